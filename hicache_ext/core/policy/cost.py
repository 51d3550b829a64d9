"""Our own: evict what is cheapest to lose.

The cost of losing a node is the chance that it is used again, times what getting it back takes from where
else it lives (a load from the host, or its prefill at its depth), per token and time that it takes up room.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

from hicache_ext.core.policy import EvictionPolicy
from hicache_ext.core.policy.costs import CostModel
from hicache_ext.core.policy.ghosts import Ghosts
from hicache_ext.core.policy.index import EvictionIndex
from hicache_ext.core.policy.reuse import Reuse, Use, Visit, age_bin
from hicache_ext.core.residency import Residency, Tier

if TYPE_CHECKING:
    from hicache_ext.core.tree import Node

GHOSTS = 1 << 16
PRICE_STEPS = 4
"""Classes of price per octave."""
SLACK = 1024
REORDER = 64
"""Changes after which the ends of all classes are looked at again, because ranks change with age."""
ORDER_LIMIT = 8192
RETRIES = 16
"""Victims at most that are reconsidered in a row because they turn out to be worth more than thought."""
SAFE_ON_DEVICE = 0.25
"""Share of a host copy's price while the device holds the node too: it may be used before it leaves the
device.
"""

Key = tuple[int, int, int]
"""Baseline, factor and price of a node, each in steps."""


class CostIndex:
    """Candidates by class; within a class the next victim is its oldest or its youngest.

    Worth over age rises until the time when such nodes come back, and falls from there, so the least of a
    class is at one of its ends: a victim costs a look at the ends of the classes, however many nodes they
    hold.
    """

    def __init__(self, policy: Cost, tier: Tier) -> None:
        self._policy = policy
        self._tier = tier
        self._members: dict[int, tuple[Node, Key, int]] = {}
        self._ends: tuple[dict[Key, list[tuple[int, int, Node]]], ...] = ({}, {})
        self._order: list[tuple[float, int, int, Key, Node]] = []
        self._offered: dict[tuple[Key, int], int] = {}
        self._entries = 0
        self._changes = 0
        self._waited = EvictionIndex(lambda node: (node.stamp,))

    def __len__(self) -> int:
        return len(self._members) + len(self._waited)

    def __contains__(self, node: Node) -> bool:
        return node.id in self._members or node in self._waited

    def add(self, node: Node) -> None:
        self._waited.discard(node)
        key = self._policy.key(node, self._tier)
        time = self._policy.use(node).visit.time
        self._members[node.id] = (node, key, time)
        for end, sign in enumerate((1, -1)):
            heap = self._ends[end].setdefault(key, [])
            heapq.heappush(heap, (sign * time, node.id, node))
            if heap[0][2] is node:
                self._offer(key, end, node)
        if len(self._order) > ORDER_LIMIT:
            # Nobody takes victims at the moment; the next who does starts afresh.
            self._order.clear()
            self._offered.clear()
        self._entries += 1
        self._changes += 1
        if self._entries > 2 * len(self._members) + SLACK:
            self._rebuild()

    def discard(self, node: Node) -> None:
        self._members.pop(node.id, None)
        self._waited.discard(node)

    def pop(self) -> Node | None:
        node = self.peek()
        if node is None:
            return self._waited.pop()
        del self._members[node.id]
        self._changes += 1
        return node

    def peek(self) -> Node | None:
        """The next victim that nobody waits for."""
        retries = RETRIES
        while self._members:
            if not self._order or self._changes > min(REORDER, len(self._members) // 8):
                self._reorder()
            rank, _, end, key, node = self._order[0]
            if self._offered.get((key, end)) != node.id:
                heapq.heappop(self._order)
                continue
            if self._top(key, end) is not node:
                heapq.heappop(self._order)
                self._offer(key, end, self._top(key, end))
                continue
            if node.waiters:
                del self._members[node.id]
                self._waited.add(node)
                continue
            if retries:
                retries -= 1
                key_now = self._policy.key(node, self._tier)
                if key_now != key or self._policy.use(node).visit.time != self._members[node.id][2]:
                    self.add(node)
                    continue
                now = self._policy.rank(node, key)
                if now > rank * 1.02:
                    heapq.heapreplace(self._order, (now, node.id, end, key, node))
                    continue
            return node
        return None

    def clear(self) -> None:
        self._members.clear()
        self._waited.clear()
        self._rebuild()

    def _top(self, key: Key, end: int) -> Node | None:
        heap = self._ends[end].get(key)
        while heap:
            node = heap[0][2]
            known = self._members.get(node.id)
            if known is not None and known[1] == key and heap[0][0] == (known[2] if end == 0 else -known[2]):
                if self._policy.use(node).visit.time == known[2]:
                    return node
                # It was used since.
                heapq.heappop(heap)
                self.add(node)
                continue
            heapq.heappop(heap)
        self._ends[end].pop(key, None)
        return None

    def _offer(self, key: Key, end: int, node: Node | None) -> None:
        self._offered.pop((key, end), None)
        if node is None:
            return
        self._offered[key, end] = node.id
        heapq.heappush(self._order, (self._policy.rank(node, key), node.id, end, key, node))

    def _reorder(self) -> None:
        """Ranks change with time: look at the ends of every class again. There are a few hundred classes."""
        self._order = []
        self._offered = {}
        self._changes = 0
        for end in (0, 1):
            for key in list(self._ends[end]):
                self._offer(key, end, self._top(key, end))

    def _rebuild(self) -> None:
        members = [node for node, _, _ in self._members.values()]
        self._members.clear()
        self._ends = ({}, {})
        self._order = []
        self._offered = {}
        self._entries = 0
        for node in members:
            self.add(node)


class Cost(EvictionPolicy):
    """``node.state`` is the node's last ``Use``; pieces of a split node share it until one of them is used
    again.
    """

    name = "cost"

    def __init__(self, costs: CostModel, page_size: int) -> None:
        self.costs = costs
        self.reuse = Reuse()
        self._ghosts: Ghosts[Use] = Ghosts(GHOSTS, page_size)
        self._indexes: dict[Tier, CostIndex] = {}

    def index(self, tier: Tier) -> CostIndex:
        self._indexes[tier] = CostIndex(self, tier)
        return self._indexes[tier]

    # What happens

    def touch(self, node: Node) -> None:
        before = self.use(node).visit
        end = node.start + len(node)
        now = self.reuse.now
        visit = Visit(now, base=end, end=end)
        if end > before.base:
            visit.turn = before.turn + 1
        shared: list[Use] = []
        while node.parent is not None:
            before_it = self._use_again(node, visit)
            if before_it is not None and before_it.pieces:
                shared.append(before_it)
            node = node.parent
        for use in shared:
            self._pass_over(use)

    def created(self, node: Node) -> None:
        assert node.parent is not None
        now = self.reuse.now
        end = node.start + len(node)
        if node.parent.parent is None:
            visit = Visit(now, end=end)
        else:
            visit = self.use(node.parent).visit
            visit.end = max(visit.end, end)
        uses, gap = 0, -1
        ghosts = list(self._ghosts.take_run(node))
        for ghost in ghosts:
            self.reuse.again(ghost)
        if ghosts:
            ghost = ghosts[0]
            uses, gap = ghost.uses + 1, age_bin(now - ghost.visit.time)
            if ghost.visit.turn >= visit.turn and ghost.visit is not visit:
                visit.turn = ghost.visit.turn + 1
                visit.base = min(ghost.visit.end, end)
        node.state = Use(visit, uses, end, len(node), gap=gap)
        self.reuse.start(node.state)
        self.reuse.passed(len(node))

    def split(self, upper: Node, lower: Node) -> None:
        use = self.use(lower)
        upper.state = use
        if use.pieces is None:
            use.pieces = {lower.id: lower}
        use.pieces[upper.id] = upper

    def forget(self, node: Node) -> None:
        use = self.use(node)
        if use.pieces is not None:
            use.pieces.pop(node.id, None)
        gone = self._ghosts.put(node, use)
        if gone is not None:
            self.reuse.censor(gone)

    def clear(self) -> None:
        self._ghosts.clear()

    # What it is worth

    def use(self, node: Node) -> Use:
        if node.state is None:
            end = node.start + len(node)
            node.state = Use(Visit(self.reuse.now, end=end), 0, end, len(node))
        return node.state

    def admit(self, node: Node, tier: Tier, *, leaving: bool = False) -> bool:
        index = self._indexes[tier]
        weakest = index.peek()
        if weakest is None:
            return True
        mine = self.rank(node, self.key(node, tier))
        if leaving:
            mine /= SAFE_ON_DEVICE
        return mine > self.rank(weakest, self.key(weakest, tier))

    def worth_storing(self, node: Node) -> bool:
        """What it saves when it comes back, times the chance that it does, against what writing it costs."""
        costs = self.costs
        recompute = costs.token + costs.depth * (node.start + len(node) / 2)
        return self.reuse.chance(self.use(node)) * (recompute - costs.store) > costs.store

    def key(self, node: Node, tier: Tier) -> Key:
        use = self.use(node)
        price = self._price(node, tier)
        return self.reuse.group(use), self.reuse.factor_bin(use), round(PRICE_STEPS * math.log2(price))

    def rank(self, node: Node, key: Key) -> float:
        group, factor, price = key
        age = self.reuse.now - self.use(node).visit.time
        return 2.0 ** (price / PRICE_STEPS) * self.reuse.worth(group, factor, age)

    def _price(self, node: Node, tier: Tier) -> float:
        """Seconds a token to have the node again once ``tier`` has lost it."""
        costs = self.costs
        recompute = costs.token + costs.depth * (node.start + len(node) / 2)
        if tier is Tier.DEVICE:
            return recompute if node.host is Residency.ABSENT else min(costs.load, recompute)
        lost = max(recompute - costs.load, 1e-3 * recompute)
        return lost if node.device is Residency.ABSENT else SAFE_ON_DEVICE * lost

    def _use_again(self, node: Node, visit: Visit) -> Use | None:
        """Returns the use that ended."""
        use = self.use(node)
        if use.visit.time == visit.time and use.end == node.start + len(node):
            # Nothing was computed since: a look at the same moment, not another use.
            return None
        if node.device_locks:
            # It could not have been evicted meanwhile, so this says nothing about when that would have hurt.
            self.reuse.censor(use)
        else:
            self.reuse.again(use)
        gap = age_bin(self.reuse.now - use.visit.time)
        node.state = Use(visit, use.uses + 1, node.start + len(node), len(node), len(node.children), gap)
        self.reuse.start(node.state)
        return use

    def _pass_over(self, use: Use) -> None:
        """Some of the nodes that shared ``use`` were used again; the others were passed over."""
        old = use.visit
        visit = Visit(self.reuse.now, old.turn, old.base, old.end)
        for node in (use.pieces or {}).values():
            if node.state is not use:
                continue
            node.state = Use(visit, use.uses, use.end, len(node), passed=True)
            self.reuse.start(node.state)
            for index in self._indexes.values():
                if node in index:
                    index.add(node)
        use.pieces = None
