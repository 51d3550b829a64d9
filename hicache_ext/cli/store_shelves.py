"""The stores behind an address, as ``hicache-ext store`` sees them: lists of objects to read and remove."""

from __future__ import annotations

import mmap
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import numpy as np

from hicache_ext.cli.store_check import Checker, is_mark
from hicache_ext.stores.base import Key, StoreError, check_object_bytes
from hicache_ext.stores.disk import DiskSettings
from hicache_ext.stores.disk_index import Entry
from hicache_ext.stores.disk_inspect import DiskInspector, rows, store_folders
from hicache_ext.stores.mooncake import MooncakeStore
from hicache_ext.stores.mooncake_admin import METRICS_PORT, MasterAdmin
from hicache_ext.stores.mooncake_client import MooncakeSettings, host_port, unreachable
from hicache_ext.stores.urls import parse_store_url

GONE = "gone"
"""Of an object that was removed or replaced while it was looked at: neither sound nor bad."""
DAMAGED = "damaged"
UNREADABLE = "cannot be read"

_ROUNDS = 2
_BATCH = 32
_CALL_S = 30.0


@dataclass(frozen=True, slots=True)
class Item:
    key: Key
    size: int
    entry: Entry | None = None
    """Where it lies, in a disk store."""


class Shelf(Protocol):
    """One store: a folder, or what a Mooncake master knows."""

    name: str

    def items(self) -> list[Item]:
        """All objects, pages and marks, in the order in which they are best read."""
        ...

    def times(self) -> dict[tuple[bytes, int], int] | None:
        """When each namespace's epoch was last used, Unix time; None if this kind of store keeps no times."""
        ...

    def in_use(self) -> str | None:
        """Who uses it, so that nothing can be removed; None if that is no obstacle."""
        ...

    def facts(self) -> list[tuple[str, str]]:
        """What ``stat`` says beside the counts."""
        ...

    def check(self, items: Sequence[Item], checker: Checker) -> Iterator[tuple[Item, str | None]]:
        """Each item with why it is bad, ``GONE``, or None if it is sound."""
        ...

    def remove(self, items: Sequence[Item]) -> None: ...


def open_shelves(url: str, metrics: str | None) -> list[Shelf]:
    """All of them that an address means.

    Raises:
        StoreError: a wrong address, or nothing is there.
        OSError: it cannot be read.
    """
    parts = urlsplit(url)
    if parts.scheme == "file" and "size_gb=" not in parts.query:
        # How much room the server may use is of no interest here.
        url = f"{url}{'&' if parts.query else '?'}size_gb=1"
        settings: DiskSettings | MooncakeSettings = replace(_disk(url), size_gb=0.0)
    else:
        settings = parse_store_url(url)
    if isinstance(settings, DiskSettings):
        return [DiskShelf(folder, settings) for folder in store_folders(settings.path)]
    host, _ = host_port(settings.master)
    return [MooncakeShelf(settings, metrics or f"{host}:{METRICS_PORT}")]


def _disk(url: str) -> DiskSettings:
    settings = parse_store_url(url)
    assert isinstance(settings, DiskSettings)
    return settings


class DiskShelf:
    def __init__(self, folder: Path, settings: DiskSettings) -> None:
        self._inspector = DiskInspector(folder)
        self._settings = settings
        self._times: dict[tuple[bytes, int], int] = {}
        self.name = str(folder)

    def items(self) -> list[Item]:
        columns, self._times = self._inspector.entries()
        size = self._inspector.object_bytes
        return [Item(entry.key, size, entry) for entry in rows(columns)]

    def times(self) -> dict[tuple[bytes, int], int]:
        return self._times

    def in_use(self) -> str | None:
        pid = self._inspector.owner
        return None if pid is None else f"in use by process {pid}"

    def facts(self) -> list[tuple[str, str]]:
        settings, size = self._settings, self._inspector.object_bytes
        quota = f"{settings.size_gb:g} GB" if settings.size_gb else "the server's size_gb"
        return [
            ("object size", f"{size} bytes"),
            ("files", f"{self._inspector.file_bytes() / 1e9:.3f} GB on the disk, {quota} allowed a folder"),
            ("in use", self.in_use() or "no"),
        ]

    def check(self, items: Sequence[Item], checker: Checker) -> Iterator[tuple[Item, str | None]]:
        # A server may use a slot anew while it is read. Bad is what its index named before and after that,
        # twice, because an object may also have gone and come back.
        doubtful = list(items)
        problems: list[str] = []
        for _ in range(_ROUNDS):
            again, problems = [], []
            for item, problem in self._read(doubtful, checker):
                if problem is None:
                    yield item, None
                else:
                    again.append(item)
                    problems.append(problem)
            doubtful = again
            if not doubtful:
                return
            columns, _ = self._inspector.entries()
            now = set(zip(columns.slots, columns.keys, columns.digests, strict=True))
            named = [i.entry is not None and (i.entry.slot, i.key, i.entry.digest) in now for i in doubtful]
            yield from ((item, GONE) for item, there in zip(doubtful, named, strict=True) if not there)
            doubtful = [item for item, there in zip(doubtful, named, strict=True) if there]
            problems = [problem for problem, there in zip(problems, named, strict=True) if there]
        yield from zip(doubtful, problems, strict=True)

    def _read(self, items: Sequence[Item], checker: Checker) -> Iterator[tuple[Item, str | None]]:
        entries = [item.entry for item in items if item.entry is not None]
        slots = [entry.slot for entry in entries]
        for item, entry, data in zip(items, entries, self._inspector.read(slots), strict=True):
            if len(data) < item.size:
                yield item, UNREADABLE
            elif not self._inspector.is_whole(entry, data):
                yield item, DAMAGED
            else:
                yield item, None if is_mark(item.key) else checker.problem(item.key, data)

    def remove(self, items: Sequence[Item]) -> None:
        self._inspector.remove([item.entry for item in items if item.entry is not None])


