"""Lookups, fetches and writes of one engine on a store that works."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hicache_ext.core.epochs import MARK_GROUP
from hicache_ext.core.header import Integrity, Labels
from hicache_ext.core.planner import Planner, PlanSettings
from hicache_ext.core.policy.costs import CostModel
from hicache_ext.core.remote import Query, Remote
from hicache_ext.core.speeds import Speeds
from hicache_ext.remote.engine import RemoteEngine, RemoteSettings
from hicache_ext.remote.planning import STORE
from hicache_ext.stores.base import Key, Outcome, Rows
from tests.remote.conftest import MakeRig
from tests.remote.moody import Around
from tests.remote.rig import (
    GROUPS,
    NAMESPACE,
    PAGE,
    PARENT,
    EagerPlanner,
    Planned,
    SharedMemoryStore,
    eventually,
    labels_of,
    layout_of,
    prompt,
    result,
)


class SlowReads(Around):
    """A page takes so long to come."""

    def __init__(self, seconds: float) -> None:
        super().__init__(SharedMemoryStore())
        self.seconds = seconds

    def get(self, keys: Sequence[Key], rows: Rows, deadline: float) -> Outcome:
        time.sleep(self.seconds * len(keys) / GROUPS)
        return super().get(keys, rows, deadline)


def as_remote(engine: RemoteEngine) -> Remote:
    """For the type checker."""
    return engine


def test_what_was_written_comes_back_into_other_pages(rig_of: MakeRig) -> None:
    rig = rig_of(SharedMemoryStore())
    labels = rig.store(prompt(1, 2, 3, 4, 5, 6, 7))
    seq, pages = rig.found(prompt(1, 2, 3, 4, 5, 6, 7, 8))
    assert pages == 7
    assert np.array_equal(rig.engine.identities(seq), labels.identities)
    into = [20, 21, 22, 9, 30, 14, 15]
    window = rig.fetch(seq, into, labels)
    assert result(rig.engine.arrivals, window) == 7
    assert result(rig.engine.settled, window) == 0
    assert rig.holds(into, labels)
    rig.engine.end(seq)
    assert rig.planner.plans[-1].ended == 7
    assert rig.planner.running == 0
    assert rig.planner.nbytes == 7 * rig.layout.page_bytes
    stats = rig.engine.stats()
    assert (stats.lookups, stats.pages_found, stats.pages_planned) == (1, 7, 7)
    assert (stats.pages_written, stats.pages_fetched, stats.write_failures) == (7, 7, 0)


def test_windows_one_after_the_other(rig_of: MakeRig) -> None:
    rig = rig_of(SharedMemoryStore())
    labels = rig.store(prompt(*range(10)))
    seq, pages = rig.found(prompt(*range(10)))
    assert pages == 10
    for start in (0, 4, 8):
        part = labels[start : start + 4]
        window = rig.fetch(seq, list(range(16, 16 + len(part))), part)
        assert result(rig.engine.arrivals, window) == len(part)
        assert rig.holds(range(16, 16 + len(part)), part)
        assert rig.planner.plans[-1].ended == (10 if start == 8 else None)
    rig.engine.end(seq)


def test_a_lookup_finds_the_leading_run_of_whole_pages(rig_of: MakeRig) -> None:
    store = SharedMemoryStore()
    rig = rig_of(store)
    tokens = prompt(*range(6))
    rig.store(tokens)
    gone = next(key for key in store._objects if key.identity == labels_of(tokens).identities[3].tobytes())
    del store._objects[gone]
    assert rig.found(tokens)[1] == 3
    assert rig.found(prompt(9, 1, 2))[1] == 0
    assert rig.found(tokens, epoch=1)[1] == 0
    assert rig.found(tokens[:3])[1] == 0


def test_a_long_prompt_is_looked_up_in_parts(rig_of: MakeRig) -> None:
    rig = rig_of(SharedMemoryStore())
    tokens = prompt(*range(200))
    whole = labels_of(tokens)
    for start in range(0, 180, 20):
        rig.compute(whole[start : start + 20], range(20))
        result(rig.engine.written, rig.write(range(20), whole[start : start + 20]))
    seq, pages = rig.found(tokens)
    assert pages == 180
    assert np.array_equal(rig.engine.identities(seq), whole.identities[:180])


@pytest.mark.parametrize("skip", [1, 31, 32, 33, 100])
def test_skipped_pages_are_hashed_and_not_looked_for(rig_of: MakeRig, skip: int) -> None:
    store = SharedMemoryStore()
    rig = rig_of(store)
    tokens = prompt(*range(skip + 5))
    labels = labels_of(tokens)[skip:]
    rig.compute(labels, range(5))
    result(rig.engine.written, rig.write(range(5), labels))
    seq, pages = rig.found(np.concatenate([tokens, prompt(7)]), skip=skip)
    assert pages == 5
    assert np.array_equal(rig.engine.identities(seq), labels.identities)
    # Two pages were computed meanwhile, so the first window begins later.
    window = rig.fetch(seq, [8, 9, 10], labels[2:])
    assert result(rig.engine.arrivals, window) == 3
    assert rig.planner.plans[-1].ended == 5
    assert rig.found(tokens[: skip * 4], skip=skip)[1] == 0


def test_the_real_planner(rig_of: MakeRig) -> None:
    """A store of unknown speed is measured first; then requests wait for it."""
    layout = layout_of()
    # A prefill of a second a page, so that any store is worth it.
    speeds = Speeds(CostModel(token=1 / 4, depth=0.0), [STORE])
    settings = PlanSettings(max_loss=5.0, max_lookup=5.0, credit=5.0, grace=5.0)
    planner = Planner(speeds, layout.page_size, layout.page_bytes, settings)
    rig = rig_of(SharedMemoryStore(), planner=planner)
    labels = rig.store(prompt(*range(9)))
    assert rig.found(prompt(*range(9)))[1] == 0
    assert eventually(lambda: speeds.measured.stores[STORE].known)
    assert eventually(lambda: planner.honesty().trials == 1)
    seq, pages = rig.found(prompt(*range(9)))
    assert pages == 9
    for part in (slice(0, 4), slice(4, 9)):
        window = rig.fetch(seq, range(20 + part.start, 20 + part.stop), labels[part])
        assert result(rig.engine.arrivals, window) == part.stop - part.start
    rig.engine.end(seq)
    assert rig.holds(range(20, 29), labels)
    honesty = planner.honesty()
    assert (honesty.whole, honesty.abandoned, honesty.pages_arrived) == (2, 0, 9 + 3)


def test_a_page_that_is_there_counts_as_written(rig_of: MakeRig) -> None:
    store = SharedMemoryStore()
    rig = rig_of(store)
    rig.store(prompt(1, 2))
    rig.store(prompt(1, 2, 3))
    assert store.stats().stored == 3 * GROUPS + 0


def test_a_page_without_its_header_is_not_written(rig_of: MakeRig) -> None:
    """A backup that failed leaves such a page on the host."""
    store = SharedMemoryStore()
    rig = rig_of(store)
    labels = labels_of(prompt(1, 2, 3))
    rig.compute(labels, range(3))
    rig.seal.void(rig.pool.buffer[1:2])
    assert result(rig.engine.written, rig.write(range(3), labels)) == 2
    assert rig.found(prompt(1, 2, 3))[1] == 1
    assert rig.engine.stats().write_failures == 1


def test_a_rank_that_does_not_write_says_so_at_once(rig_of: MakeRig) -> None:
    store = SharedMemoryStore()
    rig = rig_of(store, writes=[False])
    seq = rig.write(range(3), labels_of(prompt(1, 2, 3)))
    assert rig.engine.written.done() == seq
    assert rig.engine.written.results(seq - 1, 1) == [3]
    assert not store._objects


def test_a_lookup_that_is_not_worth_it_is_answered_at_once(rig_of: MakeRig) -> None:
    class Busy(EagerPlanner):
        def plan_lookup(self, store: str, start: int, tokens: int, now: float, *, ahead: float):  # type: ignore[no-untyped-def]
            asked = super().plan_lookup(store, start, tokens, now, ahead=ahead)
            asked.ask = False
            asked.deadline = now
            return asked

    rig = rig_of(SharedMemoryStore(), planner=Busy())
    rig.store(prompt(1, 2))
    seq = rig.lookup(prompt(1, 2))
    assert rig.engine.lookups.results(seq - 1, 1) == [0]
    rig.engine.end(seq)
    assert rig.engine.stats().lookups_skipped == 1


def test_a_fetch_that_only_measures_reads_scratch_pages(rig_of: MakeRig) -> None:
    planner = EagerPlanner()
    rig = rig_of(SharedMemoryStore(), planner=planner)
    labels = rig.store(prompt(1, 2, 3, 4, 5))
    before = rig.pool.buffer[: rig.pool.pages].clone()
    planner.wait = False
    seq, pages = rig.found(prompt(1, 2, 3, 4, 5))
    assert pages == 0
    assert eventually(lambda: planner.plans[-1].ended == 3)
    assert planner.nbytes == 3 * rig.layout.page_bytes
    assert (rig.pool.buffer[: rig.pool.pages] == before).all()
    assert rig.holds([rig.pool.pages + 1, rig.pool.pages + 2, rig.pool.pages + 3], labels[:3])
    rig.engine.end(seq)


@pytest.mark.parametrize(("seconds", "pages"), [(0.5, 1), (0.0, 3)], ids=["slow", "fast"])
def test_a_slow_store_is_measured_by_one_page(rig_of: MakeRig, seconds: float, pages: int) -> None:
    """Computing a page takes 0.4 s; whoever asks has nothing to wait for, as the speed is not known yet."""
    speeds = Speeds(CostModel(token=0.1, depth=0.0), [STORE])
    planner = Planner(speeds, PAGE, layout_of().page_bytes)
    rig = rig_of(SlowReads(seconds), planner=planner)
    rig.store(prompt(1, 2, 3, 4, 5))
    seq, found = rig.found(prompt(1, 2, 3, 4, 5))
    assert found == 0
    assert eventually(lambda: planner.honesty().trials == 1)
    rig.engine.end(seq)
    assert rig.engine.stats().trial_pages == pages
    assert planner.useful(STORE, time.monotonic())


class CountingLookups(Around):
    """Pages that it was asked for, a number a call."""

    def __init__(self) -> None:
        super().__init__(SharedMemoryStore())
        self.asked: list[int] = []

    def exists(self, keys: Sequence[Key], deadline: float) -> Outcome:
        if keys[0].group != MARK_GROUP:
            self.asked.append(len(keys) // GROUPS)
        return super().exists(keys, deadline)


@pytest.mark.parametrize("pages", [2, 60])
def test_a_lookup_that_nobody_waits_for_asks_for_no_more_than_a_trial_reads(
    rig_of: MakeRig, pages: int
) -> None:
    store = CountingLookups()
    planner = EagerPlanner(lookup_s=0.0)
    planner.wait = False
    rig = rig_of(store, planner=planner)
    tokens = prompt(*range(pages))
    rig.store(tokens[: 10 * PAGE])
    seq, found = rig.found(tokens)
    assert found == 0
    assert eventually(lambda: bool(planner.plans) and planner.plans[-1].ended is not None)
    scratch = len(rig.pool.buffer) - rig.pool.pages - 1
    assert store.asked == [planner.plans[-1].pages] == [min(pages, scratch)]
    rig.engine.end(seq)


@pytest.mark.parametrize("integrity", list(Integrity))
def test_any_integrity(rig_of: MakeRig, integrity: Integrity) -> None:
    rig = rig_of(SharedMemoryStore(), integrity=integrity)
    labels = rig.store(prompt(1, 2, 3))
    seq, pages = rig.found(prompt(1, 2, 3))
    assert pages == 3
    assert result(rig.engine.arrivals, rig.fetch(seq, [10, 11, 12], labels)) == 3


def test_cancel_and_end_leave_nothing(rig_of: MakeRig) -> None:
    rig = rig_of(SharedMemoryStore())
    labels = rig.store(prompt(1, 2, 3))
    seq, pages = rig.found(prompt(1, 2, 3))
    rig.engine.cancel(seq)
    window = rig.fetch(seq, [10, 11, 12], labels)
    assert rig.engine.arrivals.results(window - 1, 1) == [0]
    assert rig.engine.settled.results(window - 1, 1) == [0]
    rig.engine.end(seq)
    with pytest.raises(KeyError):
        rig.engine.identities(seq)
    assert [plan.ended for plan in rig.planner.plans] == [-1]
    assert pages == 3


def test_nothing_is_asked_before_the_epoch_is_learned(rig_of: MakeRig) -> None:
    rig = rig_of(SharedMemoryStore(), learn=False)
    labels = labels_of(prompt(1))
    rig.compute(labels, [0])
    assert rig.engine.learned() is None
    assert not rig.engine.healthy()
    assert rig.engine.written.results(rig.write([0], labels) - 1, 1) == [0]
    assert rig.engine.lookups.results(rig.lookup(prompt(1)) - 1, 1) == [0]
    rig.engine.use(NAMESPACE, 0)
    assert eventually(lambda: rig.engine.learned() == 0)
    assert rig.engine.healthy()
    rig.store(prompt(1))


class Asked(Around):
    """Knows which calls were about pages; marks of epochs are not."""

    def __init__(self) -> None:
        super().__init__(SharedMemoryStore())
        self.calls: list[str] = []

    def _note(self, call: str, keys: Sequence[Key]) -> None:
        if any(key.group != MARK_GROUP for key in keys):
            self.calls.append(call)

    def exists(self, keys: Sequence[Key], deadline: float) -> Outcome:
        self._note("exists", keys)
        return super().exists(keys, deadline)

    def get(self, keys: Sequence[Key], rows: Rows, deadline: float) -> Outcome:
        self._note("get", keys)
        time.sleep(0.02)
        return super().get(keys, rows, deadline)

    def put(self, keys: Sequence[Key], rows: Rows, deadline: float, *, hot: bool = False) -> Outcome:
        self._note("put", keys)
        return super().put(keys, rows, deadline, hot=hot)


def test_detached_stores_are_asked_for_no_page(rig_of: MakeRig) -> None:
    store = Asked()
    rig = rig_of(store)
    labels = rig.store(prompt(1, 2, 3))
    begun, pages = rig.found(prompt(1, 2, 3))
    rig.engine.attach(False)
    store.calls.clear()
    assert not rig.engine.healthy()
    window = rig.fetch(begun, [10, 11, 12], labels)
    assert rig.engine.arrivals.results(window - 1, 1) == [0]
    assert rig.engine.settled.results(window - 1, 1) == [0]
    rig.engine.end(begun)
    assert rig.found(prompt(1, 2, 3))[1] == 0
    new = labels_of(prompt(7))
    rig.compute(new, [5])
    assert result(rig.engine.written, rig.write([5], new)) == 0
    assert not store.calls
    assert [plan.ended for plan in rig.planner.plans] == [-1], "the store is not to blame"

    rig.engine.attach(True)
    assert rig.engine.healthy()
    seq, pages = rig.found(prompt(1, 2, 3))
    assert pages == 3
    assert result(rig.engine.arrivals, rig.fetch(seq, [10, 11, 12], labels)) == 3
    assert rig.holds([10, 11, 12], labels)
    assert rig.store(prompt(7)) is not None


def test_epochs_are_followed_while_detached(rig_of: MakeRig) -> None:
    """Those of others as well as a flush of this server's own."""
    store = SharedMemoryStore()
    rig, other = rig_of(store), rig_of(SharedMemoryStore(store))
    rig.engine.attach(False)
    other.engine.use(NAMESPACE, 1)
    assert eventually(lambda: rig.engine.learned() == 2)
    rig.engine.use(NAMESPACE, 3)
    assert eventually(lambda: rig.engine.learned() == 4)
    assert not rig.engine.healthy()
    rig.engine.use(NAMESPACE, 4)
    rig.engine.attach(True)
    rig.store(prompt(1), epoch=4)
    assert rig.found(prompt(1), epoch=4)[1] == 1


