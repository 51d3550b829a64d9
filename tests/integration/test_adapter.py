"""SGLang's interface over the cache, with SGLang's own requests, pools and allocators on the CPU."""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from tests.releases import only_on

with warnings.catch_warnings():
    # Some of what SGLang imports warns about itself.
    warnings.simplefilter("ignore")
    only_on("0.5.23")
    from sglang.srt.managers import io_struct
    from sglang.srt.mem_cache.base_prefix_cache import (
        BasePrefixCache,
        CacheRequestHandle,
        CacheRequestOutcome,
        EvictParams,
        InitLoadBackParams,
        MatchPrefixParams,
    )
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.server_args import ServerArgs

from hicache_ext.integration import build
from hicache_ext.integration.flags import SETTINGS_ATTRIBUTE
from hicache_ext.integration.settings import Settings
from tests.integration.engine import Engine, prompt

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(params=[1, 4])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = Engine(request.param)
    yield engine
    engine.close()


@pytest.fixture
def paged() -> Iterator[Engine]:
    engine = Engine(4)
    yield engine
    engine.close()


# A request's life


def test_it_is_a_prefix_cache_of_sglang(engine: Engine) -> None:
    assert isinstance(engine.cache, BasePrefixCache)
    assert engine.cache.disable is False and engine.cache.page_size == engine.page
    assert engine.cache.root_node_handle() is engine.cache.root_node is engine.cache.cache.tree.root
    assert engine.cache.supports_prefix_sharing() and engine.cache.load_back_is_cache_owned()
    assert engine.pool.layer_transfer_counter is engine.counters[0]


def test_a_cold_request_finds_nothing_and_leaves_whole_pages(engine: Engine) -> None:
    req = engine.serve(prompt(10))
    assert (req.prefix_len, req.host_hit_length) == (0, 0)
    engine.settle()
    assert engine.cache.evictable_size() == 10 // engine.page * engine.page
    engine.assert_idle()


def test_sizes_add_up_after_every_call(engine: Engine) -> None:
    engine.serve(prompt(9))
    req = engine.request(prompt(14))
    engine.assert_adds_up()
    load = engine.admit(req)
    assert req.prefix_len == 9 // engine.page * engine.page
    assert engine.cache.protected_size() == req.prefix_len
    engine.assert_adds_up(req)
    engine.forward(req, load)
    engine.checkpoint(req)
    assert req.kv.cache_protected_len == req.kv.cache_inserted_len == 14 // engine.page * engine.page
    assert engine.cache.protected_size() == req.kv.cache_protected_len
    engine.assert_adds_up(req)
    engine.checkpoint(req)
    engine.assert_adds_up(req)
    engine.step()
    engine.assert_adds_up(req)
    engine.release(req)
    engine.settle()
    engine.assert_idle()


def test_the_last_token_is_always_computed(engine: Engine) -> None:
    engine.serve(prompt(8))
    req = engine.serve(prompt(8))
    assert req.prefix_len == 7 // engine.page * engine.page


def test_a_limit_of_the_key_is_honoured(engine: Engine) -> None:
    engine.serve(prompt(16))
    for limit in (0, 1, 5, 8, 16, 99):
        key = RadixKey(array("q", prompt(16)), limit=limit)
        result = engine.cache.match_prefix(MatchPrefixParams(key=key))
        assert result.device_prefix_len == min(limit, 16) // engine.page * engine.page
        assert result.cache_protected_len is None, "it would survive a forced miss"


