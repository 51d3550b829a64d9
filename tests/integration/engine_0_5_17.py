"""What the scheduler of SGLang 0.5.17 does to its prefix cache.

The model and the scheduler's loop are stand-ins. The rest is SGLang's own: requests are admitted by
``PrefillAdder``, allocated for by ``ScheduleBatch`` and freed by ``release_kv_cache``. After every call to
the cache SGLang's check of the pools runs, with the sums that a server checks.
"""

from __future__ import annotations

import functools
import warnings
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

with warnings.catch_warnings():
    # Some of what SGLang imports warns about itself.
    warnings.simplefilter("ignore")
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req, ScheduleBatch
    from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
    from sglang.srt.managers.scheduler_components.invariant_checker import SchedulerInvariantChecker
    from sglang.srt.managers.scheduler_components.pool_stats_observer import SchedulerPoolStatsObserver
    from sglang.srt.mem_cache.common import maybe_cache_unfinished_req, release_kv_cache
    from sglang.srt.runtime_context import get_context
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from hicache_ext.core.residency import Residency
from hicache_ext.integration.adapter_0_5_17 import HicacheExtCache0517
from hicache_ext.integration.cpu_allocator_0_5_17 import paged_allocator
from tests.integration.engine_base import BaseEngine, prompt

__all__ = ["Engine", "prompt"]

TOKEN = 7
"""What the model always answers."""
MODEL = SimpleNamespace(vocab_size=1000, is_encoder_decoder=False)
CHECKED = (
    "match_prefix",
    "inc_lock_ref",
    "dec_lock_ref",
    "evict",
    "init_load_back",
    "ready_to_load_host_cache",
    "check_hicache_events",
    "cache_unfinished_req",
    "on_request_queued",
    "order_queue",
    "fetch_ended",
    "release_aborted_request",
    "on_batch_result",
    "on_control",
    "transfers_idle",
)
"""Calls after which the sums must balance; after ``cache_finished_req``, SGLang's release goes on."""


