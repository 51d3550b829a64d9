"""The radix tree: matching, growth, splits, locks, the waiting queue, and that ``check`` sees corruption."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import numpy as np
import pytest

from hicache_ext.core.page import PrefixScope
from hicache_ext.core.policy.lru import TierAwareLru
from hicache_ext.core.residency import Doubt, Residency, Tier
from hicache_ext.core.tickets import Kind, TicketBook
from hicache_ext.core.tree import Node, TieredRadixTree
from tests.core.fakes import prompt, toks

ABSENT, PENDING, READY = Residency.ABSENT, Residency.PENDING, Residency.READY
SCOPE = PrefixScope()

page_sizes = pytest.mark.parametrize("page", [1, 4, 16])


def make(page: int) -> TieredRadixTree:
    return TieredRadixTree(page, TierAwareLru(), namespace=b"space")


def grow(tree: TieredRadixTree, tokens: np.ndarray, scope: PrefixScope = SCOPE, first_slot: int = 0) -> Node:
    return tree.insert(scope, tokens, np.arange(first_slot, first_slot + len(tokens))).node


def to_host(tree: TieredRadixTree, node: Node, first_page: int = 0) -> None:
    pages = np.arange(first_page, first_page + len(node) // tree.page_size)
    tree.set_host(node, READY, pages)


def path_slots(tree: TieredRadixTree, node: Node) -> list[int]:
    return np.concatenate([n.slots for n in tree.path(node)][::-1]).tolist()


# Matching


@page_sizes
def test_an_empty_tree_matches_nothing(page: int) -> None:
    tree = make(page)
    for tokens in (np.empty(0, np.int64), prompt(page, 1)):
        match = tree.match(SCOPE, tokens)
        assert (match.device_len, match.host_len) == (0, 0)
        assert match.device_node is match.host_node is tree.root


@page_sizes
def test_only_whole_pages_match(page: int) -> None:
    tokens = prompt(page, 1, 2, 3)
    longer = np.append(tokens, [-1] * (page + 1))
    for length in range(len(longer) + 1):
        tree = make(page)
        grow(tree, tokens)
        match = tree.match(SCOPE, longer[:length])
        assert match.device_len == min(length, len(tokens)) // page * page
        assert (
            path_slots(tree, match.device_node) == list(range(match.device_len)) if length >= page else True
        )
        tree.check()


@page_sizes
def test_a_page_matches_only_if_all_of_it_is_equal(page: int) -> None:
    tokens = prompt(page, 1, 2, 3)
    for position in range(len(tokens)):
        tree = make(page)
        grow(tree, tokens)
        other = tokens.copy()
        other[position] = -1
        assert tree.match(SCOPE, other).device_len == position // page * page
        tree.check()


@page_sizes
def test_match_returns_the_deepest_node_and_its_slots(page: int) -> None:
    tree = make(page)
    grow(tree, prompt(page, 1, 2), first_slot=100)
    node = grow(tree, prompt(page, 1, 2, 3), first_slot=500)
    match = tree.match(SCOPE, prompt(page, 1, 2, 3, 4))
    assert match.device_node is match.host_node is node
    slots = [*range(100, 100 + 2 * page), *range(500 + 2 * page, 500 + 3 * page)]
    assert path_slots(tree, node) == slots


def test_match_continues_on_the_host_and_says_where_the_device_ends() -> None:
    tree = make(4)
    upper, lower = grow(tree, prompt(4, 1)), grow(tree, prompt(4, 1, 2, 3))
    to_host(tree, upper)
    to_host(tree, lower, 1)
    tree.set_device(lower, ABSENT)
    match = tree.match(SCOPE, prompt(4, 1, 2, 3, 4))
    assert (match.device_len, match.host_len) == (4, 8)
    assert match.device_node is upper and match.host_node is lower
    cut = tree.match(SCOPE, prompt(4, 1, 2, 9))
    assert (cut.device_len, cut.host_len) == (4, 4) and cut.host_node is lower.parent
    tree.check()


def test_pages_still_on_their_way_to_the_host_do_not_match_there() -> None:
    tree = make(4)
    node = grow(tree, prompt(4, 1))
    tree.set_host(node, PENDING, np.arange(1))
    node.device, node.slots = (
        ABSENT,
        None,
    )  # no sequence of calls leads here: what matters is that it is a miss
    assert tree.match(SCOPE, prompt(4, 1)).host_len == 0


def test_pages_being_loaded_match_on_the_device() -> None:
    tree = make(4)
    node = grow(tree, prompt(4, 1))
    to_host(tree, node)
    tree.set_device(node, ABSENT)
    tree.set_device(node, PENDING, np.arange(4))
    match = tree.match(SCOPE, prompt(4, 1))
    assert (match.device_len, match.host_len) == (4, 0)


def test_match_touches_the_path_unless_told_not_to() -> None:
    tree = make(4)
    upper, lower, other = (
        grow(tree, prompt(4, 1)),
        grow(tree, prompt(4, 1, 2)),
        grow(tree, prompt(4, 1, 3)),
    )
    tree.clock = 7
    tree.match(SCOPE, prompt(4, 1, 2), touch=False)
    assert [n.stamp for n in (upper, lower, other)] == [0, 0, 0]
    tree.match(SCOPE, prompt(4, 1, 2))
    assert [n.stamp for n in (upper, lower, other)] == [7, 7, 0]


def test_match_touches_only_the_matched_part_of_a_node() -> None:
    tree = make(4)
    node = grow(tree, prompt(4, 1, 2))
    tree.clock = 7
    half = tree.match(SCOPE, prompt(4, 1)).device_node
    assert (half.stamp, node.stamp) == (7, 0)


# Growth


@page_sizes
def test_insert_takes_over_only_what_is_new(page: int) -> None:
    tree = make(page)
    first = tree.insert(SCOPE, prompt(page, 1, 2), np.arange(2 * page))
    assert (first.matched, [len(n) for n in first.added]) == (0, [2 * page])
    again = tree.insert(SCOPE, prompt(page, 1, 2), np.arange(50, 50 + 2 * page))
    assert (again.matched, again.added, again.node) == (2 * page, [], first.node)
    more = tree.insert(SCOPE, prompt(page, 1, 2, 3), np.arange(100, 100 + 3 * page))
    assert more.matched == 2 * page and more.added == [more.node]
    assert path_slots(tree, more.node) == [*range(2 * page), *range(100 + 2 * page, 100 + 3 * page)]
    assert tree.evictable_tokens == 3 * page
    tree.check()


@page_sizes
def test_prompts_that_part_share_a_node(page: int) -> None:
    tree = make(page)
    one = grow(tree, prompt(page, 1, 2, 3))
    done = tree.insert(SCOPE, prompt(page, 1, 2, 4), np.arange(100, 100 + 3 * page))
    assert done.matched == 2 * page
    assert done.node.parent is one.parent is not tree.root
    assert (len(one), len(done.node), tree.nodes) == (page, page, 3)
    tree.check()


@page_sizes
def test_a_prefix_of_something_cached_adds_nothing(page: int) -> None:
    tree = make(page)
    node = grow(tree, prompt(page, 1, 2, 3))
    done = tree.insert(SCOPE, prompt(page, 1), np.arange(100, 100 + page))
    assert (done.matched, done.added) == (page, []) and done.node is node.parent
    tree.check()


def test_insert_gives_device_pages_to_what_is_only_on_the_host() -> None:
    tree = make(4)
    node = grow(tree, prompt(4, 1, 2, 3))
    to_host(tree, node)
    tree.set_device(node, ABSENT)
    done = tree.insert(SCOPE, prompt(4, 1, 2), np.arange(100, 108))
    assert done.matched == 0 and done.added == [node.parent]
    assert path_slots(tree, done.node) == list(range(100, 108))
    assert node.device is ABSENT and node.host is done.node.host is READY
    tree.check()


def test_slots_past_the_tokens_stay_with_the_caller() -> None:
    """A request's row is longer than its whole pages."""
    tree = make(4)
    grow(tree, prompt(4, 1))
    done = tree.insert(SCOPE, prompt(4, 1, 2), np.arange(100, 111))
    assert done.node.slots.tolist() == [104, 105, 106, 107] and tree.evictable_tokens == 8


