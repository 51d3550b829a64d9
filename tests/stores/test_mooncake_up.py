"""The script that starts a Mooncake master."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from hicache_ext.stores.mooncake_client import MooncakeSettings, unreachable
from hicache_ext.stores.urls import parse_store_url
from tests.conftest import ROOT
from tests.stores.conftest import missing_mooncake

SCRIPT = ["bash", str(ROOT / "scripts" / "mooncake_up.sh")]
FREE = ["--port", "0", "--metadata-port", "0", "--metrics-port", "0"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*SCRIPT, *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.slow
@pytest.mark.skipif(missing_mooncake() is not None, reason=str(missing_mooncake()))
def test_it_prints_the_address_and_ends_what_it_started(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [*SCRIPT, *FREE, "--log", str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    try:
        settings = parse_store_url(child.stdout.readline().strip())
        assert isinstance(settings, MooncakeSettings)
        assert unreachable(settings) is None
        masters = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    finally:
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 0
    assert masters
    for pid in masters:
        # The master takes a moment to end.
        with pytest.raises(ProcessLookupError):
            for _ in range(200):
                os.kill(int(pid), 0)
                time.sleep(0.05)


def test_kind_start_up_trouble_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run(*FREE, "--port", port)
    if "not installed" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 1 and done.stdout == ""
    problem = f"mooncake_up: port {port} on 127.0.0.1 is in use: stop what listens there, or give another"
    assert done.stderr == f"{problem} with --port\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--prot", "1"], "unknown option --prot; see scripts/mooncake_up.sh --help"),
        (["--port"], "--port needs a value; see --help"),
        (["--port", "x"], "--port takes a port number"),
        (["--port", "70000"], "--port takes a port number"),
    ],
)
def test_wrong_use(arguments: list[str], text: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (2, f"mooncake_up: {text}\n")


def test_help() -> None:
    done = run("--help")
    assert done.returncode == 0 and "--metadata-port N" in done.stdout


@pytest.mark.skipif(missing_mooncake() is not None, reason=str(missing_mooncake()))
def test_options_after_dashes_go_to_the_master() -> None:
    done = run(*FREE, "--", "--no_such_option=1")
    assert done.returncode == 1
    assert "no_such_option" in done.stderr and "the master ended with code" in done.stderr
