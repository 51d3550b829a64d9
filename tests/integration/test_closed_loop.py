"""Closed loops of clients: what fits in host and device together stays, and what does not moves on."""

from __future__ import annotations

import pytest

from benchmarks.token_load import Load
from tests.integration.closed_loop import Machine, Request, Server, churn, play, turns

LOAD = Load()
MAY_LOSE = 0.002
"""Of the prompt tokens."""
CLIENTS = [
    Machine(latency=latency, spread=spread, jitter=jitter)
    for latency in (0.008, 0.014)
    for spread, jitter in ((0.0004, 0.001), (0.0008, 0.003), (0.0015, 0.008))
]
ALL_AT_ONCE = Machine(latency=0.004, spread=0.0002, jitter=0.003)
SLOW_BUS = [
    Machine(latency=0.004, spread=0.0008, jitter=0.003, to_device=25e9, to_host=25e9),
    Machine(latency=0.03, spread=0.0002, jitter=0.0005, to_device=25e9, to_host=45e9, launch=0.04),
]


def cached_shares(done: list[Request]) -> list[float]:
    """Of each pass, of the rounds from the second."""
    later = [r for r in done if r.round > 0]
    return [
        sum(r.cached for r in later if r.pass_ == n) / sum(len(r.tokens) for r in later if r.pass_ == n)
        for n in range(LOAD.passes)
    ]


@pytest.fixture(scope="module")
def limit() -> list[float]:
    server = Server(CLIENTS[0], device_pages=9400, host_pages=1)
    return cached_shares(play(server, turns(LOAD), LOAD.concurrency))


def assert_all_back(server: Server) -> None:
    server.cache.drain()
    server.cache.tick()
    server.cache.check()
    assert server.device.available() + server.cache.tree.evictable_tokens == server.device.total


@pytest.mark.parametrize("machine", [*CLIENTS, ALL_AT_ONCE, *SLOW_BUS])
def test_the_cached_share_is_that_of_a_pool_that_holds_everything(
    machine: Machine, limit: list[float]
) -> None:
    """Device and host hold 309,000 tokens, sessions come to 266,000, and requests in flight to 66,000."""
    server = Server(machine, device_pages=1024, host_pages=3810)
    done = play(server, turns(LOAD), LOAD.concurrency)
    for found, best in zip(cached_shares(done), limit, strict=True):
        assert found >= best - MAY_LOSE
    assert server.cache.stats.evicted_lost == 0
    assert_all_back(server)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("host_pages", [256, 96, 0])
@pytest.mark.parametrize(("bus", "seed"), [(52e9, 6), (2e9, 1), (5e8, 1), (2e8, 1)])
def test_evictions_end_where_requests_take_each_others_room(bus: float, seed: int, host_pages: int) -> None:
    """The device holds three requests, and the host a part of what is asked for again."""
    machine = Machine(to_device=bus, to_host=bus)
    server = Server(machine, device_pages=64, host_pages=host_pages, page=16)
    assert len(play(server, churn(600, seed), 8, seed)) == 600
    assert server.cache.stats.loaded > 0 or not host_pages
    assert server.cache.stats.evict_waits < 2 * 600
    assert_all_back(server)