def test_insert_touches_the_path() -> None:
    tree = make(4)
    upper = grow(tree, prompt(4, 1))
    tree.clock = 7
    assert upper.stamp == 0
    lower = grow(tree, prompt(4, 1, 2))
    assert (upper.stamp, lower.stamp) == (7, 7)


def test_space_of_the_wrong_size_is_noticed() -> None:
    tree = make(4)
    node = grow(tree, prompt(4, 1, 2))
    with pytest.raises(AssertionError):
        tree.set_host(node, READY, np.arange(1))
    other = grow(make(4), prompt(4, 1, 2))
    other.device, other.slots = ABSENT, None
    with pytest.raises(AssertionError):
        tree.set_device(other, READY, np.arange(4))


def test_insert_keeps_no_view_of_the_callers_buffers() -> None:
    tree = make(4)
    tokens, slots = prompt(4, 1, 2), np.arange(8)
    node = tree.insert(SCOPE, tokens, slots).node
    tree.split(node, 4)
    tokens[:], slots[:] = -1, -1
    assert node.tokens.tolist() == prompt(4, 2).tolist() and node.slots.tolist() == [4, 5, 6, 7]
    for array in (node.tokens, node.slots):
        assert array.base is None, "a run keeps a larger buffer alive"
    tree.check()


@pytest.mark.parametrize("length", [1, 5])
def test_a_partial_page_is_never_inserted(length: int) -> None:
    with pytest.raises(AssertionError):
        make(4).insert(SCOPE, np.arange(length), np.arange(length))


def test_clear_forgets_everything() -> None:
    tree = make(4)
    node = grow(tree, prompt(4, 1, 2))
    to_host(tree, node)
    tree.want("r", node)
    tree.clear()
    assert (tree.evictable_tokens, tree.protected_tokens, tree.host_tokens, tree.nodes) == (0, 0, 0, 0)
    assert not tree.waiting and tree.match(SCOPE, prompt(4, 1)).device_len == 0
    tree.check()


# Scopes


SCOPES = [
    PrefixScope(),
    PrefixScope(extra_key="ab"),
    PrefixScope(cache_salt="ab"),
    PrefixScope(lora="ab"),
    PrefixScope(extra_key="a", cache_salt="b"),
    PrefixScope(extra_key="a", lora="b"),
    PrefixScope(cache_salt="a", lora="b"),
]


