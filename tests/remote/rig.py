"""A remote engine on small pages, with a planner that fetches whatever is there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hicache_ext.core.header import Integrity, Labels
from hicache_ext.core.page import page_identities
from hicache_ext.core.remote import UNDONE, Query, ResultQueue
from hicache_ext.remote.engine import Place, RemoteEngine, RemoteSettings
from hicache_ext.stores.base import Store
from hicache_ext.stores.breaker import BreakerSettings, CircuitBreaker, GuardedStore
from hicache_ext.stores.memory import MemoryStore
from hicache_ext.transfer.host_pool import HostPagePool
from hicache_ext.transfer.layout import Component, PageLayout
from hicache_ext.transfer.seal import Seal

PAGE = 4
PAGES = 32
GROUPS = 4
NAMESPACE = bytes(range(32))
PARENT = b"p" * 16
SOON = 10.0
"""Seconds; only reached when something is wrong."""


def layout_of(first_group: int = 0, groups: int = GROUPS) -> PageLayout:
    """A rank's share of a model with 4 KV heads, one a group."""
    components = (Component("K", groups, 8), Component("V", groups, 8))
    return PageLayout(PAGE, 2, torch.bfloat16, components, groups, first_group)


OBJECT_BYTES = layout_of().geometry.object_bytes


@dataclass
class Asked:
    ask: bool
    deadline: float
    started: float
    ahead: float = 0.0


@dataclass(eq=False)
class Planned:
    pages: int
    window: int
    wait: bool
    deadline: float
    ahead: float = 0.0
    ended: int | None = None


class EagerPlanner:
    """Everything that is there is worth fetching, within fixed times."""

    def __init__(self, lookup_s: float = SOON, fetch_s: float = SOON, window: int = 3) -> None:
        self.lookup_s = lookup_s
        self.fetch_s = fetch_s
        self.window = window
        self.wait = self.worth = True
        self.plans: list[Planned] = []
        self.answers: list[tuple[int, bool]] = []
        self.nbytes = 0
        self.running = 0

    @property
    def speeds(self) -> EagerPlanner:
        return self

    def observed_fetch(self, store: str, nbytes: int, seconds: float, now: float) -> None:
        pass

    def fetch_began(self, store: str, now: float) -> None:
        self.running += 1

    def fetch_ended(self, store: str, nbytes: int, now: float) -> None:
        self.running -= 1
        self.nbytes += nbytes

    def plan_lookup(self, store: str, start: int, tokens: int, now: float, *, ahead: float) -> Asked:
        return Asked(True, now + ahead + self.lookup_s, now, ahead)

    def looked_up(self, plan: Asked, pages: int, now: float, *, answered: bool) -> None:
        self.answers.append((pages, answered))

    def plan_fetch(
        self, store: str, start: int, pages: int, now: float, *, since: float | None, ahead: float
    ) -> Planned:
        self.plans.append(Planned(pages, self.window, self.wait, now + ahead + self.fetch_s, ahead))
        return self.plans[-1]

    def turn_came(self, plan: Asked | Planned, now: float) -> None:
        plan.deadline -= plan.ahead
        plan.ahead = 0.0

    def arrived(self, plan: Planned, pages: int, now: float) -> None:
        assert 0 <= pages <= plan.pages

    def ended(self, plan: Planned, pages: int, now: float) -> None:
        if plan.ended is None:
            plan.ended = pages

    def useful(self, store: str, now: float) -> bool:
        return self.worth

    def withdrawn(self, plan: Planned, now: float) -> None:
        if plan.ended is None:
            plan.ended = -1


class SharedMemoryStore(MemoryStore):
    """What one of these holds, all that were made from it hold."""

    def __init__(self, first: SharedMemoryStore | None = None, limit: int = 10_000) -> None:
        super().__init__(OBJECT_BYTES, limit)
        if first is not None:
            self._objects = first._objects
            self._lock = first._lock

    def close(self) -> None:
        self._rack = None


