"""Which leading pages of a queued prompt the stores have, and how many of them are worth fetching.

The scheduler waits for lookups, so they have threads of their own: no fetch or write is before them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from hicache_ext.core.epochs import is_local
from hicache_ext.core.header import Labels
from hicache_ext.core.page import IDENTITY_BYTES, page_identities
from hicache_ext.core.remote import Query, ResultQueue
from hicache_ext.remote.answers import Answer
from hicache_ext.remote.context import REPLACE_S, Context
from hicache_ext.remote.host_rows import leading
from hicache_ext.remote.planning import STORE, FetchPlan, LookupPlan, Planner
from hicache_ext.remote.trials import Trials
from hicache_ext.stores.workers import Job, Workers

if TYPE_CHECKING:
    from hicache_ext.remote.fetches import Window

logger = logging.getLogger(__name__)

_THREADS = 2
_FIRST_PAGES, _MOST_PAGES = 32, 512
_UNHURRIED_S = 1.0
"""Seconds for a lookup that nobody waits for."""
_NONE = np.zeros((0, IDENTITY_BYTES), np.uint8)


@dataclass(eq=False)
class Lookup:
    """From ``Remote.lookup`` to ``Remote.end``, and as long as a window of it is in flight."""

    query: Query
    answer: Answer
    asked: LookupPlan | None = None
    """If the request waits for the answer."""
    identities: np.ndarray = field(default_factory=lambda: _NONE)
    plan: FetchPlan | None = None
    """Once it was answered with pages."""
    windows: list[Window] = field(default_factory=list)
    """In the order of the prompt; none is added after ``closed``."""
    cancelled: bool = False
    closed: bool = False
    judged: bool = False
    """Whether the store had its chance: a call has returned, or a window was late."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def report(self, planner: Planner) -> None:
        """Tell the planner if the fetch is over: nothing further of it can come."""
        with self.lock:
            plan, pages, over = self.plan, 0, self.cancelled
            whole = True
            for window in self.windows:
                whole = window.good == len(window.pages)
                pages = window.before + window.good
                if not whole:
                    over = over or window.arrival.given
                    break
        if plan is None or not (over or (whole and (self.closed or pages >= plan.pages))):
            return
        if pages or self.judged:
            planner.ended(plan, pages, time.monotonic())
        else:
            planner.withdrawn(plan, time.monotonic())

    def place(self, identities: np.ndarray) -> int:
        """How many of the pages found come before the first of a window."""
        last = self.windows[-1] if self.windows else None
        guess = last.before + len(last.pages) if last is not None else 0
        if guess < len(self.identities) and np.array_equal(self.identities[guess], identities[0]):
            return guess
        # Some were computed meanwhile.
        same = np.flatnonzero((self.identities == identities[0]).all(1))
        return int(same[0]) if len(same) else guess


