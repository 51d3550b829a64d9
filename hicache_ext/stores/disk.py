"""A store in a folder of a local disk.

    store.json        format version and geometry
    lock              held by the one process that uses the folder
    index.sqlite      which object is in which slot, with a checksum of its bytes
    segment-000000    slots

An object is written into a free slot, flushed as far as ``durability`` asks, and only then entered in the
index; a slot is taken out of the index before it is reused. So a kill at any point loses what was in flight
and nothing else. The checksum in the index is verified on every read: a slot that a power cut left torn is a
miss.

A read or write that is late keeps its row held until the system call has returned; nothing is copied.
"""

from __future__ import annotations

import gc
import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from hicache_ext.stores import disk_files
from hicache_ext.stores.base import (
    GB,
    Holds,
    Key,
    Outcome,
    Rack,
    Rows,
    StoreError,
    StoreStats,
    check_object_bytes,
    nothing,
)
from hicache_ext.stores.disk_files import Segments
from hicache_ext.stores.disk_folder import Folder
from hicache_ext.stores.disk_index import DiskIndex, Entry, IndexDamaged
from hicache_ext.stores.policy import LeastRecentlyUsed, SlotHistory, SlotPolicy, lowest
from hicache_ext.stores.workers import Fate, Workers

logger = logging.getLogger(__name__)

_JOB_BYTES = 1 << 20
_EVICT_SHARE = 256
_RETRY_GROWTH_S = 30.0
_CLOSE_S = 5.0


class Durability(StrEnum):
    """What has happened when an object becomes visible; a kill of the process loses nothing in any case."""

    NONE = "none"
    """Its bytes are with the operating system. A power cut may lose it; it is then a miss."""
    DATA = "data"
    """Its bytes are on the device. A power cut may lose the newest index entries."""
    FULL = "full"
    """Its bytes and its index entry are on the device."""


@dataclass(frozen=True)
class DiskSettings:
    path: Path
    size_gb: float
    """Quota of the objects in GB (10^9 bytes); the index takes about 100 bytes an object besides."""
    durability: Durability = Durability.NONE
    direct: bool = True
    """Bypass the page cache where file system and buffer allow."""
    threads: int = 4
    """Reads and writes in flight."""
    segment_bytes: int = 1 << 30
    """About the size of one file; counts when the store is made."""


class _Transfer(NamedTuple):
    slot: int
    row: int
    position: int
    key: Key
    digest: bytes


