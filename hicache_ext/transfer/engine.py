"""Transfers between device and host: in a worker thread per direction on the CPU, in streams on a GPU."""

from __future__ import annotations

import logging
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from hicache_ext.core.tick import CompletionQueue
from hicache_ext.transfer.copy_torch import gather, scatter_layer
from hicache_ext.transfer.device_kv import DeviceKV
from hicache_ext.transfer.host_pool import HostPagePool
from hicache_ext.transfer.layers import LayerSignal, LoadFailed, ThreadSignal

logger = logging.getLogger(__name__)

STAGING_BYTES = 256 << 20
"""Device memory for one step of a copy."""


class Engine(Protocol):
    """``core.cache.Transfers`` plus what attention waits on; bytes count payload moved since start."""

    backups: CompletionQueue
    loads: CompletionQueue
    bytes_to_host: int
    bytes_to_device: int

    @property
    def signal(self) -> LayerSignal: ...

    def backup(self, seq: int, slots: list[torch.Tensor], pages: np.ndarray) -> None: ...
    def load(self, seq: int, pages: np.ndarray, slots: list[torch.Tensor]) -> None: ...
    def poll(self) -> None: ...
    def drain(self) -> None: ...
    def close(self) -> None: ...


def make_engine(kv: DeviceKV, host: HostPagePool, forward_stream: Any = None) -> Engine:
    """The engine for the device that holds ``kv``; ``forward_stream`` is where the model runs."""
    if kv.device.type == "cuda":
        return StreamEngine(kv, host, forward_stream)
    return ThreadEngine(kv, host)


class ThreadEngine:
    """For KV in host memory: a forward pass has finished when the scheduler goes on, so no fences."""

    def __init__(self, kv: DeviceKV, host: HostPagePool) -> None:
        self.kv = kv
        self.host = host
        self.backups = CompletionQueue()
        self.loads = CompletionQueue()
        self.signal = ThreadSignal()
        self.bytes_to_host = 0
        self.bytes_to_device = 0
        self._to_host = _Worker("hicache-ext-backup")
        self._to_device = _Worker("hicache-ext-load")

    def backup(self, seq: int, slots: list[torch.Tensor], pages: np.ndarray) -> None:
        self._to_host.submit(lambda: self._backup(seq, torch.cat(slots), pages))

    def load(self, seq: int, pages: np.ndarray, slots: list[torch.Tensor]) -> None:
        self._to_device.submit(lambda: self._load(seq, pages, torch.cat(slots)))

    def poll(self) -> None:
        pass

    def drain(self) -> None:
        self._to_host.wait()
        self._to_device.wait()

    def close(self) -> None:
        self._to_host.close()
        self._to_device.close()

    def _backup(self, seq: int, slots: torch.Tensor, pages: np.ndarray) -> None:
        try:
            gather(self.kv, slots, self.host.buffer, torch.from_numpy(pages))
            self.bytes_to_host += len(pages) * self.kv.layout.page_bytes
            self.backups.post(seq)
        except Exception:
            logger.exception("hicache-ext: backup %d of %d pages failed", seq, len(pages))
            self.backups.post(seq, ok=False)

    def _load(self, seq: int, pages: np.ndarray, slots: torch.Tensor) -> None:
        try:
            index = torch.from_numpy(pages)
            for layer in range(self.kv.layout.layers):
                scatter_layer(self.kv, self.host.buffer, index, slots, layer)
                self.signal.advance(seq, layer)
            self.bytes_to_device += len(pages) * self.kv.layout.page_bytes
            self.loads.post(seq)
        except Exception as error:
            logger.exception("hicache-ext: load %d of %d pages failed", seq, len(pages))
            self.signal.fail(seq, error)
            self.loads.post(seq, ok=False)


