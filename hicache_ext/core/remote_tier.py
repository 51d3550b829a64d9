"""The scheduler's side of the remote tier: what is asked of the stores, and what becomes of the answers.

    ask -> (lookup) -> (window, window, ...) -> ended          a queued request; see ``core.remote``
    offer -> flush (write)                                      a run that has reached the host

A fetch owns the host pages of its window until they have arrived; then they join the tree, and the request
matches them like any page on the host. What did not arrive is given back once no store touches it any more.

Ranks agree on every answer, so they decide alike: nothing here looks at a clock or at one rank's own state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from hicache_ext.core.header import Labels
from hicache_ext.core.host_pages import HostPages
from hicache_ext.core.page import IDENTITY_BYTES, PrefixScope, root_salt
from hicache_ext.core.remote import UNDONE, Query, Remote
from hicache_ext.core.residency import Doubt, Residency, Tier
from hicache_ext.core.tickets import Kind, TicketBook
from hicache_ext.core.tree import Match, Node, TieredRadixTree

LANES = 16
"""Jobs of each kind that are agreed on in one step, from the first on whose result is not applied: a slow one
does not hold up those behind it."""

_DEAD_SLACK = 1024
"""Nodes that are gone may stay in the queue up to this many more than there are in the tree."""

_STATE = 3
VECTOR = _STATE + 4 * LANES


@dataclass(frozen=True)
class RemoteConfig:
    """Pages. A window is what a fetch holds on the host before it has arrived."""

    window: int
    write_batch: int
    write_limit: int
    """Being written at a time; they cannot be evicted meanwhile."""


@dataclass
class TierStats:
    """Counters since start; tokens unless the name says otherwise."""

    lookups: int = 0
    found: int = 0
    """In a store, and worth fetching."""
    fetched: int = 0
    missed: int = 0
    """Asked for in a window that did not arrive in time, or not verified."""
    no_room: int = 0
    """Worth fetching, but the host had no page to spare."""
    stored: int = 0
    store_failed: int = 0
    """Not taken by the store."""
    store_declined: int = 0
    """Gone from the host before their turn to be written."""
    store_refused: int = 0
    """Not written because the policy does not expect them back."""


@dataclass(frozen=True)
class Waiting:
    """A queued prompt, whole pages; its first ``shared`` tokens are those of the fetch it waits for."""

    tokens: np.ndarray
    shared: int


@dataclass(eq=False)
class Fetch:
    """What a queued request, and those with the same beginning behind it, wait for."""

    seq: int
    rid: str
    scope: PrefixScope
    tokens: np.ndarray
    start: int
    """Tokens that were matched when it was asked for."""
    rids: dict[str, Waiting]
    """Those who wait, the first one included."""
    head: tuple[int, bytes]
    """The node and page from which it goes on: whoever would begin there waits for it instead."""
    pos: int = 0
    stop: int = 0
    anchor: Node | None = None
    identities: np.ndarray = field(default_factory=lambda: np.empty((0, IDENTITY_BYTES), np.uint8))
    stale: bool = False
    """Nobody waits for it, or the weights have changed: what arrives is dropped."""


@dataclass(frozen=True)
class Window:
    fetch: Fetch
    pages: np.ndarray


class Applied:
    """Which jobs' results have been applied: all up to ``upto``, and some after it."""

    def __init__(self) -> None:
        self.upto = 0
        self._early: set[int] = set()

    def due(
        self, agreed: list[int], ready: Callable[[int], bool] = lambda seq: True
    ) -> Iterator[tuple[int, int]]:
        """(job, result) of those that all ranks have, of the jobs after ``upto`` when it is called, as far as
        they are ``ready``. Each counts as applied when it is handed out."""
        for seq, value in enumerate(agreed, self.upto + 1):
            if value == UNDONE or seq in self._early or not ready(seq):
                continue
            self._early.add(seq)
            yield seq, value
        while self.upto + 1 in self._early:
            self.upto += 1
            self._early.discard(self.upto)


