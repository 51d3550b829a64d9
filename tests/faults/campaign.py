"""A workload whose pages travel between device and host all the time, with pages damaged on purpose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.server.harness import SGLangServer
from tests.server.workload import generate_all, prompt

SESSIONS, TURNS, FIRST, MORE, NEW_TOKENS = 12, 6, 300, 50, 6


@dataclass
class Faults:
    """Pages, as the server counts them."""

    injected: dict[str, int] = field(default_factory=dict)
    """By kind."""
    met: int = 0
    """Damaged and then loaded."""
    refused: dict[str, int] = field(default_factory=dict)
    """By reason."""
    recomputed: int = 0
    """Requests."""

    @property
    def detected(self) -> int:
        return sum(self.refused.values())


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    logprobs: list[float]
    """Of the last prompt tokens and the output, where asked for."""


def turns(round_number: int) -> Iterator[list[dict[str, Any]]]:
    """Requests turn by turn: every session grows; more sessions than the device holds.

    Some want logprobs of the output, some of the end of the prompt too.
    """
    for turn in range(TURNS):
        requests = []
        for session in range(SESSIONS):
            length = FIRST + MORE * turn
            request: dict[str, Any] = {
                "input_ids": prompt(1000 * round_number + session, length),
                "max_new_tokens": NEW_TOKENS,
            }
            if session % 3 == 0:
                request["logprobs"] = True
            if session % 6 == 0:
                request["logprob_start_len"] = length - 20
            requests.append(request)
        yield requests


def play(server: SGLangServer, round_number: int) -> list[Answer]:
    """All answers of a round; any failed request raises."""
    answers = []
    for requests in turns(round_number):
        for got in generate_all(server, requests, threads=4):
            # The first logprob of a prompt is None.
            of_prompt = [p[0] or 0.0 for p in got.raw["meta_info"].get("input_token_logprobs") or ()]
            answers.append(Answer(got.output_ids, of_prompt + got.logprobs))
    return answers


def assert_same(got: list[Answer], expected: list[Answer], where: str) -> None:
    """Equal tokens, and logprobs equal up to the order of float32 sums in another batch."""
    assert [a.tokens for a in got] == [a.tokens for a in expected], f"other tokens in {where}"
    for one, other in zip(got, expected, strict=True):
        assert len(one.logprobs) == len(other.logprobs), f"logprobs are missing in {where}"
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-2, err_msg=where)


def faults_of(server: SGLangServer) -> Faults:
    injected: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    met = recomputed = 0
    for sample in server.samples():
        match sample.name.removeprefix("hicache_ext_").removesuffix("_total"):
            case "injected_faults":
                injected[sample.labels["kind"]] += int(sample.value)
            case "refused_pages":
                refused[sample.labels["reason"]] += int(sample.value)
            case "met_faults":
                met += int(sample.value)
            case "recomputed_requests":
                recomputed += int(sample.value)
    # Unary plus drops the zeros.
    return Faults(dict(+injected), met, dict(+refused), recomputed)
