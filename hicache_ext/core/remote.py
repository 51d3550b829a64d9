"""What the cache asks of the remote tier: stores that hold pages beyond this server's memory.

    lookup -> fetch (one window after the other) -> end        for a queued request
    write                                                       for pages that have reached the host
    use, learned                                                the epoch that all who share a store agree on

The calls return at once; the work is done by threads that post to the queues below, for every job exactly
once and whatever happens. A job that meets a miss, an outage or its deadline posts what it has by then.

A fetch and a write touch host pages. A store that does not answer may touch them long after the job has given
up, so a job posts twice: its result, and that its pages are no longer touched (``settled``, ``written``).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hicache_ext.core.header import Labels

UNDONE = -1
"""Stands for the result of a job that has not ended: whatever the others say, MIN gives this."""


class ResultQueue:
    """One number per job; jobs are numbered from 1 without gaps and may end in any order, on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[int, int] = {}
        self._done = 0

    def post(self, seq: int, value: int = 0) -> None:
        """Called once for each job; ``value`` is from 0."""
        with self._lock:
            self._values[seq] = value
            while (self._done + 1) in self._values:
                self._done += 1

    def done(self) -> int:
        """The last job before which every job has ended."""
        with self._lock:
            return self._done

    def results(self, after: int, count: int) -> list[int]:
        """Of jobs ``after + 1 .. after + count``, ``UNDONE`` for those that have not ended. Results up to
        ``after`` are forgotten."""
        with self._lock:
            for seq in [s for s in self._values if s <= after]:
                del self._values[seq]
            return [self._values.get(seq, UNDONE) for seq in range(after + 1, after + 1 + count)]


@dataclass(frozen=True)
class Query:
    """The part of a queued prompt that no nearer tier has.

    ``tokens`` is int64, whole pages, and belongs to the query; ``parent`` (16 bytes) is the identity of the
    page or root that they continue. The first ``skip`` pages are here already and only carry the chain of
    identities on: they are hashed, not looked for, and do not count. ``start`` tokens come before the others.
    """

    parent: bytes
    tokens: np.ndarray
    start: int
    skip: int
    namespace: bytes
    epoch: int
    ahead: float = 0.0
    """Seconds that the request is expected to wait for others anyway."""


class Remote(Protocol):
    """One rank's way to the stores. Called from the scheduler thread only; see the module's text."""

    lookups: ResultQueue
    """Leading pages of the query that are worth fetching; 0 if none is there, or recomputing is faster."""
    arrivals: ResultQueue
    """Leading pages of the window that have arrived and verified, posted by the deadline of its lookup."""
    settled: ResultQueue
    """The window's pages are no longer touched; never before its arrival. The value is 0."""
    written: ResultQueue
    """Pages of the write that are in the store now; posted when none of them is touched any more."""

    def lookup(self, seq: int, query: Query) -> None:
        """Find out which leading pages of ``query`` to fetch. From here on the request may wait until the
        deadline that the lookup sets for itself and its windows."""
        ...

    def identities(self, seq: int) -> np.ndarray:
        """Of the pages that lookup ``seq`` found, uint8 ``[pages, 16]``, at least as many as it posted, those
        skipped not among them."""
        ...

    def fetch(self, seq: int, lookup: int, pages: np.ndarray, labels: Labels) -> None:
        """Read a window of pages into host pages, and verify that they are what ``labels`` says."""
        ...

    def turn_came(self, lookup: int) -> None:
        """The request could be admitted now: from here on it waits for stores only. May be called again."""
        ...

    def cancel(self, lookup: int) -> None:
        """Nobody waits for it any more: its jobs should end soon. Still ended by ``end``."""
        ...

    def end(self, lookup: int) -> None:
        """No further window of this lookup will come. Once for each lookup."""
        ...

    def write(self, seq: int, pages: np.ndarray, labels: Labels) -> None:
        """Store host pages, as far as they are not there yet."""
        ...

    def use(self, namespace: bytes, epoch: int) -> None:
        """The version of this server's pages from now on; ``learned`` is unknown until it was looked up. At a
        local epoch, which follows a flush, a shared one is claimed and marked first; see ``core.epochs``."""
        ...

    def attach(self, attached: bool) -> None:
        """Whether the stores are used from now on, as they are at first. If not, it is not ``healthy``, and
        jobs end as in an outage; but epochs are followed."""
        ...

    def learned(self) -> int | None:
        """The highest shared epoch of the namespace in use that is known; None until then."""
        ...

    def healthy(self) -> bool:
        """Whether a store is likely to answer."""
        ...

    def close(self) -> None:
        """Idempotent. Returns within seconds; what is in flight then is not posted."""
        ...
