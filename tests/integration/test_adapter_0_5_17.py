"""SGLang 0.5.17's interface over the cache, with its own requests, pools, admission and batches on the CPU.

``Engine`` asserts SGLang's sums after every call to the cache, also where a test says nothing of them.
"""

from __future__ import annotations

import random
import time
import warnings
from array import array
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.releases import only_on

with warnings.catch_warnings():
    # Some of what SGLang imports warns about itself.
    warnings.simplefilter("ignore")
    only_on("0.5.17")
    import torch
    from sglang.srt.environ import envs
    from sglang.srt.managers import io_struct
    from sglang.srt.mem_cache.base_prefix_cache import (
        BasePrefixCache,
        EvictParams,
        InitLoadBackParams,
        MatchPrefixParams,
        MatchResult,
    )
    from sglang.srt.mem_cache.radix_cache import RadixKey

    from tests.integration.engine_0_5_17 import Engine, prompt

from hicache_ext.core.header import Reason
from hicache_ext.core.residency import Residency
from hicache_ext.core.speeds import MEASURED_BYTES, Track
from hicache_ext.integration.cpu_allocator_0_5_17 import paged_allocator

pytestmark = pytest.mark.timeout(60)

TOKENS = 256
PAGE = 16
"""Of the tests that need pages of several tokens."""


@pytest.fixture(params=[1, PAGE])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with closing(Engine(request.param, tokens=TOKENS)) as made:
        yield made


@pytest.fixture
def paged() -> Iterator[Engine]:
    with closing(Engine(PAGE, tokens=TOKENS)) as made:
        yield made


def whole(engine: Engine, length: int) -> int:
    """Tokens of the whole pages in ``length``."""
    return length // engine.page * engine.page


def match(engine: Engine, tokens: list[int], **options: Any) -> MatchResult:
    return engine.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens), **options)))


def found(engine: Engine, tokens: list[int]) -> tuple[int, int]:
    """Device and host tokens that a lookup finds."""
    result = match(engine, tokens)
    return len(result.device_indices), result.host_hit_length


def prefill_without_tick(engine: Engine) -> Any:
    """The next batch, while no copy is told to have ended, however fast it was."""
    with mock.patch.object(engine.cache, "check_hicache_events"):
        return engine.prefill()


def hits(req: Any) -> tuple[int, int, int]:
    """What SGLang tells a client: tokens from the device, the host and a store."""
    return req.cached_tokens_device, req.cached_tokens_host, req.cached_tokens_storage


def on_host(engine: Engine, tokens: list[int], **options: Any) -> None:
    """Leave the whole pages of a prompt in host memory only."""
    engine.to_host(tokens, **options)
    assert engine.cache.total_size() == 0


# A request's life


def test_it_is_a_prefix_cache_of_sglang(engine: Engine) -> None:
    assert isinstance(engine.cache, BasePrefixCache)
    assert engine.cache.disable is False and engine.cache.page_size == engine.page
    assert engine.cache.root_node_handle() is engine.cache.root_node is engine.cache.cache.tree.root
    assert engine.cache.is_tree_cache() and not engine.cache.supports_mamba()
    assert engine.pool.layer_transfer_counter is engine.counters[0]


def test_a_cold_request_finds_nothing_and_leaves_whole_pages(engine: Engine) -> None:
    req = engine.serve(prompt(40))
    assert hits(req) == (0, 0, 0) and len(req.output_ids) == 4
    engine.settle()
    assert engine.cache.evictable_size() == whole(engine, 43), "the last token has no KV"
    engine.assert_idle()
    assert engine.checks > 20, "the sums were looked at"


def test_what_is_found_is_the_slots_that_were_computed(engine: Engine) -> None:
    req = engine.request(prompt(40))
    engine.run(engine.prefill())
    slots = engine.row(req)[: whole(engine, 40)].tolist()
    engine.finish_all()
    result = match(engine, prompt(40))
    assert result.device_indices.tolist() == slots and result.device_indices.dtype == torch.int64
    assert result.last_device_node is result.last_host_node is result.best_match_node
    assert result.host_hit_length == 0
    assert result.cache_protected_len is None, "it would survive a forced miss"


def test_a_limit_of_the_key_is_honoured(engine: Engine) -> None:
    engine.serve(prompt(48))
    for limit in (0, 1, 15, 16, 33, 48, 99):
        assert len(match(engine, prompt(48), limit=limit).device_indices) == whole(engine, min(limit, 48))


def test_the_last_token_is_always_computed(engine: Engine) -> None:
    engine.serve(prompt(32))
    assert engine.serve(prompt(32)).cached_tokens_device == whole(engine, 31)


def test_locks_tell_how_many_tokens_they_moved(engine: Engine) -> None:
    engine.serve(prompt(32))
    engine.settle()
    node = match(engine, prompt(32)).last_device_node
    assert engine.cache.inc_lock_ref(node).delta == -32 and engine.cache.protected_size() == 32
    assert engine.cache.inc_lock_ref(node).delta == 0
    assert engine.cache.dec_lock_ref(node).delta == 0
    assert engine.cache.dec_lock_ref(node).delta == 32 and engine.cache.protected_size() == 0
    engine.assert_idle()


def test_a_temporary_lock_is_replayed_as_admission_does(engine: Engine) -> None:
    """``PrefillAdder`` gives back with the parameters of the lock that it took."""
    engine.serve(prompt(32))
    engine.settle()
    node = match(engine, prompt(32)).last_device_node
    lock = engine.cache.inc_lock_ref(node)
    assert engine.cache.dec_lock_ref(node, lock.to_dec_params()).delta == 32
    engine.assert_idle()


