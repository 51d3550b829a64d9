"""``core.remote.Remote`` over stores: lookups, fetches, writes and epochs, each on threads of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from hicache_ext.core.header import Labels
from hicache_ext.core.remote import Query, ResultQueue
from hicache_ext.remote.alarms import Alarms
from hicache_ext.remote.context import Context
from hicache_ext.remote.epochs import EpochWatch
from hicache_ext.remote.fetches import Fetches
from hicache_ext.remote.host_rows import HostRows
from hicache_ext.remote.lookups import Lookups
from hicache_ext.remote.planning import Planner
from hicache_ext.remote.recall import Recall
from hicache_ext.remote.settling import Settling
from hicache_ext.remote.stats import RemoteStats, StatsBook, StoreState
from hicache_ext.remote.trials import Trials
from hicache_ext.remote.writes import Writes
from hicache_ext.stores.base import StoreError
from hicache_ext.stores.breaker import GuardedStore, State
from hicache_ext.stores.several import ORPHAN_S
from hicache_ext.stores.stack import StackedStore
from hicache_ext.transfer.host_pool import HostPagePool
from hicache_ext.transfer.layout import PageLayout
from hicache_ext.transfer.seal import Seal

TRIAL_BYTES = 4 << 20
_CLOSE_S = 8.0


@dataclass(frozen=True)
class RemoteSettings:
    write_share: float = 0.5
    """Of the time that writes may be under way, above 0 and up to 1."""
    slow_write_share: float = 0.01
    """The same while the stores are too slow for that to pay."""
    write_timeout: float = 5.0
    """Seconds for one call, 8 MB at most."""
    epoch_interval: float = 1.0
    """Seconds between two looks for a higher epoch."""
    probe: bool = True
    """Measure the stores when they are first used."""
    orphan_s: float = ORPHAN_S
    """See ``stores.several``."""


@dataclass(frozen=True)
class Place:
    """A store, and whether this rank writes to it; another rank may store the same objects."""

    store: GuardedStore
    writes: bool = True


def scratch_pages(layout: PageLayout) -> int:
    """How many scratch pages the pool should have: one for marks, the others to measure stores with."""
    return 1 + max(1, TRIAL_BYTES // layout.page_bytes)


class RemoteEngine:
    """See ``core.remote.Remote``. Owns the stores from here on; does not own the pool, whose memory must live
    until ``close`` has returned."""

    lookups: ResultQueue
    arrivals: ResultQueue
    settled: ResultQueue
    written: ResultQueue

    def __init__(
        self,
        places: Sequence[Place],
        pool: HostPagePool,
        seal: Seal,
        planner: Planner,
        settings: RemoteSettings | None = None,
    ) -> None:
        """``places``, the nearest first. Raises StoreError if a store cannot use the pool; they are closed
        then."""
        settings = settings or RemoteSettings()
        self.lookups, self.arrivals, self.settled, self.written = (ResultQueue() for _ in range(4))
        self._guarded = [place.store for place in places]
        self._closed = False
        self._attached = True
        try:
            self._stack = StackedStore(
                self._guarded,
                [place.writes for place in places],
                lambda index: self._epochs.asked(index),
                settings.orphan_s,
            )
            rows = HostRows(pool)
            if not len(rows.scratch):
                raise StoreError("the host pool has no scratch page; the remote tier needs one")
            self._stack.register(rows.buffer)
        except BaseException:
            for store in self._guarded:
                store.close()
            raise
        self._alarms = Alarms("remote alarms")
        self._stats = StatsBook()
        context = Context(
            stack=self._stack,
            rows=rows,
            seal=seal,
            planner=planner,
            stats=self._stats,
            alarms=self._alarms,
            settling=Settling(self._stack, self._alarms),
            recall=Recall(),
            in_use=self._in_use,
        )
        self._epochs = EpochWatch(
            self._stack,
            rows,
            int(rows.scratch[0]),
            settings.epoch_interval,
            self._probe if settings.probe else None,
        )
        self._trials = Trials(context, rows.scratch[1:])
        self._lookups = Lookups(context, self.lookups, self._trials, pool.layout.page_size)
        self._fetches = Fetches(context, self.arrivals, self.settled)
        shares = (settings.write_share, settings.slow_write_share)
        self._writes = Writes(context, self.written, self._fetches, shares, settings.write_timeout)

    def lookup(self, seq: int, query: Query) -> None:
        self._lookups.start(seq, query)

    def identities(self, seq: int) -> np.ndarray:
        return self._lookups[seq].identities

    def fetch(self, seq: int, lookup: int, pages: np.ndarray, labels: Labels) -> None:
        self._fetches.start(seq, self._lookups[lookup], pages, labels)

    def turn_came(self, lookup: int) -> None:
        if (earlier := self._lookups.turn_came(lookup)) is not None:
            self._fetches.hurry(earlier)

    def cancel(self, lookup: int) -> None:
        self._lookups.cancel(lookup)

    def end(self, lookup: int) -> None:
        self._lookups.end(lookup)

    def write(self, seq: int, pages: np.ndarray, labels: Labels) -> None:
        self._writes.start(seq, pages, labels)

    def use(self, namespace: bytes, epoch: int) -> None:
        self._epochs.use(namespace, epoch)

    def attach(self, attached: bool) -> None:
        self._attached = attached

    def learned(self) -> int | None:
        return self._epochs.learned()

    def healthy(self) -> bool:
        up = any(store.breaker.state is not State.OPEN for store in self._guarded)
        return self._attached and up and self._epochs.learned() is not None

    def stats(self) -> RemoteStats:
        return self._stats.copy()

    def store_states(self) -> list[StoreState]:
        """Of each store, the nearest first."""
        return [
            StoreState(store.name, store.breaker.state.value, self._epochs.asked(index), store.stats())
            for index, store in enumerate(self._guarded)
        ]

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._alarms.close()
        parts = (self._epochs, self._lookups, self._trials, self._fetches, self._writes)
        _side_by_side([partial(part.close, 1.0) for part in parts], 2.0)
        # A store that takes longer goes on, and keeps the pool's memory.
        _side_by_side([self._stack.close], _CLOSE_S)

    def _probe(self, namespace: bytes, epoch: int) -> None:
        if self._attached:
            self._trials.probe(namespace, epoch)

    def _in_use(self) -> tuple[tuple[int, int], ...]:
        if not self._attached:
            return ()
        return tuple(
            (index, store.breaker.opened)
            for index, store in enumerate(self._guarded)
            if store.breaker.state is State.CLOSED and self._epochs.asked(index)
        )


def _side_by_side(calls: Sequence[Callable[[], object]], timeout: float) -> None:
    threads = [threading.Thread(target=call, name="remote close", daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
