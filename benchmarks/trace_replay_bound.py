"""What a cache could save at most that does not know the future, but knows this trace by heart.

Every use of a block by a request belongs to a class, by what is known at that moment (how often the block was
used, how many tokens the request brought, ...). A policy that sees no more than the class can only say how
long to keep the blocks of a class: until an age, where they are dropped if nobody came. The bound gives every
class the ages that are best in hindsight, lets capacity hold on average over the trace only, and does not ask
that prefixes be closed. So with the same ages at all times, or any mixture of ages, nobody saves more. Finer
classes know more, and with enough of them the bound becomes the future itself. It is no bound for who sees
what is in no class, such as how much traffic there is at the moment.

Savings over room are piecewise linear and concave in each class (ages may be mixed), so the best use of a
capacity takes the steepest pieces of all classes first.

Two tiers: a hit saves its prefill less the load with the room of both tiers together, and the load on top
with the room of the device. Each is bounded on its own, so together they are a bound. Ages count blocks
requested since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.trace_replay_trace import Request
from hicache_ext.core.policy.costs import CostModel


@dataclass(frozen=True, slots=True)
class Known:
    """What a server can know when a request uses a block; lengths in blocks."""

    uses: int
    """By earlier requests."""
    turn: int
    """Of the conversation, from 1."""
    new: int
    """Blocks that no earlier request had."""
    length: int


CLASSES: dict[str, Callable[[Known], object]] = {
    "age only": lambda k: 0,
    "turn": lambda k: min(k.turn, 7),
    "new tokens": lambda k: k.new.bit_length(),
    "uses so far": lambda k: min(k.uses, 7),
    "turn, uses, new": lambda k: (min(k.turn, 3), min(k.uses, 7), k.new.bit_length()),
    "turn, uses, new, length": lambda k: (
        min(k.turn, 3),
        min(k.uses, 7),
        k.new.bit_length(),
        k.length.bit_length(),
    ),
}


@dataclass(frozen=True)
class Uses:
    """All uses of blocks in a trace, as arrays; ``span`` is the length of the trace in blocks requested."""

    known: list[Known]
    conversation: np.ndarray
    gap: np.ndarray
    """Blocks requested until the next use, or until the end of the trace."""
    recompute: np.ndarray
    """Seconds that a hit of the next use saves; 0 if there is none."""
    load: np.ndarray
    span: int


def uses_of(requests: Sequence[Request], block: int, costs: CostModel) -> Uses:
    """``costs`` are per token."""
    known: list[Known] = []
    conversation: list[int] = []
    began: list[int] = []
    gap: list[int] = []
    recompute: list[float] = []
    load: list[float] = []
    last: dict[int, int] = {}
    """Per block, its last use."""
    count: dict[int, int] = {}
    visits: dict[int, tuple[int, int, int]] = {}
    """Per block, of the last request that used it: its old blocks, its turn, its conversation."""
    now = 0
    for number, request in enumerate(requests):
        blocks = request.blocks.tolist()
        old = 0
        while old < len(blocks) and blocks[old] in last:
            old += 1
        turn, chat = 1, number
        if old and old > visits[blocks[old - 1]][0]:
            # It goes on from what that request brought.
            turn, chat = visits[blocks[old - 1]][1] + 1, visits[blocks[old - 1]][2]
        visits.update(dict.fromkeys(blocks, (old, turn, chat)))
        for depth, name in enumerate(blocks):
            if name in last:
                use = last[name]
                gap[use] = now - began[use]
                tokens = min(block, request.tokens - depth * block)
                recompute[use] = costs.recompute(depth * block, tokens)
                load[use] = costs.load * tokens
            last[name] = len(gap)
            known.append(Known(count.get(name, 0), turn, len(blocks) - old, len(blocks)))
            count[name] = count.get(name, 0) + 1
            conversation.append(chat)
            began.append(now)
            gap.append(-1)
            recompute.append(0.0)
            load.append(0.0)
        now += len(blocks)
    gaps, starts = np.array(gap), np.array(began)
    return Uses(
        known,
        np.array(conversation),
        np.where(gaps < 0, now - starts, gaps),
        np.array(recompute),
        np.array(load),
        now,
    )


@dataclass(frozen=True)
class Pieces:
    """The pieces of a class's concave hull, steepest first, with the age at which each ends."""

    room: np.ndarray
    saved: np.ndarray
    age: np.ndarray


def hull(gap: np.ndarray, saved: np.ndarray) -> Pieces:
    """Over all ages to give up at: room is summed over uses and blocks requested, savings over uses."""
    order = np.argsort(gap, kind="stable")
    gap, saved = gap[order].astype(float), saved[order]
    left = len(gap) - np.arange(1, len(gap) + 1)
    points = [(0.0, 0.0, 0.0)]
    last = np.append(gap[1:] != gap[:-1], True)
    rows = zip(np.cumsum(gap) + left * gap, np.cumsum(saved), gap, last & (np.cumsum(saved) > 0), strict=True)
    for room, total, age, counts in rows:
        if not counts or total <= points[-1][1]:
            continue
        while len(points) > 1 and (total - points[-1][1]) * (points[-1][0] - points[-2][0]) >= (
            points[-1][1] - points[-2][1]
        ) * (room - points[-1][0]):
            points.pop()
        points.append((room, total, age))
    corners = np.array(points)
    steps = np.diff(corners[:, :2], axis=0)
    return Pieces(steps[:, 0], steps[:, 1], corners[1:, 2])