@page_sizes
def test_scopes_share_nothing(page: int) -> None:
    """Also not when the text of one is the text of another, cut in other places."""
    tokens = prompt(page, 1, 2)
    for one, other in permutations(SCOPES, 2):
        tree = make(page)
        grow(tree, tokens, one)
        assert tree.match(other, tokens).device_len == 0, (one, other)
        done = tree.insert(other, tokens, np.arange(100, 100 + len(tokens)))
        assert done.matched == 0 and tree.match(one, tokens).device_node is not done.node
        assert not set(tree.identities(done.node)) & set(tree.identities(tree.match(one, tokens).host_node))
        tree.check()


def test_scopes_survive_splits_and_pruning() -> None:
    tree = make(4)
    nodes = [grow(tree, prompt(4, 1, 2), scope, 100 * i) for i, scope in enumerate(SCOPES)]
    for i, scope in enumerate(SCOPES):
        assert path_slots(tree, tree.match(scope, prompt(4, 1)).device_node) == [*range(100 * i, 100 * i + 4)]
    tree.check()
    for node in nodes[1:]:
        upper = node.parent
        assert upper is not None
        for member in (node, upper):
            tree.set_device(member, ABSENT)
            tree.prune(member)
    assert [tree.match(s, prompt(4, 1, 2)).device_len for s in SCOPES] == [8, 0, 0, 0, 0, 0, 0]
    tree.check()


# Splits


@page_sizes
def test_split_keeps_the_callers_node_as_the_deeper_half(page: int) -> None:
    tree = make(page)
    node = grow(tree, prompt(page, 1, 2, 3), first_slot=10)
    leaf = grow(tree, prompt(page, 1, 2, 3, 4), first_slot=100)
    to_host(tree, node, 20)
    node.stamp = 5
    all_identities = list(tree.identities(node))
    upper = tree.split(node, page)
    assert (node.parent, leaf.parent, upper.parent) == (upper, node, tree.root)
    assert upper.tokens.tolist() == prompt(page, 1).tolist()
    assert node.tokens.tolist() == prompt(page, 2, 3).tolist()
    assert upper.slots.tolist() + node.slots.tolist() == list(range(10, 10 + 3 * page))
    assert upper.pages is not None and node.pages is not None
    assert upper.pages.tolist() == [20] and node.pages.tolist() == [21, 22]
    assert upper.identities == all_identities[:1] and node.identities == all_identities[1:]
    assert upper.stamp == node.stamp == 5
    assert (upper.device, upper.host) == (READY, READY)
    tree.check()


@page_sizes
def test_split_files_both_halves_under_their_first_pages(page: int) -> None:
    tree = make(page)
    for above in (tree.root, grow(tree, prompt(page, 9))):
        before = [] if above is tree.root else [9]
        node = grow(tree, prompt(page, *before, 1, 2, 3))
        lower = grow(tree, prompt(page, *before, 1, 2, 3, 4))
        upper = tree.split(node, page)
        middle = tree.split(node, page)
        for parent, child in ((above, upper), (upper, middle), (middle, node), (node, lower)):
            assert parent.children[child.key] is child
            assert child.key == tree._key(parent, SCOPE, child.tokens, 0)
        assert len({n.key for n in (upper, middle, node, lower)}) == 4
        tree.check()


def test_split_inherits_locks_of_both_tiers() -> None:
    tree = make(4)
    node = grow(tree, prompt(4, 1, 2))
    to_host(tree, node)
    tree.lock(node, Tier.DEVICE)
    tree.lock(node, Tier.DEVICE)
    tree.lock(node, Tier.HOST)
    upper = tree.split(node, 4)
    assert (upper.device_locks, upper.host_locks) == (node.device_locks, node.host_locks) == (2, 1)
    tree.check()
    tree.unlock(node, Tier.DEVICE)
    tree.unlock(node, Tier.DEVICE)
    tree.unlock(node, Tier.HOST)
    assert (upper.device_locks, upper.host_locks) == (0, 0)
    assert (tree.protected_tokens, tree.evictable_tokens) == (0, 8)
    tree.check()


def test_split_inherits_waiters_and_leaves_the_request_at_the_deeper_half() -> None:
    tree = make(4)
    node = grow(tree, prompt(4, 1, 2))
    tree.want("r", node)
    upper = tree.split(node, 4)
    assert (upper.waiters, node.waiters) == (1, 1)
    assert tree.waiting == {"r": node} and (upper.waiting, node.waiting) == (set(), {"r"})
    tree.check()
    tree.unwant("r")
    assert (upper.waiters, node.waiters) == (0, 0)
    tree.check()


