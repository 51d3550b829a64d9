"""File systems that are full, or frozen, beneath the store."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hicache_ext.stores.disk import DiskSettings, DiskStore
from tests.conftest import ROOT
from tests.stores.util import aligned_buffer, content, fill, key, soon

OBJECT_BYTES = 64 * 1024
MB = 1 << 20


def run(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 40 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if not run("mount", "-t", "tmpfs", "-o", "size=40m", "none", str(folder)):
        pytest.skip("mounting a small file system needs root")
    yield folder
    assert run("umount", str(folder))


@pytest.fixture
def ext4_disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 file system of 64 MB that can be frozen."""
    folder, image = tmp_path / "disk", tmp_path / "image"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(64 * MB)
    if not (run("mkfs.ext4", "-q", str(image)) and run("mount", "-o", "loop", str(image), str(folder))):
        pytest.skip("mounting a file system from a file needs root, mkfs.ext4 and a loop device")
    yield folder
    run("fsfreeze", "-u", str(folder))
    assert run("umount", str(folder))


def put(store: DiskStore, buffer: np.ndarray, numbers: list[int], seconds: float = 10) -> np.ndarray:
    return store.put([key(n) for n in numbers], fill(buffer, numbers), soon(seconds)).ok


def there(store: DiskStore, buffer: np.ndarray, numbers: list[int]) -> list[int]:
    rows = range(len(numbers))
    ok = store.get([key(n) for n in numbers], rows, soon()).ok
    for row in np.flatnonzero(ok):
        assert np.array_equal(buffer[row], content(numbers[row], OBJECT_BYTES))
    return [n for n, hit in zip(numbers, ok, strict=True) if hit]


