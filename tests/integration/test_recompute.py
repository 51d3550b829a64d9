"""Requests that computed on damaged pages are taken back before any of their tokens is used.

With SGLang's own requests and pools on the CPU. The scheduler and its batches are stand-ins: the attributes
and methods that ``Recompute`` touches, driven in the order of SGLang's event loops. The real scheduler runs
in tests/faults.
"""

from __future__ import annotations

import warnings
from array import array
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.releases import only_on

with warnings.catch_warnings():
    # Some of what SGLang imports warns about itself.
    warnings.simplefilter("ignore")
    only_on("0.5.23")
    from sglang.srt.managers import io_struct, schedule_batch
    from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
    from sglang.srt.mem_cache import common
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

from hicache_ext.core.header import Reason
from tests.integration.engine import Engine, prompt

pytestmark = pytest.mark.timeout(60)

PAGE = 4


class Batch:
    """A ``ScheduleBatch`` as far as it is looked at."""

    def __init__(self, reqs: list[Req], load: int = -1, *, return_logprob: bool = False) -> None:
        self.reqs = reqs
        self.hicache_consumer_index = load
        self.return_logprob = return_logprob
        self.batch_is_full = True
        self.forward_mode = ForwardMode.EXTEND
        self.prefix_lens = [req.prefix_len for req in reqs]
        self.extend_lens = [1 for _ in reqs]

    def copy(self) -> Batch:
        return Batch(self.reqs[:], self.hicache_consumer_index, return_logprob=self.return_logprob)

    def filter_batch(self, reqs_to_exclude: list[Req]) -> None:
        self.reqs = [r for r in self.reqs if r not in reqs_to_exclude]


class Scheduler:
    """What ``Recompute`` knows of the scheduler; ``result_queue`` exists under the overlap scheduler only."""

    def __init__(self, engine: Engine, *, overlap: bool) -> None:
        self.engine = engine
        self.tree_cache = engine.cache
        self.running_batch = Batch([])
        self.last_batch: Batch | None = None
        self.chunked_req: Req | None = None
        self.waiting_queue: list[Req] = []
        if overlap:
            self.result_queue: deque[tuple[Batch, None]] = deque()

    def _prefetch_kvcache(self, req: Req) -> None:
        self.tree_cache.on_request_queued(req)

    def launch(self, reqs: list[Req], load: int, *, sound: bool, **options: Any) -> Batch:
        """Run a batch; its result is processed later."""
        batch = Batch(reqs, load, **options)
        for req in reqs:
            self.engine.forward(req, load, sound=sound)
        if hasattr(self, "result_queue"):
            self.result_queue.append((batch.copy(), None))
        self.last_batch = batch
        return batch

    def result(self, batch: Batch | None = None) -> list[Req]:
        """Process a batch's result as SGLang does; returns the requests that got a token."""
        if hasattr(self, "result_queue"):
            batch, _ = self.result_queue.popleft()
        assert batch is not None
        self.tree_cache.on_batch_result(self, batch)
        served = [r for r in batch.reqs if not r.is_retracted and not r.finished()]
        for req in served:
            req.output_ids.append(7)
            if req is not self.chunked_req:
                self.engine.checkpoint(req)
        self.tree_cache.flush_pending_backups()
        return served

    def step(self) -> None:
        self.tree_cache.check_hicache_events()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    # The two settings that SGLang's release of a request reads from its running server.
    settings = SimpleNamespace(speculative_algorithm=None, strip_thinking_cache=False)
    for module, name in ((common, "get_spec"), (common, "get_serving"), (schedule_batch, "get_serving")):
        monkeypatch.setattr(module, name, lambda: settings)
    engine = Engine(PAGE)
    yield engine
    engine.close()


def again(engine: Engine, scheduler: Scheduler, req: Req) -> None:
    """Serve a request that came back, and check all it reuses."""
    assert scheduler.waiting_queue.pop(0) is req
    load = engine.admit(req)
    req.is_retracted = False
    batch = scheduler.launch([req], load, sound=True)
    assert scheduler.result(batch) == [req]
    engine.release(req)
    engine.settle()


