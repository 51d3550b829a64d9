"""The epoch rule in every order of events: right as it is, and wrong when any part of it is left out."""

from __future__ import annotations

import pytest

from tests.core.epoch_model import PARTS, RULES, Budget, Rules, explore, without


@pytest.mark.parametrize(
    "budget",
    [
        Budget(flush=2, compute=1),
        Budget(flush=1, compute=1, update=1),
        Budget(flush=1, compute=1, restart=1),
        Budget(flush=1, compute=1, update=1, slow_gets=1),
    ],
    ids=str,
)
def test_kind_stale_after_weight_update_in_every_order(budget: Budget) -> None:
    result = explore(2, budget)
    assert result.broken is None, (result.broken, *result.trace)
    assert result.complete and result.states > 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("servers", "budget"),
    [
        (2, Budget(flush=2, compute=2)),
        (2, Budget(flush=1, compute=2, update=2)),
        (2, Budget(flush=2, compute=1, restart=1)),
        (2, Budget(flush=1, compute=2, slow_gets=2)),
        (3, Budget(flush=2, compute=1)),
    ],
    ids=str,
)
def test_more_events(servers: int, budget: Budget) -> None:
    result = explore(servers, budget)
    assert result.broken is None, (result.broken, *result.trace)
    assert result.complete


BREAKS = {
    "version_in_namespace": Budget(compute=1, update=1),
    "unnamed_update_gets_fresh_name": Budget(compute=1, update=1),
    "epoch_in_key": Budget(flush=1, compute=1),
    "stamp_when_computed": Budget(flush=1, compute=1),
    "flush_looks_first": Budget(flush=2, compute=1),
    "claim_above_marks": Budget(flush=2, compute=1),
    "take_when_marked": Budget(flush=2, compute=1),
    "void_looks_before_flush": Budget(flush=2, compute=1),
    "look_before_use": Budget(flush=1, compute=1, restart=1),
    "adopt": Budget(flush=1, compute=1, restart=1),
    "check_on_arrival": Budget(flush=1, compute=1, slow_gets=1),
}


@pytest.mark.parametrize("part", PARTS)
def test_no_part_of_the_rule_can_be_left_out(part: str) -> None:
    result = explore(2, BREAKS[part], without(part))
    assert result.broken is not None, f"{result.states} states without a fault"
    weights = part in ("version_in_namespace", "unnamed_update_gets_fresh_name")
    assert result.broken.startswith("P1" if weights else "P2"), (result.broken, *result.trace)


def test_two_servers_flushed_one_after_the_other() -> None:
    """Why a flush looks before it takes a number: both would take the same one, and the second server would
    read what the first has computed since, before the second was flushed."""
    result = explore(2, Budget(flush=2, compute=1), without("flush_looks_first"))
    flushes = [step for step in result.trace if "flushes to 2" in step]
    assert len(flushes) == 2 and flushes[0][0] != flushes[1][0]


@pytest.mark.slow
def test_a_lost_mark_brings_flushed_pages_back_but_never_those_of_other_weights() -> None:
    """The limit of the rule: a mark is evicted, and a server flushes before another writes it again."""
    budget = Budget(flush=2, compute=1, lose=1)
    lost = explore(2, budget)
    assert lost.broken is not None and lost.broken.startswith(("P2", "P3"))
    assert any("is lost" in step for step in lost.trace)
    assert explore(2, budget, Rules(check_flushes=False)).complete


@pytest.mark.slow
def test_lost_marks_and_updates_never_bring_other_weights() -> None:
    budget = Budget(flush=1, compute=2, update=1, lose=1)
    assert explore(2, budget, Rules(check_flushes=False)).complete


def test_the_mutations_are_all_of_the_rule() -> None:
    assert set(BREAKS) == set(PARTS) and all(getattr(RULES, part) for part in PARTS)
