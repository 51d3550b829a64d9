"""Fetches that nobody waits for: they tell the planner what the stores are worth now.

They read into scratch pages, one at a time, and what they read is thrown away.
"""

from __future__ import annotations

import logging
import threading
import time
from functools import partial

import numpy as np

from hicache_ext.core.header import Labels
from hicache_ext.core.page import IDENTITY_BYTES
from hicache_ext.remote.context import REPLACE_S, Context
from hicache_ext.remote.host_rows import leading
from hicache_ext.remote.planning import STORE, FetchPlan
from hicache_ext.stores.workers import Workers

logger = logging.getLogger(__name__)

_PROBE_S = 2.0
_PROBE_PAGES = 32


class Trials:
    def __init__(self, context: Context, pages: np.ndarray) -> None:
        """``pages`` are scratch pages."""
        self._context = context
        self._pages = pages
        self._free = threading.Lock()
        self._pool = Workers("remote trial", 1)

    @property
    def most(self) -> int:
        """Pages of a trial at most."""
        return len(self._pages)

    def start(self, plan: FetchPlan, labels: Labels) -> None:
        """Fetch the pages of a plan, as far as there is room; ends the plan."""
        pages = self._pages[: len(labels)]
        if not len(pages) or not self._context.ready() or not self._free.acquire(blocking=False):
            self._context.planner.withdrawn(plan, time.monotonic())
            return
        job = self._pool.submit(partial(self._run, plan, pages, labels[: len(pages)]))

        def replace() -> None:
            self._context.planner.ended(plan, 0, time.monotonic())
            if self._pool.give_up(job) and job.future.cancelled():
                self._free.release()

        self._context.alarms.at(plan.deadline + REPLACE_S, replace)

    def probe(self, namespace: bytes, epoch: int) -> None:
        """Write something and read it back, so that the first request meets a store whose speed is known."""
        if len(self._pages) and self._free.acquire(blocking=False):
            self._pool.submit(partial(self._probe, namespace, epoch))

    def close(self, timeout: float) -> None:
        self._pool.close(timeout)

    def _probe(self, namespace: bytes, epoch: int) -> None:
        context, pages = self._context, self._pages[:_PROBE_PAGES]
        rows = context.rows.rows(pages)
        name = b"probe".ljust(IDENTITY_BYTES - 2, b"\0")
        names = [name + number.to_bytes(2, "little") for number in range(len(pages))]
        identities = np.frombuffer(b"".join(names), np.uint8).reshape(-1, IDENTITY_BYTES)
        labels = Labels(identities, namespace, epoch)
        keys, bytes_ = context.rows.keys(labels), context.rows.tensor(pages)
        deadline = time.monotonic() + _PROBE_S
        try:
            context.seal.write(bytes_, labels)
            context.stack.put(keys, rows, deadline)
            for count in (1, len(pages)):
                objects = count * context.rows.groups
                begin = time.monotonic()
                outcome = context.stack.get(keys[:objects], rows[:objects], deadline)
                context.seal.verify(bytes_[:count], labels[:count])
                now = time.monotonic()
                if not outcome.ok.all():
                    return
                nbytes = count * context.rows.page_bytes
                context.planner.speeds.observed_fetch(STORE, nbytes, now - begin, now)
        except Exception:
            logger.exception("hicache-ext: measuring the remote tier failed")
        finally:
            context.settling.when_free(rows, self._free.release)

    def _run(self, plan: FetchPlan, pages: np.ndarray, labels: Labels) -> None:
        context, done = self._context, 0
        try:
            while done < len(pages) and time.monotonic() < plan.deadline:
                stop = min(done + max(1, plan.window), len(pages))
                done += self._measure(plan, pages[done:stop], labels[done:stop])
                if done < stop or not context.ready():
                    break
                context.planner.arrived(plan, done, time.monotonic())
            context.stats.count(trial_pages=done)
        except Exception:
            logger.exception("hicache-ext: measuring the remote tier failed")
        finally:
            context.planner.ended(plan, done, time.monotonic())
            context.settling.when_free(context.rows.rows(pages), self._free.release)

    def _measure(self, plan: FetchPlan, pages: np.ndarray, labels: Labels) -> int:
        """One call; how many of the first pages have come."""
        context = self._context
        speeds, nbytes = context.planner.speeds, 0
        speeds.fetch_began(STORE, time.monotonic())
        try:
            outcome = context.stack.get(context.rows.keys(labels), context.rows.rows(pages), plan.deadline)
            nbytes = int(outcome.ok.sum()) * context.rows.geometry.object_bytes
            # To verify is part of what a fetch takes.
            context.seal.verify(context.rows.tensor(pages), labels)
        finally:
            speeds.fetch_ended(STORE, nbytes, time.monotonic())
        return leading(context.rows.whole(outcome.ok))
