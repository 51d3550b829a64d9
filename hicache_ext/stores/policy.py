"""Which objects leave a full disk store.

As for the tiers in memory (``core.policy``), a policy ranks and the lowest rank leaves first; here it ranks
all slots at once, because a store holds millions of objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SlotHistory:
    """One value per slot; a slot without an object has any. Times count calls of the store."""

    written: IntArray
    used: IntArray
    """Last get or put that named the object."""
    hits: IntArray


class SlotPolicy(Protocol):
    def rank(self, slots: SlotHistory) -> npt.NDArray[np.number]:
        """One number per slot."""
        ...


class LeastRecentlyUsed:
    def rank(self, slots: SlotHistory) -> npt.NDArray[np.number]:
        return slots.used


def lowest(rank: npt.NDArray[np.number], candidates: npt.NDArray[np.bool_], count: int) -> IntArray:
    """Up to ``count`` candidates of lowest rank, in ascending order of their numbers."""
    numbers = np.flatnonzero(candidates)
    if len(numbers) > count:
        numbers = numbers[np.argpartition(rank[numbers], count - 1)[:count]]
    return np.sort(numbers)
