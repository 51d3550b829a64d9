"""Where the time of a request goes, as its client sees it: the profile of a closed loop.

With n requests in flight, a pass takes the sum of what its requests take, divided by n. A request takes

    its TTFT                          in the queue, loading, and in its own prefill
    + steps x seconds of a step       decoding without anything in between
    + interruptions x seconds of one  gaps between tokens in which others were prefilled

A gap counts as an interruption if it is longer than twice the median gap, since all decode steps of a load
take about the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.multiturn_stats import Record

INTERRUPTED = 2.0
"""Median gaps."""


@dataclass(frozen=True)
class RequestTime:
    """Means over requests; seconds."""

    ttft_s: float
    steps: float
    step_s: float
    interruptions: float
    interruption_s: float

    @property
    def decode_s(self) -> float:
        return self.steps * self.step_s

    @property
    def interrupted_s(self) -> float:
        return self.interruptions * self.interruption_s

    @property
    def total_s(self) -> float:
        return self.ttft_s + self.decode_s + self.interrupted_s


def request_time(records: Sequence[Record]) -> RequestTime | None:
    """Of the requests that were answered; None if there are none, or with a single token each."""
    answered = [r for r in records if r.ok and r.ttft_s is not None]
    gaps = np.array([gap for r in answered for gap in r.gaps_s])
    if not gaps.size:
        return None
    long = gaps > INTERRUPTED * np.median(gaps)
    count = len(answered)
    return RequestTime(
        ttft_s=float(np.mean([r.ttft_s for r in answered])),
        steps=float((~long).sum() / count),
        step_s=float(gaps[~long].mean()),
        interruptions=float(long.sum() / count),
        interruption_s=float(gaps[long].mean()) if long.any() else 0.0,
    )
