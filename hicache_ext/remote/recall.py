"""Which pages the stores have, as far as this server knows.

A page that has left the device and the host and is computed again reaches the host again, and would be
written again. To be told by the store that it is there costs a core some milliseconds for every prompt.
"""

from __future__ import annotations

import threading
from itertools import islice

import numpy as np

from hicache_ext.core.header import Labels

_LIMIT = 1 << 16
"""Pages remembered, the latest: some 8 MB."""


class Recall:
    """Pages of one namespace and epoch, those of the latest write. From any thread."""

    def __init__(self, limit: int = _LIMIT) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._of: tuple[object, ...] = ()
        self._pages: dict[bytes, None] = {}

    def wrote(self, labels: Labels, stores: object) -> None:
        """These pages are in the stores in use now.

        ``stores`` says which those are, and changes when one of them has been away.
        """
        with self._lock:
            self._turn_to(labels, stores)
            for page in labels.identities:
                name = page.tobytes()
                self._pages.pop(name, None)
                self._pages[name] = None
            for name in list(islice(self._pages, max(len(self._pages) - self._limit, 0))):
                del self._pages[name]

    def lacks(self, labels: Labels, stores: object) -> np.ndarray:
        """Which pages are not known to be there, bool ``[pages]``."""
        with self._lock:
            self._turn_to(labels, stores)
            known = [page.tobytes() in self._pages for page in labels.identities]
        return ~np.array(known, np.bool_)

    def missed(self, labels: Labels) -> None:
        """The stores do not have these, so what was known of them says nothing any more."""
        with self._lock:
            if any(page.tobytes() in self._pages for page in labels.identities):
                self._pages.clear()

    def _turn_to(self, labels: Labels, stores: object) -> None:
        """Another namespace or epoch, or a store has come or gone or been away: nothing is known."""
        of = (labels.namespace, labels.epoch, stores)
        if of != self._of:
            self._of = of
            self._pages.clear()