def found(engine: Engine, tokens: list[int]) -> tuple[int, int]:
    """Device and host tokens that a lookup finds."""
    result = engine.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))
    return result.device_prefix_len, result.host_hit_length


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_kind_corrupt_page_from_a_lower_tier(engine: Engine, bad: int, overlap: bool) -> None:
    """Damaged between two turns: no token of the first try is used, and the second one computes it anew."""
    scheduler = Scheduler(engine, overlap=overlap)
    engine.to_host(prompt(12))
    engine.damage(engine.host_page(prompt(13), bad))
    req = engine.request(prompt(18))
    load = engine.admit(req)
    assert (req.prefix_len, req.host_loaded_length) == (12, 12) and load > 0
    batch = scheduler.launch([req], load, sound=False)
    computed = engine.cache.cache.stats.computed
    assert scheduler.result(batch) == [], "nothing of it was used"
    assert req.is_retracted and not req.kv.holds_kv and req.lock is None and not req.output_ids
    assert engine.cache.cache.stats.computed == computed, "nothing of it was published"
    assert engine.cache.recompute.count == 1
    assert engine.cache.engine.counts.refused == {Reason.CHECKSUM: 1}
    engine.assert_adds_up()
    scheduler.step()
    assert scheduler.waiting_queue == [req] and not engine.cache.cache.tree.condemned
    assert scheduler.last_batch is not None and scheduler.last_batch.reqs == []
    assert found(engine, prompt(18)) == (bad * PAGE, 0), "what came before the bad page is sound"
    assert engine.cache.cache.tree.host_tokens == bad * PAGE
    assert not req.retracted_stain, "its hits are counted anew"
    again(engine, scheduler, req)
    assert req.prefix_len == bad * PAGE
    engine.assert_idle()
    assert engine.serve(prompt(20)).prefix_len == 16, "the second try was published"
    engine.settle()
    engine.to_host(prompt(18))
    assert engine.serve(prompt(20)).host_loaded_length == 16, "and its copy on the host is sound"
    assert engine.cache.engine.counts.refused.total() == 1


def condemned_pair(engine: Engine, **options: Any) -> tuple[Scheduler, Req, Req, Batch]:
    """A batch of one request on a damaged page and one that has nothing to do with it."""
    scheduler = Scheduler(engine, overlap=False)
    engine.to_host(prompt(12))
    engine.damage(engine.host_page(prompt(13), 1))
    tainted, sound = engine.request(prompt(16)), engine.request(prompt(10, 500))
    loads = [engine.admit(tainted), engine.admit(sound)]
    engine.forward(sound, -1)
    batch = scheduler.launch([tainted], max(loads), sound=False, **options)
    batch.reqs = [tainted, sound]
    return scheduler, tainted, sound, batch


def test_a_request_beside_it_goes_on(engine: Engine) -> None:
    scheduler, tainted, sound, batch = condemned_pair(engine)
    assert scheduler.result(batch) == [sound]
    assert tainted.is_retracted and not sound.is_retracted
    assert batch.reqs == [sound] and batch.batch_is_full is False
    engine.assert_adds_up(sound)
    scheduler.step()
    engine.release(sound)
    again(engine, scheduler, tainted)
    engine.assert_idle()


def test_a_batch_with_logprobs_is_taken_back_whole(engine: Engine) -> None:
    """Its results are sliced by position."""
    scheduler, tainted, sound, batch = condemned_pair(engine, return_logprob=True)
    assert scheduler.result(batch) == [] and batch.reqs == []
    assert tainted.is_retracted and sound.is_retracted and engine.cache.recompute.count == 2
    scheduler.step()
    assert set(scheduler.waiting_queue) == {tainted, sound}
    for req in list(scheduler.waiting_queue):
        again(engine, scheduler, req)
    engine.assert_idle()


def test_finished_and_retracted_requests_are_left_alone(engine: Engine) -> None:
    scheduler, tainted, sound, batch = condemned_pair(engine, return_logprob=True)
    sound.finished_reason = FINISH_LENGTH(1)
    scheduler.tree_cache.on_batch_result(scheduler, batch)
    assert engine.cache.recompute.count == 1 and not sound.is_retracted
    scheduler.tree_cache.on_batch_result(scheduler, batch)
    assert engine.cache.recompute.count == 1, "once is enough"
    engine.release(sound, checkpoint=False)
    scheduler.step()
    assert scheduler.waiting_queue == [tainted]


