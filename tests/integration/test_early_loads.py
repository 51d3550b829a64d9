"""Loads ahead of admission: a scheduler's queue in small, with copies that end when the test says so."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hicache_ext.core.page import PrefixScope
from hicache_ext.core.policy.costs import CostModel
from hicache_ext.core.prefill_batch import GATHER, LEAD, MOST
from hicache_ext.core.residency import Residency
from hicache_ext.core.speeds import Speeds
from hicache_ext.core.tree import Node
from hicache_ext.integration import early_loads
from hicache_ext.integration.early_loads import AT_ONCE, EarlyLoads
from tests.core.fakes import Rig, make_rig

SCOPE = PrefixScope()
PAGE = 4
RUNNING = 10


def session(number: int, pages: int) -> np.ndarray:
    return np.arange(pages * PAGE, dtype=np.int64) + 1000 * (number + 1)


class Queue:
    """Requests that wait; every session starts on the host only."""

    def __init__(self, sessions: int, pages: int) -> None:
        """``pages`` of a session, each a millisecond of the bus."""
        self.now = 0.0
        costs = CostModel(token=1e-3, depth=0.0)
        speeds = Speeds(costs, load_bandwidth=1e6, clock=lambda: self.now)
        room = sessions * pages
        self.rig: Rig = make_rig(
            page_size=PAGE,
            device_pages=2 * room + 8,
            host_pages=2 * room,
            speeds=speeds,
            page_bytes=1000,
        )
        cache = self.rig.cache
        self.early = EarlyLoads(cache, speeds, cache.device.available())
        for number in range(sessions):
            tokens = session(number, pages)
            slots = cache.device.alloc(len(tokens))
            assert slots is not None
            cache.insert(SCOPE, tokens, slots)
        cache.flush_backups()
        self.end_copies()
        cache.evict(room * PAGE)
        self.waiting: list[str] = []
        self.pages = pages

    def arrive(self, number: int) -> str:
        rid = f"r{number}"
        tokens = session(number, self.pages)
        self.rig.cache.want(rid, SCOPE, tokens)
        self.early.queued(rid, len(tokens) + 1)
        self.waiting.append(rid)
        return rid

    def leave(self, rid: str) -> None:
        self.waiting.remove(rid)
        self.rig.cache.unwant(rid)

    def step(self, *, running: int = RUNNING, seconds: float = 0.0) -> None:
        self.now += seconds
        self.rig.cache.tick()
        self.early.step(self.waiting, running)
        self.early.start()

    def held(self) -> list[str]:
        return [rid for rid in self.waiting if self.early.holds(rid)]

    def loaded(self) -> list[str]:
        return [rid for rid in self.waiting if self.early.tokens(rid)]

    def end_copies(self, count: int | None = None) -> None:
        if count is None:
            self.rig.cache.drain()
        else:
            for _ in range(count):
                self.rig.transfers.run_load(0)
        self.rig.cache.tick()

    def node(self, number: int) -> Node:
        return self.rig.cache.match(SCOPE, session(number, self.pages)).host_node


def pages(seconds: float) -> int:
    return round(seconds * 1000)


def test_nothing_is_held_back_while_nothing_runs() -> None:
    queue = Queue(sessions=2, pages=3)
    rid = queue.arrive(0)
    queue.step(running=0)
    assert not queue.early.holds(rid) and queue.node(0).device is Residency.ABSENT


def test_requests_are_held_until_they_have_nearly_landed_and_the_next_are_on_their_way() -> None:
    queue = Queue(sessions=3, pages=pages(MOST) // 2)
    first, second, third = (queue.arrive(number) for number in range(3))
    queue.step()
    assert queue.loaded() == [first, second] and queue.held() == [first, second, third]
    queue.end_copies()
    queue.step(seconds=1.0)
    assert queue.node(0).device is Residency.READY
    assert queue.loaded() == [first, second, third] and queue.held() == [third]


def test_a_batch_goes_before_the_last_of_its_loads_has_landed() -> None:
    queue = Queue(sessions=2, pages=pages(LEAD))
    queue.arrive(0)
    last = queue.arrive(1)
    queue.step(seconds=1.0)
    assert last in queue.held()
    queue.end_copies(1)
    queue.step(seconds=1.0)
    assert queue.held() == [] and queue.node(1).device is Residency.PENDING


def test_a_request_waits_for_others_that_may_come_but_not_for_long() -> None:
    queue = Queue(sessions=2, pages=3)
    rid = queue.arrive(0)
    queue.step()
    queue.end_copies()
    queue.step(seconds=GATHER / 2)
    assert queue.held() == [rid]
    queue.step(seconds=GATHER)
    assert queue.held() == []


def test_nobody_waits_where_nothing_is_loaded() -> None:
    queue = Queue(sessions=1, pages=3)
    queue.arrive(7)
    queue.step()
    assert queue.held() == [] and queue.loaded() == []


def test_what_waits_behind_the_first_many_does_not_overtake_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_loads, "LOOK_AHEAD", 2)
    queue = Queue(sessions=4, pages=pages(MOST))
    for number in range(4):
        queue.arrive(number)
    queue.step()
    assert len(queue.loaded()) == 1 and queue.held() == queue.waiting


def test_loads_wait_until_the_next_batch_has_been_launched_unless_it_is_a_prefill() -> None:
    queue = Queue(sessions=3, pages=pages(MOST))
    queue.arrive(0)
    queue.rig.cache.tick()
    queue.early.step(queue.waiting, RUNNING)
    assert queue.loaded() == [] and queue.held() == ["r0"]
    queue.early.start()
    assert queue.loaded() == ["r0"]
    queue.end_copies()
    queue.now += 1.0
    queue.rig.cache.tick()
    queue.arrive(1)
    for number in range(2, 12):
        # They have nothing to load, so who is ready is not worth holding back.
        queue.early.queued(f"r{number}", 1)
        queue.waiting.append(f"r{number}")
    queue.early.step(queue.waiting, 1)
    assert queue.held() == ["r1"] and queue.loaded() == ["r0", "r1"]


def test_a_few_loads_are_started_at_a_time() -> None:
    queue = Queue(sessions=AT_ONCE + 1, pages=1)
    for number in range(AT_ONCE + 1):
        queue.arrive(number)
    queue.step()
    assert len(queue.loaded()) == AT_ONCE
    queue.step()
    assert len(queue.loaded()) == AT_ONCE + 1


def test_what_has_landed_stays_until_its_request_has_left_the_queue() -> None:
    queue = Queue(sessions=1, pages=3)
    rid = queue.arrive(0)
    queue.step()
    queue.end_copies()
    queue.step()
    cache = queue.rig.cache
    assert cache.tree.protected_tokens == 3 * PAGE and cache.evict(3 * PAGE) == 0
    queue.leave(rid)
    queue.step()
    assert cache.tree.protected_tokens == 0
    cache.check()


def test_kind_waiting_for_a_load_never_ends() -> None:
    """However many come, each one is let in after a few steps, and in the order of the queue."""
    queue = Queue(sessions=40, pages=10)
    admitted: list[str] = []
    came = 0
    for _ in range(60):
        if came < 40:
            queue.arrive(came)
            came += 1
        queue.step(seconds=0.006)
        queue.end_copies(min(1, len(queue.rig.transfers.load_jobs)))
        free = [rid for rid in queue.waiting if not queue.early.holds(rid)]
        for rid in free:
            queue.leave(rid)
        admitted += free
    assert admitted == [f"r{number}" for number in range(40)]


def test_random_queues_leave_nothing_behind() -> None:
    rng = random.Random(3)
    queue = Queue(sessions=6, pages=8)
    for number in range(400):
        if len(queue.waiting) < 4 and f"r{number % 6}" not in queue.waiting:
            queue.arrive(number % 6)
        queue.step(running=rng.choice([0, 1, RUNNING]), seconds=rng.random() / 100)
        if rng.random() < 0.4:
            queue.end_copies()
        for rid in [rid for rid in queue.waiting if not queue.early.holds(rid) and rng.random() < 0.5]:
            queue.leave(rid)
        if rng.random() < 0.1:
            queue.rig.cache.evict(8 * PAGE)
        queue.rig.cache.check()
    queue.waiting.clear()
    queue.step(running=0)
    queue.end_copies()
    queue.rig.cache.check()
    assert queue.rig.cache.tree.protected_tokens == 0 and not len(queue.rig.cache.tickets)
