"""The extension in a real scheduler: every request path, at three page sizes and under other schedulings."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import requests

from tests.server.harness import SGLangServer
from tests.server.workload import (
    Stream,
    abort,
    details,
    fill_device,
    generate_all,
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
    whole_pages,
)

pytestmark = pytest.mark.server

CHUNK = 128
DEVICE = 2048
HOST = 8192
MAX_RUNNING = 6


@dataclass(frozen=True)
class Case:
    page_size: int
    args: tuple[str, ...] = ()


CASES = {
    "page1": Case(1),
    "page16": Case(16),
    "page64": Case(64),
    "page16-no-overlap": Case(16, ("--disable-overlap-schedule",)),
    "page16-lpm": Case(16, ("--schedule-policy", "lpm")),
}


@pytest.fixture(scope="module", params=CASES.values(), ids=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture(scope="module")
def running_server(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    folder = tmp_path_factory.mktemp("features")
    flags = ["--chunked-prefill-size", str(CHUNK), "--max-running-requests", str(MAX_RUNNING)]
    flags += ["--schedule-conservativeness", "0.05", *case.args]
    with tiny_server(
        tiny_model(tmp_path_factory),
        folder,
        *flags,
        page_size=case.page_size,
        device_tokens=DEVICE,
        host_tokens=HOST,
        # Admit more than fits, so that decoding runs out of slots and requests are retracted.
        env={"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "8"},
    ) as server:
        yield server


def test_sessions_come_back_from_the_host(server: SGLangServer, case: Case) -> None:
    """Together the sessions are twice as large as the device pool."""
    sessions = [prompt(seed, 560 + 17 * seed) for seed in range(7)]
    history = []
    for ids in sessions:
        first = server.generate(input_ids=ids, max_new_tokens=6)
        assert first.cached_tokens == 0
        history.append([*ids, *first.output_ids])
    second = []
    for number, ids in enumerate(history):
        turn = [*ids, *prompt(100 + number, 40)]
        answer = server.generate(input_ids=turn, max_new_tokens=6)
        # The KV of the last token of the first answer was never computed.
        assert answer.cached_tokens == whole_pages(len(ids) - 1, case.page_size)
        assert sum(details(answer)) == answer.cached_tokens
        assert details(answer)[1] > 0
        second.append((turn, answer.output_ids))
    assert moved(server, "host_to_device") > 0
    server.flush()
    for turn, output in second:
        cold = server.generate(input_ids=turn, max_new_tokens=6)
        assert (cold.cached_tokens, cold.output_ids) == (0, output)


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 127, 128, 129, 192, 193])
def test_lengths_around_a_page_and_a_chunk(server: SGLangServer, case: Case, tokens: int) -> None:
    ids = prompt(500 + tokens, tokens)
    cold = server.generate(input_ids=ids, max_new_tokens=2)
    on_device = server.generate(input_ids=ids, max_new_tokens=2)
    fill_device(server, tokens, DEVICE)
    on_host = server.generate(input_ids=ids, max_new_tokens=2)
    reused = reusable(tokens, case.page_size)
    assert (cold.cached_tokens, on_device.cached_tokens, on_host.cached_tokens) == (0, reused, reused)
    assert (details(on_device), details(on_host)) == ((reused, 0), (0, reused))
    assert cold.output_ids == on_device.output_ids == on_host.output_ids


def test_concurrent_requests_share_prefixes(server: SGLangServer) -> None:
    prefixes = [prompt(seed, 300) for seed in range(4)]
    bodies: list[dict[str, Any]] = [
        {"input_ids": [*prefixes[i % 4], *prompt(50 + i, 30 + 9 * i)], "max_new_tokens": 6} for i in range(16)
    ]
    expected = []
    for body in bodies:
        server.flush()
        expected.append(server.generate(**body).output_ids)
    server.flush()
    for _ in range(2):
        answers = generate_all(server, bodies, threads=8)
        assert [answer.output_ids for answer in answers] == expected
    assert sum(answer.cached_tokens for answer in answers) > 0
    fill_device(server, 1, DEVICE)
    answers = generate_all(server, bodies, threads=8)
    assert [answer.output_ids for answer in answers] == expected
    assert sum(details(answer)[1] for answer in answers) > 0


def test_keys_and_salts_never_share(server: SGLangServer, case: Case) -> None:
    ids = prompt(7, 200)
    reused = reusable(len(ids), case.page_size)
    spaces: list[dict[str, Any]] = [
        {},
        {"extra_key": "x"},
        {"cache_salt": "x"},
        {"extra_key": "x", "cache_salt": "x"},
        {"extra_key": "xx"},
        {"cache_salt": "xx"},
    ]

    def ask(space: dict[str, Any]) -> tuple[tuple[int, int], list[int]]:
        answer = server.generate(input_ids=ids, max_new_tokens=4, **space)
        return details(answer), answer.output_ids

    first = [ask(space) for space in spaces]
    output = first[0][1]
    assert first == [((0, 0), output)] * len(spaces)
    assert [ask(space) for space in spaces] == [((reused, 0), output)] * len(spaces)
    fill_device(server, 7, DEVICE)
    assert ask({"extra_key": "y"}) == ask({"cache_salt": "y"}) == ((0, 0), output)
    assert [ask(space) for space in spaces] == [((0, reused), output)] * len(spaces)


def test_working_set_larger_than_the_host(server: SGLangServer, case: Case) -> None:
    sessions = [prompt(200 + seed, 900) for seed in range(13)]
    first = [server.generate(input_ids=ids, max_new_tokens=2).output_ids for ids in sessions]
    assert pages(server, "host") <= HOST // case.page_size
    assert server.metric("hicache_ext_evicted_tokens_total", tier="host") > 0
    # Latest first: what is left can hit before this loop evicts it.
    for number in reversed(range(len(sessions))):
        again = server.generate(input_ids=sessions[number], max_new_tokens=2)
        assert again.output_ids == first[number]
        assert sum(details(again)) == again.cached_tokens
        if number >= 8:
            assert again.cached_tokens == reusable(900, case.page_size)


def test_retracted_requests_answer_right(server: SGLangServer) -> None:
    """Six requests that end with 400 tokens do not fit beside each other: some start again."""
    bodies: list[dict[str, Any]] = [
        {"input_ids": prompt(300 + i, 200), "max_new_tokens": 200} for i in range(MAX_RUNNING)
    ]
    expected = generate_all(server, bodies[:3], threads=3) + generate_all(server, bodies[3:], threads=3)
    server.flush()
    answers = generate_all(server, bodies, threads=MAX_RUNNING)
    assert sum(answer.raw["meta_info"]["num_retractions"] for answer in answers) > 0
    assert [a.output_ids for a in answers] == [e.output_ids for e in expected]


def test_paused_and_retracted_requests_go_on(server: SGLangServer) -> None:
    bodies: list[dict[str, Any]] = [
        {"input_ids": prompt(320 + i, 150), "max_new_tokens": 60} for i in range(3)
    ]
    expected = [server.generate(**body).output_ids for body in bodies]
    server.flush()
    streams = [Stream.open(server, **body) for body in bodies]
    for stream in streams:
        stream.next()
    server.post("/pause_generation", {"mode": "retract"})
    server.post("/continue_generation", {})
    finals = [stream.last() for stream in streams]
    assert [final["output_ids"] for final in finals] == expected
    assert sum(final["meta_info"]["num_retractions"] for final in finals) > 0


def _busy(server: SGLangServer, tokens: int) -> list[Stream]:
    """Fill all running slots with long answers."""
    streams = [Stream.open(server, prompt(400 + i, 40), tokens) for i in range(MAX_RUNNING)]
    for stream in streams:
        stream.next()
    return streams


@pytest.mark.parametrize("how", ["disconnect", "abort"])
def test_leaving_the_queue(server: SGLangServer, how: str) -> None:
    known = prompt(430, 200)
    server.generate(input_ids=known, max_new_tokens=1)
    busy = _busy(server, 250)
    rids = [f"queued-{how}-{time.monotonic_ns()}-{i}" for i in range(3)]
    clients = []
    for i, rid in enumerate(rids):
        body = {
            "input_ids": [*known, *prompt(431 + i, 20)],
            "sampling_params": {"max_new_tokens": 4},
            "rid": rid,
        }
        clients.append(send(server, body))
    wait_until("three requests are queued", lambda: waiting(server) == 3, step=0.02)
    wait_until("their matches are protected", lambda: server.metric("hicache_ext_waiting_requests") == 3)
    for client, rid in zip(clients, rids, strict=True):
        if how == "abort":
            abort(server, rid)
        client.close()
    wait_until("the queue is empty", lambda: waiting(server) == 0)
    for stream in busy:
        stream.close()
    wait_until("nothing runs", lambda: running(server) == 0)


def test_abort_in_chunked_prefill(server: SGLangServer, case: Case) -> None:
    """15 chunks; aborted as soon as the log tells of the first ones."""
    for attempt in range(10):
        rid = f"chunked-{time.monotonic_ns()}"
        ids = prompt(440 + attempt, 15 * CHUNK)
        batches = server.log_text().count("Prefill batch")
        client = send(server, {"input_ids": ids, "sampling_params": {"max_new_tokens": 64}, "rid": rid})
        wait_until("a chunk ran", lambda n=batches: server.log_text().count("Prefill batch") > n, step=0.002)
        abort(server, rid)
        wait_until("nothing runs", lambda: running(server) == 0 and waiting(server) == 0)
        client.close()
        again = server.generate(input_ids=ids, max_new_tokens=2)
        server.flush()
        cold = server.generate(input_ids=ids, max_new_tokens=2)
        assert again.output_ids == cold.output_ids
        if again.cached_tokens < reusable(len(ids), case.page_size):
            return
    pytest.fail("every abort came after the last chunk")


@pytest.mark.parametrize("tokens", [40, 15 * CHUNK])
def test_disconnect_while_running(server: SGLangServer, tokens: int) -> None:
    streams = [Stream.open(server, prompt(460 + tokens, tokens), 120) for i in range(2)]
    for stream in streams:
        assert stream.next() is not None
        stream.close()
    wait_until("nothing runs", lambda: running(server) == 0)


def test_abort_in_decode(server: SGLangServer, case: Case) -> None:
    rid = f"decode-{time.monotonic_ns()}"
    ids = prompt(470, 300)
    stream = Stream.open(server, ids, 1500, rid=rid)
    stream.next()
    abort(server, rid)
    final = stream.last()
    assert final["meta_info"]["finish_reason"]["type"] == "abort"
    assert final["meta_info"]["completion_tokens"] < 1500
    # What was computed was published.
    assert server.generate(input_ids=ids, max_new_tokens=1).cached_tokens == reusable(300, case.page_size)


def test_flush_waits_its_turn(server: SGLangServer) -> None:
    ids = prompt(480, 500)
    server.generate(input_ids=ids, max_new_tokens=1)
    stream = Stream.open(server, prompt(481, 40), 200)
    stream.next()
    refused = requests.post(f"{server.url}/flush_cache", timeout=server.request_timeout)
    assert refused.status_code == 400
    assert len(stream.last()["output_ids"]) == 200
    assert server.generate(input_ids=ids, max_new_tokens=1).cached_tokens > 0
    server.flush()
    wait_until("both tiers are empty", lambda: pages(server, "host") == pages(server, "device") == 0)
    assert server.generate(input_ids=ids, max_new_tokens=1).cached_tokens == 0


def test_too_long_a_prompt_is_refused_alone(server: SGLangServer) -> None:
    stream = Stream.open(server, prompt(490, 100), 40)
    stream.next()
    body = {"input_ids": prompt(491, DEVICE + 500), "sampling_params": {"max_new_tokens": 4}}
    refused = requests.post(f"{server.url}/generate", json=body, timeout=server.request_timeout)
    assert refused.status_code == 400
    assert "2548 tokens" in refused.text
    assert len(stream.last()["output_ids"]) == 40
