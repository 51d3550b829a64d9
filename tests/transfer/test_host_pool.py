"""Host memory for pages."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from hicache_ext.transfer.host_pool import HostPagePool, runs
from hicache_ext.transfer.layout import Component, PageLayout

LAYOUT = PageLayout(2, 1, torch.uint8, (Component("K", 1, 8),), 1)


@pytest.mark.parametrize(
    ("pages", "expected"),
    [
        ([], []),
        ([4], [(0, 1)]),
        ([4, 5, 6], [(0, 3)]),
        ([4, 6], [(0, 1), (1, 2)]),
        ([6, 5, 4], [(0, 1), (1, 2), (2, 3)]),
        ([0, 1, 9, 10, 3], [(0, 2), (2, 4), (4, 5)]),
    ],
)
def test_runs_of_consecutive_pages(pages: list[int], expected: list[tuple[int, int]]) -> None:
    assert runs(np.array(pages, dtype=np.int64)) == expected


@pytest.mark.parametrize("pages", [[], [3], [1, 2, 3], [5, 0, 1, 3]])
def test_write_then_read_gives_the_same_pages_and_touches_no_other(pages: list[int]) -> None:
    pool = HostPagePool(LAYOUT, 6, pinned=False)
    pool.buffer.fill_(0xA5)
    numbers = np.array(pages, dtype=np.int64)
    source = torch.randint(0, 100, (len(pages), LAYOUT.page_bytes), dtype=torch.uint8)
    pool.write(numbers, source)
    out = torch.zeros_like(source)
    pool.read(numbers, out)
    assert torch.equal(out, source)
    for row, page in enumerate(pages):
        assert torch.equal(pool.buffer[page], source[row])
    others = [p for p in range(6) if p not in pages]
    assert (pool.buffer[others] == 0xA5).all()


def test_a_pool_may_have_no_page() -> None:
    assert HostPagePool(LAYOUT, 0, pinned=False).buffer.shape == (0, LAYOUT.page_bytes)


def test_too_much_memory_is_told_in_one_line() -> None:
    """More than any address space has, so nothing is allocated on any machine."""
    with pytest.raises(MemoryError, match=r"^cannot get \d+\.\d GB of host memory: ") as caught:
        HostPagePool(LAYOUT, 1 << 50, pinned=False)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_close_gives_the_memory_back_and_may_be_repeated() -> None:
    pool = HostPagePool(LAYOUT, 4, pinned=False)
    pool.close()
    pool.close()
    assert pool.buffer.numel() == 0
