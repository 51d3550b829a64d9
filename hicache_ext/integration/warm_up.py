"""What would otherwise happen when the first requests are served."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

ROWS = (*range(8, 513, 8), *range(576, 2049, 64))
"""Tokens of a prefill batch. Libraries choose a kernel by the number, and few kernels for large ones."""
MOST_BYTES = 128 << 20
"""Of a product: the KV pool may have left little memory."""


def load_matmul_kernels(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Multiply by weights of each shape, for batches of up to 2,048 tokens.

    CUDA loads a kernel when it is first used, and waits for all copies in flight to do so: the forward pass
    would stand still for tens of milliseconds.
    """
    weights = {tuple(p.shape): p for p in model.parameters() if p.dim() == 2 and p.dtype is dtype}
    for weight in weights.values():
        out, width = weight.shape
        rows = [n for n in ROWS if n * out * dtype.itemsize <= MOST_BYTES]
        x = torch.zeros(max(rows, default=0), width, device=weight.device, dtype=dtype)
        for count in rows:
            linear(x[:count], weight)
