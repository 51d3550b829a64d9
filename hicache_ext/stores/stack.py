"""Several stores as one, the nearest first.

exists   in any of them
get      from the nearest that has it; what one misses, the next is asked for
put      into all of them side by side, so that one that is slow or away costs the others nothing;
         stored if one has stored it
remove   from all of them

An outcome is down if no store has answered: one that has makes it as good an answer as that store's own.

A row is held as long as any of them holds it. The stores are expected behind circuit breakers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from hicache_ext.stores.base import Key, Outcome, Rows, Store, StoreError, StoreStats, nothing
from hicache_ext.stores.several import ORPHAN_S, Ask, Several, Share, total


class StackedStore:
    def __init__(
        self,
        stores: Sequence[Store],
        writes: Sequence[bool] | None = None,
        usable: Callable[[int], bool] | None = None,
        orphan_s: float = ORPHAN_S,
    ) -> None:
        """``writes`` says which stores are written to, by default all; a store that is not ``usable`` now is
        passed over as if it were down. Raises StoreError if the object sizes differ, or there is none."""
        sizes = sorted({store.object_bytes for store in stores})
        if len(sizes) != 1:
            raise StoreError(f"stores of one stack hold objects of one size, not {sizes or 'none'}")
        self.object_bytes = sizes[0]
        self.stores = list(stores)
        self._writes = list(writes) if writes is not None else [True] * len(stores)
        self._usable = usable or (lambda _: True)
        self._several = Several(stores, "store stack", threads=2 * len(stores), orphan_s=orphan_s)

    def register(self, buffer: np.ndarray) -> None:
        for store in self.stores:
            store.register(buffer)

    def exists(self, keys: Sequence[Key], deadline: float) -> Outcome:
        return self._nearest_first(lambda store, k, _, d: store.exists(k, d), keys, None, deadline)

    def get(self, keys: Sequence[Key], rows: Rows, deadline: float) -> Outcome:
        outcome = self._nearest_first(lambda store, k, r, d: store.get(k, r, d), keys, rows, deadline)
        return self._several.report(rows, outcome)

    @property
    def writing(self) -> bool:
        """Whether there is a store that puts go to."""
        return any(self._writes)

    def put(self, keys: Sequence[Key], rows: Rows, deadline: float, *, hot: bool = False) -> Outcome:
        return self.put_to([i for i in self._now() if self._writes[i]], keys, rows, deadline, hot=hot)

    def put_to(
        self, which: Sequence[int], keys: Sequence[Key], rows: Rows, deadline: float, *, hot: bool = False
    ) -> Outcome:
        """``put`` into some of the stores, by number, whether they are usable and written to or not."""
        everything = np.arange(len(keys))
        shares = [Share(i, everything) for i in which]
        outcomes = self._several.ask(
            shares, lambda store, k, r, d: store.put(k, r, d, hot=hot), keys, rows, deadline
        )
        ok, held = np.zeros(len(keys), np.bool_), np.zeros(len(keys), np.bool_)
        for outcome in outcomes:
            ok |= outcome.ok
            held |= outcome.held
        # Unlike one store's, a row may be stored and held: by another store.
        return self._several.report(rows, Outcome(ok, held, all(outcome.down for outcome in outcomes)))

    def remove(self, keys: Sequence[Key], deadline: float) -> Outcome:
        everything = np.arange(len(keys))
        now = self._now()
        outcomes = self._several.ask(
            [Share(i, everything) for i in now],
            lambda store, k, _, d: store.remove(k, d),
            keys,
            None,
            deadline,
        )
        outcome = nothing(len(keys), down=all(o.down for o in outcomes))
        outcome.ok[:] = len(now) == len(self.stores)
        for part in outcomes:
            outcome.ok[:] &= part.ok
        return outcome

    def clear(self, namespace: bytes, below_epoch: int, deadline: float) -> bool:
        everyone = range(len(self.stores))
        return all(
            self._several.side_by_side(
                lambda s: s.clear(namespace, below_epoch, deadline), everyone, deadline
            )
        )

    def ping(self, deadline: float) -> bool:
        """Whether one of them answers."""
        return any(self._several.side_by_side(lambda s: s.ping(deadline), range(len(self.stores)), deadline))

    def released(self) -> list[int]:
        return self._several.released()

    def held_among(self, rows: Iterable[int]) -> set[int]:
        """Those of the rows that are held, as of the last ``released``."""
        return self._several.held.among(rows)

    def stats(self) -> StoreStats:
        """Of all together; each store's own are in ``stores``."""
        return total([store.stats() for store in self.stores], len(self._several.held))

    def close(self) -> None:
        self._several.close()

    def _now(self) -> list[int]:
        return [i for i in range(len(self.stores)) if self._usable(i)]

    def _nearest_first(self, ask: Ask, keys: Sequence[Key], rows: Rows | None, deadline: float) -> Outcome:
        ok, held = np.zeros(len(keys), np.bool_), np.zeros(len(keys), np.bool_)
        left = np.arange(len(keys))
        down = True
        for index in self._now():
            if not len(left) or time.monotonic() >= deadline:
                break
            (outcome,) = self._several.ask([Share(index, left)], ask, keys, rows, deadline)
            ok[left], held[left] = outcome.ok, outcome.held
            down &= outcome.down
            left = left[~(outcome.ok | outcome.held)]
        return Outcome(ok, held, down)
