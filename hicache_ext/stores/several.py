"""Calls to several stores over the same rows: side by side, and a row is free when no store holds it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from hicache_ext.stores.base import Key, Outcome, Rows, Store, StoreStats, nothing
from hicache_ext.stores.workers import Job, Workers

logger = logging.getLogger(__name__)

ORPHAN_S = 120.0
"""Seconds. A call that failed with an exception leaves its rows held, and no store will ever release them.
They count as free when the store has held nothing by its own count for this long: more than any transfer
takes that a store does not count."""

_LATENESS_S = 0.02
# How much later than its deadline a call may return and still be heard.

Ask = Callable[[Store, Sequence[Key], Rows, float], Outcome]


@dataclass(frozen=True)
class Share:
    """The keys of a call, by position, that go to one store."""

    store: int
    positions: np.ndarray


class Several:
    """``stores`` and who of them holds which row."""

    def __init__(self, stores: Sequence[Store], name: str, threads: int, orphan_s: float = ORPHAN_S) -> None:
        self.stores = list(stores)
        self.held = HeldRows(2 * len(stores))
        """Numbers from ``len(stores)`` on stand for calls that have not returned by their deadline."""
        self._name = name
        self._orphan_s = orphan_s
        self._closed = False
        self._quiet_since: list[float | None] = [None] * len(stores)
        self._workers = Workers(name, threads) if len(stores) > 1 else None

    def ask(
        self,
        shares: Sequence[Share],
        ask: Ask,
        keys: Sequence[Key],
        rows: Rows | None,
        deadline: float,
    ) -> list[Outcome]:
        """One outcome a share. Without ``rows`` the call moves no bytes."""
        if self._closed:
            return [nothing(len(share.positions), down=True) for share in shares]
        calls = [partial(self._call, share, ask, keys, rows, deadline) for share in shares]
        if len(calls) == 1 or self._workers is None:
            return [call() for call in calls]
        jobs = [self._workers.submit(call) for call in calls]
        self._workers.wait(jobs, deadline + _LATENESS_S)
        return [self._outcome(share, job, rows) for share, job in zip(shares, jobs, strict=True)]

    def side_by_side(
        self, question: Callable[[Store], bool], which: Sequence[int], deadline: float
    ) -> list[bool]:
        """The answers of some stores; no answer in time, or an exception, is False."""

        def answer(index: int) -> bool:
            try:
                return question(self.stores[index])
            except Exception:
                logger.exception("hicache-ext: a store of the %s failed", self._name)
                return False

        if self._closed:
            return [False] * len(which)
        if len(which) <= 1 or self._workers is None:
            return [answer(index) for index in which]
        parts = self._workers.run(answer, list(which), deadline + _LATENESS_S)
        return [bool(part.result) for part in parts]

    def report(self, rows: Rows, outcome: Outcome) -> Outcome:
        """``outcome`` of a transfer is what the caller sees: it will wait for the rows it names as held."""
        self.held.report([int(rows[i]) for i in np.flatnonzero(outcome.held)])
        return outcome

    def released(self) -> list[int]:
        for index, store in enumerate(self.stores):
            self.held.gave(index, store.released())
            self._free_orphans(index, store)
        return self.held.released()

    def close(self) -> None:
        """The stores side by side; idempotent."""
        self._closed = True
        closers = [threading.Thread(target=store.close, daemon=True) for store in self.stores]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()
        if self._workers is not None:
            self._workers.close(1.0)

    def _call(
        self, share: Share, ask: Ask, keys: Sequence[Key], rows: Rows | None, deadline: float
    ) -> Outcome:
        positions = share.positions.tolist()
        chosen = [int(rows[p]) for p in positions] if rows is not None else []
        try:
            outcome = ask(self.stores[share.store], [keys[p] for p in positions], chosen, deadline)
        except Exception:
            logger.exception("hicache-ext: a store of the %s failed; treated as a miss", self._name)
            outcome = nothing(len(share.positions), down=True)
            outcome.held[:] = rows is not None
        if rows is not None:
            self.held.took(share.store, [chosen[i] for i in np.flatnonzero(outcome.held)])
        return outcome

    def _outcome(self, share: Share, job: Job[Outcome], rows: Rows | None) -> Outcome:
        assert self._workers is not None
        if self._workers.give_up(job):
            return nothing(len(share.positions)) if job.future.cancelled() else job.future.result()
        outcome = nothing(len(share.positions), down=True)
        if rows is not None:
            outcome.held[:] = True
            late, chosen = len(self.stores) + share.store, [int(rows[p]) for p in share.positions]
            self.held.took(late, chosen)
            job.future.add_done_callback(lambda _: self.held.gave(late, chosen))
        return outcome

    def _free_orphans(self, index: int, store: Store) -> None:
        if not self.held.of(index) or store.stats().held:
            self._quiet_since[index] = None
            return
        now = time.monotonic()
        since = self._quiet_since[index]
        if since is None:
            self._quiet_since[index] = now
        elif now - since >= self._orphan_s:
            self.held.gave(index, self.held.of(index))


class HeldRows:
    """Which holder holds which row."""

    def __init__(self, holders: int) -> None:
        self._lock = threading.Lock()
        # Below zero: released before the call that held it has returned.
        self._counts: list[dict[int, int]] = [{} for _ in range(holders)]
        self._held: set[int] = set()
        self._reported: set[int] = set()
        self._free: list[int] = []

    def __len__(self) -> int:
        """Rows that callers were told of and that are not free yet."""
        return len(self._reported)

    def took(self, holder: int, rows: Sequence[int]) -> None:
        with self._lock:
            for row in rows:
                self._add(holder, row, 1)

    def gave(self, holder: int, rows: Sequence[int]) -> None:
        with self._lock:
            for row in rows:
                self._add(holder, row, -1)
                if row in self._reported and row not in self._held:
                    self._reported.discard(row)
                    self._free.append(row)

    def report(self, rows: Sequence[int]) -> None:
        """From now on these are to come out of ``released``."""
        with self._lock:
            for row in rows:
                if row in self._held:
                    self._reported.add(row)
                else:
                    self._free.append(row)

    def of(self, holder: int) -> list[int]:
        with self._lock:
            return [row for row, count in self._counts[holder].items() if count > 0]

    def among(self, rows: Iterable[int]) -> set[int]:
        """Those of the rows that are held."""
        with self._lock:
            return self._held.intersection(rows) if self._held else set()

    def released(self) -> list[int]:
        with self._lock:
            free, self._free = self._free, []
            return free

    def _add(self, holder: int, row: int, change: int) -> None:
        counts = self._counts[holder]
        count = counts.get(row, 0) + change
        if count:
            counts[row] = count
        else:
            counts.pop(row, None)
        if count > 0:
            self._held.add(row)
        elif not any(counts.get(row, 0) > 0 for counts in self._counts):
            self._held.discard(row)


def total(stats: Sequence[StoreStats], held: int) -> StoreStats:
    """Counts of several stores as one's; a size that one of them does not know is not known."""
    whole = StoreStats(held=held, state=stats[0].state if stats else "closed")
    for part in stats:
        for name in _COUNTS:
            setattr(whole, name, getattr(whole, name) + getattr(part, name))
    for name in ("objects", "bytes_used", "bytes_limit"):
        sizes = [getattr(part, name) for part in stats]
        setattr(whole, name, None if None in sizes else sum(sizes))
    if any(part.state == "closed" for part in stats):
        whole.state = "closed"
    return whole


_COUNTS = (
    "hits", "misses", "stored", "present", "declined", "removed", "evicted", "corrupt", "errors", "late",
    "opened",
)  # fmt: skip
