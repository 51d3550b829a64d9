"""The order of the queue: cheapest first, nobody starves, all ranks alike."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_ext.core.policy.costs import CostModel
from hicache_ext.core.queue_order import Waiting, order, remaining_cost
from hicache_ext.core.speeds import Rates, Speeds

COSTS = CostModel(token=1e-4, depth=1e-9)
RATES = Rates(COSTS, 1.0, 0.02, 10e9, {})
BYTES = 131072.0
PATIENCE = 2.0
ALLOWED = int(PATIENCE / COSTS.token)


def served(*waiting: Waiting, computed: int = 0) -> list[int]:
    return order(waiting, RATES, BYTES, computed, PATIENCE)


def test_what_is_cached_nearby_goes_first() -> None:
    cold = Waiting(0, 4000)
    on_host = Waiting(0, 4000, host=3000)
    coming = Waiting(0, 4000, host=2000, fetching=1000)
    on_device = Waiting(0, 4000, device=3000)
    short = Waiting(0, 100)
    assert served(cold, on_host, coming, on_device, short) == [4, 3, 1, 2, 0]


def test_of_equal_ones_who_came_first_goes_first() -> None:
    assert served(*[Waiting(0, 500)] * 5) == [0, 1, 2, 3, 4]


def test_the_same_tokens_cost_more_behind_a_long_prefix() -> None:
    assert served(Waiting(0, 100_500, device=100_000), Waiting(0, 500)) == [1, 0]


def test_a_slow_bus_makes_the_host_worth_no_more_than_computing() -> None:
    slow = Rates(COSTS, 1.0, 0.02, 1e6, {})
    request = Waiting(0, 4000, host=3000)
    assert remaining_cost(request, slow, BYTES) == pytest.approx(COSTS.recompute(0, 4000))
    assert remaining_cost(request, RATES, BYTES) < 0.5 * COSTS.recompute(0, 4000)


def test_who_gains_by_waiting_goes_last_until_overdue() -> None:
    sharing, dear = Waiting(0, 100, shares=True), Waiting(0, 9000)
    assert served(sharing, dear) == [1, 0]
    assert served(sharing, dear, computed=ALLOWED) == [0, 1]


def test_overdue_ones_go_first_by_arrival() -> None:
    waiting = [Waiting(0, 90_000), Waiting(100, 80_000), Waiting(ALLOWED, 10)]
    assert served(*waiting, computed=ALLOWED - 1) == [2, 1, 0]
    assert served(*waiting, computed=ALLOWED) == [0, 2, 1]
    assert served(*waiting, computed=ALLOWED + 100) == [0, 1, 2]


requests = st.builds(
    Waiting,
    arrived=st.integers(0, 100_000),
    tokens=st.integers(1, 50_000),
    device=st.integers(0, 60_000),
    host=st.integers(0, 60_000),
    fetching=st.integers(0, 60_000),
    shares=st.booleans(),
)


@given(st.lists(requests, max_size=6), st.integers(0, 200_000), st.floats(0.01, 100), st.floats(1e6, 1e12))
def test_everybody_is_served_once_and_more_cached_is_never_later(
    waiting: list[Waiting], computed: int, scale: float, load: float
) -> None:
    rates = Rates(COSTS, scale, 0.02, load, {})
    positions = order(waiting, rates, BYTES, computed)
    assert sorted(positions) == list(range(len(waiting)))
    for request in waiting:
        more = Waiting(request.arrived, request.tokens + 1, request.device, request.host, request.fetching)
        assert remaining_cost(more, rates, BYTES) >= remaining_cost(request, rates, BYTES) >= 0


def test_ranks_that_measured_differently_agree() -> None:
    ranks = [Speeds(COSTS), Speeds(COSTS)]
    for now in range(5):
        ranks[0].observed_prefill(0, 1000, 0.3, now)
        ranks[1].observed_load(1 << 30, 1.0, now)
    reduced = np.minimum(ranks[0].vector(), ranks[1].vector())
    waiting = [Waiting(i, 5000 - 400 * i, host=i * 300) for i in range(10)]
    for rank in ranks:
        rank.adopt(reduced)
    first, second = (order(waiting, rank.agreed, BYTES, 12) for rank in ranks)
    assert first == second


def serve(load: list[tuple[int, int]], *, by_cost: bool) -> list[tuple[int, int, int]]:
    """(arrival, tokens) of each request -> (arrival, begin, end), in tokens computed; one at a time."""
    left, clock = sorted(load), 0
    queue: list[tuple[int, int]] = []
    out = []
    while left or queue:
        if not queue:
            clock = max(clock, left[0][0])
        while left and left[0][0] <= clock:
            queue.append(left.pop(0))
        waiting = [Waiting(arrival, tokens) for arrival, tokens in queue]
        chosen = served(*waiting, computed=clock)[0] if by_cost else 0
        arrival, tokens = queue.pop(chosen)
        out.append((arrival, clock, clock + tokens))
        clock += tokens
    return out


def mixed(seed: int) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    at, load = 0, []
    for _ in range(400):
        at += int(rng.expovariate(1 / 3000))
        load.append((at, rng.choice([100, 200, 400, 8000])))
    return load


@pytest.mark.parametrize("seed", range(3))
def test_the_mean_wait_falls(seed: int) -> None:
    load = mixed(seed)
    by_cost, by_arrival = serve(load, by_cost=True), serve(load, by_cost=False)
    assert len(by_cost) == len(load)
    mean = [float(np.mean([end - arrival for arrival, _, end in out])) for out in (by_cost, by_arrival)]
    assert mean[0] < 0.8 * mean[1]


def test_nobody_starves_under_an_endless_stream_of_cheap_requests() -> None:
    """One dear request, and cheap ones that alone keep the server busy: those that come later are computed
    before it for at most the patience, and one more that had begun."""
    load = [(0, 100), (1, 30_000), *((100 + 90 * i, 100) for i in range(400))]
    out = serve(load, by_cost=True)
    begin = next(begin for arrival, begin, _ in out if arrival == 1)
    assert ALLOWED <= begin <= 1 + ALLOWED + 100
    assert serve(load, by_cost=False)[1][0] == 1
