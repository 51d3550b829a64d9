"""The ``triton`` and ``staged`` copy backends, as the engine calls them.

``triton``: a few blocks read or write pinned host pages directly. ``staged``: many blocks work for a moment
on a staging buffer on the device, which the copy engine fills or empties; that fills the bus and takes the
least from whatever computes meanwhile.

Functions queue their work on the current stream and return before it has run. So do the staged backends,
whose copies run on a stream of their own beside it. Streams of high priority get their blocks in earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from hicache_ext.transfer import copy_engine
from hicache_ext.transfer.device_kv import DeviceKV
from hicache_ext.transfer.host_pool import runs
from hicache_ext.transfer.layout import PageLayout
from hicache_ext.transfer.seal import upload
from hicache_ext.triton_kernels import kernels, tables
from hicache_ext.triton_kernels.kernels import Bound, Tuning
from hicache_ext.triton_kernels.tables import PagedKV

DIRECT_TO_HOST = Tuning(blocks=6, warps=16)
DIRECT_TO_DEVICE = Tuning(blocks=12, warps=16)
STAGED = Tuning(blocks=264, warps=8)

DIRECT_LAYERS = 4
"""Layers of a direct launch: at page size 1 single layers are reads of 256 bytes."""
STRIPS = 4
"""Strips of layers in a load, if they are wide enough."""
STRIP_BYTES = 96 << 10
"""Of one component of a head group. While kernels run, the copy engine fills the bus with wide rows only."""
LEAST_COPY_BYTES = 1 << 20
"""Host pages so scattered that a copy moves less are read by a kernel."""
MOST_HEADER_COPIES = 16
"""Headers of more runs of host pages are read by a kernel."""

BACKUP_STAGING = (3, 128 << 20)
LOAD_STAGING = (2, 128 << 20)
"""Buffers and their bytes: enough that a matrix product of a millisecond or two leaves no gap on the bus."""


@dataclass(frozen=True)
class DevicePages:
    """Slots of the engine's pages, int64 ``[n * page_size]``, and where each page starts if it is one run."""

    page_size: int
    slots: torch.Tensor
    starts: torch.Tensor | None

    def __getitem__(self, part: slice) -> DevicePages:
        slots = self.slots[part.start * self.page_size : part.stop * self.page_size]
        return DevicePages(self.page_size, slots, None if self.starts is None else self.starts[part])

    def __len__(self) -> int:
        return len(self.slots) // self.page_size


def prepare(kv: DeviceKV) -> PagedKV:
    """What the other functions want of ``kv``, whose buffers must stay where they are.

    Raises ValueError if the layers of a component lie differently.
    """
    return tables.paged(kv)


def device_pages(kv: PagedKV, slots: torch.Tensor, *, find_runs: bool = False) -> DevicePages:
    """``slots``: int64 ``[n * page_size]`` on the device, page by page.

    With ``find_runs`` one small kernel finds the pages whose slots lie in a row, so that copies need not look
    up every slot. On an H200 that gains nothing, and the kernel waits for its turn like any other.
    """
    size = kv.layout.page_size
    return DevicePages(size, slots, kernels.page_starts(slots, size) if find_runs else None)


def gather(
    kv: PagedKV,
    slots: DevicePages,
    out: torch.Tensor,
    pages: torch.Tensor,
    sealed: torch.Tensor | None,
    tuning: Tuning = DIRECT_TO_HOST,
) -> None:
    """Copy the engine's pages to rows of ``out`` and write the checksums of sealed ones into their headers.

    Args:
        out: uint8 ``[rows, page_bytes]`` in pinned host memory or on the device; the rest of the headers is
            left alone.
        pages: int64 ``[n]`` on the device, distinct rows.
        sealed: bool ``[n]`` on the device; other pages get zeros for checksums. None: no page is sealed, and
            nothing is written there.
    """
    rows = tables.page_rows(kv.layout, out)
    every = range(kv.layout.layers)
    kernels.gather(kv, slots.slots, slots.starts, rows, pages, sealed, every, tuning)