@pytest.mark.parametrize("kind", list(Kind))
def test_split_keeps_both_halves_in_their_ticket_upper_first(kind: Kind) -> None:
    tree = make(4)
    book = TicketBook(tree)
    above, node = grow(tree, prompt(4, 0)), grow(tree, prompt(4, 0, 1, 2))
    to_host(tree, above, 5)
    if kind is Kind.BACKUP:
        tree.set_host(node, PENDING, np.arange(2))
    else:
        to_host(tree, node)
    if kind is Kind.LOAD:
        tree.set_device(node, ABSENT)
        tree.set_device(node, PENDING, np.arange(8))
    ticket = book.begin(kind, [node], [node])
    upper = tree.split(node, 4)
    assert ticket.nodes == [upper, node] and upper.tickets == node.tickets == [ticket]
    tree.check()
    book.check()
    book.commit(ticket)
    assert {n.device for n in (upper, node)} == {n.host for n in (upper, node)} == {READY}
    assert all((n.device_locks, n.host_locks, n.tickets) == (0, 0, []) for n in tree.walk())
    tree.check()
    book.check()


@pytest.mark.parametrize("length", [0, 2, 8])
def test_split_only_between_pages_and_inside_the_run(length: int) -> None:
    tree = make(4)
    node = grow(tree, prompt(4, 1, 2))
    with pytest.raises(AssertionError):
        tree.split(node, length)


# Runs that come from elsewhere onto the host


def names(count: int) -> list[bytes]:
    return [bytes([n]) * 16 for n in range(count)]


def pages_of(node: Node) -> list[int]:
    assert node.pages is not None
    return node.pages.tolist()


@pytest.mark.parametrize("page", [1, 4])
def test_insert_host_puts_a_run_below_what_is_on_the_host(page: int) -> None:
    tree = make(page)
    above = grow(tree, prompt(page, 1))
    to_host(tree, above, 9)
    node, spare = tree.insert_host(above, SCOPE, prompt(page, 2, 3), np.array([4, 2]), names(2))
    assert node.parent is above and pages_of(node) == [4, 2] and len(spare) == 0
    assert (node.device, node.host, node.stored, node.start) == (ABSENT, READY, True, page)
    assert node.identities == names(2) and tree.host_tokens == 3 * page
    match = tree.match(SCOPE, prompt(page, 1, 2, 3))
    assert (match.device_len, match.host_len, match.host_node) == (page, 2 * page, node)
    assert node in tree.candidates[Tier.HOST] and above not in tree.candidates[Tier.HOST]
    tree.check()


def test_insert_host_below_the_root_is_filed_under_its_scope() -> None:
    tree = make(4)
    scope = PrefixScope(lora="a")
    node, _ = tree.insert_host(tree.root, scope, prompt(4, 1), np.array([0]), names(1))
    assert tree.match(SCOPE, prompt(4, 1)).host_len == 0
    assert tree.match(scope, prompt(4, 1)).host_node is node
    tree.check()


def test_insert_host_takes_only_what_the_host_lacks() -> None:
    """Of six pages one is on the host, two are on the device only, one is on its way down, two are new."""
    tree = make(1)
    for count in (1, 3, 4):
        grow(tree, toks(*range(count)))
    nodes = list(tree.walk())
    to_host(tree, nodes[0], 90)
    pages = np.arange(10, 16)
    tree.set_host(nodes[1], PENDING, np.array([91, 92]))
    book = TicketBook(tree)
    ticket = book.begin(Kind.BACKUP, [nodes[1]], [nodes[1]])
    node, spare = tree.insert_host(tree.root, SCOPE, toks(*range(6)), pages, names(6))
    assert spare.tolist() == [10, 11, 12]
    assert pages_of(nodes[2]) == [13] and nodes[2].identities == names(6)[3:4] and nodes[2].stored
    assert pages_of(node) == [14, 15] and node.parent is nodes[2]
    assert not nodes[0].stored and not nodes[1].stored
    tree.check()
    book.check()
    book.commit(ticket)
    tree.check()


def test_insert_host_splits_where_prompts_part_or_the_run_ends() -> None:
    tree = make(1)
    whole = grow(tree, toks(1, 2, 3, 4))
    node, spare = tree.insert_host(tree.root, SCOPE, toks(1, 2), np.array([5, 6]), names(2))
    assert node.tokens.tolist() == [1, 2] and whole.tokens.tolist() == [3, 4] and len(spare) == 0
    assert (node.host, whole.host) == (READY, ABSENT)
    other, spare = tree.insert_host(node, SCOPE, toks(3, 9), np.array([7, 8]), names(2))
    between = other.parent
    assert between is not None and between.tokens.tolist() == [3] and other.tokens.tolist() == [9]
    assert between.device is READY and other.device is ABSENT
    tree.check()


def test_insert_host_of_nothing_changes_nothing() -> None:
    tree = make(4)
    node = grow(tree, prompt(4, 1))
    to_host(tree, node)
    got, spare = tree.insert_host(node, SCOPE, toks(), np.empty(0, np.int64), [])
    assert got is node and len(spare) == 0 and tree.nodes == 1


def test_insert_host_keeps_no_view_of_the_callers_buffers() -> None:
    tree = make(1)
    tokens, pages = toks(1, 2), np.array([3, 4])
    node, _ = tree.insert_host(tree.root, SCOPE, tokens, pages, names(2))
    tokens[:] = pages[:] = 9
    assert node.tokens.tolist() == [1, 2] and pages_of(node) == [3, 4]


def test_insert_host_needs_its_parent_on_the_host_and_a_page_for_each() -> None:
    tree = make(4)
    node = grow(tree, prompt(4, 1))
    with pytest.raises(AssertionError):
        tree.insert_host(node, SCOPE, prompt(4, 2), np.array([0]), names(1))
    to_host(tree, node)
    with pytest.raises(AssertionError):
        tree.insert_host(node, SCOPE, prompt(4, 2, 3), np.array([0]), names(1))