def test_who_shares_a_damaged_page_is_taken_back_with_its_own_batch(engine: Engine) -> None:
    """Under the overlap scheduler the next batch runs already when the bad page is told."""
    scheduler = Scheduler(engine, overlap=True)
    engine.to_host(prompt(12))
    engine.damage(engine.host_page(prompt(13), 2))
    first, second = engine.request(prompt(16)), engine.request([*prompt(12), 90, 91, 92, 93, 94])
    scheduler.launch([first], engine.admit(first), sound=False)
    load = engine.admit(second)
    assert (second.prefix_len, second.host_loaded_length) == (12, 0), "found on the device, on its way"
    scheduler.launch([second], load, sound=False)
    assert scheduler.result() == [] and first.is_retracted and not second.is_retracted
    engine.assert_adds_up(second)
    scheduler.step()
    assert scheduler.waiting_queue == [first]
    assert engine.cache.cache.tree.condemned, "it is held by the second one"
    assert scheduler.result() == [] and second.is_retracted
    scheduler.step()
    assert scheduler.waiting_queue == [second, first] and not engine.cache.cache.tree.condemned
    for req in (second, first):
        again(engine, scheduler, req)
        assert req.prefix_len >= 8
    engine.assert_idle()


def test_a_request_whose_next_result_is_outstanding_waits_for_it(engine: Engine) -> None:
    """SGLang skips that result because the request is marked; queued again it would not be marked."""
    scheduler = Scheduler(engine, overlap=True)
    engine.to_host(prompt(12))
    engine.damage(engine.host_page(prompt(13), 0))
    req = engine.request(prompt(16))
    scheduler.launch([req], engine.admit(req), sound=False)
    # The next step decodes on.
    scheduler.running_batch = Batch([req])
    scheduler.result_queue.append((Batch([req]), None))
    assert scheduler.result() == []
    assert scheduler.running_batch.reqs == [req], "its tensors are in use"
    scheduler.step()
    assert scheduler.running_batch.reqs == [] and scheduler.waiting_queue == []
    assert scheduler.result() == [], "the outstanding one is skipped"
    scheduler.step()
    assert scheduler.waiting_queue == [req] and engine.cache.recompute.count == 1
    again(engine, scheduler, req)
    engine.assert_idle()


def test_a_result_processed_by_a_pause_leaves_the_batches_at_once(engine: Engine) -> None:
    """A pause takes the last result and then retracts all that is in the batches: not a second time."""
    scheduler = Scheduler(engine, overlap=True)
    engine.to_host(prompt(12))
    engine.damage(engine.host_page(prompt(13), 0))
    req = engine.request(prompt(16))
    scheduler.launch([req], engine.admit(req), sound=False)
    scheduler.running_batch = Batch([req])
    engine.cache.on_control(io_struct.PauseGenerationReqInput(mode="retract"))
    assert scheduler.result() == []
    assert scheduler.running_batch.reqs == [] and scheduler.last_batch is not None
    assert scheduler.last_batch.reqs == [] and scheduler.waiting_queue == []
    scheduler.step()
    assert scheduler.waiting_queue == [req]


@pytest.mark.parametrize(
    ("rid", "abort_all", "aborted"), [("r", False, True), ("x", False, False), ("", True, True)]
)
def test_an_abort_reaches_a_request_on_its_way_back(
    engine: Engine, rid: str, abort_all: bool, aborted: bool
) -> None:
    """It is in no batch and in no queue, where SGLang would look for it."""
    scheduler, tainted, sound, batch = condemned_pair(engine)
    scheduler.result(batch)
    engine.cache.on_control(io_struct.AbortReq(rid=rid, abort_all=abort_all))
    assert (tainted.to_finish is not None) is aborted and sound.to_finish is None
    scheduler.step()
    assert scheduler.waiting_queue == [tainted]


def test_a_chunked_request_on_a_condemned_node_publishes_nothing(engine: Engine) -> None:
    """Its first chunk is published before its load is told to be bad; that is not found either."""
    scheduler = Scheduler(engine, overlap=True)
    engine.to_host(prompt(12))
    engine.damage(engine.host_page(prompt(13), 1))
    req = engine.request(prompt(30))
    scheduler.chunked_req = req
    load = engine.admit(req)
    assert req.prefix_len == 12
    scheduler.launch([req], load, sound=False)
    # The next step begins with what is computed so far.
    engine.cache.checkpoint(req, up_to=20)
    assert req.kv.cache_protected_len == 20
    engine.step()
    scheduler.result_queue.append((Batch([req]), None))
    assert scheduler.result() == []
    assert scheduler.chunked_req is None and req.is_retracted
    assert found(engine, prompt(30)) == (4, 0)
    engine.assert_adds_up()
    scheduler.result()
    engine.settle()
    assert scheduler.waiting_queue == [req]
    assert found(engine, prompt(30)) == (4, 0)
    assert engine.cache.cache.tree.host_tokens == 4, "nor is the copy of the chunk"
    again(engine, scheduler, req)
    assert req.prefix_len == 4
    engine.assert_idle()


