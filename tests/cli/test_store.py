"""``hicache-ext store`` on real stores whose objects were written as a server writes them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from hicache_ext.cli.main import main
from hicache_ext.cli.store_check import Checker
from hicache_ext.core.epochs import MARK_GROUP, MARK_IDENTITY, mark_header
from hicache_ext.core.header import FIXED, Integrity, Labels
from hicache_ext.stores.base import Key
from hicache_ext.stores.disk import DiskSettings, DiskStore
from hicache_ext.stores.disk_index import DiskIndex
from hicache_ext.stores.mooncake import MooncakeStore
from hicache_ext.transfer.layout import Component, PageLayout
from hicache_ext.transfer.seal import Seal
from tests.conftest import ROOT
from tests.stores.conftest import missing_mooncake
from tests.stores.mooncake_service import Master
from tests.stores.util import aligned_buffer, soon

GROUPS, PAGES = 2, 6
OLD, NEW = bytes([1]) * 32, bytes([2]) * 32
Out = Callable[[], str]


def layout_of(*components: Component, groups: int = GROUPS) -> PageLayout:
    return PageLayout(4, 3, torch.float32, components, groups)


LAYOUT = layout_of(Component("K", 2, 8), Component("V", 2, 8))


def sealed_rows(
    labels: Labels, layout: PageLayout = LAYOUT, integrity: Integrity = Integrity.FULL
) -> np.ndarray:
    """Pages of random KV as they lie in host memory, uint8 ``[pages, group, object_bytes]``."""
    rows = torch.zeros(len(labels), layout.page_bytes, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(int(labels.identities[0, 0]))
    for view in layout.views(rows):
        view.copy_(torch.randn(view.shape, generator=generator))
    Seal(layout, integrity).write(rows, labels)
    return rows.numpy().reshape(len(labels), layout.groups, layout.geometry.object_bytes)


def labels_of(namespace: bytes = NEW, epoch: int = 0, pages: int = PAGES) -> Labels:
    return Labels(np.arange(16 * pages, dtype=np.uint8).reshape(pages, 16), namespace, epoch)


class Folders:
    """The stores of a server's head groups, closed between any two writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = f"file://{path}"

    def open(self, group: int) -> tuple[DiskStore, np.ndarray]:
        size = LAYOUT.geometry.object_bytes
        store = DiskStore(DiskSettings(self.path / f"g{group}", 1e-3, segment_bytes=8 * 4096), size)
        buffer = aligned_buffer(PAGES + 1, size)
        store.register(buffer)
        return store, buffer

    def write(self, labels: Labels, integrity: Integrity = Integrity.FULL) -> None:
        pages = sealed_rows(labels, integrity=integrity)
        for group in range(GROUPS):
            store, buffer = self.open(group)
            buffer[: len(labels)] = pages[:, group]
            keys = [
                Key(labels.namespace, labels.epoch, identity.tobytes(), group)
                for identity in labels.identities
            ]
            assert store.put(keys, range(len(keys)), soon()).ok.all()
            store.close()

    def write_mark(self, namespace: bytes, epoch: int) -> None:
        store, buffer = self.open(0)
        buffer[0] = 0
        buffer[0, : FIXED.itemsize] = np.frombuffer(mark_header(namespace, epoch), np.uint8)
        assert store.put([Key(namespace, epoch, MARK_IDENTITY, MARK_GROUP)], [0], soon()).ok.all()
        store.close()

    def names(self) -> set[tuple[bytes, int]]:
        """Namespaces and epochs of the pages that the stores offer."""
        return {(k.namespace, k.epoch) for k in self.keys() if k.group != MARK_GROUP}

    def marks(self) -> set[tuple[bytes, int]]:
        return {(k.namespace, k.epoch) for k in self.keys() if k.group == MARK_GROUP}

    def keys(self) -> list[Key]:
        keys: list[Key] = []
        for group in range(GROUPS):
            store, _ = self.open(group)
            keys += store._where
            store.close()
        return keys

    def damage(self, group: int, count: int = 1) -> None:
        """Flip a bit in the first slots' payloads, as a rotting disk does."""
        with (self.path / f"g{group}" / "segment-000000").open("r+b") as file:
            for slot in range(count):
                file.seek(slot * 4096 + LAYOUT.geometry.header_bytes)
                byte = file.read(1)[0]
                file.seek(slot * 4096 + LAYOUT.geometry.header_bytes)
                file.write(bytes([byte ^ 1]))


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    made = Folders(tmp_path / "store")
    made.write(labels_of())
    return made


