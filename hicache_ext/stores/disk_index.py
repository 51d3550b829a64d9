"""The index of a disk store: which object is in which slot, in SQLite.

SQLite's write-ahead log survives a kill and a power cut without repair. With ``synchronous=NORMAL`` a commit
costs no flush and a power cut loses the latest commits; with ``FULL`` it loses none.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from hicache_ext.stores.base import Key

_OBJECTS = """
CREATE TABLE IF NOT EXISTS objects (
    slot INTEGER PRIMARY KEY,
    namespace BLOB NOT NULL,
    epoch INTEGER NOT NULL,
    identity BLOB NOT NULL,
    head_group INTEGER NOT NULL,
    digest BLOB NOT NULL,
    used INTEGER NOT NULL
)
"""
# Beside the objects' order of use, for who cleans up: when a namespace's epoch was last used, Unix time.
_NAMESPACES = """
CREATE TABLE IF NOT EXISTS namespaces (
    namespace BLOB NOT NULL,
    epoch INTEGER NOT NULL,
    used INTEGER NOT NULL,
    PRIMARY KEY (namespace, epoch)
)
"""
_WAL_HEADER = 32
_SNAPSHOT_TRIES = 5

Times = Mapping[tuple[bytes, int], int]
"""Unix time by namespace and epoch."""


class IndexDamaged(Exception):
    """The file is not a database any more, or not this one."""


class Entry(NamedTuple):
    slot: int
    key: Key
    digest: bytes
    """16 bytes, of the object's bytes."""
    used: int


class Columns(NamedTuple):
    """The fields of many entries."""

    slots: list[int]
    keys: list[Key]
    digests: list[bytes]
    used: list[int]

    def without(self, slots: set[int]) -> Columns:
        kept = [i for i, slot in enumerate(self.slots) if slot not in slots]
        return Columns(
            [self.slots[i] for i in kept],
            [self.keys[i] for i in kept],
            [self.digests[i] for i in kept],
            [self.used[i] for i in kept],
        )


class DiskIndex:
    """Transactions are whole: an exception leaves the index as it was. Thread-safe."""

    def __init__(self, path: Path, *, every_commit_durable: bool) -> None:
        """Raises IndexDamaged, or sqlite3.Error where the file system refuses."""
        self._lock = threading.Lock()
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0)
        try:
            # One process owns the store, so the log needs no file shared between processes.
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute(f"PRAGMA synchronous={'FULL' if every_commit_durable else 'NORMAL'}")
            self._db.execute(_OBJECTS)
            self._db.execute(_NAMESPACES)
        except sqlite3.DatabaseError as error:
            self._db.close()
            if isinstance(error, sqlite3.OperationalError):
                raise
            raise IndexDamaged(str(error)) from error

    def load(self) -> Columns:
        """All entries, by slot. Raises IndexDamaged."""
        return _load(self._db)

    def insert(self, entries: Iterable[Entry], times: Times | None = None) -> None:
        """Raises sqlite3.Error, for example when the disk is full."""
        rows = [(e.slot, *e.key, e.digest, e.used) for e in entries]
        self._transaction("INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?, ?, ?, ?)", rows, times)

    def delete(self, slots: Iterable[int]) -> None:
        """Raises sqlite3.Error."""
        self._transaction("DELETE FROM objects WHERE slot = ?", [(int(slot),) for slot in slots])

    def save_used(self, used: Iterable[tuple[int, int]], times: Times | None = None) -> None:
        """Pairs of slot and time. Raises sqlite3.Error."""
        rows = [(int(t), int(slot)) for slot, t in used]
        self._transaction("UPDATE objects SET used = ? WHERE slot = ?", rows, times)

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _transaction(self, statement: str, rows: list[tuple], times: Times | None = None) -> None:
        with self._lock:
            self._db.execute("BEGIN")
            try:
                self._db.executemany(statement, rows)
                if times:
                    self._db.executemany(
                        "INSERT OR REPLACE INTO namespaces VALUES (?, ?, ?)",
                        [(*name, used) for name, used in times.items()],
                    )
                self._db.execute("COMMIT")
            except sqlite3.Error:
                # SQLite has rolled back by itself after some errors, a full disk among them.
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise


def read_index(path: Path) -> tuple[Columns, dict[tuple[bytes, int], int]]:
    """Entries and times of use as of now; from a copy, so also beside the process that owns the index.

    The log is copied after the database. While it is not begun anew, it has every page that a checkpoint may
    have moved meanwhile, so the two together are one state; SQLite ignores a torn end.

    Raises:
        IndexDamaged: it is no index.
        OSError: the file system refuses.
    """
    log = path.with_name(path.name + "-wal")
    with tempfile.TemporaryDirectory(prefix="hicache-ext-") as folder:
        copy = Path(folder) / "index.sqlite"
        for _ in range(_SNAPSHOT_TRIES):
            before = _head(log)
            shutil.copyfile(path, copy)
            copied_log = copy.with_name(copy.name + "-wal")
            copied_log.unlink(missing_ok=True)
            if log.exists():
                shutil.copyfile(log, copied_log)
            if _head(log) == before:
                break
        else:
            raise OSError(0, "it changes faster than it can be read; try again", str(path))
        try:
            db = sqlite3.connect(copy)
            try:
                times = {}
                if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'namespaces'").fetchone():
                    rows = db.execute("SELECT namespace, epoch, used FROM namespaces").fetchall()
                    times = {(namespace, epoch): used for namespace, epoch, used in rows}
                return _load(db), times
            finally:
                db.close()
        except sqlite3.DatabaseError as error:
            raise IndexDamaged(str(error)) from error


def _head(log: Path) -> bytes:
    """What changes whenever the log begins anew."""
    try:
        with log.open("rb") as file:
            return file.read(_WAL_HEADER)
    except FileNotFoundError:
        return b""


def _load(db: sqlite3.Connection) -> Columns:
    """Raises IndexDamaged."""
    try:
        rows = db.execute(
            "SELECT slot, namespace, epoch, identity, head_group, digest, used FROM objects ORDER BY slot"
        ).fetchall()
    except sqlite3.DatabaseError as error:
        raise IndexDamaged(str(error)) from error
    # One copy of each namespace, not one an object.
    copies: dict[bytes, bytes] = {}
    return Columns(
        [row[0] for row in rows],
        [Key(copies.setdefault(row[1], row[1]), row[2], row[3], row[4]) for row in rows],
        [row[5] for row in rows],
        [row[6] for row in rows],
    )
