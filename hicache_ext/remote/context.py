"""What all jobs of an engine work with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hicache_ext.remote.alarms import Alarms
from hicache_ext.remote.host_rows import HostRows
from hicache_ext.remote.planning import Planner
from hicache_ext.remote.recall import Recall
from hicache_ext.remote.settling import Settling
from hicache_ext.remote.stats import StatsBook
from hicache_ext.stores.stack import StackedStore
from hicache_ext.transfer.seal import Seal


@dataclass(frozen=True)
class Context:
    stack: StackedStore
    rows: HostRows
    seal: Seal
    planner: Planner
    stats: StatsBook
    alarms: Alarms
    settling: Settling
    recall: Recall
    in_use: Callable[[], tuple[tuple[int, int], ...]]
    """The stores in use now: each one's number, and how often it has been away."""

    def ready(self) -> bool:
        """Whether a store is in use now."""
        return bool(self.in_use())


REPLACE_S = 0.1
"""Seconds after its deadline that a job may still take before another thread takes its place."""
