"""What device and host hold together: nothing is lost while one of them has a copy of what the other has."""

from __future__ import annotations

import numpy as np
import pytest

from hicache_ext.core import cache
from hicache_ext.core.page import PrefixScope
from hicache_ext.core.policy.costs import CostModel
from hicache_ext.core.policy.make import NAMES, make_policy
from hicache_ext.core.residency import Residency
from hicache_ext.core.tree import Node
from tests.core.fakes import (
    Rig,
    assert_idle,
    device_len,
    found,
    make_rig,
    node_at,
    prompt,
    put,
    settle,
    to_host,
)

ABSENT, PENDING, READY = Residency.ABSENT, Residency.PENDING, Residency.READY
PAGE = 4
SCOPE = PrefixScope()
A, B, C, D = (prompt(PAGE, n, n + 1) for n in (10, 20, 30, 40))


def on_both(rig: Rig, tokens: np.ndarray) -> Node:
    """Load what is on the host, and use it no more."""
    node = node_at(rig, tokens)
    assert rig.cache.load(node) == len(tokens)
    settle(rig)
    assert node.device is READY and node.host is READY
    return node


def use_later(rig: Rig, tokens: np.ndarray) -> None:
    rig.cache.tick()
    rig.cache.match(SCOPE, tokens)


def full_host() -> Rig:
    """A on the host only, B on both, C on the device only, where it waits for room on the host."""
    rig = make_rig(device_pages=6, host_pages=4, ease=0.0)
    to_host(rig, A)
    to_host(rig, B)
    on_both(rig, B)
    put(rig, C)
    settle(rig)
    assert node_at(rig, C).host is ABSENT and rig.cache.host_pages.free == 0
    return rig


def test_the_copy_of_what_stays_on_the_device_leaves_before_the_only_one() -> None:
    rig = full_host()
    use_later(rig, B)
    assert rig.cache.evict(len(C)) == len(C)
    settle(rig)
    assert device_len(rig, B) == len(B) and device_len(rig, C) == 0
    assert [found(rig, tokens) for tokens in (A, B, C)] == [len(tokens) for tokens in (A, B, C)]
    assert rig.cache.stats.evicted_lost == 0
    assert_idle(rig)


def test_what_lost_its_copy_that_way_gets_it_again() -> None:
    rig = full_host()
    copy = node_at(rig, B)
    rig.cache.evict_host(2, leaving=True)
    assert copy.host is ABSENT and copy.backup_queued and found(rig, A) == len(A)
    settle(rig)
    rig.cache.evict(rig.device.total)
    assert found(rig, B) == len(B) and copy.device is ABSENT


def test_room_for_what_stays_on_the_device_is_not_made_that_way() -> None:
    rig = full_host()
    rig.cache.evict_host(1)
    assert node_at(rig, B).host is READY and found(rig, A) < len(A)


def test_requests_wait_for_what_gives_up_its_copy_first() -> None:
    rig = make_rig(device_pages=8, host_pages=4, ease=0.0)
    to_host(rig, A)
    to_host(rig, B)
    first, second = on_both(rig, A), on_both(rig, B)
    rig.cache.want("r", SCOPE, A)
    rig.cache.evict_host(2, leaving=True)
    assert first.host is ABSENT and second.host is READY


def test_what_has_a_copy_leaves_at_once_while_another_is_copied() -> None:
    rig = make_rig(device_pages=8, host_pages=4, ease=0.0)
    to_host(rig, A)
    to_host(rig, B)
    put(rig, C[:PAGE])
    settle(rig)
    for tokens in (A, B):
        on_both(rig, tokens)
        use_later(rig, tokens)
    put(rig, D[:PAGE])
    use_later(rig, D[:PAGE])
    rig.cache.flush_backups()
    oldest, latest = node_at(rig, C), node_at(rig, D)
    assert oldest.host is ABSENT and latest.host is ABSENT
    assert rig.cache.evict(PAGE) == PAGE
    assert rig.cache.stats.evict_waits == 0 and device_len(rig, A) == PAGE and device_len(rig, B) == len(B)
    assert oldest.host is PENDING and latest.host is ABSENT
    settle(rig)
    assert [found(rig, tokens) for tokens in (A, B, C, D)] == [len(A), len(B), PAGE, PAGE]
    assert_idle(rig)


