"""What the kernels know about the two sides of a copy: the engine's buffers and where slabs of pages lie."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hicache_ext.core.checksum import multipliers
from hicache_ext.core.header import FIXED
from hicache_ext.transfer.device_kv import DeviceKV
from hicache_ext.transfer.layout import PageLayout

WORD = 8
"""Bytes that a checksum takes at a time."""

PLAIN, SEALED, REFUSED = 0, 1, 2
"""Of a page that is scattered: no checksums, checksums to verify, zeros in its place."""


@dataclass(frozen=True)
class Family:
    """Consecutive components of equal shape and strides: one launch moves them all.

    A head group of one token is ``runs`` dense runs of ``run`` units of ``unit`` bytes; strides are in units.
    ``vector`` says that runs may be read 16 bytes at a time.
    """

    first: int
    components: int
    slab_words: int
    unit: int
    run: int
    runs: int
    slot_stride: int
    run_stride: int
    vector: bool


@dataclass(frozen=True)
class PagedKV:
    """``kv`` with its tables on the device; see ``paged``."""

    kv: DeviceKV
    pointers: torch.Tensor
    """int64 ``[components, layers]``, addresses of the buffers."""
    factors: torch.Tensor
    """int64 ``[words of the largest slab]``: the checksum's multipliers."""
    families: tuple[Family, ...]

    @property
    def layout(self) -> PageLayout:
        return self.kv.layout


@dataclass(frozen=True)
class SlabRows:
    """Where slabs of pages lie in memory, in 64-bit words.

    The slab of row ``r``, group ``g``, component ``c``, layer ``l`` starts at
    ``words[r * row + g * group + components[c] + (l - first_layer) * slab]``, and its checksum is
    ``sums[r * sum_row + g * sum_group + c * layers + l]``.
    """

    words: torch.Tensor
    row: int
    group: int
    components: tuple[int, ...]
    first_layer: int
    sums: torch.Tensor
    sum_row: int
    sum_group: int


def paged(kv: DeviceKV) -> PagedKV:
    """Tables of ``kv``; its buffers must stay where they are.

    Raises ValueError if the layers of a component lie differently or a last dimension is not dense.
    """
    layout, device = kv.layout, kv.device
    families: list[Family] = []
    for index in range(len(layout.components)):
        family = _family(kv, index)
        last = families[-1] if families else None
        if last is not None and _shape(last) == _shape(family):
            families[-1] = Family(last.first, last.components + 1, *_shape(family))
        else:
            families.append(family)
    pointers = [[buffer.data_ptr() for buffer in layers] for layers in kv.buffers]
    words = max(layout.slab_bytes(c) for c in layout.components) // WORD
    return PagedKV(
        kv,
        torch.tensor(pointers, dtype=torch.int64, device=device),
        torch.from_numpy(multipliers(words).view(np.int64)).to(device),
        tuple(families),
    )


def page_rows(layout: PageLayout, pages: torch.Tensor) -> SlabRows:
    """Whole pages with their headers: uint8 ``[rows, page_bytes]``, contiguous."""
    if pages.dtype != torch.uint8 or pages.shape[1:] != (layout.page_bytes,) or not pages.is_contiguous():
        raise ValueError(
            f"pages are {pages.dtype} {tuple(pages.shape)}, expected dense uint8 [n, {layout.page_bytes}]"
        )
    words = pages.view(-1).view(torch.int64)
    row, group = layout.page_bytes // WORD, layout.geometry.object_bytes // WORD
    offsets = tuple(layout.component_offset(c) // WORD for c in range(len(layout.components)))
    return SlabRows(words, row, group, offsets, 0, words[FIXED.itemsize // WORD :], row, group)


def layer_rows(
    layout: PageLayout, staging: torch.Tensor, layers: int, first_layer: int, headers: torch.Tensor
) -> SlabRows:
    """A few layers of pages, apart from their headers.

    Args:
        staging: int64, contiguous: for each row and group the components one after another, of each
            ``layers`` slabs; see ``layer_row_words``.
        headers: int64 ``[rows, groups, header_words]``, contiguous; see ``header_words``.
    """
    offsets, group = [], 0
    for component in layout.components:
        offsets.append(group)
        group += layers * layout.slab_bytes(component) // WORD
    return SlabRows(
        staging.view(-1),
        group * layout.groups,
        group,
        tuple(offsets),
        first_layer,
        headers.view(-1)[FIXED.itemsize // WORD :],
        layout.groups * header_words(layout),
        header_words(layout),
    )


def layer_row_words(layout: PageLayout, layers: int) -> int:
    """Words of ``layers`` layers of a page."""
    return layout.groups * layers * sum(layout.slab_bytes(c) for c in layout.components) // WORD


def header_words(layout: PageLayout) -> int:
    """Words of a header up to its last checksum."""
    return FIXED.itemsize // WORD + layout.geometry.slabs


def _shape(family: Family) -> tuple[int, int, int, int, int, int, bool]:
    f = family
    return f.slab_words, f.unit, f.run, f.runs, f.slot_stride, f.run_stride, f.vector


def _family(kv: DeviceKV, index: int) -> Family:
    layout, component, layers = kv.layout, kv.layout.components[index], kv.buffers[index]
    strides = {buffer.stride() for buffer in layers}
    if len(strides) != 1 or layers[0].stride(2) != 1:
        raise ValueError(f"the {component.name} buffers lie differently from layer to layer or are not dense")
    slot, head, _ = layers[0].stride()
    heads, size = component.heads // layout.groups, layout.dtype.itemsize
    if heads == 1 or head == component.dim:
        run, runs, between = heads * component.dim, 1, heads * head
    else:
        run, runs, between = component.dim, heads, head
    places = [run * size, slot * size, between * size, *(buffer.data_ptr() for buffer in layers)]
    unit = next(u for u in (8, 4, 2, 1) if all(place % u == 0 for place in places))
    vector = all(place % 16 == 0 for place in places)
    words = layout.slab_bytes(component) // WORD
    return Family(
        first=index,
        components=1,
        slab_words=words,
        unit=unit,
        run=run * size // unit,
        runs=runs,
        slot_stride=slot * size // unit,
        run_stride=between * size // unit,
        vector=vector,
    )
