"""What one page of KV looks like in host memory.

A page is stored as groups of KV heads, each contiguous, so that any TP degree up to the number of groups
reads the same bytes:

    page      = group 0 | group 1 | ...
    group     = header | payload | zeros up to a multiple of 512 bytes          see ``core.header``
    payload   = component 0 | component 1 | ...         components: K and V, or one latent row for MLA
    component = slab of layer 0 | slab of layer 1 | ...
    slab      = [token of the page][head of the group][dim]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from hicache_ext.core.header import Geometry


@dataclass(frozen=True)
class Component:
    """One kind of row that the engine keeps per token and layer: ``heads`` x ``dim`` elements."""

    name: str
    heads: int
    dim: int


@dataclass(frozen=True)
class PageLayout:
    """Sizes are elements of ``dtype`` unless they say bytes."""

    page_size: int
    layers: int
    dtype: torch.dtype
    components: tuple[Component, ...]
    groups: int
    first_group: int = 0
    """Number of this rank's first group within the model."""

    def __post_init__(self) -> None:
        for c in self.components:
            if c.heads % self.groups:
                raise ValueError(f"{c.heads} {c.name} heads do not divide into {self.groups} groups")
            if self.slab_bytes(c) % 8:
                raise ValueError(f"{self.slab_bytes(c)} bytes of {c.name} a layer are no whole 64-bit words")

    @cached_property
    def geometry(self) -> Geometry:
        return Geometry(
            groups=self.groups,
            payload_bytes=self.layers * sum(self.slab_bytes(c) for c in self.components),
            slabs=self.layers * len(self.components),
            first_group=self.first_group,
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in host memory, headers included."""
        return self.groups * self.geometry.object_bytes

    @property
    def payload_bytes(self) -> int:
        """KV bytes of a page."""
        return self.groups * self.geometry.payload_bytes

    def slab_bytes(self, component: Component) -> int:
        heads = component.heads // self.groups
        return self.page_size * heads * component.dim * self.dtype.itemsize

    def component_offset(self, index: int) -> int:
        """Bytes from the start of a group to the first slab of component ``index``."""
        before = sum(self.slab_bytes(c) for c in self.components[:index])
        return self.geometry.header_bytes + self.layers * before

    def views(self, pages: torch.Tensor) -> list[torch.Tensor]:
        """The components of a page buffer, uint8 ``[n, page_bytes]``, as views of its memory.

        Each is ``[n, group, layer, token, head of the group, dim]`` of ``dtype``.
        """
        flat = pages.view(self.dtype)
        n, stride = flat.shape[0], flat.stride(0)
        group = self.geometry.object_bytes // self.dtype.itemsize
        views = []
        for index, c in enumerate(self.components):
            heads = c.heads // self.groups
            row = heads * c.dim
            shape = (n, self.groups, self.layers, self.page_size, heads, c.dim)
            strides = (stride, group, self.page_size * row, row, c.dim, 1)
            offset = flat.storage_offset() + self.component_offset(index) // self.dtype.itemsize
            views.append(flat.as_strided(shape, strides, offset))
        return views
