"""Which host pages are free."""

from __future__ import annotations

import numpy as np


class HostPages:
    """Page numbers ``0 .. total - 1`` of the host pool; knows nothing of their bytes."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.clear()

    def clear(self) -> None:
        # A stack with the lowest number on top: fresh allocations are contiguous, so copies coalesce.
        self._stack = np.arange(self.total - 1, -1, -1, dtype=np.int64)
        self._top = self.total

    @property
    def free(self) -> int:
        return self._top

    @property
    def used(self) -> int:
        return self.total - self._top

    def alloc(self, count: int) -> np.ndarray | None:
        """``count`` page numbers (int64), or None if there are fewer."""
        if count > self._top:
            return None
        self._top -= count
        return self._stack[self._top : self._top + count][::-1].copy()

    def release(self, pages: np.ndarray) -> None:
        assert self._top + len(pages) <= self.total, "a host page was freed twice"
        self._stack[self._top : self._top + len(pages)] = pages[::-1]
        self._top += len(pages)

    def free_pages(self) -> np.ndarray:
        return self._stack[: self._top]