class Rig:
    """One rank."""

    def __init__(
        self,
        *stores: Store,
        layout: PageLayout | None = None,
        planner: Any = None,
        integrity: Integrity = Integrity.FULL,
        writes: Sequence[bool] | None = None,
        settings: RemoteSettings | None = None,
        breaker: BreakerSettings | None = None,
        make: Callable[[HostPagePool, Seal, EagerPlanner], RemoteEngine] | None = None,
        learn: bool = True,
    ) -> None:
        self.layout = layout or layout_of()
        self.pool = HostPagePool(self.layout, PAGES, pinned=False, scratch=4)
        self.pool.buffer.zero_()
        self.seal = Seal(self.layout, integrity)
        self.planner = planner or EagerPlanner()
        if make is None:
            settings = settings or RemoteSettings(probe=False, write_share=1.0, epoch_interval=0.02)
            flags = writes or [True] * len(stores)
            places = [
                Place(GuardedStore(store, f"store {i}", CircuitBreaker(breaker)), flag)
                for i, (store, flag) in enumerate(zip(stores, flags, strict=True))
            ]
            self.engine = RemoteEngine(places, self.pool, self.seal, self.planner, settings)
        else:
            self.engine = make(self.pool, self.seal, self.planner)
        self._seqs = {id(queue): 0 for queue in self.queues}
        if learn:
            self.engine.use(NAMESPACE, 0)
            assert eventually(lambda: self.engine.learned() is not None)

    @property
    def queues(self) -> tuple[ResultQueue, ...]:
        engine = self.engine
        return engine.lookups, engine.arrivals, engine.settled, engine.written

    def number(self, queue: ResultQueue) -> int:
        self._seqs[id(queue)] += 1
        return self._seqs[id(queue)]

    def lookup(self, tokens: np.ndarray, epoch: int = 0, skip: int = 0, ahead: float = 0.0) -> int:
        seq = self.number(self.engine.lookups)
        self.engine.lookup(seq, Query(PARENT, tokens, skip * PAGE, skip, NAMESPACE, epoch, ahead))
        return seq

    def found(self, tokens: np.ndarray, epoch: int = 0, skip: int = 0) -> tuple[int, int]:
        """(number, pages) of a lookup."""
        seq = self.lookup(tokens, epoch, skip)
        return seq, result(self.engine.lookups, seq)

    def fetch(self, lookup: int, pages: Sequence[int], labels: Labels) -> int:
        seq = self.number(self.engine.arrivals)
        self.engine.fetch(seq, lookup, np.array(pages, np.int64), labels)
        return seq

    def write(self, pages: Sequence[int], labels: Labels) -> int:
        seq = self.number(self.engine.written)
        self.engine.write(seq, np.array(pages, np.int64), labels)
        return seq

    def store(self, tokens: np.ndarray, pages: Sequence[int] | None = None, epoch: int = 0) -> Labels:
        """Compute the pages of a prompt and write them."""
        labels = labels_of(tokens, epoch)
        pages = range(len(labels)) if pages is None else pages
        self.compute(labels, pages)
        assert result(self.engine.written, self.write(pages, labels)) == len(labels)
        return labels

    def compute(self, labels: Labels, pages: Sequence[int]) -> None:
        self.pool.buffer[list(pages)] = self.expected(labels)

    def expected(self, labels: Labels) -> torch.Tensor:
        """The bytes of pages: what any rank and server would compute."""
        rows = torch.zeros((len(labels), self.layout.page_bytes), dtype=torch.uint8)
        geometry = self.layout.geometry
        objects = rows.view(len(labels), geometry.groups, geometry.object_bytes)
        for i, identity in enumerate(labels.identities):
            for g in range(geometry.groups):
                seed = int.from_bytes(identity[:8].tobytes(), "little") + geometry.first_group + g
                made = np.random.default_rng(seed).integers(0, 256, geometry.payload_bytes, np.uint8)
                end = geometry.header_bytes + geometry.payload_bytes
                objects[i, g, geometry.header_bytes : end] = torch.from_numpy(made)
        self.seal.write(rows, labels)
        return rows

    def holds(self, pages: Sequence[int], labels: Labels) -> bool:
        return torch.equal(self.pool.buffer[list(pages)], self.expected(labels))

    def close(self) -> None:
        self.engine.close()


def prompt(*numbers: int) -> np.ndarray:
    """A page of tokens for each number."""
    return np.repeat(np.array(numbers, np.int64), PAGE)


def labels_of(tokens: np.ndarray, epoch: int = 0) -> Labels:
    raw = b"".join(page_identities(PARENT, tokens, PAGE))
    return Labels(np.frombuffer(raw, np.uint8).reshape(-1, 16).copy(), NAMESPACE, epoch)


def result(queue: ResultQueue, seq: int, seconds: float = SOON) -> int:
    """What a job posted; the jobs before it have ended then, too."""
    assert eventually(lambda: queue.done() >= seq, seconds), f"job {seq} was not posted"
    (value,) = queue.results(seq - 1, 1)
    assert value != UNDONE
    return value


def eventually(condition: Callable[[], bool], seconds: float = SOON) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


class Gate:
    """Lets calls through while it is open."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def wait(self, seconds: float | None = SOON) -> None:
        self._open.wait(seconds)
