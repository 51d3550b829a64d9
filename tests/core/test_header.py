"""The header of a page: its exact bytes, its sizes, and why a page is refused."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest

from hicache_ext.core.header import (
    FIXED,
    NAMESPACE_BYTES,
    SAMPLED_ONE_IN,
    Geometry,
    Integrity,
    Labels,
    Reason,
    diagnose,
    fixed_parts,
    sealed_pages,
)
from hicache_ext.core.page import FORMAT_VERSION, IDENTITY_BYTES, page_identities, root_salt

SPACE = bytes(range(100, 132))
GEOMETRY = Geometry(groups=3, payload_bytes=0x0102030405, slabs=7, first_group=10)

every_mode = pytest.mark.parametrize("integrity", list(Integrity))


def labels(pages: int, *, namespace: bytes = SPACE, epoch: int = 5) -> Labels:
    identities = np.random.default_rng(1).integers(0, 256, size=(pages, IDENTITY_BYTES), dtype=np.uint8)
    return Labels(identities, namespace, epoch)


# Bytes


def test_the_fixed_part_is_these_bytes() -> None:
    """Offsets by hand: what other ranks, other processes and later versions read."""
    of = labels(2, epoch=0x1122334455667788)
    parts = fixed_parts(of, GEOMETRY, Integrity.FULL)
    assert (parts.shape, parts.dtype) == ((2, 3, 96), np.uint8)
    for page in range(2):
        for group in range(3):
            raw = parts[page, group].tobytes()
            assert raw[0:8] == b"HICACHEX"
            assert raw[8:12] == struct.pack("<I", FORMAT_VERSION)
            assert raw[12:16] == b"\x01\x00\x00\x00"
            assert raw[16:24] == b"\x05\x04\x03\x02\x01\x00\x00\x00"
            assert raw[24:32] == b"\x88\x77\x66\x55\x44\x33\x22\x11"
            assert raw[32:36] == struct.pack("<I", 10 + group)
            assert raw[36:40] == b"\x07\x00\x00\x00"
            assert raw[40:56] == of.identities[page].tobytes()
            assert raw[56:88] == SPACE
            assert raw[88:96] == bytes(8)


def test_sizes_of_the_fields_are_those_of_the_identities_and_namespaces() -> None:
    assert FIXED.itemsize == 96 and FIXED["identity"].itemsize == IDENTITY_BYTES == 16
    assert FIXED["namespace"].itemsize == NAMESPACE_BYTES == 32


@pytest.mark.parametrize(
    ("slabs", "payload", "header", "whole"),
    [
        (0, 0, 128, 512),
        (1, 1, 128, 512),
        (4, 384, 128, 512),
        (4, 385, 128, 1024),
        (5, 384, 192, 1024),
        (12, 320, 192, 512),
        (13, 320, 256, 1024),
        (60, 23_040, 576, 24_064),
    ],
)
def test_header_and_payload_are_aligned(slabs: int, payload: int, header: int, whole: int) -> None:
    """The checksums follow the 96 bytes; 64 for vector loads, 512 for direct I/O."""
    geometry = Geometry(groups=1, payload_bytes=payload, slabs=slabs)
    assert (geometry.header_bytes, geometry.object_bytes) == (header, whole)


def test_alignment_holds_for_any_size() -> None:
    for slabs in range(0, 300, 7):
        for payload in (0, 8, 500, 512, 4096, 65_544):
            geometry = Geometry(groups=1, payload_bytes=payload, slabs=slabs)
            assert geometry.header_bytes % 64 == 0 and geometry.object_bytes % 512 == 0
            assert 0 <= geometry.header_bytes - (96 + 8 * slabs) < 64
            assert 0 <= geometry.object_bytes - (geometry.header_bytes + payload) < 512


# Round trip


@every_mode
def test_what_was_written_reads_as_expected(integrity: Integrity) -> None:
    """Two sides that know the same build the same bytes; all fields can be read back."""
    of = labels(40)
    written, expected = (fixed_parts(of, GEOMETRY, integrity) for _ in range(2))
    assert np.array_equal(written, expected)
    read = written.reshape(-1).view(FIXED).reshape(40, 3)
    assert (read["magic"] == b"HICACHEX").all() and (read["version"] == FORMAT_VERSION).all()
    assert (read["epoch"] == 5).all() and (read["slabs"] == 7).all() and (read["reserved"] == 0).all()
    assert (read["payload_bytes"] == 0x0102030405).all()
    assert np.array_equal(read["identity"][:, 1], of.identities)
    assert (read["namespace"] == np.frombuffer(SPACE, np.uint8)).all()
    assert np.array_equal(read["sealed"][:, 2] == 1, sealed_pages(of, integrity))


def test_groups_are_numbered_within_the_model() -> None:
    """What one rank writes as its first group is another number for the next rank."""
    for first in (0, 2, 6):
        geometry = Geometry(groups=2, payload_bytes=64, slabs=2, first_group=first)
        read = fixed_parts(labels(3), geometry, Integrity.OFF).reshape(-1).view(FIXED)
        assert read["group"].tolist() == [first, first + 1] * 3


@every_mode
def test_no_pages_have_no_headers(integrity: Integrity) -> None:
    none = labels(0)
    assert len(none) == 0 and len(labels(4)) == 4
    assert fixed_parts(none, GEOMETRY, integrity).shape == (0, 3, 96)
    assert sealed_pages(none, integrity).shape == (0,)


def test_a_namespace_of_another_length_is_noticed() -> None:
    with pytest.raises(ValueError):
        fixed_parts(labels(1, namespace=SPACE[:-1]), GEOMETRY, Integrity.FULL)


# Which pages are sealed


def test_full_seals_all_and_off_none() -> None:
    assert sealed_pages(labels(9), Integrity.FULL).tolist() == [True] * 9
    assert sealed_pages(labels(9), Integrity.OFF).tolist() == [False] * 9


@every_mode
def test_whether_a_page_is_sealed_does_not_depend_on_the_pages_beside_it(integrity: Integrity) -> None:
    """A page is written with some pages and read with others."""
    of = labels(64)
    together = sealed_pages(of, integrity).tolist()
    one_by_one = [
        bool(sealed_pages(Labels(of.identities[i : i + 1], bytes(32), 99), integrity)[0]) for i in range(64)
    ]
    backwards = sealed_pages(Labels(of.identities[::-1], SPACE, 5), integrity)[::-1].tolist()
    assert together == one_by_one == backwards


def test_a_sample_goes_by_the_identity_and_stays_the_same_forever() -> None:
    """Identities are little-endian numbers here: multiples of 16 are those whose first byte is one."""
    identities = np.full((256, IDENTITY_BYTES), 0xFF, dtype=np.uint8)
    identities[:, 0] = np.arange(256)
    sealed = sealed_pages(Labels(identities, SPACE, 5), Integrity.SAMPLE)
    assert np.flatnonzero(sealed).tolist() == list(range(0, 256, 16))


def test_a_sample_is_about_one_in_sixteen_of_real_identities() -> None:
    pages = page_identities(root_salt(SPACE, ("", "", "")), np.arange(8000), 2)  # type: ignore[arg-type]
    of = Labels(np.frombuffer(b"".join(pages), np.uint8).reshape(-1, IDENTITY_BYTES), SPACE, 1)
    sealed = int(sealed_pages(of, Integrity.SAMPLE).sum())
    assert 0.7 * 4000 / SAMPLED_ONE_IN < sealed < 1.3 * 4000 / SAMPLED_ONE_IN


# Why a page is refused


def changed(name: str, group: int = 0) -> np.ndarray:
    """The headers of a page with the lowest bit of one field flipped in one group."""
    found = fixed_parts(labels(1), GEOMETRY, Integrity.FULL)[0].copy()
    offset = FIXED.fields[name][1]  # type: ignore[index]
    found[group, offset] ^= 1
    return found


@pytest.mark.parametrize("group", [0, 1, 2])
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("magic", Reason.MAGIC),
        ("version", Reason.VERSION),
        ("namespace", Reason.NAMESPACE),
        ("epoch", Reason.EPOCH),
        ("identity", Reason.IDENTITY),
        ("sealed", Reason.GEOMETRY),
        ("payload_bytes", Reason.GEOMETRY),
        ("group", Reason.GEOMETRY),
        ("slabs", Reason.GEOMETRY),
        ("reserved", Reason.GEOMETRY),
    ],
)
def test_the_field_that_differs_is_named_whichever_group_it_is_in(
    name: str, reason: Reason, group: int
) -> None:
    assert diagnose(changed(name, group), fixed_parts(labels(1), GEOMETRY, Integrity.FULL)[0]) is reason


def test_every_bit_of_a_header_has_a_reason() -> None:
    expected = fixed_parts(labels(1), GEOMETRY, Integrity.FULL)[0]
    for byte in range(96):
        for bit in range(8):
            found = expected.copy()
            found[1, byte] ^= 1 << bit
            assert diagnose(found, expected) is not Reason.CHECKSUM, (byte, bit)


def test_equal_headers_leave_only_the_checksums() -> None:
    expected = fixed_parts(labels(1), GEOMETRY, Integrity.FULL)[0]
    assert diagnose(expected.copy(), expected) is Reason.CHECKSUM


def test_headers_may_be_a_part_of_larger_rows() -> None:
    """They are looked at where they lie, in front of the payloads."""
    expected = fixed_parts(labels(1), GEOMETRY, Integrity.FULL)[0]
    rows = np.zeros((3, 512), np.uint8)
    rows[:, :96] = changed("epoch", 2)
    assert diagnose(rows[:, :96], expected) is Reason.EPOCH


def test_the_first_reason_is_the_most_basic_one() -> None:
    """Memory that never held a page differs in everything, and is told as that."""
    expected = fixed_parts(labels(1), GEOMETRY, Integrity.FULL)[0]
    found = np.zeros_like(expected)
    order = [
        ("magic", Reason.MAGIC),
        ("version", Reason.VERSION),
        ("namespace", Reason.NAMESPACE),
        ("epoch", Reason.EPOCH),
        ("identity", Reason.IDENTITY),
        ("payload_bytes", Reason.GEOMETRY),
    ]
    for name, reason in order:
        assert diagnose(found, expected) is reason
        fields = found.reshape(-1).view(FIXED)
        fields[name] = expected.reshape(-1).view(FIXED)[name]
        found = fields.view(np.uint8).reshape(expected.shape)
    assert diagnose(found, expected) is Reason.GEOMETRY, "the groups and slabs differ still"


Change = Callable[[Labels], tuple[Labels, Geometry, Integrity]]


@pytest.mark.parametrize(
    ("writer", "reason"),
    [
        (lambda of: (Labels(of.identities, bytes(32), 5), GEOMETRY, Integrity.FULL), Reason.NAMESPACE),
        (lambda of: (Labels(of.identities, SPACE, 4), GEOMETRY, Integrity.FULL), Reason.EPOCH),
        (lambda of: (Labels(of.identities[::-1], SPACE, 5), GEOMETRY, Integrity.FULL), Reason.IDENTITY),
        (lambda of: (of, GEOMETRY, Integrity.OFF), Reason.GEOMETRY),
        (lambda of: (of, Geometry(3, 0x0102030405, 7, 13), Integrity.FULL), Reason.GEOMETRY),
        (lambda of: (of, Geometry(3, 0x0102030405, 8, 10), Integrity.FULL), Reason.GEOMETRY),
        (lambda of: (of, Geometry(3, 0x0102030406, 7, 10), Integrity.FULL), Reason.GEOMETRY),
    ],
)
def test_pages_of_another_writer_are_refused_for_what_they_are(writer: Change, reason: Reason) -> None:
    of = labels(2)
    expected = fixed_parts(of, GEOMETRY, Integrity.FULL)
    found = fixed_parts(*writer(of))
    assert [diagnose(found[page], expected[page]) for page in range(2)] == [reason, reason]


def test_two_headers_that_change_places_are_seen() -> None:
    """Pages mixed up, and groups of a page mixed up."""
    parts = fixed_parts(labels(2), GEOMETRY, Integrity.FULL)
    assert diagnose(parts[1], parts[0]) is Reason.IDENTITY
    assert diagnose(parts[0][[1, 0, 2]], parts[0]) is Reason.GEOMETRY
