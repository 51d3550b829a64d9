"""Segmented LRU: what was used once goes before what was used again, which has a limited share."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from hicache_ext.core.policy import EvictionPolicy, Rank
from hicache_ext.core.policy.index import EvictionIndex
from hicache_ext.core.residency import Residency, Tier

if TYPE_CHECKING:
    from hicache_ext.core.tree import Node

PROTECTED_SHARE = 0.8


class Slru(EvictionPolicy):
    """Per tier a protected segment of 80 % of its tokens; what it overflows with is evictable by age
    again.
    """

    name = "slru"

    def __init__(self, capacity: dict[Tier, int]) -> None:
        """``capacity`` in tokens."""
        self.limit = {tier: int(tokens * PROTECTED_SHARE) for tier, tokens in capacity.items()}
        self._indexes: dict[Tier, EvictionIndex] = {}
        self.clear()

    def index(self, tier: Tier) -> EvictionIndex:
        index = EvictionIndex(self.device_rank if tier is Tier.DEVICE else self.host_rank)
        self._indexes[tier] = index
        return index

    def clear(self) -> None:
        self._protected: dict[Tier, OrderedDict[int, Node]] = {tier: OrderedDict() for tier in Tier}
        self._tokens = dict.fromkeys(Tier, 0)

    def touch(self, node: Node) -> None:
        path = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        for tier in Tier:
            for member in path:
                if (member.device if tier is Tier.DEVICE else member.host) is not Residency.ABSENT:
                    self._protect(member, tier)
            self._demote(tier)

    def split(self, upper: Node, lower: Node) -> None:
        for tier in Tier:
            segment = self._protected[tier]
            if lower.id in segment:
                # Which of the two is older makes no difference: they were used together.
                segment[upper.id] = upper

    def evicted(self, node: Node, tier: Tier) -> None:
        self._drop(node, tier)

    def device_rank(self, node: Node) -> Rank:
        return (node.waiters > 0, node.id in self._protected[Tier.DEVICE], node.stamp)

    def host_rank(self, node: Node) -> Rank:
        return (node.waiters > 0, node.id in self._protected[Tier.HOST], node.stamp)

    def _protect(self, node: Node, tier: Tier) -> None:
        segment = self._protected[tier]
        if node.id in segment:
            segment.move_to_end(node.id)
        else:
            segment[node.id] = node
            self._tokens[tier] += len(node)

    def _demote(self, tier: Tier) -> None:
        segment = self._protected[tier]
        while self._tokens[tier] > self.limit.get(tier, 0) and segment:
            node = next(iter(segment.values()))
            self._drop(node, tier)
            index = self._indexes.get(tier)
            if index is not None and node in index:
                index.add(node)

    def _drop(self, node: Node, tier: Tier) -> None:
        if self._protected[tier].pop(node.id, None) is not None:
            self._tokens[tier] -= len(node)
