"""Where host pages lie as rows of the buffer that stores see, and which objects belong into them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from hicache_ext.core.header import FIXED, Integrity, Labels, fixed_parts
from hicache_ext.core.page import IDENTITY_BYTES
from hicache_ext.stores.base import Key
from hicache_ext.transfer.host_pool import HostPagePool, runs


class HostRows:
    """Page ``p`` lies in rows ``p * groups`` to ``p * groups + groups - 1``, a head group in each."""

    def __init__(self, pool: HostPagePool) -> None:
        self.geometry = pool.layout.geometry
        self.groups = self.geometry.groups
        self.page_bytes = pool.layout.page_bytes
        self._pages = pool.buffer
        self.buffer = pool.buffer.numpy().reshape(-1, self.geometry.object_bytes)
        """uint8 ``[pages * groups, object_bytes]``: what the stores register."""
        self.scratch = np.arange(pool.pages, len(pool.buffer), dtype=np.int64)
        """Pages behind those of the cache."""

    def rows(self, pages: np.ndarray) -> np.ndarray:
        """Of all groups of pages, page by page, int64 ``[pages * groups]``."""
        pages = np.asarray(pages, dtype=np.int64)
        return (pages[:, None] * self.groups + np.arange(self.groups)).reshape(-1)

    def keys(self, labels: Labels) -> list[Key]:
        """In the order of ``rows``."""
        first = self.geometry.first_group
        groups = range(first, first + self.groups)
        namespace, epoch, raw = labels.namespace, labels.epoch, labels.identities.tobytes()
        # Long prompts have tens of thousands; this takes half as long as calls of Key.
        new = tuple.__new__
        keys: list[Key] = []
        for start in range(0, len(raw), IDENTITY_BYTES):
            identity = raw[start : start + IDENTITY_BYTES]
            keys += [new(Key, (namespace, epoch, identity, group)) for group in groups]
        return keys

    def whole(self, flags: np.ndarray) -> np.ndarray:
        """Of flags in the order of ``rows``: which pages have all of them, bool ``[pages]``."""
        return np.asarray(flags.reshape(-1, self.groups).all(1))

    def tensor(self, pages: np.ndarray) -> torch.Tensor:
        """The bytes of pages, uint8 ``[n, page_bytes]``: in place if they follow each other, else a copy."""
        if len(runs(pages)) == 1:
            first = int(pages[0])
            return self._pages[first : first + len(pages)]
        return self._pages[torch.from_numpy(np.asarray(pages, dtype=np.int64))]

    def headed(self, pages: np.ndarray, labels: Labels, integrity: Integrity) -> np.ndarray:
        """Which pages have the headers that ``labels`` ask for, bool ``[pages]``."""
        found = self.buffer[self.rows(pages), : FIXED.itemsize].reshape(len(pages), -1)
        return (found == fixed_parts(labels, self.geometry, integrity).reshape(len(pages), -1)).all(1)


def leading(flags: np.ndarray) -> int:
    """How many are true before the first that is not."""
    return len(flags) if flags.all() else int(np.argmin(flags))


def parts(count: int, size: int) -> Iterator[slice]:
    """``count`` in slices of ``size``, at least one each."""
    size = max(1, size)
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
