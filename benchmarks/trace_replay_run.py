"""Replays requests through the real tree and cache; a block of the trace is a page of one unit.

Requests are served one after the other, each in a scheduler step of its own; transfers end within the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.trace_replay_trace import Request
from hicache_ext.core.cache import CacheConfig, LoadJob, TieredCache
from hicache_ext.core.header import Labels
from hicache_ext.core.page import PrefixScope
from hicache_ext.core.policy import EvictionPolicy
from hicache_ext.core.policy.costs import CostModel
from hicache_ext.core.residency import Tier
from hicache_ext.core.tick import CompletionQueue

SCOPE = PrefixScope()


class Pool:
    """Device slots as numbers on a stack."""

    def __init__(self, size: int) -> None:
        self._free = np.arange(size, dtype=np.int64)[::-1].copy()
        self._top = size

    def available(self) -> int:
        return self._top

    def alloc(self, tokens: int) -> np.ndarray | None:
        if tokens > self._top:
            return None
        self._top -= tokens
        return self._free[self._top : self._top + tokens].copy()

    def free(self, *runs: np.ndarray) -> None:
        for slots in runs:
            self._free[self._top : self._top + len(slots)] = slots
            self._top += len(slots)


class Instant:
    """Transfers that are complete when they are submitted."""

    def __init__(self) -> None:
        self.backups, self.loads = CompletionQueue(), CompletionQueue()

    def backup(self, seq: int, slots: list[np.ndarray], pages: np.ndarray, labels: Labels) -> None:
        self.backups.post(seq)

    def load(self, jobs: Sequence[LoadJob], *, by_layer: bool) -> None:
        for job in jobs:
            self.loads.post(job.seq)

    def poll(self) -> None:
        pass

    def wait_backups(self, seq: int) -> None:
        pass

    def wait_loads(self, seq: int) -> None:
        pass

    def drain(self) -> None:
        pass


@dataclass
class Result:
    """Sums over a replay. ``cold_s``: prefill seconds without a cache; ``saved_s``: what hits saved of
    them, net of loads. ``cache_s``: wall seconds in tree and policy."""

    requests: int = 0
    blocks: int = 0
    tokens: int = 0
    device_blocks: int = 0
    host_blocks: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    cold_s: float = 0.0
    saved_s: float = 0.0
    load_s: float = 0.0
    written_blocks: int = 0
    refused_blocks: int = 0
    too_long: int = 0
    cache_s: float = 0.0
    wall_s: float = 0.0

    def summary(self) -> dict[str, Any]:
        hits, hit_tokens = self.device_blocks + self.host_blocks, self.device_tokens + self.host_tokens
        return asdict(self) | {
            "block_hit_rate": hits / max(self.blocks, 1),
            "token_hit_rate": hit_tokens / max(self.tokens, 1),
            "device_token_hit_rate": self.device_tokens / max(self.tokens, 1),
            "host_token_hit_rate": self.host_tokens / max(self.tokens, 1),
            "saved_share": self.saved_s / max(self.cold_s, 1e-12),
            "cache_us_per_request": 1e6 * self.cache_s / max(self.requests, 1),
        }


@dataclass
class Replay:
    """One policy at one capacity. Sizes in blocks; ``costs`` are per token."""

    policy: EvictionPolicy
    device_blocks: int
    host_blocks: int
    block: int
    costs: CostModel
    waiting: int = 0
    """So many requests ahead are known to the cache as queued."""

    def __post_init__(self) -> None:
        self.pool = Pool(self.device_blocks)
        config = CacheConfig(page_size=1, host_pages=self.host_blocks, evict_granule=1)
        self.cache = TieredCache(config, self.policy, self.pool, Instant())
        self.result = Result()

    def run(self, requests: Sequence[Request], advance: Callable[[int], object] | None = None) -> Result:
        """Serve all; ``advance`` is told the number of requests served since it was last called."""
        begun = time.perf_counter()
        for number, request in enumerate(requests):
            if self.waiting:
                start = time.perf_counter()
                ahead = requests[number + self.waiting : number + self.waiting + 1]
                for offset, queued in enumerate(ahead if number else requests[1 : self.waiting + 1]):
                    position = number + self.waiting + offset if number else 1 + offset
                    self.cache.want(str(position), SCOPE, queued.blocks)
                self.cache.unwant(str(number))
                self.result.cache_s += time.perf_counter() - start
            self.serve(request)
            if advance is not None and (number + 1) % 50 == 0:
                advance(50)
        self.result.wall_s += time.perf_counter() - begun
        if advance is not None:
            advance(len(requests) % 50)
        return self.result

    def serve(self, request: Request) -> tuple[int, int]:
        """One request's life; returns the blocks it found on the device and on the host."""
        cache, result, blocks = self.cache, self.result, request.blocks
        start = time.perf_counter()
        match = cache.match(SCOPE, blocks)
        on_device, on_host, node = match.device_len, 0, match.device_node
        if match.host_len and self._load_pays(match.device_len, match.host_len):
            on_host = cache.load(match.host_node)
            if on_host:
                node = match.host_node
        cache.lock(node)
        fresh = len(blocks) - on_device - on_host
        cache.evict(fresh - self.pool.available())
        # What does not fit is computed but not cached.
        kept = min(fresh, self.pool.available())
        slots = self.pool.alloc(kept)
        assert slots is not None
        upto = on_device + on_host + kept
        row = np.concatenate([np.zeros(upto - kept, np.int64), slots])
        done = cache.insert(SCOPE, blocks[:upto], row)
        if done.matched > upto - kept:
            self.pool.free(row[upto - kept : done.matched])
        cache.unlock(node)
        cache.flush_backups()
        cache.start_loads()
        cache.tick()
        result.cache_s += time.perf_counter() - start

        device_tokens = min(on_device * self.block, request.tokens)
        hit_tokens = min((on_device + on_host) * self.block, request.tokens)
        load = (hit_tokens - device_tokens) * self.costs.load
        result.requests += 1
        result.blocks += len(blocks)
        result.tokens += request.tokens
        result.device_blocks += on_device
        result.host_blocks += on_host
        result.device_tokens += device_tokens
        result.host_tokens += hit_tokens - device_tokens
        result.cold_s += self.costs.recompute(0, request.tokens)
        result.saved_s += self.costs.recompute(0, hit_tokens) - load
        result.load_s += load
        result.too_long += kept < fresh
        stats = cache.stats
        result.written_blocks, result.refused_blocks = stats.backed_up, stats.backup_refused
        return on_device, on_host

    def _load_pays(self, start: int, blocks: int) -> bool:
        unit = self.costs.scaled(self.block)
        return unit.load * blocks < unit.recompute(start, blocks)


__all__ = ["Instant", "Pool", "Replay", "Result", "SCOPE", "Tier"]
