"""The hosts that other tests use: they reach each other, can be cut off, slowed down, and leave nothing."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.netns import Host, cannot_limit, network, unusable

PORT = 7000
# Sends back the number of bytes that it got until the other side has closed.
COUNTER = """
import socket, sys
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
while True:
    connection, _ = server.accept()
    count = 0
    while piece := connection.recv(1 << 16):
        count += len(piece)
    connection.sendall(str(count).encode())
    connection.close()
"""
SENDER = """
import socket, sys, time
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[4])) as connection:
    begin = time.monotonic()
    connection.sendall(bytes(int(sys.argv[3])))
    connection.shutdown(socket.SHUT_WR)
    assert connection.recv(100).decode() == sys.argv[3]
    print(time.monotonic() - begin)
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[dict[str, Host]]:
    if (reason := unusable()) is not None:
        pytest.skip(reason)
    with network("a", "b") as made:
        for host in made.values():
            command = [sys.executable, "-c", COUNTER, host.address, str(PORT)]
            process = host.popen(command, stdout=subprocess.PIPE)
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield made


def send(count: int, to: Host, of: Host | None = None, timeout: float = 20) -> float | None:
    """Seconds to bring ``count`` bytes there; None if they do not arrive."""
    command = [sys.executable, "-c", SENDER, to.address, str(PORT), str(count), str(timeout)]
    done = subprocess.run(of.command(command) if of else command, capture_output=True, text=True)
    return float(done.stdout) if done.returncode == 0 else None


def test_hosts_reach_each_other_and_are_reached_from_here(hosts: dict[str, Host]) -> None:
    assert send(1000, hosts["b"], hosts["a"]) is not None
    assert send(1000, hosts["a"]) is not None


def test_loopback_is_each_hosts_own(hosts: dict[str, Host]) -> None:
    local = Host(hosts["a"].namespace, "127.0.0.1", "", "")
    assert send(10, local, hosts["a"], timeout=1) is None
    with socket.create_server(("127.0.0.1", PORT)):
        assert send(10, local, hosts["a"], timeout=1) is None


@pytest.mark.slow
def test_a_cut_is_silent_and_heals(hosts: dict[str, Host]) -> None:
    with socket.create_connection((hosts["a"].address, PORT), timeout=10) as connection:
        hosts["a"].cut()
        # Accepted by this side, and nobody says that it does not arrive.
        connection.sendall(b"x" * 100)
        assert send(1, hosts["a"], hosts["b"], timeout=0.5) is None
        connection.settimeout(0.3)
        connection.shutdown(socket.SHUT_WR)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        hosts["a"].heal()
        connection.settimeout(20)
        assert connection.recv(10) == b"100"
    assert send(1, hosts["a"], hosts["b"]) is not None


@pytest.mark.slow
def test_a_limit_slows_down_in_proportion(hosts: dict[str, Host]) -> None:
    if (reason := cannot_limit(hosts["b"])) is not None:
        pytest.skip(reason)
    hosts["b"].limit(4e6)
    slow = send(2_000_000, hosts["b"], hosts["a"])
    hosts["b"].limit(16e6)
    fast = send(2_000_000, hosts["b"], hosts["a"])
    hosts["b"].limit(None)
    assert slow is not None and fast is not None
    # Four times by the limits; a machine that is busy makes both slower.
    assert slow / fast > 2
    assert slow > 0.9 * 2_000_000 / 4e6


def test_nothing_is_left() -> None:
    if (reason := unusable()) is not None:
        pytest.skip(reason)
    with network("gone") as made:
        process = made["gone"].popen(["sleep", "60"])
        command = made["gone"].command(["readlink", "/proc/self/ns/net"])
        inside = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        assert inside not in ("", str(Path("/proc/self/ns/net").readlink()))
    assert process.poll() is not None
    for what in (["netns", "list"], ["link"]):
        text = subprocess.run(["ip", *what], capture_output=True, text=True).stdout
        assert made["gone"].namespace not in text and f"{made['gone'].switch.partition('-')[0]}o" not in text


def test_a_failure_inside_leaves_nothing_either() -> None:
    if (reason := unusable()) is not None:
        pytest.skip(reason)
    begin = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        with network("gone") as made:
            raise ZeroDivisionError
    assert (
        made["gone"].namespace
        not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    )
    assert time.monotonic() - begin < 60
