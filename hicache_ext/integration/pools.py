"""Reads SGLang's KV pools: their layout for the copies, their allocator for the cache."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hicache_ext.core import kv_spec
from hicache_ext.core.header import head_groups
from hicache_ext.core.kv_spec import Role
from hicache_ext.integration.settings import SettingsError
from hicache_ext.transfer.device_kv import DeviceKV
from hicache_ext.transfer.layout import Component, PageLayout


class SlotPool:
    """``core.cache.DevicePool`` over SGLang's allocator; slots are int64 tensors on the device."""

    def __init__(self, allocator: Any) -> None:
        self._allocator = allocator

    def available(self) -> int:
        return self._allocator.available_size()

    def alloc(self, tokens: int) -> torch.Tensor | None:
        return self._allocator.alloc(tokens)

    def free(self, *runs: torch.Tensor) -> None:
        self._allocator.free_segment(torch.cat(runs), start_pos=0)


_POOL_NAME = re.compile(r"(Pool|KVCache|Allocator)$")
_POOL_PACKAGES = ("sglang.srt.mem_cache.", "sglang.srt.hardware_backend.", "sglang.srt.disaggregation.")


def account_for_pools(ctx: Any) -> None:
    """Every pool that the model has is either carried or refused by name; ``ctx`` as for ``build_cache``.

    Looks at what SGLang hands to the cache, at its worker and model runners, and inside every pool found.

    Raises:
        SettingsError: a pool is unknown, is not carried, or is a second one beside the main KV pool.
    """
    main = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    check_carried(main)
    for where, pool in _pools(ctx):
        check_carried(pool, where)
        if _role(pool) in (Role.KV, Role.STATE) and pool is not main:
            draft = kv_spec.kind_of("draft")
            raise SettingsError(
                f"this model has a second KV pool, {type(pool).__name__} ({where}), as for {draft.title}, "
                f"not carried: {draft.reason}; {draft.cure}"
            )
    _check_model(ctx)


def check_carried(pool: Any, where: str = "") -> None:
    """SettingsError unless the very class of a pool, allocator or request table is carried."""
    module, name = type(pool).__module__, type(pool).__qualname__
    known = kv_spec.lookup(module, name)
    if known is None or not known[0].carried:
        raise SettingsError(kv_spec.refusal(module, name, where))


def _check_model(ctx: Any) -> None:
    """What the classes of the pools do not show."""
    runner = getattr(ctx.tp_worker, "model_runner", None)
    algorithm = getattr(runner, "spec_algorithm", None)
    for key, applies in (
        ("sliding-window", ctx.is_hybrid_swa),
        ("ssm", ctx.is_hybrid_ssm),
        ("sparse-index", getattr(ctx, "is_dsa", False)),
        ("cross-attention", getattr(ctx.model_config, "is_encoder_decoder", False)),
        ("draft", algorithm is not None and not algorithm.is_none()),
    ):
        if applies:
            kind = kv_spec.kind_of(key)
            raise SettingsError(f"this model has {kind.title}, not carried: {kind.reason}; {kind.cure}")


def _role(pool: Any) -> Role:
    known = kv_spec.lookup(type(pool).__module__, type(pool).__qualname__)
    return Role.KV if known is None else known[1].role


def _pools(ctx: Any) -> Iterator[tuple[str, Any]]:
    """(how it is held, pool) of every pool within reach, each once."""
    worker = ctx.tp_worker
    holders = [("params", ctx.params), ("tp_worker", worker)]
    holders.append(("model_runner", getattr(worker, "model_runner", None)))
    runners = getattr(worker, "model_runner_list", None) or ()
    holders += [(f"model_runner_list[{i}]", runner) for i, runner in enumerate(runners)]
    seen: set[int] = set()
    while holders:
        path, holder = holders.pop(0)
        for name, value in getattr(holder, "__dict__", {}).items():
            for where, pool in _flat(f"{path}.{name}", value):
                if id(pool) not in seen and _is_pool(pool):
                    seen.add(id(pool))
                    holders.append((where, pool))
                    yield where, pool


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield f"{path}[{i}]", item
    else:
        yield path, value