class MooncakeShelf:
    def __init__(self, settings: MooncakeSettings, metrics: str) -> None:
        # Looks only: gives no memory, which would be gone a moment later.
        self._settings = replace(settings, segment_gb=0.0)
        self._admin = MasterAdmin(metrics)
        self._others = 0
        self.name = f"Mooncake {settings.master}"

    def items(self) -> list[Item]:
        keys, self._others = self._admin.keys()
        keys.sort()
        sizes = self._admin.sizes(keys)
        return [Item(key, size) for key, size in zip(keys, sizes, strict=True) if size]

    def times(self) -> None:
        return None

    def in_use(self) -> None:
        return None

    def facts(self) -> list[tuple[str, str]]:
        facts = []
        for segment in self._admin.segments():
            used, size = segment.get("allocator_used_bytes", 0), segment.get("size_bytes", 0)
            status = segment.get("status", "unknown")
            facts.append(
                (
                    f"memory of {segment.get('segment_name')}",
                    f"{used / 1e9:.3f} of {size / 1e9:.3f} GB, {status}",
                )
            )
        if not facts:
            facts.append(("memory", "no server gives any, so nothing can be stored"))
        if self._others:
            facts.append(
                ("other objects", f"{self._others} that are not of hicache-ext or of another format")
            )
        return facts

    def check(self, items: Sequence[Item], checker: Checker) -> Iterator[tuple[Item, str | None]]:
        by_size: dict[int, list[Item]] = defaultdict(list)
        for item in items:
            by_size[item.size].append(item)
        for size, same in sorted(by_size.items()):
            try:
                check_object_bytes(size)
            except StoreError:
                yield from ((item, "geometry") for item in same)
                continue
            buffer = np.frombuffer(mmap.mmap(-1, _BATCH * size), np.uint8).reshape(_BATCH, size)
            store = self._connected(size, buffer)
            try:
                for start in range(0, len(same), _BATCH):
                    yield from self._read(store, buffer, same[start : start + _BATCH], checker)
            finally:
                store.close()

    def _read(
        self, store: MooncakeStore, buffer: np.ndarray, items: list[Item], checker: Checker
    ) -> Iterator[tuple[Item, str | None]]:
        keys = [item.key for item in items]
        deadline = time.monotonic() + _CALL_S
        got = store.get(keys, range(len(keys)), deadline)
        there = got if got.ok.all() else store.exists(keys, deadline)
        if there.down:
            raise StoreError(f"{self.name} stopped answering: {unreachable(self._settings) or 'try again'}")
        if got.held.any():
            raise StoreError(f"{self.name}: a server that holds objects does not answer: try again")
        for row, item in enumerate(items):
            if not got.ok[row]:
                yield item, UNREADABLE if there.ok[row] else GONE
            else:
                yield item, None if is_mark(item.key) else checker.problem(item.key, buffer[row].tobytes())

    def remove(self, items: Sequence[Item]) -> None:
        if not items:
            return
        buffer = np.zeros((1, 512), np.uint8)
        store = self._connected(512, buffer)
        try:
            for start in range(0, len(items), 1000):
                keys = [item.key for item in items[start : start + 1000]]
                if not store.remove(keys, time.monotonic() + _CALL_S).ok.all():
                    raise StoreError(f"{self.name} did not remove all objects: try again")
        finally:
            store.close()

    def _connected(self, size: int, buffer: np.ndarray) -> MooncakeStore:
        store = MooncakeStore(self._settings, size)
        store.register(buffer)
        if (problem := store.wait_connected(time.monotonic() + _CALL_S)) is not None:
            store.close()
            raise StoreError(problem)
        return store
