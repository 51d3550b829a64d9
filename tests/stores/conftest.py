"""A store of each kind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from hicache_ext.stores.base import Store, StoreError
from hicache_ext.stores.disk import DiskSettings, DiskStore
from hicache_ext.stores.memory import MemoryStore
from hicache_ext.stores.mooncake import MooncakeStore
from hicache_ext.stores.mooncake_client import MooncakeSettings, load
from tests.stores.mooncake_service import Master
from tests.stores.util import NAMESPACE, aligned_buffer

OBJECT_BYTES = 16 * 1024
ROWS = 64
OpenDisk = Callable[..., DiskStore]


@pytest.fixture(scope="module")
def module_buffer() -> np.ndarray:
    return aligned_buffer(ROWS, OBJECT_BYTES)


@pytest.fixture
def buffer(module_buffer: np.ndarray) -> np.ndarray:
    module_buffer[:] = 0
    return module_buffer


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


def missing_mooncake() -> str | None:
    """Why Mooncake cannot be used here."""
    try:
        load(MooncakeSettings("127.0.0.1:1"))
    except StoreError as error:
        return str(error)
    return None


@pytest.fixture(scope="session")
def mooncake_master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    """A master that all tests share that do not harm it."""
    if (problem := missing_mooncake()) is not None:
        pytest.skip(problem)
    master = Master(tmp_path_factory.mktemp("mooncake") / "master.log")
    master.start()
    yield master
    master.close()


OpenMooncake = Callable[..., MooncakeStore]


@pytest.fixture
def open_mooncake() -> Iterator[OpenMooncake]:
    """Opens a store on a master; waits until it is connected."""
    opened: list[MooncakeStore] = []

    def open_store(master: Master, buffer: np.ndarray, **settings: object) -> MooncakeStore:
        store = MooncakeStore(master.settings(**settings), buffer.shape[1])
        opened.append(store)
        store.register(buffer)
        assert store.wait_connected(time.monotonic() + 15) is None
        return store

    yield open_store
    # Each takes Mooncake 2 s.
    with ThreadPoolExecutor() as pool:
        list(pool.map(MooncakeStore.close, opened))


@pytest.fixture(scope="module")
def shared_mooncake(
    mooncake_master: Master, module_buffer: np.ndarray
) -> Iterator[Callable[[], MooncakeStore]]:
    """One empty store after the other on the shared master; closing takes Mooncake 2 s, so it is reused."""
    opened: list[MooncakeStore] = []

    def empty() -> MooncakeStore:
        if not opened or not opened[-1].ping(time.monotonic() + 5):
            opened.append(MooncakeStore(mooncake_master.settings(), OBJECT_BYTES))
            opened[-1].register(module_buffer)
            assert opened[-1].wait_connected(time.monotonic() + 15) is None
        for namespace in (NAMESPACE, b"\xff" * 32):
            assert opened[-1].clear(namespace, 1 << 60, time.monotonic() + 5)
        return opened[-1]

    yield empty
    for store in opened:
        store.close()


@pytest.fixture(params=["memory", "disk", "mooncake"])
def store(request: pytest.FixtureRequest, buffer: np.ndarray) -> Iterator[Store]:
    """Each kind in turn, with ``buffer`` registered."""
    if request.param == "disk":
        yield request.getfixturevalue("open_disk")(buffer)
        return
    if request.param == "mooncake":
        yield request.getfixturevalue("shared_mooncake")()
        return
    memory = MemoryStore(OBJECT_BYTES, 64)
    memory.register(buffer)
    yield memory
    memory.close()
