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
from hicache_ext.core.planner import Honesty
from hicache_ext.remote.stats import RemoteStats, StoreState
from hicache_ext.stores.base import StoreStats
from tests.core.fakes import PrefixScope, SharedStore, make_rig, node_at, prompt, put, settle, to_host

def show(title):
    registry = REGISTRY
    if MULTI:
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
    print("==", title)
    print(generate_latest(registry).decode())

rig = make_rig(device_pages=8, host_pages=16, shared=SharedStore() if STORES else None)
stats, honesty = RemoteStats(), Honesty()
one = StoreStats(opened=3, held=2)
stores = SimpleNamespace(
    engine=SimpleNamespace(
        stats=lambda: stats, store_states=lambda: [StoreState("disk /x", "closed", True, one)]
    ),
    planner=SimpleNamespace(honesty=lambda: honesty),
)
faults = SimpleNamespace(plan=parse_plan("tier=host,rate=1,kinds=flip+forge"), injected=Counter(), met=0)
engine = SimpleNamespace(counts=Counts(), faults=faults if FAULTS else None)
counts, recompute = engine.counts, Recompute()
labels, shown = {"model_name": "m", "tp_rank": 0}, stores if STORES else None
metrics = Metrics(rig.cache, engine, recompute, labels, INTERVAL, shown)
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
rig.cache.stats.load_slower = 3
counts.bytes_to_host, counts.bytes_to_device, counts.failed_backups = 1000, 500, 3
counts.refused[Reason.CHECKSUM], counts.seal_seconds, counts.verify_seconds = 4, 0.2, 0.3
recompute.count, rig.cache.epoch, rig.cache.era = 5, 6, 9
faults.injected[FaultKind.FLIP], faults.met = 7, 8
metrics.tick_seconds = 0.25
if STORES:
    tier = rig.cache.remote.stats
    tier.fetched, tier.missed, tier.no_room, tier.stored = 11, 12, 13, 14
    tier.store_failed, tier.store_declined, tier.store_refused = 15, 16, 17
    stats.lookups, stats.lookups_skipped, stats.lookups_late = 10, 2, 3
    stats.refused[Reason.EPOCH], stats.bytes_read, stats.bytes_written = 18, 19, 20
    stats.read_seconds, stats.write_seconds, stats.verify_seconds = 1.5, 2.5, 3.5
    honesty.declined, honesty.distrusted, honesty.whole = 21, 22, 23
    honesty.late, honesty.abandoned, honesty.trials = 24, 25, 26
    honesty.estimated_seconds, honesty.actual_seconds = 4.5, 5.5
    honesty.saved_seconds, honesty.lost_seconds = 6.5, 7.5
metrics.publish()
show("middle")
rig.cache.stats.hit_host = 20
if STORES:
    rig.cache.remote.detach()
counts.bytes_to_device = 700
counts.refused[Reason.EPOCH] = 1
metrics.publish()
metrics.publish()
show("end")
"""


def run(
    tmp_path: Path, *, multi: bool, interval: float = 1e-9, faults: bool = False, stores: bool = False
) -> dict[str, dict[str, float]]:
    """Samples of our metrics by name and labels, for each moment the program shows."""
    program = PROGRAM.replace("ROOT", repr(str(ROOT))).replace("MULTI", str(multi))
    program = program.replace("FAULTS", str(faults)).replace("STORES", str(stores))
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
    "hit_tokens_total store": 0,
    "computed_tokens_total": 16,
    "moved_bytes_total device_to_host": 1000,
    "moved_bytes_total host_to_device": 500,
    "evicted_tokens_total device": 12,
    "evicted_tokens_total host": 4,
    "lost_tokens_total": 0,
    "declined_tokens_total device_to_host": 1,
    "declined_tokens_total host_to_device": 2,
    "slower_tokens_total": 3,
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
    "era": 9,
}
FAULTS = {
    **{f"injected_faults_total {kind} host": 0 for kind in FaultKind},
    "injected_faults_total flip host": 7,
    "met_faults_total": 8,
}
STORES = {
    "hit_tokens_total store": 0,
    "fetched_tokens_total": 11,
    "missed_tokens_total late": 12,
    "missed_tokens_total no_room": 13,
    "stored_tokens_total": 14,
    "unstored_tokens_total failed": 15,
    "unstored_tokens_total evicted_first": 16,
    "unstored_tokens_total policy": 17,
    **{f"store_refused_pages_total {reason}": 0 for reason in Reason},
    "store_refused_pages_total epoch": 18,
    "store_lookups_total skipped": 2,
    "store_lookups_total late": 3,
    "store_lookups_total answered": 5,
    "store_bytes_total read": 19,
    "store_bytes_total written": 20,
    "store_seconds_total read": 1.5,
    "store_seconds_total write": 2.5,
    "store_seconds_total verify": 3.5,
    "stores_attached": 1,
    "store_up disk /x": 1,
    "store_outages_total disk /x": 3,
    "store_held_rows disk /x": 2,
    "plans_total declined": 21,
    "plans_total distrusted": 22,
    "plans_total whole": 23,
    "plans_total late": 24,
    "plans_total abandoned": 25,
    "plans_total trials": 26,
    "plan_seconds_total estimated": 4.5,
    "plan_seconds_total actual": 5.5,
    "plan_seconds_total saved": 6.5,
    "plan_seconds_total lost": 7.5,
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


def test_stores_are_told_where_there_are_any(tmp_path: Path) -> None:
    shown = run(tmp_path, multi=True, stores=True)
    assert {n: shown["middle"][n] for n in STORES} == STORES
    assert shown["end"]["stores_attached"] == 0 and shown["end"]["store_up disk /x"] == 1
    assert set(shown["start"]) == {*COUNTERS, *GAUGES, *STORES, "ticks_total"}
