"""Where the time of a request goes."""

from __future__ import annotations

import pytest

from benchmarks.multiturn_stats import Record
from benchmarks.request_time import request_time


def record(ttft: float | None, gaps: list[float], error: str | None = None) -> Record:
    return Record(1, 0, 1, 0.0, "", ttft_s=ttft, gaps_s=gaps, error=error)


def test_gaps_are_steps_or_interruptions_and_all_together_are_the_latency() -> None:
    records = [record(0.3, [0.006, 0.006, 0.007, 0.090]), record(0.1, [0.006, 0.007, 0.006, 0.006])]
    found = request_time(records)
    assert found is not None
    assert (found.steps, found.interruptions) == (3.5, 0.5)
    assert found.interruption_s == pytest.approx(0.090)
    assert found.ttft_s == pytest.approx(0.2)
    assert found.total_s == pytest.approx((0.3 + 0.109 + 0.1 + 0.025) / 2)


def test_failed_requests_do_not_count_and_nothing_may_be_left() -> None:
    assert request_time([record(0.3, [0.006] * 3), record(9.0, [9.0], "refused")]) == request_time(
        [record(0.3, [0.006] * 3)]
    )
    assert request_time([record(0.3, [])]) is None
    assert request_time([record(None, [], "refused")]) is None
