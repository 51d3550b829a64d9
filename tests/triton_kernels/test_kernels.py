"""The kernels against their references, bit for bit: on a GPU if there is one, else interpreted."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache_ext.core import checksum
from hicache_ext.core.header import FIXED
from hicache_ext.transfer import copy_torch
from hicache_ext.transfer.device_kv import DeviceKV
from hicache_ext.transfer.layout import Component, PageLayout
from hicache_ext.triton_kernels import kernels, reference
from hicache_ext.triton_kernels.kernels import Tuning
from hicache_ext.triton_kernels.tables import (
    REFUSED,
    PagedKV,
    header_words,
    layer_row_words,
    layer_rows,
    page_rows,
    paged,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POISON = 0xA5
DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8, torch.float32)


SMALL = Tuning(blocks=3, warps=4, words=256)


@dataclass(frozen=True)
class Case:
    """Shapes and strides of a random KV; ``gap`` elements lie between heads, ``lead`` before the first."""

    page_size: int
    layers: int
    dtype: torch.dtype
    components: tuple[Component, ...]
    groups: int
    gap: int = 0
    lead: int = 0
    wide: int = 0
    seed: int = 0
    in_a_row: float = 0.5
    tuning: Tuning = SMALL

    @property
    def layout(self) -> PageLayout:
        return PageLayout(self.page_size, self.layers, self.dtype, self.components, self.groups)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    page_size = draw(st.sampled_from((1, 2, 3, 4, 8, 16, 64, 128)))
    groups = draw(st.integers(1, 8 if page_size <= 8 else 2))
    heads = groups * draw(st.integers(1, 3 if page_size <= 16 else 1))
    dtype = draw(st.sampled_from(DTYPES))
    kind = draw(st.sampled_from(("mha", "wide K", "mla")))
    if kind == "mla":
        groups = heads = 1
    # Slabs are whole words: the dimension is rounded up until they are.
    step = 8 // math.gcd(8, page_size * heads // groups * dtype.itemsize)
    largest = max(1, 600 // (page_size * heads * step))
    dims = [step * draw(st.integers(1, min(largest, 24))) for _ in range(2)]
    components = {
        "mha": (Component("K", heads, dims[0]), Component("V", heads, dims[0])),
        "wide K": (Component("K", heads, dims[0]), Component("V", heads, dims[1])),
        "mla": (Component("latent", 1, dims[0]),),
    }[kind]
    return Case(
        page_size,
        draw(st.integers(1, 3)),
        dtype,
        components,
        groups,
        gap=draw(st.sampled_from((0, 0, 1, 8))),
        lead=draw(st.sampled_from((0, 0, 1, 16))),
        wide=draw(st.sampled_from((0, 0, 3))),
        seed=draw(st.integers(0, 99)),
        in_a_row=draw(st.sampled_from((0.0, 0.5, 1.0))),
        tuning=Tuning(
            blocks=draw(st.sampled_from((1, 3))), warps=4, words=draw(st.sampled_from((256, 2048)))
        ),
    )


class Setup:
    """A KV of random bytes, NaNs included, and tables of distinct slots, pages and rows."""

    PAGES = 4
    ROWS = 6

    def __init__(self, case: Case) -> None:
        self.case, self.layout = case, case.layout
        torch.manual_seed(case.seed)
        size, self.total = case.dtype.itemsize, 2 * self.PAGES * case.page_size
        self.storage: list[torch.Tensor] = []

        def buffer(c: Component) -> torch.Tensor:
            row = case.lead + c.heads * (c.dim + case.gap) + case.wide
            raw = torch.randint(0, 256, (self.total * row * size,), dtype=torch.uint8).to(DEVICE)
            self.storage.append(raw)
            strides = (row, c.dim + case.gap, 1)
            return raw.view(case.dtype).as_strided((self.total, c.heads, c.dim), strides, case.lead)

        buffers = tuple(tuple(buffer(c) for _ in range(case.layers)) for c in case.components)
        self.kv: PagedKV = paged(DeviceKV(self.layout, buffers))
        order = torch.randperm(2 * self.PAGES)
        self.source, self.target = self._slots(order[: self.PAGES]), self._slots(order[self.PAGES :])
        self.rows = torch.randperm(self.ROWS)[: self.PAGES].to(DEVICE)
        self.sealed = (torch.rand(self.PAGES) < 0.7).to(DEVICE)
        self.starts = reference.page_starts(self.source, case.page_size)

    def _slots(self, pages: torch.Tensor) -> torch.Tensor:
        """The slots of ``pages``; some pages lie in a row and the others exchange theirs."""
        size = self.case.page_size
        table = pages[:, None] * size + torch.arange(size)
        loose = torch.rand(self.PAGES) >= self.case.in_a_row
        mixed = table[loose].view(-1)
        table[loose] = mixed[torch.randperm(len(mixed))].view(-1, size)
        return table.view(-1).to(DEVICE)

    def poisoned(self) -> torch.Tensor:
        shape = (self.ROWS, self.layout.page_bytes)
        return torch.full(shape, POISON, dtype=torch.uint8, device=DEVICE)

    def saved(self) -> list[torch.Tensor]:
        return [raw.clone() for raw in self.storage]

    def restore(self, saved: list[torch.Tensor]) -> None:
        for raw, old in zip(self.storage, saved, strict=True):
            raw.copy_(old)


def check(case: Case) -> None:
    s = Setup(case)
    kv, layout, every = s.kv, s.layout, range(case.layers)
    assert torch.equal(kernels.page_starts(s.source, case.page_size), s.starts)

    got, want = s.poisoned(), s.poisoned()
    before = s.saved()
    kernels.gather(kv, s.source, s.starts, page_rows(layout, got), s.rows, s.sealed, every, case.tuning)
    assert all(map(torch.equal, s.storage, before)), "gather wrote to the device"
    reference.gather(kv, s.source, s.starts, page_rows(layout, want), s.rows, s.sealed, every)
    assert torch.equal(got, want)
    unsealed = s.poisoned()
    kernels.gather(kv, s.source, None, page_rows(layout, unsealed), s.rows, None, every, case.tuning)
    if case.dtype != torch.float8_e4m3fn:
        plain = s.poisoned()
        copy_torch.gather(kv.kv, s.source, plain, s.rows)
        assert torch.equal(unsealed, plain)

    shape = (s.PAGES, layout.groups, layout.geometry.slabs)
    sums = torch.full(shape, 7, dtype=torch.int64, device=DEVICE)
    also = sums.clone()
    kernels.checksums(kv, page_rows(layout, got), s.rows, sums, every, case.tuning)
    reference.checksums(kv, page_rows(layout, got), s.rows, also, every)
    assert torch.equal(sums, also)
    table = got.view(s.ROWS, layout.groups, -1)[:, :, FIXED.itemsize :].contiguous().view(torch.int64)
    kept = table[s.rows][:, :, : layout.geometry.slabs]
    assert torch.equal(kept[s.sealed], sums[s.sealed]), "the header holds another checksum"

    starts = reference.page_starts(s.target, case.page_size)
    flags = torch.zeros(s.PAGES, dtype=torch.int32, device=DEVICE)
    for layer in every:
        kernels.scatter(
            kv,
            s.target,
            starts,
            page_rows(layout, got),
            s.rows,
            s.sealed,
            flags,
            range(layer, layer + 1),
            case.tuning,
        )
    after = s.saved()
    s.restore(before)
    reference.scatter(kv, s.target, starts, page_rows(layout, got), s.rows, s.sealed, flags, every)
    assert all(map(torch.equal, s.storage, after))
    s.restore(before)
    kernels.scatter(kv, s.target, None, page_rows(layout, got), s.rows, None, flags, every, case.tuning)
    assert all(map(torch.equal, s.storage, after))
    assert not flags.any()


NAMED = {
    "8 groups of one head": Case(16, 2, torch.bfloat16, (Component("K", 8, 8), Component("V", 8, 8)), 8),
    "page of one token": Case(1, 3, torch.bfloat16, (Component("K", 8, 8), Component("V", 8, 8)), 8),
    "page of 128": Case(128, 1, torch.uint8, (Component("K", 2, 8), Component("V", 2, 8)), 2),
    "latent rows of 576": Case(1, 2, torch.bfloat16, (Component("latent", 1, 576),), 1),
    "K wider than V": Case(4, 2, torch.float32, (Component("K", 4, 6), Component("V", 4, 4)), 2),
    "bytes that are no words": Case(8, 2, torch.uint8, (Component("K", 3, 5), Component("V", 3, 5)), 3),
    "half words": Case(4, 2, torch.float16, (Component("K", 2, 3), Component("V", 2, 3)), 1, gap=2),
    "scales": Case(16, 2, torch.float32, (Component("K", 8, 1), Component("V", 8, 1)), 4),
    "every page scattered": Case(8, 1, torch.bfloat16, (Component("K", 2, 8),), 2, in_a_row=0.0),
}


@pytest.mark.parametrize("name", NAMED)
def test_same_bytes_as_the_reference(name: str) -> None:
    check(NAMED[name])


@pytest.mark.slow
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)
@given(cases())
def test_same_bytes_as_the_reference_for_any_shape(case: Case) -> None:
    check(case)


def test_checksums_are_those_of_the_core() -> None:
    """Not through the reference: words are cut out here."""
    s = Setup(NAMED["8 groups of one head"])
    got = s.poisoned()
    sealed = torch.ones(s.PAGES, dtype=torch.bool, device=DEVICE)
    kernels.gather(
        s.kv, s.source, s.starts, page_rows(s.layout, got), s.rows, sealed, range(2), s.case.tuning
    )
    objects = got[s.rows].view(s.PAGES, 8, -1).cpu().numpy()
    header = s.layout.geometry.header_bytes
    payload = np.ascontiguousarray(objects[:, :, header : header + s.layout.geometry.payload_bytes])
    words = payload.view(np.uint64).reshape(s.PAGES * 8 * 4, -1)
    want = checksum.checksums(words, checksum.multipliers(words.shape[1]))
    table = np.ascontiguousarray(objects[:, :, 96 : 96 + 8 * 4]).view(np.uint64)
    assert np.array_equal(table.reshape(-1), want)


DAMAGE = ("8 groups of one head", "page of one token", "latent rows of 576", "K wider than V", "half words")


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "not sealed"])
@pytest.mark.parametrize("damage", ["bit", "swap", "sum"])
@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_flagged_and_zeroed(name: str, damage: str, sealed: bool) -> None:
    s = Setup(NAMED[name])
    kv, layout, last = s.kv, s.layout, s.case.layers - 1
    pages = s.poisoned()
    rows, every = page_rows(layout, pages), range(s.case.layers)
    seals = torch.ones(s.PAGES, dtype=torch.bool, device=DEVICE)
    kernels.gather(kv, s.source, s.starts, rows, s.rows, seals, every, s.case.tuning)

    page, group, component = 2, layout.groups - 1, len(layout.components) - 1
    slab = layout.slab_bytes(layout.components[component])
    start = group * layout.geometry.object_bytes + layout.component_offset(component)
    row = pages[int(s.rows[page])]
    hit = [last]
    if damage == "bit":
        row[start + last * slab + slab - 1] ^= 0x80
    elif damage == "sum":
        row[group * layout.geometry.object_bytes + 96 + 8 * (component * s.case.layers + last)] ^= 1
    else:
        first = row[start : start + slab].clone()
        row[start : start + slab] = row[start + slab : start + 2 * slab]
        row[start + slab : start + 2 * slab] = first
        hit = [0, 1]
    seals[page] = sealed
    flags = torch.tensor([0, 0, 0, 1], dtype=torch.int32, device=DEVICE)

    starts = kernels.page_starts(s.target, s.case.page_size)
    before = s.saved()
    want_flags = flags.clone()
    kernels.scatter(kv, s.target, starts, rows, s.rows, seals, flags, every, s.case.tuning)
    after = s.saved()
    s.restore(before)
    reference.scatter(kv, s.target, starts, rows, s.rows, seals, want_flags, every)
    assert all(map(torch.equal, s.storage, after))
    assert flags.tolist() == want_flags.tolist() == [0, 0, int(sealed), 1]
    heads = layout.components[component].heads // layout.groups
    slots = s.target.view(s.PAGES, -1)[page]
    for layer in range(s.case.layers):
        part = kv.kv.buffers[component][layer][slots, group * heads :]
        assert (not part.view(torch.uint8).any()) == (sealed and layer in hit)


def test_a_refused_page_becomes_zeros() -> None:
    s = Setup(NAMED["page of 128"])
    pages, every = s.poisoned(), range(s.case.layers)
    rows = page_rows(s.layout, pages)
    kernels.gather(s.kv, s.source, s.starts, rows, s.rows, None, every, s.case.tuning)
    checks = torch.tensor([0, 0, REFUSED, 0], dtype=torch.uint8, device=DEVICE)
    flags = torch.zeros(s.PAGES, dtype=torch.int32, device=DEVICE)
    starts = kernels.page_starts(s.target, s.case.page_size)
    kernels.scatter(s.kv, s.target, starts, rows, s.rows, checks, flags, every, s.case.tuning)
    assert flags.tolist() == [0, 0, 1, 0]
    for buffers in s.kv.kv.buffers:
        for buffer in buffers:
            found, want = (buffer[slots].view(s.PAGES, -1) for slots in (s.target, s.source))
            assert not found[2].any()
            assert torch.equal(found[[0, 1, 3]], want[[0, 1, 3]])


def test_a_few_layers_in_a_staging_buffer_of_their_own() -> None:
    """Layers without headers beside a table of checksums: what a strided copy brings."""
    for name in ("page of one token", "K wider than V"):
        s = Setup(NAMED[name])
        kv, layout, count = s.kv, s.layout, s.case.layers
        pages = s.poisoned()
        seals = torch.ones(s.PAGES, dtype=torch.bool, device=DEVICE)
        kernels.gather(
            kv, s.source, s.starts, page_rows(layout, pages), s.rows, seals, range(count), s.case.tuning
        )
        objects = pages[s.rows].view(torch.int64).view(s.PAGES, layout.groups, -1)
        headers = objects[:, :, : header_words(layout)].contiguous()
        index = torch.arange(s.PAGES, device=DEVICE)
        starts = kernels.page_starts(s.target, s.case.page_size)
        flags = torch.zeros(s.PAGES, dtype=torch.int32, device=DEVICE)
        size = s.PAGES * layer_row_words(layout, 2)
        for layers in (range(2), range(count - 1, count)):
            staging = torch.full((size,), -1, dtype=torch.int64, device=DEVICE)
            views = layer_rows(layout, staging, 2, layers.start, headers)
            kernels.gather(kv, s.source, s.starts, views, index, None, layers, s.case.tuning)
            kernels.scatter(kv, s.target, starts, views, index, seals, flags, layers, s.case.tuning)
        assert not flags.any()
        for buffers in kv.kv.buffers:
            for buffer in buffers:
                found, want = buffer[s.target].view(torch.uint8), buffer[s.source].view(torch.uint8)
                assert torch.equal(found, want)


@pytest.mark.parametrize("name", ["page of one token", "latent rows of 576", "K wider than V"])
def test_headers_are_those_of_the_rows(name: str) -> None:
    s = Setup(NAMED[name])
    shape = (s.ROWS, s.layout.page_bytes)
    source = torch.randint(0, 256, shape, dtype=torch.uint8).to(DEVICE)
    found = (s.PAGES, s.layout.groups, header_words(s.layout))
    got, want = (torch.zeros(found, dtype=torch.int64, device=DEVICE) for _ in range(2))
    kernels.headers(s.kv, source, s.rows, got, SMALL)
    reference.headers(s.kv, source, s.rows, want)
    assert torch.equal(got, want)
    assert want.any()


def test_no_pages_is_no_launch() -> None:
    s = Setup(NAMED["page of one token"])
    nothing = torch.empty(0, dtype=torch.int64, device=DEVICE)
    seals, flags = nothing.to(torch.bool), nothing.to(torch.int32)
    pages, before = s.poisoned(), s.saved()
    rows = page_rows(s.layout, pages)
    assert len(kernels.page_starts(nothing, 4)) == 0
    kernels.gather(s.kv, nothing, nothing, rows, nothing, seals, range(3), s.case.tuning)
    kernels.scatter(s.kv, nothing, nothing, rows, nothing, seals, flags, range(3), s.case.tuning)
    kernels.checksums(s.kv, rows, nothing, nothing.view(0, 1, 1), range(3), s.case.tuning)
    kernels.headers(s.kv, pages, nothing, nothing.view(0, 1, 1), s.case.tuning)
    assert (pages == POISON).all() and all(map(torch.equal, s.storage, before))


def test_layers_that_lie_differently_are_refused() -> None:
    layout = PageLayout(1, 2, torch.float32, (Component("K", 2, 4),), 1)
    dense, spread = torch.zeros((4, 2, 4)), torch.zeros((4, 4, 4))[:, ::2]
    with pytest.raises(ValueError, match="K buffers lie differently"):
        paged(DeviceKV(layout, ((dense, spread),)))


@pytest.mark.parametrize("words", [1, 3, 16, 32, 144, 512, 2048, 16384])
def test_tiles_are_powers_of_two_with_few_idle_lanes(words: int) -> None:
    items, chunk = kernels.tile_shape(words, 4096)
    assert items * chunk == 4096 and chunk & (chunk - 1) == 0
    assert -(-words // chunk) * chunk <= 1.25 * words
