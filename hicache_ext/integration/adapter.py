"""SGLang 0.5.23's prefix-cache interface over ``TieredCache``.

SGLang calls these methods from the scheduler thread only. Which call happens when is told in SGLang's
``BasePrefixCache``; the calls it does not know (``on_request_queued``, ``order_queue``, ``fetch_ended``,
``on_batch_result``, ``on_control``, ``attach_stores``, ``detach_stores``, ``transfers_idle``) come from the
patch series.

A request's pages belong to the era and the scope it was matched in (its *origin*): what it computed is
published there or not at all.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from sglang.srt.managers.io_struct import AttachHiCacheStorageReqOutput, DetachHiCacheStorageReqOutput
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InitLoadBackParams,
    MatchPrefixParams,
    MatchResult,
)

from hicache_ext.core.cache import TieredCache
from hicache_ext.core.page import PrefixScope
from hicache_ext.core.residency import Doubt, Residency
from hicache_ext.core.speeds import Speeds
from hicache_ext.core.tree import Insertion, Node
from hicache_ext.integration.attaching import attach, detach
from hicache_ext.integration.control import Adapters, is_flush, weight_change
from hicache_ext.integration.metrics import Metrics
from hicache_ext.integration.namespace import WeightVersions
from hicache_ext.integration.queue import Queue, reusable
from hicache_ext.integration.recompute import Recompute, outstanding_batches
from hicache_ext.integration.release import rank_labels
from hicache_ext.integration.settings import Settings
from hicache_ext.integration.speeds import LoadClock, PrefillClock, Stores
from hicache_ext.integration.warm_up import freeze_startup_objects
from hicache_ext.transfer.engine import Engine
from hicache_ext.transfer.host_pool import HostPagePool
from hicache_ext.transfer.layers import LayerCounter

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

_YIELD_S = 0.0005


class Origin(NamedTuple):
    """What a request's pages were computed for."""

    era: int
    scope: PrefixScope


