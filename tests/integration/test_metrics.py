"""Prometheus metrics: named, registered once, and advanced by what the cache did.

In processes of their own, because the client's registry is global and its multi-process mode, in which SGLang
runs it, is chosen when it is imported.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hicache_ext.transfer.choices import FaultKind

pytest.importorskip("torch")
pytest.importorskip("prometheus_client")

from hicache_ext.core.header import Reason

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys
from collections import Counter
from types import SimpleNamespace
sys.path.append(ROOT)
from hicache_ext.core.header import Reason
from hicache_ext.integration.metrics import Metrics
from hicache_ext.integration.recompute import Recompute
from hicache_ext.transfer.engine import Counts
from hicache_ext.transfer.choices import FaultKind, parse_plan
from prometheus_client import CollectorRegistry, REGISTRY, generate_latest, multiprocess
from tests.core.fakes import PrefixScope, make_rig, node_at, prompt, put, settle, to_host

def show(title):
    registry = REGISTRY
    if MULTI:
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
    print("==", title)
    print(generate_latest(registry).decode())

rig = make_rig(device_pages=8, host_pages=16)
faults = SimpleNamespace(plan=parse_plan("tier=host,rate=1,kinds=flip+forge"), injected=Counter(), met=0)
engine = SimpleNamespace(counts=Counts(), faults=faults if FAULTS else None)
counts, recompute = engine.counts, Recompute()
metrics = Metrics(rig.cache, engine, recompute, {"model_name": "m", "tp_rank": 0}, INTERVAL)
metrics.publish()
show("start")
to_host(rig, prompt(4, 1, 2, 3))
rig.cache.load(node_at(rig, prompt(4, 1, 2, 3)))
settle(rig)
put(rig, prompt(4, 9))
rig.cache.want("r", PrefixScope(), prompt(4, 9))
rig.cache.evict_host(1)
rig.cache.stats.hit_device, rig.cache.stats.hit_host = 8, 12
rig.cache.stats.backup_declined, rig.cache.stats.load_declined, rig.cache.stats.refused = 1, 2, 20
counts.bytes_to_host, counts.bytes_to_device, counts.failed_backups = 1000, 500, 3
counts.refused[Reason.CHECKSUM], counts.seal_seconds, counts.verify_seconds = 4, 0.2, 0.3
recompute.count, rig.cache.epoch = 5, 6
faults.injected[FaultKind.FLIP], faults.met = 7, 8
metrics.tick_seconds = 0.25
metrics.publish()
show("middle")
rig.cache.stats.hit_host = 20
counts.bytes_to_device = 700
counts.refused[Reason.EPOCH] = 1
metrics.publish()
metrics.publish()
show("end")
"""


def run(
    tmp_path: Path, *, multi: bool, interval: float = 1e-9, faults: bool = False
) -> dict[str, dict[str, float]]:
    """Samples of our metrics by name and labels, for each moment the program shows."""
    program = PROGRAM.replace("ROOT", repr(str(ROOT))).replace("MULTI", str(multi))
    program = program.replace("FAULTS", str(faults))
    environment = {k: v for k, v in os.environ.items() if k != "PROMETHEUS_MULTIPROC_DIR"}
    if multi:
        environment["PROMETHEUS_MULTIPROC_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-P", "-c", program.replace("INTERVAL", repr(interval))],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    shown: dict[str, dict[str, float]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("== "):
            samples = shown[line[3:]] = {}
        elif line.startswith("hicache_ext_") and "_created" not in line:
            name, value = line.rsplit(" ", 1)
            labels = dict(re.findall(r'(\w+)="([^"]*)"', name))
            assert labels.pop("model_name") == "m" and labels.pop("tp_rank") == "0", line
            assert "pid" not in labels, "one series a process: a restart would start a new one"
            short = name.split("{")[0].removeprefix("hicache_ext_")
            samples[" ".join([short, *labels.values()])] = float(value)
    return shown


COUNTERS = {
    "hit_tokens_total device": 8,
    "hit_tokens_total host": 12,
    "computed_tokens_total": 16,
    "moved_bytes_total device_to_host": 1000,
    "moved_bytes_total host_to_device": 500,
    "evicted_tokens_total device": 12,
    "evicted_tokens_total host": 4,
    "lost_tokens_total": 0,
    "declined_tokens_total device_to_host": 1,
    "declined_tokens_total host_to_device": 2,
    "failed_backup_tokens_total": 12,
    "refused_pages_total checksum": 4,
    **{f"refused_pages_total {reason}": 0 for reason in Reason if reason is not Reason.CHECKSUM},
    "integrity_seconds_total": 0.5,
    "refused_tokens_total": 20,
    "recomputed_requests_total": 5,
    "evict_waits_total": 0,
    "tick_seconds_total": 0.25,
}
GAUGES = {
    "pages device": 4,
    "pages host": 2,
    "page_limit host": 16,
    "open_tickets": 0,
    "waiting_requests": 1,
    "nodes": 3,
    "epoch": 6,
}
FAULTS = {
    **{f"injected_faults_total {kind} host": 0 for kind in FaultKind},
    "injected_faults_total flip host": 7,
    "met_faults_total": 8,
}


def test_metrics_follow_the_cache(tmp_path: Path) -> None:
    shown = run(tmp_path, multi=True)
    start, middle, end = shown["start"], shown["middle"], shown["end"]
    names = {*COUNTERS, *GAUGES, "ticks_total"}
    assert set(start) == set(middle) == set(end) == names, "a series that appears late cannot be rated"
    assert {n: v for n, v in start.items() if v} == {"page_limit host": 16}
    assert {n: middle[n] for n in COUNTERS} == COUNTERS
    assert {n: middle[n] for n in GAUGES} == GAUGES
    assert middle["ticks_total"] > 0
    changed = {n: (middle[n], end[n]) for n in names if middle[n] != end[n]}
    assert changed == {
        "hit_tokens_total host": (12, 20),
        "moved_bytes_total host_to_device": (500, 700),
        "refused_pages_total epoch": (0, 1),
    }, "a counter counts what is new once"


def test_metrics_are_not_updated_more_often_than_asked(tmp_path: Path) -> None:
    shown = run(tmp_path, multi=False, interval=3600.0)
    assert shown["start"] == shown["middle"] == shown["end"]


def test_injected_faults_are_told_where_there_are_any(tmp_path: Path) -> None:
    shown = run(tmp_path, multi=True, faults=True)
    assert {n: shown["middle"][n] for n in FAULTS} == FAULTS
    assert set(shown["start"]) == {*COUNTERS, *GAUGES, *FAULTS, "ticks_total"}
