"""Results of the kernel benchmark, their table and plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

FORMAT = "hicache-ext/kernels/1"
COLORS = ("#1b6ca8", "#4fb0ae", "#f2b134", "#9a9a9a", "#c0392b", "#2c3e50", "#8e6bbf")


@dataclass(frozen=True)
class Result:
    """One case. Ratios are of pinned memcpy in the same direction; ``None``: not measured.

    ``busy_gbs`` is the bandwidth while a matrix product runs all the time, ``matmul`` how many times its time
    alone a matrix product takes while the copy runs all the time.
    """

    direction: str
    backend: str
    detail: str
    page_size: int
    dtype: str
    tokens: int
    scattered: bool
    gbs: float
    of_memcpy: float
    busy_gbs: float | None
    busy_of_memcpy: float | None
    matmul: float | None
    intact: bool


def table(results: Sequence[Result], facts: dict[str, Any]) -> Table:
    caption = ", ".join(f"{name} {value}" for name, value in facts.items())
    shown = Table(title="Copies between device KV and host pages", caption=caption)
    for name in ("direction", "page", "dtype", "tokens", "host pages", "backend", ""):
        shown.add_column(name, justify="right" if name in ("page", "tokens") else "left")
    for name in ("GB/s", "of\nmemcpy", "GB/s beside\na matmul", "of\nmemcpy", "matmul\ntakes x"):
        shown.add_column(name, justify="right")
    last = None
    for r in results:
        group = (r.direction, r.page_size, r.dtype, r.tokens)
        if last is not None and group != last:
            shown.add_section()
        last = group
        shown.add_row(
            r.direction,
            str(r.page_size) if r.page_size else "-",
            r.dtype,
            f"{r.tokens:,}",
            "scattered" if r.scattered else "in a row",
            r.backend,
            r.detail if r.intact else f"{r.detail} WRONG BYTES",
            _digits(r.gbs, 1),
            _digits(r.of_memcpy, 3),
            _digits(r.busy_gbs, 1),
            _digits(r.busy_of_memcpy, 3),
            _digits(r.matmul, 2),
        )
    return shown


def plot(path: Path, results: Sequence[Result]) -> None:
    """Writes an image, its type by the suffix of ``path``: bandwidth above, the matrix product below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    directions = [d for d in ("d2h", "h2d") if any(r.direction == d for r in results)] or ["d2h"]
    figure, axes = plt.subplots(
        2, len(directions), figsize=(7.5 * len(directions), 8), squeeze=False, layout="constrained"
    )
    labels = list(dict.fromkeys(_label(r) for r in results if r.backend != "memcpy"))
    for column, direction in enumerate(directions):
        mine = [r for r in results if r.direction == direction and r.backend != "memcpy"]
        keys = list(dict.fromkeys((r.page_size, r.dtype, r.tokens) for r in mine))
        here = [label for label in labels if any(_label(r) == label for r in mine)]
        width = 0.8 / max(len(here), 1)
        upper, lower = axes[0][column], axes[1][column]
        for i, label in enumerate(here):
            rows = [r for r in mine if _label(r) == label]
            xs = [keys.index((r.page_size, r.dtype, r.tokens)) + (i - len(here) / 2) * width for r in rows]
            style = {"align": "edge", "color": COLORS[labels.index(label) % len(COLORS)]}
            upper.bar(xs, [r.of_memcpy for r in rows], width * 0.9, **style)
            busy = [(x, r) for x, r in zip(xs, rows, strict=True) if r.matmul is not None]
            shares = [r.busy_of_memcpy for _, r in busy]
            upper.hlines(shares, [x for x, _ in busy], [x + width * 0.9 for x, _ in busy], colors="black")
            lower.bar([x for x, _ in busy], [r.matmul for _, r in busy], width * 0.9, **style)
        for axis in (upper, lower):
            axis.set_xticks(range(len(keys)), [f"page {p}\n{d}\n{t:,} tokens" for p, d, t in keys])
            axis.axhline(1, color="gray", linewidth=0.8)
        upper.set_title("device to host" if direction == "d2h" else "host to device")
        upper.set_ylabel("share of pinned memcpy (line: beside a matmul)")
        lower.set_ylim(bottom=0.9)
        lower.set_ylabel("matmul takes x of its time alone")
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLORS[i % len(COLORS)]) for i in range(len(labels))]
    if labels:
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _label(r: Result) -> str:
    said = [] if r.backend == "staged" else [r.detail] * bool(r.detail)
    said += ["scattered"] * r.scattered
    return f"{r.backend} ({', '.join(said)})" if said else r.backend


def _digits(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
