"""How such caches fail in production, by kind, as far as a real server can show it today."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.server.harness import SGLangServer
from tests.server.workload import (
    TOKEN_BYTES,
    Stream,
    abort,
    details,
    fill_device,
    moved,
    pages,
    prompt,
    reusable,
    running,
    send,
    tiny_model,
    tiny_server,
    wait_until,
    waiting,
)

pytestmark = pytest.mark.server

PAGE = 16


@pytest.fixture(scope="module")
def running_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    flags = ["--chunked-prefill-size", "128", "--max-running-requests", "2"]
    with tiny_server(
        tiny_model(tmp_path_factory), tmp_path_factory.mktemp("kinds"), *flags, page_size=PAGE
    ) as server:
        yield server


def test_kind_written_but_never_read_back(server: SGLangServer) -> None:
    """What was written to the host is found there again, is the same to the last bit, and is counted."""
    written, read = moved(server, "device_to_host"), moved(server, "host_to_device")
    hits = server.metric("hicache_ext_hit_tokens_total", tier="host")
    ids = prompt(1, 700)
    reused = reusable(len(ids), PAGE)
    server.generate(input_ids=ids, max_new_tokens=8)
    on_device = server.generate(input_ids=ids, max_new_tokens=8, logprobs=True)
    fill_device(server, 1)
    on_host = server.generate(input_ids=ids, max_new_tokens=8, logprobs=True)
    assert (details(on_device), details(on_host)) == ((reused, 0), (0, reused))
    assert (on_host.output_ids, on_host.logprobs) == (on_device.output_ids, on_device.logprobs)
    wait_until(
        "the hit is counted",
        lambda: server.metric("hicache_ext_hit_tokens_total", tier="host") - hits == reused,
    )
    assert moved(server, "host_to_device") - read == reused * TOKEN_BYTES
    assert moved(server, "device_to_host") - written >= reused * TOKEN_BYTES


def test_kind_request_gone_state_stays(server: SGLangServer) -> None:
    """Requests leave in the queue, while their pages are loaded, in prefill and in decode."""
    known = [prompt(20 + i, 600) for i in range(3)]
    for ids in known:
        server.generate(input_ids=ids, max_new_tokens=1)
    fill_device(server, 2)
    for round_ in range(4):
        busy = [Stream.open(server, prompt(40 + i, 30), 300) for i in range(2)]
        for stream in busy:
            stream.next()
        rids = [f"gone-{round_}-{i}-{time.monotonic_ns()}" for i in range(6)]
        sampling = {"temperature": 0.0, "max_new_tokens": 50, "ignore_eos": True}
        clients = []
        for i, rid in enumerate(rids):
            ids = [*known[i % 3], *prompt(60 + i, 200)]
            clients.append(send(server, {"input_ids": ids, "sampling_params": sampling, "rid": rid}))
        wait_until("six are queued", lambda: waiting(server) == 6, step=0.02)
        for rid in rids[:2]:
            abort(server, rid)
        for stream in busy:
            stream.close()
        # The rest is admitted, with pages from the host, when the streams are gone.
        wait_until("some of them run", lambda: waiting(server) < 4, step=0.005)
        time.sleep(0.03 * round_)
        for rid, client in zip(rids[2:], clients[2:], strict=True):
            abort(server, rid)
            client.close()
        for client in clients[:2]:
            client.close()
    wait_until("nothing runs", lambda: running(server) == 0 and waiting(server) == 0)
    # Before any flush: nothing is locked, marked or in flight; pages are merely cached.
    wait_until("no mark is left", lambda: server.metric("hicache_ext_waiting_requests") == 0)
    wait_until("no transfer is left", lambda: server.metric("hicache_ext_open_tickets") == 0)
    assert [load["num_used_tokens"] for load in server.loads()] == [0]
    for ids in known:
        assert server.generate(input_ids=ids, max_new_tokens=1).cached_tokens == reusable(600, PAGE)


def test_kind_stale_after_weight_update(
    server: SGLangServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """An update of the weights on an idle server empties the device and the host."""
    old, new = tiny_model(tmp_path_factory), tiny_model(tmp_path_factory, seed=1)
    ids = prompt(80, 500)
    before = server.generate(input_ids=ids, max_new_tokens=8)
    fill_device(server, 3)
    outputs = [before.output_ids]
    for folder in (new, old):
        # One more prompt right before the update: its copy to the host may still be on its way.
        server.generate(input_ids=prompt(81, 600), max_new_tokens=1)
        answer = server.post("/update_weights_from_disk", {"model_path": str(folder)})
        assert answer["success"], answer
        wait_until("both tiers are empty", lambda: pages(server, "host") == pages(server, "device") == 0)
        cold = server.generate(input_ids=ids, max_new_tokens=8)
        assert cold.cached_tokens == 0
        fill_device(server, 4)
        warm = server.generate(input_ids=ids, max_new_tokens=8)
        assert details(warm) == (0, reusable(500, PAGE))
        assert warm.output_ids == cold.output_ids
        outputs.append(cold.output_ids)
    assert outputs[0] == outputs[2] != outputs[1]
