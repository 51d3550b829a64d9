"""What a slow store costs and what a fast one saves: mean TTFT with and without it, in one run.

Two servers of the same model get the same prompts in turns; one of them has a Mooncake store on another host,
a network namespace whose link is slowed down. The prompts do not fit the device and the host and leave them
again before their turn comes, so the server with the store has to decide for each: fetch, or compute.

Needs root, for network namespaces and ``tc``, and the tests of this clone.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.netns import cannot_limit, network, unusable
from tests.server.harness import SGLangServer
from tests.server.remote import InTurns, MooncakeUp, Segment, chat_remote, settled_hits, think, wait_up
from tests.server.workload import prompt


@dataclass
class Pass:
    """TTFT in seconds, one for each prompt, in the same order for both servers."""

    store: str
    without: list[float]
    with_store: list[float]
    store_tokens: float
    """Prompt tokens that came from the store."""
    prompt_tokens: int
    equal: int = 0
    """Answers that both servers gave alike; below float32 a reused prefix may round otherwise."""

    @property
    def ratio(self) -> float:
        return float(np.mean(self.with_store) / np.mean(self.without))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.slow_store",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="model folder")
    add("--prompts", type=int, default=24, help="number of prompts, asked one after the other")
    add("--tokens", type=int, default=600, help="length of a prompt")
    add("--passes", type=int, default=3, help="how often all prompts are asked at each speed")
    add("--pool", type=int, default=2048, help="device pool of each server, tokens")
    add("--host-gb", type=float, default=0.1, help="host tier of each server, GB")
    add("--rates", type=float, nargs="+", default=[20.0], metavar="MB/S", help="speeds of the slow link")
    add(
        "--plain-first",
        action="store_true",
        help="start the server without a store first: which of two equal servers is faster depends on that",
    )
    add("--output", type=Path, metavar="FILE", help="write all times as JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(arguments)
    if (reason := unusable()) is not None:
        print(f"slow_store: error: {reason}", file=sys.stderr)
        return 1
    passes = measure(options)
    show(passes)
    if options.output is not None:
        options.output.write_text(json.dumps([asdict(one) for one in passes], indent=1))
    return 0


def measure(options: argparse.Namespace) -> list[Pass]:
    made: list[Pass] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        network("server", "plain", "store") as hosts,
        ExitStack() as stack,
    ):
        place = Path(folder)
        master = MooncakeUp(place, hosts["store"]).start()
        stack.callback(master.close)
        segment = Segment(master, 1024, hosts["store"])
        stack.callback(segment.close)
        # Both in a namespace, as like each other as can be.
        # Asked in turn, more prompts than fit are never found nearby, on either server.
        size = {"device_tokens": options.pool, "host_gb": options.host_gb, "eviction_policy": "lru"}
        kinds = [("with", [master.url(segment_gb=0)], hosts["server"]), ("without", [], hosts["plain"])]
        servers = {
            name: stack.enter_context(chat_remote(options.model, place / name, urls, host=host, **size))
            for name, urls, host in (kinds[::-1] if options.plain_first else kinds)
        }
        with_store, without = servers["with"], servers["without"]
        wait_up(with_store)
        ids = [prompt(seed, options.tokens) for seed in range(options.prompts)]
        play("first use, fast store", ids, 1, with_store, without)
        think(with_store)
        made.append(play("fast", ids, options.passes, with_store, without))
        for rate in options.rates:
            if (cause := cannot_limit(hosts["store"])) is not None:
                print(f"slow_store: the link cannot be slowed down: {cause}", file=sys.stderr)
                break
            hosts["store"].limit(rate * 1e6)
            made.append(play(f"{rate:g} MB/s", ids, options.passes, with_store, without))
            hosts["store"].limit(None)
    return made


def play(
    name: str, ids: list[list[int]], passes: int, with_store: SGLangServer, without: SGLangServer
) -> Pass:
    """All prompts, to both servers in turns."""
    times = InTurns()
    before = settled_hits(with_store)
    times.ask(track(ids * passes, name), with_store, without)
    hits = settled_hits(with_store) - before
    return Pass(name, times.without, times.with_store, hits, passes * sum(map(len, ids)), times.equal)


def show(passes: list[Pass]) -> None:
    columns = ("store", "requests", "mean TTFT without", "with", "ratio", "from the store", "equal answers")
    table = Table(*columns)
    for one in passes:
        table.add_row(
            one.store,
            str(len(one.without)),
            f"{1e3 * np.mean(one.without):.0f} ms",
            f"{1e3 * np.mean(one.with_store):.0f} ms",
            f"{one.ratio:.3f}",
            f"{one.store_tokens / one.prompt_tokens:.1%}",
            f"{one.equal} of {len(one.without)}",
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
