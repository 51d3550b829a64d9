"""The order of SGLang's waiting queue: by what is left to do, from what the tree says now."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hicache_ext.core.page import PrefixScope
from hicache_ext.core.policy.costs import CostModel
from hicache_ext.core.queue_order import PATIENCE
from hicache_ext.core.speeds import Speeds
from hicache_ext.integration.queue import MATCHED_AGAIN, MOST, Queue, QueueOrder, reusable
from tests.core.fakes import Rig, SharedStore, make_rig, prompt, put, settle, to_host

PAGE, PAGE_BYTES = 4, 4096
COSTS = CostModel(token=1e-3, depth=0.0)
SCOPE = PrefixScope()


class Served:
    """A cache with its queue, as an adapter keeps it."""

    def __init__(
        self, *, by_cost: bool = True, bandwidth: float = 1e9, shared: SharedStore | None = None
    ) -> None:
        names = [] if shared is None else ["remote"]
        speeds = Speeds(COSTS, names, load_bandwidth=bandwidth)
        self.rig: Rig = make_rig(
            page_size=PAGE,
            device_pages=64,
            host_pages=128,
            speeds=speeds,
            page_bytes=PAGE_BYTES,
            shared=shared,
        )
        self.queue = Queue(self.rig.cache, speeds, by_cost)
        self.waiting: list[Any] = []

    def add(self, rid: str, tokens: np.ndarray, scope: PrefixScope | None = SCOPE) -> None:
        ids = array("q", [*tokens.tolist(), 7])
        req = SimpleNamespace(rid=rid, origin_input_ids=ids, output_ids=array("q"))
        if scope is not None:
            self.rig.cache.want(rid, scope, reusable(req))
        self.queue.add(req, scope)
        self.waiting.append(req)

    def leave(self, rid: str) -> None:
        self.rig.cache.unwant(rid)
        self.queue.remove(rid)
        self.waiting = [req for req in self.waiting if req.rid != rid]

    def order(self) -> str:
        self.queue.sort(self.waiting)
        return " ".join(req.rid for req in self.waiting)


@pytest.mark.parametrize(
    ("order", "replaced"), [("auto", ["lpm"]), ("cost", ["fcfs", "lpm"]), ("engine", [])]
)
def test_which_orders_of_sglang_it_replaces(order: str, replaced: list[str]) -> None:
    policies = ["fcfs", "lpm", "dfs-weight", "lof", "random", "hrrn", "shortest-prefill-first"]
    assert [p for p in policies if QueueOrder(order).replaces(p, False)] == replaced
    assert not any(QueueOrder(order).replaces(p, True) for p in policies)


def test_less_to_compute_goes_first_not_what_has_matched_more() -> None:
    served = Served()
    put(served.rig, prompt(PAGE, *range(20)))
    settle(served.rig)
    served.add("matched-most", prompt(PAGE, *range(20), *range(100, 110)))
    served.add("short", prompt(PAGE, 50, 51))
    assert served.order() == "short matched-most"


def test_what_the_host_holds_costs_its_load_only() -> None:
    served = Served()
    to_host(served.rig, prompt(PAGE, 1, 2, 3, 4))
    served.add("cold", prompt(PAGE, 11, 12, 13))
    served.add("on-host", prompt(PAGE, 1, 2, 3, 4))
    assert served.order() == "on-host cold"


def test_a_slow_bus_makes_the_host_worth_nothing() -> None:
    served = Served(bandwidth=1e3)
    to_host(served.rig, prompt(PAGE, 1, 2, 3, 4))
    served.add("on-host", prompt(PAGE, 1, 2, 3, 4))
    served.add("cold", prompt(PAGE, 11, 12, 13))
    assert served.order() == "cold on-host"


def test_what_a_store_brings_counts_as_brought() -> None:
    shared = SharedStore()
    first = Served(shared=shared)
    first.rig.cache.tick()
    settle(first.rig)
    put(first.rig, prompt(PAGE, *range(8)))
    settle(first.rig)
    second = Served(shared=shared)
    settle(second.rig)
    second.add("cold", prompt(PAGE, 21, 22, 23))
    second.add("stored", prompt(PAGE, *range(8)))
    assert second.order() == "cold stored", "no store has answered"
    for _ in range(2):
        second.rig.remote.run_lookup()
    second.rig.cache.tick()
    assert second.rig.cache.coming("stored") == 8 * PAGE
    assert second.order() == "stored cold"


def test_what_others_have_computed_since_counts() -> None:
    served = Served()
    served.add("long", prompt(PAGE, *range(20)))
    served.add("short", prompt(PAGE, 50, 51, 52))
    assert served.order() == "short long"
    put(served.rig, prompt(PAGE, *range(19)))
    assert served.order() == "long short"


def test_of_those_that_share_a_beginning_the_first_computes_it() -> None:
    served = Served()
    served.add("a", prompt(PAGE, 1, 2, 3, 4))
    served.add("b", prompt(PAGE, 1, 2, 5))
    served.add("c", prompt(PAGE, *range(30, 40)))
    assert served.order() == "a c b"


def test_nobody_is_overtaken_for_longer_than_a_few_seconds_of_prefill() -> None:
    served = Served()
    served.add("dear", prompt(PAGE, *range(20)))
    served.queue.computed(int(PATIENCE / COSTS.token))
    served.add("cheap", prompt(PAGE, 50))
    assert served.order() == "dear cheap"


def test_a_long_queue_is_served_by_arrival() -> None:
    served = Served()
    for number in range(MOST + 1):
        served.add(f"{number}", prompt(PAGE, *range(number % 3 + 1)))
    before = served.waiting[:]
    served.waiting.reverse()
    served.queue.sort(served.waiting)
    assert served.waiting == before


def test_a_step_matches_only_some_of_a_queue_again(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served()
    for number in range(3 * MATCHED_AGAIN):
        served.add(f"{number}", prompt(PAGE, number, 99))
    matched: list[str] = []
    again = served.rig.cache.want_again

    def counted(rid: str, scope: PrefixScope, tokens: np.ndarray) -> None:
        matched.append(rid)
        again(rid, scope, tokens)

    monkeypatch.setattr(served.rig.cache, "want_again", counted)
    for _ in range(3):
        served.order()
    assert matched == [f"{number}" for number in range(3 * MATCHED_AGAIN)]


def test_requests_that_reuse_nothing_and_strangers_are_ordered_too() -> None:
    served = Served()
    served.add("long", prompt(PAGE, 1, 2, 3), scope=None)
    served.add("short", prompt(PAGE, 4))
    stranger = SimpleNamespace(rid="x", origin_input_ids=array("q", [1]), output_ids=array("q"))
    served.waiting.append(stranger)
    assert served.order() == "x short long"


def test_the_order_of_sglang_stays_where_it_was_asked_for() -> None:
    served = Served(by_cost=False)
    served.add("long", prompt(PAGE, 1, 2, 3))
    served.add("short", prompt(PAGE, 4))
    assert served.order() == "long short"


@pytest.mark.parametrize(("by_cost", "seconds"), [(False, 0.014), (True, 0.005)])
def test_who_comes_waits_for_those_who_are_served_before(by_cost: bool, seconds: float) -> None:
    served = Served(by_cost=by_cost)
    assert served.queue.ahead(8) == 0
    served.add("long", prompt(PAGE, 1, 2))
    served.add("short", prompt(PAGE, 4))
    assert served.queue.ahead(8) == pytest.approx(seconds)
    served.leave("short")
    assert served.queue.ahead(8) == pytest.approx(seconds - 0.005)
    assert len(served.queue) == 1
