"""Loads from the host for requests that still wait in the queue, while others compute.

A load that is started when its request is admitted keeps the whole device waiting. So as long as something
else runs, what queued requests have on the host is loaded ahead, in groups: the requests of a group are held
back until all of it has landed and are then admitted together, while the next group is on its way. Groups
keep prefill batches large, for every one of them makes all others wait; while there is only decoding, a small
group waits some steps for more. Size and steps bound how long a request is held back.

All decisions follow from the queue and the tree, so TP ranks take them alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from hicache_ext.core.cache import TieredCache
from hicache_ext.core.tree import Node

GROUP_BYTES = 2.5e9
"""Some 50 ms of a PCIe 5 bus with 16 lanes."""
GROUPS = 2
"""On their way at most: the bus need not idle until it is noticed that one has landed."""
GATHER_STEPS = 3
"""Decoding steps that a group of less than half the size waits for more."""
SPARE_SHARE = 8
"""An eighth of the device pool is left to what is about to be computed."""


@dataclass
class _Ahead:
    """``tokens`` of a queued request were loaded ahead of its admission; ``node`` is locked until then."""

    node: Node
    tokens: int


@dataclass
class _Group:
    """Requests that are admitted together, once load ``seq`` has landed."""

    seq: int
    rids: set[str]


class EarlyLoads:
    def __init__(self, cache: TieredCache, device_tokens: int, page_bytes: int) -> None:
        self._cache = cache
        self._spare = device_tokens // SPARE_SHARE
        self._group_tokens = max(int(GROUP_BYTES / page_bytes), 1) * cache.config.page_size
        self._queued: dict[str, None] = {}
        self._ahead: dict[str, _Ahead] = {}
        self._groups: deque[_Group] = deque()
        self._gathered = 0

    def queued(self, rid: str) -> None:
        """A request has entered the queue and been matched."""
        self._queued[rid] = None

    def forget(self, rid: str) -> None:
        """A request has left the queue; unknown ones are ignored."""
        self._queued.pop(rid, None)
        for group in self._groups:
            group.rids.discard(rid)
        ahead = self._ahead.pop(rid, None)
        if ahead is not None:
            self._cache.unlock(ahead.node)

    def clear(self) -> None:
        """The tree is gone, and with it all locks."""
        self._ahead.clear()
        self._groups.clear()
        self._gathered = 0

    def holds(self, rid: str) -> bool:
        """Whether a queued request should wait for its group."""
        if any(rid in group.rids for group in self._groups):
            return True
        return bool(self._groups or self._gathered) and rid in self._queued and self._missing(rid) > 0

    def tokens(self, rid: str) -> int:
        """What was loaded ahead for a request that is still queued."""
        ahead = self._ahead.get(rid)
        return 0 if ahead is None else ahead.tokens

    def step(self, queue: Collection[str], *, busy: bool, decoding: bool) -> None:
        """Once per scheduler step, after the tick; ``queue`` are the requests that still wait.

        ``busy``: something computes meanwhile. Otherwise nothing is gained by holding requests back.
        ``decoding``: what runs now is no prefill.
        """
        while self._groups and not self._cache.load_open(self._groups[0].seq):
            self._groups.popleft()
        for rid in [rid for rid in self._queued if rid not in queue]:
            self.forget(rid)
        if len(self._groups) == GROUPS:
            return
        missing = sum(map(self._missing, self._queued)) if busy else 0
        self._gathered = self._gathered + 1 if missing else 0
        if missing and (not decoding or 2 * missing >= self._group_tokens or self._gathered > GATHER_STEPS):
            self._gathered = 0
            self._next_group()

    def _next_group(self) -> None:
        cache = self._cache
        room = self._group_tokens
        rids: set[str] = set()
        for rid in self._queued:
            tokens = self._missing(rid)
            if not tokens or cache.waits(rid):
                continue
            free = cache.device.available() + cache.tree.evictable_tokens - self._spare
            if tokens > free or (rids and tokens > room):
                break
            node = cache.tree.waiting[rid]
            if not cache.load(node, wait=False):
                break
            cache.lock(node)
            self._ahead[rid] = _Ahead(node, tokens)
            rids.add(rid)
            room -= tokens
        if rids:
            self._groups.append(_Group(cache.start_loads(by_layer=False), rids))

    def _missing(self, rid: str) -> int:
        """Tokens that a queued request has on the host only, and that are worth loading."""
        node = self._cache.tree.waiting.get(rid)
        if rid in self._ahead or node is None:
            return 0
        absent = self._cache.host_only(node)
        tokens = sum(map(len, absent))
        return tokens if tokens and self._cache.worth_loading(absent[0].start, tokens) else 0
