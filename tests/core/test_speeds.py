"""Tracked speeds: outliers, changes, overlapping fetches, agreement between ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_ext.core.policy.costs import CostModel
from hicache_ext.core.speeds import KEPT, LAUNCH, STALE, Speeds, StoreRate, fit_costs

COSTS = CostModel(token=1e-4, depth=1e-9)


def speeds() -> Speeds:
    return Speeds(COSTS, ["store"], load_bandwidth=10e9)


def test_a_first_request_that_compiles_does_not_make_prefill_look_dear() -> None:
    s = speeds()
    s.observed_prefill(0, 1000, 60.0, now=0)
    assert s.measured.prefill_scale == 1.0
    for now in range(1, 4):
        s.observed_prefill(0, 1000, 1.5 * COSTS.recompute(0, 1000), now)
    assert s.measured.prefill_scale == pytest.approx(1.5)


def test_prefill_follows_a_prior_that_was_wrong() -> None:
    s = speeds()
    for now in range(3):
        s.observed_prefill(4096, 512, 30 * COSTS.recompute(4096, 512), now)
    assert s.measured.recompute(0, 100) == pytest.approx(30 * COSTS.recompute(0, 100))


def test_small_passes_say_nothing() -> None:
    s = speeds()
    for now in range(20):
        s.observed_prefill(0, 16, 0.02, now)
    assert s.measured.prefill_scale == 1.0


def test_a_pass_of_several_requests_counts_the_work_of_all() -> None:
    s = speeds()
    parts = [(0, 300), (10_000, 300), (500, 5)]
    for now in range(4):
        s.observed_pass(parts, 2 * sum(COSTS.recompute(*part) for part in parts), now)
    assert s.measured.prefill_scale == pytest.approx(2)


def test_one_stalled_transfer_in_a_few_changes_nothing() -> None:
    s = speeds()
    for i in range(12):
        stalled = i % 4 == 3
        s.observed_load(1 << 24, (1 << 24) / (1e6 if stalled else 4e9), now=i)
        s.observed_fetch("store", 1 << 24, 1e-3 + (1 << 24) / (1e6 if stalled else 2e9), now=i)
    assert s.measured.load_bandwidth == pytest.approx(4e9)
    assert s.measured.stores["store"].bandwidth == pytest.approx(2e9)


def test_the_least_that_a_pass_takes_is_that_of_the_shortest_ones() -> None:
    s = speeds()
    s.observed_prefill(0, 1, 60.0, now=0)
    assert s.measured.launch == LAUNCH, "a first request that compiles"
    for now in range(1, 11):
        s.observed_pass([(0, 10), (500, 20)], 0.08, now / 10, passes=2)
        s.observed_prefill(0, 4000, 0.5, now / 10)
    assert s.measured.launch == pytest.approx(0.04) and s.measured.prefill_scale > 1
    assert s.measured.recompute(0, 0) == 0


def test_a_change_is_followed_within_five_observations_and_within_two_after_a_pause() -> None:
    s = speeds()
    for i in range(KEPT):
        s.observed_fetch("store", 1 << 24, (1 << 24) / 1e9, now=i)
    for i in range(5):
        s.observed_fetch("store", 1 << 24, (1 << 24) / 2e7, now=KEPT + i)
    assert s.measured.stores["store"].bandwidth < 2.1e7
    for i in range(2):
        s.observed_fetch("store", 1 << 24, (1 << 24) / 1e9, now=100 + i * 2 * STALE)
    assert s.measured.stores["store"].bandwidth > 0.9e9


def test_a_store_is_unknown_until_its_first_fetch_and_latency_comes_from_lookups() -> None:
    s = speeds()
    s.observed_lookup("store", 0.02, now=0)
    assert not s.measured.stores["store"].known
    s.observed_fetch("store", 10_000_000, 0.02 + 0.1, now=0)
    rate = s.measured.stores["store"]
    assert rate.known and rate.latency == 0.02 and rate.bandwidth == pytest.approx(1e8)


def test_fetches_side_by_side_are_measured_together() -> None:
    s = speeds()
    for now in (0.0, 0.01, 0.02, 0.03):
        s.fetch_began("store", now)
    for now in (1.0, 1.0, 1.0, 1.0):
        s.fetch_ended("store", 100_000_000, now)
    assert s.measured.stores["store"].bandwidth == pytest.approx(4e8, rel=0.01)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_nonsense_is_not_an_observation(seconds: float) -> None:
    s = speeds()
    s.observed_prefill(0, 1000, seconds, now=0)
    s.observed_load(1 << 20, seconds, now=0)
    s.observed_fetch("store", 1 << 20, seconds, now=0)
    s.observed_fetch("store", 0, 1.0, now=0)
    rates = s.measured
    assert rates.prefill_scale == 1 and rates.load_bandwidth == 10e9 and not rates.stores["store"].known


observations = st.lists(st.floats(1e-4, 10.0), min_size=0, max_size=4)


@given(observations, observations, observations, observations)
def test_what_ranks_agree_on_leans_towards_recomputation(
    prefills: list[float], others: list[float], fetches: list[float], loads: list[float]
) -> None:
    ranks = [speeds(), speeds()]
    for which, seconds in ((0, prefills), (1, others)):
        for now, value in enumerate(seconds):
            ranks[which].observed_prefill(0, 1000, value, now)
    for now, value in enumerate(fetches):
        ranks[now % 2].observed_fetch("store", 1 << 20, value, now)
        ranks[now % 2].observed_lookup("store", value / 10, now)
    for now, value in enumerate(loads):
        ranks[now % 2].observed_load(1 << 20, value, now)
    assert all(rank.agreed == ranks[0].agreed for rank in ranks)
    reduced = np.minimum(ranks[0].vector(), ranks[1].vector())
    for rank in ranks:
        rank.adopt(reduced)
    agreed = ranks[0].agreed
    assert ranks[1].agreed == agreed
    for rank in ranks:
        mine = rank.measured
        assert agreed.recompute(500, 500) <= mine.recompute(500, 500) * (1 + 1e-6) + 1e-9
        assert agreed.load(1 << 20) >= mine.load(1 << 20) * (1 - 1e-6)
        if agreed.stores["store"].known:
            assert agreed.stores["store"].seconds(1 << 20) >= mine.stores["store"].seconds(1 << 20) * (
                1 - 1e-5
            )
        assert agreed.stores["store"].known <= mine.stores["store"].known


def test_a_vector_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="stores"):
        speeds().adopt(np.zeros(4 + 1, dtype=np.int64))


@given(st.floats(1e-6, 1e-2), st.floats(0, 1e-6), st.floats(0.5, 2))
def test_costs_are_fitted_to_prefills_measured_at_start(token: float, depth: float, noise: float) -> None:
    true = CostModel(token, depth)
    at = [(0, 256), (0, 2048), (8192, 512), (30_000, 1024)]
    fit = fit_costs([(start, tokens, true.recompute(start, tokens)) for start, tokens in at])
    for start, tokens in [*at, (4000, 4000)]:
        assert fit.recompute(start, tokens) == pytest.approx(true.recompute(start, tokens), rel=1e-3)
    rough = [(s, n, true.recompute(s, n) * (noise if i == 1 else 1.0)) for i, (s, n) in enumerate(at)]
    fit = fit_costs(rough)
    assert fit.token > 0 and fit.depth >= 0


def test_one_sample_is_enough_for_a_fit_and_none_is_not() -> None:
    assert fit_costs([(0, 1000, 0.5)]).recompute(0, 1000) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="samples"):
        fit_costs([])


def test_stores_measured_at_start_are_known() -> None:
    s = Speeds(COSTS, {"store": StoreRate(1e-3, 5e8, True)})
    assert s.measured.stores["store"].known
    s.observed_fetch("store", 1 << 20, 10.0, now=0)
    assert s.measured.stores["store"].known
