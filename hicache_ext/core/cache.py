"""The tiered prefix cache: what a scheduler asks for, in terms of the tree, tickets and the tick.

    match -> (load) -> lock -> insert -> unlock        a request's life
    evict                                              before an allocation
    flush_backups, start_loads, tick                   once per scheduler step
    settle_loads                                       before the results of a batch that loaded are used
    advance                                            when the weights change

With a remote tier, ``want`` also looks for the rest of the prompt in the stores, and ``waits`` tells
whether it is on its way; see ``core.remote_tier``.

The scheduler thread owns all state. Bytes move behind the ``Transfers`` interface; what they achieved is
applied in ``tick`` and ``settle_loads``, as all ranks agree. Two calls wait for bytes instead, and apply
what they waited for: ``evict``, when it cannot free enough otherwise, and ``reset``. A backup always
completes, so all ranks apply the same ones without talking to each other; ``evict`` settles loads too, where
only copies of what they load can make room.

A load whose pages do not verify condemns them and everything below them: no lookup finds them again, and who
already holds them (``Node.doubt``) must compute again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from typing import Protocol

import numpy as np

from hicache_ext.core.epochs import flushed
from hicache_ext.core.header import NAMESPACE_BYTES, Labels
from hicache_ext.core.host_pages import HostPages
from hicache_ext.core.page import PrefixScope
from hicache_ext.core.policy import EvictionPolicy
from hicache_ext.core.remote import Remote
from hicache_ext.core.remote_tier import RemoteConfig, RemoteTier, labels_of
from hicache_ext.core.residency import Doubt, Residency, Tier
from hicache_ext.core.speeds import Speeds
from hicache_ext.core.tick import NOTHING, CompletionQueue, Reduce, agree
from hicache_ext.core.tickets import Kind, Ticket, TicketBook
from hicache_ext.core.tree import Insertion, Match, Node, Slots, TieredRadixTree

ABSENT, PENDING, READY = Residency.ABSENT, Residency.PENDING, Residency.READY

MOST_WAITING = 64
"""Nodes at most that wait for room on a full host, because each step looks at all of them."""

MOST_PUT_OFF = 64
"""Victims at most that an eviction leaves where they are while it looks for one that has a copy."""

MOST_COPIED = 8192
"""Tokens at most that an eviction copies down to save one victim, and of a backup: it may wait for them."""

HASHED_PAGES = 4096
"""Page identities computed at most per step: some milliseconds of the scheduler thread."""


class WritePolicy(StrEnum):
    WRITE_THROUGH = "write-through"
    """Pages are copied to the host in the background as soon as they are computed."""
    WRITE_BACK = "write-back"
    """Pages are copied to the host when they are evicted from the device; the eviction waits for it."""


@dataclass(frozen=True)
class CacheConfig:
    page_size: int
    host_pages: int
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    evict_granule: int = 512
    """Tokens: a longer victim is cut, so that an eviction frees what is needed and not a whole prompt."""
    backup_limit: int = 1 << 16
    """Tokens whose backup is submitted at most per step."""
    ease: float = 0.125
    """As long as an eviction can free this share of the device pool at once, copies wait for room on a full
    host. Requests that come meanwhile make some: the host need not hold what they use. 1: no copy waits."""
    tick_limit: int = 64
    """Completions applied at most per queue and tick."""
    remote: RemoteConfig | None = None
    """None: a quarter of the host pool for a window, an eighth for what is being written."""


class DevicePool(Protocol):
    """The engine's allocator of device KV slots."""

    def available(self) -> int:
        """Tokens that ``alloc`` can serve now."""
        ...

    def alloc(self, tokens: int) -> Slots | None:
        """Slots of whole pages, page by page contiguous; None if there are not enough."""
        ...

    def free(self, *runs: Slots) -> None:
        """Slots of whole pages; they can be allocated again when this returns."""
        ...


@dataclass(frozen=True)
class LoadJob:
    """Host ``pages`` (int64) to ``slots``, page by page; ``labels`` says what the pages must be."""

    seq: int
    pages: np.ndarray
    slots: list[Slots]
    labels: Labels


class Transfers(Protocol):
    """Moves pages; each direction is first in, first out and has its own completions.

    A backup reads its slots as of all forward passes launched before it. A load may be read by any forward
    pass that was launched after it and waited for it. A backup that fails leaves pages that do not verify; a
    load posts its first page that does not verify, counted from 0.
    """

    backups: CompletionQueue
    loads: CompletionQueue

    def backup(self, seq: int, slots: list[Slots], pages: np.ndarray, labels: Labels) -> None:
        """Start copying device pages to host pages."""
        ...

    def load(self, jobs: Sequence[LoadJob], *, by_layer: bool) -> None:
        """Start copying host pages to device pages, and checking them; the jobs may end together.

        ``by_layer``: a forward pass waits for the layers one by one, so the first should come first.
        """
        ...

    def wait_backups(self, seq: int) -> None:
        """Wait until backups up to ``seq`` have ended and are posted."""
        ...

    def wait_loads(self, seq: int) -> None:
        """Wait until loads up to ``seq``, which have been started, have ended and are posted."""
        ...

    def poll(self) -> None:
        """Post what has completed."""
        ...

    def drain(self) -> None:
        """Wait until every copy has ended and is posted."""
        ...


