"""Two servers on two hosts share one Mooncake store: a chat goes on wherever its next request arrives."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.netns import Host, network, unusable
from tests.server.remote import (
    Chats,
    HostServer,
    MooncakeUp,
    chat_remote,
    outputs,
    share_of_bound,
    store_hits,
    stored,
    story,
    think,
    tiny_remote,
    wait_up,
)
from tests.server.workload import assert_all_back, tiny_model

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

ENOUGH = 0.95


@pytest.fixture(scope="module")
def hosts() -> Iterator[dict[str, Host]]:
    if (reason := unusable()) is not None:
        pytest.skip(reason)
    with network("one", "two", "store") as made:
        yield made


def play(chats: Chats, rounds: int, *servers: HostServer) -> None:
    """With two servers, every session changes its server with every round."""
    for server in servers:
        wait_up(server)
    for number in range(rounds):
        chats.play_round(number, servers)
        think(*servers)


def check(chats: Chats, alone: Chats, one: HostServer, two: HostServer) -> None:
    """``alone`` is the same on one server, under a salt that no page of the others has."""
    later = [turn for turn in chats.turns if turn.round > 0]
    shares = [(turn.answer.cached_tokens, turn.bound) for turn in later]
    assert share_of_bound(later) >= ENOUGH, (shares, story(one), story(two))
    for server in (one, two):
        assert store_hits(server) > 0 and stored(server) > 0
    assert outputs(chats.turns) == outputs(alone.turns)
    for server in (one, two):
        assert_all_back(server)


def test_kind_written_but_never_read_back_chats_move_between_hosts(
    hosts: dict[str, Host],
    start_mooncake: Callable[..., MooncakeUp],
    float32_model_path: Path,
    tmp_path: Path,
) -> None:
    master = start_mooncake(hosts["store"])
    urls = [master.url(segment_gb=0.3)]
    chats, alone = Chats(4, 300, 60, 12), Chats(4, 300, 60, 12, salt="alone")
    start = partial(chat_remote, float32_model_path, urls=urls, fetch="always")
    with start(tmp_path / "one", host=hosts["one"]) as one:
        with start(tmp_path / "two", host=hosts["two"]) as two:
            play(chats, 4, one, two)
            play(alone, 4, one)
            check(chats, alone, one, two)


@pytest.mark.long
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
def test_kind_different_parallelism_no_sharing_tp_1_and_tp_2(
    hosts: dict[str, Host],
    start_mooncake: Callable[..., MooncakeUp],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Both ranks read what one rank has written, and the other way round."""
    model = tiny_model(tmp_path_factory)
    master = start_mooncake(hosts["store"])
    urls = [master.url(segment_gb=0.1)]
    chats, alone = Chats(2, 900, 80, 4), Chats(2, 900, 80, 4, salt="alone")
    with tiny_remote(model, tmp_path / "one", urls, host=hosts["one"], fetch="always") as one:
        with tiny_remote(model, tmp_path / "two", urls, host=hosts["two"], ranks=2, fetch="always") as two:
            assert len(two.schedulers()) == 2
            play(chats, 3, one, two)
            play(alone, 3, one)
            check(chats, alone, one, two)
