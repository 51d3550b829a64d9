"""How many pages the host tier gets."""

from __future__ import annotations

from typing import Any

import pytest

from hicache_ext.integration.settings import SettingsError
from hicache_ext.integration.sizing import host_pages

PLENTY = 10**15


def pages(**changes: Any) -> int:
    arguments: dict[str, Any] = {
        "host_gb": None,
        "ranks": 1,
        "page_bytes": 1_000_000,
        "device_pages": 100,
        "free_bytes": PLENTY,
    }
    arguments.update(changes)
    return host_pages(arguments.pop("host_gb"), **arguments)


def test_the_default_is_twice_the_device_pool() -> None:
    assert pages() == 200


@pytest.mark.parametrize(("ranks", "expected"), [(1, 50), (2, 25), (3, 16)])
def test_the_default_is_at_most_half_of_the_free_memory_of_all_ranks(ranks: int, expected: int) -> None:
    assert pages(free_bytes=100_000_000, ranks=ranks) == expected


@pytest.mark.parametrize(
    ("host_gb", "ranks", "expected"),
    [(1, 1, 1000), (1.0, 4, 250), (0.0025, 1, 2), (0.001, 1, 1), (3, 7, 428)],
)
def test_what_was_asked_for_is_shared_by_the_ranks(host_gb: float, ranks: int, expected: int) -> None:
    got = pages(host_gb=host_gb, ranks=ranks)
    assert got == expected and got * ranks * 1_000_000 <= host_gb * 1e9


def test_what_was_asked_for_does_not_depend_on_the_device_pool_or_free_memory() -> None:
    assert pages(host_gb=1, device_pages=1, free_bytes=0) == 1000


def test_less_than_a_page_is_refused_with_the_smallest_that_works() -> None:
    with pytest.raises(SettingsError) as caught:
        pages(host_gb=0.0015, ranks=2)
    message = str(caught.value)
    assert message == (
        "the host tier would not hold a single page of 1000000 bytes on 2 rank(s); "
        "give --hicache-ext-host-gb at least 0.002000"
    )
    assert pages(host_gb=float(message.split()[-1]), ranks=2) == 1


def test_no_free_memory_is_refused_by_default() -> None:
    with pytest.raises(SettingsError, match="would not hold a single page"):
        pages(free_bytes=0)
