"""What is known to be in the stores is not written again, and no longer known once it may be gone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hicache_ext.remote.engine import RemoteSettings
from hicache_ext.remote.recall import Recall
from hicache_ext.stores.base import Key, Outcome, Rows
from hicache_ext.stores.breaker import BreakerSettings
from tests.remote.conftest import MakeRig
from tests.remote.moody import Around, Down
from tests.remote.rig import GROUPS, Rig, SharedMemoryStore, eventually, labels_of, prompt, result

HERE = (0,)


class Counting(Around):
    """Counts the objects of puts."""

    def __init__(self, inner: SharedMemoryStore) -> None:
        super().__init__(inner)
        self.objects = inner._objects
        self.put_objects = 0

    def put(self, keys: Sequence[Key], rows: Rows, deadline: float, *, hot: bool = False) -> Outcome:
        self.put_objects += len(keys)
        return super().put(keys, rows, deadline, hot=hot)


def counting(rig_of: MakeRig) -> tuple[Rig, Counting]:
    """Without marks of epochs, which are written once the store is in use."""
    store = Counting(SharedMemoryStore())
    return rig_of(store, settings=RemoteSettings(probe=False, write_share=1.0, epoch_interval=10.0)), store


def test_the_latest_pages_are_remembered() -> None:
    recall = Recall(limit=3)
    labels = labels_of(prompt(1, 2, 3, 4))
    assert recall.lacks(labels, HERE).tolist() == [True] * 4
    recall.wrote(labels[:3], HERE)
    recall.wrote(labels[:1], HERE)
    recall.wrote(labels[3:], HERE)
    assert recall.lacks(labels, HERE).tolist() == [False, True, False, False]


def test_another_epoch_or_other_stores_know_nothing() -> None:
    recall = Recall()
    recall.wrote(labels_of(prompt(1)), HERE)
    assert recall.lacks(labels_of(prompt(1), epoch=1), HERE).all()
    recall.wrote(labels_of(prompt(1)), HERE)
    assert recall.lacks(labels_of(prompt(1)), (0, 1)).all()
    assert recall.lacks(labels_of(prompt(1)), HERE).all(), "the other store may have come without it"


def test_a_page_that_should_be_there_and_is_not_makes_all_doubtful() -> None:
    recall = Recall()
    labels = labels_of(prompt(1, 2, 3))
    recall.wrote(labels[:2], HERE)
    recall.missed(labels[2:])
    assert not recall.lacks(labels[:2], HERE).any(), "nobody said that it was there"
    recall.missed(labels[1:2])
    assert recall.lacks(labels, HERE).all()


def test_pages_that_come_back_to_the_host_are_not_written_again(rig_of: MakeRig) -> None:
    rig, store = counting(rig_of)
    labels = rig.store(prompt(1, 2, 3))
    assert store.put_objects == 3 * GROUPS
    rig.store(prompt(1, 2, 3), [10, 11, 12])
    assert store.put_objects == 3 * GROUPS
    rig.store(prompt(1, 2, 3, 4, 5), [20, 21, 22, 23, 24])
    assert store.put_objects == 5 * GROUPS
    seq, pages = rig.found(prompt(1, 2, 3, 4, 5))
    assert pages == 5
    rig.engine.end(seq)
    assert len(labels) == 3
    assert rig.engine.stats().pages_written == 11


def test_a_store_that_has_forgotten_is_written_to_again(rig_of: MakeRig) -> None:
    rig, store = counting(rig_of)
    rig.store(prompt(1, 2, 3))
    gone = labels_of(prompt(1, 2, 3)).identities[1].tobytes()
    for key in [key for key in store.objects if key.identity == gone]:
        del store.objects[key]
    assert rig.found(prompt(1, 2, 3))[1] == 1
    rig.store(prompt(1, 2, 3), [10, 11, 12])
    assert rig.found(prompt(1, 2, 3))[1] == 3


def test_a_refused_page_is_written_again(rig_of: MakeRig) -> None:
    rig, store = counting(rig_of)
    labels = rig.store(prompt(1, 2))
    key = next(key for key in store.objects if key.identity == labels.identities[1].tobytes())
    store.objects[key] = bytes(reversed(bytes(store.objects[key])))
    seq, pages = rig.found(prompt(1, 2))
    assert pages == 2
    assert result(rig.engine.arrivals, rig.fetch(seq, [10, 11], labels)) == 1
    rig.engine.end(seq)
    assert eventually(lambda: key not in store.objects)
    rig.store(prompt(1, 2), [20, 21])
    assert rig.found(prompt(1, 2))[1] == 2


def test_after_an_outage_nothing_is_known(rig_of: MakeRig) -> None:
    inner = SharedMemoryStore()
    store = Down(inner)
    rig = rig_of(store, breaker=BreakerSettings(pause=0.05, max_pause=0.1, patience=0.0))
    labels = rig.store(prompt(1, 2))
    store.down = True
    assert eventually(lambda: not rig.engine._in_use())
    for key in [key for key in inner._objects if key.identity in map(np.ndarray.tobytes, labels.identities)]:
        del inner._objects[key]
    store.down = False
    assert eventually(lambda: bool(rig.engine._in_use()))
    rig.store(prompt(1, 2), [10, 11])
    assert rig.found(prompt(1, 2))[1] == 2
