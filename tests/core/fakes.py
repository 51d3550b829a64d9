"""Stand-ins for the engine's device pool and for the copies, so that the core runs without torch.

One int64 per slot stands for the KV of one token. Copies run when the test says so, in any order, which is
later than any real stream or thread would dare: a source that is freed too early shows as wrong content.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TypeVar

import numpy as np

from hicache_ext.core.cache import CacheConfig, LoadJob, TieredCache, WritePolicy
from hicache_ext.core.epochs import claim, is_local
from hicache_ext.core.header import Labels
from hicache_ext.core.page import PrefixScope, page_identities
from hicache_ext.core.policy.lru import TierAwareLru
from hicache_ext.core.remote import Query, ResultQueue
from hicache_ext.core.remote_tier import RemoteConfig
from hicache_ext.core.residency import Doubt
from hicache_ext.core.speeds import Speeds
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

    def free(self, *runs: np.ndarray) -> None:
        for slots in runs:
            self._free(slots)

    def _free(self, slots: np.ndarray) -> None:
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

    def load(self, jobs: Sequence[LoadJob], *, by_layer: bool) -> None:
        for job in jobs:
            self.load_jobs.append(Job(job.seq, np.concatenate(job.slots), job.pages, job.labels))

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

    def wait_backups(self, seq: int) -> None:
        while self.backups.done() < seq:
            self.run_backup(0)

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


StoreKey = tuple[bytes, int, bytes]
"""Namespace, epoch, identity."""


class SharedStore:
    """What several servers share: page contents with their headers, and the epochs that were marked."""

    def __init__(self) -> None:
        self.pages: dict[StoreKey, tuple[np.ndarray, Header]] = {}
        self.epochs: dict[bytes, int] = {}


@dataclass
class FetchJob:
    seq: int
    lookup: int
    pages: np.ndarray
    labels: Labels
    arrived: int | None = None


@dataclass
class WriteJob:
    seq: int
    pages: np.ndarray
    labels: Labels
    before: list[Header | None]


class FakeRemote:
    """Runs a job when the test says so. A page that is given away too early shows: late reads scribble over
    theirs, and writes compare their source with what it was."""

    def __init__(self, transfers: FakeTransfers, shared: SharedStore) -> None:
        self.transfers = transfers
        self.shared = shared
        self.lookups, self.arrivals = ResultQueue(), ResultQueue()
        self.settled, self.written = ResultQueue(), ResultQueue()
        self.lookup_jobs: list[tuple[int, Query]] = []
        self.fetch_jobs: list[FetchJob] = []
        self.write_jobs: list[WriteJob] = []
        self.open: dict[int, list[bytes]] = {}
        self.cancelled: set[int] = set()
        self.turns: list[int] = []
        self.up = self.attached = True
        self.version: tuple[bytes, int] | None = None
        self.known: int | None = None
        self.owned: Callable[[], set[int]] = set

    def lookup(self, seq: int, query: Query) -> None:
        assert self.attached
        self.open[seq] = []
        self.lookup_jobs.append((seq, query))

    def identities(self, seq: int) -> np.ndarray:
        return np.frombuffer(b"".join(self.open[seq]), np.uint8).reshape(-1, 16)

    def fetch(self, seq: int, lookup: int, pages: np.ndarray, labels: Labels) -> None:
        assert lookup in self.open and lookup not in self.cancelled and len(pages) == len(labels) > 0
        assert self.attached
        self.fetch_jobs.append(FetchJob(seq, lookup, pages, labels))

    def turn_came(self, lookup: int) -> None:
        assert lookup in self.open and lookup not in self.cancelled
        self.turns.append(lookup)

    def cancel(self, lookup: int) -> None:
        assert lookup in self.open and lookup not in self.cancelled
        self.cancelled.add(lookup)

    def end(self, lookup: int) -> None:
        del self.open[lookup]
        assert all(j.lookup != lookup or j.arrived is not None for j in self.fetch_jobs)

    def write(self, seq: int, pages: np.ndarray, labels: Labels) -> None:
        assert self.attached
        before = [self.transfers.headers[p] for p in pages.tolist()]
        self.write_jobs.append(WriteJob(seq, pages, labels, before))

    def use(self, namespace: bytes, epoch: int) -> None:
        self.version, self.known = (namespace, epoch), None

    def mark(self, namespace: bytes, epoch: int) -> None:
        """Another server has flushed."""
        assert not is_local(epoch)
        self.shared.epochs[namespace] = max(epoch, self.shared.epochs.get(namespace, 0))

    def learned(self) -> int | None:
        return self.known

    def healthy(self) -> bool:
        return self.up and self.attached

    def attach(self, attached: bool) -> None:
        self.attached = attached

    def close(self) -> None:
        pass

    def learn(self) -> None:
        if not self.up or self.version is None:
            return
        namespace, epoch = self.version
        if is_local(epoch) and self.known is None:
            self.mark(namespace, claim(epoch, self.shared.epochs.get(namespace, 0)))
        self.known = max(epoch, self.shared.epochs.get(namespace, 0))

    def run_lookup(self, index: int = 0) -> None:
        seq, query = self.lookup_jobs.pop(index)
        names = page_identities(query.parent, query.tokens, self.transfers.device.page_size)[query.skip :]
        self.open[seq] = names
        keys = [(query.namespace, query.epoch, name) for name in names]
        count = sum(1 for _ in takewhile(lambda key: key in self.shared.pages, keys)) if self.up else 0
        self.lookups.post(seq, 0 if seq in self.cancelled else count)

    def run_fetch(self, index: int = 0, *, late: bool = False) -> None:
        """First the arrival, with all pages or, if ``late``, half of them; then, another time, the end."""
        job = self.fetch_jobs[index]
        if job.arrived is None:
            good = self._read(job, len(job.pages) // 2 if late else len(job.pages))
            job.arrived = good
            self.arrivals.post(job.seq, good)
            return
        del self.fetch_jobs[index]
        assert set(job.pages[job.arrived :].tolist()) <= self.owned(), "given away while a store writes there"
        self.transfers.host[job.pages[job.arrived :]] = POISON
        self.settled.post(job.seq)

    def run_write(self, index: int = 0) -> None:
        job = self.write_jobs.pop(index)
        now = [self.transfers.headers[p] for p in job.pages.tolist()]
        assert now == job.before, "overwritten while a store reads it"
        stored = 0
        for page, header in zip(job.pages.tolist(), headers_of(job.labels), strict=True):
            sealed = self.transfers.headers[page]
            if self.up and self.attached:
                stored += 1
                if sealed is not None and sealed[:3] == header:
                    key = (header[1], header[2], header[0])
                    self.shared.pages.setdefault(key, (self.transfers.host[page].copy(), sealed))
        self.written.post(job.seq, stored)

    def run_some(self, rng: random.Random) -> None:
        self.learn()
        choices: list[tuple[Callable[[int], None], int]] = [
            (self.run_lookup, len(self.lookup_jobs)),
            (lambda i: self.run_fetch(i, late=rng.random() < 0.2), len(self.fetch_jobs)),
            (self.run_write, len(self.write_jobs)),
        ]
        runnable = [(run, count) for run, count in choices if count]
        if runnable:
            run, count = rng.choice(runnable)
            run(rng.randrange(count))

    def run_all(self) -> None:
        self.learn()
        while self.lookup_jobs:
            self.run_lookup()
        while self.fetch_jobs:
            self.run_fetch()
        while self.write_jobs:
            self.run_write()

    def _read(self, job: FetchJob, limit: int) -> int:
        good = 0
        for page, header in zip(job.pages.tolist()[:limit], headers_of(job.labels), strict=False):
            found = self.shared.pages.get((header[1], header[2], header[0])) if self.up else None
            if found is None or found[1] != (*header, int(found[0].sum())):
                break
            self.transfers.host[page], self.transfers.headers[page] = found[0], found[1]
            good += 1
        return good


@dataclass
class Rig:
    """A cache over fakes."""

    device: FakeDevice
    transfers: FakeTransfers
    cache: TieredCache
    stores: FakeRemote | None = None

    @property
    def remote(self) -> FakeRemote:
        assert self.stores is not None
        return self.stores


def make_rig(
    *,
    page_size: int = 4,
    device_pages: int = 16,
    host_pages: int = 32,
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH,
    evict_granule: int = 4,
    ease: float = 1.0,
    tick_limit: int = 64,
    backup_limit: int = 1 << 16,
    reduce: Reduce | None = None,
    shared: SharedStore | None = None,
    remote: RemoteConfig | None = None,
    speeds: Speeds | None = None,
    page_bytes: int = 0,
) -> Rig:
    """With a remote tier if there is a store to share."""
    device = FakeDevice(device_pages, page_size)
    transfers = FakeTransfers(device, host_pages)
    config = CacheConfig(
        page_size,
        host_pages,
        write_policy=write_policy,
        evict_granule=evict_granule,
        ease=ease,
        tick_limit=tick_limit,
        backup_limit=backup_limit,
        remote=remote,
    )
    stores = None if shared is None else FakeRemote(transfers, shared)
    cache = TieredCache(
        config,
        TierAwareLru(),
        device,
        transfers,
        reduce=reduce,
        remote=stores,
        speeds=speeds,
        page_bytes=page_bytes,
    )
    if stores is not None:
        tier = cache.remote
        assert tier is not None
        stores.owned = lambda: {p for pages in tier.outside() for p in pages.tolist()}
    return Rig(device, transfers, cache, stores)


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
        rig.cache.flush_writes()
        rig.cache.start_loads()
        rig.transfers.drain()
        if rig.stores is not None:
            rig.stores.run_all()
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


def found(rig: Rig, tokens: np.ndarray) -> int:
    """Tokens of the match on either tier, found without touching them."""
    match = rig.cache.match(PrefixScope(), tokens, touch=False)
    return match.device_len + match.host_len


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
