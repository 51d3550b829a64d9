"""What the integrity checks cost: the multi-turn chat load with each `--hicache-ext-integrity`, in one run.

The modes take turns, one server at a time, so that a machine whose speed drifts favours none of them.

    python -m benchmarks.integrity --model PATH --repeats 3 --json integrity.json --plot integrity.png
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.server import ServerFailed, serve

MODES = ("off", "sample", "full")


def main() -> int:
    arguments = _parser().parse_args()
    if not (arguments.model / "config.json").is_file():
        print(f"integrity: error: {arguments.model} is not a model folder", file=sys.stderr)
        return 2
    console = Console()
    runs: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as scratch:
        for repeat in range(arguments.repeats):
            # Every other turn goes backwards: a drift of the machine cancels.
            for mode in MODES if repeat % 2 == 0 else MODES[::-1]:
                console.print(f"repeat {repeat + 1} of {arguments.repeats}: {mode}")
                try:
                    runs[mode].append(measure(arguments, mode, Path(scratch)))
                except (ServerFailed, subprocess.CalledProcessError) as error:
                    print(f"integrity: error: {error}", file=sys.stderr)
                    return 1
    result = summarize(runs)
    console.print(table(result))
    if arguments.json:
        arguments.json.write_text(json.dumps({"runs": runs, "summary": result}, indent=2) + "\n")
    if arguments.plot:
        plot(runs, arguments.plot)
    return 0


def measure(arguments: argparse.Namespace, mode: str, scratch: Path) -> dict[str, float]:
    """One server, one load: prompt tokens a second, mean TTFT, and seconds spent on checks."""
    flags = ["--max-total-tokens", str(arguments.pool), "--enable-cache-report", "--enable-metrics"]
    flags += ["--enable-hicache-ext", "--hicache-ext-host-gb", str(arguments.host_gb)]
    flags += ["--hicache-ext-integrity", mode, *arguments.server_flag]
    output = scratch / "run.json"
    log = Path(tempfile.gettempdir()) / f"integrity-{mode}.log"
    with serve(arguments.model, flags, log) as url:
        load = [sys.executable, "-m", "benchmarks.multiturn", "--base-url", url, "--label", mode]
        load += ["--sessions", str(arguments.sessions), "--rounds", str(arguments.rounds)]
        load += ["--concurrency", str(arguments.concurrency), "--first-tokens", "500", "--turn-tokens", "100"]
        load += ["--output-tokens", "16", "--output", str(output)]
        subprocess.run(load, check=True, stdout=subprocess.DEVNULL)
        spent = _metric(url, "hicache_ext_integrity_seconds_total")
    totals = json.loads(output.read_text())["summary"]["totals"]
    summary = next(t for t in totals if t["label"] == "all")
    return {
        "prompt_tokens_per_s": summary["prompt_tokens_per_s"],
        "ttft_s": summary["ttft_s"]["mean"],
        "check_s": spent,
    }


def summarize(runs: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Means by mode; `throughput_ratio` is against `off`, repeat by repeat, with its standard error."""
    result = {}
    for mode, repeats in runs.items():
        ratios = [
            run["prompt_tokens_per_s"] / off["prompt_tokens_per_s"]
            for run, off in zip(repeats, runs["off"], strict=True)
        ]
        error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
        result[mode] = {
            **{key: statistics.fmean(run[key] for run in repeats) for key in repeats[0]},
            "throughput_ratio": statistics.fmean(ratios),
            "standard_error": error,
        }
    return result


def table(result: dict[str, dict[str, float]]) -> Table:
    shown = Table("integrity", "prompt tokens/s", "mean TTFT", "seconds of checks", "throughput against off")
    for mode, row in result.items():
        shown.add_row(
            mode,
            f"{row['prompt_tokens_per_s']:,.0f}",
            f"{row['ttft_s'] * 1000:,.0f} ms",
            f"{row['check_s']:.2f}",
            f"{row['throughput_ratio']:.3f} ± {row['standard_error']:.3f}",
        )
    return shown


def plot(runs: dict[str, list[dict[str, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 3.5), layout="constrained")
    for position, (_mode, repeats) in enumerate(runs.items()):
        axes.plot([position] * len(repeats), [run["prompt_tokens_per_s"] for run in repeats], "o")
    axes.set_xticks(range(len(runs)), list(runs))
    axes.set_ylabel("prompt tokens per second")
    axes.set_ylim(bottom=0)
    figure.savefig(path, dpi=120)


def _metric(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.integrity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add: Any = parser.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="model folder to serve")
    add("--repeats", type=int, default=3, metavar="N", help="times that every mode is measured (default 3)")
    add("--sessions", type=int, default=16, metavar="N", help="chat sessions (default 16)")
    add("--rounds", type=int, default=4, metavar="N", help="questions a session (default 4)")
    add("--concurrency", type=int, default=2, metavar="N", help="requests in flight (default 2)")
    add("--pool", type=int, default=4096, metavar="TOKENS", help="device KV pool (default 4096)")
    add("--host-gb", type=float, default=2.0, metavar="GB", help="host tier (default 2)")
    add(
        "--server-flag", action="append", default=[], metavar="FLAG", help="pass on to the server; repeatable"
    )
    add("--json", type=Path, metavar="FILE", help="write every run and the summary")
    add("--plot", type=Path, metavar="FILE", help="write a PNG")
    return parser


if __name__ == "__main__":
    sys.exit(main())
