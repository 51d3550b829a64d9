"""Records of single requests and the figures made of them.

What a cache of infinite size would have hit, per request, in tokens
-------------------------------------------------------------------
The bound is the largest that applies of

* round > 1:          prev_prompt_tokens + prev_completion_tokens - 1, of the round before in the same session
                      and pass (the last generated token never went through the model, so it has no KV);
* any round:          prompt_tokens - 1, if the very same prompt was sent earlier in the run (a later pass);
* any round:          the tokens of the shared system prompt, estimated from its word count;
* otherwise:          0,

cut to prompt_tokens - 1 (the last prompt token is always computed) and rounded down to a whole page. An
earlier request counts only if its first token had arrived before this request was sent.

This is an upper bound in rounds > 1: an answer that is tokenized anew may differ from the tokens that were
generated (special tokens are not part of the text, above all beyond an ignored end of sequence), and a chat
template may drop parts of old turns. In round 1 it leaves out the few template tokens before the system text,
so a hit may exceed it slightly. The exact bound (`exact_bounds`) has neither error: with token ids from the
server it is the longest common prefix of the prompt with prompt + answer[:-1] of earlier requests, with the
same cut and rounding. A hit may exceed either bound where a request waited in the server's queue while
another with the same prefix was answered, and where the server was warm before the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

TIERS = ("device", "host", "store")
Ids = npt.NDArray[np.int64]


@dataclass
class Record:
    """One request. Times are seconds since the start of the run, durations seconds; None is unknown."""

    pass_: int
    session: int
    round_: int
    start_s: float
    prompt_sha256: str
    first_s: float | None = None
    end_s: float | None = None
    ttft_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    device_tokens: int | None = None
    host_tokens: int | None = None
    store_tokens: int | None = None
    infinite_tokens: int = 0
    finish_reason: str | None = None
    answer_sha256: str | None = None
    answer: str | None = None
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None


def settle_cached(records: Sequence[Record]) -> None:
    """Fills in cached token counts that follow from others, in place.

    Servers leave a count out when it is zero: once one record shows that the server reports a count, a
    missing one means zero. A server that never reports it leaves None.
    """
    for r in records:
        if r.cached_tokens is None and r.device_tokens is not None:
            r.cached_tokens = r.device_tokens + (r.host_tokens or 0) + (r.store_tokens or 0)
    totals_known = any(r.cached_tokens is not None for r in records if r.ok)
    tiers_known = any(r.device_tokens is not None for r in records if r.ok)
    for r in records:
        if not r.ok:
            continue
        if r.cached_tokens is None and totals_known:
            r.cached_tokens = 0
        if r.device_tokens is None and tiers_known and r.cached_tokens == 0:
            r.device_tokens = r.host_tokens = r.store_tokens = 0


def _whole_pages(tokens: int, prompt_tokens: int, page_size: int) -> int:
    tokens = max(0, min(tokens, prompt_tokens - 1))
    return tokens - tokens % page_size


def formula_bounds(records: Sequence[Record], shared_tokens: int, page_size: int) -> None:
    """Sets `infinite_tokens` of each answered record by the formula above.

    `shared_tokens` is the estimated length of the shared system prompt (0 if not known).
    """
    answered = [r for r in records if r.ok]
    by_turn = {(r.pass_, r.session, r.round_): r for r in answered}
    first_seen: dict[str, float] = {}
    earliest = float("inf")
    for r in answered:
        if r.first_s is not None:
            first_seen[r.prompt_sha256] = min(r.first_s, first_seen.get(r.prompt_sha256, float("inf")))
            earliest = min(earliest, r.first_s)
    for r in answered:
        bound = shared_tokens if earliest < r.start_s else 0
        before = by_turn.get((r.pass_, r.session, r.round_ - 1))
        if before is not None:
            bound = max(bound, before.prompt_tokens + before.completion_tokens - 1)
        if first_seen.get(r.prompt_sha256, float("inf")) < r.start_s:
            bound = r.prompt_tokens - 1
        r.infinite_tokens = _whole_pages(bound, r.prompt_tokens, page_size)


def common_prefix(a: Ids, b: Ids) -> int:
    """Number of leading tokens that two token runs have in common."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def exact_bounds(records: Sequence[Record], ids: Sequence[tuple[Ids, Ids] | None], page_size: int) -> None:
    """Sets `infinite_tokens` of each answered record that has token ids (prompt, answer) in `ids`.

    Of other sessions only the one answered first is compared, for sessions share nothing but the system
    prompt.
    """
    runs = [
        (r, pair[0], np.concatenate([pair[0], pair[1][:-1]]))
        for r, pair in zip(records, ids, strict=True)
        if r.ok and pair is not None
    ]
    timed = sorted((x for x in runs if x[0].first_s is not None), key=lambda x: x[0].first_s or 0.0)
    by_session: dict[int, list[tuple[Record, Ids, Ids]]] = {}
    for run in timed:
        by_session.setdefault(run[0].session, []).append(run)
    firsts = sorted((group[0] for group in by_session.values()), key=lambda x: x[0].first_s or 0.0)[:2]
    for r, prompt, _ in runs:
        others = [x for x in firsts if x[0].session != r.session]
        earlier = [x for x in by_session.get(r.session, []) + others if (x[0].first_s or 0.0) < r.start_s]
        bound = max((common_prefix(prompt, run) for _, _, run in earlier), default=0)
        r.infinite_tokens = _whole_pages(bound, r.prompt_tokens, page_size)


