"""Tail-optimized LRU (arXiv 2510.15152): first what can be lost without missing a TTFT target, then the
oldest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_ext.core.policy import EvictionPolicy, Rank

if TYPE_CHECKING:
    from hicache_ext.core.tree import Node


class TailLru(EvictionPolicy):
    """A conversation of length L whose next turn brings Q new tokens needs L + Q - budget of them cached.

    What lies behind that point is safe to lose. Q is the mean of what requests brought so far; ``node.state``
    is L, the end of the last request through the node.
    """

    name = "tlru"

    def __init__(self, budget: float) -> None:
        """``budget``: tokens whose prefill the TTFT target allows."""
        self.budget = budget
        self._turns = 0
        self._tokens = 0

    def created(self, node: Node) -> None:
        self._turns += 1
        self._tokens += len(node)
        end = node.start + len(node)
        member: Node | None = node
        while member is not None and member.parent is not None:
            member.state = end
            member = member.parent

    def split(self, upper: Node, lower: Node) -> None:
        upper.state = lower.state

    def device_rank(self, node: Node) -> Rank:
        brought = self._tokens / max(self._turns, 1)
        # Its last token decides: an eviction takes the end of a long run first.
        safe = node.start + len(node) - 1 >= (node.state or 0) + brought - self.budget
        return (node.waiters > 0, not safe, node.stamp)

    host_rank = device_rank