@pytest.fixture
def out(capsys: pytest.CaptureFixture[str]) -> Out:
    def read() -> str:
        captured = capsys.readouterr()
        return captured.out + captured.err

    return read


WRITER = """
import sys, time
from pathlib import Path
from tests.stores.util import aligned_buffer, soon, key
from hicache_ext.stores.disk import DiskSettings, DiskStore

folder, size, slots, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
store = DiskStore(DiskSettings(folder, slots * 4096 / 1e9, segment_bytes=8 * 4096), size)
buffer = aligned_buffer(2, size)
store.register(buffer)
for number in range(rounds):
    buffer[:] = number % 251
    assert store.put([key(2 * number), key(2 * number + 1)], [0, 1], soon()).ok.all()
    if number == 0:
        print("ready", flush=True)
    time.sleep(0.001)
sys.stdin.read()
"""


def writer(folder: Path, slots: int = 250, rounds: int = 1) -> subprocess.Popen:
    """Another process that uses a store, and writes two objects a round into it."""
    command = [sys.executable, "-P", "-c", WRITER, str(folder), str(LAYOUT.geometry.object_bytes)]
    process = subprocess.Popen(
        [*command, str(slots), str(rounds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    return process


@pytest.fixture
def in_use(folders: Folders) -> Iterator[subprocess.Popen]:
    """Another process that has group 0's store open and has just written."""
    process = writer(folders.path / "g0")
    yield process
    process.kill()
    process.communicate()


# ls, stat


def test_ls_adds_up_the_head_groups(folders: Folders, out: Out) -> None:
    folders.write(labels_of(OLD, 4))
    folders.write_mark(OLD, 6)
    assert main(["store", "ls", folders.url]) == 0
    lines = [line.split() for line in out().splitlines() if "│" in line]
    listed = {(fields[1], fields[3]): fields for fields in lines}
    today = time.strftime("%Y-%m-%d")
    size = 2 * PAGES * LAYOUT.geometry.object_bytes
    assert set(listed) == {(OLD.hex()[:16], "4"), (OLD.hex()[:16], "6"), (NEW.hex()[:16], "0")}
    assert {"ended", str(2 * PAGES), today} <= set(listed[OLD.hex()[:16], "4"])
    assert f"{size / 1e6:.3f}" in listed[NEW.hex()[:16], "0"]
    assert "ended" not in listed[NEW.hex()[:16], "0"]


def test_stat_shows_each_folder(folders: Folders, out: Out) -> None:
    assert main(["store", "stat", folders.url + "?size_gb=0.5"]) == 0
    text = out()
    assert f"{folders.path}/g0" in text and f"{folders.path}/g1" in text
    assert f"{LAYOUT.geometry.object_bytes} bytes" in text and "0.5 GB allowed" in text


def test_a_store_in_use_is_read_and_not_written(folders: Folders, in_use: subprocess.Popen, out: Out) -> None:
    assert main(["store", "ls", folders.url]) == 0
    text = out()
    assert f"g0 is in use by process {in_use.pid}; this is its state a moment ago" in text
    # What the other process has written a moment ago is there, though it is in the log only.
    assert bytes(range(32)).hex()[:16] in text
    assert main(["store", "stat", folders.url]) == 0
    assert f"in use by process {in_use.pid}" in out()
    for command in (["verify", "--remove-bad"], ["gc", "--keep-namespace", OLD.hex()]):
        folders_before = out(), sorted(p.name for p in folders.path.rglob("*"))
        assert main(["store", *command, folders.url]) == 1
        assert folders_before[1] == sorted(p.name for p in folders.path.rglob("*"))
    assert main(["store", "gc", "--keep-namespace", bytes(range(32)).hex(), folders.url]) == 1
    assert f"g0 is in use by process {in_use.pid}, nothing was removed: stop that server first" in out()
    in_use.kill()
    in_use.wait()
    # g1 was free all the time, and has kept everything.
    assert folders.names() == {(NEW, 0), (bytes(range(32)), 1)}


# verify


def test_verify_passes_what_a_server_has_written(folders: Folders, out: Out) -> None:
    folders.write_mark(NEW, 2)
    assert main(["store", "verify", folders.url]) == 0
    assert f"{2 * PAGES + 1} objects sound, 0 bad" in out()


def test_kind_corrupt_page_verify_finds_a_flipped_bit(folders: Folders, out: Out) -> None:
    folders.damage(1, 2)
    assert main(["store", "verify", folders.url]) == 1
    text = out()
    assert f"{2 * PAGES - 2} objects sound, 2 bad" in text and "damaged: 2" in text
    assert text.count("bad (damaged): " + NEW.hex() + "/0/") == 2
    assert main(["store", "verify", "--remove-bad", folders.url]) == 1
    assert "removed 2 objects" in out()
    assert main(["store", "verify", folders.url]) == 0
    assert f"{2 * PAGES - 2} objects sound, 0 bad" in out()
    assert len(folders.keys()) == 2 * PAGES - 2


def test_verify_beside_a_server_that_uses_slots_anew(tmp_path: Path, out: Out) -> None:
    """What was replaced while it was read is not bad."""
    process = writer(tmp_path / "g0", slots=16, rounds=1500)
    try:
        replaced = 0
        for _ in range(12):
            main(["store", "verify", f"file://{tmp_path}"])
            text = out()
            assert "damaged" not in text and "cannot be read" not in text, text
            replaced += "replaced or removed meanwhile" in text
        assert replaced
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("what", ["namespace", "epoch", "identity", "group", "checksum"])
def test_kind_corrupt_page_verify_finds_another_page_under_a_key(
    what: str, folders: Folders, out: Out
) -> None:
    """Whole for the disk store, but not what its key says."""
    good = sealed_rows(labels_of(pages=1))[0, 0].copy()
    key = Key(NEW, 2, labels_of().identities[0].tobytes(), 0)
    header = good[: FIXED.itemsize].view(FIXED)
    header["epoch"] = 2
    match what:
        case "namespace":
            header["namespace"] = 9
        case "epoch":
            header["epoch"] = 3
        case "identity":
            header["identity"] = 9
        case "group":
            header["group"] = 1
        case "checksum":
            good[LAYOUT.geometry.header_bytes] ^= 1
    store, buffer = folders.open(0)
    buffer[0] = good
    assert store.put([key], [0], soon()).ok.all()
    store.close()
    assert main(["store", "verify", folders.url]) == 1
    assert f"{what}: 1" in out()


def test_verify_says_what_carries_no_checksum(folders: Folders, out: Out) -> None:
    folders.write(labels_of(OLD), Integrity.OFF)
    assert main(["store", "verify", folders.url]) == 0
    assert f"{2 * PAGES} of the sound carry no checksum" in out()


@pytest.mark.parametrize(
    "layout",
    [
        layout_of(Component("latent", 1, 24), groups=1),
        layout_of(Component("K", 2, 16), Component("V", 2, 4)),
        layout_of(Component("K", 2, 4), Component("V", 2, 12)),
    ],
    ids=["latent", "K wider", "V wider"],
)
def test_checksums_are_found_for_every_layout(layout: PageLayout) -> None:
    labels = labels_of(pages=3)
    rows = sealed_rows(labels, layout)
    checker = Checker()
    for page, identity in enumerate(labels.identities):
        for group in range(layout.groups):
            key = Key(NEW, 0, identity.tobytes(), group)
            assert checker.problem(key, rows[page, group].tobytes()) is None
            for place in (layout.geometry.header_bytes, layout.geometry.header_bytes + 100, FIXED.itemsize):
                other = rows[page, group].copy()
                other[place] ^= 128
                assert checker.problem(key, other.tobytes()) == "checksum"


# gc


def test_gc_removes_ended_epochs_and_keeps_the_mark(folders: Folders, out: Out) -> None:
    folders.write(labels_of(NEW, 2))
    folders.write_mark(NEW, 2)
    folders.write(labels_of(NEW, 4))
    folders.write_mark(NEW, 4)
    assert main(["store", "gc", "--dry-run", folders.url]) == 0
    assert out().count("would remove") == 2 and len(folders.names()) == 3
    assert main(["store", "gc", folders.url]) == 0
    assert (folders.names(), folders.marks()) == ({(NEW, 4)}, {(NEW, 4)})
    assert main(["store", "gc", folders.url]) == 0
    assert "nothing to remove" in out()


def test_gc_keeps_the_named_namespaces(folders: Folders, out: Out) -> None:
    other = bytes([2] * 31 + [3])
    folders.write(labels_of(OLD))
    folders.write(labels_of(other))
    for text, problem in (
        ("0202", "give 8 to 64 hexadecimal digits"),
        ("02020202", "fits 2 namespaces"),
        ("0303030303", "no such namespace"),
    ):
        assert main(["store", "gc", "--keep-namespace", text, folders.url]) == 1
        assert problem in out()
    assert len(folders.names()) == 3
    arguments = ["--keep-namespace", OLD.hex()[:16], "--keep-namespace", NEW.hex().upper()]
    assert main(["store", "gc", *arguments, folders.url]) == 0
    assert folders.names() == {(OLD, 0), (NEW, 0)}


def test_gc_by_age(folders: Folders, out: Out) -> None:
    folders.write(labels_of(OLD))
    for group in range(GROUPS):
        index = DiskIndex(folders.path / f"g{group}" / "index.sqlite", every_commit_durable=False)
        index.save_used([], {(OLD, 0): int(time.time()) - 8 * 86400})
        index.close()
    assert main(["store", "gc", "--older-than", "9d", folders.url]) == 0
    assert len(folders.names()) == 2
    assert main(["store", "gc", "--older-than", "1w", folders.url]) == 0
    assert folders.names() == {(NEW, 0)}


def test_reading_counts_as_use(folders: Folders, out: Out) -> None:
    for group in range(GROUPS):
        path = folders.path / f"g{group}" / "index.sqlite"
        index = DiskIndex(path, every_commit_durable=False)
        index.save_used([], {(NEW, 0): 1})
        index.close()
        store, _ = folders.open(group)
        if group == 0:
            assert store.get([Key(NEW, 0, labels_of().identities[0].tobytes(), 0)], [0], soon()).ok.all()
        store.close()
    assert main(["store", "gc", "--older-than", "7d", folders.url]) == 0
    assert folders.names() == {(NEW, 0)}


def test_a_new_namespace_keeps_the_mark_while_its_pages_stay(folders: Folders, out: Out) -> None:
    """An old mark beside pages of a later epoch whose mark was lost."""
    folders.write_mark(NEW, 2)
    folders.write(labels_of(NEW, 4))
    for group in range(GROUPS):
        index = DiskIndex(folders.path / f"g{group}" / "index.sqlite", every_commit_durable=False)
        index.save_used([], {(NEW, 2): 1, (NEW, 0): 1})
        index.close()
    assert main(["store", "gc", "--older-than", "7d", folders.url]) == 0
    assert (folders.names(), folders.marks()) == ({(NEW, 4)}, {(NEW, 2)})


# Mooncake


@pytest.mark.slow
def test_mooncake_is_listed_verified_and_cleaned(tmp_path: Path, out: Out) -> None:
    if (problem := missing_mooncake()) is not None:
        pytest.skip(problem)
    master = Master(tmp_path / "master.log")
    master.start()
    size = LAYOUT.geometry.object_bytes
    buffer = aligned_buffer(2 * GROUPS * PAGES + 2, size)
    store = MooncakeStore(master.settings(), size)
    arguments = [f"--metrics=127.0.0.1:{master.metrics_port}", master.url]
    try:
        store.register(buffer)
        assert store.wait_connected(soon(15)) is None
        keys: list[Key] = []
        for epoch in (2, 4):
            labels = labels_of(epoch=epoch)
            for page, objects in enumerate(sealed_rows(labels)):
                for group in range(GROUPS):
                    buffer[len(keys)] = objects[group]
                    keys.append(Key(NEW, epoch, labels.identities[page].tobytes(), group))
        buffer[len(keys) :] = 0
        keys += [Key(NEW, epoch, MARK_IDENTITY, MARK_GROUP) for epoch in (2, 4)]
        buffer[1, LAYOUT.geometry.header_bytes] ^= 1
        assert store.put(keys, range(len(keys)), soon()).ok.all()

        assert main(["store", "ls", *arguments]) == 0
        text = out()
        assert text.count(NEW.hex()[:16]) == 2 and "ended" in text and "keeps no times of use" in text
        assert main(["store", "stat", *arguments]) == 0
        text = out()
        assert f"{PAGES * GROUPS * 2} ({PAGES * 2} of head group 0, " in text
        assert "memory of 127.0.0.1" in text
        assert main(["store", "verify", *arguments]) == 1
        text = out()
        assert f"{len(keys) - 1} objects sound, 1 bad" in text
        assert f"bad (checksum): {NEW.hex()}/2/{keys[1].identity.hex()}/1" in text
        assert main(["store", "verify", "--remove-bad", *arguments]) == 1
        assert main(["store", "verify", *arguments]) == 0
        assert main(["store", "gc", "--older-than", "7d", *arguments]) == 1
        assert "use --keep-namespace" in out()
        assert main(["store", "gc", *arguments]) == 0
        there = store.exists(keys, soon()).ok
        assert [k.epoch for k, ok in zip(keys, there, strict=True) if ok] == [4] * (PAGES * GROUPS + 1)
    finally:
        store.close()
        master.close()


# Errors


def test_errors_are_one_line(folders: Folders, tmp_path: Path, out: Out) -> None:
    (tmp_path / "empty").mkdir()
    for url, text in (
        ("file:///nowhere/at/all", "does not exist"),
        (f"file://{tmp_path / 'empty'}", "holds no disk store"),
        ("file://relative/path", "three slashes"),
        ("http://x", "begins with file:// or mooncake://"),
        ("mooncake://127.0.0.1:1", "name the master's --metrics_port with --metrics HOST:PORT"),
    ):
        assert main(["store", "ls", url]) == 1
        lines = out().splitlines()
        assert len(lines) == 1 and lines[0].startswith("hicache-ext: ") and text in lines[0]
    assert list((tmp_path / "empty").iterdir()) == []
    (folders.path / "g0" / "index.sqlite").write_bytes(b"no database" * 1000)
    assert main(["store", "ls", folders.url]) == 1
    assert "is damaged" in out()


def test_an_age_is_a_number_and_a_unit(folders: Folders, out: Out) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["store", "gc", "--older-than", "7", folders.url])
    assert ended.value.code == 2 and "such as 7d" in out()
