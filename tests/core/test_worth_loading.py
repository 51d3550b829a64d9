"""Load or compute: what all ranks agreed on decides, and what is sooner computed stays where it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_ext.core.policy.costs import CostModel
from hicache_ext.core.speeds import Speeds
from tests.core.fakes import Ranks, Rig, device_len, make_rig, node_at, prompt, settle, to_host

PAGE, PAGE_BYTES = 4, 1 << 20
COSTS = CostModel(token=1e-3, depth=0.0)
LOAD = PAGE_BYTES / PAGE / COSTS.token
"""Bytes per second at which a load takes as long as the prefill that it saves."""


def rig_with(bandwidth: float) -> Rig:
    return make_rig(page_size=PAGE, speeds=Speeds(COSTS, load_bandwidth=bandwidth), page_bytes=PAGE_BYTES)


@pytest.mark.parametrize(("bandwidth", "loaded"), [(2 * LOAD, 8), (LOAD / 2, 0)])
def test_kind_slower_than_no_cache_a_load_that_recomputation_beats(bandwidth: float, loaded: int) -> None:
    rig = rig_with(bandwidth)
    tokens = prompt(PAGE, 1, 2)
    to_host(rig, tokens)
    assert rig.cache.load(node_at(rig, tokens)) == loaded
    assert rig.cache.stats.load_slower == 8 - loaded
    rig.cache.start_loads()
    settle(rig)
    assert device_len(rig, tokens) == loaded
    rig.cache.check()


def test_what_was_not_worth_loading_is_still_on_the_host_when_the_bus_is_fast_again() -> None:
    rig = rig_with(LOAD / 2)
    tokens = prompt(PAGE, 1, 2)
    to_host(rig, tokens)
    assert rig.cache.load(node_at(rig, tokens)) == 0
    assert rig.cache.speeds is not None
    for now in range(9):
        rig.cache.speeds.observed_load(1 << 24, (1 << 24) / (4 * LOAD), now)
    rig.cache.tick()
    assert rig.cache.load(node_at(rig, tokens)) == 8
    rig.cache.start_loads()
    settle(rig)
    assert device_len(rig, tokens) == 8
    rig.cache.check()


@given(st.floats(1e6, 1e11), st.integers(0, 1000), st.integers(1, 1000))
def test_it_is_what_the_measured_speeds_say(bandwidth: float, start: int, pages: int) -> None:
    cache = rig_with(bandwidth).cache
    seconds, saved = pages * PAGE_BYTES / bandwidth, COSTS.recompute(start, pages * PAGE)
    if abs(seconds / saved - 1) > 1e-3:
        assert cache.worth_loading(start, pages * PAGE) == (seconds < saved)


def test_kind_rank_divergent_hits_ranks_that_measure_different_speeds() -> None:
    ranks = Ranks(
        2,
        lambda reduce: make_rig(
            page_size=PAGE,
            reduce=reduce,
            speeds=Speeds(COSTS, load_bandwidth=2 * LOAD),
            page_bytes=PAGE_BYTES,
        ),
    )
    try:
        speeds = [rig.cache.speeds for rig in ranks.rigs]
        assert speeds[0] is not None and speeds[1] is not None
        for now in range(9):
            speeds[1].observed_load(1 << 24, (1 << 24) / (LOAD / 2), now)
        assert ranks.same(lambda rig: rig.cache.worth_loading(0, PAGE)) is True
        ranks.each(lambda rig: rig.cache.tick())
        assert ranks.same(lambda rig: rig.cache.worth_loading(0, PAGE)) is False
        lengths = {n for calls in ranks.shared.calls for n in calls}
        assert len(lengths) == 1
    finally:
        ranks.close()


def test_without_speeds_everything_is_loaded() -> None:
    assert make_rig(page_size=PAGE).cache.worth_loading(0, PAGE)
