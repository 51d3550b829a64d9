"""The stream engine on a real GPU; skipped where there is none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hicache_ext.core.cache import LoadJob
from hicache_ext.core.header import Integrity, Labels, Reason
from hicache_ext.transfer import backends
from hicache_ext.transfer.choices import CopyBackendName, FaultPlan, FaultTier
from hicache_ext.transfer.device_kv import DeviceKV
from hicache_ext.transfer.engine import StreamEngine, make_engine
from hicache_ext.transfer.faults import FaultInjector
from hicache_ext.transfer.host_pool import HostPagePool
from hicache_ext.transfer.layers import LayerCounter
from hicache_ext.transfer.layout import Component, PageLayout
from hicache_ext.transfer.seal import Seal
from tests.transfer.loading import load

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PAGES = 64
_backend = CopyBackendName.AUTO


@pytest.fixture(params=[CopyBackendName.TORCH, CopyBackendName.STAGED, CopyBackendName.TRITON], autouse=True)
def backend(request: pytest.FixtureRequest) -> None:
    """Every test runs with every copy backend."""
    global _backend
    _backend = request.param


def pool(page_size: int, dtype: torch.dtype) -> DeviceKV:
    """K and V as halves of one allocation a layer, like SGLang 0.5.23."""
    layout = PageLayout(page_size, 5, dtype, (Component("K", 8, 128), Component("V", 8, 128)), 8)
    fused = [torch.randn(2, (PAGES + 1) * page_size, 8, 128, device="cuda").to(dtype) for _ in range(5)]
    return DeviceKV(layout, (tuple(f[0] for f in fused), tuple(f[1] for f in fused)))


def slots_of(pages: np.ndarray, page_size: int) -> torch.Tensor:
    pages = torch.from_numpy(pages).cuda()
    return (pages[:, None] * page_size + torch.arange(page_size, device="cuda")).reshape(-1)


def engine_of(kv: DeviceKV, host: HostPagePool, forward: torch.cuda.Stream | None = None) -> StreamEngine:
    return StreamEngine(kv, host, Seal(kv.layout, Integrity.FULL), None, forward, _backend)


def labels_of(numbers: np.ndarray) -> Labels:
    """Identities that tell the numbers apart."""
    identities = np.zeros((len(numbers), 16), dtype=np.uint8)
    identities[:, :8] = numbers.astype(np.int64).view(np.uint8).reshape(-1, 8)
    return Labels(identities, b"n" * 32, 3)


def test_a_gpu_gets_the_stream_engine() -> None:
    kv = pool(1, torch.bfloat16)
    assert isinstance(make_engine(kv, HostPagePool(kv.layout, 1, pinned=True)), StreamEngine)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_round_trip_restores_every_bit_and_touches_nothing_else(page_size: int, dtype: torch.dtype) -> None:
    kv = pool(page_size, dtype)
    engine = engine_of(kv, HostPagePool(kv.layout, 128, pinned=True), torch.cuda.Stream())
    counter = LayerCounter(5, engine.signal)
    rng = np.random.default_rng(page_size)
    order = rng.permutation(np.arange(1, PAGES + 1))
    source, target = order[:24], order[24:48]
    host = rng.permutation(128)[:24]
    before = [[b.clone() for b in layers] for layers in kv.buffers]
    labels = labels_of(source)
    engine.backup(1, [slots_of(source[:9], page_size), slots_of(source[9:], page_size)], host, labels)
    engine.drain()
    load(engine, 1, host, [slots_of(target, page_size)], labels)
    engine.drain()
    assert engine.backups.done() == engine.loads.done() == 1
    assert engine.loads.first_failure(0) is None
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
    engine = engine_of(kv, HostPagePool(kv.layout, 64, pinned=True), torch.cuda.Stream())
    pages = np.arange(1, 33)
    engine.backup(1, [slots_of(pages, 16)], np.arange(32), labels_of(pages))
    while engine.backups.done() < 1:
        engine.poll()
    load(engine, 1, np.arange(32), [slots_of(pages + 32, 16)], labels_of(pages))
    engine.drain()
    assert engine.loads.first_failure(0) is None
    for layers in kv.buffers:
        for buffer in layers:
            assert torch.equal(buffer[slots_of(pages + 32, 16)], buffer[slots_of(pages, 16)])


def test_a_backup_reads_what_the_forward_pass_writes_last() -> None:
    kv = pool(16, torch.float32)
    forward = torch.cuda.Stream()
    host = HostPagePool(kv.layout, 8, pinned=True)
    engine = engine_of(kv, host, forward)
    slots = slots_of(np.array([3]), 16)
    with torch.cuda.stream(forward):
        torch.cuda._sleep(200_000_000)
        for layers in kv.buffers:
            for buffer in layers:
                buffer[slots] = 42.0
    engine.backup(1, [slots], np.array([5]), labels_of(np.array([3])))
    engine.drain()
    assert all(bool((view == 42.0).all()) for view in kv.layout.views(host.buffer[5:6]))
    # The checksum was made of the same bytes.
    assert Seal(kv.layout, Integrity.FULL).verify(host.buffer[5:6], labels_of(np.array([3]))).all()


def test_attention_waits_for_its_layer() -> None:
    kv = pool(64, torch.float32)
    host = HostPagePool(kv.layout, PAGES, pinned=True)
    pages = np.arange(1, PAGES + 1)
    for view in kv.layout.views(host.buffer):
        view.fill_(7.0)
    engine = engine_of(kv, host)
    engine.seal.write(host.buffer, labels_of(pages))
    counter = LayerCounter(5, engine.signal)
    forward = torch.cuda.Stream()
    slots = slots_of(pages, 64)
    torch.cuda.synchronize()
    with torch.cuda.stream(engine._to_device):
        torch.cuda._sleep(200_000_000)
    load(engine, 1, pages - 1, [slots], labels_of(pages))
    counter.set_consumer(1)
    with torch.cuda.stream(forward):
        for layer in range(5):
            counter.wait_until(layer)
            assert_later = (kv.buffers[0][layer][slots] == 7.0).all()
            forward.synchronize()
            assert bool(assert_later)


# Pages that do not verify


def backed_up(page_size: int, pages: int = 12) -> tuple[DeviceKV, HostPagePool, StreamEngine, Labels]:
    """Device pages 1 .. ``pages`` on host pages 0 .. ``pages`` - 1."""
    kv = pool(page_size, torch.bfloat16)
    host = HostPagePool(kv.layout, pages, pinned=True)
    engine = engine_of(kv, host)
    labels = labels_of(np.arange(pages))
    engine.backup(1, [slots_of(np.arange(1, pages + 1), page_size)], np.arange(pages), labels)
    engine.drain()
    return kv, host, engine, labels


@pytest.mark.parametrize("integrity", list(Integrity))
def test_numpy_verifies_what_the_gpu_sealed_and_the_other_way_round(integrity: Integrity) -> None:
    kv, host, _, labels = backed_up(16)
    seal = Seal(kv.layout, integrity)
    on_gpu = host.buffer.cuda()
    seal.write(on_gpu, labels)
    on_host = host.buffer.clone()
    seal.write(on_host, labels)
    assert torch.equal(on_gpu.cpu(), on_host)
    on_host[4, kv.layout.component_offset(1)] ^= 1
    on_host[5, 0] ^= 1
    expected = seal.verify(on_host, labels)
    assert torch.equal(seal.verify(on_host.cuda(), labels).cpu(), expected) and not expected[5]
    assert bool(expected[4]) is (integrity is not Integrity.FULL)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("bad", [[0], [5], [11], [3, 8]])
@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "by-layer"])
def test_kind_corrupt_page_from_a_lower_tier(
    page_size: int, bad: list[int], by_layer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit flipped in pinned memory: zeros in its place, the first page is posted, all others arrive.

    In chunks of four pages, so that two bad ones lie in different chunks.
    """
    kv, host, engine, labels = backed_up(page_size)
    monkeypatch.setattr(backends, "STAGING_BYTES", 4 * kv.layout.page_bytes)
    for page in bad:
        host.buffer[page, kv.layout.component_offset(page % 2) + page] ^= 0x10
    target = np.arange(20, 32)
    before = [[b.clone() for b in layers] for layers in kv.buffers]
    first = LoadJob(1, np.arange(12), [slots_of(target, page_size)], labels)
    other = slots_of(np.array([40]), page_size)
    engine.load([first, LoadJob(2, np.array([1]), [other], labels_of(np.array([1])))], by_layer=by_layer)
    engine.drain()
    assert engine.loads.first_failure(0) == (1, bad[0]) and engine.loads.first_failure(1) is None
    assert engine.counts.refused == {Reason.CHECKSUM: len(bad)}
    source, read = slots_of(np.arange(1, 13), page_size), slots_of(target, page_size)
    lost = slots_of(target[bad], page_size)
    for old_layers, new_layers in zip(before, kv.buffers, strict=True):
        for old, new in zip(old_layers, new_layers, strict=True):
            expected = old.clone()
            expected[read] = old[source]
            # Kernels refuse slab by slab, torch page by page.
            assert bool(((new[lost] == 0) | (new[lost] == expected[lost])).all())
            expected[lost] = new[lost]
            expected[slots_of(np.array([40]), page_size)] = old[slots_of(np.array([2]), page_size)]
            assert torch.equal(new, expected)
    for page in bad:
        damaged = kv.buffers[page % 2][0][slots_of(target[[page]], page_size), 0]
        assert not bool(damaged.any()), "a damaged slab reached the device"


