"""Times the radix tree: freeing pages from a small and a large tree, and matching a long cached prompt.

The match is compared with SGLang's own trees in the same run: the Python RadixCache and, if the installed
wheel has it, the Rust core. Without SGLang only ours is timed.

    python -m benchmarks.tree
    python -m benchmarks.tree --policies lru,cost --json tree.json

Exit code: 0, or 2 if an option is unusable, 130 if interrupted.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track
from rich.table import Table

from benchmarks.trace_replay import counts, names, wide_console
from benchmarks.trace_replay_run import Instant, Pool
from hicache_ext.core.cache import CacheConfig, TieredCache, WritePolicy
from hicache_ext.core.page import PrefixScope
from hicache_ext.core.policy.costs import CostModel
from hicache_ext.core.policy.make import make_policy

SCOPE = PrefixScope()


def grown(policy: str, nodes: int, page: int) -> TieredCache:
    """A cache of ``nodes`` nodes of a page each: one-page prompts behind a shared page, all evictable."""
    pool = Pool((nodes + 1) * page)
    made = make_policy(policy, device_tokens=nodes * page, host_tokens=0, page_size=page, costs=CostModel())
    config = CacheConfig(page_size=page, host_pages=0, write_policy=WritePolicy.WRITE_BACK)
    cache = TieredCache(config, made, pool, Instant())
    tokens = np.zeros(2 * page, np.int64)
    row = np.zeros(2 * page, np.int64)
    for prompt in range(nodes - 1):
        tokens[page:] = prompt + 1
        fresh = pool.alloc(page if prompt else 2 * page)
        assert fresh is not None
        row[-len(fresh) :] = fresh
        cache.insert(SCOPE, tokens, row)
        cache.tick()
    return cache


def time_eviction(cache: TieredCache, pages: int, repeats: int) -> float:
    """Seconds to free ``pages`` pages, the median of ``repeats`` calls."""
    page = cache.config.page_size
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        freed = cache.evict(pages * page)
        seconds.append(time.perf_counter() - start)
        assert freed >= pages * page
    return statistics.median(seconds)


def prompt_parts(tokens: int, page: int, nodes: int) -> list[int]:
    """Lengths of the growing prompts that make a path of ``nodes`` nodes."""
    whole = tokens // page
    return [whole * part // nodes * page for part in range(1, nodes + 1)]


def our_match(tokens: np.ndarray, page: int, parts: Sequence[int], policy: str) -> Callable[[], int]:
    pool = Pool(len(tokens) + page)
    made = make_policy(policy, device_tokens=len(tokens), host_tokens=0, page_size=page, costs=CostModel())
    cache = TieredCache(CacheConfig(page_size=page, host_pages=0), made, pool, Instant())
    for length in parts:
        have = cache.match(SCOPE, tokens[:length]).device_len
        fresh = pool.alloc(length - have)
        assert fresh is not None
        cache.insert(SCOPE, tokens[:length], np.concatenate([np.zeros(have, np.int64), fresh]))
        cache.tick()
    return lambda: cache.match(SCOPE, tokens).device_len


def sglang_matches(tokens: np.ndarray, page: int, parts: Sequence[int]) -> dict[str, Callable[[], int]]:
    """SGLang's trees that this installation has, each holding the same prompt."""
    try:
        import torch
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
    except ImportError:
        return {}
    ids = array("q", tokens.tolist())
    found: dict[str, Callable[[], int]] = {}
    radix = RadixCache.create_simulated(page_size=page)
    for length in parts:
        value = torch.arange(length, dtype=torch.int64)
        radix.insert(InsertParams(key=RadixKey(token_ids=ids[:length]), value=value))
    found["SGLang RadixCache (Python)"] = lambda: int(
        radix.match_prefix(MatchPrefixParams(key=RadixKey(token_ids=ids))).device_prefix_len
    )
    try:
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.rust_tree_core.adapter import RustUnifiedTreeCore
        from sglang.srt.mem_cache.rust_tree_core.extension import bindings
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    except ImportError:
        return found
    core = RustUnifiedTreeCore(
        CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=None,
            page_size=page,
            tree_components=(ComponentType.FULL,),
        )
    )
    for length in parts:
        value = torch.arange(length, dtype=torch.int64)
        core._binding.insert(bindings.InsertParamsBinding(ids[:length], value))
    found["SGLang UnifiedTreeCore (Rust)"] = lambda: int(
        core.match_prefix(MatchPrefixParams(key=RadixKey(token_ids=ids))).device_prefix_len
    )
    return found


