"""The measurements of the kernel benchmark; needs a CUDA GPU."""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from benchmarks.kernels_report import Result
from hicache_ext.core.header import FIXED, head_groups
from hicache_ext.transfer import copy_engine, copy_torch, copy_triton
from hicache_ext.transfer.device_kv import DeviceKV
from hicache_ext.transfer.layout import Component, PageLayout

Transfer = Callable[[], None]
"""Queues a transfer on the current stream, which waits for its end."""

SPARE = 1.25
"""Pages in each pool, for each that is copied."""
TORCH_STAGING_BYTES = 256 << 20
GATE_CYCLES = 30_000_000
"""The GPU waits about so long before anything starts, while the CPU queues it."""


class SetupError(Exception):
    """The benchmark cannot run; the message is one line."""


@dataclass(frozen=True)
class Shape:
    layers: int
    kv_heads: int
    head_dim: int
    groups: int | None


@dataclass(frozen=True)
class Case:
    direction: str
    backend: str
    page_size: int
    dtype: str
    tokens: int
    detail: str = ""
    blocks: int | None = None
    layers: int = 1
    """A launch of the triton backend takes so many."""
    whole: bool = False
    """The staged backend copies whole pages, not strips of layers."""

    @property
    def name(self) -> str:
        return f"{self.direction} {self.backend} page {self.page_size} {self.dtype} {self.tokens:,} tokens"


