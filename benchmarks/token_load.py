"""Multi-turn load in token ids, over SGLang's ``/generate``: needs no tokenizer, so random weights will do.

Every session opens with tokens of its own; each further round sends everything so far, the answer included,
and some new tokens. Later passes repeat the prompts of the first one exactly.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import aiohttp
import numpy as np

from benchmarks.multiturn_client import ServerError, client_error, one_line, sse_data
from benchmarks.multiturn_stats import Record

WRITTEN_S = 5.0
FIRST_ID = 3
"""Token ids below are special in the models that are served."""


@dataclass(frozen=True)
class Load:
    """What is asked; lengths are tokens. Equal settings ask the same, as far as the answers are equal."""

    sessions: int = 64
    rounds: int = 5
    first: int = 2000
    turn: int = 500
    output: int = 32
    concurrency: int = 16
    passes: int = 2
    vocabulary: int = 32000
    seed: int = 1
    timeout: float = 120.0

    @property
    def requests(self) -> int:
        return self.sessions * self.rounds * self.passes

    @property
    def longest(self) -> int:
        """Tokens of a session at its end."""
        return self.first + (self.rounds - 1) * self.turn + self.rounds * self.output

    def new_tokens(self, session: int, round_: int) -> list[int]:
        """What the user adds in a round, from 1."""
        rng = np.random.default_rng([self.seed, session, round_])
        count = self.first if round_ == 1 else self.turn
        return rng.integers(FIRST_ID, self.vocabulary, count).tolist()


@dataclass
class Answer:
    """A complete answer; times are readings of ``time.perf_counter``, in seconds.

    ``logprobs`` are those of ``ids``; ``device``, ``host`` and ``store`` are cached prompt tokens by tier.
    """

    sent: float
    arrivals: list[float]
    ids: list[int]
    prompt_tokens: int
    cached: int
    device: int
    host: int
    store: int
    logprobs: list[float]


async def generate(
    http: aiohttp.ClientSession,
    base_url: str,
    prompt: list[int],
    output: int,
    *,
    logprobs: bool = False,
    timeout: float = 120.0,
) -> Answer:
    """Ask for exactly ``output`` tokens, greedily.

    Raises:
        ServerError: no complete answer.
    """
    body = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": output, "temperature": 0.0, "ignore_eos": True},
        "stream": True,
        "return_logprob": logprobs,
    }
    sent = time.perf_counter()
    arrivals: list[float] = []
    chunk: dict[str, Any] = {}
    try:
        limits = aiohttp.ClientTimeout(total=timeout)
        async with http.post(f"{base_url}/generate", json=body, timeout=limits) as response:
            if response.status != 200:
                raise ServerError(f"HTTP {response.status}: {one_line(await response.text())}")
            async for data in sse_data(response.content):
                if data == "[DONE]":
                    break
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ServerError(f"error in the stream: {one_line(data)}")
                arrivals.append(time.perf_counter())
        meta = chunk["meta_info"]
        ids = chunk["output_ids"]
        if meta["finish_reason"]["type"] != "length" or len(ids) != output:
            raise ServerError(f"{len(ids)} of {output} tokens came, {meta['finish_reason']}")
        tiers = meta.get("cached_tokens_details") or {}
        return Answer(
            sent=sent,
            arrivals=arrivals,
            ids=ids,
            prompt_tokens=meta["prompt_tokens"],
            cached=meta["cached_tokens"],
            device=tiers.get("device", 0),
            host=tiers.get("host", 0),
            store=tiers.get("storage", 0),
            logprobs=[value for value, *_ in meta.get("output_token_logprobs") or []],
        )
    except TimeoutError:
        raise ServerError(f"no complete answer within {timeout:g} s") from None
    except aiohttp.ClientError as error:
        raise ServerError(f"connection failed: {client_error(error)}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ServerError(f"unexpected data in the stream: {type(error).__name__}: {error}") from None


class _Pass:
    """One pass over all sessions; those in an earlier round go first."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        base_url: str,
        load: Load,
        number: int,
        zero: float,
        prompts: dict[tuple[int, int], list[int]],
    ) -> None:
        self.http, self.base_url, self.load, self.number, self.zero = http, base_url, load, number, zero
        self.prompts = prompts
        self.ready = [(1, session) for session in range(load.sessions)]
        self.open_sessions = load.sessions
        self.changed = asyncio.Condition()
        self.records: list[Record] = []

    async def run(self, on_record: Callable[[Record], None]) -> None:
        await asyncio.gather(*(self._work(on_record) for _ in range(self.load.concurrency)))

    async def _work(self, on_record: Callable[[Record], None]) -> None:
        while True:
            async with self.changed:
                await self.changed.wait_for(lambda: self.ready or not self.open_sessions)
                if not self.ready:
                    return
                round_, session = heapq.heappop(self.ready)
            record = await self._turn(round_, session)
            self.records.append(record)
            on_record(record)
            async with self.changed:
                if record.ok and round_ < self.load.rounds:
                    heapq.heappush(self.ready, (round_ + 1, session))
                else:
                    self.open_sessions -= 1
                self.changed.notify_all()

    async def _turn(self, round_: int, session: int) -> Record:
        load = self.load
        if round_ == 1:
            self.prompts.setdefault((session, 1), load.new_tokens(session, 1))
        prompt = self.prompts[session, round_]
        digest = hashlib.sha256(np.asarray(prompt, np.int64).tobytes()).hexdigest()
        record = Record(self.number, session, round_, time.perf_counter() - self.zero, digest)
        try:
            answer = await generate(self.http, self.base_url, prompt, load.output, timeout=load.timeout)
        except ServerError as error:
            record.error = str(error)
            record.end_s = time.perf_counter() - self.zero
            return record
        _fill(record, answer, self.zero)
        if (session, round_ + 1) not in self.prompts:
            self.prompts[session, round_ + 1] = prompt + answer.ids + load.new_tokens(session, round_ + 1)
        return record


