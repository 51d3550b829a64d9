"""A circuit breaker: a store that does not answer costs a few deadlines, then nothing, until it is back.

closed     calls go to the store; ``failures`` calls in a row that it did not answer open the breaker
open       calls return misses at once; after a pause a probe is due
half-open  a probe is under way: an answer closes the breaker, no answer opens it with a longer pause

Requests never serve as probes: a background thread pings the store.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from hicache_ext.stores.base import Key, Outcome, Rows, Store, StoreStats, nothing

logger = logging.getLogger(__name__)


class State(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(frozen=True)
class BreakerSettings:
    failures: int = 3
    """Unanswered calls in a row that open the breaker."""
    pause: float = 0.5
    """Seconds from opening to the first probe; doubled after each probe that fails."""
    max_pause: float = 2.0
    """Seconds; with ``probe_timeout`` the bound on how long a healed store stays unused."""
    probe_timeout: float = 2.0
    """Seconds that a probe may take."""
    patience: float = 0.1
    """Seconds: that a call got no answer counts only if it had as long as this to wait."""


class CircuitBreaker:
    """The states above; ``clock`` gives seconds. Thread-safe."""

    def __init__(
        self, settings: BreakerSettings | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.settings = settings or BreakerSettings()
        self.clock = clock
        self.opened = 0
        self._lock = threading.Lock()
        self._state = State.CLOSED
        self._failures = 0
        self._pause = self.settings.pause
        self._probe_at = 0.0

    @property
    def state(self) -> State:
        return self._state

    def answered(self) -> None:
        """A call that was let through was answered."""
        with self._lock:
            if self._state is State.CLOSED:
                self._failures = 0

    def failed(self) -> bool:
        """A call that was let through was not answered. True if this opens the breaker."""
        with self._lock:
            if self._state is not State.CLOSED:
                return False
            self._failures += 1
            if self._failures < self.settings.failures:
                return False
            self._open(self.settings.pause)
            self.opened += 1
            return True

    def seconds_to_probe(self) -> float | None:
        """Until the next probe is due; None while closed or half-open."""
        with self._lock:
            return max(0.0, self._probe_at - self.clock()) if self._state is State.OPEN else None

    def start_probe(self) -> bool:
        """Go half-open if a probe is due. The caller that gets True must call ``probed``."""
        with self._lock:
            if self._state is not State.OPEN or self.clock() < self._probe_at:
                return False
            self._state = State.HALF_OPEN
            return True

    def probed(self, answered: bool) -> None:
        """The result of the probe under way."""
        with self._lock:
            if self._state is not State.HALF_OPEN:
                return
            if answered:
                self._state = State.CLOSED
                self._failures = 0
            else:
                self._open(min(2 * self._pause, self.settings.max_pause))

    def _open(self, pause: float) -> None:
        self._state = State.OPEN
        self._pause = pause
        self._probe_at = self.clock() + pause


class GuardedStore:
    """A store behind a circuit breaker; what the rest of the package uses.

    An exception of the store counts as no answer, so that a fault in a store never reaches a request. The
    rows of a transfer that ended so are held for good: nobody knows what may still touch them.
    """

    def __init__(
        self, inner: Store, name: str, breaker: CircuitBreaker | None = None, *, probing: bool = True
    ) -> None:
        """``probing`` False leaves ``probe`` to the caller."""
        self.inner = inner
        self.name = name
        self.breaker = breaker or CircuitBreaker()
        self._closed = threading.Event()
        self._opened = threading.Event()
        self._thread: threading.Thread | None = None
        if probing:
            self._thread = threading.Thread(target=self._probe_loop, name=f"probe {name}", daemon=True)
            self._thread.start()

    @property
    def object_bytes(self) -> int:
        return self.inner.object_bytes

    def register(self, buffer: np.ndarray) -> None:
        self.inner.register(buffer)

    def exists(self, keys: Sequence[Key], deadline: float) -> Outcome:
        return self._call(lambda: self.inner.exists(keys, deadline), len(keys), deadline)

    def get(self, keys: Sequence[Key], rows: Rows, deadline: float) -> Outcome:
        return self._call(lambda: self.inner.get(keys, rows, deadline), len(keys), deadline, transfer=True)

    def put(self, keys: Sequence[Key], rows: Rows, deadline: float, *, hot: bool = False) -> Outcome:
        return self._call(
            lambda: self.inner.put(keys, rows, deadline, hot=hot), len(keys), deadline, transfer=True
        )

    def remove(self, keys: Sequence[Key], deadline: float) -> Outcome:
        return self._call(lambda: self.inner.remove(keys, deadline), len(keys), deadline)

    def clear(self, namespace: bytes, below_epoch: int, deadline: float) -> bool:
        def clear() -> Outcome:
            done = self.inner.clear(namespace, below_epoch, deadline)
            return Outcome(np.array([done]), np.array([False]), down=not done)

        return bool(self._call(clear, 1, deadline).ok[0])

    def ping(self, deadline: float) -> bool:
        try:
            return self.inner.ping(deadline)
        except Exception:
            logger.exception("hicache-ext: the %s store failed while it was probed", self.name)
            return False

    def released(self) -> list[int]:
        return self.inner.released()

    def stats(self) -> StoreStats:
        stats = self.inner.stats()
        stats.state = self.breaker.state.value
        stats.opened = self.breaker.opened
        return stats

    def close(self) -> None:
        self._closed.set()
        self._opened.set()
        self.inner.close()
        if self._thread is not None:
            self._thread.join(self.breaker.settings.probe_timeout + 1)

    def probe(self) -> None:
        """Ping the store if a probe is due."""
        if not self.breaker.start_probe():
            return
        answered = self.ping(time.monotonic() + self.breaker.settings.probe_timeout)
        self.breaker.probed(answered)
        if answered:
            logger.warning("hicache-ext: the %s store answers again and is back in use", self.name)

    def _call(
        self, call: Callable[[], Outcome], count: int, deadline: float, *, transfer: bool = False
    ) -> Outcome:
        if self.breaker.state is not State.CLOSED:
            return nothing(count, down=True)
        wait = deadline - time.monotonic()
        if wait <= 0:
            return nothing(count)
        try:
            outcome = call()
        except Exception:
            logger.exception("hicache-ext: the %s store failed; treated as a miss", self.name)
            outcome = nothing(count, down=True)
            outcome.held[:] = transfer
        if not outcome.down:
            self.breaker.answered()
        elif wait >= self.breaker.settings.patience and self.breaker.failed():
            logger.warning(
                "hicache-ext: the %s store does not answer; it is not used until it does, requests recompute",
                self.name,
            )
            self._opened.set()
        return outcome

    def _probe_loop(self) -> None:
        while not self._closed.is_set():
            self._opened.wait()
            self._opened.clear()
            while not self._closed.is_set() and (pause := self.breaker.seconds_to_probe()) is not None:
                self._closed.wait(pause)
                if not self._closed.is_set():
                    self.probe()
