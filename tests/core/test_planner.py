"""The planner: what is fetched, how long anyone waits for it, and what comes of it in a simulated server."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_ext.core.planner import ALWAYS, FetchPlan, Planner, PlanSettings
from hicache_ext.core.policy.costs import CostModel
from hicache_ext.core.speeds import KEPT, Speeds, StoreRate
from tests.core.planner_sim import Simulation, World, prompts

PAGE = 64
PAGE_BYTES = 8 << 20
GPU = CostModel()
SETTINGS = PlanSettings()


def planner(
    bandwidth: float = 5e9,
    latency: float = 5e-4,
    *,
    costs: CostModel = GPU,
    load: float = 25e9,
    settings: PlanSettings | None = None,
) -> Planner:
    speeds = Speeds(costs, {"store": StoreRate(latency, bandwidth, True)}, load_bandwidth=load)
    # As if the store had just been used: no trial is due.
    speeds.observed_fetch("store", 1 << 30, latency + (1 << 30) / bandwidth, now=0.0)
    return Planner(speeds, PAGE, PAGE_BYTES, settings)


rates = st.floats(1e6, 1e11)
latencies = st.floats(1e-5, 0.1)
starts = st.integers(0, 2000).map(lambda pages: pages * PAGE)
counts = st.integers(0, 800)
waits = st.floats(0, 5)
costs = st.builds(CostModel, token=st.floats(1e-6, 1e-2), depth=st.floats(0, 1e-7))
queues = st.integers(0, 1 << 34)


@given(rates, rates, latencies, starts, counts, waits, queues, costs)
def test_a_faster_store_never_means_fewer_pages(
    one: float, two: float, latency: float, start: int, pages: int, ahead: float, queued: int, cost: CostModel
) -> None:
    slow, fast = (
        planner(bandwidth, latency, costs=cost).plan_fetch(
            "store", start, pages, 1.0, ahead=ahead, queued_bytes=queued
        )
        for bandwidth in sorted((one, two))
    )
    assert slow.pages <= fast.pages <= pages


@given(rates, latencies, latencies, starts, counts, waits, costs)
def test_a_quicker_answer_never_means_fewer_pages(
    bandwidth: float, one: float, two: float, start: int, pages: int, ahead: float, cost: CostModel
) -> None:
    slow, fast = (
        planner(bandwidth, latency, costs=cost).plan_fetch("store", start, pages, 1.0, ahead=ahead)
        for latency in sorted((one, two), reverse=True)
    )
    assert slow.pages <= fast.pages


@given(rates, latencies, starts, counts, waits, queues, costs, st.floats(1e8, 1e11))
def test_a_plan_is_never_expected_later_than_recomputation(
    bandwidth: float,
    latency: float,
    start: int,
    pages: int,
    ahead: float,
    queued: int,
    cost: CostModel,
    load: float,
) -> None:
    p = planner(bandwidth, latency, costs=cost, load=load)
    plan = p.plan_fetch("store", start, pages, 1.0, ahead=ahead, queued_bytes=queued)
    assert plan.finish <= plan.recompute_finish + 1e-9
    assert plan.expected <= plan.finish
    if plan.pages:
        assert plan.wait and 1 <= plan.window <= plan.pages


def test_always_fetches_what_is_slower_than_recomputing_and_waits_for_it() -> None:
    p = planner(3e7, 0.1, settings=ALWAYS)
    assert p.plan_lookup("store", 0, 4096, 1.0).deadline >= 1.5
    plan = p.plan_fetch("store", 0, 50, 1.0)
    assert plan.wait and plan.pages == 50 and plan.deadline >= 2.0
    p.ended(plan, 0, 2.0)
    assert p.plan_fetch("store", 0, 50, 2.0).wait, "and goes on after a failure"


def test_a_fetch_that_is_withdrawn_says_nothing_of_the_store() -> None:
    p = planner()
    for _ in range(5):
        plan = p.plan_fetch("store", 0, 50, 1.0)
        assert plan.wait
        p.withdrawn(plan, 1.01)
        p.withdrawn(plan, 1.01)
        p.ended(plan, 0, 1.02)
    honesty = p.honesty("store")
    assert (honesty.fetches, honesty.failed, honesty.abandoned, honesty.lost_seconds) == (0, 0, 0, 0.0)
    assert p._stores["store"].queued == 0
    assert p.plan_fetch("store", 0, 50, 1.03).wait, "it is not distrusted"


@given(rates, latencies, starts, counts, waits, st.floats(0, 0.5), st.lists(st.integers(1, 50), max_size=8))
def test_a_request_waits_at_most_its_allowance_longer_than_recomputation_takes(
    bandwidth: float,
    latency: float,
    start: int,
    pages: int,
    ahead: float,
    held: float,
    arrivals: list[int],
) -> None:
    p = planner(bandwidth, latency)
    now = 1.0 + held
    plan = p.plan_fetch("store", start, pages, now, since=1.0, ahead=ahead)
    computed = p.speeds.measured.recompute(start, plan.pages * PAGE)
    if not plan.wait:
        return
    assert now < plan.deadline <= 1.0 + max(ahead, SETTINGS.max_loss, SETTINGS.loss_share * computed) + 1e-9
    assert plan.deadline <= 1.0 + max(ahead, 0.08), "an outage may cost 100 ms, a scheduler step included"
    done = 0
    for count in arrivals:
        now, before, done = now + 0.001, plan.deadline, min(done + count, plan.pages)
        p.arrived(plan, done, now)
        saved = p.speeds.measured.recompute(start, done * PAGE)
        assert before <= plan.deadline <= 1.0 + max(ahead, SETTINGS.max_loss) + saved + 1e-9
    p.ended(plan, done, now)


@given(rates, latencies, starts, st.integers(0, 100_000), waits)
def test_a_lookup_is_waited_for_briefly_and_only_if_a_hit_would_pay(
    bandwidth: float, latency: float, start: int, tokens: int, ahead: float
) -> None:
    p = planner(bandwidth, latency)
    plan = p.plan_lookup("store", start, tokens, 1.0, ahead=ahead)
    computed = p.speeds.measured.recompute(start, tokens)
    longest = max(ahead, min(SETTINGS.max_lookup, SETTINGS.lookup_share * computed))
    assert plan.deadline <= 1.0 + longest + 1e-9
    if plan.deadline > 1.0:
        assert plan.ask
        assert p._best(p.speeds.measured, p.speeds.measured.stores["store"], start, tokens // PAGE, ahead, 0)


def test_pages_are_fetched_while_the_request_waits_for_others_anyway() -> None:
    """A store too slow for all of them brings what it can until the request's turn."""
    alone = planner(1.5e9).plan_fetch("store", 0, 100, 1.0)
    behind = planner(1.5e9).plan_fetch("store", 0, 100, 1.0, ahead=0.2)
    assert alone.pages == 0 and 20 < behind.pages < 40
    assert behind.deadline == pytest.approx(1.2)


