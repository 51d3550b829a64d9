"""Damages pages on purpose, so that one can see the checks catch it. Off unless asked for."""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Callable

import numpy as np
import torch

from hicache_ext.core.header import FIXED
from hicache_ext.transfer.choices import FaultKind, FaultPlan, FaultTier
from hicache_ext.transfer.layout import PageLayout

REMEMBERED_ROWS = 8


class FaultInjector:
    """Counts what it did; safe to call from both directions' threads."""

    def __init__(self, plan: FaultPlan, layout: PageLayout) -> None:
        self.plan = plan
        self.injected: Counter[FaultKind] = Counter()
        self.met = 0
        """Damaged pages that a load has read: each must have been refused."""
        self._layout = layout
        self._random = random.Random(plan.seed)
        self._lock = threading.Lock()
        self._damaged: set[int] = set()
        self._old: deque[np.ndarray] = deque(maxlen=REMEMBERED_ROWS)

    def on_the_way(self, rows: torch.Tensor, pages: np.ndarray) -> None:
        """``rows`` are about to be written to host pages ``pages``."""
        with self._lock:
            self._damaged.difference_update(pages.tolist())
            if self.plan.tier is FaultTier.TRANSFER:
                self._damage(rows, np.arange(len(pages)), pages)
            for index in self._some(len(pages), 0.05):
                self._old.append(rows[index].cpu().numpy().copy())

    def at_rest(self, buffer: torch.Tensor, pages: np.ndarray) -> None:
        """Host pages ``pages`` (rows of ``buffer``) are about to be loaded."""
        with self._lock:
            if self.plan.tier is FaultTier.HOST:
                self._damage(buffer, pages, pages)
            self.met += sum(page in self._damaged for page in pages.tolist())

    def _some(self, count: int, rate: float) -> list[int]:
        return [i for i in range(count) if self._random.random() < rate]

    def _damage(self, buffer: torch.Tensor, rows: np.ndarray, pages: np.ndarray) -> None:
        for index in self._some(len(pages), self.plan.rate):
            if int(pages[index]) in self._damaged:
                continue
            before = buffer[rows[index]].cpu().numpy().copy()
            kind = self._random.choice(self.plan.kinds)
            other = self._partner(index, pages) if kind is FaultKind.SWAP_PAGES else None
            if other is not None:
                after = buffer[rows[other]].cpu().numpy().copy()
                buffer[rows[other]] = torch.from_numpy(before)
                self._damaged.add(int(pages[other]))
                self.injected[kind] += 1
            else:
                after = before.copy()
                if kind is FaultKind.SWAP_PAGES or not _APPLY[kind](self, after) or (after == before).all():
                    kind = FaultKind.FLIP
                    after = before.copy()
                    self._flip(after)
            buffer[rows[index]] = torch.from_numpy(after)
            self._damaged.add(int(pages[index]))
            self.injected[kind] += 1

    def _partner(self, index: int, pages: np.ndarray) -> int | None:
        others = [i for i, page in enumerate(pages.tolist()) if i != index and page not in self._damaged]
        return self._random.choice(others) if others else None

    def _flip(self, row: np.ndarray) -> bool:
        geometry = self._layout.geometry
        used = FIXED.itemsize + 8 * geometry.slabs
        at = self._random.randrange(used + geometry.payload_bytes)
        offset = at if at < used else geometry.header_bytes + at - used
        row[self._group() + offset] ^= 1 << self._random.randrange(8)
        return True

    def _swap_layers(self, row: np.ndarray) -> bool:
        layout = self._layout
        index = self._random.randrange(len(layout.components))
        if layout.layers < 2:
            return False
        one, other = self._random.sample(range(layout.layers), 2)
        return self._swap_slabs(row, (index, one), (index, other))

    def _swap_kv(self, row: np.ndarray) -> bool:
        layout = self._layout
        sizes = {layout.slab_bytes(c) for c in layout.components}
        if len(layout.components) < 2 or len(sizes) > 1:
            return False
        layer = self._random.randrange(layout.layers)
        return self._swap_slabs(row, (0, layer), (1, layer))

    def _swap_slabs(self, row: np.ndarray, one: tuple[int, int], other: tuple[int, int]) -> bool:
        size = self._layout.slab_bytes(self._layout.components[one[0]])
        group = self._group()
        a, b = (group + self._layout.component_offset(c) + layer * size for c, layer in (one, other))
        row[a : a + size], row[b : b + size] = row[b : b + size].copy(), row[a : a + size].copy()
        return True

    def _truncate(self, row: np.ndarray) -> bool:
        geometry = self._layout.geometry
        group = self._group()
        start = group + geometry.header_bytes + self._random.randrange(geometry.payload_bytes)
        row[start : group + geometry.header_bytes + geometry.payload_bytes] = 0
        return True

    def _replay(self, row: np.ndarray) -> bool:
        # The same page written twice is no fault.
        others = [old for old in self._old if not np.array_equal(_identity(old), _identity(row))]
        if not others:
            return False
        row[:] = self._random.choice(others)
        return True

    def _forge(self, row: np.ndarray) -> bool:
        group = self._group()
        header = row[group : group + FIXED.itemsize].view(FIXED)
        field = self._random.choice(["version", "namespace", "epoch", "identity"])
        if field in ("version", "epoch"):
            header[field] += 1 + self._random.randrange(3)
        else:
            header[field][0, self._random.randrange(16)] ^= 1 + self._random.randrange(255)
        return True

    def _group(self) -> int:
        """Where a group of a row begins, one chosen at random."""
        return self._random.randrange(self._layout.groups) * self._layout.geometry.object_bytes


def _identity(row: np.ndarray) -> np.ndarray:
    return row[: FIXED.itemsize].view(FIXED)["identity"]


_APPLY: dict[FaultKind, Callable[[FaultInjector, np.ndarray], bool]] = {
    FaultKind.FLIP: FaultInjector._flip,
    FaultKind.SWAP_LAYERS: FaultInjector._swap_layers,
    FaultKind.SWAP_KV: FaultInjector._swap_kv,
    FaultKind.TRUNCATE: FaultInjector._truncate,
    FaultKind.REPLAY: FaultInjector._replay,
    FaultKind.FORGE: FaultInjector._forge,
}
