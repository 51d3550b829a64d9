"""Prometheus metrics, served by SGLang's ``/metrics``."""

from __future__ import annotations

import time
from typing import Any

from hicache_ext.core.cache import TieredCache
from hicache_ext.core.header import Reason
from hicache_ext.core.remote_tier import TierStats
from hicache_ext.integration.recompute import Recompute
from hicache_ext.integration.speeds import Stores
from hicache_ext.transfer.choices import FaultKind
from hicache_ext.transfer.engine import Engine


class Metrics:
    """Publishes a cache's statistics, at most once per ``interval`` seconds.

    Create it in a scheduler process: SGLang has set Prometheus's multi-process directory by then.
    """

    def __init__(
        self,
        cache: TieredCache,
        engine: Engine,
        recompute: Recompute,
        labels: dict[str, Any],
        interval: float,
        stores: Stores | None = None,
    ) -> None:
        # Imported late, because the client reads the multi-process directory when it is imported.
        from prometheus_client import Counter, Gauge

        self._cache = cache
        self._engine = engine
        self._recompute = recompute
        self._stores = stores
        self._interval = interval
        self._next = 0.0
        self._labels = {k: str(v) for k, v in labels.items()}
        self._last: dict[tuple[str, str], float] = {}
        self.tick_seconds = 0.0
        names = list(self._labels)

        def counter(name: str, text: str, *extra: str) -> Counter:
            return Counter(f"hicache_ext_{name}", text, [*names, *extra])

        def gauge(name: str, text: str, *extra: str) -> Gauge:
            return Gauge(f"hicache_ext_{name}", text, [*names, *extra], multiprocess_mode="mostrecent")

        self._hits = counter("hit_tokens", "Prompt tokens reused, by the tier they came from.", "tier")
        self._computed = counter("computed_tokens", "Tokens whose KV was computed and cached.")
        self._bytes = counter("moved_bytes", "KV bytes copied between tiers.", "direction")
        self._evicted = counter("evicted_tokens", "Tokens evicted from a tier.", "tier")
        self._lost = counter("lost_tokens", "Tokens evicted from the device that were on no other tier.")
        self._declined = counter("declined_tokens", "Tokens not copied for lack of room.", "direction")
        self._slower = counter("slower_tokens", "Tokens on the host that were sooner computed than loaded.")
        self._failed = counter("failed_backup_tokens", "Tokens whose copy to the host failed.")
        self._refused = counter("refused_pages", "Pages that did not verify when they came back.", "reason")
        self._checks = counter("integrity_seconds", "Time of CPU threads spent on headers and checksums.")
        self._dropped = counter("refused_tokens", "Tokens removed because a page did not verify.")
        self._recomputed = counter("recomputed_requests", "Requests that started again for such a page.")
        self._era = gauge("era", "Weight changes and flushes since start.")
        self._epoch = gauge("epoch", "Flushes of the pages of these weights, by all who share a store.")
        if engine.faults is not None:
            self._injected = counter("injected_faults", "Pages damaged on purpose.", "tier", "kind")
            self._met = counter("met_faults", "Damaged pages that were loaded; each must be refused.")
        if stores is not None:
            self._fetched = counter("fetched_tokens", "Tokens that came from a store.")
            self._missed = counter("missed_tokens", "Tokens asked of a store that did not arrive.", "reason")
            self._stored = counter("stored_tokens", "Tokens written to a store, or found there.")
            self._unstored = counter("unstored_tokens", "Tokens not written to a store.", "reason")
            self._store_refused = counter(
                "store_refused_pages", "Pages from a store that did not verify.", "reason"
            )
            self._lookups = counter("store_lookups", "Prompts looked up in the stores.", "result")
            self._store_bytes = counter("store_bytes", "KV bytes moved to or from stores.", "direction")
            self._store_seconds = counter("store_seconds", "Time of threads in stores.", "work")
            self._attached = gauge("stores_attached", "Whether the stores are to be used.")
            self._store_up = gauge("store_up", "Whether a store works.", "store")
            self._store_opened = counter("store_outages", "Times a store was taken out of use.", "store")
            self._store_held = gauge("store_held_rows", "Rows that a late transfer may touch.", "store")
            self._plans = counter("plans", "Fetches that were planned, by what became of them.", "result")
            self._plan_seconds = counter("plan_seconds", "Seconds of fetches.", "kind")
        self._waits = counter("evict_waits", "Copies in flight that evictions have waited for.")
        self._ticks = counter("ticks", "Scheduler steps.")
        self._tick_seconds = counter("tick_seconds", "Time spent in ticks.")
        self._pages = gauge("pages", "Pages held by a tier.", "tier")
        self._page_limit = gauge("page_limit", "Pages a tier can hold.", "tier")
        self._tickets = gauge("open_tickets", "Transfers in flight.")
        self._waiting = gauge("waiting_requests", "Queued requests whose match is protected from eviction.")
        self._nodes = gauge("nodes", "Nodes of the radix tree.")

    def publish(self) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._interval
        cache, stats = self._cache, self._cache.stats
        page = cache.config.page_size
        tree = cache.tree
        self._count(self._hits, stats.hit_device, tier="device")
        self._count(self._hits, stats.hit_host, tier="host")
        self._count(self._hits, stats.hit_store, tier="store")
        self._count(self._computed, stats.computed)
        counts = self._engine.counts
        self._count(self._bytes, counts.bytes_to_host, direction="device_to_host")
        self._count(self._bytes, counts.bytes_to_device, direction="host_to_device")
        self._count(self._evicted, stats.evicted_device, tier="device")
        self._count(self._evicted, stats.evicted_host, tier="host")
        self._count(self._lost, stats.evicted_lost)
        self._count(self._declined, stats.backup_declined + stats.backup_refused, direction="device_to_host")
        self._count(self._declined, stats.load_declined, direction="host_to_device")
        self._count(self._slower, stats.load_slower)
        self._count(self._failed, counts.failed_backups * page)
        for reason in Reason:
            self._count(self._refused, counts.refused[reason], reason=reason.value)
        self._count(self._checks, counts.seal_seconds + counts.verify_seconds)
        self._count(self._dropped, stats.refused)
        self._count(self._recomputed, self._recompute.count)
        self._set(self._era, cache.era)
        self._set(self._epoch, cache.epoch)
        if self._stores is not None and cache.remote is not None:
            self._set(self._attached, cache.remote.attached)
            self._publish_stores(self._stores, cache.remote.stats)
        if (faults := self._engine.faults) is not None:
            for kind in FaultKind:
                self._count(
                    self._injected, faults.injected[kind], tier=faults.plan.tier.value, kind=kind.value
                )
            self._count(self._met, faults.met)
        self._count(self._waits, stats.evict_waits)
        self._count(self._ticks, stats.ticks)
        self._count(self._tick_seconds, self.tick_seconds)
        self._set(self._pages, (tree.evictable_tokens + tree.protected_tokens) // page, tier="device")
        self._set(self._pages, cache.host_pages.used, tier="host")
        self._set(self._page_limit, cache.host_pages.total, tier="host")
        self._set(self._tickets, len(cache.tickets))
        self._set(self._waiting, len(tree.waiting))
        self._set(self._nodes, tree.nodes)

    def _publish_stores(self, stores: Stores, tier: TierStats) -> None:
        stats, honesty = stores.engine.stats(), stores.planner.honesty()
        self._count(self._fetched, tier.fetched)
        self._count(self._missed, tier.missed, reason="late")
        self._count(self._missed, tier.no_room, reason="no_room")
        self._count(self._stored, tier.stored)
        self._count(self._unstored, tier.store_failed, reason="failed")
        self._count(self._unstored, tier.store_declined, reason="evicted_first")
        self._count(self._unstored, tier.store_refused, reason="policy")
        for reason in Reason:
            self._count(self._store_refused, stats.refused[reason], reason=reason.value)
        self._count(self._lookups, stats.lookups_skipped, result="skipped")
        self._count(self._lookups, stats.lookups_late, result="late")
        answered = stats.lookups - stats.lookups_skipped - stats.lookups_late
        self._count(self._lookups, answered, result="answered")
        self._count(self._store_bytes, stats.bytes_read, direction="read")
        self._count(self._store_bytes, stats.bytes_written, direction="written")
        self._count(self._store_seconds, stats.read_seconds, work="read")
        self._count(self._store_seconds, stats.write_seconds, work="write")
        self._count(self._store_seconds, stats.verify_seconds, work="verify")
        for state in stores.engine.store_states():
            up = state.learned and state.state == "closed"
            self._set(self._store_up, up, store=state.name)
            self._count(self._store_opened, state.stats.opened, store=state.name)
            self._set(self._store_held, state.stats.held, store=state.name)
        for result in ("declined", "distrusted", "whole", "late", "abandoned", "trials"):
            self._count(self._plans, getattr(honesty, result), result=result)
        for kind in ("estimated", "actual", "saved", "lost"):
            self._count(self._plan_seconds, getattr(honesty, f"{kind}_seconds"), kind=kind)

    def _count(self, metric: Any, total: float, **extra: str) -> None:
        key = (metric._name, "".join(extra.values()))
        # A total that is a difference of counts may go down for a moment; a counter that does raises.
        grown = max(total - self._last.get(key, 0.0), 0.0)
        metric.labels(**self._labels, **extra).inc(grown)
        self._last[key] = self._last.get(key, 0.0) + grown

    def _set(self, metric: Any, value: float, **extra: str) -> None:
        metric.labels(**self._labels, **extra).set(value)
