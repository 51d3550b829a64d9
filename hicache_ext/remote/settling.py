"""Waiting until no store touches some rows any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from hicache_ext.remote.alarms import Alarms
from hicache_ext.stores.stack import StackedStore

_POLL_S = 0.01


class Settling:
    def __init__(self, stack: StackedStore, alarms: Alarms) -> None:
        self._stack = stack
        self._alarms = alarms
        self._lock = threading.Lock()
        self._waiting: list[tuple[set[int], Callable[[], object]]] = []

    def when_free(self, rows: np.ndarray, call: Callable[[], object]) -> None:
        """Once for all calls of these rows that have returned. ``call`` must be short; it may run at once."""
        held = self._stack.held_among(rows.tolist())
        if not held:
            call()
            return
        with self._lock:
            self._waiting.append((held, call))
            if len(self._waiting) == 1:
                self._alarms.at(time.monotonic() + _POLL_S, self._poll)

    def _poll(self) -> None:
        self._stack.released()
        with self._lock:
            free: list[Callable[[], object]] = []
            still = []
            for rows, call in self._waiting:
                if held := self._stack.held_among(rows):
                    still.append((held, call))
                else:
                    free.append(call)
            self._waiting = still
            if still:
                self._alarms.at(time.monotonic() + _POLL_S, self._poll)
        for call in free:
            call()
