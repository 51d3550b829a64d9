"""Host memory for pages."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from hicache_ext.transfer.layout import PageLayout

ALIGNMENT = 4096
"""Bytes; page rows are multiples of 512, so direct I/O can start at any of them."""


class HostPagePool:
    """``pages`` pages in one uint8 buffer ``[pages + scratch, page_bytes]``; pinned if a GPU is to reach it.

    The ``scratch`` pages at the end are not the cache's: the remote tier works in them.
    """

    def __init__(self, layout: PageLayout, pages: int, *, pinned: bool, scratch: int = 0) -> None:
        """Raises MemoryError if the host refuses the memory."""
        self.layout = layout
        self.pages = pages
        size = (pages + scratch) * layout.page_bytes
        try:
            memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8, pin_memory=pinned)
        except RuntimeError as error:
            kind = "pinned " if pinned else ""
            raise MemoryError(f"cannot get {size / 1e9:.1f} GB of {kind}host memory: {error}") from error
        start = -memory.data_ptr() % ALIGNMENT
        self.buffer = memory[start : start + size].view(pages + scratch, layout.page_bytes)

    def read(self, pages: np.ndarray, out: torch.Tensor) -> None:
        """Copy pages to ``out`` (uint8 ``[n, page_bytes]``, any device), a copy per run of pages."""
        for start, stop in runs(pages):
            first = int(pages[start])
            out[start:stop].copy_(self.buffer[first : first + stop - start], non_blocking=True)

    def write(self, pages: np.ndarray, source: torch.Tensor) -> None:
        """Copy ``source`` (uint8 ``[n, page_bytes]``, any device) to pages, a copy per run of pages."""
        for start, stop in runs(pages):
            first = int(pages[start])
            self.buffer[first : first + stop - start].copy_(source[start:stop], non_blocking=True)

    def close(self) -> None:
        """Give the memory back; idempotent."""
        self.buffer = torch.empty((0, self.layout.page_bytes), dtype=torch.uint8)


def runs(pages: np.ndarray) -> list[tuple[int, int]]:
    """Maximal stretches ``[start, stop)`` of consecutive page numbers."""
    if len(pages) == 0:
        return []
    cuts = np.flatnonzero(np.diff(pages) != 1) + 1
    edges = [0, *cuts.tolist(), len(pages)]
    return list(pairwise(edges))
