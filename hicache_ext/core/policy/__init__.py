"""Eviction and admission policies: one file each, one small interface.

A policy learns from ``touch``, ``created``, ``split``, ``evicted`` and ``forget``; it answers through
``index`` (who leaves a tier next), ``admit`` (what a slower tier takes) and ``worth_storing`` (what is
written to a remote store). A policy that orders by a number only implements
``device_rank`` and ``host_rank``: the lowest rank is evicted first. Ranks may rise at any time without notice
(the index re-reads a rank before it uses it) but whoever lowers one must tell the index.

Every TP rank runs its own policy and must decide like the others: use token counts and what the tree says,
never wall time, random numbers or Python's salted ``hash`` of bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hicache_ext.core.residency import Tier

if TYPE_CHECKING:
    from hicache_ext.core.tree import Node

Rank = tuple[float, ...]


class VictimIndex(Protocol):
    """The candidates of one tier, in the order in which they leave it."""

    def add(self, node: Node) -> None:
        """``node`` can be evicted now; called again when it should be looked at anew."""
        ...

    def discard(self, node: Node) -> None:
        """``node`` cannot be evicted now; unknown nodes are ignored."""
        ...

    def pop(self) -> Node | None:
        """Remove and return the next victim, or None. Work does not grow with what stays."""
        ...

    def clear(self) -> None: ...

    def __len__(self) -> int: ...

    def __contains__(self, node: Node) -> bool: ...


class EvictionPolicy:
    """The interface, with defaults: learns nothing and admits everything.

    ``node.state`` is the policy's to use; ``node.start`` is the number of tokens before the node.
    """

    name = ""

    def device_rank(self, node: Node) -> Rank:
        """Rank among nodes that could leave the device now."""
        raise NotImplementedError

    def host_rank(self, node: Node) -> Rank:
        """Rank among nodes whose host copy could be dropped now."""
        raise NotImplementedError

    def index(self, tier: Tier) -> VictimIndex:
        """A new, empty index of the tier's candidates."""
        from hicache_ext.core.policy.index import EvictionIndex

        return EvictionIndex(self.device_rank if tier is Tier.DEVICE else self.host_rank)

    def touch(self, node: Node) -> None:
        """A request matched everything from the root to ``node``; its ancestors get no call of their own."""

    def created(self, node: Node) -> None:
        """``node`` was computed and is new to the tree; its parent may be the root."""

    def split(self, upper: Node, lower: Node) -> None:
        """``lower`` lost its first tokens to its new parent ``upper``."""

    def evicted(self, node: Node, tier: Tier) -> None:
        """``node`` is no longer resident in ``tier``; it may still be in the other."""

    def forget(self, node: Node) -> None:
        """``node`` is resident nowhere and about to leave the tree; its parent link still holds."""

    def admit(self, node: Node, tier: Tier, *, leaving: bool = False) -> bool:
        """Whether a copy of ``node`` may take room in ``tier``, which has no room to spare.

        ``leaving``: the device is about to lose the node.
        """
        return True

    def worth_storing(self, node: Node) -> bool:
        """Whether ``node`` is expected to come back often enough to be written to a remote store.

        Of this server's requests only: what other servers ask the store for is not known here.
        """
        return True

    def clear(self) -> None:
        """Every node is gone. What was learned about the workload may stay."""
