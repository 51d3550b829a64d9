"""Pages damaged on purpose on the real server: all are noticed, no request fails, no answer changes.

The reduced campaign runs by default. The whole one injects 10,000 faults and prints its table:

    pytest tests/faults/test_campaign.py -m campaign -s
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.faults.campaign import Answer, Faults, assert_same, faults_of, play
from tests.server.harness import SGLangServer
from tests.server.workload import assert_all_back, fill_device, tiny_model, tiny_server

pytestmark = pytest.mark.server

PAGE = 16
WHOLE = 10_000
CASES = {
    "host": ("host", 0.05, ()),
    "host, write-back, chunked": (
        "host",
        0.05,
        ("--hicache-ext-write-policy", "write-back", "--chunked-prefill-size", "128"),
    ),
    "transfer, mixed chunks, no overlap": (
        "transfer",
        0.15,
        ("--chunked-prefill-size", "192", "--enable-mixed-chunk", "--disable-overlap-schedule"),
    ),
    "host, TP 2": ("host", 0.03, ("--tp", "2")),
}


def start(model: Path, folder: Path, *flags: str) -> SGLangServer:
    folder.mkdir(exist_ok=True)
    ranks = 2 if "--tp" in flags else 1
    env: dict[str, str | None] = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if ranks == 2 else {}
    return tiny_server(
        model,
        folder,
        "--max-running-requests",
        "4",
        *flags,
        page_size=PAGE,
        ranks=ranks,
        check_every=10,
        env=env,
    )


class Truth:
    """What a server without prefix cache and without faults answers, round by round."""

    def __init__(self, server: SGLangServer) -> None:
        self.server = server
        self.answers: dict[int, list[Answer]] = {}

    def of(self, round_number: int) -> list[Answer]:
        if round_number not in self.answers:
            self.answers[round_number] = play(self.server, round_number)
        return self.answers[round_number]


def check(found: Faults) -> None:
    assert found.detected == found.met, found
    assert found.recomputed > 0, found


def settled(server: SGLangServer) -> Faults:
    """The counts once the metrics show the last of them."""
    fill_device(server, 1)
    found, before = faults_of(server), None
    while found != before:
        # The server publishes them every 0.2 seconds.
        time.sleep(1)
        found, before = faults_of(server), found
    return found


LONG = ("host, TP 2", "transfer, mixed chunks, no overlap")
"""Of what the other cases cover, one more combination each."""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    folder = tmp_path_factory.mktemp("truth")
    with tiny_server(
        tiny_model(tmp_path_factory),
        folder,
        "--max-running-requests",
        "4",
        "--disable-radix-cache",
        page_size=PAGE,
        extension=False,
    ) as server:
        return play(server, 0)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.long if case in LONG else ()) for case in CASES]
)
def test_kind_corrupt_page_from_a_lower_tier(
    case: str, expected: list[Answer], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tier, rate, flags = CASES[case]
    plan = f"tier={tier},rate={rate},seed=1"
    with start(tiny_model(tmp_path_factory), tmp_path, *flags, "--hicache-ext-inject-faults", plan) as server:
        for attempt in range(2):
            # What is damaged on the way is damaged once: write all pages again.
            server.flush()
            assert_same(play(server, 0), expected, f"pass {attempt}")
        found = settled(server)
        check(found)
        assert found.met >= 20, found
        assert {"checksum", "identity"} <= set(found.refused), found
        assert_all_back(server)


def test_integrity_off_lets_damage_pass(
    expected: list[Answer], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The campaign can fail: without checksums, damaged payloads change answers."""
    plan = "tier=host,rate=0.05,kinds=truncate+swap-kv,seed=1"
    flags = ("--hicache-ext-integrity", "off", "--hicache-ext-inject-faults", plan)
    with start(tiny_model(tmp_path_factory), tmp_path, *flags) as server:
        assert [a.tokens for a in play(server, 0)] != [a.tokens for a in expected]
        assert faults_of(server).detected < faults_of(server).met


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("tier", ["host", "transfer"])
def test_whole_campaign(tier: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Half of the faults in each tier; every fault that a load met counts."""
    model = tiny_model(tmp_path_factory)
    plan = f"tier={tier},rate=0.2,seed=2"
    (tmp_path / "truth").mkdir()
    plain = ("--max-running-requests", "4", "--disable-radix-cache")
    found, requests, rounds = Faults(), 0, 0
    with tiny_server(model, tmp_path / "truth", *plain, page_size=PAGE, extension=False) as other:
        truth = Truth(other)
        with start(model, tmp_path / "faults", "--hicache-ext-inject-faults", plan) as server:
            while found.met < WHOLE // 2:
                # Few prompts, many passes: a page is damaged again each time it has been computed again.
                expected = truth.of(rounds % 5)
                if tier == "transfer":
                    server.flush()
                assert_same(play(server, rounds % 5), expected, f"round {rounds}")
                requests, rounds = requests + len(expected), rounds + 1
                found = faults_of(server)
                print(f"{tier}: {found.met} of {WHOLE // 2} faults met in {requests} requests", flush=True)
            found = settled(server)
            check(found)
            assert_all_back(server)
    print(f"\n{tier}: injected {found.injected}\nmet {found.met}, refused {found.refused}")
    print(f"requests {requests}, started again {found.recomputed}, failed 0, with other tokens 0")
