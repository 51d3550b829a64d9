"""Load, fetch or recompute, and how much of each; ``docs/planner.md`` has the rules and what they guarantee.

A page is fetched only if it is expected on the device before it would have been computed. How long a request
waits is not left to that estimate: it may lose at most its *allowance* against recomputation, and what a
fetch has brought so far extends its deadline by what it saved. Losses are paid from the store's *credit*, a
hundredth of the prefill seconds of all requests, so a store that keeps disappointing is not waited for.

Nothing here reads a clock: ``now`` is ``time.monotonic()``. All methods may be called from any thread.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hicache_ext.core.speeds import Rates, Speeds, StoreRate


@dataclass(frozen=True)
class PlanSettings:
    """Seconds unless the name says otherwise."""

    margin: float = 1.15
    """A fetch is taken to last so many times its estimate when it is compared with recomputation."""
    max_loss: float = 0.045
    """What a request may lose to a fetch that brings nothing."""
    max_lookup: float = 0.015
    """What a request may lose to a lookup. With ``max_loss`` and a scheduler step well below 0.1."""
    loss_share: float = 0.25
    lookup_share: float = 0.05
    """The same as shares of the prefill that is at stake."""
    slack: float = 2.0
    grace: float = 0.01
    """A call to a store is late after ``slack`` times its estimate plus ``grace``."""
    patience: float = 0.1
    """Grace as a share of the prefill at stake: a thread that is held up for a moment is no slow store."""
    window: float = 0.01
    """What one call to a store should last at least, so that its latency does not count."""
    growth: int = 4
    """A call has at most so many times the pages of the one before it."""
    unpaid: int = 2
    """After so many calls in a row that took longer than to compute what they brought, no other is made."""
    credit: float = 0.2
    """What a store's disappointments may cost at start, all together."""
    credit_share: float = 0.01
    """Of the prefill of every request that asks for the store, added to the credit."""
    credit_back: float = 0.1
    """Of what a fetch saved, added to the credit."""
    max_credit: float = 2.0
    pause: float = 1.0
    max_pause: float = 30.0
    """A store that brought nothing is not waited for so long, doubled each time in a row."""
    trial_bytes: int = 4 << 20
    """Bytes of a fetch that only measures; at least one page."""
    trial_interval: float = 5.0
    """A store in use is measured all the time; one that is not, at most so often."""
    max_trial_interval: float = 20.0
    """The interval doubles up to this with every trial in a row that does not pay, from the second on."""
    write_gain: float = 2.0
    """A page is worth writing if it takes so many times as long to compute as to fetch: fetched once, it has
    won back what the write took."""
    useless: float = 5.0
    """A store that was worth writing to is so until no request has had such a page for so long."""
    trial_share: float = 0.02
    """Of the time that a store may be busy with such measurements."""


ALWAYS = PlanSettings(
    margin=0.0,
    max_loss=2.0,
    max_lookup=1.0,
    loss_share=math.inf,
    lookup_share=math.inf,
    grace=2.0,
    credit=1e9,
    max_credit=1e9,
    pause=0.0,
    max_pause=0.0,
    write_gain=-math.inf,
)
"""Whatever a store has is fetched, and a request may lose seconds by that. For tests."""


