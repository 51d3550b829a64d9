"""Replays a request trace through the real radix tree and eviction policies; no GPU, no model.

Reads Mooncake's JSONL (timestamp, input_length, hash_ids) and SGLang's request log
(--log-requests --log-requests-level 3 --log-requests-format json). Reported per policy and capacity: block
and token hit rates by tier, prefill seconds saved net of the time that loads take, the cache's own time per
request, and what a cache that knows the future would reach (benchmarks.trace_replay_optimum says which
bound that is).

    python -m benchmarks.trace_replay --trace trace.jsonl
    python -m benchmarks.trace_replay --trace trace.jsonl --policies lru,cost --json out.json --plot out.png

Exit code: 0, or 2 if the trace or an option is unusable, 130 if interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
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
    track,
)
from rich.table import Table

from benchmarks.trace_replay_bound import CLASSES, Bound, Learned, share, uses_of
from benchmarks.trace_replay_optimum import next_uses, optimum
from benchmarks.trace_replay_run import Replay
from benchmarks.trace_replay_trace import Request, TraceError, distinct, read_trace
from hicache_ext.core.policy.costs import CostModel
from hicache_ext.core.policy.make import NAMES, make_policy

OPTIMUM = "optimum"
CAPACITIES = (1000, 2000, 5000, 10_000, 20_000)


def counts(text: str) -> list[int]:
    """Comma-separated numbers, at least 0; raises argparse.ArgumentTypeError."""
    try:
        values = [int(part.replace("_", "")) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of whole numbers, as in 1000,5000"
        ) from None
    if min(values) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} holds a negative number")
    return values


def names(text: str) -> list[str]:
    """Comma-separated policies; raises argparse.ArgumentTypeError."""
    chosen = text.split(",")
    for name in chosen:
        if name not in NAMES:
            raise argparse.ArgumentTypeError(f"unknown policy {name!r}; choose from {', '.join(NAMES)}")
    return chosen


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def wide_console() -> Console:
    """The terminal, or lines long enough for the tables where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.trace_replay",
        description=(__doc__ or "").split("\n\n")[0] + "\n",
        epilog="",
    )
    p.add_argument(
        "--trace", type=Path, required=True, help="JSONL file, Mooncake's format or SGLang's request log"
    )
    p.add_argument("--limit", type=int, default=None, help="replay the first N requests only (default: all)")
    p.add_argument(
        "--policies", type=names, default=list(NAMES), help=f"comma-separated (default: {','.join(NAMES)})"
    )
    p.add_argument(
        "--device-blocks",
        type=counts,
        default=list(CAPACITIES),
        help="device capacities in blocks, comma-separated (default: 1000,2000,5000,10000,20000)",
    )
    p.add_argument(
        "--host-ratio",
        type=counts,
        default=[0, 4],
        help="host capacities as multiples of the device's, comma-separated; 0 is no host (default: 0,4)",
    )
    p.add_argument("--block-tokens", type=int, default=512, help="tokens of a block (default: 512)")
    p.add_argument(
        "--waiting", type=int, default=0, help="requests ahead that wait in the queue (default: 0)"
    )
    model = p.add_argument_group("model and machine (assumed, not measured)")
    model.add_argument("--params", type=positive, default=8e9, help="active parameters (default: 8e9)")
    model.add_argument("--layers", type=positive, default=32, help="attention layers (default: 32)")
    model.add_argument(
        "--hidden", type=positive, default=4096, help="query heads x head size (default: 4096)"
    )
    model.add_argument(
        "--kv-bytes", type=positive, default=131072, help="KV bytes of a token, all layers (default: 131072)"
    )
    model.add_argument("--tflops", type=positive, default=400, help="prefill speed, TFLOP/s (default: 400)")
    model.add_argument("--load-gbps", type=positive, default=25, help="host to device, GB/s (default: 25)")
    p.add_argument(
        "--bound",
        action="store_true",
        help="also bound what policies can save that do not know the future, by what they know of a use "
        "(see docs/eviction.md; about a minute for 150,000 blocks)",
    )
    p.add_argument("--json", type=Path, help="write all results to this file")
    p.add_argument("--plot", type=Path, help="write hit rate and seconds saved over capacity to this image")
    return p


def cost_model(options: argparse.Namespace) -> CostModel:
    flops = options.tflops * 1e12
    return CostModel(
        token=2 * options.params / flops,
        depth=4 * options.layers * options.hidden / flops,
        load=options.kv_bytes / (options.load_gbps * 1e9),
    )