def scatter(
    kv: PagedKV,
    source: torch.Tensor,
    pages: torch.Tensor,
    slots: DevicePages,
    checks: torch.Tensor | None,
    flags: torch.Tensor,
    tuning: Tuning = DIRECT_TO_DEVICE,
) -> Bound:
    """What copies some layers of rows of ``source`` to the engine's pages: call it with a range of layers.

    Args:
        source: uint8 ``[rows, page_bytes]`` in pinned host memory or on the device.
        pages: int64 ``[n]`` on the device.
        checks: uint8 ``[n]`` on the device of ``tables.PLAIN``, ``SEALED``, ``REFUSED``, or bool: sealed or
            not, or None if all are plain. Refused pages and slabs of sealed pages that are not what their
            checksum says are written as zeros.
        flags: int32 ``[n]`` on the device or in pinned memory; the entries of such pages become 1.
    """
    rows = tables.page_rows(kv.layout, source)
    return kernels.bind_scatter(kv, slots.slots, slots.starts, rows, pages, checks, flags, tuning)


def scatter_layer(
    kv: PagedKV,
    source: torch.Tensor,
    pages: torch.Tensor,
    slots: DevicePages,
    layer: int,
    checks: torch.Tensor | None,
    flags: torch.Tensor,
    tuning: Tuning = DIRECT_TO_DEVICE,
) -> None:
    """``scatter`` of one layer."""
    scatter(kv, source, pages, slots, checks, flags, tuning)(range(layer, layer + 1))


def checksums(kv: PagedKV, rows: torch.Tensor, tuning: Tuning = STAGED) -> torch.Tensor:
    """Checksums of all slabs of ``rows``, uint8 ``[n, page_bytes]`` on the device.

    Returns:
        int64 ``[n, groups, slabs]``.
    """
    layout = kv.layout
    out = torch.empty(
        (len(rows), layout.groups, layout.geometry.slabs), dtype=torch.int64, device=rows.device
    )
    index = torch.arange(len(rows), device=rows.device)
    kernels.checksums(kv, tables.page_rows(layout, rows), index, out, range(layout.layers), tuning)
    return out


