"""The triton and staged backends against ``copy_torch``: on a GPU if there is one, else interpreted."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from hicache_ext.core import checksum
from hicache_ext.core.header import FIXED
from hicache_ext.transfer import copy_engine, copy_torch, copy_triton
from hicache_ext.transfer.copy_triton import StagedBackup, StagedLoad
from hicache_ext.transfer.device_kv import DeviceKV
from hicache_ext.transfer.layout import Component, PageLayout
from hicache_ext.triton_kernels.tables import REFUSED, SEALED, PagedKV, header_words, layer_row_words

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MHA = (Component("K", 4, 8), Component("V", 4, 8))
WIDE_K = (Component("K", 4, 12), Component("V", 4, 8))
MLA = (Component("latent", 1, 40),)
PAGES, ROWS, TOTAL = 5, 9, 12
SHAPES = [(MHA, 1, 4), (MHA, 16, 2), (WIDE_K, 4, 4), (MLA, 8, 1)]
NAMES = ["page of 1", "page of 16", "wide K", "MLA"]
IN_RUNS, SCATTERED = np.array([3, 4, 5, 0, 1]), np.array([8, 1, 6, 3, 0])


def random_kv(components: tuple[Component, ...], page_size: int, groups: int, layers: int = 6) -> PagedKV:
    torch.manual_seed(3)
    layout = PageLayout(page_size, layers, torch.bfloat16, components, groups)
    buffers = tuple(
        tuple(
            torch.randn(TOTAL * page_size, c.heads, c.dim, device=DEVICE, dtype=torch.bfloat16)
            for _ in range(layers)
        )
        for c in components
    )
    return copy_triton.prepare(DeviceKV(layout, buffers))


def host_pages(layout: PageLayout) -> torch.Tensor:
    pages = torch.zeros((ROWS, layout.page_bytes), dtype=torch.uint8)
    return pages.pin_memory() if DEVICE.type == "cuda" else pages


def slots_of(pages: list[int], page_size: int) -> torch.Tensor:
    table = torch.tensor(pages)[:, None] * page_size + torch.arange(page_size)
    return table.view(-1).to(DEVICE)


def sealed_by_numpy(
    kv: PagedKV, slots: torch.Tensor, pages: np.ndarray, sealed: torch.Tensor
) -> torch.Tensor:
    """Host pages as ``copy_torch`` and the core make them, each fixed part filled with the page's number."""
    layout = kv.layout
    rows = torch.zeros((len(pages), layout.page_bytes), dtype=torch.uint8, device=DEVICE)
    copy_torch.gather(kv.kv, slots, rows, torch.arange(len(pages), device=DEVICE))
    out = np.zeros((ROWS, layout.page_bytes), dtype=np.uint8)
    for number, page in enumerate(pages):
        objects = out[page].reshape(layout.groups, -1)
        objects[:] = rows[number].cpu().numpy().reshape(layout.groups, -1)
        objects[:, : FIXED.itemsize] = number + 1
        for index, component in enumerate(layout.components):
            size = layout.slab_bytes(component)
            for layer in range(layout.layers):
                start = layout.component_offset(index) + layer * size
                words = np.ascontiguousarray(objects[:, start : start + size]).view(np.uint64)
                entry = FIXED.itemsize + 8 * (index * layout.layers + layer)
                if sealed[number]:
                    sums = checksum.checksums(words, checksum.multipliers(size // 8))
                    objects[:, entry : entry + 8] = sums[:, None].view(np.uint8)
    return torch.from_numpy(out)


def note(landed: list[tuple[range, int]], layers: range, pages: int) -> None:
    landed.append((layers, pages))


@pytest.mark.parametrize("order", [IN_RUNS, SCATTERED], ids=["runs", "scattered"])
@pytest.mark.parametrize(("components", "page_size", "groups"), SHAPES, ids=NAMES)
def test_backup_and_load(
    components: tuple[Component, ...],
    page_size: int,
    groups: int,
    order: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As if copies of the test's size were worth a launch.
    monkeypatch.setattr(copy_triton, "LEAST_COPY_BYTES", 0 if order is IN_RUNS else 1 << 40)
    monkeypatch.setattr(copy_triton, "MOST_HEADER_COPIES", 2)
    kv = random_kv(components, page_size, groups)
    layout = kv.layout
    slots = slots_of([7, 0, 3, 4, 9], page_size)
    sealed = torch.tensor([True, False, True, True, False], device=DEVICE)
    where = copy_triton.device_pages(kv, slots, find_runs=True)
    want = sealed_by_numpy(kv, slots, order, sealed)

    def finish(part: slice, rows: torch.Tensor) -> None:
        numbers = torch.arange(part.start + 1, part.stop + 1, device=DEVICE, dtype=torch.uint8)
        rows.view(len(rows), layout.groups, -1)[:, :, : FIXED.itemsize] = numbers[:, None, None]

    host = host_pages(layout)
    backup = StagedBackup(kv, (2, 2 * layout.page_bytes))
    done = backup(where, host, order, sealed, finish)
    if done is not None:
        done.synchronize()
    assert torch.equal(host, want)

    direct = host_pages(layout)
    copy_triton.gather(kv, where, direct, torch.from_numpy(order).to(DEVICE), sealed)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    payload = slice(FIXED.itemsize, None)
    mine, theirs = (x.view(ROWS, groups, -1)[:, :, payload] for x in (direct, want))
    assert torch.equal(mine, theirs)

    saved = [[b[slots].clone() for b in layers] for layers in kv.kv.buffers]
    target = slots_of([1, 2, 11, 6, 5], page_size)
    flags = torch.zeros(PAGES, dtype=torch.int32, device=DEVICE)
    load = StagedLoad(kv, (2, 8 * layer_row_words(layout, layout.layers)))
    for by_layer in (True, False):
        for layers in kv.kv.buffers:
            for buffer in layers:
                buffer[target] = 0
        landed: list[tuple[range, int]] = []
        headers = load._headers(host, order).view(torch.uint8)
        assert headers[:, 0, 0].tolist() == [1, 2, 3, 4, 5]
        where = copy_triton.device_pages(kv, target)
        tell = partial(note, landed)
        load(where, host, order, sealed, flags, tell, by_layer=by_layer)
        counts = [pages for _, pages in landed]
        if by_layer or order is SCATTERED:
            assert [layer for layers, _ in landed for layer in layers] == list(range(layout.layers))
            assert set(counts) == {PAGES}
        else:
            assert {layers for layers, _ in landed} == {range(layout.layers)}
            assert counts == sorted(set(counts)) and counts[-1] == PAGES and len(counts) > 1
        assert not flags.any()
        for layers, old in zip(kv.kv.buffers, saved, strict=True):
            assert all(torch.equal(b[target], o) for b, o in zip(layers, old, strict=True))


@pytest.mark.parametrize("scattered", [False, True], ids=["staged", "direct"])
@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "by-layer"])
def test_bad_pages_are_zeros(by_layer: bool, scattered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_triton, "LEAST_COPY_BYTES", 1 << 40 if scattered else 0)
    kv = random_kv(MHA, 4, 4)
    layout = kv.layout
    slots, target = slots_of([7, 0, 3, 4, 9], 4), slots_of([1, 2, 11, 6, 5], 4)
    host = host_pages(layout)
    sealed = torch.ones(PAGES, dtype=torch.bool, device=DEVICE)
    host.copy_(sealed_by_numpy(kv, slots, IN_RUNS, sealed))
    slab = layout.slab_bytes(MHA[0])
    host[IN_RUNS[2]].view(4, -1)[1, layout.component_offset(1) + 5 * slab - 1] ^= 4
    checks = torch.tensor([SEALED] * 3 + [REFUSED, SEALED], dtype=torch.uint8, device=DEVICE)
    flags = torch.zeros(PAGES, dtype=torch.int32, device=DEVICE)
    saved = [[b[slots].clone() for b in layers] for layers in kv.kv.buffers]
    load = StagedLoad(kv, (2, 1))
    where = copy_triton.device_pages(kv, target)
    load(where, host, IN_RUNS, checks, flags, lambda layers, pages: None, by_layer=by_layer)
    assert flags.tolist() == [0, 0, 1, 1, 0]
    for index, (layers, old) in enumerate(zip(kv.kv.buffers, saved, strict=True)):
        for layer, (buffer, want) in enumerate(zip(layers, old, strict=True)):
            found, kept = buffer[target].view(PAGES, -1), want.view(PAGES, 4, 4, 8)
            kept[3] = 0
            if (index, layer) == (1, 4):
                kept[2, :, 1] = 0
            assert torch.equal(found, kept.view(PAGES, -1))


def test_scatter_layer_is_that_of_torch() -> None:
    kv = random_kv(WIDE_K, 4, 4)
    other = random_kv(WIDE_K, 4, 4)
    rows = torch.randint(0, 256, (ROWS, kv.layout.page_bytes), dtype=torch.uint8).to(DEVICE)
    pages, target = torch.tensor([4, 0, 8], device=DEVICE), slots_of([1, 6, 3], 4)
    flags = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    where = copy_triton.device_pages(kv, target)
    for layer in (0, 3):
        copy_triton.scatter_layer(kv, rows, pages, where, layer, None, flags)
        copy_torch.scatter_layer(other.kv, rows, pages, target, layer)
    for mine, theirs in zip(kv.kv.buffers, other.kv.buffers, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_warm_up_touches_nothing() -> None:
    kv = random_kv(MHA, 4, 4)
    before = [b.clone() for layers in kv.kv.buffers for b in layers]
    copy_triton.warm_up(kv)
    assert all(map(torch.equal, (b for layers in kv.kv.buffers for b in layers), before))


@pytest.mark.parametrize(("page_size", "widths"), [(1, [8, 24]), (16, [8, 24]), (64, [8] * 4), (2, [8, 24])])
def test_strips_cover_the_layers(page_size: int, widths: list[int]) -> None:
    heads = (Component("K", 8, 128), Component("V", 8, 128))
    strips = copy_triton.strips(PageLayout(page_size, 32, torch.bfloat16, heads, 8))
    assert [layer for strip in strips for layer in strip] == list(range(32))
    assert [len(strip) for strip in strips] == widths


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 61])
def test_strips_of_any_number_of_layers(layers: int) -> None:
    for page_size in (1, 64):
        strips = copy_triton.strips(PageLayout(page_size, layers, torch.bfloat16, MLA, 1))
        assert [layer for strip in strips for layer in strip] == list(range(layers))
        assert all(strips)