def sweep(
    requests: Sequence[Request], options: argparse.Namespace, costs: CostModel, console: Console
) -> list[dict[str, Any]]:
    """A row per host ratio, capacity and policy, the optimum first."""
    unit = costs.scaled(options.block_tokens)
    uses = next_uses(requests)
    rows: list[dict[str, Any]] = []
    cases = [(ratio, device) for ratio in options.host_ratio for device in options.device_blocks]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("replay", total=len(cases) * (len(options.policies) + 1) * len(requests))
        for ratio, device in cases:
            sizes = {
                "device_blocks_capacity": device,
                "host_blocks_capacity": ratio * device,
                "host_ratio": ratio,
            }
            progress.update(task, description=f"{device:,} blocks, host {ratio}x, {OPTIMUM}")
            best = optimum(requests, uses, device, ratio * device, options.block_tokens, costs)
            progress.advance(task, len(requests))
            rows.append({"policy": OPTIMUM, **sizes, **best.summary()})
            for name in options.policies:
                progress.update(task, description=f"{device:,} blocks, host {ratio}x, {name}")
                policy = make_policy(
                    name, device_tokens=device, host_tokens=ratio * device, page_size=1, costs=unit
                )
                replay = Replay(policy, device, ratio * device, options.block_tokens, costs, options.waiting)
                done = replay.run(requests, lambda count: progress.advance(task, count))
                rows.append({"policy": name, **sizes, **done.summary()})
    return add_gap_closed(rows)


def add_gap_closed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds each row's share of the way from LRU to the optimum in seconds saved, None where there is no
    gap.
    """
    saved = {(r["policy"], r["host_ratio"], r["device_blocks_capacity"]): r["saved_s"] for r in rows}
    for row in rows:
        at = (row["host_ratio"], row["device_blocks_capacity"])
        floor, best = saved.get(("lru", *at)), saved[OPTIMUM, *at]
        gap = None if floor is None else best - floor
        row["gap_closed"] = (
            (row["saved_s"] - floor) / gap if floor is not None and gap and gap > 1e-9 * best else None
        )
    return rows


def tables(rows: Sequence[dict[str, Any]], console: Console) -> None:
    for ratio in dict.fromkeys(row["host_ratio"] for row in rows):
        title = "device only" if ratio == 0 else f"device, and a host of {ratio} times its size"
        table = Table(title=title, title_justify="left")
        for name, right in (
            ("blocks", True),
            ("policy", False),
            ("block hits", True),
            ("token hits", True),
            ("device", True),
            ("host", True),
            ("prefill saved", True),
            ("saved s", True),
            ("gap closed", True),
            ("us/request", True),
        ):
            table.add_column(name, justify="right" if right else "left")
        last = None
        for row in (r for r in rows if r["host_ratio"] == ratio):
            capacity = row["device_blocks_capacity"]
            if last not in (None, capacity):
                table.add_section()
            gap = row["gap_closed"]
            table.add_row(
                f"{capacity:,}" if capacity != last else "",
                row["policy"],
                *(
                    f"{100 * row[key]:.1f} %"
                    for key in (
                        "block_hit_rate",
                        "token_hit_rate",
                        "device_token_hit_rate",
                        "host_token_hit_rate",
                        "saved_share",
                    )
                ),
                f"{row['saved_s']:,.0f}",
                "" if gap is None else f"{100 * gap:.0f} %",
                "" if row["policy"] == OPTIMUM else f"{row['cache_us_per_request']:.0f}",
            )
            last = capacity
        console.print(table)


def bounds(
    requests: Sequence[Request],
    options: argparse.Namespace,
    costs: CostModel,
    rows: Sequence[dict[str, Any]],
    console: Console,
) -> list[dict[str, Any]]:
    """A row per way to class uses, host ratio and capacity; with a host also if it holds a copy of all that
    the device holds.
    """
    saved = {(r["policy"], r["host_ratio"], r["device_blocks_capacity"]): r["saved_s"] for r in rows}
    uses = uses_of(requests, options.block_tokens, costs)
    found = []
    for name, classes in track(CLASSES.items(), "bounds", console=console, transient=True):
        bound, learned = Bound(uses, classes), Learned(uses, classes)
        for ratio in options.host_ratio:
            for copies in (False, True)[: 1 + (ratio > 0)]:
                for device in options.device_blocks:
                    sizes = (device, (ratio - copies) * device)
                    row = {
                        "known": name,
                        "classes": bound.classes,
                        "host_ratio": ratio,
                        "host_holds_device": copies,
                        "device_blocks_capacity": device,
                        "bound_s": bound.saved(*sizes),
                        "learned_s": learned.saved(*sizes),
                    }
                    floor, best = (saved.get((policy, ratio, device)) for policy in ("lru", OPTIMUM))
                    for key in ("bound", "learned"):
                        gap = None if floor is None or best is None else share(row[f"{key}_s"], floor, best)
                        row[f"{key}_gap"] = gap
                    found.append(row)
    return found


def bound_tables(found: Sequence[dict[str, Any]], console: Console) -> None:
    """The bound's share of the gap between LRU and the optimum, and in brackets what can be learned of it."""
    cases = dict.fromkeys((row["host_ratio"], row["host_holds_device"]) for row in found)
    for ratio, copies in cases:
        title = (
            "device only" if ratio == 0 else f"host {ratio}x" + ", which holds all the device does" * copies
        )
        table = Table(title=f"bounds on the gap closed (learned), {title}", title_justify="left")
        chosen = [r for r in found if (r["host_ratio"], r["host_holds_device"]) == (ratio, copies)]
        table.add_column("known of a use")
        table.add_column("classes", justify="right")
        for device in dict.fromkeys(r["device_blocks_capacity"] for r in chosen):
            table.add_column(f"{device:,}", justify="right")
        for name in dict.fromkeys(r["known"] for r in chosen):
            mine = [r for r in chosen if r["known"] == name]
            cells = [
                "" if r["bound_gap"] is None else f"{r['bound_gap']:.2f} ({r['learned_gap']:.2f})"
                for r in mine
            ]
            table.add_row(name, str(mine[0]["classes"]), *cells)
        console.print(table)


