"""Host copies of what requests use on the device make room for others, and come back afterwards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hicache_ext.core.cache import WritePolicy
from hicache_ext.core.page import PrefixScope
from hicache_ext.core.remote_tier import RemoteConfig
from hicache_ext.core.residency import Doubt, Residency, Tier
from hicache_ext.core.tree import Node
from tests.core.fakes import (
    Rig,
    SharedStore,
    assert_idle,
    content,
    device_len,
    found,
    kv_of,
    make_rig,
    node_at,
    prompt,
    put,
    settle,
    to_host,
)

ABSENT, READY = Residency.ABSENT, Residency.READY
PAGE = 4
SCOPE = PrefixScope()
LONG = prompt(PAGE, 1, 2, 3, 4, 5, 6)
START = LONG[: 3 * PAGE]
OTHER = prompt(PAGE, 11, 12, 13)


def use_the_start(rig: Rig) -> Node:
    """LONG is on the host, and a request uses its first half on the device."""
    to_host(rig, LONG)
    node = rig.cache.match(SCOPE, START).host_node
    assert rig.cache.load(node) == len(START)
    rig.cache.lock(node)
    settle(rig)
    return node


def crowd(rig: Rig) -> None:
    """Something else wants the host."""
    put(rig, OTHER)
    settle(rig)


def waiting_for_room() -> tuple[Rig, Node]:
    """The use of LONG's start has ended: on the device only, its end on a full host, with room to spare."""
    rig = make_rig(device_pages=12, host_pages=6)
    node = use_the_start(rig)
    crowd(rig)
    rig.cache.config = replace(rig.cache.config, ease=0.5)
    rig.cache.unlock(node)
    return rig, node


def test_the_copy_of_what_is_in_use_leaves_a_full_host_before_what_continues_it() -> None:
    rig = make_rig(device_pages=8, host_pages=6)
    node = use_the_start(rig)
    crowd(rig)
    assert node.host is ABSENT and node.device is READY
    assert found(rig, LONG) == len(LONG) and found(rig, OTHER) == len(OTHER)
    assert node_at(rig, OTHER).host is READY


def test_without_a_use_the_end_of_the_prefix_leaves_first() -> None:
    rig = make_rig(device_pages=8, host_pages=6)
    rig.cache.unlock(use_the_start(rig))
    crowd(rig)
    assert found(rig, LONG) == len(START)


def test_a_continuation_loads_below_a_prefix_that_has_no_copy() -> None:
    rig = make_rig(device_pages=12, host_pages=6)
    use_the_start(rig)
    crowd(rig)
    end = node_at(rig, LONG)
    assert rig.cache.load(end) == len(LONG) - len(START)
    rig.cache.lock(end)
    settle(rig)
    assert np.array_equal(content(rig, LONG), kv_of(SCOPE, LONG))
    rig.cache.check()


def test_it_is_copied_down_again_when_it_is_no_longer_in_use() -> None:
    rig = make_rig(device_pages=8, host_pages=9)
    node = use_the_start(rig)
    crowd(rig)
    rig.cache.evict_host(3)
    assert node.host is ABSENT
    rig.cache.unlock(node)
    # Until the copy has ended it is still there.
    assert node.device_locks and not rig.cache.tree.uncovered
    settle(rig)
    assert node.host is READY and not node.device_locks
    rig.cache.evict(rig.device.total)
    assert found(rig, LONG) == len(LONG) and device_len(rig, LONG) == 0
    rig.cache.load(node_at(rig, LONG))
    settle(rig)
    assert np.array_equal(content(rig, LONG), kv_of(SCOPE, LONG))


def test_others_leave_the_host_for_it() -> None:
    rig = make_rig(device_pages=8, host_pages=6)
    node = use_the_start(rig)
    crowd(rig)
    rig.cache.unlock(node)
    settle(rig)
    assert node.host is READY and rig.cache.host_pages.used <= 6
    assert_idle(rig)


def test_where_the_host_has_no_room_at_all_the_continuation_goes() -> None:
    rig = make_rig(device_pages=8, host_pages=6)
    node = use_the_start(rig)
    crowd(rig)
    other = node_at(rig, OTHER)
    rig.cache.tree.lock(other, Tier.HOST)
    end = node_at(rig, LONG)
    # Its own end is the only thing that could leave, and is too short.
    rig.cache.tree.lock(end, Tier.HOST, node)
    rig.cache.tree.unlock(end, Tier.HOST, node)
    rig.cache.host_pages.alloc(rig.cache.host_pages.free)
    rig.cache.tree.split(end, PAGE)
    rig.cache.evict_host(2)
    taken = rig.cache.host_pages.alloc(2)
    assert taken is not None and found(rig, LONG) == len(START) + PAGE
    rig.cache.unlock(node)
    # While the device has room for it, it stays as it is.
    assert found(rig, LONG) == len(START) + PAGE and rig.cache.tree.uncovered == [node]
    rig.cache.tree.lock(other, Tier.DEVICE)
    assert rig.cache.evict(PAGE) == PAGE
    rig.cache.tree.unlock(other, Tier.DEVICE)
    assert found(rig, LONG) == 2 * PAGE and node.host is ABSENT
    rig.cache.host_pages.release(taken)
    rig.cache.tree.unlock(other, Tier.HOST)
    assert rig.cache.evict(rig.device.total) == 2 * PAGE + len(OTHER)


