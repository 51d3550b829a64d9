"""Least frequently used; of two equally often used, the older goes first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_ext.core.policy import EvictionPolicy, Rank

if TYPE_CHECKING:
    from hicache_ext.core.tree import Node


class Lfu(EvictionPolicy):
    """``node.state`` counts the requests that matched the node since it was computed."""

    name = "lfu"

    def touch(self, node: Node) -> None:
        while node.parent is not None:
            node.state = (node.state or 0) + 1
            node = node.parent

    def split(self, upper: Node, lower: Node) -> None:
        upper.state = lower.state

    def device_rank(self, node: Node) -> Rank:
        return (node.waiters > 0, node.state or 0, node.stamp)

    host_rank = device_rank
