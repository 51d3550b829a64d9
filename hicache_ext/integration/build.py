"""Builds the cache inside a scheduler process, once the model and its KV pool are there."""

from __future__ import annotations

import logging
from contextlib import closing
from typing import Any

import numpy as np
import psutil
import torch

from hicache_ext.core.cache import CacheConfig, TieredCache, WritePolicy
from hicache_ext.core.header import Integrity
from hicache_ext.core.planner import ALWAYS, Planner, PlanSettings
from hicache_ext.core.policy.make import make_policy
from hicache_ext.core.speeds import Speeds
from hicache_ext.core.tick import Reduce
from hicache_ext.integration.flags import SERVER_ID_ATTRIBUTE, check_patches, settings_of
from hicache_ext.integration.namespace import WeightVersions, namespace_of
from hicache_ext.integration.pools import HeadShard, SlotPool, account_for_pools, describe
from hicache_ext.integration.preflight import prove_layout
from hicache_ext.integration.queue import QueueOrder
from hicache_ext.integration.release import adapter_class, data_parallel, parallel_sizes
from hicache_ext.integration.settings import Settings, SettingsError
from hicache_ext.integration.sizing import host_pages
from hicache_ext.integration.speeds import Stores, agreed_speeds, load_bandwidth, prefill_costs
from hicache_ext.integration.warm_up import ROWS, load_matmul_kernels
from hicache_ext.remote.engine import scratch_pages
from hicache_ext.remote.open import open_remote
from hicache_ext.remote.planning import STORE
from hicache_ext.stores.base import StoreError
from hicache_ext.transfer.choices import CopyBackendName, parse_plan
from hicache_ext.transfer.device_kv import DeviceKV
from hicache_ext.transfer.engine import Engine, make_engine
from hicache_ext.transfer.faults import FaultInjector
from hicache_ext.transfer.host_pool import HostPagePool
from hicache_ext.transfer.layers import LayerCounter
from hicache_ext.transfer.seal import Seal

logger = logging.getLogger(__name__)


def build_cache(ctx: Any) -> Any:
    """The factory behind ``--radix-cache-backend hicache_ext``; ``ctx`` is a ``TreeCacheBuildContext``.

    Raises:
        SystemExit: this model or configuration cannot be served; one line says why.
    """
    settings = settings_of(ctx.server_args)
    try:
        check_patches()
        return _build(ctx, settings)
    except (SettingsError, MemoryError) as error:
        raise SystemExit(f"hicache-ext: error: {error}") from error