def test_a_page_of_another_prompt_is_refused() -> None:
    kv, _, engine, _ = backed_up(16)
    slots = slots_of(np.array([20, 21]), 16)
    load(engine, 1, np.array([3, 4]), [slots], labels_of(np.array([3, 5])))
    engine.drain()
    assert engine.loads.first_failure(0) == (1, 1) and engine.counts.refused == {Reason.IDENTITY: 1}
    assert not any(bool(layer[slots[16:]].any()) for layers in kv.buffers for layer in layers)


def test_waiting_for_a_load_waits_for_its_verdict_and_not_for_later_loads() -> None:
    _, host, engine, _ = backed_up(16)
    host.buffer[2, 0] ^= 1
    with torch.cuda.stream(engine._to_device):
        torch.cuda._sleep(200_000_000)
    for seq in (1, 2, 3):
        page = np.array([seq])
        load(engine, seq, page, [slots_of(page + 20, 16)], labels_of(page))
        if seq == 2:
            with torch.cuda.stream(engine._to_device):
                torch.cuda._sleep(2_000_000_000)
    assert engine.loads.done() == 0
    engine.wait_loads(2)
    assert engine.loads.done() == 2 and engine.loads.first_failure(0) == (2, 0)
    engine.drain()
    assert engine.loads.done() == 3 and engine.loads.first_failure(2) is None


