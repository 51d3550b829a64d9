"""The epoch of a namespace: a number that a flush advances, and how servers that share a store agree on it.

Pages are stored under the epoch in which they were *computed*, and a reader asks for its own epoch only. A
flush adds one and writes a *mark*, an object of its own in the store under the new number; other servers look
for marks above their number and adopt the highest. Weights are none of its business: each weight version has
a namespace of its own. ``docs/consistency.md`` has the reasons; the rule's test is exhaustive.

Pure functions and numbers; who calls them looks and writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hicache_ext.core.header import FIXED, MAGIC
from hicache_ext.core.page import FORMAT_VERSION

MARK_IDENTITY = b"epoch".ljust(16, b"\0")
MARK_GROUP = 2**16 - 1
WINDOW = 8
"""How many epochs above its own a server looks for at a time."""


def probes(epoch: int, window: int = WINDOW) -> list[int]:
    """The epochs whose marks to look for: the own one first, then those above.

    One call of the store's ``exists``. Besides the next epochs there are ever larger steps, so that a server
    that was away for many flushes finds a higher mark although those between may be lost.
    """
    steps = list(range(1, window + 1))
    while len(steps) < 2 * window:
        steps.append(2 * steps[-1])
    return [epoch, *(epoch + step for step in steps)]


@dataclass(frozen=True)
class Decision:
    """What a look at the marks asks for."""

    epoch: int
    """The server's from now on; if it is above the one before, condemn all that it holds of the namespace."""
    look_again: bool
    """There may be marks above: look again before the store is used."""
    write_mark: bool
    """The mark of ``epoch`` is missing: write it."""


def decide(epoch: int, probed: Sequence[int], found: Sequence[bool]) -> Decision:
    """What to do after ``probes(epoch)`` were looked for.

    Args:
        epoch: the server's when it *applies* the answer; a flush may have advanced it since the look.
        probed: the epochs that were looked for.
        found: whether the store has the mark of each. A mark that could not be looked for counts as missing
            only for writing it again: pass no answer at all if the store did not answer.
    """
    seen = {number for number, there in zip(probed, found, strict=True) if there}
    newest = max(seen, default=0)
    if newest > epoch:
        return Decision(newest, look_again=True, write_mark=False)
    # Epoch 0 needs no mark: it is where everybody starts.
    missing = epoch > 0 and epoch in probed and epoch not in seen
    return Decision(epoch, look_again=False, write_mark=missing)


def after_flush(epoch: int) -> int:
    """The epoch after a flush; its mark is to be written, again and again until the store has it."""
    return epoch + 1


def mark_header(namespace: bytes, epoch: int) -> bytes:
    """What a mark holds, 96 bytes; zeros follow to the length of an object. No page verifies against it."""
    header = np.zeros(1, FIXED)
    header["magic"] = MAGIC
    header["version"] = FORMAT_VERSION
    header["epoch"] = epoch
    header["group"] = MARK_GROUP
    header["identity"] = np.frombuffer(MARK_IDENTITY, np.uint8)
    header["namespace"] = np.frombuffer(namespace, np.uint8)
    return header.tobytes()
