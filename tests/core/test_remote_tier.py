"""The scheduler's side of a remote tier: what is asked of the stores, and what becomes of the answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from hicache_ext.core import tree as tree_module
from hicache_ext.core.cache import WritePolicy
from hicache_ext.core.page import PrefixScope, page_identities, root_salt
from hicache_ext.core.remote_tier import LANES, VECTOR, RemoteConfig, RemoteTier
from hicache_ext.core.residency import Doubt, Residency
from hicache_ext.core.tick import Reduce
from hicache_ext.core.tickets import Kind
from tests.core.fakes import (
    Ranks,
    Rig,
    SharedStore,
    assert_idle,
    assert_owned_once,
    content,
    device_len,
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


def pages(*numbers: int) -> np.ndarray:
    return prompt(PAGE, *numbers)


def server(
    shared: SharedStore,
    *,
    host_pages: int = 64,
    device_pages: int = 32,
    window: int = 4,
    write_batch: int = 16,
    write_limit: int = 32,
    policy: WritePolicy = WritePolicy.WRITE_THROUGH,
    reduce: Reduce | None = None,
    known: bool = True,
) -> Rig:
    """A server that knows the epoch of the stores, unless told otherwise."""
    rig = make_rig(
        host_pages=host_pages,
        device_pages=device_pages,
        write_policy=policy,
        reduce=reduce,
        shared=shared,
        remote=RemoteConfig(window, write_batch, write_limit),
    )
    if known and reduce is None:
        rig.remote.learn()
        rig.cache.tick()
    return rig


def tier(rig: Rig) -> RemoteTier:
    assert rig.cache.remote is not None
    return rig.cache.remote


def stocked(*prompts: np.ndarray, shared: SharedStore | None = None) -> SharedStore:
    """A store into which another server has written prompts."""
    shared = shared or SharedStore()
    other = server(shared)
    for tokens in prompts:
        put(other, tokens)
        settle(other)
    return shared


def tick(rig: Rig) -> None:
    rig.cache.tick()
    rig.cache.check()


def flush(rig: Rig) -> None:
    """Back up and start writing, as one scheduler step does."""
    rig.cache.flush_backups()
    rig.transfers.drain()
    tick(rig)
    rig.cache.flush_writes()
    rig.cache.check()


def look(rig: Rig) -> None:
    rig.remote.run_lookup()
    tick(rig)


def arrive(rig: Rig, *, late: bool = False) -> None:
    """The oldest window arrives and, when that has been applied, lets go of its pages."""
    rig.remote.run_fetch(late=late)
    tick(rig)
    rig.remote.run_fetch()
    tick(rig)


def cached(rig: Rig, tokens: np.ndarray) -> int:
    """Pages of the match."""
    match = rig.cache.match(SCOPE, tokens, touch=False)
    return (match.device_len + match.host_len) // PAGE


def use(rig: Rig, tokens: np.ndarray) -> int:
    """Load what is there, and check what a model would read; returns its pages."""
    rig.cache.load(node_at(rig, tokens))
    rig.cache.settle_loads(rig.cache.start_loads())
    have = content(rig, tokens)
    assert have.tolist() == kv_of(SCOPE, tokens)[: len(have)].tolist()
    return len(have) // PAGE


def assert_nothing_left(rig: Rig) -> None:
    """After all jobs have ended: no request waits, no job is open and no host page is astray."""
    stores = rig.remote
    assert not rig.cache.pending()
    assert not stores.open and not (stores.lookup_jobs or stores.fetch_jobs or stores.write_jobs)
    assert not tier(rig).outside()
    assert rig.cache.host_pages.used * PAGE == rig.cache.tree.host_tokens
    remote = tier(rig)
    assert not (remote._lookups or remote._fetches or remote._heads or remote._windows or remote._arrived)
    assert_idle(rig)


# A prompt that another server has computed


def test_kind_written_but_never_read_back() -> None:
    """A prompt moves from one server over the store to the device of another, byte for byte."""
    rig = server(stocked(pages(1, 2, 3)))
    match = rig.cache.want("a", SCOPE, pages(1, 2, 3, 4))
    assert (match.device_len, match.host_len) == (0, 0) and rig.cache.waits("a")
    look(rig)
    assert rig.cache.waits("a") and cached(rig, pages(1, 2, 3)) == 0
    arrive(rig)
    assert not rig.cache.waits("a") and cached(rig, pages(1, 2, 3, 4)) == 3
    assert tier(rig).take_arrived("a") == 3 * PAGE and tier(rig).take_arrived("a") == 0
    assert use(rig, pages(1, 2, 3, 4)) == 3
    assert rig.cache.stats.loaded == 3 * PAGE and rig.cache.stats.refused == 0
    stats = tier(rig).stats
    assert (stats.lookups, stats.found, stats.fetched, stats.missed) == (1, 3 * PAGE, 3 * PAGE, 0)
    rig.cache.unwant("a")
    assert_nothing_left(rig)


def test_only_what_no_nearer_tier_has_is_fetched() -> None:
    rig = server(stocked(pages(1, 2, 3, 4, 5)))
    to_host(rig, pages(1, 2))
    put(rig, pages(1))
    rig.cache.want("a", SCOPE, pages(1, 2, 3, 4, 5))
    look(rig)
    (job,) = rig.remote.fetch_jobs
    assert len(job.pages) == 3
    arrive(rig)
    assert use(rig, pages(1, 2, 3, 4, 5)) == 5
    assert tier(rig).take_arrived("a") == 3 * PAGE


def test_scopes_do_not_share() -> None:
    rig = server(stocked(pages(1, 2)))
    rig.cache.want("a", PrefixScope(cache_salt="mine"), pages(1, 2))
    look(rig)
    assert not rig.cache.waits("a") and tier(rig).stats.found == 0
    assert_nothing_left(rig)


@pytest.mark.parametrize("tokens", [pages(1)[:3], pages(1, 2), np.append(pages(1, 2), [7, 7, 7])])
def test_nothing_is_asked_for_less_than_a_page(tokens: np.ndarray) -> None:
    rig = server(stocked(pages(1, 2, 3)))
    put(rig, pages(1, 2))
    rig.cache.want("a", SCOPE, tokens)
    assert not rig.cache.waits("a") and not rig.remote.lookup_jobs


def test_a_miss_ends_the_waiting_and_is_not_asked_again() -> None:
    rig = server(stocked(pages(1)))
    rig.cache.want("a", SCOPE, pages(5, 6))
    look(rig)
    assert not rig.cache.waits("a") and not rig.remote.lookup_jobs
    assert_nothing_left(rig)


def test_unknown_requests_do_not_wait() -> None:
    rig = server(SharedStore())
    assert not rig.cache.waits("nobody") and tier(rig).take_arrived("nobody") == 0
    rig.cache.unwant("nobody")


# Windows


def test_a_long_prompt_comes_in_windows() -> None:
    tokens = pages(*range(1, 11))
    rig = server(stocked(tokens), window=4)
    rig.cache.want("a", SCOPE, tokens)
    look(rig)
    sizes = []
    while rig.cache.waits("a"):
        (job,) = rig.remote.fetch_jobs
        sizes.append(len(job.pages))
        assert rig.cache.host_pages.used - len(job.pages) == sum(sizes[:-1]), "one window at a time"
        arrive(rig)
    assert sizes == [4, 4, 2] and tier(rig).stats.lookups == 1
    assert tier(rig).take_arrived("a") == 10 * PAGE
    assert use(rig, tokens) == 10
    rig.cache.unwant("a")
    assert_nothing_left(rig)


def test_a_window_evicts_from_the_host_what_nobody_waits_for() -> None:
    tokens = pages(*range(1, 7))
    rig = server(stocked(tokens), host_pages=8, window=3)
    to_host(rig, pages(10, 11, 12, 13))
    to_host(rig, pages(20, 21, 22, 23))
    rig.cache.want("b", SCOPE, pages(20, 21))
    rig.cache.want("a", SCOPE, tokens)
    assert rig.cache.host_pages.free == 0
    rig.remote.run_all()
    for _ in range(4):
        tick(rig)
        rig.remote.run_all()
    assert cached(rig, tokens) == 6 and cached(rig, pages(20, 21)) == 2
    assert rig.cache.stats.evicted_host == 6 * PAGE
    assert use(rig, tokens) == 6


def test_of_a_prompt_longer_than_the_host_pool_what_fits_is_used() -> None:
    tokens = pages(*range(1, 13))
    rig = server(stocked(tokens), host_pages=8, window=3)
    to_host(rig, pages(50, 51, 52))
    rig.cache.want("a", SCOPE, tokens)
    look(rig)
    for _ in range(3):
        assert rig.cache.waits("a")
        arrive(rig)
    assert not rig.cache.waits("a")
    assert cached(rig, tokens) == 8, "the last window takes what was freed for it"
    assert tier(rig).stats.no_room == 4 * PAGE
    assert use(rig, tokens) == 8
    rig.cache.unwant("a")
    assert_nothing_left(rig)
    rig.cache.evict_host(8)
    assert rig.cache.host_pages.free == 8


@pytest.mark.parametrize("host_pages", [0, 2])
def test_without_room_on_the_host_nobody_waits(host_pages: int) -> None:
    rig = server(stocked(pages(1, 2)), host_pages=host_pages)
    held = rig.cache.host_pages.alloc(host_pages)
    assert held is not None
    rig.cache.want("a", SCOPE, pages(1, 2))
    rig.remote.run_lookup()
    rig.cache.tick()
    assert not rig.cache.waits("a") and tier(rig).stats.no_room == 2 * PAGE
    rig.cache.host_pages.release(held)
    assert_nothing_left(rig)


def test_what_has_arrived_is_not_evicted_before_the_rest_has() -> None:
    tokens = pages(*range(1, 7))
    rig = server(stocked(tokens), window=2)
    rig.cache.want("a", SCOPE, tokens)
    look(rig)
    arrive(rig)
    assert rig.cache.evict_host(100) == 0
    arrive(rig)
    arrive(rig)
    assert cached(rig, tokens) == 6
    assert rig.cache.evict_host(100) == 6


# Less than hoped for


def test_a_late_window_brings_what_has_arrived() -> None:
    rig = server(stocked(pages(1, 2, 3, 4)), window=4)
    rig.cache.want("a", SCOPE, pages(1, 2, 3, 4))
    look(rig)
    arrive(rig, late=True)
    assert not rig.cache.waits("a") and cached(rig, pages(1, 2, 3, 4)) == 2
    assert tier(rig).take_arrived("a") == 2 * PAGE
    assert (tier(rig).stats.fetched, tier(rig).stats.missed) == (2 * PAGE, 2 * PAGE)
    assert use(rig, pages(1, 2, 3, 4)) == 2
    rig.cache.unwant("a")
    assert_nothing_left(rig)


def test_no_further_window_is_asked_for_after_a_gap() -> None:
    tokens = pages(*range(1, 9))
    rig = server(stocked(tokens), window=4)
    rig.cache.want("a", SCOPE, tokens)
    look(rig)
    arrive(rig, late=True)
    assert not rig.cache.waits("a") and not rig.remote.fetch_jobs and cached(rig, tokens) == 2


def test_the_lookup_stops_at_the_first_gap() -> None:
    shared = stocked(pages(1, 2, 3, 4))
    gone = page_identities(root_salt(bytes(32), SCOPE), pages(1, 2, 3, 4), PAGE)[2]
    del shared.pages[(bytes(32), 0, gone)]
    rig = server(shared)
    rig.cache.want("a", SCOPE, pages(1, 2, 3, 4))
    settle(rig)
    assert cached(rig, pages(1, 2, 3, 4)) == 2 and tier(rig).stats.found == 2 * PAGE


def test_what_the_store_lost_after_the_lookup_is_a_miss() -> None:
    shared = stocked(pages(1, 2, 3))
    rig = server(shared)
    rig.cache.want("a", SCOPE, pages(1, 2, 3))
    look(rig)
    shared.pages.clear()
    arrive(rig)
    assert not rig.cache.waits("a") and cached(rig, pages(1, 2, 3)) == 0
    assert tier(rig).take_arrived("a") == 0 and tier(rig).stats.missed == 3 * PAGE
    assert_nothing_left(rig)


def test_what_was_computed_before_the_answer_is_not_fetched() -> None:
    rig = server(stocked(pages(1, 2, 3, 4)))
    rig.cache.want("a", SCOPE, pages(1, 2, 3, 4))
    put(rig, pages(1, 2))
    flush(rig)
    look(rig)
    (job,) = rig.remote.fetch_jobs
    assert len(job.pages) == 2
    settle(rig)
    assert use(rig, pages(1, 2, 3, 4)) == 4
    put(rig, pages(7, 8))
    rig.cache.want("b", SCOPE, pages(1, 2, 3, 4))
    assert not rig.cache.waits("b")


def test_an_answer_that_computing_has_overtaken_ends_the_waiting() -> None:
    rig = server(stocked(pages(1, 2)))
    rig.cache.want("a", SCOPE, pages(1, 2, 3, 4))
    put(rig, pages(1, 2, 3, 4))
    free = rig.cache.host_pages.free
    look(rig)
    assert not rig.cache.waits("a") and not rig.remote.fetch_jobs and not rig.remote.open
    assert rig.cache.host_pages.free == free and tier(rig).stats.no_room == 0


def test_an_answer_does_not_make_what_it_continues_younger() -> None:
    rig = server(stocked(pages(1, 2)))
    put(rig, pages(1))
    rig.cache.want("a", SCOPE, pages(1, 2))
    stamp = node_at(rig, pages(1)).stamp
    look(rig)
    arrive(rig)
    assert node_at(rig, pages(1)).stamp == stamp


def test_pages_that_were_computed_while_they_were_fetched_are_kept_once() -> None:
    rig = server(stocked(pages(1, 2, 3, 4)))
    rig.cache.want("a", SCOPE, pages(1, 2, 3, 4))
    look(rig)
    put(rig, pages(1, 2))
    flush(rig)
    assert rig.cache.host_pages.used == 4 + 2
    rig.remote.run_fetch()
    tick(rig)
    assert rig.cache.host_pages.used == 4 + 2, "the spare pages go when no store touches them"
    rig.remote.run_fetch()
    tick(rig)
    assert rig.cache.host_pages.used == 4
    assert use(rig, pages(1, 2, 3, 4)) == 4
    rig.cache.unwant("a")
    settle(rig)
    assert_nothing_left(rig)


def test_a_fetched_page_gives_a_computed_one_its_host_copy() -> None:
    rig = server(stocked(pages(1, 2)))
    rig.cache.want("a", SCOPE, pages(1, 2))
    look(rig)
    put(rig, pages(1, 2))
    arrive(rig)
    node = node_at(rig, pages(1, 2))
    assert (node.device, node.host, node.stored) == (READY, READY, True)
    flush(rig)
    assert not rig.transfers.backup_jobs and rig.cache.stats.backed_up == 0 and not rig.remote.write_jobs
    rig.cache.evict(100)
    assert use(rig, pages(1, 2)) == 2


@pytest.mark.parametrize("event", ["reset", "flush", "other weights", "other epoch", "aborted"])
def test_what_has_arrived_does_not_count_once_it_is_gone(event: str) -> None:
    rig = server(stocked(pages(1, 2)))
    rig.cache.want("a", SCOPE, pages(1, 2))
    settle(rig)
    EVENTS[event](rig)
    assert tier(rig).take_arrived("a") == 0


# Several requests with the same beginning


def test_equal_prompts_are_looked_for_once() -> None:
    tokens = pages(1, 2, 3)
    rig = server(stocked(tokens))
    for rid in "abc":
        rig.cache.want(rid, SCOPE, tokens)
    assert len(rig.remote.lookup_jobs) == 1
    look(rig)
    assert len(rig.remote.fetch_jobs) == 1
    arrive(rig)
    assert not any(rig.cache.waits(rid) for rid in "abc")
    assert node_at(rig, tokens).waiters == 3
    assert [tier(rig).take_arrived(rid) for rid in "abc"] == [3 * PAGE, 0, 0], "fetched once, told once"
    assert tier(rig).stats.lookups == 1


@pytest.mark.parametrize("there", [0, 2])
def test_kind_slower_than_no_cache_equal_prompts_wait_for_one_lookup(there: int) -> None:
    """A page that one of them did not get is not asked for again by each of the others in turn."""
    rig = server(stocked(pages(1, 2, 3)[: there * PAGE]))
    for rid in "abcdef":
        rig.cache.want(rid, SCOPE, pages(1, 2, 3))
    settle(rig)
    assert tier(rig).stats.lookups == 1
    assert not any(rig.cache.waits(rid) for rid in "abcdef") and cached(rig, pages(1, 2, 3)) == there


def test_followers_ask_for_their_own_rest() -> None:
    rig = server(stocked(pages(1, 2, 3), pages(1, 2, 4, 5), pages(1, 2, 6)))
    rig.cache.want("a", SCOPE, pages(1, 2, 3))
    rig.cache.want("b", SCOPE, pages(1, 2, 4, 5))
    rig.cache.want("c", SCOPE, pages(1, 2, 6))
    assert len(rig.remote.lookup_jobs) == 1
    look(rig)
    arrive(rig)
    assert not rig.cache.waits("a") and rig.cache.waits("b") and rig.cache.waits("c")
    assert len(rig.remote.lookup_jobs) == 2, "the two go on side by side"
    settle(rig)
    assert tier(rig).take_arrived("b") == 2 * PAGE and tier(rig).take_arrived("c") == PAGE
    for tokens in (pages(1, 2, 3), pages(1, 2, 4, 5), pages(1, 2, 6)):
        assert use(rig, tokens) == len(tokens) // PAGE


def test_a_longer_follower_asks_on_where_the_first_ended() -> None:
    rig = server(stocked(pages(1, 2, 3, 4)))
    rig.cache.want("a", SCOPE, pages(1, 2))
    rig.cache.want("b", SCOPE, pages(1, 2, 3, 4))
    settle(rig)
    assert cached(rig, pages(1, 2, 3, 4)) == 4 and tier(rig).stats.lookups == 2
    assert tier(rig).take_arrived("b") == 2 * PAGE


def test_kind_slower_than_no_cache_a_follower_waits_for_what_it_shares_only() -> None:
    long = pages(*range(1, 11))
    rig = server(stocked(long, pages(1, 50)), window=2)
    rig.cache.want("a", SCOPE, long)
    rig.cache.want("b", SCOPE, pages(1, 50))
    rig.cache.want("c", SCOPE, pages(1))
    look(rig)
    arrive(rig)
    assert rig.cache.waits("a") and not rig.cache.waits("c")
    assert len(rig.remote.lookup_jobs) == 1, "b looks for its own rest"
    look(rig)
    assert len(rig.remote.fetch_jobs) == 2
    settle(rig)
    assert use(rig, pages(1, 50)) == 2 and use(rig, long) == 10


def test_who_comes_while_windows_arrive_waits_along() -> None:
    tokens = pages(*range(1, 7))
    rig = server(stocked(tokens), window=2)
    rig.cache.want("a", SCOPE, tokens)
    look(rig)
    arrive(rig)
    rig.cache.want("b", SCOPE, tokens)
    assert rig.cache.waits("b") and not rig.remote.lookup_jobs
    settle(rig)
    assert tier(rig).stats.lookups == 1 and tier(rig).stats.fetched == 6 * PAGE
    assert not rig.cache.waits("b") and node_at(rig, tokens).waiters == 2


def test_two_fetches_that_meet_at_one_node_both_end() -> None:
    """One has begun above what was computed since; the other asked below it."""
    tokens = pages(1, 2, 3, 4)
    rig = server(stocked(tokens), window=2)
    rig.cache.want("a", SCOPE, tokens)
    look(rig)
    put(rig, pages(1, 2))
    flush(rig)
    rig.cache.want("b", SCOPE, tokens)
    assert len(rig.remote.lookup_jobs) == 1
    arrive(rig)
    assert rig.cache.waits("a") and rig.cache.waits("b")
    settle(rig)
    assert not rig.cache.waits("a") and not rig.cache.waits("b")
    assert use(rig, tokens) == 4
    rig.cache.unwant("a")
    rig.cache.unwant("b")
    assert_nothing_left(rig)


@pytest.mark.parametrize("gone", ["a", "b"])
def test_those_who_stay_get_their_pages(gone: str) -> None:
    rig = server(stocked(pages(1, 2, 3), pages(1, 2, 4)), window=2)
    rig.cache.want("a", SCOPE, pages(1, 2, 3))
    rig.cache.want("b", SCOPE, pages(1, 2, 4))
    look(rig)
    rig.cache.unwant(gone)
    assert not rig.cache.waits(gone)
    settle(rig)
    stays, tokens = ("b", pages(1, 2, 4)) if gone == "a" else ("a", pages(1, 2, 3))
    assert cached(rig, tokens) == 3 and not rig.cache.waits(stays)
    assert tier(rig).take_arrived(gone) == 0
    other = pages(1, 2, 3) if gone == "a" else pages(1, 2, 4)
    assert cached(rig, other) == 2, "what only the one that left would need was not fetched"
    rig.cache.unwant(stays)
    assert_nothing_left(rig)


def test_a_request_that_asks_again_waits_for_its_new_prompt() -> None:
    rig = server(stocked(pages(1, 2), pages(1, 3)))
    rig.cache.want("a", SCOPE, pages(1, 2))
    rig.cache.want("b", SCOPE, pages(1, 2))
    rig.cache.want("a", SCOPE, pages(1, 3))
    settle(rig)
    assert cached(rig, pages(1, 3)) == 2 and cached(rig, pages(1, 2)) == 2
    assert node_at(rig, pages(1, 3)).waiters == 1


# Identities


def test_the_query_takes_up_the_chain_where_it_was_hashed_last() -> None:
    rig = server(SharedStore())
    put(rig, pages(1, 2))
    flush(rig)
    put(rig, pages(1, 2, 3, 4))
    rig.cache.want("a", SCOPE, pages(1, 2, 3, 4, 5, 6))
    (_, query) = rig.remote.lookup_jobs[0]
    names = page_identities(root_salt(bytes(32), SCOPE), pages(1, 2, 3, 4, 5, 6), PAGE)
    assert query.parent == names[1] and query.skip == 2 and query.start == 4 * PAGE
    assert query.tokens.tolist() == pages(3, 4, 5, 6).tolist()
    assert page_identities(query.parent, query.tokens, PAGE)[query.skip :] == names[4:]


def test_a_prompt_that_was_never_hashed_starts_at_the_root() -> None:
    rig = server(SharedStore(), policy=WritePolicy.WRITE_BACK)
    put(rig, pages(1, 2))
    rig.cache.want("a", SCOPE, pages(1, 2, 3))
    (_, query) = rig.remote.lookup_jobs[0]
    assert query.parent == root_salt(bytes(32), SCOPE) and query.skip == 2 and query.start == 2 * PAGE


def test_the_query_keeps_its_tokens() -> None:
    rig = server(stocked(pages(1, 2)))
    tokens = pages(1, 2)
    rig.cache.want("a", SCOPE, tokens)
    tokens[:] = 0
    settle(rig)
    assert cached(rig, pages(1, 2)) == 2


def test_kind_scheduler_stalls_a_request_in_the_queue_hashes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the prompt that is asked for nor what arrives is hashed on the scheduler's thread."""
    tokens = pages(*range(1, 9))
    rig = server(stocked(tokens))
    put(rig, pages(1, 2))
    flush(rig)
    hashed: list[int] = []

    def counting(parent: bytes, run: np.ndarray, page_size: int) -> list[bytes]:
        hashed.append(len(run) // page_size)
        return page_identities(parent, run, page_size)

    monkeypatch.setattr(tree_module, "page_identities", counting)
    rig.cache.want("a", SCOPE, tokens)
    settle(rig)
    assert use(rig, tokens) == 8, "the load's labels are known too"
    put(rig, pages(*range(1, 11)))
    assert sum(hashed) == 0
    flush(rig)
    assert sum(hashed) == 2, "what was computed here"


# A prefix that is only on the device


def test_a_prefix_that_only_the_device_has_is_copied_down_first() -> None:
    """On the host nothing may lie below what is not there."""
    tokens = pages(1, 2, 3, 4)
    rig = server(stocked(tokens), policy=WritePolicy.WRITE_BACK)
    put(rig, pages(1, 2))
    rig.cache.want("a", SCOPE, tokens)
    look(rig)
    node = node_at(rig, pages(1, 2))
    assert node.host is PENDING and len(rig.remote.fetch_jobs) == 1
    arrive(rig)
    assert node.host is PENDING and cached(rig, tokens) == 4
    settle(rig)
    assert node.host is READY
    rig.cache.evict(100)
    assert use(rig, tokens) == 4
    rig.cache.unwant("a")
    assert_nothing_left(rig)


def test_without_room_to_copy_the_prefix_down_nothing_is_fetched() -> None:
    tokens = pages(1, 2, 3, 4)
    rig = server(stocked(tokens), policy=WritePolicy.WRITE_BACK, host_pages=2)
    put(rig, pages(1, 2, 3))
    rig.cache.want("a", SCOPE, tokens)
    look(rig)
    assert not rig.cache.waits("a") and not rig.remote.fetch_jobs
    assert tier(rig).stats.no_room == PAGE
    rig.cache.unwant("a")
    settle(rig)
    assert_nothing_left(rig)


# Whatever happens meanwhile


LONG = pages(*range(1, 7))

Stage = Callable[[Rig], None]


def _answered(rig: Rig) -> None:
    rig.remote.run_lookup()


def _arrived(rig: Rig) -> None:
    look(rig)
    rig.remote.run_fetch()


def _unsettled(rig: Rig) -> None:
    _arrived(rig)
    tick(rig)


def _second(rig: Rig) -> None:
    look(rig)
    arrive(rig)


def _last(rig: Rig) -> None:
    look(rig)
    for _ in range(2):
        arrive(rig)
    rig.remote.run_fetch(late=True)
    tick(rig)


STAGES: dict[str, Stage] = {
    "lookup asked": lambda rig: None,
    "lookup answered": _answered,
    "window asked": look,
    "window arrived": _arrived,
    "window unsettled": _unsettled,
    "second window asked": _second,
    "last window half arrived": _last,
}


def _abort(rig: Rig) -> None:
    rig.cache.unwant("a")
    rig.cache.unwant("b")
    assert not rig.cache.waits("a") and not rig.cache.waits("b")


def _reset(rig: Rig, *, flush: bool) -> None:
    rig.cache.reset(flush=flush)
    rig.device.clear()


def _evict(rig: Rig) -> None:
    rig.cache.evict(1000)
    rig.cache.evict_host(1000)


def _outage(rig: Rig) -> None:
    rig.remote.up = False


def _full(rig: Rig) -> None:
    """All that is left of the host pool goes to others."""
    put(rig, pages(*range(100, 130)))
    flush(rig)


def _split(rig: Rig) -> None:
    put(rig, pages(1, 2, 3, 70))
    put(rig, pages(1, 80))
    flush(rig)


def _ask_again(rig: Rig) -> None:
    _abort(rig)
    rig.cache.want("a", SCOPE, LONG)


def _compute(rig: Rig) -> None:
    put(rig, LONG)


def _compute_half(rig: Rig) -> None:
    put(rig, LONG[: 3 * PAGE])


def _other_prompt(rig: Rig) -> None:
    rig.cache.want("a", SCOPE, pages(60, 61))
    rig.cache.want("b", SCOPE, pages(60, 61))


def _detach_for_a_moment(rig: Rig) -> None:
    tier(rig).detach()
    tier(rig).attach()


EVENTS: dict[str, Callable[[Rig], None]] = {
    "aborted": _abort,
    "aborted and asked again": _ask_again,
    "asked for another prompt": _other_prompt,
    "one aborted": lambda rig: rig.cache.unwant("a"),
    "evicted": _evict,
    "computed": _compute,
    "computed in part": _compute_half,
    "split": _split,
    "pool full": _full,
    "other weights": lambda rig: rig.cache.advance(bytes([9]) * 32),
    "other epoch": lambda rig: rig.cache.advance(),
    "flushed by another": lambda rig: rig.remote.mark(bytes(32), 6),
    "reset": lambda rig: _reset(rig, flush=False),
    "flush": lambda rig: _reset(rig, flush=True),
    "outage": _outage,
    "detached": lambda rig: tier(rig).detach(),
    "detached and attached": _detach_for_a_moment,
    "nothing": lambda rig: None,
}


@pytest.mark.parametrize("stage", list(STAGES))
@pytest.mark.parametrize("event", list(EVENTS))
def test_kind_request_gone_state_stays_nothing_is_left(stage: str, event: str) -> None:
    """Whatever happens at whatever point of a fetch: no page, lock, job or waiter stays behind, and what is
    found afterwards is right."""
    rig = server(stocked(LONG, pages(1, 2, 90)), host_pages=32, window=2)
    put(rig, pages(40, 41))
    flush(rig)
    rig.cache.want("a", SCOPE, LONG)
    rig.cache.want("b", SCOPE, pages(1, 2, 90))
    STAGES[stage](rig)
    rig.cache.check()
    EVENTS[event](rig)
    rig.cache.check()
    for _ in range(50):
        flush(rig)
        rig.remote.learn()
        for jobs, run in (
            (rig.remote.lookup_jobs, rig.remote.run_lookup),
            (rig.remote.fetch_jobs, rig.remote.run_fetch),
            (rig.remote.write_jobs, rig.remote.run_write),
        ):
            if jobs:
                run(len(jobs) - 1)
            tick(rig)
        if not rig.cache.pending():
            break
    assert not rig.cache.waits("a") and not rig.cache.waits("b")
    for tokens in (LONG, pages(1, 2, 90)):
        use(rig, tokens)
    if event in ("nothing", "computed", "aborted and asked again"):
        assert cached(rig, LONG) >= (5 if stage.startswith("last") else 6)
    rig.cache.unwant("a")
    rig.cache.unwant("b")
    # The loads may have had others copied down, and from there to the store.
    for _ in range(3):
        flush(rig)
        rig.remote.run_all()
        tick(rig)
    assert_nothing_left(rig)
    rig.cache.evict(1000)
    rig.cache.evict_host(1000)
    assert rig.cache.host_pages.free == 32


@pytest.mark.parametrize("stage", ["lookup asked", "window asked", "second window asked"])
def test_kind_request_gone_state_stays_an_aborted_fetch_ends_early(stage: str) -> None:
    rig = server(stocked(LONG), window=2)
    rig.cache.want("a", SCOPE, LONG)
    STAGES[stage](rig)
    had = tier(rig).stats.fetched
    rig.cache.unwant("a")
    assert len(rig.remote.cancelled) == 1
    settle(rig)
    assert tier(rig).stats.fetched == had and tier(rig).take_arrived("a") == 0
    assert_nothing_left(rig)


def test_kind_request_gone_state_stays_below_a_damaged_page() -> None:
    """The prefix turns out to be damaged while its continuation is fetched: nothing is put below it."""
    tokens = pages(1, 2, 3, 4, 5, 6)
    rig = server(stocked(tokens), window=2)
    to_host(rig, pages(1, 2))
    settle(rig)
    rig.cache.want("a", SCOPE, tokens)
    look(rig)
    rig.transfers.corrupt(host_page(rig, pages(1, 2), 1))
    rig.cache.load(node_at(rig, pages(1, 2)))
    rig.cache.settle_loads(rig.cache.start_loads())
    assert cached(rig, tokens) == 1
    arrive(rig)
    rig.cache.check()
    assert not rig.cache.waits("a") and not rig.remote.fetch_jobs
    settle(rig)
    assert use(rig, tokens) == 1
    rig.cache.unwant("a")
    assert_nothing_left(rig)
    rig.cache.want("a", SCOPE, tokens)
    settle(rig)
    assert use(rig, tokens) == 6


def test_only_what_a_thread_still_has_to_do_is_waited_for() -> None:
    """The scheduler sleeps between its steps as long as ``fetching`` says so."""
    rig = server(stocked(LONG), window=3)
    rig.cache.want("a", SCOPE, LONG)
    assert rig.cache.waits("a") and rig.cache.fetching()
    rig.remote.run_lookup()
    assert rig.cache.waits("a") and not rig.cache.fetching()
    tick(rig)
    for _ in range(2):
        assert rig.cache.waits("a") and rig.cache.fetching()
        rig.remote.run_fetch()
        assert rig.cache.waits("a") and not rig.cache.fetching()
        tick(rig)
        # It lets go of its pages, for which nobody waits.
        rig.remote.run_fetch()
    assert not rig.cache.waits("a") and not rig.cache.fetching()
    settle(rig)
    assert use(rig, LONG) == 6
    rig.cache.unwant("a")
    assert_nothing_left(rig)


# Detached stores


@pytest.mark.parametrize("stage", list(STAGES))
def test_nobody_waits_for_detached_stores(stage: str) -> None:
    rig = server(stocked(LONG), window=2)
    rig.cache.want("a", SCOPE, LONG)
    STAGES[stage](rig)
    tier(rig).detach()
    assert not rig.cache.waits("a") and not rig.cache.fetching()
    settle(rig)
    found = cached(rig, LONG)
    asked = tier(rig).stats.lookups
    rig.cache.want("b", SCOPE, pages(70, 71))
    assert not rig.cache.waits("b") and tier(rig).stats.lookups == asked
    assert use(rig, LONG) == found, "what has arrived stays"
    for rid in "ab":
        rig.cache.unwant(rid)
    assert_nothing_left(rig)


def test_what_detached_stores_have_is_found_again() -> None:
    rig = server(stocked(LONG))
    tier(rig).detach()
    tick(rig)
    assert not tier(rig).usable
    tier(rig).attach()
    rig.cache.want("a", SCOPE, LONG)
    assert not rig.cache.waits("a"), "ranks have not agreed that it works"
    tick(rig)
    rig.cache.want("a", SCOPE, LONG)
    settle(rig)
    assert use(rig, LONG) == len(LONG) // PAGE


def test_what_came_while_detached_is_written_afterwards() -> None:
    """Also what was being written: it counts for nothing, and no page stays locked."""
    shared = SharedStore()
    rig = server(shared, write_batch=1, write_limit=1)
    put(rig, pages(1, 2))
    flush(rig)
    assert len(rig.remote.write_jobs) == 1
    tier(rig).detach()
    put(rig, pages(3))
    settle(rig)
    assert not shared.pages and tier(rig).stats.stored == 0
    assert all(n.host_locks == 0 for n in rig.cache.tree.walk())
    assert not rig.cache.pending()
    tier(rig).attach()
    tick(rig)
    settle(rig)
    assert len(shared.pages) == 3 and tier(rig).stats.stored == 3 * PAGE
    assert_nothing_left(rig)


@pytest.mark.parametrize("change", ["other weights", "other epoch", "flush", "flushed by another"])
def test_kind_stale_after_weight_update_while_detached(change: str) -> None:
    """Attached again, a store is asked for pages of the present weights and epoch, and gets no others."""
    shared = stocked(pages(1, 2))
    rig = server(shared)
    to_host(rig, pages(5, 6))
    settle(rig)
    old = set(shared.pages)
    put(rig, pages(7))
    tier(rig).detach()
    tick(rig)
    put(rig, pages(8))
    flush(rig)
    EVENTS[change](rig)
    for _ in range(3):
        rig.remote.learn()
        tick(rig)
    for tokens in (pages(1, 2), pages(5, 6), pages(7), pages(8)):
        assert cached(rig, tokens) == 0
    tier(rig).attach()
    tick(rig)
    tick(rig)
    rig.cache.want("a", SCOPE, pages(1, 2))
    rig.cache.want("b", SCOPE, pages(5, 6))
    assert rig.cache.waits("a") and rig.cache.waits("b")
    settle(rig)
    assert cached(rig, pages(1, 2)) == cached(rig, pages(5, 6)) == 0 and tier(rig).stats.found == 0
    put(rig, pages(9))
    settle(rig)
    (new,) = set(shared.pages) - old
    assert new[:2] == (rig.cache.tree.namespace, rig.cache.epoch) and new[:2] != (bytes(32), 0)


def test_kind_stale_after_weight_update_attached_before_the_epoch_is_known() -> None:
    """The flush could not be told to the stores yet, so they are not used."""
    shared = stocked(pages(1, 2))
    rig = server(shared)
    rig.remote.up = False
    tier(rig).detach()
    _reset(rig, flush=True)
    tier(rig).attach()
    rig.remote.learn()
    tick(rig)
    rig.cache.want("a", SCOPE, pages(1, 2))
    assert not rig.cache.waits("a") and not tier(rig).usable
    rig.remote.up = True
    for _ in range(2):
        rig.remote.learn()
        tick(rig)
    assert tier(rig).usable and rig.cache.epoch == 2
    rig.cache.want("a", SCOPE, pages(1, 2))
    settle(rig)
    assert cached(rig, pages(1, 2)) == 0


# Pages that a store may still touch


def test_kind_source_freed_while_in_flight_a_late_store_writes_to_pages_of_nobody() -> None:
    """What did not arrive in time may still be written to, until the store says that it has let go."""
    rig = server(stocked(LONG), host_pages=12, window=6, write_limit=2)
    rig.cache.want("a", SCOPE, LONG)
    look(rig)
    (job,) = rig.remote.fetch_jobs
    late = set(job.pages[3:].tolist())
    rig.remote.run_fetch(late=True)
    tick(rig)
    assert not rig.cache.waits("a") and cached(rig, LONG) == 3
    rig.cache.unwant("a")
    put(rig, pages(*range(20, 32)))
    settle_copies(rig)
    used = {p for n in rig.cache.tree.walk() if n.pages is not None for p in n.pages.tolist()}
    assert not used & late and not set(rig.cache.host_pages.free_pages().tolist()) & late
    rig.remote.run_fetch()
    tick(rig)
    assert late <= set(rig.cache.host_pages.free_pages().tolist())
    assert use(rig, pages(*range(20, 32))) > 0


def settle_copies(rig: Rig) -> None:
    """Backups only; what the stores do waits."""
    for _ in range(5):
        rig.cache.flush_backups()
        rig.transfers.drain()
        tick(rig)


@pytest.mark.parametrize("event", ["aborted", "reset", "flush", "other weights"])
@pytest.mark.parametrize("stage", ["window asked", "window arrived", "last window half arrived"])
def test_kind_source_freed_while_in_flight_pages_of_a_dropped_window(stage: str, event: str) -> None:
    rig = server(stocked(LONG), host_pages=8, window=2)
    rig.cache.want("a", SCOPE, LONG)
    STAGES[stage](rig)
    held = {p for run in tier(rig).outside() for p in run.tolist()}
    assert held
    EVENTS[event](rig)
    put(rig, pages(*range(20, 30)))
    settle_copies(rig)
    assert held == {p for run in tier(rig).outside() for p in run.tolist()}
    while rig.remote.fetch_jobs:
        rig.remote.run_fetch(len(rig.remote.fetch_jobs) - 1)
        tick(rig)
    assert use(rig, pages(*range(20, 30))) > 0
    assert not tier(rig).outside()


def test_windows_settle_in_any_order() -> None:
    shared = stocked(pages(1, 2), pages(3, 4), pages(5, 6))
    rig = server(shared, window=2)
    for rid, page in (("a", 1), ("b", 3), ("c", 5)):
        rig.cache.want(rid, SCOPE, pages(page, page + 1))
    for _ in range(3):
        look(rig)
    shared.pages.clear()
    third, second, _ = rig.remote.fetch_jobs[::-1]
    for job in (third, second):
        rig.remote.run_fetch(rig.remote.fetch_jobs.index(job))
        rig.remote.run_fetch(rig.remote.fetch_jobs.index(job))
        tick(rig)
    assert rig.cache.host_pages.used == 2 and rig.cache.waits("a") and not rig.cache.waits("c")
    rig.remote.run_fetch()
    tick(rig)
    assert not any(rig.cache.waits(rid) for rid in "abc")
    assert rig.cache.host_pages.used == 2, "the first window is still touched"
    rig.remote.run_fetch()
    tick(rig)
    assert rig.cache.host_pages.used == 0


# Writing


def test_what_reaches_the_host_is_written() -> None:
    shared = SharedStore()
    rig = server(shared)
    put(rig, pages(1, 2, 3))
    rig.cache.flush_writes()
    assert not rig.remote.write_jobs, "it is not on the host yet"
    flush(rig)
    (job,) = rig.remote.write_jobs
    assert [row.tobytes() for row in job.labels.identities] == page_identities(
        root_salt(bytes(32), SCOPE), pages(1, 2, 3), PAGE
    )
    assert rig.cache.pending() and not node_at(rig, pages(1, 2, 3)).stored
    rig.remote.run_write()
    tick(rig)
    assert node_at(rig, pages(1, 2, 3)).stored and len(shared.pages) == 3
    assert tier(rig).stats.stored == 3 * PAGE
    assert_nothing_left(rig)


def test_nothing_is_written_twice() -> None:
    rig = server(stocked(pages(1, 2)))
    rig.cache.want("a", SCOPE, pages(1, 2))
    settle(rig)
    put(rig, pages(1, 2, 3))
    flush(rig)
    (job,) = rig.remote.write_jobs
    assert len(job.pages) == 1, "what was fetched from a store is there"
    settle(rig)
    rig.cache.evict(100)
    use(rig, pages(1, 2, 3))
    put(rig, pages(1, 2, 3))
    settle(rig)
    for node in rig.cache.tree.walk():
        tier(rig).offer(node)
    flush(rig)
    assert not rig.remote.write_jobs and tier(rig).stats.stored == PAGE


def test_a_node_waits_for_its_write_once() -> None:
    rig = server(SharedStore())
    put(rig, pages(1, 2))
    rig.cache.flush_backups()
    rig.transfers.drain()
    tick(rig)
    tier(rig).offer(node_at(rig, pages(1, 2)))
    assert len(tier(rig)._queue) == 1
    rig.cache.flush_writes()
    tier(rig).offer(node_at(rig, pages(1, 2)))
    rig.cache.flush_writes()
    assert [len(job.pages) for job in rig.remote.write_jobs] == [2]


def test_parents_are_written_before_their_children() -> None:
    shared = SharedStore()
    rig = server(shared, write_batch=2, write_limit=2)
    rig.remote.up = False
    tick(rig)
    for tokens in (pages(1), pages(1, 2), pages(1, 2, 3), pages(1, 4)):
        put(rig, tokens)
        flush(rig)
    queue = tier(rig)._queue
    queue.reverse()
    rig.remote.up = True
    order = []
    while True:
        rig.remote.learn()
        tick(rig)
        rig.cache.flush_writes()
        if not rig.remote.write_jobs:
            break
        order += [row.tobytes() for row in rig.remote.write_jobs[0].labels.identities]
        rig.remote.run_write()
    names = page_identities(root_salt(bytes(32), SCOPE), pages(1, 2, 3), PAGE)
    other = page_identities(names[0], pages(4), PAGE)
    assert len(order) == 4 and set(order) == {*names, *other}
    assert order.index(names[0]) < order.index(names[1]) < order.index(names[2])
    assert order.index(names[0]) < order.index(other[0])


def test_writes_keep_to_their_limits() -> None:
    shared = SharedStore()
    rig = server(shared, write_batch=3, write_limit=8)
    put(rig, pages(*range(1, 8)))
    put(rig, pages(*range(20, 26)))
    flush(rig)
    assert [len(job.pages) for job in rig.remote.write_jobs] == [3, 3, 2]
    rig.cache.flush_writes()
    assert len(rig.remote.write_jobs) == 3
    rig.remote.run_write(1)
    tick(rig)
    rig.cache.flush_writes()
    assert [len(job.pages) for job in rig.remote.write_jobs] == [3, 2, 3], "one for one, in any order"
    rig.remote.run_write(0)
    tick(rig)
    rig.cache.flush_writes()
    assert [len(job.pages) for job in rig.remote.write_jobs] == [2, 3, 2]
    settle(rig)
    assert len(shared.pages) == 13 and tier(rig).stats.stored == 13 * PAGE
    assert_nothing_left(rig)


def test_a_small_run_and_a_long_one_share_a_batch() -> None:
    shared = SharedStore()
    rig = server(shared, write_batch=4, write_limit=4)
    put(rig, pages(1, 2))
    put(rig, pages(20, 21, 22, 23, 24))
    flush(rig)
    (job,) = rig.remote.write_jobs
    assert len(job.pages) == 4
    tick(rig)
    settle(rig)
    assert len(shared.pages) == 7 and all(n.stored for n in rig.cache.tree.walk())


def test_a_batch_that_is_full_keeps_the_rest_of_a_path_for_the_next() -> None:
    shared = SharedStore()
    rig = server(shared, write_batch=2, write_limit=2)
    rig.remote.up = False
    tick(rig)
    put(rig, pages(1, 2))
    put(rig, pages(1, 2, 3))
    flush(rig)
    tier(rig)._queue.reverse()
    rig.remote.up = True
    rig.remote.learn()
    tick(rig)
    rig.cache.flush_writes()
    assert [len(job.pages) for job in rig.remote.write_jobs] == [2]
    settle(rig)
    assert len(shared.pages) == 3


def test_a_node_split_while_it_is_queued_is_written_whole() -> None:
    shared = SharedStore()
    rig = server(shared)
    rig.remote.up = False
    tick(rig)
    put(rig, pages(1, 2, 3, 4))
    flush(rig)
    put(rig, pages(1, 2, 7))
    rig.remote.up = True
    settle(rig)
    assert len(shared.pages) == 5 and tier(rig).stats.stored == 5 * PAGE
    assert all(n.stored for n in rig.cache.tree.walk())


def test_a_node_split_while_it_is_written_is_stored_whole() -> None:
    rig = server(SharedStore())
    put(rig, pages(1, 2, 3, 4))
    flush(rig)
    assert device_len(rig, pages(1, 2, 7)) == 2 * PAGE
    assert rig.cache.tree.nodes == 2
    rig.cache.check()
    rig.remote.run_write()
    tick(rig)
    assert [n.stored for n in rig.cache.tree.walk()] == [True, True]
    assert_nothing_left(rig)


def test_what_is_gone_from_the_host_is_not_written() -> None:
    shared = SharedStore()
    rig = server(shared, write_limit=2, write_batch=2)
    put(rig, pages(1, 2))
    put(rig, pages(3, 4))
    put(rig, pages(5, 6))
    flush(rig)
    rig.cache.evict(100)
    assert rig.cache.evict_host(100) == 4, "what is being written stays"
    settle(rig)
    assert len(shared.pages) == 2
    assert tier(rig).stats.store_declined == 4 * PAGE
    assert_nothing_left(rig)


def test_what_came_back_to_the_host_while_it_was_queued_is_written_once() -> None:
    shared = SharedStore()
    rig = server(shared)
    rig.remote.up = False
    tick(rig)
    put(rig, pages(1, 2))
    flush(rig)
    rig.cache.evict_host(100)
    put(rig, pages(1, 2))
    node = node_at(rig, pages(1, 2))
    assert node.host is ABSENT and node.store_queued
    rig.cache._copy_down(node)
    rig.remote.up = True
    settle(rig)
    assert tier(rig).stats.stored == 2 * PAGE and node.stored


def test_the_rest_of_a_run_whose_tail_was_evicted_is_written() -> None:
    shared = SharedStore()
    rig = server(shared)
    rig.remote.up = False
    tick(rig)
    put(rig, pages(1, 2, 3, 4))
    flush(rig)
    rig.cache.evict(100)
    assert rig.cache.evict_host(1) == 1
    rig.remote.up = True
    settle(rig)
    assert len(shared.pages) == 3


def test_kind_backend_down_means_server_down_writes_go_on_after_an_outage() -> None:
    shared = SharedStore()
    rig = server(shared, write_batch=2, write_limit=4)
    put(rig, pages(1, 2, 3, 4))
    put(rig, pages(5, 6))
    flush(rig)
    rig.remote.up = False
    while rig.remote.write_jobs:
        rig.remote.run_write()
    tick(rig)
    assert not shared.pages and tier(rig).stats.store_failed == 4 * PAGE
    rig.cache.flush_writes()
    assert not rig.remote.write_jobs and not rig.cache.pending()
    rig.cache.want("a", SCOPE, pages(8))
    assert not rig.cache.waits("a") and not rig.remote.lookup_jobs
    rig.remote.up = True
    settle(rig)
    assert len(shared.pages) == 6 and all(n.stored for n in rig.cache.tree.walk())
    rig.cache.unwant("a")
    assert_nothing_left(rig)


def refuse(rig: Rig, stored: int = 0) -> None:
    """A store that answers but takes only so many pages, for it is full."""
    job = rig.remote.write_jobs.pop(0)
    rig.remote.written.post(job.seq, stored)
    tick(rig)


@pytest.mark.parametrize("stored", [0, 1])
def test_a_full_store_is_not_offered_the_same_again(stored: int) -> None:
    rig = server(SharedStore())
    put(rig, pages(1, 2))
    flush(rig)
    refuse(rig, stored)
    rig.cache.flush_writes()
    assert not rig.remote.write_jobs and not rig.cache.pending()
    assert tier(rig).stats.store_failed == (2 - stored) * PAGE and tier(rig).stats.stored == stored * PAGE
    assert not node_at(rig, pages(1, 2)).stored
    put(rig, pages(1, 2, 3))
    flush(rig)
    (job,) = rig.remote.write_jobs
    assert len(job.pages) == 3, "a page without those before it would not be found"
    refuse(rig, 3)
    assert_nothing_left(rig)


def test_what_the_policy_does_not_expect_back_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedStore()
    rig = server(shared)
    unworthy = {pages(2)[0], pages(8)[0]}
    monkeypatch.setattr(rig.cache.tree.policy, "worth_storing", lambda node: node.tokens[0] not in unworthy)
    for tokens in (pages(1), pages(1, 2), pages(1, 2, 3, 4), pages(8), pages(9)):
        put(rig, tokens)
        flush(rig)
    settle(rig)
    names = {name for _, _, name in shared.pages}
    salt = root_salt(bytes(32), SCOPE)
    assert names == {*page_identities(salt, pages(1), PAGE), *page_identities(salt, pages(9), PAGE)}
    assert tier(rig).stats.store_refused == 4 * PAGE, "the two, and what is below one of them"
    assert_nothing_left(rig)


def test_kind_stale_after_weight_update_queued_writes_are_dropped() -> None:
    shared = SharedStore()
    rig = server(shared, write_batch=2, write_limit=2)
    put(rig, pages(1, 2))
    put(rig, pages(3, 4))
    flush(rig)
    row = put(rig, pages(3, 4, 5))
    node = node_at(rig, pages(3, 4, 5))
    rig.cache.lock(node)
    rig.cache.advance(bytes([9]) * 32)
    assert node.doubt is Doubt.STALE and len(row) == 3 * PAGE
    settle(rig)
    assert {key[0] for key in shared.pages} == {bytes(32)} and len(shared.pages) == 2
    rig.cache.unlock(node)
    settle(rig)
    assert_nothing_left(rig)
    assert rig.cache.host_pages.used == 0


def test_kind_stale_after_weight_update_pages_of_old_weights_are_not_written_as_new_ones() -> None:
    """A copy in flight keeps them on the host; they are no pages of the new weights."""
    shared = SharedStore()
    rig = server(shared)
    rig.remote.up = False
    tick(rig)
    to_host(rig, pages(1, 2))
    rig.cache.load(node_at(rig, pages(1, 2)))
    rig.cache.start_loads()
    rig.cache.advance(bytes([9]) * 32)
    rig.remote.up = True
    rig.remote.learn()
    tick(rig)
    assert tier(rig).usable and rig.cache.host_pages.used == 2
    rig.cache.flush_writes()
    assert not rig.remote.write_jobs and tier(rig).stats.store_declined == 2 * PAGE
    settle(rig)
    assert not shared.pages and rig.cache.host_pages.used == 0


def test_kind_source_freed_while_in_flight_a_write_keeps_its_pages() -> None:
    shared = SharedStore()
    rig = server(shared, host_pages=6, write_limit=2, write_batch=2)
    put(rig, pages(1, 2, 3, 4))
    flush(rig)
    assert rig.cache.evict_host(100) == 2
    put(rig, pages(20, 21, 22, 23, 24, 25))
    settle_copies(rig)
    rig.remote.run_write()  # compares its source with what it was
    tick(rig)
    assert len(shared.pages) == 2


@pytest.mark.parametrize("event", ["reset", "flush", "other weights", "other epoch"])
def test_kind_source_freed_while_in_flight_a_write_outlives_its_tree(event: str) -> None:
    shared = SharedStore()
    rig = server(shared, host_pages=6, write_limit=4, write_batch=2)
    put(rig, pages(1, 2, 3, 4))
    flush(rig)
    assert len(rig.remote.write_jobs) == 2
    EVENTS[event](rig)
    rig.cache.check()
    for page in range(20, 26):
        put(rig, pages(page))
    settle_copies(rig)
    assert rig.cache.host_pages.free == 0
    for left in (1, 0):
        rig.remote.run_write()
        tick(rig)
        held = 4 if event.startswith("other") and left else 2 * left  # the second write holds the whole path
        assert rig.cache.host_pages.used == held + 2
    assert {key[:2] for key in shared.pages} == {(bytes(32), 0)}, "they say of which version they are"
    assert tier(rig)._writing == 0
    settle(rig)
    # What was computed between a flush and the claim of its epoch is dropped with the claim.
    found = 0 if event in ("flush", "other epoch") else 1
    assert [use(rig, pages(page)) for page in range(20, 26)] == [found] * 6
    assert_nothing_left(rig)


def test_kind_source_freed_while_in_flight_a_reset_forgets_what_was_to_be_written() -> None:
    """Host pages of the old tree belong to others now."""
    shared = SharedStore()
    rig = server(shared)
    rig.remote.up = False
    tick(rig)
    put(rig, pages(1, 2))
    flush(rig)
    _reset(rig, flush=False)
    rig.remote.up = True
    tick(rig)
    assert not rig.cache.pending()
    put(rig, pages(3))
    settle(rig)
    assert len(shared.pages) == 1 and tier(rig).stats.stored == PAGE


def test_writes_begun_before_a_reset_count_against_the_limit() -> None:
    rig = server(SharedStore(), write_limit=2, write_batch=2)
    put(rig, pages(1, 2))
    flush(rig)
    _reset(rig, flush=False)
    put(rig, pages(3, 4))
    flush(rig)
    assert len(rig.remote.write_jobs) == 1
    rig.remote.run_write()
    tick(rig)
    rig.cache.flush_writes()
    assert len(rig.remote.write_jobs) == 1


# A host pool of which all is in use


@pytest.mark.parametrize("policy", list(WritePolicy))
def test_the_device_goes_on_while_stores_hold_the_whole_host_pool(policy: WritePolicy) -> None:
    """A window and writes leave no host page: nothing is backed up, and nobody waits for it."""
    shared = stocked(pages(1, 2, 3, 4))
    rig = server(shared, host_pages=6, device_pages=8, window=4, write_limit=2, policy=policy)
    put(rig, pages(30, 31))
    flush(rig)
    rig.cache.evict(2 * PAGE)
    flush(rig)
    rig.cache.want("a", SCOPE, pages(1, 2, 3, 4))
    look(rig)
    assert rig.cache.host_pages.free == 0 and len(rig.remote.write_jobs) == 1
    for first in (40, 50, 60):
        put(rig, pages(*range(first, first + 6)))
        flush(rig)
        assert use(rig, pages(*range(first, first + 6))) == 6
    rig.cache.want("b", SCOPE, pages(*range(60, 66), 70))
    assert rig.cache.evict(1000) == 8 * PAGE and rig.cache.stats.evicted_lost == 18 * PAGE
    settle(rig)
    assert use(rig, pages(1, 2, 3, 4)) == 4 and use(rig, pages(30, 31)) == 2
    rig.cache.unwant("a")
    rig.cache.unwant("b")
    settle(rig)
    assert_nothing_left(rig)


# Epochs


def test_without_a_known_epoch_the_stores_are_not_used() -> None:
    shared = stocked(pages(1, 2))
    rig = server(shared, known=False)
    tick(rig)
    rig.cache.want("a", SCOPE, pages(1, 2))
    put(rig, pages(5))
    flush(rig)
    assert not rig.cache.waits("a") and not rig.remote.lookup_jobs and not rig.remote.write_jobs
    assert not rig.cache.pending()
    rig.remote.learn()
    tick(rig)
    assert rig.cache.pending()
    rig.cache.flush_writes()
    assert len(rig.remote.write_jobs) == 1
    rig.cache.want("a", SCOPE, pages(1, 2))
    settle(rig)
    assert cached(rig, pages(1, 2)) == 2


def test_a_higher_epoch_is_adopted_in_the_tick() -> None:
    shared = stocked(pages(1, 2))
    rig = server(shared)
    rig.cache.want("a", SCOPE, pages(1, 2))
    settle(rig)
    era = rig.cache.era
    rig.remote.mark(bytes(32), 2)
    rig.remote.learn()
    rig.cache.load(node_at(rig, pages(1, 2)))
    rig.cache.settle_loads(rig.cache.start_loads())
    assert (rig.cache.epoch, rig.cache.era) == (0, era), "not between a batch and its results"
    assert cached(rig, pages(1, 2)) == 2
    tick(rig)
    assert (rig.cache.epoch, rig.cache.era, tier(rig).epoch) == (2, era + 1, 2)
    assert rig.remote.version == (bytes(32), 2) and not tier(rig).usable
    assert cached(rig, pages(1, 2)) == 0
    tick(rig)
    assert rig.cache.era == era + 1, "adopted once"
    rig.cache.want("a", SCOPE, pages(1, 2))
    assert not rig.cache.waits("a"), "the stores say first that this is the highest"
    rig.remote.learn()
    tick(rig)
    put(rig, pages(1, 2))
    settle(rig)
    assert {key[1] for key in shared.pages} == {0, 2}


def test_a_lower_epoch_changes_nothing() -> None:
    rig = server(SharedStore())
    rig.cache.advance(epoch=8)
    rig.remote.learn()
    rig.remote.known = 4
    era = rig.cache.era
    tick(rig)
    assert (rig.cache.epoch, rig.cache.era) == (8, era)


def test_kind_stale_after_weight_update_a_flush_reaches_all_servers() -> None:
    shared = SharedStore()
    one, two = server(shared), server(shared)
    put(one, pages(1, 2))
    settle(one)
    two.cache.want("a", SCOPE, pages(1, 2))
    settle(two)
    _reset(one, flush=True)
    assert one.cache.epoch == 1 and one.remote.version == (bytes(32), 1) and not tier(one).usable
    for rig in (one, two):
        rig.remote.learn()
        tick(rig)
        rig.remote.learn()
        tick(rig)
        assert rig.cache.epoch == 2 == shared.epochs[bytes(32)] and cached(rig, pages(1, 2)) == 0
        rig.cache.want("b", SCOPE, pages(1, 2))
        settle(rig)
        assert cached(rig, pages(1, 2)) == 0 and tier(rig).stats.found == (0 if rig is one else 2 * PAGE)


def test_a_reset_without_flush_keeps_what_stores_hold() -> None:
    shared = SharedStore()
    rig = server(shared)
    put(rig, pages(1, 2))
    settle(rig)
    _reset(rig, flush=False)
    assert not shared.epochs and tier(rig).usable and rig.cache.epoch == 0
    rig.cache.want("a", SCOPE, pages(1, 2))
    settle(rig)
    assert use(rig, pages(1, 2)) == 2


def test_kind_stale_after_weight_update_other_weights_find_nothing() -> None:
    rig = server(stocked(pages(1, 2)))
    rig.cache.advance(bytes([9]) * 32)
    assert not tier(rig).usable and rig.remote.version == (bytes([9]) * 32, 0)
    rig.remote.learn()
    tick(rig)
    rig.cache.want("a", SCOPE, pages(1, 2))
    look(rig)
    assert not rig.cache.waits("a") and tier(rig).stats.found == 0
    rig.cache.advance(bytes(32))
    rig.remote.learn()
    tick(rig)
    rig.cache.want("a", SCOPE, pages(1, 2))
    settle(rig)
    assert use(rig, pages(1, 2)) == 2, "back to the first weights, whose pages are still good"


def test_an_unhealthy_store_is_not_asked() -> None:
    rig = server(stocked(pages(1, 2)))
    rig.remote.up = False
    tick(rig)
    rig.cache.want("a", SCOPE, pages(1, 2))
    assert not rig.cache.waits("a") and not rig.remote.lookup_jobs
    rig.remote.up = True
    tick(rig)
    rig.cache.want("a", SCOPE, pages(1, 2))
    assert rig.cache.waits("a")


# Results


def test_more_results_than_lanes_take_several_steps() -> None:
    count = 2 * LANES + 3
    prompts = [pages(10 * i + 1, 10 * i + 2) for i in range(count)]
    rig = server(stocked(*prompts), device_pages=2 * count, host_pages=2 * count)
    for i, tokens in enumerate(prompts):
        rig.cache.want(f"r{i}", SCOPE, tokens)
    for i in reversed(range(count)):
        rig.remote.run_lookup(i)
    for done in (LANES, 2 * LANES, count):
        tick(rig)
        assert len(rig.remote.fetch_jobs) == done
    for i in reversed(range(1, count)):
        rig.remote.run_fetch(i)
    tick(rig)
    ready = [i for i in range(count) if not rig.cache.waits(f"r{i}")]
    assert ready == list(range(1, LANES)), "a slow one holds up no other but those too far behind it"
    rig.remote.run_fetch(0)
    for done in (LANES, 2 * LANES, count):
        tick(rig)
        assert sum(not rig.cache.waits(f"r{i}") for i in range(count)) == done
    while rig.remote.fetch_jobs:
        rig.remote.run_fetch(len(rig.remote.fetch_jobs) - 1)
    tick(rig)
    for i, tokens in enumerate(prompts):
        assert tier(rig).take_arrived(f"r{i}") == 2 * PAGE
        assert use(rig, tokens) == 2
        rig.cache.unwant(f"r{i}")
    assert_nothing_left(rig)


def test_a_window_that_is_settled_early_waits_until_its_arrival_counts() -> None:
    count = LANES + 2
    prompts = [pages(10 * i + 1) for i in range(count)]
    shared = stocked(*prompts)
    rig = server(shared)
    for i, tokens in enumerate(prompts):
        rig.cache.want(f"r{i}", SCOPE, tokens)
    rig.remote.run_all()
    tick(rig)
    tick(rig)
    shared.pages.clear()
    rig.remote.run_all()
    tick(rig)
    assert rig.cache.host_pages.used == count - LANES
    tick(rig)
    assert rig.cache.host_pages.used == 0
    for i in range(count):
        rig.cache.unwant(f"r{i}")
    assert_nothing_left(rig)


def test_many_writes_at_once() -> None:
    shared = SharedStore()
    count = 2 * LANES + 1
    rig = server(shared, write_batch=1, write_limit=count, device_pages=count, host_pages=count)
    put(rig, pages(*range(1, 2 * LANES + 2)))
    flush(rig)
    assert len(rig.remote.write_jobs) == 2 * LANES + 1
    while rig.remote.write_jobs:
        rig.remote.run_write(len(rig.remote.write_jobs) - 1)
    for done in (LANES, 2 * LANES, 2 * LANES + 1):
        tick(rig)
        assert tier(rig).stats.stored == done * PAGE
    assert_nothing_left(rig)


# Over time


def test_nothing_grows_over_time() -> None:
    """Hits, misses and aborts, a hundred times: what was applied is forgotten."""
    shared = stocked(pages(1, 2, 3))
    rig = server(shared, window=2)
    for i in range(100):
        rig.cache.want("a", SCOPE, pages(1, 2, 3))
        rig.cache.want("b", SCOPE, pages(1000 + i))
        rig.cache.want("c", SCOPE, pages(1, 2, 3))
        rig.cache.unwant("c")
        settle(rig)
        put(rig, pages(2000 + i))
        settle(rig)
        rig.cache.unwant("a")
        rig.cache.unwant("b")
        _evict(rig)
    settle(rig)
    tick(rig)
    assert_nothing_left(rig)
    remote, stores = tier(rig), rig.remote
    for queue in (stores.lookups, stores.arrivals, stores.settled, stores.written):
        assert queue.done() >= 100 and not queue._values
    assert not remote._queue and not remote._unsettled and not remote._disowned


def test_an_outage_does_not_pile_up_what_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache_ext.core.remote_tier._DEAD_SLACK", 8)
    rig = server(SharedStore())
    rig.remote.up = False
    tick(rig)
    put(rig, pages(1, 2))
    flush(rig)
    for i in range(50):
        put(rig, pages(1, 2, 100 + i))
        flush(rig)
        node = node_at(rig, pages(1, 2, 100 + i))
        assert node.store_queued
        _drop(rig, node)
        assert len(tier(rig)._queue) <= 2 * (rig.cache.tree.nodes + 1) + 8
    rig.remote.up = True
    settle(rig)
    assert len(rig.remote.shared.pages) == 2
    assert tier(rig).stats.store_declined == 50 * PAGE


def _drop(rig: Rig, node: object) -> None:
    """Evict the one page at the end."""
    rig.cache.evict(PAGE)
    rig.cache.evict_host(1)
    assert node.parent is None  # type: ignore[attr-defined]


# Ranks


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Three TP ranks; each keeps its own heads in its own store."""
    group = Ranks(3, lambda reduce: server(stocked(LONG), window=4, reduce=reduce))
    yield group
    group.close()


def agree(ranks: Ranks) -> None:
    ranks.each(tick)
    ranks.same(page_tables)
    ranks.same(lambda rig: [rig.cache.waits(rid) for rid in "ab"])
    ranks.same(lambda rig: vars(tier(rig).stats))
    ranks.same(lambda rig: (rig.cache.epoch, tier(rig).usable))


def known(ranks: Ranks) -> None:
    ranks.each(lambda rig: rig.remote.learn())
    agree(ranks)
    assert ranks.same(lambda rig: tier(rig).usable)


@pytest.mark.timeout(60)
def test_kind_rank_divergent_hits_in_the_store(ranks: Ranks) -> None:
    """One rank's store has less, and another's brings less of that: all go by the least."""
    known(ranks)
    names = page_identities(root_salt(bytes(32), SCOPE), LONG, PAGE)
    del ranks.rigs[1].remote.shared.pages[(bytes(32), 0, names[3])]
    ranks.each(lambda rig: rig.cache.want("a", SCOPE, LONG))
    for rank in (2, 0, 1):
        assert ranks.same(lambda rig: len(rig.remote.fetch_jobs)) == 0
        ranks.rigs[rank].remote.run_lookup()
        agree(ranks)
    assert ranks.same(lambda rig: [job.pages.tolist() for job in rig.remote.fetch_jobs]) == [[0, 1, 2]]
    for rank in (1, 2, 0):
        assert ranks.same(lambda rig: rig.cache.waits("a"))
        ranks.rigs[rank].remote.run_fetch(late=rank == 2)
        agree(ranks)
    assert ranks.same(lambda rig: cached(rig, LONG)) == 1 and not ranks.same(lambda rig: rig.cache.waits("a"))
    assert ranks.same(lambda rig: rig.cache.host_pages.used) == 3
    for rank in (0, 1, 2):
        assert ranks.same(lambda rig: rig.cache.host_pages.used) == 3
        ranks.rigs[rank].remote.run_fetch()
        agree(ranks)
    assert ranks.same(lambda rig: rig.cache.host_pages.used) == 1
    assert ranks.same(lambda rig: use(rig, LONG)) == 1
    ranks.each(lambda rig: rig.cache.unwant("a"))
    ranks.each(assert_nothing_left)


@pytest.mark.timeout(60)
def test_kind_rank_divergent_hits_a_write_that_one_rank_failed(ranks: Ranks) -> None:
    """Stored is what all ranks have stored; the others' part is of no use alone."""
    known(ranks)
    ranks.each(lambda rig: put(rig, pages(20, 21)).tolist())
    ranks.each(flush)
    for rank, rig in enumerate(ranks.rigs):
        job = rig.remote.write_jobs.pop()
        rig.remote.written.post(job.seq, 1 if rank == 1 else 2)
        agree(ranks)
    assert ranks.same(lambda rig: tier(rig).stats.stored) == PAGE
    assert ranks.same(lambda rig: node_at(rig, pages(20, 21)).stored) is False


@pytest.mark.timeout(60)
def test_kind_rank_divergent_hits_health_and_epoch(ranks: Ranks) -> None:
    """One rank in trouble, or not sure of the epoch, is enough; the highest epoch counts."""
    for rank in (0, 2, 1):
        assert ranks.same(lambda rig: tier(rig).usable) is False
        ranks.rigs[rank].remote.learn()
        agree(ranks)
    assert ranks.same(lambda rig: tier(rig).usable) is True
    ranks.rigs[2].remote.up = False
    agree(ranks)
    assert ranks.same(lambda rig: tier(rig).usable) is False
    ranks.rigs[2].remote.up = True
    agree(ranks)
    assert ranks.same(lambda rig: tier(rig).usable) is True
    ranks.rigs[1].remote.known = 4
    agree(ranks)
    assert ranks.same(lambda rig: (rig.cache.epoch, rig.remote.version)) == (4, (bytes(32), 4))
    assert ranks.same(lambda rig: tier(rig).usable) is False


@pytest.mark.timeout(60)
def test_kind_rank_divergent_hits_detached_on_all_ranks(ranks: Ranks) -> None:
    """Ranks that are at different points of a fetch and a write let go of both together."""
    known(ranks)
    ranks.each(lambda rig: put(rig, pages(20, 21)).tolist())
    ranks.each(flush)
    ranks.each(lambda rig: rig.cache.want("a", SCOPE, LONG))
    for rank in (0, 1):
        ranks.rigs[rank].remote.run_lookup()
    ranks.rigs[2].remote.run_write()
    agree(ranks)
    ranks.each(lambda rig: tier(rig).detach())
    assert ranks.same(lambda rig: rig.cache.waits("a")) is False
    for rank in (2, 1, 0):
        ranks.rigs[rank].remote.run_all()
        agree(ranks)
    agree(ranks)
    assert ranks.same(lambda rig: tier(rig).stats.stored) == 0
    ranks.each(lambda rig: rig.cache.unwant("a"))
    ranks.each(assert_nothing_left)
    ranks.each(lambda rig: tier(rig).attach())
    assert ranks.same(lambda rig: tier(rig).usable) is False
    agree(ranks)
    assert ranks.same(lambda rig: tier(rig).usable) is True


@pytest.mark.timeout(60)
def test_kind_collective_mismatch_across_ranks_with_stores(ranks: Ranks) -> None:
    """One reduction per tick, of one length, whatever each rank's stores have done."""
    before = [len(calls) for calls in ranks.shared.calls]
    known(ranks)
    ranks.each(lambda rig: rig.cache.want("a", SCOPE, LONG))
    ranks.rigs[0].remote.run_lookup()
    agree(ranks)
    ranks.each(lambda rig: rig.remote.run_all())
    agree(ranks)
    ranks.rigs[2].remote.up = False
    agree(ranks)
    ranks.each(lambda rig: rig.cache.advance())
    ranks.each(lambda rig: rig.remote.run_all())
    agree(ranks)
    ranks.each(lambda rig: _reset(rig, flush=True))
    agree(ranks)
    calls = [seen[n:] for seen, n in zip(ranks.shared.calls, before, strict=True)]
    assert calls == [[3 + VECTOR] * 6] * 3
    assert_owned_once(ranks.rigs[0])


def test_the_vector_has_one_length() -> None:
    rig = server(stocked(LONG), known=False)
    assert tier(rig).vector().shape == (VECTOR,)
    rig.remote.learn()
    tick(rig)
    for i in range(3 * LANES):
        rig.cache.want(f"r{i}", SCOPE, pages(100 + i))
    rig.remote.run_all()
    vector = tier(rig).vector()
    assert vector.shape == (VECTOR,) and vector.dtype == np.int64


def test_stores_and_copies_share_a_step_without_getting_in_each_others_way() -> None:
    """A node is read by a store, loaded, and cut in two at the same time."""
    shared = SharedStore()
    rig = server(shared)
    put(rig, pages(1, 2, 3))
    flush(rig)
    rig.cache.evict(100)
    node = node_at(rig, pages(1, 2, 3))
    rig.cache.load(node)
    assert {t.kind for t in node.tickets} == {Kind.STORE, Kind.LOAD}
    rig.cache.check()
    assert device_len(rig, pages(1, 9)) == PAGE
    rig.cache.check()
    rig.remote.run_write()
    tick(rig)
    upto = rig.cache.start_loads()
    rig.cache.settle_loads(upto)
    assert content(rig, pages(1, 2, 3)).tolist() == kv_of(SCOPE, pages(1, 2, 3)).tolist()
    assert len(shared.pages) == 3
    assert_nothing_left(rig)


def test_whose_turn_has_come_tells_the_stores() -> None:
    rig = server(stocked(pages(1, 2, 3, 4)))
    rig.cache.want("a", SCOPE, pages(1, 2, 3, 4), 1.5)
    assert [query.ahead for _, query in rig.remote.lookup_jobs] == [1.5]
    assert rig.cache.coming("a") == 0
    rig.cache.turn_came("a")
    rig.cache.turn_came("stranger")
    assert rig.remote.turns == [1]
    rig.remote.run_lookup()
    rig.cache.tick()
    assert rig.cache.coming("a") == 4 * PAGE
    rig.cache.unwant("a")
    rig.cache.turn_came("a")
    assert rig.remote.turns == [1] and rig.cache.coming("a") == 0
    settle(rig)
    assert_idle(rig)
