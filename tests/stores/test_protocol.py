"""What every store promises, tried on each."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from hicache_ext.stores.base import Store, StoreError
from tests.stores.util import NAMESPACE, aligned_buffer, content, fill, key, soon

OTHER = b"\xff" * 32


def put(store: Store, buffer: np.ndarray, numbers: list[int], **fields: int) -> np.ndarray:
    rows = fill(buffer, numbers)
    return store.put([key(n, **fields) for n in numbers], rows, soon()).ok  # type: ignore[arg-type]


def read_back(store: Store, buffer: np.ndarray, numbers: list[int], first_row: int = 32) -> np.ndarray:
    """Get the objects; those that are hits must have the right bytes."""
    rows = list(range(first_row, first_row + len(numbers)))
    buffer[rows] = 0
    outcome = store.get([key(n) for n in numbers], rows, soon())
    assert not outcome.held.any()
    for i, number in enumerate(numbers):
        if outcome.ok[i]:
            assert np.array_equal(buffer[rows[i]], content(number, buffer.shape[1])), f"object {number}"
    return outcome.ok


def test_kind_written_but_never_read_back(store: Store, buffer: np.ndarray) -> None:
    numbers = list(range(20))
    before = store.stats()
    assert put(store, buffer, numbers).all()
    assert store.exists([key(n) for n in numbers], soon()).ok.all()
    assert read_back(store, buffer, numbers).all()
    now = store.stats()
    assert now.hits - before.hits == now.stored - before.stored == 20
    assert now.misses == before.misses


def test_a_miss_is_a_result(store: Store, buffer: np.ndarray) -> None:
    put(store, buffer, [1, 2])
    assert store.exists([key(1), key(7), key(2)], soon()).ok.tolist() == [True, False, True]
    outcome = store.get([key(1), key(7), key(2)], [40, 41, 42], soon())
    assert outcome.ok.tolist() == [True, False, True]
    assert not outcome.held.any() and not outcome.down


def test_any_rows_in_any_order(store: Store, buffer: np.ndarray) -> None:
    put(store, buffer, list(range(8)))
    rows = [60, 33, 50, 41, 34, 63]
    numbers = [7, 0, 3, 1, 6, 2]
    assert store.get([key(n) for n in numbers], np.array(rows), soon()).ok.all()
    for row, number in zip(rows, numbers, strict=True):
        assert np.array_equal(buffer[row], content(number, buffer.shape[1]))


def test_rows_that_were_not_named_stay(store: Store, buffer: np.ndarray) -> None:
    put(store, buffer, [1, 2, 3])
    buffer[32:] = 77
    assert store.get([key(2), key(9)], [40, 50], soon()).ok.tolist() == [True, False]
    others = [row for row in range(32, 64) if row not in (40, 50)]
    assert (buffer[others] == 77).all()


def test_what_is_there_is_not_written_again(store: Store, buffer: np.ndarray) -> None:
    put(store, buffer, [1])
    buffer[0] = 99
    assert store.put([key(1)], [0], soon()).ok.all()
    assert read_back(store, buffer, [1]).all()


def test_one_key_twice_in_a_call(store: Store, buffer: np.ndarray) -> None:
    rows = fill(buffer, [5, 5])
    assert store.put([key(5), key(5)], rows, soon()).ok.all()
    assert store.get([key(5), key(5)], [40, 41], soon()).ok.all()
    assert np.array_equal(buffer[40], buffer[41])


@pytest.mark.parametrize("field", ["epoch", "group", "namespace"])
def test_keys_differ_in_every_part(store: Store, buffer: np.ndarray, field: str) -> None:
    other = {"epoch": key(1, epoch=2), "group": key(1, group=3), "namespace": key(1, namespace=OTHER)}[field]
    put(store, buffer, [1])
    assert not store.exists([other], soon()).ok.any()
    fill(buffer, [1001])
    assert store.put([other], [0], soon()).ok.all()
    assert store.get([key(1), other], [40, 41], soon()).ok.all()
    assert np.array_equal(buffer[40], content(1, buffer.shape[1]))
    assert np.array_equal(buffer[41], content(1001, buffer.shape[1]))


def test_remove(store: Store, buffer: np.ndarray) -> None:
    put(store, buffer, [1, 2, 3])
    read_back(store, buffer, [1, 2, 3])
    assert store.remove([key(1), key(3), key(8)], soon()).ok.all()
    assert read_back(store, buffer, [1, 2, 3]).tolist() == [False, True, False]
    assert put(store, buffer, [1]).all()
    assert read_back(store, buffer, [1]).all()


def test_clear_takes_old_epochs_of_one_namespace(store: Store, buffer: np.ndarray) -> None:
    keys = [key(n, epoch=n) for n in range(1, 20)] + [key(1, epoch=1, namespace=OTHER)]
    assert store.put(keys, fill(buffer, list(range(20))), soon()).ok.all()
    assert store.clear(NAMESPACE, 17, soon())
    assert store.exists(keys, soon()).ok.tolist() == [False] * 16 + [True] * 4
    assert store.clear(NAMESPACE, 1 << 40, soon())
    assert store.exists(keys, soon()).ok.tolist() == [False] * 19 + [True]


def test_empty_calls(store: Store) -> None:
    assert store.exists([], soon()).ok.shape == (0,)
    assert not store.get([], [], soon()).down
    assert not store.put([], [], soon()).down
    assert not store.remove([], soon()).down


def test_a_deadline_in_the_past_touches_nothing(store: Store, buffer: np.ndarray) -> None:
    put(store, buffer, [1, 2])
    buffer[40:42] = 55
    begin = time.monotonic()
    outcome = store.get([key(1), key(2)], [40, 41], begin - 1)
    assert time.monotonic() - begin < 1
    free = [
        row for row, ok, held in zip([40, 41], outcome.ok, outcome.held, strict=True) if not ok and not held
    ]
    assert (buffer[free] == 55).all()
    store.put([key(3)], [0], time.monotonic() - 1)
    assert read_back(store, buffer, [1, 2]).all()


def test_many_threads(store: Store, buffer: np.ndarray) -> None:
    """Each thread writes, reads and removes its own objects in its own rows, and reads common ones."""
    put(store, buffer, [0])
    wrong: list[str] = []

    def work(thread: int) -> None:
        base = 1000 * (thread + 1)
        first = 8 + 8 * thread
        for turn in range(8):
            numbers = [base + 3 * turn + i for i in range(3)]
            keys = [key(n) for n in numbers]
            rows = fill(buffer, numbers, first)
            if not store.put(keys, rows, soon()).ok.all():
                wrong.append(f"put {numbers}")
            buffer[rows] = 0
            got = store.get([*keys, key(0)], [*rows, first + 3], soon())
            expected = [*numbers, 0]
            for i, number in enumerate(expected):
                if not got.ok[i] or not np.array_equal(buffer[first + i], content(number, buffer.shape[1])):
                    wrong.append(f"get {number}")
            if not store.remove(keys, soon()).ok.all():
                wrong.append(f"remove {numbers}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_ping_and_close(store: Store, buffer: np.ndarray) -> None:
    put(store, buffer, [1])
    assert store.ping(soon())
    store.close()
    store.close()
    assert not store.ping(soon())
    assert not store.get([key(1)], [40], soon()).ok.any()
    assert not store.put([key(2)], [0], soon()).ok.any()
    assert not store.exists([key(1)], soon()).ok.any()


@pytest.mark.parametrize("shape", [(4, 512), (8,), (4, 4, 16 * 1024)])
def test_a_buffer_of_another_shape_is_refused(store: Store, shape: tuple[int, ...]) -> None:
    with pytest.raises(StoreError, match="host buffer is uint8"):
        store.register(np.zeros(shape, np.uint8))


def test_a_buffer_with_gaps_is_refused(store: Store, buffer: np.ndarray) -> None:
    with pytest.raises(StoreError, match="contiguous"):
        store.register(aligned_buffer(8, 2 * buffer.shape[1])[:, : buffer.shape[1]])
