"""Several hosts on one machine: network namespaces on one switch, whose links can be cut and slowed.

    with network("a", "b") as net:
        process = net["a"].popen(["python", "-m", "http.server", "--bind", net["a"].address])
        net["b"].cut()

The switch is a bridge in a namespace of its own, with a link to this process's namespace, so that a test can
reach every host. Everything has names that begin with ``hx`` and this process's id, and is gone afterwards.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

_NET = "10.213.{}.{}"
_numbers = itertools.count()


class NetworkError(Exception):
    """A command failed; the message is the command and what it said."""


@dataclass
class Host:
    """One network namespace; its commands see its own interfaces and loopback only."""

    namespace: str
    address: str
    switch: str
    port: str
    """The switch's end of this host's link."""
    processes: list[subprocess.Popen] = field(default_factory=list)

    def command(self, command: Sequence[str]) -> list[str]:
        """The same, to be run on this host; it replaces ``ip``, so its process id is that of the command."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen:
        """Start a process on this host; its group is killed with the network at the latest."""
        options.setdefault("start_new_session", True)
        process = subprocess.Popen(self.command(command), **options)
        self.processes.append(process)
        return process

    def cut(self) -> None:
        """From now on packets to and from this host vanish, without an error for anyone."""
        _ip("-n", self.switch, "link", "set", "dev", self.port, "nomaster")

    def heal(self) -> None:
        _ip("-n", self.switch, "link", "set", "dev", self.port, "master", "switch")

    def limit(self, bytes_per_s: float | None) -> None:
        """Slow its link down, each direction by itself; None takes the limit away.

        Raises:
            NetworkError: this kernel cannot.
        """
        for namespace, device in ((self.switch, self.port), (self.namespace, "eth0")):
            if bytes_per_s is None:
                with suppress(NetworkError):
                    _run("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")
                continue
            rate = ["rate", f"{int(8 * bytes_per_s)}bit", "burst", "64kb", "latency", "100ms"]
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *rate)

    def close(self) -> None:
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.processes.clear()


@contextmanager
def network(*names: str) -> Iterator[dict[str, Host]]:
    """Hosts by name. Raises NetworkError where namespaces cannot be made; see ``unusable``."""
    prefix = f"hx{os.getpid() % 100_000}n{next(_numbers)}"
    switch, outside = f"{prefix}-switch", f"{prefix}o"
    subnet = _free_subnet()
    hosts: dict[str, Host] = {}
    made: list[str] = []
    try:
        _ip("netns", "add", switch)
        made.append(switch)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "dev", "switch", "up")
        _ip("link", "add", outside, "type", "veth", "peer", "name", "outside", "netns", switch)
        _plug(switch, "outside")
        _ip("addr", "add", _NET.format(subnet, 254) + "/24", "dev", outside)
        _ip("link", "set", "dev", outside, "up")
        for number, name in enumerate(names, 1):
            namespace, port = f"{prefix}-{name}", f"port{number}"
            _ip("netns", "add", namespace)
            made.append(namespace)
            peer = ["peer", "name", "eth0", "netns", namespace]
            _ip("-n", switch, "link", "add", port, "type", "veth", *peer)
            _plug(switch, port)
            host = Host(namespace, _NET.format(subnet, number), switch, port)
            hosts[name] = host
            _ip("-n", namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", namespace, "link", "set", "dev", device, "up")
        yield hosts
    finally:
        for host in hosts.values():
            host.close()
        for namespace in made:
            # Its interfaces go with it, and so does the other end of each.
            with suppress(NetworkError):
                _ip("netns", "del", namespace)
        with suppress(NetworkError):
            _ip("link", "del", outside)


def unusable() -> str | None:
    """Why there can be no namespaces here; None if there can."""
    if os.geteuid():
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the command ip (iproute2)"
    try:
        with network("probe"):
            return None
    except NetworkError as error:
        return f"network namespaces cannot be made here: {error}"


def cannot_limit(host: Host) -> str | None:
    """Why a link cannot be slowed down here; None if it can."""
    if shutil.which("tc") is None:
        return "slow links need the command tc (iproute2)"
    try:
        host.limit(1e9)
        host.limit(None)
    except NetworkError as error:
        return f"links cannot be slowed down here: {error}"
    return None


def _plug(switch: str, device: str) -> None:
    _ip("-n", switch, "link", "set", "dev", device, "master", "switch")
    _ip("-n", switch, "link", "set", "dev", device, "up")


def _free_subnet() -> int:
    """A third number of addresses that no interface here uses."""
    used = _run("ip", "-4", "addr", "show")
    return next(n for n in range(os.getpid() % 200, 256) if f"{_NET.format(n, '')}" not in used)


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NetworkError(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout
