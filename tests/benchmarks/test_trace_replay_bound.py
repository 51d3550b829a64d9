"""Bounds on what can be saved without the future: that they are bounds, and what they see of a trace."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.trace_replay import main
from benchmarks.trace_replay_bound import CLASSES, Bound, Learned, hull, share, uses_of
from benchmarks.trace_replay_optimum import next_uses, optimum
from benchmarks.trace_replay_synthetic import chat
from benchmarks.trace_replay_trace import Request
from hicache_ext.core.policy.costs import CostModel

BLOCK = 512
COSTS = CostModel()


def requests_of(*prompts: list[int]) -> list[Request]:
    return [Request(float(i), len(p) * BLOCK, np.array(p, dtype=np.int64)) for i, p in enumerate(prompts)]


def test_a_use_knows_its_past_and_is_priced_by_what_comes() -> None:
    uses = uses_of(requests_of([1, 2], [9], [1, 2, 3], [1, 2, 3, 4]), BLOCK, COSTS)
    known = uses.known
    assert [k.turn for k in known] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    assert [k.uses for k in known] == [0, 0, 0, 1, 1, 0, 2, 2, 1, 0]
    assert [(k.new, k.length) for k in known[3:]] == [(1, 3)] * 3 + [(1, 4)] * 4
    assert uses.conversation.tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    assert uses.gap.tolist() == [3, 3, 8, 3, 3, 3, 4, 4, 4, 4]
    assert uses.recompute[1] == pytest.approx(COSTS.recompute(BLOCK, BLOCK))
    assert uses.recompute[2] == uses.recompute[9] == 0


def test_a_shared_prefix_alone_is_no_conversation() -> None:
    uses = uses_of(requests_of([1, 2], [1, 3], [1, 4], [1, 4, 5]), BLOCK, COSTS)
    assert [k.turn for k in uses.known] == [1, 1, 2, 2, 1, 1, 2, 2, 2]


def test_the_hull_of_a_class() -> None:
    """Three uses: two come back after 2 and 10, one never does and is watched for 20."""
    pieces = hull(np.array([10, 2, 20]), np.array([1.0, 1.0, 0.0]))
    assert pieces.age.tolist() == [2, 10]
    assert pieces.room.tolist() == [6, 16] and pieces.saved.tolist() == [1, 1]
    pieces = hull(np.array([4, 5]), np.array([1.0, 9.0]))
    assert pieces.age.tolist() == [5], "stopping at 4 is never better than a mixture"
    assert len(hull(np.array([5]), np.array([0.0])).room) == 0


@pytest.mark.parametrize("host_ratio", [0, 4])
def test_it_grows_with_room_and_knowledge_up_to_the_optimum(host_ratio: int) -> None:
    requests = chat(150, seed=3)
    uses = uses_of(requests, BLOCK, COSTS)
    upcoming = next_uses(requests)
    bounds = {name: Bound(uses, classes) for name, classes in CLASSES.items()}
    counter = itertools.count()
    future = Bound(uses, lambda known: next(counter))
    before = 0.0
    for device in (50, 200, 100_000):
        host = host_ratio * device
        best = optimum(requests, upcoming, device, host, BLOCK, COSTS).saved_s
        assert future.saved(device, host) >= best - 1e-9
        saved = {name: bound.saved(device, host) for name, bound in bounds.items()}
        assert saved["turn"] >= saved["age only"] - 1e-9
        assert saved["turn, uses, new"] >= max(saved["turn"], saved["new tokens"]) - 1e-9
        assert saved["turn, uses, new, length"] >= saved["turn, uses, new"] - 1e-9
        assert saved["age only"] >= before
        before = saved["age only"]
    assert before == pytest.approx(float(uses.recompute.sum())) == pytest.approx(future.saved(100_000, 0))


@pytest.mark.parametrize("name", CLASSES)
def test_no_choice_of_ages_saves_more_with_the_room_that_it_takes(name: str) -> None:
    requests = chat(80, seed=3)
    uses = uses_of(requests, BLOCK, COSTS)
    bound = Bound(uses, CLASSES[name])
    rng = np.random.default_rng(1)
    for _ in range(8):
        ages: dict[object, float] = {}
        room = saved = 0.0
        for known, gap, price in zip(uses.known, uses.gap, uses.recompute, strict=True):
            age = ages.setdefault(CLASSES[name](known), float(rng.exponential(500)))
            room += min(gap, age)
            saved += price if gap <= age else 0.0
        capacity = -(-int(room) // uses.span) + 1
        assert 0 < saved <= bound.saved(capacity, 0) + 1e-9


def test_what_one_half_teaches_holds_in_the_other_if_both_are_alike() -> None:
    requests = chat(1500, seed=5)
    uses = uses_of(requests, BLOCK, COSTS)
    bound, learned = Bound(uses, CLASSES["turn"]), Learned(uses, CLASSES["turn"])
    for device, host in ((300, 0), (300, 1200)):
        assert 0.8 * bound.saved(device, host) < learned.saved(device, host) <= bound.saved(device, host)


def test_share_of_no_gap_is_none() -> None:
    assert share(1.0, 1.0, 1.0) is None and share(2.0, 1.0, 3.0) == 0.5


def test_the_command_prints_and_writes_bounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, out = tmp_path / "t.jsonl", tmp_path / "o.json"
    lines = [
        json.dumps({"timestamp": 0, "input_length": r.tokens, "hash_ids": r.blocks.tolist()})
        for r in chat(120)
    ]
    trace.write_text("\n".join(lines), "utf-8")
    options = ["--device-blocks", "100,400", "--policies", "lru", "--bound", "--json", str(out)]
    assert main(["--trace", str(trace), *options]) == 0
    found = json.loads(out.read_text("utf-8"))["bounds"]
    assert len(found) == len(CLASSES) * 2 * 3
    assert all(row["bound_s"] >= row["learned_s"] - 1e-9 for row in found if row["classes"] == 1)
    assert "bounds on the gap closed" in capsys.readouterr().out
