"""Two servers on one store agree on the epoch of a namespace."""

from __future__ import annotations

import time

from tests.remote.conftest import MakeRig
from tests.remote.moody import Down
from tests.remote.rig import NAMESPACE, Rig, SharedMemoryStore, eventually, prompt

OTHER = b"\xee" * 32


def learns(rig: Rig, epoch: int) -> bool:
    return eventually(lambda: rig.engine.learned() == epoch)


def marks(store: SharedMemoryStore, namespace: bytes = NAMESPACE) -> set[int]:
    return {key.epoch for key in list(store._objects) if key.group == 65535 and key.namespace == namespace}


def test_a_flush_of_one_server_reaches_the_other(rig_of: MakeRig) -> None:
    store = SharedMemoryStore()
    one, two = rig_of(store), rig_of(SharedMemoryStore(store))
    one.store(prompt(1, 2))
    assert two.found(prompt(1, 2))[1] == 2
    one.engine.mark(NAMESPACE, 1)
    one.engine.use(NAMESPACE, 1)
    assert one.engine.learned() == 1
    assert learns(two, 1)
    two.engine.use(NAMESPACE, 1)
    assert two.found(prompt(1, 2), epoch=1)[1] == 0
    one.store(prompt(1, 2), epoch=1)
    assert two.found(prompt(1, 2), epoch=1)[1] == 2
    # The other way round, too.
    two.engine.mark(NAMESPACE, 2)
    assert learns(one, 2)


def test_both_flush_at_the_same_time(rig_of: MakeRig) -> None:
    store = SharedMemoryStore()
    one, two = rig_of(store), rig_of(SharedMemoryStore(store))
    one.engine.mark(NAMESPACE, 1)
    two.engine.mark(NAMESPACE, 1)
    one.engine.mark(NAMESPACE, 2)
    assert learns(one, 2)
    assert learns(two, 2)


def test_a_server_that_starts_later_learns_before_it_uses_the_store(rig_of: MakeRig) -> None:
    store = SharedMemoryStore()
    one = rig_of(store)
    one.store(prompt(1))
    for epoch in range(1, 12):
        one.engine.mark(NAMESPACE, epoch)
        assert eventually(lambda: max(marks(store), default=0) == epoch)  # noqa: B023
    two = rig_of(SharedMemoryStore(store), learn=False)
    two.engine.use(NAMESPACE, 0)
    seen = set()
    while (known := two.engine.learned()) != 11:
        seen.add(known)
        time.sleep(0)
    assert seen <= {None}


def test_a_mark_that_got_lost_is_written_again(rig_of: MakeRig) -> None:
    store = SharedMemoryStore()
    rig = rig_of(store)
    rig.engine.mark(NAMESPACE, 3)
    rig.engine.use(NAMESPACE, 3)
    assert eventually(lambda: 3 in marks(store))
    with store._lock:
        store._objects.clear()
    assert eventually(lambda: marks(store) == {3})


def test_a_mark_waits_for_the_store_to_come_back(rig_of: MakeRig) -> None:
    inner = SharedMemoryStore()
    store = Down(inner)
    rig = rig_of(store)
    store.down = True
    rig.engine.mark(NAMESPACE, 1)
    rig.engine.mark(OTHER, 7)
    rig.engine.use(OTHER, 8)
    # Before the store has said so, nothing is known of the new namespace.
    assert rig.engine.learned() is None
    time.sleep(0.1)
    assert not marks(inner) and not marks(inner, OTHER)
    store.down = False
    assert eventually(lambda: marks(inner) == {1} and 8 in marks(inner, OTHER))
    assert learns(rig, 8)


def test_an_outage_after_the_first_answer_changes_nothing(rig_of: MakeRig) -> None:
    store = Down(SharedMemoryStore())
    rig = rig_of(store)
    rig.engine.mark(NAMESPACE, 4)
    store.down = True
    time.sleep(0.1)
    assert rig.engine.learned() == 4


def test_a_store_that_has_not_been_asked_yet_is_not_used(rig_of: MakeRig) -> None:
    """It may hold pages from before a flush that this server missed."""
    near, inner = SharedMemoryStore(), SharedMemoryStore()
    far = Down(inner)
    other = rig_of(SharedMemoryStore(inner))
    other.store(prompt(1, 2))
    other.engine.mark(NAMESPACE, 5)
    assert eventually(lambda: 5 in marks(inner))
    far.down = True
    rig = rig_of(near, far)
    assert rig.engine.learned() == 0
    assert [state.learned for state in rig.engine.store_states()] == [True, False]
    rig.store(prompt(8))
    far.down = False
    while rig.engine.learned() == 0:
        assert rig.found(prompt(1, 2))[1] == 0 or rig.engine.learned() == 5
    assert rig.engine.learned() == 5
    # What one store knows is passed on to the other.
    assert eventually(lambda: 5 in marks(near))


def test_namespaces_are_apart(rig_of: MakeRig) -> None:
    store = SharedMemoryStore()
    one, two = rig_of(store), rig_of(SharedMemoryStore(store))
    one.engine.mark(OTHER, 9)
    assert eventually(lambda: 9 in marks(store, OTHER))
    time.sleep(0.1)
    assert two.engine.learned() == 0
    two.engine.use(OTHER, 0)
    assert learns(two, 9)