def test_an_unfinished_request_goes_on_with_the_slots_of_its_row(engine: Engine) -> None:
    req = engine.request(prompt(39))
    engine.run(engine.prefill())
    assert req.cache_protected_len == whole(engine, 39) == engine.cache.protected_size()
    assert req.prefix_indices.tolist() == engine.row(req).tolist(), "with what is no whole page"
    assert req.last_node is match(engine, prompt(39)).last_device_node
    engine.finish_all()
    engine.settle()
    engine.assert_idle()


def test_duplicates_are_freed_and_the_row_shows_the_trees_pages(engine: Engine) -> None:
    """Two requests with the same prompt in one batch: the second one's pages go, the first one's stay."""
    first, second = engine.request(prompt(39)), engine.request(prompt(39))
    batch = engine.prefill()
    assert batch is not None and batch.reqs == [first, second] and batch.prefix_lens == [0, 0]
    kept, given_up = engine.row(first), engine.row(second)
    assert not set(kept.tolist()) & set(given_up.tolist())
    free = engine.allocator.available_size()
    engine.run(batch)
    shared = whole(engine, 39)
    assert engine.allocator.available_size() == free + shared
    assert (
        engine.row(second)[:shared].tolist() == kept[:shared].tolist() == engine.row(first)[:shared].tolist()
    )
    assert engine.row(second)[shared:].tolist() == given_up[shared:].tolist(), "what is no whole page stays"
    assert second.prefix_indices.tolist() == engine.row(second).tolist()
    assert engine.cache.protected_size() == shared
    engine.finish_all()
    engine.settle()
    engine.assert_idle()


def test_what_was_decoded_is_reused(engine: Engine) -> None:
    first = engine.serve(prompt(30))
    chat = [*prompt(30), *first.output_ids, *prompt(20, 500)]
    assert engine.serve(chat).cached_tokens_device == whole(engine, 33)
    engine.settle()
    engine.assert_idle()


def test_pages_shared_by_three_are_given_up_by_the_last(engine: Engine) -> None:
    engine.serve(prompt(48))
    engine.settle()
    reqs = [engine.request([*prompt(48), 100 + number]) for number in range(3)]
    engine.run(engine.prefill())
    assert engine.cache.protected_size() >= 48
    for number, req in enumerate(reqs):
        engine.release(req)
        assert (match(engine, prompt(48)).last_device_node.device_locks > 0) is (number < 2)
    engine.running_batch.reqs = []
    engine.last_batch = None
    engine.settle()
    engine.assert_idle()


# Chunks


def test_chunks_of_a_prompt_are_published_one_after_the_other(engine: Engine) -> None:
    req = engine.request(prompt(100))
    done = []
    while not req.output_ids:
        batch = engine.run(engine.prefill(chunk=32))
        assert batch.reqs == [req]
        done.append((req.extend_range.end, req.cache_protected_len))
    assert [end for end, _ in done] == [32, 64, 96, 100]
    # A chunk is published when the next step begins, the last one with its result.
    assert [own for _, own in done] == [0, 32, 64, whole(engine, 100)]
    assert req.cached_tokens == 0, "its own chunks are no hits"
    assert engine.cache.cache.stats.hit_device == 0
    engine.finish_all()
    engine.settle()
    engine.assert_idle()


def test_a_chunk_that_ends_inside_a_page_keeps_the_rest_for_the_next(paged: Engine) -> None:
    """SGLang's chunks are whole pages, but a cache is told of any length."""
    req = paged.request(prompt(60))
    paged.forward(paged.prefill())  # type: ignore[arg-type]
    for end, own in ((20, 16), (41, 32), (60, 48)):
        req.set_extend_range(0, end)
        paged.cache.cache_unfinished_req(req, chunked=True)
        assert req.cache_protected_len == own == paged.cache.protected_size()
        assert req.prefix_indices.tolist() == paged.row(req)[:end].tolist()
        paged.assert_adds_up()
    paged.release(req)
    paged.assert_idle()


def test_a_chunked_prompt_behind_a_hit_is_counted_once(engine: Engine) -> None:
    engine.serve(prompt(32))
    engine.settle()
    req = engine.request(prompt(120))
    engine.finish_all(chunk=32)
    assert hits(req) == (32, 0, 0) and engine.cache.cache.stats.hit_device == 32
    engine.settle()
    engine.assert_idle()


def test_kind_request_gone_state_stays_when_aborted_between_chunks(engine: Engine) -> None:
    req = engine.request(prompt(100))
    engine.run(engine.prefill(chunk=32))
    engine.run(engine.prefill(chunk=32))
    assert engine.chunked_req is req
    engine.abort(req)
    assert req.req_pool_idx is None and req.kv is None
    engine.last_batch = None
    engine.settle()
    engine.assert_idle()
    assert found(engine, prompt(100)) == (32, 0), "the first chunk was published, the second was not yet"


def test_a_chunked_request_that_is_retracted_starts_again(engine: Engine) -> None:
    """A pause retracts it without inserting anything."""
    req = engine.request(prompt(100))
    engine.run(engine.prefill(chunk=32))
    engine.run(engine.prefill(chunk=32))
    engine.last_batch = engine.chunked_req = None
    engine.release(req, is_insert=False)
    req.reset_for_retract()
    engine._prefetch_kvcache(req)
    engine.waiting_queue.append(req)
    engine.finish_all()
    assert engine.serve(prompt(100)).cached_tokens_device == whole(engine, 99)
    engine.settle()
    engine.assert_idle()


# Retraction, aborts


