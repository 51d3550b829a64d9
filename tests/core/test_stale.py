"""Weight updates: what older weights computed is found in no tier, and what is in flight arrives nowhere."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from hicache_ext.core.cache import WritePolicy
from hicache_ext.core.page import PrefixScope, page_identities, root_salt
from hicache_ext.core.residency import Doubt, Residency
from hicache_ext.core.tickets import Kind
from tests.core.fakes import (
    Header,
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
OTHER = b"other weights".ljust(32)

both_policies = pytest.mark.parametrize("policy", list(WritePolicy))
every_update = pytest.mark.parametrize("namespace", [None, OTHER], ids=["unnamed", "named"])


def pages(*numbers: int) -> np.ndarray:
    return prompt(PAGE, *numbers)


def found(rig: Rig, tokens: np.ndarray, scope: PrefixScope = SCOPE) -> tuple[int, int]:
    """Pages that a lookup finds on the device, and after them on the host only."""
    match = rig.cache.match(scope, tokens, touch=False)
    return match.device_len // PAGE, match.host_len // PAGE


def assert_nothing_left(rig: Rig) -> None:
    assert_idle(rig)
    assert rig.cache.tree.nodes == 0 and rig.cache.host_pages.used == 0
    assert rig.device.available() == rig.device.total


# Nothing is found


@every_update
@both_policies
def test_kind_stale_after_weight_update_nothing_is_found_in_any_tier(
    policy: WritePolicy, namespace: bytes | None
) -> None:
    rig = make_rig(write_policy=policy)
    to_host(rig, pages(1, 2))
    put(rig, pages(3))
    put(rig, pages(1, 4))
    put(rig, pages(1), PrefixScope("scope"))
    rig.cache.load(node_at(rig, pages(1, 2)))
    settle(rig)
    rig.cache.advance(namespace)
    for tokens in (pages(1, 2), pages(3), pages(1, 4)):
        assert found(rig, tokens) == (0, 0)
    assert found(rig, pages(1), PrefixScope("scope")) == (0, 0)
    settle(rig)
    assert_nothing_left(rig)


@every_update
@both_policies
def test_kind_stale_after_weight_update_what_is_computed_then_is_cached(
    policy: WritePolicy, namespace: bytes | None
) -> None:
    rig = make_rig(write_policy=policy)
    tokens = pages(1, 2)
    to_host(rig, tokens)
    rig.cache.advance(namespace)
    to_host(rig, tokens)
    rig.cache.load(node_at(rig, tokens))
    settle(rig)
    assert found(rig, tokens) == (2, 0)
    assert content(rig, tokens).tolist() == kv_of(SCOPE, tokens).tolist()
    assert (rig.cache.stats.refused, rig.cache.stats.loaded) == (0, 2 * PAGE)
    assert_idle(rig)


def test_kind_stale_after_weight_update_pages_are_written_under_the_new_name() -> None:
    rig = make_rig()
    names: list[tuple[bytes, int]] = []
    for namespace in (None, OTHER, None):
        put(rig, pages(1))
        rig.cache.flush_backups()
        (job,) = rig.transfers.backup_jobs
        names.append((job.labels.namespace, job.labels.epoch))
        salt = root_salt(job.labels.namespace, SCOPE)
        assert [job.labels.identities[0].tobytes()] == page_identities(salt, pages(1), PAGE)
        settle(rig)
        rig.cache.advance(namespace)
    assert names == [(bytes(32), 0), (bytes(32), 1), (OTHER, 0)]
    assert (rig.cache.tree.namespace, rig.cache.epoch, rig.cache.era) == (OTHER, 1, 3)


def test_kind_stale_after_weight_update_of_an_empty_cache() -> None:
    rig = make_rig()
    rig.cache.advance()
    rig.cache.advance(OTHER)
    assert (rig.cache.era, rig.cache.epoch) == (2, 0)
    assert_nothing_left(rig)


def test_kind_stale_after_weight_update_a_flush_is_one_too() -> None:
    """The user flushes the cache after swapping the weights: late writes of before may not be read."""
    rig = make_rig()
    rig.cache.reset(flush=True)
    assert rig.cache.epoch == 1
    put(rig, pages(1))
    rig.cache.flush_backups()
    assert rig.transfers.backup_jobs[0].labels.epoch == 1
    settle(rig)
    assert_idle(rig)


# Late writes


@every_update
@both_policies
def test_kind_stale_after_weight_update_a_backup_in_flight_is_dropped(
    policy: WritePolicy, namespace: bytes | None
) -> None:
    """Old weights' pages are still being written when new ones with the same tokens arrive."""
    rig = make_rig(write_policy=policy)
    put(rig, pages(1, 2))
    node = node_at(rig, pages(1, 2))
    rig.cache._submit_backup(rig.cache._reserve_host(node))
    assert node.host is PENDING
    rig.cache.advance(namespace)
    assert (node.doubt, node.host) == (Doubt.STALE, PENDING)
    assert found(rig, pages(1, 2)) == (0, 0) and rig.cache.host_pages.used == 2
    assert_owned_once(rig)
    put(rig, pages(1, 2))
    rig.cache.tick()
    assert rig.cache.host_pages.used == 2, "freed while a copy writes to it"
    rig.transfers.run_backup(0)
    rig.cache.tick()
    assert rig.cache.host_pages.used == 0 and found(rig, pages(1, 2)) == (2, 0)
    assert_owned_once(rig)
    settle(rig)
    rig.cache.evict(rig.device.total)
    rig.cache.load(node_at(rig, pages(1, 2)))
    settle(rig)
    assert rig.cache.stats.refused == 0
    assert content(rig, pages(1, 2)).tolist() == kv_of(SCOPE, pages(1, 2)).tolist()
    assert_idle(rig)


