"""What the scheduler of SGLang 0.5.23 does to its prefix cache, call by call."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import torch

with warnings.catch_warnings():
    # Some of what SGLang imports warns about itself.
    warnings.simplefilter("ignore")
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, EvictParams, InitLoadBackParams

from hicache_ext.integration.adapter import HicacheExtCache
from tests.integration.engine_base import BaseEngine, prompt

__all__ = ["Engine", "prompt"]


class Engine(BaseEngine):
    """Requests live one call at a time, so that a test can look between any two."""

    cache: HicacheExtCache
    parallel: ClassVar = {"attn_tp_size": 1, "attn_tp_rank": 0, "dp_rank": None, "num_dp_ranks": 1}

    def __init__(self, page_size: int, *, schedule_policy: str = "fcfs", **settings: Any) -> None:
        super().__init__(page_size, schedule_policy=schedule_policy, **settings)

    def admit(self, req: Req, *, room_to_load: bool = True) -> int:
        """Match, load, lock and allocate; returns what the batch has to wait for."""
        req.init_next_round_input(self.cache)
        if req.host_hit_length:
            held = None if room_to_load else self.allocator.alloc(self.allocator.available_size())
            loaded, req.last_node = self.cache.init_load_back(
                InitLoadBackParams(req.best_match_node, req.host_hit_length, req=req)
            )
            assert loaded in (0, req.host_hit_length)
            if held is not None:
                self.allocator.free(held)
            req.host_loaded_length = loaded
            req.prefix_len += loaded
            req.kv.cache_protected_len = req.prefix_len
        req.lock = self.cache.lock(req.last_node)
        length = len(req.full_untruncated_fill_ids)
        # SGLang asks only if there is something to be told.
        prefix = (
            self.cache.prefix_device_indices(req) if req.prefix_len else torch.empty(0, dtype=torch.int64)
        )
        assert len(prefix) == req.prefix_len
        need = -(-length // self.page) * self.page - req.prefix_len
        if need > self.allocator.available_size():
            self.cache.evict(EvictParams(num_tokens=need - self.allocator.available_size()))
        fresh = self.allocator.alloc(need)
        assert fresh is not None
        assert self.rows.alloc([req]) is not None
        self.rows.write((req.kv.req_pool_idx, slice(0, req.prefix_len)), prefix)
        self.rows.write(
            (req.kv.req_pool_idx, slice(req.prefix_len, length)), fresh[: length - req.prefix_len]
        )
        req.kv.kv_allocated_len = req.kv.kv_committed_len = length
        return self.cache.ready_to_load_host_cache()

    def forward(self, req: Req, load: int, *, sound: bool = True) -> None:
        """Attention of one request; see ``compute``."""
        self.compute(req, load, self.row(req), req.prefix_len, req.kv.kv_committed_len, sound=sound)

    def row(self, req: Req) -> torch.Tensor:
        return self.rows.req_to_token[req.kv.req_pool_idx, : req.kv.kv_committed_len].to(torch.int64)

    def checkpoint(self, req: Req) -> None:
        self.cache.checkpoint(req, up_to=req.kv.kv_committed_len)

    def release(self, req: Req, *, checkpoint: bool = True) -> None:
        """The calls of SGLang's ``release_kv_cache``, which itself needs a running server's context."""
        if checkpoint:
            self.checkpoint(req)
        self.cache.free_kv_row(req.kv, [(req.kv.cache_protected_len, req.kv.kv_committed_len)])
        self.cache.unlock(req.lock)
        req.lock = None
        self.cache.on_release(req, checkpointed=checkpoint)
        self.rows.free(req)

    def serve(self, tokens: list[int], **options: Any) -> Req:
        req = self.request(tokens, **options)
        self.forward(req, self.admit(req))
        self.release(req)
        self.step()
        return req

    def abort_queued(self, req: Req) -> None:
        self.cache.release_aborted_request(CacheRequestHandle(req.rid, 0))

    def step(self) -> None:
        self.cache.check_hicache_events()
        self.cache.flush_pending_backups()

    def assert_adds_up(self, *running: Req) -> None:
        """Free, evictable, protected, and what running requests own, are all of the pool."""
        self.cache.cache.check()
        owned = sum(
            -(-r.kv.kv_allocated_len // self.page) * self.page - r.kv.cache_protected_len for r in running
        )
        sizes = self.allocator.available_size(), self.cache.evictable_size(), self.cache.protected_size()
        assert sum(sizes) + owned == self.tokens, (sizes, owned)
        assert self.cache.total_size() == sizes[1] + sizes[2]

    def assert_idle(self) -> None:
        self.assert_adds_up()
        super().assert_idle()
