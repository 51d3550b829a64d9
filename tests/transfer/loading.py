"""How tests start a single load."""

from __future__ import annotations

import numpy as np
import torch

from hicache_ext.core.cache import LoadJob
from hicache_ext.core.header import Labels
from hicache_ext.transfer.engine import Engine


def load(
    engine: Engine,
    seq: int,
    pages: np.ndarray,
    slots: list[torch.Tensor],
    labels: Labels,
    by_layer: bool = True,
) -> None:
    engine.load([LoadJob(seq, pages, slots, labels)], by_layer=by_layer)
