"""Transfers between device and host: in a worker thread per direction on the CPU, in streams on a GPU."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import torch

from hicache_ext.core.cache import LoadJob
from hicache_ext.core.header import Integrity, Labels, Reason
from hicache_ext.core.tick import CompletionQueue
from hicache_ext.transfer.backends import make_backend, recorded
from hicache_ext.transfer.choices import CopyBackendName
from hicache_ext.transfer.copy_torch import gather, scatter_layer
from hicache_ext.transfer.device_kv import DeviceKV
from hicache_ext.transfer.faults import FaultInjector
from hicache_ext.transfer.host_pool import HostPagePool, runs
from hicache_ext.transfer.layers import LayerSignal, LoadFailed, ThreadSignal
from hicache_ext.transfer.seal import Seal

logger = logging.getLogger(__name__)

CPU_STAGING_BYTES = 1 << 20
"""What a backup on the CPU gathers at a time: it should stay in a core's cache."""


@dataclass
class Counts:
    """Since start; bytes are KV bytes without headers, pages are head-group objects of one rank together."""

    bytes_to_host: int = 0
    bytes_to_device: int = 0
    failed_backups: int = 0
    """Pages whose copy to the host raised an error; they do not verify."""
    seal_seconds: float = 0.0
    verify_seconds: float = 0.0
    """Time of CPU threads spent on headers and checksums; a GPU does it in the copy streams."""

    def __post_init__(self) -> None:
        self.refused: Counter[Reason] = Counter()
        """Pages that did not verify when they were loaded."""


class Engine(Protocol):
    """``core.cache.Transfers`` plus what attention waits on."""

    backups: CompletionQueue
    loads: CompletionQueue
    counts: Counts
    faults: FaultInjector | None
    announces: bool
    """Whether pages that do not verify are logged."""

    @property
    def signal(self) -> LayerSignal: ...

    def backup(self, seq: int, slots: list[torch.Tensor], pages: np.ndarray, labels: Labels) -> None: ...
    def load(self, jobs: Sequence[LoadJob], *, by_layer: bool) -> None: ...
    def take_load_times(self) -> list[tuple[int, float]]:
        """(bytes, seconds) of loads that have ended since the last call, without their wait for others."""
        ...

    def poll(self) -> None: ...
    def wait_backups(self, seq: int) -> None: ...
    def wait_loads(self, seq: int) -> None: ...
    def drain(self) -> None: ...
    def close(self) -> None: ...


def make_engine(
    kv: DeviceKV,
    host: HostPagePool,
    forward_stream: Any = None,
    *,
    integrity: Integrity = Integrity.FULL,
    faults: FaultInjector | None = None,
    backend: CopyBackendName = CopyBackendName.AUTO,
) -> Engine:
    """The engine for the device that holds ``kv``; ``forward_stream`` is where the model runs.

    Raises:
        ValueError: ``backend`` does not work for this device.
    """
    seal = Seal(kv.layout, integrity)
    if kv.device.type == "cuda":
        return StreamEngine(kv, host, seal, faults, forward_stream, backend)
    if backend not in (CopyBackendName.AUTO, CopyBackendName.TORCH):
        raise ValueError(f"the copy backend {backend} needs a GPU")
    return ThreadEngine(kv, host, seal, faults)


def refuse(engine: ThreadEngine | StreamEngine, pages: np.ndarray, labels: Labels, bad: list[int]) -> None:
    """Count pages that did not verify, ``bad`` of ``pages``, and say so once each."""
    for index in bad:
        reason = engine.seal.reason(engine.host.buffer[int(pages[index])], labels, index)
        engine.counts.refused[reason] += 1
        if engine.announces:
            logger.warning(
                "hicache-ext: page %s on the host did not verify (%s); it is removed and computed again",
                labels.identities[index].tobytes().hex(),
                reason,
            )


def void(engine: ThreadEngine | StreamEngine, pages: np.ndarray) -> None:
    """Count pages whose backup failed, and make sure that they do not verify."""
    engine.counts.failed_backups += len(pages)
    for page in pages.tolist():
        engine.seal.void(engine.host.buffer[page : page + 1])


