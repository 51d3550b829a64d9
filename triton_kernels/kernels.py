"""Launches of the kernels in ``pages``, all on the current stream of the device that holds the KV.

Tensors lie on that device or in pinned host memory. A launch returns before the kernel has run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hicache_ext.transfer.layout import PageLayout
from hicache_ext.triton_kernels import pages as device
from hicache_ext.triton_kernels.tables import WORD, Family, PagedKV, SlabRows, header_words, page_rows

RUN_SEARCH_WORDS = 1024

Constants = dict[str, int | bool]


@dataclass(frozen=True)
class Tuning:
    """What a launch takes of the GPU: ``blocks`` programs of ``warps`` warps and tiles of ``words``."""

    blocks: int = 8
    warps: int = 16
    words: int = 4096


def page_starts(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """First slot of each page whose slots follow one another, -1 for other pages.

    Args:
        slots: int64 ``[n * page_size]``, page by page.

    Returns:
        int64 ``[n]``.
    """
    if page_size == 1:
        return slots
    starts = torch.empty(len(slots) // page_size, dtype=torch.int64, device=slots.device)
    width = _power_of_two(page_size)
    items = max(RUN_SEARCH_WORDS // width, 1)
    constants = {"PAGE": page_size, "WIDTH": width, "ITEMS": items}
    search = _Launch(device.starts_kernel, 4, (slots, starts), 1, constants)
    search(-(-len(starts) // items), len(starts))
    return starts


def gather(
    kv: PagedKV,
    slots: torch.Tensor,
    starts: torch.Tensor | None,
    rows: SlabRows,
    pages: torch.Tensor,
    sealed: torch.Tensor | None,
    layers: range,
    tuning: Tuning,
) -> None:
    """Copy the engine's pages to rows of pages and write the checksums of those that are sealed.

    Args:
        slots: int64 ``[n * page_size]``, page by page.
        starts: int64 ``[n]``, see ``page_starts``; None: every slot is looked up.
        pages: int64 ``[n]``, distinct rows.
        sealed: bool ``[n]``; the entries of other pages become 0. None: no page is, and no entry is written.
        layers: consecutive, all of them in ``rows``.
    """
    bind_gather(kv, slots, starts, rows, pages, sealed, tuning)(layers)


def scatter(
    kv: PagedKV,
    slots: torch.Tensor,
    starts: torch.Tensor | None,
    rows: SlabRows,
    pages: torch.Tensor,
    checks: torch.Tensor | None,
    flags: torch.Tensor,
    layers: range,
    tuning: Tuning,
) -> None:
    """Copy rows of pages to the engine's pages; other arguments as in ``gather``.

    Args:
        checks: uint8 ``[n]`` of ``tables.PLAIN``, ``SEALED``, ``REFUSED``; a bool tensor says sealed or not;
            None: all are plain. Refused pages are written as zeros. So is a slab of a sealed page that is
            not what its checksum says.
        flags: int32 ``[n]``; entries of refused pages and of pages with such a slab become 1, others stay.
    """
    bind_scatter(kv, slots, starts, rows, pages, checks, flags, tuning)(layers)


def checksums(
    kv: PagedKV, rows: SlabRows, pages: torch.Tensor, out: torch.Tensor, layers: range, tuning: Tuning
) -> None:
    """Checksums of the slabs of some layers in rows ``pages``, into int64 ``out`` ``[n, groups, slabs]``."""
    if not out.is_contiguous():
        raise ValueError("the tensor for the checksums is not contiguous")
    tensors = (pages, kv.factors, rows.words, out)
    slabs = kv.layout.geometry.slabs
    _bind(
        device.checksum_kernel,
        kv,
        rows,
        len(pages),
        tuning,
        tensors,
        lambda family: {"COMPONENT": family.first, "SLABS": slabs},
    )(layers)


def headers(
    kv: PagedKV, source: torch.Tensor, pages: torch.Tensor, out: torch.Tensor, tuning: Tuning
) -> None:
    """Copy headers up to their last checksum.

    Args:
        source: uint8 ``[rows, page_bytes]``, contiguous.
        pages: int64 ``[n]``.
        out: int64 ``[n, groups, header_words]``, contiguous.
    """
    layout = kv.layout
    groups, size = len(pages) * layout.groups, header_words(layout)
    width = _power_of_two(size)
    items = max(tuning.words // width, 1)
    tiles = -(-groups // items)
    rows = page_rows(layout, source)
    constants = {"GROUPS": layout.groups, "ROW": rows.row, "GROUP": rows.group, "SIZE": size}
    constants |= {"WIDTH": width, "ITEMS": items}
    copy = _Launch(device.headers_kernel, tuning.warps, (pages, rows.words, out), 2, constants)
    copy(min(tuning.blocks, tiles), groups, tiles)


class Bound:
    """Launches of one kernel over the same pages; a call for some layers takes little time of the CPU."""

    def __init__(self, parts: list[tuple[_Launch, int, int]], first_layer: int, blocks: int) -> None:
        self._parts = parts
        self._first_layer = first_layer
        self._blocks = blocks

    def __call__(self, layers: range) -> None:
        """Queue ``layers``, which are consecutive and lie in the rows."""
        for launch, slabs_per_layer, items in self._parts:
            slabs = slabs_per_layer * len(layers)
            tiles = -(-slabs // items)
            counts = (slabs, tiles, layers.start, layers.start - self._first_layer, len(layers))
            launch(min(self._blocks, tiles), *counts)

    def warm_up(self) -> None:
        """Compile and load the kernel; it runs over no page."""
        for launch, _, _ in self._parts:
            launch(1, 0, 0, 0, 0, 1)


def bind_gather(
    kv: PagedKV,
    slots: torch.Tensor,
    starts: torch.Tensor | None,
    rows: SlabRows,
    pages: torch.Tensor,
    sealed: torch.Tensor | None,
    tuning: Tuning,
) -> Bound:
    """``gather`` for any layers."""
    tensors = (
        kv.pointers,
        slots,
        _or(starts, slots),
        pages,
        _bytes(sealed, pages),
        kv.factors,
        rows.words,
        rows.sums,
    )
    seal = {"SEAL": sealed is not None}
    return _bind(
        device.gather_kernel,
        kv,
        rows,
        len(pages),
        tuning,
        tensors,
        lambda family: {**_buffers(family, kv.layout, starts), **_sums(rows), **seal},
    )


def bind_scatter(
    kv: PagedKV,
    slots: torch.Tensor,
    starts: torch.Tensor | None,
    rows: SlabRows,
    pages: torch.Tensor,
    checks: torch.Tensor | None,
    flags: torch.Tensor,
    tuning: Tuning,
) -> Bound:
    """``scatter`` for any layers."""
    tables = (
        kv.pointers,
        slots,
        _or(starts, slots),
        pages,
        _bytes(checks, pages),
        kv.factors,
        rows.words,
        rows.sums,
    )
    verify = {"VERIFY": checks is not None}
    return _bind(
        device.scatter_kernel,
        kv,
        rows,
        len(pages),
        tuning,
        (*tables, flags),
        lambda family: {**_buffers(family, kv.layout, starts), **_sums(rows), **verify},
    )


def tile_shape(slab_words: int, words: int) -> tuple[int, int]:
    """Slabs and words of a slab that a tile of about ``words`` takes; both are powers of two.

    The chunk is as long as it can be without leaving more than a quarter of the lanes idle.
    """
    chunk = min(_power_of_two(slab_words), words)
    while chunk > 1 and 4 * (-(-slab_words // chunk) * chunk) > 5 * slab_words:
        chunk //= 2
    return max(words // chunk, 1), chunk


def _bind(
    kernel: Any,
    kv: PagedKV,
    rows: SlabRows,
    pages: int,
    tuning: Tuning,
    tensors: tuple[torch.Tensor, ...],
    constants: Callable[[Family], Constants],
) -> Bound:
    parts = []
    for family in kv.families:
        items, chunk = tile_shape(family.slab_words, tuning.words)
        shape = {"ITEMS": items, "CHUNK": chunk}
        chosen = {**constants(family), **_rows(family, kv.layout, rows), **shape}
        launch = _Launch(kernel, tuning.warps, tensors, 5, chosen)
        parts.append((launch, pages * family.components * kv.layout.groups, items))
    return Bound(parts, rows.first_layer, tuning.blocks)


_compiled: dict[tuple[Any, ...], Any] = {}
"""Kernels by all that they depend on. Triton's own way to a compiled kernel takes some 50 us a launch."""


