"""Stores taken out of a running server and back: what is in them stays, and is of no use meanwhile."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server.harness import Generation
from tests.server.remote import (
    HostServer,
    MooncakeUp,
    attach,
    detach,
    nudge,
    settled_hits,
    story,
    think,
    tiny_remote,
    wait_up,
)
from tests.server.workload import assert_all_back, prompt, tiny_model, wait_until

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

TOKENS, PROMPTS = 610, 12
"""Asked in turn, none is on the device or the host when its turn comes."""
NEW_TOKENS = 2


def ask_all(server: HostServer) -> list[Generation]:
    return [
        server.generate(input_ids=prompt(seed, TOKENS), max_new_tokens=NEW_TOKENS) for seed in range(PROMPTS)
    ]


def hits(server: HostServer, expected: list[list[int]]) -> float:
    """Tokens that came from the store while all were asked; the answers must be right."""
    before = settled_hits(server)
    assert [answer.output_ids for answer in ask_all(server)] == expected
    return settled_hits(server) - before


def moved_bytes(server: HostServer) -> float:
    nudge(server)
    return server.metric("hicache_ext_store_bytes_total")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_detached_stores_are_left_alone_and_found_again(
    ranks: int, mooncake: MooncakeUp, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if (os.cpu_count() or 1) < ranks:
        pytest.skip("two ranks need two cores")
    model = tiny_model(tmp_path_factory)
    urls = [mooncake.url(segment_gb=0.2)]
    made = tiny_remote(model, tmp_path / "server", urls, ranks=ranks, host_tokens=2048, fetch="always")
    made.admin_key = "secret"
    enough = 0.5 * TOKENS * PROMPTS * ranks
    with made as server, ThreadPoolExecutor(1) as client:
        wait_up(server)
        expected = [answer.output_ids for answer in ask_all(server)]
        think(server)
        assert hits(server, expected) >= enough, story(server)
        think(server)

        # Requests may run meanwhile.
        running = client.submit(server.generate, input_ids=prompt(99, 700), max_new_tokens=200)
        wait_until("it runs", lambda: server.loads()[0]["num_running_reqs"] > 0, step=0.01)
        detach(server)
        assert len(running.result().output_ids) == 200
        before = moved_bytes(server)
        assert hits(server, expected) == 0
        assert moved_bytes(server) == before
        assert server.metric("hicache_ext_stores_attached") == 0
        assert server.metric("hicache_ext_store_up") == ranks, "it works, and is not used"
        detach(server)

        wrong = server.storage_backend("PUT", json={"hicache_storage_backend": "file"})
        assert wrong.status_code == 400 and "chosen at start" in wrong.text
        assert hits(server, expected) == 0

        attach(server)
        assert hits(server, expected) >= enough, story(server)
        assert server.metric("hicache_ext_stores_attached") == ranks
        log = server.log_text()
        assert log.count("the stores are detached") == log.count("the stores are attached") == ranks

        # A flush is one for the stores as well, also while they are detached.
        think(server)
        detach(server)
        server.flush()
        attach(server)
        wait_up(server)
        assert hits(server, expected) == 0
        think(server)
        assert hits(server, expected) >= enough, story(server)
        assert_all_back(server)
