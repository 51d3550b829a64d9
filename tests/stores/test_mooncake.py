"""The Mooncake store on real masters and peers: outages, frozen services, full stores, bad set-ups."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from hicache_ext.stores import mooncake
from hicache_ext.stores.base import Store, StoreError
from hicache_ext.stores.breaker import GuardedStore
from hicache_ext.stores.mooncake import MooncakeStore, name_of, older_epochs
from hicache_ext.stores.mooncake_client import MooncakeSettings, check_lockable, load, unreachable
from tests.conftest import ROOT
from tests.stores.conftest import OBJECT_BYTES, OpenMooncake, missing_mooncake
from tests.stores.mooncake_service import Master, Peer, free_port, freeze
from tests.stores.util import NAMESPACE, aligned_buffer, content, fill, key, soon

pytestmark = [
    pytest.mark.skipif(missing_mooncake() is not None, reason=str(missing_mooncake())),
    pytest.mark.slow,
]
HEALING_S = 10.0
"""Within which a store must be back after its service is."""


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    master = Master(tmp_path_factory.mktemp("victim") / "master.log")
    yield master
    master.close()


@pytest.fixture
def master(victim: Master) -> Iterator[Master]:
    """A master for tests that harm it, up and well at the start of each."""
    if victim.process is None:
        victim.start()
    yield victim
    if victim.process is not None:
        victim.thaw()


@pytest.fixture
def fresh_master(tmp_path: Path) -> Iterator[Master]:
    """A master for tests that kill peers, of which it would offer the memory to later tests."""
    master = Master(tmp_path / "master.log")
    master.start()
    yield master
    master.close()


def put(store: Store, buffer: np.ndarray, numbers: list[int], *, hot: bool = False) -> np.ndarray:
    return store.put([key(n) for n in numbers], fill(buffer, numbers), soon(), hot=hot).ok


def hits(store: Store, buffer: np.ndarray, numbers: list[int]) -> list[int]:
    rows = range(len(numbers))
    buffer[rows] = 0
    ok = store.get([key(n) for n in numbers], rows, soon()).ok
    for row in np.flatnonzero(ok):
        assert np.array_equal(buffer[row], content(numbers[row], buffer.shape[1]))
    return [n for n, hit in zip(numbers, ok, strict=True) if hit]


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def released_rows(store: Store, count: int) -> list[int]:
    """Rows that are released, once there are ``count``."""
    rows: list[int] = []

    def enough() -> bool:
        rows.extend(store.released())
        return len(rows) >= count

    assert wait_for(enough, HEALING_S)
    return sorted(rows)


def put_raw(store: MooncakeStore, name: str, size: int) -> int | None:
    """Store something under a name without the store's doing."""
    assert store._session is not None
    code: int | None = store._session.call(lambda client: client.put(name, b"x" * size))
    return code


def check_every_call_is_a_miss(store: Store, buffer: np.ndarray, seconds: float = 0.3) -> None:
    """All calls come back by their deadline, as misses, and say that the store did not answer."""
    rows = fill(buffer, [1, 900])
    calls: list[Callable[[float], object]] = [
        lambda d: store.exists([key(1)], d),
        lambda d: store.get([key(1)], [40], d),
        lambda d: store.put([key(900)], [rows[1]], d),
        lambda d: store.remove([key(901)], d),
    ]
    for call in calls:
        begin = time.monotonic()
        outcome = call(begin + seconds)
        # What a loaded machine may take to wake a thread.
        assert time.monotonic() - begin < seconds + 3
        assert not outcome.ok.any() and outcome.down  # type: ignore[attr-defined]
    assert not store.clear(NAMESPACE, 1, time.monotonic() + seconds)
    assert not store.ping(time.monotonic() + seconds)


def test_kind_written_but_never_read_back_by_another_server(
    mooncake_master: Master,
    shared_mooncake: Callable[[], MooncakeStore],
    open_mooncake: OpenMooncake,
    buffer: np.ndarray,
) -> None:
    writer = shared_mooncake()
    theirs = aligned_buffer(8, OBJECT_BYTES)
    reader = open_mooncake(mooncake_master, theirs, segment_gb=0.0)
    numbers = list(range(3000, 3008))
    assert put(writer, buffer, numbers).all()
    assert hits(reader, theirs, numbers) == numbers
    assert reader.clear(NAMESPACE, 1 << 40, soon())
    assert hits(writer, buffer, numbers) == []


