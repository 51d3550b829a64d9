"""Several stores as one: the order, outages, and rows that one of them holds."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest

from hicache_ext.stores.base import Key, Outcome, Rows, StoreError, StoreStats, nothing
from hicache_ext.stores.breaker import GuardedStore
from hicache_ext.stores.memory import MemoryStore
from hicache_ext.stores.several import HeldRows
from hicache_ext.stores.stack import StackedStore
from tests.stores.util import aligned_buffer, content, fill, key, soon

SIZE = 1024
ROWS = 16


class Scripted(MemoryStore):
    """Down, slow, raising, or with its transfers late, as told."""

    def __init__(self) -> None:
        super().__init__(SIZE, 64)
        self.down = False
        self.raises = False
        self.late = False
        self.sleep = 0.0
        self.asked: list[tuple[str, int]] = []
        self.free: list[int] = []
        self.holding = 0

    def exists(self, keys: Sequence[Key], deadline: float) -> Outcome:
        self.asked.append(("exists", len(keys)))
        return nothing(len(keys), down=True) if self.down else super().exists(keys, deadline)

    def get(self, keys: Sequence[Key], rows: Rows, deadline: float) -> Outcome:
        self.asked.append(("get", len(keys)))
        return self._as_told(super().get(keys, rows, deadline))

    def put(self, keys: Sequence[Key], rows: Rows, deadline: float, *, hot: bool = False) -> Outcome:
        self.asked.append(("put", len(keys)))
        time.sleep(self.sleep)
        if self.down or self.late:
            return self._as_told(nothing(len(keys)))
        return self._as_told(super().put(keys, rows, deadline, hot=hot))

    def released(self) -> list[int]:
        free, self.free = self.free, []
        self.holding -= len(free)
        return free

    def stats(self) -> StoreStats:
        stats = super().stats()
        stats.held = self.holding
        return stats

    def _as_told(self, outcome: Outcome) -> Outcome:
        if self.raises:
            raise RuntimeError("as told")
        if self.late:
            outcome.ok[:] = False
            outcome.held[:] = True
            self.holding += len(outcome.held)
        return Outcome(outcome.ok & (not self.down), outcome.held, self.down)


@pytest.fixture
def buffer() -> np.ndarray:
    return aligned_buffer(ROWS, SIZE)


def stack_of(buffer: np.ndarray, *stores: Scripted, **options: object) -> StackedStore:
    stack = StackedStore(stores, **options)  # type: ignore[arg-type]
    stack.register(buffer)
    return stack


def load(store: MemoryStore, buffer: np.ndarray, *numbers: int) -> None:
    rows = fill(buffer, list(numbers))
    MemoryStore.put(store, [key(n) for n in numbers], rows, soon())
    buffer[:] = 0


def test_the_nearest_that_has_an_object_is_read(buffer: np.ndarray) -> None:
    near, far = Scripted(), Scripted()
    stack = stack_of(buffer, near, far)
    load(near, buffer, 1, 3)
    load(far, buffer, 1, 2, 3)
    keys = [key(n) for n in (1, 2, 3, 4)]
    assert stack.exists(keys, soon()).ok.tolist() == [True, True, True, False]
    outcome = stack.get(keys, [5, 6, 7, 8], soon())
    assert outcome.ok.tolist() == [True, True, True, False]
    assert not outcome.down
    for row, number in ((5, 1), (6, 2), (7, 3)):
        assert np.array_equal(buffer[row], content(number, SIZE))
    assert near.asked == [("exists", 4), ("get", 4)]
    assert far.asked == [("exists", 2), ("get", 2)]


def test_the_far_store_is_not_asked_for_what_the_near_one_has(buffer: np.ndarray) -> None:
    near, far = Scripted(), Scripted()
    stack = stack_of(buffer, near, far)
    load(near, buffer, 1, 2)
    assert stack.get([key(1), key(2)], [0, 1], soon()).ok.all()
    assert far.asked == []


def test_a_put_goes_to_all_that_are_written_to(buffer: np.ndarray) -> None:
    stores = [Scripted() for _ in range(3)]
    stack = stack_of(buffer, *stores, writes=[True, False, True])
    rows = fill(buffer, [1, 2])
    assert stack.put([key(1), key(2)], rows, soon()).ok.all()
    assert [store.exists([key(1), key(2)], soon()).ok.sum() for store in stores] == [2, 0, 2]
    assert stack.writing
    assert not stack_of(buffer, Scripted(), writes=[False]).writing


def test_one_that_stores_is_enough(buffer: np.ndarray) -> None:
    near, far = Scripted(), Scripted()
    near.down = True
    stack = stack_of(buffer, near, far)
    outcome = stack.put([key(1)], fill(buffer, [1]), soon())
    assert outcome.ok.all() and not outcome.down
    far.down = True
    outcome = stack.put([key(2)], fill(buffer, [2]), soon())
    assert not outcome.ok.any() and outcome.down
    assert stack.get([key(1)], [3], soon()).down
    far.down = False
    assert stack.get([key(1)], [3], soon()).ok.all()
    assert stack.exists([key(1)], soon()).ok.all()


def test_a_slow_store_does_not_hold_the_others_up(buffer: np.ndarray) -> None:
    """Puts go side by side: the second store has the object long before the first returns."""
    near, far = Scripted(), Scripted()
    gate = threading.Event()
    put = near.put
    near.put = lambda *a, **k: (gate.wait(10), put(*a, **k))[1]  # type: ignore[method-assign]
    stack = stack_of(buffer, near, far)
    rows = fill(buffer, [1])
    outcome = stack.put([key(1)], rows, time.monotonic() + 0.2)
    # The first has not returned by the deadline, so the row may still be read.
    assert outcome.ok.all() and outcome.held.all()
    assert stack.released() == [] and stack.held_among(rows)
    gate.set()
    end = soon()
    while not (free := stack.released()):
        assert time.monotonic() < end
    assert free == rows
    assert not stack.held_among(rows)


def test_a_row_is_free_when_no_store_holds_it(buffer: np.ndarray) -> None:
    near, far = Scripted(), Scripted()
    near.late = far.late = True
    stack = stack_of(buffer, near, far)
    assert stack.put([key(1), key(2)], fill(buffer, [1, 2]), soon()).held.all()
    near.free = [0, 1]
    assert stack.released() == []
    far.free = [1]
    assert stack.released() == [1]
    assert stack.held_among([0]) and not stack.held_among([1])
    far.free = [0]
    assert stack.released() == [0]
    assert stack.released() == []


def test_a_held_row_is_given_to_no_other_store(buffer: np.ndarray) -> None:
    near, far = Scripted(), Scripted()
    load(far, buffer, 1)
    near.late = True
    stack = stack_of(buffer, near, far)
    outcome = stack.get([key(1)], [4], soon())
    assert outcome.held.all() and not outcome.ok.any()
    assert far.asked == []


def test_a_row_that_is_free_before_its_call_returns_is_released_all_the_same() -> None:
    held = HeldRows(2)
    held.gave(0, [7])
    held.took(1, [7])
    held.took(0, [7])
    held.report([7])
    assert held.released() == [] and held.among([7])
    held.gave(1, [7])
    assert held.released() == [7] and not held.among([7])


def test_rows_of_a_call_that_failed_are_free_when_the_store_is_long_quiet(buffer: np.ndarray) -> None:
    near = Scripted()
    guarded = GuardedStore(near, "near", probing=False)
    stack = StackedStore([guarded], orphan_s=0.2)
    stack.register(buffer)
    near.raises = True
    begin = time.monotonic()
    assert stack.get([key(1)], [4], soon()).held.all()
    near.holding = 1
    assert stack.released() == []
    time.sleep(0.3)
    # It holds another row by its own count, so nobody knows.
    assert stack.released() == []
    near.holding = 0
    end = soon()
    while not (free := stack.released()):
        assert time.monotonic() < end
    assert free == [4]
    assert time.monotonic() - begin > 0.5


def test_a_store_that_is_not_usable_is_passed_over(buffer: np.ndarray) -> None:
    near, far = Scripted(), Scripted()
    usable = {1}
    stack = stack_of(buffer, near, far, usable=lambda index: index in usable)
    assert stack.put([key(1)], fill(buffer, [1]), soon()).ok.all()
    assert stack.get([key(1)], [2], soon()).ok.all()
    assert near.asked == []
    usable.clear()
    assert stack.exists([key(1)], soon()).down
    assert stack.put([key(1)], [0], soon()).down
    assert stack.put_to([0], [key(1)], [2], soon()).ok.all()


def test_remove_and_clear_reach_all(buffer: np.ndarray) -> None:
    near, far = Scripted(), Scripted()
    stack = stack_of(buffer, near, far)
    load(near, buffer, 1, 2)
    load(far, buffer, 1, 2)
    assert stack.remove([key(1)], soon()).ok.all()
    assert stack.exists([key(1), key(2)], soon()).ok.tolist() == [False, True]
    assert stack.clear(key(2).namespace, 2, soon())
    assert not stack.exists([key(2)], soon()).ok.any()
    assert stack.stats().removed == 4
    assert stack.stores[0].stats().removed == 2
    assert stack.ping(soon())


def test_object_sizes_must_agree() -> None:
    with pytest.raises(StoreError, match="objects of one size"):
        StackedStore([MemoryStore(512, 4), MemoryStore(1024, 4)])
    with pytest.raises(StoreError, match="not none"):
        StackedStore([])
