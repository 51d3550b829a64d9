"""Is a stored object what its key says? Its header alone tells how to read it.

The header names the bytes and the number of slabs, but not their sizes. A latent (MLA) and K and V of equal
width make slabs of one size. K and V of different widths make two sizes, K's first: the first checksum in the
header then shows where the first slab ends, because a checksum over the words of a prefix is a running sum.
"""

from __future__ import annotations

import numpy as np

from hicache_ext.core.checksum import checksums, multipliers
from hicache_ext.core.epochs import MARK_GROUP, MARK_IDENTITY
from hicache_ext.core.header import FIXED, MAGIC, Geometry, Reason
from hicache_ext.core.page import FORMAT_VERSION
from hicache_ext.stores.base import Key

LATE = "does not answer"


def is_mark(key: Key) -> bool:
    """Whether the key is of an epoch's mark rather than of a page."""
    return (key.identity, key.group) == (MARK_IDENTITY, MARK_GROUP)


class Checker:
    """Checks objects, and remembers how their slabs lie."""

    def __init__(self) -> None:
        self._factors = np.zeros(0, np.uint64)
        # Words of K's and of V's slabs, of geometries where they differ.
        self._uneven: dict[tuple[int, int], tuple[int, int]] = {}
        self.unproven = 0
        """Sound objects that carry no checksums, because the server ran with integrity sample or off."""

    def problem(self, key: Key, data: bytes) -> str | None:
        """Why the object is not what it should be, in a word or two; None if it is."""
        if len(data) < FIXED.itemsize:
            return "truncated"
        header = np.frombuffer(data, FIXED, 1)[0]
        if header["magic"] != MAGIC:
            return Reason.MAGIC
        if header["version"] != FORMAT_VERSION:
            return Reason.VERSION
        if header["namespace"].tobytes() != key.namespace:
            return Reason.NAMESPACE
        if header["epoch"] != key.epoch:
            return Reason.EPOCH
        if header["identity"].tobytes() != key.identity:
            return Reason.IDENTITY
        if header["group"] != key.group:
            return "group"
        payload, slabs = int(header["payload_bytes"]), int(header["slabs"])
        if not slabs or payload % 8 or header["sealed"] > 1:
            return Reason.GEOMETRY
        geometry = Geometry(1, payload, slabs)
        if geometry.object_bytes != len(data):
            return Reason.GEOMETRY
        if not header["sealed"]:
            self.unproven += 1
            return None
        table = np.frombuffer(data, "<u8", slabs, FIXED.itemsize)
        words = np.frombuffer(data, "<u8", payload // 8, geometry.header_bytes)
        return None if self._proven(words, table) else Reason.CHECKSUM

    def _proven(self, words: np.ndarray, table: np.ndarray) -> bool:
        slabs, shape = len(table), (len(words), len(table))
        if shape in self._uneven:
            return self._matches(words, table, *self._uneven[shape])
        if len(words) % slabs == 0:
            size = len(words) // slabs
            if np.array_equal(checksums(words.reshape(slabs, size), self._multipliers(size)), table):
                return True
        if slabs % 2 or len(words) % (slabs // 2):
            return False
        # K and V of one layer together; where K ends is unknown.
        both = len(words) // (slabs // 2)
        folded = (words[:both] ^ (words[:both] >> np.uint64(32))) * self._multipliers(both)
        for first in np.flatnonzero(np.cumsum(folded) == table[0]) + 1:
            if first < both and self._matches(words, table, int(first), both - int(first)):
                self._uneven[shape] = (int(first), both - int(first))
                return True
        return False

    def _matches(self, words: np.ndarray, table: np.ndarray, first: int, second: int) -> bool:
        layers = len(table) // 2
        parts = (
            words[: layers * first].reshape(layers, first),
            words[layers * first :].reshape(layers, second),
        )
        sums = [checksums(part, self._multipliers(part.shape[1])) for part in parts]
        return bool(np.array_equal(np.concatenate(sums), table))

    def _multipliers(self, count: int) -> np.ndarray:
        if count > len(self._factors):
            self._factors = multipliers(count)
        return self._factors[:count]
