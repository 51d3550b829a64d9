"""Model-based test: random request lives against fakes, every invariant after every step.

The oracle is ``kv_of``: whatever a request would read from the device must be what the model would have
computed for its tokens, by the weights of the moment. Copies run late and out of order, some fail, host pages
are damaged, and weights change under running requests.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hicache_ext.core.cache import WritePolicy
from hicache_ext.core.epochs import claim
from hicache_ext.core.page import PrefixScope
from hicache_ext.core.remote_tier import RemoteConfig
from hicache_ext.core.residency import Doubt, Residency
from hicache_ext.core.tree import Node
from tests.core.fakes import Rig, SharedStore, kv_of, make_rig

SCOPES = [PrefixScope()] * 6 + [
    PrefixScope(extra_key="a"),
    PrefixScope(cache_salt="a"),
    PrefixScope(lora="a"),
]


@dataclass
class Request:
    scope: PrefixScope
    tokens: np.ndarray
    node: Node
    row: np.ndarray
    protected: int
    era: int
    weights: int


class CacheMachine(RuleBasedStateMachine):
    """Requests arrive, wait, load, compute, grow, finish and abort while copies complete at random."""

    steps_taken = 0
    loads_seen = 0
    refusals_seen = 0
    updates_seen = 0
    fetched_seen = 0
    detached_seen = 0

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        device_pages=st.integers(6, 24),
        host_pages=st.integers(0, 40),
        policy=st.sampled_from(list(WritePolicy)),
        granule=st.integers(1, 16),
        ease=st.sampled_from([0.0, 0.25, 1.0]),
        tick_limit=st.integers(1, 3),
        seed=st.integers(0, 2**32),
        window=st.integers(0, 6),
    )
    def start(
        self,
        page_size: int,
        device_pages: int,
        host_pages: int,
        policy: WritePolicy,
        granule: int,
        ease: float,
        tick_limit: int,
        seed: int,
        window: int,
    ) -> None:
        """``window`` pages are fetched at a time; with 0 there is no remote tier."""
        self.rig: Rig = make_rig(
            page_size=page_size,
            device_pages=device_pages,
            host_pages=host_pages,
            write_policy=policy,
            evict_granule=granule,
            ease=ease,
            tick_limit=tick_limit,
            shared=SharedStore() if window else None,
            remote=RemoteConfig(window=window, write_batch=max(window // 2, 1), write_limit=window),
        )
        self.page = page_size
        self.rng = random.Random(seed)
        self.running: list[Request] = []
        self.queued: dict[str, tuple[PrefixScope, np.ndarray]] = {}
        self.seen: list[np.ndarray] = []
        self.next_rid = 0
        self.weights = 0

    def prompt(self) -> np.ndarray:
        """Mostly a continuation of something seen, sometimes something new; rarely page-aligned."""
        base = self.rng.choice(self.seen) if self.seen and self.rng.random() < 0.8 else np.empty(0, np.int64)
        cut = base[: self.rng.randint(0, len(base))] if self.rng.random() < 0.4 else base
        more = [self.rng.randint(0, 2) for _ in range(self.rng.randint(1, 3 * self.page))]
        limit = self.rig.device.total // 2
        tokens = np.concatenate([cut, np.array(more, dtype=np.int64)])[:limit]
        self.seen = [*self.seen[-20:], tokens]
        return tokens

    @rule()
    def arrive(self) -> None:
        if len(self.queued) >= 6:
            return
        rid = f"r{self.next_rid}"
        self.next_rid += 1
        scope, tokens = self.rng.choice(SCOPES), self.prompt()
        self.queued[rid] = (scope, tokens)
        self.rig.cache.want(rid, scope, tokens)

    @rule(turns=st.integers(1, 4))
    def chat(self, turns: int) -> None:
        """Whole lives, one after the other: most of what a server sees."""
        for _ in range(turns):
            self.arrive()
            self.admit(load=True, give_up=False)
            if self.running:
                self.finish(publish=True)
            self.step()

    @rule(leaving=st.booleans())
    def give_up_copies(self, leaving: bool) -> None:
        """All that could leave the host is what then does."""
        cache = self.rig.cache
        copies = cache.tree.copies(1 << 30, leaving=leaving, above=cache.tree.root)
        freed = cache.evict_host(1 << 30, leaving=leaving, copies_only=True)
        assert freed * self.page == copies

    @precondition(lambda self: self.queued)
    @rule()
    def leave_queue(self) -> None:
        rid = self.rng.choice(list(self.queued))
        del self.queued[rid]
        self.rig.cache.unwant(rid)
        self.rig.cache.unwant(rid)

    @precondition(lambda self: self.queued)
    @rule(load=st.booleans(), give_up=st.sampled_from([False, False, False, True]))
    def admit(self, load: bool, give_up: bool) -> None:
        ready = [rid for rid in self.queued if not self.rig.cache.waits(rid)]
        if not ready:
            return
        rid = self.rng.choice(ready)
        scope, tokens = self.queued[rid]
        cache, device = self.rig.cache, self.rig.device
        match, era = cache.match(scope, tokens[: len(tokens) - 1]), cache.era
        prefix, node = match.device_len, match.device_node
        if load and match.host_len:
            got = cache.load(match.host_node)
            assert got in (0, match.host_len)
            if got:
                prefix, node = prefix + got, match.host_node
                type(self).loads_seen += 1
        if give_up:
            return
        need = -(-len(tokens) // self.page) * self.page - prefix
        cache.lock(node)
        if device.available() + cache.tree.evictable_tokens < need:
            cache.unlock(node)
            return
        del self.queued[rid]
        cache.unwant(rid)
        index = cache.start_loads()
        cache.evict(need - device.available())
        slots = device.alloc(need)
        assert slots is not None, "evictable tokens were promised and not delivered"
        path = [n.slots for n in cache.tree.path(node)][::-1]
        row = np.concatenate([*path, slots]).astype(np.int64)
        cache.settle_loads(index)
        expected = self.compute(scope, tokens)
        if node.doubt is Doubt.CORRUPT:
            type(self).refusals_seen += 1
            device.free(slots)
            cache.unlock(node)
            self.queued[rid] = (scope, tokens)
            cache.want(rid, scope, tokens)
            return
        assert np.array_equal(device.kv[row[:prefix]], expected[:prefix]), "a reused page holds other KV"
        device.kv[row[prefix : len(tokens)]] = expected[prefix:]
        request = Request(scope, tokens, node, row, prefix, era, self.weights)
        self.running.append(request)
        self.checkpoint(request)

    def compute(self, scope: PrefixScope, tokens: np.ndarray, weights: int | None = None) -> np.ndarray:
        """What some weights, by default the present ones, would compute."""
        return kv_of(scope, tokens) ^ (self.weights if weights is None else weights)

    def checkpoint(self, request: Request) -> None:
        cache, device = self.rig.cache, self.rig.device
        if request.era != cache.era:
            return
        length = len(request.tokens) // self.page * self.page
        done = cache.insert(request.scope, request.tokens[:length], request.row)
        if done.matched > request.protected:
            device.free(request.row[request.protected : done.matched])
        path = [n.slots for n in cache.tree.path(done.node)][::-1]
        if path:
            request.row[:length] = np.concatenate(path)
        cache.lock(done.node)
        cache.unlock(request.node)
        request.node, request.protected = done.node, length

    @precondition(lambda self: self.running)
    @rule()
    def grow(self) -> None:
        request = self.rng.choice(self.running)
        cache, device = self.rig.cache, self.rig.device
        if len(request.tokens) == len(request.row):
            cache.evict(self.page - device.available())
            slots = device.alloc(self.page)
            if slots is None:
                return
            request.row = np.concatenate([request.row, slots])
        request.tokens = np.append(request.tokens, self.rng.randint(0, 2))
        device.kv[request.row[len(request.tokens) - 1]] = self.compute(
            request.scope, request.tokens, request.weights
        )[-1]
        self.seen = [*self.seen[-20:], request.tokens]

    @precondition(lambda self: self.running)
    @rule(publish=st.booleans())
    def finish(self, publish: bool) -> None:
        request = self.running.pop(self.rng.randrange(len(self.running)))
        cache, device = self.rig.cache, self.rig.device
        assert np.array_equal(
            device.kv[request.row[: len(request.tokens)]],
            self.compute(request.scope, request.tokens, request.weights),
        ), "a running request's KV changed under it"
        if publish:
            self.checkpoint(request)
        device.free(request.row[request.protected :])
        cache.unlock(request.node)

    @rule(tokens=st.integers(1, 40))
    def evict(self, tokens: int) -> None:
        before = self.rig.device.available()
        promised = min(tokens, self.rig.cache.tree.evictable_tokens)
        freed = self.rig.cache.evict(tokens)
        assert self.rig.device.available() - before == freed >= promised

    @rule(pages=st.integers(1, 10))
    def evict_host(self, pages: int) -> None:
        before = self.rig.cache.host_pages.free
        freed = self.rig.cache.evict_host(pages)
        assert self.rig.cache.host_pages.free - before == freed

    @rule()
    def step(self) -> None:
        self.rig.cache.tick()
        self.rig.cache.flush_backups()
        self.rig.cache.flush_writes()
        if self.rng.random() < 0.5:
            self.rig.transfers.run_some(self.rng)
        if self.rig.stores is not None and self.rng.random() < 0.7:
            self.rig.stores.run_some(self.rng)

    @rule(count=st.integers(1, 4))
    def copies_run(self, count: int) -> None:
        for _ in range(count):
            self.rig.transfers.run_some(self.rng)

    @precondition(lambda self: self.rig.stores is not None)
    @rule(count=st.integers(1, 4))
    def stores_work(self, count: int) -> None:
        for _ in range(count):
            self.rig.remote.run_some(self.rng)
            self.rig.cache.tick()

    @precondition(lambda self: self.rig.stores is not None)
    @rule()
    def stores_go_down_or_come_back(self) -> None:
        self.rig.remote.up = self.rng.random() < 0.9

    @precondition(lambda self: self.rig.stores is not None)
    @rule()
    def stores_are_detached_or_attached(self) -> None:
        tier = self.rig.cache.remote
        assert tier is not None
        if not tier.attached:
            tier.attach()
        elif self.rng.random() < 0.1:
            type(self).detached_seen += 1
            tier.detach()
            assert not any(self.rig.cache.waits(rid) for rid in self.queued)

    @precondition(lambda self: self.rig.stores is not None)
    @rule()
    def another_server_flushes(self) -> None:
        if self.rng.random() < 0.05:
            tree = self.rig.cache.tree
            self.rig.remote.mark(tree.namespace, claim(self.rig.cache.epoch, 0))

    @rule()
    def next_backup_fails(self) -> None:
        self.rig.transfers.fail_next_backup = self.rng.random() < 0.3

    @rule()
    def host_page_is_damaged(self) -> None:
        nodes = [n for n in self.rig.cache.tree.walk() if n.host is Residency.READY]
        if nodes and self.rng.random() < 0.3:
            node = self.rng.choice(nodes)
            assert node.pages is not None
            self.rig.transfers.corrupt(int(self.rng.choice(node.pages)))

    @rule()
    def weights_change(self) -> None:
        if self.rng.random() < 0.02:
            type(self).updates_seen += 1
            self.weights += 1
            # No other weights had this name; without one, the epoch tells them apart.
            fresh = self.weights.to_bytes(32, "little")
            self.rig.cache.advance(fresh if self.rng.random() < 0.5 else None)

    @precondition(lambda self: not self.running)
    @rule()
    def flush(self) -> None:
        if self.rng.random() < 0.05:
            self.rig.cache.reset(flush=self.rng.random() < 0.5)
            self.rig.device.clear()
            assert self.rig.cache.tree.nodes == 0 and len(self.rig.cache.tickets) == 0

    @invariant()
    def invariants_hold(self) -> None:
        if not hasattr(self, "rig"):
            return
        type(self).steps_taken += 1
        cache, device = self.rig.cache, self.rig.device
        cache.check()
        private = sum(len(r.row) - r.protected for r in self.running)
        tree = cache.tree
        total = device.available() + tree.evictable_tokens + tree.protected_tokens + private
        assert total == device.total, "device slots leaked"

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        cache, device = self.rig.cache, self.rig.device
        while self.running:
            self.finish(publish=True)
        for rid in list(self.queued):
            cache.unwant(rid)
        for _ in range(200):
            cache.flush_backups()
            cache.flush_writes()
            cache.drain()
            if self.rig.stores is not None:
                self.rig.stores.run_all()
            cache.tick()
            if not cache.pending():
                break
        type(self).fetched_seen += cache.remote.stats.fetched if cache.remote else 0
        cache.check()
        assert cache.host_pages.used * self.page == cache.tree.host_tokens, "fetches hold host pages"
        assert not cache.pending() and cache.tree.protected_tokens == 0
        assert all(n.host_locks == 0 and n.waiters == 0 for n in cache.tree.walk())
        cache.evict(device.total)
        assert device.available() == device.total


@pytest.mark.timeout(900)
@pytest.mark.parametrize("lives", [12, pytest.param(240, marks=pytest.mark.slow)])
def test_random_lives_keep_every_invariant(lives: int) -> None:
    CacheMachine.steps_taken = CacheMachine.loads_seen = 0
    CacheMachine.refusals_seen = CacheMachine.updates_seen = CacheMachine.fetched_seen = 0
    CacheMachine.detached_seen = 0
    run_state_machine_as_test(
        CacheMachine,
        settings=settings(
            max_examples=lives,
            stateful_step_count=300,
            deadline=None,
            derandomize=True,
            # Shrinking a walk of hundreds of steps takes longer than reading it.
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert CacheMachine.steps_taken >= 200 * lives
    assert CacheMachine.loads_seen >= lives, "the walk hardly ever loads from the host"
    # Few walks may happen to see none of these.
    if lives > 100:
        assert CacheMachine.fetched_seen >= lives // 2, "the walk hardly ever fetches from the store"
        assert CacheMachine.refusals_seen >= 10, "the walk hardly ever meets a damaged page"
        assert CacheMachine.updates_seen >= 10, "the weights hardly ever change"
        assert CacheMachine.detached_seen >= 10, "the stores are hardly ever detached"