def test_kind_stale_after_weight_update_what_waits_for_its_backup_is_not_written() -> None:
    rig = make_rig()
    put(rig, pages(1, 2))
    rig.cache.lock(node_at(rig, pages(1, 2)))
    held = node_at(rig, pages(1, 2))
    rig.cache.advance()
    rig.cache.flush_backups()
    assert not rig.transfers.backup_jobs and not rig.cache.pending()
    rig.cache.unlock(held)
    rig.cache.tick()
    assert_nothing_left(rig)


def test_kind_stale_after_weight_update_write_back_does_not_write_it() -> None:
    rig = make_rig(write_policy=WritePolicy.WRITE_BACK)
    put(rig, pages(1, 2, 3))
    held = node_at(rig, pages(1, 2, 3))
    rig.cache.lock(held)
    rig.cache.advance()
    rig.cache.unlock(held)
    assert rig.cache.evict(2 * PAGE) == 2 * PAGE
    assert rig.cache.tickets.last_seq(Kind.BACKUP) == 0 and rig.cache.stats.evicted_lost == 2 * PAGE
    rig.cache.tick()
    assert_nothing_left(rig)


def test_kind_stale_after_weight_update_an_eviction_that_waits_for_a_backup_of_before() -> None:
    rig = make_rig()
    put(rig, pages(1, 2))
    rig.cache.flush_backups()
    rig.cache.advance()
    assert rig.device.available() == rig.device.total - 2 * PAGE
    assert rig.cache.evict(2 * PAGE) == 2 * PAGE
    assert found(rig, pages(1, 2)) == (0, 0)
    assert_owned_once(rig)
    rig.cache.tick()
    assert_nothing_left(rig)


# Late loads


@every_update
@pytest.mark.parametrize("stage", ["queued", "started", "copied"])
def test_kind_stale_after_weight_update_a_load_is_dropped(stage: str, namespace: bytes | None) -> None:
    """It verifies, as what it was asked for; that is not what anybody wants any more."""
    rig = make_rig()
    tokens = pages(1, 2)
    to_host(rig, tokens)
    node = node_at(rig, tokens)
    rig.cache.load(node)
    if stage != "queued":
        rig.cache.start_loads()
    if stage == "copied":
        rig.transfers.run_load(0)
    rig.cache.advance(namespace)
    assert (node.doubt, node.device) == (Doubt.STALE, PENDING)
    assert found(rig, tokens) == (0, 0) and rig.cache.host_pages.used == 2
    assert_owned_once(rig)
    assert rig.cache.start_loads() == 1, "a batch that was built for it still waits for it"
    rig.cache.settle_loads(1)
    assert rig.cache.stats.refused == 0
    assert_nothing_left(rig)


