"""What a slow store costs and what a fast one saves: mean TTFT with and without it, in one run.

One server has a Mooncake store on another host, a network namespace whose link is slowed down. It is asked in
blocks by turns with the store attached and detached, so that both sides see the same process and the same
machine. Prompts do not fit the device and the host and leave them again before their turn comes, so with the
store the server has to decide for each: fetch, or compute. Those of the two sides are different ones of the
same length, and change sides with every pass.

Needs root, for network namespaces and ``tc``, and the tests of this clone.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tests.netns import cannot_limit, network, unusable
from tests.server.harness import SGLangServer
from tests.server.remote import (
    MooncakeUp,
    Segment,
    attach,
    chat_remote,
    detach,
    nudge,
    settled_hits,
    think,
    wait_up,
)
from tests.server.workload import prompt, wait_until

Prompts = list[list[int]]


@dataclass
class Times:
    """TTFT in seconds; the n-th of either side were measured close to each other."""

    store: str
    without: list[float] = field(default_factory=list)
    with_store: list[float] = field(default_factory=list)
    lost: float = 0.0
    """Seconds that requests have waited for the store in vain, as the planner counts it."""
    store_tokens: int = 0
    """Prompt tokens that came from the store."""
    prompt_tokens: int = 0
    """Of the side with the store."""
    equal: int = 0
    """Answers of either side that are the first one to the same prompt; below float32 a reused prefix may
    round otherwise."""

    @property
    def ratio(self) -> float:
        return float(np.mean(self.with_store) / np.mean(self.without))

    @property
    def error(self) -> float:
        """Standard error of the ratio, from the pairs."""
        off = np.array(self.with_store) - self.ratio * np.array(self.without)
        return float(off.std(ddof=2) / math.sqrt(len(off)) / np.mean(self.without))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.slow_store",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="model folder")
    add("--prompts", type=int, default=16, help="number of prompts of a side")
    add("--tokens", type=int, default=600, help="length of a prompt")
    add("--block", type=int, default=2, help="prompts that a side is asked before it is the other's turn")
    add("--passes", type=int, default=3, help="how often all prompts are asked while the store is slow")
    add("--rounds", type=int, default=3, help="how often the store becomes slow")
    add("--threads", type=int, default=1, help="that the model computes with; the store needs a core as well")
    add("--pool", type=int, default=2048, help="device pool, tokens")
    add("--host-gb", type=float, default=0.1, help="host tier, GB")
    add(
        "--new",
        action="store_true",
        help="ask prompts that the slow store does not have, so they are written",
    )
    add("--rates", type=float, nargs="+", default=[20.0], metavar="MB/S", help="speeds of the slow link")
    add("--output", type=Path, metavar="FILE", help="write all times as JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(arguments)
    if (reason := unusable()) is not None:
        print(f"slow_store: error: {reason}", file=sys.stderr)
        return 1
    measured = measure(options)
    show(measured)
    if options.output is not None:
        options.output.write_text(json.dumps([asdict(one) for one in measured], indent=1))
    return 0


def measure(options: argparse.Namespace) -> list[Times]:
    with (
        tempfile.TemporaryDirectory() as folder,
        network("server", "store") as hosts,
        ExitStack() as stack,
    ):
        place = Path(folder)
        master = MooncakeUp(place, hosts["store"]).start()
        stack.callback(master.close)
        segment = Segment(master, 1024, hosts["store"])
        stack.callback(segment.close)
        made = chat_remote(
            options.model,
            place / "server",
            [master.url(segment_gb=0)],
            host=hosts["server"],
            device_tokens=options.pool,
            host_gb=options.host_gb,
            # Asked in turn, more prompts than fit are never found nearby.
            eviction_policy="lru",
        )
        made.admin_key = "slow-store"
        made.env["OMP_NUM_THREADS"] = str(options.threads)
        server = stack.enter_context(made)
        wait_up(server)
        run = Run(server, options)
        run.first_use()
        fast, slow = Times("fast"), {rate: Times(f"{rate:g} MB/s") for rate in options.rates}
        for _ in range(options.rounds):
            run.use_store()
            run.play(fast, 1)
            for rate, times in slow.items():
                if (cause := cannot_limit(hosts["store"])) is not None:
                    print(f"slow_store: the link cannot be slowed down: {cause}", file=sys.stderr)
                    return [fast]
                hosts["store"].limit(rate * 1e6)
                run.play(times, options.passes, new=options.new)
                hosts["store"].limit(None)
                run.use_store()
        return [fast, *slow.values()]


class Run:
    def __init__(self, server: SGLangServer, options: argparse.Namespace) -> None:
        self._server = server
        self._block = options.block
        seeds = range(3 * options.prompts)
        *self._sides, self._others = ([prompt(s, options.tokens) for s in seeds[n::3]] for n in range(3))
        self._next, self._seed, self._tokens = 0, 3 * options.prompts, options.tokens
        self._answers: dict[tuple[int, ...], list[int]] = {}
        self._swapped, self._attached, self._leaves_writes = False, True, False

    def first_use(self) -> None:
        """Fill the store with all prompts, and meet every shape of work once."""
        for ids in self._sides[0] + self._sides[1] + self._others:
            answer = self._server.generate(input_ids=ids, max_new_tokens=1)
            self._answers[tuple(ids)] = answer.output_ids
        think(self._server)

    def use_store(self) -> None:
        """Ask other prompts until the server has learned that the store is fast."""
        end = time.monotonic() + 120
        before = settled_hits(self._server)
        while settled_hits(self._server) - before < 2 * len(self._others[0]):
            for _ in range(4):
                self._server.generate(input_ids=self._others[self._next], max_new_tokens=1)
                self._next = (self._next + 1) % len(self._others)
            if time.monotonic() > end:
                raise SystemExit("slow_store: error: the server does not use its store, though it is fast")

    def play(self, times: Times, passes: int, new: bool = False) -> None:
        """All prompts of both sides in blocks, in the order with, without, without, with.

        With ``new``, as many that were never asked before; what is written of them is under way all the time.
        """
        self._leaves_writes = new
        count = len(self._sides[0])
        lost = self._lost()
        with Progress() as progress:
            task = progress.add_task(times.store, total=passes * count)
            number = 0
            for _ in range(passes):
                a, b = self._sides[::-1] if self._swapped else self._sides
                self._swapped = not self._swapped
                for start in range(0, count, self._block):
                    block = slice(start, start + self._block)
                    turns = [(True, a[block]), (False, b[block])]
                    for attached, prompts in turns[::-1] if number % 2 else turns:
                        self._turn_to(attached)
                        self._ask(times, attached, self._new(len(prompts)) if new else prompts)
                    number += 1
                    progress.advance(task, len(a[block]))
        self._turn_to(True)
        times.lost += self._lost() - lost

    def _new(self, count: int) -> Prompts:
        self._seed += count
        return [prompt(seed, self._tokens) for seed in range(self._seed - count, self._seed)]

    def _turn_to(self, attached: bool) -> None:
        """What one side has left to do in the background must not burden the other."""
        if attached == self._attached:
            return
        wait_until("the server is idle", self._idle, step=0.01)
        (attach if attached else detach)(self._server)
        self._attached = attached
        # What reached the host without the stores is offered to them when they are attached.
        wait_until("the server is idle", self._idle, step=0.01)

    def _lost(self) -> float:
        wait_until("the server is idle", self._idle, step=0.01)
        return self._server.metric("hicache_ext_plan_seconds_total", kind="lost")

    def _idle(self) -> bool:
        nudge(self._server)
        time.sleep(0.25)
        nudge(self._server)
        return self._leaves_writes or self._server.metric("hicache_ext_open_tickets") == 0

    def _ask(self, times: Times, attached: bool, prompts: Prompts) -> None:
        for ids in prompts:
            begin = time.monotonic()
            answer = self._server.generate(input_ids=ids, max_new_tokens=1)
            (times.with_store if attached else times.without).append(time.monotonic() - begin)
            times.equal += answer.output_ids == self._answers.get(tuple(ids), answer.output_ids)
            if attached:
                times.store_tokens += answer.cached_tokens
                times.prompt_tokens += len(ids)
            elif answer.cached_tokens:
                raise SystemExit("slow_store: error: all prompts fit the device and the host; give more")


def show(measured: list[Times]) -> None:
    columns = ("store", "pairs", "TTFT without", "with", "ratio", "waits in vain", "from the store", "equal")
    table = Table(*columns)
    for one in measured:
        table.add_row(
            one.store,
            str(len(one.without)),
            f"{1e3 * np.mean(one.without):.0f} ms",
            f"{1e3 * np.mean(one.with_store):.0f} ms",
            f"{one.ratio:.3f} +- {one.error:.3f}",
            f"{one.lost / sum(one.without):.2%}",
            f"{one.store_tokens / one.prompt_tokens:.1%}",
            f"{one.equal} of {2 * len(one.without)}",
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
