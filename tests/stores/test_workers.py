"""Threads that may be left behind."""

from __future__ import annotations

import threading
import time

import pytest

from hicache_ext.stores.workers import Workers
from tests.stores.util import soon


def stuck(workers: Workers) -> tuple[threading.Event, list]:
    """Keep a worker busy until the event is set."""
    started, gate = threading.Event(), threading.Event()

    def run() -> str:
        started.set()
        gate.wait(20)
        return "late"

    job = workers.submit(run)
    assert started.wait(5)
    return gate, [job]


def test_kind_backend_down_a_stuck_job_does_not_stop_the_others() -> None:
    workers = Workers("test", 1, spare=2)
    gate, (job,) = stuck(workers)
    begin = time.monotonic()
    workers.wait([job], begin + 0.05)
    assert not workers.give_up(job)
    other = workers.submit(lambda: "done")
    workers.wait([other], soon())
    assert other.future.result() == "done"
    gate.set()
    assert job.future.result(5) == "late"
    assert workers.close(5)


def test_a_job_that_never_started_is_dropped() -> None:
    workers = Workers("test", 1, spare=0)
    gate, _ = stuck(workers)
    ran: list[int] = []
    job = workers.submit(lambda: ran.append(1))
    assert workers.give_up(job)
    gate.set()
    assert workers.close(5)
    assert not ran


def test_spare_threads_are_bounded_and_end() -> None:
    workers = Workers("bounded", 1, spare=2)
    gates = []
    for _ in range(3):
        gate, (job,) = stuck(workers)
        workers.give_up(job)
        gates.append(gate)
    # One thread and two in place of stuck ones; the third stuck job keeps its thread.
    assert sum(t.name == "bounded" for t in threading.enumerate()) == 3
    waiting = workers.submit(lambda: "done")
    workers.wait([waiting], time.monotonic() + 0.05)
    assert not waiting.future.done()
    for gate in gates:
        gate.set()
    workers.wait([waiting], soon())
    assert waiting.future.result() == "done"
    end = soon()
    while sum(t.name == "bounded" for t in threading.enumerate()) > 1 and time.monotonic() < end:
        time.sleep(0.01)
    assert sum(t.name == "bounded" for t in threading.enumerate()) == 1
    assert workers.close(5)


def test_exceptions_reach_the_caller() -> None:
    workers = Workers("test", 1)
    job = workers.submit(lambda: 1 // 0)
    workers.wait([job], soon())
    with pytest.raises(ZeroDivisionError):
        job.future.result()
    assert workers.close(5)


def test_close_does_not_wait_for_ever() -> None:
    workers = Workers("test", 1)
    gate, (job,) = stuck(workers)
    assert not workers.close(0.05)
    gate.set()
    assert job.future.result(5) == "late"
    assert workers.submit(lambda: 1).future.cancelled()