def distribution(values: Iterable[float]) -> dict[str, float] | None:
    """Mean, median, 90th and 99th percentile (linear interpolation); None if there are no values."""
    data = np.asarray(list(values), dtype=np.float64)
    if data.size == 0:
        return None
    p50, p90, p99 = np.percentile(data, [50, 90, 99])
    return {"mean": float(data.mean()), "p50": float(p50), "p90": float(p90), "p99": float(p99)}


def busy_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Time covered by at least one of the (start, end) spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _sum_known(values: Iterable[int | None]) -> int | None:
    """The sum, or None if there are no values or any is unknown."""
    total = 0
    empty = True
    for value in values:
        if value is None:
            return None
        total += value
        empty = False
    return None if empty else total


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def summarize(label: str, records: Sequence[Record]) -> dict[str, Any]:
    """The figures of a group of requests; shares are of its prompt tokens, None where the server is silent.

    Throughput divides by the time in which at least one request of the group was in flight. Inter-token
    latency is the gap between successive deltas with text; a delta may carry several tokens, so `tpot_s`,
    (end-to-end latency - TTFT) / (completion tokens - 1), is given too.
    """
    ok = [r for r in records if r.ok]
    prompt = sum(r.prompt_tokens for r in ok)
    output = sum(r.completion_tokens for r in ok)
    busy = busy_seconds((r.start_s, r.end_s) for r in ok if r.end_s is not None)
    cached = _sum_known(r.cached_tokens for r in ok)
    tiers = {tier: _sum_known(getattr(r, f"{tier}_tokens") for r in ok) for tier in TIERS}
    infinite = sum(r.infinite_tokens for r in ok)
    share: dict[str, float | None] = {tier: _ratio(tokens, prompt) for tier, tokens in tiers.items()}
    share |= {
        "cached": _ratio(cached, prompt),
        "infinite": _ratio(infinite, prompt),
        "of_infinite": _ratio(cached, infinite),
    }
    return {
        "label": label,
        "requests": len(records),
        "failed": len(records) - len(ok),
        "ttft_s": distribution(r.ttft_s for r in ok if r.ttft_s is not None),
        "itl_s": distribution(gap for r in ok for gap in r.gaps_s),
        "tpot_s": distribution(
            (r.end_s - r.first_s) / (r.completion_tokens - 1)
            for r in ok
            if r.end_s is not None and r.first_s is not None and r.completion_tokens > 1
        ),
        "e2e_s": distribution(r.end_s - r.start_s for r in ok if r.end_s is not None),
        "busy_s": busy,
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "prompt_tokens_per_s": _ratio(prompt, busy),
        "output_tokens_per_s": _ratio(output, busy),
        "cached_tokens": cached,
        "cached_tokens_by_tier": tiers,
        "infinite_tokens": infinite,
        "share": share,
    }


def summarize_run(records: Sequence[Record]) -> dict[str, list[dict[str, Any]]]:
    """Figures per round of each pass (`rounds`, labelled pass.round if passes are several) and `totals`."""
    passes = sorted({r.pass_ for r in records})
    many = len(passes) > 1
    rounds = []
    for pass_, round_ in sorted({(r.pass_, r.round_) for r in records}):
        label = f"{pass_}.{round_}" if many else str(round_)
        group = [r for r in records if (r.pass_, r.round_) == (pass_, round_)]
        rounds.append({"pass": pass_, "round": round_} | summarize(label, group))
    totals = [
        summarize("rounds >= 2", [r for r in records if r.round_ >= 2]),
        summarize("all", list(records)),
    ]
    if many:
        for pass_ in passes:
            group = [r for r in records if r.pass_ == pass_ and r.round_ >= 2]
            totals.append(summarize(f"pass {pass_}, rounds >= 2", group))
    return {"rounds": rounds, "totals": totals}


def equal_answers(a: Sequence[Record], b: Sequence[Record]) -> tuple[int, int]:
    """(equal answers, equal prompts) among the turns of two runs.

    Turns are matched by pass, session and round.
    """
    answers = {(r.pass_, r.session, r.round_): r for r in a if r.ok}
    equal = asked = 0
    for r in b:
        other = answers.get((r.pass_, r.session, r.round_))
        if r.ok and other is not None and other.prompt_sha256 == r.prompt_sha256:
            asked += 1
            equal += other.answer_sha256 == r.answer_sha256
    return equal, asked


def equal_to_first_pass(records: Sequence[Record]) -> tuple[int, int] | None:
    """`equal_answers` of the first pass and each later one, added up; None if there is one pass only."""
    passes = sorted({r.pass_ for r in records})
    if len(passes) < 2:
        return None
    answers = {(r.session, r.round_): r for r in records if r.pass_ == passes[0] and r.ok}
    equal = asked = 0
    for r in records:
        other = answers.get((r.session, r.round_))
        if r.ok and r.pass_ != passes[0] and other is not None and other.prompt_sha256 == r.prompt_sha256:
            asked += 1
            equal += other.answer_sha256 == r.answer_sha256
    return equal, asked
