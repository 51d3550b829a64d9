"""The tree benchmark, on trees small enough for a test."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.tree import grown, main, our_match, prompt_parts, time_matches


@pytest.mark.parametrize("policy", ["lru", "cost"])
def test_a_grown_tree_has_the_nodes_asked_for_and_can_free_them_all(policy: str) -> None:
    cache = grown(policy, 500, 1)
    assert cache.tree.nodes == 500
    cache.check()
    assert cache.evict(500) == 500 and cache.tree.nodes == 0


def test_the_long_prompt_is_matched_whole_over_the_path_asked_for() -> None:
    tokens = np.arange(4096)
    parts = prompt_parts(4096, 64, 20)
    assert len(parts) == 20 and parts[-1] == 4096 and all(part % 64 == 0 for part in parts)
    match = our_match(tokens, 64, parts, "cost")
    assert match() == 4096
    with pytest.raises(RuntimeError, match="matched 4096 of 4097"):
        time_matches({"ours": match}, 4097, 1)


def test_the_command_writes_its_results(tmp_path: Path) -> None:
    out = tmp_path / "o.json"
    sizes = ["--nodes", "400,800", "--free", "10", "--tokens", "4096", "--repeats", "3"]
    assert main([*sizes, "--json", str(out)]) == 0
    report = json.loads(out.read_text("utf-8"))
    assert {row["policy"] for row in report["eviction"]} == {"lru", "cost"}
    assert report["match"]["ours, lru"] > 0


@pytest.mark.parametrize(
    "arguments", [["--nodes", "10"], ["--tokens", "100"], ["--free", "0"], ["--policies", "x"]]
)
def test_a_bad_option_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
