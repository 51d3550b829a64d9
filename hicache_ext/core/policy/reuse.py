"""When will it be used again? Learned online from what requests do, in bounded memory.

Every time a request uses a node, a ``Use`` starts to age. It ends when another request uses the node; until
then it counts, age bin by age bin, as not used again. The hazard of a bin is a baseline by age times a
factor of what the server knows about the use, both estimated from these counts: a proportional-hazards
model whose factor is a product over features. Ages are measured in prefill tokens that the server computed
since, so an idle server forgets nothing.

``Reuse.worth`` answers the question an eviction asks: how much reuse per token and unit of time is there to
expect of a use of that age, if it is kept for as long as that pays (its Gittins index)?
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from hicache_ext.core.tree import Node

BINS_PER_OCTAVE = 2
BINS = 84
"""Ages of up to 2 ** 42 tokens."""
TRACKED = 1 << 15
"""Uses observed at once; those beyond are ranked like the others but teach nothing."""
MOVES = 256
"""Observations brought up to date at most per computed run of tokens."""
KNOWN = 8192
"""Observations from which on chances are more than a guess."""
GROUPS = 3
"""Baselines: of nodes used by one request, by two, by more."""
FACTORS = 33
FACTOR_STEP = 0.25
LOWEST_FACTOR = -4.0
PRIOR_HAZARD = 0.05
"""Chance of a use per age bin before anything is known; the same in every bin, which ranks like LRU."""
PRIOR_WEIGHT = 2.0
PRIOR_USES = 0.5
PRIOR_PASSED = -2.0
MEMORY = 400.0
"""Observations after which older ones count half, so that a changed workload is learned anew."""
REFRESH = 1024

_SPAN = 24
"""Values a feature can take."""


@dataclass(slots=True, eq=False)
class Visit:
    """One request: when it came, how it continues an earlier one, and how far it reached."""

    time: int
    turn: int = 1
    base: int = 0
    """Tokens that were cached when it came."""
    end: int = 0


@dataclass(slots=True, eq=False)
class Use:
    """A node's use by a request; pieces of a node that is split share it."""

    visit: Visit
    uses: int
    end: int
    tokens: int
    branches: int = 0
    gap: int = -1
    """Age bin at which the node's last use ended; -1 if it was not used before."""
    passed: bool = False
    features: tuple[int, ...] | None = None
    bin: int = 0
    done: bool = False
    tracked: bool = False
    pieces: dict[int, Node] | None = None
    """The nodes that share it, by id, once there are several."""


def age_bin(age: int) -> int:
    return min(int(BINS_PER_OCTAVE * math.log2(age + 1)), BINS - 1)


def _log2(value: int) -> int:
    return min(max(value, 0).bit_length(), _SPAN - 1)


EDGES = np.array([2 ** (b / BINS_PER_OCTAVE) - 1 for b in range(BINS + 1)])
_STARTS = [math.ceil(e) for e in EDGES]


def _smooth(rows: np.ndarray) -> np.ndarray:
    """Neighbouring ages are alike: each bin counts half, its neighbours a quarter each."""
    padded = np.pad(rows, ((0, 0), (1, 1)))
    return 0.5 * padded[:, 1:-1] + 0.25 * (padded[:, :-2] + padded[:, 2:])


