"""SGLang's KV pools as the copies see them: described from real pools, anything else refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("sglang")

import torch

with warnings.catch_warnings():
    # Some of what SGLang imports warns about itself.
    warnings.simplefilter("ignore")
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, NoOpMHATokenToKVPool

from hicache_ext.integration.pools import SlotPool, describe
from hicache_ext.integration.settings import SettingsError
from hicache_ext.transfer.copy_torch import gather, scatter_layer
from hicache_ext.transfer.device_kv import DeviceKV
from hicache_ext.transfer.layout import Component

PAGE, SIZE, LAYERS = 4, 32, 2


def mha(kind: type = MHATokenToKVPool, **changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "size": SIZE,
        "page_size": PAGE,
        "dtype": torch.bfloat16,
        "head_num": 6,
        "head_dim": 8,
        "layer_num": LAYERS,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    return kind(**{**arguments, **changes})


def mla(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "size": SIZE,
        "page_size": PAGE,
        "dtype": torch.bfloat16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "layer_num": LAYERS,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    return MLATokenToKVPool(**{**arguments, **changes})


def test_mha_pool() -> None:
    pool = mha()
    kv = describe(pool, PAGE)
    assert kv.layout.components == (Component("K", 6, 8), Component("V", 6, 8))
    assert (kv.layout.page_size, kv.layout.layers, kv.layout.groups) == (PAGE, LAYERS, 6)
    assert kv.layout.dtype == torch.bfloat16
    assert kv.layout.token_bytes * (SIZE + PAGE) == sum(pool.get_kv_size_bytes())
    for layers, buffers in zip(kv.buffers, (pool.k_buffer, pool.v_buffer), strict=True):
        assert [b.data_ptr() for b in layers] == [b.data_ptr() for b in buffers]


def test_mha_pool_whose_values_are_narrower() -> None:
    layout = describe(mha(v_head_dim=5), PAGE).layout
    assert layout.components == (Component("K", 6, 8), Component("V", 6, 5))


def test_float8_is_stored_as_bytes() -> None:
    layout = describe(mha(dtype=torch.float8_e4m3fn), PAGE).layout
    assert layout.dtype == torch.uint8 and layout.token_bytes == 2 * LAYERS * 6 * 8


def test_mla_pool() -> None:
    pool = mla()
    kv = describe(pool, PAGE)
    assert kv.layout.components == (Component("latent", 1, 20),) and kv.layout.groups == 1
    assert [b.data_ptr() for b in kv.buffers[0]] == [b.data_ptr() for b in pool.kv_buffer]


def round_trip(kv: DeviceKV) -> None:
    """Page 1 to the host and back to page 6."""
    page = torch.zeros((1, kv.layout.page_bytes), dtype=torch.uint8)
    rows = torch.tensor([0])
    gather(kv, torch.arange(PAGE, 2 * PAGE), page, rows)
    for layer in range(LAYERS):
        scatter_layer(kv, page, rows, torch.arange(6 * PAGE, 7 * PAGE), layer)


@pytest.mark.parametrize("v_head_dim", [8, 5])
def test_kind_wrong_layout_right_shape_mha(v_head_dim: int) -> None:
    """Written and read back through the pool's own accessors, moved by ours in between."""
    pool = mha(v_head_dim=v_head_dim)
    key = torch.randn(LAYERS, PAGE, 6, 8).to(torch.bfloat16)
    value = torch.randn(LAYERS, PAGE, 6, v_head_dim).to(torch.bfloat16)
    for layer in range(LAYERS):
        pool.get_key_buffer(layer)[PAGE : 2 * PAGE] = key[layer]
        pool.get_value_buffer(layer)[PAGE : 2 * PAGE] = value[layer]
    round_trip(describe(pool, PAGE))
    for layer in range(LAYERS):
        k, v = pool.get_kv_buffer(layer)
        assert torch.equal(k[6 * PAGE : 7 * PAGE], key[layer])
        assert torch.equal(v[6 * PAGE : 7 * PAGE], value[layer])
        assert not k[2 * PAGE : 6 * PAGE].any() and not v[7 * PAGE :].any()


def test_kind_wrong_layout_right_shape_mla() -> None:
    pool = mla()
    rows = torch.randn(LAYERS, PAGE, 1, 20).to(torch.bfloat16)
    for layer in range(LAYERS):
        pool.get_key_buffer(layer)[PAGE : 2 * PAGE] = rows[layer]
    round_trip(describe(pool, PAGE))
    for layer in range(LAYERS):
        assert torch.equal(pool.get_key_buffer(layer)[6 * PAGE : 7 * PAGE], rows[layer])


class Subclass(MHATokenToKVPool):
    """As SGLang's own FP4, page-major and no-op pools: the same attributes, another meaning."""


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: mha(Subclass), "Subclass"),
        (lambda: mha(NoOpMHATokenToKVPool), "NoOpMHATokenToKVPool"),
        (lambda: mla(use_dsa=True), "MLATokenToKVPool"),
        (lambda: object(), "object"),
    ],
)
def test_kind_a_second_pool_forgotten_other_pools_are_refused(make: Callable[[], Any], name: str) -> None:
    with pytest.raises(SettingsError) as caught:
        describe(make(), PAGE)
    assert str(caught.value) == (
        f"this model keeps its KV in a {name}, which hicache-ext does not carry yet; "
        "start without --enable-hicache-ext"
    )


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("kv_cache_layout", "hnd", "the KV layout 'hnd' is not carried yet"),
        ("k_scale_buffer", [torch.zeros(1)], "a KV cache with scales"),
        ("post_capture_active", True, "backed after graph capture"),
        ("head_num", 12, "not laid out as their class says: K buffer is"),
        ("layer_num", 3, "not laid out as their class says: K: 2 layers, expected 3"),
        ("v_head_dim", 4, "not laid out as their class says: V buffer is"),
    ],
)
def test_a_pool_with_another_layout_is_refused(attribute: str, value: object, message: str) -> None:
    pool = mha()
    setattr(pool, attribute, value)
    with pytest.raises(SettingsError, match=message):
        describe(pool, PAGE)


def test_quantized_kv_is_refused() -> None:
    pool = mha()
    pool.quant_method = type("Quantized", (), {"name": "fp4"})()
    if not pool.is_quantized_kv_cache:
        pytest.fail("SGLang tells quantized KV by another attribute now")
    with pytest.raises(SettingsError, match="a KV cache with scales"):
        describe(pool, PAGE)


@pytest.mark.parametrize("page", [1, 4])
def test_slot_pool_over_the_engines_allocator(page: int) -> None:
    pool = mha(page_size=page)
    allocator = (
        TokenToKVPoolAllocator(SIZE, torch.bfloat16, "cpu", pool, False)
        if page == 1
        else PagedTokenToKVPoolAllocator(SIZE, page, torch.bfloat16, "cpu", pool, False)
    )
    slots = SlotPool(allocator)
    assert slots.available() == SIZE
    got = slots.alloc(3 * page)
    assert got is not None and got.dtype == torch.int64 and len(got.unique()) == 3 * page
    assert 0 not in got, "slot 0 is padding"
    assert torch.equal(got.view(-1, page), got[::page, None] + torch.arange(page)), "pages lie in pieces"
    assert slots.available() == SIZE - 3 * page
    assert slots.alloc(SIZE) is None and slots.available() == SIZE - 3 * page
    slots.free(got[page:])
    assert slots.available() == SIZE - page
    slots.free(got[:page])
    assert slots.available() == SIZE
