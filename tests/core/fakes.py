"""Stand-ins for the engine's device pool and for the copies, so that the core runs without torch.

One int64 per slot stands for the KV of one token. Copies run when the test says so, in any order, which is
later than any real stream or thread would dare: a source that is freed too early shows as wrong content.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from hicache_ext.core.cache import CacheConfig, TieredCache, WritePolicy
from hicache_ext.core.header import Labels
from hicache_ext.core.page import PrefixScope
from hicache_ext.core.policy.lru import TierAwareLru
from hicache_ext.core.residency import Doubt
from hicache_ext.core.tick import CompletionQueue, Reduce
from hicache_ext.core.tree import Node

POISON = -1

T = TypeVar("T")


class FakeDevice:
    """Pages ``1 .. pages``, like the engine's paged allocator; freed slots are poisoned."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.free_pages = list(range(1, pages + 1))
        self.total = pages * page_size
        self.kv = np.full((pages + 1) * page_size, POISON, dtype=np.int64)

    def available(self) -> int:
        return len(self.free_pages) * self.page_size

    def alloc(self, tokens: int) -> np.ndarray | None:
        count = tokens // self.page_size
        assert count * self.page_size == tokens
        if count > len(self.free_pages):
            return None
        pages, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        return (
            np.array(pages, dtype=np.int64)[:, None] * self.page_size + np.arange(self.page_size)
        ).reshape(-1)

    def free(self, slots: np.ndarray) -> None:
        pages = slots[:: self.page_size] // self.page_size
        assert np.array_equal(
            slots, (pages[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)
        )
        assert not set(pages.tolist()) & set(self.free_pages), "a device page was freed twice"
        self.free_pages += pages.tolist()
        self.kv[slots] = POISON

    def clear(self) -> None:
        self.free_pages = list(range(1, len(self.kv) // self.page_size))
        self.kv[:] = POISON


@dataclass
class Job:
    seq: int
    slots: np.ndarray
    pages: np.ndarray
    labels: Labels
    fails: bool = False


Header = tuple[bytes, bytes, int, int]
"""Identity, namespace, epoch, and the sum of the content."""


def headers_of(labels: Labels) -> list[tuple[bytes, bytes, int]]:
    return [(row.tobytes(), labels.namespace, labels.epoch) for row in labels.identities]


@dataclass
class FakeTransfers:
    device: FakeDevice
    host_pages: int
    backups: CompletionQueue = field(default_factory=CompletionQueue)
    loads: CompletionQueue = field(default_factory=CompletionQueue)
    backup_jobs: list[Job] = field(default_factory=list)
    load_jobs: list[Job] = field(default_factory=list)
    fail_next_backup: bool = False

    def __post_init__(self) -> None:
        self.host = np.full((self.host_pages, self.device.page_size), POISON, dtype=np.int64)
        self.headers: list[Header | None] = [None] * self.host_pages

    def backup(self, seq: int, slots: list[np.ndarray], pages: np.ndarray, labels: Labels) -> None:
        self.backup_jobs.append(Job(seq, np.concatenate(slots), pages, labels, self.fail_next_backup))
        self.fail_next_backup = False

    def load(self, seq: int, pages: np.ndarray, slots: list[np.ndarray], labels: Labels) -> None:
        self.load_jobs.append(Job(seq, np.concatenate(slots), pages, labels))

    def corrupt(self, page: int) -> None:
        """Damage a host page; its header stays."""
        self.host[page] += 1

    def poll(self) -> None:
        pass

    def drain(self) -> None:
        while self.backup_jobs:
            self.run_backup(0)
        while self.load_jobs:
            self.run_load(0)

    def wait_loads(self, seq: int) -> None:
        while self.loads.done() < seq:
            self.run_load(0)

    def run_backup(self, index: int) -> None:
        job = self.backup_jobs.pop(index)
        for row, (page, header) in enumerate(zip(job.pages.tolist(), headers_of(job.labels), strict=True)):
            if job.fails:
                self.headers[page] = None
                continue
            size = self.device.page_size
            self.host[page] = self.device.kv[job.slots[row * size : (row + 1) * size]]
            self.headers[page] = (*header, int(self.host[page].sum()))
        self.backups.post(job.seq)

    def run_load(self, index: int) -> None:
        job = self.load_jobs.pop(index)
        expected = headers_of(job.labels)
        bad = [
            row
            for row, page in enumerate(job.pages.tolist())
            if self.headers[page] != (*expected[row], int(self.host[page].sum()))
        ]
        content = self.host[job.pages]
        content[bad] = 0
        self.device.kv[job.slots] = content.reshape(-1)
        self.loads.post(job.seq, bad[0] if bad else None)

    def run_some(self, rng: random.Random) -> None:
        """Run one job of either direction, if there is one; not necessarily the oldest."""
        choices = [(self.run_backup, len(self.backup_jobs)), (self.run_load, len(self.load_jobs))]
        runnable = [(run, count) for run, count in choices if count]
        if runnable:
            run, count = rng.choice(runnable)
            run(rng.randrange(count))


@dataclass
class Rig:
    """A cache over fakes."""

    device: FakeDevice
    transfers: FakeTransfers
    cache: TieredCache


def make_rig(
    *,
    page_size: int = 4,
    device_pages: int = 16,
    host_pages: int = 32,
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH,
    evict_granule: int = 4,
    tick_limit: int = 64,
    backup_limit: int = 1 << 16,
    reduce: Reduce | None = None,
) -> Rig:
    device = FakeDevice(device_pages, page_size)
    transfers = FakeTransfers(device, host_pages)
    config = CacheConfig(
        page_size,
        host_pages,
        write_policy=write_policy,
        evict_granule=evict_granule,
        tick_limit=tick_limit,
        backup_limit=backup_limit,
    )
    return Rig(device, transfers, TieredCache(config, TierAwareLru(), device, transfers, reduce=reduce))


def kv_of(scope: PrefixScope, tokens: np.ndarray) -> np.ndarray:
    """What a model would compute: a value per token that depends on the scope and all tokens before it."""
    h = hashlib.sha256(repr(scope).encode())
    out = np.empty(len(tokens), dtype=np.int64)
    for i, token in enumerate(tokens.tolist()):
        h.update(str(token).encode() + b",")
        out[i] = int.from_bytes(h.digest()[:7], "little")
    return out


def toks(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def put(rig: Rig, tokens: np.ndarray, scope: PrefixScope | None = None) -> np.ndarray:
    """Compute and publish ``tokens`` (whole pages) as a finished request would; returns its row's slots."""
    scope = scope or PrefixScope()
    cache, device = rig.cache, rig.device
    match = cache.match(scope, tokens)
    cache.lock(match.device_node)
    have = [n.slots for n in cache.tree.path(match.device_node)][::-1]
    fresh = len(tokens) - match.device_len
    cache.evict(fresh - device.available())
    slots = device.alloc(fresh)
    assert slots is not None
    row = np.concatenate([*have, slots])
    device.kv[slots] = kv_of(scope, tokens)[match.device_len :]
    done = cache.insert(scope, tokens, row)
    if done.matched > match.device_len:
        device.free(row[match.device_len : done.matched])
    cache.unlock(match.device_node)
    return row


def settle(rig: Rig) -> None:
    """Let every transfer finish and be applied."""
    for _ in range(100):
        rig.cache.flush_backups()
        rig.cache.start_loads()
        rig.transfers.drain()
        rig.cache.tick()
        if not rig.cache.pending():
            return
    raise AssertionError("transfers do not settle")


def content(rig: Rig, tokens: np.ndarray, scope: PrefixScope | None = None) -> np.ndarray:
    """Device content of the matched device prefix."""
    match = rig.cache.match(scope or PrefixScope(), tokens)
    slots = [n.slots for n in rig.cache.tree.path(match.device_node)][::-1]
    return rig.device.kv[np.concatenate(slots)] if slots else np.empty(0, np.int64)


def prompt(page_size: int, *pages: int) -> np.ndarray:
    """Whole pages of tokens: equal numbers are equal pages, different ones differ in every token."""
    return np.concatenate([np.arange(page_size) + 1000 * page for page in pages]).astype(np.int64)


def node_at(rig: Rig, tokens: np.ndarray, scope: PrefixScope | None = None) -> Node:
    """The deepest node of the match, found without touching it."""
    return rig.cache.match(scope or PrefixScope(), tokens, touch=False).host_node


def device_len(rig: Rig, tokens: np.ndarray, scope: PrefixScope | None = None) -> int:
    """Tokens of the match that are on the device, found without touching them."""
    return rig.cache.match(scope or PrefixScope(), tokens, touch=False).device_len


def to_host(rig: Rig, tokens: np.ndarray) -> None:
    """Compute ``tokens``, back them up, and evict all of the device."""
    put(rig, tokens)
    settle(rig)
    rig.cache.evict(rig.device.total)
    assert device_len(rig, tokens) == 0


def host_page(rig: Rig, tokens: np.ndarray, index: int) -> int:
    """Where the host has page ``index`` of a prompt."""
    pages = [n.pages for n in rig.cache.tree.path(node_at(rig, tokens)) if n.pages is not None][::-1]
    return int(np.concatenate(pages)[index])


def assert_owned_once(rig: Rig, *private: np.ndarray) -> None:
    """Every device slot is free, a request's own, or one node's; found, condemned or in flight."""
    cache, size = rig.cache, rig.device.page_size
    cache.check()
    free = [np.arange(page * size, (page + 1) * size) for page in rig.device.free_pages]
    slots = np.concatenate([*free, *private, *[n.slots for n in cache.tree.walk() if n.slots is not None]])
    assert len(np.unique(slots)) == len(slots), "a device slot has two owners"
    assert len(slots) == rig.device.total, "device slots leaked"


def assert_idle(rig: Rig) -> None:
    """No lock, ticket, waiter, private slot or condemned node is left, and both pools add up."""
    cache = rig.cache
    assert_owned_once(rig)
    assert len(cache.tickets) == 0 and not cache.tree.waiting
    for node in cache.tree.walk():
        assert (node.device_locks, node.host_locks, node.waiters) == (0, 0, 0), node
        assert node.doubt is Doubt.NONE, node
    assert cache.tree.protected_tokens == 0
    assert rig.device.available() + cache.tree.evictable_tokens == rig.device.total


class SharedMin:
    """All-reduce (MIN) between threads that stand for ranks; one that stays away breaks it for all."""

    def __init__(self, ranks: int, timeout: float = 10.0) -> None:
        self._barrier = threading.Barrier(ranks, timeout=timeout)
        self._values: list[np.ndarray] = [np.empty(0, np.int64)] * ranks
        self.calls: list[list[int]] = [[] for _ in range(ranks)]

    def of(self, rank: int) -> Reduce:
        """The reduce function of one rank; ``calls[rank]`` records the length of each vector."""

        def reduce(values: np.ndarray) -> np.ndarray:
            self.calls[rank].append(len(values))
            self._values[rank] = values.copy()
            self._barrier.wait()
            smallest = np.stack(self._values).min(axis=0)
            self._barrier.wait()
            return smallest

        return reduce


class Ranks:
    """Several caches in lockstep: each is a TP rank in a thread of its own during ``each``."""

    def __init__(self, count: int, make: Callable[[Reduce], Rig]) -> None:
        self.shared = SharedMin(count)
        self.rigs = [make(self.shared.of(rank)) for rank in range(count)]
        self._threads = ThreadPoolExecutor(count)

    def each(self, step: Callable[[Rig], T]) -> list[T]:
        """Run the same step on all ranks at once."""
        return [f.result() for f in [self._threads.submit(step, rig) for rig in self.rigs]]

    def same(self, step: Callable[[Rig], T]) -> T:
        """As ``each``, and all ranks must get the same result."""
        first, *others = self.each(step)
        assert all(other == first for other in others), [first, *others]
        return first

    def close(self) -> None:
        self._threads.shutdown()


def page_tables(rig: Rig) -> object:
    """Everything a rank decided: free pages in order, and where each node's pages are."""
    nodes = sorted(
        (
            n.id,
            n.tokens.tolist(),
            int(n.device),
            int(n.host),
            [] if n.slots is None else n.slots.tolist(),
            [] if n.pages is None else n.pages.tolist(),
        )
        for n in rig.cache.tree.walk()
    )
    return list(rig.device.free_pages), rig.cache.host_pages.free_pages().tolist(), nodes