@pytest.mark.parametrize("policy", list(WritePolicy))
def test_eviction_frees_what_it_promises_after_a_use(policy: WritePolicy) -> None:
    rig = make_rig(device_pages=8, host_pages=6, write_policy=policy)
    node = use_the_start(rig)
    crowd(rig)
    rig.cache.evict_host(1)
    rig.cache.unlock(node)
    total = rig.cache.tree.evictable_tokens + rig.cache.tree.protected_tokens
    assert rig.cache.evict(rig.device.total) == total
    rig.cache.check()


def test_two_that_end_together_do_not_take_turns_for_ever() -> None:
    rig = make_rig(device_pages=16, host_pages=6)
    node = use_the_start(rig)
    more = prompt(PAGE, 21, 22, 23, 24)
    put(rig, more)
    half = rig.cache.match(SCOPE, more[: 2 * PAGE]).device_node
    rig.cache.lock(half)
    settle(rig)
    rig.cache.evict_host(4)
    rig.cache.unlock(node)
    rig.cache.unlock(half)
    settle(rig)
    assert_idle(rig)


def test_a_damaged_prefix_takes_its_continuation_along() -> None:
    rig = make_rig(device_pages=8, host_pages=6)
    node = use_the_start(rig)
    crowd(rig)
    rig.cache.tree.condemn(node, Doubt.CORRUPT)
    rig.cache.unlock(node)
    settle(rig)
    assert found(rig, LONG) == 0
    rig.cache.check()


def test_a_store_gets_the_continuation_once_the_prefix_has_its_copy_again() -> None:
    shared = SharedStore()
    remote = RemoteConfig(window=4, write_batch=4, write_limit=4)
    rig = make_rig(device_pages=8, host_pages=9, shared=shared, remote=remote)
    tier = rig.cache.remote
    assert tier is not None
    node = use_the_start(rig)
    crowd(rig)
    rig.cache.evict_host(3)
    assert node.host is ABSENT
    for member in rig.cache.tree.subtree(node):
        member.stored = False
        if member.host is READY:
            tier.offer(member)
    shared.pages.clear()
    settle(rig)
    assert not shared.pages, "written without what it continues"
    rig.cache.unlock(node)
    settle(rig)
    assert len(shared.pages) == len(LONG) // PAGE


def test_copies_wait_for_room_while_the_device_is_at_ease() -> None:
    rig, node = waiting_for_room()
    settle(rig)
    assert node.host is ABSENT and not node.device_locks and found(rig, LONG) == len(LONG)
    assert found(rig, OTHER) == len(OTHER)
    # What comes next is in use on the device: its copy can leave for the one that waits.
    held = node_at(rig, OTHER)
    rig.cache.lock(held)
    put(rig, prompt(PAGE, 31, 32, 33, 34))
    settle(rig)
    assert node.host is READY and held.host is ABSENT and held.device is READY
    rig.cache.check()


def test_what_is_new_waits_for_room_too() -> None:
    rig = make_rig(device_pages=12, host_pages=3, ease=0.5)
    to_host(rig, OTHER)
    put(rig, START)
    settle(rig)
    assert node_at(rig, START).host is ABSENT and found(rig, OTHER) == len(OTHER)
    put(rig, prompt(PAGE, 41, 42, 43, 44))
    settle(rig)
    assert node_at(rig, START).host is READY and found(rig, OTHER) == 0


def test_an_eviction_frees_all_that_waits_for_room() -> None:
    rig, node = waiting_for_room()
    assert rig.cache.tree.uncovered == [node]
    total = rig.cache.tree.evictable_tokens
    assert rig.cache.evict(rig.device.total) == total and rig.device.available() == rig.device.total
    rig.cache.check()


def test_an_eviction_copies_down_first_what_waits_for_room() -> None:
    """New pages wait; before they could be lost, they displace the copies of what is in use."""
    rig = make_rig(device_pages=12, host_pages=3, ease=0.25)
    to_host(rig, OTHER)
    assert rig.cache.load(node_at(rig, OTHER)) == len(OTHER)
    held = node_at(rig, OTHER)
    rig.cache.lock(held)
    settle(rig)
    put(rig, START)
    settle(rig)
    assert node_at(rig, START).host is ABSENT
    assert rig.cache.evict(8 * PAGE) == len(START)
    assert held.host is ABSENT and found(rig, START) == len(START) and device_len(rig, START) == 0


def test_an_eviction_waits_as_often_as_copies_lead_to_copies() -> None:
    """The end of one backup uncovers a prefix, whose own backup then holds what was to be evicted."""
    rig = make_rig(device_pages=12, host_pages=7)
    node = use_the_start(rig)
    branch = np.concatenate([START, prompt(PAGE, 9)])
    put(rig, branch)
    rig.cache.flush_backups()
    assert node_at(rig, branch).host is Residency.PENDING
    rig.cache.evict_host(3)
    assert node.host is ABSENT and node.host_children == 2
    rig.cache.unlock(node)
    assert node.device_locks and not rig.cache.tree.uncovered
    assert rig.cache.evict(rig.device.total) == len(branch)
    assert rig.cache.stats.evict_waits == 2
    rig.cache.check()
