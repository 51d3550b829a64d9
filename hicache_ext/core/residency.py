"""Where a node's pages are."""

from __future__ import annotations

from enum import IntEnum


class Tier(IntEnum):
    DEVICE = 0
    HOST = 1


class Residency(IntEnum):
    ABSENT = 0
    PENDING = 1
    """Space is reserved and a transfer into it is under way."""
    READY = 2


class Doubt(IntEnum):
    """Why a node is out of reach of lookups until those who hold it have let go."""

    NONE = 0
    STALE = 1
    """Computed by older weights. A request that already uses it goes on."""
    CORRUPT = 2
    """It, or what it was computed from, came back damaged. Whoever uses it must compute again."""
