"""Reads SGLang's KV pools: their layout for the copies, their allocator for the cache."""

from __future__ import annotations

from typing import Any

import torch

from hicache_ext.integration.settings import SettingsError
from hicache_ext.transfer.device_kv import DeviceKV
from hicache_ext.transfer.layout import Component, PageLayout, head_groups


class SlotPool:
    """``core.cache.DevicePool`` over SGLang's allocator; slots are int64 tensors on the device."""

    def __init__(self, allocator: Any) -> None:
        self._allocator = allocator

    def available(self) -> int:
        return self._allocator.available_size()

    def alloc(self, tokens: int) -> torch.Tensor | None:
        return self._allocator.alloc(tokens)

    def free(self, slots: torch.Tensor) -> None:
        self._allocator.free_segment(slots, start_pos=0)


def describe(pool: Any, page_size: int) -> DeviceKV:
    """The buffers of a pool whose layout is known; anything else is refused.

    Raises:
        SettingsError: the pool is of another kind, or stores more than plain K and V rows.
    """
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    # Subclasses change the layout behind the same attributes, so the class itself must match.
    if type(pool) is MHATokenToKVPool:
        return _mha(pool, page_size)
    if type(pool) is MLATokenToKVPool and not pool.use_dsa:
        return _mla(pool, page_size)
    raise SettingsError(
        f"this model keeps its KV in a {type(pool).__name__}, which hicache-ext does not carry yet; "
        "start without --enable-hicache-ext"
    )


def _mha(pool: Any, page_size: int) -> DeviceKV:
    if pool.kv_cache_layout != "nhd":
        raise SettingsError(f"the KV layout {pool.kv_cache_layout!r} is not carried yet, only 'nhd'")
    if pool.k_scale_buffer is not None or pool.is_quantized_kv_cache:
        raise SettingsError("a KV cache with scales (--kv-cache-dtype fp4 and the like) is not carried yet")
    if pool.post_capture_active:
        raise SettingsError("a KV pool whose memory is backed after graph capture is not carried yet")
    layout = PageLayout(
        page_size,
        pool.layer_num,
        pool.store_dtype,
        (Component("K", pool.head_num, pool.head_dim), Component("V", pool.head_num, pool.v_head_dim)),
        head_groups(pool.head_num),
    )
    return _checked(layout, (tuple(pool.k_buffer), tuple(pool.v_buffer)))


def _mla(pool: Any, page_size: int) -> DeviceKV:
    layout = PageLayout(
        page_size, pool.layer_num, pool.store_dtype, (Component("latent", 1, pool.kv_cache_dim),), 1
    )
    return _checked(layout, (tuple(pool.kv_buffer),))


def _checked(layout: PageLayout, buffers: tuple[tuple[torch.Tensor, ...], ...]) -> DeviceKV:
    try:
        return DeviceKV(layout, buffers)
    except ValueError as error:
        raise SettingsError(f"the KV buffers are not laid out as their class says: {error}") from error