class ThreadEngine:
    """For KV in host memory: a forward pass has finished when the scheduler goes on, so no fences."""

    def __init__(self, kv: DeviceKV, host: HostPagePool, seal: Seal, faults: FaultInjector | None) -> None:
        self.kv = kv
        self.host = host
        self.seal = seal
        self.faults = faults
        self.backups = CompletionQueue()
        self.loads = CompletionQueue()
        self.signal = ThreadSignal()
        self.counts = Counts()
        self.announces = True
        self._load_times: deque[tuple[int, float]] = deque()
        self._to_host = _Worker("hicache-ext-backup")
        self._to_device = _Worker("hicache-ext-load")

    def backup(self, seq: int, slots: list[torch.Tensor], pages: np.ndarray, labels: Labels) -> None:
        self._to_host.submit(lambda: self._backup(seq, torch.cat(slots), pages, labels))

    def load(self, jobs: Sequence[LoadJob], *, by_layer: bool) -> None:
        for job in jobs:
            self._to_device.submit(partial(self._load, job))

    def take_load_times(self) -> list[tuple[int, float]]:
        return [self._load_times.popleft() for _ in range(len(self._load_times))]

    def poll(self) -> None:
        pass

    def wait_backups(self, seq: int) -> None:
        self.backups.wait(seq)

    def wait_loads(self, seq: int) -> None:
        self.loads.wait(seq)

    def drain(self) -> None:
        self._to_host.wait()
        self._to_device.wait()

    def close(self) -> None:
        self._to_host.close()
        self._to_device.close()

    def _backup(self, seq: int, slots: torch.Tensor, pages: np.ndarray, labels: Labels) -> None:
        layout = self.kv.layout
        try:
            step = max(CPU_STAGING_BYTES // layout.page_bytes, 1)
            staging = torch.zeros((min(step, len(pages)), layout.page_bytes), dtype=torch.uint8)
            for start in range(0, len(pages), step):
                part = slice(start, min(start + step, len(pages)))
                rows = staging[: part.stop - start]
                size = layout.page_size
                gather(self.kv, slots[start * size : part.stop * size], rows, torch.arange(len(rows)))
                begun = time.perf_counter()
                self.seal.write(rows, labels[part])
                self.counts.seal_seconds += time.perf_counter() - begun
                if self.faults is not None:
                    self.faults.on_the_way(rows, pages[part])
                self.host.write(pages[part], rows)
            self.counts.bytes_to_host += len(pages) * layout.payload_bytes
        except Exception:
            logger.exception("hicache-ext: backup %d of %d pages failed", seq, len(pages))
            void(self, pages)
        self.backups.post(seq)

    def _load(self, job: LoadJob) -> None:
        seq, pages, slots, labels = job.seq, job.pages, torch.cat(job.slots), job.labels
        layout = self.kv.layout
        bad: int | None = None
        started = time.perf_counter()
        try:
            if self.faults is not None:
                self.faults.at_rest(self.host.buffer, pages)
            begun = time.perf_counter()
            sound = self._verify(pages, labels)
            self.counts.verify_seconds += time.perf_counter() - begun
            by_page = slots.view(len(pages), layout.page_size)
            good, good_slots = torch.from_numpy(pages)[sound], by_page[sound].reshape(-1)
            bad_slots = by_page[~sound].reshape(-1)
            bad = int((~sound).nonzero()[0]) if len(bad_slots) else None
            for layer in range(layout.layers):
                scatter_layer(self.kv, self.host.buffer, good, good_slots, layer)
                if bad is not None:
                    # What is computed from these is thrown away, but it must be finite.
                    for layers in self.kv.buffers:
                        layers[layer][bad_slots] = 0
                self.signal.advance(seq, layer)
            self.counts.bytes_to_device += len(good) * layout.payload_bytes
        except Exception:
            logger.exception("hicache-ext: load %d of %d pages failed", seq, len(pages))
            self.counts.refused[Reason.COPY] += len(pages)
            bad = 0
            self.signal.advance(seq, layout.layers - 1)
        self._load_times.append((len(pages) * layout.page_bytes, time.perf_counter() - started))
        self.loads.post(seq, bad)

    def _verify(self, pages: np.ndarray, labels: Labels) -> torch.Tensor:
        """Which host pages are what ``labels`` says, bool ``[n]``."""
        sound = torch.empty(len(pages), dtype=torch.bool)
        for start, stop in runs(pages):
            first = int(pages[start])
            rows = self.host.buffer[first : first + stop - start]
            sound[start:stop] = self.seal.verify(rows, labels[start:stop])
        refuse(self, pages, labels, (~sound).nonzero().flatten().tolist())
        return sound


@dataclass
class _Copy:
    """One call of a backend: ``verdicts`` as it returned them, None if it raised.

    ``begun`` and ``ended`` are timed: its first byte may cross the bus, its last one has.
    """

    begun: torch.cuda.Event
    ended: torch.cuda.Event
    nbytes: int
    verdicts: list[torch.Tensor] | None = None


@dataclass
class _Load:
    """``job`` is part of ``copy``, from page ``start`` of it; ``events`` pass as its layers land."""

    job: LoadJob
    copy: _Copy
    start: int
    events: list[torch.cuda.Event]


class StreamEngine:
    """For KV on a GPU: a copy backend in a stream of each direction."""

    def __init__(
        self,
        kv: DeviceKV,
        host: HostPagePool,
        seal: Seal,
        faults: FaultInjector | None,
        forward_stream: torch.cuda.Stream | None,
        backend: CopyBackendName = CopyBackendName.AUTO,
    ) -> None:
        """Raises ValueError if the backend does not work here."""
        self.kv = kv
        self.host = host
        self.seal = seal
        self.faults = faults
        self.backups = CompletionQueue()
        self.loads = CompletionQueue()
        self.signal = StreamSignal()
        self.counts = Counts()
        self.announces = True
        self._backend = make_backend(backend, kv, host, seal)
        self._forward_stream = forward_stream
        # Of high priority: short kernels get their turn among the long ones of the model.
        self._to_host = torch.cuda.Stream(kv.device, priority=-1)
        self._to_device = torch.cuda.Stream(kv.device, priority=-1)
        self._backups: deque[tuple[int, torch.cuda.Event]] = deque()
        self._loads: deque[_Load] = deque()
        self._copies: deque[_Copy] = deque()
        self._load_times: list[tuple[int, float]] = []

    def backup(self, seq: int, slots: list[torch.Tensor], pages: np.ndarray, labels: Labels) -> None:
        index = self._hand_over(slots, self._to_host)
        alter = None if self.faults is None else self.faults.on_the_way
        with torch.cuda.stream(self._to_host):
            try:
                ended = self._backend.to_host(index, pages, labels, alter)
                self.counts.bytes_to_host += len(pages) * self.kv.layout.payload_bytes
            except Exception:
                logger.exception("hicache-ext: backup %d of %d pages failed", seq, len(pages))
                # What was queued before the error must not make a header whole again.
                torch.cuda.synchronize(self.kv.device)
                void(self, pages)
                ended = recorded()
            self._backups.append((seq, ended))

    def load(self, jobs: Sequence[LoadJob], *, by_layer: bool) -> None:
        # Pages of several namespaces and epochs have no labels in common.
        for _, alike in groupby(jobs, key=lambda job: (job.labels.namespace, job.labels.epoch)):
            self._load_alike(list(alike), by_layer)

    def _load_alike(self, jobs: list[LoadJob], by_layer: bool) -> None:
        pages = np.concatenate([job.pages for job in jobs])
        labels = replace(jobs[0].labels, identities=np.concatenate([job.labels.identities for job in jobs]))
        index = self._hand_over([run for job in jobs for run in job.slots], self._to_device)
        stops = np.cumsum([len(job.pages) for job in jobs]).tolist()
        layers = self.kv.layout.layers
        with torch.cuda.stream(self._to_device):
            begun = recorded(self._backend.bus, timed=True)
            copy = _Copy(begun, begun, len(pages) * self.kv.layout.page_bytes)
            loads = [
                _Load(job, copy, stop - len(job.pages), []) for job, stop in zip(jobs, stops, strict=True)
            ]
            if self.faults is not None:
                self._to_device.synchronize()
                self.faults.at_rest(self.host.buffer, pages)

            def landed(some: range, count: int) -> None:
                event = recorded()
                for load, stop in zip(loads, stops, strict=True):
                    if stop <= count and len(load.events) == some.start:
                        load.events.extend([event] * len(some))

            try:
                copy.verdicts = self._backend.to_device(index, pages, labels, landed, by_layer)
            except Exception:
                logger.exception("hicache-ext: a load of %d pages failed", len(pages))
                for load in loads:
                    load.events.extend([recorded()] * (layers - len(load.events)))
            copy.ended = recorded(self._backend.bus, timed=True)
        for load in loads:
            self.signal.add(load.job.seq, load.events)
        self._loads.extend(loads)
        self._copies.append(copy)

    def take_load_times(self) -> list[tuple[int, float]]:
        times, self._load_times = self._load_times, []
        return times

    def poll(self) -> None:
        while self._backups and self._backups[0][1].query():
            self.backups.post(self._backups.popleft()[0])
        while self._loads and self._loads[0].events[-1].query():
            self._settle(self._loads.popleft())
        while self._copies and self._copies[0].ended.query():
            copy = self._copies.popleft()
            if copy.verdicts is not None:
                self._load_times.append((copy.nbytes, copy.begun.elapsed_time(copy.ended) / 1e3))

    def wait_backups(self, seq: int) -> None:
        for job, ended in self._backups:
            if job <= seq:
                ended.synchronize()
        self.poll()

    def wait_loads(self, seq: int) -> None:
        for load in self._loads:
            if load.job.seq <= seq:
                load.events[-1].synchronize()
        self.poll()

    def drain(self) -> None:
        for _, ended in self._backups:
            ended.synchronize()
        for load in self._loads:
            load.events[-1].synchronize()
        for copy in self._copies:
            copy.ended.synchronize()
        self.poll()

    def close(self) -> None:
        self.drain()

    def _settle(self, load: _Load) -> None:
        job, layout = load.job, self.kv.layout
        if load.copy.verdicts is None:
            self.counts.refused[Reason.COPY] += len(job.pages)
            self.loads.post(job.seq, 0)
            return
        refused = torch.cat(load.copy.verdicts)[load.start : load.start + len(job.pages)]
        bad = np.flatnonzero(refused.numpy()).tolist()
        self.counts.bytes_to_device += (len(job.pages) - len(bad)) * layout.payload_bytes
        refuse(self, job.pages, job.labels, bad)
        self.loads.post(job.seq, bad[0] if bad else None)

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