class HicacheExtCache(BasePrefixCache):
    """One rank's prefix cache; tree nodes are the handles SGLang keeps in its requests."""

    disable = False
    recompute_class = Recompute

    def __init__(
        self,
        params: Any,
        cache: TieredCache,
        engine: Engine,
        host: HostPagePool,
        counter: LayerCounter,
        settings: Settings,
        versions: WeightVersions,
        speeds: Speeds,
        *,
        order_by_cost: bool = False,
        stores: Stores | None = None,
    ) -> None:
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.page_size = params.page_size
        self.cache = cache
        self.engine = engine
        self.stores = stores
        self.host = host
        self.counter = counter
        self.speeds = speeds
        self.recompute = self.recompute_class()
        self._versions = versions
        self._adapters = Adapters()
        self._flush_asked = False
        self._worked = False
        self._scheduler: Any = None
        self._queue = Queue(cache, speeds, order_by_cost)
        self._prefills, self._loads = PrefillClock(speeds), LoadClock(speeds, engine)
        self._check_every = settings.check_every
        self._no_slots = torch.empty(0, dtype=torch.int64, device=self.token_to_kv_pool_allocator.device)
        self._metrics: Metrics | None = None
        if params.enable_metrics:
            self.init_metrics_collector()
            labels = rank_labels()
            self._metrics = Metrics(cache, engine, self.recompute, labels, settings.metrics_interval, stores)

    # Lookup

    @property
    def root_node(self) -> Node:
        return self.cache.tree.root

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        key = params.key
        lora = getattr(params.req, "lora_id", None)
        tokens = _as_numpy(key.token_ids)[: key._raw_len()]
        scope = self._scope(key.extra_key, key.cache_salt, lora)
        match = self.cache.match(scope, tokens)
        if params.req is not None:
            params.req._hicache_ext_origin = Origin(self.cache.era, scope)
        return MatchResult(
            device_prefix_len=match.device_len,
            last_device_node=match.device_node,
            last_host_node=match.host_node,
            best_match_node=match.host_node,
            host_hit_length=match.host_len,
        )

    def path_device_indices(self, node: Node) -> torch.Tensor:
        slots = [member.slots for member in self.cache.tree.path(node)]
        return torch.cat(slots[::-1]) if slots else self._no_slots

    def prefix_device_indices(self, req: Any) -> torch.Tensor:
        # Called once per admission, when the request's hits are final.
        fetched = self.cache.take_arrived(req.rid)
        self._left_queue(req.rid)
        self._prefills.admitted(req)
        if not req.retracted_stain:
            loaded = min(req.host_loaded_length, req.prefix_len)
            fetched = min(fetched, loaded)
            # SGLang reports it to the client as read from storage.
            req.storage_hit_length = fetched
            self.cache.stats.hit_store += fetched
            self.cache.stats.hit_host += loaded - fetched
            self.cache.stats.hit_device += req.prefix_len - loaded
        return super().prefix_device_indices(req)

    # A request's pages

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        self._left_queue(req.rid)
        length = up_to // self.page_size * self.page_size
        tokens = _as_numpy(req.full_untruncated_fill_ids[:length])
        done = self._publish_row(req, tokens, req.kv.req_pool_idx, req.kv.cache_protected_len)
        if done is None:
            return
        length = len(tokens) // self.page_size * self.page_size
        req.kv.cache_inserted_len = max(req.kv.cache_inserted_len, length)
        req.kv.cache_protected_len = length
        held, req.lock = req.lock, self.lock(done.node)
        self.unlock(held)
        req.last_node = done.node

    def _publish_row(self, req: Any, tokens: np.ndarray, row: int, owned: int) -> Insertion | None:
        """Put the whole pages of ``tokens``, computed in a request's row, into the tree; None if it may not.

        ``owned`` tokens of the row are the tree's already. Where someone else has published the same pages
        first, the row shows theirs afterwards and the request's own are free.
        """
        origin: Origin | None = getattr(req, "_hicache_ext_origin", None)
        doubtful = req.last_node is not None and req.last_node.doubt is not Doubt.NONE
        if origin is None or origin.era != self.cache.era or doubtful:
            # Computed by older weights, or from a damaged page: its row stays its own.
            return None
        length = len(tokens) // self.page_size * self.page_size
        if length < owned:
            # A stop before the end of the reused prefix: the tree holds more than this request could add.
            return None
        slots = self.req_to_token_pool.req_to_token[row, :length].to(torch.int64, copy=True)
        done = self.cache.insert(origin.scope, tokens[:length], slots)
        if done.matched > owned:
            self.token_to_kv_pool_allocator.free_segment(slots[owned : done.matched], start_pos=owned)
            theirs = self.path_device_indices(done.node)[owned : done.matched]
            self.req_to_token_pool.write((row, slice(owned, done.matched)), theirs)
        return done

    def inc_lock_ref(self, node: Node) -> IncLockRefResult:
        before = self.cache.tree.evictable_tokens
        self.cache.lock(node)
        return IncLockRefResult(delta=self.cache.tree.evictable_tokens - before)

    def dec_lock_ref(self, node: Node, params: DecLockRefParams | None = None) -> DecLockRefResult:
        before = self.cache.tree.evictable_tokens
        self.cache.unlock(node)
        return DecLockRefResult(delta=self.cache.tree.evictable_tokens - before)

    def on_request_queued(self, req: Any) -> None:
        """A request entered the waiting queue, for the first time or again."""
        scope = None
        if req.positional_embed_overrides is None:
            scope = self._scope(req.extra_key, getattr(req, "cache_salt", None), req.lora_id)
            tokens = reusable(req)
            # No store, nobody to wait for.
            ahead = 0.0 if self.stores is None else self._queue.ahead(len(tokens))
            self.cache.want(req.rid, scope, tokens, ahead)
        self._queue.add(req, scope)

    def order_queue(self, waiting: list[Any]) -> None:
        """The next prefill batch is about to be chosen from ``waiting``, first come first served."""
        self._queue.sort(waiting)

    def fetch_ended(self, req: Any) -> bool:
        """A queued request's turn has come: whether nothing of it is on its way from a store."""
        if not self.cache.waits(req.rid):
            return True
        self.cache.turn_came(req.rid)
        return False

    def release_aborted_request(self, handle: CacheRequestHandle) -> None:
        self._left_queue(handle.rid)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        self._left_queue(req.rid)

    def _left_queue(self, rid: str) -> None:
        self.cache.unwant(rid)
        self._queue.remove(rid)

    def on_batch_result(self, scheduler: Any, batch: Any) -> None:
        """A batch's result is about to be processed: nothing computed from unverified pages may pass."""
        self._worked = True
        self._scheduler = scheduler
        self._start_copies()
        self._queue.computed(self._prefills.result(batch))
        self.cache.settle_loads(batch.hicache_consumer_index)
        if self.cache.tree.condemned:
            self.recompute.take_back(scheduler, batch)

    def on_control(self, request: Any) -> None:
        """A control request is about to be carried out."""
        self.recompute.on_control(request)
        self._adapters.apply(request)
        self._flush_asked = self._flush_asked or is_flush(request)
        change = weight_change(request)
        if change is not None:
            self.cache.advance(self._versions.after_update(change.version))

    def _scope(self, extra_key: str | None, cache_salt: str | None, lora: str | None) -> PrefixScope:
        return PrefixScope(extra_key or "", cache_salt or "", self._adapters.scope(lora))

    # Space

    def evict(self, params: EvictParams) -> EvictResult:
        start = time.perf_counter()
        freed = self.cache.evict(params.num_tokens)
        self.update_eviction_metrics(freed, start)
        return EvictResult(num_tokens_evicted=freed)

    def evictable_size(self) -> int:
        return self.cache.tree.evictable_tokens

    def protected_size(self) -> int:
        return self.cache.tree.protected_tokens

    def total_size(self) -> int:
        return self.evictable_size() + self.protected_size()

    def pretty_print(self) -> None:
        for node in self.cache.tree.walk():
            print(node)
        print(f"#tokens on the device: {self.total_size()}, on the host: {self.cache.tree.host_tokens}")

    # Loading from the host

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, Node]:
        node = params.best_match_node
        if node.parent is None and node is not self.root_node:
            # Evicted since the match; what was on the device then is still locked.
            return 0, params.req.last_node
        loaded = self.cache.load(node)
        if loaded:
            return loaded, node
        while node.device is Residency.ABSENT:
            node = node.parent
        return 0, node

    def ready_to_load_host_cache(self) -> int:
        index = self.cache.start_loads()
        # SGLang's embedding worker never says which load its batch waits for.
        self.counter.set_consumer(index)
        return index

    # Once per scheduler step

    def check_hicache_events(self) -> None:
        if not self._worked and self.cache.fetching():
            # An idle scheduler spins, and would keep Python from the threads that it waits for.
            time.sleep(_YIELD_S)
        self._worked = False
        freeze_startup_objects()
        start = time.perf_counter()
        self._prefills.step()
        self._loads.step()
        self.cache.tick()
        self.recompute.settle(between_steps=True)
        if not self._result_outstanding():
            self._start_copies()
        self.cache.flush_writes()
        if self._check_every and self.cache.stats.ticks % self._check_every == 0:
            self.cache.check()
        if self._metrics is not None:
            self._metrics.tick_seconds += time.perf_counter() - start
            self._metrics.publish()

    def _result_outstanding(self) -> bool:
        """Whether the result of a batch will be processed in this step, after the next one was launched."""
        return bool(outstanding_batches(self._scheduler))

    def _start_copies(self) -> None:
        """Takes a millisecond or more, so best when the scheduler has launched a batch and is about to wait
        for the one before."""
        self.cache.flush_backups()

    def flush_pending_backups(self) -> None:
        self.recompute.settle(between_steps=False)
        self.cache.flush_backups()

    def transfers_idle(self) -> bool:
        """True, after waiting for the copies in flight: SGLang may free or unmap the KV pool next."""
        if len(self.cache.tickets):
            self.cache.drain()
        return True

    # Stores

    def attach_stores(self, request: Any) -> AttachHiCacheStorageReqOutput:
        done, message = attach(self.cache, request)
        return AttachHiCacheStorageReqOutput(success=done, message=message)

    def detach_stores(self) -> DetachHiCacheStorageReqOutput:
        done, message = detach(self.cache)
        return DetachHiCacheStorageReqOutput(success=done, message=message)

    # Lifetime

    def reset(self) -> None:
        # SGLang also resets after a weight update: those weights have a namespace of their own already.
        self.cache.reset(flush=self._flush_asked)
        self._flush_asked = False

    def release_host_resources(self) -> None:
        self.engine.close()
        if self.stores is not None:
            self.stores.engine.close()
        self.host.close()


def _as_numpy(ids: Any) -> np.ndarray:
    """Token ids as int64 without a copy; drop the result before the ids may grow."""
    return np.frombuffer(ids, dtype=np.int64) if len(ids) else np.empty(0, np.int64)
