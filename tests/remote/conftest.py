"""Engines that are closed after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.remote.rig import Rig
from tests.stores.conftest import mooncake_master

__all__ = ["mooncake_master"]

MakeRig = Callable[..., Rig]


@pytest.fixture
def rig_of() -> Iterator[MakeRig]:
    """Makes a ``Rig``."""
    rigs: list[Rig] = []

    def make(*stores: Any, **options: Any) -> Rig:
        rigs.append(Rig(*stores, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
