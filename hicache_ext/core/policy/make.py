"""Policies by name."""

from __future__ import annotations

from hicache_ext.core.policy import EvictionPolicy
from hicache_ext.core.policy.cost import Cost
from hicache_ext.core.policy.costs import CostModel
from hicache_ext.core.policy.lfu import Lfu
from hicache_ext.core.policy.lru import TierAwareLru
from hicache_ext.core.policy.s3fifo import S3Fifo
from hicache_ext.core.policy.slru import Slru
from hicache_ext.core.policy.tlru import TailLru
from hicache_ext.core.residency import Tier

NAMES = ("lru", "lfu", "slru", "s3fifo", "tlru", "cost")
TARGET_TTFT = 0.2
"""Seconds of prefill that tail-optimized LRU takes for acceptable."""


def make_policy(
    name: str, *, device_tokens: int, host_tokens: int, page_size: int, costs: CostModel
) -> EvictionPolicy:
    """A new policy; ValueError names the known ones if ``name`` is none of them."""
    capacity = {Tier.DEVICE: device_tokens, Tier.HOST: host_tokens}
    match name:
        case "lru":
            return TierAwareLru()
        case "lfu":
            return Lfu()
        case "slru":
            return Slru(capacity)
        case "s3fifo":
            return S3Fifo(capacity, page_size)
        case "tlru":
            return TailLru(TARGET_TTFT / costs.token)
        case "cost":
            return Cost(costs, page_size)
    raise ValueError(f"unknown eviction policy {name!r}; choose one of {', '.join(NAMES)}")
