"""A process that writes is killed at random moments; who opens its store next finds only whole objects."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hicache_ext.stores.disk import DiskStore
from tests.conftest import ROOT
from tests.stores.crash_child import NUMBERS, OBJECT_BYTES, settings
from tests.stores.util import aligned_buffer, content, key, soon


def write_until_killed(folder: Path, seed: int, slots: int, durability: str) -> list[int]:
    """The objects whose put had returned, in order."""
    rng = random.Random(seed)
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.stores.crash_child", str(folder), str(seed), str(slots), durability],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
    )
    assert child.stdout is not None
    lines: list[str] = []
    try:
        if rng.random() < 0.1:
            # Somewhere in the start.
            time.sleep(rng.uniform(0.1, 0.6))
        else:
            assert child.stdout.readline() == "ready\n", "the store did not start"
            # However slow the machine is, something has been stored.
            lines = [child.stdout.readline() for _ in range(rng.randrange(1, 20))]
            time.sleep(rng.uniform(0, 0.03))
    finally:
        child.send_signal(signal.SIGKILL)
        output = child.stdout.read()
        child.wait()
    lines += output.split("\n")[:-1]
    return [int(word) for line in lines if line != "ready" for word in line.split()]


def check(store: DiskStore, numbers: list[int]) -> None:
    """Everything in ``numbers`` is there, and all that claims to be there has the right bytes."""
    buffer = aligned_buffer(64, OBJECT_BYTES)
    store.register(buffer)
    assert store.exists([key(n) for n in numbers], soon()).ok.all(), "a stored object is lost"
    keys = [key(n) for n in range(NUMBERS)]
    there = np.flatnonzero(store.exists(keys, soon()).ok).tolist()
    assert len(there) == store.stats().objects
    for start in range(0, len(there), len(buffer)):
        part = there[start : start + len(buffer)]
        assert store.get([keys[n] for n in part], range(len(part)), soon()).ok.all(), "an object is torn"
        for row, n in enumerate(part):
            assert np.array_equal(buffer[row], content(n, OBJECT_BYTES)), f"object {n} has other bytes"
    assert store.stats().corrupt == 0


def kill_loop(folder: Path, kills: int, slots: int, durability: str, first_seed: int = 0) -> int:
    """Kill and check again and again over the same folder. Returns how many objects were stored in all.

    With ``NUMBERS`` slots nothing is ever evicted and everything stored must be there; with fewer, what the
    last process stored last.
    """
    stored: list[int] = []
    for turn in range(kills):
        last = write_until_killed(folder, first_seed + turn, slots, durability)
        stored += last
        store = DiskStore(settings(folder, slots, durability), OBJECT_BYTES)
        try:
            check(store, stored if slots >= NUMBERS else list(dict.fromkeys(reversed(last)))[: slots // 2])
        finally:
            store.close()
    return len(stored)


@pytest.mark.parametrize(("slots", "durability"), [(NUMBERS, "none"), (150, "data"), (150, "full")])
def test_kind_corrupt_page_after_kills(tmp_path: Path, slots: int, durability: str) -> None:
    assert kill_loop(tmp_path / "store", 2, slots, durability, 4) > 0


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("kills", "slots", "durability"),
    [(50, NUMBERS, "none"), (90, 150, "none"), (40, 150, "data"), (20, 150, "full")],
)
def test_kind_corrupt_page_after_200_kills(tmp_path: Path, kills: int, slots: int, durability: str) -> None:
    assert kill_loop(tmp_path / "store", kills, slots, durability, 1000) > kills