def test_what_the_device_may_copy_down_again_needs_no_second_writing() -> None:
    tree = make(4)
    node, _ = tree.insert_host(tree.root, SCOPE, prompt(4, 1), np.array([0]), names(1))
    tree.insert(SCOPE, prompt(4, 1), np.arange(4))
    tree.set_host(node, ABSENT)
    assert node.stored and node.device is READY
    tree.check()


# Locks and sizes


def test_a_lock_covers_the_path_and_moves_its_tokens_at_once() -> None:
    tree = make(4)
    upper, lower, other = (
        grow(tree, prompt(4, 1)),
        grow(tree, prompt(4, 1, 2, 3)),
        grow(tree, prompt(4, 1, 4)),
    )
    tree.lock(lower, Tier.DEVICE)
    assert (upper.device_locks, lower.device_locks, other.device_locks) == (1, 1, 0)
    assert (tree.protected_tokens, tree.evictable_tokens) == (12, 4)
    tree.lock(upper, Tier.DEVICE)
    tree.unlock(lower, Tier.DEVICE)
    assert (tree.protected_tokens, tree.evictable_tokens) == (4, 12)
    assert lower in tree.candidates[Tier.DEVICE] and upper not in tree.candidates[Tier.DEVICE]
    tree.check()
    tree.unlock(upper, Tier.DEVICE)
    assert (tree.protected_tokens, tree.evictable_tokens) == (0, 16)
    tree.check()


def test_a_host_lock_keeps_pages_from_being_dropped() -> None:
    tree = make(4)
    node = grow(tree, prompt(4, 1))
    to_host(tree, node)
    tree.lock(node, Tier.HOST)
    assert node not in tree.candidates[Tier.HOST]
    with pytest.raises(AssertionError):
        tree.set_host(node, ABSENT)


def test_what_is_not_in_a_tier_cannot_be_locked_there() -> None:
    tree = make(4)
    node, other = grow(tree, prompt(4, 1)), grow(tree, prompt(4, 2))
    with pytest.raises(AssertionError):
        tree.lock(node, Tier.HOST)
    to_host(tree, other)
    tree.set_device(other, ABSENT)
    with pytest.raises(AssertionError):
        tree.lock(other, Tier.DEVICE)


@pytest.mark.parametrize("tier", list(Tier))
def test_an_unlock_without_a_lock_is_noticed(tier: Tier) -> None:
    tree = make(4)
    node = grow(tree, prompt(4, 1))
    to_host(tree, node)
    with pytest.raises(AssertionError):
        tree.unlock(node, tier)


def test_a_locked_or_inner_node_cannot_leave_the_device() -> None:
    tree = make(4)
    upper, lower = grow(tree, prompt(4, 1)), grow(tree, prompt(4, 1, 2))
    tree.lock(lower, Tier.DEVICE)
    with pytest.raises(AssertionError):
        tree.set_device(lower, ABSENT)
    tree.unlock(lower, Tier.DEVICE)
    with pytest.raises(AssertionError):
        tree.set_device(upper, ABSENT)


def test_only_what_is_nowhere_and_childless_can_be_pruned() -> None:
    tree = make(4)
    upper, lower = grow(tree, prompt(4, 1)), grow(tree, prompt(4, 1, 2))
    to_host(tree, upper)
    for node in (upper, lower):
        with pytest.raises(AssertionError):
            tree.prune(node)
    tree.set_device(lower, ABSENT)
    tree.prune(lower)
    assert lower.parent is None and tree.nodes == 1 and not upper.children
    tree.set_device(upper, ABSENT)
    with pytest.raises(AssertionError):
        tree.prune(upper)
    tree.check()


# The waiting queue


def test_want_counts_on_the_whole_path_and_replaces_what_was_wanted() -> None:
    tree = make(4)
    upper, lower, other = (
        grow(tree, prompt(4, 1)),
        grow(tree, prompt(4, 1, 2)),
        grow(tree, prompt(4, 3)),
    )
    tree.want("a", lower)
    tree.want("b", upper)
    assert (upper.waiters, lower.waiters, other.waiters) == (2, 1, 0)
    tree.want("a", other)
    assert (upper.waiters, lower.waiters, other.waiters) == (1, 0, 1)
    tree.check()
    tree.want("a", tree.root)
    assert other.waiters == 0 and set(tree.waiting) == {"b"}
    tree.unwant("b")
    tree.unwant("b")
    tree.unwant("unknown")
    assert not tree.waiting and upper.waiters == 0
    tree.check()


def test_who_waits_for_a_pruned_node_waits_for_its_parent() -> None:
    tree = make(4)
    upper, lower = grow(tree, prompt(4, 1)), grow(tree, prompt(4, 1, 2))
    tree.want("r", lower)
    tree.set_device(lower, ABSENT)
    tree.prune(lower)
    assert tree.waiting == {"r": upper} and upper.waiting == {"r"} and upper.waiters == 1
    assert lower.waiting == set() and lower.waiters == 0
    tree.check()
    tree.set_device(upper, ABSENT)
    tree.prune(upper)
    assert not tree.waiting
    tree.check()
    tree.unwant("r")


