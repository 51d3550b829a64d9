"""Kind 11: what a scheduler step costs is bounded by what it moves, and not by what is there.

Work is counted in calls of Python functions of the package, so no clock and no other load on the machine
matters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import hicache_ext
from benchmarks.trace_replay_run import SCOPE, Instant, Pool
from hicache_ext.core.cache import CacheConfig, TieredCache
from hicache_ext.core.header import Labels
from hicache_ext.core.policy.costs import CostModel
from hicache_ext.core.policy.make import NAMES, make_policy

PACKAGE = str(Path(hicache_ext.__file__).parent)
RUN = 8
"""Tokens of a prompt; each is a node of its own below the root."""

every_policy = pytest.mark.parametrize("name", NAMES)


def work(step: Callable[[], object]) -> int:
    """Calls of the package's functions that ``step`` makes."""
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(before)
    return calls


class Later(Instant):
    """Backups that complete when they are told to."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[int] = []
        self.tokens = 0

    def backup(self, seq: int, slots: list[np.ndarray], pages: np.ndarray, labels: Labels) -> None:
        self.started.append(seq)
        self.tokens += len(pages)

    def complete(self) -> None:
        for seq in self.started:
            self.backups.post(seq)
        self.started.clear()

    drain = complete


def cache_of(
    name: str,
    prompts: int,
    *,
    host: int = 0,
    each_a_job: bool = False,
    tick_limit: int = 64,
    backup_limit: int = 1 << 16,
    length: int = RUN,
) -> tuple[TieredCache, Later]:
    """A server that has computed ``prompts`` different prompts and has room for no more."""
    device = prompts * length
    policy = make_policy(
        name, device_tokens=device, host_tokens=host * device, page_size=1, costs=CostModel()
    )
    pool, transfers = Pool(device), Later()
    config = CacheConfig(1, host * device, evict_granule=1, tick_limit=tick_limit, backup_limit=backup_limit)
    cache = TieredCache(config, policy, pool, transfers)
    for number in range(prompts):
        tokens = np.arange(number * length, (number + 1) * length, dtype=np.int64)
        slots = pool.alloc(length)
        assert slots is not None
        cache.insert(SCOPE, tokens, slots)
        if each_a_job:
            cache.flush_backups()
    return cache, transfers


def finish_backups(cache: TieredCache, transfers: Later) -> None:
    while cache.pending():
        cache.flush_backups()
        transfers.complete()
        cache.tick()


@every_policy
def test_kind_scheduler_stalls_eviction_costs_what_it_frees(name: str) -> None:
    def cost(prompts: int, tokens: int) -> int:
        cache, _ = cache_of(name, prompts)
        cache.evict(RUN)
        freed: list[int] = []
        calls = work(lambda: freed.append(cache.evict(tokens)))
        assert freed == [tokens]
        return calls

    few, many = cost(250, 6 * RUN), cost(250, 60 * RUN)
    assert many < 14 * few, "ten times as much is freed"
    assert cost(1000, 60 * RUN) < 1.5 * many + 200, "four times as much stays"


@every_policy
def test_kind_scheduler_stalls_host_eviction_costs_what_it_frees(name: str) -> None:
    def cost(prompts: int, pages: int) -> int:
        cache, transfers = cache_of(name, prompts, host=1)
        finish_backups(cache, transfers)
        cache.evict(prompts * RUN)
        cache.evict_host(RUN)
        freed: list[int] = []
        calls = work(lambda: freed.append(cache.evict_host(pages)))
        assert freed == [pages]
        return calls

    few, many = cost(250, 6 * RUN), cost(250, 60 * RUN)
    assert many < 14 * few
    assert cost(1000, 60 * RUN) < 1.5 * many + 200


@every_policy
def test_kind_scheduler_stalls_a_few_tokens_of_a_long_prompt_are_cut_off(name: str) -> None:
    """A prompt of 100,000 tokens is one node: freeing 16 of them frees 16, and looks at a handful."""
    cache, _ = cache_of(name, 1, length=100_000)
    freed: list[int] = []
    assert work(lambda: freed.append(cache.evict(16))) < 100
    assert freed == [16]


def test_kind_scheduler_stalls_a_tick_applies_no_more_than_its_limit() -> None:
    def costs(outstanding: int) -> list[int]:
        cache, transfers = cache_of("lru", outstanding, host=1, each_a_job=True, tick_limit=16)
        assert len(cache.tickets) == outstanding
        transfers.complete()
        before = len(cache.tickets)
        ticks = []
        while len(cache.tickets):
            ticks.append(work(cache.tick))
            assert before - len(cache.tickets) <= 16
            before = len(cache.tickets)
        assert cache.stats.backed_up == outstanding * RUN
        return ticks

    assert max(costs(640)) <= max(costs(64)) + 20


@pytest.mark.parametrize("outstanding", [0, 200])
def test_kind_scheduler_stalls_a_tick_without_news_costs_the_same_in_any_tree(outstanding: int) -> None:
    def cost(prompts: int) -> int:
        cache, transfers = cache_of("lru", prompts, host=1, each_a_job=True)
        if not outstanding:
            finish_backups(cache, transfers)
        cache.tick()
        return work(cache.tick)

    assert cost(1000) == cost(outstanding or 10)


def test_kind_scheduler_stalls_backups_of_many_tokens_are_spread_over_steps() -> None:
    cache, transfers = cache_of("lru", 3, host=1, length=10_000, backup_limit=1000)
    steps = []
    while cache.pending():
        before = transfers.tokens
        steps.append(work(cache.flush_backups))
        assert transfers.tokens - before <= 1000
        transfers.complete()
        cache.tick()
    assert transfers.tokens == 30_000 and len(steps) >= 30
    assert max(steps) < 2000
