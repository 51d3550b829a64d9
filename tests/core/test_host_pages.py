"""The free list of host pages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_ext.core.host_pages import HostPages


def taken(pages: HostPages, count: int) -> np.ndarray:
    got = pages.alloc(count)
    assert got is not None
    return got


def test_a_fresh_pool_hands_out_contiguous_pages_from_the_lowest() -> None:
    pages = HostPages(8)
    assert taken(pages, 3).tolist() == [0, 1, 2]
    assert taken(pages, 2).tolist() == [3, 4]
    assert (pages.free, pages.used, pages.total) == (3, 5, 8)


def test_page_numbers_are_int64() -> None:
    assert taken(HostPages(2), 1).dtype == np.int64


def test_too_many_is_none_and_takes_nothing() -> None:
    pages = HostPages(4)
    taken(pages, 3)
    assert pages.alloc(2) is None
    assert pages.free == 1 and taken(pages, 1).tolist() == [3]


def test_nothing_can_always_be_had() -> None:
    pages = HostPages(0)
    assert taken(pages, 0).tolist() == [] and pages.alloc(1) is None
    pages.release(np.empty(0, np.int64))
    assert (pages.free, pages.used) == (0, 0)


def test_released_pages_come_back_in_order() -> None:
    pages = HostPages(4)
    got = taken(pages, 4)
    pages.release(got)
    assert taken(pages, 4).tolist() == got.tolist()


def test_what_was_handed_out_does_not_change_later() -> None:
    pages = HostPages(4)
    first = taken(pages, 2)
    pages.release(taken(pages, 2))
    assert first.tolist() == [0, 1]


def test_releasing_more_than_there_are_is_noticed() -> None:
    pages = HostPages(2)
    got = taken(pages, 1)
    pages.release(got)
    with pytest.raises(AssertionError, match="freed twice"):
        pages.release(got)


def test_clear_makes_all_pages_free_again() -> None:
    pages = HostPages(4)
    taken(pages, 3)
    pages.clear()
    assert pages.free == 4 and taken(pages, 4).tolist() == [0, 1, 2, 3]


def test_clear_keeps_what_others_still_touch() -> None:
    pages = HostPages(6)
    held = taken(pages, 4)[[1, 3]]
    pages.clear(keep=held)
    assert (pages.free, pages.used) == (4, 2) and pages.alloc(5) is None
    assert taken(pages, 4).tolist() == [0, 2, 4, 5]
    pages.release(held)
    assert taken(pages, 2).tolist() == [1, 3]


@settings(deadline=None, derandomize=True)
@given(st.integers(0, 12), st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=40))
def test_each_page_has_one_owner_at_any_time(total: int, steps: list[tuple[bool, int]]) -> None:
    pages = HostPages(total)
    held: list[np.ndarray] = []
    for release, count in steps:
        if release and held:
            pages.release(held.pop(count % len(held)))
        elif not release and (got := pages.alloc(count)) is not None:
            assert len(got) == count
            held.append(got)
        everywhere = np.concatenate([*held, pages.free_pages()])
        assert sorted(everywhere.tolist()) == list(range(total))
        assert pages.free == len(pages.free_pages()) == total - pages.used
