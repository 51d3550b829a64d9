"""Stores that misbehave."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from hicache_ext.stores.base import Holds, Key, Outcome, Rack, Rows, Store, StoreStats, nothing
from hicache_ext.stores.workers import Workers
from tests.remote.rig import SharedMemoryStore


class Around:
    """Passes everything on."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.object_bytes = inner.object_bytes

    def register(self, buffer: np.ndarray) -> None:
        self.inner.register(buffer)

    def exists(self, keys: Sequence[Key], deadline: float) -> Outcome:
        return self.inner.exists(keys, deadline)

    def get(self, keys: Sequence[Key], rows: Rows, deadline: float) -> Outcome:
        return self.inner.get(keys, rows, deadline)

    def put(self, keys: Sequence[Key], rows: Rows, deadline: float, *, hot: bool = False) -> Outcome:
        return self.inner.put(keys, rows, deadline, hot=hot)

    def remove(self, keys: Sequence[Key], deadline: float) -> Outcome:
        return self.inner.remove(keys, deadline)

    def clear(self, namespace: bytes, below_epoch: int, deadline: float) -> bool:
        return self.inner.clear(namespace, below_epoch, deadline)

    def ping(self, deadline: float) -> bool:
        return self.inner.ping(deadline)

    def released(self) -> list[int]:
        return self.inner.released()

    def stats(self) -> StoreStats:
        return self.inner.stats()

    def close(self) -> None:
        self.inner.close()


class Stuck(Around):
    """Calls of some kinds do not return, whatever their deadline, until ``free``."""

    def __init__(self, inner: Store, *calls: str) -> None:
        super().__init__(inner)
        self.calls = set(calls)
        self.waiting = 0
        self._free = threading.Event()

    def free(self) -> None:
        self._free.set()

    def _pass(self, call: str) -> None:
        if call in self.calls and not self._free.is_set():
            self.waiting += 1
            self._free.wait(30)

    def exists(self, keys: Sequence[Key], deadline: float) -> Outcome:
        self._pass("exists")
        return super().exists(keys, deadline)

    def get(self, keys: Sequence[Key], rows: Rows, deadline: float) -> Outcome:
        self._pass("get")
        return super().get(keys, rows, time.monotonic() + 10)

    def put(self, keys: Sequence[Key], rows: Rows, deadline: float, *, hot: bool = False) -> Outcome:
        self._pass("put")
        return super().put(keys, rows, time.monotonic() + 10, hot=hot)

    def close(self) -> None:
        self.free()
        super().close()


class Down(Around):
    """Answers nothing while ``down`` is set."""

    down = False

    def exists(self, keys: Sequence[Key], deadline: float) -> Outcome:
        return nothing(len(keys), down=True) if self.down else super().exists(keys, deadline)

    def get(self, keys: Sequence[Key], rows: Rows, deadline: float) -> Outcome:
        return nothing(len(keys), down=True) if self.down else super().get(keys, rows, deadline)

    def put(self, keys: Sequence[Key], rows: Rows, deadline: float, *, hot: bool = False) -> Outcome:
        return nothing(len(keys), down=True) if self.down else super().put(keys, rows, deadline, hot=hot)

    def ping(self, deadline: float) -> bool:
        return not self.down and super().ping(deadline)


class Moody(Around):
    """Each transfer is one of: right, partly missing, slow, down, an exception, late with its rows held and
    written to afterwards, with bytes that are not right, or later than its deadline."""

    moods = ("right", "right", "right", "missing", "slow", "down", "raises", "held", "wrong", "overdue")

    def __init__(self, inner: SharedMemoryStore, seed: int) -> None:
        super().__init__(inner)
        self.random = random.Random(seed)
        self.seen: set[str] = set()
        self._holds = Holds()
        self._rack: Rack | None = None
        self._late = Workers("moody store", 4)

    def register(self, buffer: np.ndarray) -> None:
        super().register(buffer)
        self._rack = Rack(buffer, self.object_bytes)

    def exists(self, keys: Sequence[Key], deadline: float) -> Outcome:
        mood = self._mood()
        if mood == "raises":
            raise RuntimeError("the store is in a mood")
        if mood == "down":
            return nothing(len(keys), down=True)
        if mood in ("slow", "overdue"):
            time.sleep(0.01)
        return super().exists(keys, deadline)

    def get(self, keys: Sequence[Key], rows: Rows, deadline: float) -> Outcome:
        def scribble(row: int) -> None:
            assert self._rack is not None
            self._rack.view(row)[:] = bytes([self.random.randrange(256)]) * self.object_bytes

        outcome = self._transfer(
            lambda: super(Moody, self).get(keys, rows, deadline), rows, deadline, scribble
        )
        if "wrong" in self._now and outcome.ok.any():
            row = int(rows[int(self.random.choice(np.flatnonzero(outcome.ok).tolist()))])
            assert self._rack is not None
            view = self._rack.view(row)
            at = self.random.choice((0, 40, 70, 150, 300))
            view[at] ^= 1 << self.random.randrange(8)
        return outcome

    def put(self, keys: Sequence[Key], rows: Rows, deadline: float, *, hot: bool = False) -> Outcome:
        return self._transfer(
            lambda: super(Moody, self).put(keys, rows, deadline, hot=hot), rows, deadline, lambda _: None
        )

    def released(self) -> list[int]:
        return self._holds.released()

    def stats(self) -> StoreStats:
        stats = super().stats()
        stats.held = len(self._holds)
        return stats

    _now = ""

    def _mood(self) -> str:
        mood = self.random.choice(self.moods)
        self.seen.add(mood)
        self._now = mood
        return mood

    def _transfer(
        self, call: Callable[[], Outcome], rows: Rows, deadline: float, touch: Callable[[int], None]
    ) -> Outcome:
        mood = self._mood()
        if mood == "raises":
            raise RuntimeError("the store is in a mood")
        if mood == "down":
            return nothing(len(rows), down=True)
        if mood == "slow":
            time.sleep(self.random.uniform(0, 0.02))
        if mood == "overdue":
            time.sleep(max(0.0, deadline - time.monotonic()) + 0.02)
        outcome = call()
        if mood in ("missing", "held") and len(rows):
            some = np.array([self.random.random() < 0.3 for _ in rows])
            outcome.ok[some] = False
            if mood == "held":
                outcome.held[some] = True
                late = [int(row) for row, held in zip(rows, some, strict=True) if held]
                self._holds.add(late)
                self._late.submit(lambda: self._end(late, touch))
        return outcome

    def _end(self, rows: list[int], touch: Callable[[int], None]) -> None:
        time.sleep(self.random.uniform(0, 0.05))
        for row in rows:
            touch(row)
        self._holds.done(rows)
