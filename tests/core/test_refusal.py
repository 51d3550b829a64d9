"""Pages that come back damaged: what is refused, what is kept, and that nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from hicache_ext.core.cache import WritePolicy
from hicache_ext.core.page import PrefixScope
from hicache_ext.core.residency import Doubt, Residency
from hicache_ext.core.tickets import Kind
from hicache_ext.core.tree import Node
from tests.core.fakes import (
    Ranks,
    Rig,
    assert_idle,
    assert_owned_once,
    content,
    host_page,
    kv_of,
    make_rig,
    node_at,
    page_tables,
    prompt,
    put,
    settle,
    to_host,
)

ABSENT, PENDING, READY = Residency.ABSENT, Residency.PENDING, Residency.READY
PAGE = 4
SCOPE = PrefixScope()

both_policies = pytest.mark.parametrize("policy", list(WritePolicy))


def pages(*numbers: int) -> np.ndarray:
    return prompt(PAGE, *numbers)


def found(rig: Rig, tokens: np.ndarray) -> tuple[int, int]:
    """Pages that a lookup finds on the device, and after them on the host only."""
    match = rig.cache.match(SCOPE, tokens, touch=False)
    return match.device_len // PAGE, match.host_len // PAGE


def damage(rig: Rig, tokens: np.ndarray, *indices: int) -> None:
    for index in indices:
        rig.transfers.corrupt(host_page(rig, tokens, index))


def load(rig: Rig, tokens: np.ndarray) -> Node:
    """Queue and start the load of all the host has of ``tokens``; returns the node a request would hold."""
    node = node_at(rig, tokens)
    assert rig.cache.load(node) > 0
    rig.cache.start_loads()
    return node


def held_after_refusal(rig: Rig, tokens: np.ndarray, bad: int) -> Node:
    """A request holds what it loaded, and page ``bad`` of it did not verify."""
    to_host(rig, tokens)
    damage(rig, tokens, bad)
    node = load(rig, tokens)
    rig.cache.lock(node)
    rig.cache.settle_loads(rig.cache.start_loads())
    assert node.doubt is Doubt.CORRUPT and found(rig, tokens) == (bad, 0)
    assert_owned_once(rig)
    return node


def assert_sound(rig: Rig, tokens: np.ndarray, upto: int) -> None:
    """The first ``upto`` pages are on the device as computed, and nothing follows them anywhere."""
    assert found(rig, tokens) == (upto, 0)
    assert content(rig, tokens).tolist() == kv_of(SCOPE, tokens)[: upto * PAGE].tolist()


# One load


@pytest.mark.parametrize("cuts", [(), (1,), (2,), (3,), (1, 2, 3), (1, 3)])
@pytest.mark.parametrize("bad", [(0,), (1,), (2,), (3,), (1, 2), (3, 0), (0, 1, 2, 3)])
def test_kind_corrupt_page_from_a_lower_tier(bad: tuple[int, ...], cuts: tuple[int, ...]) -> None:
    """The first bad page and all after it are refused; all before it is used. In one node or in several."""
    rig = make_rig()
    tokens, first = pages(1, 2, 3, 4), min(bad)
    to_host(rig, tokens)
    for cut in cuts:
        rig.cache.match(SCOPE, tokens[: cut * PAGE])
    assert rig.cache.tree.nodes == len(cuts) + 1
    damage(rig, tokens, *bad)
    load(rig, tokens)
    rig.cache.settle_loads(rig.cache.start_loads())
    assert_sound(rig, tokens, first)
    assert rig.cache.host_pages.used == first, "the bad pages were not removed"
    assert rig.device.available() == rig.device.total - first * PAGE
    assert (rig.cache.stats.loaded, rig.cache.stats.refused) == (first * PAGE, (4 - first) * PAGE)
    assert rig.cache.tree.nodes == len({cut for cut in cuts if cut < first}) + (first > 0)
    assert_idle(rig)


def test_without_damage_nothing_is_refused() -> None:
    rig = make_rig()
    to_host(rig, pages(1, 2, 3))
    load(rig, pages(1, 2, 3))
    settle(rig)
    assert_sound(rig, pages(1, 2, 3), 3)
    assert rig.cache.stats.refused == 0
    assert_idle(rig)


@pytest.mark.parametrize("bad", [1, 2])
def test_pages_are_counted_from_where_the_load_begins(bad: int) -> None:
    """What was on the device before is not part of it."""
    rig = make_rig()
    tokens = pages(0, 1, 2, 3)
    put(rig, pages(0))
    put(rig, tokens)
    settle(rig)
    rig.cache.evict(3 * PAGE)
    assert found(rig, tokens) == (1, 3)
    damage(rig, tokens, bad)
    load(rig, tokens)
    settle(rig)
    assert_sound(rig, tokens, bad)
    assert (rig.cache.stats.loaded, rig.cache.stats.refused) == ((bad - 1) * PAGE, (4 - bad) * PAGE)
    assert_idle(rig)


@pytest.mark.parametrize("apply", [lambda rig: rig.cache.tick(), lambda rig: rig.cache.settle_loads(1)])
def test_a_refusal_is_applied_in_a_tick_or_before_results_are_used(apply: Callable[[Rig], None]) -> None:
    """Not when the copy ends: other ranks do not know of it yet."""
    rig = make_rig()
    to_host(rig, pages(1, 2))
    damage(rig, pages(1, 2), 1)
    node = load(rig, pages(1, 2))
    rig.cache.lock(node)
    rig.transfers.run_load(0)
    assert (node.device, node.doubt) == (PENDING, Doubt.NONE)
    apply(rig)
    assert (node.device, node.doubt) == (READY, Doubt.CORRUPT)
    rig.cache.unlock(node)
    rig.cache.tick()
    assert_idle(rig)


def test_damage_to_a_host_page_harms_nobody_who_has_it_on_the_device() -> None:
    rig = make_rig()
    put(rig, pages(1, 2))
    settle(rig)
    damage(rig, pages(1, 2), 0, 1)
    assert rig.cache.load(node_at(rig, pages(1, 2))) == 0
    settle(rig)
    assert_sound(rig, pages(1, 2), 2)
    assert_idle(rig)


def test_a_sibling_of_what_was_refused_is_not_touched() -> None:
    rig = make_rig()
    for tokens in (pages(1, 2), pages(1, 3), pages(4)):
        put(rig, tokens)
    settle(rig)
    rig.cache.evict(rig.device.total)
    damage(rig, pages(1, 2), 1)
    load(rig, pages(1, 2))
    settle(rig)
    assert (found(rig, pages(1, 2)), found(rig, pages(1, 3)), found(rig, pages(4))) == (
        (1, 0),
        (1, 1),
        (0, 1),
    )
    load(rig, pages(1, 3))
    settle(rig)
    assert_sound(rig, pages(1, 3), 2)
    assert_idle(rig)


def test_what_continues_a_refused_page_on_the_host_goes_too() -> None:
    """It was computed from pages that cannot be had again as they were."""
    rig = make_rig()
    for tokens in (pages(1, 2), pages(1, 3), pages(1, 3, 4)):
        put(rig, tokens)
    settle(rig)
    rig.cache.evict(rig.device.total)
    damage(rig, pages(1), 0)
    load(rig, pages(1, 2))
    settle(rig)
    assert [found(rig, t) for t in (pages(1, 2), pages(1, 3, 4))] == [(0, 0), (0, 0)]
    assert rig.cache.host_pages.used == 0 and rig.cache.tree.nodes == 0
    assert_idle(rig)


@both_policies
def test_what_was_refused_is_computed_again_and_goes_all_the_way(policy: WritePolicy) -> None:
    rig = make_rig(write_policy=policy)
    tokens = pages(1, 2, 3)
    to_host(rig, tokens)
    for bad in (2, 0, 1):
        damage(rig, tokens, bad)
        load(rig, tokens)
        settle(rig)
        assert_sound(rig, tokens, bad)
        to_host(rig, tokens)
        assert found(rig, tokens) == (0, 3)
    load(rig, tokens)
    settle(rig)
    assert_sound(rig, tokens, 3)
    assert rig.cache.stats.refused == 6 * PAGE
    assert_idle(rig)


def test_two_requests_that_wait_for_the_same_load_both_learn_of_it() -> None:
    """The second one found the pages on the device, on their way."""
    rig = make_rig()
    tokens = pages(1, 2, 3)
    to_host(rig, tokens)
    damage(rig, tokens, 1)
    first = load(rig, tokens)
    rig.cache.lock(first)
    other = rig.cache.match(SCOPE, pages(1, 2)).device_node
    rig.cache.lock(other)
    lucky = rig.cache.match(SCOPE, pages(1)).device_node
    rig.cache.lock(lucky)
    assert rig.cache.start_loads() == 1
    rig.cache.settle_loads(1)
    assert [n.doubt for n in (first, other, lucky)] == [Doubt.CORRUPT, Doubt.CORRUPT, Doubt.NONE]
    for node in (first, lucky, other):
        rig.cache.unlock(node)
        assert_owned_once(rig)
    rig.cache.tick()
    assert_sound(rig, tokens, 1)
    assert_idle(rig)


# Who holds refused pages


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_refused_pages_stay_until_their_holders_let_go(bad: int) -> None:
    """A forward pass may still read them; they can be neither found nor reused."""
    rig = make_rig()
    node = held_after_refusal(rig, pages(1, 2, 3), bad)
    rig.cache.lock(node)
    slots = [n.slots for n in rig.cache.tree.path(node)]
    for _ in range(2):
        rig.cache.tick()
        assert [n.slots is s for n, s in zip(rig.cache.tree.path(node), slots, strict=True)]
        assert rig.cache.evict(rig.device.total) == 0
        assert rig.cache.tree.protected_tokens == 3 * PAGE and rig.cache.tree.evictable_tokens == 0
        assert rig.device.available() == rig.device.total - 3 * PAGE
        assert_owned_once(rig)
        rig.cache.unlock(node)
    assert rig.cache.tree.evictable_tokens == 3 * PAGE
    rig.cache.tick()
    assert rig.cache.tree.evictable_tokens == bad * PAGE
    assert rig.device.available() == rig.device.total - bad * PAGE
    assert_sound(rig, pages(1, 2, 3), bad)
    assert_idle(rig)


def test_refused_host_pages_are_free_at_once() -> None:
    """Only the device side is held."""
    rig = make_rig(host_pages=3)
    node = held_after_refusal(rig, pages(1, 2, 3), 1)
    assert rig.cache.host_pages.used == 1 and node.host is ABSENT
    put(rig, pages(7, 8))
    settle(rig)
    assert node_at(rig, pages(7, 8)).host is READY
    rig.cache.unlock(node)
    rig.cache.tick()
    assert_idle(rig)


def test_a_recomputed_prompt_gets_pages_of_its_own() -> None:
    rig = make_rig()
    tokens = pages(1, 2, 3)
    node = held_after_refusal(rig, tokens, 1)
    old = set(np.concatenate([n.slots for n in rig.cache.tree.path(node)][:-1]).tolist())
    row = put(rig, pages(1, 2, 3, 4))
    assert not old & set(row.tolist())
    assert_owned_once(rig)
    assert_sound(rig, pages(1, 2, 3, 4), 4)
    assert node_at(rig, tokens) is not node and node_at(rig, tokens).doubt is Doubt.NONE
    settle(rig)
    assert node_at(rig, pages(1, 2, 3, 4)).host is READY
    rig.cache.unlock(node)
    rig.cache.tick()
    assert_sound(rig, pages(1, 2, 3, 4), 4)
    assert_idle(rig)


def test_the_same_prompt_can_be_refused_while_it_is_still_held_from_before() -> None:
    rig = make_rig()
    held = [held_after_refusal(rig, pages(1, 2, 3), 0) for _ in range(3)]
    assert rig.cache.tree.nodes == 3 and rig.cache.tree.protected_tokens == 9 * PAGE
    for node in (held[1], held[0], held[2]):
        rig.cache.unlock(node)
        rig.cache.tick()
        assert_owned_once(rig)
    assert_idle(rig)


def test_what_was_computed_on_top_of_a_load_is_condemned_with_it() -> None:
    """Published before the load was verified, or by somebody else."""
    rig = make_rig()
    tokens = pages(1, 2)
    to_host(rig, tokens)
    damage(rig, tokens, 1)
    node = load(rig, tokens)
    put(rig, pages(1, 2, 3))
    put(rig, pages(1, 5))
    above, beside = node_at(rig, pages(1, 2, 3)), node_at(rig, pages(1, 5))
    rig.cache.lock(above)
    rig.cache.settle_loads(rig.cache.start_loads())
    assert [n.doubt for n in (node, above, beside)] == [Doubt.CORRUPT, Doubt.CORRUPT, Doubt.NONE]
    assert found(rig, pages(1, 2, 3)) == (1, 0) and found(rig, pages(1, 5)) == (2, 0)
    rig.cache.unlock(above)
    settle(rig)
    assert found(rig, pages(1, 5)) == (2, 0) and rig.cache.host_pages.used == 2
    assert_idle(rig)


# Backups of what was refused


def test_a_backup_in_flight_below_a_refused_page_is_dropped_when_it_ends() -> None:
    rig = make_rig()
    tokens = pages(1, 2)
    to_host(rig, tokens)
    damage(rig, tokens, 0)
    load(rig, tokens)
    put(rig, pages(1, 2, 3))
    rig.cache.flush_backups()
    deepest = node_at(rig, pages(1, 2, 3))
    assert deepest.host is PENDING
    rig.cache.settle_loads(rig.cache.start_loads())
    assert deepest.doubt is Doubt.CORRUPT and found(rig, pages(1, 2, 3)) == (0, 0)
    assert rig.cache.host_pages.used == 3, "the pages above are needed as long as the copy runs"
    assert_owned_once(rig)
    rig.cache.tick()
    assert len(rig.transfers.backup_jobs) == 1
    rig.transfers.run_backup(0)
    rig.cache.tick()
    assert rig.cache.host_pages.used == 0 and rig.device.available() == rig.device.total
    assert_idle(rig)


def test_no_backup_of_condemned_pages_is_started() -> None:
    rig = make_rig()
    to_host(rig, pages(1, 2))
    damage(rig, pages(1, 2), 1)
    load(rig, pages(1, 2))
    put(rig, pages(1, 2, 3))
    node = node_at(rig, pages(1, 2, 3))
    rig.cache.lock(node)
    assert node.backup_queued
    rig.cache.settle_loads(rig.cache.start_loads())
    written = rig.cache.stats.backed_up
    rig.cache.flush_backups()
    assert not rig.transfers.backup_jobs and not rig.cache.pending()
    rig.cache.unlock(node)
    settle(rig)
    assert rig.cache.stats.backed_up == written and rig.cache.host_pages.used == 1
    assert_idle(rig)


def test_condemned_pages_do_not_use_up_what_a_step_may_write() -> None:
    rig = make_rig(backup_limit=PAGE)
    to_host(rig, pages(1))
    damage(rig, pages(1), 0)
    load(rig, pages(1))
    put(rig, pages(1, 2))
    put(rig, pages(7))
    rig.cache.settle_loads(rig.cache.start_loads())
    rig.cache.flush_backups()
    assert node_at(rig, pages(7)).host is PENDING
    settle(rig)
    assert_idle(rig)


@pytest.mark.parametrize("cut", [PAGE, 2 * PAGE])
def test_write_back_does_not_write_condemned_victims(cut: int) -> None:
    rig = make_rig(write_policy=WritePolicy.WRITE_BACK)
    to_host(rig, pages(1))
    damage(rig, pages(1), 0)
    load(rig, pages(1))
    put(rig, pages(1, 2, 3))
    put(rig, pages(7))
    node = node_at(rig, pages(1, 2, 3))
    node_at(rig, pages(7)).stamp = 99
    rig.cache.lock(node)
    rig.cache.settle_loads(rig.cache.start_loads())
    rig.cache.unlock(node)
    before = rig.cache.tickets.last_seq(Kind.BACKUP)
    assert rig.cache.evict(cut) == cut
    assert rig.cache.tickets.last_seq(Kind.BACKUP) == before
    assert rig.cache.stats.evicted_lost == cut
    assert_owned_once(rig)
    assert rig.cache.evict(rig.device.total) == 4 * PAGE - cut
    assert rig.cache.tickets.last_seq(Kind.BACKUP) == before + 1 and found(rig, pages(7)) == (0, 1)
    rig.cache.tick()
    assert rig.cache.host_pages.used == 1
    assert_idle(rig)


# Eviction of what was refused


@both_policies
@pytest.mark.parametrize("asked", [PAGE, 2 * PAGE, 3 * PAGE, 4 * PAGE])
def test_an_eviction_may_cut_a_condemned_node(asked: int, policy: WritePolicy) -> None:
    """Its holder has let go, and space is needed before the next tick."""
    rig = make_rig(write_policy=policy)
    tokens = pages(1, 2, 3, 4)
    node = held_after_refusal(rig, tokens, 1)
    rig.cache.unlock(node)
    assert rig.cache.evict(asked) == asked
    assert found(rig, tokens) == ((1, 0) if asked < 4 * PAGE else (0, 1))
    assert_owned_once(rig)
    rig.cache.tick()
    assert rig.device.available() == rig.device.total - (PAGE if asked < 4 * PAGE else 0)
    assert_idle(rig)


def test_a_condemned_node_is_cut_where_a_holder_of_its_upper_part_ends() -> None:
    """An eviction takes the free end; what is held stays, and goes when it is let go."""
    rig = make_rig()
    tokens = pages(1, 2, 3, 4)
    to_host(rig, tokens)
    damage(rig, tokens, 0)
    node = load(rig, tokens)
    upper = rig.cache.match(SCOPE, pages(1, 2)).device_node
    rig.cache.lock(node)
    rig.cache.lock(upper)
    rig.cache.settle_loads(1)
    rig.cache.unlock(node)
    assert rig.cache.evict(PAGE) == PAGE
    assert upper.slots is not None and rig.cache.tree.protected_tokens == 2 * PAGE
    assert_owned_once(rig)
    rig.cache.tick()
    assert rig.device.available() == rig.device.total - 2 * PAGE
    rig.cache.unlock(upper)
    rig.cache.tick()
    assert_idle(rig)


# Several loads


@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize("second_bad", [None, 2, 3])
def test_a_load_in_flight_below_a_refused_page(second_bad: int | None, started: bool) -> None:
    """It cannot be stopped: what it brings is dropped when it ends, whether it verifies or not."""
    rig = make_rig()
    tokens = pages(1, 2, 3, 4)
    to_host(rig, tokens)
    damage(rig, tokens, 1, *([] if second_bad is None else [second_bad]))
    upper = load(rig, pages(1, 2))
    lower = node_at(rig, tokens)
    assert rig.cache.load(lower) == 2 * PAGE
    rig.cache.lock(lower)
    if started:
        assert rig.cache.start_loads() == 2
    rig.transfers.run_load(0)
    rig.cache.settle_loads(1)
    assert [n.doubt for n in (upper, lower)] == [Doubt.CORRUPT] * 2 and lower.device is PENDING
    assert found(rig, tokens) == (1, 0)
    assert rig.cache.host_pages.used == 4 and rig.cache.tree.host_tokens == 4 * PAGE
    assert_owned_once(rig)
    put(rig, pages(1, 2))
    rig.cache.settle_loads(rig.cache.start_loads())
    assert_owned_once(rig)
    assert lower.doubt is Doubt.CORRUPT and rig.cache.host_pages.used == 1
    rig.cache.unlock(lower)
    rig.cache.tick()
    assert_sound(rig, tokens, 2)
    settle(rig)
    assert_idle(rig)


def test_settling_several_loads_with_bad_pages_in_two_of_them() -> None:
    rig = make_rig()
    prompts = [pages(10 * n, 10 * n + 1, 10 * n + 2) for n in range(1, 5)]
    for tokens in prompts:
        to_host(rig, tokens)
    for number, bad in ((1, 2), (3, 0)):
        damage(rig, prompts[number], bad)
    for tokens in prompts:
        load(rig, tokens)
    assert rig.cache.start_loads() == 4
    rig.cache.settle_loads(4)
    for tokens, sound in zip(prompts, (3, 2, 3, 0), strict=True):
        assert_sound(rig, tokens, sound)
    assert (rig.cache.stats.loaded, rig.cache.stats.refused) == (8 * PAGE, 4 * PAGE)
    assert_idle(rig)


def test_settling_up_to_a_load_before_one_that_fails() -> None:
    rig = make_rig()
    for number in (1, 2, 3):
        to_host(rig, pages(number))
    damage(rig, pages(2), 0)
    for number in (1, 2, 3):
        load(rig, pages(number))
    rig.cache.settle_loads(1)
    assert [found(rig, pages(n)) for n in (1, 2, 3)] == [(1, 0), (1, 0), (1, 0)]
    assert rig.cache.start_loads() == 3
    rig.cache.settle_loads(3)
    assert [found(rig, pages(n)) for n in (1, 2, 3)] == [(1, 0), (0, 0), (1, 0)]
    assert_idle(rig)


def test_a_tick_applies_one_refusal_and_the_next_one_later() -> None:
    rig = make_rig()
    for number in (1, 2, 3):
        to_host(rig, pages(number))
    for number in (1, 2):
        damage(rig, pages(number), 0)
    for number in (1, 2, 3):
        load(rig, pages(number))
    rig.transfers.drain()
    refused = []
    for _ in range(4):
        rig.cache.tick()
        refused.append((rig.cache.stats.refused // PAGE, rig.cache.stats.loaded // PAGE))
        assert_owned_once(rig)
    assert refused == [(1, 0), (2, 0), (2, 1), (2, 1)]
    assert_idle(rig)


def test_loads_that_end_in_another_order_are_applied_in_theirs() -> None:
    rig = make_rig()
    for number in (1, 2, 3):
        to_host(rig, pages(number))
    damage(rig, pages(2), 0)
    for number in (1, 2, 3):
        load(rig, pages(number))
    for index in (2, 1, 0):
        rig.cache.tick()
        assert rig.cache.stats.refused == rig.cache.stats.loaded == 0
        rig.transfers.run_load(index)
    rig.cache.tick()
    rig.cache.tick()
    assert [found(rig, pages(n)) for n in (1, 2, 3)] == [(1, 0), (0, 0), (1, 0)]
    assert_idle(rig)


# The waiting queue


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("bad", [0, 1])
def test_who_waits_for_refused_pages_waits_for_what_is_left(bad: int, held: bool) -> None:
    rig = make_rig()
    tokens = pages(1, 2, 3)
    to_host(rig, tokens)
    damage(rig, tokens, bad)
    for rid in ("a", "b"):
        rig.cache.want(rid, SCOPE, tokens)
    node = load(rig, tokens)
    if held:
        rig.cache.lock(node)
    rig.cache.settle_loads(1)
    rig.cache.check()
    if held:
        rig.cache.unwant("b")
        rig.cache.check()
        rig.cache.unlock(node)
        rig.cache.tick()
    kept = node_at(rig, tokens)
    assert kept.waiters == (0 if not bad else 1 if held else 2)
    assert set(rig.cache.tree.waiting.values()) == ({kept} if bad else set())
    rig.cache.want("a", SCOPE, tokens)
    rig.cache.check()
    for rid in ("a", "b"):
        rig.cache.unwant(rid)
    assert_idle(rig)


def test_waiting_for_condemned_pages_does_not_keep_them() -> None:
    rig = make_rig()
    tokens = pages(1, 2)
    to_host(rig, tokens)
    rig.cache.want("r", SCOPE, tokens)
    damage(rig, tokens, 0)
    load(rig, tokens)
    rig.cache.settle_loads(1)
    assert rig.cache.tree.nodes == 0 and rig.device.available() == rig.device.total
    rig.cache.unwant("r")
    assert_idle(rig)


# A handle of before


def test_loading_by_a_handle_to_pages_that_were_refused_since_loads_nothing() -> None:
    rig = make_rig()
    for tokens in (pages(1, 2), pages(1, 3)):
        put(rig, tokens)
    settle(rig)
    rig.cache.evict(rig.device.total)
    damage(rig, pages(1), 0)
    stale = node_at(rig, pages(1, 3))
    load(rig, pages(1, 2))
    rig.cache.settle_loads(1)
    assert rig.cache.load(stale) == 0 and rig.cache.start_loads() == -1
    assert_idle(rig)


def test_a_request_that_left_before_its_load_was_refused_leaves_nothing() -> None:
    rig = make_rig()
    to_host(rig, pages(1, 2))
    damage(rig, pages(1, 2), 1)
    node = load(rig, pages(1, 2))
    rig.cache.lock(node)
    rig.cache.unlock(node)
    for _ in range(2):
        rig.transfers.drain()
        rig.cache.tick()
    assert_sound(rig, pages(1, 2), 1)
    assert_idle(rig)


# Several ranks


@pytest.fixture
def three_ranks() -> Iterator[Ranks]:
    ranks = Ranks(3, lambda reduce: make_rig(reduce=reduce))
    yield ranks
    ranks.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("bad_on", [0, 1, 2])
def test_kind_rank_divergent_hits_a_page_bad_on_one_rank_is_refused_on_all(
    three_ranks: Ranks, bad_on: int
) -> None:
    ranks, tokens = three_ranks, pages(1, 2, 3)
    ranks.each(lambda rig: to_host(rig, tokens))
    damage(ranks.rigs[bad_on], tokens, 1)
    ranks.each(lambda rig: rig.cache.lock(load(rig, tokens)))
    ranks.rigs[0].transfers.drain()
    assert ranks.same(lambda rig: rig.cache.start_loads()) == 1
    ranks.each(lambda rig: rig.cache.settle_loads(1))
    assert ranks.same(lambda rig: found(rig, tokens)) == (1, 0)
    assert ranks.same(lambda rig: [int(n.doubt) for n in rig.cache.tree.walk()]) == [0, int(Doubt.CORRUPT)]
    ranks.same(page_tables)
    ranks.each(assert_owned_once)
    for rig in ranks.rigs:
        (node,) = [n for n in rig.cache.tree.walk() if n.doubt is Doubt.CORRUPT]
        rig.cache.unlock(node)
    ranks.each(lambda rig: rig.cache.tick())
    ranks.each(lambda rig: assert_sound(rig, tokens, 1))
    ranks.each(assert_idle)


@pytest.mark.timeout(60)
def test_kind_rank_divergent_hits_ranks_with_bad_pages_of_their_own(three_ranks: Ranks) -> None:
    """Different pages of one load: the first of any rank. Different loads: each of them."""
    ranks = three_ranks
    prompts = [pages(1, 2, 3), pages(4, 5, 6), pages(7, 8, 9)]
    for tokens in prompts:
        ranks.each(lambda rig, t=tokens: to_host(rig, t))  # type: ignore[misc]
    first, second, third = ranks.rigs
    damage(first, prompts[0], 2)
    damage(second, prompts[0], 1)
    damage(third, prompts[1], 0)
    damage(first, prompts[2], 2)
    for tokens in prompts:
        ranks.each(lambda rig, t=tokens: load(rig, t).id)  # type: ignore[misc]
    second.transfers.run_load(2)
    ranks.each(lambda rig: rig.cache.settle_loads(3))
    for tokens, sound in zip(prompts, (1, 0, 2), strict=True):
        ranks.each(lambda rig, t=tokens, n=sound: assert_sound(rig, t, n))  # type: ignore[misc]
    ranks.same(page_tables)
    ranks.each(assert_idle)


@pytest.mark.timeout(60)
def test_kind_rank_divergent_hits_what_a_batch_waits_for_is_the_same(three_ranks: Ranks) -> None:
    """However far the copies of a rank are: posted, not posted, or refused on this rank only."""
    ranks = three_ranks
    for number in (1, 2):
        ranks.each(lambda rig, n=number: to_host(rig, pages(n)))  # type: ignore[misc]
    damage(ranks.rigs[2], pages(1), 0)
    seen = []
    for number in (1, 2):
        ranks.each(lambda rig, n=number: rig.cache.load(node_at(rig, pages(n))))  # type: ignore[misc]
        seen.append(ranks.same(lambda rig: rig.cache.start_loads()))
    for rank, count in enumerate((0, 1, 2)):
        for _ in range(count):
            ranks.rigs[rank].transfers.run_load(0)
        ranks.each(lambda rig: rig.cache.tick())
        seen.append(ranks.same(lambda rig: rig.cache.start_loads()))
    for rank, count in enumerate((2, 1, 0)):
        for _ in range(count):
            ranks.rigs[rank].transfers.run_load(0)
        ranks.each(lambda rig: rig.cache.tick())
        seen.append(ranks.same(lambda rig: rig.cache.start_loads()))
    assert seen == [1, 2, 2, 2, 2, 2, -1, -1]
    assert ranks.same(lambda rig: (rig.cache.stats.loaded, rig.cache.stats.refused)) == (PAGE, PAGE)
    ranks.each(assert_idle)
