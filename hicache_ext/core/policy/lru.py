"""Least recently used, aware of tiers and of the waiting queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_ext.core.policy import EvictionPolicy, Rank
from hicache_ext.core.residency import Residency

if TYPE_CHECKING:
    from hicache_ext.core.tree import Node


class TierAwareLru(EvictionPolicy):
    """Oldest first; of two equally old, the one that is cheaper to get back goes first.

    A node that a queued request has matched outranks every node that nobody waits for, whatever its age.
    Age is counted in scheduler steps, so everything touched in one step is equally old.
    """

    name = "lru"

    def device_rank(self, node: Node) -> Rank:
        return (node.waiters > 0, node.stamp, node.host is not Residency.READY)

    def host_rank(self, node: Node) -> Rank:
        return (node.waiters > 0, node.stamp, node.device is Residency.ABSENT)
