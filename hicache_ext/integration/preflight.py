"""Proof, before the first request, that the KV layout is what the copies take it to be.

A pattern goes in through the engine's own setter, moves device -> host -> other device slots as every page
will, and comes out through the engine's own getter. The host bytes in between are compared with the layout
position by position, so a packed or permuted buffer of the same shape does not pass either. Then one bit of
a page is flipped, and loading it must be refused.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from hicache_ext.core.cache import LoadJob
from hicache_ext.core.header import NAMESPACE_BYTES, Integrity, Labels, sealed_pages
from hicache_ext.core.page import IDENTITY_BYTES
from hicache_ext.core.tick import CompletionQueue
from hicache_ext.integration.settings import SettingsError
from hicache_ext.transfer.device_kv import DeviceKV
from hicache_ext.transfer.engine import Engine
from hicache_ext.transfer.host_pool import HostPagePool


def prove_layout(
    pool: Any, kv: DeviceKV, engine: Engine, host: HostPagePool, integrity: Integrity = Integrity.FULL
) -> None:
    """Move the first and the last device page to the host and on to two others; all layers.

    The KV pool and the host pool must be empty; only free slots and pages are written. ``engine`` is one of
    its own, because this uses up its first transfers.

    Raises:
        SettingsError: what came out is not what went in.
    """
    layout = kv.layout
    size = layout.page_size
    last = kv.buffers[0][0].shape[0] // size - 1
    count = min(2, (last + 1) // 2, host.buffer.shape[0])
    if count == 0:
        return
    # Page 0 is padding; a pool of one page moves it onto itself.
    source = np.array([1, last][:count])
    target = np.array([max(last // 2, 1), last - 1][:count]) if last > 3 else source
    pages = np.array([0, host.buffer.shape[0] - 1][:count])
    rows, home = _slots(source, size, kv.device), _slots(target, size, kv.device)
    layers = range(pool.start_layer, pool.start_layer + layout.layers)
    wanted = [_pattern(kv, len(rows), layer) for layer in range(layout.layers)]
    for layer, values in zip(layers, wanted, strict=True):
        _write(pool, layer, rows, values)
    written = [_read(pool, layer, rows) for layer in layers]
    for layer, got, values in zip(layers, written, wanted, strict=True):
        _compare(got, [v.to(pool.dtype) for v in values], f"layer {layer} as written")

    identities = np.arange(count * IDENTITY_BYTES, dtype=np.uint8).reshape(count, IDENTITY_BYTES)
    labels = Labels(identities, bytes(NAMESPACE_BYTES), 0)
    engine.backup(1, [rows], pages, labels)
    engine.drain()
    _assert_copied(engine.backups, 1)
    _check_host(kv, host, pages, written)
    for layers_of_component in kv.buffers:
        for buffer in layers_of_component:
            buffer[home] = 0
    engine.load([LoadJob(1, pages, [home], labels)], by_layer=True)
    engine.drain()
    _assert_copied(engine.loads, 1)
    for layer, values in zip(layers, written, strict=True):
        _compare(_read(pool, layer, home), values, f"layer {layer} after the host")
    host.buffer[int(pages[-1]), layout.component_offset(0)] ^= 1
    engine.announces = False
    engine.load([LoadJob(2, pages, [home], labels)], by_layer=False)
    engine.drain()
    if sealed_pages(labels, integrity)[-1] and engine.loads.first_failure(1) != (2, count - 1):
        raise SettingsError("a damaged page passed the integrity check in the self-test; this is a bug")


def _pattern(kv: DeviceKV, rows: int, layer: int) -> list[torch.Tensor]:
    """Random small whole numbers, exact in every KV dtype; K and V, layers, tokens and heads all differ."""
    generator = torch.Generator().manual_seed(layer)
    values = []
    for component in kv.layout.components:
        shape = (rows, component.heads, component.dim)
        whole = torch.randint(-8, 8, shape, generator=generator)
        values.append(whole.to(torch.float32).to(kv.device))
    return values


def _assert_copied(done: CompletionQueue, seq: int) -> None:
    if done.done() != seq or done.first_failure(seq - 1) is not None:
        raise SettingsError("a copy between device and host failed in the self-test; the log says why")


def _write(pool: Any, layer: int, rows: torch.Tensor, values: list[torch.Tensor]) -> None:
    at = SimpleNamespace(layer_id=layer)
    typed = [v.to(pool.dtype) for v in values]
    pool.set_kv_buffer(at, rows, typed[0], typed[-1])


def _read(pool: Any, layer: int, rows: torch.Tensor) -> list[torch.Tensor]:
    if hasattr(pool, "kv_buffer"):
        return [_rows(pool.get_key_buffer(layer), rows)]
    return [_rows(pool.get_key_buffer(layer), rows), _rows(pool.get_value_buffer(layer), rows)]


def _rows(buffer: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """A copy of some rows; as bytes, because not every dtype can be indexed."""
    return buffer.view(torch.uint8)[rows].view(buffer.dtype)


def _check_host(
    kv: DeviceKV, host: HostPagePool, pages: np.ndarray, written: list[list[torch.Tensor]]
) -> None:
    layout = kv.layout
    n = len(pages)
    views = layout.views(host.buffer[torch.from_numpy(pages)])
    for index, (component, view) in enumerate(zip(layout.components, views, strict=True)):
        heads = component.heads // layout.groups
        for layer, group in itertools.product(range(layout.layers), range(layout.groups)):
            rows = written[layer][index].reshape(n, layout.page_size, component.heads, component.dim)
            expected = rows[:, :, group * heads : (group + 1) * heads].cpu().view(layout.dtype)
            _compare([view[:, group, layer]], [expected], f"{component.name}, layer {layer} on the host")


def _compare(got: list[torch.Tensor], expected: list[torch.Tensor], where: str) -> None:
    for one, other in zip(got, expected, strict=True):
        if one.shape != other.shape or not torch.equal(_bits(one), _bits(other)):
            raise SettingsError(
                f"the KV layout is not what hicache-ext takes it to be ({where}): pages would come back "
                "scrambled; start without --enable-hicache-ext and report the model and the flags"
            )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _slots(pages: np.ndarray, size: int, device: torch.device) -> torch.Tensor:
    first = torch.from_numpy(pages).to(device)[:, None] * size
    return (first + torch.arange(size, device=device)).reshape(-1)
