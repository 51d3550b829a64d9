"""The numbers of epochs: parity, claims, and how a look finds the highest mark."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_ext.core import epochs
from hicache_ext.core.header import FIXED, MAGIC

numbers = st.integers(0, 2**24).map(lambda n: 2 * n)


def look(epoch: int, marks: set[int]) -> tuple[epochs.Decision, int]:
    """A look to its end, and how many calls of the store it took."""
    calls, again = 0, True
    while again:
        probed = epochs.probes(epoch)
        made = epochs.decide(epoch, probed, [number in marks for number in probed])
        epoch, again, calls = made.epoch, made.look_again, calls + 1
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
    assert found.epoch == max(own, other)
    assert calls <= 26
    assert found.missing == ()


@given(numbers, st.lists(numbers, max_size=5))
def test_a_look_finds_the_highest_of_several(own: int, others: list[int]) -> None:
    found, _ = look(own, marks_of(*others))
    assert found.epoch == max([own, *others])


@given(numbers.filter(bool), st.data())
def test_a_look_names_the_own_marks_that_are_missing(own: int, data: st.DataObject) -> None:
    chain = epochs.chain(own)
    lost = data.draw(st.sets(st.sampled_from(chain)))
    found, calls = look(own, set(chain) - lost)
    assert (found.epoch, sorted(found.missing), calls) == (own, sorted(lost), 1)


@pytest.mark.parametrize("epoch", [1, 7, 2**20 + 1])
def test_a_look_after_a_flush_sees_all_marks(epoch: int) -> None:
    """Of what is below, nothing matters."""
    for other in (2, 6, 2**22 + 2**5):
        found, _ = look(epoch, marks_of(other))
        number = epochs.claim(epoch, found.epoch)
        assert number > max(epoch, other) and number <= max(epoch, other) + 2


def test_one_call_of_31_keys_when_nothing_has_changed() -> None:
    assert look(0, set())[1] == 1
    assert [len(epochs.probes(epoch)) for epoch in (0, 6, 2**20)] == [epochs.BITS - 1] * 3


def test_a_mark_is_no_page() -> None:
    header = np.frombuffer(epochs.mark_header(bytes(range(32)), 6), FIXED)[0]
    assert header["magic"] == MAGIC and header["epoch"] == 6
    assert header["identity"].tobytes() == epochs.MARK_IDENTITY and header["slabs"] == 0
    assert header["group"] == epochs.MARK_GROUP and header["namespace"].tobytes() == bytes(range(32))
