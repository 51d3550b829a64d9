"""The 64-bit checksum of KV bytes: cheap enough for every page, the same on every device.

Over a run of little-endian 64-bit words ``w[0 .. n)``, modulo 2^64:

    checksum = sum of fold(w[i]) * m[i],    fold(w) = w XOR (w >> 32),    m[i] odd

``m[i]`` is the i-th output of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators,
2014) with its lowest bit set. An odd factor makes every single flipped bit visible; ``fold`` brings the high
half of a word down, because changes of the highest bits alone would cancel modulo 2^64.
"""

from __future__ import annotations

import numpy as np

_CACHED_BYTES = 1 << 18
"""Words folded at a time: what fits into a core's cache beside its source."""


def multipliers(words: int) -> np.ndarray:
    """``m[0 .. words)``, uint64."""
    with np.errstate(over="ignore"):
        z = np.arange(1, words + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (z ^ (z >> np.uint64(31))) | np.uint64(1)


def checksums(words: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Checksum over the last axis.

    Args:
        words: uint64 ``[rows, ..., n]``; the last axis is dense, the others may have any stride.
        factors: ``multipliers(n)``.

    Returns:
        uint64 ``[rows, ...]``.
    """
    out = np.zeros(words.shape[:-1], dtype=np.uint64)
    if words.size == 0:
        return out
    step = min(max(_CACHED_BYTES // max(words[0].nbytes, 1), 1), len(words))
    folded = np.empty((step, *words.shape[1:]), dtype=np.uint64)
    for start in range(0, len(words), step):
        part = words[start : start + step]
        buffer = folded[: len(part)]
        np.right_shift(part, np.uint64(32), out=buffer)
        np.bitwise_xor(buffer, part, out=buffer)
        sums = np.einsum("rw,w->r", buffer.reshape(-1, words.shape[-1]), factors)
        out[start : start + len(part)] = sums.reshape(part.shape[:-1])
    return out