def test_kind_stale_after_weight_update_a_load_beside_the_same_prompt_computed_anew() -> None:
    rig = make_rig()
    tokens = pages(1, 2)
    to_host(rig, tokens)
    old = node_at(rig, tokens)
    rig.cache.load(old)
    rig.cache.start_loads()
    rig.cache.advance()
    put(rig, tokens)
    assert node_at(rig, tokens) is not old
    settle(rig)
    assert found(rig, tokens) == (2, 0) and rig.cache.host_pages.used == 2
    assert_idle(rig)


# Late readers


@pytest.mark.parametrize("older", ["epoch", "namespace"])
def test_kind_stale_after_weight_update_an_older_header_is_refused(older: str) -> None:
    """Even if the tree pointed to the page: the header says by which weights it was computed."""
    rig = make_rig()
    tokens = pages(1, 2, 3)
    to_host(rig, tokens)
    old = rig.transfers.headers[host_page(rig, tokens, 1)]
    bytes_of_old = rig.transfers.host[host_page(rig, tokens, 1)].copy()
    rig.cache.advance(OTHER if older == "namespace" else None)
    to_host(rig, tokens)
    place = host_page(rig, tokens, 1)
    new = rig.transfers.headers[place]
    assert old is not None and new is not None and old != new
    identity, namespace, epoch, total = old
    header: Header = old if older == "epoch" else (identity, namespace, new[2], total)
    rig.transfers.headers[place] = header
    rig.transfers.host[place] = bytes_of_old
    rig.cache.load(node_at(rig, tokens))
    settle(rig)
    assert found(rig, tokens) == (1, 0)
    assert (rig.cache.stats.loaded, rig.cache.stats.refused) == (PAGE, 2 * PAGE)
    assert (epoch, namespace) == (0, bytes(32))
    assert_idle(rig)


def test_kind_stale_after_weight_update_a_page_of_before_a_flush_is_refused() -> None:
    rig = make_rig()
    to_host(rig, pages(1))
    place = host_page(rig, pages(1), 0)
    old = rig.transfers.headers[place]
    rig.cache.reset(flush=True)
    rig.device.clear()
    to_host(rig, pages(1))
    rig.transfers.headers[host_page(rig, pages(1), 0)] = old
    rig.cache.load(node_at(rig, pages(1)))
    settle(rig)
    assert found(rig, pages(1)) == (0, 0) and rig.cache.stats.refused == PAGE
    assert_nothing_left(rig)


# Running requests


@both_policies
def test_kind_stale_after_weight_update_a_running_request_keeps_its_pages(policy: WritePolicy) -> None:
    rig = make_rig(write_policy=policy)
    row = put(rig, pages(1, 2, 3))
    put(rig, pages(1, 4))
    held = node_at(rig, pages(1, 2))
    rig.cache.lock(held)
    rig.cache.advance()
    assert held.doubt is Doubt.STALE and rig.cache.tree.protected_tokens == 2 * PAGE
    assert rig.device.available() == rig.device.total - 2 * PAGE, "only what is held stays"
    for _ in range(2):
        put(rig, pages(1, 2, 3))
        assert rig.cache.evict(rig.device.total) == 3 * PAGE
        rig.cache.tick()
        assert_owned_once(rig)
    assert rig.device.kv[row[: 2 * PAGE]].tolist() == kv_of(SCOPE, pages(1, 2)).tolist()
    rig.cache.unlock(held)
    rig.cache.tick()
    assert rig.device.available() == rig.device.total
    assert_idle(rig)


def test_kind_stale_after_weight_update_twice_while_requests_run() -> None:
    rig = make_rig()
    held = []
    for _ in range(3):
        put(rig, pages(1, 2))
        held.append(node_at(rig, pages(1, 2)))
        rig.cache.lock(held[-1])
        rig.cache.advance()
    assert rig.cache.tree.nodes == 3 and rig.cache.tree.protected_tokens == 6 * PAGE
    for node in (held[1], held[2], held[0]):
        rig.cache.unlock(node)
        rig.cache.tick()
        assert_owned_once(rig)
    assert_nothing_left(rig)


def test_kind_stale_after_weight_update_queued_requests_wait_for_nothing() -> None:
    rig = make_rig()
    to_host(rig, pages(1, 2))
    rig.cache.want("r", SCOPE, pages(1, 2))
    rig.cache.advance()
    assert not rig.cache.tree.waiting
    assert rig.cache.want("r", SCOPE, pages(1, 2)).host_len == 0
    rig.cache.unwant("r")
    assert_nothing_left(rig)


