"""The circuit breaker by a clock that the tests turn, and around a store that fails on request."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest

from hicache_ext.stores.base import Key, Outcome, Rows, nothing
from hicache_ext.stores.breaker import BreakerSettings, CircuitBreaker, GuardedStore, State
from hicache_ext.stores.memory import MemoryStore
from tests.stores.util import aligned_buffer, fill, key, soon

SETTINGS = BreakerSettings(failures=3, pause=1.0, max_pause=4.0)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> CircuitBreaker:
    return CircuitBreaker(SETTINGS, clock)


def trip(breaker: CircuitBreaker) -> None:
    for _ in range(SETTINGS.failures):
        breaker.failed()


def test_opens_after_failures_in_a_row_only(breaker: CircuitBreaker) -> None:
    assert not breaker.failed()
    assert not breaker.failed()
    breaker.answered()
    assert not breaker.failed()
    assert not breaker.failed()
    assert breaker.state is State.CLOSED
    assert breaker.failed()
    assert breaker.state is State.OPEN
    assert breaker.opened == 1


def test_no_probe_before_its_time(breaker: CircuitBreaker, clock: Clock) -> None:
    assert breaker.seconds_to_probe() is None
    assert not breaker.start_probe()
    trip(breaker)
    assert breaker.seconds_to_probe() == 1.0
    clock.now += 0.99
    assert not breaker.start_probe()
    clock.now += 0.01
    assert breaker.start_probe()
    assert breaker.state is State.HALF_OPEN


def test_one_probe_at_a_time(breaker: CircuitBreaker, clock: Clock) -> None:
    trip(breaker)
    clock.now += 1
    assert breaker.start_probe()
    assert not breaker.start_probe()
    assert breaker.seconds_to_probe() is None


def test_an_answer_closes_and_the_count_starts_again(breaker: CircuitBreaker, clock: Clock) -> None:
    trip(breaker)
    clock.now += 1
    breaker.start_probe()
    breaker.probed(True)
    assert breaker.state is State.CLOSED
    assert not breaker.failed()
    assert not breaker.failed()
    assert breaker.failed()
    assert breaker.seconds_to_probe() == 1.0


def test_pauses_double_up_to_the_limit(breaker: CircuitBreaker, clock: Clock) -> None:
    trip(breaker)
    pauses = []
    for _ in range(5):
        pause = breaker.seconds_to_probe()
        assert pause is not None
        pauses.append(pause)
        clock.now += pause
        assert breaker.start_probe()
        breaker.probed(False)
        assert breaker.state is State.OPEN
    assert pauses == [1.0, 2.0, 4.0, 4.0, 4.0]


def test_late_results_of_calls_from_before_do_not_count(breaker: CircuitBreaker, clock: Clock) -> None:
    trip(breaker)
    breaker.answered()
    assert breaker.state is State.OPEN
    assert not breaker.failed()
    clock.now += 1
    breaker.start_probe()
    breaker.answered()
    breaker.failed()
    assert breaker.state is State.HALF_OPEN
    breaker.probed(True)
    breaker.probed(False)
    assert breaker.state is State.CLOSED


class FailingStore(MemoryStore):
    """A memory store that stops answering, or raises, when told to."""

    down = False
    broken = False
    calls = 0
    pings = 0

    def get(self, keys: Sequence[Key], rows: Rows, deadline: float) -> Outcome:
        self.calls += 1
        if self.broken:
            raise RuntimeError("a fault in the store")
        return nothing(len(keys), down=True) if self.down else super().get(keys, rows, deadline)

    def clear(self, namespace: bytes, below_epoch: int, deadline: float) -> bool:
        return not self.down

    def ping(self, deadline: float) -> bool:
        self.pings += 1
        if self.broken:
            raise RuntimeError("a fault in the store")
        return not self.down


def guarded(clock: Clock | None = None) -> tuple[GuardedStore, FailingStore]:
    inner = FailingStore(512, 100)
    breaker = CircuitBreaker(SETTINGS, clock) if clock else CircuitBreaker(BreakerSettings(pause=0.02))
    store = GuardedStore(inner, "memory", breaker, probing=clock is None)
    buffer = aligned_buffer(4, 512)
    store.register(buffer)
    store.put([key(1)], fill(buffer, [1]), soon())
    return store, inner


def test_kind_backend_down_costs_three_calls_then_none(clock: Clock) -> None:
    store, inner = guarded(clock)
    assert store.get([key(1)], [1], soon()).ok.all()
    inner.down = True
    for _ in range(10):
        outcome = store.get([key(1)], [1], soon())
        assert outcome.down and not outcome.ok.any() and not outcome.held.any()
    assert inner.calls == 1 + SETTINGS.failures
    assert store.stats().state == "open"
    inner.down = False
    store.probe()
    assert inner.pings == 0
    clock.now += 1
    store.probe()
    assert store.get([key(1)], [1], soon()).ok.all()
    assert store.stats().state == "closed"
    assert store.stats().opened == 1


def test_kind_backend_down_exceptions_are_misses_and_hold_the_rows(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    store, inner = guarded(clock)
    inner.broken = True
    outcome = store.get([key(1), key(2)], [1, 2], soon())
    assert outcome.down and not outcome.ok.any()
    assert outcome.held.all()
    assert "a fault in the store" in caplog.text
    store.get([key(1)], [1], soon())
    store.get([key(1)], [1], soon())
    clock.now += 1
    store.probe()
    assert store.breaker.state is State.OPEN


def test_an_unanswered_clear_counts(clock: Clock) -> None:
    store, inner = guarded(clock)
    inner.down = True
    for _ in range(SETTINGS.failures):
        assert not store.clear(key(1).namespace, 2, soon())
    assert store.breaker.state is State.OPEN


def test_misses_do_not_open(clock: Clock) -> None:
    store, _ = guarded(clock)
    for _ in range(10):
        assert not store.get([key(99)], [1], soon()).ok.any()
    assert store.breaker.state is State.CLOSED


def test_the_background_probe_brings_the_store_back() -> None:
    store, inner = guarded()
    inner.down = True
    for _ in range(3):
        store.get([key(1)], [1], soon())
    assert store.breaker.state is not State.CLOSED
    end = soon()
    while inner.pings < 2 and time.monotonic() < end:
        time.sleep(0.01)
    assert store.breaker.state is not State.CLOSED
    inner.down = False
    while store.breaker.state is not State.CLOSED and time.monotonic() < end:
        time.sleep(0.01)
    assert store.get([key(1)], [1], soon()).ok.all()
    store.close()
    assert not any(t.name == "probe memory" for t in threading.enumerate())


def test_a_call_without_time_says_nothing_about_the_store(clock: Clock) -> None:
    store, inner = guarded(clock)
    inner.down = True
    for _ in range(10):
        assert store.get([key(1)], [1], soon(0.05)).down
        assert not store.get([key(1)], [1], soon(-1)).ok.any()
    assert inner.calls == 10, "a call that is late already must not reach the store"
    assert store.breaker.state is State.CLOSED
    for _ in range(SETTINGS.failures):
        store.get([key(1)], [1], soon())
    assert store.breaker.state is State.OPEN


def test_outcomes_pass_unchanged(clock: Clock) -> None:
    store, _ = guarded(clock)
    outcome = store.get([key(1), key(2)], [1, 2], soon())
    assert np.array_equal(outcome.ok, [True, False])
    assert not outcome.down
