"""What prefill costs on this server, before any was seen."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch

from hicache_ext.core.planner import Planner
from hicache_ext.core.policy.costs import CostModel
from hicache_ext.remote.engine import RemoteEngine

_ROWS = 512
_RUNS = 3


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


class Stores(NamedTuple):
    """The remote tier of a rank."""

    engine: RemoteEngine
    planner: Planner


class PrefillClock:
    """Tells the planner what prefill takes, from what the scheduler does anyway.

    A pass begins when its last request is admitted or the pass before it has ended, whichever is later. It
    has ended by the scheduler step after its result was processed.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._last_end = 0.0
        self._ending: tuple[float, list[tuple[int, int]]] | None = None

    def admitted(self, req: Any) -> None:
        req._hicache_ext_admitted = time.monotonic()

    def result(self, batch: Any) -> None:
        """The result of ``batch`` is about to be processed."""
        if not batch.forward_mode.is_extend() or batch.prefix_lens is None or batch.extend_lens is None:
            return
        begun = max((getattr(req, "_hicache_ext_admitted", 0.0) for req in batch.reqs), default=0.0)
        parts = list(zip(batch.prefix_lens, batch.extend_lens, strict=True))
        self._ending = (begun, parts)

    def step(self) -> None:
        if self._ending is None:
            return
        (begun, parts), self._ending = self._ending, None
        now = time.monotonic()
        self._planner.speeds.observed_pass(parts, now - max(begun, self._last_end), now)
        self._last_end = now


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
