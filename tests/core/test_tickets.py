"""Tickets: one owner of space and locks for each transfer, ended exactly once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hicache_ext.core.page import PrefixScope
from hicache_ext.core.policy.lru import TierAwareLru
from hicache_ext.core.residency import Residency, Tier
from hicache_ext.core.tickets import Kind, State, TicketBook, TicketError
from hicache_ext.core.tree import Node, TieredRadixTree
from tests.core.fakes import prompt

ABSENT, PENDING, READY = Residency.ABSENT, Residency.PENDING, Residency.READY
SCOPE = PrefixScope()

both_kinds = pytest.mark.parametrize("kind", list(Kind))


class Sample:
    """Two nodes in a row, and a ticket of either kind over both."""

    def __init__(self, kind: Kind) -> None:
        self.tree = TieredRadixTree(4, TierAwareLru())
        self.book = TicketBook(self.tree)
        self.upper = self.tree.insert(SCOPE, prompt(4, 1), np.arange(4)).node
        self.lower = self.tree.insert(SCOPE, prompt(4, 1, 2), np.arange(8)).node
        self.nodes = [self.upper, self.lower]
        self.kind = kind
        if kind is Kind.BACKUP:
            self.set_host(PENDING)
            self.ticket = self.book.begin(kind, self.nodes, self.nodes)
        elif kind is Kind.STORE:
            self.set_host(READY)
            self.ticket = self.book.begin(kind, self.nodes, self.nodes)
        else:
            self.set_host(READY)
            for node in reversed(self.nodes):
                self.tree.set_device(node, ABSENT)
            for node in self.nodes:
                self.tree.set_device(node, PENDING, np.arange(4))
            self.ticket = self.book.begin(kind, self.nodes, [self.lower])
        self.check()

    def set_host(self, state: Residency) -> None:
        for page, node in enumerate(self.nodes):
            self.tree.set_host(node, state, np.array([page]))

    def check(self) -> None:
        self.tree.check()
        self.book.check()

    def locks(self) -> list[tuple[int, int]]:
        return [(n.device_locks, n.host_locks) for n in self.nodes]


@both_kinds
def test_commit_makes_pages_ready_and_drops_the_locks(kind: Kind) -> None:
    s = Sample(kind)
    s.book.commit(s.ticket)
    assert s.ticket.state is State.COMMITTED and len(s.book) == 0
    assert {(n.device, n.host) for n in s.nodes} == {(READY, READY)}
    assert s.locks() == [(0, 0), (0, 0)] and all(not n.tickets for n in s.nodes)
    assert s.lower in s.tree.candidates[Tier.DEVICE] and s.lower in s.tree.candidates[Tier.HOST]
    s.check()


@both_kinds
def test_a_ticket_ends_exactly_once(kind: Kind) -> None:
    s = Sample(kind)
    s.book.commit(s.ticket)
    locks = s.locks()
    with pytest.raises(TicketError, match=f"ticket {kind.name} 1 is already COMMITTED"):
        s.book.commit(s.ticket)
    assert s.locks() == locks, "the second end had an effect"


@both_kinds
def test_both_ends_are_locked_until_the_end(kind: Kind) -> None:
    """Kind 8: neither the source nor the target of a copy can be freed while it is in flight."""
    s = Sample(kind)
    for node in s.nodes:
        # A write to a store reads the host's pages only.
        assert (node.device_locks > 0) == (kind is not Kind.STORE)
        assert node not in s.tree.candidates[Tier.DEVICE] or (node is s.lower and kind is Kind.STORE)
        # The target of a backup is kept by being PENDING, which is no candidate.
        assert node not in s.tree.candidates[Tier.HOST]
        assert kind is Kind.BACKUP or node.host_locks > 0
    with pytest.raises(AssertionError):
        if kind is Kind.STORE:
            s.tree.set_host(s.lower, ABSENT)
        else:
            s.tree.set_device(s.lower, ABSENT)


def test_sequence_numbers_count_up_in_each_direction() -> None:
    s = Sample(Kind.BACKUP)
    s.book.commit(s.ticket)
    nodes: list[Node] = []
    seqs = [(kind, s.book.begin(kind, nodes, nodes).seq) for kind in (Kind.BACKUP, Kind.LOAD, Kind.BACKUP)]
    assert seqs == [(Kind.BACKUP, 2), (Kind.LOAD, 1), (Kind.BACKUP, 3)]
    assert (s.book.last_seq(Kind.BACKUP), s.book.last_seq(Kind.LOAD), len(s.book)) == (3, 1, 3)


def test_tickets_over_the_same_node_end_on_their_own() -> None:
    s = Sample(Kind.LOAD)
    other = s.tree.insert(SCOPE, prompt(4, 1, 2, 3), np.arange(12)).node
    s.tree.set_host(other, PENDING, np.array([7]))
    backup = s.book.begin(Kind.BACKUP, [other], [other])
    assert s.locks() == [(2, 1), (2, 1)]
    s.book.commit(s.ticket)
    assert s.locks() == [(1, 0), (1, 0)]
    s.check()
    s.book.commit(backup)
    assert s.locks() == [(0, 0), (0, 0)]
    s.check()


@both_kinds
def test_a_ticket_counts_its_tokens_also_after_a_split(kind: Kind) -> None:
    tree = TieredRadixTree(4, TierAwareLru())
    node = tree.insert(SCOPE, prompt(4, 1, 2, 3), np.arange(12)).node
    tree.set_host(node, PENDING if kind is Kind.BACKUP else READY, np.arange(3))
    ticket = TicketBook(tree).begin(kind, [node], [node])
    tree.split(node, 4)
    assert ticket.tokens == sum(len(n) for n in ticket.nodes) == 12


@both_kinds
def test_disown_ends_tickets_without_touching_the_tree(kind: Kind) -> None:
    s = Sample(kind)
    locks = s.locks()
    s.book.disown()
    assert s.ticket.state is State.DISOWNED and len(s.book) == 0 and s.locks() == locks
    with pytest.raises(TicketError):
        s.book.commit(s.ticket)


def forget(s: Sample) -> None:
    del s.book.open[s.kind][s.ticket.seq]


def close_only(s: Sample) -> None:
    s.ticket.state = State.COMMITTED


def wrong_seq(s: Sample) -> None:
    s.book.open[s.kind] = {9: s.ticket}


def wrong_kind(s: Sample) -> None:
    s.ticket.kind = next(k for k in Kind if k is not s.kind)


def node_without_ticket(s: Sample) -> None:
    s.lower.tickets.clear()


def lost_lock(s: Sample) -> None:
    if s.kind is Kind.STORE:
        s.lower.host_locks = 0
    else:
        s.lower.device_locks = 0


def wrong_residency(s: Sample) -> None:
    """Ready too early, or pending without a copy."""
    if s.kind is Kind.BACKUP:
        s.lower.host = READY
    elif s.kind is Kind.STORE:
        s.lower.host = PENDING
    else:
        s.lower.device = READY


CORRUPTIONS = [
    forget,
    close_only,
    wrong_seq,
    wrong_kind,
    node_without_ticket,
    lost_lock,
    wrong_residency,
]


@both_kinds
@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda f: f.__name__)
def test_check_detects(kind: Kind, corrupt: Callable[[Sample], None]) -> None:
    s = Sample(kind)
    corrupt(s)
    with pytest.raises(AssertionError):
        s.book.check()


def test_check_detects_a_load_whose_source_is_not_locked() -> None:
    s = Sample(Kind.LOAD)
    s.lower.host_locks = 0
    with pytest.raises(AssertionError):
        s.book.check()
