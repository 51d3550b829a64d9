"""What the engine needs to know about speed; ``core.planner.Planner`` is the real one."""

from __future__ import annotations

from typing import Any, Protocol

STORE = "remote"
"""The name under which the planner knows all stores together."""


class LookupPlan(Protocol):
    @property
    def ask(self) -> bool: ...
    @property
    def deadline(self) -> float: ...
    @property
    def started(self) -> float: ...


class FetchPlan(Protocol):
    @property
    def pages(self) -> int: ...
    @property
    def window(self) -> int: ...
    @property
    def wait(self) -> bool: ...
    @property
    def deadline(self) -> float: ...


class Speeds(Protocol):
    def observed_fetch(self, store: str, nbytes: int, seconds: float, now: float) -> None: ...
    def fetch_began(self, store: str, now: float) -> None: ...
    def fetch_ended(self, store: str, nbytes: int, now: float) -> None: ...


class Planner(Protocol):
    """Called from any thread. See ``core.planner.Planner`` for what the calls mean."""

    @property
    def speeds(self) -> Speeds: ...

    def plan_lookup(self, store: str, start: int, tokens: int, now: float) -> LookupPlan: ...

    def looked_up(self, plan: Any, pages: int, now: float, *, answered: bool) -> None: ...

    def plan_fetch(
        self, store: str, start: int, pages: int, now: float, *, since: float | None
    ) -> FetchPlan: ...

    def arrived(self, plan: Any, pages: int, now: float) -> None: ...

    def ended(self, plan: Any, pages: int, now: float) -> None: ...


def withdraw(planner: Planner, plan: FetchPlan, now: float) -> None:
    """End a plan that came to nothing through no fault of the store: nobody asked it, or nobody waits."""
    withdrawn = getattr(planner, "withdrawn", None)
    if withdrawn is None:
        planner.ended(plan, 0, now)
    else:
        withdrawn(plan, now)
