"""SGLang's KV pools as the copies see them: described from real pools, anything else refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("sglang")

import torch

with warnings.catch_warnings():
    # Some of what SGLang imports warns about itself.
    warnings.simplefilter("ignore")
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import (
        DSATokenToKVPool,
        MambaPool,
        MHATokenToKOnlyPool,
        MHATokenToKVPool,
        MLATokenToKVPool,
        NoOpMHATokenToKVPool,
        ReqToTokenPool,
    )
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from hicache_ext.integration.pools import HeadShard, SlotPool, account_for_pools, describe
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
    assert kv.layout.payload_bytes * (SIZE // PAGE + 1) == sum(pool.get_kv_size_bytes())
    for layers, buffers in zip(kv.buffers, (pool.k_buffer, pool.v_buffer), strict=True):
        assert [b.data_ptr() for b in layers] == [b.data_ptr() for b in buffers]


def test_mha_pool_whose_values_are_narrower() -> None:
    layout = describe(mha(v_head_dim=5), PAGE).layout
    assert layout.components == (Component("K", 6, 8), Component("V", 6, 5))


def test_float8_is_stored_as_bytes() -> None:
    layout = describe(mha(dtype=torch.float8_e4m3fn), PAGE).layout
    assert layout.dtype == torch.uint8 and layout.payload_bytes == PAGE * 2 * LAYERS * 6 * 8


def test_mla_pool() -> None:
    pool = mla()
    kv = describe(pool, PAGE)
    assert kv.layout.components == (Component("latent", 1, 20),) and kv.layout.groups == 1
    assert [b.data_ptr() for b in kv.buffers[0]] == [b.data_ptr() for b in pool.kv_buffer]


# (heads of the model, TP size, groups a rank, heads a group); more ranks than heads share them, as in SGLang.
SHARDS = [
    (8, 1, 8, 1),
    (8, 2, 4, 1),
    (8, 4, 2, 1),
    (8, 8, 1, 1),
    (8, 16, 1, 1),
    (12, 1, 6, 2),
    (12, 2, 3, 2),
    (12, 4, 3, 1),
    (3, 1, 3, 1),
    (16, 1, 8, 2),
    (16, 4, 2, 2),
    (16, 16, 1, 1),
    (32, 8, 1, 4),
    (32, 16, 2, 1),
    *[(1, size, 1, 1) for size in (1, 2, 4, 8, 16)],
]


@pytest.mark.parametrize(("heads", "size", "groups", "width"), SHARDS)
def test_kind_different_parallelism_no_sharing(heads: int, size: int, groups: int, width: int) -> None:
    """A group's number says which heads of the model it holds, so equal objects have equal numbers."""
    local = max(heads // size, 1)
    held: list[int] = []
    for rank in range(size):
        mine, first = HeadShard(heads, size, rank).groups(local)
        assert (mine, local // mine) == (groups, width)
        first_head = rank * heads // size
        assert first * width == first_head, "group n begins at head n * width, whatever the rank"
        held += range(first, first + mine)
    copies = max(size // heads, 1)
    assert sorted(held) == sorted(list(range(heads // width)) * copies), "each group once, or once a replica"


@pytest.mark.parametrize(
    ("heads", "sizes"), [(8, (1, 2, 4, 8)), (12, (1, 2)), (16, (1, 2, 4, 8)), (3, (1, 3))]
)
def test_tp_degrees_share_groups_where_they_can(heads: int, sizes: tuple[int, ...]) -> None:
    """All degrees that divide the groups of TP 1 store the same ones."""
    widths = {heads // size // HeadShard(heads, size, 0).groups(heads // size)[0] for size in sizes}
    assert len(widths) == 1


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_numbers_its_groups_within_the_model(rank: int) -> None:
    layout = describe(mha(head_num=2), PAGE, HeadShard(8, 4, rank)).layout
    assert (
        (layout.groups, layout.first_group) == (2, 2 * rank) == (layout.groups, layout.geometry.first_group)
    )


def test_without_a_shard_a_pool_holds_the_whole_model() -> None:
    layout = describe(mha(), PAGE).layout
    assert (layout.groups, layout.first_group) == (6, 0)


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
    ("make", "parts"),
    [
        (lambda: mha(Subclass), ("Subclass", "does not know")),
        (lambda: mha(NoOpMHATokenToKVPool), ("NoOpMHATokenToKVPool", "no KV")),
        (lambda: mla(use_dsa=True), ("MLATokenToKVPool", "sparse-attention index keys")),
        (lambda: object(), ("builtins.object", "does not know")),
    ],
)
def test_kind_a_second_pool_forgotten_other_pools_are_refused(
    make: Callable[[], Any], parts: tuple[str, ...]
) -> None:
    with pytest.raises(SettingsError) as caught:
        describe(make(), PAGE)
    assert all(part in str(caught.value) for part in (*parts, "start without --enable-hicache-ext"))
    assert "\n" not in str(caught.value)


def context(pool: Any, requests: Any = None, **changes: Any) -> Any:
    """What SGLang hands to the factory of a cache, reduced to what holds pools."""
    allocator = PagedTokenToKVPoolAllocator(SIZE, PAGE, torch.bfloat16, "cpu", pool, False)
    requests = requests or ReqToTokenPool(2, SIZE, "cpu", False)
    params = CacheInitParams(
        disable=False, req_to_token_pool=requests, token_to_kv_pool_allocator=allocator, page_size=PAGE
    )
    runner = SimpleNamespace(
        req_to_token_pool=requests,
        token_to_kv_pool=pool,
        token_to_kv_pool_allocator=allocator,
        mtp_draft_device_pools=(),
        spec_algorithm=SpeculativeAlgorithm.NONE,
        memory_pool_config=object(),
    )
    fields: dict[str, Any] = {
        "params": params,
        "tp_worker": SimpleNamespace(model_runner=runner, model_runner_list=[runner]),
        "model_config": SimpleNamespace(is_encoder_decoder=False),
        "is_hybrid_swa": False,
        "is_hybrid_ssm": False,
        "is_dsa": False,
    }
    return SimpleNamespace(**{**fields, **changes})


@pytest.mark.parametrize("make", [mha, mla])
def test_a_model_with_one_carried_pool_is_accepted(make: Callable[[], Any]) -> None:
    account_for_pools(context(make()))


class HybridReqToTokenPool(ReqToTokenPool):
    """A table that holds a recurrent state as well, of a class that no release has."""


def in_params(name: str, pool: Any) -> Any:
    ctx = context(mha())
    setattr(ctx.params, name, (pool,))
    return ctx


def on_runner(name: str, value: Any) -> Any:
    ctx = context(mha())
    setattr(ctx.tp_worker.model_runner, name, value)
    return ctx


def inside_main(value: Any) -> Any:
    pool = mha()
    pool.index_pools = {4: value}
    return context(pool)


def bare(kind: type) -> Any:
    """An instance without buffers; only its class is looked at."""
    return object.__new__(kind)


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: in_params("mtp_draft_device_pools", mha()), ("MHATokenToKVPool", "mtp_draft_device")),
        (lambda: in_params("sidecar_draft_device_pools", mla()), ("MLATokenToKVPool", "sidecar_draft")),
        (lambda: in_params("mtp_draft_mamba_pools", bare(MambaPool)), ("MambaPool", "SSM", "mtp_draft")),
        (lambda: on_runner("mtp_draft_device_pools", (mha(),)), ("model_runner.mtp_draft_device_pools[0]",)),
        (lambda: on_runner("draft_pool", mha(Subclass)), ("Subclass", "model_runner.draft_pool")),
        (lambda: on_runner("spec_algorithm", SpeculativeAlgorithm.EAGLE), ("draft model", "--speculative")),
        (lambda: inside_main(bare(DSATokenToKVPool)), ("DSATokenToKVPool", "sparse-attention index keys")),
        (lambda: inside_main(bare(MHATokenToKOnlyPool)), ("MHATokenToKOnlyPool", "index_pools[0]")),
        (
            lambda: context(mha(), bare(HybridReqToTokenPool)),
            ("HybridReqToTokenPool", "params.req_to_token_pool", "does not know"),
        ),
        (lambda: context(mha(), is_hybrid_swa=True), ("sliding-window", "--disable-hybrid-swa-memory")),
        (lambda: context(mha(), is_hybrid_ssm=True), ("SSM",)),
        (lambda: context(mla(), is_dsa=True), ("sparse-attention index keys",)),
        (
            lambda: context(mha(), model_config=SimpleNamespace(is_encoder_decoder=True)),
            ("encoder cross-attention",),
        ),
        (lambda: context(mha(Subclass)), ("Subclass", "does not know")),
    ],
)
def test_kind_a_second_pool_forgotten(make: Callable[[], Any], parts: tuple[str, ...]) -> None:
    """However a model holds another pool, it is found and refused by its name."""
    with pytest.raises(SettingsError) as caught:
        account_for_pools(make())
    assert all(part in str(caught.value) for part in (*parts, "start without --enable-hicache-ext"))
    assert "\n" not in str(caught.value)


def test_kind_a_second_pool_forgotten_hybrid_pools_of_the_engine() -> None:
    pool = SWAKVPool(
        size=SIZE,
        size_swa=SIZE,
        page_size=PAGE,
        dtype=torch.bfloat16,
        head_num=2,
        head_dim=8,
        swa_attention_layer_ids=[0],
        full_attention_layer_ids=[1],
        device="cpu",
    )
    with pytest.raises(SettingsError, match="SWAKVPool, which holds sliding-window attention"):
        account_for_pools(context(pool))


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
