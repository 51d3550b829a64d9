"""A store killed, frozen, slow, cut off, full: no request fails or waits, and the tier comes back.

Waits are compared with a server that has no store, asked the same in turns in the same run.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.netns import Host, cannot_limit, network, unusable
from tests.server.remote import (
    HostServer,
    InTurns,
    MooncakeUp,
    Segment,
    nudge,
    percentile,
    settled_hits,
    stop,
    stored,
    story,
    think,
    tiny_remote,
    up,
    wait_up,
    working,
)
from tests.server.workload import assert_all_back, prompt, tiny_model, wait_until
from tests.stores.conftest import missing_mooncake

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

TOKENS, PROMPTS = 620, 24
"""Three times what the device and the host hold together."""
HOST = 3072
MAY_WAIT_S = 0.1
BACK_S = 10.0


@dataclass
class Rig:
    """A server whose store is on another host, and one without."""

    hosts: dict[str, Host]
    master: MooncakeUp
    segment: Segment
    server: HostServer
    plain: HostServer
    times: InTurns = field(default_factory=InTurns)

    def ask(self, seeds: list[int]) -> None:
        """The same prompts to both, in turns; any failed request raises, and answers are equal."""
        before = self.times.equal
        self.times.ask([prompt(seed, TOKENS) for seed in seeds], self.server, self.plain)
        assert self.times.equal - before == len(seeds)

    def use_store(self, seconds: float = 30.0) -> None:
        """Ask old prompts until the server has learned that its store is worth it."""
        end = time.monotonic() + seconds
        first = 0
        while not self.hits_of([(first + i) % PROMPTS for i in range(6)]):
            assert time.monotonic() < end, ("the store is not used", story(self.server))
            first += 6

    def hits_of(self, seeds: list[int]) -> float:
        before = settled_hits(self.server)
        for seed in seeds:
            self.server.generate(input_ids=prompt(seed, TOKENS), max_new_tokens=1)
        return settled_hits(self.server) - before


@pytest.fixture
def rig(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Rig]:
    for reason in (unusable(), missing_mooncake()):
        if reason is not None:
            pytest.skip(reason)
    model = tiny_model(tmp_path_factory)
    megabytes = getattr(request, "param", 256)
    with network("server", "store") as hosts, ExitStack() as stack:
        master = MooncakeUp(tmp_path, hosts["store"]).start()
        stack.callback(master.close)
        segment = Segment(master, megabytes, hosts["store"])
        stack.callback(segment.close)
        urls = [master.url(segment_gb=0)]
        server = stack.enter_context(
            tiny_remote(model, tmp_path / "server", urls, host=hosts["server"], host_tokens=HOST)
        )
        plain = stack.enter_context(tiny_remote(model, tmp_path / "plain", [], host_tokens=HOST))
        wait_up(server)
        made = Rig(hosts, master, segment, server, plain)
        made.ask(list(range(PROMPTS)))
        think(server)
        if megabytes > 100:
            # One that holds a third of the prompts, asked in turn, has always just evicted the next.
            made.use_store()
        made.times = InTurns()
        yield made


def kill_master(rig: Rig) -> None:
    rig.master.kill()


def restart_master(rig: Rig) -> None:
    rig.master.start()


def freeze_master(rig: Rig) -> None:
    rig.master.freeze()


def thaw_master(rig: Rig) -> None:
    rig.master.thaw()


def freeze_segment(rig: Rig) -> None:
    stop(rig.segment.pid)


def thaw_segment(rig: Rig) -> None:
    os.kill(rig.segment.pid, signal.SIGCONT)


def cut(rig: Rig) -> None:
    rig.hosts["store"].cut()


def heal(rig: Rig) -> None:
    rig.hosts["store"].heal()


def slow(rig: Rig) -> None:
    if (reason := cannot_limit(rig.hosts["store"])) is not None:
        pytest.skip(reason)
    rig.hosts["store"].limit(10e6)


def fast(rig: Rig) -> None:
    rig.hosts["store"].limit(None)


OUTAGES: dict[str, tuple[Callable[[Rig], None], Callable[[Rig], None]]] = {
    "master killed": (kill_master, restart_master),
    "master frozen": (freeze_master, thaw_master),
    "memory frozen": (freeze_segment, thaw_segment),
    "cut off": (cut, heal),
    "10 MB/s": (slow, fast),
}


@pytest.mark.parametrize(
    ("outage", "measured"),
    [("master killed", False), *(pytest.param(outage, True, marks=pytest.mark.long) for outage in OUTAGES)],
)
def test_kind_backend_down_means_server_down(outage: str, measured: bool, rig: Rig) -> None:
    """``measured``: waits are compared, which a busy machine spoils."""
    breaks, heals = OUTAGES[outage]
    breaks(rig)
    try:
        # Old prompts, which the store has, and new ones.
        for part in range(2):
            rig.ask(list(range(PROMPTS // 2)) + list(range(100 + 12 * part, 112 + 12 * part)))
    finally:
        heals(rig)
    healed = time.monotonic()
    wait_until("the store is in use again", lambda: working(rig.server), BACK_S, step=0.2)
    # In use means written to and read from, also by a master that forgot all.
    before = stored(rig.server)
    seeds = list(range(200, 212))
    rig.hits_of(seeds)
    left = BACK_S - (time.monotonic() - healed)
    wait_until("pages are stored again", lambda: working(rig.server) and stored(rig.server) > before, left)
    print(f"{outage}: stored again {time.monotonic() - healed:.1f} s after it was healed")
    think(rig.server)
    rig.ask(list(range(300, 312)))
    think(rig.server)
    end = time.monotonic() + BACK_S
    while not rig.hits_of(seeds):
        assert time.monotonic() < end, story(rig.server)
    if measured:
        check_waits(outage, rig)
    assert_all_back(rig.server)


@pytest.mark.long
@pytest.mark.parametrize("rig", [16], indirect=True, ids=["16 MB"])
def test_a_full_store_costs_nothing(rig: Rig) -> None:
    """A third of the prompts fits: the master evicts, or declines."""
    rig.ask(list(range(PROMPTS)) + list(range(300, 324)))
    check_waits("full", rig)
    nudge(rig.server)
    assert up(rig.server)
    assert_all_back(rig.server)


def check_waits(what: str, rig: Rig) -> None:
    without, waited = percentile(rig.times.without, 0.99), percentile(rig.times.with_store, 0.99)
    print(f"{what}: 99th percentile {waited:.3f} s, without a store {without:.3f} s")
    # Mooncake's client polls a server that does not answer, which takes one of two cores from the model.
    if what != "memory frozen":
        assert waited <= without + MAY_WAIT_S, (
            sorted(rig.times.with_store)[-5:],
            sorted(rig.times.without)[-5:],
        )
