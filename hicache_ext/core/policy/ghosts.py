"""What is remembered of nodes that left the tree: bounded, and the same on every TP rank."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from hicache_ext.core.tree import Node

T = TypeVar("T")

Key = tuple[int, bytes]


class Ghosts(Generic[T]):
    """Payloads of forgotten nodes by their place in the tree: their parent and their first tokens.

    A node that comes back under the same parent is recognized; one whose parent left the tree too if both
    come back in one run, which ``take_run`` follows.
    """

    def __init__(self, limit: int, page_size: int = 64) -> None:
        """At most ``limit`` entries, about 200 bytes each; the oldest goes first."""
        self.limit = limit
        self.page_size = page_size
        self._entries: OrderedDict[Key, tuple[int, int, T]] = OrderedDict()
        """With each payload the node's id and length."""

    def __len__(self) -> int:
        return len(self._entries)

    def key(self, node: Node) -> Key:
        assert node.parent is not None
        return self._key(node.parent.id, node, 0)

    def put(self, node: Node, payload: T) -> T | None:
        """Remember ``node``; returns the payload that had to go for it, if any."""
        key = self.key(node)
        self._entries.pop(key, None)
        self._entries[key] = (node.id, len(node), payload)
        return self._entries.popitem(last=False)[1][2] if len(self._entries) > self.limit else None

    def take(self, node: Node) -> T | None:
        """The payload remembered at the place of ``node``, which is forgotten now."""
        return next(self.take_run(node), None)

    def take_run(self, node: Node) -> Iterator[T]:
        """The payloads remembered at the place of ``node`` and, one behind the other, within it."""
        assert node.parent is not None
        above, start = node.parent.id, 0
        while self._entries and start < len(node):
            entry = self._entries.pop(self._key(above, node, start), None)
            if entry is None:
                return
            above, length, payload = entry
            start += length
            yield payload

    def _key(self, above: int, node: Node, start: int) -> Key:
        first = node.tokens[start : start + self.page_size]
        return above, blake2b(first.tobytes(), digest_size=8).digest()

    def clear(self) -> None:
        self._entries.clear()