@dataclass
class Stats:
    """Counters since start; tokens unless the name says otherwise."""

    hit_device: int = 0
    hit_host: int = 0
    hit_store: int = 0
    computed: int = 0
    backed_up: int = 0
    loaded: int = 0
    evicted_device: int = 0
    evicted_lost: int = 0
    """Evicted from the device while on no other tier."""
    evicted_host: int = 0
    backup_declined: int = 0
    """Not backed up because the host pool had no page to spare."""
    backup_refused: int = 0
    """Not backed up because the policy expects more of what the host holds."""
    refused: int = 0
    """Loaded from the host and refused: from the first page of a load that did not verify to its end."""
    load_declined: int = 0
    """On the host, but the device pool had no room to load it."""
    load_slower: int = 0
    """On the host, but sooner computed than loaded."""
    ticks: int = 0
    evict_waits: int = 0
    """Copies in flight that evictions had to wait for."""
    resets: int = 0


class TieredCache:
    def __init__(
        self,
        config: CacheConfig,
        policy: EvictionPolicy,
        device: DevicePool,
        transfers: Transfers,
        *,
        namespace: bytes = bytes(NAMESPACE_BYTES),
        own: Callable[[Slots], Slots] = lambda run: run.copy(),
        reduce: Reduce | None = None,
        remote: Remote | None = None,
        speeds: Speeds | None = None,
        page_bytes: int = 0,
    ) -> None:
        """``reduce`` is None with a single TP rank; see ``tick.agree``.

        With ``speeds``, ranks agree on them in every tick, and what is sooner computed than loaded is not
        loaded; ``page_bytes`` is what a load moves of a page.
        """
        self.config = config
        self.device = device
        self.transfers = transfers
        self.reduce = reduce
        self.speeds = speeds
        self.page_bytes = page_bytes
        self.host_pages = HostPages(config.host_pages)
        self.tree = TieredRadixTree(config.page_size, policy, namespace=namespace, own=own)
        self.tickets = TicketBook(self.tree)
        self.stats = Stats()
        self.era = 0
        """Counts weight changes and resets: what was computed in one is not published in another."""
        self.epoch = 0
        """Of the tree's namespace, as all who share its pages count; stands in every page's header."""
        self._dirty: deque[Node] = deque()
        self._deferred = False
        """Whether what is dirty waits for room on the host."""
        self._applied = {Kind.BACKUP: 0, Kind.LOAD: 0}
        self._queued_loads: list[tuple[Ticket, Labels]] = []
        self.remote: RemoteTier | None = None
        if remote is not None:
            self.remote = RemoteTier(
                remote,
                config.remote or _remote_config(config.host_pages),
                self.tree,
                self.tickets,
                self.host_pages,
                self._host_room,
                self._copy_down,
            )
            remote.use(namespace, self.epoch)

    # A request's life

    def match(self, scope: PrefixScope, tokens: np.ndarray, *, touch: bool = True) -> Match:
        return self.tree.match(scope, tokens, touch=touch)

    def lock(self, node: Node) -> None:
        self.tree.hold(node)

    def unlock(self, node: Node) -> None:
        self.tree.release(node)
        # What a full host gave up, or did not take, while it was in use here: the end of the path.
        for member in self._missing(node):
            if not member.uses and member.doubt is Doubt.NONE:
                self._mark_dirty(member)
        self._cover()

    def insert(self, scope: PrefixScope, tokens: np.ndarray, slots: Slots) -> Insertion:
        """Publish computed pages; see ``TieredRadixTree.insert``. Queues their backup."""
        result = self.tree.insert(scope, tokens, slots)
        for node in result.added:
            self.stats.computed += len(node)
            self._mark_dirty(node)
        return result

    def load(self, node: Node, *, wait: bool = True) -> int:
        """Reserve device pages for the host-only part of the path to ``node`` and queue the copy.

        All or nothing: returns the tokens that will be on the device, 0 if there was no room, or computing
        them is sooner. The copy starts with ``start_loads``; whoever reads the pages waits for it there.
        Without ``wait``, room that backups in flight would leave does not count.
        """
        nodes = self.host_only(node)
        tokens = sum(map(len, nodes))
        if not nodes:
            return 0
        if not self.worth_loading(nodes[0].start, tokens):
            self.stats.load_slower += tokens
            return 0
        above = nodes[0].parent
        assert above is not None
        # Both ends stay while room is made: evicting may drop host pages and unlocked device pages.
        self.tree.lock(node, Tier.HOST, above)
        self.tree.lock(above, Tier.DEVICE)
        slots = self._make_room(tokens, wait)
        if slots is not None and node.doubt is not Doubt.NONE:
            # A load that making room has waited for was refused.
            self.device.free(slots)
            slots = None
        if slots is not None:
            start = 0
            # What came from a store meanwhile may have cut them.
            nodes = self.host_only(node)
            for member in nodes:
                self.tree.set_device(member, PENDING, self.tree.own(slots[start : start + len(member)]))
                start += len(member)
            labels = self._labels(nodes)
            self._queued_loads.append((self.tickets.begin(Kind.LOAD, nodes, [node]), labels))
        else:
            self.stats.load_declined += tokens if wait else 0
        self.tree.unlock(node, Tier.HOST, above)
        self.tree.unlock(above, Tier.DEVICE)
        self._cover()
        return tokens if slots is not None else 0

    def host_only(self, node: Node) -> list[Node]:
        """The end of the path to ``node`` that the device lacks, top down."""
        return list(takewhile(lambda n: n.device is ABSENT, self.tree.path(node)))[::-1]

    def worth_loading(self, start: int, tokens: int) -> bool:
        """Whether ``tokens`` behind ``start`` others are sooner loaded from the host than computed.

        All or none is right: of a prefix, later tokens are dearer to compute and not dearer to load. Loads
        queued before do not count: the batch waits for those anyway.
        """
        if self.speeds is None:
            return True
        rates = self.speeds.agreed
        return rates.load(tokens * self.page_bytes // self.config.page_size) < rates.recompute(start, tokens)

    def want(self, rid: str, scope: PrefixScope, tokens: np.ndarray, ahead: float = 0.0) -> Match:
        """A request entered the queue: what it has matched is not evicted before what nobody waits for.

        ``ahead``: seconds that it is expected to wait for others; of use to a remote tier.
        """
        match = self.tree.match(scope, tokens, touch=False)
        self.tree.want(rid, match.host_node)
        if self.remote is not None:
            self.remote.ask(rid, scope, tokens, match, ahead)
        return match

    def want_again(self, rid: str, scope: PrefixScope, tokens: np.ndarray) -> None:
        """Others have computed since: find out what a queued request matches now. Asks no store."""
        self.tree.want(rid, self.tree.match(scope, tokens, touch=False).host_node)

    def turn_came(self, rid: str) -> None:
        """A queued request could be admitted if nothing of it were on its way from a store."""
        if self.remote is not None:
            self.remote.turn_came(rid)

    def coming(self, rid: str) -> int:
        """Tokens on their way from a store for a queued request, as far as is known."""
        return 0 if self.remote is None else self.remote.coming(rid)

    def waits(self, rid: str) -> bool:
        """Whether pages of a queued request are on their way from a store; never for longer than planned."""
        return self.remote is not None and self.remote.waits(rid)

    def fetching(self) -> bool:
        """Whether a queued request waits for a store."""
        return self.remote is not None and self.remote.fetching()

    def take_arrived(self, rid: str) -> int:
        """Tokens that were fetched from a store for a queued request, told once."""
        return 0 if self.remote is None else self.remote.take_arrived(rid)

    def unwant(self, rid: str) -> None:
        self.tree.unwant(rid)
        if self.remote is not None:
            self.remote.forget(rid)

    # Space

    def evict(self, tokens: int, *, wait: bool = True) -> int:
        """Free at least ``tokens`` device tokens if possible; returns how many were freed.

        Without ``wait``, only what needs no copy, and copies start that will free the rest.
        """
        freed = 0
        # Copies in flight will free something soon; more of them than needed would cost others theirs.
        copied = tokens if self.tickets.open[Kind.BACKUP] else 0
        # What was freed when the latest copies were begun; where they lead to nothing, it goes on without.
        progress, lose = -1, False
        runs: list[Slots] = []
        put_off: list[Node] = []
        while freed < tokens:
            victims = self._victims(tokens - freed) if len(put_off) < MOST_PUT_OFF else []
            if not victims:
                # What is left is locked by copies in flight, or by requests; only the former will end.
                if self.tickets.open[Kind.BACKUP]:
                    if not wait:
                        break
                    self._settle_oldest_backup()
                elif self._cover(force=tokens - freed):
                    pass
                elif put_off and copied:
                    lose = freed == progress
                    progress, copied = freed, 0
                elif wait and self.tickets.open[Kind.LOAD] and (put_off or self.tree.uncovered):
                    freed += self._settle_oldest_load()
                    progress = -1
                else:
                    break
                self._put_back(put_off)
                continue
            if self.config.write_policy is WritePolicy.WRITE_BACK:
                self._write_back([v for v in victims if v.host is ABSENT and v.doubt is Doubt.NONE])
            for victim in victims:
                if self._to_be_copied(victim) and not lose:
                    if copied >= tokens or self._loads_make_room(victim):
                        # What has a copy leaves first.
                        put_off.append(victim)
                        continue
                    copied += self._copy_first(victim)
                if not victim.device_locks:
                    freed += len(victim)
                    runs.append(self._drop_device(victim))
        self._put_back(put_off)
        if runs:
            self.device.free(*runs)
        return freed

    def evict_host(self, pages: int, *, leaving: bool = False, copies_only: bool = False) -> int:
        """Free at least ``pages`` host pages if possible; returns how many were freed.

        Copies of what is in use on the device go first. ``leaving``: the room is for what the device is about
        to lose, so copies of what stays there go next. ``copies_only``: nothing else goes.
        """
        freed = 0
        step = max(self.config.evict_granule // self.config.page_size, 1)
        while freed < pages:
            node = self.tree.in_use.pop() or (self.tree.duplicates.pop() if leaving else None)
            if node is None and not copies_only:
                node = self.tree.candidates[Tier.HOST].pop()
            if node is None:
                break
            node = self._tail(node, max(pages - freed, step) * self.config.page_size, Tier.HOST)
            freed += len(node) // self.config.page_size
            self._drop_host(node)
            if leaving and node.device is READY and not node.uses:
                self._mark_dirty(node)
                self._deferred = True
        return freed

    # Once per step

    def flush_backups(self) -> None:
        """Write-through: submit the backup of what was inserted since, parents before children."""
        self._deferred = False
        if not self._dirty:
            return
        nodes: list[Node] = []
        # Whole pages, and at least one: a limit below the page size would never write anything.
        limit = min(max(self.config.backup_limit // self.config.page_size, 1), HASHED_PAGES)
        budget = limit * self.config.page_size
        while self._dirty and budget:
            node = self._dirty.popleft()
            node.backup_queued = False
            if node.parent is None or node.doubt is not Doubt.NONE:
                continue
            if node.device is READY and node.host is ABSENT:
                crowded = self._crowded(node)
                if crowded and node.uses:
                    # It stays where it is as long as it is in use; then its turn comes again.
                    continue
                if crowded and self._can_wait(node):
                    node.backup_queued = self._deferred = True
                    self._dirty.appendleft(node)
                    break
                chain = self._reserve_host(node, budget)
                nodes += chain
                budget -= sum(len(n) for n in chain)
                if node.host is ABSENT and not budget:
                    node.backup_queued = True
                    self._dirty.appendleft(node)
                    break
        self._submit_backup(nodes)

    def start_loads(self, *, by_layer: bool = True) -> int:
        """Start the queued loads; returns the load that a batch built now has to wait for, or -1.

        The same on all ranks. The batch's results may be used after ``settle_loads`` of that number. Without
        ``by_layer`` nobody reads the first layers before all have come.
        """
        if self._queued_loads:
            jobs = []
            for ticket, labels in self._queued_loads:
                pages = np.concatenate([n.pages for n in ticket.nodes if n.pages is not None])
                jobs.append(LoadJob(ticket.seq, pages, [n.slots for n in ticket.nodes], labels))
            self.transfers.load(jobs, by_layer=by_layer)
            self._queued_loads.clear()
        started = self.tickets.last_seq(Kind.LOAD)
        return started if started > self._applied[Kind.LOAD] else -1

    def load_open(self, seq: int) -> bool:
        """Whether load ``seq`` has not been applied yet."""
        return seq > self._applied[Kind.LOAD]

    def pending_load(self, node: Node) -> int:
        """The last load that the path to ``node`` still waits for, or -1."""
        tickets = (t for n in self.tree.path(node) if n.device is PENDING for t in n.tickets)
        return max((t.seq for t in tickets if t.kind is Kind.LOAD), default=-1)

    def settle_loads(self, upto: int) -> None:
        """Wait until load ``upto`` and those before it are verified on all ranks, and apply them.

        Every rank calls it for the same batch, with the number that ``start_loads`` returned for it.
        """
        if self._applied[Kind.LOAD] < upto:
            self.transfers.wait_loads(upto)
        while self._applied[Kind.LOAD] < upto:
            self._apply_agreed(limit=1 << 30)
        self._sweep()

    def tick(self) -> None:
        """Apply what transfers have achieved, the same on every rank; see ``tick.agree``."""
        self.tree.clock += 1
        self.stats.ticks += 1
        self.transfers.poll()
        known = self._apply_agreed(self.config.tick_limit)
        if known > self.epoch:
            # Another server has flushed.
            self.advance(epoch=known)
        self._sweep()

    def flush_writes(self) -> None:
        """Start writing to the stores what has reached the host."""
        if self.remote is not None:
            self.remote.flush()

    def advance(self, namespace: bytes | None = None, epoch: int | None = None) -> None:
        """The weights change, or someone has flushed: nothing computed before is found in any tier.

        Requests that hold such pages keep them until they let go. A copy in flight may end; its pages are
        dropped then. Without arguments the namespace stays, and its epoch is a local one.
        """
        self.era += 1
        if namespace is not None and namespace != self.tree.namespace:
            self.tree.namespace = namespace
            self.epoch = 0 if epoch is None else epoch
        else:
            self.epoch = flushed(self.epoch) if epoch is None else epoch
        for child in list(self.tree.root.children.values()):
            self.tree.condemn(child, Doubt.STALE)
        if self.remote is not None:
            self.remote.advance(self.epoch)
        self._sweep()

    def drain(self) -> None:
        """Wait for every copy in flight; what they achieved is applied by the next tick."""
        self.start_loads()
        self.transfers.drain()

    def reset(self, *, flush: bool = False) -> None:
        """Forget everything. Waits for copies in flight; frees no device slot: the engine clears its pool.

        With ``flush``, what stores hold is forgotten too, by all who share them; see ``core.epochs``.
        """
        self._queued_loads.clear()
        self.transfers.drain()
        for kind, queue in ((Kind.BACKUP, self.transfers.backups), (Kind.LOAD, self.transfers.loads)):
            for seq in range(queue.done() + 1, self.tickets.last_seq(kind) + 1):
                queue.post(seq)
            self._applied[kind] = self.tickets.last_seq(kind)
        self.era += 1
        if flush:
            self.epoch = flushed(self.epoch)
        busy = NOTHING if self.remote is None else self.remote.reset(self.epoch)
        self.tickets.disown()
        self.tree.clear()
        self.host_pages.clear(keep=busy)
        self._dirty.clear()
        self.stats.resets += 1

    # Inspection

    def pending(self) -> bool:
        """Whether any transfer is outstanding, or a backup that does not wait for room."""
        remote = self.remote is not None and self.remote.pending()
        return bool(len(self.tickets) or (self._dirty and not self._deferred) or remote)

    def check(self) -> None:
        """Assert every invariant: the tree's, the tickets', and that host pages are owned exactly once."""
        self.tree.check()
        self.tickets.check()
        owned = [n.pages for n in self.tree.walk() if n.pages is not None]
        outside = 0
        if self.remote is not None:
            self.remote.check()
            away = self.remote.outside()
            owned += away
            outside = sum(map(len, away))
        pages = np.concatenate([*owned, self.host_pages.free_pages()])
        assert len(pages) == self.host_pages.total, (len(pages), self.host_pages.total)
        assert len(np.unique(pages)) == len(pages), "a host page has two owners"
        assert (self.host_pages.used - outside) * self.config.page_size == self.tree.host_tokens

    # Internals

    def _make_room(self, tokens: int, wait: bool) -> Slots | None:
        """Device slots for a load, evicting only if that is enough; None otherwise."""
        shortfall = tokens - self.device.available()
        while wait and shortfall > self.tree.evictable_tokens and self.tickets.open[Kind.BACKUP]:
            self._settle_oldest_backup()
        if shortfall > self.tree.evictable_tokens:
            return None
        self.evict(shortfall, wait=wait)
        return self.device.alloc(tokens)

    def _host_room(self, count: int) -> np.ndarray | None:
        """Host pages, evicting if that is enough; None otherwise."""
        if count > self.host_pages.free:
            self.evict_host(count - self.host_pages.free)
        return self.host_pages.alloc(count)

    def _copy_down(self, node: Node) -> None:
        """Start the backup of what is not on the host on the path to ``node``, as far as there is room, and a
        step may hash."""
        limit = HASHED_PAGES * self.config.page_size
        for member in reversed(list(self.tree.path(node))):
            if member.host is ABSENT and limit:
                nodes = self._reserve_host(member, limit)
                limit -= sum(map(len, nodes))
                self._submit_backup(nodes)

    def _mark_dirty(self, node: Node) -> None:
        if self.config.write_policy is not WritePolicy.WRITE_THROUGH:
            return
        if node.host is ABSENT and not node.backup_queued:
            node.backup_queued = True
            self._dirty.append(node)

    def _missing(self, node: Node) -> list[Node]:
        """The end of the path to ``node`` that the host lacks, top down."""
        return list(takewhile(lambda n: n.host is ABSENT, self.tree.path(node)))[::-1]

    def _lacks(self, node: Node) -> int:
        """Tokens at the end of the path to ``node`` that the host lacks."""
        above: Node | None = node
        while above is not None and above.host is ABSENT:
            above = above.parent
        return node.start + len(node) - (0 if above is None else above.start + len(above))

    def _crowded(self, node: Node) -> bool:
        """Whether the host has no room for ``node``, with what it lacks above, unless something leaves it."""
        return self._lacks(node) > self.host_pages.free * self.config.page_size

    def _cover(self, *, force: int = 0) -> bool:
        """See to what was in use on the device without a host copy below it, while its continuation is on the
        host: once the host has room for it, or the device needs its room, it is copied down, whatever else
        must leave the host. Where there is no room at all, the continuation goes. ``force``: device tokens
        that are needed. Returns whether anything was seen to."""
        waiting, self.tree.uncovered = self.tree.uncovered, []
        nodes: list[Node] = []
        for number, node in enumerate(waiting):
            if node.parent is None or node.device_locks or node.host is not ABSENT or not node.host_children:
                continue
            sound = node.doubt is Doubt.NONE
            if sound and self._crowded(node) and self._cover_can_wait(waiting[number:], force > 0):
                self.tree.uncovered += waiting[number:]
                self._submit_backup(nodes)
                return number > 0
            if sound:
                force -= self._stuck([node])
                nodes += self._reserve_host(node, admit=True, leaving=True)
            if node.host is ABSENT:
                for member in reversed(list(self.tree.subtree(node))[1:]):
                    if member.host is READY:
                        self._drop_host(member)
        self._submit_backup(nodes)
        return bool(waiting)

    def _cover_can_wait(self, waiting: list[Node], urgent: bool) -> bool:
        """Whether the first of ``waiting`` need not be covered now, for which a full host has no room."""
        if urgent:
            return self._loads_make_room(waiting[0])
        return self._at_ease(waiting) or not self._copies_make_room(waiting[0], leaving=True)

    def _can_wait(self, node: Node) -> bool:
        """Whether new pages, for which a full host has no room, may go without a copy for now: as long as the
        device has room for them, or something else could give up its copy when it has none."""
        if self._at_ease([node, *self._dirty, *self.tree.uncovered]):
            return True
        if self._copies_make_room(node) or self.remote is not None:
            # Stores would get them late.
            return False
        return len(self.tree.duplicates) > 0 or bool(self.tickets.open[Kind.LOAD])

    def _loads_make_room(self, node: Node) -> bool:
        """Whether the host has no room for what is about to leave the device, but will have once loads in
        flight have come: what they load is in both tiers then."""
        return bool(self.tickets.open[Kind.LOAD]) and not self._copies_make_room(node, leaving=True)

    def _copies_make_room(self, node: Node, *, leaving: bool = False) -> bool:
        """Whether the host has room for ``node``, with what it lacks above, once copies of what stays on the
        device have left it; nothing leaves it yet. See ``evict_host`` for ``leaving``."""
        needed = self._lacks(node) - self.host_pages.free * self.config.page_size
        # A copy of it is of no use without the host pages above it.
        return self.tree.copies(needed, leaving=leaving, above=node) >= needed

    @contextmanager
    def _kept_above(self, chain: list[Node]) -> Iterator[None]:
        """A copy of ``chain`` is of no use without the host pages above it: they survive making room."""
        above = chain[0].parent if chain else None
        if above is None or above.parent is None:
            yield
            return
        self.tree.lock(above, Tier.HOST, above.parent)
        yield
        self.tree.unlock(above, Tier.HOST, above.parent)

    def _at_ease(self, waiting: list[Node]) -> bool:
        """Whether the device could free enough for what may come, without ``waiting``."""
        if len(waiting) > MOST_WAITING or not self.host_pages.total:
            return False
        free, evictable = self.device.available(), self.tree.evictable_tokens
        total = free + evictable + self.tree.protected_tokens
        spare = free + evictable - self.config.ease * total
        return spare >= 0 and self._stuck(waiting, spare) <= spare

    def _to_be_copied(self, node: Node) -> bool:
        """Whether ``node`` should have a copy before it leaves the device, and that is soon made."""
        lost = node.host is ABSENT and node.doubt is Doubt.NONE
        if self.config.write_policy is not WritePolicy.WRITE_THROUGH or not lost:
            return False
        return self._lacks(node) <= MOST_COPIED

    def _copy_first(self, victim: Node) -> int:
        """Start copying down what is about to leave the device; returns how many tokens can leave after it,
        with what is above it."""
        stuck = self._stuck([victim])
        self._submit_backup(self._reserve_host(victim, leaving=True))
        return stuck if victim.device_locks else 0

    def _stuck(self, waiting: list[Node], most: float = math.inf) -> int:
        """Unlocked device tokens on the paths to ``waiting``, which have not been copied down; what is beyond
        ``most`` need not be counted."""
        seen: set[int] = set()
        tokens = 0
        for node in waiting:
            if node.parent is None or node.device is ABSENT or node.host is not ABSENT:
                continue
            member: Node | None = node
            while member is not None and member.parent is not None and not member.device_locks:
                if member.id in seen:
                    break
                seen.add(member.id)
                tokens += len(member)
                member = member.parent
            if tokens > most:
                break
        return tokens

    def _reserve_host(
        self, node: Node, limit: int | None = None, *, admit: bool = False, leaving: bool = False
    ) -> list[Node]:
        """Host pages for ``node`` and those of its ancestors that lack them, top down, as far as they go.

        At most ``limit`` tokens, a multiple of the page size: a longer run is cut. With ``admit`` the policy
        is not asked. ``leaving``: the device is about to lose ``node``.
        """
        chain, policy = self._missing(node), self.tree.policy
        reserved: list[Node] = []
        with self._kept_above(chain):
            for member in chain:
                if limit is not None:
                    if limit == 0:
                        break
                    if len(member) > limit:
                        member = self.tree.split(member, limit)
                    limit -= len(member)
                count = len(member) // self.config.page_size
                self.evict_host(count - self.host_pages.free, leaving=leaving, copies_only=True)
                pages = self.host_pages.alloc(count)
                if pages is None and not (admit or policy.admit(member, Tier.HOST, leaving=leaving)):
                    self.stats.backup_refused += len(member)
                    break
                if pages is None:
                    self.evict_host(count - self.host_pages.free)
                    pages = self.host_pages.alloc(count)
                if pages is None:
                    self.stats.backup_declined += len(member)
                    break
                self.tree.set_host(member, PENDING, pages)
                reserved.append(member)
        return reserved

    def _submit_backup(self, nodes: list[Node]) -> None:
        """Start copying down nodes that have host pages. In several tickets, so that what the first of many
        free need not wait for the last."""
        some: list[Node] = []
        for node in nodes:
            some.append(node)
            if node is nodes[-1] or sum(map(len, some)) >= MOST_COPIED:
                ticket = self.tickets.begin(Kind.BACKUP, some, some)
                pages = np.concatenate([n.pages for n in some if n.pages is not None])
                self.transfers.backup(ticket.seq, [n.slots for n in some], pages, self._labels(some))
                some = []

    def _labels(self, nodes: list[Node]) -> Labels:
        return labels_of(self.tree, nodes, self.epoch)

    def _write_back(self, victims: list[Node]) -> None:
        nodes: list[Node] = []
        for victim in victims:
            if victim.host is ABSENT:
                nodes += self._reserve_host(victim)
        self._submit_backup(nodes)
        if nodes:
            self._settle_backups(self.tickets.last_seq(Kind.BACKUP))

    def _settle_oldest_backup(self) -> None:
        self.stats.evict_waits += 1
        self._settle_backups(self._applied[Kind.BACKUP] + 1)

    def _settle_oldest_load(self) -> int:
        """Returns device tokens that were freed: of what a refused load has condemned."""
        self.stats.evict_waits += 1
        before = self.device.available()
        self.start_loads()
        self.settle_loads(self._applied[Kind.LOAD] + 1)
        return self.device.available() - before

    def _settle_backups(self, upto: int) -> None:
        """Wait for backups and apply them here and now; every rank does so in the same call."""
        self.transfers.wait_backups(upto)
        self._apply_backups(upto)

    def _apply_agreed(self, limit: int) -> int:
        """Returns the highest epoch that is known to any server that shares a store."""
        speeds = NOTHING if self.speeds is None else self.speeds.vector()
        remote = NOTHING if self.remote is None else self.remote.vector()
        agreed = agree(
            (self.transfers.backups, self._applied[Kind.BACKUP]),
            (self.transfers.loads, self._applied[Kind.LOAD]),
            limit,
            self.reduce,
            np.concatenate([speeds, remote]),
        )
        self._apply_backups(agreed.backups)
        self._apply_loads(agreed.loads, agreed.bad_page)
        self._cover()
        if self.speeds is not None:
            self.speeds.adopt(agreed.extra[: len(speeds)])
        return 0 if self.remote is None else self.remote.apply(agreed.extra[len(speeds) :])

    def _apply_backups(self, upto: int) -> None:
        for seq in range(self._applied[Kind.BACKUP] + 1, upto + 1):
            ticket = self.tickets.open[Kind.BACKUP][seq]
            self.tickets.commit(ticket)
            self.stats.backed_up += ticket.tokens
            if self.remote is not None:
                for node in ticket.nodes:
                    self._offer(node)
        self._applied[Kind.BACKUP] = max(self._applied[Kind.BACKUP], upto)

    def _offer(self, node: Node) -> None:
        """Offer what has reached the host to the stores, with what it had kept from them."""
        assert self.remote is not None
        self.remote.offer(node)
        if node.host_children:
            for member in list(self.tree.subtree(node))[1:]:
                if member.host is READY:
                    self.remote.offer(member)

    def _apply_loads(self, upto: int, bad_page: int | None) -> None:
        """Commit loads up to ``upto``; of the last one only what is before ``bad_page`` is kept."""
        for seq in range(self._applied[Kind.LOAD] + 1, upto + 1):
            ticket = self.tickets.open[Kind.LOAD][seq]
            if seq < upto or bad_page is None:
                self.tickets.commit(ticket)
                self.stats.loaded += ticket.tokens
                continue
            bad = self._node_at(ticket, bad_page)
            self.tickets.commit(ticket)
            self.tree.condemn(bad, Doubt.CORRUPT)
            sound = bad_page * self.config.page_size
            self.stats.loaded += sound
            self.stats.refused += ticket.tokens - sound
        self._applied[Kind.LOAD] = max(self._applied[Kind.LOAD], upto)

    def _node_at(self, ticket: Ticket, page: int) -> Node:
        """The ticket's node that begins at its page ``page``; one that only contains it is split there."""
        start = page * self.config.page_size
        for node in ticket.nodes:
            if start < len(node):
                if start:
                    self.tree.split(node, start)
                return node
            start -= len(node)
        raise AssertionError(f"load {ticket.seq} has no page {page}")

    def _sweep(self) -> None:
        """Give back what condemned nodes hold as far as nobody uses it."""
        for top in list(self.tree.condemned.values()):
            for node in reversed(list(self.tree.subtree(top))):
                if node.host is READY and not node.host_locks and not node.host_children:
                    self._release_host(node)
                if node.device is READY and not node.device_locks and not node.device_children:
                    slots = node.slots
                    self.tree.set_device(node, ABSENT)
                    self.device.free(slots)
                if node.device is ABSENT and node.host is ABSENT:
                    self.tree.prune(node)

    def _victims(self, tokens: int) -> list[Node]:
        """Device candidates of lowest rank, enough for ``tokens`` if there are; the last one is cut."""
        victims: list[Node] = []
        while tokens > 0 and (node := self.tree.candidates[Tier.DEVICE].pop()) is not None:
            victim = self._tail(node, max(tokens, self.config.evict_granule), Tier.DEVICE)
            victims.append(victim)
            tokens -= len(victim)
            if self.config.write_policy is WritePolicy.WRITE_THROUGH:
                break
        return victims

    def _put_back(self, victims: list[Node]) -> None:
        for victim in victims:
            self.tree.put_back(victim, Tier.DEVICE)
        victims.clear()

    def _tail(self, node: Node, tokens: int, tier: Tier) -> Node:
        """The last ``tokens`` of a popped candidate, rounded up to pages, cut off if the node is longer."""
        page = self.config.page_size
        keep = len(node) - -(-tokens // page) * page
        if keep > 0:
            self.tree.split(node, keep)
        return node

    def _drop_device(self, node: Node) -> Slots:
        """Returns the slots that are to be freed."""
        slots, tokens = node.slots, len(node)
        self.tree.set_device(node, ABSENT)
        self.stats.evicted_device += tokens
        if node.host is ABSENT:
            self.stats.evicted_lost += tokens
            parent = node.parent
            if node.backup_queued and parent is not None and parent is not self.tree.root:
                # It may have been cut from the end of a run whose rest still waits for its backup.
                self._mark_dirty(parent)
            self.tree.prune(node)
        return slots

    def _drop_host(self, node: Node) -> None:
        self.stats.evicted_host += len(node)
        self._release_host(node)
        parent = node.parent
        if self.remote is not None and node.store_queued and parent is not None and parent.parent is not None:
            # It may have been cut from the end of a run whose rest still waits to be written.
            self.remote.offer(parent)
        if node.device is ABSENT:
            self.tree.prune(node)

    def _release_host(self, node: Node) -> None:
        pages = node.pages
        assert pages is not None
        self.tree.set_host(node, ABSENT)
        self.host_pages.release(pages)


def _remote_config(host_pages: int) -> RemoteConfig:
    share = max(host_pages // 8, 1)
    return RemoteConfig(window=2 * share, write_batch=max(share // 4, 1), write_limit=share)