def test_a_chunk_after_the_bad_page_was_told_is_not_published(engine: Engine) -> None:
    engine.to_host(prompt(12))
    engine.damage(engine.host_page(prompt(13), 1))
    req = engine.request(prompt(30))
    engine.forward(req, engine.admit(req), sound=False)
    engine.cache.cache.settle_loads(1)
    computed = engine.cache.cache.stats.computed
    for up_to in (20, 30):
        engine.cache.checkpoint(req, up_to=up_to)
        assert req.kv.cache_protected_len == 12 and engine.cache.cache.stats.computed == computed
        engine.assert_adds_up(req)
    engine.release(req)
    engine.settle()
    engine.assert_idle()
    assert found(engine, prompt(30)) == (4, 0)


def test_tokens_that_were_sent_stay_sent(engine: Engine) -> None:
    """A request that had tokens before the load was refused keeps them; its hits are not counted anew."""
    scheduler, tainted, sound, batch = condemned_pair(engine)
    tainted.output_ids.append(5)
    tainted.cached_tokens = 3
    assert scheduler.result(batch) == [sound]
    assert list(tainted.output_ids) == [5] and tainted.cached_tokens == 3 and tainted.retracted_stain
    assert tainted.host_loaded_length == 0
    scheduler.step()
    engine.release(sound)
    hits = engine.cache.cache.stats.hit_device
    again(engine, scheduler, tainted)
    assert engine.cache.cache.stats.hit_device == hits
    engine.assert_idle()


def test_it_comes_first_and_what_it_will_reuse_is_kept_for_it(engine: Engine) -> None:
    scheduler, tainted, sound, batch = condemned_pair(engine)
    waiting = engine.request(prompt(8, 900))
    scheduler.waiting_queue = [waiting]
    scheduler.result(batch)
    assert tainted.rid not in engine.cache.cache.tree.waiting
    scheduler.step()
    assert scheduler.waiting_queue == [tainted, waiting]
    assert tainted.rid in engine.cache.cache.tree.waiting
    engine.release(sound)


def test_pages_of_older_weights_are_no_reason_to_start_again(engine: Engine) -> None:
    """SGLang lets running requests go on with what they have when the weights change."""
    scheduler = Scheduler(engine, overlap=False)
    engine.to_host(prompt(12))
    req = engine.request(prompt(16))
    batch = scheduler.launch([req], engine.admit(req), sound=True)
    engine.cache.on_control(io_struct.UpdateWeightVersionReqInput(new_version="v2"))
    assert engine.cache.cache.tree.condemned
    assert scheduler.result(batch) == [req] and engine.cache.recompute.count == 0
    engine.release(req)
    engine.settle()
    engine.assert_idle()


def test_a_stale_page_that_is_damaged_too_is_a_reason(engine: Engine) -> None:
    scheduler = Scheduler(engine, overlap=False)
    engine.to_host(prompt(12))
    engine.damage(engine.host_page(prompt(13), 1))
    req = engine.request(prompt(16))
    batch = scheduler.launch([req], engine.admit(req), sound=False)
    engine.cache.on_control(io_struct.UpdateWeightVersionReqInput(new_version="v2"))
    assert scheduler.result(batch) == [] and engine.cache.recompute.count == 1
    scheduler.step()
    again(engine, scheduler, req)
    assert req.prefix_len == 0
    engine.assert_idle()


def test_without_damage_nothing_is_taken_back(engine: Engine) -> None:
    scheduler = Scheduler(engine, overlap=False)
    engine.to_host(prompt(12))
    req = engine.request(prompt(16))
    batch = scheduler.launch([req], engine.admit(req), sound=True)
    assert scheduler.result(batch) == [req] and engine.cache.recompute.count == 0
    engine.release(req)
    engine.settle()
    engine.assert_idle()
