"""What the kernels must do, in torch and numpy: same signatures, for the CPU and for tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hicache_ext.core import checksum
from hicache_ext.triton_kernels.tables import REFUSED, SEALED, WORD, PagedKV, SlabRows


def page_starts(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """First slot of each page whose slots follow one another, -1 for other pages; int64 ``[n]``."""
    table = slots.view(-1, page_size)
    in_a_row = (table == table[:, :1] + torch.arange(page_size, device=slots.device)).all(dim=1)
    return torch.where(in_a_row, table[:, 0], -1)


def gather(
    kv: PagedKV,
    slots: torch.Tensor,
    starts: torch.Tensor | None,
    rows: SlabRows,
    pages: torch.Tensor,
    sealed: torch.Tensor | None,
    layers: range,
    tuning: Any = None,
) -> None:
    """See ``kernels.gather``."""
    layout = kv.layout
    for c, component in enumerate(layout.components):
        heads = component.heads // layout.groups
        for layer in layers:
            tokens = kv.kv.buffers[c][layer][slots]
            tokens = tokens.view(len(pages), layout.page_size, layout.groups, heads, component.dim)
            slabs = _words(tokens.permute(0, 2, 1, 3, 4).contiguous()).view(len(pages), layout.groups, -1)
            _slabs(kv, rows, c, layer)[pages] = slabs
            if sealed is not None:
                _sums(kv, rows, c, layer)[pages] = _checksums(slabs).where(sealed[:, None], 0)


def scatter(
    kv: PagedKV,
    slots: torch.Tensor,
    starts: torch.Tensor | None,
    rows: SlabRows,
    pages: torch.Tensor,
    checks: torch.Tensor | None,
    flags: torch.Tensor,
    layers: range,
    tuning: Any = None,
) -> None:
    """See ``kernels.scatter``."""
    layout = kv.layout
    for c, component in enumerate(layout.components):
        heads = component.heads // layout.groups
        for layer in layers:
            slabs = _slabs(kv, rows, c, layer)[pages]
            if checks is not None:
                check = checks.view(torch.uint8)[:, None]
                wrong = _checksums(slabs) != _sums(kv, rows, c, layer)[pages]
                bad = (check == REFUSED) | (wrong & (check == SEALED))
                slabs[bad] = 0
                flags[bad.any(dim=1)] = 1
            shape = (len(pages), layout.groups, layout.page_size, heads, component.dim)
            tokens = slabs.view(-1).view(layout.dtype).view(shape).permute(0, 2, 1, 3, 4)
            kv.kv.buffers[c][layer][slots] = tokens.reshape(len(slots), component.heads, component.dim)


def checksums(
    kv: PagedKV, rows: SlabRows, pages: torch.Tensor, out: torch.Tensor, layers: range, tuning: Any = None
) -> None:
    """See ``kernels.checksums``."""
    for c in range(len(kv.layout.components)):
        for layer in layers:
            out[:, :, c * kv.layout.layers + layer] = _checksums(_slabs(kv, rows, c, layer)[pages])


def headers(
    kv: PagedKV, source: torch.Tensor, pages: torch.Tensor, out: torch.Tensor, tuning: Any = None
) -> None:
    """See ``kernels.headers``."""
    objects = source.view(torch.int64).view(len(source), kv.layout.groups, -1)
    out.copy_(objects[pages, :, : out.shape[2]])


def _slabs(kv: PagedKV, rows: SlabRows, component: int, layer: int) -> torch.Tensor:
    """One layer's slabs in rows of pages, a view int64 ``[rows, groups, words]``."""
    slab = kv.layout.slab_bytes(kv.layout.components[component]) // WORD
    offset = rows.components[component] + (layer - rows.first_layer) * slab
    shape = (len(rows.words) // rows.row, kv.layout.groups, slab)
    return rows.words.as_strided(shape, (rows.row, rows.group, 1), rows.words.storage_offset() + offset)


def _sums(kv: PagedKV, rows: SlabRows, component: int, layer: int) -> torch.Tensor:
    """One layer's checksums, a view int64 ``[rows, groups]``."""
    offset = rows.sums.storage_offset() + component * kv.layout.layers + layer
    shape = (-(-len(rows.sums) // rows.sum_row), kv.layout.groups)
    return rows.sums.as_strided(shape, (rows.sum_row, rows.sum_group), offset)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8).view(torch.int64)


def _checksums(slabs: torch.Tensor) -> torch.Tensor:
    """int64 of the shape of ``slabs`` without its last dimension, by the numpy code."""
    words = slabs.contiguous().cpu().numpy().view(np.uint64).reshape(-1, slabs.shape[-1])
    sums = checksum.checksums(words, checksum.multipliers(slabs.shape[-1]))
    return torch.from_numpy(sums.view(np.int64)).view(slabs.shape[:-1]).to(slabs.device)
