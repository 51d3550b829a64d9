"""Waiting for a load layer by layer."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

pytest.importorskip("torch")

from hicache_ext.transfer.layers import LayerCounter, ThreadSignal


class Waiter:
    """A thread that waits for a layer, as attention does."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self.returned = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(wait,), daemon=True)
        self._thread.start()

    def _run(self, wait: Callable[[], None]) -> None:
        try:
            wait()
        except BaseException as error:
            self.error = error
        self.returned.set()

    def still_waits(self) -> bool:
        return not self.returned.wait(0.1)

    def returns(self) -> bool:
        return self.returned.wait(10)


class Recorder:
    def __init__(self) -> None:
        self.waits: list[tuple[int, int]] = []

    def wait(self, load: int, layer: int) -> None:
        self.waits.append((load, layer))


def test_a_wait_returns_when_its_layer_is_there_and_not_before() -> None:
    signal = ThreadSignal()
    waiter = Waiter(lambda: signal.wait(2, 1))
    for load, layer in ((1, 0), (1, 5), (2, 0)):
        signal.advance(load, layer)
        assert waiter.still_waits(), (load, layer)
    signal.advance(2, 1)
    assert waiter.returns() and waiter.error is None


def test_what_has_passed_needs_no_wait() -> None:
    signal = ThreadSignal()
    signal.advance(3, 2)
    for load, layer in ((3, 2), (3, 0), (2, 9), (1, 0)):
        signal.wait(load, layer)


def test_the_last_layer_of_a_load_wakes_all_who_wait_for_it() -> None:
    """A load that cannot go on says that all of it is there: attention never hangs and never raises."""
    signal = ThreadSignal()
    waiters = [Waiter(lambda layer=layer: signal.wait(1, layer)) for layer in range(4)]  # type: ignore[misc]
    signal.advance(1, 0)
    assert waiters[0].returns() and all(w.still_waits() for w in waiters[1:])
    signal.advance(1, 3)
    assert all(w.returns() and w.error is None for w in waiters)


def test_a_later_load_includes_all_before() -> None:
    """Loads are first in, first out."""
    signal = ThreadSignal()
    waiter = Waiter(lambda: signal.wait(1, 3))
    signal.advance(1, 2)
    assert waiter.still_waits()
    signal.advance(2, 0)
    assert waiter.returns() and waiter.error is None


# The counter that SGLang's attention asks


def test_without_a_consumer_nothing_waits() -> None:
    signal = Recorder()
    counter = LayerCounter(4, signal)
    assert counter.consumer_index == -1
    counter.wait_until(3)
    counter.set_consumer(-1)
    counter.wait_until(0)
    assert signal.waits == []


def test_the_consumer_waits_for_its_load() -> None:
    signal = Recorder()
    counter = LayerCounter(4, signal)
    counter.set_consumer(7)
    counter.wait_until(0)
    counter.wait_until(3)
    assert signal.waits == [(7, 0), (7, 3)] and counter.consumer_index == 7
    counter.set_consumer(0)
    counter.wait_until(1)
    assert signal.waits[2:] == [(0, 1)], "only -1 waits for nothing"


def test_reset_forgets_the_consumer() -> None:
    signal = Recorder()
    counter = LayerCounter(4, signal)
    counter.set_consumer(7)
    counter.reset()
    counter.wait_until(0)
    assert signal.waits == [] and counter.consumer_index == -1


def test_events_are_found_by_load_as_the_graph_runner_does() -> None:
    """SGLang waits for the last layer before it replays a prefill graph."""
    signal = Recorder()
    counter = LayerCounter(4, signal)
    counter.set_consumer(5)
    counter.events[counter.consumer_index].wait(counter.num_layers - 1)
    assert signal.waits == [(5, 3)]
    with pytest.raises(NotImplementedError, match="wait for the last layer"):
        _ = counter.events[5].finish_event
