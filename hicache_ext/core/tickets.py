"""Tickets: the only owners of space and locks of a transfer in flight.

Every transfer has one ticket. It is opened with its space reserved and both ends locked, and it ends
exactly once: with ``commit`` (the copy has ended), or disowned together with the whole tree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from hicache_ext.core.residency import Residency, Tier
from hicache_ext.core.tree import Node, TieredRadixTree


class Kind(Enum):
    BACKUP = auto()
    """Device to host: the nodes' host residency is PENDING, their device pages are locked."""
    LOAD = auto()
    """Host to device: the nodes' device residency is PENDING, both ends are locked."""
    STORE = auto()
    """Host to a store: the nodes' host pages are locked."""


_LOCKED = {
    Kind.BACKUP: (Tier.DEVICE,),
    Kind.LOAD: (Tier.DEVICE, Tier.HOST),
    Kind.STORE: (Tier.HOST,),
}


class State(Enum):
    OPEN = auto()
    COMMITTED = auto()
    DISOWNED = auto()


@dataclass(slots=True, eq=False)
class Ticket:
    """``nodes`` change residency when it ends, parents before children; ``anchors`` carry its locks."""

    kind: Kind
    seq: int
    nodes: list[Node]
    anchors: list[Node]
    state: State = State.OPEN
    tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = sum(len(n) for n in self.nodes)


class TicketError(AssertionError):
    """A ticket was ended twice."""


class TicketBook:
    """Opens and ends tickets; sequence numbers count up from 1 in each direction."""

    def __init__(self, tree: TieredRadixTree) -> None:
        self._tree = tree
        self.open: dict[Kind, dict[int, Ticket]] = {kind: {} for kind in Kind}
        self._last_seq = dict.fromkeys(Kind, 0)

    def __len__(self) -> int:
        return sum(len(tickets) for tickets in self.open.values())

    def last_seq(self, kind: Kind) -> int:
        return self._last_seq[kind]

    def begin(self, kind: Kind, nodes: list[Node], anchors: list[Node]) -> Ticket:
        """Open a ticket over nodes whose receiving side is already PENDING, and lock both ends."""
        self._last_seq[kind] += 1
        ticket = Ticket(kind, self._last_seq[kind], list(nodes), list(anchors))
        for node in nodes:
            node.tickets.append(ticket)
        for node in anchors:
            for tier in _LOCKED[kind]:
                self._tree.lock(node, tier, _below(ticket, tier))
        self.open[kind][ticket.seq] = ticket
        return ticket

    def commit(self, ticket: Ticket) -> None:
        """The copy has ended: PENDING becomes READY, the locks go."""
        self._end(ticket, State.COMMITTED)
        for node in ticket.nodes:
            if ticket.kind is Kind.BACKUP:
                self._tree.set_host(node, Residency.READY)
            elif ticket.kind is Kind.LOAD:
                self._tree.set_device(node, Residency.READY)
        for node in ticket.anchors:
            for tier in _LOCKED[ticket.kind]:
                self._tree.unlock(node, tier, _below(ticket, tier))

    def disown(self) -> None:
        """End every open ticket without touching the tree; for a reset, once no copy is in flight."""
        for tickets in self.open.values():
            for ticket in tickets.values():
                ticket.state = State.DISOWNED
            tickets.clear()

    def check(self) -> None:
        """Assert that PENDING and open tickets say the same."""
        pending: dict[Kind, set[int]] = {kind: set() for kind in Kind}
        for kind, tickets in self.open.items():
            for seq, ticket in tickets.items():
                assert ticket.state is State.OPEN and ticket.seq == seq and ticket.kind is kind
                for node in ticket.nodes:
                    assert ticket in node.tickets
                    for tier in _LOCKED[kind]:
                        locks = node.device_locks if tier is Tier.DEVICE else node.host_locks
                        assert locks > 0, f"{node} is in flight without a {tier.name.lower()} lock"
                    pending[kind].add(node.id)
        for node in self._tree.walk():
            assert (node.host is Residency.PENDING) == (node.id in pending[Kind.BACKUP]), node
            assert (node.device is Residency.PENDING) == (node.id in pending[Kind.LOAD]), node
            assert all(self.open[t.kind].get(t.seq) is t for t in node.tickets), node

    def _end(self, ticket: Ticket, state: State) -> None:
        if ticket.state is not State.OPEN:
            raise TicketError(f"ticket {ticket.kind.name} {ticket.seq} is already {ticket.state.name}")
        ticket.state = state
        del self.open[ticket.kind][ticket.seq]
        for node in ticket.nodes:
            node.tickets.remove(ticket)


def _below(ticket: Ticket, tier: Tier) -> Node | None:
    """Above what a load brings, the device holds the prefix: the host need not."""
    return ticket.nodes[0].parent if ticket.kind is Kind.LOAD and tier is Tier.HOST else None