@pytest.mark.campaign
@pytest.mark.parametrize("outage", [0, 25])
def test_kind_backend_down_master_killed_and_restarted(
    master: Master, open_mooncake: OpenMooncake, buffer: np.ndarray, outage: float
) -> None:
    store = open_mooncake(master, buffer)
    assert put(store, buffer, list(range(8))).all()
    master.kill()
    check_every_call_is_a_miss(store, buffer)
    assert wait_for(lambda: not store.stats().held, 10)
    time.sleep(outage)
    master.start()
    assert wait_for(lambda: bool(put(store, buffer, [50]).all()), HEALING_S)
    assert hits(store, buffer, [50]) == [50]
    # The new master knows nothing of what was stored before.
    assert hits(store, buffer, list(range(8))) == []
    assert put(store, buffer, list(range(8))).all()
    assert hits(store, buffer, list(range(8))) == list(range(8))


def test_kind_backend_down_master_frozen_and_thawed(
    master: Master, open_mooncake: OpenMooncake, buffer: np.ndarray
) -> None:
    store = open_mooncake(master, buffer)
    assert put(store, buffer, list(range(8))).all()
    master.freeze()
    check_every_call_is_a_miss(store, buffer)
    master.thaw()
    assert wait_for(lambda: hits(store, buffer, list(range(8))) == list(range(8)), HEALING_S)
    assert wait_for(lambda: not store.stats().held, 5)


def test_kind_backend_down_behind_the_breaker(
    master: Master, open_mooncake: OpenMooncake, buffer: np.ndarray
) -> None:
    store = GuardedStore(open_mooncake(master, buffer), "Mooncake")
    assert put(store, buffer, [1]).all()
    master.freeze()
    for _ in range(3):
        store.get([key(1)], [40], time.monotonic() + 0.3)
    assert store.stats().state != "closed"
    begin = time.monotonic()
    for _ in range(1000):
        assert store.get([key(1)], [41], time.monotonic() + 5).down
    assert time.monotonic() - begin < 5, "an open breaker must not wait for the store"
    master.thaw()
    assert wait_for(lambda: store.stats().state == "closed", HEALING_S)
    assert hits(store, buffer, [1]) == [1]
    store.close()


def test_kind_backend_down_a_frozen_peer_holds_the_rows(
    fresh_master: Master, open_mooncake: OpenMooncake, buffer: np.ndarray
) -> None:
    """Its kernel takes the request and nothing comes: the rows stay held until it is known what happened."""
    peer = Peer(fresh_master)
    store = open_mooncake(fresh_master, buffer, segment_gb=0.0)
    try:
        assert put(store, buffer, list(range(32))).all()
        buffer[:] = 0
        freeze(peer.process)
        outcome = store.get([key(n) for n in range(32)], range(32), time.monotonic() + 0.3)
        assert outcome.down and outcome.held.all()
        assert store.stats().held == 32
        assert store.released() == []
        assert store.exists([key(1)], soon()).ok.all(), "the master must still be usable"
        peer.process.send_signal(signal.SIGCONT)
        assert released_rows(store, 32) == list(range(32))
        assert hits(store, buffer, list(range(32))) == list(range(32))
    finally:
        peer.close()


@pytest.mark.campaign
def test_kind_backend_down_a_dead_peer_is_a_miss(
    fresh_master: Master, open_mooncake: OpenMooncake, buffer: np.ndarray
) -> None:
    peer = Peer(fresh_master)
    store = open_mooncake(fresh_master, buffer, segment_gb=0.0)
    try:
        assert put(store, buffer, list(range(8))).all()
    finally:
        peer.close()
    assert hits(store, buffer, list(range(8))) == []
    assert store.stats().errors > 0
    another = Peer(fresh_master)
    try:
        # The master takes some seconds to drop the dead peer, and offers it meanwhile.
        numbers = iter(range(100, 10_000))
        assert wait_for(lambda: bool(put(store, buffer, [next(numbers)]).all()), 2 * HEALING_S)
    finally:
        another.close()


