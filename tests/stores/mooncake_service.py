"""A real Mooncake master with its metadata service on loopback, and peers that give memory to the store."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from hicache_ext.stores.mooncake_client import MooncakeSettings, unreachable
from tests.conftest import ROOT


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def freeze(process: subprocess.Popen) -> None:
    """Stop a process, and wait until all its threads have stopped."""
    process.send_signal(signal.SIGSTOP)
    end = time.monotonic() + 10
    tasks = Path(f"/proc/{process.pid}/task")
    while any((task / "stat").read_text().rsplit(")", 1)[1].split()[0] != "T" for task in tasks.iterdir()):
        assert time.monotonic() < end, "the process does not stop"
        time.sleep(0.001)


class Master:
    """Keeps its ports over restarts, and loses what it knew."""

    def __init__(self, log: Path, *options: str) -> None:
        self.port, self.metadata_port, self.metrics_port = free_port(), free_port(), free_port()
        self.options = options
        self._log = log.open("ab")
        self.process: subprocess.Popen | None = None

    @property
    def url(self) -> str:
        return f"mooncake://127.0.0.1:{self.port}?metadata=http://127.0.0.1:{self.metadata_port}/metadata"

    def settings(self, **fields: object) -> MooncakeSettings:
        values = {
            "master": f"127.0.0.1:{self.port}",
            "metadata": f"http://127.0.0.1:{self.metadata_port}/metadata",
            "segment_gb": 0.064,
            "rpc_timeout_s": 1.0,
            **fields,
        }
        return MooncakeSettings(**values)  # type: ignore[arg-type]

    def start(self) -> None:
        command = [
            "mooncake_master",
            "--rpc_address=127.0.0.1",
            f"--rpc_port={self.port}",
            "--enable_http_metadata_server=true",
            "--http_metadata_server_host=127.0.0.1",
            f"--http_metadata_server_port={self.metadata_port}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={self.metrics_port}",
            *self.options,
        ]
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
        self.process = subprocess.Popen(
            command, stdout=self._log, stderr=self._log, env=os.environ | {"PATH": path}
        )
        end = time.monotonic() + 20
        while unreachable(self.settings()) is not None:
            assert self.process.poll() is None, f"the master ended; see {self._log.name}"
            assert time.monotonic() < end, "the master does not answer"
            time.sleep(0.05)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def freeze(self) -> None:
        assert self.process is not None
        freeze(self.process)

    def thaw(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.kill()
        self._log.close()


class Peer:
    """Another process that gives memory to the store and does nothing else."""

    def __init__(self, master: Master, megabytes: int = 64) -> None:
        program = (
            "import sys\n"
            "from mooncake.store import MooncakeDistributedStore\n"
            "store = MooncakeDistributedStore()\n"
            f"code = store.setup('127.0.0.1', 'http://127.0.0.1:{master.metadata_port}/metadata', "
            f"{megabytes << 20}, 16 << 20, 'tcp', '', '127.0.0.1:{master.port}')\n"
            "print(code, flush=True)\n"
            "sys.stdin.read()\n"
            "store.close()\n"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": str(ROOT), "MC_TCP_BIND_ADDRESS": "127.0.0.1"},
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "0\n", "the peer could not be set up"

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.communicate()
