"""What a page's bytes are: offsets computed by hand, and the same bytes for every TP degree."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

import torch

from hicache_ext.core.header import MAX_GROUPS, head_groups
from hicache_ext.transfer.copy_torch import gather
from hicache_ext.transfer.device_kv import DeviceKV
from hicache_ext.transfer.layout import Component, PageLayout


def layout_of(**changes: object) -> PageLayout:
    base = PageLayout(
        page_size=4,
        layers=3,
        dtype=torch.bfloat16,
        components=(Component("K", 6, 8), Component("V", 6, 6)),
        groups=3,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def test_sizes() -> None:
    layout = layout_of()
    geometry = layout.geometry
    assert [layout.slab_bytes(c) for c in layout.components] == [4 * 2 * 8 * 2, 4 * 2 * 6 * 2]
    assert geometry.payload_bytes == 3 * (128 + 96) and geometry.slabs == 6
    assert geometry.header_bytes == 192, "96 bytes and six checksums, up to a multiple of 64"
    assert geometry.object_bytes == 1024, "192 + 672, up to a multiple of 512"
    assert layout.page_bytes == 3 * 1024 and layout.payload_bytes == 3 * 672


@pytest.mark.parametrize(
    ("page", "group", "component", "layer", "token", "head", "dim", "offset"),
    [
        (0, 0, 0, 0, 0, 0, 0, 192),
        (0, 0, 0, 0, 0, 0, 7, 192 + 14),
        (0, 0, 0, 0, 0, 1, 0, 192 + 16),
        (0, 0, 0, 0, 1, 0, 0, 192 + 32),
        (0, 0, 0, 1, 0, 0, 0, 192 + 128),
        # K of a group is 3 layers x 4 tokens x 2 heads x 8 = 192 elements; a group is 1024 bytes.
        (0, 0, 1, 0, 0, 0, 0, 192 + 384),
        (0, 0, 1, 2, 3, 1, 4, 192 + 384 + 2 * (2 * 4 * 2 * 6 + 3 * 2 * 6 + 6 + 4)),
        (0, 1, 0, 0, 0, 0, 0, 1024 + 192),
        (0, 2, 1, 1, 2, 0, 3, 2 * 1024 + 192 + 384 + 2 * (4 * 2 * 6 + 2 * 2 * 6 + 3)),
        (2, 1, 0, 2, 0, 1, 6, 2 * 3072 + 1024 + 192 + 2 * (2 * 4 * 2 * 8 + 8 + 6)),
    ],
)
def test_byte_offset_of_an_element(
    page: int, group: int, component: int, layer: int, token: int, head: int, dim: int, offset: int
) -> None:
    layout = layout_of()
    pages = torch.zeros((3, layout.page_bytes), dtype=torch.uint8)
    layout.views(pages)[component][page, group, layer, token, head, dim] = 1.0
    # bfloat16 1.0 is 0x3f80, little-endian.
    assert pages.view(-1).nonzero().view(-1).tolist() == [offset, offset + 1]
    assert pages.view(-1)[offset : offset + 2].tolist() == [0x80, 0x3F]


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_components_cover_every_byte_of_the_payload_once(groups: int) -> None:
    layout = layout_of(groups=groups, dtype=torch.uint8)
    pages = torch.zeros((2, layout.page_bytes), dtype=torch.uint8)
    for view in layout.views(pages):
        view += 1
    geometry = layout.geometry
    objects = pages.view(2, groups, geometry.object_bytes)
    start, stop = geometry.header_bytes, geometry.header_bytes + geometry.payload_bytes
    assert objects[:, :, start:stop].unique().tolist() == [1]
    assert not objects[:, :, :start].any() and not objects[:, :, stop:].any()


def test_views_of_some_rows_of_a_buffer() -> None:
    """A staging buffer may be part of a larger one."""
    layout = layout_of()
    buffer = torch.zeros((4, layout.page_bytes), dtype=torch.uint8)
    layout.views(buffer[2:3])[0].fill_(1.0)
    assert buffer[2].any() and not buffer[[0, 1, 3]].any()


def test_views_of_rows_that_lie_apart() -> None:
    layout = layout_of()
    buffer = torch.zeros((2, layout.page_bytes + 64), dtype=torch.uint8)
    for view in layout.views(buffer[:, : layout.page_bytes]):
        view.fill_(1.0)
    assert not buffer[:, layout.page_bytes :].any()
    values = buffer[:, : layout.page_bytes].view(torch.bfloat16)
    assert int((values == 1.0).sum()) * 2 == 2 * layout.payload_bytes


def test_heads_must_divide_into_groups() -> None:
    with pytest.raises(ValueError, match="6 K heads do not divide into 4 groups"):
        layout_of(groups=4)


def test_a_slab_is_whole_words() -> None:
    with pytest.raises(ValueError, match="30 bytes of V a layer are no whole 64-bit words"):
        layout_of(page_size=1, groups=2, components=(Component("K", 6, 8), Component("V", 6, 5)))


@pytest.mark.parametrize(
    ("heads", "groups"),
    [(1, 1), (2, 2), (3, 3), (8, 8), (16, 8), (12, 6), (9, 3), (10, 5), (11, 1), (20, 5), (32, 8), (128, 8)],
)
def test_head_groups_is_the_largest_divisor(heads: int, groups: int) -> None:
    assert head_groups(heads) == groups <= MAX_GROUPS


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_every_tp_degree_reads_the_same_group_bytes(tp: int) -> None:
    """Kind 14: rank r of TP n holds groups [r * 8 / n, (r + 1) * 8 / n) of the page of TP 1."""
    heads, page_size, layers = 8, 4, 2
    components = (Component("K", heads, 6), Component("V", heads, 4))
    whole = PageLayout(page_size, layers, torch.float32, components, 8)
    torch.manual_seed(0)
    buffers = tuple(
        tuple(torch.randn(3 * page_size, heads, c.dim) for _ in range(layers)) for c in components
    )
    slots, rows = torch.arange(2 * page_size) + page_size, torch.arange(2)
    expected = torch.zeros((2, whole.page_bytes), dtype=torch.uint8)
    gather(DeviceKV(whole, buffers), slots, expected, rows)
    groups_of_all = expected.view(2, 8, -1)
    for rank in range(tp):
        mine = slice(rank * heads // tp, (rank + 1) * heads // tp)
        part = PageLayout(
            page_size,
            layers,
            torch.float32,
            tuple(Component(c.name, heads // tp, c.dim) for c in components),
            8 // tp,
        )
        kv = DeviceKV(part, tuple(tuple(b[:, mine] for b in layer) for layer in buffers))
        got = torch.zeros((2, part.page_bytes), dtype=torch.uint8)
        gather(kv, slots, got, rows)
        assert torch.equal(got.view(2, 8 // tp, -1), groups_of_all[:, rank * 8 // tp : (rank + 1) * 8 // tp])


def buffers_like(layout: PageLayout, slots: int = 8) -> tuple[tuple[torch.Tensor, ...], ...]:
    return tuple(
        tuple(torch.zeros((slots, c.heads, c.dim), dtype=layout.dtype) for _ in range(layout.layers))
        for c in layout.components
    )


def test_device_buffers_that_fit_are_accepted() -> None:
    layout = layout_of()
    assert DeviceKV(layout, buffers_like(layout)).device == torch.device("cpu")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"layers": 2}, "K: 2 layers, expected 3"),
        ({"dtype": torch.float16}, r"K buffer is torch.float16 \(8, 6, 8\), expected torch.bfloat16"),
        (
            {"components": (Component("K", 6, 8), Component("V", 6, 8))},
            r"V buffer is .*\(8, 6, 8\), expected",
        ),
        # Kind 1: as many elements, another meaning.
        ({"components": (Component("K", 8, 6), Component("V", 6, 5)), "groups": 2}, "K buffer is .*8, 8, 6"),
        ({"components": (Component("K", 3, 16), Component("V", 6, 5))}, "K buffer is .*8, 3, 16"),
    ],
)
def test_kind_wrong_layout_right_shape_is_refused(other: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DeviceKV(layout_of(), buffers_like(layout_of(**other)))


def test_a_missing_component_is_refused() -> None:
    layout = layout_of()
    with pytest.raises(ValueError):
        DeviceKV(layout, buffers_like(layout)[:1])
