"""A store in this process's memory, for tests and as the plainest example of the protocol."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hicache_ext.stores.base import Key, Outcome, Rack, Rows, StoreStats, check_object_bytes, nothing


class MemoryStore:
    """Holds up to ``limit`` objects; the least recently used goes first."""

    def __init__(self, object_bytes: int, limit: int) -> None:
        self.object_bytes = check_object_bytes(object_bytes)
        self._limit = limit
        self._objects: OrderedDict[Key, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self._stats = StoreStats()
        self._rack: Rack | None = None

    def register(self, buffer: np.ndarray) -> None:
        self._rack = Rack(buffer, self.object_bytes)

    def exists(self, keys: Sequence[Key], deadline: float) -> Outcome:
        outcome = nothing(len(keys))
        with self._lock:
            outcome.ok[:] = [key in self._objects for key in keys]
        return outcome

    def get(self, keys: Sequence[Key], rows: Rows, deadline: float) -> Outcome:
        outcome = nothing(len(keys))
        if self._rack is None:
            return outcome
        for i, (key, row) in enumerate(zip(keys, rows, strict=True)):
            if time.monotonic() >= deadline:
                self._stats.late += len(keys) - i
                break
            with self._lock:
                data = self._objects.get(key)
                if data is None:
                    self._stats.misses += 1
                    continue
                self._objects.move_to_end(key)
                self._stats.hits += 1
            self._rack.view(row)[:] = data
            outcome.ok[i] = True
        return outcome

    def put(self, keys: Sequence[Key], rows: Rows, deadline: float, *, hot: bool = False) -> Outcome:
        outcome = nothing(len(keys))
        if self._rack is None:
            return outcome
        for i, (key, row) in enumerate(zip(keys, rows, strict=True)):
            if time.monotonic() >= deadline:
                self._stats.late += len(keys) - i
                break
            with self._lock:
                outcome.ok[i] = True
                if key in self._objects:
                    self._stats.present += 1
                    continue
                self._objects[key] = bytes(self._rack.view(row))
                self._stats.stored += 1
                if len(self._objects) > self._limit:
                    self._objects.popitem(last=False)
                    self._stats.evicted += 1
        return outcome

    def remove(self, keys: Sequence[Key], deadline: float) -> Outcome:
        outcome = nothing(len(keys))
        with self._lock:
            self._drop(keys)
        outcome.ok[:] = True
        return outcome

    def clear(self, namespace: bytes, below_epoch: int, deadline: float) -> bool:
        with self._lock:
            self._drop([k for k in self._objects if k.namespace == namespace and k.epoch < below_epoch])
        return True

    def ping(self, deadline: float) -> bool:
        return self._rack is not None

    def released(self) -> list[int]:
        return []

    def stats(self) -> StoreStats:
        with self._lock:
            self._stats.objects = len(self._objects)
            self._stats.bytes_used = len(self._objects) * self.object_bytes
            self._stats.bytes_limit = self._limit * self.object_bytes
            return replace(self._stats)

    def close(self) -> None:
        self._rack = None
        with self._lock:
            self._objects.clear()

    def _drop(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self._stats.removed += self._objects.pop(key, None) is not None
