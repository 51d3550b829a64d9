"""Agreement on completions: order, failures, and that all ranks apply the same, whatever they hold."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_ext.core.tick import Agreed, CompletionQueue, agree
from tests.core.fakes import SharedMin

steady = settings(deadline=None, derandomize=True)


def queue_of(*posts: int) -> CompletionQueue:
    """Jobs by sequence number in the order they ended; a negative one failed."""
    queue = CompletionQueue()
    for seq in posts:
        queue.post(abs(seq), ok=seq > 0)
    return queue


# One queue


def test_done_waits_for_the_jobs_before() -> None:
    queue = CompletionQueue()
    assert queue.done() == 0
    for seq, done in [(3, 0), (2, 0), (1, 3), (5, 3), (4, 5)]:
        queue.post(seq)
        assert queue.done() == done


def test_a_failure_counts_once_all_before_it_have_ended() -> None:
    queue = queue_of(-3)
    assert queue.first_failure(0) is None
    queue.post(1)
    assert queue.done() == 1 and queue.first_failure(0) is None
    queue.post(2)
    assert queue.done() == 3 and queue.first_failure(0) == 3


def test_failures_are_told_in_order_and_only_past_what_is_applied() -> None:
    queue = queue_of(1, -2, 3, -4)
    assert [queue.first_failure(after) for after in range(5)] == [2, 2, 4, 4, None]


def test_posts_from_many_threads_are_all_counted() -> None:
    queue, jobs, threads = CompletionQueue(), 400, 4
    start = threading.Barrier(threads)

    def post(first: int) -> None:
        start.wait(10)
        for seq in range(first, jobs + 1, threads):
            queue.post(seq, ok=seq != 77)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(post, range(1, threads + 1)))
    assert queue.done() == jobs and queue.first_failure(0) == 77 and queue.first_failure(77) is None


@steady
@given(st.permutations(range(1, 9)), st.sets(st.integers(1, 8)))
def test_the_order_of_posts_does_not_matter(order: list[int], failed: set[int]) -> None:
    queue = CompletionQueue()
    posted: set[int] = set()
    for seq in order:
        queue.post(seq, ok=seq not in failed)
        posted.add(seq)
        done = max(n for n in range(9) if set(range(1, n + 1)) <= posted)
        assert queue.done() == done
        for after in range(9):
            expected = min((f for f in failed if after < f <= done), default=None)
            assert queue.first_failure(after) == expected


# One rank


def test_an_empty_queue_applies_nothing() -> None:
    assert agree([(CompletionQueue(), 0), (queue_of(1, 2), 2)], 8, None) == [
        Agreed(0, None),
        Agreed(2, None),
    ]


def test_the_prefix_of_ended_jobs_is_applied() -> None:
    assert agree([(queue_of(2, 4, 1), 0)], 8, None) == [Agreed(2, None)]


@pytest.mark.parametrize(
    ("applied", "limit", "upto"), [(0, 2, 2), (2, 2, 4), (4, 2, 5), (0, 5, 5), (0, 0, 0)]
)
def test_at_most_limit_jobs_are_applied(applied: int, limit: int, upto: int) -> None:
    assert agree([(queue_of(1, 2, 3, 4, 5), applied)], limit, None) == [Agreed(upto, None)]


def test_a_failed_job_is_the_last_of_its_batch() -> None:
    queue = queue_of(1, -2, 3, -4, -5, 6)
    verdicts, applied = [], 0
    for _ in range(5):
        (verdict,) = agree([(queue, applied)], 8, None)
        verdicts.append((verdict.upto, verdict.failed))
        applied = verdict.upto
    assert verdicts == [(2, 2), (4, 4), (5, 5), (6, None), (6, None)]


def test_a_failure_past_the_limit_waits() -> None:
    queue = queue_of(1, 2, -3)
    assert agree([(queue, 0)], 2, None) == [Agreed(2, None)]
    assert agree([(queue, 2)], 2, None) == [Agreed(3, 3)]


def test_queues_do_not_disturb_each_other() -> None:
    queues = [(queue_of(-1, 2), 0), (queue_of(1, 2), 0), (CompletionQueue(), 0)]
    assert agree(queues, 8, None) == [Agreed(1, 1), Agreed(2, None), Agreed(0, None)]


# Many ranks


def on_all_ranks(
    ranks: list[list[CompletionQueue]], applied: list[int], limit: int
) -> tuple[list[Agreed], list[int]]:
    """The verdict, asserted equal on all ranks, and the lengths of the vectors they sent."""
    sent: list[np.ndarray] = []

    def collect(values: np.ndarray) -> np.ndarray:
        sent.append(values.copy())
        return values

    queues = [list(zip(rank, applied, strict=True)) for rank in ranks]
    for rank in queues:
        agree(rank, limit, collect)
    smallest = np.stack(sent).min(axis=0)
    verdicts = [agree(rank, limit, lambda values: smallest.copy()) for rank in queues]
    assert all(v == verdicts[0] for v in verdicts)
    return verdicts[0], [len(s) for s in sent]


def test_only_what_all_ranks_have_is_applied() -> None:
    verdict, _ = on_all_ranks([[queue_of(1, 2, 3)], [queue_of(1)], [queue_of(2, 1)]], [0], 8)
    assert verdict == [Agreed(1, None)]


def test_a_rank_with_an_empty_queue_holds_the_others_back() -> None:
    verdict, lengths = on_all_ranks([[queue_of(1, 2)], [CompletionQueue()]], [0], 8)
    assert verdict == [Agreed(0, None)] and lengths == [2, 2]


def test_a_failure_on_one_rank_fails_the_job_on_all() -> None:
    verdict, _ = on_all_ranks([[queue_of(1, 2, 3)], [queue_of(1, -2, 3)]], [0], 8)
    assert verdict == [Agreed(2, 2)]


def test_the_earliest_failure_of_any_rank_comes_first() -> None:
    verdict, _ = on_all_ranks([[queue_of(1, 2, -3)], [queue_of(1, -2, 3)]], [0], 8)
    assert verdict == [Agreed(2, 2)]


def test_a_failure_waits_until_every_rank_has_ended_the_job() -> None:
    ranks = [[queue_of(1, -2, 3)], [queue_of(1)]]
    assert on_all_ranks(ranks, [0], 8)[0] == [Agreed(1, None)]
    assert on_all_ranks(ranks, [1], 8)[0] == [Agreed(1, None)]
    ranks[1][0].post(2)
    assert on_all_ranks(ranks, [1], 8)[0] == [Agreed(2, 2)]


@settings(deadline=None, derandomize=True, max_examples=300)
@given(
    ranks=st.integers(1, 4),
    jobs=st.lists(st.integers(0, 7), min_size=2, max_size=2),
    limit=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_every_job_is_settled_once_and_the_same_on_all_ranks(
    ranks: int, jobs: list[int], limit: int, seed: int
) -> None:
    """Ranks see completions in different orders at different times; some jobs fail on some ranks."""
    rng = random.Random(seed)
    queues = [[CompletionQueue() for _ in jobs] for _ in range(ranks)]
    to_post = [
        (rank, kind, seq)
        for kind, count in enumerate(jobs)
        for rank in range(ranks)
        for seq in range(1, count + 1)
    ]
    failing = {job for job in to_post if rng.random() < 0.2}
    rng.shuffle(to_post)
    applied = [0] * len(jobs)
    settled: list[dict[int, bool]] = [{} for _ in jobs]

    def tick() -> None:
        verdict, lengths = on_all_ranks(queues, applied, limit)
        assert set(lengths) == {2 * len(jobs)}
        for kind, agreed in enumerate(verdict):
            assert applied[kind] <= agreed.upto <= applied[kind] + limit
            assert agreed.failed in (None, agreed.upto), "a failed job is not the last of its batch"
            for seq in range(applied[kind] + 1, agreed.upto + 1):
                assert seq not in settled[kind]
                assert all(rank[kind].done() >= seq for rank in queues), "applied before it ended everywhere"
                settled[kind][seq] = seq != agreed.failed
            applied[kind] = agreed.upto

    while to_post:
        for _ in range(min(rng.randint(0, 5), len(to_post))):
            rank, kind, seq = to_post.pop()
            queues[rank][kind].post(seq, ok=(rank, kind, seq) not in failing)
        tick()
    for _ in range(2 * max(jobs) + 1):
        tick()
    for kind, count in enumerate(jobs):
        bad = {seq for _, of_kind, seq in failing if of_kind == kind}
        assert settled[kind] == {seq: seq not in bad for seq in range(1, count + 1)}


@pytest.mark.timeout(60)
def test_ranks_in_threads_meet_in_one_reduction_a_tick() -> None:
    """Real concurrency: nobody waits for a vector that another rank does not send."""
    ranks, ticks = 3, 50
    shared = SharedMin(ranks)
    queues = [CompletionQueue() for _ in range(ranks)]

    def live(rank: int) -> list[int]:
        seen, applied = [], 0
        for step in range(ticks):
            if step % (rank + 1) == 0:
                queues[rank].post(step // (rank + 1) + 1)
            (verdict,) = agree([(queues[rank], applied)], 2, shared.of(rank))
            applied = verdict.upto
            seen.append(applied)
        return seen

    with ThreadPoolExecutor(ranks) as pool:
        first, *others = list(pool.map(live, range(ranks)))
    assert all(other == first for other in others) and first[-1] == len(range(0, ticks, ranks))
    assert shared.calls == [[2] * ticks] * ranks