@dataclass
class Honesty:
    """What was estimated and what happened, of one store; counts, seconds and pages since start."""

    lookups: int = 0
    """Lookups that a request waited for."""
    lookups_late: int = 0
    """Of these, not answered in time."""
    fetches: int = 0
    """Ended fetches that a request waited for."""
    trials: int = 0
    """Ended fetches that nobody waited for."""
    declined: int = 0
    """The store had pages, but recomputing them was expected to be faster."""
    distrusted: int = 0
    """The store was expected to be faster, but has disappointed too much of late."""
    whole: int = 0
    """Fetches that brought all they should."""
    late: int = 0
    """Of these, after 1.5 times the estimate."""
    abandoned: int = 0
    """Fetches given up at their deadline, by the store or because they do not pay; what had arrived is
    used."""
    failed: int = 0
    """Of these, nothing had arrived."""
    pages_planned: int = 0
    pages_arrived: int = 0
    estimated_seconds: float = 0.0
    actual_seconds: float = 0.0
    """Of the whole fetches, from plan to the arrival of the last page."""
    saved_seconds: float = 0.0
    """Prefill that needed no computing, less loads and waits, where that is positive."""
    lost_seconds: float = 0.0
    """Waits for lookups and fetches beyond what they saved."""

    def __add__(self, other: Honesty) -> Honesty:
        return Honesty(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


@dataclass(slots=True, eq=False)
class LookupPlan:
    store: str
    ask: bool
    """Whether to ask the store at all."""
    deadline: float
    """Until when a request may be held back for the answer; not after ``started`` if it may not."""
    started: float
    ahead: float
    allowance: float = 0.0


@dataclass(slots=True, eq=False)
class FetchPlan:
    """Of the pages that the store holds, fetch the first ``pages`` in order, ``window`` at a time."""

    store: str
    start: int
    pages: int
    """0: recompute all."""
    window: int
    """Pages of the next call to the store; ``arrived`` changes it."""
    wait: bool
    """Whether the request is held back for it; without, the fetch goes on in the background."""
    started: float
    since: float
    """Since when the request has been held back."""
    ahead: float
    expected: float
    """When its pages are expected on the host."""
    finish: float
    """When they are expected on the device."""
    recompute_finish: float
    """When they would have been computed."""
    deadline: float
    """Until when the request may wait, and calls to the store may last; ``arrived`` extends it."""
    allowance: float
    most: int
    """Pages of one call at most."""
    _arrived: int = 0
    _called: float = -math.inf
    """When the call under way began."""
    _unpaid: int = 0
    """Calls in a row that did not pay."""
    _over: bool = False
    """No other call is to be made."""
    _ended: bool = False


@dataclass
class _StoreState:
    credit: float
    honesty: Honesty = field(default_factory=Honesty)
    queued: int = 0
    """Bytes planned and not yet arrived."""
    failures: int = 0
    paused: float = -math.inf
    """Until when it is not waited for."""
    trial: FetchPlan | None = None
    next_trial: float = -math.inf
    unpaid_trials: int = 0
    """Trials in a row that did not pay."""
    useless: float | None = None
    """Since when no request had a page that is worth writing, the latency left aside; -inf if none ever
    had."""
    gained: bool = False
    """Whether one had."""


class Planner:
    def __init__(
        self, speeds: Speeds, page_tokens: int, page_bytes: int, settings: PlanSettings | None = None
    ) -> None:
        """``page_bytes``: what this rank fetches of one page."""
        self.speeds = speeds
        self.page_tokens = page_tokens
        self.page_bytes = page_bytes
        self.settings = settings or PlanSettings()
        self._lock = threading.Lock()
        self._stores = {name: _StoreState(self.settings.credit) for name in speeds.measured.stores}

    # Stores: on worker threads

    def plan_lookup(
        self, store: str, start: int, tokens: int, now: float, *, ahead: float = 0.0
    ) -> LookupPlan:
        """Whether to ask the store for a request with ``tokens`` to compute behind ``start`` others.

        ``ahead``: seconds that the request is expected to wait for others anyway (``turn_came`` corrects it).
        Whoever is not ready when its turn comes may have to wait for another's whole prefill, so these
        seconds are not added to what it may lose.
        """
        pages = tokens // self.page_tokens
        with self._lock:
            state, rates = self._stores[store], self.speeds.measured
            rate = rates.stores[store]
            at_stake = rates.recompute(start, pages * self.page_tokens)
            self._earn(state, self.settings.credit_share * at_stake)
            best = self._best(rates, rate, start, pages, ahead, state.queued) if rate.known else 0
            if pages:
                last = start + (pages - 1) * self.page_tokens
                fetch = self.page_bytes / rate.bandwidth
                gains = self.settings.write_gain * fetch < self._saved(rates, last, 1)
                if gains or not rate.known:
                    state.useless = None
                    state.gained = state.gained or rate.known
                elif state.useless is None:
                    state.useless = now if state.gained else -math.inf
            most = self._allowance(state, rates.recompute(start, best * self.page_tokens))
            left = max(ahead, most) - rate.latency
            if not best or now < state.paused or not self._affordable(rate, state.queued, left):
                return LookupPlan(store, bool(pages) and self._trial_due(store, now), now, now, ahead)
            late = self.settings.slack * rate.latency + self.settings.grace
            allowance = min(self._allowance(state, at_stake, lookup=True), late)
            return LookupPlan(store, True, now + max(ahead, allowance), now, ahead, allowance)

    def looked_up(self, plan: LookupPlan, pages: int, now: float, *, answered: bool = True) -> None:
        """The store has so many of the leading pages; ``answered`` is False if it did not say.

        Call it for every plan that said ``ask``.
        """
        if answered:
            self.speeds.observed_lookup(plan.store, now - plan.started, now)
        with self._lock:
            state = self._stores[plan.store]
            if plan.deadline > plan.started:
                state.honesty.lookups += 1
                state.honesty.lookups_late += not answered or now > plan.deadline
                if not pages:
                    self._spend(state, max(min(now, plan.deadline) - plan.started - plan.ahead, 0.0))
            if not answered:
                self._fail(state, now)

    def plan_fetch(
        self,
        store: str,
        start: int,
        pages: int,
        now: float,
        *,
        since: float | None = None,
        ahead: float = 0.0,
        queued_bytes: int = 0,
    ) -> FetchPlan:
        """How many of ``pages`` behind ``start`` tokens, all of which the store holds, to fetch.

        A plan with pages must be given to ``ended``, once its fetch is over.

        Args:
            since: since when the request has been held back, for the lookup.
            ahead: as for ``plan_lookup``, counted from ``since``: to fetch meanwhile costs nothing.
            queued_bytes: what the store has to do before it besides the fetches planned here, such as puts.
        """
        since = now if since is None else since
        settings = self.settings
        with self._lock:
            state, rates = self._stores[store], self.speeds.measured
            rate = rates.stores[store]
            queued = state.queued + queued_bytes
            lost = max(now - since - ahead, 0.0)
            free = max(since + ahead - now, 0.0)
            best = self._best(rates, rate, start, pages, free, queued) if rate.known else 0
            allowance = self._allowance(state, rates.recompute(start, best * self.page_tokens))
            affordable = self._affordable(rate, queued, since + max(ahead, allowance) - now)
            wait = best > 0 and affordable > 0 and now >= state.paused
            if wait:
                count = best
                seconds = max(settings.window, 10 * rate.latency)
                most = min(count, max(1, int(seconds * rate.bandwidth / self.page_bytes)))
                window = min(most, affordable, self._first(rates, rate, start, most, queued))
            else:
                if pages:
                    state.honesty.distrusted += best > 0
                    state.honesty.declined += best == 0
                    self._spend(state, lost)
                trial = pages > 0 and self._trial_due(store, now)
                count = most = min(pages, max(1, settings.trial_bytes // self.page_bytes)) if trial else 0
                window = self._first(rates, rate, start, most, queued)
            nbytes = count * self.page_bytes
            expected = now + (rate.seconds(queued + nbytes) if count else 0.0)
            plan = FetchPlan(
                store=store,
                start=start,
                pages=count,
                window=window,
                wait=wait,
                started=now,
                since=since,
                ahead=ahead,
                expected=expected,
                finish=max(expected, now + free) + rates.load(nbytes),
                recompute_finish=now + free + rates.recompute(start, count * self.page_tokens),
                deadline=now,
                allowance=allowance,
                most=most,
                _called=now,
            )
            if wait:
                plan.deadline = self._deadline(plan, rates, now, queued)
            elif count:
                # Long enough to measure a slow store, and over before the next trial.
                plan.deadline = now + settings.trial_interval
                state.trial = plan
            state.queued += nbytes
            return plan

    def arrived(self, plan: FetchPlan, pages: int, now: float) -> None:
        """So many of the plan's leading pages have arrived and verified, and the next call is about to begin.

        ``deadline`` moves on, unless the fetch turns out not to pay: then it is now.
        """
        with self._lock:
            state = self._stores[plan.store]
            before, began, plan._called = plan._arrived, plan._called, now
            self._progress(state, plan, pages)
            if plan._arrived > before:
                self._judge(plan, before, now - began, now)
            if plan.wait and not plan._ended and not plan._over:
                others = state.queued - (plan.pages - plan._arrived) * self.page_bytes
                plan.deadline = max(plan.deadline, self._deadline(plan, self.speeds.measured, now, others))

    def turn_came(self, plan: LookupPlan | FetchPlan, now: float) -> None:
        """The request could be admitted now if it did not wait: no more of its wait is for others.

        Call it in every step in which that is so, before looking at ``deadline``. Only the first counts.
        """
        with self._lock:
            began = plan.started if isinstance(plan, LookupPlan) else plan.since
            if now - began >= plan.ahead:
                return
            plan.ahead = now - began
            until = began + max(plan.ahead, plan.allowance)
            if isinstance(plan, FetchPlan):
                until += self._saved(self.speeds.measured, plan.start, plan._arrived)
            plan.deadline = min(plan.deadline, until)

    def withdrawn(self, plan: FetchPlan, now: float) -> None:
        """The fetch came to nothing, through no fault of the store: nobody asked it, or nobody waits."""
        with self._lock:
            if plan._ended or not plan.pages:
                return
            state = self._stores[plan.store]
            plan._ended = True
            state.queued -= (plan.pages - plan._arrived) * self.page_bytes
            if not plan.wait:
                state.trial = None

    def ended(self, plan: FetchPlan, pages: int, now: float) -> None:
        """The fetch is over with so many leading pages; counts once, so an abort may call it too."""
        with self._lock:
            if plan._ended or not plan.pages:
                return
            state = self._stores[plan.store]
            self._progress(state, plan, pages)
            plan._ended = True
            state.queued -= (plan.pages - plan._arrived) * self.page_bytes
            honesty = state.honesty
            honesty.pages_planned += plan.pages
            honesty.pages_arrived += plan._arrived
            if plan._arrived == plan.pages:
                honesty.whole += 1
                honesty.late += now - plan.started > 1.5 * (plan.expected - plan.started)
                honesty.estimated_seconds += plan.expected - plan.started
                honesty.actual_seconds += now - plan.started
            else:
                honesty.abandoned += 1
            if plan.wait:
                honesty.fetches += 1
                waited = min(now, plan.deadline) - plan.since - plan.ahead
                lost = max(waited, 0.0) - self._saved(self.speeds.measured, plan.start, plan._arrived)
                self._spend(state, lost)
                paid = lost <= 0
            else:
                paid = plan._arrived > 0 and not plan._unpaid
                honesty.trials += 1
                state.trial = None
                state.unpaid_trials = 0 if paid else min(state.unpaid_trials + 1, 16)
                state.next_trial = now + self._trial_pause(state, now - plan.started)
            if plan._arrived:
                if paid:
                    state.failures = state.unpaid_trials = 0
                    state.paused = -math.inf
                elif plan.wait:
                    self._fail(state, now)
                return
            honesty.failed += 1
            if self._fail(state, now):
                nbytes = plan.window * self.page_bytes
                self.speeds.observed_nothing(plan.store, nbytes, now - plan.started, now)

    def useful(self, store: str, now: float) -> bool:
        """Whether pages are worth writing to the store; of a store of unknown speed that is assumed."""
        with self._lock:
            useless = self._stores[store].useless
            return useless is None or now - useless < self.settings.useless

    def honesty(self, store: str | None = None) -> Honesty:
        """A copy of one store's record, or the sum of all."""
        with self._lock:
            records = [s.honesty for name, s in self._stores.items() if store in (None, name)]
            return sum(records, Honesty())

    def credit(self, store: str) -> float:
        """Seconds that may still be lost to the store."""
        return self._stores[store].credit

    # Internals; the lock is held

    def _best(self, rates: Rates, rate: StoreRate, start: int, pages: int, free: float, queued: int) -> int:
        """The number of pages by which the prompt is ready soonest; of equally good ones the largest."""
        count = np.arange(pages + 1)
        gain = self._saved_all(rates, start, count)
        fetch = self.settings.margin * (rate.latency + (queued + count * self.page_bytes) / rate.bandwidth)
        gain[1:] -= np.maximum(fetch[1:] - free, 0.0)
        best = pages - int(np.argmax(gain[::-1]))
        return best if gain[best] > 0 else 0

    def _first(self, rates: Rates, rate: StoreRate, start: int, most: int, queued: int) -> int:
        """Pages of a fetch's first call: as few as tell whether the store is as fast as it was.

        A call cannot be taken back, and a store that has become slow keeps the link and a core busy with it.
        """
        count = np.arange(1, most + 1)
        seconds = rate.latency + (queued + count * self.page_bytes) / rate.bandwidth
        pays = np.flatnonzero(self._saved_all(rates, start, count) >= self.settings.slack * seconds)
        if len(pays):
            return int(count[pays[0]])
        # Enough for the latency not to hide the bandwidth.
        return max(min(most, math.ceil(rate.latency * rate.bandwidth / self.page_bytes)), min(most, 1))

    def _affordable(self, rate: StoreRate, queued: int, left: float) -> int:
        """Pages of a call that is over within ``left`` seconds although it takes twice what it should."""
        moving = left / self.settings.slack - rate.seconds(queued)
        return max(int(moving * rate.bandwidth / self.page_bytes), 0)

    def _judge(self, plan: FetchPlan, before: int, seconds: float, now: float) -> None:
        """A call has brought the pages from ``before`` on: whether to make another, and of how many pages."""
        rates, count = self.speeds.measured, plan._arrived - before
        saved = self._saved(rates, plan.start + before * self.page_tokens, count)
        if now > plan.since + plan.ahead and self.settings.margin * seconds > saved:
            plan._unpaid += 1
            if plan._unpaid >= self.settings.unpaid or not plan.wait:
                plan._over = True
                plan.deadline = min(plan.deadline, now)
            return
        plan._unpaid = 0
        plan.window = min(self.settings.growth * count, plan.most)
        if plan.wait:
            rate = rates.stores[plan.store]
            affordable = self._affordable(rate, 0, self._lost_at(plan, rates) - now)
            plan.window = max(min(plan.window, affordable), 1)

    def _lost_at(self, plan: FetchPlan, rates: Rates) -> float:
        """When the request has lost its allowance."""
        return plan.since + max(plan.ahead, plan.allowance) + self._saved(rates, plan.start, plan._arrived)

    def _saved_all(self, rates: Rates, start: int, count: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        tokens = count * float(self.page_tokens)
        costs = rates.costs
        computed = rates.prefill_scale * tokens * (costs.token + costs.depth * (start + tokens / 2))
        return computed - count * (self.page_bytes / rates.load_bandwidth)

    def _saved(self, rates: Rates, start: int, pages: int) -> float:
        """Seconds that so many fetched pages save; not negative."""
        return max(float(self._saved_all(rates, start, np.array([pages]))[0]), 0.0)

    def _deadline(self, plan: FetchPlan, rates: Rates, now: float, queued: int) -> float:
        """The earlier of: the request has lost its allowance; the next call, begun now, is late."""
        rate = rates.stores[plan.store]
        call = rate.seconds(queued + plan.window * self.page_bytes)
        patience = self.settings.patience * rates.recompute(plan.start, plan.pages * self.page_tokens)
        late = now + self.settings.slack * call + max(self.settings.grace, patience)
        return min(self._lost_at(plan, rates), max(late, plan.since + plan.ahead))

    def _allowance(self, state: _StoreState, at_stake: float, *, lookup: bool = False) -> float:
        most = self.settings.max_lookup if lookup else self.settings.max_loss
        share = self.settings.lookup_share if lookup else self.settings.loss_share
        return max(min(most, share * at_stake, state.credit), 0.0)

    def _earn(self, state: _StoreState, seconds: float) -> None:
        state.credit = min(state.credit + seconds, self.settings.max_credit)

    def _spend(self, state: _StoreState, lost: float) -> None:
        """A request lost so many seconds; negative if it won them."""
        if lost > 0:
            state.credit -= lost
            state.honesty.lost_seconds += lost
        else:
            self._earn(state, -lost * self.settings.credit_back)
            state.honesty.saved_seconds -= lost

    def _fail(self, state: _StoreState, now: float) -> bool:
        """Whether it is a failure of its own: those that waited side by side fail side by side."""
        if now < state.paused:
            return False
        state.paused = now + min(self.settings.pause * 2**state.failures, self.settings.max_pause)
        state.failures = min(state.failures + 1, 16)
        return True

    def _progress(self, state: _StoreState, plan: FetchPlan, pages: int) -> None:
        pages = min(pages, plan.pages)
        if pages > plan._arrived and not plan._ended:
            state.queued -= (pages - plan._arrived) * self.page_bytes
            plan._arrived = pages

    def _trial_pause(self, state: _StoreState, took: float) -> float:
        """Until the next trial, after one that took so many seconds."""
        settings = self.settings
        interval = settings.trial_interval * 2.0 ** max(state.unpaid_trials - 1, 0)
        return max(min(interval, settings.max_trial_interval), took / settings.trial_share)

    def _trial_due(self, store: str, now: float) -> bool:
        state = self._stores[store]
        idle = now - self.speeds.fetched_last(store) >= self.settings.trial_interval
        return state.trial is None and idle and now >= state.next_trial
