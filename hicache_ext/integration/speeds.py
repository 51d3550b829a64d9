"""How fast this server is: measured at start, and tracked while it serves."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from hicache_ext.core.cache import LoadJob
from hicache_ext.core.header import NAMESPACE_BYTES, Labels
from hicache_ext.core.page import IDENTITY_BYTES
from hicache_ext.core.planner import Planner
from hicache_ext.core.policy.costs import CostModel
from hicache_ext.core.speeds import Speeds
from hicache_ext.core.tick import Reduce
from hicache_ext.remote.engine import RemoteEngine
from hicache_ext.transfer.device_kv import DeviceKV
from hicache_ext.transfer.engine import Engine
from hicache_ext.transfer.host_pool import HostPagePool
from hicache_ext.transfer.layout import PageLayout

_ROWS = 512
_RUNS = 3
_LOAD_BYTES = 64 << 20
_PASSES = 4
"""Prefill passes without a break that are measured together at most."""
_UNIT = 1e-15
"""Seconds, in which ranks agree on costs."""


def prefill_costs(ctx: Any) -> CostModel:
    """From the size of the model and a matrix product on its device; takes a fraction of a second.

    A token takes 2 operations per weight, and 4 per layer, query head and element for each token before it.
    The rest of a forward pass is left out, so this is the least that it can take.
    """
    runner = ctx.tp_worker.model_runner
    config = ctx.model_config.hf_text_config
    weights = sum(p.numel() for p in runner.model.parameters())
    speed = matmul_speed(torch.device(runner.device), runner.dtype, config.hidden_size)
    attention = 4 * config.num_hidden_layers * config.hidden_size / ctx.tp_size
    return CostModel(token=2 * weights / speed, depth=attention / speed)


def matmul_speed(device: torch.device, dtype: torch.dtype, hidden: int) -> float:
    """Operations per second of ``[512, hidden] @ [hidden, 4 * hidden]``; the best of three."""
    x = torch.ones(_ROWS, hidden, device=device, dtype=dtype)
    w = torch.ones(hidden, 4 * hidden, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(1 + _RUNS):
        _wait(device)
        begun = time.perf_counter()
        x @ w
        _wait(device)
        best = min(best, time.perf_counter() - begun)
    return 2 * _ROWS * hidden * 4 * hidden / best


def load_bandwidth(kv: DeviceKV, host: HostPagePool, engine: Engine) -> float:
    """Bytes per second from the host to the device, by loads of up to 64 MB, checks included.

    The KV pool and the host pool must be empty; ``engine`` is one of its own.
    """
    layout = kv.layout
    size = layout.page_size
    device_pages = kv.buffers[0][0].shape[0] // size - 1
    count = max(min(device_pages, host.pages, _LOAD_BYTES // layout.page_bytes), 1)
    pages = np.arange(count)
    slots = [torch.arange(count * size, device=kv.device)]
    names = np.zeros((count, IDENTITY_BYTES), np.uint8)
    names[:, :8] = pages.astype("<i8").view(np.uint8).reshape(count, 8)
    labels = Labels(names, bytes(NAMESPACE_BYTES), 0)
    engine.backup(engine.backups.done() + 1, slots, pages, labels)
    engine.drain()
    engine.take_load_times()
    for _ in range(_RUNS):
        engine.load([LoadJob(engine.loads.done() + 1, pages, slots, labels)], by_layer=True)
        engine.drain()
    return count * layout.page_bytes / min(seconds for _, seconds in engine.take_load_times())


def agreed_speeds(
    costs: CostModel, load_bandwidth: float, layout: PageLayout, stores: list[str], reduce: Reduce | None
) -> Speeds:
    """What all ranks start from: of what they have measured, the cheapest prefill and the slowest load."""
    mine = np.array([costs.token / _UNIT, costs.depth / _UNIT, load_bandwidth]).astype(np.int64)
    token, depth, bandwidth = (mine if reduce is None else reduce(mine)).tolist()
    load = layout.page_bytes / layout.page_size / bandwidth
    agreed = replace(costs, token=token * _UNIT, depth=depth * _UNIT, load=load, store=load)
    return Speeds(agreed, stores, load_bandwidth=float(bandwidth))


class Stores(NamedTuple):
    """The remote tier of a rank."""

    engine: RemoteEngine
    planner: Planner


class LoadClock:
    """Measures what loads from the host take."""

    def __init__(self, speeds: Speeds, engine: Engine) -> None:
        self._speeds = speeds
        self._engine = engine

    def step(self) -> None:
        for nbytes, seconds in self._engine.take_load_times():
            self._speeds.observed_load(nbytes, seconds, time.monotonic())


class PrefillClock:
    """Measures what prefill takes, from what the scheduler does anyway.

    A pass begins when its last request is admitted or the pass before it has ended, whichever is later. It
    has ended by the scheduler step after its result was processed. SGLang may process a result only when the
    next pass has been launched, or even computed, so passes that follow each other are measured together.
    """

    def __init__(self, speeds: Speeds) -> None:
        self._speeds = speeds
        self._ending: tuple[float, list[tuple[int, int]]] | None = None
        self._begun = self._last_end = 0.0
        self._parts: list[tuple[int, int]] = []
        self._passes = 0

    def admitted(self, req: Any) -> None:
        req._hicache_ext_admitted = time.monotonic()

    def result(self, batch: Any) -> int:
        """The result of ``batch`` is about to be processed; returns how many prompt tokens it computed."""
        if not batch.forward_mode.is_extend() or batch.prefix_lens is None or batch.extend_lens is None:
            return 0
        begun = max((getattr(req, "_hicache_ext_admitted", 0.0) for req in batch.reqs), default=0.0)
        parts = list(zip(batch.prefix_lens, batch.extend_lens, strict=True))
        self._ending = (begun, parts)
        return sum(batch.extend_lens)

    def step(self) -> None:
        if self._ending is None:
            self._tell()
            return
        (begun, parts), self._ending = self._ending, None
        if not self._parts:
            self._begun = max(begun, self._last_end)
        self._parts += parts
        self._passes += 1
        self._last_end = time.monotonic()
        if self._passes == _PASSES:
            self._tell()

    def _tell(self) -> None:
        if self._parts:
            seconds = self._last_end - self._begun
            self._speeds.observed_pass(self._parts, seconds, self._last_end, self._passes)
        self._parts, self._passes = [], 0


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
