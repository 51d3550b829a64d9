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