@pytest.mark.parametrize("pages", [IN_RUNS, SCATTERED], ids=["runs", "scattered"])
def test_strided_copies_find_headers_and_layers(pages: np.ndarray) -> None:
    layout = PageLayout(4, 6, torch.bfloat16, WIDE_K, 2)
    host = host_pages(layout)
    host.copy_(torch.randint(0, 256, host.shape, dtype=torch.uint8))
    objects = host[pages].view(PAGES, 2, -1)
    headers = torch.zeros((PAGES, 2, header_words(layout)), dtype=torch.int64, device=DEVICE)
    copy_engine.read_headers(layout, host, pages, headers)
    assert torch.equal(headers.view(torch.uint8).cpu(), objects[:, :, : FIXED.itemsize + 8 * 12])
    staging = torch.zeros(PAGES * layer_row_words(layout, 2) + 3, dtype=torch.int64, device=DEVICE)
    copy_engine.read_layers(layout, host, pages, range(3, 5), staging)
    parts = []
    for index, component in enumerate(layout.components):
        size = layout.slab_bytes(component)
        start = layout.component_offset(index) + 3 * size
        parts.append(objects[:, :, start : start + 2 * size])
    want = torch.cat(parts, dim=2).reshape(-1)
    found = staging.view(torch.uint8).cpu()
    assert torch.equal(found[: len(want)], want)
    assert not found[len(want) :].any()


def test_pages_go_to_the_host_and_back() -> None:
    layout = PageLayout(4, 1, torch.bfloat16, MHA, 4)
    host = host_pages(layout)
    rows = torch.randint(0, 256, (PAGES, layout.page_bytes), dtype=torch.uint8).to(DEVICE)
    back = torch.zeros_like(rows)
    stream = torch.cuda.Stream() if DEVICE.type == "cuda" else None
    with torch.cuda.stream(stream):
        copy_engine.write_pages(host, SCATTERED, rows)
        copy_engine.read_pages(host, SCATTERED, back)
    if stream is not None:
        stream.synchronize()
    assert torch.equal(host[SCATTERED], rows.cpu())
    assert torch.equal(back, rows)
    assert not host[[2, 4, 5, 7]].any()
