"""How fast this server computes, loads and fetches: measured at start, tracked while it serves.

A number is tracked as a quantile of its last few observations. A request that compiles, a batch that was
measured as one request or a stalled machine are single observations, and a quantile does not follow those.

Numbers differ from rank to rank. ``Speeds.measured`` is what this rank saw, good for decisions that the ranks
agree on afterwards; ``Speeds.agreed`` is equal on all ranks, good for decisions of the scheduler thread.
All methods may be called from any thread.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache_ext.core.policy.costs import CostModel

KEPT = 9
"""Observations of one number."""
STALE = 10.0
"""Seconds; older observations are dropped, but for the last two."""
MEASURED_TOKENS = 256
"""A pass of fewer tokens is mostly fixed cost, and says little about what a token costs."""

LAUNCH = 0.02
"""Seconds of a pass of few tokens, until some have been measured."""
LAUNCHES = 32
LAUNCH_QUANTILE = 1 / 10
"""Of so many passes, whatever they compute: the shortest ones are those of few tokens."""

PREFILL_QUANTILE = 1 / 3
"""Passes are measured too long more often than too short, and a prefill thought too dear means a wait."""
RATE_QUANTILE = 1 / 2

MEASURED_BYTES = 1 << 20
"""A smaller load is mostly fixed cost too."""

_SCALE_UNIT = 1e-9
_SECOND = 1_000_000_000


@dataclass(frozen=True, slots=True)
class StoreRate:
    """Seconds and bytes per second; ``known`` is False as long as both are guesses."""

    latency: float = 1e-3
    bandwidth: float = 1e9
    known: bool = False

    def seconds(self, nbytes: float) -> float:
        """A fetch of so many bytes."""
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True, slots=True)
class Rates:
    """All speeds at one moment."""

    costs: CostModel
    prefill_scale: float
    """What a pass takes, in units of what ``costs`` says."""
    launch: float
    """Seconds that a pass takes at least, however few tokens it computes."""
    load_bandwidth: float
    """Host to device, bytes per second."""
    stores: Mapping[str, StoreRate]
    clock: float = 0.0
    """Seconds since the start, as ranks agree on them."""

    def recompute(self, start: int, tokens: int) -> float:
        """Seconds of prefill of ``tokens`` behind ``start`` others."""
        return self.prefill_scale * self.costs.recompute(start, tokens)

    def load(self, nbytes: int) -> float:
        """Seconds to bring so many bytes from the host to the device."""
        return nbytes / self.load_bandwidth


class Track:
    """A positive number: the weighted quantile of its recent observations. Not thread-safe."""

    def __init__(self, prior: float, quantile: float, *, keep_prior: bool, kept: int = KEPT) -> None:
        """``keep_prior``: the prior was measured, so it counts like one observation until others replace it;
        otherwise it is a guess, and goes with the first observation."""
        self.value = prior
        self.count = 0
        self.last = float("-inf")
        """When it was observed last."""
        self._prior = prior if keep_prior else None
        self._quantile = quantile
        self._seen: deque[tuple[float, float, float]] = deque(maxlen=kept)

    def add(self, value: float, weight: float, now: float) -> None:
        """``weight`` is the size of what was measured: large transfers say more about a rate."""
        if not (0 < value < float("inf") and weight > 0):
            return
        if self._prior is not None and not self.count:
            self._seen.append((now, self._prior, weight))
        while len(self._seen) > 2 and now - self._seen[0][0] > STALE:
            self._seen.popleft()
        self._seen.append((now, value, weight))
        self.count += 1
        self.last = now
        wanted = self._quantile * sum(weight for _, _, weight in self._seen)
        for seen, part in sorted((value, weight) for _, value, weight in self._seen):
            self.value = seen
            wanted -= part
            if wanted <= 1e-12:
                break


class _StoreTrack:
    def __init__(self, prior: StoreRate) -> None:
        self.prior = prior
        self.latency = Track(prior.latency, RATE_QUANTILE, keep_prior=prior.known)
        self.bandwidth = Track(prior.bandwidth, RATE_QUANTILE, keep_prior=prior.known)
        self.fetches = 0
        self.since = 0.0
        self.nbytes = 0
        self.missing = 0

    def rate(self) -> StoreRate:
        known = self.prior.known or self.bandwidth.count > 0
        return StoreRate(self.latency.value, self.bandwidth.value, known)

    def observed(self, nbytes: int, seconds: float, now: float) -> None:
        moving = max(seconds - self.latency.value, seconds / 2)
        if nbytes > 0 and moving > 0:
            self.bandwidth.add(nbytes / moving, nbytes, now)


class Speeds:
    def __init__(
        self,
        costs: CostModel,
        stores: Mapping[str, StoreRate] | Sequence[str] = (),
        *,
        load_bandwidth: float = 10e9,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The priors must be equal on all ranks.

        Args:
            costs: prefill as measured at start (``fit_costs``), or as derived from the model's size.
            stores: the remote stores, with what a probe at start measured if there was one.
            load_bandwidth: host to device, bytes per second, measured at start.
            clock: seconds, from anywhere.
        """
        if not isinstance(stores, Mapping):
            stores = {name: StoreRate() for name in stores}
        self.costs = costs
        self._lock = threading.Lock()
        self._prefill = Track(1.0, PREFILL_QUANTILE, keep_prior=True)
        self._launch = Track(LAUNCH, LAUNCH_QUANTILE, keep_prior=True, kept=LAUNCHES)
        self._load = Track(load_bandwidth, RATE_QUANTILE, keep_prior=True)
        self._stores = {name: _StoreTrack(prior) for name, prior in stores.items()}
        self.clock, self._start = clock, clock()
        self._measured = self._agreed = self._rates()

    @property
    def measured(self) -> Rates:
        """What this rank sees; differs from rank to rank."""
        return self._measured

    @property
    def agreed(self) -> Rates:
        """The last vector adopted, the priors before that; equal on all ranks."""
        return self._agreed

    def observed_prefill(self, start: int, tokens: int, seconds: float, now: float) -> None:
        """A prefill of ``tokens`` behind ``start`` others took so long."""
        self.observed_pass([(start, tokens)], seconds, now)

    def observed_pass(
        self, parts: Sequence[tuple[int, int]], seconds: float, now: float, passes: int = 1
    ) -> None:
        """A prefill of several requests, each (tokens before it, its tokens), took so long together."""
        few = sum(tokens for _, tokens in parts) < passes * MEASURED_TOKENS
        expected = sum(self.costs.recompute(start, tokens) for start, tokens in parts)
        with self._lock:
            self._launch.add(seconds / passes, 1.0, now)
            if not few:
                self._prefill.add(seconds / expected, expected, now)
            self._measured = self._rates()

    def observed_load(self, nbytes: int, seconds: float, now: float) -> None:
        """A load from the host to the device took so long."""
        if nbytes < MEASURED_BYTES or seconds <= 0:
            return
        with self._lock:
            self._load.add(nbytes / seconds, nbytes, now)
            self._measured = self._rates()

    def observed_fetch(self, store: str, nbytes: int, seconds: float, now: float) -> None:
        """A fetch that had the store to itself took so long; others are for ``fetch_began``."""
        with self._lock:
            self._stores[store].observed(nbytes, seconds, now)
            self._measured = self._rates()

    def fetch_began(self, store: str, now: float) -> None:
        """A fetch starts that may overlap others; ``fetch_ended`` measures what they achieve together."""
        with self._lock:
            track = self._stores[store]
            if not track.fetches:
                track.since = now
            track.fetches += 1

    def fetch_ended(self, store: str, nbytes: int, now: float) -> None:
        """A fetch of ``fetch_began`` has brought so many bytes."""
        with self._lock:
            track = self._stores[store]
            # As many as there were when the first of them ended: they may end at about the same time.
            track.missing = (track.missing or track.fetches) - 1
            track.fetches -= 1
            track.nbytes += nbytes
            if track.missing:
                return
            track.observed(track.nbytes, now - track.since, now)
            track.since = now
            track.nbytes = 0
            self._measured = self._rates()

    def observed_nothing(self, store: str, nbytes: int, seconds: float, now: float) -> None:
        """Nothing of so many bytes had arrived after ``seconds``: the store is slower than that."""
        with self._lock:
            track = self._stores[store]
            if seconds > 0 and track.rate().known and nbytes / seconds < track.bandwidth.value:
                track.bandwidth.add(nbytes / seconds, nbytes, now)
                self._measured = self._rates()

    def observed_lookup(self, store: str, seconds: float, now: float) -> None:
        """A round trip without data took so long."""
        with self._lock:
            self._stores[store].latency.add(seconds, 1.0, now)
            self._measured = self._rates()

    def fetched_last(self, store: str) -> float:
        """When the store's bandwidth was observed last; -inf if never."""
        with self._lock:
            return self._stores[store].bandwidth.last

    def vector(self) -> npt.NDArray[np.int64]:
        """What this rank sees, int64 ``[4 + 2 * stores]``, for an all-reduce (MIN).

        Each minimum leans towards recomputation: the cheapest prefill, the slowest transfers. Latencies are
        negative for that, and a store that one rank knows nothing of has bandwidth 0.
        """
        rates = self._measured
        values = [
            int((self.clock() - self._start) * _SECOND),
            int(rates.prefill_scale / _SCALE_UNIT),
            int(rates.launch * _SECOND),
            int(rates.load_bandwidth),
        ]
        for store in rates.stores.values():
            values += [-math.ceil(store.latency * _SECOND), int(store.bandwidth) if store.known else 0]
        return np.array(values, dtype=np.int64)

    def adopt(self, vector: npt.NDArray[np.int64]) -> None:
        """The reduced vector becomes ``agreed``."""
        clock, prefill, launch, load, *rest = (int(value) for value in vector)
        if len(rest) != 2 * len(self._stores):
            raise ValueError(f"{len(vector)} numbers are not those of {len(self._stores)} stores")
        stores = {
            name: StoreRate(-rest[2 * i] / _SECOND, float(rest[2 * i + 1]) or 1.0, rest[2 * i + 1] > 0)
            for i, name in enumerate(self._stores)
        }
        scale, bandwidth = prefill * _SCALE_UNIT, float(max(load, 1))
        self._agreed = Rates(self.costs, scale, launch / _SECOND, bandwidth, stores, clock / _SECOND)

    def _rates(self) -> Rates:
        stores = {name: track.rate() for name, track in self._stores.items()}
        return Rates(self.costs, self._prefill.value, self._launch.value, self._load.value, stores)


def fit_costs(samples: Sequence[tuple[int, int, float]], load: float | None = None) -> CostModel:
    """The costs that explain prefills measured at start best, by relative error.

    Args:
        samples: (tokens before it, tokens, seconds), of different depths or lengths for ``depth`` to be seen.
        load: seconds a token to load; for who ranks by costs.

    Raises:
        ValueError: no sample, or one without tokens or time.
    """
    if not samples or any(tokens <= 0 or seconds <= 0 for _, tokens, seconds in samples):
        raise ValueError("prefill costs need samples of at least one token and some time")
    start, tokens, seconds = np.array(samples, dtype=float).T
    shape = np.stack([tokens, tokens * (start + tokens / 2)], axis=1) / seconds[:, None]
    unit = shape.max(axis=0)
    (token, depth), *_ = np.linalg.lstsq(shape / unit, np.ones(len(samples)), rcond=None)
    if token <= 0 or depth < 0 or len(samples) == 1:
        # The samples do not tell the two apart: all of it is the token's.
        token, depth = unit[0] / np.median(shape[:, 0]), 0.0
    return CostModel(
        float(token / unit[0]), float(depth / unit[1]), CostModel().load if load is None else load
    )
