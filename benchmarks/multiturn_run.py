"""Runs the sessions of the multi-turn chat benchmark against a server and records every request."""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from benchmarks import multiturn_stats as stats
from benchmarks import multiturn_workload as workload
from benchmarks.multiturn_client import HttpStatusError, Reply, ServerError, get_json, stream_chat
from benchmarks.multiturn_stats import Ids, Record
from benchmarks.multiturn_workload import Messages, Shape

EXACT_FIELDS = {"return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True}
PROBE_WORDS = (8, 200)
SERVER_FIELDS = (
    "version",
    "model_path",
    "page_size",
    "max_total_num_tokens",
    "max_total_tokens",
    "tp_size",
    "dtype",
    "kv_cache_dtype",
    "radix_cache_backend",
    "disable_radix_cache",
    "enable_hierarchical_cache",
)


class SetupError(Exception):
    """The benchmark cannot start; the message is one line that names cause and cure."""


@dataclass(frozen=True)
class Settings:
    """How to load the server; times in seconds. Exactly one of `concurrency` and `request_rate` is given."""

    base_url: str
    model: str | None
    output_tokens: int
    temperature: float = 0.0
    concurrency: int | None = None
    request_rate: float | None = None
    think_time: float = 0.0
    order: str = "round-robin"
    passes: int = 1
    timeout: float = 600.0
    ignore_eos: bool = True
    exact: bool = False
    extra_body: dict[str, Any] = field(default_factory=dict)
    api_key: str | None = field(default=None, repr=False)
    save_texts: bool = False


@dataclass
class Server:
    """What the probe found: the model, the extra fields the server takes, and what it says of itself."""

    model: str
    tokens_per_word: float
    template_tokens: float
    fields: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    max_model_len: int | None = None


@dataclass
class Run:
    """The records of a run in the order in which requests ended; `ids`: token ids for the exact bound."""

    records: list[Record] = field(default_factory=list)
    ids: list[tuple[Ids, Ids] | None] = field(default_factory=list)
    planned: int = 0
    skipped: int = 0
    seconds: float = 0.0
    interrupted: bool = False


def open_http(settings: Settings) -> aiohttp.ClientSession:
    """A client without a limit on connections; the key, if any, is sent as a bearer token."""
    headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers)


def request_body(settings: Settings, server: Server, messages: Messages, max_tokens: int) -> dict[str, Any]:
    """The JSON body of one request."""
    return {
        "model": server.model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": settings.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        **server.fields,
        **settings.extra_body,
    }


async def find_model(http: aiohttp.ClientSession, settings: Settings) -> tuple[str, int | None]:
    """The model to ask for and its context length if told. Raises SetupError."""
    url = f"{settings.base_url}/v1/models"
    try:
        listing = await get_json(http, url, min(settings.timeout, 30.0))
        cards = {card["id"]: card for card in listing["data"]}
    except HttpStatusError as error:
        if settings.model is not None and error.status in (404, 405):
            return settings.model, None
        raise SetupError(f"{url}: {error}; is it an OpenAI-compatible server?") from None
    except ServerError as error:
        raise SetupError(
            f"cannot reach {settings.base_url}: {error}; is the server up, and --base-url right?"
        ) from None
    except (KeyError, TypeError):
        raise SetupError(f"{url} does not list models as an OpenAI-compatible server does") from None
    if settings.model is None:
        if not cards:
            raise SetupError(f"{url} lists no model; name one with --model")
        card = next(iter(cards.values()))
    else:
        # SGLang takes base:adapter for a LoRA adapter.
        found = cards.get(settings.model) or cards.get(settings.model.partition(":")[0])
        if found is None:
            raise SetupError(
                f"the server has no model {settings.model!r}; it serves: {', '.join(cards) or 'none'}"
            )
        card = found
    length = card.get("max_model_len")
    return settings.model or str(card["id"]), length if isinstance(length, int) else None


