"""The CPU engine with real threads: order, layer-wise waiting, failures, drain."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from hicache_ext.transfer.device_kv import DeviceKV
from hicache_ext.transfer.engine import ThreadEngine, make_engine
from hicache_ext.transfer.host_pool import HostPagePool
from hicache_ext.transfer.layers import LayerCounter, LoadFailed
from hicache_ext.transfer.layout import Component, PageLayout

pytestmark = pytest.mark.timeout(60)

PAGE, LAYERS, SLOTS = 4, 3, 64
LAYOUT = PageLayout(PAGE, LAYERS, torch.float32, (Component("K", 2, 8), Component("V", 2, 8)), 2)


class Rig:
    def __init__(self) -> None:
        torch.manual_seed(3)
        self.kv = DeviceKV(
            LAYOUT,
            tuple(tuple(torch.randn(SLOTS, 2, 8) for _ in range(LAYERS)) for _ in LAYOUT.components),
        )
        self.host = HostPagePool(LAYOUT, 16, pinned=False)
        self.host.buffer.zero_()
        self.engine = ThreadEngine(self.kv, self.host)
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


def test_the_cpu_gets_the_thread_engine(rig: Rig) -> None:
    engine = make_engine(rig.kv, rig.host)
    assert isinstance(engine, ThreadEngine)
    engine.close()


def test_pages_survive_the_way_to_the_host_and_back(rig: Rig) -> None:
    """Slots come in one tensor a node, as the tree keeps them."""
    expected = rig.rows([1, 2, 3])
    rig.engine.backup(1, [slots_of(1), torch.cat([slots_of(2), slots_of(3)])], host_pages(5, 0, 9))
    rig.engine.drain()
    rig.engine.load(1, host_pages(5, 0, 9), [slots_of(10), torch.cat([slots_of(4), slots_of(12)])])
    rig.engine.drain()
    assert torch.equal(rig.rows([10, 4, 12]), expected)
    assert rig.engine.backups.done() == rig.engine.loads.done() == 1
    assert rig.engine.bytes_to_host == rig.engine.bytes_to_device == 3 * LAYOUT.page_bytes


def test_calls_return_before_the_bytes_have_moved(rig: Rig) -> None:
    """Kind 11: the scheduler thread never waits for a copy."""
    gates = [rig.hold("_to_host"), rig.hold("_to_device")]
    rig.engine.backup(1, [slots_of(1)], host_pages(0))
    rig.engine.load(1, host_pages(1), [slots_of(2)])
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

    def recorded(seq: int, ok: bool = True) -> None:
        seen.append(seq)
        post(seq, ok)

    rig.engine.backups.post = recorded  # type: ignore[method-assign]
    for seq in range(1, 6):
        rig.engine.backup(seq, [slots_of(seq)], host_pages(0))
    gate.set()
    rig.engine.drain()
    assert seen == [1, 2, 3, 4, 5]
    rig.engine.load(1, host_pages(0), [slots_of(9)])
    rig.engine.drain()
    assert torch.equal(rig.rows([9]), rig.rows([5])), "the last of five copies to one page came last"


def test_directions_do_not_wait_for_each_other(rig: Rig) -> None:
    rig.hold("_to_host")
    rig.engine.backup(1, [slots_of(1)], host_pages(0))
    rig.engine.load(1, host_pages(1), [slots_of(2)])
    LayerCounter(LAYERS, rig.engine.signal).events[1].wait(LAYERS - 1)
    assert rig.engine.backups.done() == 0


def test_the_slots_of_a_job_are_those_of_its_call(rig: Rig) -> None:
    """The tree splits nodes while a copy waits its turn: the caller's list may change."""
    gate = rig.hold("_to_host")
    slots = [slots_of(1)]
    rig.engine.backup(1, list(slots), host_pages(0))
    slots[0] = slots_of(2)
    gate.set()
    rig.engine.drain()
    rig.engine.load(1, host_pages(0), [slots_of(9)])
    rig.engine.drain()
    assert torch.equal(rig.rows([9]), rig.rows([1]))


def test_attention_waits_for_each_layer(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer can be read as soon as it is there, while the next ones are still on their way."""
    from hicache_ext.transfer import engine

    expected = rig.rows([1])
    rig.engine.backup(1, [slots_of(1)], host_pages(0))
    rig.engine.drain()
    go = [threading.Event() for _ in range(LAYERS)]
    real = engine.scatter_layer

    def gated(kv, source, pages, slots, layer) -> None:
        assert go[layer].wait(30)
        real(kv, source, pages, slots, layer)

    monkeypatch.setattr(engine, "scatter_layer", gated)
    counter = LayerCounter(LAYERS, rig.engine.signal)
    rig.engine.load(1, host_pages(0), [slots_of(8)])
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


def test_a_failing_backup_is_posted_as_failed_and_the_next_one_runs(rig: Rig) -> None:
    rig.engine.backup(1, [slots_of(1)], host_pages(99))
    rig.engine.backup(2, [slots_of(1)], host_pages(0))
    rig.engine.drain()
    assert rig.engine.backups.done() == 2 and rig.engine.backups.first_failure(0) == 1
    assert rig.engine.backups.first_failure(1) is None
    assert rig.engine.bytes_to_host == LAYOUT.page_bytes, "only what was copied counts"


@pytest.mark.parametrize(
    ("pages", "slots"), [([99], [slots_of(1)]), ([0], [torch.arange(1000, 1004)]), ([0], [torch.arange(3)])]
)
def test_a_failing_load_wakes_its_waiters(rig: Rig, pages: list[int], slots: list[torch.Tensor]) -> None:
    """Never a hang, never tokens computed from what did not arrive."""
    gate = rig.hold("_to_device")
    rig.engine.load(1, host_pages(*pages), slots)
    counter = LayerCounter(LAYERS, rig.engine.signal)
    counter.set_consumer(1)
    errors: list[BaseException] = []

    def attention() -> None:
        try:
            counter.wait_until(0)
        except LoadFailed as error:
            errors.append(error)

    thread = threading.Thread(target=attention, daemon=True)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive(), "it did not wait"
    gate.set()
    thread.join(10)
    assert not thread.is_alive() and len(errors) == 1
    rig.engine.drain()
    assert rig.engine.loads.done() == 1 and rig.engine.loads.first_failure(0) == 1
    assert rig.engine.bytes_to_device == 0


def test_drain_waits_for_everything_submitted(rig: Rig) -> None:
    gate = rig.hold("_to_host")
    for seq in range(1, 4):
        rig.engine.backup(seq, [slots_of(seq)], host_pages(seq))
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
    rig.engine.backup(1, [slots_of(1)], host_pages(0))
    rig.engine.close()
    assert rig.engine.backups.done() == 1, "what was submitted before is still done"
    assert not any(t.name.startswith("hicache-ext") and t.is_alive() for t in threading.enumerate())
    rig.engine.drain()
    rig.engine.close()


def test_workers_do_not_keep_the_process_alive(rig: Rig) -> None:
    workers = [t for t in threading.enumerate() if t.name.startswith("hicache-ext")]
    assert len(workers) == 2 and all(t.daemon for t in workers)
