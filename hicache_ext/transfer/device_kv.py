"""The engine's KV buffers, as the copy backends see them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hicache_ext.transfer.layout import PageLayout


@dataclass(frozen=True)
class DeviceKV:
    """``buffers[component][layer]`` is ``[slots, heads, dim]``; strides are free, the last dim is dense."""

    layout: PageLayout
    buffers: tuple[tuple[torch.Tensor, ...], ...]

    def __post_init__(self) -> None:
        for component, layers in zip(self.layout.components, self.buffers, strict=True):
            if len(layers) != self.layout.layers:
                raise ValueError(f"{component.name}: {len(layers)} layers, expected {self.layout.layers}")
            for buffer in layers:
                if buffer.dtype != self.layout.dtype or buffer.shape[1:] != (component.heads, component.dim):
                    raise ValueError(
                        f"{component.name} buffer is {buffer.dtype} {tuple(buffer.shape)}, expected "
                        f"{self.layout.dtype} [slots, {component.heads}, {component.dim}]"
                    )

    @property
    def device(self) -> torch.device:
        return self.buffers[0][0].device
