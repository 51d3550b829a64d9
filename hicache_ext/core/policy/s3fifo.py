"""S3-FIFO (SOSP'23): a small FIFO that sieves out what is used once, a main FIFO, and a ghost list."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hicache_ext.core.policy import EvictionPolicy, Rank
from hicache_ext.core.policy.ghosts import Ghosts
from hicache_ext.core.policy.index import EvictionIndex
from hicache_ext.core.residency import Tier

if TYPE_CHECKING:
    from hicache_ext.core.tree import Node

SMALL_SHARE = 0.1
MAX_USES = 3
GHOSTS = 1 << 16


@dataclass(slots=True)
class _State:
    uses: int = 0
    main: list[bool] = field(default_factory=lambda: [False, False])
    order: list[int] = field(default_factory=lambda: [0, 0])


class S3Index:
    """The two queues of one tier, as far as they are candidates; inner nodes keep their place meanwhile."""

    def __init__(self, policy: S3Fifo, tier: Tier, small_limit: int) -> None:
        self._policy = policy
        self._tier = tier
        self._small_limit = small_limit
        self._small = EvictionIndex(self._rank)
        self._main = EvictionIndex(self._rank)
        self._lengths: dict[int, int] = {}
        self._small_tokens = 0

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __contains__(self, node: Node) -> bool:
        return node in self._small or node in self._main

    def add(self, node: Node) -> None:
        self.discard(node)
        if self._state(node).main[self._tier]:
            self._main.add(node)
        else:
            self._small.add(node)
            self._lengths[node.id] = len(node)
            self._small_tokens += len(node)

    def discard(self, node: Node) -> None:
        self._small.discard(node)
        self._main.discard(node)
        self._small_tokens -= self._lengths.pop(node.id, 0)

    def pop(self) -> Node | None:
        while len(self):
            from_small = len(self._small) and (self._small_tokens > self._small_limit or not len(self._main))
            node = (self._small if from_small else self._main).pop()
            assert node is not None
            self._small_tokens -= self._lengths.pop(node.id, 0)
            state = self._state(node)
            if state.uses > (1 if from_small else 0) and not node.waiters:
                # At most MAX_USES times in a row, each paid for by a request that used the node.
                if not from_small:
                    state.uses -= 1
                state.main[self._tier] = True
                state.order[self._tier] = self._policy.next_order()
                self._main.add(node)
                continue
            return node
        return None

    def clear(self) -> None:
        self._small.clear()
        self._main.clear()
        self._lengths.clear()
        self._small_tokens = 0

    def _state(self, node: Node) -> _State:
        if node.state is None:
            node.state = _State()
        return node.state

    def _rank(self, node: Node) -> Rank:
        return (node.waiters > 0, self._state(node).order[self._tier])


class S3Fifo(EvictionPolicy):
    name = "s3fifo"

    def __init__(self, capacity: dict[Tier, int], page_size: int) -> None:
        """``capacity`` in tokens."""
        self._capacity = capacity
        self._ghosts: Ghosts[bool] = Ghosts(GHOSTS, page_size)
        self._order = 0
        self._indexes: list[S3Index] = []

    def index(self, tier: Tier) -> S3Index:
        index = S3Index(self, tier, int(self._capacity.get(tier, 0) * SMALL_SHARE))
        self._indexes.append(index)
        return index

    def next_order(self) -> int:
        self._order += 1
        return self._order

    def touch(self, node: Node) -> None:
        while node.parent is not None:
            if node.state is not None:
                node.state.uses = min(node.state.uses + 1, MAX_USES)
            node = node.parent

    def created(self, node: Node) -> None:
        order = self.next_order()
        known = self._ghosts.take(node) is not None
        node.state = _State(main=[known, known], order=[order, order])

    def split(self, upper: Node, lower: Node) -> None:
        state = lower.state
        if state is not None:
            upper.state = _State(state.uses, list(state.main), list(state.order))
        for index in self._indexes:
            if lower in index:
                index.add(lower)

    def forget(self, node: Node) -> None:
        self._ghosts.put(node, True)

    def clear(self) -> None:
        self._ghosts.clear()
