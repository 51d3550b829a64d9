"""Multi-turn chat benchmark against any OpenAI-compatible streaming endpoint.

Many sessions take turns. Each round sends the whole chat so far, with the answers that were really received,
so a prefix cache that keeps a session until its next round computes only the new turn. Measured per request:
time to first token, gaps between tokens, tokens, and how many prompt tokens came from which tier of the
cache. See `benchmarks.multiturn_stats` for the bound that an infinite cache would reach.

    python -m benchmarks.multiturn --sessions 32 --rounds 5 --output a.json --plot a.png --label baseline
    python -m benchmarks.multiturn --compare a.json b.json --plot both.png

Exit code: 0 if every request was answered, 1 if any failed, 2 if the benchmark could not start, 130 if
interrupted (what was measured until then is reported and written).
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from benchmarks import multiturn_report as report
from benchmarks.multiturn_run import (
    Run,
    Server,
    Settings,
    SetupError,
    check_length,
    finish,
    open_http,
    probe,
    run_sessions,
)
from benchmarks.multiturn_stats import Record, equal_to_first_pass, summarize_run
from benchmarks.multiturn_workload import ORDERS, Shape

PLAIN_LINE_SECONDS = 5.0
PLAIN_SILENT_LINES = 6


def _number(kind: type[int] | type[float], least: float, above: bool = False) -> Callable[[str], Any]:
    """A parser of finite numbers that are at least `least`, or above it."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not (value > least if above else value >= least) or value == float("inf"):
            raise argparse.ArgumentTypeError(f"{text} must be {'above' if above else 'at least'} {least:g}")
        return value

    return parse


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError('must be a JSON object, such as {"top_k": 1}')
    fixed = sorted(value.keys() & {"messages", "stream", "stream_options", "n"})
    if fixed:
        raise argparse.ArgumentTypeError(f"the benchmark itself sets {', '.join(fixed)}")
    return value