def test_what_does_not_fit_is_retracted_and_served_later(engine: Engine) -> None:
    """Two requests fill the pool while they decode; both answers are computed on what they should be."""
    reqs = [engine.request(prompt(96, 1000 * number)) for number in range(2)]
    engine.run(engine.prefill())
    for req in reqs:
        # More than admission reckoned with.
        req.sampling_params.max_new_tokens = 40
    engine.finish_all()
    assert sum(req.retraction_count for req in reqs) >= 1
    assert [len(req.output_ids) for req in reqs] == [40, 40]
    assert engine.cache.cache.stats.hit_device == 0, "what a retracted request gets back is no hit"
    engine.settle()
    engine.assert_idle()


def test_a_retracted_request_leaves_only_what_was_published(engine: Engine) -> None:
    reqs = [engine.request(prompt(40, 1000 * number)) for number in range(2)]
    engine.run(engine.prefill())
    for _ in range(2):
        engine.prefill()
        engine.run(engine.decode())
    (gone,) = engine.retract(engine.running_batch)
    assert gone.is_retracted and gone.last_node is None and gone.cache_protected_len == 0
    start = 1000 * reqs.index(gone)
    assert found(engine, [*prompt(40, start), *gone.output_ids]) == (whole(engine, 40), 0)
    engine.assert_adds_up()
    assert gone.rid in engine.cache.cache.tree.waiting, "it waits again"
    engine.finish_all()
    assert [len(req.output_ids) for req in reqs] == [4, 4]
    engine.settle()
    engine.assert_idle()


def test_an_aborted_request_that_runs_finishes_with_what_it_has(engine: Engine) -> None:
    req = engine.request(prompt(40))
    engine.run(engine.prefill())
    engine.abort(req)
    engine.finish_all()
    engine.settle()
    assert len(req.output_ids) == 2 and engine.cache.evictable_size() == whole(engine, 41)
    engine.assert_idle()


@pytest.mark.parametrize("known", [True, False])
def test_kind_request_gone_state_stays_when_aborted_in_the_queue(engine: Engine, known: bool) -> None:
    """0.5.17 names a request by its id, and may do so twice."""
    engine.serve(prompt(40))
    rid = "unknown"
    if known:
        req = engine.request(prompt(40))
        rid = req.rid
        engine.abort(req)
    engine.cache.release_aborted_request(rid)
    engine.settle()
    engine.assert_idle()
    assert len(engine.cache._queue) == 0


def test_kind_request_gone_state_stays_when_aborted_after_its_load(engine: Engine) -> None:
    on_host(engine, prompt(48))
    req = engine.request(prompt(64))
    engine.prefill()
    assert req.prefix_indices.numel() == 48
    engine.release(req, is_insert=False)
    engine.settle()
    engine.assert_idle()
    assert found(engine, prompt(64)) == (48, 0), "what was loaded stays"


# Scopes


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"extra_key": "a"}, {"extra_key": "b"}),
        ({"lora_id": "a"}, {"lora_id": "b"}),
        ({"extra_key": "a"}, {}),
        ({"lora_id": "a"}, {}),
        # SGLang appends the adapter to the extra key as text, which a client may send as its own key.
        ({"lora_id": "x"}, {"extra_key": "x"}),
        ({"extra_key": "ab", "lora_id": "c"}, {"extra_key": "a", "lora_id": "bc"}),
        ({"extra_key": "a", "lora_id": "b"}, {"extra_key": "ab"}),
    ],
)
def test_requests_of_different_scopes_share_nothing(
    paged: Engine, one: dict[str, Any], other: dict[str, Any]
) -> None:
    paged.serve(prompt(40), **one)
    assert paged.serve(prompt(40), **other).cached_tokens_device == 0
    assert paged.serve(prompt(40), **one).cached_tokens_device == 32
    paged.settle()
    paged.cache.evict(EvictParams(num_tokens=TOKENS))
    assert hits(paged.serve(prompt(40), **one)) == (0, 32, 0), "and on the host they are apart too"
    paged.settle()
    paged.assert_idle()


@pytest.mark.parametrize("make", ["load", "unload"])
def test_a_changed_adapter_shares_nothing_with_what_it_was(paged: Engine, make: str) -> None:
    """SGLang may give a changed file the id it had before."""
    request: Any = (
        io_struct.LoadLoRAAdapterReqInput(lora_name="a", lora_path="p", lora_id="x")
        if make == "load"
        else io_struct.UnloadLoRAAdapterReqInput(lora_name="a", lora_id="x")
    )
    for scope in ({"lora_id": "x"}, {"lora_id": "y"}, {}):
        paged.serve(prompt(40), **scope)
    running = paged.request(prompt(60), lora_id="x")
    paged.run(paged.prefill())
    paged.cache.on_control(request)
    paged.finish_all()
    assert running.finished()
    assert paged.serve(prompt(40), lora_id="x").cached_tokens == 0, "also not what was computed meanwhile"
    assert paged.serve(prompt(60), lora_id="x").cached_tokens_device == 32
    assert paged.serve(prompt(40), lora_id="y").cached_tokens_device == 32
    assert paged.serve(prompt(40)).cached_tokens_device == 32
    paged.settle()
    paged.assert_idle()


def test_requests_with_replaced_embeddings_are_neither_found_nor_published(engine: Engine) -> None:
    """Their tokens do not say what was computed, and 0.5.17 asks the cache to keep them all the same."""
    replaced = SimpleNamespace(positions=[], embeds=None)
    req = engine.serve(prompt(40), positional_embed_overrides=replaced)
    assert req.finished() and engine.cache.total_size() == 0
    engine.serve(prompt(40))
    again = engine.request(prompt(40), positional_embed_overrides=replaced)
    assert again.rid not in engine.cache.cache.tree.waiting
    engine.finish_all()
    assert again.cached_tokens == 0
    engine.settle()
    engine.assert_idle()


