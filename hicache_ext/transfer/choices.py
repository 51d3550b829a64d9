"""What a user can choose about copies; no torch here, so that the command line stays quick."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class CopyBackendName(StrEnum):
    AUTO = "auto"
    """``staged`` where Triton runs, else ``torch``."""
    STAGED = "staged"
    TRITON = "triton"
    TORCH = "torch"


class FaultTier(StrEnum):
    TRANSFER = "transfer"
    """On the way from the device to the host, after the checksum was made."""
    HOST = "host"
    """In host memory, before the page is loaded."""


class FaultKind(StrEnum):
    FLIP = "flip"
    """One bit, anywhere in header or payload."""
    SWAP_PAGES = "swap-pages"
    SWAP_LAYERS = "swap-layers"
    SWAP_KV = "swap-kv"
    TRUNCATE = "truncate"
    """Zeros from some byte of the payload on."""
    REPLAY = "replay"
    """An older page, header and all, in place of this one."""
    FORGE = "forge"
    """A header that claims another version, namespace, epoch or identity."""


@dataclass(frozen=True)
class FaultPlan:
    """Damage each page that passes ``tier`` with probability ``rate``, by a kind chosen at random."""

    tier: FaultTier
    rate: float
    kinds: tuple[FaultKind, ...] = tuple(FaultKind)
    seed: int = 0


def parse_plan(text: str) -> FaultPlan:
    """``tier=host,rate=0.01[,kinds=flip+forge][,seed=1]``.

    Raises:
        ValueError: one line that names what cannot be read.
    """
    values = dict(part.partition("=")[::2] for part in text.split(","))
    unknown = sorted(set(values) - {"tier", "rate", "kinds", "seed"})
    if unknown:
        raise ValueError(f"{unknown[0]!r} is unknown; known are tier, rate, kinds and seed")
    if values.get("tier") not in list(FaultTier):
        raise ValueError(f"tier must be one of {', '.join(FaultTier)}")
    try:
        rate, seed = float(values.get("rate", "")), int(values.get("seed", "0"))
    except ValueError:
        raise ValueError("rate must be a number from 0 to 1, seed a whole number") from None
    if not 0 <= rate <= 1:
        raise ValueError("rate must be a number from 0 to 1")
    kinds = values["kinds"].split("+") if "kinds" in values else list(FaultKind)
    for kind in kinds:
        if kind not in list(FaultKind):
            raise ValueError(f"kind {kind!r} is unknown; known are {', '.join(FaultKind)}")
    return FaultPlan(FaultTier(values["tier"]), rate, tuple(FaultKind(k) for k in kinds), seed)