def test_a_turn_that_comes_early_ends_the_wait() -> None:
    p = planner()
    lookup = p.plan_lookup("store", 0, 6400, 1.0, ahead=5.0)
    p.turn_came(lookup, 1.5)
    assert lookup.deadline == 1.5
    idle = p.plan_lookup("store", 0, 6400, 1.0, ahead=5.0)
    p.turn_came(idle, 1.0)
    assert 1.0 < idle.deadline <= 1.0 + SETTINGS.max_lookup
    plan = p.plan_fetch("store", 0, 100, 1.0, ahead=5.0)
    later = plan.deadline
    p.arrived(plan, 50, 1.3)
    p.turn_came(plan, 1.5)
    saved = GPU.recompute(0, 50 * PAGE) - 50 * PAGE_BYTES / 25e9
    assert plan.deadline == pytest.approx(1.5 + saved) and plan.deadline < later
    p.turn_came(plan, 1.6)
    assert plan.deadline == pytest.approx(1.5 + saved), "only the first time counts"


def test_what_is_queued_on_the_store_counts() -> None:
    p = planner(5e9)
    assert p.plan_fetch("store", 0, 100, 1.0, queued_bytes=4 << 30).pages == 0
    first = p.plan_fetch("store", 0, 200, 1.0)
    assert first.pages == 200
    assert p.plan_fetch("store", 0, 50, 1.0).pages == 0
    p.arrived(first, 195, 1.3)
    assert p.plan_fetch("store", 0, 50, 1.3).pages == 50