class _Launch:
    """A kernel with all arguments but the last ``counts`` ones before its constants."""

    def __init__(
        self, kernel: Any, warps: int, tensors: tuple[torch.Tensor, ...], counts: int, constants: Constants
    ) -> None:
        self._kernel, self._warps, self._tensors, self._constants = kernel, warps, tensors, constants
        self._device = tensors[0].device
        self._key = (kernel, self._device, warps, *constants.items())
        self._ready = _compiled.get(self._key)
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        self._ordered: list[int | bool] = []
        if self._device.type == "cuda":
            names = kernel.arg_names[len(tensors) + counts :]
            self._ordered = [constants[name] for name in names]

    def __call__(self, blocks: int, *counts: int) -> None:
        if not blocks:
            return
        if self._ready is None:
            launch = self._kernel[(blocks,)]
            self._ready = launch(*self._tensors, *counts, **self._constants, num_warps=self._warps)
            _compiled[self._key] = self._ready
            return
        stream = torch.cuda.current_stream(self._device).cuda_stream
        self._ready[(blocks, 1, 1)](*self._addresses, *counts, *self._ordered, stream=stream)


def _or(tensor: torch.Tensor | None, unused: torch.Tensor) -> torch.Tensor:
    """A kernel that does without a tensor still takes a pointer."""
    return unused if tensor is None else tensor


def _bytes(checks: torch.Tensor | None, unused: torch.Tensor) -> torch.Tensor:
    return unused if checks is None else checks.view(torch.uint8)


def _buffers(family: Family, layout: PageLayout, starts: torch.Tensor | None) -> Constants:
    return {
        "PAGE": layout.page_size,
        "FOUND": starts is not None and layout.page_size > 1,
        "COMPONENT": family.first,
        "UNIT": family.unit,
        "RUN": family.run,
        "RUNS": family.runs,
        "SLOT_STRIDE": family.slot_stride,
        "RUN_STRIDE": family.run_stride,
    }


def _rows(family: Family, layout: PageLayout, rows: SlabRows) -> Constants:
    offsets = rows.components[family.first : family.first + family.components]
    places = [rows.row, rows.group, family.slab_words, *rows.components, rows.words.data_ptr() // WORD]
    return {
        "LAYERS": layout.layers,
        "GROUPS": layout.groups,
        "COMPONENTS": family.components,
        "SLAB": family.slab_words,
        "ROW": rows.row,
        "GROUP": rows.group,
        "OFFSET": offsets[0],
        "BETWEEN": offsets[1] - offsets[0] if len(offsets) > 1 else 0,
        "VECTOR": family.vector and all(place % 2 == 0 for place in places),
    }


def _sums(rows: SlabRows) -> Constants:
    return {"SUM_ROW": rows.sum_row, "SUM_GROUP": rows.sum_group}


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
