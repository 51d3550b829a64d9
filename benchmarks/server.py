"""Starts an SGLang server for a benchmark and stops it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

START_SECONDS = 300.0


class ServerFailed(Exception):
    """One line that names the log."""


def device_flags() -> tuple[list[str], dict[str, str]]:
    """Flags and environment that run the server on the GPU that is there, or else on the CPU."""
    if (
        shutil.which("nvidia-smi")
        and subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0
    ):
        return [], {}
    flags = ["--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph"]
    environment = {
        "SGLANG_PLATFORM": "hicache_ext_cpu",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(os.cpu_count() or 1)),
        # Threads that spin while they wait would starve the load generator on a small machine.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    return [*flags, "--mem-fraction-static", "0.3"], environment


@contextmanager
def serve(model: Path, flags: Sequence[str], log: Path) -> Iterator[str]:
    """Yield the base URL of a server that answers; its processes are gone afterwards.

    Raises:
        ServerFailed: it did not start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    device, environment = device_flags()
    command = [sys.executable, "-P", "-m", "sglang.launch_server", "--model-path", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--random-seed", "0", *device, *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **environment, "PYTHONSAFEPATH": "1"},
            start_new_session=True,
        )
    try:
        _wait(process, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
        # Its own session: what it left behind ends with it.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=20) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.5)
    raise ServerFailed(f"the server did not start; its log is {log}")