class StreamEngine:
    """For KV on a GPU: gather or scatter on the device, one copy per run of host pages, all in streams."""

    def __init__(self, kv: DeviceKV, host: HostPagePool, forward_stream: torch.cuda.Stream | None) -> None:
        self.kv = kv
        self.host = host
        self.backups = CompletionQueue()
        self.loads = CompletionQueue()
        self.signal = StreamSignal()
        self.bytes_to_host = 0
        self.bytes_to_device = 0
        self._forward_stream = forward_stream
        self._to_host = torch.cuda.Stream(kv.device)
        self._to_device = torch.cuda.Stream(kv.device)
        self._in_flight: dict[str, deque[tuple[int, torch.cuda.Event]]] = {"backup": deque(), "load": deque()}

    def backup(self, seq: int, slots: list[torch.Tensor], pages: np.ndarray) -> None:
        index = self._hand_over(slots, self._to_host)
        with torch.cuda.stream(self._to_host):
            for chunk, slots_of_chunk in self._chunks(pages, index):
                rows, staging = self._staging(len(chunk))
                gather(self.kv, slots_of_chunk, staging, rows)
                self.host.write(chunk, staging)
            self._in_flight["backup"].append((seq, self._event()))
        self.bytes_to_host += len(pages) * self.kv.layout.page_bytes

    def load(self, seq: int, pages: np.ndarray, slots: list[torch.Tensor]) -> None:
        index = self._hand_over(slots, self._to_device)
        events: list[torch.cuda.Event] = []
        with torch.cuda.stream(self._to_device):
            for chunk, slots_of_chunk in self._chunks(pages, index):
                rows, staging = self._staging(len(chunk))
                self.host.read(chunk, staging)
                events.clear()
                for layer in range(self.kv.layout.layers):
                    scatter_layer(self.kv, staging, rows, slots_of_chunk, layer)
                    events.append(self._event())
            self.signal.add(seq, events)
            self._in_flight["load"].append((seq, events[-1]))
        self.bytes_to_device += len(pages) * self.kv.layout.page_bytes

    def poll(self) -> None:
        for name, done in (("backup", self.backups), ("load", self.loads)):
            jobs = self._in_flight[name]
            while jobs and jobs[0][1].query():
                done.post(jobs.popleft()[0])

    def drain(self) -> None:
        self._to_host.synchronize()
        self._to_device.synchronize()
        self.poll()

    def close(self) -> None:
        self.drain()

    def _hand_over(self, slots: list[torch.Tensor], stream: torch.cuda.Stream) -> torch.Tensor:
        """One slot tensor for ``stream``, which waits for all work queued so far.

        A backup reads what the forward pass still writes; a load overwrites slots that a forward pass of
        their last owner may still use.
        """
        index = torch.cat(slots)
        index.record_stream(stream)
        stream.wait_stream(torch.cuda.current_stream(self.kv.device))
        if self._forward_stream is not None:
            stream.wait_stream(self._forward_stream)
        return index

    def _chunks(self, pages: np.ndarray, slots: torch.Tensor) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
        layout = self.kv.layout
        step = max(STAGING_BYTES // layout.page_bytes, 1)
        for i in range(0, len(pages), step):
            yield pages[i : i + step], slots[i * layout.page_size : (i + step) * layout.page_size]

    def _staging(self, pages: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.arange(pages, device=self.kv.device)
        shape = (pages, self.kv.layout.page_bytes)
        return rows, torch.empty(shape, dtype=torch.uint8, device=self.kv.device)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record()
        return event


class StreamSignal:
    """Events of the latest loads; older ones have long completed, as loads run one after the other."""

    KEEP = 64

    def __init__(self) -> None:
        self._events: OrderedDict[int, list[torch.cuda.Event]] = OrderedDict()

    def add(self, load: int, events: list[torch.cuda.Event]) -> None:
        self._events[load] = events
        while len(self._events) > self.KEEP:
            _, oldest = self._events.popitem(last=False)
            oldest[-1].synchronize()

    def wait(self, load: int, layer: int) -> None:
        events = self._events.get(load)
        if events is not None:
            torch.cuda.current_stream().wait_event(events[layer])
        elif not self._events or load > next(reversed(self._events)):
            raise LoadFailed(f"load {load} was never started")


@dataclass
class _Idle:
    event: threading.Event


class _Worker:
    """One daemon thread that runs jobs in order."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | _Idle | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def wait(self) -> None:
        """Return when everything submitted before has run."""
        if not self._thread.is_alive():
            return
        marker = _Idle(threading.Event())
        self._jobs.put(marker)
        marker.event.wait()

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(timeout=10)

    def _run(self) -> None:
        with torch.inference_mode():
            while (job := self._jobs.get()) is not None:
                if isinstance(job, _Idle):
                    job.event.set()
                else:
                    job()
