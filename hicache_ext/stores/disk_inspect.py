"""Looks into a disk store from outside, also while a server uses it; removes only what nobody uses."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash

from hicache_ext.stores import disk_files
from hicache_ext.stores.base import StoreError
from hicache_ext.stores.disk_folder import Folder, holds_store, owner, read_meta
from hicache_ext.stores.disk_index import Columns, DiskIndex, Entry, IndexDamaged, read_index

_BATCH = 1000
_GROUP = re.compile(r"g\d+(\.\d+)?")


def store_folders(path: Path) -> list[Path]:
    """The disk stores that an address means: the folder itself, or one for each head group and each copy.

    Raises:
        StoreError: there is none.
    """
    groups = [p for p in path.glob("g*") if _GROUP.fullmatch(p.name) and holds_store(p)]
    folders = sorted(groups, key=lambda p: [int(number) for number in p.name[1:].split(".")])
    if holds_store(path):
        folders.insert(0, path)
    if not folders:
        there = "holds no disk store" if path.is_dir() else "does not exist"
        raise StoreError(f"{path} {there}: name the folder that the server was given")
    return folders


class DiskInspector:
    """One folder. Reading takes no lock; ``remove`` takes the store's."""

    def __init__(self, folder: Path) -> None:
        """Raises StoreError, OSError."""
        self.folder = folder
        self.object_bytes, self._slots_per_file = read_meta(folder)

    @property
    def owner(self) -> str | None:
        """The pid of the process that uses the store, or None. Raises OSError."""
        return owner(self.folder)

    def entries(self) -> tuple[Columns, dict[tuple[bytes, int], int]]:
        """What the index says now, and when each namespace's epoch was last used, Unix time.

        Raises:
            StoreError: the index is damaged.
            OSError: it cannot be read.
        """
        path = self.folder / "index.sqlite"
        if not path.exists():
            return Columns([], [], [], []), {}
        try:
            return read_index(path)
        except IndexDamaged as error:
            raise StoreError(
                f"the index {path} is damaged ({error}): the next server that uses the folder starts it empty"
            ) from error

    def file_bytes(self) -> int:
        """Of all its files."""
        return sum(p.stat().st_size for p in self.folder.iterdir() if p.is_file())

    def read(self, slots: Sequence[int]) -> Iterator[bytes]:
        """The bytes in each slot; fewer than an object's if the file ends before, or cannot be read."""
        stride = disk_files.stride(self.object_bytes)
        files: dict[int, int] = {}
        try:
            for slot in slots:
                number, place = divmod(slot, self._slots_per_file)
                offset = place * stride
                try:
                    if number not in files:
                        path = self.folder / f"segment-{number:06d}"
                        files[number] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                    # From the device: a server writes past the page cache.
                    os.posix_fadvise(files[number], offset, stride, os.POSIX_FADV_DONTNEED)
                    yield os.pread(files[number], self.object_bytes, offset)
                except OSError:
                    yield b""
        finally:
            for file in files.values():
                os.close(file)

    def is_whole(self, entry: Entry, data: bytes) -> bool:
        """Whether these are the bytes that were stored."""
        return xxhash.xxh3_128_digest(data) == entry.digest

    def remove(self, entries: Sequence[Entry]) -> None:
        """Take objects out of the store; their room is for new ones.

        Raises:
            StoreError: a process uses the store, or the index cannot be written.
            OSError: the file system refuses.
        """
        # Holds the lock; the size of segments counts only when a store is made.
        folder = Folder(self.folder, self.object_bytes, 0)
        try:
            index = DiskIndex(self.folder / "index.sqlite", every_commit_durable=True)
            try:
                # A server may have used slots anew before the lock was taken.
                now = index.load()
                same = set(zip(now.slots, now.keys, strict=True))
                slots = [e.slot for e in entries if (e.slot, e.key) in same]
                for start in range(0, len(slots), _BATCH):
                    index.delete(slots[start : start + _BATCH])
            finally:
                index.close()
        except (sqlite3.Error, IndexDamaged) as error:
            raise StoreError(
                f"the index of {self.folder} cannot be written ({error}): free some space there"
            ) from error
        finally:
            folder.close()


def rows(columns: Columns) -> list[Entry]:
    return [Entry(*fields) for fields in zip(*columns, strict=True)]
