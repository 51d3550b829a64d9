"""The reference copies: bytes survive a round trip to other slots, and nothing else is touched."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

import torch

from hicache_ext.transfer.copy_torch import gather, scatter_layer
from hicache_ext.transfer.device_kv import DeviceKV
from hicache_ext.transfer.layout import Component, PageLayout

LAYERS = 3
POISON = 0xA5

MHA = (Component("K", 24, 8), Component("V", 24, 8))
WIDE_K = (Component("K", 24, 16), Component("V", 24, 8))
MLA = (Component("latent", 1, 40),)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Copies this small only lose time by being spread over threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_kv(
    components: tuple[Component, ...], page_size: int, dtype: torch.dtype, groups: int, pages: int
) -> DeviceKV:
    """Random bytes, NaNs included; equal K and V are halves of one allocation a layer, as in SGLang."""
    layout = PageLayout(page_size, LAYERS, dtype, components, groups)
    slots = pages * page_size

    def rows(count: int, c: Component) -> torch.Tensor:
        raw = torch.randint(0, 256, (count, slots, c.heads, c.dim * dtype.itemsize), dtype=torch.uint8)
        return raw.view(dtype)

    if len({(c.heads, c.dim) for c in components}) == 1:
        fused = [rows(len(components), components[0]) for _ in range(LAYERS)]
        return DeviceKV(layout, tuple(tuple(f[i] for f in fused) for i in range(len(components))))
    return DeviceKV(layout, tuple(tuple(rows(1, c)[0] for _ in range(LAYERS)) for c in components))


def raw(buffer: torch.Tensor) -> torch.Tensor:
    """The bytes: NaNs are not equal to themselves."""
    return buffer.contiguous().view(torch.uint8)


def slots_of(pages: torch.Tensor, page_size: int) -> torch.Tensor:
    return (pages[:, None] * page_size + torch.arange(page_size)).view(-1)


CASES = [
    (components, page_size, dtype, groups)
    for components, all_groups in ((MHA, (1, 3, 8)), (WIDE_K, (1, 3, 8)), (MLA, (1,)))
    for groups in all_groups
    for page_size in (1, 16, 64)
    for dtype in (torch.bfloat16, torch.float32, torch.uint8)
]


@pytest.mark.parametrize(
    ("components", "page_size", "dtype", "groups"),
    CASES,
    ids=lambda v: "+".join(f"{c.name}{c.heads}x{c.dim}" for c in v) if isinstance(v, tuple) else str(v),
)
def test_round_trip(
    components: tuple[Component, ...], page_size: int, dtype: torch.dtype, groups: int
) -> None:
    torch.manual_seed(1)
    kv = random_kv(components, page_size, dtype, groups, pages=8)
    source, target, rows = torch.tensor([5, 1, 2]), torch.tensor([0, 7, 3]), torch.tensor([3, 0, 4])
    before = [[raw(b).clone() for b in layers] for layers in kv.buffers]
    host = torch.full((6, kv.layout.page_bytes), POISON, dtype=torch.uint8)
    gather(kv, slots_of(source, page_size), host, rows)
    assert (host[[1, 2, 5]] == POISON).all(), "a page that was not asked for was written"
    for layers, old in zip(kv.buffers, before, strict=True):
        assert all(torch.equal(raw(b), o) for b, o in zip(layers, old, strict=True)), (
            "gather wrote to the device"
        )

    from_slots, to_slots = slots_of(source, page_size), slots_of(target, page_size)
    others = torch.ones(8 * page_size, dtype=torch.bool)
    others[to_slots] = False
    for layer in range(LAYERS):
        scatter_layer(kv, host, rows, to_slots, layer)
        for index in range(LAYERS):
            for layers, old in zip(kv.buffers, before, strict=True):
                now, then = raw(layers[index]), old[index]
                assert torch.equal(now[others], then[others]), "a slot that was not asked for was written"
                if index <= layer:
                    assert torch.equal(now[to_slots], then[from_slots])
                else:
                    assert torch.equal(now[to_slots], then[to_slots]), "another layer was written"


def test_every_element_lands_where_the_layout_says() -> None:
    """Not through ``views``: offsets are computed here, so that both being wrong alike would show."""
    page_size, groups = 2, 2
    components = (Component("K", 4, 4), Component("V", 4, 2))
    torch.manual_seed(2)
    kv = random_kv(components, page_size, torch.uint8, groups, pages=3)
    host = torch.full((2, kv.layout.page_bytes), POISON, dtype=torch.uint8)
    gather(kv, slots_of(torch.tensor([2, 1]), page_size), host, torch.tensor([1, 0]))
    for row, page in ((1, 2), (0, 1)):
        expected = []
        for group in range(groups):
            for component, layers in zip(components, kv.buffers, strict=True):
                for layer in range(LAYERS):
                    for token in range(page_size):
                        for head in (2 * group, 2 * group + 1):
                            expected += layers[layer][page * page_size + token, head].tolist()
                assert len(expected) % component.dim == 0
        objects = host[row].view(groups, -1)
        start = kv.layout.geometry.header_bytes
        payload = objects[:, start : start + kv.layout.geometry.payload_bytes]
        assert payload.reshape(-1).tolist() == expected
        rest = [objects[:, :start], objects[:, start + kv.layout.geometry.payload_bytes :]]
        assert all((part == POISON).all() for part in rest), "the header is not the copy's to write"


def test_strides_of_the_device_buffers_are_free() -> None:
    """A TP rank's heads as a slice of wider rows, and slots that lie two rows apart."""
    layout = PageLayout(2, 1, torch.float32, (Component("K", 2, 3),), 2)
    wide = torch.arange(16 * 8 * 3, dtype=torch.float32).view(16, 8, 3)
    view = wide[::2, 2:4]
    kv = DeviceKV(layout, ((view,),))
    host = torch.zeros((1, layout.page_bytes), dtype=torch.uint8)
    expected = view[[4, 5]].clone()
    gather(kv, torch.tensor([4, 5]), host, torch.tensor([0]))
    before = wide.clone()
    scatter_layer(kv, host, torch.tensor([0]), torch.tensor([0, 1]), 0)
    assert torch.equal(view[[0, 1]], expected)
    before[[0, 2], 2:4] = expected
    assert torch.equal(wide, before)


def test_no_pages_is_no_copy() -> None:
    kv = random_kv(MHA, 4, torch.uint8, 8, pages=2)
    host = torch.full((2, kv.layout.page_bytes), POISON, dtype=torch.uint8)
    nothing = torch.empty(0, dtype=torch.int64)
    gather(kv, nothing, host, nothing)
    assert (host == POISON).all()
    before = raw(kv.buffers[0][0]).clone()
    scatter_layer(kv, host, nothing, nothing, 0)
    assert torch.equal(raw(kv.buffers[0][0]), before)