def test_duplicates_are_freed_and_the_row_shows_the_trees_pages(engine: Engine) -> None:
    """Two requests with the same prompt run at once: the second one's pages go, the first one's stay."""
    first, second = engine.request(prompt(12)), engine.request(prompt(12))
    loads = [engine.admit(first), engine.admit(second)]
    assert second.prefix_len == 0
    for req, load in zip((first, second), loads, strict=True):
        engine.forward(req, load)
    kept, given_up = engine.row(first), engine.row(second)
    assert not set(kept.tolist()) & set(given_up.tolist())
    engine.checkpoint(first)
    free = engine.allocator.available_size()
    engine.checkpoint(second)
    assert engine.allocator.available_size() == free + 12
    assert engine.row(second).tolist() == kept.tolist() == engine.row(first).tolist()
    assert engine.cache.protected_size() == 12
    engine.assert_adds_up(first, second)
    engine.release(first)
    engine.assert_adds_up(second)
    engine.release(second)
    engine.assert_idle()
    free_slots = engine.allocator.alloc(engine.allocator.available_size()).tolist()
    assert len(set(free_slots)) == len(free_slots) and not set(free_slots) & set(kept.tolist())


def test_only_the_duplicated_part_is_freed(paged: Engine) -> None:
    first, second = paged.request(prompt(9)), paged.request([*prompt(9), 50, 51, 52, 53, 54])
    loads = [paged.admit(first), paged.admit(second)]
    paged.forward(first, loads[0])
    paged.forward(second, loads[1])
    mine = paged.row(second)
    paged.checkpoint(first)
    paged.checkpoint(second)
    assert paged.row(second)[:8].tolist() == paged.row(first)[:8].tolist()
    assert paged.row(second)[8:].tolist() == mine[8:].tolist()
    paged.assert_adds_up(first, second)
    paged.release(first)
    paged.release(second)
    paged.assert_idle()


def test_a_released_request_without_checkpoint_leaves_only_what_was_published(engine: Engine) -> None:
    """Retraction: what was checkpointed before stays, the rest is freed."""
    req = engine.request(prompt(12))
    engine.forward(req, engine.admit(req))
    engine.release(req, checkpoint=False)
    assert engine.cache.total_size() == 0
    engine.assert_idle()


def test_a_checkpoint_moves_the_lock_and_leaves_one_behind_also_if_it_inserts_nothing(paged: Engine) -> None:
    req = paged.request(prompt(3))
    paged.forward(req, paged.admit(req))
    paged.checkpoint(req)
    assert req.lock is not None and req.last_node is paged.cache.root_node
    assert req.kv.cache_protected_len == 0
    paged.release(req)
    paged.assert_idle()


def test_chunks_of_a_prompt_are_published_one_after_the_other(paged: Engine) -> None:
    req = paged.request(prompt(20))
    paged.forward(req, paged.admit(req))
    for up_to, protected in ((6, 4), (13, 12), (20, 20)):
        paged.cache.checkpoint(req, up_to=up_to)
        assert req.kv.cache_protected_len == protected == paged.cache.protected_size()
        paged.assert_adds_up(req)
    paged.release(req)
    paged.assert_idle()


def test_locks_tell_how_many_tokens_they_moved(engine: Engine) -> None:
    engine.serve(prompt(8))
    engine.settle()
    key = RadixKey(array("q", prompt(8)))
    node = engine.cache.match_prefix(MatchPrefixParams(key=key)).last_device_node
    assert engine.cache.inc_lock_ref(node).delta == -8
    assert engine.cache.inc_lock_ref(node).delta == 0
    assert engine.cache.dec_lock_ref(node).delta == 0
    assert engine.cache.dec_lock_ref(node).delta == 8


