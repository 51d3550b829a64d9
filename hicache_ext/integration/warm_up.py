"""What would otherwise happen when the first requests are served."""

from __future__ import annotations

import gc
from functools import cache

import torch
from torch.nn.functional import linear

ROWS = (*range(8, 513, 8), *range(576, 2049, 64), *range(2176, 8193, 128))
"""Tokens of a prefill batch. Libraries choose a kernel by the number."""
MOST_BYTES = 512 << 20
"""Of a product, so that a large vocabulary takes no memory that is not there."""


@torch.no_grad()
def load_matmul_kernels(model: torch.nn.Module, dtype: torch.dtype, longest: int) -> None:
    """Multiply by weights of each shape, for batches of up to ``longest`` tokens.

    CUDA loads a kernel when it is first used, and waits for all copies in flight to do so: the forward pass
    would stand still for tens of milliseconds. Call it in the stream of the forward pass: it takes memory
    of that.
    """
    weights = {tuple(p.shape): p for p in model.parameters() if p.dim() == 2 and p.dtype is dtype}
    for weight in weights.values():
        out, width = weight.shape
        rows = [n for n in ROWS if n <= longest and n * out * dtype.itemsize <= MOST_BYTES]
        x = torch.zeros(max(rows, default=0), width, device=weight.device, dtype=dtype)
        for count in rows:
            linear(x[:count], weight)


@cache
def freeze_startup_objects() -> None:
    """Take what exists now out of Python's garbage collection; once per process.

    SGLang and torch leave some 900,000 objects behind, and looking at all of them stops the scheduler for 0.4
    seconds each time enough objects have outlived younger collections.
    """
    gc.collect()
    gc.freeze()