def averages(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Mean over the capacities of the share of the gap between LRU and the optimum that each policy
    closes.
    """
    table = Table(
        title="gap between LRU and the optimum closed, mean over the capacities", title_justify="left"
    )
    ratios = list(dict.fromkeys(row["host_ratio"] for row in rows))
    table.add_column("policy")
    for ratio in ratios:
        table.add_column("device only" if ratio == 0 else f"host {ratio}x", justify="right")
    for name in dict.fromkeys(row["policy"] for row in rows if row["policy"] != OPTIMUM):
        cells = []
        for ratio in ratios:
            gaps = [
                r["gap_closed"]
                for r in rows
                if r["policy"] == name and r["host_ratio"] == ratio and r["gap_closed"] is not None
            ]
            cells.append(f"{100 * sum(gaps) / len(gaps):.0f} %" if gaps else "")
        table.add_row(name, *cells)
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    console = wide_console()
    try:
        if options.block_tokens < 1 or (options.limit is not None and options.limit < 1):
            raise TraceError("--block-tokens and --limit start at 1")
        if min(options.device_blocks) < 1:
            raise TraceError("--device-blocks start at 1")
        for path in (options.json, options.plot):
            if path is not None and not path.parent.is_dir():
                raise TraceError(f"{path.parent} is not a directory: cannot write {path.name}")
        requests = read_trace(options.trace, options.block_tokens, options.limit)
        costs = cost_model(options)
        console.print(
            f"{len(requests):,} requests, {sum(len(r.blocks) for r in requests):,} blocks, "
            f"{distinct(requests):,} distinct"
        )
        rows = sweep(requests, options, costs, console)
        tables(rows, console)
        if "lru" in options.policies:
            averages(rows, console)
        found = bounds(requests, options, costs, rows, console) if options.bound else []
        bound_tables(found, console)
        if options.json is not None:
            report = {
                "trace": options.trace.name,
                "requests": len(requests),
                "block_tokens": options.block_tokens,
                "waiting": options.waiting,
                "costs_s": {"token": costs.token, "depth": costs.depth, "load": costs.load},
                "rows": rows,
                "bounds": found,
            }
            options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if options.plot is not None:
            from benchmarks.trace_replay_plot import plot_rows

            plot_rows(options.plot, rows)
    except ImportError as error:
        print(f"trace_replay: --plot needs {error.name}: pip install 'hicache-ext[bench]'", file=sys.stderr)
        return 2
    except (TraceError, OSError, ValueError) as error:
        print(f"trace_replay: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("trace_replay: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
