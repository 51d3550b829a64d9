"""Headers and checksums of page rows: written when pages leave the device, checked when they come back.

Rows are uint8 ``[n, page_bytes]`` on any device. On the CPU numpy does the arithmetic, elsewhere torch.
"""

from __future__ import annotations

import numpy as np
import torch

from hicache_ext.core.checksum import checksums, multipliers
from hicache_ext.core.header import (
    FIXED,
    Integrity,
    Labels,
    Reason,
    diagnose,
    fixed_parts,
    sealed_pages,
)
from hicache_ext.transfer.layout import PageLayout


class Seal:
    def __init__(self, layout: PageLayout, integrity: Integrity) -> None:
        self.layout = layout
        self.integrity = integrity
        self._factors = [multipliers(layout.slab_bytes(c) // 8) for c in layout.components]
        self._on_device: dict[torch.device, list[torch.Tensor]] = {}

    def write(self, rows: torch.Tensor, labels: Labels) -> None:
        """Fill in the headers of rows whose payload is complete."""
        objects = self._objects(rows)
        fixed = fixed_parts(labels, self.layout.geometry, self.integrity)
        objects[:, :, : FIXED.itemsize] = upload(fixed, rows.device)
        sealed = np.flatnonzero(sealed_pages(labels, self.integrity))
        if len(sealed) == len(rows):
            self._table(objects).copy_(self._checksums(objects))
        elif len(sealed):
            index = upload(sealed, rows.device)
            self._table(objects)[index] = self._checksums(objects[index])

    def verify(self, rows: torch.Tensor, labels: Labels) -> torch.Tensor:
        """Which rows are what ``labels`` says, bool ``[n]`` on the device of ``rows``."""
        objects = self._objects(rows)
        fixed = fixed_parts(labels, self.layout.geometry, self.integrity)
        sound = (objects[:, :, : FIXED.itemsize] == upload(fixed, rows.device)).flatten(1).all(1)
        sealed = np.flatnonzero(sealed_pages(labels, self.integrity))
        if len(sealed) == len(rows):
            sound &= self._verified(objects)
        elif len(sealed):
            index = upload(sealed, rows.device)
            sound[index] &= self._verified(objects[index])
        return sound

    def reason(self, row: torch.Tensor, labels: Labels, index: int) -> Reason:
        """Why row ``index`` did not verify; ``row`` is on the CPU."""
        found = self._objects(row[None])[0, :, : FIXED.itemsize].contiguous().numpy()
        one = labels[index : index + 1]
        return diagnose(found, fixed_parts(one, self.layout.geometry, self.integrity)[0])

    def void(self, rows: torch.Tensor) -> None:
        """Make sure that rows do not verify, whatever they hold."""
        self._objects(rows)[:, :, : FIXED.itemsize] = 0

    def _objects(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(len(rows), self.layout.groups, self.layout.geometry.object_bytes)

    def _table(self, objects: torch.Tensor) -> torch.Tensor:
        """The checksums in the headers, int64 ``[n, group, slab]``."""
        stop = FIXED.itemsize + 8 * self.layout.geometry.slabs
        return objects[:, :, FIXED.itemsize : stop].view(torch.int64)

    def _verified(self, objects: torch.Tensor) -> torch.Tensor:
        return (self._table(objects) == self._checksums(objects)).flatten(1).all(1)

    def _checksums(self, objects: torch.Tensor) -> torch.Tensor:
        """Of the payload, int64 ``[n, group, slab]``."""
        sums = []
        for index in range(len(self.layout.components)):
            words = self._words(objects, index)
            if words.device.type == "cpu":
                made = checksums(words.numpy().view(np.uint64), self._factors[index])
                sums.append(torch.from_numpy(made.view(np.int64)))
            else:
                sums.append(torch_checksums(words, self._factors_on(words.device)[index]))
        return torch.cat(sums, dim=2)

    def _words(self, objects: torch.Tensor, index: int) -> torch.Tensor:
        """Slabs of a component, int64 ``[n, group, layer, word]``."""
        layout = self.layout
        size = layout.slab_bytes(layout.components[index])
        start = layout.component_offset(index)
        part = objects[:, :, start : start + layout.layers * size].view(torch.int64)
        return part.unflatten(2, (layout.layers, size // 8))

    def _factors_on(self, device: torch.device) -> list[torch.Tensor]:
        if device not in self._on_device:
            factors = [torch.from_numpy(f.view(np.int64)).to(device) for f in self._factors]
            self._on_device[device] = factors
        return self._on_device[device]


def torch_checksums(words: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """``core.checksum.checksums`` of int64 words, on their device."""
    return ((words ^ ((words >> 32) & 0xFFFFFFFF)) * factors).sum(-1)


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """To ``device`` in the current stream, without waiting for it: pageable memory would."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
