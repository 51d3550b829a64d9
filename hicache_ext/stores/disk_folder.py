"""The folder of a disk store: one owner at a time, and only a store of this format and object size."""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hicache_ext.stores import disk_files
from hicache_ext.stores.base import StoreError

FORMAT = 1
_META = "store.json"
_OWN = ("lock", _META, _META + ".new", "probe", "lost+found")


class Meta(NamedTuple):
    """What ``store.json`` says."""

    object_bytes: int
    slots_per_file: int


class Folder:
    """Holds the folder's lock until ``close``."""

    def __init__(self, path: Path, object_bytes: int, segment_bytes: int) -> None:
        """Make the folder a store, or check that it is one for objects of this size.

        Raises:
            StoreError: it is in use, or holds something else.
            OSError: the file system refuses.
        """
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._take_lock()
            if not (path / _META).exists():
                self._make(object_bytes, segment_bytes)
            self.slots_per_file = self._check(object_bytes)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(
                f"the disk store in {self.path} is in use by another process (pid {_pid(self._lock)}): stop "
                "that one, or name another folder"
            ) from None
        os.ftruncate(self._lock, 0)
        with suppress(OSError):
            # Only for the message above; the disk may be full.
            os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def _make(self, object_bytes: int, segment_bytes: int) -> None:
        foreign = sorted(p.name for p in self.path.iterdir() if p.name not in _OWN)
        if foreign:
            raise StoreError(
                f"{self.path} is not empty and holds no disk store ({foreign[0]} is there): name an empty or "
                "a new folder"
            )
        per_file = max(1, segment_bytes // disk_files.stride(object_bytes))
        new = self.path / (_META + ".new")
        with new.open("w") as file:
            json.dump({"format": FORMAT, "object_bytes": object_bytes, "slots_per_file": per_file}, file)
            file.flush()
            os.fsync(file.fileno())
        new.rename(self.path / _META)
        disk_files.sync_folder(self.path)

    def _check(self, object_bytes: int) -> int:
        """Slots per file."""
        meta = read_meta(self.path)
        if meta.object_bytes != object_bytes:
            raise StoreError(
                f"the disk store in {self.path} holds objects of {meta.object_bytes} bytes, this model's "
                f"have {object_bytes}: name one folder per model, or delete this one"
            )
        return meta.slots_per_file


def holds_store(path: Path) -> bool:
    """Whether a folder is a disk store."""
    return (path / _META).is_file()


def read_meta(path: Path) -> Meta:
    """Of the store in a folder. Raises StoreError if it is damaged or of another format, OSError."""
    file = path / _META
    try:
        values = json.loads(file.read_text())
        version = int(values["format"])
        if version == FORMAT:
            return Meta(int(values["object_bytes"]), int(values["slots_per_file"]))
    except (ValueError, KeyError, TypeError):
        raise StoreError(f"{file} is damaged: delete the folder, or name another") from None
    raise StoreError(
        f"the disk store in {path} was written by format version {version}, this release reads "
        f"version {FORMAT}: delete the folder, or name another"
    )


def owner(path: Path) -> str | None:
    """The pid of the process that uses a store, as it says; None if nobody does. Raises OSError."""
    try:
        lock = os.open(path / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _pid(lock)
    finally:
        os.close(lock)
    return None


def _pid(lock: int) -> str:
    return os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
