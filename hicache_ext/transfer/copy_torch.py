"""The ``torch`` copy backend: plain indexing, the same bytes as every other backend; the reference."""

from __future__ import annotations

import torch

from hicache_ext.transfer.device_kv import DeviceKV


def gather(kv: DeviceKV, slots: torch.Tensor, out: torch.Tensor, pages: torch.Tensor) -> None:
    """Read device pages into rows ``pages`` of a page buffer on the same device.

    Args:
        slots: int64 ``[n * page_size]``, page by page.
        out: uint8 ``[rows, page_bytes]``.
        pages: int64 ``[n]``, distinct.
    """
    layout = kv.layout
    for component, view, layers in zip(layout.components, layout.views(out), kv.buffers, strict=True):
        heads = component.heads // layout.groups
        for layer, buffer in enumerate(layers):
            rows = buffer[slots].view(len(pages), layout.page_size, layout.groups, heads, component.dim)
            view[:, :, layer].index_copy_(0, pages, rows.permute(0, 2, 1, 3, 4))


def scatter_layer(
    kv: DeviceKV, source: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, layer: int
) -> None:
    """Write one layer of rows ``pages`` of a page buffer to device slots; arguments as in ``gather``."""
    layout = kv.layout
    for component, view, layers in zip(layout.components, layout.views(source), kv.buffers, strict=True):
        rows = view[:, :, layer].index_select(0, pages).permute(0, 2, 1, 3, 4)
        layers[layer].index_copy_(0, slots, rows.reshape(len(slots), component.heads, component.dim))
