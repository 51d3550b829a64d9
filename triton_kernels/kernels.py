"""Launches of the kernels in ``pages``, all on the current stream of the device that holds the KV.

Tensors lie on that device or in pinned host memory. A launch returns before the kernel has run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hicache_ext.transfer.layout import PageLayout
from hicache_ext.triton_kernels import pages as device
from hicache_ext.triton_kernels.tables import WORD, Family, PagedKV, SlabRows

RUN_SEARCH_WORDS = 1024


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
    if len(starts):
        device.starts_kernel[(-(-len(starts) // items),)](slots, starts, len(starts), page_size, width, items)
    return starts


def gather(
    kv: PagedKV,
    slots: torch.Tensor,
    starts: torch.Tensor,
    rows: SlabRows,
    pages: torch.Tensor,
    sealed: torch.Tensor | None,
    layers: range,
    tuning: Tuning,
) -> None:
    """Copy the engine's pages to rows of pages and write the checksums of those that are sealed.

    Args:
        slots: int64 ``[n * page_size]``, page by page.
        starts: int64 ``[n]``, see ``page_starts``.
        pages: int64 ``[n]``, distinct rows.
        sealed: bool ``[n]``, or None if no page is.
        layers: consecutive, all of them in ``rows``.
    """
    for family in kv.families:
        items, shape = _tiles(family, kv.layout, len(pages), len(layers), tuning)
        if not items:
            continue
        tiles = -(-items // shape["ITEMS"])
        device.gather_kernel[(min(tuning.blocks, tiles),)](
            kv.pointers,
            slots,
            starts,
            pages,
            pages if sealed is None else sealed.view(torch.uint8),
            kv.factors,
            rows.words,
            rows.sums,
            items,
            tiles,
            layers.start,
            layers.start - rows.first_layer,
            len(layers),
            **_buffers(family),
            **_rows(family, kv.layout, rows),
            **_sums(rows),
            PAGE=kv.layout.page_size,
            SEAL=sealed is not None,
            **shape,
            num_warps=tuning.warps,
        )


def scatter(
    kv: PagedKV,
    slots: torch.Tensor,
    starts: torch.Tensor,
    rows: SlabRows,
    pages: torch.Tensor,
    sealed: torch.Tensor | None,
    flags: torch.Tensor,
    layers: range,
    tuning: Tuning,
) -> None:
    """Copy rows of pages to the engine's pages; arguments as in ``gather``.

    A slab of a sealed page that is not what its checksum says is written as zeros and sets the page's entry
    of ``flags``, int32 ``[n]``, to 1; other entries stay as they are.
    """
    for family in kv.families:
        items, shape = _tiles(family, kv.layout, len(pages), len(layers), tuning)
        if not items:
            continue
        tiles = -(-items // shape["ITEMS"])
        device.scatter_kernel[(min(tuning.blocks, tiles),)](
            kv.pointers,
            slots,
            starts,
            pages,
            pages if sealed is None else sealed.view(torch.uint8),
            kv.factors,
            rows.words,
            rows.sums,
            flags,
            items,
            tiles,
            layers.start,
            layers.start - rows.first_layer,
            len(layers),
            **_buffers(family),
            **_rows(family, kv.layout, rows),
            **_sums(rows),
            PAGE=kv.layout.page_size,
            VERIFY=sealed is not None,
            **shape,
            num_warps=tuning.warps,
        )


def checksums(
    kv: PagedKV, rows: SlabRows, pages: torch.Tensor, out: torch.Tensor, layers: range, tuning: Tuning
) -> None:
    """Checksums of the slabs of some layers in rows ``pages``, into int64 ``out`` ``[n, groups, slabs]``."""
    if not out.is_contiguous():
        raise ValueError("the tensor for the checksums is not contiguous")
    for family in kv.families:
        items, shape = _tiles(family, kv.layout, len(pages), len(layers), tuning)
        if not items:
            continue
        tiles = -(-items // shape["ITEMS"])
        device.checksum_kernel[(min(tuning.blocks, tiles),)](
            pages,
            kv.factors,
            rows.words,
            out,
            items,
            tiles,
            layers.start,
            layers.start - rows.first_layer,
            len(layers),
            COMPONENT=family.first,
            SLABS=kv.layout.geometry.slabs,
            **_rows(family, kv.layout, rows),
            **shape,
            num_warps=tuning.warps,
        )


def tile_shape(slab_words: int, words: int) -> tuple[int, int]:
    """Slabs and words of a slab that a tile of about ``words`` takes; both are powers of two.

    The chunk is as long as it can be without leaving more than a quarter of the lanes idle.
    """
    chunk = min(_power_of_two(slab_words), words)
    while chunk > 1 and 4 * (-(-slab_words // chunk) * chunk) > 5 * slab_words:
        chunk //= 2
    return max(words // chunk, 1), chunk


def _tiles(
    family: Family, layout: PageLayout, pages: int, layers: int, tuning: Tuning
) -> tuple[int, dict[str, int]]:
    """Number of slabs, and the tile's shape."""
    items, chunk = tile_shape(family.slab_words, tuning.words)
    return pages * family.components * layout.groups * layers, {"ITEMS": items, "CHUNK": chunk}


def _buffers(family: Family) -> dict[str, Any]:
    return {
        "COMPONENT": family.first,
        "UNIT": family.unit,
        "RUN": family.run,
        "RUNS": family.runs,
        "SLOT_STRIDE": family.slot_stride,
        "RUN_STRIDE": family.run_stride,
    }


def _rows(family: Family, layout: PageLayout, rows: SlabRows) -> dict[str, Any]:
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


def _sums(rows: SlabRows) -> dict[str, int]:
    return {"SUM_ROW": rows.sum_row, "SUM_GROUP": rows.sum_group}


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
