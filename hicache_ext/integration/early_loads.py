"""Loads from the host for requests that still wait in the queue, while others compute.

A load that is started when its request is admitted keeps the whole device waiting. So as long as something
else runs, what queued requests have on the host is loaded ahead, in the order of the queue, and requests are
held back until it pays to admit them (``core.prefill_batch``): what has landed and what is about to land go
into one batch, which waits in its stream for the last of it. Where nothing was loaded ahead, nobody waits.

All decisions follow from the queue, the tree and the speeds that TP ranks have agreed on, so ranks take them
alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from hicache_ext.core.cache import TieredCache
from hicache_ext.core.prefill_batch import MOST, Candidate, admit_now
from hicache_ext.core.residency import Residency
from hicache_ext.core.speeds import Speeds
from hicache_ext.core.tree import Node

LOOK_AHEAD = 64
"""Queued requests; those behind are not loaded ahead, and not admitted before any of these."""
AT_ONCE = 4
"""Loads that are started at a time, at most: each takes the scheduler a millisecond or two."""
SPARE_SHARE = 32
"""Of the device pool is left to what runs, beside the room that queued requests will compute in."""


@dataclass(frozen=True)
class _Queued:
    tokens: int
    since: float


@dataclass(frozen=True)
class _Ahead:
    """``tokens`` of a queued request were loaded ahead of its admission; ``node`` is locked until then."""

    node: Node
    tokens: int
    seconds: float
    room: int
    """Tokens that it will compute."""


@dataclass(frozen=True)
class _Load:
    """On its way, for some ``seconds`` of the bus."""

    seq: int
    seconds: float


class EarlyLoads:
    def __init__(self, cache: TieredCache, speeds: Speeds, device_tokens: int) -> None:
        self._cache = cache
        self._speeds = speeds
        self._spare = device_tokens // SPARE_SHARE
        self._queued: dict[str, _Queued] = {}
        self._ahead: dict[str, _Ahead] = {}
        self._loads: deque[_Load] = deque()
        self._next: dict[str, int] = {}
        """Who has something to load, and room for it, in order, and how many tokens in this step."""
        self._let: set[str] | None = None
        """The queued requests that may be admitted; None: all."""

    def queued(self, rid: str, tokens: int) -> None:
        """A request of so many tokens has entered the queue and been matched."""
        self._queued[rid] = _Queued(tokens, self._speeds.agreed.clock)

    def forget(self, rid: str) -> None:
        """A request has left the queue; unknown ones are ignored."""
        self._queued.pop(rid, None)
        ahead = self._ahead.pop(rid, None)
        if ahead is not None:
            self._cache.unlock(ahead.node)

    def clear(self) -> None:
        """The tree is gone, and with it all locks."""
        self._ahead.clear()
        self._loads.clear()
        self._next.clear()
        self._let = None

    def holds(self, rid: str) -> bool:
        """Whether a queued request should wait for those that are on their way."""
        return self._let is not None and rid not in self._let

    def tokens(self, rid: str) -> int:
        """What was loaded ahead for a request that is still queued."""
        ahead = self._ahead.get(rid)
        return 0 if ahead is None else ahead.tokens

    def step(self, queue: Sequence[str], running: int) -> None:
        """Once per scheduler step, after the tick; ``queue``: the requests that still wait, in order.

        ``running``: requests that compute meanwhile. With none, nothing is gained by holding requests back.
        """
        while self._loads and not self._cache.load_open(self._loads[0].seq):
            self._loads.popleft()
        for rid in self._queued.keys() - set(queue):
            self.forget(rid)
        self._let, self._next = None, {}
        if not running:
            return
        waiting = [rid for rid in queue[:LOOK_AHEAD] if rid in self._queued and not self._cache.waits(rid)]
        self._next = self._loadable(waiting)
        if self._next or any(rid in self._ahead for rid in waiting):
            self._hold(waiting, running)
        if waiting and self._let != set():
            # A prefill batch keeps the scheduler busy: the bus should have something to do meanwhile.
            self.start()

    def start(self) -> None:
        """Start loads that have their turn. Best called when the next batch has been launched: the scheduler
        waits then anyway."""
        cache, started = self._cache, 0
        while self._next and started < AT_ONCE and sum(load.seconds for load in self._loads) < MOST:
            rid = next(iter(self._next))
            # Others may have loaded a part of it since.
            if tokens := self._missing(rid):
                node = cache.tree.waiting[rid]
                room = self._computes(rid)
                if tokens + room > self._room() or not cache.load(node, wait=False):
                    break
                cache.lock(node)
                seconds = self._seconds(tokens)
                self._ahead[rid] = _Ahead(node, tokens, seconds, room)
                self._loads.append(_Load(cache.pending_load(node), seconds))
                started += 1
            del self._next[rid]
        if started:
            cache.start_loads(by_layer=False)

    def _loadable(self, waiting: Sequence[str]) -> dict[str, int]:
        """Who has something to load for which there is room, in order, and how many tokens."""
        room = self._room()
        found = {}
        for rid in waiting:
            if tokens := self._missing(rid):
                room -= tokens + self._computes(rid)
                if room < 0:
                    break
                found[rid] = tokens
        return found

    def _room(self) -> int:
        """Tokens of the device pool that loads may take."""
        cache = self._cache
        taken = self._spare + sum(ahead.room for ahead in self._ahead.values())
        return cache.device.available() + cache.tree.evictable_tokens - taken

    def _computes(self, rid: str) -> int:
        """Tokens that a queued request will compute, as far as its pages can be loaded."""
        tree = self._cache.tree
        node = tree.waiting.get(rid, tree.root)
        return max(self._queued[rid].tokens - node.start - len(node), 1)

    def _hold(self, waiting: Sequence[str], running: int) -> None:
        """Decide who may be admitted while loads are on their way."""
        rates, tree = self._speeds.agreed, self._cache.tree
        last = sum(load.seconds for load in self._loads)
        coming: list[tuple[float, str, Candidate]] = []
        ready: list[Candidate] = []
        for rid in waiting:
            node = tree.waiting.get(rid, tree.root)
            ahead = self._ahead.get(rid)
            load = 0.0 if ahead is None else ahead.seconds
            if rid in self._next:
                load = self._seconds(self._next[rid])
                lands = last = last + load
            else:
                lands = self._lands(node)
            waited = rates.clock - self._queued[rid].since
            one = Candidate(node.start + len(node), self._computes(rid), load, lands, waited)
            if lands:
                coming.append((lands, rid, one))
            else:
                ready.append(one)
        coming.sort(key=lambda entry: entry[0])
        count = admit_now(ready, [one for _, _, one in coming], running, rates)
        held = set(waiting) if count is None else {rid for _, rid, _ in coming[count:]}
        self._let = set(waiting) - held if held else None

    def _lands(self, node: Node) -> float:
        """Seconds until the path to ``node`` is on the device, as far as it is on its way."""
        if node.device is not Residency.PENDING:
            return 0.0
        seq = self._cache.pending_load(node)
        return sum(load.seconds for load in self._loads if load.seq <= seq)

    def _missing(self, rid: str) -> int:
        """Tokens that a queued request has on the host only, and that are worth loading."""
        node = self._cache.tree.waiting.get(rid)
        if rid in self._ahead or node is None:
            return 0
        absent = self._cache.host_only(node)
        tokens = sum(map(len, absent))
        return tokens if tokens and self._cache.worth_loading(absent[0].start, tokens) else 0

    def _seconds(self, tokens: int) -> float:
        cache = self._cache
        return self._speeds.agreed.load(tokens * cache.page_bytes // cache.config.page_size)
