"""What the remote tier has done, for metrics."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field, replace

from hicache_ext.core.header import Reason
from hicache_ext.stores.base import StoreStats


@dataclass
class RemoteStats:
    """Counts since start, of this rank; pages unless the name says otherwise."""

    lookups: int = 0
    """Lookups."""
    lookups_skipped: int = 0
    """Of these, answered without asking a store: none is in use, or it is not worth it."""
    lookups_late: int = 0
    """Of these, not answered in time."""
    pages_found: int = 0
    pages_planned: int = 0
    """Of those found, worth fetching."""
    fetches: int = 0
    """Windows."""
    fetches_late: int = 0
    """Of these, not whole at the deadline."""
    pages_fetched: int = 0
    """Arrived and verified in time."""
    refused: Counter[Reason] = field(default_factory=Counter)
    """Arrived but not what they should be, by reason; removed from the stores."""
    trial_pages: int = 0
    """Read only to measure a store."""
    pages_written: int = 0
    """In a store when their write ended."""
    write_failures: int = 0
    """Not in a store when their write ended."""
    bytes_read: int = 0
    bytes_written: int = 0
    """Of pages written; a store that had one already moved none."""
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    verify_seconds: float = 0.0
    """Time in calls, of all threads together."""


class StatsBook:
    """Counts from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = RemoteStats()

    def count(self, **numbers: float) -> None:
        with self._lock:
            for name, number in numbers.items():
                setattr(self._stats, name, getattr(self._stats, name) + number)

    def refuse(self, reason: Reason) -> None:
        with self._lock:
            self._stats.refused[reason] += 1

    def copy(self) -> RemoteStats:
        with self._lock:
            return replace(self._stats, refused=Counter(self._stats.refused))


@dataclass(frozen=True)
class StoreState:
    name: str
    state: str
    """Of its circuit breaker."""
    learned: bool
    """Whether the epoch was looked up there: before that it is not used."""
    stats: StoreStats
