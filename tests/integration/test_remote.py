"""The remote tier behind SGLang's interface: a disk store, SGLang's own requests, pools and allocators."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.releases import only_on

with warnings.catch_warnings():
    # Some of what SGLang imports warns about itself.
    warnings.simplefilter("ignore")
    only_on("0.5.23")
    from sglang.srt.managers import io_struct
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

from hicache_ext.integration import build
from tests.integration.engine import Engine, prompt
from tests.integration.engine_base import wait

pytestmark = pytest.mark.timeout(60)

Make = Callable[[], Engine]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Make]:
    """Servers, one after the other on the same store."""
    started: list[Engine] = []

    def start() -> Engine:
        for engine in started:
            engine.close()
        engine = Engine(4, remote=(f"file://{tmp_path}/store?size_gb=0.01",))
        started.append(engine)
        wait(engine, lambda: engine.cache.cache.remote is not None and engine.cache.cache.remote.usable)
        # The store was measured.
        wait(engine, lambda: stores(engine).planner.speeds.measured.stores["remote"].known)
        return engine

    yield start
    for engine in started:
        engine.close()


def stores(engine: Engine) -> build.Stores:
    assert engine.cache.stores is not None
    return engine.cache.stores


def stored(engine: Engine) -> int:
    tier = engine.cache.cache.remote
    assert tier is not None
    return tier.stats.stored


def having_stored(server: Make) -> Engine:
    """A server whose store has ``prompt(40)``."""
    engine = server()
    engine.serve(prompt(40))
    wait(engine, lambda: stored(engine) == 40)
    return engine


def restarted(server: Make) -> Engine:
    """A server that finds ``prompt(40)`` in its store and nowhere else."""
    having_stored(server)
    return server()


def test_kind_written_but_never_read_back_a_prompt_survives_a_restart(server: Make) -> None:
    second = restarted(server)
    req = second.request(prompt(43))
    assert not second.cache.fetch_ended(req), "it waits for its pages"
    wait(second, lambda: second.cache.fetch_ended(req))
    second.forward(req, second.admit(req))
    assert (req.prefix_len, req.storage_hit_length) == (40, 40)
    stats = second.cache.cache.stats
    assert (stats.hit_device, stats.hit_host, stats.hit_store) == (0, 0, 40)
    second.release(req)
    again = second.serve(prompt(43))
    assert again.prefix_len == 40 and again.storage_hit_length == 0 and stats.hit_store == 40
    second.assert_adds_up()


def test_what_was_fetched_is_not_written_again(server: Make) -> None:
    second = restarted(server)
    req = second.request(prompt(44))
    wait(second, lambda: second.cache.fetch_ended(req))
    second.forward(req, second.admit(req))
    second.release(req)
    wait(second, lambda: stored(second) == 4)
    second.settle()
    assert stored(second) == 4


def test_kind_request_gone_state_stays_an_abort_during_its_fetch(server: Make) -> None:
    second = restarted(server)
    req = second.request(prompt(43))
    second.cache.release_aborted_request(CacheRequestHandle(req.rid, 0))
    assert second.cache.fetch_ended(req)
    wait(second, lambda: not second.cache.cache.pending())
    second.assert_idle()


def update_weights(engine: Engine) -> None:
    engine.cache.on_control(
        io_struct.UpdateWeightFromDiskReqInput(model_path="x", load_format=None, weight_version="v2")
    )


def assert_nothing_is_found(engine: Engine) -> None:
    """Of the prompt that was stored before, once the stores can be used."""
    wait(engine, lambda: engine.cache.cache.remote is not None and engine.cache.cache.remote.usable)
    req = engine.request(prompt(43))
    wait(engine, lambda: engine.cache.fetch_ended(req))
    engine.forward(req, engine.admit(req))
    assert req.prefix_len == 0
    engine.release(req)


def test_kind_stale_after_weight_update_other_weights_find_nothing_in_a_store(server: Make) -> None:
    second = restarted(server)
    update_weights(second)
    assert_nothing_is_found(second)


def test_a_flush_is_kept_by_the_store(server: Make) -> None:
    first = having_stored(server)
    first.settle()
    first.cache.on_control(io_struct.FlushCacheReqInput())
    first.cache.reset()
    first.allocator.clear()
    wait(first, lambda: first.cache.cache.epoch == 2)
    assert first.serve(prompt(43)).prefix_len == 0
    wait(first, lambda: stored(first) == 80)
    second = server()
    assert second.cache.cache.epoch == 2, "a server that starts later knows of it"


def attach(engine: Engine, name: str = "hicache-ext", **more: str) -> io_struct.AttachHiCacheStorageReqOutput:
    request = io_struct.AttachHiCacheStorageReqInput(hicache_storage_backend=name, **more)
    return engine.cache.attach_stores(request)


def test_detached_stores_give_nothing_and_get_nothing_until_they_are_attached(server: Make) -> None:
    second = restarted(server)
    waiting = second.request(prompt(43))
    assert not second.cache.fetch_ended(waiting)
    done = second.cache.detach_stores()
    assert done.success and done.message == "the stores are detached"
    assert second.cache.fetch_ended(waiting), "it waits for nothing any more"
    second.forward(waiting, second.admit(waiting))
    assert (waiting.prefix_len, waiting.storage_hit_length) == (0, 0)
    second.release(waiting)
    second.serve(prompt(40, start=200))
    second.settle()
    assert stored(second) == 0
    again = second.cache.detach_stores()
    assert again.success and again.message == "the stores were detached before"

    assert attach(second).success
    wait(second, lambda: stored(second) == 80)
    assert attach(second).message == "the stores were attached before"
    third = server()
    for start in (0, 200):
        req = third.request(prompt(43, start=start))
        wait(third, lambda req=req: third.cache.fetch_ended(req))  # type: ignore[misc]
        third.forward(req, third.admit(req))
        assert req.storage_hit_length == 40
        third.release(req)
    third.settle()
    third.assert_adds_up()


def test_kind_stale_after_weight_update_while_the_stores_are_detached(server: Make) -> None:
    second = restarted(server)
    second.cache.detach_stores()
    update_weights(second)
    attach(second)
    assert_nothing_is_found(second)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("mooncake", {}),
        ("file", {}),
        ("", {}),
        ("hicache-ext", {"hicache_storage_backend_extra_config_json": "{}"}),
        ("hicache-ext", {"hicache_storage_prefetch_policy": "timeout"}),
        ("hicache-ext", {"hicache_write_policy": "write_through"}),
    ],
)
def test_only_the_stores_of_the_start_can_be_attached(server: Make, name: str, more: dict[str, str]) -> None:
    engine = server()
    engine.cache.detach_stores()
    answer = attach(engine, name, **more)
    assert not answer.success and "chosen at start, with --hicache-ext-remote" in answer.message
    assert "\n" not in answer.message
    tier = engine.cache.cache.remote
    assert tier is not None and not tier.attached


def test_a_server_without_stores_says_so() -> None:
    engine = Engine(4)
    for answer in (engine.cache.detach_stores(), attach(engine)):
        assert not answer.success
        assert answer.message == "this server has no stores; start it with --hicache-ext-remote"
    engine.close()


def test_without_a_store_no_request_waits() -> None:
    engine = Engine(4)
    req = engine.request(prompt(43))
    assert engine.cache.fetch_ended(req) and engine.cache.stores is None
    engine.close()
