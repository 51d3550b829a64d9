"""The trace replay: formats, what it counts, the optimum, and the command line."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest

from benchmarks.trace_replay import main
from benchmarks.trace_replay_optimum import belady, next_uses, optimum
from benchmarks.trace_replay_run import Replay
from benchmarks.trace_replay_synthetic import agents, chat, with_scan
from benchmarks.trace_replay_trace import Request, TraceError, read_trace
from hicache_ext.core.policy.costs import CostModel
from hicache_ext.core.policy.make import make_policy

BLOCK = 512
COSTS = CostModel()


def requests_of(*prompts: list[int]) -> list[Request]:
    return [Request(float(i), len(p) * BLOCK, np.array(p, dtype=np.int64)) for i, p in enumerate(prompts)]


def replay(name: str, requests: list[Request], device: int, host: int = 0) -> Replay:
    policy = make_policy(name, device_tokens=device, host_tokens=host, page_size=1, costs=COSTS.scaled(BLOCK))
    run = Replay(policy, device, host, BLOCK, COSTS)
    run.run(requests)
    run.cache.check()
    return run


def test_mooncake_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"timestamp": 2000, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}\n\n', "utf-8"
    )
    (request,) = read_trace(path, BLOCK)
    assert (request.time, request.tokens, request.blocks.tolist()) == (2.0, 600, [7, 8])


def test_sglang_logs_name_blocks_by_content_and_prefix(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    prompts: list[dict[str, object]] = [
        {"input_ids": [1, 2, 3, 4, 5]},
        {"input_ids": [1, 2, 3, 4, 6]},
        {"input_ids": [9, 9, 3, 4]},
        {"text": "a" * 16 + "b"},
    ]
    lines = [
        {"timestamp": "2026-01-02T03:04:05", "event": "request.received", "rid": str(i), "obj": obj}
        for i, obj in enumerate(prompts)
    ]
    lines.append({"timestamp": "2026-01-02T03:04:06", "event": "request.finished", "rid": "0", "obj": {}})
    path.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    first, second, third, text = read_trace(path, 2)
    assert [r.tokens for r in (first, second, third, text)] == [5, 5, 4, 5]
    assert first.blocks[:2].tolist() == second.blocks[:2].tolist() and first.blocks[2] != second.blocks[2]
    assert not set(third.blocks.tolist()) & set(first.blocks.tolist())
    assert len(text.blocks) == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no request"),
        ("nonsense\n", ":1: not a request"),
        ('{"input_length": 5, "hash_ids": [1, 2]}\n', "2 hash_ids of 512 tokens for input_length 5"),
        ('{"event": "request.received", "timestamp": "2026-01-01", "obj": {}}\n', "log-requests-level 3"),
    ],
)
def test_a_bad_trace_is_one_clear_line(
    tmp_path: Path, content: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(content, "utf-8")
    with pytest.raises(TraceError, match=message):
        read_trace(path, BLOCK)
    assert main(["--trace", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_hits_are_counted_by_tier_and_loads_cost_time() -> None:
    run = replay("lru", requests_of([1, 2], [3, 4], [1, 2]), device=2, host=4)
    result = run.result
    assert (result.device_blocks, result.host_blocks, result.blocks) == (0, 2, 6)
    load = 2 * BLOCK * COSTS.load
    assert result.load_s == pytest.approx(load)
    assert result.saved_s == pytest.approx(COSTS.recompute(0, 2 * BLOCK) - load)
    assert result.cold_s == pytest.approx(3 * COSTS.recompute(0, 2 * BLOCK))
    result = replay("lru", requests_of([1, 2], [1, 2]), device=2).result
    assert (result.device_blocks, result.host_blocks, result.load_s) == (2, 0, 0)


def test_a_partial_block_counts_its_tokens_only() -> None:
    requests = [Request(0.0, 600, np.array([1, 2], dtype=np.int64))] * 2
    assert replay("lru", requests, device=4).result.device_tokens == 600


def test_a_prompt_larger_than_the_device_is_served_and_counted() -> None:
    result = replay("cost", requests_of(list(range(10)), list(range(10))), device=4).result
    assert result.too_long == 2 and result.device_blocks == 4


def test_block_hits_of_the_optimum_are_the_most_that_any_order_of_eviction_reaches() -> None:
    """Exhaustive: every prefix-closed set that fits may be kept after each request."""
    rng = random.Random(1)
    tree = {1: [1], 2: [1, 2], 3: [1, 3], 4: [4], 5: [4, 5]}
    for _ in range(20):
        prompts = [tree[rng.randint(1, 5)] for _ in range(7)]
        requests = requests_of(*prompts)
        states: dict[frozenset[int], int] = {frozenset(): 0}
        for prompt in prompts:
            after: dict[frozenset[int], int] = {}
            for kept, score in states.items():
                hit = len(list(itertools.takewhile(kept.__contains__, prompt)))
                have = kept | set(prompt)
                for size in range(min(2, len(have)) + 1):
                    for choice in itertools.combinations(sorted(have), size):
                        closed = all(set(tree[b]) <= set(choice) for b in choice)
                        if closed:
                            key = frozenset(choice)
                            after[key] = max(after.get(key, 0), score + hit)
            states = after
        assert sum(belady(requests, next_uses(requests), 2)) == max(states.values())


def test_no_policy_beats_the_optimum_in_block_hits_and_all_agree_when_everything_fits() -> None:
    requests = chat(400, seed=4)
    uses = next_uses(requests)
    best = optimum(requests, uses, 500, 0, BLOCK, COSTS)
    everything = optimum(requests, uses, 10**6, 0, BLOCK, COSTS)
    for name in ("lru", "s3fifo", "cost"):
        assert replay(name, requests, 500).result.device_blocks <= best.device_blocks
        assert replay(name, requests, 20_000).result.saved_s == pytest.approx(everything.saved_s)


@pytest.mark.parametrize("make", [chat, agents])
def test_synthetic_traces_repeat(make) -> None:  # type: ignore[no-untyped-def]
    one, two = make(50, seed=7), make(50, seed=7)
    assert [r.blocks.tolist() for r in one] == [r.blocks.tolist() for r in two]
    assert all(a.time <= b.time + 60 for a, b in itertools.pairwise(one))


@pytest.mark.slow
def test_cost_beats_lru_on_chats_with_think_times_and_keeps_up_on_agents() -> None:
    chats, runs = chat(2500, seed=1), agents(1000, seed=1)
    lru, cost = (replay(name, chats, 1000).result for name in ("lru", "cost"))
    assert cost.saved_s > 1.1 * lru.saved_s
    lru, cost = (replay(name, runs, 300).result for name in ("lru", "cost"))
    assert cost.saved_s / cost.cold_s > lru.saved_s / lru.cold_s - 0.01


@pytest.mark.slow
def test_a_scan_of_ten_times_the_capacity_costs_returning_sessions_at_most_three_points() -> None:
    capacity = 3000
    sessions = chat(3000, again=0.8)
    mixed, own = with_scan(sessions, 10 * capacity, at=1000)

    def session_hits(name: str, requests: list[Request], mine: list[bool]) -> float:
        policy = make_policy(
            name, device_tokens=capacity, host_tokens=0, page_size=1, costs=COSTS.scaled(BLOCK)
        )
        run = Replay(policy, capacity, 0, BLOCK, COSTS)
        hits = [sum(run.serve(request)) for request in requests]
        total = sum(len(r.blocks) for r, m in zip(requests, mine, strict=True) if m)
        return sum(h for h, m in zip(hits, mine, strict=True) if m) / total

    assert session_hits("cost", sessions, [True] * 3000) - session_hits("cost", mixed, own) <= 0.03


def test_the_command_prints_tables_and_writes_json_and_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    trace = tmp_path / "t.jsonl"
    trace.write_text(
        "\n".join(
            json.dumps({"timestamp": 0, "input_length": r.tokens, "hash_ids": r.blocks.tolist()})
            for r in chat(120)
        ),
        "utf-8",
    )
    out, plot = tmp_path / "o.json", tmp_path / "o.png"
    arguments = [
        "--trace",
        str(trace),
        "--device-blocks",
        "100,400",
        "--policies",
        "lru,cost",
        "--waiting",
        "3",
    ]
    assert main([*arguments, "--json", str(out), "--plot", str(plot)]) == 0
    rows = json.loads(out.read_text("utf-8"))["rows"]
    assert len(rows) == 2 * 2 * 3 and {r["policy"] for r in rows} == {"optimum", "lru", "cost"}
    assert all(r["requests"] == 120 for r in rows)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "gap closed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [["--policies", "mru"], ["--device-blocks", "x"], ["--device-blocks", "-1"], ["--tflops", "0"]],
)
def test_a_bad_option_is_refused_with_a_reason(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--trace", "none.jsonl", *arguments])
    assert stop.value.code == 2 and arguments[0] in capsys.readouterr().err


def test_a_missing_trace_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--trace", "none.jsonl"]) == 2
    assert "none.jsonl: No such file" in capsys.readouterr().err
