"""The multi-turn chat benchmark against a small aiohttp server.

The server here stands in for the OpenAI streaming protocol with SGLang's additions: it really streams over
HTTP, has a word-level tokenizer, a chat template and a prefix cache without limit, but no model. The demo
runs the benchmark against the real SGLang server.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from benchmarks import multiturn
from benchmarks import multiturn_stats as stats
from benchmarks import multiturn_workload as workload
from benchmarks.multiturn_client import HttpStatusError, ServerError, stream_chat
from benchmarks.multiturn_run import Settings, open_http
from benchmarks.multiturn_stats import Record
from benchmarks.multiturn_workload import Shape

ROOT = Path(__file__).parents[2]
SMALL = ["--system-tokens", "10", "--first-tokens", "30", "--turn-tokens", "12", "--output-tokens", "6"]


class ChatServer:
    """A streaming chat endpoint in its own thread; attributes switch its habits and keep what it saw."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.in_flight = self.most_in_flight = 0
        self.vocabulary: dict[str, int] = {}
        self.cache: list[list[int]] = []
        self.device_limit = 40
        self.cache_report = True
        self.cache_tiers = True
        self.zero_is_left_out = False
        self.usage = True
        self.strict = False
        self.token_ids = True
        self.fail_round: int | None = None
        self.fail_in_stream = False
        self.cut = False
        self.delay = 0.0
        self.max_model_len = 100_000
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def turns(self) -> list[dict[str, Any]]:
        """The requests of the run, without those of the probe."""
        return [body for body in self.bodies if body["max_tokens"] > 1]

    def start(self) -> None:
        self._thread.start()
        assert self._up.wait(10)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/server_info", self._info)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.port = runner.addresses[0][1]
        self._up.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": "words", "object": "model", "max_model_len": self.max_model_len}
        return web.json_response({"object": "list", "data": [card]})

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.0.test", "page_size": 4, "api_key": "secret"})

    def _tokenize(self, text: str) -> list[int]:
        return [self.vocabulary.setdefault(word, len(self.vocabulary)) for word in text.split()]

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.strict and body.keys() - {
            "model",
            "messages",
            "max_tokens",
            "temperature",
            "stream",
            "stream_options",
        }:
            return web.json_response({"error": {"message": "unknown field"}}, status=400)
        self.bodies.append(body)
        round_ = sum(message["role"] == "user" for message in body["messages"])
        if self.fail_round == round_ and body["max_tokens"] > 1 and not self.fail_in_stream:
            return web.json_response({"error": {"message": "out of\nmemory"}}, status=500)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self._answer(request, body, round_)
        finally:
            self.in_flight -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any], round_: int) -> web.StreamResponse:
        text = " ".join(f"<{m['role']}> {m['content']} <end>" for m in body["messages"])
        prompt = self._tokenize(f"{text} <assistant>")
        rng = random.Random(json.dumps(body["messages"]))
        words = [f"w{rng.randrange(10**9)}" for _ in range(body["max_tokens"])]
        answer = self._tokenize(" ".join(words))
        cached = max((stats.common_prefix(np.array(prompt), np.array(run)) for run in self.cache), default=0)
        cached = min(cached, len(prompt) - 1)

        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(event: dict[str, Any]) -> None:
            data = f"data: {json.dumps(event)}\n\n".encode()
            # In two pieces, as a network may cut it.
            await response.write(data[:9])
            await response.write(data[9:])

        await send({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for i, word in enumerate(words):
            await asyncio.sleep(self.delay)
            await send({"choices": [{"index": 0, "delta": {"content": word if i == 0 else f" {word}"}}]})
            if self.fail_round == round_ and body["max_tokens"] > 1:
                await send({"error": {"message": "aborted", "code": 500}})
                return response
        if self.cut:
            return response
        await send({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        ext: dict[str, Any] = {}
        if body.get("return_cached_tokens_details") and self.cache_tiers and cached:
            device = min(cached, self.device_limit)
            ext["cached_tokens_details"] = {"device": device, "host": cached - device}
        if body.get("return_input_ids_in_sglext") and self.token_ids:
            ext |= {"input_ids": prompt, "output_ids": [answer]}
        if ext:
            await send({"choices": [], "sglext": ext})
        if self.usage:
            usage: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": len(answer)}
            if self.cache_report and (cached or not self.zero_is_left_out):
                usage["prompt_tokens_details"] = {"cached_tokens": cached}
            await send({"choices": [], "usage": usage})
        self.cache.append(prompt + answer[:-1])
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
def server() -> Iterator[ChatServer]:
    chat = ChatServer()
    chat.start()
    yield chat
    chat.stop()


def bench(server: ChatServer, tmp_path: Path, *options: str, code: int = 0) -> dict[str, Any]:
    """Runs the command line in this process; gives the result file."""
    path = tmp_path / "result.json"
    assert multiturn.main(["--base-url", server.url, "--output", str(path), *SMALL, *options]) == code
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def total(result: dict[str, Any], label: str = "rounds >= 2") -> dict[str, Any]:
    found: dict[str, Any] = next(s for s in result["summary"]["totals"] if s["label"] == label)
    return found


def turns_in_order(server: ChatServer) -> list[tuple[int, int]]:
    """(session, round) of each request in the order in which they came."""
    return [
        (
            int(next(m["content"] for m in body["messages"] if m["role"] == "user").split()[0]) - 1,
            sum(m["role"] == "user" for m in body["messages"]),
        )
        for body in server.turns
    ]


def record(**changes: Any) -> Record:
    fields: dict[str, Any] = {
        "pass_": 1,
        "session": 0,
        "round_": 1,
        "start_s": 0.0,
        "prompt_sha256": "a",
        "end_s": 2.0,
        "prompt_tokens": 100,
        "completion_tokens": 10,
    }
    fields |= changes
    return Record(**({"first_s": fields["start_s"] + 1.0} | fields))


# Workload


SHAPE = Shape(3, 2, 20, 50, 15, seed=7, tokens_per_word=1.25)


def texts(shape: Shape) -> list[str]:
    users = [workload.user_text(shape, s, r) for s in range(shape.sessions) for r in (1, 2)]
    return [workload.system_text(shape), *users]


def test_texts_depend_on_the_seed_alone() -> None:
    assert texts(SHAPE) == texts(SHAPE)
    other = texts(Shape(**(vars(SHAPE) | {"seed": 8})))
    assert all(a != b for a, b in zip(texts(SHAPE), other, strict=True))


def test_texts_have_the_asked_length() -> None:
    assert len(workload.system_text(SHAPE).split()) == 16
    assert len(workload.user_text(SHAPE, 0, 1).split()) == 40
    assert len(workload.user_text(SHAPE, 0, 2).split()) == 12
    assert workload.system_text(Shape(**(vars(SHAPE) | {"system_tokens": 0}))) == ""


def test_sessions_part_at_their_first_word() -> None:
    assert len({workload.user_text(SHAPE, s, 1).split()[0] for s in range(50)}) == 50


def test_messages_alternate_and_carry_the_answers() -> None:
    messages = workload.build_messages("s", ["u1", "u2"], ["a1"])
    assert [(m["role"], m["content"]) for m in messages] == [
        ("system", "s"),
        ("user", "u1"),
        ("assistant", "a1"),
        ("user", "u2"),
    ]
    assert workload.build_messages("", ["u"], [])[0]["role"] == "user"
    with pytest.raises(ValueError, match="alternate"):
        workload.build_messages("", ["u"], ["a"])


# Figures


def test_distribution_is_that_of_numpy_on_known_values() -> None:
    got = stats.distribution(range(1, 101))
    assert got == pytest.approx({"mean": 50.5, "p50": 50.5, "p90": 90.1, "p99": 99.01})
    assert stats.distribution([]) is None


def test_busy_time_counts_overlaps_once_and_gaps_never() -> None:
    assert stats.busy_seconds([(5, 6), (0, 2), (1, 3), (1.5, 2)]) == pytest.approx(4.0)
    assert stats.busy_seconds([]) == 0


def test_missing_counts_mean_zero_only_where_the_server_reports_others() -> None:
    silent = [record(), record()]
    stats.settle_cached(silent)
    assert [r.cached_tokens for r in silent] == [None, None]
    tiers = [record(), record(device_tokens=3, host_tokens=2, store_tokens=1), record(error="x")]
    stats.settle_cached(tiers)
    assert [(r.cached_tokens, r.device_tokens) for r in tiers] == [(0, 0), (6, 3), (None, None)]
    no_tiers = [record(cached_tokens=5), record()]
    stats.settle_cached(no_tiers)
    assert [(r.cached_tokens, r.device_tokens) for r in no_tiers] == [(5, None), (0, None)]


def bounds(records: list[Record], shared: int = 0, page: int = 1) -> list[int]:
    stats.formula_bounds(records, shared, page)
    return [r.infinite_tokens for r in records]


def test_bound_of_later_rounds_leaves_out_the_last_generated_token() -> None:
    second = record(round_=2, start_s=3.0, prompt_sha256="b", prompt_tokens=150)
    assert bounds([record(), second]) == [0, 109]
    assert bounds([record(), second], page=16) == [0, 96]


def test_bound_never_reaches_the_last_prompt_token() -> None:
    assert bounds([record(), record(round_=2, start_s=3.0, prompt_sha256="b", prompt_tokens=105)]) == [0, 104]


def test_bound_counts_the_system_prompt_once_it_was_answered() -> None:
    early = record(session=1, start_s=0.5, prompt_sha256="b")
    late = record(session=2, start_s=1.5, prompt_sha256="c")
    assert bounds([record(), early, late], shared=32) == [0, 0, 32]


def test_bound_of_a_repeated_prompt_is_all_but_one_token() -> None:
    again = record(pass_=2, start_s=3.0)
    other_session = record(pass_=2, session=5, round_=2, start_s=3.0, prompt_sha256="z")
    assert bounds([record(), again, other_session]) == [0, 99, 0]


def test_bound_ignores_failed_rounds() -> None:
    assert bounds([record(error="x"), record(round_=2, start_s=3.0, prompt_sha256="b")]) == [0, 0]


def test_exact_bound_is_the_common_prefix_with_earlier_tokens() -> None:
    first = record(prompt_tokens=4)
    second = record(round_=2, start_s=3.0, prompt_tokens=8)
    other = record(session=1, start_s=3.0, prompt_tokens=3)
    unsure = record(session=2, start_s=3.0, prompt_tokens=3)

    def ids(*values: int) -> stats.Ids:
        return np.array(values, np.int64)

    # The answer 5 6 7 comes back as 5 9: only 5 is reused.
    pairs = [
        (ids(1, 2, 3, 4), ids(5, 6, 7)),
        (ids(1, 2, 3, 4, 5, 9, 8, 8), ids(1)),
        (ids(1, 2, 9), ids(1)),
        None,
    ]
    stats.exact_bounds([first, second, other, unsure], pairs, 1)
    assert [r.infinite_tokens for r in (first, second, other, unsure)] == [0, 5, 2, 0]


def test_summary_of_known_records() -> None:
    rows = [
        record(
            ttft_s=1.0, gaps_s=[0.1, 0.3], cached_tokens=50, device_tokens=30, host_tokens=20, store_tokens=0
        ),
        record(
            start_s=1.0,
            end_s=4.0,
            ttft_s=3.0,
            cached_tokens=0,
            device_tokens=0,
            host_tokens=0,
            store_tokens=0,
        ),
        record(error="x", prompt_tokens=0, end_s=9.0),
    ]
    rows[0].infinite_tokens = 80
    s = stats.summarize("all", rows)
    assert (s["requests"], s["failed"], s["prompt_tokens"], s["completion_tokens"]) == (3, 1, 200, 20)
    assert s["ttft_s"]["mean"] == 2.0 and s["itl_s"]["mean"] == pytest.approx(0.2)
    assert s["share"] == pytest.approx(
        {"device": 0.15, "host": 0.1, "store": 0, "cached": 0.25, "infinite": 0.4, "of_infinite": 0.625}
    )
    assert s["busy_s"] == 4.0 and s["prompt_tokens_per_s"] == 50.0


def test_unknown_tiers_make_unknown_shares() -> None:
    share = stats.summarize("all", [record(cached_tokens=5), record(cached_tokens=5)])["share"]
    assert share["cached"] == 0.05 and share["device"] is None and share["of_infinite"] is None


def test_equal_answers_count_equal_prompts_only() -> None:
    a = [record(answer_sha256="x"), record(round_=2, answer_sha256="y")]
    b = [record(answer_sha256="x"), record(round_=2, answer_sha256="z", prompt_sha256="other")]
    assert stats.equal_answers(a, b) == (1, 1)
    assert stats.equal_answers(a, [record(answer_sha256="q")]) == (0, 1)


# Client


def ask(server: ChatServer, timeout: float = 10.0, **body: Any) -> Any:
    async def once() -> Any:
        async with open_http(Settings(server.url, None, 5)) as http:
            message = {"role": "user", "content": "one two three"}
            full = {"messages": [message], "max_tokens": 5} | body
            return await stream_chat(http, f"{server.url}/v1/chat/completions", full, timeout)

    return asyncio.run(once())


def test_reply_has_text_times_and_counts(server: ChatServer) -> None:
    reply = ask(server)
    assert len(reply.text.split()) == len(reply.arrivals) == reply.completion_tokens == 5
    assert reply.prompt_tokens == 6 and reply.cached == 0 and reply.tiers is None
    assert reply.sent <= reply.arrivals[0] <= reply.arrivals[-1] <= reply.finished
    again = ask(server, return_cached_tokens_details=True)
    assert again.cached == 5 and again.tiers == (5, 0, 0)


def test_long_lines_of_the_stream_are_read_whole(server: ChatServer) -> None:
    words = " ".join(f"x{i}" for i in range(60_000))
    message = {"role": "user", "content": words}
    assert len(ask(server, messages=[message], return_input_ids_in_sglext=True).input_ids) == 60_003


@pytest.mark.parametrize(
    ("habit", "message"),
    [
        ({"cut": True}, "ended before"),
        ({"usage": False}, "does not report usage"),
        ({"fail_round": 1}, "HTTP 500: out of memory"),
        ({"fail_round": 1, "fail_in_stream": True}, "error in the stream: aborted"),
        ({"delay": 5.0}, "no complete answer within 0.5 s"),
    ],
)
def test_incomplete_answers_are_errors(server: ChatServer, habit: dict[str, Any], message: str) -> None:
    for name, value in habit.items():
        setattr(server, name, value)
    with pytest.raises(ServerError, match=message):
        ask(server, timeout=0.5)


def test_http_errors_carry_the_status(server: ChatServer) -> None:
    server.strict = True
    with pytest.raises(HttpStatusError) as caught:
        ask(server, ignore_eos=True)
    assert caught.value.status == 400


# Whole runs


def test_each_round_sends_the_whole_chat_with_the_real_answers(server: ChatServer, tmp_path: Path) -> None:
    result = bench(server, tmp_path, "--sessions", "2", "--rounds", "3", "--concurrency", "1", "--save-texts")
    answers = {(r["session"], r["round"]): r for r in result["records"]}
    for (session, round_), body in zip(turns_in_order(server), server.turns, strict=True):
        sent = [m["content"] for m in body["messages"] if m["role"] == "assistant"]
        assert sent == [answers[session, r]["answer"] for r in range(1, round_)]
        assert body["messages"][0]["role"] == "system"
        assert body["ignore_eos"] is True and body["temperature"] == 0 and body["max_tokens"] == 6
        digest = hashlib.sha256(answers[session, round_]["answer"].encode()).hexdigest()
        assert answers[session, round_]["answer_sha256"] == digest
    assert result["server"]["tokens_per_word"] == 1.0
    assert result["server"]["info"] == {"version": "0.0.test", "page_size": 4}


def test_runs_with_equal_seeds_ask_the_same(server: ChatServer, tmp_path: Path) -> None:
    options = ["--sessions", "3", "--rounds", "2", "--order", "random", "--concurrency", "1"]
    first = bench(server, tmp_path, *options)
    again = bench(server, tmp_path, *options)
    other = bench(server, tmp_path, *options, "--seed", "1")
    hashes = [
        [(r["session"], r["prompt_sha256"], r["answer_sha256"]) for r in run["records"]]
        for run in (first, again, other)
    ]
    assert hashes[0] == hashes[1] and not set(hashes[0]) & set(hashes[2])


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("round-robin", [(s, r) for r in (1, 2, 3) for s in range(4)]),
        ("depth-first", [(s, r) for s in range(4) for r in (1, 2, 3)]),
    ],
)
def test_order_in_which_sessions_advance(
    server: ChatServer, tmp_path: Path, order: str, expected: list[tuple[int, int]]
) -> None:
    bench(server, tmp_path, "--sessions", "4", "--rounds", "3", "--concurrency", "1", "--order", order)
    assert turns_in_order(server) == expected


def test_concurrency_is_kept_and_used(server: ChatServer, tmp_path: Path) -> None:
    server.delay = 0.005
    bench(server, tmp_path, "--sessions", "6", "--rounds", "2", "--concurrency", "3")
    assert server.most_in_flight == 3


def test_request_rate_and_think_time_serve_every_turn(server: ChatServer, tmp_path: Path) -> None:
    options = ["--request-rate", "200", "--think-time", "0.01", "--sessions", "5", "--rounds", "3"]
    result = bench(server, tmp_path, *options)
    assert sorted(turns_in_order(server)) == [(s, r) for s in range(5) for r in (1, 2, 3)]
    assert result["counts"] == {"planned": 15, "done": 15, "failed": 0, "skipped": 0}


def test_an_infinite_cache_reaches_the_bound(server: ChatServer, tmp_path: Path) -> None:
    result = bench(server, tmp_path, "--sessions", "4", "--rounds", "3", "--concurrency", "2")
    share = total(result)["share"]
    assert share["of_infinite"] == 1.0 and 0.5 < share["cached"] < 1.0
    assert share["device"] + share["host"] == pytest.approx(share["cached"]) and share["host"] > 0
    first = next(s for s in result["summary"]["rounds"] if s["round"] == 1)
    assert first["infinite_tokens"] <= first["cached_tokens"]


def test_a_forgetful_cache_misses_the_bound(server: ChatServer, tmp_path: Path) -> None:
    class Forgetful(list[list[int]]):
        def append(self, item: list[int]) -> None:
            self[:] = [item]

    server.cache = Forgetful()
    options = ["--sessions", "4", "--rounds", "3", "--concurrency", "1"]
    assert total(bench(server, tmp_path, *options))["share"]["of_infinite"] < 0.5


def test_the_exact_bound_is_what_an_infinite_cache_hits(server: ChatServer, tmp_path: Path) -> None:
    options = ["--sessions", "4", "--rounds", "3", "--concurrency", "1", "--passes", "2", "--bound", "exact"]
    result = bench(server, tmp_path, *options)
    # The very first request shares template tokens with the probe, which is not part of the run.
    assert all(r["cached_tokens"] == r["infinite_tokens"] for r in result["records"][1:])
    assert {r["infinite_tokens"] for r in result["records"][:1]} == {0}


def test_the_bound_is_rounded_to_pages(server: ChatServer, tmp_path: Path) -> None:
    options = ["--sessions", "2", "--rounds", "2", "--page-size", "auto"]
    result = bench(server, tmp_path, *options)
    assert result["page_size"] == 4
    assert all(r["infinite_tokens"] % 4 == 0 for r in result["records"])
    assert total(result)["infinite_tokens"] > 0


def test_passes_repeat_the_prompts(
    server: ChatServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = bench(server, tmp_path, "--sessions", "2", "--rounds", "2", "--passes", "2")
    assert result["equal_to_first_pass"] == [4, 4]
    assert [s["label"] for s in result["summary"]["rounds"]] == ["1.1", "1.2", "2.1", "2.2"]
    assert total(result, "pass 2, rounds >= 2")["share"]["of_infinite"] == 1.0
    assert "answers equal to those of pass 1: 4 of 4" in capsys.readouterr().out


def test_failures_are_counted_and_end_their_session(
    server: ChatServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.fail_round = 2
    result = bench(server, tmp_path, "--sessions", "3", "--rounds", "4", code=1)
    assert result["counts"] == {"planned": 12, "done": 3, "failed": 3, "skipped": 6}
    assert [r["error"] for r in result["records"] if r["round"] == 2] == ["HTTP 500: out of memory"] * 3
    assert total(result)["share"]["cached"] is None
    out = capsys.readouterr().out
    assert "3 failed" in out and "failed 3 times: HTTP 500: out of memory" in out


def test_servers_without_cache_report_give_dashes(
    server: ChatServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.cache_report = server.cache_tiers = False
    result = bench(server, tmp_path, "--sessions", "2", "--rounds", "2")
    assert total(result)["share"]["cached"] is None and total(result)["share"]["infinite"] > 0
    out = capsys.readouterr().out
    assert "--enable-cache-report" in out and "cached share of rounds >= 2: - of" in out


def test_tiers_alone_give_the_total(server: ChatServer, tmp_path: Path) -> None:
    server.cache_report = False
    assert total(bench(server, tmp_path, "--sessions", "2", "--rounds", "2"))["share"]["of_infinite"] == 1.0


def test_totals_alone_leave_the_tiers_unknown(server: ChatServer, tmp_path: Path) -> None:
    server.cache_tiers, server.zero_is_left_out = False, True
    share = total(bench(server, tmp_path, "--sessions", "2", "--rounds", "2"))["share"]
    assert share["of_infinite"] == 1.0 and share["device"] is None


def test_strict_servers_are_asked_without_extra_fields(server: ChatServer, tmp_path: Path) -> None:
    server.strict = True
    result = bench(server, tmp_path, "--sessions", "1", "--rounds", "2")
    assert "ignore_eos" not in server.turns[0] and "ignore_eos" in result["notes"][0]


def test_extra_body_and_no_ignore_eos_reach_the_server(server: ChatServer, tmp_path: Path) -> None:
    bench(
        server,
        tmp_path,
        "--sessions",
        "1",
        "--rounds",
        "1",
        "--no-ignore-eos",
        "--extra-body",
        '{"top_k": 3}',
    )
    assert server.turns[0]["top_k"] == 3 and "ignore_eos" not in server.turns[0]


def test_plot_is_a_png_for_one_and_for_two_results(server: ChatServer, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one, both = tmp_path / "one.png", tmp_path / "both.png"
    bench(server, tmp_path, "--sessions", "2", "--rounds", "2", "--plot", str(one))
    path = str(tmp_path / "result.json")
    assert multiturn.main(["--compare", path, path, "--plot", str(both)]) == 0
    assert all(p.read_bytes().startswith(b"\x89PNG") and p.stat().st_size > 10_000 for p in (one, both))


# Comparing


def test_compare_shows_both_and_the_ratio(
    server: ChatServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = bench(server, tmp_path, "--sessions", "2", "--rounds", "2", "--label", "base")
    b = json.loads(json.dumps(a)) | {"label": "[new]"}
    for s in b["summary"]["totals"] + b["summary"]["rounds"]:
        s["ttft_s"] = {name: 2 * value for name, value in s["ttft_s"].items()}
        s["share"]["store"] = None
    b["records"][0]["answer_sha256"] = "other"
    b["arguments"]["seed"] = 9
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, result in zip(paths, (a, b), strict=True):
        path.write_text(json.dumps(result))
    capsys.readouterr()
    assert multiturn.main(["--compare", *map(str, paths)]) == 0
    out = capsys.readouterr().out
    rows = {
        line.split("│")[1].strip(): line.split("│")[2:5] for line in out.splitlines() if line.count("│") == 5
    }
    assert float(rows["TTFT mean, ms"][2]) == 2.0
    assert rows["cached: store"][1].strip() == "-"
    assert "base" in out and "[new]" in out
    assert "equal answers: 3 of 4" in out and "differ in --seed: 0 and 9" in out


@pytest.mark.parametrize("content", [None, "{", "[]", '{"format": "else"}', "damaged", "\x00"])
def test_compare_refuses_other_files(
    server: ChatServer, tmp_path: Path, content: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.json"
    if content == "damaged":
        result = bench(server, tmp_path, "--sessions", "1", "--rounds", "1")
        del result["summary"]["totals"][0]["share"]
        content = json.dumps(result)
    if content is not None:
        bad.write_text(content)
    capsys.readouterr()
    assert multiturn.main(["--compare", str(bad), str(bad)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("error: ") and "bad.json" in err


# Command line errors


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Runs the command line, which must end with code 2; gives the last line of the error output."""
    try:
        code = multiturn.main(list(options))
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    assert code == 2 and captured.out == "" and "Traceback" not in captured.err
    return captured.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sessions", "0"], "must be at least 1"),
        (["--rounds", "x"], "'x' is not a number"),
        (["--request-rate", "inf"], "must be above 0"),
        (["--think-time", "nan"], "must be at least 0"),
        (["--concurrency", "2", "--request-rate", "2"], "not allowed with"),
        (["--extra-body", "{"], "not JSON"),
        (["--extra-body", "[1]"], "must be a JSON object"),
        (["--extra-body", '{"messages": []}'], "sets messages"),
        (["--base-url", "localhost:1"], "must start with http://"),
        (["--output", "no/such/dir/x.json"], "there is no directory"),
        (["--output", "."], "is a directory"),
        (["--plot", "x.jpeg2"], "suffix .png"),
        (["--api-key-env", "HICACHE_EXT_NO_SUCH_KEY"], "is not set"),
    ],
)
def test_bad_options_are_refused(
    capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert message in refused(capsys, *options)


def test_unreachable_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot reach http://127.0.0.1:9: Connect" in refused(capsys, "--base-url", "http://127.0.0.1:9")


def test_wrong_model_names_the_right_one(server: ChatServer, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "--base-url", server.url, "--model", "other")
    assert "'other'" in line and "it serves: words" in line


def test_wrong_path_is_an_http_error(server: ChatServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert "HTTP 404" in refused(capsys, "--base-url", f"{server.url}/else")


def test_too_long_chats_are_refused_before_the_run(
    server: ChatServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.max_model_len = 500
    assert "the model takes 500" in refused(capsys, "--base-url", server.url, "--rounds", "20")
    assert server.turns == []


def test_servers_without_usage_are_refused(server: ChatServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.usage = False
    assert "does not report usage" in refused(capsys, "--base-url", server.url)


def test_exact_bound_needs_token_ids(server: ChatServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.token_ids = False
    assert "--bound formula" in refused(capsys, "--base-url", server.url, "--bound", "exact")


def test_interrupt_keeps_what_was_measured(server: ChatServer, tmp_path: Path) -> None:
    path = tmp_path / "partial.json"
    server.delay = 0.02
    command = [sys.executable, "-m", "benchmarks.multiturn", "--base-url", server.url, "--output", str(path)]
    process = subprocess.Popen(
        [*command, *SMALL, "--sessions", "500", "--concurrency", "2"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"NO_COLOR": "1"},
    )
    deadline = time.monotonic() + 60
    while len(server.turns) < 6 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    result = json.loads(path.read_text())
    assert result["interrupted"] and 0 < result["counts"]["done"] < 100 and result["counts"]["failed"] == 0
    assert "(interrupted)" in out and "Traceback" not in err
    assert "/2500 requests, failed 0" in err


@pytest.mark.slow
def test_sglang_has_the_fields_that_are_asked_for() -> None:
    protocol = pytest.importorskip("sglang.srt.entrypoints.openai.protocol")
    request = protocol.ChatCompletionRequest.model_fields
    if "return_input_ids_in_sglext" not in request:
        pytest.skip("an older SGLang, which is asked without these")
    assert {"ignore_eos", "return_cached_tokens_details", "return_output_ids_in_sglext"} <= request.keys()
    assert {"cached_tokens_details", "input_ids", "output_ids"} <= protocol.SglExt.model_fields.keys()
    assert {"device", "host", "storage"} <= protocol.CachedTokensDetails.model_fields.keys()
