"""Multi-turn load on several servers, one after the other: what a host tier gains, and what is left to gain.

    small    a small KV pool and no host tier
    hicache  the same with SGLang's own hierarchical cache
    ext      the same with hicache-ext
    large    a KV pool that holds everything: the limit, as if GPU memory were infinite

Without --model-path the servers run random weights of a known shape, which need no download. Needs a GPU for
`hicache`; the others run on a CPU too, with small settings.

    python -m benchmarks.four_way --output four-way.json --plot four-way.png
    python -m benchmarks.four_way --show four-way.json
    python -m benchmarks.four_way --shape tiny --servers small ext large --pool 4096 --large-pool 40000 \\
        --host-gb 0.2 --sessions 8 --first 400 --turn 100

Exit code: 0 if every request was answered, 1 if any failed, 2 if a server did not start, 130 if interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shlex
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.multiturn_client import ServerError
from benchmarks.multiturn_stats import Record, equal_answers, equal_to_first_pass, summarize
from benchmarks.request_time import request_time
from benchmarks.server import ServerFailed, serve
from benchmarks.token_load import Load, check_exactness, run_load
from hicache_ext.core.model_kv import from_config, read_config

SHAPES: dict[str, dict[str, int]] = {
    # 2 KiB of KV a token in bf16
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    # Llama-3-8B: 128 KiB of KV a token in bf16
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
VOCABULARY = 32000
FORMAT = "hicache-ext/four-way/1"
SERVERS = ("small", "hicache", "ext", "large")
TITLES = {
    "small": "small pool",
    "hicache": "small pool + SGLang's HiCache",
    "ext": "small pool + hicache-ext",
    "large": "large pool",
}


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    load = Load()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.four_way", description=__doc__, formatter_class=_Help
    )
    group = parser.add_argument_group("servers")
    group.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS), help="which, in order")
    group.add_argument("--shape", choices=sorted(SHAPES), default="8b", help="shape of the random weights")
    group.add_argument("--model-path", type=Path, metavar="DIR", help="a model in place of random weights")
    group.add_argument("--pool", type=int, default=65536, metavar="TOKENS", help="small KV pool")
    group.add_argument("--large-pool", type=int, default=600_000, metavar="TOKENS", help="large KV pool")
    group.add_argument("--host-gb", type=float, default=32, metavar="GB", help="host tier, 10^9 bytes")
    group.add_argument("--page-size", type=int, default=64, metavar="TOKENS", help="of every server")
    group.add_argument("--flags", default="", metavar="'FLAGS'", help="more flags for every server")
    group.add_argument(
        "--hicache-flags",
        default="--hicache-io-backend kernel --hicache-mem-layout layer_first",
        metavar="'FLAGS'",
        help="more flags for SGLang's hierarchical cache",
    )
    group.add_argument("--ext-flags", default="", metavar="'FLAGS'", help="more flags for hicache-ext")
    group = parser.add_argument_group("load")
    for name, text in (
        ("sessions", "conversations"),
        ("rounds", "rounds of each"),
        ("first", "tokens of the first round"),
        ("turn", "new tokens of each further round"),
        ("output", "generated tokens of each round"),
        ("concurrency", "requests in flight"),
        ("passes", "how often everything is asked"),
        ("seed", "of the prompts and the weights"),
    ):
        dest = "output_tokens" if name == "output" else name
        flag = "--output-tokens" if name == "output" else f"--{name}"
        group.add_argument(flag, dest=dest, type=int, default=getattr(load, name), metavar="N", help=text)
    group.add_argument("--timeout", type=float, default=load.timeout, metavar="S", help="of one request")
    group.add_argument(
        "--exactness",
        action="store_true",
        help="also compare answers on device hits with those on host hits, and on store hits if --ext-flags "
        "name a store, bit by bit (hicache-ext)",
    )
    group = parser.add_argument_group("results")
    group.add_argument("--output", type=Path, metavar="FILE", help="write all figures as JSON")
    group.add_argument("--plot", type=Path, metavar="FILE", help="draw the table")
    group.add_argument(
        "--show", type=Path, metavar="FILE", help="start no server; print and draw what --output wrote before"
    )
    group.add_argument("--logs", type=Path, metavar="DIR", help="keep the servers' logs there")
    return parser


def random_model(folder: Path, shape: str) -> list[str]:
    """Write the configuration of a model with random weights; returns the flags that serve it."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        **SHAPES[shape],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return ["--load-format", "dummy"]