def test_no_more_is_copied_than_the_eviction_needs() -> None:
    rig = make_rig(device_pages=8, host_pages=4, ease=0.0)
    to_host(rig, A)
    to_host(rig, B)
    rig.cache.load(node_at(rig, A))
    held = node_at(rig, A)
    rig.cache.lock(held)
    settle(rig)
    put(rig, C)
    use_later(rig, C)
    put(rig, D)
    use_later(rig, D)
    first, second = node_at(rig, C), node_at(rig, D)
    rig.cache.flush_backups()
    assert first.host is ABSENT and second.host is ABSENT
    assert rig.cache.evict(PAGE) == PAGE
    assert rig.cache.stats.evict_waits == 1
    assert held.host is ABSENT and first.host is READY and second.host is ABSENT
    assert second.device is READY and found(rig, B) == len(B)
    rig.cache.unlock(held)
    settle(rig)
    assert_idle(rig)


def test_what_is_evicted_before_its_copy_has_started_is_copied_first() -> None:
    rig = make_rig()
    put(rig, A)
    assert rig.cache.evict(rig.device.total) == len(A)
    assert found(rig, A) == len(A) and device_len(rig, A) == 0 and rig.cache.stats.evicted_lost == 0


def test_it_is_not_if_that_would_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MOST_COPIED", PAGE)
    rig = make_rig()
    put(rig, A)
    assert rig.cache.evict(PAGE) == PAGE and found(rig, A) == PAGE
    assert rig.cache.evict(PAGE) == PAGE and found(rig, A) == PAGE
    assert rig.cache.stats.evicted_lost == PAGE and device_len(rig, A) == 0


def test_no_other_is_copied_while_copies_in_flight_will_free_something() -> None:
    rig = make_rig(device_pages=8)
    put(rig, C)
    settle(rig)
    put(rig, A)
    rig.cache.flush_backups()
    put(rig, B)
    assert rig.cache.evict(len(C)) == len(C)
    assert rig.cache.stats.evict_waits == 0 and device_len(rig, C) == 0 and node_at(rig, B).host is ABSENT
    assert rig.cache.evict(len(A)) == len(A)
    assert rig.cache.stats.evict_waits == 1 and device_len(rig, A) == 0 and node_at(rig, B).host is ABSENT
    assert rig.cache.evict(len(B)) == len(B) and rig.cache.stats.evict_waits == 2
    assert [found(rig, tokens) for tokens in (A, B, C)] == [len(tokens) for tokens in (A, B, C)]


def test_an_eviction_that_must_not_wait_frees_what_has_a_copy_and_starts_copies_for_the_rest() -> None:
    rig = make_rig(device_pages=6)
    put(rig, A)
    settle(rig)
    put(rig, B)
    assert rig.cache.evict(len(A) + len(B), wait=False) == len(A)
    assert rig.cache.stats.evict_waits == 0 and node_at(rig, B).host is PENDING
    assert rig.cache.evict(len(B), wait=False) == 0 and len(rig.transfers.backup_jobs) == 1
    rig.transfers.drain()
    rig.cache.tick()
    assert rig.cache.evict(len(B), wait=False) == len(B) and rig.cache.stats.evicted_lost == 0


def test_a_load_that_must_not_wait_gets_its_room_once_the_copies_have_ended() -> None:
    rig = make_rig(device_pages=4)
    to_host(rig, A)
    for tokens in (B, C):
        put(rig, tokens)
    assert rig.cache.load(node_at(rig, A), wait=False) == 0
    assert rig.cache.stats.evict_waits == 0 and rig.cache.stats.load_declined == 0
    rig.transfers.drain()
    rig.cache.tick()
    assert rig.cache.load(node_at(rig, A), wait=False) == len(A)
    settle(rig)
    assert [found(rig, tokens) for tokens in (A, B, C)] == [len(tokens) for tokens in (A, B, C)]


def test_an_eviction_waits_for_the_first_of_many_copies_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MOST_COPIED", 2 * PAGE)
    rig = make_rig()
    for tokens in (A, B, C):
        put(rig, tokens)
    rig.cache.flush_backups()
    assert [len(job.pages) for job in rig.transfers.backup_jobs] == [2, 2, 2]
    assert rig.cache.evict(PAGE) == PAGE
    assert rig.cache.stats.evict_waits == 1 and len(rig.transfers.backup_jobs) == 2


