"""A disk store of one folder per head group, so that servers of any TP degree find each other's objects.

    PATH/g0, PATH/g1, ...      the first copy of each group
    PATH/g0.1, PATH/g1.1, ...  the copies of further TP ranks that hold the same groups

Each folder is a disk store of its own, with one process at a time: the rank that holds its group. Objects
whose group no rank holds belong to all of a rank: they go to each of its folders, and one that has it is
enough to find it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hicache_ext.stores import disk_files
from hicache_ext.stores.base import (
    GB,
    Key,
    Outcome,
    Rows,
    StoreError,
    StoreStats,
    check_object_bytes,
)
from hicache_ext.stores.disk import DiskSettings, DiskStore
from hicache_ext.stores.several import ORPHAN_S, Ask, Several, Share, total

_ALL, _NONE = -1, -2


@dataclass(frozen=True)
class Placement:
    """Which head groups of the model a TP rank holds, and which copy of them."""

    groups: int
    first_group: int = 0
    total_groups: int | None = None
    """By default there are no other groups."""
    replica: int = 0
    replicas: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.first_group <= self.all_groups - self.groups or self.groups < 1:
            last = self.first_group + self.groups - 1
            raise ValueError(f"groups {self.first_group} to {last} of {self.all_groups}")
        if not 0 <= self.replica < self.replicas:
            raise ValueError(f"replica {self.replica} of {self.replicas}")

    @property
    def all_groups(self) -> int:
        return self.groups if self.total_groups is None else self.total_groups

    @property
    def ranks(self) -> int:
        return self.all_groups // self.groups * self.replicas

    @property
    def own(self) -> range:
        return range(self.first_group, self.first_group + self.groups)


def folder_of(path: Path, group: int, replica: int) -> Path:
    return path / (f"g{group}.{replica}" if replica else f"g{group}")


class GroupedDiskStore:
    """See the module's text. The quota of ``settings`` is for all folders of all ranks."""

    def __init__(
        self, settings: DiskSettings, object_bytes: int, placement: Placement, orphan_s: float = ORPHAN_S
    ) -> None:
        """Raises StoreError if a folder cannot be used, is in use, or holds something else."""
        self.settings = settings
        self.object_bytes = check_object_bytes(object_bytes)
        self.placement = placement
        folders = placement.all_groups * placement.replicas
        if settings.size_gb * GB / folders < disk_files.stride(object_bytes):
            raise StoreError(
                f"size_gb={settings.size_gb:g} leaves less than one object of {object_bytes} bytes to each "
                f"of the {folders} folders in {settings.path}; give more"
            )
        # The threads of the whole store, but never one alone: a read should not wait for a write.
        threads = max(2, settings.threads // placement.groups)
        self.folders: list[DiskStore] = []
        try:
            for group in placement.own:
                path = folder_of(settings.path, group, placement.replica)
                one = replace(settings, path=path, size_gb=settings.size_gb / folders, threads=threads)
                self.folders.append(DiskStore(one, object_bytes))
        except BaseException:
            for folder in self.folders:
                folder.close()
            raise
        self._several = Several(
            self.folders, f"disk store in {settings.path}", threads=2 * placement.groups, orphan_s=orphan_s
        )

    def register(self, buffer: np.ndarray) -> None:
        for folder in self.folders:
            folder.register(buffer)

    def exists(self, keys: Sequence[Key], deadline: float) -> Outcome:
        # Answered from memory, so not worth a thread.
        parts = [
            (s, self._one(s, lambda f, k, _, d: f.exists(k, d), keys, deadline)) for s in self._shares(keys)
        ]
        return self._any(len(keys), parts)

    def get(self, keys: Sequence[Key], rows: Rows, deadline: float) -> Outcome:
        shares = self._shares(keys, once=True)
        outcomes = self._several.ask(shares, lambda f, k, r, d: f.get(k, r, d), keys, rows, deadline)
        return self._several.report(rows, self._any(len(keys), list(zip(shares, outcomes, strict=True))))

    def put(self, keys: Sequence[Key], rows: Rows, deadline: float, *, hot: bool = False) -> Outcome:
        shares = self._shares(keys)
        outcomes = self._several.ask(shares, lambda f, k, r, d: f.put(k, r, d, hot=hot), keys, rows, deadline)
        return self._several.report(rows, self._all(len(keys), list(zip(shares, outcomes, strict=True))))

    def remove(self, keys: Sequence[Key], deadline: float) -> Outcome:
        shares = self._shares(keys)
        outcomes = self._several.ask(shares, lambda f, k, _, d: f.remove(k, d), keys, None, deadline)
        outcome = self._all(len(keys), list(zip(shares, outcomes, strict=True)))
        # Of another rank's groups nothing is here.
        outcome.ok[:] |= self._folders_of(keys) == _NONE
        return outcome

    def clear(self, namespace: bytes, below_epoch: int, deadline: float) -> bool:
        return self._everywhere(lambda f: f.clear(namespace, below_epoch, deadline), deadline)

    def ping(self, deadline: float) -> bool:
        """Whether all folders answer: a page is read from all of them."""
        return self._everywhere(lambda f: f.ping(deadline), deadline)

    def released(self) -> list[int]:
        return self._several.released()

    def stats(self) -> StoreStats:
        return total([folder.stats() for folder in self.folders], len(self._several.held))

    def close(self) -> None:
        self._several.close()

    def _everywhere(self, question: Callable[..., bool], deadline: float) -> bool:
        return all(self._several.side_by_side(question, range(len(self.folders)), deadline))

    def _one(self, share: Share, ask: Ask, keys: Sequence[Key], deadline: float) -> Outcome:
        (outcome,) = self._several.ask([share], ask, keys, None, deadline)
        return outcome

    def _folders_of(self, keys: Sequence[Key]) -> np.ndarray:
        """Where objects belong: a folder's index, ``_ALL``, or ``_NONE`` for another rank's."""
        place = self.placement
        groups = np.array([key.group for key in keys], np.int64)
        folders = groups - place.first_group
        folders[(folders < 0) | (folders >= place.groups)] = _NONE
        folders[groups >= place.all_groups] = _ALL
        return folders

    def _shares(self, keys: Sequence[Key], *, once: bool = False) -> list[Share]:
        """Which keys go to which folder; with ``once`` each to one that has it, as far as any has."""
        folders = self._folders_of(keys)
        if once:
            for p in np.flatnonzero(folders == _ALL):
                having = (i for i, f in enumerate(self.folders) if f.exists([keys[p]], 0.0).ok[0])
                folders[p] = next(having, 0)
        mine = [np.flatnonzero((folders == i) | (folders == _ALL)) for i in range(len(self.folders))]
        return [Share(i, positions) for i, positions in enumerate(mine) if len(positions)]

    @staticmethod
    def _any(count: int, parts: list[tuple[Share, Outcome]]) -> Outcome:
        ok, held = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        for share, outcome in parts:
            ok[share.positions] |= outcome.ok
            held[share.positions] |= outcome.held
        return Outcome(ok, held, any(o.down for _, o in parts) and not ok.any())

    @staticmethod
    def _all(count: int, parts: list[tuple[Share, Outcome]]) -> Outcome:
        missed, asked, held = (np.zeros(count, np.bool_) for _ in range(3))
        for share, outcome in parts:
            asked[share.positions] = True
            missed[share.positions] |= ~outcome.ok
            held[share.positions] |= outcome.held
        ok = asked & ~missed
        return Outcome(ok, held, any(o.down for _, o in parts) and not ok.any())