def test_token_buffers_are_not_kept(engine: Engine) -> None:
    """An array that a numpy view still uses cannot grow: the next decoded token would raise BufferError."""
    engine.serve(prompt(8))
    req = engine.request(prompt(9))
    engine.forward(req, engine.admit(req))
    engine.checkpoint(req)
    req.output_ids.append(5)
    req.origin_input_ids.append(6)
    req.full_untruncated_fill_ids.append(7)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"extra_key": "a"}, {"extra_key": "b"}),
        ({"lora_id": "a"}, {"lora_id": "b"}),
        ({"extra_key": "a"}, {"cache_salt": "a"}),
        ({"extra_key": "a"}, {}),
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({"lora_id": "a"}, {}),
        ({"extra_key": "a", "cache_salt": "b"}, {"extra_key": "ab"}),
        # SGLang appends the adapter to the extra key as text, which a client may send as its own key.
        ({"lora_id": "x"}, {"extra_key": "x"}),
        ({"extra_key": "ab", "lora_id": "c"}, {"extra_key": "a", "lora_id": "bc"}),
    ],
)
def test_requests_of_different_scopes_share_nothing(
    paged: Engine, one: dict[str, Any], other: dict[str, Any]
) -> None:
    paged.serve(prompt(12), **one)
    assert paged.serve(prompt(12), **other).prefix_len == 0
    assert paged.serve(prompt(12), **one).prefix_len == 8
    paged.settle()
    paged.assert_idle()


# Host tier


def test_a_host_hit_is_loaded_and_holds_what_was_computed(engine: Engine) -> None:
    engine.to_host(prompt(12))
    assert engine.cache.total_size() == 0
    noise = engine.serve(prompt(100, 500))
    assert noise.prefix_len == 0
    req = engine.request(prompt(16))
    load = engine.admit(req)
    assert (req.prefix_len, req.host_loaded_length, req.host_hit_length) == (12, 12, 12)
    assert load == 1
    assert engine.cache.counter.consumer_index == 1, "a worker that does not set it must wait, too"
    engine.forward(req, load)
    engine.assert_adds_up(req)
    engine.release(req)
    engine.settle()
    engine.assert_idle()
    assert engine.cache.ready_to_load_host_cache() == -1


def test_a_hit_may_begin_on_the_device_and_end_on_the_host(paged: Engine) -> None:
    paged.serve(prompt(8))
    paged.serve(prompt(16))
    paged.settle()
    paged.cache.evict(EvictParams(num_tokens=8))
    req = paged.request(prompt(20))
    load = paged.admit(req)
    assert (req.prefix_len, req.host_loaded_length) == (16, 8)
    paged.forward(req, load)
    paged.release(req)
    paged.settle()
    paged.assert_idle()


def test_without_room_the_load_is_declined_and_the_device_part_is_told(paged: Engine) -> None:
    paged.to_host(prompt(12))
    paged.serve(prompt(4))
    private = paged.allocator.alloc(paged.allocator.available_size())
    key = RadixKey(array("q", prompt(12)))
    match = paged.cache.match_prefix(MatchPrefixParams(key=key))
    assert (match.device_prefix_len, match.host_hit_length) == (4, 8)
    lock = paged.cache.lock(match.last_device_node)
    loaded, node = paged.cache.init_load_back(InitLoadBackParams(match.best_match_node, 8))
    assert loaded == 0 and node is match.last_device_node
    assert paged.cache.ready_to_load_host_cache() == -1
    paged.cache.unlock(lock)
    paged.allocator.free(private)
    paged.assert_idle()


def test_evict_frees_slots_before_it_returns(engine: Engine) -> None:
    engine.serve(prompt(40))
    engine.settle()
    free = engine.allocator.available_size()
    result = engine.cache.evict(EvictParams(num_tokens=8))
    assert result.num_tokens_evicted == 8 == engine.allocator.available_size() - free


def test_write_back_moves_pages_when_they_are_evicted() -> None:
    engine = Engine(4, write_policy="write-back")
    engine.serve(prompt(12))
    engine.settle()
    assert engine.cache.cache.tree.host_tokens == 0
    engine.cache.evict(EvictParams(num_tokens=12))
    assert engine.cache.cache.tree.host_tokens == 12
    assert engine.serve(prompt(16)).host_loaded_length == 12
    engine.settle()
    engine.assert_idle()
    engine.close()


