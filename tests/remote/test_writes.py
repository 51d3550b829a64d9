"""Writes give way: to fetches, and to everything else for a share of the time."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from hicache_ext.remote import writes
from hicache_ext.remote.engine import RemoteSettings
from hicache_ext.stores.base import Key, Outcome, Rows
from tests.remote.conftest import MakeRig
from tests.remote.moody import Around, Stuck
from tests.remote.rig import GROUPS, SharedMemoryStore, eventually, labels_of, layout_of, prompt, result


class Timed(Around):
    """Puts take a while; says when they began and ended."""

    def __init__(self) -> None:
        super().__init__(SharedMemoryStore())
        self.times: list[tuple[float, float]] = []

    def put(self, keys: Sequence[Key], rows: Rows, deadline: float, *, hot: bool = False) -> Outcome:
        begin = time.monotonic()
        time.sleep(0.02)
        outcome = super().put(keys, rows, deadline, hot=hot)
        self.times.append((begin, time.monotonic()))
        return outcome


def test_a_busy_writer_rests_for_its_share(rig_of: MakeRig) -> None:
    store = Timed()
    rig = rig_of(store, settings=RemoteSettings(probe=False, write_share=0.25))
    labels = labels_of(prompt(*range(4)))
    rig.compute(labels, range(4))
    seqs = [rig.write([i], labels[i : i + 1]) for i in range(4)]
    assert [result(rig.engine.written, seq) for seq in seqs] == [1] * 4
    for (begin, end), (after, _) in zip(store.times, store.times[1:], strict=False):
        # The rest is counted from within the engine's call, which is a little longer than the store's.
        assert after - end >= 3 * (end - begin)


def test_a_write_that_rests_ends_when_the_stores_are_detached(rig_of: MakeRig) -> None:
    """The host pages must not stay locked for as long as it would have rested, here 20 s."""
    store = Timed()
    rig = rig_of(store, settings=RemoteSettings(probe=False, write_share=0.001))
    labels = labels_of(prompt(1, 2))
    rig.compute(labels, [0, 1])
    assert result(rig.engine.written, rig.write([0], labels[:1])) == 1
    resting = rig.write([1], labels[1:])
    rig.engine.attach(False)
    assert result(rig.engine.written, resting, seconds=5.0) == 0
    assert len(store.times) == 1


def test_a_write_waits_for_fetches_but_not_for_ever(rig_of: MakeRig) -> None:
    store = Stuck(SharedMemoryStore())
    rig = rig_of(store)
    labels = rig.store(prompt(1, 2))
    seq, _ = rig.found(prompt(1, 2))
    store.calls = {"get"}
    rig.fetch(seq, [10, 11], labels)
    assert eventually(lambda: store.waiting > 0)
    new = labels_of(prompt(5))
    rig.compute(new, [12])
    begin = time.monotonic()
    write = rig.write([12], new)
    assert result(rig.engine.written, write) == 1
    assert time.monotonic() - begin >= 1.0
    store.free()
    rig.engine.end(seq)
    assert result(rig.engine.settled, 1) == 0
    begin = time.monotonic()
    rig.store(prompt(6), [13])
    assert time.monotonic() - begin < 1.0


def test_a_writer_that_is_stuck_is_replaced(rig_of: MakeRig) -> None:
    store = Stuck(SharedMemoryStore())
    rig = rig_of(store, settings=RemoteSettings(probe=False, write_timeout=0.05, write_share=1.0))
    labels = labels_of(prompt(1, 2))
    rig.compute(labels, [0, 1])
    store.calls = {"put"}
    first = rig.write([0], labels[:1])
    assert eventually(lambda: store.waiting > 0)
    store.calls = set()
    rig.write([1], labels[1:])
    inner = store.inner
    assert isinstance(inner, SharedMemoryStore)
    assert eventually(lambda: len(inner._objects) == GROUPS)
    assert rig.engine.written.done() == first - 1
    store.free()
    assert result(rig.engine.written, first + 1) == 1


def test_an_idle_engine_sleeps(rig_of: MakeRig) -> None:
    """No thread may spin while nothing is to be done."""
    rig = rig_of(SharedMemoryStore(), settings=RemoteSettings(probe=False))
    rig.store(prompt(1))
    before = threading.active_count(), time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before[1] < 0.2
    assert threading.active_count() <= before[0]


def test_a_store_too_slow_to_fetch_from_is_written_to_seldom(rig_of: MakeRig) -> None:
    store = Timed()
    settings = RemoteSettings(probe=False, write_share=1.0, slow_write_share=0.1)
    rig = rig_of(store, settings=settings)
    rig.planner.worth = False
    labels = labels_of(prompt(*range(3)))
    rig.compute(labels, range(3))
    seqs = [rig.write([i], labels[i : i + 1]) for i in range(2)]
    assert [result(rig.engine.written, seq) for seq in seqs] == [1] * 2
    (begin, end), (after, _) = store.times[-2:]
    assert after - end >= 9 * (end - begin)
    rig.planner.worth = True
    assert result(rig.engine.written, rig.write([2], labels[2:])) == 1


@pytest.mark.parametrize(("worth", "calls"), [(True, 1), (False, 3)])
def test_a_store_too_slow_to_fetch_from_is_written_to_in_short_calls(
    rig_of: MakeRig, monkeypatch: pytest.MonkeyPatch, worth: bool, calls: int
) -> None:
    monkeypatch.setattr(writes, "_SLOW_CALL_BYTES", 2 * layout_of().page_bytes)
    store = Timed()
    rig = rig_of(store, settings=RemoteSettings(probe=False, write_share=1.0, slow_write_share=1.0))
    rig.planner.worth = worth
    labels = labels_of(prompt(*range(5)))
    rig.compute(labels, range(5))
    before = len(store.times)
    assert result(rig.engine.written, rig.write(range(5), labels)) == 5
    assert len(store.times) - before == calls