def test_copies_that_do_not_suffice_cost_nothing_its_only_copy() -> None:
    """New pages, of which the device has room for more, wait, and no copy leaves the host for them."""
    rig = make_rig(device_pages=12, host_pages=5)
    to_host(rig, A)
    to_host(rig, B)
    put(rig, D[:PAGE])
    settle(rig)
    on_both(rig, B)
    use_later(rig, B)
    held = node_at(rig, D[:PAGE])
    rig.cache.lock(held)
    put(rig, C)
    settle(rig)
    assert [found(rig, tokens) for tokens in (A, B, C, D)] == [len(A), len(B), len(C), PAGE]
    assert node_at(rig, C).host is ABSENT and held.host is READY
    rig.cache.unlock(held)
    rig.cache.evict(len(B))
    assert [found(rig, tokens) for tokens in (A, B, C, D)] == [len(A), len(B), len(C), PAGE]


def loading() -> Rig:
    """A on the host only, B on its way from there, C on the device only; host and device are full."""
    rig = make_rig(device_pages=4, host_pages=4)
    to_host(rig, A)
    to_host(rig, B)
    put(rig, C)
    rig.cache.load(node_at(rig, B))
    rig.cache.start_loads()
    return rig


def all_found(rig: Rig) -> bool:
    return [found(rig, tokens) for tokens in (A, B, C)] == [len(A), len(B), len(C)]


def test_new_pages_wait_for_the_room_that_loads_in_flight_will_leave() -> None:
    rig = loading()
    rig.cache.flush_backups()
    assert not rig.transfers.backup_jobs and all_found(rig)
    settle(rig)
    assert all_found(rig)


def test_evictions_wait_for_the_room_that_loads_in_flight_will_leave() -> None:
    rig = loading()
    assert rig.cache.evict(len(C), wait=False) == 0 and rig.cache.stats.evict_waits == 0
    assert rig.cache.evict(len(C)) == len(C)
    assert rig.cache.stats.evict_waits > 0 and rig.cache.stats.evicted_lost == 0
    assert all_found(rig)


def test_a_load_that_is_refused_while_another_waits_for_it_takes_that_one_along() -> None:
    rig = make_rig(device_pages=4, host_pages=4)
    both = np.concatenate([A, B])
    to_host(rig, both)
    rig.cache.match(SCOPE, A)
    first = node_at(rig, A)
    assert first.pages is not None
    rig.transfers.corrupt(int(first.pages[0]))
    put(rig, C)
    assert rig.cache.load(first) == len(A)
    assert rig.cache.load(node_at(rig, both)) == 0
    assert found(rig, A) == 0 and rig.cache.stats.refused == len(A)
    settle(rig)
    rig.cache.evict(rig.device.total)
    assert_idle(rig)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("policy", NAMES)
def test_what_fits_in_both_together_is_never_lost(policy: str, group: int, late: bool) -> None:
    """Sessions that take turns, of which neither tier could hold all; ``late``: copies start when a turn has
    made room for the next."""
    device, host, size, count = 24, 64, 8, 9
    rig = make_rig(device_pages=device, host_pages=host, ease=0.125)
    costs = CostModel(token=2.5e-5, depth=1.3e-9, load=2.4e-6, store=2.4e-6)
    tree = rig.cache.tree
    tree.policy = make_policy(
        policy, device_tokens=device * PAGE, host_tokens=host * PAGE, page_size=PAGE, costs=costs
    )
    tree.candidates = {tier: tree.policy.index(tier) for tier in tree.candidates}
    sessions = [prompt(PAGE, *range(100 * n, 100 * n + size)) for n in range(1, count + 1)]
    for turn in range(12 * count // group):
        now = [sessions[(turn * group + k) % count] for k in range(group)]
        for tokens in now:
            if late:
                rig.cache.evict(len(tokens) - rig.device.available())
                rig.cache.flush_backups()
            rig.cache.want(str(tokens[0]), SCOPE, tokens)
            if found(rig, tokens) > device_len(rig, tokens):
                rig.cache.load(node_at(rig, tokens))
                rig.cache.start_loads()
                rig.transfers.drain()
                rig.cache.tick()
            rig.cache.unwant(str(tokens[0]))
            if turn * group >= count:
                assert device_len(rig, tokens) == len(tokens), turn
            put(rig, tokens)
            rig.cache.lock(rig.cache.match(SCOPE, tokens).device_node)
        if not late:
            rig.cache.flush_backups()
        rig.cache.tick()
        for tokens in now:
            rig.cache.unlock(node_at(rig, tokens))
        if not late:
            rig.cache.flush_backups()
        rig.transfers.drain()
        rig.cache.tick()
        rig.cache.check()
        lost = [found(rig, tokens) for tokens in sessions[: (turn + 1) * group]]
        assert lost == [len(tokens) for tokens in sessions[: (turn + 1) * group]], turn