def test_nobody_waits_for_a_store_of_unknown_speed() -> None:
    speeds = Speeds(GPU, ["store"])
    p = Planner(speeds, PAGE, 1 << 20)
    lookup = p.plan_lookup("store", 0, 100 * PAGE, 1.0)
    assert lookup.ask and lookup.deadline == 1.0
    p.looked_up(lookup, 100, 1.001)
    plan = p.plan_fetch("store", 0, 100, 1.001, since=1.0)
    assert not plan.wait and plan.pages == SETTINGS.trial_bytes >> 20
    assert p.plan_fetch("store", 0, 100, 1.001).pages == 0, "one trial at a time"
    speeds.observed_fetch("store", plan.pages << 20, 0.002, 1.003)
    p.ended(plan, plan.pages, 1.003)
    plan = p.plan_fetch("store", 0, 100, 1.003)
    assert plan.wait and plan.pages == 100


def test_a_slow_store_is_measured_again_now_and_then_and_nobody_waits() -> None:
    p = planner(20e6)
    busy, trials, now = 0.0, 0, 0.0
    while now < 1000:
        plan = p.plan_fetch("store", 0, 100, now)
        assert not plan.wait
        if plan.pages:
            seconds = plan.pages * PAGE_BYTES / 20e6
            p.speeds.observed_fetch("store", plan.pages * PAGE_BYTES, seconds, now + seconds)
            p.ended(plan, plan.pages, now + seconds)
            busy, trials = busy + seconds, trials + 1
        now += 0.1
    assert 20 <= trials <= 5 + 1000 / SETTINGS.max_trial_interval and busy <= SETTINGS.trial_share * 1000 + 1
    assert p.honesty().trials == trials and not p.honesty().fetches


def test_the_longer_a_store_is_slow_the_less_it_is_measured() -> None:
    p = planner(20e6)
    trials: list[float] = []
    for now in np.arange(0.0, 200.0, 0.05).tolist():
        plan = p.plan_fetch("store", 0, 100, now)
        if not plan.pages:
            continue
        trials.append(now)
        # At 100 s it is fast, for once.
        seconds = 0.001 if len(trials) > 1 and trials[-2] < 100 <= now else 0.1
        p.arrived(plan, 1, now + seconds)
        p.ended(plan, 1, now + seconds)
    gaps = np.diff(trials)
    paid = next(number for number, begin in enumerate(trials) if begin >= 100)
    assert gaps[:paid] == pytest.approx([5, 10, *[20] * (paid - 2)], abs=0.3)
    assert gaps[paid:] == pytest.approx([5, 5, 10, *[20] * (len(gaps) - paid - 3)], abs=0.3)


