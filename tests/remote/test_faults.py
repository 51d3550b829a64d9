"""Whatever a store does: every job ends once, nothing wrong arrives, no page is touched after it settled."""

from __future__ import annotations

import random
import time
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hicache_ext.core.header import Reason
from hicache_ext.core.remote import UNDONE, ResultQueue
from hicache_ext.remote.engine import RemoteSettings
from hicache_ext.remote.open import open_remote
from hicache_ext.stores.breaker import BreakerSettings
from tests.remote.conftest import MakeRig
from tests.remote.moody import Down, Moody, Stuck
from tests.remote.rig import (
    GROUPS,
    PAGES,
    EagerPlanner,
    SharedMemoryStore,
    eventually,
    labels_of,
    prompt,
    result,
)

LATE_S = 2.0
"""How much later than a deadline of tenths of a second an answer may be on a busy machine."""

Quiet = partial(RemoteSettings, probe=False)


def count_posts(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int]]:
    """(queue, job) to how often it was posted."""
    posts: Counter[tuple[int, int]] = Counter()
    post = ResultQueue.post

    def counted(self: ResultQueue, seq: int, value: int = 0) -> None:
        posts[id(self), seq] += 1
        post(self, seq, value)

    monkeypatch.setattr(ResultQueue, "post", counted)
    return posts


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_any_outcome_of_a_store_ends_every_job_once(
    rig_of: MakeRig, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    posts = count_posts(monkeypatch)
    rng = random.Random(seed)
    far = SharedMemoryStore()
    near, middle = Moody(SharedMemoryStore(), seed), Moody(far, seed + 100)
    settings = RemoteSettings(
        probe=False, write_share=1.0, write_timeout=0.1, epoch_interval=0.02, orphan_s=0.2
    )
    rig = rig_of(
        near,
        middle,
        planner=EagerPlanner(lookup_s=0.1, fetch_s=0.05),
        settings=settings,
        breaker=BreakerSettings(failures=3, pause=0.02, max_pause=0.05),
    )
    # What is to be found is there for sure, in the farther store.
    helper = rig_of(SharedMemoryStore(far))
    prompts = [prompt(p, *range(5)) for p in range(6)]
    for tokens in prompts:
        helper.store(tokens)
    engine = rig.engine
    free = list(range(PAGES))
    quiet: dict[int, bytes] = {}
    arrived = written = 0
    for step in range(40):
        tokens = rng.choice(prompts)
        labels = labels_of(tokens)
        if rng.random() < 0.4:
            pages = [free.pop() for _ in labels.identities]
            rig.compute(labels, pages)
            for page in pages:
                quiet.pop(page, None)
            count = result(engine.written, rig.write(pages, labels))
            assert 0 <= count <= len(labels)
            written += count
            assert rig.holds(pages, labels)
        else:
            seq = rig.lookup(tokens)
            if rng.random() < 0.1:
                engine.cancel(seq)
            found = result(engine.lookups, seq)
            if not found:
                engine.end(seq)
                continue
            labels = labels[:found]
            assert np.array_equal(engine.identities(seq)[:found], labels.identities)
            pages = [free.pop() for _ in range(found)]
            for page in pages:
                quiet.pop(page, None)
            window = rig.fetch(seq, pages, labels)
            if rng.random() < 0.2:
                time.sleep(rng.uniform(0, 0.02))
                engine.cancel(seq)
            if rng.random() < 0.5:
                engine.end(seq)
                seq = 0
            good = result(engine.arrivals, window)
            assert rig.holds(pages[:good], labels[:good]), "what has not verified counted as arrived"
            arrived += good
            assert result(engine.settled, window) == 0
            assert rig.holds(pages[:good], labels[:good]), "a page changed after its arrival"
            if seq:
                engine.end(seq)
        for page in pages:
            quiet[page] = rig.pool.buffer[page].numpy().tobytes()
        free = pages + free
        for page, content in quiet.items():
            assert rig.pool.buffer[page].numpy().tobytes() == content, f"page {page} was touched at {step}"
    time.sleep(0.1)
    for page, content in quiet.items():
        assert rig.pool.buffer[page].numpy().tobytes() == content
    assert arrived and written
    assert near.seen | middle.seen == set(Moody.moods)
    assert all(plan.ended is not None for plan in rig.planner.plans)
    assert set(posts.values()) == {1}
    assert engine.settled.done() == engine.arrivals.done()
    for queue in (engine.lookups, engine.arrivals, engine.written):
        assert queue.done() == rig.number(queue) - 1


@pytest.mark.parametrize("call", ["get", "exists", "put"])
def test_a_call_that_does_not_return_delays_no_answer(rig_of: MakeRig, call: str) -> None:
    store = Stuck(SharedMemoryStore())
    planner = EagerPlanner(lookup_s=0.2, fetch_s=0.2)
    rig = rig_of(store, planner=planner, settings=Quiet(write_timeout=0.2, write_share=1.0))
    labels = rig.store(prompt(1, 2, 3))
    store.calls = {call}
    if call == "put":
        new = labels_of(prompt(4))
        rig.compute(new, [9])
        write = rig.write([9], new)
        assert eventually(lambda: store.waiting > 0)
        # The store still reads the page, so there is no answer; but others are served.
        assert rig.found(prompt(1, 2, 3))[1] == 3
        time.sleep(0.3)
        assert rig.engine.written.done() == write - 1
        store.free()
        assert result(rig.engine.written, write) == 1
        return
    begin = time.monotonic()
    if call == "exists":
        assert rig.found(prompt(1, 2, 3))[1] == 0
        assert time.monotonic() - begin < 0.2 + LATE_S
        return
    windows = []
    for i in range(4):
        seq, pages = rig.found(prompt(1, 2, 3))
        assert pages == 3
        windows.append(rig.fetch(seq, [4 + 3 * i, 5 + 3 * i, 6 + 3 * i], labels))
        rig.engine.end(seq)
    for window in windows:
        assert result(rig.engine.arrivals, window) == 0
    assert time.monotonic() - begin < 0.2 + LATE_S
    assert rig.engine.settled.done() == 0
    assert rig.engine.stats().fetches_late == 4
    # Stuck fetches are replaced: later ones are served.
    store.calls = set()
    seq, pages = rig.found(prompt(1, 2, 3))
    window = rig.fetch(seq, [20, 21, 22], labels)
    assert eventually(lambda: rig.holds([20, 21, 22], labels))
    store.free()
    assert result(rig.engine.settled, window) == 0
    assert result(rig.engine.arrivals, window) == 3


def test_lookups_go_on_while_fetches_and_writes_are_stuck(rig_of: MakeRig) -> None:
    store = Stuck(SharedMemoryStore())
    rig = rig_of(store)
    labels = rig.store(prompt(1, 2, 3))
    store.calls = {"get", "put"}
    for i in range(6):
        seq, _ = rig.found(prompt(1, 2, 3))
        rig.fetch(seq, [4 + i], labels[:1])
        new = labels_of(prompt(4, 5, 6 + i))
        rig.compute(new, [12, 13, 14])
        rig.write([12, 13, 14], new)
    assert eventually(lambda: store.waiting >= 3)
    for _ in range(10):
        assert rig.found(prompt(1, 2, 3))[1] == 3
    store.free()
    assert result(rig.engine.settled, 6) == 0
    assert result(rig.engine.written, 7) == 3


def test_a_cancelled_fetch_is_answered_before_the_store_is(rig_of: MakeRig) -> None:
    store = Stuck(SharedMemoryStore())
    rig = rig_of(store)
    labels = rig.store(prompt(1, 2, 3))
    seq, _ = rig.found(prompt(1, 2, 3))
    store.calls = {"get"}
    window = rig.fetch(seq, [9, 10, 11], labels)
    assert eventually(lambda: store.waiting > 0)
    rig.engine.cancel(seq)
    assert rig.engine.arrivals.results(window - 1, 1) == [0]
    assert rig.engine.settled.done() == 0
    rig.engine.end(seq)
    store.free()
    assert result(rig.engine.settled, window) == 0


def test_kind_corrupt_page_from_a_store(rig_of: MakeRig) -> None:
    """Kind 3: a damaged or mixed-up page is a miss, counted by reason, and removed."""
    store = SharedMemoryStore()
    rig = rig_of(store)
    tokens = prompt(*range(8))
    labels = rig.store(tokens)
    keys = {key.identity: key for key in store._objects if key.group == 2}
    first, second = (keys[labels.identities[i].tobytes()] for i in (5, 7))
    damaged = bytearray(store._objects[first])
    damaged[200] ^= 1
    store._objects[first] = bytes(damaged)
    store._objects[second] = store._objects[keys[labels.identities[0].tobytes()]]
    seq, pages = rig.found(tokens)
    assert pages == 8
    rig.planner.plans[-1].window = 8
    window = rig.fetch(seq, range(16, 24), labels)
    assert result(rig.engine.arrivals, window) == 5
    assert rig.holds(range(16, 21), labels[:5])
    rig.engine.end(seq)
    assert rig.engine.stats().refused == {Reason.CHECKSUM: 1, Reason.IDENTITY: 1}
    assert eventually(lambda: first not in store._objects and second not in store._objects)
    assert len(store._objects) == 8 * GROUPS - 2 * GROUPS
    assert rig.found(tokens)[1] == 5
    # It is written again, and right.
    rig.store(tokens)
    assert rig.found(tokens)[1] == 8


def test_kind_corrupt_page_from_a_disk(rig_of: MakeRig, tmp_path: Path) -> None:
    """The same through real files, behind the store's back."""
    url = f"file://{tmp_path / 'kv'}?size_gb=0.001"
    rig = rig_of(
        make=lambda pool, seal, planner: open_remote([url], pool.layout, pool, seal, planner, total_groups=4)
    )
    labels = rig.store(prompt(*range(6)))
    damaged = 0
    for segment in (tmp_path / "kv" / "g1").glob("segment-*"):
        with segment.open("r+b") as file:
            data = bytearray(file.read(6 * 4096))
            for at in range(3 * 4096, len(data), 4096):
                data[at + 200] ^= 0x40
                damaged += 1
            file.seek(0)
            file.write(data)
    assert damaged
    seq, pages = rig.found(prompt(*range(6)))
    assert pages == 6
    window = rig.fetch(seq, range(16, 22), labels)
    good = result(rig.engine.arrivals, window)
    assert good < 6
    assert rig.holds(range(16, 16 + good), labels[:good])
    rig.engine.end(seq)
    assert rig.found(prompt(*range(6)))[1] < 6


def test_kind_backend_down_is_a_miss_and_comes_back_by_itself(rig_of: MakeRig) -> None:
    """Kind 12: with the service away, requests recompute at once; when it is back, so is the tier."""
    store = Down(SharedMemoryStore())
    rig = rig_of(store, breaker=BreakerSettings(pause=0.05, max_pause=0.1, patience=0.0))
    labels = rig.store(prompt(1, 2, 3))
    seq, pages = rig.found(prompt(1, 2, 3))
    assert pages == 3
    store.down = True
    window = rig.fetch(seq, [9, 10, 11], labels)
    assert result(rig.engine.arrivals, window) == 0
    assert result(rig.engine.settled, window) == 0
    rig.engine.end(seq)
    # Looking for epochs has found out meanwhile, or does now, without any request.
    assert eventually(lambda: not rig.engine._in_use())
    seq = rig.lookup(prompt(1, 2, 3))
    assert rig.engine.lookups.results(seq - 1, 1) == [0]
    rig.engine.end(seq)
    assert rig.engine.learned() == 0
    store.down = False
    assert eventually(lambda: bool(rig.engine._in_use()))
    assert rig.engine.healthy()
    assert rig.found(prompt(1, 2, 3))[1] == 3
    assert rig.engine.store_states()[0].stats.opened >= 1


def test_kind_backend_down_of_one_store_leaves_the_other(rig_of: MakeRig) -> None:
    near, far = Down(SharedMemoryStore()), Stuck(SharedMemoryStore())
    rig = rig_of(near, far, settings=Quiet(write_timeout=0.2, epoch_interval=0.02))
    near.down = True
    labels = rig.store(prompt(1, 2, 3))
    seq, pages = rig.found(prompt(1, 2, 3))
    assert pages == 3
    window = rig.fetch(seq, [9, 10, 11], labels)
    assert result(rig.engine.arrivals, window) == 3
    rig.engine.end(seq)
    near.down = False
    far.calls = {"put"}
    assert eventually(lambda: all(s.state == "closed" for s in rig.engine.store_states()))
    other = labels_of(prompt(7, 8))
    rig.compute(other, [4, 5])
    write = rig.write([4, 5], other)
    assert eventually(lambda: len(near.inner._objects) >= 2 * GROUPS)  # type: ignore[attr-defined]
    far.free()
    assert result(rig.engine.written, write) == 2


def test_a_held_row_that_no_store_knows_of_is_free_after_a_while(rig_of: MakeRig) -> None:
    """A call that failed with an exception leaves such rows."""

    class Raising(Down):
        def get(self, keys, rows, deadline):  # type: ignore[no-untyped-def]
            if self.down:
                raise RuntimeError("a fault in the store")
            return super().get(keys, rows, deadline)

    store = Raising(SharedMemoryStore())
    rig = rig_of(store, settings=Quiet(orphan_s=0.3, epoch_interval=0.02, write_share=1.0))
    labels = rig.store(prompt(1, 2))
    seq, _ = rig.found(prompt(1, 2))
    store.down = True
    window = rig.fetch(seq, [9, 10], labels)
    assert result(rig.engine.arrivals, window) == 0
    assert rig.engine.settled.done() == 0
    assert result(rig.engine.settled, window) == 0
    rig.engine.end(seq)


@pytest.mark.parametrize("call", ["exists", "get"])
def test_who_waits_for_others_anyway_waits_for_the_store_until_its_turn(rig_of: MakeRig, call: str) -> None:
    store = Stuck(SharedMemoryStore())
    rig = rig_of(store, planner=EagerPlanner(lookup_s=0.1, fetch_s=0.1), settings=Quiet())
    labels = rig.store(prompt(1, 2, 3))
    engine = rig.engine
    if call == "get":
        lookup = rig.lookup(prompt(1, 2, 3), ahead=60.0)
        assert result(engine.lookups, lookup) == 3
        store.calls = {call}
        job, queue = rig.fetch(lookup, [4, 5, 6], labels), engine.arrivals
    else:
        store.calls = {call}
        lookup = job = rig.lookup(prompt(1, 2, 3), ahead=60.0)
        queue = engine.lookups
    assert eventually(lambda: store.waiting > 0)
    time.sleep(0.3)
    assert queue.results(job - 1, 1) == [UNDONE]
    begin = time.monotonic()
    for _ in range(3):
        engine.turn_came(lookup)
    assert result(queue, job) == 0
    assert time.monotonic() - begin < 0.1 + LATE_S
    engine.end(lookup)
    store.free()
    if call == "get":
        assert result(engine.settled, job) == 0


def test_a_turn_that_comes_late_changes_nothing(rig_of: MakeRig) -> None:
    rig = rig_of(SharedMemoryStore())
    labels = rig.store(prompt(1, 2, 3))
    seq, pages = rig.found(prompt(1, 2, 3))
    rig.engine.turn_came(seq)
    window = rig.fetch(seq, [4, 5, 6], labels)
    rig.engine.turn_came(seq)
    assert (pages, result(rig.engine.arrivals, window)) == (3, 3)
    rig.engine.turn_came(seq)
    rig.engine.end(seq)
    assert rig.holds([4, 5, 6], labels)
