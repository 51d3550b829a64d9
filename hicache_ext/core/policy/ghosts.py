"""What is remembered of nodes that left the tree: bounded, and the same on every TP rank."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from hicache_ext.core.tree import Node

T = TypeVar("T")

Key = tuple[int, bytes]


class Ghosts(Generic[T]):
    """Payloads of forgotten nodes by their place in the tree: their parent and their first tokens.

    A node that comes back under the same parent is recognized, one whose parent left the tree too is not.
    """

    def __init__(self, limit: int, page_size: int = 64) -> None:
        """At most ``limit`` entries, about 200 bytes each; the oldest goes first."""
        self.limit = limit
        self.page_size = page_size
        self._entries: OrderedDict[Key, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def key(self, node: Node) -> Key:
        assert node.parent is not None
        first = node.tokens[: self.page_size]
        return node.parent.id, blake2b(first.tobytes(), digest_size=8).digest()

    def put(self, node: Node, payload: T) -> T | None:
        """Remember ``node``; returns the payload that had to go for it, if any."""
        key = self.key(node)
        self._entries.pop(key, None)
        self._entries[key] = payload
        return self._entries.popitem(last=False)[1] if len(self._entries) > self.limit else None

    def take(self, node: Node) -> T | None:
        """The payload remembered at the place of ``node``, which is forgotten now."""
        return self._entries.pop(self.key(node), None) if self._entries else None

    def clear(self) -> None:
        self._entries.clear()
