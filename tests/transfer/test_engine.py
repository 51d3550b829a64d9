"""The CPU engine with real threads: order, layer-wise waiting, bad pages, failures, drain."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from hicache_ext.core.cache import LoadJob
from hicache_ext.core.header import Integrity, Labels, Reason
from hicache_ext.transfer import engine as engine_module
from hicache_ext.transfer.choices import FaultKind, FaultPlan, FaultTier
from hicache_ext.transfer.device_kv import DeviceKV
from hicache_ext.transfer.engine import ThreadEngine, make_engine
from hicache_ext.transfer.faults import FaultInjector
from hicache_ext.transfer.host_pool import HostPagePool
from hicache_ext.transfer.layers import LayerCounter
from hicache_ext.transfer.layout import Component, PageLayout
from hicache_ext.transfer.seal import Seal
from tests.transfer.loading import load

pytestmark = pytest.mark.timeout(60)

PAGE, LAYERS, SLOTS = 4, 3, 64
LAYOUT = PageLayout(PAGE, LAYERS, torch.float32, (Component("K", 2, 8), Component("V", 2, 8)), 2)


class Rig:
    def __init__(self, faults: FaultPlan | None = None) -> None:
        torch.manual_seed(3)
        self.kv = DeviceKV(
            LAYOUT,
            tuple(tuple(torch.randn(SLOTS, 2, 8) for _ in range(LAYERS)) for _ in LAYOUT.components),
        )
        self.host = HostPagePool(LAYOUT, 16, pinned=False)
        self.host.buffer.zero_()
        injector = None if faults is None else FaultInjector(faults, LAYOUT)
        self.engine = ThreadEngine(self.kv, self.host, Seal(LAYOUT, Integrity.FULL), injector)
        self.gates: list[threading.Event] = []

    def hold(self, worker: str) -> threading.Event:
        """Block a worker until the event is set."""
        gate, reached = threading.Event(), threading.Event()

        def job() -> None:
            reached.set()
            gate.wait(30)

        getattr(self.engine, worker).submit(job)
        assert reached.wait(10)
        self.gates.append(gate)
        return gate

    def rows(self, pages: list[int]) -> torch.Tensor:
        """All K and V of some device pages."""
        slots = torch.cat([slots_of(p) for p in pages])
        return torch.stack([torch.stack([layer[slots] for layer in layers]) for layers in self.kv.buffers])

    def to_host(self, device_pages: list[int], pages: list[int]) -> Labels:
        """Back some device pages up, and wait for it."""
        labels = labels_of(*device_pages)
        seq = self.engine.backups.done() + 1
        self.engine.backup(seq, [slots_of(p) for p in device_pages], host_pages(*pages), labels)
        self.engine.drain()
        assert self.engine.backups.done() == seq
        return labels

    def close(self) -> None:
        for gate in self.gates:
            gate.set()
        self.engine.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def slots_of(page: int) -> torch.Tensor:
    return torch.arange(page * PAGE, (page + 1) * PAGE)


def host_pages(*pages: int) -> np.ndarray:
    return np.array(pages, dtype=np.int64)


def labels_of(*numbers: int, epoch: int = 3) -> Labels:
    """Identities that tell the numbers apart."""
    identities = np.zeros((len(numbers), 16), dtype=np.uint8)
    identities[:, 0] = numbers
    return Labels(identities, b"n" * 32, epoch)


def attend(counter: LayerCounter) -> threading.Thread:
    """Wait for all layers in a thread, as attention does."""

    def run() -> None:
        for layer in range(LAYERS):
            counter.wait_until(layer)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_the_cpu_gets_the_thread_engine(rig: Rig) -> None:
    engine = make_engine(rig.kv, rig.host, integrity=Integrity.SAMPLE)
    assert isinstance(engine, ThreadEngine) and engine.seal.integrity is Integrity.SAMPLE
    assert engine.faults is None
    engine.close()


def test_pages_survive_the_way_to_the_host_and_back(rig: Rig) -> None:
    """Slots come in one tensor a node, as the tree keeps them."""
    expected = rig.rows([1, 2, 3])
    pages, labels = host_pages(5, 0, 9), labels_of(1, 2, 3)
    rig.engine.backup(1, [slots_of(1), torch.cat([slots_of(2), slots_of(3)])], pages, labels)
    rig.engine.drain()
    load(rig.engine, 1, pages, [slots_of(10), torch.cat([slots_of(4), slots_of(12)])], labels)
    rig.engine.drain()
    assert torch.equal(rig.rows([10, 4, 12]), expected)
    assert rig.engine.backups.done() == rig.engine.loads.done() == 1
    assert rig.engine.loads.first_failure(0) is None and not rig.engine.counts.refused
    counts = rig.engine.counts
    assert counts.bytes_to_host == counts.bytes_to_device == 3 * LAYOUT.payload_bytes


def test_calls_return_before_the_bytes_have_moved(rig: Rig) -> None:
    """Kind 11: the scheduler thread never waits for a copy."""
    gates = [rig.hold("_to_host"), rig.hold("_to_device")]
    rig.engine.backup(1, [slots_of(1)], host_pages(0), labels_of(1))
    load(rig.engine, 1, host_pages(1), [slots_of(2)], labels_of(1))
    rig.engine.poll()
    assert rig.engine.backups.done() == rig.engine.loads.done() == 0
    assert not rig.host.buffer.any()
    for gate in gates:
        gate.set()
    rig.engine.drain()
    assert rig.engine.backups.done() == rig.engine.loads.done() == 1


def test_each_direction_is_first_in_first_out(rig: Rig) -> None:
    gate = rig.hold("_to_host")
    seen: list[int] = []
    post = rig.engine.backups.post

    def recorded(seq: int, bad: int | None = None) -> None:
        seen.append(seq)
        post(seq, bad)

    rig.engine.backups.post = recorded  # type: ignore[method-assign]
    for seq in range(1, 6):
        rig.engine.backup(seq, [slots_of(seq)], host_pages(0), labels_of(seq))
    gate.set()
    rig.engine.drain()
    assert seen == [1, 2, 3, 4, 5]
    load(rig.engine, 1, host_pages(0), [slots_of(9)], labels_of(5))
    rig.engine.drain()
    assert torch.equal(rig.rows([9]), rig.rows([5])), "the last of five copies to one page came last"


def test_directions_do_not_wait_for_each_other(rig: Rig) -> None:
    rig.hold("_to_host")
    rig.engine.backup(1, [slots_of(1)], host_pages(0), labels_of(1))
    load(rig.engine, 1, host_pages(1), [slots_of(2)], labels_of(1))
    LayerCounter(LAYERS, rig.engine.signal).events[1].wait(LAYERS - 1)
    assert rig.engine.backups.done() == 0


def test_the_slots_of_a_job_are_those_of_its_call(rig: Rig) -> None:
    """The tree splits nodes while a copy waits its turn: the caller's list may change."""
    gate = rig.hold("_to_host")
    slots = [slots_of(1)]
    rig.engine.backup(1, list(slots), host_pages(0), labels_of(1))
    slots[0] = slots_of(2)
    gate.set()
    rig.engine.drain()
    load(rig.engine, 1, host_pages(0), [slots_of(9)], labels_of(1))
    rig.engine.drain()
    assert torch.equal(rig.rows([9]), rig.rows([1]))


