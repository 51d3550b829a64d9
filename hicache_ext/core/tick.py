"""The only place where results of asynchronous work change state.

Workers and streams post completions to a ``CompletionQueue``, in any order, from any thread. Once per
scheduler step every rank calls ``agree`` with its queues: one all-reduce (MIN) of a vector of fixed length,
whatever the queues hold, tells all ranks the same prefix of completions, and that prefix is applied.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Reduce = Callable[[np.ndarray], np.ndarray]
"""All-reduce (MIN) of an int64 vector over the TP group; returns the reduced vector."""


class CompletionQueue:
    """Completions by sequence number; numbers start at 1 and have no gaps once all are posted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._early: dict[int, bool] = {}
        self._done = 0
        self._failed: set[int] = set()

    def post(self, seq: int, ok: bool = True) -> None:
        """Called once for each sequence number, from any thread."""
        with self._lock:
            self._early[seq] = ok
            while (self._done + 1) in self._early:
                self._done += 1
                if not self._early.pop(self._done):
                    self._failed.add(self._done)

    def done(self) -> int:
        """The last sequence number before which every job has ended."""
        with self._lock:
            return self._done

    def first_failure(self, after: int) -> int | None:
        """The first failed job past ``after`` among those that ``done`` covers."""
        with self._lock:
            return min((s for s in self._failed if s > after), default=None)


@dataclass(frozen=True, slots=True)
class Agreed:
    """What every rank may apply now: jobs ``applied + 1 .. upto``; ``failed`` is one of them or None.

    A failed job is the last of its batch, so that each tick settles at most one failure a queue.
    """

    upto: int
    failed: int | None


def agree(queues: list[tuple[CompletionQueue, int]], limit: int, reduce: Reduce | None) -> list[Agreed]:
    """One decision for all ranks.

    Args:
        queues: each queue with the last sequence number already applied; equal on all ranks.
        limit: at most this many jobs of a queue are applied in one tick.
        reduce: None with a single rank.
    """
    mine = np.empty(2 * len(queues), dtype=np.int64)
    for i, (queue, applied) in enumerate(queues):
        done = min(queue.done(), applied + limit)
        failure = queue.first_failure(applied)
        sound = done if failure is None or failure > done else failure - 1
        mine[2 * i : 2 * i + 2] = done, sound
    everyone = mine if reduce is None else reduce(mine)
    verdicts = []
    for done, sound in everyone.reshape(-1, 2).tolist():
        verdicts.append(Agreed(sound, None) if sound >= done else Agreed(sound + 1, sound + 1))
    return verdicts