def test_a_request_that_must_not_be_kept_is_not(engine: Engine) -> None:
    req = engine.request(prompt(40))
    req.skip_radix_cache_insert = True
    engine.finish_all()
    assert engine.cache.total_size() == 0 and engine.cache.cache.stats.computed == 0
    engine.settle()
    engine.assert_idle()


def test_without_inserting_what_is_finished_only_the_prompt_is_kept() -> None:
    """SGLang's deterministic mode: what was decoded is not reused."""
    with closing(Engine(1, tokens=TOKENS, init_params={"disable_finished_insert": True})) as engine:
        req = engine.serve(prompt(40))
        assert found(engine, [*prompt(40), *req.output_ids]) == (40, 0)
        engine.settle()
        engine.assert_idle()


@pytest.mark.parametrize("page", [1, PAGE])
def test_of_an_answer_with_its_thinking_stripped_only_the_prompt_is_kept(page: int) -> None:
    """SGLang then frees all that comes after the prompt by itself."""
    with closing(Engine(page, tokens=TOKENS, config={"strip_thinking_cache": True})) as engine:
        req = engine.request(prompt(40))
        req.sampling_params.max_new_tokens = 30
        req.reasoning_tokens = 10
        engine.finish_all()
        assert len(req.output_ids) == 30
        assert found(engine, [*prompt(40), *req.output_ids]) == (whole(engine, 40), 0)
        engine.settle()
        engine.assert_idle()


def test_a_forced_miss_computes_everything_and_leaves_one_copy(engine: Engine) -> None:
    engine.serve(prompt(40))
    engine.settle()
    size = engine.cache.total_size()
    with envs.SGLANG_RADIX_FORCE_MISS.override(True):
        assert engine.serve(prompt(40)).cached_tokens == 0
    engine.settle()
    assert engine.cache.total_size() == size
    engine.assert_idle()


# Host tier


def test_a_host_hit_is_loaded_and_holds_what_was_computed(engine: Engine) -> None:
    on_host(engine, prompt(48))
    assert found(engine, prompt(64)) == (0, 48)
    engine.serve(prompt(200, 500))
    engine.settle()
    req = engine.request(prompt(64))
    batch = engine.prefill()
    assert batch is not None and batch.hicache_consumer_index == 1
    assert engine.cache.counter.consumer_index == 1, "a worker that does not set it must wait, too"
    assert len(req.prefix_indices) == req.cache_protected_len == req.host_hit_length == 48
    assert engine.cache.protected_size() == 48, "what is on its way counts as in use"
    engine.run(batch)
    assert hits(req) == (0, 48, 0)
    engine.finish_all()
    engine.settle()
    engine.assert_idle()
    assert engine.cache.ready_to_load_host_cache() == -1


def test_a_hit_may_begin_on_the_device_and_end_on_the_host(paged: Engine) -> None:
    paged.serve(prompt(64))
    paged.settle()
    paged.cache.evict(EvictParams(num_tokens=32))
    assert found(paged, prompt(80)) == (32, 32)
    assert hits(paged.serve(prompt(80))) == (32, 32, 0)
    stats = paged.cache.cache.stats
    assert (stats.hit_device, stats.hit_host, stats.hit_store) == (32, 32, 0)
    paged.settle()
    paged.assert_idle()


def test_a_request_behind_another_one_s_load_waits_for_it(engine: Engine) -> None:
    """What is on its way is found on the device by others, in the same batch and in a later one."""
    on_host(engine, prompt(48))
    engine.request([*prompt(48), *prompt(9, 500)])
    second = engine.request([*prompt(48), *prompt(9, 600)])
    batch = engine.prefill()
    assert batch is not None and batch.prefix_lens == [48, 48] and batch.hicache_consumer_index == 1
    assert hits(second) == (48, 0, 0)
    third = engine.request([*prompt(48), *prompt(9, 700)])
    unrelated = engine.request(prompt(9, 800))
    later = prefill_without_tick(engine)
    assert later is not None and later.hicache_consumer_index == 1 and later.reqs == [third, unrelated]
    engine.forward(batch)
    engine.forward(later)
    engine.result(batch)
    engine._merge_last_batch()
    engine.result(later)
    engine.finish_all()
    engine.settle()
    engine.assert_idle()


def test_a_batch_that_reuses_nothing_of_a_load_does_not_wait_for_it(engine: Engine) -> None:
    on_host(engine, prompt(48))
    engine.request(prompt(60))
    first = engine.prefill()
    assert first is not None and first.hicache_consumer_index == 1
    engine.request(prompt(20, 500))
    other = prefill_without_tick(engine)
    assert other is not None and other.hicache_consumer_index == -1 == engine.cache.counter.consumer_index
    for batch in (first, other):
        engine.forward(batch)
    engine.result(first)
    engine._merge_last_batch()
    engine.result(other)
    engine.finish_all()
    engine.settle()
    engine.assert_idle()


def test_without_room_nothing_is_loaded_and_nothing_is_told(engine: Engine) -> None:
    """SGLang would tell the client what was promised: what it reads is set to what was loaded."""
    on_host(engine, prompt(48))
    req = engine.request(prompt(64))
    engine.waiting_queue.clear()
    req.init_next_round_input(engine.cache)
    assert req.host_hit_length == 48
    held = engine.allocator.alloc(engine.allocator.available_size())
    # They are nobody's while they are held, so the sums are not asked for.
    load = InitLoadBackParams(best_match_node=req.best_match_node, host_hit_length=48, req=req)
    slots, node = type(engine.cache).init_load_back(engine.cache, load)
    engine.allocator.free(held)
    assert slots.tolist() == [] and slots.dtype == torch.int64
    assert node is engine.cache.root_node is req.last_node
    assert (req.host_hit_length, req.storage_hit_length) == (0, 0)
    assert engine.cache.ready_to_load_host_cache() == -1
    engine.abort_queued(req)
    engine.settle()
    engine.assert_idle()


