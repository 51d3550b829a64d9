"""Fixtures of the tests that start the real server, and a reason to skip them where it cannot run."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.netns import Host
from tests.server.harness import SGLangServer
from tests.server.remote import MooncakeUp
from tests.server.workload import assert_all_back
from tests.stores.conftest import missing_mooncake


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("sglang") is not None:
        return
    skip = pytest.mark.skip(reason="sglang is not installed; run scripts/setup.sh")
    for item in items:
        if item.get_closest_marker("server"):
            item.add_marker(skip)


@pytest.fixture
def start_server(model_path: Path, tmp_path: Path) -> Iterator[Callable[..., SGLangServer]]:
    """Start servers that end with the test: `start_server(args=[...], max_total_tokens=2048)`.

    Takes what `SGLangServer` takes; the model is the chat model in bfloat16 unless given.
    """
    servers: list[SGLangServer] = []

    def start(**options: Any) -> SGLangServer:
        options.setdefault("model", model_path)
        options.setdefault("log_path", tmp_path / f"server-{len(servers)}.log")
        server = SGLangServer(**options)
        servers.append(server)
        return server.start()

    yield start
    for server in servers:
        if server.log_path is not None and server.log_path.exists():
            # pytest shows it when the test failed.
            print(f"--- end of {server.log_path} ---\n{server.log_tail()}")
        server.stop()


@pytest.fixture
def start_mooncake(tmp_path: Path) -> Iterator[Callable[..., MooncakeUp]]:
    """Start Mooncake masters that end with the test, on a host or on loopback: `start_mooncake(host)`."""
    if (problem := missing_mooncake()) is not None:
        pytest.skip(problem)
    masters: list[MooncakeUp] = []

    def start(host: Host | None = None, *options: str) -> MooncakeUp:
        masters.append(MooncakeUp(tmp_path, host, *options))
        return masters[-1].start()

    yield start
    for master in masters:
        master.close()


@pytest.fixture
def mooncake(start_mooncake: Callable[..., MooncakeUp]) -> MooncakeUp:
    """A master on loopback that can be killed, frozen and started again."""
    return start_mooncake()


@pytest.fixture
def server(running_server: SGLangServer) -> Iterator[SGLangServer]:
    """The module's `running_server`, flushed; after the test, everything it held must be back."""
    running_server.flush()
    yield running_server
    assert_all_back(running_server)
