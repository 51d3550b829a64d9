"""Chats that move between two servers, without and with a store that both share.

Every question of a chat goes to the other server than the one before. Without a store that server computes
again what it has not seen itself; with one it reads what the other has computed.

Starts two servers on this machine, twice, and a Mooncake master for them unless a store is named.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.table import Table

from benchmarks.multiturn_client import Reply, ServerError, stream_chat
from benchmarks.multiturn_workload import Shape, build_messages, user_text
from benchmarks.server import ServerFailed, serve

ROOT = Path(__file__).resolve().parents[1]
WITHOUT, WITH = "no store", "shared store"


@dataclass(frozen=True)
class Turn:
    """A question and its answer; tokens and seconds."""

    servers: str
    chat: int
    round: int
    server: int
    prompt_tokens: int
    device: int
    host: int
    store: int
    ttft: float
    text: str


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.moving",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="model folder")
    add("--chats", type=int, default=4, help="number of chats, one after the other in every round")
    add("--rounds", type=int, default=4, help="questions in each chat")
    add("--first-tokens", type=int, default=600, help="length of the first question")
    add("--turn-tokens", type=int, default=150, help="length of the others")
    add("--output-tokens", type=int, default=16, help="length of an answer")
    add("--pool", type=int, default=8192, help="device pool of each server, tokens")
    add("--host-gb", type=float, default=0.3, help="host tier of each server, GB")
    add("--page-size", type=int, default=16, help="tokens in a page")
    add(
        "--store",
        metavar="URL",
        help="store to share (default: a Mooncake master that is started)",
    )
    add("--segment-gb", type=float, default=0.5, help="memory that each server gives to that master")
    add("--only", choices=[WITHOUT, WITH], help="run only this half")
    add("--logs", type=Path, default=Path(), metavar="DIR", help="where server logs go")
    add("--output", type=Path, metavar="FILE", help="write all turns as JSON")
    return parser


@contextmanager
def mooncake(segment_gb: float, log: Path) -> Iterator[str]:
    """The address of a Mooncake master that ends with the block. Raises ServerFailed."""
    command = ["bash", str(ROOT / "scripts/mooncake_up.sh"), "--port", "0", "--metadata-port", "0"]
    command += ["--metrics-port", "0", "--log", str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True) as master:
        try:
            assert master.stdout is not None
            url = master.stdout.readline().strip()
            if not url:
                raise ServerFailed(f"the Mooncake master did not start; its log is {log}")
            yield f"{url}&segment_gb={segment_gb:g}"
        finally:
            master.terminate()


async def ask(http: aiohttp.ClientSession, url: str, body: dict[str, object]) -> Reply:
    return await stream_chat(http, f"{url}/v1/chat/completions", body, 300.0)


async def run_chats(
    servers: Sequence[str], label: str, args: argparse.Namespace, console: Console
) -> list[Turn]:
    """All chats, a round after the other; raises ServerError."""
    shape = Shape(args.chats, args.rounds, 0, args.first_tokens, args.turn_tokens, 1, 1.3)
    turns: list[Turn] = []
    answers: list[list[str]] = [[] for _ in range(args.chats)]
    async with aiohttp.ClientSession() as http:
        for round_ in range(1, args.rounds + 1):
            for chat in range(args.chats):
                users = [user_text(shape, chat, number) for number in range(1, round_ + 1)]
                server = (chat + round_) % len(servers)
                body: dict[str, object] = {
                    "model": str(args.model),
                    "messages": build_messages("", users, answers[chat]),
                    "max_tokens": args.output_tokens,
                    "temperature": 0,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                    "return_cached_tokens_details": True,
                }
                reply = await ask(http, servers[server], body)
                answers[chat].append(reply.text)
                device, host, store = reply.tiers or (reply.cached or 0, 0, 0)
                ttft = (reply.arrivals[0] if reply.arrivals else reply.finished) - reply.sent
                tokens = (reply.prompt_tokens, device, host, store)
                turns.append(Turn(label, chat, round_, server, *tokens, ttft, reply.text))
            console.print(f"{label}: round {round_} of {args.rounds}")
    return turns


def run_half(label: str, store: str | None, args: argparse.Namespace, console: Console) -> list[Turn]:
    flags = [
        "--max-total-tokens",
        str(args.pool),
        "--page-size",
        str(args.page_size),
        "--enable-cache-report",
    ]
    # Two idle schedulers would take two cores from whoever works.
    flags += [
        "--sleep-on-idle",
        "--enable-cache-report",
        "--enable-hicache-ext",
        "--hicache-ext-host-gb",
        str(args.host_gb),
    ]
    if store is not None:
        flags += ["--hicache-ext-remote", store]
    with ExitStack() as stack:
        servers = []
        for number in (1, 2):
            log = args.logs / f"{label.replace(' ', '-')}-{number}.log"
            console.print(f"{label}: starting server {number} (log: {log})")
            servers.append(stack.enter_context(serve(args.model, flags, log)))
        return asyncio.run(run_chats(servers, label, args, console))


def table(turns: Sequence[Turn]) -> Table:
    result = Table(title="chats that change the server with every question; rounds 2 and later")
    for name in ("servers", "prompt tokens", "cached", "from device", "from host", "from store", "mean TTFT"):
        result.add_column(name, justify="left" if name == "servers" else "right")
    for label in (WITHOUT, WITH):
        later = [t for t in turns if t.servers == label and t.round > 1]
        if not later:
            continue
        prompt = sum(t.prompt_tokens for t in later)
        parts = [sum(getattr(t, name) for t in later) for name in ("device", "host", "store")]
        result.add_row(
            label,
            str(prompt),
            f"{100 * sum(parts) / prompt:.1f} %",
            *(f"{100 * part / prompt:.1f} %" for part in parts),
            f"{1000 * sum(t.ttft for t in later) / len(later):.0f} ms",
        )
    return result


def one_chat(turns: Sequence[Turn]) -> Table:
    result = Table(title="one of these chats, with the shared store")
    for name in ("question", "server", "prompt tokens", "device", "host", "store", "computed", "TTFT"):
        result.add_column(name, justify="right")
    for t in turns:
        if t.servers == WITH and t.chat == 0:
            computed = t.prompt_tokens - t.device - t.host - t.store
            numbers = (t.round, t.server + 1, t.prompt_tokens, t.device, t.host, t.store, computed)
            result.add_row(*map(str, numbers), f"{1000 * t.ttft:.0f} ms")
    return result


def equal_texts(turns: Sequence[Turn]) -> tuple[int, int]:
    """(answers that are equal with and without the store, answers)."""
    texts = {(t.servers, t.chat, t.round): t.text for t in turns}
    pairs = [(texts[WITHOUT, c, r], text) for (label, c, r), text in texts.items() if label == WITH]
    return sum(a == b for a, b in pairs), len(pairs)


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    # The servers end with the blocks that hold them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console()
    args.logs.mkdir(parents=True, exist_ok=True)
    turns: list[Turn] = []
    try:
        if args.only != WITH:
            turns += run_half(WITHOUT, None, args, console)
        if args.only != WITHOUT:
            with ExitStack() as stack:
                store = args.store
                if store is None:
                    store = stack.enter_context(mooncake(args.segment_gb, args.logs / "mooncake.log"))
                turns += run_half(WITH, store, args, console)
    except (ServerFailed, ServerError) as error:
        print(f"moving: {error}", file=sys.stderr)
        return 1
    if args.output is not None:
        args.output.write_text(json.dumps([asdict(t) for t in turns], indent=1) + "\n")
    console.print(table(turns))
    if args.only != WITHOUT:
        console.print(one_chat(turns))
    if args.only is None:
        equal, count = equal_texts(turns)
        console.print(f"{equal} of {count} answers are equal with and without the store")
    return 0


if __name__ == "__main__":
    sys.exit(main())
