"""Which products are computed at start."""

from __future__ import annotations

import gc

import pytest

pytest.importorskip("torch")

import torch

from hicache_ext.integration import warm_up


def test_every_shape_of_weight_is_multiplied_once_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int, int]] = []
    monkeypatch.setattr(warm_up, "ROWS", (8, 16, 24, 4096))
    monkeypatch.setattr(warm_up, "MOST_BYTES", 16 * 12 * 4)
    monkeypatch.setattr(
        warm_up, "linear", lambda x, weight: made.append((len(x), weight.shape[1], weight.shape[0]))
    )
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 12), torch.nn.Linear(12, 4), torch.nn.Linear(4, 12), torch.nn.Embedding(1000, 4)
    )
    model.append(torch.nn.Linear(3, 3).to(torch.float16))
    warm_up.load_matmul_kernels(model, torch.float32, 24)
    assert made == [(8, 4, 12), (16, 4, 12), (8, 12, 4), (16, 12, 4), (24, 12, 4)]


def test_what_exists_at_start_is_left_out_of_garbage_collection_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda: calls.append("collect"))
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    warm_up.freeze_startup_objects.cache_clear()
    for _ in range(2):
        warm_up.freeze_startup_objects()
    assert calls == ["collect", "freeze"]
