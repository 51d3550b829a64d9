"""The queue in which the threads of a remote tier leave their results."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

from hicache_ext.core.remote import UNDONE, ResultQueue


def test_nothing_has_ended_yet() -> None:
    queue = ResultQueue()
    assert queue.results(0, 3) == [UNDONE] * 3
    assert queue.results(0, 0) == []


def test_results_in_order() -> None:
    queue = ResultQueue()
    for seq, value in ((1, 7), (2, 0), (3, 9)):
        queue.post(seq, value)
    assert queue.results(0, 2) == [7, 0]
    assert queue.results(0, 5) == [7, 0, 9, UNDONE, UNDONE]
    assert queue.results(2, 2) == [9, UNDONE]


def test_what_ended_early_shows_at_once() -> None:
    queue = ResultQueue()
    queue.post(2, 20)
    queue.post(4, 40)
    assert queue.results(0, 4) == [UNDONE, 20, UNDONE, 40]
    queue.post(1, 10)
    assert queue.results(0, 4) == [10, 20, UNDONE, 40]
    assert queue.results(2, 3) == [UNDONE, 40, UNDONE]


def test_results_are_told_again_until_they_are_passed() -> None:
    queue = ResultQueue()
    queue.post(1, 10)
    queue.post(2, 20)
    assert queue.results(0, 2) == queue.results(0, 2) == [10, 20]
    assert queue.results(1, 2) == [20, UNDONE]


def test_a_job_without_a_value_counts_as_0() -> None:
    queue = ResultQueue()
    queue.post(1)
    assert queue.results(0, 1) == [0]


def test_passed_results_are_forgotten() -> None:
    queue = ResultQueue()
    for seq in range(1, 1001):
        queue.post(seq, seq)
        assert queue.results(seq - 1, 8)[0] == seq
        assert len(queue._values) == 1
    queue.results(1000, 0)
    assert not queue._values and queue.done() == 1000


def test_many_threads_post() -> None:
    queue = ResultQueue()
    jobs = list(range(1, 2001))
    random.Random(1).shuffle(jobs)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda seq: queue.post(seq, 3 * seq), jobs))
    assert queue.done() == 2000
    assert queue.results(0, 2001) == [3 * seq for seq in range(1, 2001)] + [UNDONE]
