"""Servers of different TP degrees on one store."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache_ext.remote.open import open_remote
from hicache_ext.transfer.layout import PageLayout
from tests.remote.conftest import MakeRig
from tests.remote.rig import GROUPS, Rig, SharedMemoryStore, labels_of, layout_of, prompt, result

TOKENS = prompt(*range(6))


def fetched(rig: Rig) -> int:
    """Pages of the prompt that come from the store, checked byte by byte."""
    labels = labels_of(TOKENS)
    seq, pages = rig.found(TOKENS)
    if not pages:
        return 0
    window = rig.fetch(seq, range(16, 16 + pages), labels[:pages])
    assert result(rig.engine.arrivals, window) == pages
    assert rig.holds(range(16, 16 + pages), labels[:pages])
    rig.engine.end(seq)
    return pages


def half(first: int) -> PageLayout:
    return layout_of(first * GROUPS // 2, GROUPS // 2)


def test_kind_different_parallelism_shares_pages_of_a_service(rig_of: MakeRig) -> None:
    """Kind 14: what TP 1 wrote, TP 2 reads, and the other way round."""
    store = SharedMemoryStore()
    whole = rig_of(store)
    ranks = [rig_of(SharedMemoryStore(store), layout=half(i)) for i in (0, 1)]
    whole.store(TOKENS)
    assert [fetched(rank) for rank in ranks] == [6, 6]
    store._objects.clear()
    ranks[0].store(TOKENS)
    assert fetched(whole) == 0
    ranks[1].store(TOKENS)
    assert fetched(whole) == 6
    assert fetched(ranks[0]) == 6


@pytest.mark.parametrize("writer", [1, 2])
def test_kind_different_parallelism_shares_pages_of_a_disk(
    rig_of: MakeRig, tmp_path: Path, writer: int
) -> None:
    """Kind 14 on folders, one server after the other."""
    url = f"file://{tmp_path / 'kv'}?size_gb=0.004"

    def ranks(degree: int) -> list[Rig]:
        layouts = [layout_of()] if degree == 1 else [half(0), half(1)]
        return [
            rig_of(
                layout=layout,
                make=lambda pool, seal, planner: open_remote(
                    [url], pool.layout, pool, seal, planner, total_groups=GROUPS
                ),
            )
            for layout in layouts
        ]

    for rig in (writers := ranks(writer)):
        rig.store(TOKENS)
    for rig in writers:
        rig.close()
    assert [fetched(rig) for rig in ranks(3 - writer)] == [6] * (3 - writer)
    assert sorted(p.name for p in (tmp_path / "kv").iterdir()) == ["g0", "g1", "g2", "g3"]


def test_ranks_that_hold_the_same_groups_have_their_own_folders(rig_of: MakeRig, tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'kv'}?size_gb=0.004"
    rigs = [
        rig_of(
            make=lambda pool, seal, planner, replica=replica: open_remote(
                [url], pool.layout, pool, seal, planner, replica=replica, replicas=2
            )
        )
        for replica in (0, 1)
    ]
    rigs[0].store(TOKENS)
    assert [fetched(rig) for rig in rigs] == [6, 0]
    rigs[1].store(TOKENS)
    assert fetched(rigs[1]) == 6
    names = [f"g{g}{end}" for g in range(GROUPS) for end in ("", ".1")]
    assert sorted(p.name for p in (tmp_path / "kv").iterdir()) == sorted(names)
