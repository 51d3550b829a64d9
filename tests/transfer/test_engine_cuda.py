"""The stream engine on a real GPU; skipped where there is none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hicache_ext.transfer.device_kv import DeviceKV
from hicache_ext.transfer.engine import StreamEngine
from hicache_ext.transfer.host_pool import HostPagePool
from hicache_ext.transfer.layers import LayerCounter
from hicache_ext.transfer.layout import Component, PageLayout

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PAGES = 64


def pool(page_size: int, dtype: torch.dtype) -> DeviceKV:
    """K and V as halves of one allocation a layer, like SGLang 0.5.23."""
    layout = PageLayout(page_size, 5, dtype, (Component("K", 8, 128), Component("V", 8, 128)), 8)
    fused = [torch.randn(2, (PAGES + 1) * page_size, 8, 128, device="cuda").to(dtype) for _ in range(5)]
    return DeviceKV(layout, (tuple(f[0] for f in fused), tuple(f[1] for f in fused)))


def slots_of(pages: np.ndarray, page_size: int) -> torch.Tensor:
    pages = torch.from_numpy(pages).cuda()
    return (pages[:, None] * page_size + torch.arange(page_size, device="cuda")).reshape(-1)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_round_trip_restores_every_bit_and_touches_nothing_else(page_size: int, dtype: torch.dtype) -> None:
    kv = pool(page_size, dtype)
    engine = StreamEngine(kv, HostPagePool(kv.layout, 128, pinned=True), torch.cuda.Stream())
    counter = LayerCounter(5, engine.signal)
    rng = np.random.default_rng(page_size)
    order = rng.permutation(np.arange(1, PAGES + 1))
    source, target = order[:24], order[24:48]
    host = rng.permutation(128)[:24]
    before = [[b.clone() for b in layers] for layers in kv.buffers]
    engine.backup(1, [slots_of(source[:9], page_size), slots_of(source[9:], page_size)], host)
    engine.load(1, host, [slots_of(target, page_size)])
    engine.drain()
    assert engine.backups.done() == engine.loads.done() == 1
    counter.set_consumer(1)
    for layer in range(5):
        counter.wait_until(layer)
    torch.cuda.synchronize()
    read, written = slots_of(source, page_size), slots_of(target, page_size)
    for old_layers, new_layers in zip(before, kv.buffers, strict=True):
        for old, new in zip(old_layers, new_layers, strict=True):
            expected = old.clone()
            expected[written] = old[read]
            assert torch.equal(new, expected)


def test_a_load_waits_for_the_backup_it_reads() -> None:
    """In the cache a page is loaded only after its backup was applied; streams alone do not order them."""
    kv = pool(16, torch.bfloat16)
    engine = StreamEngine(kv, HostPagePool(kv.layout, 64, pinned=True), torch.cuda.Stream())
    pages = np.arange(1, 33)
    engine.backup(1, [slots_of(pages, 16)], np.arange(32))
    while engine.backups.done() < 1:
        engine.poll()
    engine.load(1, np.arange(32), [slots_of(pages + 32, 16)])
    engine.drain()
    for layers in kv.buffers:
        for buffer in layers:
            assert torch.equal(buffer[slots_of(pages + 32, 16)], buffer[slots_of(pages, 16)])


def test_a_backup_reads_what_the_forward_pass_writes_last() -> None:
    kv = pool(16, torch.float32)
    forward = torch.cuda.Stream()
    host = HostPagePool(kv.layout, 8, pinned=True)
    engine = StreamEngine(kv, host, forward)
    slots = slots_of(np.array([3]), 16)
    with torch.cuda.stream(forward):
        torch.cuda._sleep(200_000_000)
        for layers in kv.buffers:
            for buffer in layers:
                buffer[slots] = 42.0
    engine.backup(1, [slots], np.array([5]))
    engine.drain()
    assert bool((host.buffer[5].view(torch.float32) == 42.0).all())


def test_attention_waits_for_its_layer() -> None:
    kv = pool(64, torch.float32)
    host = HostPagePool(kv.layout, PAGES, pinned=True)
    host.buffer.view(torch.float32).fill_(7.0)
    engine = StreamEngine(kv, host, None)
    counter = LayerCounter(5, engine.signal)
    forward = torch.cuda.Stream()
    pages = np.arange(1, PAGES + 1)
    slots = slots_of(pages, 64)
    torch.cuda.synchronize()
    with torch.cuda.stream(engine._to_device):
        torch.cuda._sleep(200_000_000)
    engine.load(1, pages - 1, [slots])
    counter.set_consumer(1)
    with torch.cuda.stream(forward):
        for layer in range(5):
            counter.wait_until(layer)
            assert_later = (kv.buffers[0][layer][slots] == 7.0).all()
            forward.synchronize()
            assert bool(assert_later)
