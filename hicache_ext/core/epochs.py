"""The epoch of a namespace: a number that a flush advances, and how servers that share a store agree on it.

A page is stored under the epoch in which it was *computed*, and a reader asks for its own epoch only. Weights
are none of its business: each weight version has a namespace of its own.

* Even numbers are shared, odd ones are local: pages of an odd epoch never go to a store, nor are they asked
  for. A namespace starts at 0.
* A flush makes the number odd (``flushed``) and so condemns all that the server holds, at once and without
  the store. Then the server looks for *marks*, objects of their own in the store, and claims the next even
  number above all that it finds (``claim``): it writes the marks of that number, and takes the number when
  the store has them all. A look that began before the flush does not count.
* Before a server uses the store for a namespace, and about once a second, it looks for marks above its number
  and takes the highest, condemning what it holds of a lower one.
* While it lives at a number it writes marks of it again that are missing.

So what is stamped with a number was computed after that number's mark was in the store; and a flush, which
saw no such mark when it looked, is earlier. ``docs/consistency.md`` says what follows, and what does not.

A number is marked at itself and at what remains as its lowest set bits are cleared (``chain``): a server that
starts finds the highest number in a few calls, although a store may have evicted the marks of all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hicache_ext.core.header import FIXED, MAGIC
from hicache_ext.core.page import FORMAT_VERSION

MARK_IDENTITY = b"epoch".ljust(16, b"\0")
MARK_GROUP = 2**16 - 1
"""A mark's key is (namespace, number, ``MARK_IDENTITY``, ``MARK_GROUP``)."""
BITS = 32
"""Numbers are below 2 to this power."""


def is_local(epoch: int) -> bool:
    """Whether its pages stay in this server."""
    return epoch % 2 == 1


def flushed(epoch: int) -> int:
    """The epoch from the moment of a flush on."""
    return (epoch + 1) | 1


def claim(epoch: int, highest: int) -> int:
    """The number to claim after a flush, given the highest mark of a look that began after it."""
    return (max(epoch, highest) | 1) + 1


def chain(epoch: int) -> list[int]:
    """The numbers whose marks a server at a shared epoch keeps in the store, its own last; ascending."""
    numbers = []
    while epoch:
        numbers.append(epoch)
        epoch &= epoch - 1
    return numbers[::-1]


def probes(epoch: int) -> list[int]:
    """The numbers whose marks to look for, in one call of the store's ``exists``.

    First those that a server at ``epoch`` keeps, then some above, such that the chain of every higher number
    has one of them. At a local epoch only what is above counts.
    """
    kept = [] if is_local(epoch) else chain(epoch)
    return [*kept, *(((epoch >> bit) | 1) << bit for bit in range(1, BITS) if not epoch >> bit & 1)]


@dataclass(frozen=True)
class Decision:
    epoch: int
    """The highest number so far."""
    look_again: bool
    """There may be higher ones: look for ``probes(epoch)`` of this epoch before anything is concluded."""
    missing: tuple[int, ...]
    """Marks of ``epoch`` that the store does not have, to be written if the server is or will be at it."""


def decide(epoch: int, probed: Sequence[int], found: Sequence[bool]) -> Decision:
    """What the answer to ``probes(epoch)`` means: whether each mark is there.

    A look is one or more of these, begun with the server's own epoch. At its end a server at a shared epoch
    adopts ``Decision.epoch``; one at a local epoch writes the marks of ``claim(own, Decision.epoch)``. If the
    store does not answer, or a flush or an update has come meanwhile, the look begins anew.
    """
    there = {number for number, ok in zip(probed, found, strict=True) if ok}
    highest = max(there, default=0)
    if highest > epoch:
        return Decision(highest, True, ())
    kept = [] if is_local(epoch) else chain(epoch)
    return Decision(epoch, False, tuple(number for number in kept if number not in there))


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
