"""The copy backends over Triton kernels: ``staged`` and ``triton``; see ``copy_triton``."""

from __future__ import annotations

import numpy as np
import torch

from hicache_ext.core.header import FIXED, Labels, fixed_parts, sealed_pages
from hicache_ext.transfer import copy_triton
from hicache_ext.transfer.backends import RING_BYTES, Alter, Landed, headers_on, recorded, write_fixed
from hicache_ext.transfer.device_kv import DeviceKV
from hicache_ext.transfer.host_pool import HostPagePool
from hicache_ext.transfer.seal import Seal, upload
from hicache_ext.triton_kernels import tables


class StagedBackend:
    """A kernel gathers or scatters in device memory, the copy engine crosses the bus."""

    def __init__(self, kv: DeviceKV, host: HostPagePool, seal: Seal) -> None:
        self.host = host
        self.seal = seal
        self._kv = copy_triton.prepare(kv)
        # Small GPUs give less: there are five buffers of this size.
        size = min(RING_BYTES, torch.cuda.get_device_properties(kv.device).total_memory >> 9)
        self._backup = copy_triton.StagedBackup(self._kv, (3, size))
        self._load = copy_triton.StagedLoad(self._kv, (2, size))
        self.bus = self._load.stream
        copy_triton.warm_up(self._kv)

    def to_host(
        self, slots: torch.Tensor, pages: np.ndarray, labels: Labels, alter: Alter | None
    ) -> torch.cuda.Event:
        fixed, sealed = headers_on(slots.device, self.seal, labels)

        def finish(part: slice, rows: torch.Tensor) -> None:
            write_fixed(rows, fixed[part], self._kv.layout.groups)
            if alter is not None:
                alter(rows, pages[part])

        index = copy_triton.device_pages(self._kv, slots)
        event = self._backup(index, self.host.buffer, pages, sealed, finish)
        assert event is not None
        return event

    def to_device(
        self, slots: torch.Tensor, pages: np.ndarray, labels: Labels, landed: Landed, by_layer: bool = True
    ) -> list[torch.Tensor]:
        checks, flags = checks_of(self.host.buffer, pages, self.seal, labels)
        index = copy_triton.device_pages(self._kv, slots)
        self._load(index, self.host.buffer, pages, checks, flags, landed, by_layer=by_layer)
        return [flags]


class DirectBackend:
    """A few blocks read and write pinned host memory themselves."""

    bus: torch.cuda.Stream | None = None

    def __init__(self, kv: DeviceKV, host: HostPagePool, seal: Seal) -> None:
        self.host = host
        self.seal = seal
        self._kv = copy_triton.prepare(kv)
        copy_triton.warm_up(self._kv)

    def to_host(
        self, slots: torch.Tensor, pages: np.ndarray, labels: Labels, alter: Alter | None
    ) -> torch.cuda.Event:
        layout = self._kv.layout
        # The kernel writes payload and checksums only, so the rest can be there before.
        fixed = fixed_parts(labels, layout.geometry, self.seal.integrity)
        objects = self.host.buffer.numpy().reshape(len(self.host.buffer), layout.groups, -1)
        objects[pages, :, : FIXED.itemsize] = fixed
        _, sealed = headers_on(slots.device, self.seal, labels)
        index = copy_triton.device_pages(self._kv, slots)
        copy_triton.gather(self._kv, index, self.host.buffer, upload(pages, slots.device), sealed)
        if alter is not None:
            torch.cuda.current_stream(slots.device).synchronize()
            rows = self.host.buffer[pages]
            alter(rows, pages)
            self.host.buffer[pages] = rows
        return recorded()

    def to_device(
        self, slots: torch.Tensor, pages: np.ndarray, labels: Labels, landed: Landed, by_layer: bool = True
    ) -> list[torch.Tensor]:
        layers = self._kv.layout.layers
        rows = upload(pages, slots.device)
        checks, flags = checks_of(self.host.buffer, pages, self.seal, labels)
        index = copy_triton.device_pages(self._kv, slots)
        copy = copy_triton.scatter(self._kv, self.host.buffer, rows, index, checks, flags)
        for first in range(0, layers, copy_triton.DIRECT_LAYERS):
            some = range(first, min(first + copy_triton.DIRECT_LAYERS, layers))
            copy(some)
            landed(some, len(pages))
        return [flags]


def checks_of(
    host: torch.Tensor, pages: np.ndarray, seal: Seal, labels: Labels
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernels are to do with each page, uint8 ``[n]``, and zeros for what they find, int32 ``[n]``.

    Both lie in the same pinned memory, which kernels reach: keep one of them until they have run.
    """
    objects = host.numpy().reshape(len(host), seal.layout.groups, -1)
    fixed = fixed_parts(labels, seal.layout.geometry, seal.integrity)
    sound = (objects[pages, :, : FIXED.itemsize] == fixed).all((1, 2))
    board = torch.zeros((2, len(pages)), dtype=torch.int32, pin_memory=host.is_pinned())
    checks = board[1].view(torch.uint8)[: len(pages)]
    sealed = sealed_pages(labels, seal.integrity)
    checks.numpy()[:] = np.where(sound, np.where(sealed, tables.SEALED, tables.PLAIN), tables.REFUSED)
    return checks, board[0]