class Reuse:
    def __init__(self) -> None:
        self.now = 0
        self._queues: list[deque[Use]] = [deque() for _ in range(BINS)]
        self._tracked = 0
        self._mean = 1.0
        self._seen = [[0.0] * BINS for _ in range(GROUPS)]
        self._again = [[0.0] * BINS for _ in range(GROUPS)]
        self._bias: list[float] = [0.0] * (8 * 4 * _SPAN)
        self._info: list[float] = [0.0] * (8 * 4 * _SPAN)
        self._stale = 0
        self._observed = 0
        for uses in range(8):
            # Until the server's own requests say otherwise: use begets use, and what was passed over is done.
            self._bias[uses] = PRIOR_USES * (math.sqrt(uses) - 0.7)
            self._bias[8 + uses] = PRIOR_PASSED
        self._tables()

    # What happens

    def passed(self, tokens: int) -> None:
        """The server computed ``tokens`` more: brings observations up to date, oldest first."""
        self.now += tokens
        moves = MOVES
        # Oldest first, so that every queue stays in order of time.
        for b in range(BINS - 2, -1, -1):
            queue, end = self._queues[b], _STARTS[b + 1]
            while queue and moves and (queue[0].done or self.now - queue[0].visit.time >= end):
                use = queue.popleft()
                if use.done:
                    self._tracked -= 1
                    continue
                moves -= 1
                reached = age_bin(self.now - use.visit.time)
                self._learn(use, reached, 0.0)
                self._queues[reached].append(use)

    def start(self, use: Use) -> None:
        """Observe ``use``, which begins now."""
        if self._tracked < TRACKED:
            self._tracked += 1
            use.tracked = True
            self._queues[0].append(use)

    def again(self, use: Use) -> None:
        """The node was used again: its use ends."""
        if not use.done:
            use.done = True
            if use.tracked:
                self._learn(use, max(age_bin(self.now - use.visit.time), use.bin), 1.0)

    # What is to be expected

    def factor_bin(self, use: Use) -> int:
        """The use's hazard in relation to the baseline: a row of the tables."""
        log2 = sum([self._bias[f] for f in self.features(use)]) * 1.4427
        return min(max(round((log2 - LOWEST_FACTOR) / FACTOR_STEP), 0), FACTORS - 1)

    def censor(self, use: Use) -> None:
        """Nothing more will be seen of ``use``."""
        use.done = True

    def worth(self, group: int, factor_bin: int, age: int) -> float:
        """Uses to expect per token of time that a token of room is kept for it."""
        at = min(BINS_PER_OCTAVE * math.log2(age + 1), BINS - 2.0)
        row, low = self._worth[group][factor_bin], int(at)
        return row[low] + (at - low) * (row[low + 1] - row[low])

    def chance(self, use: Use) -> float:
        """That the node is used again, at an age that this server has lived long enough to see.

        1 until enough was observed to say.
        """
        if self._observed < KNOWN:
            return 1.0
        start, end = age_bin(self.now - use.visit.time), age_bin(self.now)
        hazard = sum(self._hazard[self.group(use)][start : end + 1])
        factor = 2.0 ** (LOWEST_FACTOR + FACTOR_STEP * self.factor_bin(use))
        return 1.0 - math.exp(-hazard * factor)

    def group(self, use: Use) -> int:
        return min(use.uses, GROUPS - 1)

    def features(self, use: Use) -> tuple[int, ...]:
        if use.features is None:
            visit = use.visit
            turn = min(visit.turn, 7)
            new = _log2(visit.end - visit.base)
            length = _log2(visit.end)
            values = (
                min(use.uses, 7) + 8 * use.passed,
                turn,
                min(turn, 3) * _SPAN + new,
                min(turn, 3) * _SPAN + length,
                use.gap // 2 + 1 if use.gap >= 0 else 0,
                _log2(visit.end - use.end),
                min(use.branches, 7),
                _log2(visit.base) if turn == 1 else _SPAN,
            )
            use.features = tuple(i * 4 * _SPAN + v for i, v in enumerate(values))
        return use.features

    def _learn(self, use: Use, b: int, again: float) -> None:
        group = self.group(use)
        features = self.features(use)
        bias, info = self._bias, self._info
        factor = math.exp(min(max(sum([bias[f] for f in features]), -3.0), 3.0))
        self._mean += (use.tokens - self._mean) * 0.002
        weight = min(use.tokens / self._mean, 3.0)
        hazard = self._hazard[group]
        expected = factor * sum(hazard[use.bin : b])
        seen, counted = self._seen[group], self._again[group]
        # Half of a bin's exposure counts on the way in, so that the oldest ages do not seem to hit only.
        if b > use.bin:
            seen[use.bin] += 0.5 * weight
            for passed in range(use.bin + 1, b):
                seen[passed] += weight
            seen[b] += 0.5 * weight
        if again:
            expected += 0.5 * factor * hazard[b]
            counted[b] += weight
            if seen[b] > MEMORY:
                seen[b] *= 0.5
                counted[b] *= 0.5
        use.bin = b
        gain = 0.5 * weight * (again - expected)
        for f in features:
            info[f] = min(info[f] + weight * expected, MEMORY)
            bias[f] += gain / (PRIOR_WEIGHT + info[f])
        self._observed += 1
        self._stale += 1
        if self._stale >= REFRESH:
            self._tables()

    def _tables(self) -> None:
        """Baseline hazards, and worth by group, factor and age."""
        self._stale = 0
        seen, again = _smooth(np.array(self._seen)), _smooth(np.array(self._again))
        pooled = (again.sum(0) + PRIOR_WEIGHT * PRIOR_HAZARD) / (seen.sum(0) + PRIOR_WEIGHT)
        hazard = (again + PRIOR_WEIGHT * pooled) / (seen + PRIOR_WEIGHT)
        self._hazard = hazard.tolist()
        factors = 2.0 ** (LOWEST_FACTOR + FACTOR_STEP * np.arange(FACTORS))
        width = np.diff(EDGES)
        chance = 1.0 - np.exp(-hazard[:, None, :] * factors[None, :, None])
        worth = np.zeros_like(chance)
        # Backwards over the bins: keeping on pays while the rest is worth more than the whole.
        # gain[j], time[j]: of keeping from bin b to the end of bin j.
        gain = np.zeros((GROUPS, FACTORS, BINS))
        time = np.zeros((GROUPS, FACTORS, BINS))
        for b in range(BINS - 1, -1, -1):
            stay = 1.0 - chance[:, :, b : b + 1]
            gain[:, :, b:] = chance[:, :, b : b + 1] + stay * gain[:, :, b:]
            time[:, :, b:] = width[b] * (1.0 + stay) / 2 + stay * time[:, :, b:]
            worth[:, :, b] = (gain[:, :, b:] / time[:, :, b:]).max(2)
        self._worth = worth.tolist()
