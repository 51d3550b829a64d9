"""Servers that share one store, small enough to visit every order in which their steps can happen.

A page is one content under a label (namespace, epoch); one prompt is enough, because prompts do not interact.
What crosses the network is sent and landed, with any steps of others between: a partition is a message that
waits until it heals, a time-out one that lands after its sender has given up. A page that was computed may
land in the store at any later time, whatever its server is at by then. The rule is ``core.epochs``; ``Rules``
breaks it in one place.

P1  no server reads KV of other weights than its own;
P2  once a server's flush has begun, that server reads no page that was computed before it;
P3  nor does another server, once it has adopted the flush's number or a higher one, or if it started after
    the flush's marks were in the store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from hicache_ext.core import epochs


@dataclass(frozen=True)
class Rules:
    """All true is the rule."""

    version_in_namespace: bool = True
    unnamed_update_gets_fresh_name: bool = True
    epoch_in_key: bool = True
    stamp_when_computed: bool = True
    """False: a page is stamped with what its server is at when it lands."""
    flush_looks_first: bool = True
    """False: a flush takes the next number at once, and marks it then."""
    claim_above_marks: bool = True
    """False: the number follows the server's own, whatever is marked."""
    take_when_marked: bool = True
    """False: the number is taken when the marks have been sent."""
    void_looks_before_flush: bool = True
    look_before_use: bool = True
    adopt: bool = True
    """False: a higher mark changes nothing."""
    check_on_arrival: bool = True
    """False: a page that was asked for before an update or a flush is used."""
    check_flushes: bool = True
    """Not a part of the rule. False: only P1 is checked."""


RULES = Rules()
PARTS = tuple(f.name for f in fields(Rules) if f.name != "check_flushes")


class Label(NamedTuple):
    namespace: str
    epoch: int


class Page(NamedTuple):
    label: Label
    weights: str
    older: int = 0
    """Bit mask of the servers whose last flush of this namespace the page was computed before."""


class Server(NamedTuple):
    weights: str
    label: Label
    looked: bool = False
    """A look since it started, changed weights or flushed has ended."""
    answer: int | None = None
    """Of a look under way: the highest mark when the store was asked."""
    claimed: int | None = None
    """The number whose marks it has sent and not seen yet."""
    getting: Page | None = None
    """The store's answer to a get, on its way."""
    respects: int = 0
    """Bit mask of the servers whose last flush binds it, its own among them."""


class Budget(NamedTuple):
    """How often each kind of step may happen; the others are bounded by what they change."""

    flush: int = 0
    compute: int = 2
    update: int = 0
    restart: int = 0
    lose: int = 0
    slow_gets: int = 0
    """Gets whose answer takes time; those without delay are tried in every state."""


class World(NamedTuple):
    servers: tuple[Server, ...]
    budget: Budget
    flushes: tuple[Label | None, ...]
    """Namespace and number of each server's last flush; -1 until the number is taken."""
    queued: frozenset[tuple[int, Page]] = frozenset()
    """Pages on their way to the store, with their server."""
    store: frozenset[Page] = frozenset()
    marking: frozenset[Label] = frozenset()
    marks: frozenset[Label] = frozenset()


class Broken(Exception):
    """A property does not hold."""


Step = tuple[str, World]


def steps(world: World, rules: Rules) -> Iterator[Step]:
    """Every step that can happen next. Raises Broken where a server would read what it must not."""
    budget = world.budget
    for i, server in enumerate(world.servers):
        for page in _found(world, server, rules):
            _read(i, server, page, rules)
            if budget.slow_gets and server.getting is None:
                yield (
                    f"{i} gets {page.label}",
                    _with(_spend(world, "slow_gets"), i, server._replace(getting=page)),
                )
        if server.getting is not None:
            if server.getting.label == server.label or not rules.check_on_arrival:
                _read(i, server, server.getting, rules)
            yield f"{i} has got", _with(world, i, server._replace(getting=None))
        if budget.compute and not epochs.is_local(server.label.epoch):
            # Local pages reach no store, and are read under their own label only.
            page = Page(server.label, server.weights)
            computed = _spend(world, "compute")._replace(queued=world.queued | {(i, page)})
            yield f"{i} computes {page.label}", computed
        yield from _look(world, i, rules)
        if budget.flush:
            yield from _flush(_spend(world, "flush"), i, rules)
        if budget.update:
            yield from _update(_spend(world, "update"), i, rules)
        if budget.restart:
            fresh = _fresh(world, "v0", "v0", rules)
            yield f"{i} restarts", _with(_spend(world, "restart"), i, fresh)
    for i, page in world.queued:
        label = page.label if rules.stamp_when_computed else world.servers[i].label
        stored = page._replace(label=label if rules.epoch_in_key else label._replace(epoch=0))
        landed = world._replace(queued=world.queued - {(i, page)})
        if not epochs.is_local(label.epoch) and all(p.label != stored.label for p in world.store):
            landed = landed._replace(store=world.store | {stored})
        yield f"page of {i} lands as {stored.label}", landed
    for mark in world.marking:
        landed = world._replace(marking=world.marking - {mark}, marks=world.marks | {mark})
        yield f"mark {mark} lands", landed
    if budget.lose:
        for mark in world.marks:
            yield f"mark {mark} is lost", _spend(world, "lose")._replace(marks=world.marks - {mark})


