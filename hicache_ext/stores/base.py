"""What a store is: a map from keys to objects of one size, in batches, over rows of one host buffer.

An object is a byte string of fixed length (one head group of one page), produced and checked by other code.
A row of the registered buffer holds one object; stores read and write rows in place, without a copy.

A miss and an outage are results, not exceptions. Every call has a deadline, a value of ``time.monotonic()``:
it returns by then, and what is not done counts as a miss. A transfer that could not be stopped by then may
still read or write its row. Such rows are *held*: the result names them, and they must not be given to anyone
else until ``released`` has returned them.

Calls block, so they belong on worker threads. All methods may be called from several threads at once.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]
Rows = Sequence[int] | npt.NDArray[np.integer]

OBJECT_MULTIPLE = 512
GB = 1_000_000_000
"""Bytes; what the settings and messages call a GB."""


class StoreError(Exception):
    """A store cannot be opened or used as asked; the text is one line with cause and cure."""


class Key(NamedTuple):
    """Names one object: 32 bytes, a number from 0, 16 bytes, a number from 0."""

    namespace: bytes
    epoch: int
    identity: bytes
    group: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of each key of a call; arrays as long as its keys."""

    ok: BoolArray
    """exists: it is there. get: its row now holds it. put: it is stored. remove: it is not there any more."""
    held: BoolArray
    """Not ok, and a transfer may still touch the row: keep the row until ``released`` returns it."""
    down: bool = False
    """The store did not answer, so what is not ok is unknown rather than absent."""


@dataclass(slots=True)
class StoreStats:
    """Counts since the store was opened, and what it holds now."""

    hits: int = 0
    misses: int = 0
    stored: int = 0
    present: int = 0
    """Objects of a put that were there already and were not written again."""
    declined: int = 0
    """Objects of a put for which there was no room, or that were being written by another call."""
    removed: int = 0
    evicted: int = 0
    corrupt: int = 0
    """Objects that failed the store's own checksum; each was a miss and was removed."""
    errors: int = 0
    """Transfers that the system or the service refused."""
    late: int = 0
    """Objects not done by a deadline."""
    held: int = 0
    """Rows that are held now."""
    objects: int | None = None
    """Objects in the store; None if only the service knows."""
    bytes_used: int | None = None
    bytes_limit: int | None = None
    state: str = "closed"
    """Of the circuit breaker: closed (in use), open or half-open (not used, being probed)."""
    opened: int = 0
    """How often the circuit breaker has taken the store out of use."""


class Store(Protocol):
    """See the module's text for deadlines and held rows."""

    @property
    def object_bytes(self) -> int:
        """Length of every object, a multiple of 512."""
        ...

    def register(self, buffer: np.ndarray) -> None:
        """Name the buffer that rows are taken from: uint8 ``[rows, object_bytes]``, contiguous. Called once,
        before any transfer; the buffer must live until ``close`` has returned.

        Raises:
            StoreError: another shape, or the store cannot use this memory.
        """
        ...

    def exists(self, keys: Sequence[Key], deadline: float) -> Outcome: ...

    def get(self, keys: Sequence[Key], rows: Rows, deadline: float) -> Outcome:
        """Read each object into its row. A row that is not ok may hold anything."""
        ...

    def put(self, keys: Sequence[Key], rows: Rows, deadline: float, *, hot: bool = False) -> Outcome:
        """Store each row under its key, unless the key is there already. ``hot`` asks to keep it longer."""
        ...

    def remove(self, keys: Sequence[Key], deadline: float) -> Outcome: ...

    def clear(self, namespace: bytes, below_epoch: int, deadline: float) -> bool:
        """Remove a namespace's objects of all epochs below ``below_epoch``; False if it is not known to be
        done. For room only: readers ask for the current epoch, so what remains is never read."""
        ...

    def ping(self, deadline: float) -> bool:
        """Whether the store answers."""
        ...

    def released(self) -> list[int]:
        """Rows that were held and are free now; each is returned once."""
        ...

    def stats(self) -> StoreStats: ...

    def close(self) -> None:
        """Idempotent; later calls return misses. Waits some seconds at most for transfers in flight; rows
        that are held then stay held."""
        ...


class Rack:
    """The registered buffer: rows as memory views and as addresses."""

    def __init__(self, buffer: np.ndarray, object_bytes: int) -> None:
        """Raises StoreError if the buffer is not uint8 ``[rows, object_bytes]`` and contiguous."""
        fits = buffer.dtype == np.uint8 and buffer.ndim == 2 and buffer.flags.c_contiguous
        if not fits or buffer.shape[1] != object_bytes:
            raise StoreError(
                f"the host buffer is {buffer.dtype} {list(buffer.shape)}; this store needs contiguous uint8 "
                f"rows of {object_bytes} bytes"
            )
        self.rows = buffer.shape[0]
        self.object_bytes = object_bytes
        self.nbytes = buffer.nbytes
        self.base = int(buffer.ctypes.data)
        self._view = buffer.reshape(-1).data

    def view(self, row: int) -> memoryview:
        """The row's bytes, writable."""
        start = int(row) * self.object_bytes
        return self._view[start : start + self.object_bytes]

    def address(self, row: int) -> int:
        return self.base + int(row) * self.object_bytes


class Holds:
    """Rows that a transfer may touch after its call has returned."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._free: list[int] = []

    def __len__(self) -> int:
        return self._count

    def add(self, rows: Sequence[int]) -> None:
        with self._lock:
            self._count += len(rows)

    def done(self, rows: Sequence[int]) -> None:
        """The transfer of these rows has ended."""
        with self._lock:
            self._count -= len(rows)
            self._free += rows

    def released(self) -> list[int]:
        """What has become free since the last call."""
        with self._lock:
            free, self._free = self._free, []
            return free


def nothing(count: int, *, down: bool = False) -> Outcome:
    """The outcome of a call that did nothing."""
    return Outcome(np.zeros(count, np.bool_), np.zeros(count, np.bool_), down)


def check_object_bytes(object_bytes: int) -> int:
    """Raises StoreError unless it is a positive multiple of 512."""
    if object_bytes <= 0 or object_bytes % OBJECT_MULTIPLE:
        raise StoreError(
            f"objects of {object_bytes} bytes cannot be stored: not a multiple of {OBJECT_MULTIPLE}"
        )
    return object_bytes