def test_a_store_that_brings_nothing_is_left_alone_for_longer_and_longer() -> None:
    p = planner()

    def fast(now: float) -> None:
        for _ in range(KEPT):
            p.speeds.observed_fetch("store", 1 << 30, (1 << 30) / 5e9, now)

    pauses = []
    now = 1.0
    for _ in range(8):
        fast(now)
        side_by_side = [p.plan_fetch("store", 0, 50, now, ahead=1.0) for _ in range(5)]
        for plan in side_by_side:
            assert plan.wait
            p.ended(plan, 0, now + 0.01)
        fast(now + 0.01)
        assert not p.plan_fetch("store", 0, 50, now + 0.02).wait
        again = next(
            t for t in (now + 0.25 * i for i in range(400)) if p.plan_lookup("store", 0, 4096, t).deadline > t
        )
        pauses.append(again - now)
        now = again
    assert pauses[0] == pytest.approx(SETTINGS.pause, abs=0.3), "five at once are one failure"
    assert pauses == sorted(pauses) and pauses[-1] == pytest.approx(SETTINGS.max_pause, abs=0.3)
    plan = p.plan_fetch("store", 0, 50, now)
    p.ended(plan, 50, now + 0.1)
    plan = p.plan_fetch("store", 0, 50, now + 0.1)
    p.ended(plan, 0, now + 0.2)
    fast(now + 0.2)
    assert p.plan_fetch("store", 0, 50, now + 0.3 + SETTINGS.pause).wait, "what it brought is not forgotten"


def small(bandwidth: float = 1e9, latency: float = 2e-3, page_bytes: int = 360 << 10) -> Planner:
    """A page takes 16 ms to compute."""
    speeds = Speeds(CostModel(token=1e-3, depth=0.0), {"store": StoreRate(latency, bandwidth, True)})
    speeds.observed_fetch("store", 16 << 20, latency + (16 << 20) / bandwidth, now=0.0)
    return Planner(speeds, 16, page_bytes)


def test_the_first_call_is_small_and_those_that_pay_grow() -> None:
    p = small()
    plan = p.plan_fetch("store", 0, 100, 1.0)
    now, done, windows = 1.0, 0, [plan.window]
    while done < plan.pages:
        now, done = now + 0.003, done + plan.window
        p.arrived(plan, done, now)
        windows.append(min(plan.window, plan.pages - done))
    assert windows[:3] == [1, 4, 16]
    assert all(window <= plan.most for window in windows)
    assert plan.most == pytest.approx(20e-3 * 1e9 / (360 << 10), abs=1)


def test_a_first_call_is_large_enough_for_the_latency_to_pay() -> None:
    plan = small(latency=0.015).plan_fetch("store", 0, 100, 1.0)
    assert 2 <= plan.window <= 3


@pytest.mark.parametrize("seconds", [0.0185, 0.03])
def test_a_fetch_that_does_not_pay_is_given_up_before_it_has_cost_much(seconds: float) -> None:
    """The store was fast, and brings 20 MB/s or less now."""
    p = small()
    plan = p.plan_fetch("store", 0, 37, 1.0)
    p.arrived(plan, 1, 1.0 + seconds)
    assert plan.deadline > 1.0 + seconds, "it may have been a stall"
    p.arrived(plan, 2, 1.0 + 2 * seconds)
    assert plan.deadline <= 1.0 + 2 * seconds
    p.arrived(plan, 2, 1.0 + 2 * seconds + 0.001)
    assert plan.deadline <= 1.0 + 2 * seconds, "and is not taken up again"
    p.ended(plan, 2, plan.deadline)
    assert p.honesty().lost_seconds == pytest.approx(2 * (seconds - 0.016), abs=2e-3)
    assert p.plan_lookup("store", 0, 592, 1.1).deadline == 1.1, "nobody waits for it for a while"
    for _ in range(KEPT):
        p.speeds.observed_fetch("store", 16 << 20, 0.016, 2.2)
    assert p.plan_lookup("store", 0, 592, 2.2).deadline > 2.2


def test_a_stall_is_no_reason_to_give_up() -> None:
    p = small()
    plan = p.plan_fetch("store", 0, 37, 1.0)
    p.arrived(plan, 1, 1.03)
    p.arrived(plan, 2, 1.032)
    p.arrived(plan, 6, 1.062)
    assert plan.deadline > 1.062 and plan.window > 1


def test_to_fetch_while_the_request_waits_for_others_always_pays() -> None:
    p = small(bandwidth=60e6)
    plan = p.plan_fetch("store", 0, 37, 1.0, ahead=0.5)
    for done in range(1, 11):
        p.arrived(plan, done, 1.0 + 0.03 * done)
    assert plan.deadline == pytest.approx(1.5)