@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "by-layer"])
def test_loads_of_one_copy_land_one_after_another_if_nobody_waits_by_layer(
    by_layer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "STAGING_BYTES", 1)
    _, _, engine, _ = backed_up(16)
    pages = [np.array([number]) for number in range(3)]
    jobs = [LoadJob(n + 1, p, [slots_of(p + 20, 16)], labels_of(p)) for n, p in enumerate(pages)]
    engine.load(jobs, by_layer=by_layer)
    ends = {id(load.events[-1]) for load in engine._loads}
    assert all(len(load.events) == engine.kv.layout.layers for load in engine._loads)
    # The other backends take more than a page at a time.
    if isinstance(engine._backend, backends.TorchBackend):
        assert len(ends) == (1 if by_layer else 3)
    elif by_layer:
        assert len(ends) == 1
    engine.drain()
    assert engine.loads.done() == 3 and len(engine.take_load_times()) == 1


def test_kind_scheduler_stalls_a_copy_is_queued_while_the_model_runs() -> None:
    """Neither direction waits for the forward pass, whose work may take seconds."""
    kv = pool(16, torch.bfloat16)
    forward = torch.cuda.Stream()
    engine = engine_of(kv, HostPagePool(kv.layout, 8, pinned=True), forward)
    pages = np.arange(4)
    labels = labels_of(pages)
    # Once before, for what is made at the first call.
    engine.backup(1, [slots_of(pages + 1, 16)], pages, labels)
    load(engine, 1, pages, [slots_of(pages + 20, 16)], labels)
    engine.drain()
    slots = slots_of(pages + 1, 16), slots_of(pages + 20, 16)
    with torch.cuda.stream(forward):
        torch.cuda._sleep(4_000_000_000)
        ended = torch.cuda.Event()
        ended.record()
    engine.backup(2, [slots[0]], pages + 4, labels)
    assert not ended.query(), "the backup waited for the forward pass"
    load(engine, 2, pages, [slots[1]], labels)
    assert not ended.query(), "the load waited for the forward pass"
    engine.drain()
    assert engine.loads.first_failure(0) is None


@pytest.mark.parametrize("tier", list(FaultTier))
def test_injected_faults_are_met_and_refused(tier: FaultTier) -> None:
    kv = pool(16, torch.bfloat16)
    faults = FaultInjector(FaultPlan(tier, 1.0, seed=2), kv.layout)
    host = HostPagePool(kv.layout, 12, pinned=True)
    engine = StreamEngine(kv, host, Seal(kv.layout, Integrity.FULL), faults, None, _backend)
    pages = np.arange(12)
    before = [[b.clone() for b in layers] for layers in kv.buffers]
    engine.backup(1, [slots_of(pages + 1, 16)], pages, labels_of(pages))
    engine.drain()
    for old_layers, new_layers in zip(before, kv.buffers, strict=True):
        assert all(torch.equal(old, new) for old, new in zip(old_layers, new_layers, strict=True))
    load(engine, 1, pages, [slots_of(pages + 20, 16)], labels_of(pages))
    engine.drain()
    assert faults.met == faults.injected.total() == engine.counts.refused.total() == 12
    assert engine.loads.first_failure(0) == (1, 0)