def _page_size(text: str) -> int | str:
    if text == "auto":
        return text
    size: int = _number(int, 1)(text)
    return size


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except where there is none to show."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, {}, False) else super()._get_help_string(action)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.multiturn",
        description="Multi-turn chat benchmark against an OpenAI-compatible streaming endpoint.",
        epilog="Exit code: 0 all answered, 1 some requests failed, 2 could not start, 130 interrupted.",
        formatter_class=_HelpFormatter,
    )
    count, amount = _number(int, 1), _number(int, 0)

    server = parser.add_argument_group("server")
    server.add_argument("--base-url", default="http://127.0.0.1:30000", help="address of the server")
    server.add_argument("--model", help="model to ask for (default: the first one the server lists)")
    server.add_argument(
        "--timeout", type=_number(float, 0, True), default=600.0, help="limit of one request, seconds"
    )
    server.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable that holds the server's API key"
    )

    load = parser.add_argument_group("load")
    load.add_argument("--sessions", type=count, default=16, help="number of chats")
    load.add_argument("--rounds", type=count, default=5, help="questions in each chat")
    pace = load.add_mutually_exclusive_group()
    pace.add_argument(
        "--concurrency", type=count, help="requests in flight (4 unless --request-rate is given)"
    )
    pace.add_argument(
        "--request-rate",
        type=_number(float, 0, True),
        help="requests a second, Poisson arrivals; an arrival that finds no session ready waits for one",
    )
    load.add_argument(
        "--think-time",
        type=_number(float, 0),
        default=0.0,
        help="mean seconds between an answer and the session's next question, exponentially distributed",
    )
    load.add_argument(
        "--order",
        choices=ORDERS,
        default="round-robin",
        help="which session advances next: all round 1, then all round 2, which stresses eviction most; one "
        "session to its end, then the next; or any",
    )
    load.add_argument(
        "--passes", type=count, default=1, help="how often to run the same sessions, one after another"
    )

    text = parser.add_argument_group("texts (sizes in tokens, without those of the chat template)")
    text.add_argument(
        "--system-tokens", type=amount, default=32, help="system prompt that all sessions share"
    )
    text.add_argument("--first-tokens", type=count, default=256, help="question of the first round")
    text.add_argument("--turn-tokens", type=count, default=64, help="question of each later round")
    text.add_argument("--output-tokens", type=count, default=64, help="limit of an answer")
    text.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="make every answer --output-tokens long (SGLang's field ignore_eos)",
    )
    text.add_argument("--temperature", type=_number(float, 0), default=0.0, help="sampling temperature")
    text.add_argument("--seed", type=int, default=0, help="equal seeds ask equal questions")
    text.add_argument(
        "--tokens-per-word",
        type=_number(float, 0, True),
        help="tokens of an English word in this model (default: measured by two short requests first)",
    )
    text.add_argument(
        "--extra-body", type=_json_object, default={}, metavar="JSON", help="fields merged into every request"
    )

    bound = parser.add_argument_group("bound of an infinite cache")
    bound.add_argument(
        "--page-size",
        type=_page_size,
        default=1,
        metavar="N|auto",
        help="tokens of a cache page, to which the bound is rounded down; auto asks the server",
    )
    bound.add_argument(
        "--bound",
        choices=("formula", "exact"),
        default="formula",
        help="formula: from token counts; exact: from token ids that the server sends along (SGLang 0.5.23)",
    )

    out = parser.add_argument_group("results")
    out.add_argument("--label", default="run", help="name of this run in tables and plots")
    out.add_argument(
        "--output", type=Path, metavar="FILE", help="write all figures and every request as JSON"
    )
    out.add_argument("--plot", type=Path, metavar="FILE", help="write a plot, such as out.png")
    out.add_argument("--save-texts", action="store_true", help="keep the answers' texts in --output")
    out.add_argument(
        "--compare",
        type=Path,
        nargs=2,
        metavar=("A", "B"),
        help="run nothing; print two result files side by side (and --plot both)",
    )
    return parser


