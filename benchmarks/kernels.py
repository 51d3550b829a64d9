"""Speed of the copies between device KV and host pages, and what they take from a matrix product meanwhile.

Everything is measured in one run against a plain copy of pinned memory in the same direction: bytes are KV
bytes without headers, checksums are made and verified, pages lie at random places on the device.

    python -m benchmarks.kernels --json kernels.json --plot kernels.png
    python -m benchmarks.kernels --page-size 64 --backend triton --blocks 2 4 8 16

Exit code: 0 if every copy arrived, 1 if bytes were wrong, 2 if the benchmark could not run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.kernels_report import FORMAT, Result, plot, table

DIRECTIONS = ("d2h", "h2d")
BACKENDS = ("staged", "triton", "torch", "sglang")
DTYPES = ("bfloat16", "float16", "uint8", "float32")


def positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels",
        description="Bandwidth of the KV copies, against pinned memcpy in the same run, with and without a "
        "bf16 matrix product beside them. Needs a CUDA GPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    what = parser.add_argument_group("what is measured")
    what.add_argument("--direction", nargs="+", choices=DIRECTIONS, default=DIRECTIONS, help="ways to copy")
    what.add_argument(
        "--backend",
        nargs="+",
        choices=BACKENDS,
        default=BACKENDS,
        help="staged and triton: ours; torch: plain indexing; sglang: the kernels of SGLang, if installed",
    )
    what.add_argument("--page-size", nargs="+", type=positive, default=[1, 16, 64], help="tokens of a page")
    what.add_argument("--tokens", nargs="+", type=positive, default=[16384], help="tokens of one transfer")
    what.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bfloat16"], help="type of the KV")
    what.add_argument("--blocks", nargs="+", type=positive, help="blocks of the triton backend, not its own")
    what.add_argument("--scattered", action="store_true", help="host pages at random places, not in a row")

    shape = parser.add_argument_group("shape of the model (default: the 8B shape)")
    shape.add_argument("--layers", type=positive, default=32, help="layers")
    shape.add_argument("--kv-heads", type=positive, default=8, help="KV heads")
    shape.add_argument("--head-dim", type=positive, default=128, help="elements of a head")
    shape.add_argument("--groups", type=positive, help="head groups of a page (default: as served)")

    how = parser.add_argument_group("how")
    how.add_argument("--repeats", type=positive, default=3, help="runs of each case; the median counts")
    how.add_argument("--matmul", type=positive, default=8192, help="edge of the matrices beside the copies")
    how.add_argument("--no-matmul", action="store_true", help="do not measure with a matrix product")
    how.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    how.add_argument("--plot", type=Path, metavar="FILE", help="draw the results (png, svg or pdf)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(arguments)
    console = Console(stderr=True)
    for file in (args.json, args.plot):
        if file is not None and not file.absolute().parent.is_dir():
            return fail(console, f"{file.parent} is no folder; create it or name another")
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        return fail(console, "--plot needs matplotlib: pip install matplotlib")
    sizes = [(t, p) for t in args.tokens for p in args.page_size if t % p]
    if sizes:
        return fail(console, f"{sizes[0][0]} tokens are no whole pages of {sizes[0][1]}")
    try:
        import torch
        import triton  # noqa: F401
    except ImportError as error:
        return fail(console, f"torch and triton are needed: {error}")
    if not torch.cuda.is_available():
        return fail(console, "no CUDA GPU here; this benchmark measures one")

    from benchmarks.kernels_run import Bench, SetupError, Shape

    try:
        bench = Bench(Shape(args.layers, args.kv_heads, args.head_dim, args.groups), args)
        cases = list(bench.cases())
    except SetupError as error:
        return fail(console, str(error))
    results: list[Result] = []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    interrupted = False
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("copies", total=len(cases))
        try:
            for case in cases:
                progress.update(task, description=case.name)
                results.append(bench.run(case))
                progress.advance(task)
        except KeyboardInterrupt:
            interrupted = True
    out = Console(width=None if sys.stdout.isatty() else 150)
    out.print(table(results, bench.facts))
    if args.json is not None:
        report = {"format": FORMAT, "facts": bench.facts, "results": [asdict(r) for r in results]}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.plot is not None:
        plot(args.plot, results)
    if interrupted:
        return 130
    return 0 if all(r.intact for r in results) else 1


def fail(console: Console, message: str) -> int:
    console.print(f"error: {message}", style="red", markup=False, soft_wrap=True)
    return 2


if __name__ == "__main__":
    sys.exit(main())
