"""Host pages into the stores, when nothing better is to be done.

One thread: it lets fetches go first, and is busy for a share of the time at most.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from functools import partial

import numpy as np

from hicache_ext.core.epochs import is_local
from hicache_ext.core.header import Labels
from hicache_ext.core.remote import ResultQueue
from hicache_ext.remote.answers import Answer
from hicache_ext.remote.context import Context
from hicache_ext.remote.fetches import Fetches
from hicache_ext.remote.host_rows import parts
from hicache_ext.remote.planning import STORE
from hicache_ext.stores.workers import Job, Workers

logger = logging.getLogger(__name__)

_CALL_BYTES = 8 << 20
_SLOW_CALL_BYTES = 1 << 20
"""Of a store that is too slow: a call may keep a core from a prefill as long as it lasts."""
_PATIENCE_S = 1.0
"""How long a call waits for fetches to end."""
_LOOK_S = 0.005
_REST_S = 0.5
"""How long a rest may be before its length is looked at again."""
_STUCK_S = 1.0
"""After a call's deadline: it does not come back, so another thread goes on."""


@dataclass(eq=False)
class _Write:
    pages: np.ndarray
    labels: Labels
    answer: Answer
    there: int
    """Further pages, which were in the store already."""
    stored: int = 0
    calls: int = 0


class Writes:
    def __init__(
        self,
        context: Context,
        queue: ResultQueue,
        fetches: Fetches,
        shares: tuple[float, float],
        timeout: float,
    ) -> None:
        """``shares`` of the time spent in calls, above 0 and up to 1: of a store that is worth writing to,
        and of one that is too slow for that; ``timeout`` of a call in seconds."""
        self._context = context
        self._queue = queue
        self._fetches = fetches
        self._rests = [1 / share - 1 for share in shares]
        self._timeout = timeout
        self._ended = self._took = 0.0
        """When the last call ended, and how long it took."""
        self._closed = threading.Event()
        self._pool = Workers("remote write", 1)

    def start(self, seq: int, pages: np.ndarray, labels: Labels) -> None:
        context, answer = self._context, Answer(self._queue, seq)
        if not context.stack.writing:
            # Another rank stores the same objects.
            answer.give(len(pages))
            return
        stores = context.in_use()
        if is_local(labels.epoch) or not stores:
            context.stats.count(write_failures=len(pages))
            answer.give(0)
            return
        lacking = context.recall.lacks(labels, stores)
        there = len(pages) - int(lacking.sum())
        context.stats.count(pages_written=there)
        if there == len(pages):
            answer.give(there)
            return
        rest = Labels(labels.identities[lacking], labels.namespace, labels.epoch)
        write = _Write(pages[lacking], rest, answer, there)
        jobs: list[Job[None]] = []
        jobs.append(self._pool.submit(partial(self._run, write, jobs)))

    def close(self, timeout: float) -> None:
        self._closed.set()
        self._pool.close(timeout)

    def _run(self, write: _Write, jobs: list[Job[None]]) -> None:
        try:
            nbytes = _CALL_BYTES if self._useful() else _SLOW_CALL_BYTES
            for part in parts(len(write.pages), nbytes // self._context.rows.page_bytes):
                self._give_way()
                if self._closed.is_set():
                    return
                if not self._context.ready():
                    break
                self._put(write, part, jobs)
        except Exception:
            logger.exception("hicache-ext: writing to the remote tier failed")
        stored, failed = write.stored, len(write.pages) - write.stored
        self._context.stats.count(pages_written=stored, write_failures=failed)
        rows = self._context.rows.rows(write.pages)
        self._context.settling.when_free(rows, partial(write.answer.give, write.there + stored))

    def _put(self, write: _Write, part: slice, jobs: list[Job[None]]) -> None:
        context = self._context
        pages, labels = write.pages[part], write.labels[part]
        # A backup that failed has left pages that are nobody's.
        sound = context.rows.headed(pages, labels, context.seal.integrity)
        pages = pages[sound]
        labels = Labels(labels.identities[sound], labels.namespace, labels.epoch)
        if not len(pages):
            return
        begin = time.monotonic()
        deadline = begin + self._timeout
        number = write.calls

        def replace() -> None:
            if write.calls == number and jobs:
                self._pool.give_up(jobs[0])

        context.alarms.at(deadline + _STUCK_S, replace)
        stores = context.in_use()
        outcome = context.stack.put(context.rows.keys(labels), context.rows.rows(pages), deadline)
        write.calls += 1
        end = time.monotonic()
        whole = context.rows.whole(outcome.ok)
        stored = int(whole.sum())
        context.recall.wrote(Labels(labels.identities[whole], labels.namespace, labels.epoch), stores)
        write.stored += stored
        context.stats.count(bytes_written=stored * context.rows.page_bytes, write_seconds=end - begin)
        self._ended, self._took = end, end - begin

    def _give_way(self) -> None:
        """Rest, then wait for fetches to end, but not for ever."""
        while (left := self._ended + self._took * self._rest() - time.monotonic()) > 0:
            if self._closed.wait(min(left, _REST_S)) or not self._context.ready():
                return
        end = time.monotonic() + _PATIENCE_S
        while self._fetches.active and time.monotonic() < end and not self._closed.is_set():
            self._closed.wait(_LOOK_S)

    def _rest(self) -> float:
        """How long to rest after a call, in units of the call."""
        return self._rests[0 if self._useful() else 1]

    def _useful(self) -> bool:
        return self._context.planner.useful(STORE, time.monotonic())