@pytest.mark.campaign
def test_kind_corrupt_page_rows_of_an_abandoned_transfer_are_held_until_the_client_is_gone(
    fresh_master: Master, open_mooncake: OpenMooncake, buffer: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after Mooncake's limit of 60 s, here with a limit of none and a dead peer."""
    monkeypatch.setattr(mooncake, "_ENGINE_GIVES_UP_S", 0.0)
    peer = Peer(fresh_master)
    store = open_mooncake(fresh_master, buffer, segment_gb=0.0)
    try:
        assert put(store, buffer, [1, 2]).all()
    finally:
        peer.close()
    first = store._session
    outcome = store.get([key(1), key(2)], [40, 41], soon())
    assert outcome.held.all()
    assert released_rows(store, 2) == [40, 41]
    assert wait_for(lambda: store.ping(soon(1)), HEALING_S)
    assert store._session is not first


@pytest.mark.campaign
def test_kind_backend_down_a_client_that_does_not_recover_is_replaced(
    master: Master, open_mooncake: OpenMooncake, buffer: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_mooncake(master, buffer)
    first = store._session
    real = store.ping
    monkeypatch.setattr(store, "ping", lambda deadline: store._session is not first and real(deadline))
    assert wait_for(lambda: store.ping(soon(1)), 2 * HEALING_S)
    assert put(store, buffer, [1]).all()
    assert hits(store, buffer, [1]) == [1]


@pytest.mark.campaign
def test_kind_backend_down_store_full(
    mooncake_master: Master, open_mooncake: OpenMooncake, buffer: np.ndarray
) -> None:
    """The master makes room by evicting, or declines; whatever it does, reads are right."""
    large = aligned_buffer(16, 1 << 20)
    store = open_mooncake(mooncake_master, large, segment_gb=0.033)
    stored: list[int] = []
    for start in range(5000, 5160, 16):
        numbers = list(range(start, start + 16))
        stored += [n for n, ok in zip(numbers, put(store, large, numbers), strict=True) if ok]
    stats = store.stats()
    assert stats.stored == len(stored) and stats.declined + stats.stored == 160
    assert stats.errors == 0
    found = [n for start in range(0, len(stored), 16) for n in hits(store, large, stored[start : start + 16])]
    assert found and set(found) <= set(stored)
    assert store.clear(NAMESPACE, 1 << 40, soon())


@pytest.mark.campaign
def test_hot_objects_outlive_others(fresh_master: Master, open_mooncake: OpenMooncake) -> None:
    buffer = aligned_buffer(8, 1 << 20)
    store = open_mooncake(fresh_master, buffer, segment_gb=0.033)
    hot = list(range(4))
    assert put(store, buffer, hot, hot=True).all()
    for start in range(100, 260, 8):
        put(store, buffer, list(range(start, start + 8)))
    assert store.exists([key(n) for n in hot], soon()).ok.all()
    assert not store.exists([key(n) for n in range(100, 260)], soon()).ok.all()


@pytest.mark.campaign
def test_replicas_are_kept_in_different_processes(fresh_master: Master, open_mooncake: OpenMooncake) -> None:
    buffer = aligned_buffer(8, OBJECT_BYTES)
    store = open_mooncake(fresh_master, buffer, replicas=2)
    peer = Peer(fresh_master)
    try:
        assert put(store, buffer, [1, 2]).all()
        assert store._session is not None
        descriptions = store._session.call(lambda c: c.batch_get_replica_desc([name_of(key(1))]))
        assert descriptions is not None
        (replicas,) = descriptions.values()
        ends = {r.get_memory_descriptor().buffer_descriptor.transport_endpoint for r in replicas}
        assert len(ends) == 2
    finally:
        peer.close()


def test_an_object_of_another_size_is_a_miss(
    shared_mooncake: Callable[[], MooncakeStore], buffer: np.ndarray
) -> None:
    store = shared_mooncake()
    corrupt = store.stats().corrupt
    for number, size in ((7001, 512), (7002, OBJECT_BYTES + 512)):
        name = name_of(key(number))
        assert put_raw(store, name, size) == 0
    assert put(store, buffer, [7000]).all()
    assert hits(store, buffer, [7000, 7001, 7002]) == [7000]
    assert store.stats().corrupt - corrupt == 2


@pytest.mark.parametrize("below", [0, 1, 2, 9, 15, 16, 17, 255, 256, 4096, 0x1234, (1 << 63) + 5])
def test_the_pattern_of_older_epochs(below: int) -> None:
    pattern = older_epochs(NAMESPACE, below)
    near = {0, 1, 2, 9, 10, 15, 16, 17, 255, 256, 257, 4095, 4096, 0x1233, 0x1234, 0x1235, 1 << 63}
    for epoch in near | {max(0, below - 1), below, below + 1}:
        name = name_of(key(5, epoch=epoch))
        assert (pattern is not None and re.match(pattern, name) is not None) is (epoch < below), epoch
    if pattern is not None:
        assert not re.match(pattern, name_of(key(5, epoch=0, namespace=b"\xff" * 32)))


# Starting


@pytest.mark.campaign
def test_kind_start_up_trouble_no_master_then_one(buffer: np.ndarray, tmp_path: Path) -> None:
    master = Master(tmp_path / "master.log")
    store = MooncakeStore(master.settings(), OBJECT_BYTES)
    store.register(buffer)
    try:
        problem = store.wait_connected(soon())
        assert problem is not None and "\n" not in problem
        assert (
            f"no Mooncake master answers at 127.0.0.1:{master.port} (Connection refused): start one"
            in problem
        )
        check_every_call_is_a_miss(store, buffer)
        master.start()
        assert wait_for(lambda: bool(put(store, buffer, [1]).all()), HEALING_S)
        assert store.problem is None
        assert hits(store, buffer, [1]) == [1]
    finally:
        store.close()
        master.close()


def test_kind_start_up_trouble_no_metadata_service(mooncake_master: Master) -> None:
    port = free_port()
    problem = unreachable(mooncake_master.settings(metadata=f"http://127.0.0.1:{port}/metadata"))
    assert problem is not None
    assert f"no Mooncake metadata service answers at http://127.0.0.1:{port}/metadata" in problem
    assert "Connection refused" in problem


@pytest.mark.campaign
def test_without_a_metadata_service(
    mooncake_master: Master, open_mooncake: OpenMooncake, buffer: np.ndarray
) -> None:
    store = open_mooncake(mooncake_master, buffer, metadata="P2PHANDSHAKE")
    assert put(store, buffer, [8000]).all()
    assert hits(store, buffer, [8000]) == [8000]


def load_in_child(path: Path, prelude: str = "") -> str:
    program = (
        f"{prelude}\n"
        "import sys\n"
        "from hicache_ext.stores.base import StoreError\n"
        "from hicache_ext.stores.mooncake import MooncakeStore\n"
        "from hicache_ext.stores.mooncake_client import MooncakeSettings\n"
        "try:\n"
        "    MooncakeStore(MooncakeSettings('127.0.0.1:1'), 512)\n"
        "except StoreError as error:\n"
        "    sys.exit(str(error))\n"
    )
    env = os.environ | {"PYTHONPATH": f"{path}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_kind_start_up_trouble_package_missing(tmp_path: Path) -> None:
    error = load_in_child(tmp_path, "import sys; sys.modules['mooncake'] = None")
    assert "needs the package mooncake-transfer-engine-non-cuda" in error
    assert "pip install 'hicache-ext[mooncake]'" in error


def test_kind_start_up_trouble_system_library_missing(tmp_path: Path) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    (tmp_path / "mooncake" / "store.py").write_text(
        "raise ImportError('libibverbs.so.1: cannot open shared object file: No such file or directory')\n"
    )
    error = load_in_child(tmp_path)
    assert "libibverbs.so.1" in error and "apt-get install libibverbs1 librdmacm1 libnuma1" in error


@pytest.mark.skipif(any(Path("/sys/class/infiniband").glob("*")), reason="this machine has RDMA devices")
def test_kind_start_up_trouble_no_rdma_device() -> None:
    with pytest.raises(StoreError, match="no RDMA device: use protocol=tcp"):
        load(MooncakeSettings("127.0.0.1:1", protocol="rdma"))


def test_kind_start_up_trouble_too_little_lockable_memory() -> None:
    with pytest.raises(
        StoreError, match=r"lock 2\.00 GB of memory, the limit is 0\.00 GB: ulimit -l unlimited"
    ):
        check_lockable(2_000_000_000, 65536)
    check_lockable(2_000_000_000, -1)
    check_lockable(1000, 65536)
