"""What a cache that knows the future would save.

Evict the block whose next use is farthest, and never keep one that is not used again (Belady with bypass). A
block is used whenever a block behind it is, so its next use is never later than theirs: evicting the deeper
of two with equal next use keeps every prefix closed. For block hits this is the optimum of one tier,
closure included. For seconds it is a lower bound of the optimum, because it does not weigh blocks by what
they cost to compute.

Two tiers: blocks hit with the capacity of both together, and those that the device alone would hit pay no
load. No cache of both tiers hits more; block by block this is an upper bound of the Belady kind.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from benchmarks.trace_replay_run import Result
from benchmarks.trace_replay_trace import Request
from hicache_ext.core.policy.costs import CostModel

NEVER = 1 << 60


def next_uses(requests: Sequence[Request]) -> list[list[int]]:
    """Per request and block, the number of the next request that uses the block."""
    upcoming: dict[int, int] = {}
    uses: list[list[int]] = []
    for number in range(len(requests) - 1, -1, -1):
        blocks = requests[number].blocks.tolist()
        uses.append([upcoming.get(block, NEVER) for block in blocks])
        upcoming.update(dict.fromkeys(blocks, number))
    return uses[::-1]


def belady(requests: Sequence[Request], uses: Sequence[Sequence[int]], capacity: int) -> list[int]:
    """Per request, how many of its first blocks are cached when it comes."""
    cached: dict[int, int] = {}
    farthest: list[tuple[int, int, int]] = []
    hits = []
    for request, upcoming in zip(requests, uses, strict=True):
        blocks = request.blocks.tolist()
        hit = 0
        while hit < len(blocks) and blocks[hit] in cached:
            hit += 1
        hits.append(hit)
        for depth, (block, use) in enumerate(zip(blocks, upcoming, strict=True)):
            if use == NEVER:
                cached.pop(block, None)
                continue
            cached[block] = use
            heapq.heappush(farthest, (-use, -depth, block))
        while len(cached) > capacity:
            use, _, block = heapq.heappop(farthest)
            if cached.get(block) == -use:
                del cached[block]
    return hits


def optimum(
    requests: Sequence[Request],
    uses: Sequence[Sequence[int]],
    device_blocks: int,
    host_blocks: int,
    block: int,
    costs: CostModel,
) -> Result:
    """See the module docstring. Sizes in blocks of ``block`` tokens; ``costs`` are per token."""
    device = belady(requests, uses, device_blocks)
    both = belady(requests, uses, device_blocks + host_blocks) if host_blocks else device
    result = Result()
    for request, on_device, hit in zip(requests, device, both, strict=True):
        device_tokens = min(on_device * block, request.tokens)
        hit_tokens = min(hit * block, request.tokens)
        load = (hit_tokens - device_tokens) * costs.load
        result.requests += 1
        result.blocks += len(request.blocks)
        result.tokens += request.tokens
        result.device_blocks += on_device
        result.host_blocks += hit - on_device
        result.device_tokens += device_tokens
        result.host_tokens += hit_tokens - device_tokens
        result.cold_s += costs.recompute(0, request.tokens)
        result.saved_s += costs.recompute(0, hit_tokens) - load
        result.load_s += load
    return result