def test_of_a_hit_that_was_evicted_meanwhile_nothing_is_loaded(engine: Engine) -> None:
    engine.to_host(prompt(48))
    req = engine.request(prompt(64))
    req.init_next_round_input(engine.cache)
    node = req.best_match_node
    engine.cache.cache.unwant(req.rid)
    engine.cache.cache.evict_host(TOKENS)
    assert node.parent is None
    load = InitLoadBackParams(best_match_node=node, host_hit_length=48, req=req)
    slots, last = engine.cache.init_load_back(load)
    assert slots.tolist() == [] and last is req.last_node and req.host_hit_length == 0
    engine.finish_all()
    assert hits(req) == (0, 0, 0)
    engine.settle()
    engine.assert_idle()


def test_a_load_whose_request_was_not_admitted_runs_with_the_next_batch(paged: Engine) -> None:
    """0.5.17 may turn a request away after its load was prepared: less than a page of the chunk is left."""
    on_host(paged, prompt(48))
    first, second = paged.request(prompt(16, 500)), paged.request(prompt(80))
    batch = paged.prefill(chunk=24)
    assert batch is not None and batch.reqs == [first] and paged.waiting_queue == [second]
    assert found(paged, prompt(80)) == (48, 0)
    paged.run(batch)
    batch = paged.prefill()
    assert batch is not None and batch.reqs == [second] and batch.prefix_lens == [48]
    paged.run(batch)
    paged.finish_all()
    paged.settle()
    paged.assert_idle()


def test_decoding_never_starts_on_a_page_that_is_on_its_way(engine: Engine) -> None:
    """A prompt was computed twice; what the tree has of it has left the device and is being loaded."""
    first, second = engine.request(prompt(48)), engine.request(prompt(48))
    batch = engine.prefill()
    assert batch is not None
    engine.forward(batch)
    # The first one ends at once, before the result of the second one is looked at.
    first.sampling_params.max_new_tokens = 1
    batch.reqs = [first]
    engine.result(batch)
    for _ in range(3):
        engine.cache.check_hicache_events()
        engine.cache.engine.drain()
    engine.cache.evict(EvictParams(num_tokens=48))
    assert found(engine, prompt(48)) == (0, 48)
    third = engine.request(prompt(50))
    engine.waiting_queue.clear()
    third.init_next_round_input(engine.cache)
    engine.cache.init_load_back(
        InitLoadBackParams(best_match_node=third.best_match_node, host_hit_length=48, req=third)
    )
    assert third.best_match_node.device is Residency.PENDING
    engine.cache.cache_unfinished_req(second)
    assert third.best_match_node.device is Residency.READY
    engine.compute(second, -1, engine.row(second), 48, 48)
    engine.abort_queued(third)
    engine.release(second)
    engine.last_batch = None
    engine.settle()
    engine.assert_idle()


def test_evict_frees_slots_before_it_returns(engine: Engine) -> None:
    engine.serve(prompt(64))
    engine.settle()
    free = engine.allocator.available_size()
    assert engine.cache.evict(EvictParams(num_tokens=32)).num_tokens_evicted == 32
    assert engine.allocator.available_size() == free + 32
    left = engine.cache.evictable_size()
    held = match(engine, prompt(32)).last_device_node
    engine.cache.inc_lock_ref(held)
    assert engine.cache.evict(EvictParams(num_tokens=TOKENS)).num_tokens_evicted == left - 32
    assert len(match(engine, prompt(64)).device_indices) == 32, "what is in use stays"
    engine.cache.dec_lock_ref(held)
    engine.assert_idle()


def test_write_back_moves_pages_when_they_are_evicted() -> None:
    with closing(Engine(PAGE, tokens=TOKENS, write_policy="write-back")) as engine:
        engine.serve(prompt(48))
        engine.settle()
        assert engine.cache.cache.tree.host_tokens == 0
        engine.cache.evict(EvictParams(num_tokens=48))
        assert engine.cache.cache.tree.host_tokens == 48
        assert hits(engine.serve(prompt(64))) == (0, 48, 0)
        engine.settle()
        engine.assert_idle()


# Loads ahead of admission


def set_clock(engine: Engine, seconds: float) -> None:
    """As if a batch's launches took long, so that requests wait for others as long as the clock stands."""
    speeds = engine.cache.speeds
    speeds.clock = lambda: seconds
    speeds._start = 0.0
    speeds._launch = Track(1000.0, 1.0, keep_prior=True)
    speeds.observed_load(MEASURED_BYTES, 1e-3, time.monotonic())


def ahead(engine: Engine, **options: Any) -> Any:
    """A queued request whose pages are loaded while another one decodes; returns it."""
    on_host(engine, prompt(48))
    running = engine.request(prompt(20, 500))
    running.sampling_params.max_new_tokens = 60
    engine.run(engine.prefill())
    engine.run(engine.decode())
    set_clock(engine, 1.0)
    engine.cache.check_hicache_events()
    req = engine.request(prompt(64), **options)
    for _ in range(4):
        assert engine.prefill() is None, "it is held back"
        assert not engine.cache.fetch_ended(req)
        engine.run(engine.decode())
    assert match(engine, prompt(64)).best_match_node.device is not Residency.ABSENT
    set_clock(engine, 2.0)
    return req


