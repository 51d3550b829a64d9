"""The proxy that other tests put between a client and a service."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.tcp_proxy import Proxy


@pytest.fixture(scope="module")
def echo() -> Iterator[str]:
    server = socket.create_server(("127.0.0.1", 0))

    def one(connection: socket.socket) -> None:
        with connection:
            while piece := connection.recv(1 << 16):
                connection.sendall(piece)

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=one, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield f"127.0.0.1:{server.getsockname()[1]}"
    server.close()


@pytest.fixture(scope="module")
def running(echo: str) -> Iterator[Proxy]:
    with Proxy(echo) as started:
        yield started


@pytest.fixture
def proxy(running: Proxy) -> Iterator[Proxy]:
    yield running
    running.set(bytes_per_s=None, delay_s=0.0, frozen=False, refuse=False)


def connect(proxy: Proxy, timeout: float = 20) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=timeout)


def round_trip(connection: socket.socket, count: int) -> float:
    """Seconds until ``count`` bytes have come back."""
    begin = time.monotonic()
    sender = threading.Thread(target=connection.sendall, args=(bytes(count),))
    sender.start()
    got = 0
    while got < count:
        piece = connection.recv(1 << 16)
        assert piece, "the connection was closed"
        got += len(piece)
    sender.join()
    return time.monotonic() - begin


def test_it_passes_everything_on(proxy: Proxy) -> None:
    with connect(proxy) as connection:
        connection.sendall(b"hello")
        assert connection.recv(10) == b"hello"
        round_trip(connection, 1 << 20)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""


@pytest.mark.slow
def test_a_rate_slows_down_in_proportion(proxy: Proxy) -> None:
    with connect(proxy) as connection:
        proxy.set(bytes_per_s=2e6)
        slow = round_trip(connection, 1_000_000)
        proxy.set(bytes_per_s=8e6)
        fast = round_trip(connection, 1_000_000)
    assert slow > 0.9 * 1_000_000 / 2e6
    assert slow / fast > 2


def test_a_delay_counts_both_ways(proxy: Proxy) -> None:
    with connect(proxy) as connection:
        round_trip(connection, 1)
        proxy.set(delay_s=0.1)
        assert round_trip(connection, 1) >= 0.2


def test_frozen_it_holds_what_there_is(proxy: Proxy) -> None:
    with connect(proxy) as connection:
        round_trip(connection, 1)
        proxy.set(frozen=True)
        connection.sendall(b"later")
        with connect(proxy, timeout=0.2) as other:
            other.sendall(b"x")
            with pytest.raises(TimeoutError):
                other.recv(1)
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        proxy.set(frozen=False)
        connection.settimeout(20)
        assert connection.recv(10) == b"later"


def test_refusing_it_drops_what_there_is(proxy: Proxy) -> None:
    with connect(proxy) as connection:
        round_trip(connection, 1)
        proxy.set(refuse=True)
        with pytest.raises(OSError):
            # Reset, or closed at once.
            if connection.recv(1) == b"":
                raise OSError
        with connect(proxy) as other, pytest.raises(OSError):
            other.sendall(b"x")
            if other.recv(1) == b"":
                raise OSError
    proxy.set(refuse=False)
    with connect(proxy) as connection:
        round_trip(connection, 100)
