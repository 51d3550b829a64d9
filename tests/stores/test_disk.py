"""What only the disk store has: files, a quota, a lock, checksums, and damage to any of them."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from hicache_ext.stores import disk_files
from hicache_ext.stores.base import StoreError
from hicache_ext.stores.disk import DiskSettings, DiskStore, Durability
from hicache_ext.stores.policy import LeastRecentlyUsed, SlotHistory, lowest
from tests.stores.conftest import OBJECT_BYTES, OpenDisk
from tests.stores.util import aligned_buffer, content, fill, key, soon

ALL = list(range(64))


def fill_store(store: DiskStore, buffer: np.ndarray, numbers: Sequence[int]) -> np.ndarray:
    """Put objects, at most as many as the buffer has rows at a time."""
    ok = []
    for start in range(0, len(numbers), len(buffer)):
        part = list(numbers[start : start + len(buffer)])
        ok += store.put([key(n) for n in part], fill(buffer, part), soon()).ok.tolist()
    return np.array(ok)


def hits(store: DiskStore, buffer: np.ndarray, numbers: Sequence[int]) -> list[int]:
    """Which objects are read back; each must have the right bytes."""
    found = []
    for start in range(0, len(numbers), len(buffer)):
        part = list(numbers[start : start + len(buffer)])
        buffer[:] = 0
        outcome = store.get([key(n) for n in part], range(len(part)), soon())
        for row, number in enumerate(part):
            if outcome.ok[row]:
                assert np.array_equal(buffer[row], content(number, buffer.shape[1])), f"object {number}"
                found.append(number)
    return found


@pytest.mark.parametrize("durability", list(Durability))
def test_kind_written_but_never_read_back_after_a_restart(
    open_disk: OpenDisk, buffer: np.ndarray, durability: Durability
) -> None:
    store = open_disk(buffer, durability=durability)
    assert fill_store(store, buffer, ALL).all()
    store.close()
    again = open_disk(buffer, durability=durability)
    assert again.stats().objects == 64
    assert hits(again, buffer, ALL) == ALL


@pytest.mark.parametrize("object_bytes", [512, 8192, 8704, 12800, 1 << 20, (1 << 20) + 512])
@pytest.mark.parametrize("direct", [True, False])
def test_every_object_size(open_disk: OpenDisk, object_bytes: int, direct: bool) -> None:
    buffer = aligned_buffer(8, object_bytes)
    store = open_disk(buffer, size_gb=20 * (object_bytes + 4096) / 1e9, direct=direct)
    assert fill_store(store, buffer, range(12)).all()
    assert hits(store, buffer, range(12)) == list(range(12))
    if not direct:
        assert not store.direct


def test_files_are_allocated_when_they_are_made(
    open_disk: OpenDisk, buffer: np.ndarray, tmp_path: Path
) -> None:
    store = open_disk(buffer)
    fill_store(store, buffer, range(9))
    files = sorted((tmp_path / "store").glob("segment-*"))
    assert [f.stat().st_size for f in files] == [8 * OBJECT_BYTES] * 2
    assert all(f.stat().st_blocks * 512 >= 8 * OBJECT_BYTES for f in files)


def test_quota_evicts_the_least_recently_used(open_disk: OpenDisk, buffer: np.ndarray) -> None:
    store = open_disk(buffer)
    for n in ALL:
        fill_store(store, buffer, [n])
    assert hits(store, buffer, range(10)) == list(range(10))
    assert fill_store(store, buffer, range(100, 120)).all()
    assert hits(store, buffer, ALL) == [*range(10), *range(30, 64)]
    assert hits(store, buffer, range(100, 120)) == list(range(100, 120))
    stats = store.stats()
    assert stats.evicted == 20
    assert stats.objects == 64
    assert stats.bytes_used == stats.bytes_limit == 64 * OBJECT_BYTES


def test_use_is_remembered_over_a_restart(open_disk: OpenDisk, buffer: np.ndarray) -> None:
    store = open_disk(buffer)
    for n in ALL:
        fill_store(store, buffer, [n])
    hits(store, buffer, range(10))
    store.close()
    again = open_disk(buffer)
    fill_store(again, buffer, range(100, 120))
    assert hits(again, buffer, ALL) == [*range(10), *range(30, 64)]


def test_another_policy_can_be_given(open_disk: OpenDisk, buffer: np.ndarray) -> None:
    class NewestFirst:
        def rank(self, slots: SlotHistory) -> np.ndarray:
            return -slots.written

    store = open_disk(buffer, policy=NewestFirst())
    for n in ALL:
        fill_store(store, buffer, [n])
    fill_store(store, buffer, [100])
    assert hits(store, buffer, ALL) == ALL[:-1]


def test_a_batch_larger_than_the_quota_keeps_what_fits(open_disk: OpenDisk) -> None:
    buffer = aligned_buffer(100, OBJECT_BYTES)
    store = open_disk(buffer)
    ok = fill_store(store, buffer, range(100))
    assert ok.sum() == 64
    assert hits(store, buffer, range(100)) == np.flatnonzero(ok).tolist()


def test_the_lowest_ranks_are_found() -> None:
    rng = np.random.default_rng(0)
    rank = rng.permutation(1000)
    candidates = rng.random(1000) < 0.5
    expected = sorted(sorted(np.flatnonzero(candidates), key=lambda i: rank[i])[:37])
    assert lowest(rank, candidates, 37).tolist() == expected
    assert lowest(rank, candidates, 5000).tolist() == np.flatnonzero(candidates).tolist()
    history = SlotHistory(rank, rank + 1, rank)
    assert np.array_equal(LeastRecentlyUsed().rank(history), rank + 1)


@pytest.mark.parametrize("place", [0, OBJECT_BYTES // 2, OBJECT_BYTES - 1])
def test_kind_corrupt_page_is_a_miss_and_is_removed(
    open_disk: OpenDisk, buffer: np.ndarray, tmp_path: Path, place: int
) -> None:
    store = open_disk(buffer)
    fill_store(store, buffer, range(8))
    store.close()
    with (tmp_path / "store" / "segment-000000").open("r+b") as file:
        file.seek(3 * OBJECT_BYTES + place)
        byte = file.read(1)[0]
        file.seek(3 * OBJECT_BYTES + place)
        file.write(bytes([byte ^ 1]))
    store = open_disk(buffer)
    assert hits(store, buffer, range(8)) == [0, 1, 2, 4, 5, 6, 7]
    assert store.stats().corrupt == 1
    assert not store.exists([key(3)], soon()).ok.any()
    assert fill_store(store, buffer, [3]).all()
    assert hits(store, buffer, range(8)) == list(range(8))


def test_kind_corrupt_page_when_slots_are_swapped(
    open_disk: OpenDisk, buffer: np.ndarray, tmp_path: Path
) -> None:
    store = open_disk(buffer)
    fill_store(store, buffer, range(8))
    store.close()
    path = tmp_path / "store" / "segment-000000"
    data = path.read_bytes()
    swapped = data[OBJECT_BYTES : 2 * OBJECT_BYTES] + data[:OBJECT_BYTES] + data[2 * OBJECT_BYTES :]
    path.write_bytes(swapped)
    assert hits(open_disk(buffer), buffer, range(8)) == list(range(2, 8))


@pytest.mark.parametrize("damage", ["garbage", "empty", "cut", "gone", "other schema"])
def test_kind_corrupt_page_a_damaged_index_starts_empty(
    open_disk: OpenDisk, buffer: np.ndarray, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    store = open_disk(buffer)
    fill_store(store, buffer, ALL)
    store.close()
    path = tmp_path / "store" / "index.sqlite"
    if damage == "garbage":
        path.write_bytes(b"x" * 8192)
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "cut":
        os.truncate(path, path.stat().st_size - 4096)
    elif damage == "gone":
        path.unlink()
    else:
        path.unlink()
        with sqlite3.connect(path) as db:
            db.execute("CREATE TABLE objects (x)")
        db.close()
    store = open_disk(buffer)
    found = hits(store, buffer, ALL)
    assert found == []
    if damage not in ("empty", "gone"):
        assert "is damaged" in caplog.text
    assert fill_store(store, buffer, ALL).all()
    store.close()
    assert hits(open_disk(buffer), buffer, ALL) == ALL


def test_a_deleted_segment_is_a_miss(open_disk: OpenDisk, buffer: np.ndarray, tmp_path: Path) -> None:
    store = open_disk(buffer)
    fill_store(store, buffer, ALL)
    store.close()
    (tmp_path / "store" / "segment-000005").unlink()
    store = open_disk(buffer)
    found = hits(store, buffer, ALL)
    assert found == list(range(40))
    assert fill_store(store, buffer, range(40, 64)).all()
    assert hits(store, buffer, ALL) == ALL


def test_the_quota_may_shrink_and_grow(open_disk: OpenDisk, buffer: np.ndarray, tmp_path: Path) -> None:
    store = open_disk(buffer)
    fill_store(store, buffer, ALL)
    store.close()
    small = open_disk(buffer, size_gb=20.5 * OBJECT_BYTES / 1e9)
    assert hits(small, buffer, ALL) == list(range(20))
    size = sum(f.stat().st_size for f in (tmp_path / "store").glob("segment-*"))
    assert size == 20 * OBJECT_BYTES
    small.close()
    large = open_disk(buffer, size_gb=70 * OBJECT_BYTES / 1e9)
    assert fill_store(large, buffer, range(20, 70)).all()
    assert hits(large, buffer, range(70)) == list(range(70))


def test_an_unaligned_buffer_goes_through_the_page_cache(
    open_disk: OpenDisk, caplog: pytest.LogCaptureFixture
) -> None:
    raw = np.zeros(9 * OBJECT_BYTES, np.uint8)
    start = -raw.ctypes.data % 4096 + 64
    buffer = raw[start : start + 8 * OBJECT_BYTES].reshape(8, OBJECT_BYTES)
    aligned = aligned_buffer(8, OBJECT_BYTES)
    store = open_disk(aligned)
    fill_store(store, aligned, range(8))
    was_direct = store.direct
    store.close()
    again = open_disk(buffer)
    assert not again.direct
    assert hits(again, buffer, range(8)) == list(range(8))
    assert ("page cache" in caplog.text) is was_direct


# Folders that cannot be used


def test_kind_start_up_trouble_a_second_process_is_refused(
    open_disk: OpenDisk, buffer: np.ndarray, tmp_path: Path
) -> None:
    open_disk(buffer)
    program = (
        "import sys, pathlib\n"
        "from hicache_ext.stores.base import StoreError\n"
        "from hicache_ext.stores.disk import DiskSettings, DiskStore\n"
        "try:\n"
        f"    DiskStore(DiskSettings(pathlib.Path({str(tmp_path / 'store')!r}), 0.001), {OBJECT_BYTES})\n"
        "except StoreError as error:\n"
        "    sys.exit(str(error))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"in use by another process (pid {os.getpid()})" in done.stderr


def test_kind_start_up_trouble_another_format_is_refused(open_disk: OpenDisk, tmp_path: Path) -> None:
    open_disk().close()
    meta = tmp_path / "store" / "store.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"format": 7}))
    with pytest.raises(StoreError, match="written by format version 7, this release reads version 1: delete"):
        open_disk()
    meta.write_text("{")
    with pytest.raises(StoreError, match=r"store\.json is damaged: delete"):
        open_disk()


def test_kind_start_up_trouble_another_object_size_is_refused(open_disk: OpenDisk) -> None:
    open_disk().close()
    with pytest.raises(StoreError, match=r"holds objects of 16384 bytes, this model's have 8192: name one"):
        open_disk(aligned_buffer(4, 8192))


def test_kind_start_up_trouble_a_foreign_folder_is_left_alone(open_disk: OpenDisk, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    precious = tmp_path / "store" / "thesis.txt"
    precious.write_text("text")
    with pytest.raises(StoreError, match=r"is not empty and holds no disk store \(thesis.txt is there\)"):
        open_disk()
    assert precious.read_text() == "text"


def test_kind_start_up_trouble_a_file_in_place_of_the_folder(open_disk: OpenDisk, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("text")
    with pytest.raises(StoreError, match=r"cannot use .* \(File exists\): name a folder"):
        open_disk()
    with pytest.raises(StoreError, match=r"\(Not a directory\): name a folder"):
        open_disk(path=tmp_path / "store" / "below")


@contextmanager
def as_nobody() -> Iterator[None]:
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_kind_start_up_trouble_no_permission(open_disk: OpenDisk, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir(mode=0o755)
    tmp_path.chmod(0o755)
    with as_nobody(), pytest.raises(StoreError, match=r"\(Permission denied\): give the server's user write"):
        open_disk()


@pytest.mark.parametrize("size_gb", [0, 1e-9])
def test_kind_start_up_trouble_a_quota_below_one_object(open_disk: OpenDisk, size_gb: float) -> None:
    with pytest.raises(StoreError, match="is less than one object of 16384 bytes"):
        open_disk(size_gb=size_gb)


def test_objects_of_odd_size_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="multiple of 512"):
        DiskStore(DiskSettings(tmp_path / "store", 1), 1000)


# A disk that hangs


class SlowReads:
    """Stops reads of segments until told to go on, as a hanging disk does."""

    def __init__(self, store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        read = disk_files.Segments.read

        def late(segments: disk_files.Segments, first: int, views: Sequence[memoryview]) -> None:
            self.go.wait(30)
            read(segments, first, views)

        monkeypatch.setattr(disk_files.Segments, "read", late)


def wait_for_rows(store: DiskStore, count: int) -> list[int]:
    """Rows that are released, once there are ``count``."""
    rows: list[int] = []
    end = soon()
    while len(rows) < count and time.monotonic() < end:
        rows += store.released()
        time.sleep(0.005)
    return sorted(rows)


def test_kind_backend_down_a_late_read_holds_its_rows(
    open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = aligned_buffer(64, 64 * 1024)
    store = open_disk(buffer, threads=2)
    fill_store(store, buffer, ALL)
    slow = SlowReads(store, monkeypatch)
    buffer[:] = 0
    keys = [key(n) for n in ALL]
    outcome = store.get(keys, ALL, soon(0.1))
    assert outcome.down and not outcome.ok.any()
    # Two reads are under way; the others were dropped and their rows are free at once.
    held = np.flatnonzero(outcome.held)
    assert 0 < len(held) < 64
    assert store.released() == []
    assert store.stats().held == len(held)
    # Objects that are being read are not evicted, and reads by others go on once the disk does.
    buffer[~outcome.held] = 7
    slow.go.set()
    assert store.get([key(0)], [int(np.flatnonzero(~outcome.held)[0])], soon()).ok.all()
    assert wait_for_rows(store, len(held)) == held.tolist()
    free = np.flatnonzero(~outcome.held)[1:]
    assert (buffer[free] == 7).all()
    assert store.stats().held == 0
    assert hits(store, buffer, ALL) == ALL


def test_kind_backend_down_objects_being_read_are_not_evicted(
    open_disk: OpenDisk, buffer: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_disk(buffer, threads=1)
    fill_store(store, buffer, ALL)
    slow = SlowReads(store, monkeypatch)
    outcome = store.get([key(0)], [63], soon(0.1))
    assert outcome.held.all()
    store.remove([key(0)], soon())
    numbers = list(range(200, 263))
    assert store.put([key(n) for n in numbers], fill(buffer, numbers), soon()).ok.all()
    slow.go.set()
    wait_for_rows(store, 1)
    # The slot was neither freed nor written while the read was under way.
    assert np.array_equal(buffer[63], content(0, OBJECT_BYTES))
    assert hits(store, buffer, numbers) == numbers


def test_closing_over_a_stuck_read_keeps_the_folder_locked(
    open_disk: OpenDisk,
    buffer: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("hicache_ext.stores.disk._CLOSE_S", 0.1)
    store = open_disk(buffer, threads=1)
    fill_store(store, buffer, [1])
    slow = SlowReads(store, monkeypatch)
    assert store.get([key(1)], [40], soon(0.05)).held.all()
    with caplog.at_level(logging.WARNING):
        store.close()
    assert "does not answer" in caplog.text
    with pytest.raises(StoreError, match="in use"):
        open_disk()
    slow.go.set()
