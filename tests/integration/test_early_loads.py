"""Loads ahead of admission: a scheduler's queue in small, with copies that end when the test says so."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hicache_ext.core.page import PrefixScope
from hicache_ext.core.residency import Residency
from hicache_ext.core.tree import Node
from hicache_ext.integration import early_loads
from hicache_ext.integration.early_loads import GATHER_STEPS, EarlyLoads
from tests.core.fakes import Rig, make_rig

SCOPE = PrefixScope()
PAGE = 4


def session(number: int, pages: int) -> np.ndarray:
    return np.arange(pages * PAGE, dtype=np.int64) + 1000 * (number + 1)


class Queue:
    """Requests that wait; every session starts on the host only."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sessions: int, pages: int, group: int) -> None:
        monkeypatch.setattr(early_loads, "GROUP_BYTES", group)
        self.rig: Rig = make_rig(page_size=PAGE, device_pages=sessions * pages + 8, host_pages=200)
        cache = self.rig.cache
        self.early = EarlyLoads(cache, cache.device.available(), page_bytes=1)
        for number in range(sessions):
            tokens = session(number, pages)
            slots = cache.device.alloc(len(tokens))
            assert slots is not None
            cache.insert(SCOPE, tokens, slots)
        cache.flush_backups()
        self.end_copies()
        cache.evict(sessions * pages * PAGE)
        self.waiting: list[str] = []
        self.pages = pages

    def arrive(self, number: int) -> str:
        rid = f"r{number}"
        self.rig.cache.want(rid, SCOPE, session(number, self.pages))
        self.early.queued(rid)
        self.waiting.append(rid)
        return rid

    def leave(self, rid: str) -> None:
        self.waiting.remove(rid)
        self.rig.cache.unwant(rid)

    def step(self, *, busy: bool = True, decoding: bool = False) -> None:
        self.rig.cache.tick()
        self.early.step(set(self.waiting), busy=busy, decoding=decoding)

    def end_copies(self) -> None:
        self.rig.cache.drain()
        self.rig.cache.tick()

    def node(self, number: int) -> Node:
        return self.rig.cache.match(SCOPE, session(number, self.pages)).host_node


def test_nothing_is_held_back_while_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(monkeypatch, sessions=2, pages=3, group=100)
    rid = queue.arrive(0)
    queue.step(busy=False)
    assert not queue.early.holds(rid) and queue.node(0).device is Residency.ABSENT


def test_a_group_is_held_until_it_has_landed_and_the_next_one_is_on_its_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = Queue(monkeypatch, sessions=3, pages=3, group=6)
    first, second, third = (queue.arrive(number) for number in range(3))
    queue.step()
    assert [queue.early.tokens(rid) for rid in (first, second, third)] == [3 * PAGE, 3 * PAGE, 0]
    assert all(queue.early.holds(rid) for rid in (first, second, third))
    queue.end_copies()
    queue.step()
    assert not queue.early.holds(first) and not queue.early.holds(second)
    assert queue.early.holds(third) and queue.early.tokens(third) == 3 * PAGE
    assert queue.node(0).device is Residency.READY


def test_what_has_landed_stays_until_its_request_has_left_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = Queue(monkeypatch, sessions=1, pages=3, group=100)
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


def test_a_small_group_gathers_while_there_is_only_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(monkeypatch, sessions=1, pages=3, group=100)
    rid = queue.arrive(0)
    for _ in range(GATHER_STEPS):
        queue.step(decoding=True)
        assert queue.early.holds(rid) and not queue.early.tokens(rid)
    queue.step(decoding=True)
    assert queue.early.tokens(rid) == 3 * PAGE


def test_random_queues_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    queue = Queue(monkeypatch, sessions=6, pages=4, group=8)
    for number in range(400):
        if len(queue.waiting) < 4 and f"r{number % 6}" not in queue.waiting:
            queue.arrive(number % 6)
        queue.step(busy=rng.random() < 0.8, decoding=rng.random() < 0.5)
        if rng.random() < 0.4:
            queue.end_copies()
        for rid in [rid for rid in queue.waiting if not queue.early.holds(rid) and rng.random() < 0.5]:
            queue.leave(rid)
        if rng.random() < 0.1:
            queue.rig.cache.evict(8 * PAGE)
        queue.rig.cache.check()
    queue.waiting.clear()
    queue.step(busy=False)
    queue.end_copies()
    queue.rig.cache.check()
    assert queue.rig.cache.tree.protected_tokens == 0 and not len(queue.rig.cache.tickets)


def test_a_second_group_is_on_its_way_before_the_first_has_landed(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(monkeypatch, sessions=6, pages=2, group=4)
    rids = [queue.arrive(number) for number in range(6)]
    queue.step()
    queue.step()
    queue.step()
    started = [rid for rid in rids if queue.early.tokens(rid)]
    assert started == rids[:4] and all(queue.early.holds(rid) for rid in rids)
    queue.end_copies()
    queue.step()
    assert not any(queue.early.holds(rid) for rid in rids[:4])
    assert all(queue.early.tokens(rid) for rid in rids)
