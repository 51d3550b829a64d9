"""In which order queued requests are served: who costs the server least goes first, and nobody starves.

Cost is what is left to do for a request, in seconds: the load of what the host has or a store is about to
bring, and the prefill of the rest. Shortest first gives the lowest mean TTFT; a request that has been
overtaken for too long goes before all others, in the order of arrival.

Everything is measured in tokens and in speeds that are equal on all TP ranks, never in wall time, so all
ranks build the same batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hicache_ext.core.speeds import Rates

PATIENCE = 5.0
"""Seconds of prefill after which a request goes first; see ``order``."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A queued request; tokens of its prompt, each after those before it."""

    arrived: int
    """Tokens that the server had computed, for all requests since it started, when this one came."""
    tokens: int
    device: int = 0
    """Matched on the device."""
    host: int = 0
    """Matched on the host, behind those."""
    fetching: int = 0
    """On their way from a store, behind those."""
    shares: bool = False
    """A request before it computes a prefix that this one can use afterwards."""


def remaining_cost(request: Waiting, rates: Rates, token_bytes: float) -> float:
    """Seconds of load and prefill; what is dearer to load than to compute counts as computed.

    ``token_bytes``: KV of a token on this rank.
    """
    elsewhere = request.host + request.fetching
    cached = request.device + elsewhere
    load = rates.load(int(elsewhere * token_bytes))
    loaded = min(load, rates.recompute(request.device, elsewhere))
    return loaded + rates.recompute(cached, max(request.tokens - cached, 0))


def order(
    waiting: Sequence[Waiting],
    rates: Rates,
    token_bytes: float,
    computed: int,
    patience: float = PATIENCE,
) -> list[int]:
    """Positions in ``waiting``, which is in order of arrival, as they should be served.

    A request is overdue once the server has computed ``patience`` seconds' worth of tokens since it came.
    Those overdue come first, by arrival; so whoever comes after a request is served before it only within
    that span, and a queue that is longer than that is served by arrival. Then the others by cost, those that
    gain by waiting last; of equally dear ones who came first.

    Args:
        rates: agreed between ranks (``Speeds.agreed``).
        computed: tokens that the server has computed since it started.
    """
    allowed = patience / (rates.prefill_scale * rates.costs.token)

    def rank(position: int) -> tuple[bool, bool, float, int]:
        request = waiting[position]
        if computed - request.arrived >= allowed:
            return (False, False, 0.0, position)
        return (True, request.shares, remaining_cost(request, rates, token_bytes), position)

    return sorted(range(len(waiting)), key=rank)