class StagedBackup:
    """Gather into buffers on the device that take turns with the copy engine."""

    def __init__(self, kv: PagedKV, staging: tuple[int, int] = BACKUP_STAGING) -> None:
        self._kv = kv
        count, size = staging
        self._pages = max(size // kv.layout.page_bytes, 1)
        shape = (self._pages, kv.layout.page_bytes)
        # Gaps between payload and the next header are copied too, and must be zeros.
        buffers = [torch.zeros(shape, dtype=torch.uint8, device=kv.kv.device) for _ in range(count)]
        self._ring = _Ring(buffers, kv.kv.device)
        self._index = torch.arange(self._pages, device=kv.kv.device)

    def __call__(
        self,
        slots: DevicePages,
        host: torch.Tensor,
        pages: np.ndarray,
        sealed: torch.Tensor | None,
        finish: Callable[[slice, torch.Tensor], None],
    ) -> torch.cuda.Event | None:
        """Copy the engine's pages to rows ``pages`` of ``host``, uint8 ``[rows, page_bytes]``, pinned.

        ``finish(part, rows)`` is called for every part of ``pages`` to complete the headers of ``rows`` on
        the device, in the current stream.

        Returns:
            What passes when the bytes are in host memory; the current stream does not wait for it. None
            on the CPU, where they are.
        """
        for part in _parts(len(pages), self._pages):

            def fill(buffer: torch.Tensor, part: slice = part) -> None:
                rows = buffer[: part.stop - part.start]
                mine = None if sealed is None else sealed[part]
                gather(self._kv, slots[part], rows, self._index[: len(rows)], mine, STAGED)
                finish(part, rows)

            def drain(buffer: torch.Tensor, part: slice = part) -> None:
                copy_engine.write_pages(host, pages[part], buffer[: part.stop - part.start])

            self._ring.turn(fill, drain, copies_fill=False)
        return self._ring.event()


class StagedLoad:
    """The copy engine fills buffers on the device with strips of layers, and a kernel scatters them."""

    def __init__(self, kv: PagedKV, staging: tuple[int, int] = LOAD_STAGING) -> None:
        self._kv = kv
        count, self._size = staging
        self._size = max(self._size, kv.layout.page_bytes)
        device = kv.kv.device
        words = [torch.zeros(self._size // 8, dtype=torch.int64, device=device) for _ in range(count)]
        self._ring = _Ring(words, device)
        narrow = min(tables.layer_row_words(kv.layout, len(some)) for some in strips(kv.layout))
        self._index = torch.arange(max(self._size // (8 * narrow), 1), device=device)
        self.strips = strips(kv.layout)
        self.stream = self._ring.copies
        """Where the copies run, None on the CPU: they start at once, unless it waits for something."""

    def _headers(self, host: torch.Tensor, pages: np.ndarray) -> torch.Tensor:
        """Headers of rows ``pages`` up to their last checksum, int64 ``[n, groups, words]`` on the device."""
        layout = self._kv.layout
        shape = (len(pages), layout.groups, tables.header_words(layout))
        found = torch.empty(shape, dtype=torch.int64, device=self._kv.kv.device)
        if len(runs(pages)) > MOST_HEADER_COPIES:
            index = upload(pages, found.device)
            kernels.headers(self._kv, host, index, found, DIRECT_TO_DEVICE)
        else:
            copy_engine.read_headers(layout, host, pages, found)
        return found

    def __call__(
        self,
        slots: DevicePages,
        host: torch.Tensor,
        pages: np.ndarray,
        checks: torch.Tensor | None,
        flags: torch.Tensor,
        landed: Callable[[range, int], None],
        *,
        by_layer: bool = True,
    ) -> None:
        """Copy rows ``pages`` of ``host``, uint8 ``[rows, page_bytes]``, pinned, to the engine's pages.

        Args:
            checks, flags: see ``scatter``.
            landed: called after the work of some layers of the first pages is queued, to record an event in
                the current stream.
            by_layer: the first layers first, in strips. Otherwise whole pages: fewer and wider copies.
        """
        layout = self._kv.layout
        every = range(layout.layers)
        strips = self.strips if by_layer else [every]
        if _is_scattered(layout, pages, max(map(len, strips))):
            copy = scatter(self._kv, host, upload(pages, slots.slots.device), slots, checks, flags)
            for some in _parts(layout.layers, DIRECT_LAYERS):
                copy(range(some.start, some.stop))
                landed(range(some.start, some.stop), len(pages))
            if self.stream is not None:
                self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
            return
        headers = self._headers(host, pages) if by_layer else None
        for layers in strips:
            width = 8 * tables.layer_row_words(layout, len(layers)) if by_layer else layout.page_bytes
            for part in _parts(len(pages), self._size // width):

                def fill(buffer: torch.Tensor, part: slice = part, layers: range = layers) -> None:
                    if by_layer:
                        copy_engine.read_layers(layout, host, pages[part], layers, buffer)
                    else:
                        copy_engine.read_pages(host, pages[part], self._rows(buffer, part))

                def drain(buffer: torch.Tensor, part: slice = part, layers: range = layers) -> None:
                    if headers is not None:
                        rows = tables.layer_rows(layout, buffer, len(layers), layers.start, headers[part])
                    else:
                        rows = tables.page_rows(layout, self._rows(buffer, part))
                    mine, here = slots[part], self._index[: part.stop - part.start]
                    check = None if checks is None else checks[part]
                    kernels.scatter(
                        self._kv, mine.slots, mine.starts, rows, here, check, flags[part], layers, STAGED
                    )

                self._ring.turn(fill, drain, copies_fill=True)
                if not by_layer:
                    landed(every, part.stop)
            if by_layer:
                landed(layers, len(pages))

    def _rows(self, buffer: torch.Tensor, part: slice) -> torch.Tensor:
        count, size = part.stop - part.start, self._kv.layout.page_bytes
        return buffer[: count * size // 8].view(torch.uint8).view(count, size)


def strips(layout: PageLayout) -> list[range]:
    """Layers that are copied at a time: few enough to overlap, wide enough to fill the bus.

    ``STRIPS`` equal strips; where that makes them narrower than ``STRIP_BYTES``, one of that size, so that
    the first layers do not wait for all, and one with the rest.
    """
    slab = min(layout.slab_bytes(c) for c in layout.components)
    layers, step = layout.layers, -(-layout.layers // STRIPS)
    if slab * step < STRIP_BYTES:
        return [r for r in (range(step), range(step, layers)) if r]
    return [range(part.start, part.stop) for part in _parts(layers, step)]


def warm_up(kv: PagedKV, *, find_runs: bool = False) -> None:
    """Compile and load every kernel that the backends use on ``kv``; no page is touched.

    ``find_runs`` as in ``device_pages``.
    """
    layout, device = kv.layout, kv.kv.device
    slots = torch.zeros(layout.page_size, dtype=torch.int64, device=device)
    index = torch.zeros(1, dtype=torch.int64, device=device)
    flags = torch.zeros(1, dtype=torch.int32, device=device)
    page = torch.zeros((1, layout.page_bytes), dtype=torch.uint8, device=device)
    words = torch.zeros(tables.layer_row_words(layout, layout.layers), dtype=torch.int64, device=device)
    headers = torch.zeros((1, layout.groups, tables.header_words(layout)), dtype=torch.int64, device=device)
    whole = tables.page_rows(layout, page)
    widths = sorted({len(layers) for layers in strips(layout)})
    rows = [tables.layer_rows(layout, words, width, 0, headers) for width in widths]
    starts = device_pages(kv, slots, find_runs=find_runs).starts
    for sealed in (None, flags.to(torch.uint8)):
        for tuning in (DIRECT_TO_HOST, STAGED):
            kernels.bind_gather(kv, slots, starts, whole, index, sealed, tuning).warm_up()
        for tuning, source in ((DIRECT_TO_DEVICE, whole), *((STAGED, r) for r in (whole, *rows))):
            kernels.bind_scatter(kv, slots, starts, source, index, sealed, flags, tuning).warm_up()
    kernels.headers(kv, page, index, headers, DIRECT_TO_DEVICE)
    checksums(kv, page)


class _Ring:
    """Buffers that kernels of the current stream and copies in a stream of their own use in turns."""

    def __init__(self, buffers: list[torch.Tensor], device: torch.device) -> None:
        self._buffers = buffers
        self.copies = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._free: list[torch.cuda.Event | None] = [None] * len(buffers)
        self._next = 0

    def turn(
        self,
        fill: Callable[[torch.Tensor], None],
        drain: Callable[[torch.Tensor], None],
        *,
        copies_fill: bool,
    ) -> None:
        """Queue one use of a buffer; ``copies_fill`` says which of the two runs in the copies' stream."""
        index, self._next = self._next, (self._next + 1) % len(self._buffers)
        buffer = self._buffers[index]
        if self.copies is None:
            fill(buffer)
            drain(buffer)
            return
        current, free = torch.cuda.current_stream(buffer.device), self._free[index]
        first, second = (self.copies, current) if copies_fill else (current, self.copies)
        if free is not None:
            first.wait_event(free)
        with torch.cuda.stream(self.copies) if copies_fill else nullcontext():
            fill(buffer)
        second.wait_event(first.record_event())
        with nullcontext() if copies_fill else torch.cuda.stream(self.copies):
            drain(buffer)
        self._free[index] = second.record_event()

    def event(self) -> torch.cuda.Event | None:
        """Passes after all copies so far."""
        return None if self.copies is None else self.copies.record_event()


def _is_scattered(layout: PageLayout, pages: np.ndarray, layers: int) -> bool:
    """Whether copies of so many layers would be so small that their launches take longer than the bus."""
    slab = max(layout.slab_bytes(c) for c in layout.components)
    moved = len(pages) * layout.groups * slab * layers
    return len(runs(pages)) * LEAST_COPY_BYTES > moved


def _parts(count: int, step: int) -> Iterator[slice]:
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))
