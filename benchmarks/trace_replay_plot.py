"""Plots of a trace replay: token hit rate and prefill saved over capacity, a line per policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

STYLES = {
    "optimum": ("#2c3e50", "--"),
    "cost": ("#c0392b", "-"),
    "lru": ("#1b6ca8", "-"),
    "lfu": ("#f2b134", "-"),
    "slru": ("#3a9b57", ":"),
    "s3fifo": ("#7d5ba6", "-"),
    "tlru": ("#4fb0ae", ":"),
}


def plot_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes an image (its type by the suffix of `path`); a row of axes per host ratio.

    Raises ImportError without matplotlib, OSError or ValueError if the image cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullFormatter

    ratios = list(dict.fromkeys(row["host_ratio"] for row in rows))
    figure, axes = plt.subplots(
        len(ratios), 2, figsize=(11, 4.2 * len(ratios)), layout="constrained", squeeze=False
    )
    values = (("token_hit_rate", "prompt tokens hit, %"), ("saved_share", "prefill seconds saved, %"))
    for line, ratio in enumerate(ratios):
        for column, (key, label) in enumerate(values):
            ax = axes[line][column]
            for name in dict.fromkeys(row["policy"] for row in rows):
                points = sorted(
                    (row["device_blocks_capacity"], 100 * row[key])
                    for row in rows
                    if row["policy"] == name and row["host_ratio"] == ratio
                )
                color, style = STYLES.get(name, (None, "-"))
                ax.plot(*zip(*points, strict=True), style, marker="o", ms=4, color=color, label=name)
            ax.set_xscale("log")
            ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
            ax.xaxis.set_minor_formatter(NullFormatter())
            ax.set_xticks(sorted({row["device_blocks_capacity"] for row in rows}))
            ax.set_ylim(bottom=0)
            ax.set_xlabel("device capacity, blocks")
            ax.set_ylabel(label)
            ax.set_title("device only" if ratio == 0 else f"host {ratio} times the device")
            ax.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
