"""What a scheduler does to its prefix cache, with SGLang's own requests, pools and allocators on the CPU."""

from __future__ import annotations

import warnings
from array import array
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

with warnings.catch_warnings():
    # Some of what SGLang imports warns about itself.
    warnings.simplefilter("ignore")
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, EvictParams, InitLoadBackParams
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.server_args import ServerArgs

from hicache_ext.core.policy.costs import CostModel
from hicache_ext.integration import build
from hicache_ext.integration.adapter import HicacheExtCache
from hicache_ext.integration.flags import SERVER_ID_ATTRIBUTE, SETTINGS_ATTRIBUTE
from hicache_ext.integration.settings import Settings
from hicache_ext.transfer.layout import Component, PageLayout

TOKENS = 128
LAYERS, HEADS, DIM = 2, 2, 4


class Engine:
    """What a scheduler does to its prefix cache, call by call."""

    def __init__(self, page_size: int, *, schedule_policy: str = "fcfs", **settings: Any) -> None:
        """The model is a slow one: no copy is dearer than what it saves."""
        self.page = page_size
        self.pool = MHATokenToKVPool(
            size=TOKENS,
            page_size=page_size,
            dtype=torch.float32,
            head_num=HEADS,
            head_dim=DIM,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        kind = TokenToKVPoolAllocator if page_size == 1 else PagedTokenToKVPoolAllocator
        paged = {} if page_size == 1 else {"page_size": page_size}
        self.allocator = kind(
            TOKENS, dtype=torch.float32, device="cpu", kvcache=self.pool, need_sort=False, **paged
        )
        self.rows = ReqToTokenPool(8, TOKENS, "cpu", False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page_size,
        )
        server_args = ServerArgs(model_path="none", schedule_policy=schedule_policy)
        components = (Component("K", HEADS, DIM), Component("V", HEADS, DIM))
        layout = PageLayout(page_size, LAYERS, torch.float32, components, HEADS)
        settings.setdefault("host_gb", 2 * TOKENS // page_size * layout.page_bytes / 1e9)
        settings.setdefault("check_every", 1)
        setattr(server_args, SETTINGS_ATTRIBUTE, Settings(**settings))
        setattr(server_args, SERVER_ID_ATTRIBUTE, "server")
        self.counters: list[Any] = []
        context = SimpleNamespace(
            server_args=server_args,
            params=params,
            is_hybrid_swa=False,
            is_hybrid_ssm=False,
            is_dsa=False,
            model_config=SimpleNamespace(
                is_encoder_decoder=False,
                get_total_num_kv_heads=lambda: HEADS,
                hf_text_config=SimpleNamespace(rope_theta=10000.0),
                model_path="none",
                revision=None,
            ),
            tp_worker=SimpleNamespace(
                model_runner=SimpleNamespace(),
                register_hicache_layer_transfer_counter=self.counters.append,
            ),
        )
        parallel = get_parallel().override(attn_tp_size=1, attn_tp_rank=0, dp_rank=None, num_dp_ranks=1)
        slow = mock.patch.object(build, "prefill_costs", lambda context: CostModel(token=0.1, depth=0.0))
        with parallel, slow:
            self.cache: HicacheExtCache = build.build_cache(context)
        self._next_rid = 0

    def request(self, tokens: list[int], **options: Any) -> Req:
        """A request in the queue."""
        self._next_rid += 1
        req = Req(f"r{self._next_rid}", "", array("q", tokens), SamplingParams(max_new_tokens=4), **options)
        self.cache.on_request_queued(req)
        return req

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
        """Wait layer by layer, assert what is reused, and write what is new, as attention does.

        If it is not ``sound``, what is reused may be anything, and so is what is computed from it.
        """
        counter = self.pool.layer_transfer_counter
        counter.set_consumer(load)
        length = req.kv.kv_committed_len
        slots = self.row(req)
        for layer in range(LAYERS):
            key = self.pool.get_key_buffer(layer)
            value = self.pool.get_value_buffer(layer)
            expected = expected_kv(req, length, layer)
            if not sound:
                counter.wait_until(layer)
                key[slots[req.prefix_len :]] = value[slots[req.prefix_len :]] = -1.0
                continue
            reused = slots[: req.prefix_len]
            assert torch.equal(key[reused], expected[0, : req.prefix_len]), (
                "reused K is not what was computed"
            )
            assert torch.equal(value[reused], expected[1, : req.prefix_len])
            key[slots[req.prefix_len :]] = expected[0, req.prefix_len :]
            value[slots[req.prefix_len :]] = expected[1, req.prefix_len :]
        counter.set_consumer(-1)

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
        """A whole life; returns the request with the hits it had."""
        req = self.request(tokens, **options)
        self.forward(req, self.admit(req))
        self.release(req)
        self.step()
        return req

    def step(self) -> None:
        self.cache.check_hicache_events()
        self.cache.flush_pending_backups()

    def settle(self) -> None:
        for _ in range(50):
            self.step()
            self.cache.engine.drain()
            if not self.cache.cache.pending():
                return
        raise AssertionError("transfers do not settle")

    def to_host(self, tokens: list[int], **options: Any) -> None:
        self.serve(tokens, **options)
        self.settle()
        self.cache.evict(EvictParams(num_tokens=TOKENS))

    def host_page(self, tokens: list[int], index: int, **scope: Any) -> int:
        """Where the host has page ``index`` of a prompt."""
        found = self.request(tokens, **scope)
        node = self.cache.cache.tree.waiting[found.rid]
        self.cache.release_aborted_request(CacheRequestHandle(found.rid, 0))
        pages = [n.pages for n in self.cache.cache.tree.path(node) if n.pages is not None]
        return int(np.concatenate(pages[::-1])[index])

    def damage(self, page: int) -> None:
        """Flip a bit of a host page's payload."""
        layout = self.cache.host.layout
        self.cache.host.buffer[page, layout.component_offset(0) + page % 8] ^= 4

    def assert_adds_up(self, *running: Req) -> None:
        """Free, evictable, protected, and what running requests own, are all of the pool."""
        self.cache.cache.check()
        owned = sum(
            -(-r.kv.kv_allocated_len // self.page) * self.page - r.kv.cache_protected_len for r in running
        )
        sizes = self.allocator.available_size(), self.cache.evictable_size(), self.cache.protected_size()
        assert sum(sizes) + owned == TOKENS, (sizes, owned)
        assert self.cache.total_size() == sizes[1] + sizes[2]

    def assert_idle(self) -> None:
        self.assert_adds_up()
        assert self.cache.protected_size() == 0 and not self.cache.cache.tree.waiting
        assert self.rows.available_size() == self.rows.size
        assert not self.cache.cache.tree.condemned

    def close(self) -> None:
        self.cache.release_host_resources()


def expected_kv(req: Req, length: int, layer: int) -> torch.Tensor:
    """``[K or V, token, head, dim]`` that depend on the scope and on all tokens before."""
    scope = hash((req.extra_key, req.cache_salt, req.lora_id)) % 1000
    ids = torch.tensor(req.full_untruncated_fill_ids[:length], dtype=torch.float64)
    history = (torch.cumsum(ids * (1 + torch.arange(length)), 0) + scope) % 65521
    kv = torch.arange(2).view(2, 1, 1, 1) * 0.5 + layer * 0.25 + history.view(1, -1, 1, 1)
    return (kv + torch.arange(HEADS * DIM).view(1, 1, HEADS, DIM)).to(torch.float32)


def prompt(length: int, start: int = 0) -> list[int]:
    return list(range(start, start + length))