def test_what_was_loaded_ahead_is_told_as_found_on_the_host(engine: Engine) -> None:
    req = ahead(engine)
    engine.cache.engine.drain()
    batch = engine.prefill()
    assert batch is not None and batch.reqs == [req] and batch.hicache_consumer_index == -1
    assert batch.prefix_lens == [48] and hits(req) == (0, 48, 0)
    engine.run(batch)
    stats = engine.cache.cache.stats
    assert (stats.hit_device, stats.hit_host) == (0, 48)
    engine.finish_all()
    engine.settle()
    engine.assert_idle()


def test_kind_request_gone_state_stays_when_aborted_while_its_pages_come_ahead(engine: Engine) -> None:
    req = ahead(engine)
    engine.cache.engine.drain()
    engine.cache.check_hicache_events()
    held = engine.cache.protected_size()
    engine.abort(req)
    assert engine.cache.protected_size() == held - 48, "at once"
    engine.finish_all()
    engine.settle()
    engine.assert_idle()
    assert found(engine, prompt(64)) == (48, 0)


def test_a_running_request_takes_what_others_have_loaded_ahead(engine: Engine) -> None:
    """A long prompt is computed in chunks: SGLang gives each of them room without asking, or ends."""
    on_host(engine, prompt(112))
    long = engine.request(prompt(192, 500))
    engine.run(engine.prefill(chunk=32))
    waiting = engine.request(prompt(120))
    while not long.output_ids:
        batch = engine.prefill(chunk=32)
        assert batch is not None and batch.reqs == [long]
        engine.run(batch)
    assert waiting in engine.waiting_queue
    engine.finish_all(chunk=32)
    assert len(waiting.output_ids) == len(long.output_ids) == 4
    engine.settle()
    engine.assert_idle()


def test_a_running_request_is_not_retracted_for_what_others_have_loaded_ahead(engine: Engine) -> None:
    """The last request that runs would not be retracted but fail."""
    on_host(engine, prompt(112))
    running = engine.request(prompt(32, 500))
    engine.run(engine.prefill())
    waiting = engine.request(prompt(200))
    # More than admission reckoned with, so that nobody else is admitted.
    running.sampling_params.max_new_tokens = 180
    while not running.finished():
        engine.run(engine.next_batch())
    assert running.retraction_count == 0 and len(running.output_ids) == 180
    engine.finish_all()
    assert len(waiting.output_ids) == 4
    engine.settle()
    engine.assert_idle()


def test_what_is_loaded_ahead_never_keeps_the_head_of_the_queue_out(engine: Engine) -> None:
    """First come first served: who waits behind the head is not admitted before it."""
    on_host(engine, prompt(112))
    running = engine.request(prompt(20, 500))
    running.sampling_params.max_new_tokens = 60
    engine.run(engine.prefill())
    engine.run(engine.decode())
    head = engine.request(prompt(210, 1000))
    behind = engine.request(prompt(120))
    for _ in range(4):
        engine.run(engine.next_batch())
    assert engine.waiting_queue == [head, behind]
    assert match(engine, prompt(120)).best_match_node.device is not Residency.ABSENT
    engine.finish_all()
    assert [len(req.output_ids) for req in (running, head, behind)] == [60, 4, 4]
    engine.settle()
    engine.assert_idle()


def test_an_idle_server_holds_no_request_back(engine: Engine) -> None:
    on_host(engine, prompt(48))
    req = engine.request(prompt(64))
    batch = engine.prefill()
    assert batch is not None and batch.reqs == [req]
    engine.run(batch)
    engine.finish_all()
    engine.assert_adds_up()


# Damaged pages


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_kind_corrupt_page_from_a_lower_tier(paged: Engine, bad: int) -> None:
    """Damaged between two turns: no token of the first try is used, and the second one computes it anew."""
    on_host(paged, prompt(48))
    paged.damage(paged.host_page(prompt(49), bad))
    req, beside = paged.request(prompt(70)), paged.request(prompt(20, 500))
    batch = paged.prefill()
    assert batch is not None and batch.reqs == [req, beside] and batch.prefix_lens == [48, 0]
    paged.forward(batch, sound=False)
    paged.compute(beside, -1, paged.row(beside), 0, 20)
    assert paged.result(batch) == [beside], "nothing of the other was used"
    assert req.is_retracted and req.req_pool_idx is None and not req.output_ids
    assert paged.cache.recompute.count == 1
    assert paged.cache.engine.counts.refused == {Reason.CHECKSUM: 1}
    paged.step()
    assert paged.waiting_queue == [req] and not paged.cache.cache.tree.condemned
    assert beside in paged.running_batch.reqs and req not in paged.running_batch.reqs
    assert found(paged, prompt(70)) == (bad * PAGE, 0), "what came before the bad page is sound"
    assert not req.retracted_stain, "its hits are counted anew"
    paged.finish_all()
    assert req.cached_tokens == bad * PAGE and len(req.output_ids) == 4
    paged.settle()
    paged.assert_idle()
    assert paged.serve(prompt(80)).cached_tokens_device == 64, "the second try was published"


def test_a_chunk_on_a_page_that_proves_bad_is_not_found(paged: Engine) -> None:
    on_host(paged, prompt(48))
    paged.damage(paged.host_page(prompt(49), 1))
    req = paged.request(prompt(110))
    batch = paged.prefill(chunk=32)
    assert batch is not None and batch.prefix_lens == [48] and paged.chunked_req is req
    paged.forward(batch, sound=False)
    # Under the overlap scheduler the next step begins before that is known.
    paged.cache.cache_unfinished_req(req, chunked=True)
    assert req.cache_protected_len == 80
    assert paged.result(batch) == [] and paged.chunked_req is None and req.is_retracted
    assert found(paged, prompt(110)) == (16, 0)
    paged.step()
    assert paged.waiting_queue == [req]
    paged.finish_all(chunk=32)
    assert req.cached_tokens == 16 and len(req.output_ids) == 4
    paged.settle()
    paged.assert_idle()


