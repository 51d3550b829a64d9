"""What one page of KV looks like in host memory.

A page is stored as groups of KV heads, each contiguous, so that any TP degree up to the number of groups
reads the same bytes:

    page     = group 0 | group 1 | ...
    group    = component 0 | component 1 | ...          components: K and V, or one latent row for MLA
    component = [layer][token of the page][head of the group][dim]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_GROUPS = 8


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

    def __post_init__(self) -> None:
        for c in self.components:
            if c.heads % self.groups:
                raise ValueError(f"{c.heads} {c.name} heads do not divide into {self.groups} groups")

    @property
    def group_elements(self) -> int:
        return sum(self._component_elements(c) for c in self.components)

    @property
    def page_bytes(self) -> int:
        return self.groups * self.group_elements * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        return self.page_bytes // self.page_size

    def views(self, pages: torch.Tensor) -> list[torch.Tensor]:
        """The components of a page buffer, uint8 ``[n, page_bytes]``, as views of its memory.

        Each is ``[n, group, layer, token, head of the group, dim]`` of ``dtype``.
        """
        flat = pages.view(self.dtype)
        n, stride = flat.shape[0], flat.stride(0)
        views, offset = [], 0
        for c in self.components:
            heads = c.heads // self.groups
            shape = (n, self.groups, self.layers, self.page_size, heads, c.dim)
            row = heads * c.dim
            strides = (stride, self.group_elements, self.page_size * row, row, c.dim, 1)
            views.append(flat.as_strided(shape, strides, flat.storage_offset() + offset))
            offset += self._component_elements(c)
        return views

    def _component_elements(self, c: Component) -> int:
        return self.layers * self.page_size * (c.heads // self.groups) * c.dim


def head_groups(kv_heads: int) -> int:
    """The largest number of groups up to ``MAX_GROUPS`` that divides the heads evenly."""
    return max(g for g in range(1, min(kv_heads, MAX_GROUPS) + 1) if kv_heads % g == 0)
