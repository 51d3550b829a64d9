"""Threads that may be left behind: a caller waits for a job until its deadline and no longer."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any, Generic, TypeVar

P = TypeVar("P")
T = TypeVar("T")


class Fate(Enum):
    """What became of a part by the deadline."""

    DONE = auto()
    DROPPED = auto()
    """It never started and never will."""
    RUNNING = auto()
    """It goes on; ``Part.when_ended`` tells when it no longer does."""


class Job(Generic[T]):
    """One function on its way through ``Workers``."""

    def __init__(self, run: Callable[[], T]) -> None:
        self.run = run
        self.future: Future[T] = Future()


@dataclass(frozen=True)
class Part(Generic[P, T]):
    """A part of a call."""

    value: P
    fate: Fate
    result: T | None
    """If done."""
    job: Job[T]

    def when_ended(self, call: Callable[[], None]) -> None:
        """Call when the part has ended; at once if it has."""
        self.job.future.add_done_callback(lambda _: call())


class Workers:
    """A few daemon threads that run jobs in order.

    A job that is still running when its caller gives up keeps its thread until it ends; another thread takes
    its place, so that a stuck job does not take the others along. At most ``spare`` threads are replaced at
    a time: beyond that, jobs wait in the queue and are dropped unstarted when their callers give up.
    """

    def __init__(self, name: str, threads: int, spare: int = 16) -> None:
        self._name = name
        self._spare = spare
        self._queue: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._stuck = 0
        self._closed = False
        self._threads: list[threading.Thread] = []
        for _ in range(threads):
            self._start()

    def submit(self, run: Callable[[], T]) -> Job[T]:
        """Queue a function. After ``close`` it is never run."""
        job = Job(run)
        if self._closed:
            job.future.cancel()
        else:
            self._queue.put(job)
        return job

    def wait(self, jobs: Sequence[Job[Any]], deadline: float) -> None:
        """Until all jobs have ended, or the deadline."""
        wait([job.future for job in jobs], max(0.0, deadline - time.monotonic()))

    def give_up(self, job: Job[Any]) -> bool:
        """Stop waiting for a job. True: it will never run, or has ended; False: it is still running."""
        if job.future.cancel() or job.future.done():
            return True
        with self._lock:
            if self._stuck >= self._spare or self._closed:
                return job.future.done()
            self._stuck += 1
        job.future.add_done_callback(lambda _: self._unstuck())
        self._start()
        return job.future.done()

    def run(self, work: Callable[[P], T], parts: Sequence[P], deadline: float) -> list[Part[P, T]]:
        """Run ``work`` on all parts side by side; what has become of each by the deadline.

        Raises what ``work`` raised.
        """
        jobs = [self.submit(partial(work, part)) for part in parts]
        self.wait(jobs, deadline)
        # First those not started: a thread that replaces a stuck one must not take them up.
        for job in jobs:
            job.future.cancel()
        return [self._part(value, job) for value, job in zip(parts, jobs, strict=True)]

    def _part(self, value: P, job: Job[T]) -> Part[P, T]:
        if not self.give_up(job):
            return Part(value, Fate.RUNNING, None, job)
        if job.future.cancelled():
            return Part(value, Fate.DROPPED, None, job)
        return Part(value, Fate.DONE, job.future.result(), job)

    def ask(self, question: Callable[[], bool], deadline: float) -> bool:
        """The answer of a function, or False if it does not come in time."""
        (part,) = self.run(lambda _: question(), [None], deadline)
        return bool(part.result)

    def close(self, timeout: float) -> bool:
        """Run no further job; wait for those in flight. False if some are still running after that."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
        self._drop_queue()
        for _ in threads:
            self._queue.put(None)
        end = time.monotonic() + timeout
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _start(self) -> None:
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        with self._lock:
            self._threads = [t for t in self._threads if t.is_alive()]
            self._threads.append(thread)
            thread.start()

    def _unstuck(self) -> None:
        with self._lock:
            self._stuck -= 1
        # One thread more than needed is running now: the next that is idle ends.
        self._queue.put(None)

    def _drop_queue(self) -> None:
        while True:
            try:
                job = self._queue.get_nowait()
            except queue.Empty:
                return
            if job is not None:
                job.future.cancel()

    def _work(self) -> None:
        while True:
            job = self._queue.get()
            if job is None:
                return
            if not job.future.set_running_or_notify_cancel():
                continue
            try:
                result = job.run()
            except BaseException as error:
                job.future.set_exception(error)
            else:
                job.future.set_result(result)
            # Its buffers and results must not live until the next job comes.
            del job