# Condemned subtrees


def test_a_condemned_node_is_out_of_reach_and_everything_else_is_not() -> None:
    tree = make(4)
    above, node, below, beside = (
        grow(tree, prompt(4, 1)),
        grow(tree, prompt(4, 1, 2), first_slot=100),
        grow(tree, prompt(4, 1, 2, 3), first_slot=200),
        grow(tree, prompt(4, 1, 4), first_slot=300),
    )
    tree.condemn(node, Doubt.CORRUPT)
    tree.check()
    assert [n.doubt for n in (above, node, below, beside)] == [
        Doubt.NONE,
        Doubt.CORRUPT,
        Doubt.CORRUPT,
        Doubt.NONE,
    ]
    match = tree.match(SCOPE, prompt(4, 1, 2, 3))
    assert match.host_node is match.device_node is above and match.device_len == 4
    assert tree.match(SCOPE, prompt(4, 1, 4)).device_node is beside
    assert (tree.nodes, tree.evictable_tokens) == (4, 16), "it still owns what it has"
    assert list(tree.path(below)) == [below, node, above]


def test_what_is_inserted_in_place_of_a_condemned_node_is_another_node() -> None:
    tree = make(4)
    node = grow(tree, prompt(4, 1, 2, 3), first_slot=100)
    tree.condemn(node, Doubt.CORRUPT)
    done = tree.insert(SCOPE, prompt(4, 1, 2), np.arange(200, 208))
    assert done.matched == 0 and done.added == [done.node] and done.node is not node
    assert tree.match(SCOPE, prompt(4, 1, 2, 3)).device_node is done.node
    assert node.slots.tolist() == list(range(100, 112)) and done.node.doubt is Doubt.NONE
    tree.check()
    tree.condemn(done.node, Doubt.STALE)
    third = tree.insert(SCOPE, prompt(4, 1), np.arange(300, 304)).node
    assert tree.match(SCOPE, prompt(4, 1, 2)).device_node is third
    assert tree.nodes == 3
    tree.check()


@page_sizes
def test_a_split_of_a_condemned_node_leaves_both_halves_condemned(page: int) -> None:
    tree = make(page)
    node = grow(tree, prompt(page, 1, 2, 3))
    below = grow(tree, prompt(page, 1, 2, 3, 4))
    tree.condemn(node, Doubt.STALE)
    uppermost = tree.split(tree.split(node, 2 * page), page)
    assert [n.doubt for n in tree.path(below)] == [Doubt.STALE] * 4
    assert list(tree.path(below))[-1] is uppermost
    assert tree.match(SCOPE, prompt(page, 1, 2, 3, 4)).device_len == 0
    tree.check()
    tree.condemn(node, Doubt.CORRUPT)
    assert [n.doubt for n in tree.path(below)] == [Doubt.CORRUPT] * 2 + [Doubt.STALE] * 2
    tree.check()
    for member in list(tree.path(below)):
        tree.set_device(member, ABSENT)
        tree.prune(member)
        tree.check()
    assert tree.nodes == 0 and not tree.condemned


def test_doubt_only_grows() -> None:
    tree = make(4)
    upper, lower = grow(tree, prompt(4, 1)), grow(tree, prompt(4, 1, 2))
    tree.condemn(lower, Doubt.CORRUPT)
    tree.condemn(upper, Doubt.STALE)
    assert (upper.doubt, lower.doubt) == (Doubt.STALE, Doubt.CORRUPT)
    tree.check()
    tree.condemn(upper, Doubt.CORRUPT)
    tree.condemn(lower, Doubt.STALE)
    assert (upper.doubt, lower.doubt) == (Doubt.CORRUPT, Doubt.CORRUPT)
    tree.check()
    for node in (lower, upper):
        tree.set_device(node, ABSENT)
        tree.prune(node)
    assert not tree.condemned


def test_no_scope_and_no_tokens_lead_to_a_condemned_node() -> None:
    tree = make(1)
    node = grow(tree, toks(1, 2))
    tree.condemn(node, Doubt.CORRUPT)
    for scope in (SCOPE, PrefixScope("condemned"), PrefixScope("condemned", str(node.id))):
        for first in (1, node.id, 0):
            assert tree.match(scope, toks(first, 2)).host_node is tree.root


def test_locks_and_waiters_of_a_condemned_node_can_be_let_go() -> None:
    tree = make(4)
    upper, lower = grow(tree, prompt(4, 1)), grow(tree, prompt(4, 1, 2))
    to_host(tree, upper)
    to_host(tree, lower, 1)
    for tier in Tier:
        tree.lock(lower, tier)
    tree.want("r", lower)
    tree.condemn(lower, Doubt.CORRUPT)
    tree.check()
    assert (tree.protected_tokens, tree.host_tokens) == (8, 8)
    for tier in Tier:
        tree.unlock(lower, tier)
    tree.check()
    tree.set_host(lower, ABSENT)
    tree.set_device(lower, ABSENT)
    tree.prune(lower)
    assert tree.waiting == {"r": upper} and upper.waiters == 1
    tree.unwant("r")
    tree.check()


