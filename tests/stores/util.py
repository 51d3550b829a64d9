"""Objects, keys and buffers for the store tests."""

from __future__ import annotations

import mmap
import time

import numpy as np

from hicache_ext.stores.base import Key

NAMESPACE = bytes(range(32))


def soon(seconds: float = 10.0) -> float:
    """A deadline that is only reached when something is wrong."""
    return time.monotonic() + seconds


def aligned_buffer(rows: int, object_bytes: int) -> np.ndarray:
    """Page-aligned uint8 ``[rows, object_bytes]``."""
    return np.frombuffer(mmap.mmap(-1, rows * object_bytes), np.uint8).reshape(rows, object_bytes)


def key(number: int, *, epoch: int = 1, namespace: bytes = NAMESPACE, group: int = 0) -> Key:
    return Key(namespace, epoch, number.to_bytes(16, "little"), group)


def content(number: int, object_bytes: int) -> np.ndarray:
    """Bytes that only this number has."""
    return np.random.default_rng(number).integers(0, 256, object_bytes, dtype=np.uint8)


def fill(buffer: np.ndarray, numbers: list[int], first_row: int = 0) -> list[int]:
    """Put the content of each number into consecutive rows; returns the rows."""
    rows = list(range(first_row, first_row + len(numbers)))
    for row, number in zip(rows, numbers, strict=True):
        buffer[row] = content(number, buffer.shape[1])
    return rows
