"""A radix tree over page-aligned token runs, with residency per tier.

A node is a run of pages. Each tier says of it ABSENT, PENDING (space reserved, transfer under way) or
READY. The tree moves no bytes and allocates nothing: it records where pages are and who needs them.

Invariants, asserted by ``check()``:

 1. Links: every child is filed under its first page (and, below the root, its scope); no node is empty;
    run lengths are multiples of the page size.
 2. Residency: every node but the root is resident somewhere.
 3. Closure: if a node is on the device, so is its parent; if a node is on the host, its parent is on the host
    too or locked on the device. What loses such a lock without a host copy is ``uncovered``: its owner must
    give it one, or drop what continues it on the host.
 4. Locks cover the path: a node has at least as many locks in a tier as its children together, except that
    locks on the host end below a node that is locked on the device; a locked node is resident in that tier.
    PENDING nodes are locked.
 5. Sizes: evictable + protected = tokens on the device, evictable = those without a device lock.
 6. Eviction candidates of a tier are exactly its unlocked READY nodes without children there that are not
    uncovered on the device, nor in use on the device if they are on the host. ``in_use`` holds the unlocked
    READY copies on the host of what is in use on the device, ``duplicates`` the candidates of the host that
    are READY on the device too.
 7. Waiters of a node = the queued requests whose match ends at or below it.
 8. Doubt covers the subtree: below a condemned node all are condemned, at least as badly. The topmost one is
    filed under a key that no lookup builds.

A split keeps the caller's node object as the deeper half, so every handle stays valid.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from hicache_ext.core.page import PrefixScope, page_identities, root_salt
from hicache_ext.core.policy import EvictionPolicy, VictimIndex
from hicache_ext.core.policy.index import EvictionIndex
from hicache_ext.core.residency import Doubt, Residency, Tier

if TYPE_CHECKING:
    from hicache_ext.core.tickets import Ticket

ABSENT, PENDING, READY = Residency.ABSENT, Residency.PENDING, Residency.READY

_CONDEMNED = "condemned"

Slots = Any
"""Device KV slots of a token run, one per token: an int64 numpy array or torch tensor."""


@dataclass(slots=True, eq=False)
class Node:
    """A run of pages. ``tokens`` is int64; ``pages`` holds one host page number per page.

    ``start`` tokens lie between the root and the node; ``state`` belongs to the policy.
    """

    id: int
    parent: Node | None
    scope: PrefixScope
    tokens: np.ndarray
    stamp: int = 0
    start: int = 0
    state: Any = None
    key: Hashable = None
    children: dict[Hashable, Node] = field(default_factory=dict)
    identities: list[bytes] | None = None

    device: Residency = ABSENT
    slots: Slots = None
    device_locks: int = 0
    uses: int = 0
    """Of its device locks, those of requests."""
    device_children: int = 0

    host: Residency = ABSENT
    pages: np.ndarray | None = None
    host_locks: int = 0
    host_children: int = 0

    waiters: int = 0
    waiting: set[str] = field(default_factory=set)
    tickets: list[Ticket] = field(default_factory=list)
    backup_queued: bool = False
    stored: bool = False
    """A store is known to have taken what the host has."""
    store_queued: bool = False
    doubt: Doubt = Doubt.NONE

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return (
            f"Node({self.id}, {len(self)} tokens, device={self.device.name}/{self.device_locks}, "
            f"host={self.host.name}/{self.host_locks}, waiters={self.waiters}, stamp={self.stamp})"
        )


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix: ``device_len`` tokens on the device, then ``host_len`` on the host only."""

    device_len: int
    host_len: int
    device_node: Node
    host_node: Node
    """The deepest node of the match; equal to ``device_node`` if ``host_len`` is 0."""


@dataclass(frozen=True, slots=True)
class Insertion:
    """``matched`` tokens were on the device before; ``added`` nodes took over the caller's slots."""

    matched: int
    node: Node
    added: list[Node]


