"""The four-way comparison without servers: flags, figures, table; and the token load against a small fake."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

from benchmarks import four_way
from benchmarks.multiturn_stats import Record
from benchmarks.token_load import FIRST_ID, Load, check_exactness, run_load

LOAD = Load(sessions=3, rounds=3, first=20, turn=5, output=2, concurrency=2, passes=2, vocabulary=50)


@asynccontextmanager
async def fake_server(seen: list[list[int]], fail: bool = False) -> AsyncIterator[str]:
    """Answers like SGLang's ``/generate``; all but the last token of what it has seen comes from a cache."""

    async def generate(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt, count = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        cached = len(prompt) - 1 if any(prompt[: len(old)] == old for old in seen) else 0
        seen.append(prompt)
        response = web.StreamResponse()
        await response.prepare(request)
        for n in range(1, count + 1):
            meta = {
                "prompt_tokens": len(prompt),
                "cached_tokens": cached,
                "cached_tokens_details": {"device": cached, "host": 0},
                "finish_reason": {"type": "abort" if fail else "length"} if n == count else None,
                "output_token_logprobs": [(-0.5, FIRST_ID, None)] * n,
            }
            chunk = {"output_ids": [FIRST_ID] * n, "meta_info": meta}
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def test_every_session_grows_and_the_second_pass_repeats_the_first() -> None:
    seen: list[list[int]] = []

    async def run() -> list:
        async with fake_server(seen) as url:
            return await run_load(url, LOAD, lambda record: None)

    records = asyncio.run(run())
    assert len(records) == LOAD.requests and all(r.ok for r in records)
    half = len(seen) // 2
    assert sorted(seen[:half]) == sorted(seen[half:])
    assert {len(prompt) for prompt in seen} == {20, 27, 34}
    longest = next(p for p in seen if len(p) == 34)
    assert longest[20:22] == [FIRST_ID] * 2 and longest[:20] in seen
    first, second = (four_way.summary(records, number) for number in (1, 2))
    assert first["requests"] == 9 and first["failed"] == 0
    assert second["cached_share"] == pytest.approx(59 / 61)


def test_a_failed_request_ends_its_session() -> None:
    async def run() -> list:
        async with fake_server([], fail=True) as url:
            return await run_load(url, LOAD, lambda record: None)

    records = asyncio.run(run())
    assert len(records) == LOAD.sessions * LOAD.passes
    assert all(r.error and "abort" in r.error for r in records)


def test_exactness_counts_only_hits_of_the_host() -> None:
    async def run() -> int:
        async with fake_server([]) as url:
            return (await check_exactness(url, LOAD, {"host": 100}, prompts=2, length=20))["host"].prompts

    assert asyncio.run(run()) == 0


def test_what_is_above_a_store_is_the_device_and_the_host(tmp_path: Path) -> None:
    four_way.random_model(tmp_path, "8b")
    argv = ["--pool", "1024", "--host-gb", "1.31072"]
    assert four_way.tiers_above(four_way.build_parser().parse_args(argv), tmp_path) == {"host": 1024}
    argv += ["--ext-flags=--hicache-ext-remote mooncake://a:1"]
    above = four_way.tiers_above(four_way.build_parser().parse_args(argv), tmp_path)
    assert above == {"host": 1024, "store": 1024 + 10_000}


def test_the_servers_differ_in_their_caches_only(tmp_path: Path) -> None:
    options = four_way.build_parser().parse_args(["--pool", "1024", "--large-pool", "9000", "--host-gb", "3"])
    flags = {name: four_way.server_flags(name, options) for name in four_way.SERVERS}
    for name, of in flags.items():
        assert of[of.index("--max-total-tokens") + 1] == ("9000" if name == "large" else "1024")
    base = flags["small"]
    assert flags["ext"][: len(base)] == base and "--enable-hicache-ext" in flags["ext"]
    assert flags["hicache"][len(base) :][:3] == ["--enable-hierarchical-cache", "--hicache-size", "3"]


def test_a_pool_that_is_too_small_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert four_way.main(["--pool", "1000"]) == 2
    assert "--pool must be twice as large" in capsys.readouterr().out


def test_the_table_shows_ratios_to_the_large_pool() -> None:
    figures = {"prompt_tokens_per_s": 50.0, "ttft_mean_s": 0.2, "ttft_p99_s": 0.4, "cached_share": 0.5}
    rest = {"host_share": 0.5, "failed": 0}
    large = figures | rest | {"prompt_tokens_per_s": 100.0, "ttft_mean_s": 0.1}
    results = [{"name": "ext", "passes": [figures | rest]}, {"name": "large", "passes": [large]}]
    console = Console(width=160, record=True, file=None, quiet=False)
    with console.capture() as capture:
        console.print(four_way.table(results))
    assert "0.500" in capture.get() and "2.000" in capture.get()


def test_results_are_shown_again_without_a_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(four_way, "version", lambda name: "0")
    options, load = four_way.build_parser().parse_args([]), Load()
    record = Record(1, 0, 2, 0.0, "x", first_s=0.2, end_s=0.5, ttft_s=0.2, gaps_s=[0.01, 0.01, 0.28])
    record.prompt_tokens, record.cached_tokens, record.completion_tokens = 100, 50, 4
    result: dict[str, Any] = {"name": "ext", "passes": [four_way.summary([record], 1)], "records": [record]}
    result |= {"equal_to_first_pass": None, "exactness": None}
    path = tmp_path / "results.json"
    four_way.write_json(path, [result], options, load)
    assert four_way.main(["--show", str(path)]) == 0
    told = capsys.readouterr().out
    assert "280.0" in told and "50.0" in told
    path.write_text("[]")
    assert four_way.main(["--show", str(path)]) == 2
    assert "not a result of four_way" in capsys.readouterr().out
    assert four_way.main(["--show", str(tmp_path / "none")]) == 2
