"""Tables, result files and comparisons of the multi-turn chat benchmark."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.multiturn_stats import TIERS, Record, equal_answers

FORMAT = "hicache-ext/multiturn/1"
# Arguments that may differ between two runs of the same workload.
FREE_ARGS = frozenset({"base_url", "label", "output", "plot", "save_texts", "timeout"})

Summary = dict[str, Any]


class ResultError(Exception):
    """A result file cannot be used; the message is one line."""


def _ms(summary: Summary, name: str, key: str) -> str:
    values = summary[name]
    return "-" if values is None else f"{values[key] * 1e3:,.1f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.1f}%"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def latency_table(summaries: dict[str, list[Summary]]) -> Table:
    """Requests, latencies and throughput by round."""
    table = Table(title="Latency and throughput")
    table.add_column("round")
    for name in (
        "requests",
        "failed",
        "TTFT\nmean ms",
        "p50",
        "p90",
        "p99",
        "inter-token\nmean ms",
        "p99",
        "prompt\ntok/s",
        "output\ntok/s",
    ):
        table.add_column(name, justify="right")

    def add(s: Summary) -> None:
        table.add_row(
            s["label"],
            str(s["requests"]),
            str(s["failed"]),
            *(_ms(s, "ttft_s", key) for key in ("mean", "p50", "p90", "p99")),
            *(_ms(s, "itl_s", key) for key in ("mean", "p99")),
            _number(s["prompt_tokens_per_s"]),
            _number(s["output_tokens_per_s"]),
        )

    _add_all(table, summaries, add)
    return table


def cache_table(summaries: dict[str, list[Summary]]) -> Table:
    """Where the prompt tokens came from, by round."""
    table = Table(title="Prompt tokens found in the cache")
    table.add_column("round")
    for name in ("prompt\ntokens", *TIERS, "cached", "infinite\ncache", "of\ninfinite"):
        table.add_column(name, justify="right")

    def add(s: Summary) -> None:
        names = (*TIERS, "cached", "infinite", "of_infinite")
        table.add_row(s["label"], f"{s['prompt_tokens']:,}", *(_percent(s["share"][name]) for name in names))

    _add_all(table, summaries, add)
    return table


def _add_all(table: Table, summaries: dict[str, list[Summary]], add: Any) -> None:
    for summary in summaries["rounds"]:
        add(summary)
    table.add_section()
    for summary in summaries["totals"]:
        add(summary)


def print_report(console: Console, result: dict[str, Any]) -> None:
    """Prints the tables of a result and what a reader has to know about them."""
    summaries = result["summary"]
    if result["records"]:
        console.print(latency_table(summaries))
        console.print(cache_table(summaries))
    counts = result["counts"]
    line = f"{counts['done']} of {counts['planned']} requests answered in {result['seconds']:.1f} s"
    if counts["failed"]:
        line += f", {counts['failed']} failed"
    if counts["skipped"]:
        line += f", {counts['skipped']} not sent because an earlier round of the session failed"
    if result["interrupted"]:
        line += " (interrupted)"
    console.print(line)
    main = next(s for s in summaries["totals"] if s["label"] == "rounds >= 2")
    share = main["share"]
    console.print(
        f"cached share of rounds >= 2: {_percent(share['cached'])} of the prompt tokens, "
        f"{_percent(share['of_infinite'])} of what an infinite cache would have hit",
        highlight=False,
    )
    repeated = result["equal_to_first_pass"]
    if repeated is not None:
        console.print(
            f"answers equal to those of pass 1: {repeated[0]} of {repeated[1]} with the same prompt"
        )
    for note in result["notes"]:
        console.print(f"note: {escape(note)}")
    failures: dict[str, int] = {}
    for record in result["records"]:
        if record["error"] is not None:
            failures[record["error"]] = failures.get(record["error"], 0) + 1
    for error, count in sorted(failures.items(), key=lambda item: -item[1])[:5]:
        console.print(f"failed {count} times: {escape(error)}")


def record_to_json(record: Record) -> dict[str, Any]:
    """A record as in the result file: `pass` and `round` without underscore, times to the microsecond."""
    out: dict[str, Any] = {}
    for name, value in dataclasses.asdict(record).items():
        if name == "gaps_s":
            value = [round(gap, 6) for gap in value]
        elif name.endswith("_s") and value is not None:
            value = round(value, 6)
        if name != "answer" or value is not None:
            out[name.rstrip("_")] = value
    return out


def record_from_json(data: dict[str, Any]) -> Record:
    """Inverse of `record_to_json`. Raises TypeError if fields are missing or unknown."""
    return Record(
        **{f"{name}_" if name in ("pass", "round") else name: value for name, value in data.items()}
    )


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Writes a result file; an older file of that name stays whole until the new one is complete."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(path)


def load_result(path: Path) -> dict[str, Any]:
    """Reads a result file. Raises ResultError."""
    try:
        result = json.loads(path.read_text())
    except OSError as error:
        raise ResultError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ResultError(f"{path} is not JSON: {error}") from None
    if not isinstance(result, dict) or result.get("format") != FORMAT:
        raise ResultError(f"{path} is not a result of this benchmark (format {FORMAT})")
    try:
        for summary in [*result["summary"]["rounds"], *result["summary"]["totals"]]:
            _metrics(summary)
        [record_from_json(record) for record in result["records"]]
        dict(result["arguments"])
        str(result["label"])
    except (KeyError, TypeError, ValueError) as error:
        raise ResultError(f"{path} is damaged: {type(error).__name__}: {error}") from None
    return result


def _metrics(s: Summary) -> list[tuple[str, float | None, str]]:
    """(name, value, kind) of the compared figures; kind is ms, rate or share."""
    ttft, itl, share = s["ttft_s"] or {}, s["itl_s"] or {}, s["share"]
    return [
        ("TTFT mean, ms", ttft.get("mean"), "ms"),
        ("TTFT p50, ms", ttft.get("p50"), "ms"),
        ("TTFT p90, ms", ttft.get("p90"), "ms"),
        ("TTFT p99, ms", ttft.get("p99"), "ms"),
        ("inter-token mean, ms", itl.get("mean"), "ms"),
        ("inter-token p99, ms", itl.get("p99"), "ms"),
        ("prompt tok/s", s["prompt_tokens_per_s"], "rate"),
        ("output tok/s", s["output_tokens_per_s"], "rate"),
        ("cached: device", share["device"], "share"),
        ("cached: host", share["host"], "share"),
        ("cached: store", share["store"], "share"),
        ("cached", share["cached"], "share"),
        ("infinite cache", share["infinite"], "share"),
        ("cached of infinite", share["of_infinite"], "share"),
    ]


def _show(value: float | None, kind: str) -> str:
    if value is None:
        return "-"
    return {"ms": f"{value * 1e3:,.1f}", "rate": _number(value), "share": _percent(value)}[kind]


def _ratio(a: float | None, b: float | None) -> str:
    return "-" if b is None or not a else f"{b / a:.2f}"


def labels_of(results: Sequence[dict[str, Any]]) -> list[str]:
    """Labels of results, numbered if they are equal."""
    labels = [str(result["label"]) for result in results]
    if len(set(labels)) < len(labels):
        return [f"{label} ({i})" for i, label in enumerate(labels, 1)]
    return labels


def compare_tables(a: dict[str, Any], b: dict[str, Any]) -> list[Table]:
    """Totals, and TTFT and cached share by round, of two results side by side with the ratio b / a."""
    name_a, name_b = (escape(label) for label in labels_of([a, b]))
    tables = []
    totals_b = {s["label"]: s for s in b["summary"]["totals"]}
    for s in a["summary"]["totals"]:
        if s["label"] not in totals_b:
            continue
        table = Table("", title=s["label"])
        for name in (name_a, name_b, "ratio"):
            table.add_column(name, justify="right")
        for (metric, x, kind), (_, y, _) in zip(_metrics(s), _metrics(totals_b[s["label"]]), strict=True):
            table.add_row(metric, _show(x, kind), _show(y, kind), _ratio(x, y))
        for metric, x, y in (
            ("requests", s["requests"], totals_b[s["label"]]["requests"]),
            ("failed", s["failed"], totals_b[s["label"]]["failed"]),
        ):
            table.add_row(metric, str(x), str(y), _ratio(x, y))
        tables.append(table)

    table = Table("round", title="By round")
    for what in ("TTFT p50, ms", "cached"):
        for name in (name_a, name_b, "ratio"):
            table.add_column(f"{what}\n{name}", justify="right")
    rounds_b = {(s["pass"], s["round"]): s for s in b["summary"]["rounds"]}
    for s in a["summary"]["rounds"]:
        other = rounds_b.get((s["pass"], s["round"]))
        if other is None:
            continue
        x, y = ((t["ttft_s"] or {}).get("p50") for t in (s, other))
        u, v = s["share"]["cached"], other["share"]["cached"]
        cells = (_show(x, "ms"), _show(y, "ms"), _ratio(x, y), _percent(u), _percent(v), _ratio(u, v))
        table.add_row(s["label"], *cells)
    tables.append(table)
    return tables


def print_comparison(console: Console, a: dict[str, Any], b: dict[str, Any]) -> None:
    """Prints two results side by side, and in what their workloads differ."""
    for table in compare_tables(a, b):
        console.print(table)
    runs = [[record_from_json(record) for record in result["records"]] for result in (a, b)]
    equal, asked = equal_answers(runs[0], runs[1])
    console.print(f"equal answers: {equal} of {asked} turns that had the same prompt in both runs")
    args_a, args_b = a["arguments"], b["arguments"]
    for name in sorted((args_a.keys() | args_b.keys()) - FREE_ARGS):
        if args_a.get(name) != args_b.get(name):
            console.print(
                f"note: the runs differ in --{name.replace('_', '-')}: "
                f"{escape(str(args_a.get(name)))} and {escape(str(args_b.get(name)))}"
            )