class RemoteTier:
    def __init__(
        self,
        remote: Remote,
        config: RemoteConfig,
        tree: TieredRadixTree,
        tickets: TicketBook,
        host_pages: HostPages,
        room: Callable[[int], np.ndarray | None],
        copy_down: Callable[[Node], None],
    ) -> None:
        """``room`` gets that many host pages, evicting if need be, or None; ``copy_down`` starts the backup
        of what is not on the host on the path to a node."""
        self.remote = remote
        self.config = config
        self.stats = TierStats()
        self.usable = False
        """As all ranks agreed: a store is likely to answer, and the epoch is known."""
        self.attached = True
        """Whether the stores are to be used; see ``detach``."""
        self.epoch = 0
        self._tree = tree
        self._tickets = tickets
        self._host_pages = host_pages
        self._room = room
        self._copy_down = copy_down
        self._healthy = False
        self._lookup_seq = self._window_seq = 0
        self._lookups_applied, self._arrivals_applied = Applied(), Applied()
        self._settled_applied, self._written_applied = Applied(), Applied()
        self._lookups: dict[int, Fetch] = {}
        self._fetches: dict[str, Fetch] = {}
        self._heads: dict[tuple[int, bytes], Fetch] = {}
        self._windows: dict[int, Window] = {}
        self._unsettled: dict[int, np.ndarray] = {}
        """Of a window that has arrived: pages that are not in the tree."""
        self._arrived: dict[str, int] = {}
        self._queue: deque[Node] = deque()
        self._writing = 0
        self._disowned: dict[int, np.ndarray] = {}
        """Pages of writes whose tree is gone."""

    # A queued request

    def ask(self, rid: str, scope: PrefixScope, tokens: np.ndarray, match: Match, ahead: float = 0.0) -> None:
        """Look for what ``tokens`` continues after ``match``, unless it is already on its way.

        ``ahead``: seconds that the request is expected to wait for others; may differ between ranks.
        """
        self.forget(rid)
        self._join(rid, scope, tokens, match, ahead)

    def waits(self, rid: str) -> bool:
        """Whether pages of this request are on their way."""
        return rid in self._fetches

    def turn_came(self, rid: str) -> None:
        """The request could be admitted if nothing of it were on its way."""
        fetch = self._fetches.get(rid)
        if fetch is not None:
            self.remote.turn_came(fetch.seq)

    def coming(self, rid: str) -> int:
        """Tokens that a store has and will have brought before the request can be admitted, if all goes well;
        0 as long as no store has answered."""
        fetch = self._fetches.get(rid)
        if fetch is None:
            return 0
        return max(min(fetch.stop, fetch.rids[rid].shared) - max(fetch.pos, fetch.start), 0)

    def fetching(self) -> bool:
        """Whether a request waits for what a thread of this rank still has to find or to fetch; may differ
        between ranks."""
        lookups, arrivals = self.remote.lookups.done(), self.remote.arrivals.done()
        return bool(self._fetches) and (lookups < self._lookup_seq or arrivals < self._window_seq)

    def forget(self, rid: str) -> None:
        """The request no longer waits; unknown ids are ignored."""
        self._arrived.pop(rid, None)
        fetch = self._fetches.pop(rid, None)
        if fetch is None:
            return
        del fetch.rids[rid]
        if not fetch.rids:
            self._abandon(fetch)

    def take_arrived(self, rid: str) -> int:
        """Tokens that were fetched for this request, told once."""
        return self._arrived.pop(rid, 0)

    # Pages on the host

    def offer(self, node: Node) -> None:
        """``node`` has reached the host: it is written when its turn comes."""
        if not node.stored and not node.store_queued:
            node.store_queued = True
            self._queue.append(node)
            if len(self._queue) > 2 * self._tree.nodes + _DEAD_SLACK:
                # In an outage nothing else takes them out.
                gone = [n for n in self._queue if n.parent is None]
                self.stats.store_declined += sum(map(len, gone))
                self._queue = deque(n for n in self._queue if n.parent is not None)

    def flush(self) -> None:
        """Start writing what was offered, oldest first, as far as the limits allow."""
        size = self._tree.page_size
        while self.usable and self._queue and self._writing < self.config.write_limit:
            budget = min(self.config.write_batch, self.config.write_limit - self._writing)
            nodes = list(self._next_writes(budget))
            if not nodes:
                return
            labels = labels_of(self._tree, nodes, self.epoch)
            ticket = self._tickets.begin(Kind.STORE, nodes, nodes)
            pages = np.concatenate([n.pages for n in nodes if n.pages is not None])
            self._writing += ticket.tokens // size
            self.remote.write(ticket.seq, pages, labels)

    # Once per step

    def vector(self) -> np.ndarray:
        """This rank's state as int64 ``[VECTOR]``, to be reduced by MIN."""
        remote = self.remote
        learned = remote.learned()
        return np.array(
            [
                remote.healthy(),
                learned is not None,
                # The highest epoch counts, and MIN is what there is.
                -(learned or 0),
                *remote.lookups.results(self._lookups_applied.upto, LANES),
                *remote.arrivals.results(self._arrivals_applied.upto, LANES),
                *remote.settled.results(self._settled_applied.upto, LANES),
                *remote.written.results(self._written_applied.upto, LANES),
            ],
            dtype=np.int64,
        )

    def apply(self, agreed: np.ndarray) -> int:
        """Apply what all ranks have; returns the highest epoch of any, 0 if one knows none."""
        healthy, known, epoch = agreed[:_STATE].tolist()
        found, arrived, settled, written = agreed[_STATE:].reshape(4, LANES).tolist()
        self._healthy = bool(healthy)
        self.usable = bool(healthy and known) and -epoch == self.epoch
        for seq, value in self._arrivals_applied.due(arrived):
            self._apply_arrival(seq, value)
        for seq, _ in self._settled_applied.due(settled, lambda seq: seq in self._unsettled):
            self._host_pages.release(self._unsettled.pop(seq))
        for seq, value in self._written_applied.due(written):
            self._apply_write(seq, value)
        for seq, value in self._lookups_applied.due(found):
            self._apply_lookup(self._lookups[seq], value)
        return -epoch if known else 0

    def advance(self, epoch: int) -> None:
        """Other weights, or another epoch, from now on: what is on its way is of no use."""
        self.epoch = epoch
        self.usable = False
        for fetch in list(self._lookups.values()):
            self._abandon(fetch)
        self._arrived.clear()
        self.remote.use(self._tree.namespace, epoch)

    def detach(self) -> None:
        """Use the stores no more, until ``attach``: nobody waits for them from now on, and writes under way
        end soon. All ranks call it in the same step.

        What reaches the host meanwhile is written afterwards, as after an outage.
        """
        self.attached = self.usable = False
        for fetch in list(self._lookups.values()):
            self._abandon(fetch)
        self.remote.attach(False)

    def attach(self) -> None:
        """Use the stores again, once they are healthy and know the present epoch. All ranks call it in the
        same step."""
        self.attached = True
        self.remote.attach(True)

    def reset(self, epoch: int) -> np.ndarray:
        """The tree is about to be cleared; returns the host pages that stores may still touch."""
        for seq, ticket in self._tickets.open[Kind.STORE].items():
            self._disowned[seq] = np.concatenate([n.pages for n in ticket.nodes if n.pages is not None])
        self._queue.clear()
        for fetch in list(self._lookups.values()):
            self._abandon(fetch)
        self._arrived.clear()
        if epoch != self.epoch:
            self.epoch = epoch
            self.usable = False
            self.remote.use(self._tree.namespace, epoch)
        return np.concatenate([*self.outside(), np.empty(0, np.int64)])

    def pending(self) -> bool:
        """Whether any lookup, fetch or write is outstanding."""
        queued = self._queue and self.usable
        return bool(self._lookups or self._windows or self._unsettled or self._disowned or queued)

    def outside(self) -> list[np.ndarray]:
        """Host pages that no node holds, because a store may touch them."""
        windows = (w.pages for w in self._windows.values())
        return [*windows, *self._unsettled.values(), *self._disowned.values()]

    def check(self) -> None:
        """Assert that who waits and what is on its way say the same."""
        for rid, fetch in self._fetches.items():
            assert rid in fetch.rids and self._heads.get(fetch.head) is fetch, rid
            assert fetch.seq in self._lookups and not fetch.stale, rid
        for head, fetch in self._heads.items():
            assert head == fetch.head and fetch.rids, fetch
            assert all(self._fetches.get(rid) is fetch for rid in fetch.rids), fetch
        holding = {w.fetch.seq for w in self._windows.values()}
        assert len(holding) == len(self._windows), "a fetch has two windows"
        for fetch in self._lookups.values():
            assert fetch.anchor is None or fetch.seq in holding, fetch
        pages = sum(t.tokens for t in self._tickets.open[Kind.STORE].values()) // self._tree.page_size
        assert self._writing == pages + sum(len(p) for p in self._disowned.values())

    # Internals

    def _join(
        self, rid: str, scope: PrefixScope, tokens: np.ndarray, match: Match, ahead: float = 0.0
    ) -> None:
        if not self.usable:
            return
        size = self._tree.page_size
        start = match.device_len + match.host_len
        stop = len(tokens) // size * size
        if stop <= start:
            return
        own = tokens[:stop].copy()
        head = (match.host_node.id, own[start : start + size].tobytes())
        fetch = self._heads.get(head)
        if fetch is None:
            self._lookup_seq += 1
            fetch = Fetch(self._lookup_seq, rid, scope, own, start, {}, head)
            self._lookups[fetch.seq] = self._heads[head] = fetch
            self.stats.lookups += 1
            self.remote.lookup(fetch.seq, self._query(scope, own, match.host_node, start, ahead))
        fetch.rids[rid] = Waiting(own, self._tree.common(own, fetch.tokens))
        self._fetches[rid] = fetch

    def _query(self, scope: PrefixScope, tokens: np.ndarray, node: Node, start: int, ahead: float) -> Query:
        """Hashes nothing: the chain is taken up where the tree has hashed last."""
        above = next((n for n in self._tree.path(node) if n.identities is not None), None)
        hashed = 0 if above is None else above.start + len(above)
        parent = root_salt(self._tree.namespace, scope)
        if above is not None and above.identities:
            parent = above.identities[-1]
        skip = (start - hashed) // self._tree.page_size
        return Query(parent, tokens[hashed:], start, skip, self._tree.namespace, self.epoch, ahead)

    def _apply_lookup(self, fetch: Fetch, pages: int) -> None:
        tree, size = self._tree, self._tree.page_size
        if fetch.stale or not pages:
            return self._end(fetch)
        self.stats.found += pages * size
        match = tree.match(fetch.scope, fetch.tokens, touch=False)
        fetch.pos = match.device_len + match.host_len
        fetch.stop = fetch.start + pages * size
        if not fetch.start <= fetch.pos < fetch.stop:
            # Computed or evicted meanwhile.
            return self._end(fetch)
        anchor = match.host_node
        if not tree.on_host(anchor):
            self._copy_down(anchor)
            if not tree.on_host(anchor):
                self.stats.no_room += fetch.stop - fetch.pos
                return self._end(fetch)
        fetch.identities = self.remote.identities(fetch.seq)[:pages]
        tree.lock(anchor, Tier.HOST)
        fetch.anchor = anchor
        self._next_window(fetch)

    def _next_window(self, fetch: Fetch) -> None:
        size = self._tree.page_size
        count = min((fetch.stop - fetch.pos) // size, self.config.window)
        pages = self._room(count)
        if pages is None:
            # Not enough could be evicted; what could is of no use to anybody else now.
            count = min(count, self._host_pages.free)
            pages = self._host_pages.alloc(count)
        if pages is None or not count:
            self.stats.no_room += fetch.stop - fetch.pos
            return self._end(fetch)
        self._window_seq += 1
        self._windows[self._window_seq] = Window(fetch, pages)
        first = (fetch.pos - fetch.start) // size
        identities = fetch.identities[first : first + count]
        labels = Labels(identities, self._tree.namespace, self.epoch)
        self.remote.fetch(self._window_seq, fetch.seq, pages, labels)

    def _apply_arrival(self, seq: int, good: int) -> None:
        size = self._tree.page_size
        window = self._windows.pop(seq)
        fetch, pages = window.fetch, window.pages
        if fetch.stale or fetch.anchor is None or fetch.anchor.doubt is not Doubt.NONE:
            # Nobody would find it there.
            self._unsettled[seq] = pages
            return self._end(fetch)
        first = (fetch.pos - fetch.start) // size
        run = fetch.tokens[fetch.pos : fetch.pos + good * size]
        names = [row.tobytes() for row in fetch.identities[first : first + good]]
        node, spare = self._tree.insert_host(fetch.anchor, fetch.scope, run, pages[:good], names)
        self._tree.lock(node, Tier.HOST)
        self._tree.unlock(fetch.anchor, Tier.HOST)
        fetch.anchor = node
        fetch.pos += good * size
        self._unsettled[seq] = np.concatenate([spare, pages[good:]])
        self.stats.fetched += good * size
        self.stats.missed += (len(pages) - good) * size
        if fetch.rid in fetch.rids:
            self._arrived[fetch.rid] = self._arrived.get(fetch.rid, 0) + good * size
        if good < len(pages) or fetch.pos >= fetch.stop:
            return self._end(fetch)
        for rid, waiting in list(fetch.rids.items()):
            if waiting.shared <= fetch.pos:
                # The rest is not its prompt.
                del fetch.rids[rid], self._fetches[rid]
                self._go_on(rid, fetch, waiting)
        if not fetch.rids:
            return self._end(fetch)
        head = (node.id, fetch.tokens[fetch.pos : fetch.pos + size].tobytes())
        if head not in self._heads:
            del self._heads[fetch.head]
            fetch.head = head
            self._heads[head] = fetch
        self._next_window(fetch)

    def _abandon(self, fetch: Fetch) -> None:
        """Whoever waits need not; it ends when its job has ended."""
        if not fetch.stale:
            fetch.stale = True
            self._let_go(fetch)
            self.remote.cancel(fetch.seq)

    def _end(self, fetch: Fetch) -> None:
        """Nothing more will come for those who wait."""
        waiting = {} if fetch.stale else dict(fetch.rids)
        self._let_go(fetch)
        del self._lookups[fetch.seq]
        self.remote.end(fetch.seq)
        for rid, prompt in waiting.items():
            self._go_on(rid, fetch, prompt)

    def _go_on(self, rid: str, fetch: Fetch, waiting: Waiting) -> None:
        """The request matches what there is, and asks for what the fetch did not ask for."""
        match = self._tree.match(fetch.scope, waiting.tokens, touch=False)
        self._tree.want(rid, match.host_node)
        if waiting.shared <= match.device_len + match.host_len:
            self._join(rid, fetch.scope, waiting.tokens, match)

    def _let_go(self, fetch: Fetch) -> None:
        if fetch.anchor is not None:
            self._tree.unlock(fetch.anchor, Tier.HOST)
            fetch.anchor = None
        if self._heads.get(fetch.head) is fetch:
            del self._heads[fetch.head]
        for rid in fetch.rids:
            del self._fetches[rid]
        fetch.rids = {}

    def _next_writes(self, budget: int) -> Iterator[Node]:
        """Nodes of up to ``budget`` pages from the queue, parents before children; a longer one is cut."""
        size = self._tree.page_size
        taken: set[Node] = set()
        while self._queue and budget:
            node = self._queue.popleft()
            node.store_queued = False
            # What it continues may be in use without a copy on the host; offered again when it has one.
            whole = all(member.host is Residency.READY for member in self._tree.path(node))
            if node.parent is None or node.doubt is not Doubt.NONE or not whole:
                self.stats.store_declined += len(node)
                continue
            # A split leaves the upper half out of the queue.
            above = takewhile(lambda n: _unwritten(n) and n not in taken, self._tree.path(node))
            for member in reversed(list(above)):
                if not self._tree.policy.worth_storing(member):
                    # Without it, nothing below it is found.
                    self.stats.store_refused += len(node)
                    break
                if not budget:
                    node.store_queued = True
                    self._queue.appendleft(node)
                    break
                if len(member) > budget * size:
                    member = self._tree.split(member, budget * size)
                    node.store_queued = True
                    self._queue.appendleft(node)
                    budget = 0
                    taken.add(member)
                    yield member
                    break
                budget -= len(member) // size
                taken.add(member)
                yield member

    def _apply_write(self, seq: int, stored: int) -> None:
        size = self._tree.page_size
        if (pages := self._disowned.pop(seq, None)) is not None:
            self._host_pages.release(pages)
            self._writing -= len(pages)
            return
        ticket = self._tickets.open[Kind.STORE][seq]
        self._tickets.commit(ticket)
        self._writing -= ticket.tokens // size
        self.stats.stored += stored * size
        if stored * size == ticket.tokens:
            for node in ticket.nodes:
                node.stored = True
            return
        self.stats.store_failed += ticket.tokens - stored * size
        if not self._healthy:
            # An outage: they are written when it is over, if they are still here.
            for node in ticket.nodes:
                self.offer(node)


def _unwritten(node: Node) -> bool:
    return not node.stored and all(t.kind is not Kind.STORE for t in node.tickets)


def labels_of(tree: TieredRadixTree, nodes: list[Node], epoch: int) -> Labels:
    """Whose bytes the host pages of ``nodes`` hold, in order; computes identities that are not known yet."""
    joined = b"".join(b"".join(tree.identities(node)) for node in nodes)
    identities = np.frombuffer(joined, dtype=np.uint8).reshape(-1, IDENTITY_BYTES)
    return Labels(identities, tree.namespace, epoch)