def time_matches(matches: dict[str, Callable[[], int]], tokens: int, repeats: int) -> dict[str, float]:
    """Median seconds of a match, the trees taking turns so that a busy machine slows all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in matches}
    for name, match in matches.items():
        if (found := match()) != tokens:
            raise RuntimeError(f"{name} matched {found} of {tokens} tokens")
    gc.disable()
    try:
        for _ in range(repeats):
            for name, match in matches.items():
                # The first call of a turn finds another tree's memory in the processor's cache.
                match()
                for _ in range(4):
                    start = time.perf_counter()
                    match()
                    seconds[name].append(time.perf_counter() - start)
    finally:
        gc.enable()
    return {name: statistics.median(values) for name, values in seconds.items()}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.tree", description=(__doc__ or "").split("\n\n")[0]
    )
    p.add_argument(
        "--policies", type=names, default=["lru", "cost"], help="comma-separated (default: lru,cost)"
    )
    p.add_argument(
        "--nodes", type=counts, default=[10_000, 1_000_000], help="tree sizes (default: 10000,1000000)"
    )
    p.add_argument("--free", type=int, default=100, help="pages freed a call (default: 100)")
    p.add_argument("--tokens", type=int, default=131072, help="tokens of the cached prompt (default: 131072)")
    p.add_argument("--page-size", type=int, default=64, help="tokens of a page for the match (default: 64)")
    p.add_argument("--path", type=int, default=20, help="nodes of the cached prompt (default: 20)")
    p.add_argument("--repeats", type=int, default=31, help="measurements; the median counts (default: 31)")
    p.add_argument("--json", type=Path, help="write the results to this file")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    p = parser()
    options = p.parse_args(arguments)
    if min(options.free, options.tokens, options.page_size, options.path, options.repeats) < 1:
        p.error("--free, --tokens, --page-size, --path and --repeats start at 1")
    if options.tokens % options.page_size or options.tokens < options.page_size * options.path:
        p.error("--tokens must be a multiple of --page-size and hold a page for each node of --path")
    if min(options.nodes) < 20 * options.free:
        p.error(f"--nodes must be at least 20 times --free, {20 * options.free}")
    console = wide_console()
    try:
        report: dict[str, Any] = {"eviction": [], "match": {}}
        table = Table(title=f"freeing {options.free} pages", title_justify="left")
        table.add_column("policy")
        for size in options.nodes:
            table.add_column(f"{size:,} nodes, us", justify="right")
        table.add_column("largest / smallest", justify="right")
        for policy in track(options.policies, "growing trees", console=console, transient=True):
            seconds = []
            for size in options.nodes:
                repeats = max(min(options.repeats, size // (2 * options.free)), 1)
                seconds.append(time_eviction(grown(policy, size, 1), options.free, repeats))
            ratio = seconds[-1] / seconds[0]
            table.add_row(policy, *(f"{1e6 * s:,.0f}" for s in seconds), f"{ratio:.2f}")
            report["eviction"].append({"policy": policy, "nodes": options.nodes, "seconds": seconds})
        console.print(table)
        tokens = np.random.default_rng(0).integers(0, 150_000, options.tokens)
        parts = prompt_parts(options.tokens, options.page_size, options.path)
        matches = {
            f"ours, {policy}": our_match(tokens, options.page_size, parts, policy)
            for policy in options.policies
        }
        matches |= sglang_matches(tokens, options.page_size, parts)
        medians = time_matches(matches, options.tokens, options.repeats)
        table = Table(
            title=f"matching {options.tokens:,} tokens ({options.path} nodes, page {options.page_size})",
            title_justify="left",
        )
        table.add_column("tree")
        table.add_column("us", justify="right")
        for name, value in medians.items():
            table.add_row(name, f"{1e6 * value:,.0f}")
        console.print(table)
        report["match"] = medians
        if options.json is not None:
            options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except (OSError, RuntimeError) as error:
        print(f"tree: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tree: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
