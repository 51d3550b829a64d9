"""Looking for marks of higher epochs, and writing those of this server; the rule is in ``core.epochs``."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from hicache_ext.remote.host_rows import HostRows
from hicache_ext.remote.marks import MARK_GROUP, MARK_IDENTITY, decide, mark_header, probes
from hicache_ext.stores.base import Key
from hicache_ext.stores.stack import StackedStore
from hicache_ext.stores.workers import Fate, Workers

logger = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_RETRY_S = 0.2
"""While a store has not been asked yet, or a mark not written."""
_CALL_S = 1.0
_LATENESS_S = 0.1


class EpochWatch:
    """A thread that looks into each store about once a second.

    A store is used for pages only once it was asked for marks of the namespace (``asked``): a flush that this
    server missed must not be undone by what such a store still holds.
    """

    def __init__(
        self,
        stack: StackedStore,
        rows: HostRows,
        page: int,
        interval: float = _INTERVAL_S,
        first_learned: Callable[[bytes, int], None] | None = None,
    ) -> None:
        """``page`` is the scratch page that marks are written from; ``first_learned`` is called once, on this
        thread, with a namespace and its epoch."""
        self._first_learned = first_learned
        self._stack = stack
        self._row = int(rows.rows(np.array([page]))[0])
        self._bytes = rows.buffer[self._row]
        self._interval = interval
        self._lock = threading.Lock()
        self._namespace: bytes | None = None
        self._epoch = 0
        self._asked = [False] * len(stack.stores)
        # Marks to write: the epoch of a namespace, and the stores that do not have it yet.
        self._due: dict[bytes, tuple[int, set[int]]] = {}
        self._closed = False
        self._wake = threading.Event()
        self._pool = Workers("remote epoch", len(stack.stores))
        self._thread = threading.Thread(target=self._loop, name="remote epochs", daemon=True)
        self._thread.start()

    def use(self, namespace: bytes, epoch: int) -> None:
        with self._lock:
            if namespace == self._namespace:
                self._epoch = max(self._epoch, epoch)
                return
            self._namespace, self._epoch = namespace, epoch
            self._asked = [False] * len(self._asked)
        self._wake.set()

    def mark(self, namespace: bytes, epoch: int) -> None:
        with self._lock:
            if namespace == self._namespace:
                self._epoch = max(self._epoch, epoch)
            before = self._due.get(namespace)
            if before is None or before[0] < epoch:
                self._due[namespace] = (epoch, set(range(len(self._asked))))
        self._wake.set()

    def learned(self) -> int | None:
        with self._lock:
            return self._epoch if any(self._asked) else None

    def asked(self, store: int) -> bool:
        return self._asked[store]

    def close(self, timeout: float) -> None:
        self._closed = True
        self._wake.set()
        self._thread.join(timeout)
        self._pool.close(0.0)

    def _loop(self) -> None:
        while not self._closed:
            try:
                well = self._look() and self._write()
            except Exception:
                logger.exception("hicache-ext: looking for epochs failed; it is tried again")
                well = False
            self._wake.wait(self._interval if well else min(_RETRY_S, self._interval))
            self._wake.clear()

    def _look(self) -> bool:
        """Ask all stores; whether each has been asked by now."""
        with self._lock:
            namespace, epoch = self._namespace, self._epoch
        if namespace is None:
            return True
        stores = range(len(self._stack.stores))
        deadline = time.monotonic() + _CALL_S
        look = partial(self._look_into, namespace, epoch, deadline)
        for part in self._pool.run(look, stores, deadline + _LATENESS_S):
            if part.fate is not Fate.DONE or part.result is None:
                continue
            found, missing = part.result
            with self._lock:
                if namespace != self._namespace:
                    return False
                self._epoch = max(self._epoch, found)
                self._asked[part.value] = True
                epoch = self._epoch
                if missing and self._epoch == found:
                    wanted, where = self._due.get(namespace, (0, set()))
                    self._due[namespace] = (found, (where if wanted == found else set()) | {part.value})
        if self._first_learned is not None and any(self._asked):
            self._first_learned(namespace, epoch)
            self._first_learned = None
        return all(self._asked)

    def _look_into(
        self, namespace: bytes, epoch: int, deadline: float, store: int
    ) -> tuple[int, bool] | None:
        """The highest epoch that a store knows, and whether its mark is missing; None without answer."""
        while True:
            probed = probes(epoch)
            keys = [mark_key(namespace, number) for number in probed]
            outcome = self._stack.stores[store].exists(keys, deadline)
            if outcome.down or time.monotonic() >= deadline:
                return None
            decision = decide(epoch, probed, outcome.ok.tolist())
            if not decision.look_again:
                return decision.epoch, decision.write_mark
            epoch = decision.epoch

    def _write(self) -> bool:
        """Write the marks that are due; whether none is left."""
        with self._lock:
            due = [(ns, epoch, tuple(where)) for ns, (epoch, where) in self._due.items()]
        for namespace, epoch, where in due:
            if not self._fill(namespace, epoch):
                return False
            for store in where:
                key, deadline = mark_key(namespace, epoch), time.monotonic() + _CALL_S
                if not self._stack.put_to([store], [key], [self._row], deadline).ok[0]:
                    continue
                with self._lock:
                    newest, left = self._due[namespace]
                    if newest == epoch:
                        left.discard(store)
                        if not left:
                            del self._due[namespace]
        return not self._due

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
