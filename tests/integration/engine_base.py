"""What the schedulers of all releases have in common, with SGLang's own pools and allocators on the CPU."""

from __future__ import annotations

import time
import warnings
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch

with warnings.catch_warnings():
    # Some of what SGLang imports warns about itself.
    warnings.simplefilter("ignore")
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.server_args import ServerArgs

from hicache_ext.core.policy.costs import CostModel
from hicache_ext.integration import build
from hicache_ext.integration.flags import SERVER_ID_ATTRIBUTE, SETTINGS_ATTRIBUTE
from hicache_ext.integration.settings import Settings
from hicache_ext.transfer.layout import Component, PageLayout

TOKENS = 128
LAYERS, HEADS, DIM = 2, 2, 4


class BaseEngine:
    """A cache as a scheduler builds it, over a pool of ``tokens``. What is done to it differs by release."""

    parallel: ClassVar[dict[str, Any]]
    """What SGLang knows of its ranks."""
    model_runner: ClassVar[Any] = SimpleNamespace()

    def __init__(
        self,
        page_size: int,
        *,
        tokens: int = TOKENS,
        allocator: type | None = None,
        schedule_policy: str = "fcfs",
        init_params: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """The model is a slow one: no copy is dearer than what it saves."""
        self.page = page_size
        self.tokens = tokens
        self.pool = MHATokenToKVPool(
            size=tokens,
            page_size=page_size,
            dtype=torch.float32,
            head_num=HEADS,
            head_dim=DIM,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        kind = allocator or (TokenToKVPoolAllocator if page_size == 1 else PagedTokenToKVPoolAllocator)
        paged = {} if kind is TokenToKVPoolAllocator else {"page_size": page_size}
        self.allocator = kind(
            tokens, dtype=torch.float32, device="cpu", kvcache=self.pool, need_sort=False, **paged
        )
        self.rows = ReqToTokenPool(8, tokens, "cpu", False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page_size,
            **(init_params or {}),
        )
        server_args = ServerArgs(model_path="none", schedule_policy=schedule_policy)
        components = (Component("K", HEADS, DIM), Component("V", HEADS, DIM))
        layout = PageLayout(page_size, LAYERS, torch.float32, components, HEADS)
        settings.setdefault("host_gb", 2 * tokens // page_size * layout.page_bytes / 1e9)
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
                model_runner=self.model_runner,
                register_hicache_layer_transfer_counter=self.counters.append,
            ),
        )
        parallel = get_parallel().override(**self.parallel)
        slow = mock.patch.object(build, "prefill_costs", lambda context: CostModel(token=0.1, depth=0.0))
        with parallel, slow:
            self.cache: Any = build.build_cache(context)
        self._next_rid = 0

    def request(self, tokens: list[int], **options: Any) -> Req:
        """A request in the queue."""
        self._next_rid += 1
        req = Req(f"r{self._next_rid}", "", array("q", tokens), SamplingParams(max_new_tokens=4), **options)
        self.cache.on_request_queued(req)
        return req

    def serve(self, tokens: list[int], **options: Any) -> Req:
        """A request's whole life; returns it with the hits it had."""
        raise NotImplementedError

    def abort_queued(self, req: Req) -> None:
        """A client has gone whose request is still queued."""
        raise NotImplementedError

    def step(self) -> None:
        """One scheduler step in which nothing is computed."""
        raise NotImplementedError

    def compute(
        self, req: Req, load: int, slots: torch.Tensor, start: int, end: int, *, sound: bool = True
    ) -> None:
        """Wait layer by layer, assert what is reused, and write what is new, as attention does.

        ``slots`` are those of the first ``end`` tokens, of which ``start`` are reused. If it is not
        ``sound``, what is reused may be anything, and so is what is computed from it.
        """
        counter = self.pool.layer_transfer_counter
        counter.set_consumer(load)
        reused, new = slots[:start], slots[start:end]
        for layer in range(LAYERS):
            key = self.pool.get_key_buffer(layer)
            value = self.pool.get_value_buffer(layer)
            expected = expected_kv(req, end, layer)
            if not sound:
                counter.wait_until(layer)
                key[new] = value[new] = -1.0
                continue
            assert torch.equal(key[reused], expected[0, :start]), "reused K is not what was computed"
            assert torch.equal(value[reused], expected[1, :start]), "reused V is not what was computed"
            key[new] = expected[0, start:]
            value[new] = expected[1, start:]
        counter.set_consumer(-1)

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
        self.cache.evict(EvictParams(num_tokens=self.tokens))

    def host_page(self, tokens: list[int], index: int, **scope: Any) -> int:
        """Where the host has page ``index`` of a prompt."""
        found = self.request(tokens, **scope)
        node = self.cache.cache.tree.waiting[found.rid]
        self.abort_queued(found)
        pages = [n.pages for n in self.cache.cache.tree.path(node) if n.pages is not None]
        return int(np.concatenate(pages[::-1])[index])

    def damage(self, page: int) -> None:
        """Flip a bit of a host page's payload."""
        layout = self.cache.host.layout
        self.cache.host.buffer[page, layout.component_offset(0) + page % 8] ^= 4

    def assert_idle(self) -> None:
        """Nothing is held by anybody."""
        assert self.cache.protected_size() == 0 and not self.cache.cache.tree.waiting
        assert self.rows.available_size() == self.rows.size
        assert not self.cache.cache.tree.condemned

    def close(self) -> None:
        self.cache.release_host_resources()


def expected_kv(req: Req, length: int, layer: int) -> torch.Tensor:
    """``[K or V, token, head, dim]`` that depend on the scope and on all tokens before."""
    scope = hash((req.extra_key, getattr(req, "cache_salt", None), req.lora_id)) % 1000
    ids = torch.tensor((req.origin_input_ids + req.output_ids)[:length], dtype=torch.float64)
    history = (torch.cumsum(ids * (1 + torch.arange(length)), 0) + scope) % 65521
    kv = torch.arange(2).view(2, 1, 1, 1) * 0.5 + layer * 0.25 + history.view(1, -1, 1, 1)
    return (kv + torch.arange(HEADS * DIM).view(1, 1, HEADS, DIM)).to(torch.float32)


def prompt(length: int, start: int = 0) -> list[int]:
    return list(range(start, start + length))


def wait(engine: BaseEngine, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it does not come to pass"
        engine.step()
        time.sleep(0.002)
