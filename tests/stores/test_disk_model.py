"""The disk store against a dictionary, over random lives with restarts."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hicache_ext.stores.base import Key
from hicache_ext.stores.disk import DiskSettings, DiskStore, Durability
from tests.stores.util import NAMESPACE, aligned_buffer, content, key, soon

OBJECT_BYTES = 4608
KEYS = [key(n, epoch=epoch) for n in range(12) for epoch in (1, 2)]
SOME = st.lists(st.sampled_from(KEYS), max_size=10)


def number(k: Key) -> int:
    return KEYS.index(k)


class DiskLives(RuleBasedStateMachine):
    """With 24 slots nothing is ever evicted and the store equals the dictionary; with 7 it may hold less."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="hicache-ext-model-"))
        self.buffer = aligned_buffer(16, OBJECT_BYTES)
        self.model: set[Key] = set()

    @initialize(slots=st.sampled_from([7, len(KEYS)]), durability=st.sampled_from(list(Durability)))
    def start(self, slots: int, durability: Durability) -> None:
        self.exact = slots == len(KEYS)
        self.settings = DiskSettings(
            self.folder / "store", slots * 8192 / 1e9, durability, threads=2, segment_bytes=5 * 8192
        )
        self.open()

    def open(self) -> None:
        self.store = DiskStore(self.settings, OBJECT_BYTES)
        self.store.register(self.buffer)

    @rule(keys=SOME, hot=st.booleans())
    def put(self, keys: list[Key], hot: bool) -> None:
        for row, k in enumerate(keys):
            self.buffer[row] = content(number(k), OBJECT_BYTES)
        outcome = self.store.put(keys, range(len(keys)), soon(), hot=hot)
        stored = {k for k, ok in zip(keys, outcome.ok, strict=True) if ok}
        if self.exact:
            assert stored == set(keys)
        self.model |= stored
        there = self.store.exists(list(stored), soon()).ok
        assert there.all()

    @rule(keys=SOME)
    def get(self, keys: list[Key]) -> None:
        self.buffer[:] = 0
        outcome = self.store.get(keys, range(len(keys)), soon())
        assert not outcome.held.any() and not outcome.down
        for row, k in enumerate(keys):
            if outcome.ok[row]:
                assert k in self.model
                assert np.array_equal(self.buffer[row], content(number(k), OBJECT_BYTES))
            else:
                assert not self.exact or k not in self.model

    @rule(keys=SOME)
    def remove(self, keys: list[Key]) -> None:
        assert self.store.remove(keys, soon()).ok.all()
        self.model -= set(keys)

    @rule(below=st.sampled_from([1, 2, 3]))
    def clear(self, below: int) -> None:
        assert self.store.clear(NAMESPACE, below, soon())
        self.model = {k for k in self.model if k.epoch >= below}

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.open()

    @precondition(lambda self: hasattr(self, "store"))
    @invariant()
    def exists_is_true(self) -> None:
        there = {k for k, ok in zip(KEYS, self.store.exists(KEYS, soon()).ok, strict=True) if ok}
        assert there == self.model if self.exact else there <= self.model
        stats = self.store.stats()
        assert stats.objects == len(there)
        assert stats.held == stats.corrupt == stats.errors == stats.late == 0

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        shutil.rmtree(self.folder)


TestDiskLives = DiskLives.TestCase
TestDiskLives.settings = settings(
    max_examples=15, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
