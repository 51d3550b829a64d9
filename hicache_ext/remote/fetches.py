"""Windows of pages from the stores into host pages, verified before they count."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from hicache_ext.core.header import Labels
from hicache_ext.core.remote import ResultQueue
from hicache_ext.remote.answers import Answer
from hicache_ext.remote.context import REPLACE_S, Context
from hicache_ext.remote.host_rows import leading, parts
from hicache_ext.remote.lookups import Lookup
from hicache_ext.remote.planning import STORE, FetchPlan
from hicache_ext.stores.workers import Job, Workers

logger = logging.getLogger(__name__)

_THREADS = 2
_CALL_BYTES = 8 << 20
"""Of one call to the stores, at most."""
_VERIFY_BYTES = 2 << 20
"""Verified between two looks at the clock."""
_REMOVE_S = 2.0


@dataclass(eq=False)
class Window:
    lookup: Lookup
    plan: FetchPlan
    pages: np.ndarray
    labels: Labels
    arrival: Answer
    settled: Answer
    before: int
    """Pages in the windows of the lookup before this one."""
    good: int = 0
    """Leading pages that have arrived and verified."""

    def wanted(self) -> bool:
        return not self.arrival.given and time.monotonic() < self.plan.deadline


class Fetches:
    """A window is read and verified call by call."""

    def __init__(self, context: Context, arrivals: ResultQueue, settled: ResultQueue) -> None:
        self._context = context
        self._arrivals = arrivals
        self._settled = settled
        self._lock = threading.Lock()
        self._active = 0
        self._pool = Workers("remote fetch", _THREADS)
        self._removers = Workers("remote remove", 1)

    @property
    def active(self) -> bool:
        """Whether a window is queued or being read."""
        return self._active > 0

    def start(self, seq: int, lookup: Lookup, pages: np.ndarray, labels: Labels) -> None:
        arrival, settled = Answer(self._arrivals, seq), Answer(self._settled, seq)
        self._context.stats.count(fetches=1)
        plan = lookup.plan
        if plan is None or lookup.cancelled or not len(pages):
            arrival.give(0)
            settled.give()
            return
        before = lookup.place(labels.identities)
        window = Window(lookup, plan, pages.copy(), labels, arrival, settled, before)
        with lookup.lock:
            lookup.windows.append(window)
        # The store is not to blame for the time since the last window.
        self._context.planner.arrived(plan, before, time.monotonic())
        if not window.wanted() or not self._context.ready():
            self._answer(window)
            settled.give()
            return
        with self._lock:
            self._active += 1
        job = self._pool.submit(partial(self._run, window))
        self._context.alarms.at(plan.deadline, partial(self._due, window, job))

    def hurry(self, lookup: Lookup) -> None:
        """The deadline of the lookup's plan is earlier now."""
        for window in lookup.windows:
            if not window.arrival.given:
                self._context.alarms.at(window.plan.deadline, partial(self._overdue, window))

    def close(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        for pool in (self._pool, self._removers):
            pool.close(max(0.0, end - time.monotonic()))

    # On the fetch threads

    def _run(self, window: Window) -> None:
        try:
            self._read(window)
        except Exception:
            logger.exception("hicache-ext: a remote fetch failed; what had not arrived is treated as missing")
        finally:
            self._answer(window)
            self._finish(window)

    def _read(self, window: Window) -> None:
        most, done = max(1, _CALL_BYTES // self._context.rows.page_bytes), 0
        while done < len(window.pages) and window.wanted():
            stop = min(done + min(max(1, window.plan.window), most), len(window.pages))
            if not self._bring(window, slice(done, stop)):
                return
            done = stop

    def _bring(self, window: Window, part: slice) -> bool:
        """Read some pages and verify them; whether all are good. To verify is part of what a fetch takes."""
        context = self._context
        context.planner.speeds.fetch_began(STORE, time.monotonic())
        got = 0
        try:
            got = self._get(window, part)
            whole = self._verify(window, slice(part.start, part.start + got))
        finally:
            now = time.monotonic()
            context.planner.speeds.fetch_ended(STORE, got * context.rows.page_bytes, now)
        context.planner.arrived(window.plan, window.before + window.good, now)
        return whole and got == part.stop - part.start

    def _get(self, window: Window, part: slice) -> int:
        """Read some pages; how many of the first are there."""
        context = self._context
        keys, rows = context.rows.keys(window.labels[part]), context.rows.rows(window.pages[part])
        begin = time.monotonic()
        outcome = context.stack.get(keys, rows, window.plan.deadline)
        nbytes = int(outcome.ok.sum()) * context.rows.geometry.object_bytes
        context.stats.count(bytes_read=nbytes, read_seconds=time.monotonic() - begin)
        window.lookup.judged = True
        return leading(context.rows.whole(outcome.ok & ~outcome.held))

    def _verify(self, window: Window, part: slice) -> bool:
        """Verify pages in order; False if one is bad, or time is up."""
        context = self._context
        begin = time.monotonic()
        try:
            for piece in parts(part.stop - part.start, _VERIFY_BYTES // context.rows.page_bytes):
                if not window.wanted():
                    return False
                some = slice(part.start + piece.start, part.start + piece.stop)
                labels = window.labels[some]
                bytes_ = context.rows.tensor(window.pages[some])
                sound = context.seal.verify(bytes_, labels).numpy()
                window.good = some.start + leading(sound)
                if not sound.all():
                    self._refuse(bytes_, labels, np.flatnonzero(~sound))
                    return False
            return True
        finally:
            context.stats.count(verify_seconds=time.monotonic() - begin)

    def _refuse(self, bytes_: torch.Tensor, labels: Labels, bad: np.ndarray) -> None:
        context = self._context
        for index in bad.tolist():
            reason = context.seal.reason(bytes_[index], labels, index)
            context.stats.refuse(reason)
        refused = Labels(labels.identities[bad], labels.namespace, labels.epoch)
        context.recall.missed(refused)
        keys = context.rows.keys(refused)
        logger.warning(
            "hicache-ext: %d pages from the remote tier are not what they should be (%s); removed there",
            len(bad),
            reason,
        )
        self._removers.submit(lambda: context.stack.remove(keys, time.monotonic() + _REMOVE_S))

    def _answer(self, window: Window) -> None:
        good = window.good
        if window.arrival.give(good):
            late = good < len(window.pages) and time.monotonic() >= window.plan.deadline
            window.lookup.judged |= late
            self._context.stats.count(pages_fetched=good, fetches_late=late)
        window.lookup.report(self._context.planner)

    def _finish(self, window: Window) -> None:
        """Nothing of this module touches the pages any more; a store may."""
        with self._lock:
            self._active -= 1
        self._context.settling.when_free(self._context.rows.rows(window.pages), window.settled.give)

    # On the alarm thread

    def _due(self, window: Window, job: Job[None]) -> None:
        """The deadline, unless it has moved."""
        if not window.arrival.given and window.plan.deadline > time.monotonic():
            self._context.alarms.at(window.plan.deadline, partial(self._due, window, job))
            return
        self._answer(window)
        self._context.alarms.at(time.monotonic() + REPLACE_S, partial(self._replace, window, job))

    def _overdue(self, window: Window) -> None:
        """As ``_due``, which still comes at the old deadline and sees to the thread."""
        if window.plan.deadline <= time.monotonic():
            self._answer(window)

    def _replace(self, window: Window, job: Job[None]) -> None:
        if self._pool.give_up(job) and job.future.cancelled():
            self._finish(window)
