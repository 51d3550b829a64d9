"""The benchmark of the stores, run for real on small amounts."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks import stores
from hicache_ext.stores.base import Key, Outcome, Rows
from hicache_ext.stores.memory import MemoryStore
from tests.stores.conftest import missing_mooncake

ROOT = Path(stores.__file__).resolve().parent.parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.stores", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"},
    )


@pytest.mark.slow
def test_disk_and_memory_in_one_run(tmp_path: Path) -> None:
    out, image = tmp_path / "out.json", tmp_path / "out.png"
    done = run(
        *("--stores", "memory", "disk", "--sizes", "8K", "512K", "--total-mb", "4", "--repeat", "2"),
        *("--path", str(tmp_path / "disk"), "--open-objects", "500"),
        *("--json", str(out), "--plot", str(image)),
    )
    assert done.returncode == 0, done.stderr
    assert "ratio" in done.stdout and "512 KiB" in done.stdout
    assert "a disk store of 500 objects opened in" in done.stdout
    assert "measuring disk 8 KiB" in done.stderr
    report = json.loads(out.read_text())
    assert report["format"] == stores.FORMAT
    assert [(r["store"], r["object_bytes"]) for r in report["results"]][:2] == [
        ("memory", 8192),
        ("memory", 524288),
    ]
    for result in report["results"]:
        assert result["read"] > 0 and result["write"] > 0
        assert (result["read_ratio"] is None) is (result["store"] == "memory")
    assert report["open"]["objects"] == 500
    assert image.read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "disk").iterdir()) == [], "the benchmark left files behind"


@pytest.mark.slow
@pytest.mark.skipif(missing_mooncake() is not None, reason=str(missing_mooncake()))
def test_mooncake_with_a_master_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = run(
        *("--stores", "mooncake", "--sizes", "64K", "--total-mb", "4", "--repeat", "1", "--json", str(out))
    )
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(out.read_text())["results"]
    assert result["read_ratio"] > 0 and result["write_ratio"] > 0


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--sizes", "1000"], 2, "1000 is not a multiple of 512 bytes"),
        (["--sizes", "1Q"], 2, "1Q is not a size such as 8192, 64K or 1M"),
        (["--repeat", "0"], 2, "0 is not a whole number above 0"),
        (["--open-objects", "-1"], 2, "takes a number from 0"),
        (["--json", "/nowhere/out.json"], 2, "the folder /nowhere does not exist"),
        (["--stores", "mooncake", "--mooncake", "host"], 2, "begins with file:// or mooncake://"),
        (
            ["--stores", "mooncake", "--mooncake", "file:///a?size_gb=1"],
            1,
            "is not the address of a Mooncake",
        ),
        (["--stores", "disk", "--path", "/dev/null/x"], 1, "cannot be used (Not a directory)"),
    ],
)
def test_bad_input(arguments: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        result = stores.main(["--total-mb", "1", *arguments])
    except SystemExit as end:
        result = int(end.code or 0)
    error = capsys.readouterr().err
    assert result == code
    assert text in error.replace("\n", " ")
    assert "Traceback" not in error


class Forgetful(MemoryStore):
    """Returns other bytes than were stored."""

    def get(self, keys: Sequence[Key], rows: Rows, deadline: float) -> Outcome:
        outcome = super().get(keys, rows, deadline)
        assert self._rack is not None
        self._rack.view(int(rows[0]))[0] ^= 1
        return outcome


def test_wrong_bytes_are_an_error() -> None:
    buffer = stores.filled(8, 4096)
    store = Forgetful(4096, 8)
    store.register(buffer)
    with pytest.raises(stores.BenchmarkError, match="what was read is not what was written"):
        stores.measure("memory", store, buffer, 8, 4, 1, None, lambda what: None)


def test_a_store_without_room_is_an_error() -> None:
    buffer = stores.filled(8, 4096)
    store = MemoryStore(4096, 4)
    store.register(buffer)
    with pytest.raises(stores.BenchmarkError, match="not all objects were read back"):
        stores.measure("memory", store, buffer, 8, 4, 1, None, lambda what: None)


def test_sizes_and_ratios() -> None:
    assert [stores.size(t) for t in ("512", "8K", "8k", "1M")] == [512, 8192, 8192, 1 << 20]
    with pytest.raises(argparse.ArgumentTypeError):
        stores.size("0")
    result = stores.Result("disk", 8192, 10, 4, 1e9, 2e9, 3e9, 4e9, 5.0)
    assert (result.read_ratio, result.write_ratio) == (0.75, 0.5)
    assert np.isclose(stores.TARGET, 0.8)
