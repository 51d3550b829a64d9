"""Eviction policies: one file each, one small interface.

A policy ranks nodes; the lowest rank is evicted first. Ranks may rise at any time without notice (the
index re-reads a rank before it uses it) but whoever lowers one must tell the index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from hicache_ext.core.tree import Node

Rank = tuple[float, ...]


class EvictionPolicy(Protocol):
    def device_rank(self, node: Node) -> Rank:
        """Rank among nodes that could leave the device now."""
        ...

    def host_rank(self, node: Node) -> Rank:
        """Rank among nodes whose host copy could be dropped now."""
        ...
