"""Host pages that are not what they should be: a miss, counted by reason, whatever they hold."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from hicache_ext.core.header import FIXED, Labels, Reason
from hicache_ext.transfer.device_kv import DeviceKV
from hicache_ext.transfer.engine import ThreadEngine, make_engine
from hicache_ext.transfer.host_pool import HostPagePool
from hicache_ext.transfer.layout import Component, PageLayout
from tests.transfer.loading import load

PAGE, PAGES = 4, 4
LAYOUT = PageLayout(PAGE, 3, torch.float32, (Component("K", 2, 8), Component("V", 2, 8)), 2)


def labels(namespace: int = 7, epoch: int = 3, first: int = 0) -> Labels:
    identities = np.arange(first, first + 16 * PAGES, dtype=np.uint8).reshape(PAGES, 16)
    return Labels(identities, bytes([namespace]) * 32, epoch)


class Rig:
    """Device pages 1 .. 4 are on host pages 0 .. 3; loads go to device pages 5 .. 8."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        slots = (2 * PAGES + 1) * PAGE
        buffers = tuple(tuple(torch.randn(slots, 2, 8) for _ in range(LAYOUT.layers)) for _ in range(2))
        self.kv = DeviceKV(LAYOUT, buffers)
        self.host = HostPagePool(LAYOUT, PAGES, pinned=False)
        self.engine = make_engine(self.kv, self.host)
        assert isinstance(self.engine, ThreadEngine)
        self.pages = np.arange(PAGES)
        self.source = torch.arange(PAGE, (PAGES + 1) * PAGE)
        self.target = torch.arange((PAGES + 1) * PAGE, (2 * PAGES + 1) * PAGE)
        self.write(labels())

    def write(self, of: Labels) -> None:
        self.seq = getattr(self, "seq", 0) + 1
        self.engine.backup(self.seq, [self.source], self.pages, of)
        self.engine.drain()

    def header(self, page: int) -> np.ndarray:
        """Of its first head group, writable."""
        return self.host.buffer[page].numpy()[: FIXED.itemsize].view(FIXED)

    def load(self, expected: Labels) -> tuple[int | None, dict[Reason, int]]:
        """The first bad page, and how many were refused why."""
        load(self.engine, 1, self.pages, [self.target], expected)
        self.engine.drain()
        failure = self.engine.loads.first_failure(0)
        return None if failure is None else failure[1], dict(self.engine.counts.refused)

    def arrived(self, page: int) -> str:
        """What is in the slots of a loaded page: ``whole``, ``zeros`` or ``other``."""
        kinds = set()
        size = slice(page * PAGE, (page + 1) * PAGE)
        for layers in self.kv.buffers:
            for buffer in layers:
                got, sent = buffer[self.target[size]], buffer[self.source[size]]
                kinds.add("whole" if torch.equal(got, sent) else "other" if got.any() else "zeros")
        return kinds.pop() if len(kinds) == 1 else "other"


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.engine.close()


def test_sound_pages_arrive(rig: Rig) -> None:
    assert rig.load(labels()) == (None, {})
    assert [rig.arrived(page) for page in range(PAGES)] == ["whole"] * PAGES


def test_a_header_of_an_unknown_version_is_a_miss(rig: Rig) -> None:
    rig.header(2)["version"] += 1
    assert rig.load(labels()) == (2, {Reason.VERSION: 1})
    assert [rig.arrived(page) for page in range(PAGES)] == ["whole", "whole", "zeros", "whole"]


def test_a_page_of_another_model_is_a_miss(rig: Rig) -> None:
    rig.write(labels(namespace=8))
    assert rig.load(labels()) == (0, {Reason.NAMESPACE: PAGES})
    assert {rig.arrived(page) for page in range(PAGES)} == {"zeros"}


def test_kind_stale_after_weight_update_a_page_of_an_older_epoch_is_a_miss(rig: Rig) -> None:
    assert rig.load(labels(epoch=4)) == (0, {Reason.EPOCH: PAGES})


def test_the_right_key_with_wrong_content_is_a_miss(rig: Rig) -> None:
    geometry = LAYOUT.geometry
    payload = slice(geometry.header_bytes, geometry.header_bytes + geometry.payload_bytes)
    rig.host.buffer[1, payload] = rig.host.buffer[0, payload]
    assert rig.load(labels()) == (1, {Reason.CHECKSUM: 1})
    assert rig.arrived(1) == "zeros"


def test_another_page_under_this_key_is_a_miss(rig: Rig) -> None:
    rig.host.buffer[[0, 3]] = rig.host.buffer[[3, 0]]
    assert rig.load(labels()) == (0, {Reason.IDENTITY: 2})


def test_an_object_without_a_byte_is_a_miss(rig: Rig) -> None:
    """A store that answers with nothing leaves the row as a fresh one: zeros."""
    rig.host.buffer[3] = 0
    assert rig.load(labels()) == (3, {Reason.MAGIC: 1})


def test_a_page_of_another_shape_is_a_miss(rig: Rig) -> None:
    rig.header(0)["payload_bytes"] //= 2
    assert rig.load(labels()) == (0, {Reason.GEOMETRY: 1})


def test_a_head_group_of_another_rank_is_a_miss(rig: Rig) -> None:
    """Groups of one page are alike in all but their number."""
    size = LAYOUT.geometry.object_bytes
    row = rig.host.buffer[0]
    row[:size], row[size:] = row[size:].clone(), row[:size].clone()
    assert rig.load(labels()) == (0, {Reason.GEOMETRY: 1})
