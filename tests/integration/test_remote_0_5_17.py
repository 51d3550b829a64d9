"""The remote tier behind SGLang 0.5.17: a disk store, SGLang's own requests, pools and batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.releases import only_on

with warnings.catch_warnings():
    # Some of what SGLang imports warns about itself.
    warnings.simplefilter("ignore")
    only_on("0.5.17")
    from sglang.srt.managers import io_struct

    from tests.integration.engine_0_5_17 import Engine, prompt
    from tests.integration.engine_base import wait

pytestmark = pytest.mark.timeout(60)

PAGE, TOKENS = 16, 256
Make = Callable[[], Engine]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Make]:
    """Servers, one after the other on the same store."""
    started: list[Engine] = []

    def start() -> Engine:
        for engine in started:
            engine.close()
        started.clear()
        engine = Engine(PAGE, tokens=TOKENS, remote=(f"file://{tmp_path}/store?size_gb=0.01",))
        started.append(engine)
        wait(engine, lambda: engine.cache.cache.remote is not None and engine.cache.cache.remote.usable)
        assert engine.cache.stores is not None
        speeds = engine.cache.stores.planner.speeds
        wait(engine, lambda: speeds.measured.stores["remote"].known)
        return engine

    yield start
    for engine in started:
        engine.close()


def restarted(server: Make) -> Engine:
    """A server with a prompt of 64 tokens in its store and nowhere else."""
    first = server()
    first.serve(prompt(64))
    tier = first.cache.cache.remote
    assert tier is not None
    wait(first, lambda: tier.stats.stored == 64)
    return server()


def test_kind_written_but_never_read_back_a_prompt_survives_a_restart(server: Make) -> None:
    second = restarted(server)
    req = second.request(prompt(80))
    assert second.prefill() is None and not second.cache.fetch_ended(req), "it waits for its pages"
    wait(second, lambda: second.cache.fetch_ended(req))
    second.finish_all()
    assert (req.cached_tokens_device, req.cached_tokens_host, req.cached_tokens_storage) == (0, 0, 64)
    stats = second.cache.cache.stats
    assert (stats.hit_device, stats.hit_host, stats.hit_store) == (0, 0, 64)
    again = second.serve(prompt(80))
    assert again.cached_tokens_device == 64 and stats.hit_store == 64
    wait(second, lambda: not second.cache.cache.pending())
    second.assert_idle()


def test_detached_stores_give_nothing_until_they_are_attached(server: Make) -> None:
    second = restarted(server)
    req = second.request(prompt(80))
    assert not second.cache.fetch_ended(req)
    assert second.cache.detach_stores() == io_struct.DetachHiCacheStorageReqOutput(
        success=True, message="the stores are detached"
    )
    assert second.cache.fetch_ended(req)
    second.finish_all()
    assert (req.cached_tokens_device, req.cached_tokens_host, req.cached_tokens_storage) == (0, 0, 0)
    wait(second, lambda: not second.cache.cache.pending())
    second.assert_idle()
    request = io_struct.AttachHiCacheStorageReqInput(hicache_storage_backend="hicache-ext")
    assert second.cache.attach_stores(request).success
    tier = second.cache.cache.remote
    assert tier is not None
    wait(second, lambda: tier.stats.stored == 64)
    third = server()
    req = third.request(prompt(80))
    wait(third, lambda: third.cache.fetch_ended(req))
    third.finish_all()
    assert req.cached_tokens_storage == 64


def test_kind_request_gone_state_stays_an_abort_during_its_fetch(server: Make) -> None:
    second = restarted(server)
    req = second.request(prompt(80))
    second.abort(req)
    assert second.cache.fetch_ended(req)
    wait(second, lambda: not second.cache.cache.pending())
    second.assert_idle()
