"""Which node leaves a tier next, and how much leaves."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from hicache_ext.core.cache import WritePolicy
from hicache_ext.core.page import PrefixScope
from hicache_ext.core.policy import Rank
from hicache_ext.core.policy.index import EvictionIndex
from hicache_ext.core.policy.lru import TierAwareLru
from hicache_ext.core.residency import Residency, Tier
from hicache_ext.core.tree import Node
from tests.core.fakes import Rig, assert_idle, device_len, make_rig, node_at, prompt, put, settle, to_host

PAGE = 4
SCOPE = PrefixScope()


def pages(*numbers: int) -> np.ndarray:
    return prompt(PAGE, *numbers)


def new_step(rig: Rig) -> None:
    rig.cache.tick()


# The index


class Ranked:
    """Nodes whose rank is their stamp; counts how often a rank is read."""

    def __init__(self) -> None:
        self.reads = 0
        self.index = EvictionIndex(self.rank)
        self._next_id = 0

    def rank(self, node: Node) -> Rank:
        self.reads += 1
        return (node.stamp,)

    def node(self, stamp: int) -> Node:
        self._next_id += 1
        return Node(self._next_id, None, SCOPE, pages(1), stamp)

    def add(self, stamp: int) -> Node:
        node = self.node(stamp)
        self.index.add(node)
        return node

    def pop_all(self) -> list[Node]:
        popped = []
        while (node := self.index.pop()) is not None:
            popped.append(node)
        return popped


def test_index_pops_the_lowest_rank_first() -> None:
    ranked = Ranked()
    nodes = [ranked.add(stamp) for stamp in (5, 1, 3, 2, 4)]
    assert [n.stamp for n in ranked.pop_all()] == [1, 2, 3, 4, 5]
    assert len(ranked.index) == 0 and not any(n in ranked.index for n in nodes)


def test_index_breaks_ties_by_node_id_whatever_the_order_of_adding() -> None:
    ranked = Ranked()
    nodes = [ranked.node(1) for _ in range(6)]
    for i in (3, 0, 5, 1, 4, 2):
        ranked.index.add(nodes[i])
    assert ranked.pop_all() == nodes


def test_index_rereads_a_rank_that_rose() -> None:
    ranked = Ranked()
    old, new = ranked.add(1), ranked.add(2)
    old.stamp = 3
    assert ranked.pop_all() == [new, old]


def test_index_takes_a_rank_that_fell_when_told() -> None:
    ranked = Ranked()
    one, other = ranked.add(1), ranked.add(2)
    other.stamp = 0
    ranked.index.add(other)
    assert len(ranked.index) == 2 and ranked.pop_all() == [other, one]


def test_index_forgets_what_is_discarded_and_remembers_what_comes_back() -> None:
    ranked = Ranked()
    one, other = ranked.add(1), ranked.add(2)
    ranked.index.discard(one)
    ranked.index.discard(one)
    assert one not in ranked.index and len(ranked.index) == 1
    one.stamp = 5
    ranked.index.add(one)
    assert ranked.pop_all() == [other, one]


def test_index_does_not_grow_with_what_comes_and_goes() -> None:
    ranked = Ranked()
    nodes = [ranked.add(i) for i in range(10)]
    for _ in range(2000):
        for node in nodes:
            ranked.index.discard(node)
            ranked.index.add(node)
    assert len(ranked.index._heap) < 1100
    assert ranked.pop_all() == nodes


def test_index_work_does_not_grow_with_what_stays() -> None:
    """Kind 11: taking a few out of many candidates looks at few."""
    ranked = Ranked()
    for stamp in range(5000):
        ranked.add(stamp)
    ranked.reads = 0
    assert [ranked.index.pop() is not None for _ in range(3)] == [True] * 3
    assert ranked.reads == 3


# The policy


def node(
    *, stamp: int = 0, waiters: int = 0, device: bool = True, host: Residency = Residency.ABSENT
) -> Node:
    n = Node(1, None, SCOPE, pages(1), stamp)
    n.waiters, n.host = waiters, host
    n.device = Residency.READY if device else Residency.ABSENT
    return n


def test_device_rank_is_queue_then_age_then_cost() -> None:
    rank = TierAwareLru().device_rank
    order = [
        node(stamp=1, host=Residency.READY),
        node(stamp=1, host=Residency.PENDING),
        node(stamp=2, host=Residency.READY),
        node(stamp=2),
        node(stamp=1, waiters=1, host=Residency.READY),
        node(stamp=1, waiters=3),
        node(stamp=2, waiters=1),
    ]
    assert sorted(order, key=rank) == order
    assert all(rank(a) < rank(b) for a, b in pairwise(order))


def test_host_rank_is_queue_then_age_then_whether_the_device_has_it() -> None:
    rank = TierAwareLru().host_rank
    order = [
        node(stamp=1),
        node(stamp=1, device=False),
        node(stamp=2),
        node(stamp=2, device=False),
        node(stamp=1, waiters=1),
        node(stamp=1, waiters=1, device=False),
    ]
    assert all(rank(a) < rank(b) for a, b in pairwise(order))


# Order of eviction in the cache


@pytest.mark.parametrize("policy", list(WritePolicy))
def test_the_least_recently_used_goes_first(policy: WritePolicy) -> None:
    rig = make_rig(write_policy=policy)
    for number in (1, 2, 3):
        put(rig, pages(number))
        new_step(rig)
    rig.cache.match(SCOPE, pages(1))
    rig.cache.evict(PAGE)
    assert [device_len(rig, pages(n)) for n in (1, 2, 3)] == [PAGE, 0, PAGE]
    rig.cache.evict(PAGE)
    assert [device_len(rig, pages(n)) for n in (1, 2, 3)] == [PAGE, 0, 0]


def test_a_look_without_a_touch_does_not_make_it_younger() -> None:
    rig = make_rig()
    for number in (1, 2):
        put(rig, pages(number))
        new_step(rig)
    rig.cache.match(SCOPE, pages(1), touch=False)
    rig.cache.evict(PAGE)
    assert device_len(rig, pages(1)) == 0 and device_len(rig, pages(2)) == PAGE


def test_leaves_go_before_what_they_continue() -> None:
    rig = make_rig()
    put(rig, pages(1))
    put(rig, pages(1, 2))
    put(rig, pages(1, 2, 3))
    for left in (2, 1, 0):
        assert rig.cache.evict(PAGE) == PAGE
        assert device_len(rig, pages(1, 2, 3)) == left * PAGE
        rig.cache.check()


def test_what_becomes_a_leaf_is_ranked_before_what_is_younger() -> None:
    """Freeing several pages at once may not skip the parent of the first victim."""
    rig = make_rig()
    put(rig, pages(1))
    put(rig, pages(1, 2))
    new_step(rig)
    put(rig, pages(9))
    assert rig.cache.evict(2 * PAGE) == 2 * PAGE
    assert device_len(rig, pages(1)) == 0 and device_len(rig, pages(9)) == PAGE


def test_of_two_equally_old_the_one_on_the_host_goes_first() -> None:
    """The one that is nowhere else has the lower node id, so that a tie would take it."""
    rig = make_rig()
    put(rig, pages(1))
    settle(rig)
    rig.cache.evict_host(1)
    put(rig, pages(2))
    settle(rig)
    only_device, on_host = node_at(rig, pages(1)), node_at(rig, pages(2))
    assert only_device.host is Residency.ABSENT and on_host.host is Residency.READY
    assert only_device.id < on_host.id
    rig.cache.match(SCOPE, pages(1))
    rig.cache.match(SCOPE, pages(2))
    rig.cache.evict(PAGE)
    assert (device_len(rig, pages(1)), device_len(rig, pages(2))) == (PAGE, 0)
    assert rig.cache.stats.evicted_lost == 0


def test_a_backup_that_arrives_makes_a_candidate_cheaper() -> None:
    """The rank falls after the node became a candidate: the index has to be told."""
    rig = make_rig()
    put(rig, pages(1))
    put(rig, pages(2))
    one, other = node_at(rig, pages(1)), node_at(rig, pages(2))
    rig.cache.tree.set_host(other, Residency.READY, rig.cache.host_pages.alloc(1))
    rig.cache.evict(PAGE)
    assert one.device is Residency.READY and other.device is Residency.ABSENT


def test_on_the_host_what_the_device_has_goes_first() -> None:
    rig = make_rig(host_pages=2)
    put(rig, pages(1))
    put(rig, pages(2))
    settle(rig)
    rig.cache.match(SCOPE, pages(2), touch=True)
    rig.cache.evict(PAGE)
    rig.cache.match(SCOPE, pages(1), touch=True)
    on_host_only, on_both = node_at(rig, pages(1)), node_at(rig, pages(2))
    assert on_host_only.device is Residency.ABSENT and on_host_only.stamp == on_both.stamp
    assert rig.cache.evict_host(1) == 1
    assert on_both.host is Residency.ABSENT and on_host_only.host is Residency.READY


def test_recomputed_pages_make_their_host_copy_cheaper() -> None:
    """What the device has too costs nothing to drop."""
    rig = make_rig()
    to_host(rig, pages(1))
    to_host(rig, pages(2))
    one, other = node_at(rig, pages(1)), node_at(rig, pages(2))
    for number in (1, 2):
        put(rig, pages(number))
    rig.cache.evict(2 * PAGE)
    put(rig, pages(2))
    assert one.stamp == other.stamp and one.device is Residency.ABSENT
    assert one.id < other.id
    assert rig.cache.evict_host(1) == 1
    assert one.host is Residency.READY and other.host is Residency.ABSENT


# The waiting queue


def test_what_a_queued_request_matched_goes_last() -> None:
    rig = make_rig()
    put(rig, pages(1))
    rig.cache.want("r", SCOPE, pages(1, 7))
    for number in (2, 3):
        new_step(rig)
        put(rig, pages(number))
    rig.cache.evict(2 * PAGE)
    assert [device_len(rig, pages(n)) for n in (1, 2, 3)] == [PAGE, 0, 0]


def test_what_a_queued_request_matched_still_goes_if_nothing_else_is_left() -> None:
    rig = make_rig()
    put(rig, pages(1, 2))
    rig.cache.want("r", SCOPE, pages(1, 2))
    assert rig.cache.evict(2 * PAGE) == 2 * PAGE
    assert rig.device.available() == rig.device.total
    rig.cache.check()


def test_only_what_was_matched_is_protected() -> None:
    rig = make_rig(host_pages=0)
    put(rig, pages(1, 2, 3))
    rig.cache.want("r", SCOPE, pages(1, 2, 9))
    new_step(rig)
    put(rig, pages(4))
    rig.cache.evict(2 * PAGE)
    assert device_len(rig, pages(1, 2, 3)) == 2 * PAGE and device_len(rig, pages(4)) == 0


def test_both_halves_stay_protected_after_a_split() -> None:
    rig = make_rig()
    put(rig, pages(1, 2, 3))
    rig.cache.want("r", SCOPE, pages(1, 2, 3))
    rig.cache.match(SCOPE, pages(1), touch=False)
    assert node_at(rig, pages(1)) is not node_at(rig, pages(1, 2, 3))
    new_step(rig)
    put(rig, pages(4, 5))
    rig.cache.evict(2 * PAGE)
    assert device_len(rig, pages(1, 2, 3)) == 3 * PAGE and device_len(rig, pages(4)) == 0


def test_the_rest_stays_protected_after_the_deepest_part_was_evicted() -> None:
    rig = make_rig(host_pages=0)
    put(rig, pages(1, 2, 3))
    rig.cache.want("r", SCOPE, pages(1, 2, 3))
    rig.cache.evict(PAGE)
    assert device_len(rig, pages(1, 2, 3)) == 2 * PAGE, "the deepest page was to go"
    new_step(rig)
    put(rig, pages(4))
    rig.cache.evict(PAGE)
    assert device_len(rig, pages(1, 2, 3)) == 2 * PAGE and device_len(rig, pages(4)) == 0
    rig.cache.check()


def test_protection_ends_when_the_request_leaves_the_queue() -> None:
    rig = make_rig(host_pages=0)
    put(rig, pages(1, 2))
    for rid in ("a", "b"):
        rig.cache.want(rid, SCOPE, pages(1, 2))
    new_step(rig)
    put(rig, pages(3, 4))
    rig.cache.unwant("a")
    rig.cache.evict(PAGE)
    assert device_len(rig, pages(1, 2)) == 2 * PAGE, "another request still waits for it"
    rig.cache.unwant("b")
    rig.cache.evict(2 * PAGE)
    assert device_len(rig, pages(1, 2)) == 0 and device_len(rig, pages(3, 4)) == PAGE


def test_protection_ends_for_what_is_left_after_the_deepest_part_was_evicted() -> None:
    rig = make_rig()
    put(rig, pages(1, 2, 3))
    rig.cache.want("r", SCOPE, pages(1, 2, 3))
    rig.cache.evict(PAGE)
    rig.cache.unwant("r")
    new_step(rig)
    put(rig, pages(4))
    rig.cache.evict(2 * PAGE)
    assert device_len(rig, pages(1, 2, 3)) == 0 and device_len(rig, pages(4)) == PAGE
    assert_idle(rig)


def test_host_pages_of_a_queued_request_go_last() -> None:
    rig = make_rig()
    to_host(rig, pages(1))
    rig.cache.want("r", SCOPE, pages(1))
    new_step(rig)
    to_host(rig, pages(2))
    assert rig.cache.evict_host(1) == 1
    assert rig.cache.match(SCOPE, pages(1)).host_len == PAGE
    assert rig.cache.match(SCOPE, pages(2)).host_len == 0


# How much goes


@pytest.mark.parametrize("policy", list(WritePolicy))
@pytest.mark.parametrize(
    ("granule", "asked", "freed"),
    [
        (4, 1, 4),
        (4, 4, 4),
        (4, 5, 8),
        (16, 1, 16),
        (16, 17, 20),
        (6, 1, 8),
        (1, 12, 12),
        (4, 999, 40),
        (4, 0, 0),
    ],
)
def test_a_long_run_is_cut_to_what_is_needed(
    policy: WritePolicy, granule: int, asked: int, freed: int
) -> None:
    """At least the granule, whole pages, and the deepest part of the prompt."""
    rig = make_rig(write_policy=policy, evict_granule=granule)
    whole = pages(*range(10))
    put(rig, whole)
    assert rig.cache.evict(asked) == freed
    assert rig.device.available() == rig.device.total - len(whole) + freed
    assert device_len(rig, whole) == len(whole) - freed
    rig.cache.check()


@pytest.mark.parametrize("policy", list(WritePolicy))
def test_several_short_runs_go_if_one_is_not_enough(policy: WritePolicy) -> None:
    rig = make_rig(write_policy=policy)
    for number in (1, 2, 3):
        put(rig, pages(number))
        new_step(rig)
    assert rig.cache.evict(PAGE + 1) == 2 * PAGE
    assert [device_len(rig, pages(n)) for n in (1, 2, 3)] == [0, 0, PAGE]


@pytest.mark.parametrize("policy", list(WritePolicy))
def test_what_earlier_victims_freed_counts(policy: WritePolicy) -> None:
    rig = make_rig(write_policy=policy)
    put(rig, pages(1))
    new_step(rig)
    put(rig, pages(*range(10, 16)))
    assert rig.cache.evict(PAGE + 1) == 2 * PAGE
    assert device_len(rig, pages(*range(10, 16))) == 5 * PAGE


def test_a_negative_shortfall_evicts_nothing() -> None:
    rig = make_rig()
    put(rig, pages(1))
    assert rig.cache.evict(-100) == 0 and device_len(rig, pages(1)) == PAGE


def test_locked_pages_stay_and_the_shortfall_is_told() -> None:
    rig = make_rig()
    put(rig, pages(1))
    put(rig, pages(2))
    held = node_at(rig, pages(1))
    rig.cache.lock(held)
    assert rig.cache.evict(2 * PAGE) == PAGE
    assert device_len(rig, pages(1)) == PAGE
    rig.cache.unlock(held)
    assert rig.cache.evict(PAGE) == PAGE
    assert_idle(rig)


def test_host_eviction_is_cut_to_the_granule_too() -> None:
    rig = make_rig(evict_granule=8)
    to_host(rig, pages(*range(10)))
    assert rig.cache.evict_host(1) == 2
    assert rig.cache.match(SCOPE, pages(*range(10))).host_len == 8 * PAGE
    assert rig.cache.evict_host(3) == 3
    assert rig.cache.evict_host(99) == 5
    assert rig.cache.tree.nodes == 0
    rig.cache.check()


def test_what_earlier_host_victims_freed_counts() -> None:
    rig = make_rig()
    to_host(rig, pages(1))
    new_step(rig)
    to_host(rig, pages(*range(10, 16)))
    assert rig.cache.evict_host(3) == 3
    assert rig.cache.match(SCOPE, pages(*range(10, 16))).host_len == 4 * PAGE


def test_evicted_tokens_are_counted_by_whether_they_are_lost() -> None:
    rig = make_rig()
    to_host(rig, pages(1, 2))
    rig.cache.host_pages.alloc(rig.cache.host_pages.free)
    rig.cache.tree.lock(node_at(rig, pages(1, 2)), Tier.HOST)
    put(rig, pages(3))
    rig.cache.evict(PAGE)
    rig.cache.tree.unlock(node_at(rig, pages(1, 2)), Tier.HOST)
    rig.cache.evict_host(1)
    stats = rig.cache.stats
    assert (stats.evicted_device, stats.evicted_lost, stats.evicted_host) == (3 * PAGE, PAGE, PAGE)