def _found(world: World, server: Server, rules: Rules) -> list[Page]:
    """What the store has under the server's label."""
    if not server.looked or epochs.is_local(server.label.epoch):
        return []
    key = server.label if rules.epoch_in_key else server.label._replace(epoch=0)
    return [page._replace(label=server.label) for page in world.store if page.label == key]


def _read(i: int, server: Server, page: Page, rules: Rules) -> None:
    if page.weights != server.weights:
        raise Broken(f"P1: server {i} reads KV of {page.weights} with weights {server.weights}")
    for j in range(page.older.bit_length() if rules.check_flushes else 0):
        if page.older & server.respects & 1 << j:
            raise Broken(f"P{2 if i == j else 3}: server {i} reads a page of before server {j}'s flush")


def _look(world: World, i: int, rules: Rules) -> Iterator[Step]:
    """Look, claim, adopt."""
    server = world.servers[i]
    namespace, own = server.label
    if server.claimed is not None:
        marks = _marks(namespace, server.claimed)
        if marks <= world.marks:
            yield f"{i} sees its claim of {server.claimed}", _take(world, i, server)
        elif not marks <= world.marks | world.marking:
            yield f"{i} marks again", world._replace(marking=world.marking | marks - world.marks)
        return
    highest, missing = _highest(world, namespace, own)
    if server.looked and highest == own and missing - world.marking:
        yield f"{i} marks again", world._replace(marking=world.marking | missing)
    if server.answer != highest and not (server.looked and highest == own):
        yield f"{i} looks", _with(world, i, server._replace(answer=highest))
    if server.answer is None:
        return
    told = server._replace(answer=None)
    if epochs.is_local(own):
        number = epochs.claim(own, server.answer if rules.claim_above_marks else 0)
        claimed = _with(world, i, told._replace(claimed=number))
        claimed = claimed._replace(marking=world.marking | _marks(namespace, number) - world.marks)
        if not rules.take_when_marked:
            claimed = _take(claimed, i, claimed.servers[i])
        yield f"{i} claims {number}", claimed
        return
    if server.answer > own and rules.adopt:
        told = _adopt(world, told, server.answer)
    yield f"{i} is told {server.answer}", _with(world, i, told._replace(looked=True))


def _highest(world: World, namespace: str, own: int) -> tuple[int, frozenset[Label]]:
    """The result of a look, and the marks of that number that are missing."""
    epoch, again = own, True
    while again:
        probed = epochs.probes(epoch)
        found = [Label(namespace, number) in world.marks for number in probed]
        decision = epochs.decide(epoch, probed, found)
        epoch, again = decision.epoch, decision.look_again
    return epoch, frozenset(Label(namespace, number) for number in decision.missing)


def _take(world: World, i: int, server: Server) -> World:
    """The claimed number is the server's from now on."""
    assert server.claimed is not None
    flush = Label(server.label.namespace, server.claimed)
    world = world._replace(flushes=(*world.flushes[:i], flush, *world.flushes[i + 1 :]))
    taken = _adopt(world, server, server.claimed)._replace(claimed=None, looked=True)
    return _with(world, i, taken)


def _adopt(world: World, server: Server, number: int) -> Server:
    respects = server.respects
    for j, flush in enumerate(world.flushes):
        if flush is not None and flush.namespace == server.label.namespace and 0 <= flush.epoch <= number:
            respects |= 1 << j
    return server._replace(label=server.label._replace(epoch=number), respects=respects)


