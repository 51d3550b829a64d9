"""Who is admitted now, while pages of others are still on their way from the host.

A prefill batch makes every request that runs wait, and takes its launches' time at least, however few tokens
it computes. So it can pay to hold back what is ready until more has landed and compute all of it in one
batch. Compared are all ways to take what is ready and the first few that are on their way in one batch, as
soon as those have landed, and the rest in a second one: by the seconds that requests wait, all of them added
up. What runs counts too.

Requests that come one by one would otherwise be computed one by one, with everything else standing still most
of the time. So a batch also waits for those that may come, as long as that has cost little; it is the
acknowledgment problem of TCP (Dooly, Goldman, Scott: On-line analysis of the TCP acknowledgment delay
problem), where a batch goes once waiting has cost as much as the batch does. Here a part of that is waited,
and never longer than ``GATHER``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hicache_ext.core.speeds import Rates

LEAD = 0.018
"""Seconds before its last load lands that a batch may be launched: launching takes longer than that, and
attention waits for the load."""
MOST = 0.06
"""Seconds of loads in a batch. It bounds how long anyone is held back."""
GATHER = 0.03
"""Seconds that a request waits at most for others that may come."""
GATHER_SHARE = 0.25
"""Of what a batch costs the others, that its requests together may wait for more to come."""
LOOK_AHEAD = 32
"""Requests on their way that are looked at, at most."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A queued request that will compute ``tokens`` behind ``start`` others."""

    start: int
    tokens: int
    load: float = 0.0
    """Seconds that its load takes, landed or not."""
    lands: float = 0.0
    """Seconds from now until all loads up to its own have landed."""
    waited: float = float("inf")
    """Seconds in the queue; infinite: it does not wait for any that may come."""


def admit_now(
    ready: Sequence[Candidate], coming: Sequence[Candidate], running: int, rates: Rates
) -> int | None:
    """How many of ``coming`` to admit now with all of ``ready``; None: nobody yet.

    Args:
        coming: in the order in which they land.
        running: requests that every prefill batch delays.
    """
    coming = coming[:LOOK_AHEAD]
    compute, load = sum(_compute(one, rates) for one in ready), sum(one.load for one in ready)
    each = [_compute(one, rates) for one in coming]
    later = sum(each)
    best: _Plan | None = None
    for count in range(len(coming) + 1):
        if count:
            load += coming[count - 1].load
            compute += each[count - 1]
            later -= each[count - 1]
        taken, rest = len(ready) + count, len(coming) - count
        if not taken:
            continue
        if best is not None and load > MOST:
            break
        starts = max(0.0, coming[count - 1].lands - LEAD) if count else 0.0
        first = max(rates.launch, compute)
        cost = taken * (starts + first) + running * first
        if rest:
            second = max(rates.launch, later)
            begins = max(starts + first, coming[-1].lands - LEAD)
            cost += rest * (begins + second) + (running + taken) * second
        if best is None or cost < best.cost:
            best = _Plan(cost, count, starts, compute)
    if best is None or best.starts > 0:
        return None
    waited = [one.waited for one in (*ready, *coming[: best.count])]
    idle = max(rates.launch - best.compute, 0.0)
    if sum(waited) < GATHER_SHARE * idle * running and max(waited) < GATHER:
        return None
    return best.count


@dataclass(frozen=True, slots=True)
class _Plan:
    cost: float
    count: int
    starts: float
    compute: float


def _compute(one: Candidate, rates: Rates) -> float:
    return rates.recompute(one.start, one.tokens)
