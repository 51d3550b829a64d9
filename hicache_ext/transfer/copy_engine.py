"""Plain asynchronous copies between pinned host pages and a GPU, by its copy engines.

Everything runs on the current stream. On tensors of the CPU the same copies are made by torch at once.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from hicache_ext.core.header import FIXED
from hicache_ext.transfer.host_pool import runs
from hicache_ext.transfer.layout import PageLayout

LOOSE_COPY_BYTES = 4 << 20
"""Shorter copies of their own are not worth their launch; they go into one batch."""


def write_pages(host: torch.Tensor, pages: np.ndarray, rows: torch.Tensor) -> None:
    """Copy ``rows``, uint8 ``[n, page_bytes]``, to rows ``pages`` of ``host``."""
    _copy_pages(host, pages, rows, to_host=True)


def read_pages(host: torch.Tensor, pages: np.ndarray, rows: torch.Tensor) -> None:
    """Copy rows ``pages`` of ``host`` to ``rows``, uint8 ``[n, page_bytes]``."""
    _copy_pages(host, pages, rows, to_host=False)


def read_headers(layout: PageLayout, host: torch.Tensor, pages: np.ndarray, headers: torch.Tensor) -> None:
    """Copy the headers of rows ``pages`` up to their last checksum.

    Args:
        headers: int64 ``[n, groups, words]``, contiguous, on the device.
    """
    size = layout.geometry.object_bytes
    width = FIXED.itemsize + 8 * layout.geometry.slabs
    for start, stop in runs(pages):
        objects = (stop - start) * layout.groups
        source = _window(host, int(pages[start]) * layout.page_bytes, objects, size, width)
        _copy_window(_window(_flat(headers), start * layout.groups * width, objects, width, width), source)


def read_layers(
    layout: PageLayout, host: torch.Tensor, pages: np.ndarray, layers: range, staging: torch.Tensor
) -> None:
    """Copy some layers of rows ``pages``, for ``tables.layer_rows``.

    Args:
        staging: on the device, contiguous, at least ``n * layer_row_words(layout, len(layers))`` words.
    """
    slabs = [layout.slab_bytes(c) for c in layout.components]
    size, group = layout.geometry.object_bytes, len(layers) * sum(slabs)
    out = _flat(staging)
    for start, stop in runs(pages):
        objects = (stop - start) * layout.groups
        place = start * layout.groups * group
        for index, slab in enumerate(slabs):
            width = len(layers) * slab
            offset = layout.component_offset(index) + layers.start * slab
            source = _window(host, int(pages[start]) * layout.page_bytes + offset, objects, size, width)
            _copy_window(_window(out, place, objects, group, width), source)
            place += width


def _copy_pages(host: torch.Tensor, pages: np.ndarray, rows: torch.Tensor, *, to_host: bool) -> None:
    stretches = runs(pages)
    loose = len(stretches) > 1 and rows.numel() < LOOSE_COPY_BYTES * len(stretches)
    if loose and rows.is_cuda and _can_batch(rows.device):
        size, first, other = host.shape[1], host.data_ptr(), rows.data_ptr()
        there = [first + int(pages[start]) * size for start, _ in stretches]
        here = [other + start * size for start, _ in stretches]
        sizes = [(stop - start) * size for start, stop in stretches]
        _batch(*((there, here) if to_host else (here, there)), sizes, rows.device)
        return
    for start, stop in stretches:
        page = int(pages[start])
        there, here = host[page : page + stop - start], rows[start:stop]
        if to_host:
            there.copy_(here, non_blocking=True)
        else:
            here.copy_(there, non_blocking=True)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _window(memory: torch.Tensor, offset: int, rows: int, pitch: int, width: int) -> torch.Tensor:
    """Rows of ``width`` bytes that start ``pitch`` bytes apart."""
    return memory.as_strided((rows, width), (pitch, 1), memory.storage_offset() + offset)


def _copy_window(out: torch.Tensor, source: torch.Tensor) -> None:
    """torch would pack a strided host tensor on the CPU first; the copy engine takes it as it is."""
    if not out.is_cuda:
        out.copy_(source)
        return
    runtime = _runtime()
    rows, width = source.shape
    kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
    stream = torch.cuda.current_stream(out.device).cuda_stream
    pitches = out.stride(0), source.stride(0)
    _check(
        runtime.cudaMemcpy2DAsync(
            out.data_ptr(), pitches[0], source.data_ptr(), pitches[1], width, rows, kind, stream
        )
    )


def _batch(out: list[int], source: list[int], sizes: list[int], device: torch.device) -> None:
    runtime = _runtime()
    attributes = runtime.cudaMemcpyAttributes()
    attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
    stream = torch.cuda.current_stream(device).cuda_stream
    _check(runtime.cudaMemcpyBatchAsync(out, source, sizes, len(sizes), [attributes], [0], 1, stream))


@cache
def _runtime() -> Any:
    from cuda.bindings import runtime

    return runtime


def _can_batch(device: torch.device) -> bool:
    """Batched copies came with CUDA 12.8; the default stream takes none."""
    if torch.cuda.current_stream(device).cuda_stream == 0:
        return False
    try:
        return hasattr(_runtime(), "cudaMemcpyBatchAsync")
    except ImportError:
        return False


def _check(result: tuple[Any, ...]) -> None:
    if int(result[0]):
        raise RuntimeError(f"a copy between host and device failed to start: {result[0]}")
