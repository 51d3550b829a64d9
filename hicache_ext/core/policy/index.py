"""Which node leaves a tier next, in time proportional to what leaves."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from hicache_ext.core.policy import Rank

if TYPE_CHECKING:
    from hicache_ext.core.tree import Node

_SLACK = 1024


class EvictionIndex:
    """A heap of candidates that tolerates stale entries.

    ``add`` a node when it becomes a candidate and again whenever its rank falls; a rank that rises needs no
    call, because ``pop`` re-reads it. Ties break by node id, so TP ranks that do the same operations pick
    the same victims.
    """

    def __init__(self, rank: Callable[[Node], Rank]) -> None:
        self._rank = rank
        self._heap: list[tuple[Rank, int, Node]] = []
        self._members: dict[int, Node] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, node: Node) -> bool:
        return node.id in self._members

    def __iter__(self) -> Iterator[Node]:
        """The candidates, in no order of rank."""
        return iter(self._members.values())

    def add(self, node: Node) -> None:
        self._members[node.id] = node
        heapq.heappush(self._heap, (self._rank(node), node.id, node))
        if len(self._heap) > 2 * len(self._members) + _SLACK:
            self._heap = [(self._rank(n), n.id, n) for n in self._members.values()]
            heapq.heapify(self._heap)

    def discard(self, node: Node) -> None:
        self._members.pop(node.id, None)

    def pop(self) -> Node | None:
        """Remove and return the candidate of lowest rank, or None."""
        while self._heap:
            rank, node_id, node = heapq.heappop(self._heap)
            if self._members.get(node_id) is not node:
                continue
            now = self._rank(node)
            if now > rank:
                heapq.heappush(self._heap, (now, node_id, node))
                continue
            del self._members[node_id]
            return node
        return None

    def clear(self) -> None:
        self._heap.clear()
        self._members.clear()
