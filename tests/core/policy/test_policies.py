"""What each policy evicts first, in the real tree; and that all keep its invariants."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from benchmarks.trace_replay_run import SCOPE, Instant, Pool, Replay
from benchmarks.trace_replay_synthetic import BLOCK, chat, with_scan
from benchmarks.trace_replay_trace import Request
from hicache_ext.core.cache import CacheConfig, TieredCache
from hicache_ext.core.policy.cost import Cost, CostIndex
from hicache_ext.core.policy.costs import CostModel
from hicache_ext.core.policy.make import NAMES, make_policy
from hicache_ext.core.residency import Tier
from hicache_ext.core.tree import Node

COSTS = CostModel()


class Server:
    """A cache of one-token pages with one of the policies."""

    def __init__(self, policy: str, device: int, host: int = 0) -> None:
        self.policy = make_policy(policy, device_tokens=device, host_tokens=host, page_size=1, costs=COSTS)
        self.pool = Pool(device)
        self.cache = TieredCache(
            CacheConfig(1, host, evict_granule=1, ease=1.0), self.policy, self.pool, Instant()
        )

    def serve(self, *tokens: int) -> int:
        """Serve a prompt; returns its tokens that were found on either tier."""
        prompt = np.array(tokens, dtype=np.int64)
        match = self.cache.match(SCOPE, prompt)
        loaded = self.cache.load(match.host_node) if match.host_len else 0
        node = match.host_node if loaded else match.device_node
        self.cache.lock(node)
        have = match.device_len + loaded
        self.cache.evict(len(prompt) - have - self.pool.available())
        slots = self.pool.alloc(min(len(prompt) - have, self.pool.available()))
        assert slots is not None
        upto = have + len(slots)
        done = self.cache.insert(SCOPE, prompt[:upto], np.concatenate([np.zeros(have, np.int64), slots]))
        assert done.matched <= have
        self.cache.unlock(node)
        self.cache.flush_backups()
        self.cache.start_loads()
        self.cache.tick()
        return have

    def cached(self, *tokens: int) -> int:
        """Tokens on the device, found without touching them."""
        return self.cache.match(SCOPE, np.array(tokens, dtype=np.int64), touch=False).device_len


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("host", [0, 90])
def test_random_requests_keep_every_invariant_and_repeat_exactly(name: str, host: int) -> None:
    """Two ranks that see the same do the same, whatever their clocks say."""

    def run() -> tuple[list[int], list[tuple[int, int, int]]]:
        rng = random.Random(3)
        server = Server(name, 40, host)
        hits = []
        for _ in range(300):
            chat = rng.randrange(12)
            if rng.random() < 0.3:
                server.cache.want(str(chat), SCOPE, np.array([0, 100 * chat + 1], dtype=np.int64))
            if rng.random() < 0.3:
                server.cache.unwant(str(rng.randrange(12)))
            hits.append(server.serve(0, *(100 * chat + i for i in range(1, rng.randrange(2, 16)))))
            server.cache.check()
        nodes = sorted((n.id, int(n.device), int(n.host)) for n in server.cache.tree.walk())
        return hits, nodes

    first = run()
    time.sleep(0.01)
    assert run() == first and sum(first[0]) > 0


@pytest.mark.parametrize("name", NAMES)
def test_what_a_queued_request_waits_for_goes_last(name: str) -> None:
    server = Server(name, 6)
    server.serve(1, 2)
    server.cache.want("r", SCOPE, np.array([1, 2], dtype=np.int64))
    for other in range(10, 30, 2):
        server.serve(other, other + 1)
    assert server.cached(1, 2) == 2
    server.cache.unwant("r")
    assert server.cache.evict(6) == 6 and server.cached(1, 2) == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_reset_forgets_every_node(name: str) -> None:
    server = Server(name, 6, 12)
    for other in range(10, 30, 2):
        server.serve(other, other + 1)
    server.cache.reset()
    server.pool = server.cache.device = Pool(6)
    assert server.cache.evict(1) == 0
    assert server.serve(10, 11) == 0 and server.serve(10, 11) == 2
    server.cache.check()


@pytest.mark.parametrize("name", ["lfu", "slru", "s3fifo"])
def test_used_again_outlives_used_once(name: str) -> None:
    server = Server(name, 10)
    for _ in range(3):
        server.serve(1, 2)
    for other in range(10, 50, 2):
        server.serve(other, other + 1)
    assert server.cached(1, 2) == 2
    server = Server("lru", 10)
    for _ in range(3):
        server.serve(1, 2)
    for other in range(10, 50, 2):
        server.serve(other, other + 1)
    assert server.cached(1, 2) == 0


def test_slru_lets_go_of_what_overflows_the_protected_segment() -> None:
    server = Server("slru", 10)
    for first in (1, 3, 5, 7, 9):
        server.serve(first, first + 1)
        server.serve(first, first + 1)
    assert server.cache.evict(2) == 2
    assert server.cached(1, 2) == 0 and server.cached(9, 10) == 2


def test_s3fifo_recognizes_what_it_evicted() -> None:
    server = Server("s3fifo", 4)
    server.serve(1, 2)
    server.cache.evict(2)
    server.serve(1, 2)
    (node,) = server.cache.tree.root.children.values()
    assert node.state.main == [True, True]


def test_tlru_first_loses_tails_that_fit_the_target() -> None:
    server = Server("tlru", 40)
    server.policy.budget = 8.0  # type: ignore[attr-defined]
    server.serve(*range(1, 11))
    server.serve(*range(1, 14))
    server.serve(51, 52, 53)
    # 16 tokens in 3 requests: a next turn brings 5.3, so 2 more of each conversation may be missing.
    for _ in range(4):
        assert server.cache.evict(1) == 1
    assert server.cached(*range(1, 14)) == 11 and server.cached(51, 52, 53) == 1


def test_cost_keeps_what_is_dearer_to_compute_again() -> None:
    """Of two prompts that came together, the end of a long one outlives the short one."""
    server = Server("cost", 3000)
    server.policy.costs = CostModel(token=1.0, depth=0.01)  # type: ignore[attr-defined]
    long = list(range(1, 2001))
    server.serve(5001, 5002)
    server.serve(*long)
    assert server.cache.evict(2) == 2
    assert server.cached(5001, 5002) == 0 and server.cached(*long) == 2000


def test_cost_prefers_to_lose_what_the_host_has() -> None:
    server = Server("cost", 8, 2)
    server.serve(1, 2)
    server.serve(3, 4)
    assert server.cache.evict(2) == 2
    assert server.cached(1, 2) == 0 and server.cached(3, 4) == 2
    assert server.serve(1, 2) == 2


def test_cost_admits_what_leaves_the_device_at_its_full_price() -> None:
    server = Server("cost", 8, 2)
    server.serve(1, 2)
    (node,) = server.cache.tree.walk()
    server.policy.rank = lambda node, key: 1.0  # type: ignore[attr-defined]
    assert not server.policy.admit(node, Tier.HOST)
    assert server.policy.admit(node, Tier.HOST, leaving=True)


def test_what_was_refused_while_it_stayed_on_the_device_is_asked_about_again_when_it_leaves() -> None:
    server = Server("cost", 4, 2)
    asked: list[bool] = []

    def admit(node: Node, tier: Tier, *, leaving: bool = False) -> bool:
        asked.append(leaving)
        return leaving

    server.serve(1, 2)
    server.cache.evict(4)
    server.policy.admit = admit  # type: ignore[method-assign]
    server.serve(3, 4)
    assert asked == [False] and server.cache.stats.backup_refused == 2
    assert server.cache.evict(2) == 2 and True in asked
    assert server.cache.match(SCOPE, np.array([3, 4]), touch=False).host_len == 2
    assert server.cache.stats.evicted_lost == 0


def test_cost_passes_over_the_rest_of_a_prompt_as_soon_as_only_its_beginning_is_used() -> None:
    """In the index too: the rest does not wait there for its turn as what it was before."""
    server = Server("cost", 100, 100)
    server.serve(*range(1, 41))
    server.serve(1, 2, 3)
    head, rest = server.cache.tree.walk()
    assert (len(head), len(rest)) == (3, 37)
    assert rest.state.passed and not head.state.passed
    policy = server.policy
    assert isinstance(policy, Cost)
    for tier in Tier:
        index = server.cache.tree.candidates[tier]
        assert isinstance(index, CostIndex)
        assert index._members[rest.id][1] == policy.key(rest, tier)


@pytest.mark.parametrize("tier", list(Tier))
def test_cost_sees_behind_an_old_prompt_that_is_used_again_while_it_could_leave(tier: Tier) -> None:
    """It is the oldest of its class no more: then the next one is, and nothing younger goes for it."""
    server = Server("cost", 1000, 1000)
    server.policy.reuse.factor_bin = lambda use: 16  # type: ignore[attr-defined]
    for start in range(0, 50, 5):
        server.serve(*range(start, start + 5))
    server.cache.match(SCOPE, np.arange(0, 5))
    victims = [server.cache.tree.candidates[tier].pop() for _ in range(9)]
    assert [victim.tokens[0] for victim in victims if victim] == list(range(5, 50, 5))


def test_cost_learns_from_every_turn_of_a_conversation_that_comes_back_after_it_was_lost() -> None:
    """Turns are nodes of their own; lost with their parents, they still count as used again."""
    server = Server("cost", 12)
    uses = []
    for length in (4, 8):
        server.serve(*range(length))
    for node in server.cache.tree.walk():
        uses.append(node.state)
    server.serve(*range(100, 112))
    assert server.cached(*range(8)) == 0 and not any(use.done for use in uses)
    server.serve(*range(10))
    assert len(uses) == 2 and all(use.done for use in uses)


def test_cost_learns_which_requests_never_come_back() -> None:
    """Prompts of 20 tokens are one-time, prompts of 3 return: soon the former make room for the latter."""
    server = Server("cost", 60)
    fresh = iter(range(1000, 10**9))
    short = [[next(fresh) for _ in range(3)] for _ in range(8)]
    hits = []
    for turn in range(600):
        server.serve(*(next(fresh) for _ in range(20)))
        hits.append(server.serve(*short[turn % 8]))
    assert sum(hits[-80:]) >= 0.9 * 3 * 80
    lru = Server("lru", 60)
    again = 0
    for turn in range(100):
        lru.serve(*(next(fresh) for _ in range(20)))
        again += lru.serve(*short[turn % 8])
    assert again == 0


def test_cost_writes_down_what_comes_back_and_nothing_else() -> None:
    """Prompts of 3 tokens return, those of 20 never do: it learns to keep the latter out of a store."""
    server = Server("cost", 200, 400)
    fresh = iter(range(1000, 10**9))
    short = [[next(fresh) for _ in range(3)] for _ in range(8)]

    def stored(tokens: list[int]) -> bool:
        node = server.cache.match(SCOPE, np.array(tokens, dtype=np.int64), touch=False).device_node
        assert node is not server.cache.tree.root
        return server.policy.worth_storing(node)

    first = [next(fresh) for _ in range(20)]
    server.serve(*first)
    assert stored(first), "as long as nothing is known, everything is written"
    written = {True: 0, False: 0}
    for turn in range(900):
        once = [next(fresh) for _ in range(20)]
        server.serve(*once)
        server.serve(*short[turn % 8])
        if turn >= 600:
            written[True] += stored(short[turn % 8])
            written[False] += stored(once)
    assert written[True] == 300 and written[False] <= 15


@pytest.mark.parametrize("price", [0.0, 4e-6, 1.0])
def test_cost_writes_nothing_that_is_dearer_to_write_than_to_compute(price: float) -> None:
    server = Server("cost", 200)
    server.policy.costs = CostModel(token=1e-5, depth=0.0, store=price)  # type: ignore[attr-defined]
    server.serve(*range(100))
    (node,) = server.cache.tree.root.children.values()
    assert server.policy.worth_storing(node) == (price < 1e-5)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "cost"])
def test_other_policies_write_everything(name: str) -> None:
    server = Server(name, 10)
    server.serve(1, 2)
    (node,) = server.cache.tree.root.children.values()
    assert server.policy.worth_storing(node)


@pytest.mark.slow
@pytest.mark.parametrize("host", [0, 4])
def test_a_scan_of_ten_times_the_capacity_costs_returning_sessions_at_most_three_points(host: int) -> None:
    """One-time prompts of ten times what device and host hold, between the requests of conversations."""
    device = 600 if not host else 200
    capacity = device * (1 + host)
    sessions = chat(1200, again=0.8, seed=2)
    mixed, own = with_scan(sessions, 10 * capacity, at=400)

    def session_hits(requests: list[Request], mine: list[bool]) -> float:
        costs = COSTS.scaled(BLOCK)
        policy = make_policy(
            "cost", device_tokens=device, host_tokens=host * device, page_size=1, costs=costs
        )
        run = Replay(policy, device, host * device, BLOCK, COSTS)
        hits = [sum(run.serve(request)) for request in requests]
        run.cache.check()
        found = sum(h for h, m in zip(hits, mine, strict=True) if m)
        return found / sum(len(r.blocks) for r, m in zip(requests, mine, strict=True) if m)

    assert sum(not m for m in own) * 16 >= 10 * capacity
    alone = session_hits(sessions, [True] * len(sessions))
    assert alone > 0.05
    assert alone - session_hits(mixed, own) <= 0.03


@pytest.mark.slow
def test_cost_memory_is_bounded() -> None:
    server = Server("cost", 50)
    fresh = iter(range(10**9))
    for _ in range(3000):
        server.serve(*(next(fresh) for _ in range(5)))
    index = server.cache.tree.candidates[Tier.DEVICE]
    assert isinstance(index, CostIndex)
    held = sum(len(heap) for ends in index._ends for heap in ends.values())
    assert held < 5000 and len(index._order) <= 8193


@pytest.mark.parametrize("name", NAMES)
def test_kind_scheduler_stalls_eviction_work_does_not_grow_with_what_stays(name: str) -> None:
    """Kind 11: as many nodes are looked at in a large tree as in a small one."""

    def looks(prompts: int) -> int:
        server = Server(name, 4 * prompts)
        for number in range(prompts):
            server.serve(4 * number, 4 * number + 1)
        index, policy, seen = server.cache.tree.candidates[Tier.DEVICE], server.policy, [0]
        server.cache.evict(2)

        def counted(call):  # type: ignore[no-untyped-def]
            def count(*args):  # type: ignore[no-untyped-def]
                seen[0] += 1
                return call(*args)

            return count

        if name == "cost":
            policy.rank = counted(policy.rank)  # type: ignore[attr-defined]
        else:
            for part in (index, getattr(index, "_small", index), getattr(index, "_main", index)):
                if hasattr(part, "_rank"):
                    part._rank = counted(part._rank)
        assert server.cache.evict(200) == 200
        assert seen[0] > 0
        return seen[0]

    assert looks(4000) <= 2 * looks(400) + 100


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"unknown eviction policy 'mru'.*cost"):
        make_policy("mru", device_tokens=1, host_tokens=0, page_size=1, costs=COSTS)
