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

SESSIONS = 52
ROUNDS = 3
PAGE = 16
WORDS = ["river", "stone", "garden", "music", "winter", "letter", "captain", "yellow", "market", "silver"]


@dataclass(frozen=True)
class Turn:
    session: int
    round: int
    prompt: list[int]
    answer: Generation


def question(rng: random.Random, words: int) -> str:
    return "Tell me about the " + " and the ".join(rng.choice(WORDS) for _ in range(words)) + "."


def play(server: SGLangServer, tokenizer: Any, script: list[Turn] | None, rounds: int = ROUNDS) -> list[Turn]:
    """Play the chat; with a script, send exactly its prompts, so that answers compare one to one."""
    rng = random.Random(7)
    turns: list[Turn] = []
    history: dict[int, list[int]] = {s: [] for s in range(SESSIONS)}
    for number in range(rounds):
        for session in range(SESSIONS):
            text = f"<|im_start|>user\n{question(rng, 24 if number == 0 else 5)}<|im_end|>\n"
            prompt = history[session] + tokenizer.encode(text + "<|im_start|>assistant\n")
            if script is not None:
                prompt = script[len(turns)].prompt
            answer = server.generate(
                input_ids=prompt, max_new_tokens=8, logprobs=True, return_cached_tokens_details=True
            )
            history[session] = prompt + answer.output_ids + tokenizer.encode("<|im_end|>\n")
            turns.append(Turn(session, number, prompt, answer))
    return turns


def cached(turn: Turn, tier: str) -> int:
    details = turn.answer.raw["meta_info"].get("cached_tokens_details") or {}
    return int(details.get(tier, 0))


@pytest.mark.server
@pytest.mark.timeout(1800)
def test_device_hit_host_hit_and_cold_run_agree(
    start_server: Callable[..., SGLangServer], float32_model_path: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(float32_model_path)
    extended = ["--page-size", str(PAGE), "--enable-hicache-ext", "--hicache-ext-host-gb", "2"]

    roomy = start_server(model=float32_model_path, max_total_tokens=20_000, args=extended)
    on_device = play(roomy, tokenizer, None)
    roomy.assert_no_leaks()
    roomy.stop()

    tight = start_server(model=float32_model_path, max_total_tokens=2_048, args=extended)
    from_host = play(tight, tokenizer, on_device)
    metrics = tight.metrics()
    tight.assert_no_leaks()
    tight.stop()

    cold = start_server(
        model=float32_model_path,
        max_total_tokens=2_048,
        args=["--page-size", str(PAGE), "--disable-radix-cache"],
    )
    computed = play(cold, tokenizer, on_device)
    cold.stop()

    assert metrics["hicache_ext_evicted_tokens_total"] > 5 * 2_048, "there was no eviction pressure"
    returning = [i for i, turn in enumerate(on_device) if turn.round > 0]
    host_share = sum(cached(from_host[i], "host") for i in returning) / sum(
        from_host[i].answer.cached_tokens for i in returning
    )
    assert host_share > 0.9, f"only {host_share:.2f} of the hits came from the host"
    for a, b, c in zip(on_device, from_host, computed, strict=True):
        where = (a.session, a.round)
        assert cached(a, "host") == 0 and c.answer.cached_tokens == 0, where
        assert a.answer.cached_tokens == b.answer.cached_tokens, where
        assert a.answer.output_ids == b.answer.output_ids, where
        assert a.answer.logprobs == b.answer.logprobs, f"{where}: a host hit computes differently"
        assert a.answer.output_ids == c.answer.output_ids, f"{where}: differs from a cold run"
