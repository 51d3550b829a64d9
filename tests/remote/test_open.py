"""The remote tier from addresses: refusals in one line, and a real Mooncake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.core.header import Integrity
from hicache_ext.remote.engine import RemoteEngine, scratch_pages
from hicache_ext.remote.open import open_remote
from hicache_ext.stores.base import Store, StoreError
from hicache_ext.transfer.host_pool import HostPagePool
from hicache_ext.transfer.seal import Seal
from tests.remote.conftest import MakeRig
from tests.remote.moody import Down
from tests.remote.rig import EagerPlanner, eventually, labels_of, layout_of, prompt, result
from tests.stores.conftest import missing_mooncake
from tests.stores.mooncake_service import Master, free_port

Make = Callable[[HostPagePool, Seal, EagerPlanner], RemoteEngine]


def opening(*urls: str, **options: Any) -> Make:
    def make(pool: HostPagePool, seal: Seal, planner: EagerPlanner) -> RemoteEngine:
        return open_remote(urls, pool.layout, pool, seal, planner, **options)

    return make


def refusal(*urls: str, scratch: int = 4) -> str:
    layout = layout_of()
    pool = HostPagePool(layout, 8, pinned=False, scratch=scratch)
    with pytest.raises(StoreError) as caught:
        open_remote(urls, layout, pool, Seal(layout, Integrity.FULL), EagerPlanner())
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_wrong_addresses_are_refused(tmp_path: Path) -> None:
    disk = f"file://{tmp_path / 'a'}?size_gb=0.001"
    assert "needs the address of a store" in refusal()
    assert "begins with file:// or mooncake://" in refusal("redis://x")
    assert "given twice" in refusal(disk, disk + "&direct=off")
    assert "less than one object of 512 bytes" in refusal(f"file://{tmp_path / 'a'}?size_gb=0.000001")
    (tmp_path / "b" / "g2").mkdir(parents=True)
    (tmp_path / "b" / "g2" / "letter.txt").touch()
    assert "letter.txt is there" in refusal(disk, f"file://{tmp_path / 'b'}?size_gb=0.001")
    assert "no scratch page" in refusal(disk, scratch=0)


def test_what_was_opened_before_a_refusal_is_closed(rig_of: MakeRig, tmp_path: Path) -> None:
    disk = f"file://{tmp_path / 'a'}?size_gb=0.001"
    (tmp_path / "file").touch()
    assert "name a folder" in refusal(disk, f"file://{tmp_path / 'file'}?size_gb=0.001")
    rig = rig_of(make=opening(disk))
    assert "in use by another process" in refusal(disk)
    rig.store(prompt(1))


def test_a_restart_finds_what_the_disk_holds(rig_of: MakeRig, tmp_path: Path) -> None:
    disk = f"file://{tmp_path / 'a'}?size_gb=0.001"
    first = rig_of(make=opening(disk))
    first.store(prompt(1, 2, 3))
    first.engine.use(b"\x01" * 32, 5)
    assert eventually(lambda: first.engine.learned() == 6)
    first.close()
    rig = rig_of(make=opening(disk))
    assert rig.found(prompt(1, 2, 3))[1] == 3
    rig.engine.use(b"\x01" * 32, 0)
    assert eventually(lambda: rig.engine.learned() == 6)


def test_stores_can_be_wrapped(rig_of: MakeRig, tmp_path: Path) -> None:
    wrapped: dict[str, Down] = {}

    def wrap(store: Store, name: str) -> Store:
        return wrapped.setdefault(name, Down(store))

    rig = rig_of(make=opening(f"file://{tmp_path / 'a'}?size_gb=0.001", wrap=wrap))
    rig.store(prompt(1))
    (name,) = wrapped
    assert name == rig.engine.store_states()[0].name == f"disk {tmp_path / 'a'}"
    wrapped[name].down = True
    assert rig.found(prompt(1))[1] == 0


def test_scratch_pages_hold_a_mark_and_a_measurement() -> None:
    layout = layout_of()
    assert scratch_pages(layout) == 1 + (4 << 20) // layout.page_bytes


@pytest.mark.skipif(missing_mooncake() is not None, reason=str(missing_mooncake()))
@pytest.mark.slow
class TestMooncake:
    def test_without_its_service_the_tier_runs_on_the_disk(self, rig_of: MakeRig, tmp_path: Path) -> None:
        disk = f"file://{tmp_path / 'a'}?size_gb=0.001"
        rig = rig_of(make=opening(disk, f"mooncake://127.0.0.1:{free_port()}?segment_gb=0.064"))
        rig.store(prompt(1, 2))
        assert rig.found(prompt(1, 2))[1] == 2
        assert [state.learned for state in rig.engine.store_states()] == [True, False]

    def test_two_servers_share_pages_and_epochs(self, rig_of: MakeRig, mooncake_master: Master) -> None:
        url = mooncake_master.url + "&segment_gb=0.064"
        one, two = rig_of(make=opening(url)), rig_of(make=opening(url, replica=1, replicas=2, writes=False))
        labels = one.store(prompt(1, 2, 3))
        assert result(two.engine.written, two.write([0, 1, 2], labels)) == 3
        seq, pages = two.found(prompt(1, 2, 3))
        assert pages == 3
        assert result(two.engine.arrivals, two.fetch(seq, [9, 10, 11], labels)) == 3
        assert two.holds([9, 10, 11], labels)
        two.engine.end(seq)
        one.engine.use(labels.namespace, 1)
        assert eventually(lambda: two.engine.learned() == 2)

    def test_kind_backend_down_killed_frozen_and_back(self, rig_of: MakeRig, tmp_path: Path) -> None:
        """Kind 12 with a real master: requests recompute meanwhile, and it comes back by itself."""
        master = Master(tmp_path / "master.log")
        try:
            rig = rig_of(make=opening(master.url + "&segment_gb=0.064"), learn=False)
            labels = labels_of(prompt(1, 2, 3))
            rig.engine.use(labels.namespace, 0)
            assert rig.found(prompt(1, 2, 3))[1] == 0
            assert rig.engine.learned() is None
            master.start()
            assert eventually(lambda: rig.engine.learned() == 0)
            rig.store(prompt(1, 2, 3))
            assert rig.found(prompt(1, 2, 3))[1] == 3
            rig.planner.lookup_s = rig.planner.fetch_s = 0.3
            master.freeze()
            assert rig.found(prompt(1, 2, 3))[1] == 0
            assert eventually(lambda: not rig.engine._in_use())
            master.thaw()
            assert eventually(lambda: bool(rig.engine._in_use()))
            master.kill()
            assert rig.found(prompt(1, 2, 3))[1] == 0
            assert eventually(lambda: not rig.engine._in_use())
            master.start()
            assert eventually(lambda: bool(rig.engine._in_use()))
            # Its client takes some seconds to offer its memory to the new master.
            rig.compute(labels[:2], [4, 5])
            assert eventually(lambda: result(rig.engine.written, rig.write([4, 5], labels[:2])) == 2)
        finally:
            master.close()
