"""Headers and checksums of page rows: what was sealed verifies, and nothing else does."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from hicache_ext.core.checksum import checksums, multipliers
from hicache_ext.core.header import FIXED, Integrity, Labels, Reason
from hicache_ext.transfer.layout import Component, PageLayout
from hicache_ext.transfer.seal import Seal, torch_checksums

PAGES = 5
SEALED = (0, 16)
"""The pages of ``labels_of`` that ``sample`` seals: those with these numbers."""

MHA = (Component("K", 6, 8), Component("V", 6, 8))
WIDE_K = (Component("K", 6, 16), Component("V", 6, 8))
MLA = (Component("latent", 1, 20),)


def layout_of(
    components: tuple[Component, ...] = WIDE_K, groups: int = 3, page_size: int = 4, first_group: int = 0
) -> PageLayout:
    return PageLayout(page_size, 3, torch.bfloat16, components, groups, first_group)


def labels_of(*numbers: int, namespace: bytes = b"n" * 32, epoch: int = 7) -> Labels:
    identities = np.random.default_rng(1).integers(0, 256, (len(numbers), 16), dtype=np.uint8)
    identities[:, 0] = numbers
    return Labels(identities, namespace, epoch)


LABELS = labels_of(0, 1, 16, 17, 33)


def random_rows(layout: PageLayout, pages: int = PAGES) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, 256, (pages, layout.page_bytes), dtype=torch.uint8, generator=generator)


def sealed_rows(layout: PageLayout, integrity: Integrity = Integrity.FULL) -> tuple[Seal, torch.Tensor]:
    seal, rows = Seal(layout, integrity), random_rows(layout)
    seal.write(rows, LABELS)
    return seal, rows


def offsets(layout: PageLayout, group: int) -> tuple[int, int, int]:
    """(begin of a group, begin of its payload, end of its payload) in a row."""
    geometry = layout.geometry
    start = group * geometry.object_bytes
    payload = start + geometry.header_bytes
    return start, payload, payload + geometry.payload_bytes


CASES = [
    (components, groups, page_size)
    for components, all_groups in ((MHA, (1, 3)), (WIDE_K, (1, 2, 6)), (MLA, (1,)))
    for groups in all_groups
    for page_size in (1, 16, 64)
]


@pytest.mark.parametrize("integrity", list(Integrity))
@pytest.mark.parametrize(
    ("components", "groups", "page_size"),
    CASES,
    ids=lambda v: "+".join(f"{c.name}{c.heads}x{c.dim}" for c in v) if isinstance(v, tuple) else str(v),
)
def test_what_was_sealed_verifies(
    components: tuple[Component, ...], groups: int, page_size: int, integrity: Integrity
) -> None:
    """And sealing changes headers only, and verifying nothing."""
    layout = layout_of(components, groups, page_size)
    seal, rows = sealed_rows(layout, integrity)
    before = random_rows(layout)
    for group in range(groups):
        _, payload, end = offsets(layout, group)
        stop = (group + 1) * layout.geometry.object_bytes
        assert torch.equal(rows[:, payload:end], before[:, payload:end])
        assert torch.equal(rows[:, end:stop], before[:, end:stop])
    copy = rows.clone()
    assert seal.verify(rows, LABELS).tolist() == [True] * PAGES
    assert torch.equal(rows, copy)
    assert Seal(layout, integrity).verify(rows[[3, 1]], Labels(LABELS.identities[[3, 1]], b"n" * 32, 7)).all()


@pytest.mark.parametrize(
    ("components", "groups", "page_size"), [(WIDE_K, 2, 1), (MLA, 1, 16), (MHA, 3, 4)], ids=str
)
def test_the_header_holds_the_checksum_of_each_slab(
    components: tuple[Component, ...], groups: int, page_size: int
) -> None:
    """With sums made here, word by word: K of all layers, then V of all layers, group by group."""
    layout = layout_of(components, groups, page_size)
    _, rows = sealed_rows(layout)
    for group in range(groups):
        start, at, _ = offsets(layout, group)
        table = rows[1, start + FIXED.itemsize :][: 8 * layout.geometry.slabs].numpy().view("<u8").tolist()
        expected = []
        for component in components:
            size = page_size * component.heads // groups * component.dim * 2
            for _ in range(layout.layers):
                words = rows[1, at : at + size].numpy().tobytes()
                factors = multipliers(size // 8).tolist()
                total = 0
                for i, factor in enumerate(factors):
                    word = int.from_bytes(words[8 * i : 8 * i + 8], "little")
                    total += (word ^ (word >> 32)) * factor
                expected.append(total % 2**64)
                at += size
        assert table == expected


@pytest.mark.slow
@pytest.mark.parametrize("integrity", list(Integrity))
def test_every_byte_counts_where_the_page_is_sealed(integrity: Integrity) -> None:
    """Header and payload of every group; what pads them is nobody's."""
    layout = layout_of(page_size=1)
    seal, rows = sealed_rows(layout, integrity)
    used = FIXED.itemsize + 8 * layout.geometry.slabs
    sampled = np.isin(LABELS.identities[:, 0], SEALED)
    for group in range(layout.groups):
        start, payload, end = offsets(layout, group)
        for at in range(start, start + layout.geometry.object_bytes):
            rows[:, at] ^= 1 << (at % 8)
            sound = seal.verify(rows, LABELS)
            rows[:, at] ^= 1 << (at % 8)
            sealed = at - start < used or payload <= at < end
            if at - start < FIXED.itemsize or (sealed and integrity is Integrity.FULL):
                expected = np.zeros(PAGES, bool)
            elif sealed and integrity is Integrity.SAMPLE:
                expected = ~sampled
            else:
                expected = np.ones(PAGES, bool)
            assert sound.tolist() == expected.tolist(), at - start