class Engine(BaseEngine):
    """A scheduler in small; it is the ``scheduler`` that the cache is told about."""

    cache: HicacheExtCache0517
    parallel: ClassVar = {"attn_tp_size": 1, "attn_tp_rank": 0}
    model_runner: ClassVar = SimpleNamespace(ps=SimpleNamespace(dp_rank=None, dp_size=1))

    def __init__(self, page_size: int, *, config: dict[str, Any] | None = None, **options: Any) -> None:
        """``config``: settings that SGLang's batches and release read from the running server."""
        settings = {"attention_backend": "torch_native", "device": "cpu", **(config or {})}
        self._config = get_context().override_server_args(**settings)
        self.server_args = self._config.install()
        self.requests: list[Req] = []
        self.waiting_queue: list[Req] = []
        self.chunked_req: Any = None
        self.last_batch: ScheduleBatch | None = None
        self.running_batch = ScheduleBatch(reqs=[])
        if page_size > 1:
            options.setdefault("allocator", paged_allocator())
        super().__init__(page_size, **options)
        self.tree_cache = self.cache
        self.checks = 0
        for name in CHECKED:
            setattr(self.cache, name, self._checked(getattr(self.cache, name)))

    def close(self) -> None:
        super().close()
        self._config.restore()

    # What a scheduler step consists of

    def request(self, tokens: list[int], **options: Any) -> Req:
        req = super().request(tokens, **options)
        self.requests.append(req)
        self.waiting_queue.append(req)
        return req

    def _prefetch_kvcache(self, req: Req) -> None:
        self.cache.on_request_queued(req)

    def prefill(self, *, chunk: int | None = None) -> ScheduleBatch | None:
        """The beginning of a step: the next prefill batch, of at most ``chunk`` tokens, if there is any."""
        self.cache.check_hicache_events()
        chunked = self.chunked_req
        if chunked is not None and chunked.extend_range.end > len(chunked.prefix_indices):
            maybe_cache_unfinished_req(chunked, self.cache, chunked=True)
        self._merge_last_batch()
        self.cache.order_queue(self.waiting_queue)
        adder = PrefillAdder(
            self.page, self.cache, self.allocator, self.running_batch, 0.5, self.tokens, chunk
        )
        if self.chunked_req is not None:
            self.chunked_req.init_next_round_input()
            self.chunked_req = adder.add_chunked_req(self.chunked_req)
        for req in self.waiting_queue:
            if not self.cache.fetch_ended(req):
                continue
            req.init_next_round_input(self.cache)
            added = adder.add_one_req(
                req, has_chunked_req=self.chunked_req is not None, truncation_align_size=None
            )
            if added != AddReqResult.CONTINUE:
                break
        admitted = adder.can_run_list
        if not admitted:
            return None
        self.waiting_queue = [req for req in self.waiting_queue if req not in admitted]
        if adder.new_chunked_req is not None:
            self.chunked_req = adder.new_chunked_req
        if self.chunked_req is not None:
            self.chunked_req.inflight_middle_chunks += 1
        batch = ScheduleBatch.init_new(
            admitted,
            self.rows,
            self.allocator,
            self.cache,
            MODEL,
            False,
            SpeculativeAlgorithm.NONE,
            chunked_req=self.chunked_req,
        )
        batch.hicache_consumer_index = self.cache.ready_to_load_host_cache()
        batch.prepare_for_extend()
        self.assert_adds_up()
        return batch

    def decode(self) -> ScheduleBatch | None:
        """A step without prefill: a token more for all that run. What does not fit is retracted."""
        self._merge_last_batch()
        batch = self.running_batch
        batch.filter_batch()
        if batch.is_empty():
            return None
        if not batch.check_decode_mem():
            self.retract(batch)
        batch.prepare_for_decode()
        batch.hicache_consumer_index = -1
        self.assert_adds_up()
        return batch

    def next_batch(self, *, chunk: int | None = None) -> ScheduleBatch | None:
        """What a step computes; prefill goes first."""
        batch = self.prefill(chunk=chunk)
        return self.decode() if batch is None else batch

    def retract(self, batch: ScheduleBatch) -> list[Req]:
        """What does not fit leaves the batch and is queued again."""
        retracted, _, aborted = batch.retract_decode(self.server_args)
        assert not aborted
        for req in retracted:
            self._prefetch_kvcache(req)
            self.waiting_queue.append(req)
        return retracted

    def forward(self, batch: ScheduleBatch, *, sound: bool = True) -> None:
        """Attention of all requests of a batch; see ``compute``."""
        for number, req in enumerate(batch.reqs):
            extends = batch.forward_mode.is_extend()
            start = batch.prefix_lens[number] if extends else req.kv_committed_len - 1
            self.compute(
                req,
                batch.hicache_consumer_index,
                self.row(req),
                start,
                req.kv_committed_len,
                sound=sound,
            )

    def result(self, batch: ScheduleBatch) -> list[Req]:
        """The result of a batch is processed; returns the requests that got a token."""
        self.last_batch = batch
        self.cache.on_batch_result(self, batch)
        extends = batch.forward_mode.is_extend()
        served = []
        for req in batch.reqs:
            if req.is_retracted or req.finished():
                continue
            if extends and req.inflight_middle_chunks > 0:
                req.inflight_middle_chunks -= 1
                continue
            req.output_ids.append(TOKEN)
            served.append(req)
            if req.to_finish is not None:
                req.finished_reason = req.to_finish
            elif len(req.output_ids) >= req.sampling_params.max_new_tokens:
                req.finished_reason = FINISH_LENGTH(len(req.output_ids))
            if req.finished():
                self.release(req)
            elif extends:
                maybe_cache_unfinished_req(req, self.cache)
        self.assert_adds_up()
        return served

    def run(self, batch: ScheduleBatch | None) -> ScheduleBatch:
        """Compute a batch and process its result."""
        assert batch is not None
        self.forward(batch)
        self.result(batch)
        return batch

    def finish_all(self, *, chunk: int | None = None) -> None:
        """Steps until nothing is queued and nothing runs."""
        for _ in range(200):
            batch = self.next_batch(chunk=chunk)
            if batch is not None:
                self.run(batch)
            elif not self.waiting_queue:
                return
            else:
                self.cache.engine.drain()
        raise AssertionError("the queue does not drain")

    def release(self, req: Req, *, is_insert: bool = True) -> None:
        release_kv_cache(req, self.cache, is_insert=is_insert)

    def abort(self, req: Req) -> None:
        """A client has gone; where its request is decides what happens."""
        if req in self.waiting_queue:
            self.abort_queued(req)
        elif req is self.chunked_req:
            req.finished_reason = FINISH_ABORT()
            self.release(req, is_insert=False)
            self.chunked_req = None
        else:
            req.to_finish = FINISH_ABORT()

    # What BaseEngine asks for

    def serve(self, tokens: list[int], **options: Any) -> Req:
        req = self.request(tokens, **options)
        self.finish_all()
        return req

    def abort_queued(self, req: Req) -> None:
        self.waiting_queue = [other for other in self.waiting_queue if other is not req]
        self.cache.release_aborted_request(req.rid)

    def step(self) -> None:
        self.cache.check_hicache_events()
        self._merge_last_batch()

    # Sums

    def row(self, req: Req) -> torch.Tensor:
        """The slots of all tokens of a request that have KV."""
        return self.rows.req_to_token[req.req_pool_idx, : req.kv_committed_len].to(torch.int64)

    def assert_adds_up(self) -> None:
        """The sums that SGLang checks while requests run, and every slot has one owner."""
        self.cache.cache.check()
        checker = self._checker()
        checker.self_check_during_busy()
        checker._check_kv_page_invariants()
        free = torch.cat((self.allocator.free_pages, self.allocator.release_pages)) * self.page
        owned = [(free.view(-1, 1) + torch.arange(self.page)).view(-1)]
        owned += [n.slots for n in self.cache.cache.tree.walk() if n.device is not Residency.ABSENT]
        for req in self._live():
            allocated = -(-req.kv.kv_allocated_len // self.page) * self.page
            row = self.rows.req_to_token[req.req_pool_idx, req.cache_protected_len : req.kv.kv_allocated_len]
            pages = row.to(torch.int64)[:: self.page]
            owned.append((pages.view(-1, 1) + torch.arange(self.page)).view(-1))
            assert len(owned[-1]) == allocated - req.cache_protected_len
        slots = torch.cat(owned).sort().values
        assert torch.equal(slots, torch.arange(self.page, self.tokens + self.page)), "not one owner each"
        assert self.cache.total_size() == self.cache.evictable_size() + self.cache.protected_size()

    def assert_idle(self) -> None:
        """Also what SGLang checks whenever nothing runs: a difference ends the server."""
        assert not self._live() and not self.waiting_queue
        self.assert_adds_up()
        super().assert_idle()
        checker = self._checker()
        leaked, messages = checker._check_all_pools(checker.pool_stats_observer.get_pool_stats())
        assert not leaked, messages
        checker._check_req_pool()
        assert self.cache.transfers_idle()

    def _live(self) -> list[Req]:
        return [req for req in self.requests if req.kv is not None]

    def _checker(self) -> SchedulerInvariantChecker:
        live = self._live()
        common: dict[str, Any] = {
            "is_hybrid_swa": False,
            "is_hybrid_ssm": False,
            "full_tokens_per_layer": None,
            "swa_tokens_per_layer": None,
            "max_total_num_tokens": self.tokens,
            "tree_cache": self.cache,
            "token_to_kv_pool_allocator": self.allocator,
            "req_to_token_pool": self.rows,
            "get_last_batch": lambda: SimpleNamespace(reqs=live, is_empty=lambda: not live),
            "get_running_batch": lambda: None,
        }
        observer = SchedulerPoolStatsObserver(
            session_controller=None, hisparse_coordinator=None, enable_hisparse=False, **common
        )
        return SchedulerInvariantChecker(
            disaggregation_mode=DisaggregationMode.NULL,
            page_size=self.page,
            server_args=self.server_args,
            pool_stats_observer=observer,
            **common,
        )

    def _checked(self, call: Any) -> Any:
        @functools.wraps(call)
        def checked(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            self._checker().self_check_during_busy()
            self.checks += 1
            return result

        return checked

    def _merge_last_batch(self) -> None:
        last, self.last_batch = self.last_batch, None
        if last is None or not last.forward_mode.is_extend():
            return
        exclude = [req for req in (self.chunked_req, last.chunked_req) if req is not None]
        last.filter_batch(chunked_req_to_exclude=exclude)
        if last.is_empty():
            return
        if self.running_batch.is_empty():
            self.running_batch = last
        else:
            self.running_batch.merge_batch(last)
