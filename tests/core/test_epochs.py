"""The numbers of epochs: parity, claims, and how a look finds the highest mark."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_ext.core import epochs
from hicache_ext.core.header import FIXED, MAGIC

numbers = st.integers(0, 2**24).map(lambda n: 2 * n)


def look(epoch: int, marks: set[int]) -> tuple[epochs.Look, int]:
    """A look to its end, and how many calls of the store it took."""
    made = epochs.Look(epoch)
    calls = 0
    while asked := made.ask():
        made.answer([number in marks for number in asked])
        calls += 1
    return made, calls


def marks_of(*claimed: int) -> set[int]:
    return {number for epoch in claimed for number in epochs.chain(epoch)}


@given(st.integers(0, 2**20), st.integers(0, 2**20))
def test_a_flush_is_local_and_its_claim_shared_and_above_all(epoch: int, highest: int) -> None:
    local = epochs.flushed(epoch)
    assert epochs.is_local(local) and local > epoch
    number = epochs.claim(local, highest)
    assert not epochs.is_local(number) and number > max(local, highest)
    # Another flush while this one is being settled claims another number.
    assert epochs.claim(epochs.flushed(local), highest) >= number
    assert epochs.claim(epochs.flushed(local), 0) > epochs.claim(local, 0)


@given(numbers, numbers)
def test_a_look_finds_a_higher_number_though_all_other_marks_are_gone(own: int, other: int) -> None:
    found, calls = look(own, marks_of(own, other))
    assert found.highest == max(own, other)
    assert calls <= 26
    assert found.missing == []


@given(numbers, st.lists(numbers, max_size=5))
def test_a_look_finds_the_highest_of_several(own: int, others: list[int]) -> None:
    found, _ = look(own, marks_of(*others))
    assert found.highest == max([own, *others])


@given(numbers.filter(bool), st.data())
def test_a_look_names_the_own_marks_that_are_missing(own: int, data: st.DataObject) -> None:
    chain = epochs.chain(own)
    lost = data.draw(st.sets(st.sampled_from(chain)))
    found, calls = look(own, set(chain) - lost)
    assert (found.highest, sorted(found.missing), calls) == (own, sorted(lost), 1)


@pytest.mark.parametrize("epoch", [1, 7, 2**20 + 1])
def test_a_look_after_a_flush_sees_all_marks(epoch: int) -> None:
    """The server's own former number is nothing it would have to find."""
    for other in (2, 6, 2**22 + 2**5):
        found, _ = look(epoch, marks_of(other))
        assert found.highest == other and found.missing == []


def test_one_call_when_nothing_has_changed() -> None:
    assert look(0, set())[1] == 1
    assert len(epochs.Look(0).ask()) == epochs.BITS - 1
    assert len(epochs.Look(6).ask()) == epochs.BITS - 1


def test_a_mark_is_no_page() -> None:
    header = np.frombuffer(epochs.mark_header(bytes(range(32)), 6), FIXED)[0]
    assert header["magic"] == MAGIC and header["epoch"] == 6
    assert header["identity"].tobytes() == epochs.MARK_IDENTITY and header["slabs"] == 0
    assert header["group"] == epochs.MARK_GROUP and header["namespace"].tobytes() == bytes(range(32))