def server_flags(name: str, options: argparse.Namespace) -> list[str]:
    """What starts one of the four, beside model and address."""
    pool = options.large_pool if name == "large" else options.pool
    flags = ["--page-size", str(options.page_size), "--max-total-tokens", str(pool)]
    flags += ["--skip-tokenizer-init", "--grammar-backend", "none", "--sampling-backend", "pytorch"]
    flags += shlex.split(options.flags)
    if name == "hicache":
        flags += ["--enable-hierarchical-cache", "--hicache-size", f"{options.host_gb:g}"]
        flags += shlex.split(options.hicache_flags)
    if name == "ext":
        flags += ["--enable-hicache-ext", "--hicache-ext-host-gb", f"{options.host_gb:g}"]
        flags += shlex.split(options.ext_flags)
    return flags


def measure(
    name: str, model: Path, options: argparse.Namespace, load: Load, logs: Path, console: Console
) -> dict[str, Any]:
    """Start one server, run the load, stop the server.

    Raises:
        ServerFailed: it did not start.
    """
    flags = [*options.model_flags, *server_flags(name, options)]
    console.print(f"{name}: {shlex.join(flags)}", markup=False, soft_wrap=True)
    log = logs / f"{name}.log"
    with (
        Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        ) as progress,
    ):
        task = progress.add_task(f"{name}: starting", total=load.requests)
        with serve(model, flags, log) as url:
            # Kernels for the lengths of the load are compiled before it is timed.
            progress.update(task, description=f"{name}: warming up")
            warm = replace(load, sessions=load.concurrency, passes=1, rounds=2, seed=load.seed + 1)
            failed = [r for r in asyncio.run(run_load(url, warm, lambda _: None)) if not r.ok]
            if failed:
                raise ServerFailed(f"{name}: warm-up failed: {failed[0].error}; the log is {log}")
            _flush(url)
            progress.update(task, description=name)
            records = asyncio.run(run_load(url, load, lambda _: progress.advance(task)))
            exactness = None
            metrics = _metrics(url) if name == "ext" else {}
            if name == "ext" and options.exactness:
                progress.update(task, description=f"{name}: exactness")
                # A full host may rather keep what it has.
                _flush(url)
                found = asyncio.run(check_exactness(url, load, tiers_above(options, model)))
                exactness = {tier: asdict(one) for tier, one in found.items()}
    return {
        "name": name,
        "flags": flags,
        "passes": [summary(records, number) for number in range(1, load.passes + 1)],
        "equal_to_first_pass": equal_to_first_pass(records),
        "exactness": exactness,
        "metrics": metrics,
        "records": records,
    }


def tiers_above(options: argparse.Namespace, model: Path) -> dict[str, int]:
    """Tokens that all tiers above the host, and above a store if there is one, hold together."""
    above = {"host": options.pool}
    if "--hicache-ext-remote" in options.ext_flags:
        token_bytes = from_config(read_config(model)).token_bytes
        above["store"] = options.pool + int(options.host_gb * 1e9 / token_bytes)
    return above


def _flush(url: str) -> None:
    request = urllib.request.Request(f"{url}/flush_cache", method="POST")
    with urllib.request.urlopen(request, timeout=30):
        pass


def _metrics(url: str) -> dict[str, float]:
    """The extension's metrics, summed over their labels but the tier; empty without --enable-metrics."""
    found: dict[str, float] = {}
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
    except OSError:
        return found
    for line in text.splitlines():
        if line.startswith("hicache_ext_") and "_created" not in line:
            name, _, value = line.rpartition(" ")
            labels = re.findall(r'(?:tier|direction|reason)="([^"]*)"', name)
            key = " ".join([name.partition("{")[0], *labels])
            found[key] = found.get(key, 0.0) + float(value)
    return found


