"""Settings of the extension: defaults, TOML file, command line; the later wins."""

from __future__ import annotations

import sys
import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from hicache_ext.core.cache import WritePolicy
from hicache_ext.core.header import Integrity
from hicache_ext.core.policy.make import NAMES as POLICIES
from hicache_ext.integration.queue import QueueOrder
from hicache_ext.stores.base import GB as GB
from hicache_ext.stores.base import StoreError
from hicache_ext.stores.urls import parse_urls
from hicache_ext.transfer.choices import CopyBackendName, parse_plan


class SettingsError(ValueError):
    """A setting cannot be used; the text is one line with cause and cure."""


@dataclass(frozen=True)
class Settings:
    """The keys of the TOML file, at its top level."""

    host_gb: float | None = None
    """Host memory in GB (10^9 bytes) for all ranks on this machine; None: see ``sizing``."""
    write_policy: str = WritePolicy.WRITE_THROUGH.value
    """``write-through`` or ``write-back``."""
    integrity: str = Integrity.FULL.value
    """``full``, ``sample`` or ``off``: how many pages carry checksums and are checked when they come back."""
    remote: tuple[str, ...] = ()
    """Addresses of stores, the nearest first; see ``stores.urls``. Empty: no remote tier."""
    fetch: str = "auto"
    """``auto``: what is sooner here than computed. ``always``: whatever a store has."""
    inject_faults: str | None = None
    """Damage pages on purpose, see ``transfer.faults.parse_plan``; None is off."""
    copy_backend: str = CopyBackendName.AUTO.value
    """``auto``, ``staged``, ``triton`` or ``torch``; see ``transfer.backends``."""
    eviction_policy: str = "cost"
    """One of ``core.policy.make.NAMES``: what leaves a tier first, and what a full host takes."""
    queue_order: str = QueueOrder.AUTO.value
    """``auto``, ``cost`` or ``engine``: who is served first; see ``integration.queue``."""
    evict_granule: int = 512
    """Tokens: longer runs are evicted in parts of about this length."""
    backup_limit: int = 65536
    """Tokens whose copy to the host is submitted at most per scheduler step."""
    metrics_interval: float = 0.2
    """Seconds between two updates of the Prometheus metrics."""
    check_every: int = 0
    """Assert all invariants every so many scheduler steps; 0 is off. Slow; for tests."""


def load_settings(config: str | None, **flags: Any) -> Settings:
    """Settings from a TOML file, overridden by the flags that are not None.

    Raises:
        SettingsError: unreadable file, unknown key, or a value out of range.
    """
    values = _read(Path(config)) if config is not None else {}
    known = {f.name: f for f in fields(Settings)}
    for key, value in values.items():
        if key not in known:
            raise SettingsError(f"{config}: unknown setting {key!r}; known are {', '.join(sorted(known))}")
        if not _fits(known[key].name, value):
            raise SettingsError(f"{config}: {key} = {value!r} is not a {_EXPECTED[key]}")
    settings = replace(Settings(), **values)
    settings = replace(settings, **{k: v for k, v in flags.items() if v is not None})
    return _checked(replace(settings, remote=tuple(settings.remote)))


_EXPECTED = {
    "fetch": "string, auto or always",
    "remote": "list of addresses of stores",
    "host_gb": "positive number",
    "write_policy": f"string, one of {', '.join(WritePolicy)}",
    "integrity": f"string, one of {', '.join(Integrity)}",
    "inject_faults": "string like tier=host,rate=0.01",
    "copy_backend": f"string, one of {', '.join(CopyBackendName)}",
    "eviction_policy": f"string, one of {', '.join(POLICIES)}",
    "queue_order": f"string, one of {', '.join(QueueOrder)}",
    "evict_granule": "positive whole number",
    "backup_limit": "positive whole number",
    "metrics_interval": "positive number",
    "check_every": "whole number from 0",
}


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SettingsError(f"--hicache-ext-config: cannot read {path}: {reason}") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"--hicache-ext-config: {path} is not valid TOML: {error}") from error


def _fits(key: str, value: Any) -> bool:
    if isinstance(value, bool):
        return False
    if key == "remote":
        return isinstance(value, list | tuple) and all(isinstance(url, str) for url in value)
    if key == "fetch":
        return value in ("auto", "always")
    if key == "write_policy":
        return value in list(WritePolicy)
    if key == "integrity":
        return value in list(Integrity)
    if key == "copy_backend":
        return value in list(CopyBackendName)
    if key == "eviction_policy":
        return value in POLICIES
    if key == "queue_order":
        return value in list(QueueOrder)
    if key == "inject_faults":
        return isinstance(value, str)
    if key in ("host_gb", "metrics_interval"):
        return isinstance(value, int | float) and 0 < value <= sys.float_info.max
    return isinstance(value, int) and value >= (0 if key == "check_every" else 1)


def _checked(settings: Settings) -> Settings:
    for field in fields(settings):
        value = getattr(settings, field.name)
        if value is None and field.default is None:
            continue
        flag = "--hicache-ext-" + field.name.replace("_", "-")
        if not _fits(field.name, value):
            raise SettingsError(f"{flag} {value} is not a {_EXPECTED[field.name]}")
        if field.name == "remote" and value:
            try:
                parse_urls(value)
            except StoreError as error:
                raise SettingsError(f"{flag} {error}") from None
        if field.name == "inject_faults":
            try:
                parse_plan(value)
            except ValueError as error:
                raise SettingsError(f"{flag} {value}: {error}") from None
    return settings