# Weights that change


def updated(engine: Engine, version: str | None = None) -> None:
    """A weight update is about to be carried out."""
    engine.cache.on_control(io_struct.UpdateWeightFromDiskReqInput(model_path="m", weight_version=version))


@pytest.mark.parametrize("version", [None, "v2", "default"])
def test_kind_stale_after_weight_update(engine: Engine, version: str | None) -> None:
    """Neither on the device nor on the host is anything found that older weights computed."""
    on_host(engine, prompt(48, 500))
    engine.serve(prompt(48))
    engine.settle()
    queued = engine.request(prompt(64))
    updated(engine, version)
    engine.assert_adds_up()
    engine.finish_all()
    assert hits(queued) == (0, 0, 0)
    assert engine.serve(prompt(48, 500)).cached_tokens == 0
    assert engine.serve(prompt(64)).cached_tokens_device == whole(engine, 63), "the new ones are found"
    engine.settle()
    engine.assert_idle()


@pytest.mark.parametrize("reused", [32, 0])
def test_a_request_of_an_older_epoch_publishes_nothing_and_its_slots_come_back(
    engine: Engine, reused: int
) -> None:
    if reused:
        engine.serve(prompt(reused))
        engine.settle()
    req = engine.request(prompt(70))
    batch = engine.prefill()
    assert batch is not None
    engine.forward(batch)
    updated(engine)
    computed = engine.cache.cache.stats.computed
    engine.result(batch)
    own = len(req.prefix_indices)
    assert own == 70 and req.prefix_indices.tolist() == engine.row(req).tolist()
    assert engine.cache.cache.stats.computed == computed
    assert req.cache_protected_len == (0 if not reused else whole(engine, 32))
    assert engine.cache.protected_size() == req.cache_protected_len, "what it reads stays until it lets go"
    engine.finish_all()
    engine.settle()
    engine.assert_idle()
    assert engine.cache.total_size() == 0 and engine.cache.cache.tree.host_tokens == 0
    assert engine.serve(prompt(70)).cached_tokens == 0


def test_of_a_request_between_two_chunks_nothing_is_found(engine: Engine) -> None:
    req = engine.request(prompt(100))
    engine.run(engine.prefill(chunk=32))
    engine.run(engine.prefill(chunk=32))
    assert req.cache_protected_len == 32
    updated(engine)
    engine.finish_all(chunk=32)
    assert len(req.output_ids) == 4 and found(engine, prompt(100)) == (0, 0)
    engine.settle()
    engine.assert_idle()
    assert engine.cache.total_size() == 0


def test_a_retracted_request_starts_in_the_new_epoch(engine: Engine) -> None:
    reqs = [engine.request(prompt(40, 1000 * number)) for number in range(2)]
    engine.run(engine.prefill())
    engine.prefill()
    updated(engine)
    (gone,) = engine.retract(engine.running_batch)
    engine.finish_all()
    start = 1000 * reqs.index(gone)
    assert found(engine, prompt(60, start)) == (whole(engine, 40), 0)
    assert found(engine, prompt(60, 1000 - start)) == (0, 0)
    engine.settle()
    engine.assert_idle()


def test_copies_in_flight_end_and_their_pages_are_dropped(engine: Engine) -> None:
    """A backup of old pages, and a load that a request of the old epoch waits for."""
    on_host(engine, prompt(48))
    engine.request(prompt(64))
    batch = engine.prefill()
    assert batch is not None and batch.hicache_consumer_index == 1
    updated(engine)
    engine.run(batch)
    engine.finish_all()
    engine.settle()
    engine.assert_idle()
    assert engine.cache.total_size() == 0 and engine.cache.cache.host_pages.used == 0


# Statistics


def test_a_look_is_not_a_hit(engine: Engine) -> None:
    """A policy that orders by matched length matches every queued request in every step."""
    engine.serve(prompt(48))
    stats = engine.cache.cache.stats
    req = engine.request(prompt(64))
    for _ in range(3):
        req.init_next_round_input(engine.cache)
    assert stats.hit_device == 0
    engine.finish_all()
    assert stats.hit_device == 48 == req.cached_tokens_device
    engine.settle()
    engine.assert_idle()


# Lifetime


def test_transfers_idle_waits_for_copies_in_flight(engine: Engine) -> None:
    engine.request(prompt(48))
    engine.run(engine.prefill())
    engine.step()
    assert len(engine.cache.cache.tickets) == 1
    assert engine.cache.transfers_idle()
    assert engine.cache.engine.backups.done() == 1


def test_reset_leaves_the_slots_to_the_engine(engine: Engine) -> None:
    on_host(engine, prompt(48))
    engine.serve(prompt(48, 500))
    free = engine.allocator.available_size()
    type(engine.cache).reset(engine.cache)
    assert engine.allocator.available_size() == free
    engine.allocator.clear()
    engine.rows.clear()
    assert (engine.cache.total_size(), engine.cache.cache.host_pages.used) == (0, 0)
    assert engine.serve(prompt(48)).cached_tokens == 0
    engine.settle()
    engine.cache.evict(EvictParams(num_tokens=TOKENS))
    assert hits(engine.serve(prompt(64))) == (0, 48, 0)
    engine.settle()
    engine.assert_idle()


def test_after_a_reset_no_batch_waits_for_a_load_from_before(engine: Engine) -> None:
    """Its request was turned away and then aborted, so that the load was neither started nor waited for."""
    on_host(engine, prompt(48))
    req = engine.request(prompt(64))
    req.init_next_round_input(engine.cache)
    _, node = engine.cache.init_load_back(
        InitLoadBackParams(best_match_node=req.best_match_node, host_hit_length=48, req=req)
    )
    engine.cache.dec_lock_ref(node, engine.cache.inc_lock_ref(node).to_dec_params())
    engine.abort(req)
    engine.cache.reset()
    engine.allocator.clear()
    engine.request(prompt(20, 500))
    batch = engine.prefill()
    assert batch is not None and batch.hicache_consumer_index == -1
    engine.run(batch)
    engine.finish_all()
    engine.settle()
    engine.assert_idle()


