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

pytest.importorskip("torch")
pytest.importorskip("prometheus_client")

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys
from types import SimpleNamespace
sys.path.append(ROOT)
from hicache_ext.integration.metrics import Metrics
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
engine = SimpleNamespace(bytes_to_host=0, bytes_to_device=0)
metrics = Metrics(rig.cache, engine, {"model_name": "m", "tp_rank": 0}, INTERVAL)
metrics.publish()
show("start")
to_host(rig, prompt(4, 1, 2, 3))
rig.cache.load(node_at(rig, prompt(4, 1, 2, 3)))
settle(rig)
put(rig, prompt(4, 9))
rig.cache.want("r", PrefixScope(), prompt(4, 9))
rig.cache.evict_host(1)
rig.cache.stats.hit_device, rig.cache.stats.hit_host = 8, 12
rig.cache.stats.backup_declined, rig.cache.stats.load_declined, rig.cache.stats.backup_failed = 1, 2, 3
engine.bytes_to_host, engine.bytes_to_device = 1000, 500
metrics.tick_seconds = 0.25
metrics.publish()
show("middle")
rig.cache.stats.hit_host = 20
engine.bytes_to_device = 700
metrics.publish()
metrics.publish()
show("end")
"""


def run(tmp_path: Path, *, multi: bool, interval: float = 1e-9) -> dict[str, dict[str, float]]:
    """Samples of our metrics by name and labels, for each moment the program shows."""
    program = PROGRAM.replace('rig.cache.want("r", (), prompt(4, 9)) if False else None\n', "")
    program = program.replace("ROOT", repr(str(ROOT))).replace("MULTI", str(multi))
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
    "failed_backup_tokens_total": 3,
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
    }, "a counter counts what is new once"


def test_metrics_are_not_updated_more_often_than_asked(tmp_path: Path) -> None:
    shown = run(tmp_path, multi=False, interval=3600.0)
    assert shown["start"] == shown["middle"] == shown["end"]