class Bench:
    def __init__(self, shape: Shape, args: argparse.Namespace) -> None:
        self.shape, self.args = shape, args
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.groups = shape.groups or head_groups(shape.kv_heads)
        if shape.kv_heads % self.groups:
            raise SetupError(f"{shape.kv_heads} KV heads do not divide into {self.groups} groups")
        self.facts: dict[str, Any] = {
            "GPU": torch.cuda.get_device_name(self.device),
            "torch": torch.__version__,
        }
        self.stream = torch.cuda.Stream(self.device, priority=-1)
        self.matmul = None if args.no_matmul else MatMul(args.matmul, self.device)
        if self.matmul is not None:
            self.facts["matmul alone"] = f"{self.matmul.milliseconds:.2f} ms"
        sizes = [self._layout(p, d).page_bytes * (t // p) for p, d, t in self._sizes()]
        try:
            self.host = torch.empty(int(max(sizes) * SPARE), dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise SetupError(
                f"cannot get {max(sizes) * SPARE / 1e9:.1f} GB of pinned memory: {error}"
            ) from error
        self._pool: tuple[tuple[int, str, int], Pool] | None = None
        self._memcpy: dict[tuple[str, str, int], Result] = {}
        self._warm_up: dict[str, float] = {}

    def cases(self) -> Iterator[Case]:
        backends = [b for b in self.args.backend if b != "sglang" or self._kernels_of_sglang is not None]
        for dtype in self.args.dtype:
            for tokens in self.args.tokens:
                for direction in self.args.direction:
                    yield Case(direction, "memcpy", self.args.page_size[0], dtype, tokens)
                for page_size in self.args.page_size:
                    for direction in self.args.direction:
                        plain = Case(direction, "memcpy", page_size, dtype, tokens)
                        for backend in backends:
                            yield from self._cases_of(replace(plain, backend=backend))

    def run(self, case: Case) -> Result:
        pool = self._pool_of(case)
        transfer, check = TRANSFERS[case.backend](pool, case)
        number = case.tokens * 2 * self.shape.layers * self.shape.kv_heads * self.shape.head_dim
        size = number * pool.layout.dtype.itemsize
        intact = self._first(transfer, check)
        alone = statistics.median(self._gated(transfer, 0)[1] for _ in range(self.args.repeats))
        gbs, busy, slowdown = size / alone / 1e6, None, None
        if self.matmul is not None:
            few = max(1, int(0.7 * alone / self.matmul.milliseconds))
            many = int(2 * alone / self.matmul.milliseconds) + 2
            own = self.matmul.alone(few, lambda: self._gated(None, few)[0])
            took = [self._gated(transfer, few)[0] for _ in range(self.args.repeats)]
            slowdown = statistics.median(took) / own
            busy = (
                size
                / statistics.median(self._gated(transfer, many)[1] for _ in range(self.args.repeats))
                / 1e6
            )
        result = Result(
            case.direction,
            case.backend,
            case.detail,
            case.page_size,
            case.dtype,
            case.tokens,
            bool(self.args.scattered) and case.backend != "memcpy",
            gbs,
            1.0,
            busy,
            None if busy is None else 1.0,
            slowdown,
            intact,
        )
        if case.backend == "memcpy":
            busy_share = None if busy is None else busy / gbs
            result = replace(result, page_size=0, busy_of_memcpy=busy_share)
            self._memcpy[case.direction, case.dtype, case.tokens] = result
            return result
        base = self._memcpy[case.direction, case.dtype, case.tokens]
        share = None if busy is None else busy / base.gbs
        return replace(result, of_memcpy=gbs / base.gbs, busy_of_memcpy=share)

    def _cases_of(self, case: Case) -> Iterator[Case]:
        if case.backend == "triton":
            to_host = case.direction == "d2h"
            tuning = copy_triton.DIRECT_TO_HOST if to_host else copy_triton.DIRECT_TO_DEVICE
            for blocks in self.args.blocks or [tuning.blocks]:
                name = f"{blocks} blocks"
                if to_host:
                    yield replace(case, blocks=blocks, detail=name)
                    continue
                for layers in (1, copy_triton.DIRECT_LAYERS):
                    some = f"{layers} layer{'s' * (layers > 1)} a launch"
                    yield replace(case, blocks=blocks, layers=layers, detail=f"{name}, {some}")
        elif case.backend == "sglang":
            yield replace(case, backend="sglang", detail="page first")
            yield replace(case, backend="sglang", detail="layer first")
        elif case.backend == "staged" and case.direction == "h2d":
            widths = [len(s) for s in copy_triton.strips(self._layout(case.page_size, case.dtype))]
            yield replace(case, detail=f"layers {'+'.join(map(str, widths))}")
            yield replace(case, whole=True, detail="whole pages")
        else:
            yield case

    def _first(self, transfer: Transfer, check: Callable[[], bool]) -> bool:
        with torch.cuda.stream(self.stream):
            transfer()
        torch.cuda.synchronize()
        return check()

    def _gated(self, transfer: Transfer | None, products: int) -> tuple[float, float]:
        """Milliseconds of the matrix products and of the transfer, which start together."""
        gate, main = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)
        begun, ended, first, last = (torch.cuda.Event(enable_timing=True) for _ in range(4))
        with torch.cuda.stream(gate):
            torch.cuda._sleep(GATE_CYCLES)
            opened = gate.record_event()
        main.wait_event(opened)
        begun.record(main)
        for _ in range(products):
            assert self.matmul is not None
            self.matmul()
        ended.record(main)
        if transfer is not None:
            self.stream.wait_event(opened)
            first.record(self.stream)
            with torch.cuda.stream(self.stream):
                transfer()
            last.record(self.stream)
        torch.cuda.synchronize()
        return begun.elapsed_time(ended), first.elapsed_time(last) if transfer is not None else 0.0

    def _pool_of(self, case: Case) -> Pool:
        key = (case.page_size, case.dtype, case.tokens)
        if self._pool is None or self._pool[0] != key:
            self._pool = None
            layout = self._layout(case.page_size, case.dtype)
            try:
                pool = Pool(layout, case.tokens, self.host, self.device, bool(self.args.scattered))
            except torch.OutOfMemoryError as error:
                raise SetupError(f"the KV does not fit on the GPU: {error}") from error
            begun = time.perf_counter()
            copy_triton.warm_up(pool.kv)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - begun
            self._warm_up.setdefault(f"page {case.page_size}", seconds)
            self.facts["warm-up"] = ", ".join(f"{k}: {v:.1f} s" for k, v in self._warm_up.items())
            pool.sglang = self._kernels_of_sglang
            self._pool = key, pool
        return self._pool[1]

    def _layout(self, page_size: int, dtype: str) -> PageLayout:
        heads = tuple(Component(name, self.shape.kv_heads, self.shape.head_dim) for name in "KV")
        try:
            return PageLayout(page_size, self.shape.layers, getattr(torch, dtype), heads, self.groups)
        except ValueError as error:
            raise SetupError(str(error)) from error

    def _sizes(self) -> Iterator[tuple[int, str, int]]:
        for page_size in self.args.page_size:
            for dtype in self.args.dtype:
                for tokens in self.args.tokens:
                    yield page_size, dtype, tokens

    @cached_property
    def _kernels_of_sglang(self) -> Any:
        if "sglang" not in self.args.backend:
            return None
        try:
            return importlib.import_module("sgl_kernel.kvcacheio")
        except Exception as error:  # a wheel for another CUDA fails in many ways
            self.facts["sglang"] = f"not measured ({type(error).__name__})"
            return None


class MatMul:
    """A bf16 matrix product in the current stream."""

    def __init__(self, edge: int, device: torch.device) -> None:
        self._a, self._b = (torch.randn(edge, edge, device=device, dtype=torch.bfloat16) for _ in range(2))
        self._out = torch.empty_like(self._a)
        self._alone: dict[int, float] = {}
        for _ in range(5):
            self()
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        for _ in range(10):
            self()
        ended.record()
        ended.synchronize()
        self.milliseconds = begun.elapsed_time(ended) / 10

    def __call__(self) -> None:
        torch.mm(self._a, self._b, out=self._out)

    def alone(self, count: int, measure: Callable[[], float]) -> float:
        """Milliseconds of ``count`` products with nothing beside them."""
        if count not in self._alone:
            measure()
            self._alone[count] = statistics.median(measure() for _ in range(5))
        return self._alone[count]


class Pool:
    """Random KV on the device, and pages of host memory that hold the pages ``source``."""

    def __init__(
        self, layout: PageLayout, tokens: int, host: torch.Tensor, device: torch.device, scattered: bool
    ) -> None:
        self.layout, self.tokens, self.device, self.sglang = layout, tokens, device, None
        self.pages = tokens // layout.page_size
        total = 2 * self.pages
        slots = total * layout.page_size
        size = layout.dtype.itemsize

        def buffer(c: Component) -> torch.Tensor:
            raw = torch.randint(0, 256, (slots, c.heads, c.dim * size), dtype=torch.uint8, device=device)
            return raw.view(layout.dtype)

        self.flat_host = host
        self.kv = copy_triton.prepare(
            DeviceKV(layout, tuple(tuple(buffer(c) for _ in range(layout.layers)) for c in layout.components))
        )
        order = torch.randperm(total, device=device)
        self.source, self.target = (self._slots(part) for part in (order[: self.pages], order[self.pages :]))
        rows = int(self.pages * SPARE)
        self.host = host[: rows * layout.page_bytes].view(rows, layout.page_bytes)
        generator = np.random.default_rng(0)
        picked = generator.permutation(rows) if scattered else np.arange(rows)
        self.host_pages = picked[: self.pages].astype(np.int64)
        self.host_index = torch.from_numpy(self.host_pages).to(device)
        self.sealed = torch.ones(self.pages, dtype=torch.bool, device=device)
        self.flags = torch.zeros(self.pages, dtype=torch.int32, device=device)
        self.fixed = torch.zeros((layout.groups, FIXED.itemsize), dtype=torch.uint8, device=device)

    def fill_host(self) -> None:
        copy_triton.gather(
            self.kv, copy_triton.device_pages(self.kv, self.source), self.host, self.host_index, self.sealed
        )
        torch.cuda.synchronize()

    def arrived(self) -> bool:
        """Whether the target slots hold what the source slots hold."""
        same = all(
            torch.equal(b[self.target].view(torch.uint8), b[self.source].view(torch.uint8))
            for layers in self.kv.kv.buffers
            for b in layers
        )
        return same and not bool(self.flags.any())

    def forget(self) -> None:
        for layers in self.kv.kv.buffers:
            for b in layers:
                b.view(torch.uint8)[self.target] = 0

    def reads_back(self) -> bool:
        """Whether host pages restore the source in the target slots, checksums included."""
        self.forget()
        where = copy_triton.device_pages(self.kv, self.target)
        layers = range(self.layout.layers)
        copy_triton.scatter(self.kv, self.host, self.host_index, where, self.sealed, self.flags)(layers)
        return self.arrived()

    def _slots(self, pages: torch.Tensor) -> torch.Tensor:
        size = self.layout.page_size
        return (pages[:, None] * size + torch.arange(size, device=self.device)).view(-1)


Made = tuple[Transfer, Callable[[], bool]]


def memcpy(pool: Pool, case: Case) -> Made:
    size = pool.tokens * pool.layout.payload_bytes // pool.layout.page_size
    here = torch.zeros(size, dtype=torch.uint8, device=pool.device)
    there = pool.flat_host[:size]
    out, source = (there, here) if case.direction == "d2h" else (here, there)
    return lambda: out.copy_(source, non_blocking=True), lambda: True


def staged(pool: Pool, case: Case) -> Made:
    kv, stream = pool.kv, torch.cuda.current_stream
    if case.direction == "d2h":
        backup = copy_triton.StagedBackup(kv)

        def finish(part: slice, rows: torch.Tensor) -> None:
            rows.view(len(rows), pool.layout.groups, -1)[:, :, : FIXED.itemsize] = pool.fixed

        def to_host() -> None:
            where = copy_triton.device_pages(kv, pool.source)
            done = backup(where, pool.host, pool.host_pages, pool.sealed, finish)
            assert done is not None
            stream().wait_event(done)

        pool.host.zero_()
        return to_host, pool.reads_back
    load = copy_triton.StagedLoad(kv)

    def to_device() -> None:
        assert load.stream is not None
        load.stream.wait_stream(stream())
        where = copy_triton.device_pages(kv, pool.target)
        load(
            where,
            pool.host,
            pool.host_pages,
            pool.sealed,
            pool.flags,
            lambda layers, pages: None,
            by_layer=not case.whole,
        )

    pool.fill_host()
    pool.forget()
    return to_device, pool.arrived


def triton(pool: Pool, case: Case) -> Made:
    kv = pool.kv
    if case.direction == "d2h":
        tuning = replace(copy_triton.DIRECT_TO_HOST, blocks=case.blocks)

        def to_host() -> None:
            where = copy_triton.device_pages(kv, pool.source)
            copy_triton.gather(kv, where, pool.host, pool.host_index, pool.sealed, tuning)

        pool.host.zero_()
        return to_host, pool.reads_back
    tuning = replace(copy_triton.DIRECT_TO_DEVICE, blocks=case.blocks)

    def to_device() -> None:
        where = copy_triton.device_pages(kv, pool.target)
        copy = copy_triton.scatter(kv, pool.host, pool.host_index, where, pool.sealed, pool.flags, tuning)
        for layer in range(0, pool.layout.layers, case.layers):
            copy(range(layer, min(layer + case.layers, pool.layout.layers)))

    pool.fill_host()
    pool.forget()
    return to_device, pool.arrived


def plain_torch(pool: Pool, case: Case) -> Made:
    """The reference backend, which makes no checksums."""
    kv, layout = pool.kv.kv, pool.layout
    step = max(TORCH_STAGING_BYTES // layout.page_bytes, 1)
    staging = torch.zeros((step, layout.page_bytes), dtype=torch.uint8, device=pool.device)
    index = torch.arange(step, device=pool.device)
    parts = [slice(i, min(i + step, pool.pages)) for i in range(0, pool.pages, step)]

    def slots(part: slice, of: torch.Tensor) -> torch.Tensor:
        return of[part.start * layout.page_size : part.stop * layout.page_size]

    def to_host() -> None:
        for part in parts:
            rows = staging[: part.stop - part.start]
            copy_torch.gather(kv, slots(part, pool.source), rows, index[: len(rows)])
            copy_engine.write_pages(pool.host, pool.host_pages[part], rows)

    def to_device() -> None:
        for part in parts:
            rows = staging[: part.stop - part.start]
            copy_engine.read_pages(pool.host, pool.host_pages[part], rows)
            for layer in range(layout.layers):
                copy_torch.scatter_layer(kv, rows, index[: len(rows)], slots(part, pool.target), layer)

    def reads_back() -> bool:
        pool.forget()
        where = copy_triton.device_pages(pool.kv, pool.target)
        copy = copy_triton.scatter(pool.kv, pool.host, pool.host_index, where, None, pool.flags)
        copy(range(layout.layers))
        return pool.arrived()

    if case.direction == "d2h":
        pool.host.zero_()
        return to_host, reads_back
    pool.fill_host()
    pool.forget()
    return to_device, pool.arrived


def sglang(pool: Pool, case: Case) -> Made:
    """SGLang's kernels, with host memory in its own layouts and no checksums."""
    io: Any = pool.sglang
    layout = pool.layout
    component, layers = layout.components[0], layout.layers
    item = component.heads * component.dim * layout.dtype.itemsize
    rows = int(pool.tokens * SPARE)
    half = rows * layers * item
    sides = [pool.flat_host[i * half : (i + 1) * half] for i in range(2)]
    tokens = (pool.host_index[:, None] * layout.page_size).add(
        torch.arange(layout.page_size, device=pool.device)
    )
    there = tokens.view(-1)
    buffers = pool.kv.kv.buffers
    pointers = [pool.kv.pointers[i].view(torch.uint64) for i in range(2)]
    by_layer = [side.view(layers, rows, item) for side in sides]
    host_pointers = [
        torch.tensor([b[i].data_ptr() for i in range(layers)], dtype=torch.uint64, device=pool.device)
        for b in by_layer
    ]
    whole = {"item_size": item, "num_layers": layers}

    def to_host(of: torch.Tensor = pool.source) -> None:
        if case.detail == "page first":
            io.transfer_kv_all_layer_lf_pf(
                src_k_layers=pointers[0],
                dst_k=sides[0],
                src_v_layers=pointers[1],
                dst_v=sides[1],
                src_indices=of,
                dst_indices=there,
                dst_layout_dim=item * layers,
                **whole,
            )
            return
        io.transfer_kv_all_layer(
            src_k_layers=pointers[0],
            dst_k_layers=host_pointers[0],
            src_v_layers=pointers[1],
            dst_v_layers=host_pointers[1],
            src_indices=of,
            dst_indices=there,
            **whole,
        )

    def to_device() -> None:
        for layer in range(layers):
            if case.detail == "page first":
                io.transfer_kv_per_layer_pf_lf(
                    src_k=sides[0],
                    dst_k=buffers[0][layer],
                    src_v=sides[1],
                    dst_v=buffers[1][layer],
                    src_indices=there,
                    dst_indices=pool.target,
                    layer_id=layer,
                    item_size=item,
                    src_layout_dim=item * layers,
                )
                continue
            io.transfer_kv_per_layer(
                src_k=by_layer[0][layer],
                dst_k=buffers[0][layer],
                src_v=by_layer[1][layer],
                dst_v=buffers[1][layer],
                src_indices=there,
                dst_indices=pool.target,
                item_size=item,
            )

    def reads_back() -> bool:
        pool.forget()
        to_device()
        return pool.arrived()

    if case.direction == "d2h":
        return to_host, reads_back
    to_host()
    pool.forget()
    torch.cuda.synchronize()
    return to_device, pool.arrived


TRANSFERS: dict[str, Callable[[Pool, Case], Made]] = {
    "memcpy": memcpy,
    "staged": staged,
    "triton": triton,
    "torch": plain_torch,
    "sglang": sglang,
}