class DiskStore:
    """See the module's text. ``close`` it, or the folder stays locked until the process ends."""

    def __init__(self, settings: DiskSettings, object_bytes: int, policy: SlotPolicy | None = None) -> None:
        """Open the folder's store, or make one there.

        Raises:
            StoreError: the folder cannot be used, is in use, or holds something else.
        """
        self.settings = settings
        self.object_bytes = check_object_bytes(object_bytes)
        self._policy = policy or LeastRecentlyUsed()
        self._slots = int(settings.size_gb * GB) // disk_files.stride(object_bytes)
        if self._slots < 1:
            raise StoreError(
                f"size_gb={settings.size_gb:g} is less than one object of {object_bytes} bytes; give more"
            )
        self._lock = threading.Lock()
        self._room = threading.Lock()
        self._stats = StoreStats()
        self._holds = Holds()
        self._rack: Rack | None = None
        self._closed = False

        self._where: dict[Key, int] = {}
        self._keys: list[Key | None] = [None] * self._slots
        self._digests: list[bytes] = [b""] * self._slots
        self._history = SlotHistory(*(np.zeros(self._slots, np.int64) for _ in range(3)))
        self._live = np.zeros(self._slots, np.bool_)
        self._readers = np.zeros(self._slots, np.int32)
        self._writing: set[Key] = set()
        # Out of the map, still in the index: not to be reused yet.
        self._doomed: list[int] = []
        self._clock = 0
        # When each namespace's epoch was last used, Unix time, as far as the index does not say it yet.
        self._times: dict[tuple[bytes, int], int] = {}
        self._grow_at = 0.0

        try:
            self._open()
        except BaseException:
            for part in ("_segments", "_folder"):
                if hasattr(self, part):
                    getattr(self, part).close()
            raise
        self._workers = Workers("disk store", settings.threads)

    @property
    def direct(self) -> bool:
        """Whether transfers bypass the page cache."""
        return self._segments.direct

    def register(self, buffer: np.ndarray) -> None:
        rack = Rack(buffer, self.object_bytes)
        if self.direct and self._alignment and rack.base % self._alignment:
            logger.warning(
                "hicache-ext: the host buffer is not aligned to %d bytes; the disk store uses the page cache",
                self._alignment,
            )
            self._segments.close()
            self._segments.direct = False
            self._segments.open()
        self._rack = rack

    def exists(self, keys: Sequence[Key], deadline: float) -> Outcome:
        outcome = nothing(len(keys), down=self._closed)
        if not self._closed:
            with self._lock:
                outcome.ok[:] = [key in self._where for key in keys]
        return outcome

    def get(self, keys: Sequence[Key], rows: Rows, deadline: float) -> Outcome:
        if self._rack is None or self._closed:
            return nothing(len(keys), down=True)
        ok, held = np.zeros(len(keys), np.bool_), np.zeros(len(keys), np.bool_)
        reads: list[_Transfer] = []
        used: set[tuple[bytes, int]] = set()
        with self._lock:
            self._clock += 1
            for position, (key, row) in enumerate(zip(keys, rows, strict=True)):
                slot = self._where.get(key)
                if slot is None:
                    self._stats.misses += 1
                    continue
                self._readers[slot] += 1
                self._history.used[slot] = self._clock
                used.add(key[:2])
                reads.append(_Transfer(slot, int(row), position, key, self._digests[slot]))
            self._times.update(dict.fromkeys(used, int(time.time())))
        reads.sort()
        troubles = 0
        for part, results in self._run(self._read, reads, deadline, held, self._unpin):
            good = 0
            for read, result in zip(part, results or (), strict=False):
                ok[read.position] = bool(result)
                good += bool(result)
            troubles += results is None
            with self._lock:
                self._stats.hits += good
                self._stats.misses += len(part) - good
                if results is None:
                    self._stats.late += len(part)
                else:
                    for read, result in zip(part, results, strict=False):
                        self._history.hits[read.slot] += bool(result)
        return Outcome(ok, held, down=troubles > 0 and not ok.any())

    def put(self, keys: Sequence[Key], rows: Rows, deadline: float, *, hot: bool = False) -> Outcome:
        if self._rack is None or self._closed:
            return nothing(len(keys), down=True)
        ok, held = np.zeros(len(keys), np.bool_), np.zeros(len(keys), np.bool_)
        new: list[tuple[Key, int, int]] = []
        present: list[int] = []
        again: list[tuple[int, int]] = []
        first: dict[Key, int] = {}
        with self._lock:
            self._clock += 1
            for position, (key, row) in enumerate(zip(keys, rows, strict=True)):
                slot = self._where.get(key)
                if slot is not None:
                    self._history.used[slot] = self._clock
                    # Room for the others must not be made at its cost.
                    self._readers[slot] += 1
                    present.append(slot)
                    self._stats.present += 1
                    ok[position] = True
                elif key in first:
                    again.append((position, first[key]))
                elif key in self._writing:
                    self._stats.declined += 1
                else:
                    self._writing.add(key)
                    first[key] = position
                    new.append((key, int(row), position))
            short = len(new) > len(self._free)
        in_time = True
        if new and short:
            in_time = self._workers.ask(partial(self._make_room, len(new), deadline), deadline)
        writes = self._take_slots(new)
        with self._lock:
            self._stats.declined += len(new) - len(writes)
            for slot in present:
                self._readers[slot] -= 1
        troubles = 0
        written: list[tuple[_Transfer, bytes]] = []
        undo = self._give_slots_back
        for part, results in self._run(self._write, writes, deadline, held, undo, undo):
            if results is None:
                troubles += 1
                with self._lock:
                    self._stats.late += len(part)
                continue
            written += [(w, digest) for w, digest in zip(part, results, strict=True) if digest]
            self._give_slots_back([w for w, digest in zip(part, results, strict=True) if not digest])
        if written:
            (finish,) = self._workers.run(partial(self._publish, now=self._clock), [written], deadline)
            if finish.fate is Fate.DROPPED:
                undo([w for w, _ in written])
            if finish.fate is not Fate.DONE:
                # If it still runs, the objects appear later: they are whole.
                troubles += 1
                with self._lock:
                    self._stats.late += len(written)
            elif finish.result:
                ok[[w.position for w, _ in written]] = True
        for position, original in again:
            ok[position] = ok[original]
        return Outcome(ok, held, down=(troubles > 0 or not in_time) and not ok.any())

    def remove(self, keys: Sequence[Key], deadline: float) -> Outcome:
        outcome = nothing(len(keys), down=self._closed)
        if self._closed:
            return outcome
        with self._lock:
            slots = [slot for key in keys if (slot := self._where.get(key)) is not None]
            self._stats.removed += self._forget(slots)
        done = not slots or self._workers.ask(self._reap, deadline)
        outcome.ok[:] = done
        return replace(outcome, down=not done)

    def clear(self, namespace: bytes, below_epoch: int, deadline: float) -> bool:
        if self._closed:
            return False
        with self._lock:
            slots = [
                slot
                for key, slot in self._where.items()
                if key.epoch < below_epoch and key.namespace == namespace
            ]
            self._stats.removed += self._forget(slots)
        return not slots or self._workers.ask(self._reap, deadline)

    def ping(self, deadline: float) -> bool:
        return not self._closed and self._workers.ask(self._probe, deadline)

    def released(self) -> list[int]:
        return self._holds.released()

    def stats(self) -> StoreStats:
        with self._lock:
            objects = len(self._where)
            return replace(
                self._stats,
                held=len(self._holds),
                objects=objects,
                bytes_used=objects * self.object_bytes,
                bytes_limit=self._slots * self.object_bytes,
            )

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if not self._workers.close(_CLOSE_S):
            # A file descriptor that is closed under a system call may by then name another file.
            logger.warning(
                "hicache-ext: the disk under %s does not answer; its files stay open", self.settings.path
            )
            return
        with suppress(sqlite3.Error):
            slots = np.flatnonzero(self._live)
            used = self._history.used[slots].tolist()
            self._index.save_used(zip(slots.tolist(), used, strict=True), self._times)
        self._index.close()
        self._segments.close()
        self._folder.close()

    # Opening

    def _open(self) -> None:
        folder = self.settings.path
        try:
            self._folder = Folder(folder, self.object_bytes, self.settings.segment_bytes)
            self._alignment = disk_files.direct_alignment(folder) if self.settings.direct else None
            direct = self._alignment is not None and self.object_bytes % self._alignment == 0
            self._segments = Segments(
                folder, self.object_bytes, self._folder.slots_per_file, self._slots, direct=direct
            )
            self._usable = self._segments.open()
            with _no_garbage_collection():
                self._load_index(folder / "index.sqlite")
        except OSError as error:
            raise StoreError(_cannot_use(folder, error)) from error
        except sqlite3.Error as error:
            raise StoreError(
                f"the index of the disk store in {folder} cannot be opened ({error}): free some space there, "
                "or name another folder"
            ) from error
        self._free = deque(np.flatnonzero(~self._live[: self._usable]).tolist())

    def _load_index(self, path: Path) -> None:
        durable = self.settings.durability is Durability.FULL
        try:
            self._index = DiskIndex(path, every_commit_durable=durable)
            self._load_entries()
        except IndexDamaged as error:
            logger.warning(
                "hicache-ext: the index %s is damaged (%s); the disk store starts empty", path, error
            )
            if hasattr(self, "_index"):
                self._index.close()
            self._where.clear()
            self._live[:] = False
            for suffix in ("", "-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            self._index = DiskIndex(path, every_commit_durable=durable)

    def _load_entries(self) -> None:
        rows = self._index.load()
        where = dict(zip(rows.keys, rows.slots, strict=True))
        # The quota may have shrunk, a file may have been deleted, and an old entry of a key may be left from
        # when the disk was too full to remove it.
        stale = {
            slot
            for slot, key in zip(rows.slots, rows.keys, strict=True)
            if not 0 <= slot < self._usable or where[key] != slot
        }
        if stale:
            rows = rows.without(stale)
            where = dict(zip(rows.keys, rows.slots, strict=True))
            self._index.delete(stale)
        self._where = where
        for slot, key, digest in zip(rows.slots, rows.keys, rows.digests, strict=True):
            self._keys[slot] = key
            self._digests[slot] = digest
        live = np.array(rows.slots, np.int64)
        self._live[live] = True
        self._history.used[live] = self._history.written[live] = rows.used
        self._clock = max(rows.used, default=0)

    # Work on the workers' threads

    def _read(self, reads: list[_Transfer], deadline: float) -> list[bool]:
        assert self._rack is not None
        good = [False] * len(reads)
        bad: list[int] = []
        try:
            for start, stop in self._runs(reads):
                if time.monotonic() >= deadline:
                    break
                views = [self._rack.view(read.row) for read in reads[start:stop]]
                try:
                    self._segments.read(reads[start].slot, views)
                except OSError as error:
                    self._count_error(error, stop - start)
                    bad += range(start, stop)
                    continue
                for i, view in enumerate(views, start):
                    good[i] = xxhash.xxh3_128_digest(view) == reads[i].digest
                    if not good[i]:
                        bad.append(i)
                        with self._lock:
                            self._stats.corrupt += 1
        finally:
            self._unpin(reads)
        if bad:
            with self._lock:
                # Only if the slot still is what was read: it may have been removed meanwhile.
                self._forget([r.slot for r in (reads[i] for i in bad) if self._where.get(r.key) == r.slot])
            self._reap()
        return good

    def _write(self, writes: list[_Transfer], deadline: float) -> list[bytes]:
        """A digest for each object that was written; empty for the others."""
        assert self._rack is not None
        digests = [b""] * len(writes)
        for start, stop in self._runs(writes):
            if time.monotonic() >= deadline:
                break
            views = [self._rack.view(write.row) for write in writes[start:stop]]
            try:
                self._segments.write(writes[start].slot, views)
            except OSError as error:
                self._count_error(error, stop - start)
                continue
            digests[start:stop] = [xxhash.xxh3_128_digest(view) for view in views]
        return digests

    def _publish(self, written: list[tuple[_Transfer, bytes]], now: int) -> bool:
        """Make written objects durable as far as asked, then visible."""
        writes = [w for w, _ in written]
        with self._lock:
            self._times.update(dict.fromkeys({w.key[:2] for w in writes}, int(time.time())))
            times, self._times = self._times, {}
        try:
            if self.settings.durability is not Durability.NONE:
                self._segments.sync([w.slot for w in writes])
            self._index.insert((Entry(w.slot, w.key, digest, now) for w, digest in written), times)
        except (OSError, sqlite3.Error) as error:
            self._count_error(error, len(written))
            self._give_slots_back(writes)
            return False
        with self._lock:
            for write, digest in written:
                slot = write.slot
                self._where[write.key] = slot
                self._keys[slot] = write.key
                self._digests[slot] = digest
                self._live[slot] = True
                self._history.used[slot] = self._history.written[slot] = now
                self._history.hits[slot] = 0
                self._writing.discard(write.key)
            self._stats.stored += len(written)
        return True

    def _make_room(self, count: int, deadline: float) -> bool:
        """Free slots for ``count`` objects as far as possible: new files first, then eviction."""
        # Behind a file system that hangs, waiting threads would be missing for reads.
        if not self._room.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return False
        try:
            while len(self._free) < count and self._usable < self._slots:
                if time.monotonic() < self._grow_at:
                    break
                try:
                    usable = self._segments.grow(self._usable)
                except OSError as error:
                    self._grow_at = time.monotonic() + _RETRY_GROWTH_S
                    logger.warning(
                        "hicache-ext: the disk store in %s cannot grow beyond %.1f GB: %s",
                        self.settings.path,
                        self._usable * self.object_bytes / GB,
                        error.strerror,
                    )
                    break
                with self._lock:
                    self._free.extend(range(self._usable, usable))
                self._usable = usable
            missing = count - len(self._free)
            if missing <= 0:
                return True
            with self._lock:
                missing -= sum(not self._readers[slot] for slot in self._doomed)
                if missing > 0:
                    rank = self._policy.rank(self._history)
                    candidates = self._live & (self._readers == 0)
                    victims = lowest(rank, candidates, max(missing, self._slots // _EVICT_SHARE))
                    self._stats.evicted += self._forget(victims.tolist())
            self._reap()
        finally:
            self._room.release()
        return True

    def _reap(self) -> bool:
        """Take forgotten slots out of the index, then reuse them."""
        with self._lock:
            slots = [slot for slot in self._doomed if not self._readers[slot]]
            self._doomed = [slot for slot in self._doomed if self._readers[slot]]
        try:
            self._index.delete(slots)
        except sqlite3.Error as error:
            self._count_error(error, 0)
            with self._lock:
                self._doomed += slots
            return False
        with self._lock:
            self._free.extend(sorted(slots))
        return True

    def _probe(self) -> bool:
        try:
            self._segments.probe()
        except OSError:
            return False
        return True

    # Helpers

    def _run(
        self,
        work: Callable[..., list],
        transfers: list[_Transfer],
        deadline: float,
        held: np.ndarray,
        undo: Callable[[list[_Transfer]], None],
        at_end: Callable[[list[_Transfer]], None] | None = None,
    ) -> list[tuple[list[_Transfer], list | None]]:
        """Spread transfers over the workers. Results per part; None for a part that is late.

        ``undo`` is called for a part that never started, ``at_end`` when one that is late has ended; until
        then its rows are held.
        """
        results: list[tuple[list[_Transfer], list | None]] = []
        for part in self._workers.run(partial(work, deadline=deadline), self._parts(transfers), deadline):
            results.append((part.value, part.result))
            if part.fate is Fate.DROPPED:
                undo(part.value)
            elif part.fate is Fate.RUNNING:
                rows = [transfer.row for transfer in part.value]
                held[[transfer.position for transfer in part.value]] = True
                self._holds.add(rows)
                if at_end is not None:
                    part.when_ended(partial(at_end, part.value))
                part.when_ended(partial(self._holds.done, rows))
        return results

    def _parts(self, transfers: list[_Transfer]) -> list[list[_Transfer]]:
        """Enough parts to keep all workers busy, but of a size that is worth a hand-over."""
        share = len(transfers) * self.object_bytes // self.settings.threads
        size = max(1, min(_JOB_BYTES, max(share, _JOB_BYTES // 8)) // self.object_bytes)
        return [transfers[i : i + size] for i in range(0, len(transfers), size)]

    def _runs(self, transfers: list[_Transfer]) -> list[tuple[int, int]]:
        """Stretches ``[start, stop)`` of transfers whose slots follow each other in one file."""
        runs = []
        start = 0
        for i in range(1, len(transfers) + 1):
            if i < len(transfers):
                last, slot = transfers[i - 1].slot, transfers[i].slot
                if slot == last + 1 and self._segments.same_file(slot, last):
                    continue
            runs.append((start, i))
            start = i
        return runs

    def _take_slots(self, new: list[tuple[Key, int, int]]) -> list[_Transfer]:
        """Slots for as many of the new objects as there are; the others may be tried again later."""
        with self._lock:
            count = min(len(new), len(self._free))
            slots = sorted(self._free.popleft() for _ in range(count))
            for key, _, _ in new[count:]:
                self._writing.discard(key)
        return [
            _Transfer(slot, row, position, key, b"")
            for slot, (key, row, position) in zip(slots, new[:count], strict=True)
        ]

    def _give_slots_back(self, writes: list[_Transfer]) -> None:
        with self._lock:
            for write in writes:
                self._free.append(write.slot)
                self._writing.discard(write.key)

    def _unpin(self, reads: list[_Transfer]) -> None:
        with self._lock:
            for read in reads:
                self._readers[read.slot] -= 1

    def _forget(self, slots: Sequence[int]) -> int:
        """Make objects invisible; returns how many. Called with the lock held; ``_reap`` must follow."""
        count = 0
        for slot in slots:
            key = self._keys[slot]
            if key is None:
                continue
            del self._where[key]
            self._keys[slot] = None
            self._live[slot] = False
            self._doomed.append(slot)
            count += 1
        return count

    def _count_error(self, error: Exception, objects: int) -> None:
        with self._lock:
            first = not self._stats.errors
            self._stats.errors += max(1, objects)
        if first:
            logger.warning(
                "hicache-ext: the disk store in %s: %s; treated as misses", self.settings.path, error
            )


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Hundreds of thousands of new tuples would make the collector walk the whole process again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _cannot_use(folder: Path, error: OSError) -> str:
    cures = {
        PermissionError: "give the server's user write access there, or name another folder",
        NotADirectoryError: "name a folder",
        FileExistsError: "name a folder",
    }
    cure = cures.get(type(error), "free some space there, or name another folder")
    return f"the disk store cannot use {folder} ({error.strerror}): {cure}"
