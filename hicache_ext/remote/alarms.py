"""Functions that are called at a set time."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Alarms:
    """One daemon thread; the functions must not block."""

    def __init__(self, name: str) -> None:
        self._condition = threading.Condition()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def at(self, when: float, call: Callable[[], None]) -> None:
        """``when`` is a value of ``time.monotonic()``; in the past means at once."""
        with self._condition:
            first = not self._heap or when < self._heap[0][0]
            heapq.heappush(self._heap, (when, next(self._order), call))
            if first:
                self._condition.notify()

    def close(self) -> None:
        """No function is called any more."""
        with self._condition:
            self._closed = True
            self._heap.clear()
            self._condition.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _loop(self) -> None:
        while (call := self._next()) is not None:
            try:
                call()
            except Exception:
                logger.exception("hicache-ext: an alarm of the remote tier failed")

    def _next(self) -> Callable[[], None] | None:
        with self._condition:
            while not self._closed:
                wait = self._heap[0][0] - time.monotonic() if self._heap else None
                if wait is not None and wait <= 0:
                    return heapq.heappop(self._heap)[2]
                self._condition.wait(wait)
            return None
