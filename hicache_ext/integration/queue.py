"""The scheduler's waiting queue, as far as a prefix cache has a say in it: its order, and who waits for whom.

What a queued request has matched changes while it waits, because others compute the same prefix. A few
requests are matched again in every step, so the work of a step does not grow with the queue. Everything is
the same on all TP ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Any

import numpy as np

from hicache_ext.core.cache import TieredCache
from hicache_ext.core.page import PrefixScope
from hicache_ext.core.queue_order import Waiting, order, remaining_cost
from hicache_ext.core.residency import Residency
from hicache_ext.core.speeds import Speeds

MOST = 128
"""Requests; a longer queue is served by arrival, as SGLang does when it orders by matched length."""
MATCHED_AGAIN = 8
"""Requests at most that are matched again in a step."""


class QueueOrder(StrEnum):
    AUTO = "auto"
    """By remaining cost where SGLang would order by matched length; SGLang's order otherwise."""
    COST = "cost"
    """By remaining cost also where SGLang would serve by arrival."""
    ENGINE = "engine"
    """SGLang's order."""

    def replaces(self, schedule_policy: str, by_priority: bool) -> bool:
        """Whether remaining cost takes the place of SGLang's policy; the user's priorities come first."""
        replaced = {QueueOrder.AUTO: ("lpm",), QueueOrder.COST: ("lpm", "fcfs"), QueueOrder.ENGINE: ()}
        return schedule_policy in replaced[self] and not by_priority


@dataclass(slots=True)
class _Queued:
    req: Any
    scope: PrefixScope | None
    """None: it reuses nothing."""
    arrived: int
    tokens: int


class Queue:
    """Requests by arrival, from when they are queued until they are admitted or gone."""

    def __init__(self, cache: TieredCache, speeds: Speeds, by_cost: bool) -> None:
        self._cache = cache
        self._speeds = speeds
        self._by_cost = by_cost
        self._token_bytes = cache.page_bytes / cache.config.page_size
        self._queued: dict[str, _Queued] = {}
        self._computed = 0
        self._next = 0

    def __len__(self) -> int:
        return len(self._queued)

    def add(self, req: Any, scope: PrefixScope | None) -> None:
        """A request has entered the queue, for the first time or again."""
        self.remove(req.rid)
        tokens = len(req.origin_input_ids) + len(req.output_ids)
        self._queued[req.rid] = _Queued(req, scope, self._computed, tokens)

    def remove(self, rid: str) -> None:
        """It has left the queue; unknown ids are ignored."""
        self._queued.pop(rid, None)

    def computed(self, tokens: int) -> None:
        """A prefill of so many tokens has ended."""
        self._computed += tokens

    def ahead(self, tokens: int) -> float:
        """Seconds that a request of ``tokens`` which comes now is expected to wait for those in the queue."""
        rates = self._speeds.agreed
        mine = rates.recompute(0, tokens) if self._by_cost else float("inf")
        others = (self._waiting(one) for one in islice(self._queued.values(), MOST))
        costs = [remaining_cost(other, rates, self._token_bytes) for other in others]
        return sum(cost for cost in costs if cost <= mine)

    def sort(self, waiting: list[Any]) -> None:
        """Bring SGLang's waiting queue into the order in which it should be served, in place."""
        if not self._by_cost or len(waiting) < 2:
            return
        for req in waiting:
            if req.rid not in self._queued:
                self.add(req, None)
        place = {rid: number for number, rid in enumerate(self._queued)}
        waiting.sort(key=lambda req: place[req.rid])
        if len(waiting) > MOST:
            return
        self._match_again()
        beginnings: set[tuple[int, tuple[int, ...]]] = set()
        told = [self._waiting(self._queued[req.rid], beginnings) for req in waiting]
        served = order(told, self._speeds.agreed, self._token_bytes, self._computed)
        waiting[:] = [waiting[number] for number in served]

    def _match_again(self) -> None:
        waiting = list(self._queued.values())
        for number in range(min(MATCHED_AGAIN, len(waiting))):
            one = waiting[(self._next + number) % len(waiting)]
            if one.scope is not None:
                self._cache.want_again(one.req.rid, one.scope, reusable(one.req))
        self._next = (self._next + MATCHED_AGAIN) % len(waiting)

    def _waiting(self, one: _Queued, beginnings: set[tuple[int, tuple[int, ...]]] | None = None) -> Waiting:
        """``beginnings``: of what those before it compute, each the node and the first page after it."""
        tree, rid = self._cache.tree, one.req.rid
        node = tree.waiting.get(rid, tree.root)
        device = host = 0
        for member in tree.path(node):
            if member.device is Residency.ABSENT:
                host += len(member)
            else:
                device += len(member)
        shares = False
        if beginnings is not None and one.scope is not None:
            page = one.req.origin_input_ids[device + host : device + host + tree.page_size]
            beginning = (node.id, tuple(page))
            shares = len(page) == tree.page_size and beginning in beginnings
            beginnings.add(beginning)
        fetching = self._cache.coming(rid)
        return Waiting(one.arrived, one.tokens, device, host, fetching, shares)


def reusable(req: Any) -> np.ndarray:
    """What a request may find in a cache, int64: the last token is always computed, so the page it completes
    is never reused."""
    ids = req.origin_input_ids + req.output_ids
    return np.frombuffer(ids, dtype=np.int64)[:-1] if len(ids) else np.empty(0, np.int64)