class Live:
    """Progress on standard error: a bar on a terminal, a line every few seconds elsewhere."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total = console, total
        self.done = self.failed = self.prompt = self.cached = 0
        self.ttft = 0.0
        self.timed = 0
        self.reported = False
        self.started = time.monotonic()
        self.bar = Progress(
            TextColumn("requests"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self.task = self.bar.add_task("requests", total=total, figures="")

    def figures(self) -> str:
        """Failures, cached share of the prompt tokens and mean TTFT so far."""
        share = f"{100 * self.cached / self.prompt:.1f}%" if self.reported and self.prompt else "-"
        ttft = f"{1e3 * self.ttft / self.timed:.0f} ms" if self.timed else "-"
        return f"failed {self.failed}, cached {share}, mean TTFT {ttft}"

    def add(self, record: Record) -> None:
        """Counts one more finished request."""
        self.done += 1
        self.failed += not record.ok
        self.prompt += record.prompt_tokens
        tiers = (record.device_tokens, record.host_tokens, record.store_tokens)
        by_tier = None if record.device_tokens is None else sum(t or 0 for t in tiers)
        cached = by_tier if record.cached_tokens is None else record.cached_tokens
        self.reported |= cached is not None
        self.cached += cached or 0
        if record.ttft_s is not None:
            self.ttft += record.ttft_s
            self.timed += 1
        if self.console.is_terminal:
            self.bar.update(self.task, completed=self.done, figures=self.figures())

    def line(self) -> None:
        """Prints the figures as one plain line."""
        seconds = time.monotonic() - self.started
        self.console.print(
            f"{seconds:.0f} s: {self.done}/{self.total} requests, {self.figures()}", highlight=False
        )

    async def tick(self) -> None:
        """Prints a line every few seconds, more rarely if nothing was answered; until cancelled."""
        printed, silent = -1, 0
        while True:
            await asyncio.sleep(PLAIN_LINE_SECONDS)
            silent = silent + 1 if self.done == printed else 0
            if silent % PLAIN_SILENT_LINES == 0:
                self.line()
                printed = self.done


async def _measure(
    settings: Settings, shape: Shape, calibrate: bool, console: Console
) -> tuple[Run, Server, Shape]:
    """Probes the server and runs the sessions; SIGINT and SIGTERM end it early. Raises SetupError."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with open_http(settings) as http:
        server = await probe(http, settings, shape, calibrate)
        check_length(settings, server, shape)
        shape = Shape(**(vars(shape) | {"tokens_per_word": server.tokens_per_word}))
        live = Live(console, settings.passes * shape.sessions * shape.rounds)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        ticking = None if console.is_terminal else asyncio.create_task(live.tick())
        try:
            if console.is_terminal:
                live.bar.start()
            run = await run_sessions(http, settings, server, shape, stop, live.add)
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
            if ticking is not None:
                ticking.cancel()
                live.line()
            live.bar.stop()
    return run, server, shape


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("hicache-ext", "aiohttp", "numpy", "rich"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _notes(server: Server, run: Run, page_size: int, exact: bool) -> list[str]:
    notes = list(server.notes)
    answered = [r for r in run.records if r.ok]
    if answered and all(r.cached_tokens is None for r in answered):
        notes.append("the server reports no cached tokens; start SGLang with --enable-cache-report")
    told = server.facts.get("page_size")
    if isinstance(told, int) and told != page_size:
        notes.append(
            f"the server's page size is {told}, the bound was rounded to {page_size}; see --page-size auto"
        )
    silent = sum(r.ttft_s is None for r in answered)
    if silent:
        notes.append(f"{silent} answers had no text and so no TTFT")
    if exact and any(ids is None for r, ids in zip(run.records, run.ids, strict=True) if r.ok):
        notes.append("some answers came without token ids; their bound is by formula")
    return notes


def build_result(
    arguments: dict[str, Any], run: Run, server: Server, shape: Shape, page_size: int, started: datetime
) -> dict[str, Any]:
    """The content of a result file; fills in the bound of an infinite cache. `started` is the wall clock."""
    exact = arguments["bound"] == "exact"
    finish(run, server, shape, page_size, exact)
    failed = sum(not r.ok for r in run.records)
    return {
        "format": report.FORMAT,
        "label": arguments["label"],
        "started": started.isoformat(timespec="seconds"),
        "seconds": run.seconds,
        "interrupted": run.interrupted,
        "arguments": arguments,
        "versions": _versions(),
        "server": {
            "model": server.model,
            "tokens_per_word": server.tokens_per_word,
            "template_tokens": server.template_tokens,
            "extra_fields": server.fields,
            "info": server.facts,
        },
        "page_size": page_size,
        "notes": _notes(server, run, page_size, exact),
        "counts": {
            "planned": run.planned,
            "done": len(run.records) - failed,
            "failed": failed,
            "skipped": run.skipped,
        },
        "equal_to_first_pass": equal_to_first_pass(run.records),
        "summary": summarize_run(run.records),
        "records": [report.record_to_json(r) for r in run.records],
    }


def _check_outputs(args: argparse.Namespace) -> None:
    """Raises SetupError if a result could not be written in the end."""
    for option, path in (("--output", args.output), ("--plot", args.plot)):
        if path is None:
            continue
        if path.is_dir():
            raise SetupError(f"{option} {path} is a directory; name a file")
        if not path.parent.is_dir():
            raise SetupError(f"{option}: there is no directory {path.parent}; make it first")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise SetupError(f"{option}: no permission to write {path}")
    if args.plot is not None:
        if importlib.util.find_spec("matplotlib") is None:
            raise SetupError("--plot needs matplotlib: pip install 'hicache-ext[bench]'")
        if args.plot.suffix.lower() not in (".png", ".svg", ".pdf"):
            raise SetupError(f"--plot {args.plot}: give it the suffix .png, .svg or .pdf")


def _plot(path: Path, results: list[dict[str, Any]]) -> None:
    from benchmarks.multiturn_plot import plot_results

    try:
        plot_results(path, results)
    except OSError as error:
        raise SetupError(f"cannot write {path}: {error.strerror}") from None


def _arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments as they go into the result file."""
    kept = {name: value for name, value in vars(args).items() if name not in ("compare", "api_key_env")}
    return {name: str(value) if isinstance(value, Path) else value for name, value in kept.items()}


def _compare(args: argparse.Namespace, console: Console) -> int:
    a, b = (report.load_result(path) for path in args.compare)
    report.print_comparison(console, a, b)
    if args.plot is not None:
        _plot(args.plot, [a, b])
        console.print(f"wrote {args.plot}", highlight=False)
    return 0


def _benchmark(args: argparse.Namespace, console: Console, progress: Console) -> int:
    if args.concurrency is None and args.request_rate is None:
        args.concurrency = 4
    api_key = None
    if args.api_key_env is not None:
        api_key = os.environ.get(args.api_key_env)
        if not api_key:
            raise SetupError(f"--api-key-env: the environment variable {args.api_key_env} is not set")
    base_url = args.base_url.rstrip("/").removesuffix("/v1")
    if not base_url.startswith(("http://", "https://")):
        raise SetupError(f"--base-url {args.base_url}: must start with http:// or https://")
    settings = Settings(
        base_url=base_url,
        model=args.model,
        output_tokens=args.output_tokens,
        temperature=args.temperature,
        concurrency=args.concurrency,
        request_rate=args.request_rate,
        think_time=args.think_time,
        order=args.order,
        passes=args.passes,
        timeout=args.timeout,
        ignore_eos=args.ignore_eos,
        exact=args.bound == "exact",
        extra_body=args.extra_body,
        api_key=api_key,
        save_texts=args.save_texts,
    )
    shape = Shape(
        sessions=args.sessions,
        rounds=args.rounds,
        system_tokens=args.system_tokens,
        first_tokens=args.first_tokens,
        turn_tokens=args.turn_tokens,
        seed=args.seed,
        tokens_per_word=args.tokens_per_word or 1.3,
    )
    started = datetime.now(UTC)
    run, server, shape = asyncio.run(_measure(settings, shape, args.tokens_per_word is None, progress))
    if args.page_size == "auto":
        told = server.facts.get("page_size")
        page_size = told if isinstance(told, int) and told > 0 else 1
    else:
        page_size = args.page_size
    result = build_result(_arguments(args), run, server, shape, page_size, started)
    # The file first: a closed pipe on standard output must not cost the measurement.
    if args.output is not None:
        try:
            report.write_json(args.output, result)
        except OSError as error:
            progress.print(
                f"error: cannot write {args.output}: {error.strerror}", highlight=False, markup=False
            )
    report.print_report(console, result)
    if args.output is not None and args.output.exists():
        console.print(f"wrote {args.output}", highlight=False)
    if args.plot is not None and run.records:
        _plot(args.plot, [result])
        console.print(f"wrote {args.plot}", highlight=False)
    if run.interrupted:
        return 130
    return 1 if result["counts"]["failed"] else 0


def _console(stderr: bool = False) -> Console:
    """Plain output off a terminal is wide enough for the tables whatever COLUMNS says."""
    console = Console(stderr=stderr, soft_wrap=False)
    return console if console.is_terminal else Console(stderr=stderr, width=140)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    args = build_parser().parse_args(argv)
    console, progress = _console(), _console(stderr=True)
    try:
        _check_outputs(args)
        return _compare(args, console) if args.compare is not None else _benchmark(args, console, progress)
    except (SetupError, report.ResultError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted before the first request", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
