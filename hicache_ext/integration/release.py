"""What depends on the installed SGLang release: the adapter, and facts whose place has moved."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hicache_ext import patching
from hicache_ext.integration.settings import SettingsError

_ADAPTERS = {
    "0.5.17": ("adapter_0_5_17", "HicacheExtCache0517"),
    "0.5.23": ("adapter", "HicacheExtCache"),
}


def adapter_class() -> Any:
    """The prefix cache class for the installed SGLang.

    Raises:
        SettingsError: there is none.
    """
    try:
        version = patching.find_sglang().version
    except patching.PatchError as error:
        raise SettingsError(str(error)) from error
    if version not in _ADAPTERS:
        raise SettingsError(
            f"SGLang {version} has no adapter in this hicache-ext; supported are {', '.join(_ADAPTERS)}"
        )
    module, name = _ADAPTERS[version]
    return getattr(import_module(f"hicache_ext.integration.{module}"), name)


def parallel_sizes(server_args: Any) -> tuple[int, int, int]:
    """(TP degree, data-parallel replicas that are worlds of their own, machines); under DP attention one."""
    try:
        from sglang.srt.arg_groups.overrides import resolving_view
    except ImportError:
        replicas = 1 if server_args.enable_dp_attention else server_args.dp_size
        return server_args.tp_size, replicas, server_args.nnodes
    cfg = resolving_view(server_args)
    replicas = 1 if cfg.attn_dp_size and cfg.attn_dp_size > 1 else cfg.dp_size
    return cfg.tp_size, replicas, cfg.nnodes


def data_parallel(ctx: Any) -> tuple[int, int]:
    """(This rank among the data-parallel ranks, their number); ``ctx`` is a ``TreeCacheBuildContext``."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if hasattr(parallel, "num_dp_ranks"):
        return parallel.dp_rank or 0, parallel.num_dp_ranks
    ranks = ctx.tp_worker.model_runner.ps
    return ranks.dp_rank or 0, ranks.dp_size


def rank_labels() -> dict[str, Any]:
    """Prometheus labels that tell the ranks apart."""
    from sglang.srt.layers.dp_attention import is_dp_attention_enabled
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    apart = is_dp_attention_enabled()
    return {
        "tp_rank": parallel.attn_tp_rank if apart else parallel.tp_rank,
        "pp_rank": parallel.pp_rank,
        "dp_rank": parallel.attn_dp_rank if apart else 0,
    }