def test_printing_tells_nodes_and_totals(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.serve(prompt(45))
    engine.settle()
    engine.cache.pretty_print()
    printed = capsys.readouterr().out
    assert "#tokens on the device: 48, on the host: 48" in printed and "Node(" in printed
    assert "evictable_size=48" in engine.cache.available_and_evictable_str()


# Everything at once


@pytest.mark.parametrize(
    ("seed", "page", "options"),
    [
        (0, 1, {}),
        (1, PAGE, {}),
        (2, 1, {"allocator": paged_allocator()}),
        (3, PAGE, {"write_policy": "write-back"}),
        (4, PAGE, {"schedule_policy": "lpm"}),
    ],
    ids=["tokens", "pages", "allocator of a CPU", "write-back", "lpm"],
)
def test_a_pool_full_of_traffic_stays_exact(seed: int, page: int, options: dict[str, Any]) -> None:
    """Chats that grow, chunks, aborts, evictions, weight updates: every reused token is checked."""
    with closing(Engine(page, tokens=TOKENS, **options)) as engine:
        run_traffic(engine, random.Random(seed))


def run_traffic(engine: Engine, rng: random.Random) -> None:
    chats = [prompt(rng.randrange(10, 40), 1000 * number) for number in range(5)]
    open_reqs: list[tuple[int, Any]] = []
    loaded = 0
    for _ in range(120):
        if len(engine.waiting_queue) < 3 and len(open_reqs) < 5:
            number = rng.randrange(len(chats))
            scope = {"extra_key": rng.choice("ab")} if rng.random() < 0.2 else {}
            open_reqs.append((number, engine.request(chats[number], **scope)))
        batch = engine.next_batch(chunk=rng.choice([32, 48]))
        if batch is not None:
            engine.run(batch)
        if open_reqs and rng.random() < 0.1:
            engine.abort(rng.choice(open_reqs)[1])
        if rng.random() < 0.2:
            engine.cache.evict(EvictParams(num_tokens=rng.randrange(1, TOKENS)))
        if rng.random() < 0.02:
            updated(engine)
        if rng.random() < 0.3:
            engine.cache.engine.drain()
        for number, req in [pair for pair in open_reqs if pair[1].finished() or pair[1].kv is None]:
            if req.finished():
                loaded += req.cached_tokens_host
                chats[number] = (list(req.origin_input_ids) + list(req.output_ids) + prompt(5, 900))[:150]
            if req.finished() or req not in engine.waiting_queue:
                open_reqs = [pair for pair in open_reqs if pair[1] is not req]
    engine.finish_all(chunk=32)
    engine.settle()
    engine.assert_idle()
    stats = engine.cache.cache.stats
    assert stats.hit_device > 0 and stats.hit_host > 0 and loaded > 0


# The allocator of a CPU


def extended(allocator: Any, lengths: list[tuple[int, int]], last: list[int]) -> torch.Tensor | None:
    prefix, total = (torch.tensor(column) for column in zip(*lengths, strict=True))
    count = int((total - prefix).sum())
    return allocator.alloc_extend(prefix, prefix, total, total, torch.tensor(last), count)


@pytest.mark.parametrize("page", [2, 4, PAGE])
def test_rows_that_grow_are_page_after_page(page: int) -> None:
    """What SGLang's Triton kernels do: fill the open page, then take whole free pages in their order."""
    with closing(Engine(page, tokens=TOKENS, allocator=paged_allocator())) as engine:
        rng = random.Random(page)
        allocator = engine.allocator
        rows: list[list[int]] = [[], [], []]
        for _ in range(8):
            lengths = [(len(row), len(row) + rng.randrange(1, 6)) for row in rows]
            out = extended(allocator, lengths, [row[-1] if row else -1 for row in rows])
            assert out is not None
            start = 0
            for row, (before, after) in zip(rows, lengths, strict=True):
                row += out[start : start + after - before].tolist()
                start += after - before
            total = torch.tensor([len(row) + 1 for row in rows])
            out = allocator.alloc_decode(total, total, torch.tensor([row[-1] for row in rows]))
            assert out is not None
            for row, slot in zip(rows, out.tolist(), strict=True):
                row.append(slot)
        pages = [row[at] // page for row in rows for at in range(0, len(row), page)]
        assert len(set(pages)) == len(pages) and not set(pages) & set(allocator.free_pages.tolist())
        for row in rows:
            assert all(slot == row[at // page * page] + at % page for at, slot in enumerate(row))
            assert all(row[at] % page == 0 for at in range(0, len(row), page))
        assert len(pages) * page + allocator.available_size() == TOKENS


def test_too_few_pages_are_told_and_none_are_taken() -> None:
    with closing(Engine(PAGE, tokens=TOKENS)) as engine:
        allocator = engine.allocator
        held = allocator.alloc(TOKENS - 2 * PAGE)
        lasts = held[PAGE - 1 :: PAGE][:3].tolist()
        assert extended(allocator, [(16, 20)] * 3, lasts) is None
        full = torch.tensor([17] * 3)
        assert allocator.alloc_decode(full, full, torch.tensor(lasts)) is None
        assert allocator.available_size() == 2 * PAGE
        assert extended(allocator, [(16, 20)] * 2, lasts[:2]) is not None
        assert allocator.available_size() == 0
