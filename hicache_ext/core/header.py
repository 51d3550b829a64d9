"""The header in front of every head group of a page, and what it is compared with on the way back.

    header = fixed part | checksum of each slab, uint64 | zeros up to a multiple of 64 bytes

A slab is one layer of one component (K, V or latent) of the group. All numbers are little-endian. The fixed
part says whose bytes these are; a reader knows what it must say, so it compares and never trusts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from hicache_ext.core.page import FORMAT_VERSION, IDENTITY_BYTES

MAGIC = b"HICACHEX"
NAMESPACE_BYTES = 32

FIXED = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("sealed", "<u4"),
        ("payload_bytes", "<u8"),
        ("epoch", "<u8"),
        ("group", "<u4"),
        ("slabs", "<u4"),
        ("identity", "u1", IDENTITY_BYTES),
        ("namespace", "u1", NAMESPACE_BYTES),
        ("reserved", "<u8"),
    ]
)
"""96 bytes; ``sealed`` is 1 if the checksums are filled in."""

MAX_GROUPS = 8
"""Head groups of a page, at most."""

SAMPLED_ONE_IN = 16
"""``sample`` seals and verifies the pages whose identity is a multiple of this."""


class Integrity(StrEnum):
    """How much of a page's payload is proven when it comes back; headers always are."""

    FULL = "full"
    SAMPLE = "sample"
    OFF = "off"


class Reason(StrEnum):
    """Why a page was refused."""

    MAGIC = "magic"
    VERSION = "version"
    NAMESPACE = "namespace"
    EPOCH = "epoch"
    IDENTITY = "identity"
    GEOMETRY = "geometry"
    CHECKSUM = "checksum"
    COPY = "copy"
    """The copy itself raised an error."""


@dataclass(frozen=True)
class Geometry:
    """Sizes of one head group of a page; ``first_group`` numbers this rank's groups within the model."""

    groups: int
    payload_bytes: int
    slabs: int
    first_group: int = 0

    @property
    def header_bytes(self) -> int:
        return _up(FIXED.itemsize + 8 * self.slabs, 64)

    @property
    def object_bytes(self) -> int:
        """Header and payload, padded so that direct I/O can move it as it is."""
        return _up(self.header_bytes + self.payload_bytes, 512)


@dataclass(frozen=True)
class Labels:
    """Whose bytes some pages hold: ``identities`` is uint8 ``[pages, 16]``."""

    identities: np.ndarray
    namespace: bytes
    epoch: int

    def __len__(self) -> int:
        return len(self.identities)

    def __getitem__(self, part: slice) -> Labels:
        return Labels(self.identities[part], self.namespace, self.epoch)


def head_groups(kv_heads: int) -> int:
    """The largest number of groups up to ``MAX_GROUPS`` that divides the heads evenly."""
    return max(g for g in range(1, min(kv_heads, MAX_GROUPS) + 1) if kv_heads % g == 0)


def sealed_pages(labels: Labels, integrity: Integrity) -> np.ndarray:
    """Which pages carry checksums, bool ``[pages]``; writers and readers agree without asking."""
    if integrity is Integrity.SAMPLE:
        return labels.identities[:, 0] % SAMPLED_ONE_IN == 0
    return np.full(len(labels), integrity is Integrity.FULL)


def fixed_parts(labels: Labels, geometry: Geometry, integrity: Integrity) -> np.ndarray:
    """The fixed part of every header, uint8 ``[pages, groups, 96]``."""
    headers = np.zeros((len(labels), geometry.groups), dtype=FIXED)
    headers["magic"] = MAGIC
    headers["version"] = FORMAT_VERSION
    headers["sealed"] = sealed_pages(labels, integrity)[:, None]
    headers["payload_bytes"] = geometry.payload_bytes
    headers["epoch"] = labels.epoch
    headers["group"] = geometry.first_group + np.arange(geometry.groups)
    headers["slabs"] = geometry.slabs
    headers["identity"] = labels.identities[:, None]
    headers["namespace"] = np.frombuffer(labels.namespace, dtype=np.uint8)
    return headers.view(np.uint8).reshape(len(labels), geometry.groups, FIXED.itemsize)


def diagnose(found: np.ndarray, expected: np.ndarray) -> Reason:
    """Why the headers of a page do not pass; both are its fixed parts, uint8 ``[groups, 96]``."""
    got, want = found.reshape(-1).view(FIXED), expected.reshape(-1).view(FIXED)
    for reason, fields in (
        (Reason.MAGIC, ("magic",)),
        (Reason.VERSION, ("version",)),
        (Reason.NAMESPACE, ("namespace",)),
        (Reason.EPOCH, ("epoch",)),
        (Reason.IDENTITY, ("identity",)),
        (Reason.GEOMETRY, ("sealed", "payload_bytes", "group", "slabs", "reserved")),
    ):
        if any(not np.array_equal(got[name], want[name]) for name in fields):
            return reason
    return Reason.CHECKSUM


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
