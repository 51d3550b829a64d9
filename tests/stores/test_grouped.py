"""One folder per head group on a disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from hicache_ext.stores.base import StoreError
from hicache_ext.stores.disk import DiskSettings
from hicache_ext.stores.grouped import GroupedDiskStore, Placement, folder_of
from tests.stores.util import aligned_buffer, content, fill, key, soon

SIZE = 4096
ROWS = 32
MARK = 65535
Open = Callable[..., GroupedDiskStore]


@pytest.fixture
def buffer() -> np.ndarray:
    return aligned_buffer(ROWS, SIZE)


@pytest.fixture
def open_grouped(tmp_path: Path, buffer: np.ndarray) -> Iterator[Open]:
    opened: list[GroupedDiskStore] = []

    def make(placement: Placement, objects: int = 256) -> GroupedDiskStore:
        settings = DiskSettings(tmp_path / "kv", objects * SIZE / 1e9, segment_bytes=8 * SIZE)
        opened.append(GroupedDiskStore(settings, SIZE, placement))
        opened[-1].register(buffer)
        return opened[-1]

    yield make
    for store in opened:
        store.close()


def folders(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "kv").iterdir())


def test_each_group_has_its_folder(open_grouped: Open, buffer: np.ndarray, tmp_path: Path) -> None:
    store = open_grouped(Placement(groups=3, first_group=2, total_groups=8))
    assert folders(tmp_path) == ["g2", "g3", "g4"]
    keys = [key(n, group=g) for n in (1, 2) for g in (2, 3, 4)]
    rows = fill(buffer, list(range(6)))
    assert store.put(keys, rows, soon()).ok.all()
    assert store.exists(keys, soon()).ok.all()
    buffer[:] = 0
    order = [5, 3, 1, 0, 2, 4]
    assert store.get([keys[i] for i in order], [10 + i for i in order], soon()).ok.all()
    for i in order:
        assert np.array_equal(buffer[10 + i], content(i, SIZE))
    assert [folder.stats().objects for folder in store.folders] == [2, 2, 2]
    assert (store.stats().objects, store.stats().stored, store.stats().hits) == (6, 6, 6)
    assert store.remove(keys[:1], soon()).ok.all()
    assert store.exists(keys, soon()).ok.tolist() == [False] + [True] * 5


def test_another_ranks_groups_are_misses(open_grouped: Open, buffer: np.ndarray) -> None:
    store = open_grouped(Placement(groups=2, first_group=2, total_groups=4))
    other = [key(1, group=0), key(1, group=2)]
    assert store.put(other, fill(buffer, [1, 1]), soon()).ok.tolist() == [False, True]
    assert store.get(other, [5, 6], soon()).ok.tolist() == [False, True]
    assert store.exists(other, soon()).ok.tolist() == [False, True]
    assert store.remove(other, soon()).ok.tolist() == [True, True]


def test_a_mark_goes_to_each_folder_and_one_is_enough(open_grouped: Open, buffer: np.ndarray) -> None:
    store = open_grouped(Placement(groups=4))
    mark = key(1, group=MARK)
    assert store.put([mark], fill(buffer, [1]), soon()).ok.all()
    assert [folder.exists([mark], soon()).ok[0] for folder in store.folders] == [True] * 4
    for folder in store.folders[:3]:
        folder.remove([mark], soon())
    assert store.exists([mark], soon()).ok.all()
    assert store.get([mark], [7], soon()).ok.all()
    assert np.array_equal(buffer[7], content(1, SIZE))
    assert store.put([mark], [7], soon()).ok.all()
    assert [folder.exists([mark], soon()).ok[0] for folder in store.folders] == [True] * 4
    assert store.remove([mark], soon()).ok.all()
    assert not store.exists([mark], soon()).ok.any()


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_ranks_of_any_degree_read_the_same_folders(
    open_grouped: Open, buffer: np.ndarray, degree: int
) -> None:
    whole = open_grouped(Placement(groups=4))
    keys = [key(1, group=g) for g in range(4)]
    assert whole.put(keys, fill(buffer, [0, 1, 2, 3]), soon()).ok.all()
    whole.close()
    share = 4 // degree
    for rank in range(degree):
        store = open_grouped(Placement(groups=share, first_group=rank * share, total_groups=4))
        mine = keys[rank * share : (rank + 1) * share]
        assert store.get(mine, range(8, 8 + share), soon()).ok.all()
        for i in range(share):
            assert np.array_equal(buffer[8 + i], content(rank * share + i, SIZE))


def test_replicas_have_folders_of_their_own(open_grouped: Open, tmp_path: Path) -> None:
    open_grouped(Placement(groups=1, replica=0, replicas=2))
    open_grouped(Placement(groups=1, replica=1, replicas=2))
    assert folders(tmp_path) == ["g0", "g0.1"]
    assert folder_of(Path("x"), 3, 2) == Path("x/g3.2")


def test_the_quota_is_for_all_ranks_together(open_grouped: Open, buffer: np.ndarray) -> None:
    store = open_grouped(Placement(groups=2, first_group=0, total_groups=4, replicas=2), objects=64)
    assert store.stats().bytes_limit == 2 * (64 // 8) * SIZE


def test_a_rank_has_its_folders_to_itself(open_grouped: Open, tmp_path: Path) -> None:
    open_grouped(Placement(groups=2, first_group=2, total_groups=4))
    with pytest.raises(StoreError, match="in use by another process"):
        open_grouped(Placement(groups=4))
    # Those before the one in use were let go.
    open_grouped(Placement(groups=2, first_group=0, total_groups=4))


def test_a_quota_below_one_object_a_folder_is_refused(open_grouped: Open) -> None:
    with pytest.raises(StoreError, match=r"^size_gb=\S+ leaves less than one object of 4096 bytes to"):
        open_grouped(Placement(groups=8), objects=7)


@pytest.mark.parametrize(
    "fields",
    [
        {"groups": 0},
        {"groups": 2, "first_group": 3, "total_groups": 4},
        {"groups": 2, "first_group": -1},
        {"groups": 1, "replica": 1},
    ],
)
def test_a_placement_is_within_the_model(fields: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        Placement(**fields)


def test_nothing_works_after_close(open_grouped: Open, buffer: np.ndarray) -> None:
    store = open_grouped(Placement(groups=2))
    store.put([key(1)], fill(buffer, [1]), soon())
    assert store.ping(soon())
    store.close()
    store.close()
    assert not store.ping(soon())
    assert store.get([key(1)], [3], soon()).down
    assert not store.clear(key(1).namespace, 5, soon())
