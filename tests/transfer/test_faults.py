"""Damage on purpose: each kind does what it says, is refused, and is counted."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from hicache_ext.core.header import FIXED, Integrity, Labels, Reason
from hicache_ext.transfer.choices import FaultKind, FaultPlan, FaultTier, parse_plan
from hicache_ext.transfer.faults import FaultInjector
from hicache_ext.transfer.layout import Component, PageLayout
from hicache_ext.transfer.seal import Seal

LAYOUT = PageLayout(4, 3, torch.float32, (Component("K", 4, 8), Component("V", 4, 8)), 2)
NARROW_V = PageLayout(4, 3, torch.float32, (Component("K", 4, 8), Component("V", 4, 4)), 2)
MLA = PageLayout(4, 1, torch.float32, (Component("latent", 1, 20),), 1)

TRANSFER, HOST = FaultTier.TRANSFER, FaultTier.HOST


class Rig:
    """Host pages of random content, each sealed for its own identity."""

    def __init__(self, plan: FaultPlan, layout: PageLayout = LAYOUT, pages: int = 12) -> None:
        self.layout = layout
        self.seal = Seal(layout, Integrity.FULL)
        rng = np.random.default_rng(5)
        self.labels = Labels(rng.integers(0, 256, (pages, 16), dtype=np.uint8), b"n" * 32, 2)
        self.rows = torch.from_numpy(rng.integers(1, 256, (pages, layout.page_bytes), dtype=np.uint8))
        self.seal.write(self.rows, self.labels)
        self.before = self.rows.clone()
        self.injector = FaultInjector(plan, layout)
        self.all = np.arange(pages)

    def changed(self) -> list[int]:
        return (self.rows != self.before).any(1).nonzero().flatten().tolist()

    def refused(self) -> list[int]:
        return (~self.seal.verify(self.rows, self.labels)).nonzero().flatten().tolist()

    def damage(self, tier: FaultTier, pages: np.ndarray | None = None) -> None:
        pages = self.all if pages is None else pages
        if tier is TRANSFER:
            # What is on its way lies in rows of its own.
            rows = self.rows[pages].clone()
            self.injector.on_the_way(rows, pages)
            self.rows[pages] = rows
        else:
            self.injector.at_rest(self.rows, pages)


def diff(rig: Rig, page: int) -> list[int]:
    """Offsets of the bytes that changed."""
    return (rig.rows[page] != rig.before[page]).nonzero().flatten().tolist()


@pytest.mark.slow
@pytest.mark.parametrize("layout", [LAYOUT, NARROW_V, MLA], ids=["mha", "narrow-v", "mla"])
@pytest.mark.parametrize("tier", list(FaultTier))
@pytest.mark.parametrize("kind", list(FaultKind))
def test_each_kind_damages_every_page_and_is_refused(
    kind: FaultKind, tier: FaultTier, layout: PageLayout
) -> None:
    for seed in range(10):
        rig = Rig(FaultPlan(tier, 1.0, (kind,), seed), layout)
        # Something to replay: earlier pages.
        rig.injector._old.append(rig.before[3].numpy().copy())
        rig.damage(tier)
        assert rig.changed() == rig.refused() == rig.all.tolist()
        assert rig.injector.injected.total() == len(rig.all)


@pytest.mark.parametrize("tier", list(FaultTier))
def test_the_other_tier_is_left_alone(tier: FaultTier) -> None:
    rig = Rig(FaultPlan(tier, 1.0))
    rig.damage(HOST if tier is TRANSFER else TRANSFER)
    assert rig.changed() == [] and rig.injector.injected.total() == rig.injector.met == 0


def made(kind: FaultKind, page: int = 2, layout: PageLayout = LAYOUT, seed: int = 0) -> tuple[Rig, list[int]]:
    """One page damaged by one kind, and what changed in it."""
    rig = Rig(FaultPlan(HOST, 1.0, (kind,), seed), layout)
    rig.injector._old.append(rig.before[7].numpy().copy())
    rig.damage(HOST, np.array([page]))
    assert rig.changed() == [page] and rig.injector.injected == {kind: 1}
    return rig, diff(rig, page)


def test_flip_changes_one_bit_of_header_or_payload() -> None:
    geometry = LAYOUT.geometry
    used = FIXED.itemsize + 8 * geometry.slabs
    places: Counter[tuple[int, bool]] = Counter()
    for seed in range(80):
        rig, changed = made(FaultKind.FLIP, seed=seed)
        (at,) = changed
        assert int(rig.rows[2, at] ^ rig.before[2, at]).bit_count() == 1
        group, offset = divmod(at, geometry.object_bytes)
        payload = geometry.header_bytes <= offset < geometry.header_bytes + geometry.payload_bytes
        assert offset < used or payload, "padding is nobody's"
        places[group, payload] += 1
    assert set(places) == {(g, p) for g in (0, 1) for p in (False, True)}


def test_swap_pages_swaps_two_whole_pages() -> None:
    rig = Rig(FaultPlan(HOST, 1.0, (FaultKind.SWAP_PAGES,)))
    rig.damage(HOST)
    assert sorted(map(bytes, rig.rows.numpy())) == sorted(map(bytes, rig.before.numpy()))
    assert rig.injector.injected == {FaultKind.SWAP_PAGES: len(rig.all)}
    places = [
        next(p for p in rig.all.tolist() if torch.equal(rig.rows[q], rig.before[p])) for q in rig.all.tolist()
    ]
    assert all(p != q and places[p] == q for q, p in enumerate(places)), "pairs, each page in one of them"
    assert {rig.seal.reason(rig.rows[p], rig.labels, p) for p in rig.all.tolist()} == {Reason.IDENTITY}


@pytest.mark.parametrize("layout", [LAYOUT, NARROW_V], ids=["mha", "narrow-v"])
def test_swap_layers_swaps_two_slabs_of_one_component(layout: PageLayout) -> None:
    for seed in range(20):
        rig, _ = made(FaultKind.SWAP_LAYERS, layout=layout, seed=seed)
        views = zip(layout.views(rig.before), layout.views(rig.rows), strict=True)
        moved = [
            (c, g) for c, (old, new) in enumerate(views) for g in (0, 1) if not same(old[2, g], new[2, g])
        ]
        ((component, group),) = moved
        old = layout.views(rig.before)[component][2, group]
        new = layout.views(rig.rows)[component][2, group]
        one, other = [layer for layer in range(3) if not same(old[layer], new[layer])]
        assert same(old[one], new[other]) and same(old[other], new[one])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bytes, NaN or not."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def test_swap_kv_swaps_keys_and_values_of_one_layer() -> None:
    rig, _ = made(FaultKind.SWAP_KV)
    (k, v), (new_k, new_v) = LAYOUT.views(rig.before), LAYOUT.views(rig.rows)
    moved = [(g, layer) for g in (0, 1) for layer in range(3) if not same(k[2, g, layer], new_k[2, g, layer])]
    ((group, layer),) = moved
    assert same(new_k[2, group, layer], v[2, group, layer]) and same(
        new_v[2, group, layer], k[2, group, layer]
    )


def test_truncate_zeroes_the_rest_of_a_group() -> None:
    rig, changed = made(FaultKind.TRUNCATE)
    geometry = LAYOUT.geometry
    group, first = divmod(changed[0], geometry.object_bytes)
    end = group * geometry.object_bytes + geometry.header_bytes + geometry.payload_bytes
    assert first >= geometry.header_bytes
    assert changed == list(range(changed[0], end)) and not rig.rows[2, changed].any()


def test_forge_changes_what_a_header_claims() -> None:
    reasons: Counter[Reason] = Counter()
    for seed in range(60):
        rig, changed = made(FaultKind.FORGE, seed=seed)
        assert all(at % LAYOUT.geometry.object_bytes < FIXED.itemsize for at in changed)
        reasons[rig.seal.reason(rig.rows[2], rig.labels, 2)] += 1
    assert set(reasons) == {Reason.VERSION, Reason.NAMESPACE, Reason.EPOCH, Reason.IDENTITY}


def test_replay_puts_an_older_page_there_header_and_all() -> None:
    rig, _ = made(FaultKind.REPLAY)
    assert torch.equal(rig.rows[2], rig.before[7])
    assert rig.seal.reason(rig.rows[2], rig.labels, 2) is Reason.IDENTITY


def test_a_replay_of_the_same_page_would_be_no_fault() -> None:
    """Only the page itself is known: a bit is flipped instead, so what is counted is damaged."""
    rig = Rig(FaultPlan(HOST, 1.0, (FaultKind.REPLAY,)))
    rig.injector._old.append(rig.before[2].numpy().copy())
    rig.damage(HOST, np.array([2]))
    assert rig.injector.injected == {FaultKind.FLIP: 1} and len(diff(rig, 2)) == 1
    assert rig.refused() == [2]


def test_replayed_pages_are_such_as_were_written() -> None:
    """What the injector remembers of the traffic is enough to replay, and never replays a page as itself."""
    rig = Rig(FaultPlan(HOST, 0.0, (FaultKind.REPLAY,)))
    for _ in range(30):
        rig.damage(TRANSFER)
    assert rig.changed() == [] and 1 < len(rig.injector._old) <= 8
    old = [bytes(row) for row in rig.injector._old]
    rig.injector.plan = FaultPlan(HOST, 1.0, (FaultKind.REPLAY,))
    rig.damage(HOST)
    assert rig.injector.injected == {FaultKind.REPLAY: len(rig.all)}
    for page in rig.all.tolist():
        assert bytes(rig.rows[page].numpy()) in old and not torch.equal(rig.rows[page], rig.before[page])
    assert rig.refused() == rig.all.tolist()


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        (FaultKind.SWAP_KV, MLA),
        (FaultKind.SWAP_KV, NARROW_V),
        (FaultKind.SWAP_LAYERS, MLA),
        (FaultKind.REPLAY, LAYOUT),
        (FaultKind.SWAP_PAGES, LAYOUT),
    ],
)
def test_a_kind_that_cannot_be_is_a_flipped_bit(kind: FaultKind, layout: PageLayout) -> None:
    """No second component, none of the same size, no second layer, no older page, no other page."""
    rig = Rig(FaultPlan(HOST, 1.0, (kind,)), layout)
    rig.damage(HOST, np.array([2]))
    assert rig.injector.injected == {FaultKind.FLIP: 1} and len(diff(rig, 2)) == 1


@pytest.mark.parametrize("kind", [FaultKind.TRUNCATE, FaultKind.SWAP_LAYERS, FaultKind.SWAP_KV])
def test_damage_that_changes_nothing_is_a_flipped_bit(kind: FaultKind) -> None:
    """A page of zeros: truncated or swapped it would be the same."""
    rig = Rig(FaultPlan(HOST, 1.0, (kind,)))
    rig.rows.zero_()
    rig.seal.write(rig.rows, rig.labels)
    rig.before = rig.rows.clone()
    rig.damage(HOST, np.array([2]))
    assert rig.injector.injected == {FaultKind.FLIP: 1} and len(diff(rig, 2)) == 1
    assert rig.refused() == [2]


# Counting


def test_a_page_is_damaged_at_most_once() -> None:
    """A second fault could undo the first, and what is counted would not be met."""
    rig = Rig(FaultPlan(HOST, 1.0))
    rig.damage(HOST)
    damaged = rig.rows.clone()
    assert rig.injector.injected.total() == rig.injector.met == len(rig.all)
    rig.damage(HOST)
    assert torch.equal(rig.rows, damaged) and rig.injector.injected.total() == len(rig.all)
    assert rig.injector.met == 2 * len(rig.all), "each load that reads it meets it"


def test_a_page_that_was_written_anew_is_sound_and_may_be_damaged_again() -> None:
    rig = Rig(FaultPlan(HOST, 1.0))
    rig.damage(HOST)
    rig.rows[:] = rig.before
    rig.damage(TRANSFER, rig.all[:5])
    rig.damage(HOST)
    assert rig.injector.injected.total() == len(rig.all) + 5
    assert rig.changed() == [0, 1, 2, 3, 4]


def test_what_was_damaged_on_the_way_is_met_when_it_is_loaded() -> None:
    rig = Rig(FaultPlan(TRANSFER, 0.5, seed=3))
    rig.damage(TRANSFER)
    damaged = rig.changed()
    assert 0 < len(damaged) < len(rig.all) and rig.injector.injected.total() == len(damaged)
    assert rig.injector.met == 0
    for page in rig.all.tolist():
        rig.damage(HOST, np.array([page]))
    assert rig.injector.met == len(damaged) and rig.refused() == damaged == rig.changed()


def test_the_rate_is_a_probability() -> None:
    rig = Rig(FaultPlan(HOST, 0.1, (FaultKind.FLIP,)), pages=2000)
    rig.damage(HOST)
    assert 140 < rig.injector.injected.total() == len(rig.refused()) < 260
    idle = Rig(FaultPlan(HOST, 0.0))
    idle.damage(HOST)
    assert idle.changed() == []


@pytest.mark.parametrize("tier", list(FaultTier))
def test_the_same_seed_does_the_same(tier: FaultTier) -> None:
    def outcome(seed: int) -> tuple[bytes, Counter[FaultKind]]:
        rig = Rig(FaultPlan(tier, 0.5, seed=seed))
        rig.damage(TRANSFER)
        rig.damage(HOST)
        return rig.rows.numpy().tobytes(), rig.injector.injected

    assert outcome(1) == outcome(1)
    assert outcome(1)[0] != outcome(2)[0]


# The plan as text


def test_a_plan_from_text() -> None:
    assert parse_plan("tier=host,rate=0.01") == FaultPlan(HOST, 0.01)
    assert parse_plan("tier=host,rate=0.01").kinds == tuple(FaultKind)
    plan = parse_plan("seed=7,kinds=flip+forge,rate=1,tier=transfer")
    assert plan == FaultPlan(TRANSFER, 1.0, (FaultKind.FLIP, FaultKind.FORGE), 7)
    assert parse_plan("tier=host,rate=0").rate == 0


@pytest.mark.parametrize("kind", list(FaultKind))
def test_every_kind_has_a_name(kind: FaultKind) -> None:
    assert parse_plan(f"tier=host,rate=1,kinds={kind}").kinds == (kind,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is unknown; known are tier, rate, kinds and seed"),
        ("tier=host,rate=0.1,", "'' is unknown"),
        ("tier=host,rate=0.1,kind=flip", "'kind' is unknown"),
        ("tier=host, rate=0.1", "' rate' is unknown"),
        ("rate=0.1", "tier must be one of transfer, host"),
        ("tier=disk,rate=0.1", "tier must be one of transfer, host"),
        ("tier=host", "rate must be a number from 0 to 1"),
        ("tier=host,rate=", "rate must be a number"),
        ("tier=host,rate=often", "rate must be a number"),
        ("tier=host,rate=1.5", "rate must be a number from 0 to 1"),
        ("tier=host,rate=-0.1", "rate must be a number from 0 to 1"),
        ("tier=host,rate=nan", "rate must be a number from 0 to 1"),
        ("tier=host,rate=1,seed=x", "seed a whole number"),
        ("tier=host,rate=1,kinds=", "kind '' is unknown; known are flip"),
        ("tier=host,rate=1,kinds=flip+melt", "kind 'melt' is unknown; known are flip, swap-pages"),
        ("tier=host,rate=1,kinds=flip\n", r"kind 'flip\n' is unknown"),
        ("\n\n", r"'\n\n' is unknown"),
    ],
)
def test_a_plan_that_cannot_be_read_is_told_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_plan(text)
    assert message in str(caught.value) and "\n" not in str(caught.value)