def test_a_pool_full_of_traffic_stays_exact(engine: Engine) -> None:
    """More prompts than the device holds, in turns: every reused token is checked in ``forward``."""
    hits = [0, 0]
    for turn in range(1, 5):
        for chat in range(6):
            req = engine.serve(prompt(11 * turn, 1000 * chat))
            hits[0] += req.prefix_len - req.host_loaded_length
            hits[1] += req.host_loaded_length
            engine.assert_adds_up()
    engine.settle()
    engine.assert_idle()
    assert min(hits) > 0, hits
    stats = engine.cache.cache.stats
    assert (stats.hit_device, stats.hit_host) == tuple(hits)


# Weights that change


def updated(engine: Engine, version: str | None = None) -> None:
    """A weight update is about to be carried out."""
    engine.cache.on_control(io_struct.UpdateWeightFromDiskReqInput(model_path="m", weight_version=version))


@pytest.mark.parametrize("version", [None, "v2", "default"])
def test_kind_stale_after_weight_update(engine: Engine, version: str | None) -> None:
    """Neither on the device nor on the host is anything found that older weights computed."""
    engine.serve(prompt(12))
    engine.settle()
    engine.to_host(prompt(12, 500))
    engine.serve(prompt(12))
    engine.settle()
    queued = engine.request(prompt(16))
    updated(engine, version)
    engine.assert_adds_up()
    engine.forward(queued, engine.admit(queued))
    assert (queued.prefix_len, queued.host_hit_length) == (0, 0)
    engine.release(queued)
    assert engine.serve(prompt(12, 500)).prefix_len == 0
    assert engine.serve(prompt(16)).prefix_len == 15 // engine.page * engine.page, "the new ones are found"
    engine.settle()
    engine.assert_idle()


def test_an_update_names_the_pages_that_follow(paged: Engine) -> None:
    tree = paged.cache.cache.tree
    seen = [tree.namespace]
    for version in (None, "v2", None):
        updated(paged, version)
        seen.append(tree.namespace)
    assert len(set(seen)) == 4 and paged.cache.cache.era == 3
    paged.cache.on_control(io_struct.GetWeightsByNameReqInput(name="x"))
    assert (tree.namespace, paged.cache.cache.era) == (seen[-1], 3)


@pytest.mark.parametrize("reused", [8, 0])
def test_a_request_of_an_older_epoch_publishes_nothing_and_its_slots_come_back(
    engine: Engine, reused: int
) -> None:
    if reused:
        engine.serve(prompt(8))
        engine.settle()
    req = engine.request(prompt(14))
    engine.forward(req, engine.admit(req))
    assert req.prefix_len == reused
    updated(engine)
    computed = engine.cache.cache.stats.computed
    engine.checkpoint(req)
    assert engine.cache.cache.stats.computed == computed and req.kv.cache_protected_len == reused
    engine.step()
    engine.assert_adds_up(req)
    assert engine.cache.protected_size() == reused, "what it reads stays until it lets go"
    engine.release(req)
    engine.settle()
    engine.assert_idle()
    assert engine.cache.total_size() == 0 and engine.cache.cache.tree.host_tokens == 0
    assert engine.serve(prompt(14)).prefix_len == 0


def test_a_request_between_two_chunks_publishes_the_first_of_them_at_most(paged: Engine) -> None:
    """And the first one is not found either."""
    req = paged.request(prompt(20))
    paged.forward(req, paged.admit(req))
    paged.cache.checkpoint(req, up_to=8)
    assert req.kv.cache_protected_len == 8
    updated(paged)
    paged.cache.checkpoint(req, up_to=16)
    assert req.kv.cache_protected_len == 8 == paged.cache.total_size()
    paged.assert_adds_up(req)
    key = RadixKey(array("q", prompt(20)))
    assert paged.cache.match_prefix(MatchPrefixParams(key=key)).device_prefix_len == 0
    paged.release(req)
    paged.settle()
    paged.assert_idle()
    assert paged.cache.total_size() == 0


