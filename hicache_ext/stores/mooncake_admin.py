"""What a Mooncake master knows, over the HTTP port of its metrics: its own clients cannot list keys."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

from hicache_ext.stores.base import Key, StoreError
from hicache_ext.stores.mooncake import key_of, name_of

METRICS_PORT = 9003
"""Mooncake's own default."""
_TIMEOUT_S = 30.0
# Names stand in the request line, whose length servers limit.
_QUERY = 40


class MasterAdmin:
    """``address`` is HOST:PORT of the master's metrics. All calls raise StoreError if it does not answer."""

    def __init__(self, address: str) -> None:
        self.address = address

    def keys(self) -> tuple[list[Key], int]:
        """Keys of this format, and the number of others."""
        names = self._get("/get_all_keys").decode(errors="replace").split()
        keys = [key for name in names if (key := key_of(name)) is not None]
        return keys, len(names) - len(keys)

    def sizes(self, keys: Sequence[Key]) -> Iterator[int]:
        """Bytes of each object, one by one in order; 0 if it is gone."""
        for start in range(0, len(keys), _QUERY):
            names = [name_of(key) for key in keys[start : start + _QUERY]]
            data = self._json(f"/batch_query_keys?keys={','.join(names)}").get("data") or {}
            for name in names:
                parts = (data.get(name) or {}).get("values") or [{}]
                yield int(parts[0].get("size_", 0))

    def segments(self) -> list[dict[str, Any]]:
        """What clients give: ``segment_name``, ``size_bytes``, ``allocator_used_bytes``, ``status``."""
        return list(self._json("/get_segments_detail").get("segments") or [])

    def _json(self, path: str) -> dict[str, Any]:
        try:
            found = json.loads(self._get(path))
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise StoreError(
                f"{self.address} does not answer as a Mooncake master's metrics do: see --metrics"
            )
        return found

    def _get(self, path: str) -> bytes:
        try:
            with urllib.request.urlopen(f"http://{self.address}{path}", timeout=_TIMEOUT_S) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            raise StoreError(
                f"the Mooncake master at {self.address} has no {path.partition('?')[0]} ({error.code}), so "
                "its objects cannot be listed: check --metrics, or use a newer Mooncake"
            ) from error
        except OSError as error:
            reason = getattr(error, "reason", error)
            reason = getattr(reason, "strerror", None) or reason
            raise StoreError(
                f"no Mooncake master's metrics at {self.address} ({reason}): "
                "name the master's --metrics_port with --metrics HOST:PORT"
            ) from error
