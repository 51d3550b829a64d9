"""SGLang 0.5.17's prefix-cache interface, where it differs from 0.5.23's.

Here a match carries the slots themselves, a request keeps its row and its lock without an owner object, and
``cache_finished_req`` frees and unlocks by itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InitLoadBackParams,
    MatchPrefixParams,
    MatchResult,
)

from hicache_ext.core.cache import TieredCache
from hicache_ext.core.tree import Node
from hicache_ext.integration.adapter import HicacheExtCache, Origin, _as_numpy
from hicache_ext.integration.early_loads import EarlyLoads
from hicache_ext.integration.recompute import Recompute
from hicache_ext.transfer.engine import Engine


class Recompute0517(Recompute):
    """Taking requests back, with 0.5.17's requests and batches."""

    def holds_kv(self, req: Any) -> bool:
        return req.req_pool_idx is not None

    def release(self, req: Any, scheduler: Any) -> None:
        from sglang.srt.mem_cache.common import release_kv_cache

        release_kv_cache(req, scheduler.tree_cache, is_insert=False)
        req.reset_for_retract()

    def filter_out(self, batch: Any, reqs: list[Any]) -> None:
        batch.filter_batch(chunked_req_to_exclude=reqs)


class Hits(NamedTuple):
    """Tokens that a request found in each tier."""

    device: int
    host: int = 0
    store: int = 0


class RequestHandle(NamedTuple):
    """What 0.5.23 names a queued request by."""

    rid: str