def summary(records: Sequence[Record], number: int) -> dict[str, Any]:
    """The figures of one pass; TTFT and shares are those of rounds from 2."""
    mine = [r for r in records if r.pass_ == number]
    whole = summarize(f"pass {number}", mine)
    later = summarize(f"pass {number}, rounds from 2", [r for r in mine if r.round_ >= 2])
    ttft = later["ttft_s"] or {"mean": None, "p50": None, "p99": None}
    return {
        "requests": whole["requests"],
        "failed": whole["failed"],
        "seconds": whole["busy_s"],
        "prompt_tokens_per_s": whole["prompt_tokens_per_s"],
        "ttft_mean_s": ttft["mean"],
        "ttft_p50_s": ttft["p50"],
        "ttft_p99_s": ttft["p99"],
        "itl_mean_s": (later["itl_s"] or {"mean": None})["mean"],
        "cached_share": later["share"]["cached"],
        "device_share": later["share"]["device"],
        "host_share": later["share"]["host"],
    }


def table(results: Sequence[dict[str, Any]]) -> Table:
    """Both passes of every server, and ratios to the large pool where it ran."""
    limit = next((r for r in results if r["name"] == "large"), None)
    out = Table(title="prompt tokens/s of all rounds; TTFT and cached share of rounds from 2")
    out.add_column("server")
    for name in (
        "pass",
        "prompt\ntok/s",
        "x large",
        "TTFT\nmean ms",
        "x large",
        "p99 ms",
        "cached %",
        "host %",
    ):
        out.add_column(name, justify="right")
    for result in results:
        for i, one in enumerate(result["passes"]):
            best = limit["passes"][i] if limit else None
            out.add_row(
                TITLES[result["name"]] if i == 0 else "",
                str(i + 1),
                _show(one["prompt_tokens_per_s"], 1, ",.0f"),
                _ratio(one, best, "prompt_tokens_per_s"),
                _show(one["ttft_mean_s"], 1e3, ",.0f"),
                _ratio(one, best, "ttft_mean_s"),
                _show(one["ttft_p99_s"], 1e3, ",.0f"),
                _show(one["cached_share"], 100, ".1f"),
                _show(one["host_share"], 100, ".1f"),
            )
    return out


def time_table(results: Sequence[dict[str, Any]]) -> Table:
    """Where the time of a request goes, of all rounds; the columns add up to the last one."""
    out = Table(title="where a request's time goes, ms (all rounds)")
    for name in ("server", "pass", "TTFT", "steps", "of", "interruptions", "of", "in all"):
        out.add_column(name, justify="left" if name == "server" else "right")
    for result in results:
        for i in range(len(result["passes"])):
            found = request_time([r for r in result["records"] if r.pass_ == i + 1])
            if found is not None:
                out.add_row(
                    TITLES[result["name"]] if i == 0 else "",
                    str(i + 1),
                    f"{found.ttft_s * 1e3:.0f}",
                    f"{found.steps:.1f}",
                    f"{found.step_s * 1e3:.2f}",
                    f"{found.interruptions:.2f}",
                    f"{found.interruption_s * 1e3:.1f}",
                    f"{found.total_s * 1e3:.0f}",
                )
    return out


def _show(value: float | None, scale: float, spec: str) -> str:
    return "-" if value is None else format(value * scale, spec)


def _ratio(one: dict[str, Any], best: dict[str, Any] | None, key: str) -> str:
    if best is None or not best[key] or one[key] is None:
        return "-"
    return f"{one[key] / best[key]:.3f}"