async def probe(http: aiohttp.ClientSession, settings: Settings, shape: Shape, calibrate: bool) -> Server:
    """Asks the server two short questions: which fields it takes, and how many tokens a word has.

    The texts differ from those of the run, so nothing of the run is cached by this. With `calibrate` false
    the tokens per word are kept as they are in `shape`. Raises SetupError.
    """
    model, max_model_len = await find_model(http, settings)
    fields: dict[str, Any] = {"return_cached_tokens_details": True}
    if settings.ignore_eos:
        fields["ignore_eos"] = True
    if settings.exact:
        fields |= EXACT_FIELDS
    server = Server(model, shape.tokens_per_word, 0.0, fields, max_model_len=max_model_len)

    async def ask(words: int) -> Reply:
        text = workload.plain_text(random.Random(f"{shape.seed}/probe"), words)
        system = "Probe." if shape.system_tokens else ""
        body = request_body(settings, server, workload.build_messages(system, [text], []), 1)
        return await stream_chat(http, f"{settings.base_url}/v1/chat/completions", body, settings.timeout)

    try:
        try:
            short = await ask(PROBE_WORDS[0])
        except HttpStatusError as error:
            if error.status not in (400, 422):
                raise
            server.fields = {}
            short = await ask(PROBE_WORDS[0])
            server.notes.append(
                f"the server refuses SGLang's extra fields, sent without: {', '.join(fields)}"
            )
        long = await ask(PROBE_WORDS[1]) if calibrate else None
    except ServerError as error:
        raise SetupError(f"the first request to {settings.base_url} failed: {error}") from None
    if long is not None:
        server.tokens_per_word = (long.prompt_tokens - short.prompt_tokens) / (
            PROBE_WORDS[1] - PROBE_WORDS[0]
        )
        if server.tokens_per_word <= 0:
            raise SetupError(
                "the server's usage.prompt_tokens does not grow with the prompt; give --tokens-per-word"
            )
    server.template_tokens = max(0.0, short.prompt_tokens - server.tokens_per_word * PROBE_WORDS[0])
    if settings.exact and (short.input_ids is None or short.output_ids is None):
        raise SetupError("the server returns no token ids (SGLang 0.5.23 does); use --bound formula")
    server.facts = await server_facts(http, settings.base_url)
    return server


async def server_facts(http: aiohttp.ClientSession, base_url: str) -> dict[str, Any]:
    """Version and cache settings from SGLang's /server_info; empty on other servers."""
    for path in ("server_info", "get_server_info"):
        try:
            info = await get_json(http, f"{base_url}/{path}", 10.0)
        except ServerError:
            continue
        if isinstance(info, dict):
            return {name: info[name] for name in SERVER_FIELDS if name in info}
    return {}