def test_a_retracted_request_starts_in_the_new_epoch(paged: Engine) -> None:
    req = paged.request(prompt(12))
    paged.forward(req, paged.admit(req))
    updated(paged)
    paged.release(req, checkpoint=False)
    req.reset_for_retract()
    paged.cache.on_request_queued(req)
    paged.forward(req, paged.admit(req))
    paged.release(req)
    assert paged.serve(prompt(16)).prefix_len == 12
    paged.settle()
    paged.assert_idle()


def test_copies_in_flight_end_and_their_pages_are_dropped(paged: Engine) -> None:
    """A backup of old pages, and a load that a request of the old epoch waits for."""
    paged.to_host(prompt(12))
    req = paged.request(prompt(16))
    load = paged.admit(req)
    assert req.prefix_len == 12
    paged.serve(prompt(12, 500))
    assert len(paged.cache.cache.tickets) >= 1
    updated(paged)
    paged.forward(req, load)
    paged.release(req)
    paged.settle()
    paged.assert_idle()
    assert paged.cache.total_size() == 0 and paged.cache.cache.host_pages.used == 0


def test_a_flush_is_an_epoch_of_its_own(paged: Engine) -> None:
    """A request that was not idle when SGLang cleared its pools may not publish into the new tree."""
    req = paged.request(prompt(12))
    paged.forward(req, paged.admit(req))
    paged.cache.reset()
    paged.checkpoint(req)
    assert paged.cache.total_size() == 0


def test_a_user_s_flush_is_for_all_who_share_a_store_and_other_resets_are_not(paged: Engine) -> None:
    cache = paged.cache.cache
    paged.cache.reset()
    assert (cache.era, cache.epoch) == (1, 0)
    paged.cache.on_control(io_struct.FlushCacheReqInput())
    paged.cache.reset()
    assert (cache.era, cache.epoch) == (2, 1)
    paged.cache.reset()
    assert (cache.era, cache.epoch) == (3, 1), "asked for once"


def test_a_version_that_was_here_before_is_a_new_one(paged: Engine) -> None:
    tree = paged.cache.cache.tree
    seen = [tree.namespace]
    for version in ("v2", "v3", "v2", "default"):
        updated(paged, version)
        seen.append(tree.namespace)
    assert len(set(seen)) == 5


# Adapters


@pytest.mark.parametrize("make", ["load", "unload"])
def test_a_changed_adapter_shares_nothing_with_what_it_was(paged: Engine, make: str) -> None:
    """SGLang may give a changed file the id it had before."""
    request: Any = (
        io_struct.LoadLoRAAdapterReqInput(lora_name="a", lora_path="p", lora_id="x")
        if make == "load"
        else io_struct.UnloadLoRAAdapterReqInput(lora_name="a", lora_id="x")
    )
    paged.serve(prompt(12), lora_id="x")
    paged.serve(prompt(12), lora_id="y")
    paged.serve(prompt(12))
    running = paged.request(prompt(16), lora_id="x")
    paged.forward(running, paged.admit(running))
    paged.cache.on_control(request)
    paged.release(running)
    assert paged.serve(prompt(12), lora_id="x").prefix_len == 0, "also not what was computed meanwhile"
    assert paged.serve(prompt(16), lora_id="x").prefix_len == 12
    assert paged.serve(prompt(12), lora_id="y").prefix_len == 8
    assert paged.serve(prompt(12)).prefix_len == 8
    paged.settle()
    paged.assert_idle()


# Statistics


def test_hits_are_counted_by_tier_once_for_each_admission(paged: Engine) -> None:
    stats = paged.cache.cache.stats
    paged.serve(prompt(8))
    assert (stats.hit_device, stats.hit_host) == (0, 0)
    paged.serve(prompt(12))
    assert (stats.hit_device, stats.hit_host) == (8, 0)
    paged.settle()
    paged.cache.evict(EvictParams(num_tokens=4))
    req = paged.request(prompt(20))
    for _ in range(3):
        req.init_next_round_input(paged.cache)
    assert (stats.hit_device, stats.hit_host) == (8, 0), "a look is not a hit"
    paged.forward(req, paged.admit(req))
    assert (stats.hit_device, stats.hit_host) == (16, 4)
    paged.release(req)