def test_a_trial_ends_when_the_stores_are_detached(rig_of: MakeRig) -> None:
    store, planner = Asked(), EagerPlanner(window=1)
    rig = rig_of(store, planner=planner)
    rig.store(prompt(1, 2, 3))
    planner.wait = False
    store.calls.clear()
    rig.lookup(prompt(1, 2, 3))
    assert eventually(lambda: "get" in store.calls)
    rig.engine.attach(False)
    assert eventually(lambda: planner.plans[-1].ended is not None)
    assert store.calls == ["exists", "get"] and planner.plans[-1].ended == 1


def test_no_trial_follows_a_lookup_that_the_detaching_overtook(rig_of: MakeRig) -> None:
    class Detaching(EagerPlanner):
        def plan_fetch(self, *args: Any, **options: Any) -> Planned:
            rig.engine.attach(False)
            return super().plan_fetch(*args, **options)

    store, planner = Asked(), Detaching()
    rig = rig_of(store, planner=planner)
    rig.store(prompt(1, 2, 3))
    planner.wait = False
    rig.lookup(prompt(1, 2, 3))
    assert eventually(lambda: bool(planner.plans) and planner.plans[-1].ended == -1)
    assert "get" not in store.calls


def test_stores_that_are_detached_before_their_first_use_are_not_measured(rig_of: MakeRig) -> None:
    store = Asked()
    rig = rig_of(store, settings=RemoteSettings(epoch_interval=0.02), learn=False)
    rig.engine.attach(False)
    rig.engine.use(NAMESPACE, 0)
    assert eventually(lambda: rig.engine.store_states()[0].learned)
    assert rig.engine.learned() == 0 and not store.calls


def test_close_is_quick_and_may_be_repeated(rig_of: MakeRig) -> None:
    rig = rig_of(SharedMemoryStore())
    rig.store(prompt(1))
    begin = time.monotonic()
    rig.engine.close()
    rig.engine.close()
    assert time.monotonic() - begin < 10
    # Later calls do no harm.
    rig.engine.lookup(1, Query(PARENT, prompt(1), 0, 0, NAMESPACE, 0))
    rig.engine.end(1)
    rig.engine.write(2, np.array([0]), Labels(labels_of(prompt(1)).identities, NAMESPACE, 0))