def test_clear_forgets_what_is_condemned() -> None:
    tree = make(4)
    tree.condemn(grow(tree, prompt(4, 1)), Doubt.STALE)
    tree.clear()
    assert not tree.condemned
    tree.check()


# ``check`` detects corruption


class Sample:
    """A healthy tree with every kind of state in it."""

    def __init__(self) -> None:
        self.tree = tree = make(4)
        self.top = grow(tree, prompt(4, 1, 2), first_slot=0)
        self.inner = grow(tree, prompt(4, 1, 2, 3), first_slot=100)
        self.leaf = grow(tree, prompt(4, 1, 2, 3, 4), first_slot=200)
        self.host_only = grow(tree, prompt(4, 1, 2, 5), first_slot=300)
        self.free = grow(tree, prompt(4, 9), first_slot=400)
        to_host(tree, self.top, 0)
        to_host(tree, self.inner, 2)
        to_host(tree, self.host_only, 3)
        tree.set_device(self.host_only, ABSENT)
        tree.lock(self.inner, Tier.DEVICE)
        tree.lock(self.top, Tier.HOST)
        tree.want("r", self.inner)
        tree.check()


def unfile(s: Sample) -> None:
    key = next(k for k, v in s.tree.root.children.items() if v is s.free)
    s.tree.root.children["elsewhere"] = s.tree.root.children.pop(key)


def other_scope(s: Sample) -> None:
    s.free.scope = PrefixScope("x")


def empty_run(s: Sample) -> None:
    s.free.tokens, s.free.slots = s.free.tokens[:0], s.free.slots[:0]
    s.free.key = s.tree._key(s.tree.root, SCOPE, s.free.tokens, 0)
    s.tree.root.children = {n.key: n for n in (s.top, s.free)}
    s.tree.evictable_tokens -= 4


def partial_page(s: Sample) -> None:
    s.leaf.tokens, s.leaf.slots = np.append(s.leaf.tokens, 1), np.append(s.leaf.slots, 1)
    s.tree.evictable_tokens += 1


def nowhere(s: Sample) -> None:
    s.free.device, s.free.slots = ABSENT, None
    s.tree.evictable_tokens -= 4
    s.tree.candidates[Tier.DEVICE].discard(s.free)


def device_gap(s: Sample) -> None:
    """The host-only node's child is put on the device."""
    child = Node(99, s.host_only, SCOPE, prompt(4, 7))
    child.key = s.tree._key(s.host_only, SCOPE, child.tokens, 0)
    s.host_only.children[child.key] = child
    child.device, child.slots = READY, np.arange(4)
    s.host_only.device_children = 1
    s.tree.nodes += 1
    s.tree.evictable_tokens += 4
    s.tree.candidates[Tier.DEVICE].add(child)


def host_gap(s: Sample) -> None:
    child = Node(99, s.leaf, SCOPE, prompt(4, 7))
    child.key = s.tree._key(s.leaf, SCOPE, child.tokens, 0)
    s.leaf.children[child.key] = child
    child.host, child.pages = READY, np.arange(1)
    s.leaf.host_children = 1
    s.tree.nodes += 1
    s.tree.host_tokens += 4
    s.tree.candidates[Tier.HOST].add(child)


def pending_unlocked(s: Sample) -> None:
    s.free.device = PENDING
    s.tree.candidates[Tier.DEVICE].discard(s.free)


def pending_without_ticket(s: Sample) -> None:
    s.inner.host = PENDING
    s.tree.candidates[Tier.HOST].discard(s.inner)


def lost_device_lock(s: Sample) -> None:
    s.inner.device_locks += 1


def lost_host_lock(s: Sample) -> None:
    s.tree.unlock(s.inner, Tier.DEVICE)
    s.inner.host_locks += 2
    s.tree.candidates[Tier.HOST].discard(s.inner)


def lost_use(s: Sample) -> None:
    s.inner.uses = 1


def more_uses_than_locks(s: Sample) -> None:
    s.free.uses = 1


def locked_while_absent(s: Sample) -> None:
    s.host_only.device_locks = 1


def host_locked_while_absent(s: Sample) -> None:
    s.leaf.host_locks = 0
    s.free.host_locks = 1


def slots_while_absent(s: Sample) -> None:
    s.host_only.slots = np.arange(4)


def pages_while_absent(s: Sample) -> None:
    s.free.pages = np.arange(1)


def short_slots(s: Sample) -> None:
    s.leaf.slots = s.leaf.slots[:-1]


def short_pages(s: Sample) -> None:
    s.inner.pages = np.empty(0, np.int64)


def no_pages(s: Sample) -> None:
    s.inner.pages = None


def device_children(s: Sample) -> None:
    s.top.device_children += 1


def host_children(s: Sample) -> None:
    s.top.host_children -= 1


def evictable(s: Sample) -> None:
    s.tree.evictable_tokens += 4


def protected(s: Sample) -> None:
    s.tree.protected_tokens -= 4


def host_tokens(s: Sample) -> None:
    s.tree.host_tokens += 4


def node_count(s: Sample) -> None:
    s.tree.nodes += 1


def missing_candidate(s: Sample) -> None:
    s.tree.candidates[Tier.DEVICE].discard(s.leaf)


def missing_host_candidate(s: Sample) -> None:
    s.tree.candidates[Tier.HOST].discard(s.host_only)


