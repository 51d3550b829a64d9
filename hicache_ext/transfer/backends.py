"""How KV moves between a GPU and pinned host pages: the copy backends behind ``StreamEngine``.

All write the same bytes and refuse the same pages. Their work goes to the current stream (and streams that
are ordered with it); nothing waits on the CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import torch

from hicache_ext.core.header import FIXED, Labels, fixed_parts, sealed_pages
from hicache_ext.transfer.choices import CopyBackendName
from hicache_ext.transfer.copy_torch import gather, scatter_layer
from hicache_ext.transfer.device_kv import DeviceKV
from hicache_ext.transfer.host_pool import HostPagePool
from hicache_ext.transfer.seal import Seal, upload

logger = logging.getLogger(__name__)

STAGING_BYTES = 256 << 20
"""Device memory for one step of the torch backend."""
RING_BYTES = 128 << 20
"""Device memory of one of the five buffers of the staged backend, on a large GPU."""

Alter = Callable[[torch.Tensor, np.ndarray], None]
"""Called with rows that are about to be written to host pages, and the pages' numbers."""
Landed = Callable[[range, int], None]
"""Called with some layers and a number of pages when the work of these layers of the first pages is queued,
in ascending order; at last of all layers of all pages."""


class CopyBackend(Protocol):
    bus: torch.cuda.Stream | None
    """Where bytes cross the bus to the device; None: in the stream in which ``to_device`` is called."""

    def to_host(
        self, slots: torch.Tensor, pages: np.ndarray, labels: Labels, alter: Alter | None
    ) -> torch.cuda.Event:
        """Copy device pages to host pages, headers included; the event passes when they are there.

        Args:
            slots: int64 ``[n * page_size]`` on the device, page by page.
            pages: int64 ``[n]``, numbers of host pages.
        """
        ...

    def to_device(
        self, slots: torch.Tensor, pages: np.ndarray, labels: Labels, landed: Landed, by_layer: bool = True
    ) -> list[torch.Tensor]:
        """Copy host pages to device pages; zeros in place of those that are not what ``labels`` says.

        Args:
            by_layer: the first layers are waited for before the last; otherwise the first pages are.

        Returns:
            Tensors in pinned memory, ``n`` elements together, not zero for such pages; valid once the last
            layer has landed and the current stream has passed that point.
        """
        ...


def make_backend(name: CopyBackendName, kv: DeviceKV, host: HostPagePool, seal: Seal) -> CopyBackend:
    """The backend of that name; ``auto`` takes the fastest that this GPU and these buffers allow.

    Raises:
        ValueError: the named backend does not work here; one line says why.
    """
    if name is CopyBackendName.TORCH:
        return TorchBackend(kv, host, seal)
    try:
        from hicache_ext.transfer.triton_backends import DirectBackend, StagedBackend

        return (DirectBackend if name is CopyBackendName.TRITON else StagedBackend)(kv, host, seal)
    except (ImportError, ValueError) as error:
        if name is not CopyBackendName.AUTO:
            raise ValueError(f"the copy backend {name} does not work here: {error}") from error
        logger.warning("hicache-ext: copies with torch, because Triton kernels do not work here: %s", error)
        return TorchBackend(kv, host, seal)


class TorchBackend:
    """Plain indexing into a staging buffer on the device, and one copy for each run of host pages."""

    bus: torch.cuda.Stream | None = None

    def __init__(self, kv: DeviceKV, host: HostPagePool, seal: Seal) -> None:
        self.kv = kv
        self.host = host
        self.seal = seal

    def to_host(
        self, slots: torch.Tensor, pages: np.ndarray, labels: Labels, alter: Alter | None
    ) -> torch.cuda.Event:
        for part in self._parts(len(pages)):
            staging = self._staging(part)
            gather(self.kv, self._slots(slots, part), staging, self._rows(staging))
            self.seal.write(staging, labels[part])
            if alter is not None:
                alter(staging, pages[part])
            self.host.write(pages[part], staging)
        return recorded()

    def to_device(
        self, slots: torch.Tensor, pages: np.ndarray, labels: Labels, landed: Landed, by_layer: bool = True
    ) -> list[torch.Tensor]:
        verdicts = []
        parts = list(self._parts(len(pages)))
        for part in parts:
            staging = self._staging(part)
            self.host.read(pages[part], staging)
            sound = self.seal.verify(staging, labels[part])
            # What is computed from a bad page is thrown away, but it must be finite.
            staging.masked_fill_(~sound[:, None], 0)
            verdict = torch.empty(len(staging), dtype=torch.bool, pin_memory=True)
            verdicts.append(verdict.copy_(~sound, non_blocking=True))
            for layer in range(self.kv.layout.layers):
                scatter_layer(self.kv, staging, self._rows(staging), self._slots(slots, part), layer)
                if by_layer and part is parts[-1]:
                    landed(range(layer, layer + 1), len(pages))
            if not by_layer:
                landed(range(self.kv.layout.layers), part.stop)
        return verdicts

    def _parts(self, pages: int) -> Iterator[slice]:
        step = max(STAGING_BYTES // self.kv.layout.page_bytes, 1)
        for start in range(0, pages, step):
            yield slice(start, min(start + step, pages))

    def _slots(self, slots: torch.Tensor, part: slice) -> torch.Tensor:
        size = self.kv.layout.page_size
        return slots[part.start * size : part.stop * size]

    def _rows(self, staging: torch.Tensor) -> torch.Tensor:
        return torch.arange(len(staging), device=staging.device)

    def _staging(self, part: slice) -> torch.Tensor:
        shape = (part.stop - part.start, self.kv.layout.page_bytes)
        return torch.zeros(shape, dtype=torch.uint8, device=self.kv.device)


def recorded(stream: torch.cuda.Stream | None = None, *, timed: bool = False) -> torch.cuda.Event:
    """An event in ``stream``, or in the current one; two that are timed tell the time between them."""
    event = torch.cuda.Event(enable_timing=timed)
    event.record(stream)
    return event


def headers_on(device: torch.device, seal: Seal, labels: Labels) -> tuple[torch.Tensor, torch.Tensor]:
    """(fixed parts of the headers, uint8 ``[n, groups, 96]``; which pages are sealed, bool ``[n]``)."""
    fixed = fixed_parts(labels, seal.layout.geometry, seal.integrity)
    return upload(fixed, device), upload(sealed_pages(labels, seal.integrity), device)


def write_fixed(rows: torch.Tensor, fixed: torch.Tensor, groups: int) -> None:
    """Put the fixed parts into the headers of rows, uint8 ``[n, page_bytes]``."""
    rows.view(len(rows), groups, -1)[:, :, : FIXED.itemsize] = fixed
