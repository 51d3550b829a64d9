"""A server's scheduler and a closed loop of clients in simulated time, over the real tree and loads ahead.

Copies take what the bus takes and end in order; prefill batches and decoding steps take fixed times. No KV is
moved. Requests are admitted, allocated for and published in the order of SGLang 0.5.17's scheduler.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np

from benchmarks.token_load import Load
from hicache_ext.core.cache import CacheConfig, LoadJob, TieredCache
from hicache_ext.core.header import Labels
from hicache_ext.core.page import PrefixScope
from hicache_ext.core.policy.costs import CostModel
from hicache_ext.core.policy.make import make_policy
from hicache_ext.core.speeds import Rates
from hicache_ext.core.tick import CompletionQueue
from hicache_ext.core.tree import Node
from hicache_ext.integration.early_loads import EarlyLoads
from tests.core.fakes import FakeDevice

SCOPE = PrefixScope()
COSTS = CostModel(token=2.35e-5, depth=1.3e-9, load=2.4e-6, store=2.4e-6)


@dataclass(frozen=True)
class Machine:
    """Seconds and bytes per second; of an H200 with an 8B model."""

    token_bytes: int = 131072
    to_device: float = 52e9
    to_host: float = 52e9
    launch: float = 0.022
    tail: float = 0.004
    """What a batch has left to compute when its last load has landed."""
    step: float = 0.0065
    latency: float = 0.012
    """Between an answer and its client's next request, and ``spread`` more for each that ended with it."""
    spread: float = 0.0008
    jitter: float = 0.002


class Clock:
    def __init__(self) -> None:
        self.now = 0.0


class TimedTransfers:
    """Each direction copies in order, at the speed of its bus."""

    def __init__(self, clock: Clock, machine: Machine) -> None:
        self.clock, self.machine = clock, machine
        self.backups, self.loads = CompletionQueue(), CompletionQueue()
        self.backup_ends: deque[tuple[int, float]] = deque()
        self.load_ends: deque[tuple[int, float]] = deque()
        self.lands: dict[int, float] = {}
        self.free_from = {"backup": 0.0, "load": 0.0}

    def backup(self, seq: int, slots: list[np.ndarray], pages: np.ndarray, labels: Labels) -> None:
        end = self._end("backup", sum(map(len, slots)), self.machine.to_host)
        self.backup_ends.append((seq, end))

    def load(self, jobs: Sequence[LoadJob], *, by_layer: bool) -> None:
        for job in jobs:
            end = self._end("load", sum(map(len, job.slots)), self.machine.to_device)
            self.load_ends.append((job.seq, end))
            self.lands[job.seq] = end

    def _end(self, way: str, tokens: int, speed: float) -> float:
        start = max(self.clock.now, self.free_from[way])
        self.free_from[way] = start + tokens * self.machine.token_bytes / speed
        return self.free_from[way]

    def poll(self) -> None:
        for ends, done in ((self.backup_ends, self.backups), (self.load_ends, self.loads)):
            while ends and ends[0][1] <= self.clock.now:
                done.post(ends.popleft()[0])

    def wait_backups(self, seq: int) -> None:
        self._wait(self.backup_ends, seq)

    def wait_loads(self, seq: int) -> None:
        self._wait(self.load_ends, seq)

    def _wait(self, ends: deque[tuple[int, float]], seq: int) -> None:
        for number, end in ends:
            if number <= seq:
                self.clock.now = max(self.clock.now, end)
        self.poll()

    def drain(self) -> None:
        self.clock.now = max(self.clock.now, *self.free_from.values())
        self.poll()


@dataclass
class Request:
    rid: str
    round: int
    pass_: int
    tokens: np.ndarray
    output: np.ndarray
    arrives: float = 0.0
    made: int = 0
    node: Node | None = None
    cached: int = 0
    slots: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    first: float = 0.0