def check_length(settings: Settings, server: Server, shape: Shape) -> None:
    """Raises SetupError if the last round cannot fit into the model's context."""
    if server.max_model_len is None:
        return
    turns = (shape.rounds - 1) * (shape.turn_tokens + settings.output_tokens)
    need = shape.system_tokens + shape.first_tokens + turns + settings.output_tokens
    if need > server.max_model_len:
        raise SetupError(
            f"round {shape.rounds} needs about {need} tokens and the model takes {server.max_model_len}: "
            "lower --rounds, --first-tokens, --turn-tokens or --output-tokens"
        )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class _Pass:
    """One pass over all sessions: hands out turns in order; a session is ready again after its answer."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        settings: Settings,
        server: Server,
        shape: Shape,
        run: Run,
        number: int,
        clock_zero: float,
        on_record: Callable[[Record], None],
    ) -> None:
        self.http, self.settings, self.server, self.shape = http, settings, server, shape
        self.run, self.number, self.clock_zero, self.on_record = run, number, clock_zero, on_record
        self.url = f"{settings.base_url}/v1/chat/completions"
        self.system = workload.system_text(shape)
        self.answers: list[list[str]] = [[] for _ in range(shape.sessions)]
        self.users: list[list[str]] = [[] for _ in range(shape.sessions)]
        self.thinking = random.Random(f"{shape.seed}/think/{number}")
        self.ready: list[tuple[tuple[float, int], int]] = []
        self.open_sessions = shape.sessions
        self.changed = asyncio.Event()
        self.slots = asyncio.Semaphore(settings.concurrency) if settings.concurrency else None

    async def drive(self) -> None:
        """Serves all turns; cancelling it cancels the requests in flight."""
        for session in range(self.shape.sessions):
            self._make_ready(session)
        arrivals = random.Random(f"{self.shape.seed}/arrivals/{self.number}")
        next_arrival = time.perf_counter()
        async with asyncio.TaskGroup() as requests:
            while True:
                if self.slots is not None:
                    await self.slots.acquire()
                elif self.settings.request_rate:
                    next_arrival += arrivals.expovariate(self.settings.request_rate)
                    await asyncio.sleep(max(0.0, next_arrival - time.perf_counter()))
                # An arrival that finds no session ready waits for the next one.
                while not self.ready and self.open_sessions:
                    self.changed.clear()
                    await self.changed.wait()
                if not self.ready:
                    break
                _, session = heapq.heappop(self.ready)
                requests.create_task(self._turn(session))

    def _make_ready(self, session: int) -> None:
        key = workload.order_key(
            self.settings.order, self.shape.seed, session, len(self.answers[session]) + 1
        )
        heapq.heappush(self.ready, (key, session))
        self.changed.set()

    async def _turn(self, session: int) -> None:
        round_ = len(self.answers[session]) + 1
        self.users[session].append(workload.user_text(self.shape, session, round_))
        messages = workload.build_messages(self.system, self.users[session], self.answers[session])
        body = request_body(self.settings, self.server, messages, self.settings.output_tokens)
        record = Record(
            pass_=self.number,
            session=session,
            round_=round_,
            start_s=time.perf_counter() - self.clock_zero,
            prompt_sha256=_sha256(json.dumps(messages)),
        )
        reply: Reply | None = None
        try:
            reply = await stream_chat(self.http, self.url, body, self.settings.timeout)
        except ServerError as error:
            record.error = str(error)
            record.end_s = time.perf_counter() - self.clock_zero
        if reply is not None:
            self._fill(record, reply)
        ids = None
        if reply is not None and reply.input_ids is not None and reply.output_ids is not None:
            ids = (np.asarray(reply.input_ids, np.int64), np.asarray(reply.output_ids, np.int64))
        self.run.records.append(record)
        self.run.ids.append(ids)
        if reply is None or round_ == self.shape.rounds:
            # Without an answer there is no history to go on from.
            self.run.skipped += self.shape.rounds - round_
            self.open_sessions -= 1
            self.changed.set()
        else:
            self.answers[session].append(reply.text)
            if self.settings.think_time > 0:
                pause = self.thinking.expovariate(1 / self.settings.think_time)
                asyncio.get_running_loop().call_later(pause, self._make_ready, session)
            else:
                self._make_ready(session)
        if self.slots is not None:
            self.slots.release()
        self.on_record(record)

    def _fill(self, record: Record, reply: Reply) -> None:
        record.start_s = reply.sent - self.clock_zero
        record.end_s = reply.finished - self.clock_zero
        if reply.arrivals:
            record.first_s = reply.arrivals[0] - self.clock_zero
            record.ttft_s = reply.arrivals[0] - reply.sent
            record.gaps_s = [b - a for a, b in zip(reply.arrivals, reply.arrivals[1:], strict=False)]
        record.prompt_tokens = reply.prompt_tokens
        record.completion_tokens = reply.completion_tokens
        record.cached_tokens = reply.cached
        if reply.tiers is not None:
            record.device_tokens, record.host_tokens, record.store_tokens = reply.tiers
        record.finish_reason = reply.finish_reason
        record.answer_sha256 = _sha256(reply.text)
        if self.settings.save_texts:
            record.answer = reply.text


async def run_sessions(
    http: aiohttp.ClientSession,
    settings: Settings,
    server: Server,
    shape: Shape,
    stop: asyncio.Event,
    on_record: Callable[[Record], None],
) -> Run:
    """Serves every session in every pass, until done or until `stop` is set; `on_record` sees each record.

    The result holds what was measured so far in either case; requests in flight at a stop are not recorded.
    `finish` completes the records afterwards.
    """
    run = Run(planned=settings.passes * shape.sessions * shape.rounds)
    clock_zero = time.perf_counter()
    stopping = asyncio.create_task(stop.wait())
    try:
        for number in range(1, settings.passes + 1):
            one = _Pass(http, settings, server, shape, run, number, clock_zero, on_record)
            driving = asyncio.create_task(one.drive())
            await asyncio.wait({driving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not driving.done():
                driving.cancel()
                await asyncio.gather(driving, return_exceptions=True)
                run.interrupted = True
                break
            driving.result()
    finally:
        stopping.cancel()
    run.seconds = time.perf_counter() - clock_zero
    return run


def finish(run: Run, server: Server, shape: Shape, page_size: int, exact: bool) -> None:
    """Completes the records: cached counts that follow from others, and the bound of an infinite cache."""
    stats.settle_cached(run.records)
    words = len(workload.system_text(shape).split())
    stats.formula_bounds(run.records, int(words * server.tokens_per_word), page_size)
    if exact:
        stats.exact_bounds(run.records, run.ids, page_size)
