"""Request streams of a known kind, to see a policy on more than one trace. All are deterministic in their
seed.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from itertools import count

import numpy as np

from benchmarks.trace_replay_trace import Request

BLOCK = 512


def _request(time: float, blocks: list[int], block: int) -> Request:
    return Request(time, len(blocks) * block, np.array(blocks, dtype=np.int64))


def chat(
    requests: int, *, seed: int = 0, again: float = 0.5, think_s: float = 60.0, block: int = BLOCK
) -> list[Request]:
    """Conversations behind one system prompt: a turn comes after a log-normal think time, or never."""
    rng, ids = random.Random(seed), count(1)
    due: list[tuple[float, int, list[int]]] = []
    out: list[Request] = []
    clock, order = 0.0, count()
    while len(out) < requests:
        clock += rng.expovariate(3.0)
        heapq.heappush(due, (clock, next(order), [0, *_fresh(ids, rng.randint(2, 24))]))
        while due and due[0][0] <= clock and len(out) < requests:
            at, _, blocks = heapq.heappop(due)
            out.append(_request(at, blocks, block))
            if rng.random() < again:
                later = at + rng.lognormvariate(math.log(think_s), 0.8)
                heapq.heappush(due, (later, next(order), blocks + _fresh(ids, rng.randint(1, 4))))
    return out


def agents(requests: int, *, seed: int = 0, kinds: int = 20, block: int = BLOCK) -> list[Request]:
    """Agents with long shared prefixes, some far more popular, and quick steps that each add a little."""
    rng, ids = random.Random(seed), count(1)
    prefixes = [_fresh(ids, rng.randint(10, 60)) for _ in range(kinds)]
    weights = [1 / (k + 1) for k in range(kinds)]
    due: list[tuple[float, int, list[int], int]] = []
    out: list[Request] = []
    clock, order = 0.0, count()
    while len(out) < requests:
        clock += rng.expovariate(0.5)
        prefix = rng.choices(prefixes, weights)[0]
        start = (clock, next(order), prefix + _fresh(ids, 1), rng.randint(1, 12))
        heapq.heappush(due, start)
        while due and due[0][0] <= clock and len(out) < requests:
            at, _, blocks, steps = heapq.heappop(due)
            out.append(_request(at, blocks, block))
            if steps:
                step = (at + rng.expovariate(0.2), next(order), blocks + _fresh(ids, 1), steps - 1)
                heapq.heappush(due, step)
    return out


def with_scan(
    sessions: list[Request], blocks: int, *, at: int, each: int = 16, share: int = 3, block: int = BLOCK
) -> tuple[list[Request], list[bool]]:
    """Mixes one-time prompts of ``blocks`` blocks in all into ``sessions`` from request ``at`` on.

    ``share`` of them come before each request of a session. Returns the stream, and which requests are
    sessions'.
    """
    ids = count(1 << 40)
    out, own = [], []
    left = blocks
    for number, request in enumerate(sessions):
        for _ in range(share if number >= at else 0):
            if left > 0:
                out.append(_request(request.time, _fresh(ids, each), block))
                own.append(False)
                left -= each
        out.append(request)
        own.append(True)
    return out, own


def _fresh(ids: Iterator[int], length: int) -> list[int]:
    return [next(ids) for _ in range(length)]
