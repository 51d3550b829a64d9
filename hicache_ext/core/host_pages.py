"""Which host pages are free."""

from __future__ import annotations

import numpy as np

NONE = np.empty(0, dtype=np.int64)


class HostPages:
    """Page numbers ``0 .. total - 1`` of the host pool; knows nothing of their bytes."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.clear()

    def clear(self, keep: np.ndarray = NONE) -> None:
        """All pages are free, except those in ``keep``."""
        # A stack with the lowest number on top: fresh allocations are contiguous, so copies coalesce.
        free = np.setdiff1d(np.arange(self.total, dtype=np.int64), keep)[::-1]
        self._stack = np.concatenate([free, np.empty(self.total - len(free), np.int64)])
        self._top = len(free)

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
