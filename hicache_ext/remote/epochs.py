"""Looking for marks of higher epochs, and writing those of this server; the rule is in ``core.epochs``."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from hicache_ext.core.epochs import (
    MARK_GROUP,
    MARK_IDENTITY,
    chain,
    claim,
    decide,
    is_local,
    mark_header,
    probes,
)
from hicache_ext.remote.host_rows import HostRows
from hicache_ext.stores.base import Key
from hicache_ext.stores.stack import StackedStore
from hicache_ext.stores.workers import Fate, Workers

logger = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_RETRY_S = 0.2
"""While a store has not been asked yet, or a mark not written."""
_CALL_S = 1.0
_LATENESS_S = 0.1

Found = tuple[int, tuple[int, ...]]
"""The highest number that a store knows, and the marks of it that are missing there."""


class EpochWatch:
    """A thread that looks into each store about once a second.

    A store is used for pages once it has been asked for marks of the namespace, and the server is at the
    number that came of it (``asked``). After a flush of this server, that number is above all marks that were
    there when the store was first asked, and its own marks are there: what others have stored with it is of
    after the flush. A store that was away may have such a mark already; then a higher number is claimed.
    """

    def __init__(
        self,
        stack: StackedStore,
        rows: HostRows,
        page: int,
        interval: float = _INTERVAL_S,
        first_used: Callable[[bytes, int], None] | None = None,
    ) -> None:
        """``page`` is the scratch page that marks are written from; ``first_used`` is called once, on this
        thread, with a namespace and its epoch."""
        self._first_used = first_used
        self._stack = stack
        self._row = int(rows.rows(np.array([page]))[0])
        self._bytes = rows.buffer[self._row]
        self._interval = interval
        self._lock = threading.Lock()
        self._namespace: bytes | None = None
        self._own = 0
        # The highest shared number that is known; None after a flush, until one is claimed.
        self._shared: int | None = None
        # Whether this server has flushed the namespace.
        self._flushed = False
        # Of each store, since the namespace was first used or flushed: the highest mark when it was first
        # asked, or a bound of it; and the number from which on it is used.
        self._floor: list[int | None] = [None] * len(stack.stores)
        self._clear: list[int | None] = [None] * len(stack.stores)
        # Counts what makes the answer to a look worthless.
        self._round = 0
        self._closed = False
        self._wake = threading.Event()
        self._pool = Workers("remote epoch", len(stack.stores))
        self._thread = threading.Thread(target=self._loop, name="remote epochs", daemon=True)
        self._thread.start()

    def use(self, namespace: bytes, epoch: int) -> None:
        """What this server is at. At a local epoch, which follows a flush, a shared one is claimed; then
        ``learned`` says which."""
        with self._lock:
            if namespace == self._namespace and epoch == self._own:
                return
            if namespace == self._namespace and not is_local(epoch):
                self._shared = max(self._shared or 0, epoch)
            else:
                self._flushed = is_local(epoch)
                self._shared = None if self._flushed else epoch
                self._floor = [None] * len(self._floor)
                self._clear = [None] * len(self._clear)
            self._namespace, self._own = namespace, epoch
            self._round += 1
        self._wake.set()

    def learned(self) -> int | None:
        with self._lock:
            return None if self._clear.count(None) == len(self._clear) else self._shared

    def asked(self, store: int) -> bool:
        number, own = self._clear[store], self._own
        return number is not None and number <= own and not is_local(own)

    def close(self, timeout: float) -> None:
        self._closed = True
        self._wake.set()
        self._thread.join(timeout)
        self._pool.close(0.0)

    def _loop(self) -> None:
        while not self._closed:
            try:
                well = self._look()
            except Exception:
                logger.exception("hicache-ext: looking for epochs failed; it is tried again")
                well = False
            self._wake.wait(self._interval if well else min(_RETRY_S, self._interval))
            self._wake.clear()

    def _look(self) -> bool:
        """Ask all stores, and write what is missing; whether nothing is left to do."""
        with self._lock:
            namespace, own, shared, round_ = self._namespace, self._own, self._shared, self._round
            flushed, floor, clear = self._flushed, list(self._floor), list(self._clear)
        if namespace is None:
            return True
        found = self._look_into_all(namespace, own if shared is None else shared)
        if not found:
            return False
        for store, (top, missing) in found.items():
            if floor[store] is None:
                floor[store] = top - (top in missing)
        highest = max(top for top, _ in found.values())
        below = max(top for top in floor if top is not None)
        claims = flushed and (shared is None or shared <= below)
        if claims:
            highest = claim(max(own, shared or 0), highest)
            found = dict.fromkeys(found, (highest, tuple(chain(highest))))
        any_marked = False
        for store, (top, missing) in found.items():
            # Below the highest, what is missing is known after the next look.
            marked = top == highest and self._write(namespace, missing, store)
            any_marked = any_marked or marked
            if clear[store] is None and (marked or not flushed):
                clear[store] = highest
        known = clear.count(None) < len(clear)
        with self._lock:
            if round_ != self._round:
                return False
            self._floor, self._clear = floor, clear
            if any_marked or not claims:
                self._shared = shared = highest
        if self._first_used is not None and any(self.asked(store) for store in found):
            self._first_used(namespace, own)
            self._first_used = None
        return known and all(top == highest for top, _ in found.values())

    def _look_into_all(self, namespace: bytes, epoch: int) -> dict[int, Found]:
        """By store, of those that answer."""
        deadline = time.monotonic() + _CALL_S
        look = partial(self._look_into, namespace, epoch, deadline)
        parts = self._pool.run(look, range(len(self._stack.stores)), deadline + _LATENESS_S)
        return {p.value: p.result for p in parts if p.fate is Fate.DONE and p.result is not None}

    def _look_into(self, namespace: bytes, epoch: int, deadline: float, store: int) -> Found | None:
        while True:
            probed = probes(epoch)
            keys = [mark_key(namespace, number) for number in probed]
            outcome = self._stack.stores[store].exists(keys, deadline)
            if outcome.down or time.monotonic() >= deadline:
                return None
            decision = decide(epoch, probed, outcome.ok.tolist())
            if not decision.look_again:
                return decision.epoch, decision.missing
            epoch = decision.epoch

    def _write(self, namespace: bytes, numbers: Sequence[int], store: int) -> bool:
        """Write marks into a store; whether it has them all."""
        for number in numbers:
            deadline = time.monotonic() + _CALL_S
            if not self._fill(namespace, number):
                return False
            if not self._stack.put_to([store], [mark_key(namespace, number)], [self._row], deadline).ok[0]:
                return False
        return True

    def _fill(self, namespace: bytes, epoch: int) -> bool:
        """Put a mark's bytes into the row; False if a store may still read others there."""
        header = np.frombuffer(mark_header(namespace, epoch), np.uint8)
        self._stack.released()
        if np.array_equal(self._bytes[: len(header)], header) and not self._bytes[len(header) :].any():
            return True
        if self._stack.held_among([self._row]):
            return False
        self._bytes[:] = 0
        self._bytes[: len(header)] = header
        return True


def mark_key(namespace: bytes, epoch: int) -> Key:
    return Key(namespace, epoch, MARK_IDENTITY, MARK_GROUP)
