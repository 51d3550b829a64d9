"""Page identity: which model, under which namespace, would have computed these bytes.

A page is ``page_size`` consecutive tokens of one prompt. Its identity chains over the whole prefix, so
two pages are interchangeable exactly when their identities are equal:

    identity(0) = H(root salt, page's tokens)          root salt = H(namespace, extra_key, cache_salt, lora)
    identity(i) = H(identity(i - 1), page's tokens)

H is SHA-256 truncated to 128 bits; tokens are little-endian int64; strings are length-framed, so that no
concatenation of two fields can equal another pair.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np

IDENTITY_BYTES = 16
FORMAT_VERSION = 1


class PrefixScope(NamedTuple):
    """What separates equal token sequences of one model: all three are compared, never concatenated."""

    extra_key: str = ""
    cache_salt: str = ""
    lora: str = ""


@dataclass(frozen=True)
class Namespace:
    """Everything that changes the bytes of a page without showing in its tokens.

    The TP degree is absent on purpose: pages are stored per group of KV heads, so every TP degree reads
    the same bytes.
    """

    model: str
    weight_version: str
    kv_dtype: str
    layers: int
    kv_heads: int
    head_dims: tuple[int, ...]
    rotary: str
    page_size: int
    kind: str
    format_version: int = FORMAT_VERSION

    def digest(self) -> bytes:
        """SHA-256 over the framed fields, 32 bytes."""
        h = hashlib.sha256(b"hicache-ext namespace")
        for name, value in asdict(self).items():
            _frame(h, name)
            _frame(h, repr(value))
        return h.digest()


def root_salt(namespace: bytes, scope: PrefixScope) -> bytes:
    """The parent identity of a prompt's first page, 16 bytes."""
    h = hashlib.sha256(b"hicache-ext root")
    _frame(h, namespace)
    for field in scope:
        _frame(h, field)
    return h.digest()[:IDENTITY_BYTES]


def page_identities(parent: bytes, tokens: np.ndarray, page_size: int) -> list[bytes]:
    """Identities of the pages of a token run that follows ``parent``.

    Args:
        parent: 16 bytes, the identity of the preceding page or ``root_salt``.
        tokens: int64, its length a multiple of ``page_size``.
        page_size: tokens per page.

    Raises:
        ValueError: the run is not page-aligned.
    """
    if len(tokens) % page_size:
        raise ValueError(f"{len(tokens)} tokens are not a multiple of the page size {page_size}")
    raw = memoryview(np.ascontiguousarray(tokens, dtype="<i8").tobytes())
    step = page_size * 8
    identities = []
    for start in range(0, len(raw), step):
        h = hashlib.sha256(parent)
        h.update(raw[start : start + step])
        parent = h.digest()[:IDENTITY_BYTES]
        identities.append(parent)
    return identities


def _frame(h: hashlib._Hash, value: str | bytes) -> None:
    data = value.encode() if isinstance(value, str) else value
    h.update(struct.pack("<Q", len(data)))
    h.update(data)
