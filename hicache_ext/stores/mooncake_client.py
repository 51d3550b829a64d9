"""Reaching Mooncake: its package, its services, and one client's life.

A client is never called after it has been closed: Mooncake crashes the process then.
"""

from __future__ import annotations

import os
import resource
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from hicache_ext.stores.base import GB, Holds, Rack, StoreError

T = TypeVar("T")

PEER_TO_PEER = "P2PHANDSHAKE"
"""Mooncake's word for working without a metadata service."""
_PREFLIGHT_S = 1.0
_LOCAL_BUFFER = 16 << 20
_RDMA_DEVICES = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class MooncakeSettings:
    master: str
    """HOST:PORT of the master."""
    metadata: str = PEER_TO_PEER
    """Address of the metadata service, such as http://HOST:PORT/metadata; or without one."""
    protocol: str = "tcp"
    """tcp or rdma."""
    device: str = ""
    """RDMA devices, separated by commas; empty: Mooncake chooses."""
    segment_gb: float = 1.0
    """Memory in GB (10^9 bytes) that this process gives to the store; with 0 it only uses that of others."""
    replicas: int = 1
    """Copies of each object, each in another process's segment."""
    host: str | None = None
    """This machine's address as others reach it; None: the one from which the master is reached."""
    soft_pin_s: float = 1800.0
    """How long a hot object is preferred over others when the store is full."""
    rpc_timeout_s: float = 1.0
    """Limit of one exchange with the master. Holds for all Mooncake clients of the process."""


def load(settings: MooncakeSettings) -> Any:
    """Mooncake's module ``mooncake.store``.

    Raises:
        StoreError: it or a system library is missing, or the protocol cannot work on this machine.
    """
    if settings.protocol == "rdma" and not any(_RDMA_DEVICES.glob("*")):
        raise StoreError("protocol=rdma, but this machine has no RDMA device: use protocol=tcp")
    # Mooncake's own limits are 30 s; read when its first client is made.
    milliseconds = str(max(1, int(1000 * settings.rpc_timeout_s)))
    os.environ.setdefault("MC_RPC_TIMEOUT_MS", milliseconds)
    os.environ.setdefault("MC_RPC_CONNECT_TIMEOUT_MS", milliseconds)
    os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "1")
    # Dozens of lines a client otherwise, in the server's log.
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        import mooncake.store as module
    except ModuleNotFoundError as error:
        raise StoreError(
            "mooncake:// needs the package mooncake-transfer-engine-non-cuda, or -cuda13 beside CUDA 13: "
            "pip install 'hicache-ext[mooncake]' or 'hicache-ext[mooncake-cuda13]'"
        ) from error
    except ImportError as error:
        raise StoreError(
            f"Mooncake cannot be loaded ({error}): on Debian, apt-get install libibverbs1 librdmacm1 libnuma1"
        ) from error
    return module


def check_lockable(nbytes: int, limit: int | None = None) -> None:
    """Raises StoreError if RDMA cannot lock so much memory. ``limit`` defaults to this process's."""
    if limit is None:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit not in (resource.RLIM_INFINITY, -1) and limit < nbytes:
        raise StoreError(
            f"protocol=rdma has to lock {nbytes / GB:.2f} GB of memory, the limit is {limit / GB:.2f} GB: "
            "ulimit -l unlimited"
        )


def host_port(address: str) -> tuple[str, int]:
    """Raises ValueError."""
    parts = urlsplit(f"//{address}")
    if not parts.hostname or not parts.port:
        raise ValueError(address)
    return parts.hostname, parts.port


def unreachable(settings: MooncakeSettings) -> str | None:
    """Why the services cannot be reached, in one line, or None if they answer. Takes 2 s at most."""
    try:
        socket.create_connection(host_port(settings.master), _PREFLIGHT_S).close()
    except OSError as error:
        return (
            f"no Mooncake master answers at {settings.master} ({_reason(error)}): start one "
            "(scripts/mooncake_up.sh), or correct the address"
        )
    if settings.metadata.startswith(("http://", "https://")):
        try:
            urllib.request.urlopen(f"{settings.metadata}?key=hicache-ext", timeout=_PREFLIGHT_S).close()
        except urllib.error.HTTPError:
            pass
        except OSError as error:
            return (
                f"no Mooncake metadata service answers at {settings.metadata} ({_reason(error)}): start one, "
                "or correct metadata="
            )
    return None


def master_serves(module: Any, settings: MooncakeSettings) -> bool:
    """Whether a new client can be set up, tried with one that gives no memory. Takes some seconds."""
    client = module.MooncakeDistributedStore()
    code = _set_up(client, settings, segment_bytes=0)
    client.close()
    return code == 0


def own_address(settings: MooncakeSettings) -> str:
    """This machine's address on the way to the master. Raises OSError."""
    if settings.host:
        return settings.host
    host, port = host_port(settings.master)
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        # Sends nothing: a datagram socket only looks up the route.
        probe.connect(address)
        return str(probe.getsockname()[0])


class Session:
    """One client, from its set-up until nothing uses it any more."""

    def __init__(self, module: Any, settings: MooncakeSettings, rack: Rack, holds: Holds) -> None:
        """Takes some seconds if the services stop answering meanwhile. Raises StoreError, OSError."""
        self._client = module.MooncakeDistributedStore()
        self._holds = holds
        self._lock = threading.Lock()
        self._calls = 0
        self._retired = False
        self._closed = False
        self._tainted: list[int] = []
        code = _set_up(self._client, settings, int(settings.segment_gb * GB))
        if code:
            raise StoreError(
                f"Mooncake's client could not be set up (code {code}): its own message is above; "
                "check metadata=, protocol=, device= and that segment_gb= of memory are free"
            )
        code = self._client.register_buffer(rack.base, rack.nbytes)
        if code:
            raise StoreError(
                f"Mooncake cannot register the host buffer of {rack.nbytes / GB:.2f} GB (code {code}): "
                "check ulimit -l and device="
            )

    def call(self, function: Callable[[Any], T]) -> T | None:
        """Run a function of the client; None if the session has been retired."""
        with self._lock:
            if self._retired:
                return None
            self._calls += 1
        try:
            return function(self._client)
        finally:
            with self._lock:
                self._calls -= 1

    def taint(self, rows: list[int]) -> None:
        """The client may still touch these held rows, although the call has returned: until it is closed."""
        with self._lock:
            if not self._closed:
                self._tainted += rows
                return
        self._holds.done(rows)

    @property
    def tainted(self) -> bool:
        return bool(self._tainted)

    def retire(self) -> None:
        """Let no further call in."""
        with self._lock:
            self._retired = True

    def close(self) -> bool:
        """Close a retired client; up to some 12 s if the master is gone. False if a call still uses it."""
        with self._lock:
            if self._calls:
                return False
        self._client.close()
        with self._lock:
            self._closed = True
            tainted, self._tainted = self._tainted, []
        self._holds.done(tainted)
        return True


def _set_up(client: Any, settings: MooncakeSettings, segment_bytes: int) -> int:
    """Mooncake's code, 0 for success."""
    address = own_address(settings)
    # On a machine with several networks it would announce the first of them.
    os.environ.setdefault("MC_TCP_BIND_ADDRESS", address)
    return client.setup(
        address,
        settings.metadata,
        segment_bytes,
        _LOCAL_BUFFER,
        settings.protocol,
        settings.device,
        settings.master,
    )


def _reason(error: OSError) -> str:
    inner = getattr(error, "reason", error)
    return str(getattr(inner, "strerror", None) or inner)