def _flush(world: World, i: int, rules: Rules) -> Iterator[Step]:
    """Begins and returns at once: it does not wait for the store."""
    bit, namespace = 1 << i, world.servers[i].label.namespace

    def aged(page: Page) -> Page:
        return page._replace(older=page.older | bit) if page.label.namespace == namespace else page

    servers = tuple(
        s._replace(getting=s.getting and aged(s.getting), respects=s.respects & ~bit) for s in world.servers
    )
    world = world._replace(
        servers=servers,
        store=frozenset(aged(page) for page in world.store),
        queued=frozenset((j, aged(page)) for j, page in world.queued),
        flushes=(*world.flushes[:i], Label(namespace, -1), *world.flushes[i + 1 :]),
    )
    server = world.servers[i]
    own = server.label.epoch
    server = server._replace(respects=server.respects | bit, claimed=None)
    if rules.void_looks_before_flush:
        server = server._replace(answer=None)
    if rules.flush_looks_first:
        label = server.label._replace(epoch=epochs.flushed(own))
        yield f"{i} flushes", _with(world, i, server._replace(label=label, looked=False))
        return
    looked, number = server.looked, epochs.claim(own, 0)
    world = _take(world, i, server._replace(claimed=number))
    world = world._replace(marking=world.marking | _marks(namespace, number) - world.marks)
    yield f"{i} flushes to {number}", _with(world, i, world.servers[i]._replace(looked=looked))


def _update(world: World, i: int, rules: Rules) -> Iterator[Step]:
    """To a named version, or without a name."""
    old = world.servers[i]
    for weights in ("v1", f"u{i}"):
        if old.weights in (weights, f"u{i}"):
            continue
        unnamed = weights != "v1"
        version = "v0" if unnamed and not rules.unnamed_update_gets_fresh_name else weights
        server = _fresh(world, weights, version, rules)._replace(getting=old.getting)
        if not rules.version_in_namespace:
            server = server._replace(label=old.label, looked=old.looked, respects=old.respects)
        yield f"{i} updates to {weights}", _with(world, i, server)


def _fresh(world: World, weights: str, version: str, rules: Rules) -> Server:
    """A server that knows nothing of the namespace; flushes whose marks are there bind it."""
    label = Label(version if rules.version_in_namespace else "model", 0)
    respects = 0
    for j, flush in enumerate(world.flushes):
        taken = flush is not None and flush.namespace == label.namespace and flush.epoch >= 0
        if flush is not None and taken and _marks(*flush) <= world.marks:
            respects |= 1 << j
    return Server(weights, label, looked=not rules.look_before_use, respects=respects)


def _marks(namespace: str, number: int) -> frozenset[Label]:
    return frozenset(Label(namespace, n) for n in epochs.chain(number))


def _with(world: World, i: int, server: Server) -> World:
    return world._replace(servers=(*world.servers[:i], server, *world.servers[i + 1 :]))


def _spend(world: World, kind: str) -> World:
    left = getattr(world.budget, kind) - 1
    return world._replace(budget=world.budget._replace(**{kind: left}))


@dataclass(frozen=True)
class Result:
    states: int
    complete: bool
    """Every reachable state was visited; False if a property broke."""
    broken: str | None = None
    trace: tuple[str, ...] = ()
    """The steps that lead there; no shorter ones do."""


def explore(servers: int, budget: Budget, rules: Rules = RULES) -> Result:
    """Visit every reachable state, breadth first."""
    world = World((), budget, (None,) * servers)
    world = world._replace(servers=(_fresh(world, "v0", "v0", rules),) * servers)
    came: dict[World, tuple[World, str] | None] = {world: None}
    queue = deque([world])
    while queue:
        world = queue.popleft()
        try:
            for name, following in steps(world, rules):
                if following not in came:
                    came[following] = (world, name)
                    queue.append(following)
        except Broken as error:
            return Result(len(came), False, str(error), _trace(came, world))
    return Result(len(came), not queue)


def _trace(came: dict[World, tuple[World, str] | None], world: World) -> tuple[str, ...]:
    names: list[str] = []
    while (at := came[world]) is not None:
        world, name = at
        names.append(name)
    return tuple(reversed(names))


def without(part: str) -> Rules:
    """The rule with one of ``PARTS`` left out."""
    return replace(RULES, **{part: False})
