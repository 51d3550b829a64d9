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
    size, width = layout.geometry.object_bytes, FIXED.itemsize + 8 * layout.geometry.slabs
    out, stream = _flat(headers), _stream(headers.device)
    for start, stop in runs(pages):
        objects = (stop - start) * layout.groups
        source = host, int(pages[start]) * layout.page_bytes, size
        _copy_rows((out, start * layout.groups * width, width), source, objects, width, stream)


def read_layers(
    layout: PageLayout, host: torch.Tensor, pages: np.ndarray, layers: range, staging: torch.Tensor
) -> None:
    """Copy some layers of rows ``pages``, for ``tables.layer_rows``.

    Args:
        staging: on the device, contiguous, at least ``n * layer_row_words(layout, len(layers))`` words.
    """
    slabs = [layout.slab_bytes(c) for c in layout.components]
    size, group = layout.geometry.object_bytes, len(layers) * sum(slabs)
    starts = [layout.component_offset(c) + layers.start * slab for c, slab in enumerate(slabs)]
    out, stream = _flat(staging), _stream(staging.device)
    for start, stop in runs(pages):
        objects, place = (stop - start) * layout.groups, start * layout.groups * group
        page = int(pages[start]) * layout.page_bytes
        for slab, offset in zip(slabs, starts, strict=True):
            width = len(layers) * slab
            _copy_rows((out, place, group), (host, page + offset, size), objects, width, stream)
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


Rows = tuple[torch.Tensor, int, int]
"""Bytes, offset of the first row, distance of the rows."""


def _copy_rows(out: Rows, source: Rows, rows: int, width: int, stream: int | None) -> None:
    """Rows of ``width`` bytes. torch would pack them on the CPU; the copy engine takes them as they lie."""
    if stream is None:
        there, here = (
            memory.as_strided((rows, width), (pitch, 1), memory.storage_offset() + offset)
            for memory, offset, pitch in (out, source)
        )
        there.copy_(here)
        return
    to, start = out[0].data_ptr() + out[1], source[0].data_ptr() + source[1]
    runtime = _runtime()
    kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
    _check(runtime.cudaMemcpy2DAsync(to, out[2], start, source[2], width, rows, kind, stream))


def _stream(device: torch.device) -> int | None:
    """The current stream of a GPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


def _batch(out: list[int], source: list[int], sizes: list[int], device: torch.device) -> None:
    runtime = _runtime()
    attributes = runtime.cudaMemcpyAttributes()
    attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
    count, stream = len(sizes), _stream(device)
    _check(runtime.cudaMemcpyBatchAsync(out, source, sizes, count, [attributes], [0], 1, stream))


@cache
def _runtime() -> Any:
    from cuda.bindings import runtime

    return runtime


def _can_batch(device: torch.device) -> bool:
    """Batched copies came with CUDA 12.8; the default stream takes none."""
    if not _stream(device):
        return False
    try:
        return hasattr(_runtime(), "cudaMemcpyBatchAsync")
    except ImportError:
        return False


def _check(result: tuple[Any, ...]) -> None:
    if int(result[0]):
        raise RuntimeError(f"a copy between host and device failed to start: {result[0]}")