class HicacheExtCache0517(HicacheExtCache):
    """One rank's prefix cache; tree nodes are the handles SGLang keeps in its requests."""

    recompute_class = Recompute0517

    def __init__(self, params: Any, cache: TieredCache, engine: Engine, *args: Any, **kwargs: Any) -> None:
        super().__init__(params, cache, engine, *args, **kwargs)
        self._keep_finished = not params.disable_finished_insert
        self._early = EarlyLoads(cache, self.speeds, self.token_to_kv_pool_allocator.size)
        self._idle_steps = 0
        self._matched: dict[str, Any] = {}
        self._load_needed = -1

    # Lookup

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        key, req = params.key, params.req
        tokens = _as_numpy(key.token_ids)[: key._raw_len()]
        # The extra key holds the cache salt and the adapter's id; the adapter's content is kept apart.
        scope = self._scope(key.extra_key, None, getattr(req, "lora_id", None))
        match = self.cache.match(scope, tokens)
        if req is not None:
            req._hicache_ext_origin = Origin(self.cache.era, scope)
            req._hicache_ext_hits = Hits(match.device_len)
            self._matched[req.rid] = req
            self._prefills.admitted(req)
        return MatchResult(
            device_indices=self.path_device_indices(match.device_node),
            last_device_node=match.device_node,
            last_host_node=match.host_node,
            best_match_node=match.host_node,
            host_hit_length=match.host_len,
        )

    def init_load_back(self, params: InitLoadBackParams) -> tuple[torch.Tensor, Node]:
        req = params.req
        loaded, node = super().init_load_back(params)
        fetched = min(self.cache.take_arrived(req.rid), loaded)
        # SGLang reports what was promised as loaded, unless it is told otherwise.
        req.host_hit_length, req.storage_hit_length = loaded, fetched
        req._hicache_ext_hits = Hits(len(req.prefix_indices), loaded - fetched, fetched)
        return self.path_device_indices(node)[len(req.prefix_indices) :], node

    def inc_lock_ref(self, node: Node) -> IncLockRefResult:
        # Of every request that is admitted, and of some that are not.
        self._load_needed = max(self._load_needed, self.cache.pending_load(node))
        return super().inc_lock_ref(node)

    def ready_to_load_host_cache(self) -> int:
        self.cache.start_loads()
        index, self._load_needed = self._load_needed, -1
        self.counter.set_consumer(index)
        for rid, req in self._matched.items():
            if ahead := self._early.tokens(rid):
                # SGLang takes them for found on the device otherwise.
                prefix = len(req.prefix_indices)
                req.host_hit_length = min(req.host_hit_length + ahead, prefix)
                req._hicache_ext_hits = Hits(prefix - req.host_hit_length, req.host_hit_length)
        self._matched.clear()
        return index

    # Loads ahead of admission

    def on_request_queued(self, req: Any) -> None:
        super().on_request_queued(req)
        self._early.queued(req.rid, len(req.origin_input_ids) + len(req.output_ids))

    def fetch_ended(self, req: Any) -> bool:
        """Whether a queued request can be scheduled: nothing worth waiting for is on its way."""
        return super().fetch_ended(req) and not self._early.holds(req.rid)

    def check_hicache_events(self) -> None:
        super().check_hicache_events()
        if self._scheduler is not None:
            running = _running(self._scheduler)
            self._early.step([req.rid for req in self._scheduler.waiting_queue], running)
            self._idle_steps = 0 if running else self._idle_steps + 1
            if self._idle_steps > 1:
                # The first of the queue was not admitted: it may lack the room that others hold.
                for rid in self._loaded_ahead():
                    self._early.forget(rid)

    def _start_copies(self) -> None:
        super()._start_copies()
        self._early.start()

    def evict(self, params: EvictParams) -> EvictResult:
        freed = super().evict(params).num_tokens_evicted
        # A request that runs is given room without a look at locks: where there is none, it or SGLang ends.
        for rid in reversed(self._loaded_ahead()):
            if freed >= params.num_tokens:
                break
            self._early.forget(rid)
            self.cache.settle_loads(self.cache.start_loads())
            freed += super().evict(EvictParams(num_tokens=params.num_tokens - freed)).num_tokens_evicted
        return EvictResult(num_tokens_evicted=freed)

    def _loaded_ahead(self) -> list[str]:
        """Queued requests that hold pages on the device, who is served first first."""
        queue = () if self._scheduler is None else self._scheduler.waiting_queue
        return [req.rid for req in queue if self._early.tokens(req.rid)]

    def reset(self) -> None:
        super().reset()
        self._early.clear()
        self._matched.clear()
        self._load_needed = -1

    # A request's pages

    def cache_unfinished_req(self, req: Any, chunked: bool = False, **kwargs: Any) -> None:
        tokens = _as_numpy(req.get_fill_ids())
        row = self.req_to_token_pool.req_to_token[req.req_pool_idx, : len(tokens)]
        self._admitted(req)
        self._publish(req, tokens)
        # The next chunk goes on from here without another match.
        req.prefix_indices = row.to(torch.int64, copy=True)

    def cache_finished_req(
        self, req: Any, is_insert: bool = True, *, kv_len_to_handle: int, **kwargs: Any
    ) -> None:
        ids = (req.origin_input_ids + req.output_ids)[:kv_len_to_handle]
        row = self.req_to_token_pool.req_to_token[req.req_pool_idx, : len(ids)]
        self._admitted(req)
        if is_insert and self._keep_finished:
            self._publish(req, _as_numpy(ids))
        own = req.cache_protected_len
        self.token_to_kv_pool_allocator.free_segment(row[own:], start_pos=own)
        if req.last_node is not None:
            self.cache.unlock(req.last_node)
        self.on_release(req, checkpointed=is_insert)

    def release_aborted_request(self, handle: Any) -> None:
        self._early.forget(handle)
        super().release_aborted_request(RequestHandle(handle))

    def _admitted(self, req: Any) -> None:
        """The first call for a request after its admission, when its hits are final."""
        self._left_queue(req.rid)
        hits: Hits | None = getattr(req, "_hicache_ext_hits", None)
        if hits is None:
            return
        req._hicache_ext_hits = None
        if not req.retracted_stain:
            self.cache.stats.hit_device += hits.device
            self.cache.stats.hit_host += hits.host
            self.cache.stats.hit_store += hits.store

    def _publish(self, req: Any, tokens: np.ndarray) -> None:
        """Put the whole pages of a request's row into the tree, unless they are doubtful."""
        if req.positional_embed_overrides is not None:
            return
        owned = req.cache_protected_len
        done = self._publish_row(req, tokens, req.req_pool_idx, owned)
        if done is None:
            return
        if done.matched > owned and (pending := self.cache.pending_load(done.node)) > 0:
            # Decoding waits for no load.
            self.cache.start_loads()
            self.cache.settle_loads(pending)
        self.cache.lock(done.node)
        if req.last_node is not None:
            self.cache.unlock(req.last_node)
        req.last_node = done.node
        req.cache_protected_len = len(tokens) // self.page_size * self.page_size


def _running(scheduler: Any) -> int:
    """Requests that run, or will without a new one."""
    batches = (scheduler.running_batch, scheduler.last_batch)
    reqs = [req for batch in batches if batch is not None for req in batch.reqs]
    chunked = scheduler.chunked_req
    return len(
        {id(req) for req in reqs if not req.finished()} | ({id(chunked)} if chunked is not None else set())
    )
