"""SGLang 0.5.17's paged allocator on a CPU: its two Triton kernels in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class _Kernel:
    """What is launched as ``kernel[grid](...)``."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._run


def paged_allocator() -> type:
    """SGLang's own class, whose module launches torch code from now on."""
    from sglang.srt.mem_cache.allocator import paged

    paged.alloc_extend_kernel = _Kernel(_extend)
    paged.alloc_decode_kernel = _Kernel(_decode)
    return paged.PagedTokenToKVPoolAllocator


def _extend(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out: torch.Tensor,
    _: int,
    page_size: int,
) -> None:
    from sglang.srt.mem_cache.allocator.paged import alloc_extend_naive

    if int((_pages(seq_lens, page_size) - _pages(prefix_lens, page_size)).sum()) > len(free_pages):
        # The caller sees that there are too few pages and throws the result away.
        return
    alloc_extend_naive(prefix_lens, seq_lens, last_loc, free_pages, out, page_size, "cpu")


def _decode(
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out: torch.Tensor,
    _: int,
    page_size: int,
) -> None:
    opens = (seq_lens - 1) % page_size == 0
    if int(opens.sum()) > len(free_pages):
        return
    out.copy_(last_loc + 1)
    out[opens] = free_pages[: int(opens.sum())] * page_size


def _pages(tokens: torch.Tensor, page_size: int) -> torch.Tensor:
    return (tokens + page_size - 1) // page_size
