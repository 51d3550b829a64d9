"""A reused page gives the same tokens as a computed one: real model, float32, real evictions.

One multi-turn chat of many sessions is played three times, request by request:
on a device pool that holds everything (every hit is a device hit), on one that holds a fraction of it (hits
come back from the host), and without any prefix cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.server.harness import Generation, SGLangServer

SESSIONS = 40
ROUNDS = 3
PAGE = 16
WORDS = ["river", "stone", "garden", "music", "winter", "letter", "captain", "yellow", "market", "silver"]


@dataclass(frozen=True)
class Turn:
    session: int
    round: int
    prompt: list[int]
    answer: Generation


def ask(server: SGLangServer, prompt: list[int]) -> Generation:
    return server.generate(
        input_ids=prompt, max_new_tokens=6, logprobs=True, return_cached_tokens_details=True
    )


def chat(server: SGLangServer, tokenizer: Any) -> list[Turn]:
    """All sessions, round after round; each prompt holds the whole history of its session."""
    rng = random.Random(7)
    turns: list[Turn] = []
    history: dict[int, list[int]] = {s: [] for s in range(SESSIONS)}
    for number in range(ROUNDS):
        for session in range(SESSIONS):
            words = " and the ".join(rng.choice(WORDS) for _ in range(24 if number == 0 else 5))
            text = f"<|im_start|>user\nTell me about the {words}.<|im_end|>\n<|im_start|>assistant\n"
            prompt = history[session] + tokenizer.encode(text)
            answer = ask(server, prompt)
            history[session] = prompt + answer.output_ids + tokenizer.encode("<|im_end|>\n")
            turns.append(Turn(session, number, prompt, answer))
    return turns


def replay(server: SGLangServer, turns: list[Turn]) -> list[Turn]:
    """The same prompts in the same order, so that answers compare one to one."""
    return [Turn(t.session, t.round, t.prompt, ask(server, t.prompt)) for t in turns]


def cached(turn: Turn, tier: str) -> int:
    details = turn.answer.raw["meta_info"].get("cached_tokens_details") or {}
    return int(details.get(tier, 0))


@pytest.mark.server
@pytest.mark.timeout(1800)
def test_device_hit_host_hit_and_cold_run_agree(
    start_server: Callable[..., SGLangServer], float32_model_path: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(float32_model_path)
    page = ["--page-size", str(PAGE)]
    # The default would keep more on the device.
    settings = tmp_path / "hicache-ext.toml"
    settings.write_text('eviction_policy = "lru"')
    extended = [*page, "--enable-hicache-ext", "--hicache-ext-host-gb", "2"]
    extended += ["--hicache-ext-config", str(settings)]

    roomy = start_server(model=float32_model_path, max_total_tokens=20_000, args=extended)
    on_device = chat(roomy, tokenizer)
    roomy.assert_no_leaks()
    roomy.stop()

    tight = start_server(model=float32_model_path, max_total_tokens=2_048, args=extended)
    from_host = replay(tight, on_device)
    evicted = tight.metric("hicache_ext_evicted_tokens_total", tier="device")
    tight.assert_no_leaks()
    tight.stop()

    last = [t for t in on_device if t.round == ROUNDS - 1]
    cold = start_server(
        model=float32_model_path, max_total_tokens=2_048, args=[*page, "--disable-radix-cache"]
    )
    computed = replay(cold, last)
    cold.stop()

    assert evicted > 5 * 2_048, "there was no eviction pressure"
    hits = sum(t.answer.cached_tokens for t in from_host if t.round > 0)
    host_hits = sum(cached(t, "host") for t in from_host if t.round > 0)
    assert host_hits > 0.9 * hits, f"only {host_hits} of {hits} hits came from the host"
    for a, b in zip(on_device, from_host, strict=True):
        where = (a.session, a.round)
        assert cached(a, "host") == 0, where
        assert a.answer.cached_tokens == b.answer.cached_tokens, where
        assert a.answer.output_ids == b.answer.output_ids, where
        assert a.answer.logprobs == b.answer.logprobs, f"{where}: a host hit computes differently"
    for a, c in zip(last, computed, strict=True):
        assert c.answer.cached_tokens == 0, a.session
        assert a.answer.output_ids == c.answer.output_ids, f"{a.session}: differs from a cold run"