def test_a_trial_ends_with_the_first_call_that_does_not_pay() -> None:
    p = small(bandwidth=20e6)
    plan = p.plan_fetch("store", 0, 37, 10.0)
    assert plan.pages > 4 and plan.window == 1 and not plan.wait
    p.arrived(plan, 1, 10.02)
    assert plan.deadline <= 10.02
    p.ended(plan, 1, 10.02)
    again = p.plan_fetch("store", 0, 37, 20.0)
    p.arrived(again, 1, 20.003)
    assert again.deadline > 20.003 and again.window == 4


@pytest.mark.parametrize(("seconds", "waits"), [(0.02, False), (0.003, True)])
def test_a_trial_ends_a_pause_only_if_it_pays(seconds: float, waits: bool) -> None:
    p = small()
    now = 10.0
    for _ in range(4):
        plan = p.plan_fetch("store", 0, 37, now)
        p.ended(plan, 0, now + 0.001)
        now = max(now + 0.01, p._stores["store"].paused)
    now = p._stores["store"].paused - 1.0
    plan = p.plan_fetch("store", 0, 37, now)
    assert plan.pages and not plan.wait
    p.arrived(plan, 1, now + seconds)
    p.ended(plan, 1, now + seconds)
    for _ in range(KEPT):
        p.speeds.observed_fetch("store", 16 << 20, 0.016, now + seconds)
    assert (p.plan_lookup("store", 0, 592, now + 0.1).deadline > now + 0.1) == waits


def test_a_lookup_is_not_waited_for_if_no_page_could_be() -> None:
    """A store of 22 MB/s would be a little sooner with all of them, but a page takes as long as one waits."""
    p = small(bandwidth=28e6, latency=8e-3)
    rates = p.speeds.measured
    assert p._best(rates, rates.stores["store"], 0, 37, 0.0, 0) == 37
    assert p.plan_lookup("store", 0, 592, 1.0).deadline == 1.0
    assert p.plan_lookup("store", 0, 592, 1.0, ahead=1.0).deadline == 2.0


SLOW = pytest.mark.parametrize("bandwidth", [10e6, 35e6])
"""Computing a page takes 16 ms; a store that brings it in 11 ms is too slow to be written to as well."""


@SLOW
def test_a_store_that_never_was_worth_writing_to_is_not_from_the_first_request_on(bandwidth: float) -> None:
    p = small(bandwidth=bandwidth)
    assert p.useful("store", 1.0)
    p.plan_lookup("store", 0, 592, 1.0)
    assert not p.useful("store", 1.0)


@SLOW
def test_where_everything_is_fetched_everything_is_written(bandwidth: float) -> None:
    p = planner(bandwidth, settings=ALWAYS)
    p.plan_lookup("store", 0, 592, 1.0)
    assert p.useful("store", 100.0)


@SLOW
def test_a_store_is_not_worth_writing_to_once_no_request_has_gained_by_it_for_a_while(
    bandwidth: float,
) -> None:
    p = small()
    p.plan_lookup("store", 0, 592, 0.5)
    for _ in range(KEPT):
        p.speeds.observed_fetch("store", 16 << 20, 0.002 + (16 << 20) / bandwidth, 0.6)
    assert p.useful("store", 1.0)
    p.plan_lookup("store", 0, 592, 1.0)
    assert p.useful("store", 1.0 + SETTINGS.useless - 0.1)
    p.plan_lookup("store", 0, 592, 3.0)
    assert not p.useful("store", 1.0 + SETTINGS.useless + 0.1)
    p.plan_lookup("store", 0, 8, 12.0)
    assert not p.useful("store", 12.0), "a prompt of less than a page says nothing"
    for _ in range(KEPT):
        p.speeds.observed_fetch("store", 16 << 20, 0.016, 12.0)
    p.plan_lookup("store", 0, 592, 12.0)
    assert p.useful("store", 30.0)