class Curve:
    """Seconds saved at most, over capacity."""

    def __init__(self, uses: Uses, classes: Callable[[Known], object], price: np.ndarray) -> None:
        pieces = [hull(uses.gap[members], price[members]) for members in _members(uses, classes)]
        room = np.concatenate([p.room for p in pieces])
        saved = np.concatenate([p.saved for p in pieces])
        order = np.argsort(-saved / np.maximum(room, 1e-12), kind="stable")
        self.classes = len(pieces)
        self._room = np.concatenate([[0.0], np.cumsum(room[order])])
        self._saved = np.concatenate([[0.0], np.cumsum(saved[order])])
        self._span = uses.span

    def at(self, capacity: int) -> float:
        """``capacity`` in blocks."""
        return float(np.interp(float(capacity) * self._span, self._room, self._saved))


class Bound:
    """For one way to class uses; see the module docstring."""

    def __init__(self, uses: Uses, classes: Callable[[Known], object]) -> None:
        self._whole = Curve(uses, classes, uses.recompute)
        self._less_load = Curve(uses, classes, np.maximum(uses.recompute - uses.load, 0.0))
        self._load = Curve(uses, classes, np.minimum(uses.load, uses.recompute))
        self.classes = self._whole.classes

    def saved(self, device_blocks: int, host_blocks: int) -> float:
        """Prefill seconds saved at most, net of loads."""
        if not host_blocks:
            return self._whole.at(device_blocks)
        return self._less_load.at(device_blocks + host_blocks) + self._load.at(device_blocks)


class Learned:
    """What is left of the bound if the ages of each half of the conversations are chosen on the other half.

    An estimate of what can be learned, and no bound. Each half gets room for its share of the uses.
    """

    def __init__(self, uses: Uses, classes: Callable[[Known], object]) -> None:
        self._span = uses.span
        less_load = np.maximum(uses.recompute - uses.load, 0.0)
        self._whole = self._halves(uses, classes, uses.recompute)
        self._less_load = self._halves(uses, classes, less_load)
        self._load = self._halves(uses, classes, np.minimum(uses.load, uses.recompute))

    def saved(self, device_blocks: int, host_blocks: int) -> float:
        """Prefill seconds saved, net of loads."""
        if not host_blocks:
            return self._at(self._whole, device_blocks)
        return self._at(self._less_load, device_blocks + host_blocks) + self._at(self._load, device_blocks)

    def _at(self, halves: Sequence[tuple[float, np.ndarray]], capacity: int) -> float:
        total = 0.0
        for share_of_uses, steps in halves:
            room = share_of_uses * capacity * self._span
            used = np.minimum(np.maximum(room - (np.cumsum(steps[:, 0]) - steps[:, 0]), 0.0), steps[:, 0])
            taken = np.divide(used, steps[:, 0], out=np.ones(len(steps)), where=steps[:, 0] > 0)
            total += float((taken * steps[:, 1]).sum())
        return total

    def _halves(
        self, uses: Uses, classes: Callable[[Known], object], price: np.ndarray
    ) -> list[tuple[float, np.ndarray]]:
        """Per half, its share of the uses, and (room, savings) in it, in the order that the other gives."""
        halves = []
        members = _members(uses, classes)
        for half in (0, 1):
            tested = uses.conversation % 2 == half
            steps: list[tuple[float, float, float]] = []
            for group in members:
                train, test = group[~tested[group]], group[tested[group]]
                pieces = hull(uses.gap[train], price[train])
                gap, before = uses.gap[test], (0.0, 0.0)
                for room, saved, age in zip(pieces.room, pieces.saved, pieces.age, strict=True):
                    after = (float(np.minimum(gap, age).sum()), float(price[test][gap <= age].sum()))
                    steps.append((saved / max(room, 1e-12), after[0] - before[0], after[1] - before[1]))
                    before = after
                # Room that is left goes to what the other half has never seen come back.
                rest = (float(gap.sum()) - before[0], float(price[test].sum()) - before[1])
                steps.append((0.0, *rest))
            steps.sort(key=lambda step: -step[0])
            halves.append((float(tested.mean()), np.array([step[1:] for step in steps]).reshape(-1, 2)))
        return halves


def _members(uses: Uses, classes: Callable[[Known], object]) -> list[np.ndarray]:
    groups: dict[object, list[int]] = {}
    for index, known in enumerate(uses.known):
        groups.setdefault(classes(known), []).append(index)
    return [np.array(members) for members in groups.values()]


def share(saved: float, floor: float, best: float) -> float | None:
    """Of the way from ``floor`` to ``best``; None where there is none."""
    return (saved - floor) / (best - floor) if best - floor > 1e-9 * best else None