def test_kind_backend_down_disk_full_the_store_goes_on_with_what_it_has(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A quota of 100 MB on 40 MB: files as far as they go, then eviction."""
    buffer = aligned_buffer(32, OBJECT_BYTES)
    settings = DiskSettings(small_disk / "store", 0.1, segment_bytes=4 * MB)
    store = DiskStore(settings, OBJECT_BYTES)
    store.register(buffer)
    for start in range(0, 640, 32):
        assert put(store, buffer, list(range(start, start + 32))).all()
    assert caplog.text.count("cannot grow beyond") == 1
    assert "No space left" in caplog.text
    stats = store.stats()
    assert stats.objects is not None and 200 < stats.objects < 640
    assert stats.evicted == 640 - stats.objects
    assert there(store, buffer, list(range(608, 640))) == list(range(608, 640))
    store.close()
    again = DiskStore(settings, OBJECT_BYTES)
    again.register(buffer)
    assert there(again, buffer, list(range(608, 640))) == list(range(608, 640))
    again.close()


def test_kind_backend_down_disk_full_from_the_start_puts_decline(small_disk: Path) -> None:
    buffer = aligned_buffer(8, OBJECT_BYTES)
    store = DiskStore(DiskSettings(small_disk / "store", 0.02, segment_bytes=4 * MB), OBJECT_BYTES)
    store.register(buffer)
    with (small_disk / "ballast").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 38 * MB)
    outcome = store.put([key(1)], fill(buffer, [1]), soon())
    assert not outcome.ok.any() and not outcome.down and not outcome.held.any()
    assert store.stats().declined == 1
    assert there(store, buffer, [1]) == []
    # There is room again: the store uses it after its pause.
    (small_disk / "ballast").unlink()
    store._grow_at = 0.0
    assert put(store, buffer, [1]).all()
    assert there(store, buffer, [1]) == [1]
    store.close()


def test_kind_backend_down_disk_full_for_the_index_puts_decline(small_disk: Path) -> None:
    """Others fill the disk to the last byte, so that not even the index can grow."""
    buffer = aligned_buffer(32, OBJECT_BYTES)
    store = DiskStore(DiskSettings(small_disk / "store", 0.016, segment_bytes=16 * MB), OBJECT_BYTES)
    store.register(buffer)
    assert put(store, buffer, list(range(16))).all()
    with (small_disk / "ballast").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
    results = [put(store, buffer, list(range(n, n + 32))) for n in range(100, 1000, 32)]
    assert not all(ok.all() for ok in results), "the disk was not full"
    last = [n for n in range(16) if store.exists([key(n)], soon()).ok[0]]
    assert there(store, buffer, last) == last
    (small_disk / "ballast").unlink()
    assert put(store, buffer, list(range(2000, 2016))).all()
    store.close()
    again = DiskStore(DiskSettings(small_disk / "store", 0.016, segment_bytes=16 * MB), OBJECT_BYTES)
    again.register(buffer)
    assert there(again, buffer, list(range(2000, 2016))) == list(range(2000, 2016))
    assert again.stats().corrupt == 0
    again.close()


def test_kind_start_up_trouble_disk_full(small_disk: Path) -> None:
    from hicache_ext.stores.base import StoreError

    with (small_disk / "ballast").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
    with pytest.raises(StoreError, match=r"(No space left|disk is full).*: free some space there, or name"):
        DiskStore(DiskSettings(small_disk / "store", 0.016), OBJECT_BYTES)


def test_kind_backend_down_a_file_size_limit_declines(tmp_path: Path) -> None:
    """``ulimit -f`` refuses the files; a child, because the limit holds for a whole process."""
    program = (
        "import pathlib, resource, sys\n"
        "from hicache_ext.stores.disk import DiskSettings, DiskStore\n"
        "from tests.stores.util import aligned_buffer, fill, key, soon\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))\n"
        f"store = DiskStore(DiskSettings(pathlib.Path(sys.argv[1]), 0.1), {OBJECT_BYTES})\n"
        f"buffer = aligned_buffer(4, {OBJECT_BYTES})\n"
        "store.register(buffer)\n"
        "outcome = store.put([key(1)], fill(buffer, [1]), soon())\n"
        "print(outcome.ok.any(), outcome.down, store.stats().declined)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "store._grow_at = 0\n"
        "print(store.put([key(1)], fill(buffer, [1]), soon()).ok.all())\n"
    )
    if resource.getrlimit(resource.RLIMIT_FSIZE)[1] != resource.RLIM_INFINITY:
        pytest.skip("the file size is limited already")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "store")], capture_output=True, text=True, env=env
    )
    assert done.stdout == "False False 1\nTrue\n", done.stderr


def test_kind_backend_down_a_frozen_file_system(ext4_disk: Path) -> None:
    """Writes hang until it thaws: the call ends in time, and its rows are held as long as they are read."""
    buffer = aligned_buffer(16, OBJECT_BYTES)
    store = DiskStore(DiskSettings(ext4_disk / "store", 0.016, segment_bytes=16 * MB), OBJECT_BYTES)
    store.register(buffer)
    assert put(store, buffer, list(range(8))).all()
    assert run("fsfreeze", "-f", str(ext4_disk))
    try:
        begin = time.monotonic()
        outcome = store.put([key(n) for n in range(20, 24)], fill(buffer, list(range(20, 24))), begin + 0.3)
        assert not outcome.ok.any() and outcome.down
        held = np.flatnonzero(outcome.held).tolist()
        assert time.monotonic() - begin < 5
        buffer[8:] = 0
        assert store.get([key(n) for n in range(8)], range(8, 16), soon()).ok.all()
    finally:
        assert run("fsfreeze", "-u", str(ext4_disk))
    released: list[int] = []
    end = soon()
    while len(released) < len(held) and time.monotonic() < end:
        released += store.released()
        time.sleep(0.01)
    assert sorted(released) == held
    assert put(store, buffer, list(range(20, 24))).all()
    assert there(store, buffer, [*range(8), *range(20, 24)]) == [*range(8), *range(20, 24)]
    assert store.stats().corrupt == 0
    store.close()