def test_what_a_retracted_request_gets_back_is_no_hit(paged: Engine) -> None:
    req = paged.request(prompt(12))
    paged.forward(req, paged.admit(req))
    paged.checkpoint(req)
    paged.release(req, checkpoint=False)
    req.reset_for_retract()
    assert req.retracted_stain
    paged.cache.on_request_queued(req)
    paged.forward(req, paged.admit(req))
    assert req.prefix_len == 8
    assert paged.cache.cache.stats.hit_device == 0
    paged.release(req)
    paged.settle()
    paged.assert_idle()


# The waiting queue


def test_what_a_queued_request_will_reuse_is_evicted_last(paged: Engine) -> None:
    paged.serve(prompt(8))
    waiting = paged.request(prompt(12))
    paged.serve(prompt(8, 500))
    paged.settle()
    paged.cache.evict(EvictParams(num_tokens=8))
    assert paged.admit(waiting) == -1 and waiting.prefix_len == 8
    assert waiting.rid not in paged.cache.cache.tree.waiting, "admitted, it has a lock instead"
    paged.forward(waiting, -1)
    paged.release(waiting)
    paged.assert_idle()


def test_a_request_whose_load_was_declined_does_not_wait_for_ever(paged: Engine) -> None:
    paged.to_host(prompt(12))
    req = paged.request(prompt(16))
    assert req.rid in paged.cache.cache.tree.waiting
    paged.forward(req, paged.admit(req, room_to_load=False))
    assert (req.prefix_len, req.host_hit_length) == (0, 12)
    paged.checkpoint(req)
    assert req.rid not in paged.cache.cache.tree.waiting
    paged.release(req)
    paged.settle()
    paged.assert_idle()


def test_a_page_that_the_last_token_completes_is_not_waited_for(paged: Engine) -> None:
    paged.serve(prompt(12))
    req = paged.request(prompt(12))
    node = paged.cache.cache.tree.waiting[req.rid]
    assert sum(len(n) for n in paged.cache.cache.tree.path(node)) == 8


def test_requests_with_replaced_embeddings_wait_for_nothing(paged: Engine) -> None:
    """Their tokens do not say what was computed."""
    paged.serve(prompt(12))
    req = paged.request(prompt(12), positional_embed_overrides=SimpleNamespace())
    assert req.rid not in paged.cache.cache.tree.waiting


@pytest.mark.parametrize("known", [True, False])
def test_kind_request_gone_state_stays_when_aborted_in_the_queue(paged: Engine, known: bool) -> None:
    paged.serve(prompt(12))
    rid = paged.request(prompt(12)).rid if known else "unknown"
    handle = CacheRequestHandle(rid, 0)
    for _ in range(2):
        paged.cache.finish(handle, CacheRequestOutcome.ABORT)
    paged.settle()
    paged.assert_idle()


def test_kind_request_gone_state_stays_when_aborted_after_its_load(paged: Engine) -> None:
    paged.to_host(prompt(12))
    req = paged.request(prompt(16))
    paged.admit(req)
    paged.release(req, checkpoint=False)
    paged.settle()
    paged.assert_idle()


# Lifetime


def test_transfers_idle_waits_for_copies_in_flight(paged: Engine) -> None:
    paged.serve(prompt(12))
    assert len(paged.cache.cache.tickets) == 1
    assert paged.cache.transfers_idle()
    assert paged.cache.engine.backups.done() == 1


def test_reset_leaves_the_slots_to_the_engine(engine: Engine) -> None:
    engine.to_host(prompt(12))
    engine.serve(prompt(12, 500))
    free = engine.allocator.available_size()
    engine.cache.reset()
    assert engine.allocator.available_size() == free
    engine.allocator.clear()
    engine.rows.clear()
    assert (engine.cache.total_size(), engine.cache.cache.host_pages.used) == (0, 0)
    assert engine.serve(prompt(12)).num_matched_prefix_tokens == 0
    engine.to_host(prompt(12))
    assert engine.serve(prompt(16)).host_loaded_length == 12
    engine.settle()
    engine.assert_idle()