def locked_candidate(s: Sample) -> None:
    s.tree.candidates[Tier.DEVICE].add(s.inner)


def wrong_candidate(s: Sample) -> None:
    """As many as there should be, but another one."""
    s.tree.candidates[Tier.DEVICE].discard(s.leaf)
    s.tree.candidates[Tier.DEVICE].add(s.inner)


def candidate_outside_the_tree(s: Sample) -> None:
    s.tree.candidates[Tier.DEVICE].add(Node(99, s.top, SCOPE, prompt(4, 7)))


def waiters(s: Sample) -> None:
    s.inner.waiters += 1


def waiters_above(s: Sample) -> None:
    s.top.waiters = 0


def unknown_waiter(s: Sample) -> None:
    s.inner.waiting.clear()


CORRUPTIONS: list[Callable[[Sample], None]] = [
    unfile,
    other_scope,
    empty_run,
    partial_page,
    nowhere,
    device_gap,
    host_gap,
    pending_unlocked,
    pending_without_ticket,
    lost_device_lock,
    lost_host_lock,
    lost_use,
    more_uses_than_locks,
    locked_while_absent,
    host_locked_while_absent,
    slots_while_absent,
    pages_while_absent,
    short_slots,
    short_pages,
    no_pages,
    device_children,
    host_children,
    evictable,
    protected,
    host_tokens,
    node_count,
    missing_candidate,
    missing_host_candidate,
    locked_candidate,
    wrong_candidate,
    candidate_outside_the_tree,
    waiters,
    waiters_above,
    unknown_waiter,
]


class Condemned:
    """A condemned subtree inside another, and healthy nodes above and beside it."""

    def __init__(self) -> None:
        self.tree = tree = make(4)
        self.above = grow(tree, prompt(4, 1), first_slot=0)
        self.stale = grow(tree, prompt(4, 1, 2), first_slot=100)
        self.corrupt = grow(tree, prompt(4, 1, 2, 3), first_slot=200)
        self.below = grow(tree, prompt(4, 1, 2, 3, 4), first_slot=300)
        self.beside = grow(tree, prompt(4, 1, 5), first_slot=400)
        tree.condemn(self.corrupt, Doubt.CORRUPT)
        tree.condemn(self.stale, Doubt.STALE)
        self.top = grow(tree, prompt(4, 6), first_slot=500)
        tree.condemn(self.top, Doubt.STALE)
        tree.check()

    def refile(self, node: Node, key: object) -> None:
        assert node.parent is not None
        del node.parent.children[node.key]
        node.key = key
        node.parent.children[key] = node


def trusted_below(c: Condemned) -> None:
    c.below.doubt = Doubt.NONE


def less_doubt_below(c: Condemned) -> None:
    c.below.doubt = Doubt.STALE


def trusted_between(c: Condemned) -> None:
    c.corrupt.doubt = Doubt.NONE


def within_reach(c: Condemned) -> None:
    c.refile(c.stale, c.tree._key(c.above, SCOPE, c.stale.tokens, 0))


def within_reach_of_the_root(c: Condemned) -> None:
    c.refile(c.top, c.tree._key(c.tree.root, SCOPE, c.top.tokens, 0))


def doubted_only(c: Condemned) -> None:
    """Doubted, but never taken out of reach."""
    c.beside.doubt = Doubt.STALE


def pardoned(c: Condemned) -> None:
    for node in c.tree.subtree(c.stale):
        node.doubt = Doubt.NONE


def not_swept(c: Condemned) -> None:
    """Nobody would ever free it."""
    c.tree.condemned.clear()


def out_of_reach(c: Condemned) -> None:
    """Filed like a condemned node, but trusted: it would never be found or freed."""
    c.refile(c.beside, ("condemned", c.beside.id))


def another_key(c: Condemned) -> None:
    """A node that does not know where it is filed cannot be pruned."""
    c.beside.key = c.stale.key


def no_key(c: Condemned) -> None:
    c.below.key = None


@pytest.mark.parametrize(
    "corrupt",
    [
        trusted_below,
        less_doubt_below,
        trusted_between,
        within_reach,
        within_reach_of_the_root,
        doubted_only,
        pardoned,
        not_swept,
        out_of_reach,
        another_key,
        no_key,
    ],
    ids=lambda f: f.__name__,
)
def test_check_detects_misplaced_doubt(corrupt: Callable[[Condemned], None]) -> None:
    sample = Condemned()
    corrupt(sample)
    with pytest.raises(AssertionError):
        sample.tree.check()


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda f: f.__name__)
def test_check_detects(corrupt: Callable[[Sample], None]) -> None:
    sample = Sample()
    corrupt(sample)
    with pytest.raises(AssertionError):
        sample.tree.check()


def test_nodes_print_what_matters() -> None:
    text = repr(Sample().inner)
    assert "4 tokens" in text and "device=READY/1" in text and "host=READY/0" in text and "waiters=1" in text


def test_tokens_may_be_any_int64() -> None:
    tree = make(2)
    tokens = toks(-(2**63), 2**63 - 1, -1, 0)
    node = grow(tree, tokens)
    assert tree.match(SCOPE, tokens).device_node is node
    assert tree.match(SCOPE, toks(-(2**63), 2**63 - 1)).device_len == 2