def _build(ctx: Any, settings: Settings) -> Any:
    adapter = adapter_class()
    params = ctx.params
    if params.disable:
        raise SettingsError(
            "SGLang has switched prefix caching off for this model; drop --enable-hicache-ext"
        )
    account_for_pools(ctx)
    allocator = params.token_to_kv_pool_allocator
    pool = allocator.get_kvcache()
    kv = describe(pool, params.page_size, head_shard(ctx))
    reduce = group_min(params.tp_cache_group)
    pages = host_pages(
        settings.host_gb,
        ranks=ranks_here(ctx.server_args),
        page_bytes=kv.layout.page_bytes,
        device_pages=allocator.size // params.page_size,
        free_bytes=psutil.virtual_memory().available,
    )
    if reduce is not None:
        # Ranks see different free memory; equal pools keep their decisions equal.
        pages = int(reduce(np.array([pages], dtype=np.int64))[0])
    on_gpu = kv.device.type == "cuda"
    logger.info(
        "hicache-ext: host tier of %d pages of %d tokens (%.2f GB%s), %s",
        pages,
        params.page_size,
        pages * kv.layout.page_bytes / 1e9,
        ", pinned" if on_gpu else "",
        settings.write_policy,
    )
    scratch = scratch_pages(kv.layout) if settings.remote else 0
    host = HostPagePool(kv.layout, pages, pinned=on_gpu, scratch=scratch)
    forward_stream = getattr(ctx.tp_worker.model_runner, "forward_stream", None)
    integrity = Integrity(settings.integrity)
    backend = CopyBackendName(settings.copy_backend)

    def engine_with(faults: FaultInjector | None) -> Engine:
        return make_engine(kv, host, forward_stream, integrity=integrity, faults=faults, backend=backend)

    try:
        # Dropped at once, so that its buffers on the device serve the next engine.
        with closing(engine_with(None)) as trial:
            prove_layout(pool, kv, trial, host, integrity)
            bandwidth = load_bandwidth(kv, host, trial)
        del trial
    except SettingsError:
        raise
    except ValueError as error:
        raise SettingsError(f"--hicache-ext-copy-backend {backend}: {error}") from error
    faults = None
    if settings.inject_faults is not None:
        faults = FaultInjector(parse_plan(settings.inject_faults), kv.layout)
        logger.warning("hicache-ext: pages are damaged on purpose (%s)", settings.inject_faults)
    engine = engine_with(faults)
    counter = LayerCounter(kv.layout.layers, engine.signal)
    pool.register_layer_transfer_counter(counter)
    ctx.tp_worker.register_hicache_layer_transfer_counter(counter)
    granule = min(settings.evict_granule, max(allocator.size // 64, params.page_size))
    namespace = namespace_of(ctx.server_args, ctx.model_config, kv.layout, str(pool.dtype))
    versions = WeightVersions(namespace, getattr(ctx.server_args, SERVER_ID_ATTRIBUTE))
    names = [STORE] if settings.remote else []
    if on_gpu:
        runner, chunk = ctx.tp_worker.model_runner, ctx.server_args.chunked_prefill_size
        with torch.cuda.stream(forward_stream):
            load_matmul_kernels(runner.model, runner.dtype, chunk if chunk and chunk > 0 else max(ROWS))
    speeds = agreed_speeds(prefill_costs(ctx), bandwidth, kv.layout, names, reduce)
    logger.info(
        "hicache-ext: a token takes at least %.1f us to compute and about %.2f us to load from the host",
        1e6 * speeds.costs.token,
        1e6 * speeds.costs.load,
    )
    stores = None
    if settings.remote:
        stores = open_stores(settings, ctx, kv, host, Seal(kv.layout, integrity), speeds)
    cache = TieredCache(
        CacheConfig(
            page_size=params.page_size,
            host_pages=pages,
            write_policy=WritePolicy(settings.write_policy),
            evict_granule=granule,
            backup_limit=settings.backup_limit,
        ),
        make_policy(
            settings.eviction_policy,
            device_tokens=allocator.size,
            host_tokens=pages * params.page_size,
            page_size=params.page_size,
            costs=speeds.costs,
        ),
        SlotPool(allocator),
        engine,
        namespace=versions.digest(),
        own=torch.Tensor.clone,
        reduce=reduce,
        remote=None if stores is None else stores.engine,
        speeds=speeds,
        page_bytes=kv.layout.page_bytes,
    )
    args = ctx.server_args
    by_cost = QueueOrder(settings.queue_order).replaces(args.schedule_policy, args.enable_priority_scheduling)
    return adapter(
        params,
        cache,
        engine,
        host,
        counter,
        settings,
        versions,
        speeds,
        order_by_cost=by_cost,
        stores=stores,
    )


def open_stores(
    settings: Settings, ctx: Any, kv: DeviceKV, host: HostPagePool, seal: Seal, speeds: Speeds
) -> Stores:
    """The remote tier of this rank. Raises SettingsError if a store cannot be used as asked."""
    layout = kv.layout
    rules = ALWAYS if settings.fetch == "always" else PlanSettings()
    planner = Planner(speeds, layout.page_size, layout.page_bytes, rules)
    shard = head_shard(ctx)
    dp_rank, dp_ranks = data_parallel(ctx)
    total, replica, replicas = shard.copies(layout)
    try:
        engine = open_remote(
            settings.remote,
            layout,
            host,
            seal,
            planner,
            total_groups=total,
            # Data-parallel ranks see other prompts, and a folder belongs to one process.
            replica=replica + replicas * dp_rank,
            replicas=replicas * dp_ranks,
            writes=replica == 0,
        )
    except StoreError as error:
        raise SettingsError(f"--hicache-ext-remote: {error}") from error
    return Stores(engine, planner)


def head_shard(ctx: Any) -> HeadShard:
    """This rank's part of the model's KV heads; under DP attention the attention group counts."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return HeadShard(ctx.model_config.get_total_num_kv_heads(), parallel.attn_tp_size, parallel.attn_tp_rank)


def group_min(group: Any) -> Reduce | None:
    """All-reduce (MIN) over a gloo group, None if it has one member."""
    if group is None or torch.distributed.get_world_size(group) == 1:
        return None

    def reduce(values: np.ndarray) -> np.ndarray:
        tensor = torch.from_numpy(values)
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MIN, group=group)
        return values

    return reduce


def ranks_here(server_args: Any) -> int:
    """Scheduler ranks that share this machine's memory."""
    tp_size, replicas, machines = parallel_sizes(server_args)
    return max(tp_size * replicas // machines, 1)
