"""Agreement on completions: order, bad pages, and that all ranks apply the same, whatever they hold."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_ext.core.tick import Agreed, CompletionQueue, agree
from tests.core.fakes import SharedMin

steady = settings(deadline=None, derandomize=True)

Post = int | tuple[int, int]
"""A job by its sequence number, or with its first bad page."""


def queue_of(*posts: Post) -> CompletionQueue:
    """The jobs in the order they ended."""
    queue = CompletionQueue()
    for post in posts:
        seq, bad = post if isinstance(post, tuple) else (post, None)
        queue.post(seq, bad)
    return queue


NONE = CompletionQueue()
"""Nothing was posted to it."""


# One queue


def test_done_waits_for_the_jobs_before() -> None:
    queue = CompletionQueue()
    assert queue.done() == 0
    for seq, done in [(3, 0), (2, 0), (1, 3), (5, 3), (4, 5)]:
        queue.post(seq)
        assert queue.done() == done


def test_a_failure_counts_once_all_before_it_have_ended() -> None:
    queue = queue_of((3, 7))
    assert queue.first_failure(0) is None
    queue.post(1)
    assert queue.done() == 1 and queue.first_failure(0) is None
    queue.post(2)
    assert queue.done() == 3 and queue.first_failure(0) == (3, 7)


def test_a_bad_first_page_is_a_failure_too() -> None:
    """Page 0 is not the same as no page."""
    assert queue_of((1, 0)).first_failure(0) == (1, 0)


def test_failures_are_told_in_order_and_only_past_what_is_applied() -> None:
    queue = queue_of(1, (2, 9), 3, (4, 0))
    told = [queue.first_failure(after) for after in range(5)]
    assert told == [(2, 9), (2, 9), (4, 0), (4, 0), None]


def test_asking_twice_tells_the_same_failure() -> None:
    """Ranks that are not there yet keep a failure from being applied: it is asked for again."""
    queue = queue_of(1, (2, 5))
    assert [queue.first_failure(1) for _ in range(3)] == [(2, 5)] * 3


def test_applied_failures_are_forgotten() -> None:
    """A server whose host memory fails runs for long: what it has dealt with may not add up."""
    queue = CompletionQueue()
    for seq in range(1, 1001):
        queue.post(seq, 0)
        assert queue.first_failure(seq - 1) == (seq, 0)
    assert queue.first_failure(1000) is None
    assert not queue._bad and not queue._early


def test_posts_from_many_threads_are_all_counted() -> None:
    queue, jobs, threads = CompletionQueue(), 400, 4
    start = threading.Barrier(threads)

    def post(first: int) -> None:
        start.wait(10)
        for seq in range(first, jobs + 1, threads):
            queue.post(seq, 3 if seq == 77 else None)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(post, range(1, threads + 1)))
    assert queue.done() == jobs and queue.first_failure(0) == (77, 3) and queue.first_failure(77) is None


@pytest.mark.timeout(60)
def test_a_waiter_returns_when_its_job_and_those_before_have_ended() -> None:
    queue = CompletionQueue()
    returned = threading.Event()

    def wait() -> None:
        queue.wait(3)
        returned.set()

    threading.Thread(target=wait, daemon=True).start()
    for seq in (1, 4, 2):
        queue.post(seq)
        assert not returned.wait(0.05), f"posted {seq}, and job 3 has not ended"
    queue.post(3)
    assert returned.wait(10)
    for seq in (4, 3, 0):
        queue.wait(seq)


@pytest.mark.timeout(60)
def test_a_waiter_waits_for_the_jobs_before_its_own() -> None:
    queue = queue_of(2)
    returned = threading.Event()

    def wait() -> None:
        queue.wait(2)
        returned.set()

    threading.Thread(target=wait, daemon=True).start()
    assert not returned.wait(0.05), "job 1 has not ended"
    queue.post(1, 0)
    assert returned.wait(10)


@steady
@given(st.permutations(range(1, 9)), st.dictionaries(st.integers(1, 8), st.integers(0, 2**32 - 1)))
def test_the_order_of_posts_does_not_matter(order: list[int], failed: dict[int, int]) -> None:
    queue = CompletionQueue()
    posted: set[int] = set()
    applied = 0
    for seq in order:
        queue.post(seq, failed.get(seq))
        posted.add(seq)
        done = max(n for n in range(9) if set(range(1, n + 1)) <= posted)
        assert queue.done() == done
        for after in range(applied, 9):
            waiting = CompletionQueue()
            for other in posted:
                waiting.post(other, failed.get(other))
            expected = min(((f, p) for f, p in failed.items() if after < f <= done), default=None)
            assert waiting.first_failure(after) == expected
        applied = max(applied, done // 2)
        expected = min(((f, p) for f, p in failed.items() if applied < f <= done), default=None)
        assert queue.first_failure(applied) == expected


# One rank


def test_empty_queues_apply_nothing() -> None:
    assert agree((CompletionQueue(), 0), (CompletionQueue(), 0), 8, None) == Agreed(0, 0, None)
    assert agree((queue_of(1, 2), 2), (queue_of(1), 1), 8, None) == Agreed(2, 1, None)


def test_the_prefix_of_ended_jobs_is_applied() -> None:
    assert agree((queue_of(2, 4, 1), 0), (queue_of(3, 1), 0), 8, None) == Agreed(2, 1, None)


@pytest.mark.parametrize(
    ("applied", "limit", "upto"), [(0, 2, 2), (2, 2, 4), (4, 2, 5), (0, 5, 5), (0, 0, 0), (0, 1 << 30, 5)]
)
def test_at_most_limit_jobs_of_each_queue_are_applied(applied: int, limit: int, upto: int) -> None:
    five, two = queue_of(1, 2, 3, 4, 5), queue_of(1, 2)
    assert agree((five, applied), (two, 2), limit, None) == Agreed(upto, 2, None)
    assert agree((two, 2), (five, applied), limit, None) == Agreed(2, upto, None)


def test_a_failed_load_is_the_last_of_its_batch() -> None:
    loads = queue_of(1, (2, 4), 3, (4, 0), (5, 9), 6)
    verdicts, applied = [], 0
    for _ in range(5):
        agreed = agree((NONE, 0), (loads, applied), 8, None)
        verdicts.append((agreed.loads, agreed.bad_page))
        applied = agreed.loads
    assert verdicts == [(2, 4), (4, 0), (5, 9), (6, None), (6, None)]


def test_a_failed_load_does_not_hold_backups_back() -> None:
    assert agree((queue_of(1, 2, 3), 0), (queue_of((1, 0), 2), 0), 8, None) == Agreed(3, 1, 0)


def test_a_failure_past_the_limit_waits() -> None:
    loads = queue_of(1, 2, (3, 5))
    assert agree((NONE, 0), (loads, 0), 2, None) == Agreed(0, 2, None)
    assert agree((NONE, 0), (loads, 2), 2, None) == Agreed(0, 3, 5)


def test_the_largest_page_number_is_told_unchanged() -> None:
    largest = 2**32 - 1
    assert agree((NONE, 0), (queue_of(1, (2, largest)), 0), 8, None) == Agreed(0, 2, largest)


# Many ranks


def on_all_ranks(
    ranks: list[tuple[CompletionQueue, CompletionQueue]], applied: tuple[int, int], limit: int
) -> Agreed:
    """The verdict, asserted equal on all ranks that each sent three int64."""
    sent: list[np.ndarray] = []

    def collect(values: np.ndarray) -> np.ndarray:
        sent.append(values.copy())
        return values

    for backups, loads in ranks:
        agree((backups, applied[0]), (loads, applied[1]), limit, collect)
    assert [(len(s), s.dtype) for s in sent] == [(3, np.int64)] * len(ranks)
    smallest = np.stack(sent).min(axis=0)
    verdicts = [agree((b, applied[0]), (n, applied[1]), limit, lambda _: smallest.copy()) for b, n in ranks]
    assert all(v == verdicts[0] for v in verdicts)
    return verdicts[0]


def loads_on_ranks(*ranks: CompletionQueue, applied: int = 0) -> Agreed:
    return on_all_ranks([(NONE, loads) for loads in ranks], (0, applied), 8)


def test_only_what_all_ranks_have_is_applied() -> None:
    ranks = [(queue_of(1, 2, 3), queue_of(1)), (queue_of(1), queue_of(2, 1)), (queue_of(2, 1), queue_of(1))]
    assert on_all_ranks(ranks, (0, 0), 8) == Agreed(1, 1, None)


def test_a_rank_with_an_empty_queue_holds_the_others_back() -> None:
    assert loads_on_ranks(queue_of(1, 2), NONE) == Agreed(0, 0, None)
    assert on_all_ranks([(queue_of(1, 2), NONE), (NONE, NONE)], (0, 0), 8) == Agreed(0, 0, None)


def test_a_failure_on_one_rank_fails_the_load_on_all() -> None:
    assert loads_on_ranks(queue_of(1, 2, 3), queue_of(1, (2, 6), 3)) == Agreed(0, 2, 6)


def test_the_earliest_failed_load_of_any_rank_comes_first_whatever_its_page() -> None:
    assert loads_on_ranks(queue_of(1, 2, (3, 0)), queue_of(1, (2, 6), 3)) == Agreed(0, 2, 6)
    assert loads_on_ranks(queue_of(1, 2, (3, 0)), queue_of(1, 2, 3), applied=2) == Agreed(0, 3, 0)


def test_of_one_load_the_first_bad_page_of_any_rank_counts() -> None:
    assert loads_on_ranks(queue_of((1, 5)), queue_of((1, 3)), queue_of((1, 4)), queue_of(1)) == Agreed(
        0, 1, 3
    )


def test_failures_of_different_loads_are_applied_one_after_the_other() -> None:
    ranks = [queue_of((1, 5), 2, 3), queue_of(1, 2, (3, 0)), queue_of(1, (2, 2), (3, 1))]
    verdicts, applied = [], 0
    for _ in range(4):
        verdicts.append(loads_on_ranks(*ranks, applied=applied))
        applied = verdicts[-1].loads
    assert verdicts == [Agreed(0, 1, 5), Agreed(0, 2, 2), Agreed(0, 3, 0), Agreed(0, 3, None)]


def test_a_failure_waits_until_every_rank_has_ended_the_load() -> None:
    """And a rank that ends it later may have found an earlier page."""
    late = queue_of(1)
    ranks = [queue_of(1, (2, 6), 3), late]
    assert loads_on_ranks(*ranks) == Agreed(0, 1, None)
    assert loads_on_ranks(*ranks, applied=1) == Agreed(0, 1, None)
    late.post(2, 4)
    assert loads_on_ranks(*ranks, applied=1) == Agreed(0, 2, 4)


@dataclass
class Run:
    """Ranks that see completions in different orders at different times; some loads fail on some ranks."""

    ranks: int
    jobs: tuple[int, int]
    limit: int
    seed: int
    applied: tuple[int, int] = (0, 0)
    settled: list[dict[int, int | None]] = field(default_factory=lambda: [{}, {}])

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.queues = [(CompletionQueue(), CompletionQueue()) for _ in range(self.ranks)]
        self.to_post = [
            (rank, kind, seq)
            for kind, count in enumerate(self.jobs)
            for rank in range(self.ranks)
            for seq in range(1, count + 1)
        ]
        self.bad = {
            job: self.rng.choice([0, 1, 2, 5, 2**20])
            for job in self.to_post
            if job[1] == 1 and self.rng.random() < 0.2
        }
        self.rng.shuffle(self.to_post)

    def post_some(self) -> None:
        for _ in range(min(self.rng.randint(0, 5), len(self.to_post))):
            rank, kind, seq = job = self.to_post.pop()
            self.queues[rank][kind].post(seq, self.bad.get(job))

    def tick(self) -> None:
        verdict = on_all_ranks(self.queues, self.applied, self.limit)
        for kind, upto in enumerate((verdict.backups, verdict.loads)):
            assert self.applied[kind] <= upto <= self.applied[kind] + self.limit
            for seq in range(self.applied[kind] + 1, upto + 1):
                assert seq not in self.settled[kind]
                assert all(rank[kind].done() >= seq for rank in self.queues), "applied before it ended"
                last_load = kind == 1 and seq == upto
                self.settled[kind][seq] = verdict.bad_page if last_load else None
        if verdict.bad_page is not None:
            assert verdict.loads > self.applied[1], "a failure was told twice"
        self.applied = verdict.backups, verdict.loads

    def first_bad(self, seq: int) -> int | None:
        pages = [self.bad[job] for rank in range(self.ranks) if (job := (rank, 1, seq)) in self.bad]
        return min(pages, default=None)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(
    ranks=st.integers(1, 4),
    backups=st.integers(0, 7),
    loads=st.integers(0, 7),
    limit=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_every_job_is_settled_once_and_the_same_on_all_ranks(
    ranks: int, backups: int, loads: int, limit: int, seed: int
) -> None:
    run = Run(ranks, (backups, loads), limit, seed)
    while run.to_post:
        run.post_some()
        run.tick()
    for _ in range(2 * max(backups, loads) + 1):
        run.tick()
    assert run.settled[0] == dict.fromkeys(range(1, backups + 1))
    assert run.settled[1] == {seq: run.first_bad(seq) for seq in range(1, loads + 1)}


@pytest.mark.timeout(60)
def test_ranks_in_threads_meet_in_one_reduction_a_tick() -> None:
    """Real concurrency: nobody waits for a vector that another rank does not send."""
    ranks, ticks = 3, 50
    shared = SharedMin(ranks)
    queues = [(CompletionQueue(), CompletionQueue()) for _ in range(ranks)]
    loads = len(range(0, ticks, ranks))

    def live(rank: int) -> list[Agreed]:
        seen, applied = [], (0, 0)
        backups, mine = queues[rank]
        for step in range(ticks):
            if step % (rank + 1) == 0:
                seq = step // (rank + 1) + 1
                backups.post(seq)
                # Each rank finds other loads bad, and other pages of the same one.
                mine.post(seq, 10 - rank if seq % (rank + 2) == 0 else None)
            agreed = agree((backups, applied[0]), (mine, applied[1]), 2, shared.of(rank))
            applied = agreed.backups, agreed.loads
            seen.append(agreed)
        return seen

    with ThreadPoolExecutor(ranks) as pool:
        first, *others = list(pool.map(live, range(ranks)))
    assert all(other == first for other in others)
    assert first[-1].backups == loads and first[-1].loads >= loads - 2
    told = {agreed.loads: agreed.bad_page for agreed in first if agreed.bad_page is not None}
    expected = {
        seq: min(10 - rank for rank in range(ranks) if seq % (rank + 2) == 0)
        for seq in range(1, first[-1].loads + 1)
        if any(seq % (rank + 2) == 0 for rank in range(ranks))
    }
    assert told == expected
    assert shared.calls == [[3] * ticks] * ranks