class Lookups:
    def __init__(self, context: Context, queue: ResultQueue, trials: Trials, page_size: int) -> None:
        self._context = context
        self._queue = queue
        self._trials = trials
        self._page_size = page_size
        self._known: dict[int, Lookup] = {}
        self._measuring = threading.Lock()
        self._pool = Workers("remote lookup", _THREADS)

    def __getitem__(self, seq: int) -> Lookup:
        """On the scheduler thread only."""
        return self._known[seq]

    def start(self, seq: int, query: Query) -> None:
        context = self._context
        lookup = self._known[seq] = Lookup(query, Answer(self._queue, seq))
        now = time.monotonic()
        asked = None
        tokens = len(query.tokens) - query.skip * self._page_size
        if tokens > 0 and not is_local(query.epoch) and context.ready():
            asked = context.planner.plan_lookup(STORE, query.start, tokens, now, ahead=query.ahead)
        waits = asked is not None and asked.deadline > asked.started
        lookup.asked = asked if waits else None
        context.stats.count(lookups=1, lookups_skipped=not waits)
        if not waits:
            lookup.answer.give(0)
        if asked is None or not asked.ask:
            return
        # One at a time is enough to measure.
        if not waits and not self._measuring.acquire(blocking=False):
            return
        until = asked.deadline if waits else now + _UNHURRIED_S
        job = self._pool.submit(partial(self._run, lookup, asked, until, waits))
        context.alarms.at(until, partial(self._late, lookup))
        context.alarms.at(until + REPLACE_S, partial(self._replace, job, asked, waits))

    def turn_came(self, seq: int) -> Lookup | None:
        """The request could be admitted now, so its deadline may be earlier; the lookup if that is so for its
        fetch."""
        lookup = self._known[seq]
        fetch = lookup.plan
        plan = lookup.asked if fetch is None else fetch
        if plan is None:
            return None
        before = plan.deadline
        self._context.planner.turn_came(plan, time.monotonic())
        if plan.deadline >= before:
            return None
        if fetch is None:
            self._context.alarms.at(plan.deadline, partial(self._late, lookup))
            return None
        return lookup

    def cancel(self, seq: int) -> None:
        lookup = self._known[seq]
        with lookup.lock:
            lookup.cancelled = True
        lookup.answer.give(0)
        for window in lookup.windows:
            window.arrival.give(window.good)
        lookup.report(self._context.planner)

    def end(self, seq: int) -> None:
        lookup = self._known.pop(seq)
        with lookup.lock:
            lookup.closed = True
        lookup.answer.give(0)
        lookup.report(self._context.planner)

    def close(self, timeout: float) -> None:
        self._pool.close(timeout)

    # On the lookup threads

    def _run(self, lookup: Lookup, asked: LookupPlan, until: float, waits: bool) -> None:
        try:
            self._look(lookup, asked, until, waits)
        except Exception:
            logger.exception("hicache-ext: a remote lookup failed; treated as a miss")
        finally:
            lookup.answer.give(0)
            if not waits:
                self._measuring.release()

    def _look(self, lookup: Lookup, asked: LookupPlan, until: float, waits: bool) -> None:
        planner, query = self._context.planner, lookup.query
        identities, answered = self._find(lookup, until, waits)
        now = time.monotonic()
        planner.looked_up(asked, len(identities), now, answered=answered)
        self._context.stats.count(pages_found=len(identities))
        if not answered or not len(identities) or (waits and lookup.answer.given):
            return
        since, ahead = (asked.started, asked.ahead) if waits else (None, 0.0)
        plan = planner.plan_fetch(STORE, query.start, len(identities), now, since=since, ahead=ahead)
        if not plan.pages:
            return
        if not (waits and plan.wait):
            self._trials.start(plan, Labels(identities[: plan.pages], query.namespace, query.epoch))
            return
        self._context.stats.count(pages_planned=plan.pages)
        lookup.identities = identities
        with lookup.lock:
            lookup.plan = plan
        if not lookup.answer.give(plan.pages):
            planner.withdrawn(plan, now)

    def _find(self, lookup: Lookup, until: float, waits: bool) -> tuple[np.ndarray, bool]:
        """The identities of the leading pages that are there, and whether a store answered."""
        context, query = self._context, lookup.query
        parent, found, answered = query.parent, [_NONE], True
        count = len(query.tokens) // self._page_size
        if not waits:
            # No more than a trial can make use of.
            count = min(count, query.skip + self._trials.most)
        for part in _growing(count, query.skip):
            if (waits and lookup.answer.given) or time.monotonic() >= until:
                break
            tokens = query.tokens[part.start * self._page_size : part.stop * self._page_size]
            made = page_identities(parent, tokens, self._page_size)
            parent = made[-1]
            if part.stop <= query.skip:
                continue
            identities = np.frombuffer(b"".join(made), np.uint8).reshape(-1, IDENTITY_BYTES)
            keys = context.rows.keys(Labels(identities, query.namespace, query.epoch))
            outcome = context.stack.exists(keys, until)
            count = leading(context.rows.whole(outcome.ok))
            found.append(identities[:count])
            if count < len(made):
                answered = not outcome.down
                if answered:
                    missing = identities[count : count + 1]
                    context.recall.missed(Labels(missing, query.namespace, query.epoch))
                break
        return np.concatenate(found), answered

    # On the alarm thread

    def _late(self, lookup: Lookup) -> None:
        if lookup.answer.give(0):
            self._context.stats.count(lookups_late=1)

    def _replace(self, job: Job[None], asked: LookupPlan, waits: bool) -> None:
        if self._pool.give_up(job) and job.future.cancelled():
            if not waits:
                self._measuring.release()
            self._context.planner.looked_up(asked, 0, time.monotonic(), answered=False)


def _growing(count: int, skip: int) -> Iterator[slice]:
    """The first ``skip`` of ``count`` in slices of equal size, the others in ever larger ones: most prompts
    that are not there end in the first of those."""
    for start in range(0, skip, _MOST_PAGES):
        yield slice(start, min(start + _MOST_PAGES, skip))
    start, size = skip, _FIRST_PAGES
    while start < count:
        yield slice(start, min(start + size, count))
        start += size
        size = min(2 * size, _MOST_PAGES)
