"""Servers on one store agree on the epoch of a namespace; the rule itself is tested in tests/core."""

from __future__ import annotations

import time

from hicache_ext.core.epochs import chain, flushed
from tests.remote.conftest import MakeRig
from tests.remote.moody import Down
from tests.remote.rig import NAMESPACE, Rig, SharedMemoryStore, eventually, labels_of, prompt, result

OTHER = b"\xee" * 32


def learns(rig: Rig, epoch: int) -> bool:
    return eventually(lambda: rig.engine.learned() == epoch)


def flush(rig: Rig, epoch: int, namespace: bytes = NAMESPACE) -> int:
    """What a cache does: local at once, and the number that was claimed when it is known."""
    rig.engine.use(namespace, flushed(epoch))
    assert eventually(lambda: rig.engine.learned() is not None)
    number = rig.engine.learned()
    assert number is not None and number > epoch and number % 2 == 0
    rig.engine.use(namespace, number)
    return number


def marks(store: SharedMemoryStore, namespace: bytes = NAMESPACE) -> set[int]:
    with store._lock:
        return {key.epoch for key in store._objects if key.group == 65535 and key.namespace == namespace}


def test_a_flush_of_one_server_reaches_the_other(rig_of: MakeRig) -> None:
    store = SharedMemoryStore()
    one, two = rig_of(store), rig_of(SharedMemoryStore(store))
    one.store(prompt(1, 2))
    assert two.found(prompt(1, 2))[1] == 2
    number = flush(one, 0)
    assert learns(two, number)
    two.engine.use(NAMESPACE, number)
    assert two.found(prompt(1, 2), epoch=number)[1] == 0
    one.store(prompt(1, 2), epoch=number)
    assert two.found(prompt(1, 2), epoch=number)[1] == 2
    # The other way round, too.
    assert learns(one, flush(two, number))


def test_while_it_is_local_a_server_neither_reads_nor_writes(rig_of: MakeRig) -> None:
    inner = SharedMemoryStore()
    store = Down(inner)
    rig = rig_of(store)
    store.down = True
    rig.engine.use(NAMESPACE, 1)
    assert rig.engine.learned() is None and not rig.engine.healthy()
    labels = labels_of(prompt(1), epoch=1)
    rig.compute(labels, [0])
    assert rig.engine.written.results(rig.write([0], labels) - 1, 1) == [0]
    assert rig.engine.lookups.results(rig.lookup(prompt(1), epoch=1) - 1, 1) == [0]
    store.down = False
    assert learns(rig, 2)
    # Also once a number is claimed, what was computed before goes nowhere.
    assert rig.engine.written.results(rig.write([0], labels) - 1, 1) == [0]
    assert rig.engine.lookups.results(rig.lookup(prompt(1), epoch=1) - 1, 1) == [0]
    assert marks(inner) == {2}


def test_a_claim_counts_when_the_store_has_its_marks(rig_of: MakeRig) -> None:
    class Full(Down):
        def put(self, keys, rows, deadline, *, hot=False):  # type: ignore[no-untyped-def]
            outcome = super().put(keys, rows, deadline, hot=hot)
            if self.down:
                outcome.ok[:] = False
            return outcome

        def exists(self, keys, deadline):  # type: ignore[no-untyped-def]
            return self.inner.exists(keys, deadline)

    inner = SharedMemoryStore()
    store = Full(inner)
    rig = rig_of(store)
    store.down = True
    rig.engine.use(NAMESPACE, 1)
    time.sleep(0.1)
    assert rig.engine.learned() is None
    store.down = False
    assert learns(rig, 2)
    assert marks(inner) == {2}


def test_flushes_one_after_the_other_take_different_numbers(rig_of: MakeRig) -> None:
    store = SharedMemoryStore()
    one, two = rig_of(store), rig_of(SharedMemoryStore(store))
    assert flush(one, 0) == 2
    assert flush(two, 0) == 4
    assert learns(one, 4)
    # One that is flushed again before it has a number, and then gets one.
    one.engine.use(NAMESPACE, flushed(4))
    assert flush(one, flushed(4)) == 8
    assert learns(two, 8)


def test_a_server_that_starts_later_learns_before_it_uses_the_store(rig_of: MakeRig) -> None:
    store = SharedMemoryStore()
    one = rig_of(store)
    number = 0
    for _ in range(11):
        number = flush(one, number)
    assert number == 22
    # The store has evicted all but what a server keeps there.
    with store._lock:
        for key in [k for k in store._objects if k.epoch not in chain(number)]:
            del store._objects[key]
    two = rig_of(SharedMemoryStore(store), learn=False)
    two.engine.use(NAMESPACE, 0)
    seen = set()
    while (known := two.engine.learned()) != number:
        seen.add(known)
        time.sleep(0)
    assert seen <= {None}


def test_marks_that_got_lost_are_written_again(rig_of: MakeRig) -> None:
    store = SharedMemoryStore()
    rig = rig_of(store)
    number = 0
    for _ in range(3):
        number = flush(rig, number)
    with store._lock:
        store._objects.clear()
    assert eventually(lambda: marks(store) == set(chain(6)))
    assert rig.engine.learned() == 6


