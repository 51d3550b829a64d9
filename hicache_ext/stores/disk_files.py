"""The files of a disk store: preallocated segments of slots, past the page cache where that is possible."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

BLOCK = 4096
_MAX_VECTORS = 512
_HEADROOM = 16 << 20
"""Bytes left free on the file system, so that the index can still be written when the store is full."""


class Segments:
    """Slots of ``stride`` bytes in files of ``per_file`` slots, made when they are first needed."""

    def __init__(self, folder: Path, object_bytes: int, per_file: int, slots: int, *, direct: bool) -> None:
        self._folder = folder
        self._object_bytes = object_bytes
        self.stride = stride(object_bytes)
        self._per_file = per_file
        self._slots = slots
        self.direct = direct
        self._fds: dict[int, int] = {}
        # What lies between two objects is read into one page and written from another, always zero.
        self._pad_in = mmap.mmap(-1, BLOCK)
        self._pad_out = mmap.mmap(-1, BLOCK)
        self._pad = self.stride - object_bytes

    def open(self) -> int:
        """Open what is there, cut to the present number of slots. Returns the slots that can be used now.

        Raises OSError.
        """
        usable = 0
        count = -(-self._slots // self._per_file)
        for path in self._folder.glob("segment-*"):
            number = path.name.removeprefix("segment-")
            if not number.isdigit() or int(number) >= count:
                path.unlink()
        for file in range(count):
            size = self._path(file).stat().st_size if self._path(file).exists() else 0
            whole = self._slots_of(file)
            if size > whole * self.stride:
                os.truncate(self._path(file), whole * self.stride)
            if size < whole * self.stride:
                # Slots are numbered without gaps, so what follows a short file cannot be used.
                if size // self.stride:
                    self._open_file(file)
                return usable + size // self.stride
            self._open_file(file)
            usable += whole
        return usable

    def grow(self, usable: int) -> int:
        """Make room for more slots than ``usable``. Returns the new number of usable slots.

        Raises OSError when the file system has no room; what was usable stays so.
        """
        file = usable // self._per_file
        size = self._slots_of(file) * self.stride
        path = self._path(file)
        had = path.stat().st_size if path.exists() else 0
        free = os.statvfs(self._folder)
        if free.f_bavail * free.f_frsize < size - had + _HEADROOM:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        # Not by way of O_DIRECT: where preallocation is emulated, single bytes are written.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
            os.fsync(fd)
        except OSError:
            with suppress(OSError):
                os.ftruncate(fd, had)
            raise
        finally:
            os.close(fd)
        sync_folder(self._folder)
        if file not in self._fds:
            self._open_file(file)
        return file * self._per_file + self._slots_of(file)

    def same_file(self, slot: int, other: int) -> bool:
        return slot // self._per_file == other // self._per_file

    def read(self, first: int, views: Sequence[memoryview]) -> None:
        """Fill the views from slots ``first``, ``first + 1``, ... of one file. Raises OSError."""
        self._move(os.preadv, first, views, self._pad_in)

    def write(self, first: int, views: Sequence[memoryview]) -> None:
        """Write the views to slots ``first``, ``first + 1``, ... of one file. Raises OSError."""
        self._move(os.pwritev, first, views, self._pad_out)

    def sync(self, slots: Sequence[int]) -> None:
        """Flush the files of these slots to the device. Raises OSError."""
        for file in {slot // self._per_file for slot in slots}:
            os.fdatasync(self._fds[file])

    def probe(self) -> None:
        """Read a block from the device. Raises OSError."""
        if self._fds:
            os.preadv(self._fds[0], [self._pad_in], 0)
        else:
            os.statvfs(self._folder)

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}

    def _move(
        self,
        call: Callable[[int, list[memoryview], int], int],
        first: int,
        views: Sequence[memoryview],
        pad: mmap.mmap,
    ) -> None:
        fd = self._fds[first // self._per_file]
        offset = first % self._per_file * self.stride
        step = _MAX_VECTORS
        for start in range(0, len(views), step):
            part = views[start : start + step]
            vectors: list[memoryview] = []
            for view in part:
                vectors.append(view)
                if self._pad:
                    vectors.append(memoryview(pad)[: self._pad])
            wanted = len(part) * self.stride
            if call(fd, vectors, offset) != wanted:
                raise OSError(errno.EIO, "short transfer", str(self._path(first // self._per_file)))
            offset += wanted

    def _path(self, file: int) -> Path:
        return self._folder / f"segment-{file:06d}"

    def _slots_of(self, file: int) -> int:
        return min(self._per_file, self._slots - file * self._per_file)

    def _open_file(self, file: int) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if self.direct else 0)
        self._fds[file] = os.open(self._path(file), flags)


def stride(object_bytes: int) -> int:
    """Bytes from one slot to the next: whole blocks, so that direct I/O never shares a block."""
    return -(-object_bytes // BLOCK) * BLOCK


def direct_alignment(folder: Path) -> int | None:
    """The alignment in bytes that direct I/O in this folder needs of addresses and sizes, or None if it is
    not to be had. Raises OSError if the folder cannot be written."""
    path = folder / "probe"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, bytes(2 * BLOCK))
        os.fsync(fd)
    finally:
        os.close(fd)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return None
    else:
        page = mmap.mmap(-1, 2 * BLOCK)
        try:
            for size in (512, BLOCK):
                with suppress(OSError):
                    if os.preadv(fd, [memoryview(page)[size : 2 * size]], size) == size:
                        return size
            return None
        finally:
            os.close(fd)
    finally:
        path.unlink()


def sync_folder(folder: Path) -> None:
    """Make new names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