class Server:
    """One scheduler thread."""

    def __init__(self, machine: Machine, device_pages: int, host_pages: int, page: int = 64) -> None:
        self.machine, self.page = machine, page
        self.clock = Clock()
        self.device = FakeDevice(device_pages, page)
        self.transfers = TimedTransfers(self.clock, machine)
        policy = make_policy(
            "cost",
            device_tokens=device_pages * page,
            host_tokens=host_pages * page,
            page_size=page,
            costs=COSTS,
        )
        self.cache = TieredCache(
            CacheConfig(page_size=page, host_pages=host_pages), policy, self.device, self.transfers
        )
        rates = Rates(COSTS, 1.0, machine.launch, machine.to_device, {})
        self.speeds = SimpleNamespace(agreed=rates)
        self.cache.page_bytes = machine.token_bytes * page
        self.early = EarlyLoads(self.cache, self.speeds, self.device.total)  # type: ignore[arg-type]
        self.queue: list[Request] = []
        self.running: list[Request] = []
        self.idle_steps = 0

    def receive(self, request: Request) -> None:
        self.cache.want(request.rid, SCOPE, request.tokens[:-1])
        self.early.queued(request.rid, len(request.tokens))
        self.queue.append(request)

    def step(self) -> list[Request]:
        """One turn of the event loop; returns who has ended."""
        cache, clock = self.cache, self.clock
        self.speeds.agreed = replace(self.speeds.agreed, clock=clock.now)
        cache.tick()
        self.early.step([r.rid for r in self.queue], len(self.running))
        self.idle_steps = 0 if self.running else self.idle_steps + 1
        if self.idle_steps > 1:
            for request in self.queue:
                self.early.forget(request.rid)
        batch = self._admit()
        load = cache.start_loads()
        if batch:
            cache.flush_backups()
            self.early.start()
            compute = sum(self.speeds.agreed.recompute(r.cached, len(r.tokens) - r.cached) for r in batch)
            pending = [cache.pending_load(r.node) for r in batch if r.node is not None]
            lands = max(self.transfers.lands.get(seq, 0.0) for seq in (-1, *pending))
            clock.now = max(clock.now + max(self.machine.launch, compute), lands + self.machine.tail)
            cache.settle_loads(load)
            for request in batch:
                request.first = clock.now
                self._publish(request, request.tokens)
            self.running += batch
            return []
        if self.running:
            for request in self.running:
                self._extend(request, len(request.tokens) + request.made + 1)
            cache.flush_backups()
            self.early.start()
            clock.now += self.machine.step
            ended = []
            for request in list(self.running):
                request.made += 1
                if request.made >= len(request.output):
                    self.running.remove(request)
                    ended.append(request)
            for request in ended:
                self._finish(request)
            return ended
        cache.flush_backups()
        clock.now += 0.0005
        return []

    def _admit(self) -> list[Request]:
        cache = self.cache
        batch: list[Request] = []
        reserved = sum(len(r.output) - r.made + self.page for r in self.running)
        budget = 8192
        for request in list(self.queue):
            if self.early.holds(request.rid):
                continue
            match = cache.match(SCOPE, request.tokens[:-1])
            new = len(request.tokens) - match.device_len - match.host_len
            if batch and new > budget:
                break
            cache.lock(match.device_node)
            room = self.device.available() + cache.tree.evictable_tokens - reserved
            if len(request.tokens) - match.device_len + len(request.output) + self.page > room:
                cache.unlock(match.device_node)
                break
            node, cached = match.device_node, match.device_len
            if match.host_len and cache.load(match.host_node):
                cache.lock(match.host_node)
                cache.unlock(match.device_node)
                node, cached = match.host_node, match.device_len + match.host_len
            self.early.forget(request.rid)
            cache.unwant(request.rid)
            request.node, request.cached = node, cached
            request.slots = self._slots_of(node)
            self._extend(request, len(request.tokens))
            reserved += len(request.output)
            budget -= len(request.tokens) - cached
            self.queue.remove(request)
            batch.append(request)
            if budget <= 0:
                break
        return batch

    def _slots_of(self, node: Node) -> np.ndarray:
        path = reversed(list(self.cache.tree.path(node)))
        return np.concatenate([np.empty(0, np.int64), *(n.slots for n in path)])

    def _extend(self, request: Request, length: int) -> None:
        need = -(-length // self.page) * self.page - len(request.slots)
        if need > 0:
            if self.device.available() < need:
                self._evict(need)
            slots = self.device.alloc(need)
            assert slots is not None, "no room for a request that runs"
            request.slots = np.concatenate([request.slots, slots])

    def _evict(self, tokens: int) -> None:
        freed = self.cache.evict(tokens)
        for request in reversed(self.queue):
            if freed >= tokens:
                break
            if self.early.tokens(request.rid):
                self.early.forget(request.rid)
                self.cache.settle_loads(self.cache.start_loads())
                freed += self.cache.evict(tokens - freed)

    def _publish(self, request: Request, tokens: np.ndarray) -> None:
        length = len(tokens) // self.page * self.page
        assert request.node is not None
        owned = request.node.start + len(request.node) if request.node.parent is not None else 0
        done = self.cache.insert(SCOPE, tokens[:length], request.slots[:length])
        if done.matched > owned:
            pending = self.cache.pending_load(done.node)
            if pending > 0:
                self.cache.start_loads()
                self.cache.settle_loads(pending)
            self.device.free(request.slots[owned : done.matched])
            request.slots[owned : done.matched] = self._slots_of(done.node)[owned : done.matched]
        self.cache.lock(done.node)
        self.cache.unlock(request.node)
        request.node = done.node

    def _finish(self, request: Request) -> None:
        tokens = np.concatenate([request.tokens, request.output])[:-1]
        self._publish(request, tokens)
        length = len(tokens) // self.page * self.page
        if length < len(request.slots):
            self.device.free(request.slots[length:])
        assert request.node is not None
        self.cache.unlock(request.node)


def turns(load: Load, seed: int = 1) -> list[Request]:
    """The requests of a multi-turn load, in the order in which they are sent."""
    fill = np.random.default_rng(seed)
    texts = [fill.integers(0, 1 << 30, load.longest) for _ in range(load.sessions)]
    requests = []
    for pass_ in range(load.passes):
        for round_ in range(load.rounds):
            size = load.first + round_ * (load.turn + load.output)
            for session, text in enumerate(texts):
                rid = f"{pass_}.{round_}.{session}"
                requests.append(Request(rid, round_, pass_, text[:size], text[size : size + load.output]))
    return requests


def churn(count: int, seed: int = 1, prefixes: int = 24) -> list[Request]:
    """Short requests that share a few prefixes, of tests/server/test_churn.py's sizes."""
    rng, fill = random.Random(seed), np.random.default_rng(seed)
    texts = [fill.integers(0, 1 << 30, 330) for _ in range(prefixes)]
    requests = []
    for number in range(count):
        start = rng.choice(texts)[: rng.choice([96, 200, 330])]
        own, output = (fill.integers(0, 1 << 30, size) for size in (rng.choice([0, 25, 50]), 3))
        if rng.random() < 0.1:
            output = fill.integers(0, 1 << 30, 40)
        requests.append(Request(str(number), 0, 0, np.concatenate([start, own]), output))
    return requests


def play(server: Server, requests: Sequence[Request], concurrency: int, seed: int = 1) -> list[Request]:
    """All requests, in the order of their ends; so many clients send the next one each when one has ended."""
    rng = random.Random(seed)
    machine, clock = server.machine, server.clock
    todo = deque(requests)
    arriving: list[Request] = []
    done: list[Request] = []

    def send(when: float) -> None:
        if todo:
            arriving.append(todo.popleft())
            arriving[-1].arrives = when

    for number in range(concurrency):
        send(machine.spread * number)
    while len(done) < len(requests):
        arriving.sort(key=lambda r: r.arrives)
        while arriving and arriving[0].arrives <= clock.now:
            server.receive(arriving.pop(0))
        if not server.queue and not server.running:
            clock.now = max(clock.now, arriving[0].arrives)
            continue
        for number, request in enumerate(server.step()):
            done.append(request)
            send(clock.now + machine.latency + machine.spread * number + machine.jitter * rng.random())
    return done