def test_attention_waits_for_each_layer(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer can be read as soon as it is there, while the next ones are still on their way."""
    expected = rig.rows([1])
    rig.engine.backup(1, [slots_of(1)], host_pages(0), labels_of(1))
    rig.engine.drain()
    go = [threading.Event() for _ in range(LAYERS)]
    real = engine_module.scatter_layer

    def gated(kv, source, pages, slots, layer) -> None:
        assert go[layer].wait(30)
        real(kv, source, pages, slots, layer)

    monkeypatch.setattr(engine_module, "scatter_layer", gated)
    counter = LayerCounter(LAYERS, rig.engine.signal)
    load(rig.engine, 1, host_pages(0), [slots_of(8)], labels_of(1))
    arrived: list[int] = []
    progress = threading.Condition()

    def attention() -> None:
        for layer in range(LAYERS):
            counter.wait_until(layer)
            with progress:
                arrived.append(layer)
                progress.notify_all()

    counter.set_consumer(1)
    thread = threading.Thread(target=attention, daemon=True)
    thread.start()
    for layer in range(LAYERS):
        thread.join(0.1)
        assert arrived == list(range(layer)), "a layer was read before it had arrived"
        go[layer].set()
        with progress:
            assert progress.wait_for(lambda n=layer: len(arrived) == n + 1, 10)  # type: ignore[misc]
        assert torch.equal(rig.rows([8])[:, : layer + 1], expected[:, : layer + 1])
    thread.join(10)
    rig.engine.drain()
    assert rig.engine.loads.done() == 1


# Pages that do not verify


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_kind_corrupt_page_from_a_lower_tier(rig: Rig, bad: int) -> None:
    """It is posted and its slots are zero; all others arrive, and attention is woken for every layer."""
    expected = rig.rows([1, 2, 3])
    pages = [5, 0, 9]
    labels = rig.to_host([1, 2, 3], pages)
    rig.host.buffer[pages[bad], LAYOUT.component_offset(1)] ^= 0x80
    gate = rig.hold("_to_device")
    load(rig.engine, 1, host_pages(*pages), [slots_of(p) for p in (10, 4, 12)], labels)
    counter = LayerCounter(LAYERS, rig.engine.signal)
    counter.set_consumer(1)
    attention = attend(counter)
    attention.join(0.1)
    assert attention.is_alive(), "it did not wait"
    gate.set()
    attention.join(10)
    assert not attention.is_alive()
    rig.engine.drain()
    assert rig.engine.loads.done() == 1 and rig.engine.loads.first_failure(0) == (1, bad)
    got = rig.rows([10, 4, 12]).unflatten(2, (3, PAGE))
    expected = expected.unflatten(2, (3, PAGE))
    good = [i for i in range(3) if i != bad]
    assert torch.equal(got[:, :, good], expected[:, :, good])
    assert not got[:, :, bad].any(), "what is computed from it must be finite"
    assert rig.engine.counts.refused == {Reason.CHECKSUM: 1}
    assert rig.engine.counts.bytes_to_device == 2 * LAYOUT.payload_bytes


def test_the_first_of_several_bad_pages_is_posted(rig: Rig) -> None:
    """First in the prompt, wherever it lies on the host; the next load is not concerned."""
    pages = [9, 8, 3, 2]
    labels = rig.to_host([1, 2, 3, 4], pages)
    rig.host.buffer[[2, 8], LAYOUT.component_offset(0) + 5] ^= 1
    load(rig.engine, 1, host_pages(*pages), [slots_of(p) for p in (10, 11, 12, 13)], labels)
    load(rig.engine, 2, host_pages(3), [slots_of(14)], labels_of(3))
    rig.engine.drain()
    assert rig.engine.loads.first_failure(0) == (1, 1)
    assert rig.engine.loads.first_failure(1) is None
    got = rig.rows([10, 11, 12, 13]).unflatten(2, (4, PAGE))
    assert not got[:, :, [1, 3]].any() and got[:, :, [0, 2]].all()
    assert torch.equal(rig.rows([14]), rig.rows([3]))
    assert rig.engine.counts.refused == {Reason.CHECKSUM: 2}


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        (labels_of(1, 7), Reason.IDENTITY),
        (Labels(labels_of(1, 2).identities, b"m" * 32, 3), Reason.NAMESPACE),
        (labels_of(1, 2, epoch=4), Reason.EPOCH),
    ],
)
def test_a_page_of_another_prompt_model_or_epoch_is_refused(rig: Rig, labels: Labels, reason: Reason) -> None:
    rig.to_host([1, 2], [0, 1])
    load(rig.engine, 1, host_pages(0, 1), [slots_of(10), slots_of(11)], labels)
    rig.engine.drain()
    first, count = (1, 1) if reason is Reason.IDENTITY else (0, 2)
    assert rig.engine.loads.first_failure(0) == (1, first)
    assert rig.engine.counts.refused == {reason: count}
    assert not rig.rows([11]).any()


def test_a_page_that_was_never_written_is_refused(rig: Rig) -> None:
    load(rig.engine, 1, host_pages(4), [slots_of(10)], labels_of(1))
    rig.engine.drain()
    assert rig.engine.loads.first_failure(0) == (1, 0) and rig.engine.counts.refused == {Reason.MAGIC: 1}


@pytest.mark.parametrize("announces", [True, False])
def test_a_refused_page_is_named_in_the_log(
    rig: Rig, announces: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rig.engine.announces = announces
    with caplog.at_level(logging.WARNING):
        load(rig.engine, 1, host_pages(4, 5), [slots_of(10), slots_of(11)], labels_of(1, 2))
        rig.engine.drain()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (2 if announces else 0)
    assert all("(magic)" in message and "00" * 15 in message for message in messages)


# Copies that raise an error


def test_a_failed_backup_completes_and_leaves_no_page_that_verifies(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even one that was written before, and not an older one that would pass for it."""
    pages, labels = [5, 0, 9], rig.to_host([1, 2, 3], [5, 0, 9])
    monkeypatch.setattr(engine_module, "CPU_STAGING_BYTES", LAYOUT.page_bytes)
    real, calls = engine_module.gather, []

    def second_fails(*args: object) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise OSError("no such memory")
        real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(engine_module, "gather", second_fails)
    rig.engine.backup(2, [slots_of(p) for p in (1, 2, 3)], host_pages(*pages), labels)
    rig.engine.backup(3, [slots_of(4)], host_pages(7), labels_of(4))
    rig.engine.drain()
    assert len(calls) == 3 and rig.engine.backups.done() == 3, "the next one runs"
    assert rig.engine.backups.first_failure(0) is None, "a backup only completes"
    assert rig.engine.counts.failed_backups == 3
    assert rig.engine.counts.bytes_to_host == 4 * LAYOUT.payload_bytes, "only what was copied counts"
    load(rig.engine, 1, host_pages(*pages), [slots_of(p) for p in (10, 11, 12)], labels)
    load(rig.engine, 2, host_pages(7), [slots_of(13)], labels_of(4))
    rig.engine.drain()
    assert rig.engine.counts.refused == {Reason.MAGIC: 3} and not rig.rows([10, 11, 12]).any()
    assert rig.engine.loads.first_failure(0) == (1, 0) and rig.engine.loads.first_failure(1) is None
    assert torch.equal(rig.rows([13]), rig.rows([4]))


def test_a_failed_write_to_the_host_voids_the_pages(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = rig.to_host([1], [0])
    real = rig.host.write

    def half(pages: np.ndarray, source: torch.Tensor) -> None:
        real(pages, source)
        raise OSError("lost")

    monkeypatch.setattr(rig.host, "write", half)
    rig.to_host([1], [0])
    load(rig.engine, 1, host_pages(0), [slots_of(10)], labels)
    rig.engine.drain()
    assert rig.engine.loads.first_failure(0) == (1, 0) and rig.engine.counts.failed_backups == 1


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_raising_copy_to_the_device_is_a_bad_load_and_wakes_its_waiters(
    rig: Rig, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never a hang and never an error in attention: what is computed from it is taken back later."""
    labels = rig.to_host([1, 2], [0, 1])
    real = engine_module.scatter_layer

    def fails(kv, source, pages, slots, at) -> None:
        if at == layer:
            raise OSError("no such memory")
        real(kv, source, pages, slots, at)

    monkeypatch.setattr(engine_module, "scatter_layer", fails)
    gate = rig.hold("_to_device")
    load(rig.engine, 1, host_pages(0, 1), [slots_of(10), slots_of(11)], labels)
    counter = LayerCounter(LAYERS, rig.engine.signal)
    counter.set_consumer(1)
    attention = attend(counter)
    gate.set()
    attention.join(10)
    assert not attention.is_alive()
    rig.engine.drain()
    assert rig.engine.loads.first_failure(0) == (1, 0)
    assert rig.engine.counts.refused == {Reason.COPY: 2} and rig.engine.counts.bytes_to_device == 0
    monkeypatch.setattr(engine_module, "scatter_layer", real)
    load(rig.engine, 2, host_pages(0, 1), [slots_of(10), slots_of(11)], labels)
    rig.engine.drain()
    assert rig.engine.loads.first_failure(1) is None and torch.equal(rig.rows([10, 11]), rig.rows([1, 2]))


@pytest.mark.parametrize(
    ("pages", "slots"), [([99], [slots_of(1)]), ([0], [torch.arange(1000, 1004)]), ([0], [torch.arange(3)])]
)
def test_a_load_that_makes_no_sense_is_a_bad_load(
    rig: Rig, pages: list[int], slots: list[torch.Tensor]
) -> None:
    rig.to_host([1], [0])
    load(rig.engine, 1, host_pages(*pages), slots, labels_of(1))
    rig.engine.drain()
    assert rig.engine.loads.done() == 1 and rig.engine.loads.first_failure(0) == (1, 0)
    rig.engine.signal.wait(1, LAYERS - 1)


# Faults on purpose


@pytest.mark.parametrize("tier", list(FaultTier))
def test_injected_faults_are_met_and_refused(tier: FaultTier) -> None:
    rig = Rig(FaultPlan(tier, 1.0, (FaultKind.FLIP, FaultKind.FORGE), seed=4))
    labels = rig.to_host([1, 2, 3], [5, 0, 9])
    faults = rig.engine.faults
    assert faults is not None and faults.met == 0
    assert faults.injected.total() == (3 if tier is FaultTier.TRANSFER else 0)
    load(rig.engine, 1, host_pages(5, 0, 9), [slots_of(p) for p in (10, 11, 12)], labels)
    rig.engine.drain()
    assert faults.met == faults.injected.total() == rig.engine.counts.refused.total() == 3
    assert rig.engine.loads.first_failure(0) == (1, 0) and not rig.rows([10, 11, 12]).any()
    rig.close()


def test_faults_on_the_way_do_not_touch_the_device() -> None:
    rig = Rig(FaultPlan(FaultTier.TRANSFER, 1.0))
    before = rig.rows(list(range(16)))
    rig.to_host([1, 2, 3], [5, 0, 9])
    assert torch.equal(rig.rows(list(range(16))), before)
    rig.close()


# Waiting


def test_waiting_for_a_load_waits_for_those_before_it_and_not_for_those_after_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.to_host([1, 2, 3], [0, 1, 2])
    go = {seq: threading.Event() for seq in (1, 2, 3)}
    real = rig.engine.seal.verify
    seqs = iter((1, 2, 3))

    def gated(rows: torch.Tensor, labels: Labels) -> torch.Tensor:
        assert go[next(seqs)].wait(30)
        return real(rows, labels)

    monkeypatch.setattr(rig.engine.seal, "verify", gated)
    for seq in (1, 2, 3):
        load(rig.engine, seq, host_pages(seq - 1), [slots_of(9 + seq)], labels_of(seq))
    waited = threading.Event()

    def wait() -> None:
        rig.engine.wait_loads(2)
        waited.set()

    threading.Thread(target=wait, daemon=True).start()
    go[1].set()
    assert not waited.wait(0.1)
    go[2].set()
    assert waited.wait(10) and rig.engine.loads.done() == 2, "what was waited for is posted"
    go[3].set()
    rig.engine.wait_loads(0)


def test_drain_waits_for_everything_submitted(rig: Rig) -> None:
    gate = rig.hold("_to_host")
    for seq in range(1, 4):
        rig.engine.backup(seq, [slots_of(seq)], host_pages(seq), labels_of(seq))
    drained = threading.Event()

    def drain() -> None:
        rig.engine.drain()
        drained.set()

    thread = threading.Thread(target=drain, daemon=True)
    thread.start()
    assert not drained.wait(0.1)
    gate.set()
    assert drained.wait(10) and rig.engine.backups.done() == 3


def test_close_ends_the_threads_and_a_late_drain_does_not_hang(rig: Rig) -> None:
    rig.engine.backup(1, [slots_of(1)], host_pages(0), labels_of(1))
    rig.engine.close()
    assert rig.engine.backups.done() == 1, "what was submitted before is still done"
    assert not any(t.name.startswith("hicache-ext") and t.is_alive() for t in threading.enumerate())
    rig.engine.drain()
    rig.engine.close()


def test_workers_do_not_keep_the_process_alive(rig: Rig) -> None:
    workers = [t for t in threading.enumerate() if t.name.startswith("hicache-ext")]
    assert len(workers) == 2 and all(t.daemon for t in workers)


@pytest.mark.parametrize("by_layer", [False, True])
def test_loads_that_start_together_have_each_their_own_verdict(rig: Rig, by_layer: bool) -> None:
    pages = [0, 1, 2, 3]
    labels = rig.to_host([1, 2, 3, 4], pages)
    rig.host.buffer[2, LAYOUT.component_offset(0) + 5] ^= 1
    expected = rig.rows([1, 2, 4])
    jobs = [
        LoadJob(1, host_pages(0, 1), [slots_of(10), slots_of(11)], labels[:2]),
        LoadJob(2, host_pages(2), [slots_of(12)], labels[2:3]),
        LoadJob(3, host_pages(3), [slots_of(13)], labels[3:]),
    ]
    rig.engine.load(jobs, by_layer=by_layer)
    rig.engine.drain()
    assert rig.engine.loads.done() == 3
    assert [rig.engine.loads.first_failure(n) for n in range(3)] == [(2, 0), (2, 0), None]
    assert torch.equal(rig.rows([10, 11, 13]), expected)