def test_an_outage_after_the_first_answer_changes_nothing(rig_of: MakeRig) -> None:
    store = Down(SharedMemoryStore())
    rig = rig_of(store)
    number = flush(rig, 0)
    store.down = True
    time.sleep(0.1)
    assert rig.engine.learned() == number


def test_before_a_new_namespace_was_looked_up_nothing_is_known(rig_of: MakeRig) -> None:
    store = Down(SharedMemoryStore())
    rig = rig_of(store)
    store.down = True
    rig.engine.use(OTHER, 0)
    assert rig.engine.learned() is None
    time.sleep(0.1)
    assert rig.engine.learned() is None
    store.down = False
    assert learns(rig, 0)


def test_a_store_that_has_not_been_asked_yet_is_not_used(rig_of: MakeRig) -> None:
    """It may hold pages from before a flush that this server missed."""
    near, inner = SharedMemoryStore(), SharedMemoryStore()
    far = Down(inner)
    other = rig_of(SharedMemoryStore(inner))
    other.store(prompt(1, 2))
    number = flush(other, 0)
    far.down = True
    rig = rig_of(near, far)
    assert rig.engine.learned() == 0
    assert [state.learned for state in rig.engine.store_states()] == [True, False]
    rig.store(prompt(8))
    far.down = False
    while rig.engine.learned() == 0:
        assert rig.found(prompt(1, 2))[1] == 0 or rig.engine.learned() == number
    assert rig.engine.learned() == number
    assert rig.found(prompt(1, 2))[1] == 0
    # What one store knows is passed on to the other.
    assert eventually(lambda: number in marks(near))


def test_a_store_that_was_away_during_a_flush_is_used_once_it_is_marked(rig_of: MakeRig) -> None:
    near, inner = SharedMemoryStore(), SharedMemoryStore()
    far = Down(inner)
    rig = rig_of(near, far)
    rig.store(prompt(1))
    far.down = True
    number = flush(rig, 0)
    assert not marks(inner)
    far.down = False
    assert eventually(lambda: all(state.learned for state in rig.engine.store_states()))
    assert eventually(lambda: number in marks(inner))
    labels = rig.store(prompt(1, 2), epoch=number)
    seq, pages = rig.found(prompt(1, 2), epoch=number)
    assert pages == 2
    assert result(rig.engine.arrivals, rig.fetch(seq, [9, 10], labels)) == 2


def test_a_number_that_a_store_knew_before_it_was_claimed_is_given_up(rig_of: MakeRig) -> None:
    """The store was away when it was claimed, and has pages of others with it: of before the flush."""
    inner = SharedMemoryStore()
    far = Down(inner)
    other = rig_of(SharedMemoryStore(inner))
    number = flush(other, 0)
    other.store(prompt(1, 2), epoch=number)
    rig = rig_of(SharedMemoryStore(), far)
    assert rig.engine.learned() == number
    far.down = True
    rig.engine.use(OTHER, 0)
    rig.engine.use(NAMESPACE, 0)
    assert flush(rig, 0) == number
    far.down = False
    while (known := rig.engine.learned()) == number:
        assert rig.found(prompt(1, 2), epoch=number)[1] == 0
    # Nor while the cache has not heard of it.
    assert rig.found(prompt(1, 2), epoch=number)[1] == 0
    assert known == number + 2
    rig.engine.use(NAMESPACE, known)
    assert eventually(lambda: all(state.learned for state in rig.engine.store_states()))
    assert rig.found(prompt(1, 2), epoch=known)[1] == 0
    assert learns(other, known)


def test_ranks_that_are_flushed_together_agree_soon(rig_of: MakeRig) -> None:
    """Each claims for itself, and all take the highest: as soon as one has one, or when all have."""
    store = SharedMemoryStore()
    ranks = [rig_of(store), *(rig_of(SharedMemoryStore(store)) for _ in range(2))]
    epoch = 0
    for patient in (False, True):
        before, epoch = epoch, flushed(epoch)
        for rank in ranks:
            rank.engine.use(NAMESPACE, epoch)
        settled = 0
        while settled < 10:
            learned = [rank.engine.learned() for rank in ranks]
            highest = max((number or 0 for number in learned), default=0)
            if highest > epoch and not (patient and None in learned):
                epoch = highest
                for rank in ranks:
                    rank.engine.use(NAMESPACE, epoch)
            used = all(state.learned for rank in ranks for state in rank.engine.store_states())
            settled = settled + 1 if used and set(learned) == {epoch} else 0
            time.sleep(0.01)
        assert before < epoch <= before + 2 * len(ranks)
        ranks[0].store(prompt(1), epoch=epoch)
        assert [rank.found(prompt(1), epoch=epoch)[1] for rank in ranks] == [1, 1, 1]


def test_namespaces_are_apart(rig_of: MakeRig) -> None:
    store = SharedMemoryStore()
    one, two = rig_of(store), rig_of(SharedMemoryStore(store))
    one.engine.use(OTHER, 0)
    number = flush(one, 0, OTHER)
    time.sleep(0.1)
    assert two.engine.learned() == 0
    two.engine.use(OTHER, 0)
    assert learns(two, number)
