"""A store of each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from hicache_ext.stores.base import Store
from hicache_ext.stores.disk import DiskSettings, DiskStore
from hicache_ext.stores.memory import MemoryStore
from tests.stores.util import aligned_buffer

OBJECT_BYTES = 16 * 1024
ROWS = 64
OpenDisk = Callable[..., DiskStore]


@pytest.fixture
def buffer() -> np.ndarray:
    return aligned_buffer(ROWS, OBJECT_BYTES)


@pytest.fixture
def open_disk(tmp_path: Path) -> Iterator[OpenDisk]:
    """Opens the store in ``tmp_path / "store"``, by default with room for 64 objects in files of 8."""
    opened: list[DiskStore] = []

    def open_store(buffer: np.ndarray | None = None, **settings: object) -> DiskStore:
        object_bytes = OBJECT_BYTES if buffer is None else buffer.shape[1]
        values = {
            "path": tmp_path / "store",
            "size_gb": 64 * object_bytes / 1e9,
            "segment_bytes": 8 * object_bytes,
            **settings,
        }
        policy = values.pop("policy", None)
        store = DiskStore(DiskSettings(**values), object_bytes, policy)  # type: ignore[arg-type]
        opened.append(store)
        if buffer is not None:
            store.register(buffer)
        return store

    yield open_store
    for store in opened:
        store.close()


@pytest.fixture(params=["memory", "disk"])
def store(request: pytest.FixtureRequest, buffer: np.ndarray) -> Iterator[Store]:
    """Each kind in turn, with ``buffer`` registered."""
    if request.param == "disk":
        yield request.getfixturevalue("open_disk")(buffer)
        return
    memory = MemoryStore(OBJECT_BYTES, 64)
    memory.register(buffer)
    yield memory
    memory.close()