def plot(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """Bars of throughput, TTFT and cached share."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = (
        ("prompt_tokens_per_s", 1e-3, "prompt tokens/s (thousands)"),
        ("ttft_mean_s", 1e3, "mean TTFT of rounds from 2 (ms)"),
        ("cached_share", 100, "cached share of rounds from 2 (%)"),
    )
    figure, axes = plt.subplots(1, len(panels), figsize=(13, 4.2), layout="constrained")
    passes = len(results[0]["passes"])
    width = 0.8 / passes
    for axis, (key, scale, title) in zip(axes, panels, strict=True):
        for number in range(passes):
            xs = [i - 0.4 + width * (number + 0.5) for i in range(len(results))]
            heights = [(r["passes"][number][key] or 0.0) * scale for r in results]
            bars = axis.bar(xs, heights, width * 0.92, label=f"pass {number + 1}")
            axis.bar_label(bars, fmt="%.3g", fontsize="x-small")
        axis.set_xticks(range(len(results)), [r["name"] for r in results])
        axis.set_title(title, fontsize="medium")
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
    axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def report(results: Sequence[dict[str, Any]], options: argparse.Namespace, console: Console) -> None:
    """Print the table and write the files."""
    console.print(table(results))
    console.print(time_table(results))
    base = results[-1]
    for result in results:
        equal, asked = result["equal_to_first_pass"] or (0, 0)
        line = f"{result['name']}: {equal} of {asked} answers of later passes equal those of the first"
        if result is not base:
            same, both = equal_answers(base["records"], result["records"])
            line += f"; {same} of {both} equal those of {base['name']} to the same prompts"
        console.print(line)
        if (exact := result["exactness"]) is not None:
            for tier, one in exact.items():
                console.print(
                    f"{result['name']}: device hit against {tier} hit, {one['prompts']} prompts: "
                    f"{one['equal_ids']} with equal tokens, {one['equal_logprobs']} with equal logprobs"
                )
    if options.plot is not None:
        plot(options.plot, results)


def write_json(
    path: Path, results: Sequence[dict[str, Any]], options: argparse.Namespace, load: Load
) -> None:
    document = {
        "format": FORMAT,
        "sglang": version("sglang"),
        "load": asdict(load),
        "host_gb": options.host_gb,
        "results": [r | {"records": [asdict(record) for record in r["records"]]} for r in results],
    }
    path.write_text(json.dumps(document))


def read_json(path: Path) -> list[dict[str, Any]]:
    """What ``write_json`` wrote.

    Raises:
        ValueError: it is not that; the message says why.
    """
    document = json.loads(path.read_text())
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"not a result of four_way ({FORMAT})")
    results = document["results"]
    return [r | {"records": [Record(**record) for record in r["records"]]} for r in results]


def main(argv: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    console = Console(stderr=False)
    if options.show is not None:
        try:
            results = read_json(options.show)
        except (OSError, ValueError) as error:
            console.print(f"four_way: {options.show}: {error}", markup=False, soft_wrap=True)
            return 2
        report(results, options, console)
        return 0
    names = {f: f for f in Load.__dataclass_fields__} | {"output": "output_tokens"}
    names.pop("vocabulary")
    load = Load(vocabulary=VOCABULARY, **{field: getattr(options, name) for field, name in names.items()})
    if load.longest > options.pool // 2:
        console.print(f"four_way: a session has up to {load.longest} tokens; --pool must be twice as large")
        return 2
    for path in (options.output, options.plot):
        if path is not None and not path.parent.is_dir():
            console.print(f"four_way: there is no folder {path.parent} for {path.name}")
            return 2
    results = []
    code = 0
    with tempfile.TemporaryDirectory() as scratch:
        model = options.model_path or Path(scratch)
        options.model_flags = [] if options.model_path else random_model(model, options.shape)
        logs = options.logs or Path(tempfile.mkdtemp(prefix="four-way-"))
        logs.mkdir(parents=True, exist_ok=True)
        try:
            for name in options.servers:
                try:
                    results.append(measure(name, model, options, load, logs, console))
                except (ServerFailed, ServerError) as error:
                    console.print(f"four_way: {name}: {error}", markup=False, soft_wrap=True)
                    code = 2
                if options.output is not None:
                    write_json(options.output, results, options, load)
        except KeyboardInterrupt:
            console.print("four_way: interrupted; what was measured follows")
            code = 130
    if results:
        report(results, options, console)
    if not code and any(one["failed"] for result in results for one in result["passes"]):
        code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
