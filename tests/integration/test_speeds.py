"""How fast this server is: measured on the engine's own copies, and the same on all ranks from the start."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from hicache_ext.core.header import NAMESPACE_BYTES, Integrity, Labels
from hicache_ext.core.page import IDENTITY_BYTES
from hicache_ext.core.policy.costs import CostModel
from hicache_ext.core.speeds import MEASURED_BYTES, Speeds
from hicache_ext.integration.speeds import LoadClock, PrefillClock, agreed_speeds, load_bandwidth
from hicache_ext.transfer.device_kv import DeviceKV
from hicache_ext.transfer.engine import ThreadEngine
from hicache_ext.transfer.host_pool import HostPagePool
from hicache_ext.transfer.layout import Component, PageLayout
from hicache_ext.transfer.seal import Seal
from tests.core.fakes import Ranks, make_rig
from tests.transfer.loading import load

pytestmark = pytest.mark.timeout(60)

LAYOUT = PageLayout(4, 2, torch.float32, (Component("K", 2, 64), Component("V", 2, 64)), 2)
PAGES = 200
COSTS = CostModel(token=1e-3, depth=1e-8)


def engine_of(pages: int = PAGES) -> tuple[DeviceKV, HostPagePool, ThreadEngine]:
    slots = 4 * (pages + 1)
    layers = tuple(tuple(torch.randn(slots, 2, 64) for _ in range(2)) for _ in LAYOUT.components)
    kv, host = DeviceKV(LAYOUT, layers), HostPagePool(LAYOUT, pages, pinned=False)
    return kv, host, ThreadEngine(kv, host, Seal(LAYOUT, Integrity.FULL), None)


@pytest.mark.parametrize("pages", [1, PAGES])
def test_the_bandwidth_at_start_is_that_of_sound_loads(pages: int) -> None:
    kv, host, engine = engine_of(pages)
    begun = time.perf_counter()
    bandwidth = load_bandwidth(kv, host, engine)
    seconds = time.perf_counter() - begun
    # Three loads took no longer than the call, and none of them was refused.
    assert bandwidth >= pages * LAYOUT.page_bytes / seconds
    assert engine.counts.bytes_to_device == 3 * pages * LAYOUT.payload_bytes
    assert not engine.counts.refused
    assert engine.take_load_times() == []
    engine.close()


def test_loads_are_tracked_while_serving() -> None:
    kv, host, engine = engine_of()
    speeds = Speeds(COSTS, load_bandwidth=1.0)
    clock = LoadClock(speeds, engine)
    clock.step()
    assert speeds.measured.load_bandwidth == 1.0
    assert PAGES * LAYOUT.page_bytes > MEASURED_BYTES
    first = load_bandwidth(kv, host, engine)
    pages, slots = np.arange(PAGES), [torch.arange(4 * PAGES)]
    labels = Labels(np.zeros((PAGES, IDENTITY_BYTES), np.uint8), bytes(NAMESPACE_BYTES), 0)
    for _ in range(9):
        load(engine, engine.loads.done() + 1, pages, slots, labels)
        engine.drain()
    clock.step()
    assert speeds.measured.load_bandwidth > first / 1000
    assert speeds.agreed.load_bandwidth == 1.0, "agreed in a tick, not by one rank"
    engine.close()


def test_small_loads_say_nothing_about_the_bus() -> None:
    speeds = Speeds(COSTS, load_bandwidth=5e9)
    speeds.observed_load(MEASURED_BYTES - 1, 10.0, 0.0)
    assert speeds.measured.load_bandwidth == 5e9
    speeds.observed_load(MEASURED_BYTES, 10.0, 0.0)
    assert speeds.measured.load_bandwidth < 5e9


def test_kind_rank_divergent_hits_ranks_start_from_the_same_speeds() -> None:
    ranks = Ranks(2, lambda reduce: make_rig(reduce=reduce))
    try:
        mine = iter([(CostModel(token=2e-4, depth=3e-9), 8e9), (CostModel(token=5e-4, depth=1e-9), 6e9)])
        told = dict(zip(map(id, ranks.rigs), mine, strict=True))
        made = ranks.each(lambda rig: agreed_speeds(*told[id(rig)], LAYOUT, ["remote"], rig.cache.reduce))
        assert made[0].agreed == made[1].agreed
        assert made[0].costs.token == pytest.approx(2e-4) and made[0].costs.depth == pytest.approx(1e-9)
        assert made[0].agreed.load_bandwidth == 6e9
        assert made[0].costs.load == pytest.approx(LAYOUT.page_bytes / 4 / 6e9)
    finally:
        ranks.close()


def test_a_prefill_is_measured_from_admission_to_the_step_after_its_result() -> None:
    speeds = Speeds(COSTS)
    clock = PrefillClock(speeds)
    req = SimpleNamespace()
    clock.admitted(req)
    time.sleep(0.05)
    prefill = SimpleNamespace(is_extend=lambda: True)
    batch = SimpleNamespace(reqs=[req], forward_mode=prefill, prefix_lens=[0], extend_lens=[1000])
    assert clock.result(batch) == 1000
    clock.step()
    time.sleep(0.5)
    clock.step()
    expected = COSTS.recompute(0, 1000)
    assert 0.05 / expected <= speeds.measured.prefill_scale < 0.5 / expected
    decode = SimpleNamespace(is_extend=lambda: False)
    assert clock.result(SimpleNamespace(reqs=[req], forward_mode=decode)) == 0


@pytest.mark.parametrize("passes", [2, 8])
def test_passes_whose_results_come_late_are_not_taken_for_fast(passes: int) -> None:
    """With SGLang's overlap, a result is processed when the next pass has been launched; on a CPU it has been
    computed by then, and the last of several seems to take no time."""
    speeds = Speeds(COSTS)
    clock = PrefillClock(speeds)
    prefill = SimpleNamespace(is_extend=lambda: True)
    waiting: list[SimpleNamespace] = []
    for number in range(passes + 1):
        clock.step()
        if number < passes:
            req = SimpleNamespace()
            clock.admitted(req)
            time.sleep(0.05)
            batch = SimpleNamespace(reqs=[req], forward_mode=prefill, prefix_lens=[0], extend_lens=[1000])
            waiting.append(batch)
        if number:
            clock.result(waiting.pop(0))
    for _ in range(2):
        clock.step()
    # The first of many has one more than it should, the last one less.
    assert speeds.measured.prefill_scale >= 0.7 * 0.05 / COSTS.recompute(0, 1000)
