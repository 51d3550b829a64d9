"""Plots of results of the multi-turn chat benchmark: TTFT and cached share by round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.multiturn_report import labels_of
from benchmarks.multiturn_stats import TIERS

TIER_COLORS = {"device": "#1b6ca8", "host": "#4fb0ae", "store": "#f2b134", "tier unknown": "#9a9a9a"}
RUN_COLORS = ("#c0392b", "#2c3e50")
RUN_HATCHES = ("", "///")


def _line(
    xs: Sequence[float], ys: Sequence[float | None], rounds: Sequence[dict[str, Any]]
) -> tuple[list[float], list[float]]:
    """The points of a line that breaks between passes and where a value is missing."""
    points: list[tuple[float, float]] = []
    last = None
    for x, y, s in zip(xs, ys, rounds, strict=True):
        if last not in (None, s["pass"]):
            points.append((x, math.nan))
        points.append((x, math.nan if y is None else y))
        last = s["pass"]
    return [x for x, _ in points], [y for _, y in points]


def plot_results(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """Writes an image (its type by the suffix of `path`) of one or two results.

    Raises ImportError without matplotlib, OSError or ValueError if the image cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    labels = labels_of(results)
    keys = sorted({(s["pass"], s["round"]) for result in results for s in result["summary"]["rounds"]})
    many = len({pass_ for pass_, _ in keys}) > 1
    width = min(24.0, max(10.0, 3.0 + 0.9 * len(keys)))
    figure, (left, right) = plt.subplots(1, 2, figsize=(width, 5.2), layout="constrained")
    bar = 0.8 / len(results)
    named: set[str] = set()

    for i, (result, label) in enumerate(zip(results, labels, strict=True)):
        rows = {(s["pass"], s["round"]): s for s in result["summary"]["rounds"]}
        at = [x for x, key in enumerate(keys) if key in rows]
        rounds = [rows[keys[x]] for x in at]
        for quantile, style, marker in (("p50", "-", "o"), ("p99", "--", "^")):
            left.plot(
                *_line(at, [s["ttft_s"] and s["ttft_s"][quantile] * 1e3 for s in rounds], rounds),
                style,
                marker=marker,
                color=RUN_COLORS[i % 2],
                label=f"{label}: {quantile}",
            )

        middle = [x - 0.4 + bar * (i + 0.5) for x in at]
        bottom = [0.0] * len(at)
        tiers_known = all(
            s["share"]["device"] is not None for s in rounds if s["share"]["cached"] is not None
        )
        for tier in TIERS if tiers_known else ("tier unknown",):
            name = tier if tiers_known else "cached"
            heights = [100 * (s["share"][name] or 0.0) for s in rounds]
            right.bar(
                middle,
                heights,
                bar * 0.94,
                bottom=bottom,
                color=TIER_COLORS[tier],
                hatch=RUN_HATCHES[i % 2],
                edgecolor="white",
                linewidth=0.4,
                label=None if tier in named else tier,
            )
            named.add(tier)
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
        right.plot(
            *_line(middle, [s["share"]["infinite"] and s["share"]["infinite"] * 100 for s in rounds], rounds),
            marker="_" if len(results) > 1 else "o",
            markersize=9 if len(results) > 1 else 4,
            linewidth=1.5,
            color=RUN_COLORS[i % 2],
            label=f"{label}: infinite cache" if len(results) > 1 else "infinite cache",
        )
        if len(results) > 1:
            right.bar(
                [0], [0], color="#dddddd", hatch=RUN_HATCHES[i % 2], edgecolor="white", label=f"bars: {label}"
            )

    ticks = [f"{pass_}.{round_}" if many else str(round_) for pass_, round_ in keys]
    for axes in (left, right):
        axes.set_xticks(range(len(keys)), ticks)
        axes.set_xlabel("pass.round" if many else "round")
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    left.set_ylabel("time to first token (ms)")
    left.set_ylim(bottom=0)
    left.set_title("Time to first token")
    left.legend(fontsize="small")
    right.set_ylabel("share of prompt tokens (%)")
    right.set_ylim(0, 102)
    right.set_title("Prompt tokens found in the cache")
    # Below the axes: bars may fill them to the top.
    right.legend(fontsize="small", ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.13))
    figure.suptitle(" and ".join(labels))
    figure.savefig(path, dpi=130)
    plt.close(figure)
