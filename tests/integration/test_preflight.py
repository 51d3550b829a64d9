"""The preflight against pools that look right and are not; they stand in for releases yet to come."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch

from hicache_ext.core.header import Integrity, Labels
from hicache_ext.integration.preflight import prove_layout
from hicache_ext.integration.settings import SettingsError
from hicache_ext.transfer.device_kv import DeviceKV
from hicache_ext.transfer.engine import ThreadEngine
from hicache_ext.transfer.host_pool import HostPagePool
from hicache_ext.transfer.layout import Component, PageLayout
from hicache_ext.transfer.seal import Seal

LAYERS, HEADS, DIM = 3, 2, 8


class Pool:
    """The engine's pool, reduced to what attention uses: separate K and V rows a token."""

    start_layer = 0

    def __init__(self, pages: int, page_size: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.dtype = dtype
        self.page_size = page_size
        shape = ((pages + 1) * page_size, HEADS, DIM)
        # As SGLang does: 8-bit floats are stored as bytes, because indexing does not know them.
        self.store_dtype = torch.uint8 if dtype.itemsize == 1 else dtype
        self.k_buffer = [torch.zeros(shape, dtype=self.store_dtype) for _ in range(LAYERS)]
        self.v_buffer = [torch.zeros(shape, dtype=self.store_dtype) for _ in range(LAYERS)]

    def set_kv_buffer(self, layer: Any, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self.k_buffer[layer.layer_id][loc] = k.view(self.store_dtype)
        self.v_buffer[layer.layer_id][loc] = v.view(self.store_dtype)

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        return self.k_buffer[layer].view(self.dtype)

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        return self.v_buffer[layer].view(self.dtype)


class PackedPool(Pool):
    """Each buffer holds one head of both K and V; with 2 KV heads its shape is that of plain K or V."""

    def set_kv_buffer(self, layer: Any, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        packed = torch.stack((k, v), dim=1)
        self.k_buffer[layer.layer_id][loc] = packed[:, :, 0]
        self.v_buffer[layer.layer_id][loc] = packed[:, :, 1]

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        return torch.stack((self.k_buffer[layer][:, 0], self.v_buffer[layer][:, 0]), dim=1)

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        return torch.stack((self.k_buffer[layer][:, 1], self.v_buffer[layer][:, 1]), dim=1)


class SwappedHeadsPool(Pool):
    """Heads are stored in reverse; the accessors agree with each other."""

    def set_kv_buffer(self, layer: Any, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        super().set_kv_buffer(layer, loc, k.flip(1), v.flip(1))

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        return self.k_buffer[layer].flip(1)

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        return self.v_buffer[layer].flip(1)


class SecondBufferPool(Pool):
    """The last layer lives in a buffer that the extension was not told of."""

    def __init__(self, pages: int, page_size: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(pages, page_size, dtype)
        self.hidden = torch.zeros_like(self.k_buffer[-1])

    def set_kv_buffer(self, layer: Any, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        super().set_kv_buffer(layer, loc, k, v)
        if layer.layer_id == LAYERS - 1:
            self.hidden[loc] = k
            self.k_buffer[-1][loc] = 0

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        return self.hidden if layer == LAYERS - 1 else self.k_buffer[layer]


class TransposedPagePool(Pool):
    """Tokens of a page are stored in another order than their slots say."""

    def _at(self, loc: torch.Tensor) -> torch.Tensor:
        page, offset = loc // self.page_size, loc % self.page_size
        return page * self.page_size + (self.page_size - 1 - offset)

    def set_kv_buffer(self, layer: Any, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        super().set_kv_buffer(layer, self._at(loc), k, v)

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        return self.k_buffer[layer][self._at(torch.arange(len(self.k_buffer[layer])))]

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        return self.v_buffer[layer][self._at(torch.arange(len(self.v_buffer[layer])))]


def prove(
    pool: Pool, host_pages: int = 4, integrity: Integrity = Integrity.FULL, seal: type[Seal] = Seal
) -> None:
    layout = PageLayout(
        pool.page_size,
        LAYERS,
        pool.store_dtype,
        (Component("K", HEADS, DIM), Component("V", HEADS, DIM)),
        HEADS,
    )
    kv = DeviceKV(layout, (tuple(pool.k_buffer), tuple(pool.v_buffer)))
    host = HostPagePool(layout, host_pages, pinned=False)
    with closing(ThreadEngine(kv, host, seal(layout, integrity), None)) as engine:
        prove_layout(pool, kv, engine, host, integrity)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("pages", [1, 2, 3, 4, 5, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_a_plain_pool_passes(page_size: int, pages: int, dtype: torch.dtype) -> None:
    prove(Pool(pages, page_size, dtype))


@pytest.mark.parametrize("host_pages", [1, 2])
def test_a_small_host_pool_passes(host_pages: int) -> None:
    prove(Pool(8, 4), host_pages)


@pytest.mark.parametrize("kind", [PackedPool, SwappedHeadsPool, SecondBufferPool, TransposedPagePool])
def test_kind_wrong_layout_right_shape(kind: type[Pool]) -> None:
    with pytest.raises(SettingsError, match="layout is not what hicache-ext takes it to be"):
        prove(kind(8, 4))


@pytest.mark.parametrize("integrity", list(Integrity))
@pytest.mark.parametrize("pages", [1, 8])
def test_every_integrity_mode_passes(integrity: Integrity, pages: int) -> None:
    prove(Pool(pages, 4), integrity=integrity)


class Trusting(Seal):
    """Takes every page for what it should be."""

    def verify(self, rows: torch.Tensor, labels: Labels) -> torch.Tensor:
        return torch.ones(len(rows), dtype=torch.bool)


class Distrusting(Seal):
    """Takes no page for what it should be."""

    def verify(self, rows: torch.Tensor, labels: Labels) -> torch.Tensor:
        return torch.zeros(len(rows), dtype=torch.bool)


def test_a_check_that_passes_everything_does_not_pass() -> None:
    with pytest.raises(SettingsError, match="a damaged page passed the integrity check"):
        prove(Pool(8, 4), seal=Trusting)


def test_a_check_that_passes_nothing_does_not_pass() -> None:
    with pytest.raises(SettingsError, match="a copy between device and host failed in the self-test"):
        prove(Pool(8, 4), seal=Distrusting)


def test_the_page_it_damages_on_purpose_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    prove(Pool(8, 4))
    assert not caplog.records
