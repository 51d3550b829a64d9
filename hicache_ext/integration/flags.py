"""Checks the server's arguments before anything is loaded, and selects the cache.

Called by the patched ``ServerArgs.resolve_once`` with the raw arguments, in the main process.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from hicache_ext.integration.settings import GB, Settings, SettingsError, load_settings
from hicache_ext.stores.base import StoreError
from hicache_ext.stores.urls import check_machine, parse_store_url

BACKEND = "hicache_ext"
SETTINGS_ATTRIBUTE = "_hicache_ext_settings"
SERVER_ID_ATTRIBUTE = "_hicache_ext_server_id"


def prepare(server_args: Any) -> None:
    """Validate, remember the settings, and select the cache backend.

    Raises:
        SystemExit: with one line that names the cause and the cure.
    """
    try:
        settings = load_settings(
            server_args.hicache_ext_config,
            host_gb=server_args.hicache_ext_host_gb,
            write_policy=server_args.hicache_ext_write_policy,
            integrity=server_args.hicache_ext_integrity,
            copy_backend=server_args.hicache_ext_copy_backend,
            remote=server_args.hicache_ext_remote,
            inject_faults=server_args.hicache_ext_inject_faults,
        )
        check_patches()
        check_model(server_args.model_path)
        check_conflicts(server_args)
        check_page_size(server_args)
        check_host_memory(settings)
        check_stores(settings)
    except SettingsError as error:
        raise SystemExit(f"hicache-ext: error: {error}") from None
    server_args.radix_cache_backend = BACKEND
    # Underscore attributes travel with the record to the scheduler processes.
    setattr(server_args, SETTINGS_ATTRIBUTE, settings)
    setattr(server_args, SERVER_ID_ATTRIBUTE, uuid.uuid4().hex)


def settings_of(server_args: Any) -> Settings:
    settings = getattr(server_args, SETTINGS_ATTRIBUTE, None)
    if settings is None:
        raise SystemExit(
            "hicache-ext: error: the cache was selected but its settings were never checked; "
            "start the server with --enable-hicache-ext instead of --radix-cache-backend"
        )
    return settings


def check_patches() -> None:
    """The installed SGLang carries exactly our series."""
    from hicache_ext import patching

    try:
        status = patching.state(patching.find_sglang())
    except patching.PatchError as error:
        raise SettingsError(str(error)) from error
    if status.state == "patched":
        return
    cure = {
        "pristine": "run `hicache-ext patch apply`",
        "partial": "run `hicache-ext patch apply` to complete it, or `hicache-ext patch revert`",
        "foreign": "reinstall SGLang, then run `hicache-ext patch apply`",
        "unsupported": "install a supported SGLang release",
    }[status.state]
    raise SettingsError(f"{status.reason}; {cure}")


def check_model(model_path: str | None) -> None:
    if model_path is None or not model_path.startswith(("/", "./", "../", "~")):
        return
    path = Path(model_path).expanduser()
    if not path.exists():
        raise SettingsError(f"--model-path {model_path} does not exist")
    if path.is_dir() and not (path / "config.json").is_file():
        raise SettingsError(f"--model-path {model_path} has no config.json, so it is not a model folder")


_Condition = Callable[[Any], bool]

_CONFLICTS: list[tuple[str, str, _Condition]] = [
    (
        "--enable-hierarchical-cache",
        "it is SGLang's own host tier; drop one of the two flags",
        lambda a: a.enable_hierarchical_cache,
    ),
    (
        "--disable-radix-cache",
        "there would be no prefix cache to extend; drop it",
        lambda a: a.disable_radix_cache,
    ),
    (
        "--radix-cache-backend",
        "the extension is a cache backend itself; drop it",
        lambda a: a.radix_cache_backend not in (None, BACKEND),
    ),
    (
        "--hicache-storage-backend",
        "it needs SGLang's own host tier; drop it",
        lambda a: a.hicache_storage_backend is not None,
    ),
    ("--enable-lmcache", "both replace the prefix cache; drop one", lambda a: a.enable_lmcache),
    ("--enable-flexkv", "both replace the prefix cache; drop one", lambda a: a.enable_flexkv),
    (
        "--enable-unified-cache-external-linker",
        "it needs SGLang's own prefix cache; drop one",
        lambda a: getattr(a, "enable_unified_cache_external_linker", False),
    ),
    (
        "--speculative-algorithm",
        "the draft model's KV is not carried to the host yet; drop it",
        lambda a: a.speculative_algorithm is not None,
    ),
    ("--pp-size", "pipeline parallelism is not supported yet; use --tp-size", lambda a: a.pp_size > 1),
    ("--attn-cp-size", "context parallelism is not supported yet; drop it", lambda a: a.attn_cp_size > 1),
    ("--dcp-size", "decode context parallelism is not supported yet; drop it", lambda a: a.dcp_size > 1),
    (
        "--disaggregation-mode",
        "prefill-decode disaggregation is not supported yet; drop it",
        lambda a: a.disaggregation_mode != "null",
    ),
    ("--enable-pdmux", "PD multiplexing skips the cache's tick; drop it", lambda a: a.enable_pdmux),
    ("--enable-hisparse", "its KV is not carried to the host; drop it", lambda a: a.enable_hisparse),
    (
        "--dllm-algorithm",
        "diffusion models are not supported; drop it",
        lambda a: a.dllm_algorithm is not None,
    ),
    (
        "--enable-unified-memory",
        "it moves KV pages under the cache; drop it",
        lambda a: a.enable_unified_memory,
    ),
    (
        "--enable-streaming-session",
        "streaming sessions need SGLang's own prefix cache; drop it",
        lambda a: a.enable_streaming_session,
    ),
    (
        "--enable-session-radix-cache",
        "it needs SGLang's own prefix cache; drop it",
        lambda a: a.enable_session_radix_cache,
    ),
    (
        "--kv-events-config",
        "KV events are not published yet; drop it",
        lambda a: a.kv_events_config is not None,
    ),
    ("--use-ray", "Ray actors load no plugins; drop it", lambda a: a.use_ray),
]


def check_conflicts(server_args: Any) -> None:
    for flag, reason, applies in _CONFLICTS:
        if applies(server_args):
            raise SettingsError(f"--enable-hicache-ext cannot be combined with {flag}: {reason}")


def check_page_size(server_args: Any) -> None:
    page = server_args.page_size
    if page is None:
        return
    if page < 1 or page & (page - 1):
        raise SettingsError(f"--page-size {page} is not a power of two from 1; 1, 16 and 64 are usual")
    for flag, limit in (
        ("--max-total-tokens", server_args.max_total_tokens),
        ("--context-length", server_args.context_length),
    ):
        if limit is not None and page > limit:
            raise SettingsError(f"--page-size {page} is larger than {flag} {limit}; no page would ever fill")
    longest = model_context_length(server_args.model_path)
    if longest is not None and page > longest:
        raise SettingsError(
            f"--page-size {page} is larger than the model's context of {longest} tokens; "
            "no page would ever fill"
        )


def model_context_length(model_path: str | None) -> int | None:
    """``max_position_embeddings`` of a local model folder, if it says."""
    if model_path is None:
        return None
    try:
        config = json.loads((Path(model_path).expanduser() / "config.json").read_text())
    except (OSError, ValueError):
        return None
    value = config.get("max_position_embeddings") if isinstance(config, dict) else None
    return value if isinstance(value, int) else None


def check_host_memory(settings: Settings) -> None:
    if settings.host_gb is None:
        return
    memory = psutil.virtual_memory()
    wanted = settings.host_gb * GB
    limit = memory_limit()
    if wanted > limit:
        raise SettingsError(
            f"--hicache-ext-host-gb {settings.host_gb:g} is more than the {limit / GB:.1f} GB that this "
            f"machine has; {memory.available / GB:.1f} GB are free now"
        )
    if wanted > memory.available:
        raise SettingsError(
            f"--hicache-ext-host-gb {settings.host_gb:g} is more than the {memory.available / GB:.1f} GB "
            "that are free now; ask for less, or free memory first"
        )


def check_stores(settings: Settings) -> None:
    """What a store needs on this machine is there; whether a service answers is not asked."""
    for url in settings.remote:
        try:
            check_machine(parse_store_url(url))
        except StoreError as error:
            raise SettingsError(f"--hicache-ext-remote {url}: {error}") from None


def memory_limit() -> int:
    """Bytes of memory that this machine or container has."""
    total = psutil.virtual_memory().total
    return min(total, cgroup_limit() or total)


def cgroup_limit() -> int | None:
    """Memory limit of this container in bytes (cgroup v2, or v1), None if there is none."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return int(Path(path).read_text())
        except (OSError, ValueError):
            continue
    return None


def asked_for(argv: list[str]) -> bool:
    """Whether this command line wants the extension."""
    return "--enable-hicache-ext" in argv