def _is_pool(value: Any) -> bool:
    """Of a class that is registered, derives from one, or by its name and place should have been."""
    for cls in type(value).__mro__:
        if kv_spec.lookup(cls.__module__, cls.__qualname__) is not None:
            return True
        if cls.__module__.startswith(_POOL_PACKAGES) and _POOL_NAME.search(cls.__qualname__):
            return True
    return False


@dataclass(frozen=True)
class HeadShard:
    """Which KV heads of the model a TP rank holds: ``rank`` of ``size``; more ranks than heads replicate."""

    model_heads: int
    size: int = 1
    rank: int = 0

    def groups(self, local_heads: int) -> tuple[int, int]:
        """(groups on this rank, number of the first one), such that TP degrees share them where they can."""
        groups = head_groups(self.model_heads)
        shared = groups % self.size == 0 and local_heads * self.size == self.model_heads
        mine = groups // self.size if shared else head_groups(local_heads)
        first_head = self.rank * self.model_heads // self.size
        return mine, first_head // (local_heads // mine)

    def copies(self, layout: PageLayout) -> tuple[int, int, int]:
        """(head groups of the model, which copy of its groups this rank holds, how many copies there are)."""
        if layout.components[0].name == "latent":
            return layout.groups, self.rank, self.size
        heads = layout.components[0].heads
        replicas = max(self.size * heads // self.model_heads, 1)
        return self.model_heads * layout.groups // heads, self.rank % replicas, replicas


def describe(pool: Any, page_size: int, shard: HeadShard | None = None) -> DeviceKV:
    """The buffers of a pool whose layout is known; anything else is refused.

    ``shard`` is None for a pool that holds all heads of the model.

    Raises:
        SettingsError: the pool is of another kind, or stores more than plain K and V rows.
    """
    check_carried(pool)
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    # Subclasses change the layout behind the same attributes, so the class itself must match.
    if type(pool) is MHATokenToKVPool:
        return _mha(pool, page_size, shard or HeadShard(pool.head_num))
    if type(pool) is MLATokenToKVPool and not pool.use_dsa:
        return _mla(pool, page_size)
    kind = kv_spec.kind_of("sparse-index")
    raise SettingsError(
        f"this model uses {type(pool).__name__}, which holds {kind.title}, not carried: {kind.reason}; "
        f"{kind.cure}"
    )


def _mha(pool: Any, page_size: int, shard: HeadShard) -> DeviceKV:
    if pool.kv_cache_layout != "nhd":
        raise SettingsError(f"the KV layout {pool.kv_cache_layout!r} is not carried yet, only 'nhd'")
    if pool.k_scale_buffer is not None or pool.is_quantized_kv_cache:
        raise SettingsError("a KV cache with scales (--kv-cache-dtype fp4 and the like) is not carried yet")
    if pool.post_capture_active:
        raise SettingsError("a KV pool whose memory is backed after graph capture is not carried yet")
    groups, first = shard.groups(pool.head_num)
    components = (
        Component("K", pool.head_num, pool.head_dim),
        Component("V", pool.head_num, pool.v_head_dim),
    )
    return _checked(page_size, pool, components, groups, first, (tuple(pool.k_buffer), tuple(pool.v_buffer)))


def _mla(pool: Any, page_size: int) -> DeviceKV:
    components = (Component("latent", 1, pool.kv_cache_dim),)
    return _checked(page_size, pool, components, 1, 0, (tuple(pool.kv_buffer),))


def _checked(
    page_size: int,
    pool: Any,
    components: tuple[Component, ...],
    groups: int,
    first_group: int,
    buffers: tuple[tuple[torch.Tensor, ...], ...],
) -> DeviceKV:
    try:
        layout = PageLayout(page_size, pool.layer_num, pool.store_dtype, components, groups, first_group)
    except ValueError as error:
        raise SettingsError(f"the KV of this model is not carried with these flags: {error}") from error
    try:
        return DeviceKV(layout, buffers)
    except ValueError as error:
        raise SettingsError(f"the KV buffers are not laid out as their class says: {error}") from error
