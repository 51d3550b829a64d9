"""Addresses of stores, as users write them.

file:///PATH?size_gb=100&durability=none|data|full&direct=on|off
mooncake://HOST:PORT?metadata=http://...&protocol=tcp|rdma&device=...&segment_gb=1&replicas=1
    &host=...&soft_pin_s=1800&rpc_timeout_s=1
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from hicache_ext.stores.base import Store, StoreError
from hicache_ext.stores.breaker import CircuitBreaker, GuardedStore
from hicache_ext.stores.disk import DiskSettings, DiskStore, Durability
from hicache_ext.stores.mooncake import MooncakeStore
from hicache_ext.stores.mooncake_client import PEER_TO_PEER, MooncakeSettings, host_port, load

Settings = DiskSettings | MooncakeSettings
_METADATA = ("http://", "https://", "etcd://", "redis://")


def parse_store_url(url: str) -> Settings:
    """What an address asks for; touches neither disk nor network.

    Raises:
        StoreError: one line that names the part that is wrong and what it may be.
    """
    try:
        parts = urlsplit(url)
        options = dict(_pairs(url, parts.query))
    except ValueError as error:
        raise StoreError(f"{url} is not an address ({error})") from None
    if parts.fragment:
        raise StoreError(f"{url}: a # in a path is written %23")
    if parts.scheme == "file":
        return _disk(url, parts.netloc, unquote(parts.path), options)
    if parts.scheme == "mooncake":
        if parts.path not in ("", "/"):
            raise StoreError(f"{url}: nothing may stand between the port and the ?, but {parts.path} does")
        return _mooncake(url, parts.netloc, options)
    raise StoreError(f"{url}: a store's address begins with file:// or mooncake://")


def parse_urls(urls: Sequence[str]) -> list[Settings]:
    """What some addresses, the nearest first, ask for; touches neither disk nor network.

    Raises:
        StoreError: one line that names the part that is wrong and what it may be.
    """
    if not urls:
        raise StoreError("the remote tier needs the address of a store, such as file:///PATH?size_gb=100")
    settings = [parse_store_url(url) for url in urls]
    places = [s.path if isinstance(s, DiskSettings) else s.master for s in settings]
    for place in places:
        if places.count(place) > 1:
            raise StoreError(f"the store {place} is given twice")
    return settings


def check_machine(settings: Settings) -> None:
    """Raises StoreError if this machine lacks what a kind of store needs; asks no service."""
    if isinstance(settings, MooncakeSettings):
        load(settings)
        return
    folder = next(p for p in (settings.path, *settings.path.parents) if p.exists())
    if not folder.is_dir():
        raise StoreError(f"{folder} is not a folder; name another path")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StoreError(f"{folder} is not writable for this user; choose another folder, or its owner")


def open_store(settings: Settings, object_bytes: int, breaker: CircuitBreaker | None = None) -> GuardedStore:
    """The store, behind a circuit breaker. Raises StoreError if it cannot be used as asked; a service that
    does not answer is no error: the store connects when it does."""
    if isinstance(settings, DiskSettings):
        store: Store = DiskStore(settings, object_bytes)
        return GuardedStore(store, f"disk {settings.path}", breaker)
    return GuardedStore(MooncakeStore(settings, object_bytes), f"Mooncake {settings.master}", breaker)


def _disk(url: str, host: str, path: str, options: dict[str, str]) -> DiskSettings:
    if host not in ("", "localhost"):
        raise StoreError(
            f"{url}: the path of a disk store is absolute, so three slashes: file:///{host}{path}"
        )
    if path in ("", "/"):
        raise StoreError(f"{url}: name a folder, such as file:///var/cache/hicache-ext?size_gb=100")
    if "size_gb" not in options:
        raise StoreError(f"{url}: say how much of the disk may be used, such as ?size_gb=100")
    return DiskSettings(
        Path(path),
        **_values(
            url,
            options,
            {
                "size_gb": _positive,
                "durability": _one_of(Durability, *Durability),
                "direct": lambda text: _one_of(str, "on", "off")(text) == "on",
            },
        ),
    )


def _mooncake(url: str, master: str, options: dict[str, str]) -> MooncakeSettings:
    try:
        host_port(master)
    except ValueError:
        raise StoreError(f"{url}: name the master as HOST:PORT, such as mooncake://127.0.0.1:50051") from None
    values = _values(
        url,
        options,
        {
            "metadata": _metadata,
            "protocol": _one_of(str, "tcp", "rdma"),
            "device": str,
            "segment_gb": _not_negative,
            "replicas": _count,
            "host": str,
            "soft_pin_s": _positive,
            "rpc_timeout_s": _positive,
        },
    )
    if values.get("device") and values.get("protocol") != "rdma":
        raise StoreError(f"{url}: device= is for protocol=rdma")
    return MooncakeSettings(master, **values)


def _pairs(url: str, query: str) -> list[tuple[str, str]]:
    pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise StoreError(f"{url}: {name}= is given twice")
    return pairs


def _values(url: str, options: dict[str, str], kinds: dict[str, Callable[[str], Any]]) -> dict[str, Any]:
    values = {}
    for name, text in options.items():
        if name not in kinds:
            raise StoreError(f"{url}: unknown option {name}; known are {', '.join(kinds)}")
        try:
            values[name] = kinds[name](text)
        except ValueError as error:
            raise StoreError(f"{url}: {name}={text} must be {error}") from None
    return values


def _positive(text: str) -> float:
    return _number(text, 0, above=True)


def _not_negative(text: str) -> float:
    return _number(text, 0, above=False)


def _number(text: str, least: float, *, above: bool) -> float:
    expected = f"a number {'above' if above else 'from'} {least:g}"
    try:
        value = float(text)
    except ValueError:
        raise ValueError(expected) from None
    if not math.isfinite(value) or value < least or (above and value == least):
        raise ValueError(expected)
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ValueError("a whole number from 1")
    return int(text)


def _metadata(text: str) -> str:
    if text != PEER_TO_PEER and not text.startswith(_METADATA):
        raise ValueError(f"an address that begins with {', '.join(_METADATA)}, or {PEER_TO_PEER}")
    return text


def _one_of(kind: Callable[[str], Any], *known: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        if text not in known:
            raise ValueError(f"one of {', '.join(known)}")
        return kind(text)

    return parse