def test_losses_are_paid_from_a_credit_that_requests_earn_back() -> None:
    p = planner()
    now, lost, asked = 1.0, 0.0, 0.0
    for _ in range(3000):
        lookup = p.plan_lookup("store", 0, 8192, now)
        asked += GPU.recompute(0, 8192)
        if lookup.deadline > now:
            # Nothing is there, and it takes as long as one waits to say so.
            lost += lookup.deadline - now
        p.looked_up(lookup, 0, max(lookup.deadline, now + 1e-6))
        now += 1.0
    assert lost <= SETTINGS.credit + SETTINGS.credit_share * asked + SETTINGS.max_lookup
    assert p.credit("store") > -SETTINGS.max_lookup
    assert p.honesty("store").lost_seconds == pytest.approx(lost)


def test_a_plan_ends_once() -> None:
    p = planner()
    plan = p.plan_fetch("store", 0, 100, 1.0)
    p.arrived(plan, 40, 1.1)
    p.ended(plan, 40, 1.2)
    p.ended(plan, 100, 1.3)
    p.arrived(plan, 100, 1.3)
    h = p.honesty()
    assert (h.fetches, h.abandoned, h.pages_planned, h.pages_arrived) == (1, 1, 100, 40)
    assert p.plan_fetch("store", 0, 100, 1.4).expected - 1.4 < 0.2, "nothing is left in the queue"


def test_estimates_and_outcomes_are_kept() -> None:
    p = planner()
    plan = p.plan_fetch("store", 0, 100, 1.0)
    p.ended(plan, 100, 1.0 + 2 * (plan.expected - 1.0))
    h = p.honesty("store")
    assert h.whole == h.late == 1
    assert h.actual_seconds == pytest.approx(2 * h.estimated_seconds)
    assert (h + h).whole == 2


def test_threads_leave_nothing_behind() -> None:
    p = planner()

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for i in range(200):
            plan = p.plan_fetch("store", 0, int(rng.integers(300)), 1.0 + i, ahead=float(rng.random()))
            done = int(rng.integers(plan.pages + 1))
            p.arrived(plan, done, 1.1 + i)
            p.speeds.observed_fetch("store", (done + 1) * PAGE_BYTES, 0.1, 1.1 + i)
            p.ended(plan, done, 1.2 + i)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert p._stores["store"].queued == 0
    h = p.honesty()
    assert h.whole + h.abandoned == h.fetches + h.trials > 0


# A simulated server

SERVERS = {
    "8B on a GPU": (GPU, 64, 8 << 20, 25e9, (500, 16_000)),
    "small on a CPU": (CostModel(token=1e-3, depth=1e-7), 16, 360 << 10, 5e9, (100, 1500)),
}
every_server = pytest.mark.parametrize("server", SERVERS)
every_load = pytest.mark.parametrize("busy", [0.2, 0.6])
FAST = 20e9


def simulate(
    server: str,
    bandwidth: Callable[[float], float],
    *,
    busy: float = 0.4,
    prior: float = 1.0,
    latency: float = 5e-4,
    share: float = 0.9,
    count: int = 250,
    answers: bool = False,
    ahead_error: float = 1.0,
) -> tuple[Simulation, Simulation]:
    """The same load without and with the store; ``prior``: how far the measurement at start is off."""
    true, page, page_bytes, load, lengths = SERVERS[server]
    world = World(true, page, page_bytes, load, latency, bandwidth, lookups_always=answers)
    requests = prompts(1, count, lengths, world, busy=busy, share=share)
    speeds = Speeds(CostModel(true.token * prior, true.depth * prior), ["store"], load_bandwidth=load)
    with_store = Simulation(world, Planner(speeds, page, page_bytes), ahead_error)
    return Simulation(world, None).run(requests), with_store.run(requests)


def added(without: Simulation, store: Simulation) -> np.ndarray:
    return np.array([store.ttft[prompt] - ttft for prompt, ttft in without.ttft.items()])