# Stale and corrupt


def test_pages_that_were_refused_before_a_weight_update_stay_refused() -> None:
    """Their holder has to compute again; the update alone would let it go on."""
    rig = make_rig()
    tokens = pages(1, 2, 3)
    to_host(rig, tokens)
    rig.transfers.corrupt(host_page(rig, tokens, 1))
    node = node_at(rig, tokens)
    rig.cache.load(node)
    rig.cache.lock(node)
    rig.cache.settle_loads(rig.cache.start_loads())
    upper = node.parent
    assert upper is not None
    rig.cache.advance()
    assert (node.doubt, upper.doubt) == (Doubt.CORRUPT, Doubt.STALE)
    assert found(rig, tokens) == (0, 0) and rig.cache.host_pages.used == 0
    assert_owned_once(rig)
    rig.cache.tick()
    rig.cache.unlock(node)
    rig.cache.tick()
    assert_nothing_left(rig)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_pages_that_are_refused_after_a_weight_update_are_told_as_such(bad: int) -> None:
    rig = make_rig()
    tokens = pages(1, 2, 3)
    to_host(rig, tokens)
    rig.transfers.corrupt(host_page(rig, tokens, bad))
    node = node_at(rig, tokens)
    rig.cache.load(node)
    rig.cache.lock(node)
    rig.cache.start_loads()
    rig.cache.advance()
    rig.cache.settle_loads(1)
    doubts = [n.doubt for n in rig.cache.tree.path(node)]
    assert doubts == [Doubt.CORRUPT, *([Doubt.STALE] if bad else [])]
    assert len(node) == (3 - bad) * PAGE
    assert found(rig, tokens) == (0, 0) and rig.cache.host_pages.used == 0
    assert_owned_once(rig)
    rig.cache.unlock(node)
    rig.cache.tick()
    assert_nothing_left(rig)


def test_a_holder_of_the_sound_part_goes_on_after_update_and_refusal() -> None:
    rig = make_rig()
    tokens = pages(1, 2, 3)
    to_host(rig, tokens)
    rig.transfers.corrupt(host_page(rig, tokens, 2))
    rig.cache.load(node_at(rig, tokens))
    upper = rig.cache.match(SCOPE, pages(1)).device_node
    rig.cache.lock(upper)
    rig.cache.start_loads()
    rig.cache.advance()
    rig.cache.settle_loads(1)
    assert upper.doubt is Doubt.STALE
    assert rig.device.kv[upper.slots].tolist() == kv_of(SCOPE, pages(1)).tolist()
    assert rig.device.available() == rig.device.total - PAGE
    rig.cache.unlock(upper)
    rig.cache.tick()
    assert_nothing_left(rig)


# Several ranks


@pytest.fixture
def three_ranks() -> Iterator[Ranks]:
    ranks = Ranks(3, lambda reduce: make_rig(reduce=reduce))
    yield ranks
    ranks.close()


@pytest.mark.timeout(60)
def test_kind_stale_after_weight_update_on_ranks_whose_copies_progress_differently(
    three_ranks: Ranks,
) -> None:
    ranks = three_ranks
    ranks.each(lambda rig: to_host(rig, pages(1, 2)))
    ranks.rigs[1].transfers.corrupt(host_page(ranks.rigs[1], pages(1, 2), 1))
    ranks.each(lambda rig: rig.cache.load(node_at(rig, pages(1, 2))))
    ranks.each(lambda rig: rig.cache.start_loads())
    ranks.each(lambda rig: put(rig, pages(3)).tolist())
    ranks.each(lambda rig: rig.cache.flush_backups())
    ranks.rigs[0].transfers.drain()
    ranks.rigs[2].transfers.run_backup(0)
    ranks.each(lambda rig: rig.cache.advance(OTHER))
    ranks.same(page_tables)
    ranks.each(lambda rig: put(rig, pages(1, 2, 3)).tolist())
    for rank in (1, 2):
        ranks.rigs[rank].transfers.drain()
        ranks.each(lambda rig: rig.cache.tick())
        ranks.same(page_tables)
        ranks.each(assert_owned_once)
    ranks.each(settle)
    assert ranks.same(lambda rig: (found(rig, pages(1, 2, 3)), rig.cache.host_pages.used)) == ((3, 0), 3)
    ranks.each(assert_idle)
