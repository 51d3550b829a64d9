"""Reads request traces: Mooncake's JSONL and SGLang's request log, one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

BYTES_PER_TOKEN = 4
"""Assumed where a log holds text and no token ids."""


class TraceError(Exception):
    """A trace that cannot be replayed; the text is one line for the user."""


@dataclass(frozen=True, slots=True)
class Request:
    """``blocks``: ids, equal for equal content behind an equal prefix. ``tokens``: prompt length."""

    time: float
    tokens: int
    blocks: np.ndarray


def read_trace(path: Path, block: int, limit: int | None = None) -> list[Request]:
    """The first ``limit`` requests of ``path``, in the file's order; raises TraceError."""
    requests: list[Request] = []
    chains = _Chains()
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if limit is not None and len(requests) >= limit:
                    break
                if not line.strip():
                    continue
                try:
                    requests += _requests(json.loads(line), block, chains)
                except (ValueError, KeyError, TypeError, OverflowError) as error:
                    raise TraceError(f"{path}:{number}: not a request: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if not requests:
        raise TraceError(
            f"{path} holds no request: neither hash_ids (Mooncake) nor request.received "
            "(SGLang: --log-requests --log-requests-level 3 --log-requests-format json)"
        )
    return requests[:limit]


def _requests(record: Any, block: int, chains: _Chains) -> Iterator[Request]:
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    if "hash_ids" in record:
        tokens = int(record["input_length"])
        blocks = np.array(record["hash_ids"], dtype=np.int64)
        if tokens < 0 or blocks.ndim != 1 or len(blocks) != -(-tokens // block):
            raise ValueError(f"{len(blocks)} hash_ids of {block} tokens for input_length {tokens}")
        yield Request(float(record.get("timestamp", 0)) / 1e3, tokens, blocks)
    elif record.get("event") == "request.received":
        time = datetime.fromisoformat(record["timestamp"]).timestamp()
        ids, text = record["obj"].get("input_ids"), record["obj"].get("text")
        if ids:
            for prompt in ids if isinstance(ids[0], list) else [ids]:
                yield Request(time, len(prompt), chains.ids(np.array(prompt, dtype=np.int64), block))
        elif text:
            for prompt in text if isinstance(text, list) else [text]:
                raw = np.frombuffer(prompt.encode(), dtype=np.uint8)
                blocks = chains.ids(raw, block * BYTES_PER_TOKEN)
                yield Request(time, -(-len(raw) // BYTES_PER_TOKEN), blocks)
        else:
            raise ValueError("no input_ids and no text; log with --log-requests-level 3")


class _Chains:
    """Names blocks by content and prefix, as Mooncake's traces do."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, bytes], int] = {}

    def ids(self, items: np.ndarray, block: int) -> np.ndarray:
        above = -1
        out = []
        for start in range(0, len(items), block):
            key = (above, items[start : start + block].tobytes())
            above = self._ids.setdefault(key, len(self._ids))
            out.append(above)
        return np.array(out, dtype=np.int64)


def distinct(requests: Iterable[Request]) -> int:
    """Different blocks in all prompts: with that capacity nothing is ever evicted."""
    seen: set[int] = set()
    for request in requests:
        seen.update(request.blocks.tolist())
    return len(seen)