def test_host_resources_can_be_released_twice(engine: Engine) -> None:
    engine.to_host(prompt(12))
    engine.cache.release_host_resources()
    engine.cache.release_host_resources()
    assert engine.cache.host.buffer.numel() == 0


def test_printing_tells_nodes_and_totals(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.serve(prompt(12))
    engine.settle()
    engine.cache.pretty_print()
    printed = capsys.readouterr().out
    assert "#tokens on the device: 12, on the host: 12" in printed and "Node(" in printed


def test_invariants_are_checked_only_as_often_as_asked() -> None:
    engine = Engine(4, check_every=3)
    calls: list[int] = []
    engine.cache.cache.check = lambda: calls.append(engine.cache.cache.stats.ticks)  # type: ignore[method-assign]
    for _ in range(7):
        engine.cache.check_hicache_events()
    assert calls == [3, 6]
    engine.close()


# The factory


def test_a_model_whose_prefix_caching_is_off_is_refused_with_one_line() -> None:
    server_args = ServerArgs(model_path="none")
    setattr(server_args, SETTINGS_ATTRIBUTE, Settings())
    context = SimpleNamespace(server_args=server_args, params=SimpleNamespace(disable=True))
    with pytest.raises(SystemExit) as caught:
        build.build_cache(context)
    assert str(caught.value) == (
        "hicache-ext: error: SGLang has switched prefix caching off for this model; drop --enable-hicache-ext"
    )


def test_the_backend_without_the_flag_is_refused() -> None:
    with pytest.raises(SystemExit, match="start the server with --enable-hicache-ext"):
        build.build_cache(SimpleNamespace(server_args=ServerArgs(model_path="none")))


def test_a_host_tier_of_less_than_a_page_is_refused() -> None:
    with pytest.raises(SystemExit, match="would not hold a single page of 1024 bytes"):
        Engine(4, host_gb=1e-9)


@pytest.mark.parametrize("backend", ["staged", "triton"])
def test_a_copy_backend_that_needs_a_gpu_is_refused(backend: str) -> None:
    with pytest.raises(SystemExit) as caught:
        Engine(4, copy_backend=backend)
    assert str(caught.value) == (
        f"hicache-ext: error: --hicache-ext-copy-backend {backend}: the copy backend {backend} needs a GPU"
    )


def test_runs_are_cut_by_the_size_of_the_pool() -> None:
    """The default granule would be the whole of a small pool."""
    engine = Engine(4)
    assert engine.cache.cache.config.evict_granule == 4
    engine.close()


def test_where_sglang_would_order_by_matched_length_less_to_compute_goes_first() -> None:
    with closing(Engine(4, schedule_policy="lpm")) as engine:
        engine.serve(prompt(20))
        long = engine.request([*prompt(20), *range(500, 540)])
        short = engine.request([*range(600, 612)])
        embedded = engine.request([*range(700, 702)], positional_embed_overrides=object())
        waiting = [long, short, embedded]
        engine.cache.order_queue(waiting)
        assert waiting == [embedded, short, long]
        engine.cache.release_aborted_request(CacheRequestHandle(short.rid, 0))
        waiting.remove(short)
        engine.cache.order_queue(waiting)
        assert waiting == [embedded, long]


def test_first_come_first_served_stays_unless_cost_is_asked_for() -> None:
    for settings, order in (({}, [0, 1]), ({"queue_order": "cost"}, [1, 0])):
        with closing(Engine(4, **settings)) as engine:
            waiting = [engine.request([*range(600, 640)]), engine.request([*range(700, 704)])]
            expected = [waiting[number] for number in order]
            engine.cache.order_queue(waiting)
            assert waiting == expected