class TieredRadixTree:
    """See the module docstring. All token arguments are int64 numpy arrays; lengths are tokens."""

    def __init__(
        self,
        page_size: int,
        policy: EvictionPolicy,
        *,
        namespace: bytes = b"",
        own: Callable[[Slots], Slots] = lambda run: run.copy(),
    ) -> None:
        """``own`` copies a slice of slots, so that a small run does not keep a large buffer alive."""
        self.page_size = page_size
        self.namespace = namespace
        self.own = own
        self.policy = policy
        self.candidates = {tier: policy.index(tier) for tier in Tier}
        # These cannot be lost on the device, and are made again after; the latest are in use for longest.
        self.in_use = EvictionIndex(lambda node: (-node.stamp,))
        # These are lost if the device evicts them; it evicts what requests wait for, and the latest, last.
        self.duplicates = EvictionIndex(lambda node: (node.waiters == 0, -node.stamp))
        self.clock = 0
        self._next_id = 0
        self.clear()

    def clear(self) -> None:
        """Forget every node. Frees nothing: the caller resets the pools."""
        self.root = Node(self._new_id(), None, PrefixScope(), np.empty(0, np.int64))
        self.root.device = self.root.host = READY
        self.waiting: dict[str, Node] = {}
        self.condemned: dict[Hashable, Node] = {}
        self.uncovered: list[Node] = []
        """May hold nodes that no longer are."""
        self.evictable_tokens = 0
        self.protected_tokens = 0
        self.host_tokens = 0
        self.nodes = 0
        for index in (*self.candidates.values(), self.in_use, self.duplicates):
            index.clear()
        self.policy.clear()

    # Lookup and growth

    def match(self, scope: PrefixScope, tokens: np.ndarray, *, touch: bool = True) -> Match:
        """The longest cached prefix of ``tokens``, cut to whole pages; splits a node it ends inside of.

        Takes no lock: the nodes are valid until the next eviction.
        """
        node = self.root
        device_node, device_len, pos = node, 0, 0
        end = self._whole_pages(len(tokens))
        while pos < end:
            child = node.children.get(self._key(node, scope, tokens, pos))
            if child is None or (child.device is ABSENT and child.host is not READY):
                break
            common = self.common(child.tokens, tokens[pos:end])
            if common < len(child):
                child = self.split(child, common)
            if touch:
                child.stamp = self.clock
            node = child
            pos += common
            if child.device is not ABSENT:
                device_node, device_len = child, pos
        if touch and node is not self.root:
            self.policy.touch(node)
        return Match(device_len, pos - device_len, device_node, node)

    def insert(self, scope: PrefixScope, tokens: np.ndarray, slots: Slots) -> Insertion:
        """Put ``tokens`` (whole pages) on the device; slots past ``matched`` now belong to the tree.

        The device-resident part keeps its own slots: the caller frees its duplicates ``[0, matched)``.
        """
        assert len(tokens) % self.page_size == 0 and len(slots) >= len(tokens)
        node, pos, matched, end = self.root, 0, 0, len(tokens)
        added: list[Node] = []
        while pos < end:
            node = self._child(node, scope, tokens[pos:])
            stop = pos + len(node)
            if node.device is ABSENT:
                self.set_device(node, READY, self.own(slots[pos:stop]))
                added.append(node)
            else:
                matched = stop
            node.stamp = self.clock
            pos = stop
        return Insertion(matched, node, added)

    def insert_host(
        self, node: Node, scope: PrefixScope, tokens: np.ndarray, pages: np.ndarray, identities: list[bytes]
    ) -> tuple[Node, np.ndarray]:
        """Put a run (whole pages) on the host that continues ``node``, which is on the host.

        Returns the run's last node, and those of ``pages`` that the tree did not take because others hold
        the same there.
        """
        assert node.host is not ABSENT and len(tokens) == len(pages) * self.page_size
        pos, end = 0, len(tokens)
        spare: list[np.ndarray] = []
        while pos < end:
            node = self._child(node, scope, tokens[pos:])
            first, stop = pos // self.page_size, (pos + len(node)) // self.page_size
            if node.host is ABSENT:
                node.identities = identities[first:stop]
                self.set_host(node, READY, pages[first:stop].copy())
                node.stored = True
            else:
                spare.append(pages[first:stop])
            pos += len(node)
        return node, np.concatenate([*spare, np.empty(0, np.int64)])

    def split(self, node: Node, length: int) -> Node:
        """Cut ``node`` after ``length`` tokens; returns the new upper half, ``node`` becomes the lower."""
        assert 0 < length < len(node) and length % self.page_size == 0
        parent = node.parent
        assert parent is not None
        head = node.tokens[:length].copy()
        upper = Node(self._new_id(), parent, node.scope, head, node.stamp, node.start, key=node.key)
        upper.doubt = node.doubt
        upper.stored = node.stored
        pages = length // self.page_size
        if node.identities is not None:
            upper.identities, node.identities = node.identities[:pages], node.identities[pages:]
        if node.device is not ABSENT:
            upper.slots, node.slots = self.own(node.slots[:length]), self.own(node.slots[length:])
            upper.device_children = 1
        if node.host is not ABSENT:
            assert node.pages is not None
            upper.pages, node.pages = node.pages[:pages].copy(), node.pages[pages:].copy()
            upper.host_children = 1
        upper.device, upper.host = node.device, node.host
        upper.device_locks, upper.host_locks, upper.uses = node.device_locks, node.host_locks, node.uses
        upper.waiters = node.waiters
        for ticket in node.tickets:
            ticket.nodes.insert(ticket.nodes.index(node), upper)
            upper.tickets.append(ticket)
        node.tokens = node.tokens[length:].copy()
        node.start += length
        parent.children[upper.key] = upper
        node.parent = upper
        node.key = self._key(upper, node.scope, node.tokens, 0)
        upper.children[node.key] = node
        if upper.key in self.condemned:
            self.condemned[upper.key] = upper
        self.nodes += 1
        self.policy.split(upper, node)
        if upper.uses:
            self._reconsider(upper, Tier.HOST)
        return upper

    def identities(self, node: Node) -> list[bytes]:
        """Page identities of the node's run, computed once; hashes its ancestors' runs if need be."""
        for member in reversed([n for n in self.path(node) if n.identities is None]):
            above = member.parent
            assert above is not None
            parent = above.identities[-1] if above.identities else root_salt(self.namespace, member.scope)
            member.identities = page_identities(parent, member.tokens, self.page_size)
        return node.identities or []

    def path(self, node: Node) -> Iterator[Node]:
        """From ``node`` up to the last node below the root."""
        while node.parent is not None:
            yield node
            node = node.parent

    def on_host(self, node: Node) -> bool:
        """Whether the whole path to ``node`` is on the host, or on its way there."""
        return all(member.host is not ABSENT for member in self.path(node))

    # Residency

    def set_device(self, node: Node, state: Residency, slots: Slots = None) -> None:
        """Change a node's device residency; ``slots`` are given when it becomes resident."""
        was = node.device
        node.device = state
        assert node.parent is not None
        if was is ABSENT and state is not ABSENT:
            assert len(slots) == len(node)
            node.slots = slots
            node.parent.device_children += 1
            self.evictable_tokens += len(node)
            self._reconsider(node.parent, Tier.DEVICE)
        elif was is not ABSENT and state is ABSENT:
            assert node.device_locks == 0 and node.device_children == 0
            node.slots = None
            node.parent.device_children -= 1
            self.evictable_tokens -= len(node)
            self.policy.evicted(node, Tier.DEVICE)
            self._reconsider(node.parent, Tier.DEVICE)
        self._reconsider(node, Tier.DEVICE)
        self._reconsider(node, Tier.HOST)

    def set_host(self, node: Node, state: Residency, pages: np.ndarray | None = None) -> None:
        """Change a node's host residency; ``pages`` are given when it becomes resident."""
        was = node.host
        node.host = state
        assert node.parent is not None
        if was is ABSENT and state is not ABSENT:
            assert pages is not None and len(pages) * self.page_size == len(node)
            node.pages = pages
            node.parent.host_children += 1
            self.host_tokens += len(node)
            self._reconsider(node.parent, Tier.HOST)
        elif was is not ABSENT and state is ABSENT:
            assert node.host_locks == 0
            node.pages = None
            # The device may copy it down again: the store has it already.
            node.stored = node.stored and node.device is not ABSENT
            node.parent.host_children -= 1
            self.host_tokens -= len(node)
            self.policy.evicted(node, Tier.HOST)
            self._reconsider(node.parent, Tier.HOST)
            self._reconsider(node.parent, Tier.DEVICE)
        self._reconsider(node, Tier.HOST)
        self._reconsider(node, Tier.DEVICE)

    def prune(self, node: Node) -> None:
        """Take a node that is resident nowhere out of the tree; those who wait for it wait for its parent."""
        parent = node.parent
        assert parent is not None and not node.children and node.device is ABSENT and node.host is ABSENT
        self.policy.forget(node)
        del parent.children[node.key]
        self.condemned.pop(node.key, None)
        for rid in node.waiting:
            self.waiting[rid] = parent
            if parent is not self.root:
                parent.waiting.add(rid)
            else:
                del self.waiting[rid]
        node.parent = None
        node.waiting.clear()
        node.waiters = 0
        self.nodes -= 1
        for index in (*self.candidates.values(), self.in_use, self.duplicates):
            index.discard(node)

    def condemn(self, node: Node, doubt: Doubt) -> None:
        """Take a subtree out of reach of every lookup; it stays until its locks are gone."""
        parent = node.parent
        assert parent is not None
        if node.doubt is Doubt.NONE:
            del parent.children[node.key]
            node.key = (_CONDEMNED, node.id)
            parent.children[node.key] = node
            self.condemned[node.key] = node
        for member in self.subtree(node):
            member.doubt = max(member.doubt, doubt)

    # Locks

    def lock(self, node: Node, tier: Tier, below: Node | None = None) -> None:
        """Keep the path root..node in ``tier`` until the matching ``unlock``.

        On the host, only what comes after ``below``, a node of the path that is kept otherwise.
        """
        for member in self._locked(node, below):
            if tier is Tier.HOST:
                assert member.host is not ABSENT, member
                member.host_locks += 1
                self.in_use.discard(member)
                self.duplicates.discard(member)
            else:
                assert member.device is not ABSENT, member
                if member.device_locks == 0:
                    self.evictable_tokens -= len(member)
                    self.protected_tokens += len(member)
                member.device_locks += 1
            self.candidates[tier].discard(member)

    def unlock(self, node: Node, tier: Tier, below: Node | None = None) -> None:
        for member in self._locked(node, below):
            if tier is Tier.HOST:
                assert member.host_locks > 0, member
                member.host_locks -= 1
            else:
                assert member.device_locks > 0, member
                member.device_locks -= 1
                if member.device_locks == 0:
                    self.evictable_tokens += len(member)
                    self.protected_tokens -= len(member)
                    if _lacks_cover(member):
                        self.uncovered.append(member)
            self._reconsider(member, tier)

    def hold(self, node: Node) -> None:
        """Lock the path root..node on the device for a request, until the matching ``release``."""
        self.lock(node, Tier.DEVICE)
        for member in self.path(node):
            member.uses += 1
            if member.uses == 1:
                self._reconsider(member, Tier.HOST)

    def release(self, node: Node) -> None:
        for member in self.path(node):
            assert member.uses > 0, member
            member.uses -= 1
            if member.uses == 0:
                self._reconsider(member, Tier.HOST)
        self.unlock(node, Tier.DEVICE)

    def put_back(self, node: Node, tier: Tier) -> None:
        """A popped candidate of ``tier`` is not evicted after all."""
        self._reconsider(node, tier)

    def copies(self, most: int, *, leaving: bool, above: Node) -> int:
        """Tokens on the host that could leave it, because the device has them: of what is in use, and with
        ``leaving`` of the rest. Without those above ``above``; does not count on beyond ``most``."""
        tokens = 0
        kept = {node.id for node in self.path(above)}
        children: dict[int, int] = {}
        for node in chain(self.in_use, self.duplicates if leaving else ()):
            member: Node | None = node
            while member is not None and tokens < most and member.id not in kept:
                tokens += len(member)
                member = self._next_duplicate(member, children) if not node.uses else None
            if tokens >= most:
                break
        return tokens

    def _next_duplicate(self, node: Node, children: dict[int, int]) -> Node | None:
        """The parent of a copy that leaves the host, if it can leave next: it is the last of its children
        that does. ``children`` counts them by node id."""
        parent = node.parent
        assert parent is not None
        children[parent.id] = gone = children.get(parent.id, 0) + 1
        free = gone == parent.host_children and not parent.uses and parent.device is READY
        return parent if free and self._is_free_on_host(parent) and parent is not self.root else None

    # The waiting queue

    def want(self, rid: str, node: Node) -> None:
        """Queued request ``rid`` has matched up to ``node``; replaces what it waited for before."""
        self.unwant(rid)
        if node is self.root:
            return
        self.waiting[rid] = node
        node.waiting.add(rid)
        for member in self.path(node):
            member.waiters += 1
            if member in self.duplicates:
                self.duplicates.add(member)

    def unwant(self, rid: str) -> None:
        """Forget a queued request; unknown ids are ignored."""
        node = self.waiting.pop(rid, None)
        if node is None:
            return
        node.waiting.discard(rid)
        for member in self.path(node):
            member.waiters -= 1
            if member.waiters == 0:
                for tier, index in self.candidates.items():
                    if member in index:
                        self._reconsider(member, tier)

    # Inspection

    def subtree(self, node: Node) -> Iterator[Node]:
        """``node`` and every node below it, parents first."""
        stack = [node]
        while stack:
            member = stack.pop()
            yield member
            stack.extend(member.children.values())

    def walk(self) -> Iterator[Node]:
        """Every node below the root, parents first."""
        for child in list(self.root.children.values()):
            yield from self.subtree(child)

    def check(self) -> None:
        """Assert the invariants of the module docstring; O(nodes)."""
        evictable = protected = host = count = 0
        waiters: dict[int, int] = {}
        for rid, node in self.waiting.items():
            assert rid in node.waiting, (rid, node)
            for member in self.path(node):
                waiters[member.id] = waiters.get(member.id, 0) + 1
        for node in self.walk():
            count += 1
            parent = node.parent
            assert parent is not None
            assert len(node) > 0 and len(node) % self.page_size == 0, node
            assert parent.children.get(node.key) is node, node
            assert node.doubt >= parent.doubt, f"{node} is trusted below a condemned node"
            if node.doubt is Doubt.NONE:
                assert node.key == self._key(parent, node.scope, node.tokens, 0), node
            elif parent.doubt is Doubt.NONE:
                assert self.condemned.get(node.key) is node and isinstance(node.key, tuple), node
                assert node.key[0] is _CONDEMNED, node
            assert node.device is not ABSENT or node.host is not ABSENT, f"{node} is nowhere"
            if node.device is not ABSENT:
                assert parent.device is not ABSENT, f"device closure broken at {node}"
                assert len(node.slots) == len(node), node
                if node.device_locks:
                    protected += len(node)
                else:
                    evictable += len(node)
                    assert node.device is READY, f"{node} is pending and unlocked"
            else:
                assert node.slots is None and node.device_locks == 0, node
            if node.host is not ABSENT:
                covered = parent.host is not ABSENT or parent.device_locks or parent in self.uncovered
                assert covered, f"host closure broken at {node}"
                assert node.pages is not None and len(node.pages) * self.page_size == len(node), node
                assert node.host is READY or node.tickets, f"{node} is pending without a ticket"
                host += len(node)
            else:
                assert node.pages is None and node.host_locks == 0, node
            kids = node.children.values()
            assert node.device_children == sum(c.device is not ABSENT for c in kids), node
            assert node.host_children == sum(c.host is not ABSENT for c in kids), node
            assert node.device_locks >= sum(c.device_locks for c in kids), node
            assert node.device_locks >= node.uses >= sum(c.uses for c in kids), node
            assert node.device_locks or node.host_locks >= sum(c.host_locks for c in kids), node
            assert node.waiters == waiters.get(node.id, 0), node
            for tier, index in self.candidates.items():
                assert (node in index) == self._is_candidate(node, tier), (tier, node)
            assert (node in self.in_use) == (node.uses > 0 and self._is_free_on_host(node)), node
            assert (node in self.duplicates) == self._is_duplicate(node), node
        assert (evictable, protected) == (self.evictable_tokens, self.protected_tokens)
        assert host == self.host_tokens and count == self.nodes
        for tier, index in self.candidates.items():
            members = sum(self._is_candidate(n, tier) for n in self.walk())
            assert len(index) == members, (tier, len(index), members)

    def _is_candidate(self, node: Node, tier: Tier) -> bool:
        if node.parent is None:
            return False
        if tier is Tier.DEVICE:
            free = node.device is READY and node.device_locks == 0 and node.device_children == 0
            return free and not _lacks_cover(node)
        return self._is_free_on_host(node) and node.host_children == 0 and node.uses == 0

    def _is_duplicate(self, node: Node) -> bool:
        return node.device is READY and self._is_candidate(node, Tier.HOST)

    def _is_free_on_host(self, node: Node) -> bool:
        return node.host is READY and node.host_locks == 0

    def _reconsider(self, node: Node, tier: Tier) -> None:
        if tier is Tier.HOST:
            _keep(self.in_use, node, node.uses > 0 and self._is_free_on_host(node))
            _keep(self.duplicates, node, self._is_duplicate(node))
        _keep(self.candidates[tier], node, self._is_candidate(node, tier))

    def _locked(self, node: Node, below: Node | None) -> Iterator[Node]:
        return takewhile(lambda member: member is not below, self.path(node))

    def _child(self, node: Node, scope: PrefixScope, tokens: np.ndarray) -> Node:
        """The child of ``node`` that begins like ``tokens``, cut to what they share; if there is none, a new
        one for all of them, resident nowhere yet."""
        key = self._key(node, scope, tokens, 0)
        child = node.children.get(key)
        if child is not None:
            common = self.common(child.tokens, tokens)
            return child if common == len(child) else self.split(child, common)
        start = node.start + len(node)
        child = Node(self._new_id(), node, scope, tokens.copy(), self.clock, start, key=key)
        node.children[key] = child
        self.nodes += 1
        self.policy.created(child)
        return child

    def _whole_pages(self, length: int) -> int:
        return length // self.page_size * self.page_size

    def _key(self, parent: Node, scope: PrefixScope, tokens: np.ndarray, pos: int) -> Hashable:
        first = tokens[pos : pos + self.page_size].tobytes()
        return (scope, first) if parent is self.root else first

    def common(self, run: np.ndarray, tokens: np.ndarray) -> int:
        """Length of the common prefix, in whole pages."""
        n = min(len(run), len(tokens))
        if np.array_equal(run[:n], tokens[:n]):
            return self._whole_pages(n)
        return self._whole_pages(int(np.argmax(run[:n] != tokens[:n])))

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id


def _lacks_cover(node: Node) -> bool:
    """Whether the device alone holds ``node``, and the host what continues it."""
    return node.host is ABSENT and node.host_children > 0


def _keep(index: VictimIndex, node: Node, member: bool) -> None:
    """Have ``node`` in ``index``, ordered anew, or not."""
    if member:
        index.add(node)
    else:
        index.discard(node)