async def run_load(base_url: str, load: Load, on_record: Callable[[Record], None]) -> list[Record]:
    """Serve all sessions in every pass, ``load.concurrency`` requests at a time.

    Failed requests are records with an error; their session ends there.
    """
    zero = time.perf_counter()
    records: list[Record] = []
    prompts: dict[tuple[int, int], list[int]] = {}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        for number in range(1, load.passes + 1):
            one = _Pass(http, base_url, load, number, zero, prompts)
            await one.run(on_record)
            records += one.records
    return records


def _fill(record: Record, answer: Answer, zero: float) -> None:
    times = answer.arrivals
    record.start_s = answer.sent - zero
    record.first_s, record.end_s = times[0] - zero, times[-1] - zero
    record.ttft_s = times[0] - answer.sent
    record.gaps_s = [b - a for a, b in pairwise(times)]
    record.prompt_tokens, record.completion_tokens = answer.prompt_tokens, len(answer.ids)
    record.cached_tokens = answer.cached
    record.device_tokens, record.host_tokens, record.store_tokens = answer.device, answer.host, answer.store
    record.answer_sha256 = hashlib.sha256(np.asarray(answer.ids, np.int64).tobytes()).hexdigest()


@dataclass(frozen=True)
class Exactness:
    """How many prompts were answered bit for bit alike on a hit of the device and on one of a lower tier.

    ``prompts`` are those that had such hits of equal length; ``tokens`` came from that tier.
    """

    prompts: int
    equal_ids: int
    equal_logprobs: int
    tokens: int


async def check_exactness(
    base_url: str, load: Load, above: Mapping[str, int], prompts: int = 4, length: int = 4000
) -> dict[str, Exactness]:
    """Compare answers on device hits with answers on hits of the same length in other tiers.

    One request at a time: batches of another composition may round differently. Before each tier of ``above``
    ("host", "store"), other prompts push everything out of the tiers above it, which hold so many tokens.

    Raises:
        ServerError: a request failed.
    """
    rng = random.Random(load.seed)

    def draw(count: int) -> list[int]:
        return [rng.randrange(FIRST_ID, load.vocabulary) for _ in range(count)]

    async with aiohttp.ClientSession() as http:

        async def ask(prompt: list[int], output: int, logprobs: bool) -> Answer:
            return await generate(http, base_url, prompt, output, logprobs=logprobs, timeout=load.timeout)

        asked = [draw(length) for _ in range(prompts)]
        for prompt in asked:
            await ask(prompt, 1, False)
        from_device = [await ask(prompt, load.output, True) for prompt in asked]
        found: dict[str, Exactness] = {}
        for tier, tokens in above.items():
            # Stores are written to in the background.
            await asyncio.sleep(WRITTEN_S if tier == "store" else 0)
            for _ in range(-(-5 * tokens // (4 * length))):
                await ask(draw(length), 1, False)
            found[tier] = _compare(tier, from_device, [await ask(p, load.output, True) for p in asked])
    return found


def _compare(tier: str, from_device: Sequence[Answer], from_tier: Sequence[Answer]) -> Exactness:
    pairs = [
        (one, other)
        for one, other in zip(from_device, from_tier, strict=True)
        if one.cached == other.cached and getattr(other, tier) > getattr(one, tier) == 0
    ]
    return Exactness(
        prompts=len(pairs),
        equal_ids=sum(a.ids == b.ids for a, b in pairs),
        equal_logprobs=sum(a.logprobs == b.logprobs for a, b in pairs),
        tokens=sum(getattr(answer, tier) for answer in from_tier),
    )
