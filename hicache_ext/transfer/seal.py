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
        objects[:, :, : FIXED.itemsize] = torch.from_numpy(fixed).to(rows.device)
        sealed = np.flatnonzero(sealed_pages(labels, self.integrity))
        if len(sealed):
            self._table(objects)[sealed] = self._checksums(objects, sealed)

    def verify(self, rows: torch.Tensor, labels: Labels) -> torch.Tensor:
        """Which rows are what ``labels`` says, bool ``[n]`` on the device of ``rows``."""
        objects = self._objects(rows)
        fixed = fixed_parts(labels, self.layout.geometry, self.integrity)
        expected = torch.from_numpy(fixed).to(rows.device)
        sound = (objects[:, :, : FIXED.itemsize] == expected).flatten(1).all(1)
        sealed = np.flatnonzero(sealed_pages(labels, self.integrity))
        if len(sealed):
            same = self._table(objects)[sealed] == self._checksums(objects, sealed)
            sound[sealed] &= same.flatten(1).all(1)
        return sound

    def reason(self, row: torch.Tensor, labels: Labels, index: int) -> Reason:
        """Why row ``index`` did not verify; ``row`` is on the CPU."""
        found = self._objects(row[None])[0, :, : FIXED.itemsize].contiguous().numpy()
        one = Labels(labels.identities[index : index + 1], labels.namespace, labels.epoch)
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

    def _checksums(self, objects: torch.Tensor, pages: np.ndarray) -> torch.Tensor:
        """Of the payload of some pages, int64 ``[len(pages), group, slab]``."""
        whole = len(pages) == len(objects)
        sums = []
        for index in range(len(self.layout.components)):
            words = self._words(objects, index)
            words = words if whole else words[pages]
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