REASONS = {
    "magic": Reason.MAGIC,
    "version": Reason.VERSION,
    "namespace": Reason.NAMESPACE,
    "epoch": Reason.EPOCH,
    "identity": Reason.IDENTITY,
    "sealed": Reason.GEOMETRY,
    "payload_bytes": Reason.GEOMETRY,
    "group": Reason.GEOMETRY,
    "slabs": Reason.GEOMETRY,
    "reserved": Reason.GEOMETRY,
}


@pytest.mark.parametrize("field", REASONS)
@pytest.mark.parametrize("group", [0, 2])
def test_a_field_of_any_group_is_the_reason(field: str, group: int) -> None:
    assert FIXED.fields is not None and set(REASONS) == set(FIXED.fields)
    layout = layout_of()
    seal, rows = sealed_rows(layout)
    start = offsets(layout, group)[0]
    dtype, offset = FIXED.fields[field][:2]
    rows[1, start + offset + dtype.itemsize - 1] ^= 0x40
    assert seal.verify(rows, LABELS).tolist() == [True, False, True, True, True]
    assert seal.reason(rows[1], LABELS, 1) is REASONS[field]


def test_the_payload_and_its_sums_are_the_reason_checksum() -> None:
    layout = layout_of()
    for at in (FIXED.itemsize, layout.geometry.header_bytes):
        seal, rows = sealed_rows(layout)
        rows[4, at] ^= 1
        assert not seal.verify(rows, LABELS)[4] and seal.reason(rows[4], LABELS, 4) is Reason.CHECKSUM


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        (labels_of(0, 1, 16, 17, 34), Reason.IDENTITY),
        (replace(LABELS, namespace=b"m" * 32), Reason.NAMESPACE),
        (replace(LABELS, namespace=b"n" * 31 + b"m"), Reason.NAMESPACE),
        (replace(LABELS, epoch=8), Reason.EPOCH),
        (replace(LABELS, epoch=7 + (1 << 40)), Reason.EPOCH),
    ],
)
def test_a_page_of_another_prompt_model_or_epoch(labels: Labels, reason: Reason) -> None:
    seal, rows = sealed_rows(layout_of())
    assert not seal.verify(rows, labels)[4] and seal.reason(rows[4], labels, 4) is reason


def test_two_pages_that_changed_places() -> None:
    seal, rows = sealed_rows(layout_of())
    assert seal.verify(rows[[1, 0, 2, 3, 4]], LABELS).tolist() == [False, False, True, True, True]


@pytest.mark.parametrize("integrity", list(Integrity))
def test_two_groups_of_a_page_that_changed_places(integrity: Integrity) -> None:
    """Each is whole and valid, but of other KV heads."""
    layout = layout_of()
    seal, rows = sealed_rows(layout, integrity)
    swapped = rows.view(PAGES, 3, -1)[:, [1, 0, 2]].reshape(PAGES, -1)
    assert not seal.verify(swapped, LABELS).any()
    assert seal.reason(swapped[0], LABELS, 0) is Reason.GEOMETRY


def test_kind_different_parallelism_no_sharing() -> None:
    """The groups of the second rank of TP 3 are those that one rank alone writes, and no other's."""
    whole, part = layout_of(), layout_of(tuple(replace(c, heads=2) for c in WIDE_K), 1, first_group=1)
    _, rows = sealed_rows(whole)
    groups = rows.view(PAGES, 3, -1)
    seal = Seal(part, Integrity.FULL)
    assert [bool(seal.verify(groups[:, g].contiguous(), LABELS).all()) for g in range(3)] == [
        False,
        True,
        False,
    ]


