"""Waiting for a load layer by layer, in the shape that SGLang's attention code expects.

SGLang sets the load a batch depends on (``set_consumer``) before its forward pass and calls
``wait_until(layer)`` before attention reads that layer. Loads are first in, first out, so waiting for one
waits for all before it. Index -1 waits for nothing.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol


class LoadFailed(RuntimeError):
    """The pages this forward pass depends on did not arrive; computing on would give wrong tokens."""


class LayerSignal(Protocol):
    def wait(self, load: int, layer: int) -> None:
        """Make the calling thread or its stream wait for ``layer`` of ``load``."""
        ...


class LayerCounter:
    """Duck type of SGLang's ``LayerDoneCounter``."""

    def __init__(self, num_layers: int, signal: LayerSignal) -> None:
        self.num_layers = num_layers
        self.consumer_index = -1
        self.events = _Events(signal, num_layers)

    def set_consumer(self, index: int) -> None:
        self.consumer_index = index

    def wait_until(self, threshold: int) -> None:
        if self.consumer_index >= 0:
            self.events[self.consumer_index].wait(threshold)

    def reset(self) -> None:
        self.consumer_index = -1


class _Events:
    def __init__(self, signal: LayerSignal, num_layers: int) -> None:
        self._signal = signal
        self._num_layers = num_layers

    def __getitem__(self, load: int) -> _Event:
        return _Event(self._signal, load, self._num_layers)


class _Event:
    def __init__(self, signal: LayerSignal, load: int, num_layers: int) -> None:
        self._signal, self._load, self._num_layers = signal, load, num_layers

    def wait(self, layer: int) -> None:
        self._signal.wait(self._load, layer)

    @property
    def finish_event(self) -> Any:
        raise NotImplementedError("wait for the last layer instead: event.wait(num_layers - 1)")


class ThreadSignal:
    """Progress of a worker thread; ``wait`` blocks the caller."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._reached = (0, 0)

    def advance(self, load: int, layer: int) -> None:
        """``layer`` of ``load`` and everything before is on the device."""
        with self._condition:
            self._reached = (load, layer)
            self._condition.notify_all()

    def wait(self, load: int, layer: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._reached >= (load, layer))