@every_server
@every_load
@pytest.mark.parametrize("prior", [0.05, 1.0, 3.0])
def test_kind_slower_than_no_cache_with_a_store_of_20_mb_a_second(
    server: str, busy: float, prior: float
) -> None:
    without, store = simulate(server, lambda now: 20e6, busy=busy, prior=prior)
    assert store.mean() <= 1.02 * without.mean()


@every_server
@pytest.mark.parametrize("latency", [5e-4, 0.02])
def test_kind_slower_than_no_cache_with_a_store_that_never_has_anything(server: str, latency: float) -> None:
    without, store = simulate(server, lambda now: FAST, share=0.0, latency=latency)
    assert store.mean() <= 1.02 * without.mean()


@every_server
@pytest.mark.parametrize("lookups", [False, True], ids=["silent", "lookups answered"])
@pytest.mark.parametrize("ahead_error", [1.0, 3.0])
def test_kind_slower_than_no_cache_in_an_outage(server: str, lookups: bool, ahead_error: float) -> None:
    for begin in (0, 10):

        def bandwidth(now: float, begin: int = begin) -> float:
            return 0.0 if begin < now < 40 else FAST

        without, store = simulate(server, bandwidth, answers=lookups, ahead_error=ahead_error, busy=0.6)
        during = np.array([begin < prompt.arrival < 40 for prompt in without.ttft])
        assert np.quantile(added(without, store)[during], 0.99) <= 0.1
        assert store.mean(begin, 40) <= 1.02 * without.mean(begin, 40)


@every_server
def test_kind_slower_than_no_cache_with_a_store_that_changes_every_few_seconds(server: str) -> None:
    without, store = simulate(server, lambda now: FAST if now % 6 > 3 else 20e6)
    assert store.mean() <= 1.02 * without.mean()


@pytest.mark.parametrize("bandwidth", [20e6, 2e6])
def test_kind_slower_than_no_cache_when_a_store_becomes_slow(bandwidth: float) -> None:
    """Few requests find out, by calls that keep the link busy only briefly; so do later measurements."""
    # Hardly anybody waits for others: what is fetched meanwhile costs nothing, however slow.
    without, store = simulate("small on a CPU", lambda now: bandwidth if now > 200 else FAST, busy=0.05)
    assert store.mean(200) <= 1.005 * without.mean(200)
    end = max(prompt.arrival for prompt in without.ttft)
    busy = sum(seconds for begin, seconds in store.calls if begin > 200)
    page = (360 << 10) / bandwidth
    assert busy <= 50 * page + (end - 200) * page / SETTINGS.max_trial_interval


@every_server
@every_load
def test_a_fast_store_lowers_ttft(server: str, busy: float) -> None:
    without, store = simulate(server, lambda now: FAST, busy=busy)
    assert store.mean() < 0.75 * without.mean()
    assert np.quantile(added(without, store), 0.99) <= 0.1


@every_server
def test_a_store_that_is_fast_again_is_used_again(server: str) -> None:
    end = max(p.arrival for p in simulate(server, lambda now: FAST)[0].ttft)
    begin, until = 0.3 * end, 0.5 * end
    without, store = simulate(server, lambda now: 20e6 if begin < now < until else FAST)
    after = until + SETTINGS.max_trial_interval + 2 * SETTINGS.trial_interval
    assert after < 0.9 * end
    assert store.mean(begin + 1, until) <= 1.05 * without.mean(begin + 1, until)
    assert store.mean(after) < 0.75 * without.mean(after)


def test_plans_name_pages_only_where_they_fetch() -> None:
    """What the simulation relies on: a plan without pages has nothing to end."""
    _, store = simulate("8B on a GPU", lambda now: 1e9)
    assert all(isinstance(plan, FetchPlan) for plan in store.plans)
    assert all(plan.window > 0 for plan in store.plans if plan.pages)
    assert all(plan.deadline > plan.started for plan in store.plans if plan.pages)
    assert all(not math.isnan(plan.finish) for plan in store.plans)
