"""The one number that each job posts."""

from __future__ import annotations

import threading

from hicache_ext.core.remote import ResultQueue


class Answer:
    """Posts the first number that it is given and ignores the rest; any thread may be first."""

    def __init__(self, queue: ResultQueue, seq: int) -> None:
        self._queue = queue
        self._seq = seq
        self._lock = threading.Lock()
        self.given = False

    def give(self, value: int = 0) -> bool:
        """True if this was the first."""
        with self._lock:
            if self.given:
                return False
            self.given = True
        self._queue.post(self._seq, value)
        return True