@pytest.mark.parametrize("reader", list(Integrity))
@pytest.mark.parametrize("writer", list(Integrity))
def test_modes_agree_only_on_pages_that_both_seal_or_both_do_not(
    writer: Integrity, reader: Integrity
) -> None:
    layout = layout_of()
    _, rows = sealed_rows(layout, writer)

    def seals(mode: Integrity) -> np.ndarray:
        sampled = np.isin(LABELS.identities[:, 0], SEALED)
        return sampled if mode is Integrity.SAMPLE else np.full(PAGES, mode is Integrity.FULL)

    found = Seal(layout, reader).verify(rows, LABELS)
    assert found.tolist() == (seals(writer) == seals(reader)).tolist()


@pytest.mark.parametrize("integrity", list(Integrity))
def test_what_is_void_does_not_verify(integrity: Integrity) -> None:
    seal, rows = sealed_rows(layout_of(), integrity)
    seal.void(rows[2:4])
    assert seal.verify(rows, LABELS).tolist() == [True, True, False, False, True]
    assert seal.reason(rows[2], LABELS, 2) is Reason.MAGIC


def test_one_void_group_is_enough() -> None:
    layout = layout_of()
    seal, rows = sealed_rows(layout)
    start = offsets(layout, 1)[0]
    rows[0, start : start + FIXED.itemsize] = 0
    assert seal.verify(rows, LABELS).tolist() == [False, True, True, True, True]


@pytest.mark.parametrize("integrity", list(Integrity))
def test_rows_may_be_slices_of_a_larger_buffer(integrity: Integrity) -> None:
    """As the first rows of a staging buffer, or rows that lie apart; nothing beside them is written."""
    layout = layout_of()
    seal, rows = sealed_rows(layout, integrity)
    buffer = torch.full((2 * PAGES, layout.page_bytes + 64), 0xA5, dtype=torch.uint8)
    part = buffer[1 : 1 + 2 * PAGES : 2, 64:]
    part[:] = random_rows(layout)
    seal.write(part, LABELS)
    assert torch.equal(part, rows)
    assert seal.verify(part, LABELS).all()
    assert (buffer[::2] == 0xA5).all() and (buffer[:, :64] == 0xA5).all()
    part[3, 0] ^= 1
    assert seal.verify(part, LABELS).tolist() == [True, True, True, False, True]
    assert seal.reason(part[3], LABELS, 3) is Reason.MAGIC
    seal.void(part[1:2])
    assert not seal.verify(part, LABELS)[1] and (buffer[:, :64] == 0xA5).all()


def test_no_rows() -> None:
    layout = layout_of()
    seal, nothing = Seal(layout, Integrity.FULL), labels_of()
    seal.write(random_rows(layout, 0), nothing)
    seal.void(random_rows(layout, 0))
    assert seal.verify(random_rows(layout, 0), nothing).tolist() == []


# The arithmetic of a GPU, on the CPU


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (5, 3, 2, 7), (2, 1, 30, 96), (3, 8, 4, 1024)])
def test_torch_and_numpy_agree(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    words = rng.integers(0, 1 << 64, math.prod(shape), dtype=np.uint64).reshape(shape)
    factors = multipliers(shape[-1])
    got = torch_checksums(torch.from_numpy(words.view(np.int64)), torch.from_numpy(factors.view(np.int64)))
    assert np.array_equal(got.numpy().view(np.uint64), checksums(words, factors))


@pytest.mark.parametrize("word", [0, 1, (1 << 63), (1 << 64) - 1, 0x80000000, 0xFFFFFFFF00000000])
def test_torch_and_numpy_agree_on_the_signs(word: int) -> None:
    """int64 shifts bring the sign down; the fold must not."""
    words = np.full((1, 1, 1, 3), word, dtype=np.uint64)
    factors = multipliers(3)
    got = torch_checksums(torch.from_numpy(words.view(np.int64)), torch.from_numpy(factors.view(np.int64)))
    expected = sum((word ^ (word >> 32)) * f for f in factors.tolist()) % 2**64
    assert got.numpy().view(np.uint64).tolist() == [[[expected]]]


def test_torch_and_numpy_agree_on_slices() -> None:
    """As ``Seal`` sees a component: slabs inside of objects inside of rows."""
    layout = layout_of()
    rows = random_rows(layout)
    seal = Seal(layout, Integrity.FULL)
    for index, component in enumerate(layout.components):
        words = seal._words(seal._objects(rows), index)
        factors = multipliers(layout.slab_bytes(component) // 8)
        got = torch_checksums(words, torch.from_numpy(factors.view(np.int64)))
        assert np.array_equal(got.numpy().view(np.uint64), checksums(words.numpy().view(np.uint64), factors))
