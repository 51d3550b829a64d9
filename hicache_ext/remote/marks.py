"""The marks by which servers that share a store agree on a namespace's epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MARK_IDENTITY = b"epoch".ljust(16, b"\0")
MARK_GROUP = 2**16 - 1
WINDOW = 64


@dataclass(frozen=True)
class Decision:
    epoch: int
    look_again: bool
    write_mark: bool


def probes(epoch: int, window: int = WINDOW) -> list[int]:
    """The epochs whose marks to look for: the own one first, then those above."""
    return list(range(epoch, epoch + window + 1))


def decide(epoch: int, probed: Sequence[int], found: Sequence[bool]) -> Decision:
    seen = {number for number, there in zip(probed, found, strict=True) if there}
    newest = max(seen, default=0)
    if newest > epoch:
        return Decision(newest, look_again=True, write_mark=False)
    return Decision(epoch, look_again=False, write_mark=epoch > 0 and epoch not in seen)


def mark_header(namespace: bytes, epoch: int) -> bytes:
    return b""
