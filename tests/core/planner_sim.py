"""A server of one GPU and one store in virtual time: what the planner's decisions do to TTFT."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hicache_ext.core.planner import FetchPlan, LookupPlan, Planner
from hicache_ext.core.policy.costs import CostModel


@dataclass(frozen=True)
class Prompt:
    arrival: float
    tokens: int
    stored: int
    """Leading pages that the store holds."""


@dataclass(frozen=True)
class World:
    """What is true, whatever the planner thinks; rates in bytes per second."""

    costs: CostModel
    page_tokens: int
    page_bytes: int
    load_bandwidth: float
    latency: float
    bandwidth: Callable[[float], float]
    """Of the store over time; 0: it does not answer."""
    call_timeout: float = 0.5
    lookups_always: bool = False
    """Whether lookups are answered even when nothing can be fetched."""


def prompts(
    seed: int, count: int, tokens: tuple[int, int], world: World, *, busy: float, share: float = 0.9
) -> list[Prompt]:
    """Poisson arrivals that keep the GPU busy for a share of the time without a store."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(*tokens, count)
    mean = float(np.mean([world.costs.recompute(0, n) for n in lengths]))
    arrivals = np.cumsum(rng.exponential(mean / busy, count))
    stored = [int(n * share * rng.random()) // world.page_tokens for n in lengths]
    return [Prompt(float(a), int(n), s) for a, n, s in zip(arrivals, lengths, stored, strict=True)]


class Simulation:
    """Fetches go through the store one call after the other; of those ready, who came first is computed."""

    def __init__(self, world: World, planner: Planner | None, ahead_error: float = 1.0) -> None:
        """``ahead_error``: by what factor the wait for others is thought to be longer than it is."""
        self.world = world
        self.ahead_error = ahead_error
        self.planner = planner
        self.now = 0.0
        self.ttft: dict[Prompt, float] = {}
        self.waited: dict[Prompt, float] = {}
        """Seconds from arrival to readiness."""
        self.reused: dict[Prompt, int] = {}
        self.plans: list[FetchPlan] = []
        self.calls: list[tuple[float, float]] = []
        """When the store began to move bytes for a call, and for how many seconds."""
        self._held: dict[Prompt, LookupPlan | FetchPlan] = {}
        """Not ready, and what they wait for."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._gpu_free = 0.0
        self._queue: list[tuple[float, Prompt]] = []
        """Ready and not begun, by arrival."""
        self._pending: dict[Prompt, float] = {}
        """Arrived and not begun: seconds of prefill."""
        self._store_free = 0.0

    def run(self, load: list[Prompt]) -> Simulation:
        for prompt in load:
            self._at(prompt.arrival, lambda prompt=prompt: self._arrive(prompt))  # type: ignore[misc]
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
        return self

    def mean(self, after: float = 0.0, before: float = math.inf) -> float:
        chosen = [ttft for prompt, ttft in self.ttft.items() if after <= prompt.arrival < before]
        return float(np.mean(chosen))

    def _at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(time, self.now), next(self._order), event))

    def _arrive(self, prompt: Prompt) -> None:
        if self.planner is None:
            return self._ready(prompt, 0)
        ahead = max(self._gpu_free - self.now, 0.0) + sum(self._pending.values())
        self._pending[prompt] = self.world.costs.recompute(0, prompt.tokens)
        ahead *= self.ahead_error
        plan = self.planner.plan_lookup("store", 0, prompt.tokens, self.now, ahead=ahead)
        if plan.ask:
            end = self._call(0)
            late = end - self.now > self.world.call_timeout
            end = min(end, self.now + self.world.call_timeout)
            self._at(end, lambda: self._looked_up(prompt, plan, answered=not late))
        if not plan.ask:
            return self._ready(prompt, 0)
        self._held[prompt] = plan
        self._watch(prompt, plan)
        return self._begin()

    def _looked_up(self, prompt: Prompt, lookup: LookupPlan, answered: bool) -> None:
        assert self.planner is not None
        pages = prompt.stored if answered else 0
        self.planner.looked_up(lookup, pages, self.now, answered=answered)
        ready = prompt in self.waited
        if not pages:
            if not ready:
                self._ready(prompt, 0)
            return
        plan = self.planner.plan_fetch(
            "store", 0, pages, self.now, since=lookup.started, ahead=0.0 if ready else lookup.ahead
        )
        self.plans.append(plan)
        wait = plan.wait and not ready
        if wait:
            self._held[prompt] = plan
            self._watch(prompt, plan)
        elif not ready:
            self._ready(prompt, 0)
        if plan.pages:
            self._window(prompt, plan, 0, wait)

    def _watch(self, prompt: Prompt, plan: LookupPlan | FetchPlan) -> None:
        """The scheduler admits the request when its deadline, as it is then, has passed."""
        if self._held.get(prompt) is not plan:
            return
        if self.now >= plan.deadline:
            self._ready(prompt, self.reused.get(prompt, 0))
        else:
            self._at(plan.deadline, lambda: self._watch(prompt, plan))

    def _window(self, prompt: Prompt, plan: FetchPlan, done: int, wait: bool) -> None:
        assert self.planner is not None
        pages = min(plan.window, plan.pages - done)
        began, end = self.now, self._call(pages * self.world.page_bytes)

        def ended() -> None:
            assert self.planner is not None
            if end > self.now:
                self.planner.ended(plan, done, self.now)
                if wait and prompt not in self.waited:
                    self._ready(prompt, done)
                return
            nbytes = pages * self.world.page_bytes
            self.planner.speeds.observed_fetch("store", nbytes, self.now - max(began, served), self.now)
            self.planner.arrived(plan, done + pages, self.now)
            if wait and prompt not in self.waited:
                self.reused[prompt] = done + pages
            if done + pages < plan.pages and self.now < plan.deadline:
                return self._window(prompt, plan, done + pages, wait)
            self.planner.ended(plan, done + pages, self.now)
            if wait and prompt not in self.waited:
                self._ready(prompt, done + pages)
            return None

        served = end - self.world.latency - pages * self.world.page_bytes / (self._bandwidth() or 1.0)
        self._at(min(end, plan.deadline), ended)

    def _bandwidth(self) -> float:
        return self.world.bandwidth(self.now)

    def _call(self, nbytes: int) -> float:
        """When a call made now ends; a transfer that nobody waits for any more still takes its time."""
        if not self._bandwidth():
            return math.inf if nbytes or not self.world.lookups_always else self.now + self.world.latency
        begin = max(self.now, self._store_free) if nbytes else self.now
        end = begin + self.world.latency + nbytes / self._bandwidth()
        if nbytes:
            self._store_free = end
            self.calls.append((begin, end - begin))
        return end

    def _ready(self, prompt: Prompt, pages: int) -> None:
        world = self.world
        self._held.pop(prompt, None)
        self.waited[prompt] = self.now - prompt.arrival
        self.reused[prompt] = pages
        tokens = pages * world.page_tokens
        self._pending[prompt] = world.costs.recompute(tokens, prompt.tokens - tokens)
        heapq.heappush(self._queue, (prompt.arrival, prompt))
        self._begin()

    def _begin(self) -> None:
        if self.now < self._gpu_free:
            return
        first = self._queue[0][0] if self._queue else math.inf
        for held, plan in list(self._held.items()):
            if held.arrival < first and self.planner is not None:
                before = plan.deadline
                self.planner.turn_came(plan, self.now)
                if plan.deadline < before or self.now >= plan.deadline:
                    self._watch(held, plan)
                    if self.now < self._gpu_free:
                        return
        if not self._queue:
            return
        _, prompt = heapq.heappop(self._queue)
        world = self.world
        compute = self._pending.pop(prompt)
        pages = self.reused[prompt]
        self._gpu_free = self.now + pages * world.page_bytes / world.load_bandwidth + compute

        def done() -> None:
            self.ttft[prompt] = self.now - prompt.arrival
            if self.planner is not None:
                tokens = pages * world.page_tokens
                self.planner.speeds.observed_prefill(tokens, prompt.tokens - tokens, compute, self.now)
            self._begin()

        self._at(self._gpu_free, done)
