"""When to admit: single decisions, and a closed loop of sessions in simulated time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

from hypothesis import given
from hypothesis import strategies as st

from hicache_ext.core.policy.costs import CostModel
from hicache_ext.core.prefill_batch import LEAD, MOST, Candidate, admit_now
from hicache_ext.core.speeds import Rates

RATES = Rates(CostModel(token=2.35e-5, depth=1.3e-9), 1.0, 0.03, 55e9, {})


def coming(*seconds: float, tokens: int = 50) -> list[Candidate]:
    """Loads that take so long, one after the other."""
    made: list[Candidate] = []
    for load in seconds:
        lands = load + (made[-1].lands if made else 0.0)
        made.append(Candidate(3000, tokens, load, lands))
    return made


def ready(*tokens: int, load: float = 0.0) -> list[Candidate]:
    return [Candidate(3000, one, load) for one in tokens]


def test_what_is_ready_is_admitted_if_nothing_is_on_its_way() -> None:
    assert admit_now(ready(50), [], 10, RATES) == 0


def test_nobody_is_admitted_if_nobody_is_ready() -> None:
    assert admit_now([], [], 10, RATES) is None
    assert admit_now([], coming(LEAD + 0.01), 10, RATES) is None


def test_what_is_about_to_land_goes_along() -> None:
    assert admit_now([], coming(LEAD / 2, LEAD / 2), 10, RATES) == 2
    assert admit_now(ready(50), coming(LEAD), 10, RATES) == 1


def test_one_waits_for_another_if_many_would_wait_for_its_batch() -> None:
    assert admit_now(ready(50), coming(0.04), 15, RATES) is None
    assert admit_now(ready(50), coming(5.0), 15, RATES) == 0, "but not for long"


def test_many_do_not_wait_for_one() -> None:
    assert admit_now(ready(*[50] * 8), coming(0.08), 2, RATES) == 0


def test_a_batch_that_computes_for_long_loses_nothing_by_going_first() -> None:
    assert admit_now(ready(2000, 2000), coming(0.04, tokens=2000), 15, RATES) == 0


def test_kind_waiting_for_a_load_never_ends() -> None:
    """Whoever is ready is admitted once loads of ``MOST`` have landed, whatever else comes."""
    assert admit_now(ready(*[50] * 4, load=MOST / 3), coming(*[0.02] * 10), 15, RATES) == 0


candidates = st.builds(
    Candidate,
    st.integers(0, 100_000),
    st.integers(1, 10_000),
    st.floats(0, 1),
)


@given(st.lists(candidates, max_size=5), st.lists(candidates, max_size=40), st.integers(1, 64))
def test_only_what_is_about_to_land_is_taken(
    now: Sequence[Candidate], queued: Sequence[Candidate], running: int
) -> None:
    lands = 0.0
    later = []
    for one in queued:
        lands += one.load
        later.append(Candidate(one.start, one.tokens, one.load, lands))
    count = admit_now(now, later, running, RATES)
    if count is None:
        assert later or not now
    else:
        assert now or count
        assert all(one.lands <= LEAD for one in later[:count])


@dataclass
class Session:
    arrives: float
    load: float
    left: int = 31
    came: float = 0.0
    lands: float = 0.0


@dataclass(frozen=True)
class Client:
    """A client's pause between an answer and the next request, in seconds."""

    latency: float = 0.012
    spread: float = 0.0008
    jitter: float = 0.003


Admit = Callable[[Sequence[Candidate], Sequence[Candidate], int], int | None]


def serve(admit: Admit, client: Client, *, bus: float, step: float = 6.35e-3) -> tuple[float, float]:
    """320 requests of some 3,000 cached tokens, 16 in flight: (seconds, mean TTFT).

    The next request comes when one has ended. Loads start when requests come, and share one bus; a prefill
    batch delays all that decode.
    """
    rng = random.Random(1)
    lengths = iter([2000 + 532 * turn for turn in range(5) for _ in range(64)])
    now = landed = 0.0
    arriving: list[Session] = []
    queue: list[Session] = []
    running: list[Session] = []
    waits: list[float] = []

    def arrive(when: float) -> None:
        if (length := next(lengths, None)) is not None:
            arriving.append(Session(when, length * 131072 / bus))

    for number in range(16):
        arrive(client.spread * number)
    while arriving or queue or running:
        for one in sorted((a for a in arriving if a.arrives <= now), key=lambda a: a.arrives):
            arriving.remove(one)
            queue.append(one)
            one.came, one.lands = now, max(now + 0.002, landed) + one.load
            landed = one.lands
        there = [Candidate(3000, 56, q.load, 0.0, now - q.came) for q in queue if q.lands <= now]
        on_way: list[Candidate] = []
        for one in queue[len(there) :]:
            ahead = one.load + (on_way[-1].lands if on_way else 0.0)
            on_way.append(Candidate(3000, 56, one.load, ahead, now - one.came))
        count: int | None = len(on_way)
        if running:
            count = admit(there, on_way, len(running)) if queue else None
        if count is not None and (there or count):
            batch, queue = queue[: len(there) + count], queue[len(there) + count :]
            now = max(now + RATES.launch, max(one.lands for one in batch) + 0.014)
            waits += [now - one.arrives for one in batch]
            running += batch
        elif running:
            now += step
            for one in running:
                one.left -= 1
            ended = [one for one in running if not one.left]
            running = [one for one in running if one.left]
            for number, _ in enumerate(ended):
                arrive(now + client.latency + client.spread * number + client.jitter * rng.random())
        else:
            now = max(now + 1e-4, min(one.arrives for one in arriving))
    return now, mean(waits)


def at_once(there: Sequence[Candidate], on_way: Sequence[Candidate], running: int) -> int | None:
    return 0 if there else None


def all_together(there: Sequence[Candidate], on_way: Sequence[Candidate], running: int) -> int | None:
    return 0 if there and not on_way else None


def planned(there: Sequence[Candidate], on_way: Sequence[Candidate], running: int) -> int | None:
    return admit_now(there, on_way, running, RATES)


CLIENTS = [
    Client(latency, spread, jitter)
    for latency in (0.008, 0.010, 0.014)
    for spread, jitter in ((0.0004, 0.001), (0.0008, 0.003), (0.0015, 0.008))
]


def averages(admit: Admit, bus: float) -> tuple[float, float]:
    made = [serve(admit, client, bus=bus) for client in CLIENTS]
    return mean(seconds for seconds, _ in made), mean(ttft for _, ttft in made)


def test_a_closed_loop_is_served_sooner_than_by_simple_rules() -> None:
    seconds, ttft = averages(planned, 55e9)
    for rule in (at_once, all_together):
        other_seconds, other_ttft = averages(rule, 55e9)
        assert seconds < 0.95 * other_seconds, rule.__name__
        assert ttft < 0.85 * other_ttft, rule.__name__


def test_a_closed_loop_never_falls_apart_into_batches_of_one() -> None:
    without = averages(planned, 1e15)[0]
    for client in CLIENTS:
        assert serve(planned, client, bus=55e9)[0] < 1.35 * without, client
