"""The only place where results of asynchronous work change state.

Workers and streams post completions to a ``CompletionQueue``, in any order, from any thread. Once per
scheduler step every rank calls ``agree`` with its queues: one all-reduce (MIN) of a vector of fixed length,
whatever the queues hold, tells all ranks the same prefix of completions, and that prefix is applied.

A backup only completes: one that failed leaves pages that will not verify. A load may find bad pages; they
differ from rank to rank, so the ranks agree on the first of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

Reduce = Callable[[np.ndarray], np.ndarray]
"""All-reduce (MIN) of an int64 vector over the TP group; returns the reduced vector."""

_PAGE_BITS = 32
_NO_FAILURE = 1 << 62
_FIXED = 3
NOTHING = np.empty(0, dtype=np.int64)


class CompletionQueue:
    """Completions by sequence number; numbers start at 1 and have no gaps once all are posted."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._early: dict[int, int | None] = {}
        self._done = 0
        self._bad: dict[int, int] = {}

    def post(self, seq: int, bad: int | None = None) -> None:
        """Called once for each sequence number, from any thread; ``bad`` is the job's first bad page."""
        with self._changed:
            self._early[seq] = bad
            while (self._done + 1) in self._early:
                self._done += 1
                if (page := self._early.pop(self._done)) is not None:
                    self._bad[self._done] = page
            self._changed.notify_all()

    def wait(self, seq: int) -> None:
        """Return when ``done`` has reached ``seq``."""
        with self._changed:
            self._changed.wait_for(lambda: self._done >= seq)

    def done(self) -> int:
        """The last sequence number before which every job has ended."""
        with self._changed:
            return self._done

    def first_failure(self, after: int) -> tuple[int, int] | None:
        """(job, its first bad page) of the first failed job past ``after`` among those ``done`` covers.

        Failures up to ``after`` are forgotten.
        """
        with self._changed:
            for seq in [s for s in self._bad if s <= after]:
                del self._bad[seq]
            return min(self._bad.items(), default=None)


@dataclass(frozen=True, slots=True)
class Agreed:
    """What every rank may apply now: backups up to ``backups``, loads up to ``loads``.

    If ``bad_page`` is not None, load ``loads`` failed, and this is its first bad page on any rank: a failed
    load is the last of its batch. ``extra`` is the minimum of what each rank added.
    """

    backups: int
    loads: int
    bad_page: int | None
    extra: np.ndarray = field(default_factory=lambda: NOTHING, compare=False)


def agree(
    backups: tuple[CompletionQueue, int],
    loads: tuple[CompletionQueue, int],
    limit: int,
    reduce: Reduce | None,
    extra: np.ndarray = NOTHING,
) -> Agreed:
    """One decision for all ranks.

    Args:
        backups, loads: a queue with the last sequence number already applied, which is equal on all ranks.
        limit: at most this many jobs of a queue are applied at once.
        reduce: None with a single rank.
        extra: int64, of equal length on all ranks and in all calls; agreed along with the rest.
    """
    failure = loads[0].first_failure(loads[1])
    mine = np.array(
        [
            *(min(queue.done(), applied + limit) for queue, applied in (backups, loads)),
            _NO_FAILURE if failure is None else failure[0] << _PAGE_BITS | failure[1],
            *extra,
        ],
        dtype=np.int64,
    )
    agreed = mine if reduce is None else reduce(mine)
    backed_up, loaded, first = agreed[:_FIXED].tolist()
    failed = first >> _PAGE_BITS
    if failed <= loaded:
        return Agreed(backed_up, failed, first & ((1 << _PAGE_BITS) - 1), agreed[_FIXED:])
    return Agreed(backed_up, loaded, None, agreed[_FIXED:])
