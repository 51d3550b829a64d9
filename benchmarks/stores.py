"""How fast the stores are, beside the raw calls beneath them, measured by turns in one run.

    python -m benchmarks.stores
    python -m benchmarks.stores --stores disk --path /mnt/nvme/bench --sizes 64K 1M --json a.json --plot a.png

The raw call of the disk store is ``preadv`` or ``pwritev`` of one object in the store's own files, on one
thread or on as many as the store uses, whichever is faster; that of Mooncake is ``batch_get_into`` or
``batch_put_from`` of the same client on the same objects in the same batches. Mooncake's objects lie in the
memory of another process, so they cross the loopback interface. The ratio is the store's rate through the
raw rate.

Exit code: 0 measured, 1 a store gave wrong results, 2 it could not start, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hicache_ext.stores.base import GB, Key, Store, StoreError
from hicache_ext.stores.disk import DiskSettings, DiskStore, Durability
from hicache_ext.stores.disk_files import stride
from hicache_ext.stores.disk_folder import Folder
from hicache_ext.stores.disk_index import DiskIndex, Entry
from hicache_ext.stores.memory import MemoryStore
from hicache_ext.stores.mooncake import MooncakeStore, name_of
from hicache_ext.stores.mooncake_client import MooncakeSettings
from hicache_ext.stores.urls import parse_store_url

ROOT = Path(__file__).resolve().parent.parent
FORMAT = "hicache-ext/stores/1"
TARGET = 0.8
"""The share of the raw read rate that a store has to reach."""
NAMESPACE = b"benchmark".ljust(32, b"\0")
SECONDS = 120.0
LEASE_EXPIRED = -707
KINDS = ("memory", "disk", "mooncake")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}


class BenchmarkError(Exception):
    """The benchmark cannot run or its results are wrong; one line."""


@dataclass(frozen=True)
class Result:
    """Rates in bytes per second, medians over the repetitions; None where there is no raw call."""

    store: str
    object_bytes: int
    objects: int
    batch: int
    write: float
    raw_write: float | None
    read: float
    raw_read: float | None
    exists_per_s: float

    @property
    def read_ratio(self) -> float | None:
        return self.read / self.raw_read if self.raw_read else None

    @property
    def write_ratio(self) -> float | None:
        return self.write / self.raw_write if self.raw_write else None


def size(text: str) -> int:
    """Bytes of a size such as 8192, 64K or 1M."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if not number.isdecimal() or unit not in _UNITS or not int(number):
        raise argparse.ArgumentTypeError(f"{text} is not a size such as 8192, 64K or 1M")
    value = int(number) * _UNITS[unit]
    if value % 512:
        raise argparse.ArgumentTypeError(f"{text} is not a multiple of 512 bytes")
    return value


def positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stores",
        description="Read and write rates of the stores beside the raw calls beneath them.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--stores", nargs="+", choices=KINDS, default=list(KINDS), help="which to measure")
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=size,
        default=[8 << 10, 64 << 10, 1 << 20, 4 << 20],
        metavar="SIZE",
        help="object sizes, such as 8K 1M",
    )
    parser.add_argument("--total-mb", type=positive, default=128, help="moved in each measurement, MiB")
    parser.add_argument("--batch", type=positive, default=64, help="objects of one call")
    parser.add_argument("--repeat", type=positive, default=5, help="measurements, of which the median counts")
    parser.add_argument("--threads", type=positive, default=4, help="threads of the disk store")
    parser.add_argument(
        "--durability",
        choices=[d.value for d in Durability],
        default=Durability.NONE.value,
        help="of the disk store",
    )
    parser.add_argument(
        "--path", type=Path, help="folder for the disk store, emptied afterwards (default: a temporary one)"
    )
    parser.add_argument(
        "--mooncake", metavar="URL", help="a running store, such as mooncake://HOST:PORT (default: start one)"
    )
    parser.add_argument(
        "--open-objects",
        type=int,
        default=0,
        metavar="N",
        help="also measure how long a disk store of N objects takes to open after a kill; 0 is off",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a plot, such as out.png")
    return parser


def page_aligned(rows: int, object_bytes: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, rows * object_bytes), np.uint8).reshape(rows, object_bytes)


def keys_of(first: int, count: int) -> list[Key]:
    return [Key(NAMESPACE, 1, i.to_bytes(16, "little"), 0) for i in range(first, first + count)]


def rate(call: Callable[[], None], nbytes: int) -> float:
    begin = time.perf_counter()
    call()
    return nbytes / (time.perf_counter() - begin)


@dataclass
class Raw:
    """Ways to make the calls beneath a store, over the same objects; the fastest by its median counts.

    Writes may use objects of their own.
    """

    reads: list[Callable[[], float]]
    writes: list[Callable[[], float]]


def measure(
    name: str,
    store: Store,
    buffer: np.ndarray,
    objects: int,
    batch: int,
    repeat: int,
    make_raw: Callable[[list[Key]], Raw] | None,
    step: Callable[[str], None],
) -> Result:
    """Write, read back and compare, by turns with the raw calls.

    ``buffer`` has ``2 * objects`` rows: what is written, and where it is read to. Raises BenchmarkError.
    """
    source, target = buffer[:objects], buffer[objects:]
    nbytes = objects * store.object_bytes
    keys = keys_of(0, objects)

    def deadline() -> float:
        return time.monotonic() + SECONDS

    def batches() -> Iterator[slice]:
        for start in range(0, objects, batch):
            yield slice(start, min(start + batch, objects))

    def write() -> None:
        for part in batches():
            if not store.put(keys[part], range(part.start, part.stop), deadline()).ok.all():
                raise BenchmarkError(f"{name}: not all objects were stored; is there room for them?")

    def read() -> None:
        for part in batches():
            rows = range(objects + part.start, objects + part.stop)
            if not store.get(keys[part], rows, deadline()).ok.all():
                raise BenchmarkError(f"{name}: not all objects were read back")

    writes, reads, checks = [], [], []
    raw_writes: list[list[float]] = []
    raw_reads: list[list[float]] = []
    raw: Raw | None = None
    for turn in range(repeat + 1):
        step(f"{name} {_text(store.object_bytes)}")
        # What was just stored is not stored again, so every turn starts without it.
        store.remove(keys, deadline())
        written = rate(write, nbytes)
        target[:] = 0
        if make_raw is not None and raw is None:
            raw = make_raw(keys)
        result = rate(read, nbytes)
        if not np.array_equal(source, target):
            raise BenchmarkError(f"{name}: what was read is not what was written")
        checked = rate(lambda: _exists(store, keys, batch, deadline()), objects)
        if raw is not None:
            raw_read, raw_write = [call() for call in raw.reads], [call() for call in raw.writes]
        if turn == 0:
            # The first touches memory and makes connections.
            continue
        writes.append(written)
        reads.append(result)
        checks.append(checked)
        if raw is not None:
            raw_reads.append(raw_read)
            raw_writes.append(raw_write)
    return Result(
        name,
        store.object_bytes,
        objects,
        batch,
        statistics.median(writes),
        _best(raw_writes),
        statistics.median(reads),
        _best(raw_reads),
        statistics.median(checks),
    )


def _best(turns: list[list[float]]) -> float | None:
    """Of several ways to make the raw call, measured in each turn, the best median."""
    return max(statistics.median(way) for way in zip(*turns, strict=True)) if turns else None


def _exists(store: Store, keys: list[Key], batch: int, deadline: float) -> None:
    for start in range(0, len(keys), batch):
        if not store.exists(keys[start : start + batch], deadline).ok.all():
            raise BenchmarkError("an object that was stored is said not to exist")


def disk_raw(folder: Path, buffer: np.ndarray, objects: int, threads: int, direct: bool, sync: bool) -> Raw:
    """One system call an object, over the first file of the store for reading and a file beside it for
    writing."""
    object_bytes = buffer.shape[1]
    step = stride(object_bytes)
    flags = os.O_RDWR | (os.O_DIRECT if direct else 0)
    source = os.open(folder / "segment-000000", flags)
    with (folder / "segment-raw").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, objects * step)
    target = os.open(folder / "segment-raw", flags)
    pools = [ThreadPoolExecutor(1), ThreadPoolExecutor(threads)]

    def run(pool: ThreadPoolExecutor, call: Callable[[int], object], finish: Callable[[], object]) -> float:
        def all_objects() -> None:
            # Handed out in stretches, as a loop in C would.
            size = max(1, min(objects // (4 * threads), (1 << 20) // object_bytes))
            stretches = [range(start, min(start + size, objects)) for start in range(0, objects, size)]
            list(pool.map(lambda stretch: [call(i) for i in stretch], stretches))
            finish()

        return rate(all_objects, objects * object_bytes)

    def read(pool: ThreadPoolExecutor) -> float:
        return run(pool, lambda i: os.preadv(source, [buffer[objects + i]], i * step), lambda: None)

    def write(pool: ThreadPoolExecutor) -> float:
        finish = partial(os.fdatasync, target) if sync else lambda: None
        return run(pool, lambda i: os.pwritev(target, [buffer[i]], i * step), finish)

    return Raw([partial(read, pool) for pool in pools], [partial(write, pool) for pool in pools])


def measure_disk(options: argparse.Namespace, object_bytes: int, step: Callable[[str], None]) -> Result:
    objects = object_count(options, object_bytes)
    with working_folder(options.path) as folder:
        settings = DiskSettings(
            folder / "store",
            2 * objects * stride(object_bytes) / GB,
            Durability(options.durability),
            threads=options.threads,
            segment_bytes=2 * objects * stride(object_bytes),
        )
        buffer = filled(objects, object_bytes)
        store = DiskStore(settings, object_bytes)
        try:
            store.register(buffer)
            sync = settings.durability is not Durability.NONE

            def raw(keys: list[Key]) -> Raw:
                return disk_raw(settings.path, buffer, objects, options.threads, store.direct, sync)

            name = "disk" if store.direct else "disk, page cache"
            return measure(name, store, buffer, objects, options.batch, options.repeat, raw, step)
        finally:
            store.close()


def measure_mooncake(
    url: str, options: argparse.Namespace, object_bytes: int, step: Callable[[str], None]
) -> Result:
    objects = object_count(options, object_bytes)
    settings = parse_store_url(url)
    if not isinstance(settings, MooncakeSettings):
        raise BenchmarkError(f"--mooncake {url} is not the address of a Mooncake store")
    buffer = filled(objects, object_bytes)
    # Room for the raw objects too, and what the master keeps free.
    with peer(url, 3 * objects * object_bytes / GB + 0.1):
        store = MooncakeStore(
            MooncakeSettings(settings.master, settings.metadata, segment_gb=0), object_bytes
        )
        try:
            store.register(buffer)
            if (problem := store.wait_connected(time.monotonic() + 30)) is not None:
                raise BenchmarkError(problem)
            result = measure(
                "mooncake",
                store,
                buffer,
                objects,
                options.batch,
                options.repeat,
                lambda keys: mooncake_raw(store, buffer, keys, options.batch),
                step,
            )
            store.clear(NAMESPACE, 2, time.monotonic() + 10)
            return result
        finally:
            store.close()


def mooncake_raw(store: MooncakeStore, buffer: np.ndarray, keys: list[Key], batch: int) -> Raw:
    session = store._session
    assert session is not None
    objects, object_bytes = len(keys), store.object_bytes
    base = int(buffer.ctypes.data)
    read_names = [name_of(key) for key in keys]
    write_names = [f"raw/{i}" for i in range(objects)]

    def parts(names: list[str], first_row: int) -> list[tuple[list[str], list[int], list[int]]]:
        return [
            (
                names[start : start + batch],
                [base + (first_row + i) * object_bytes for i in range(start, min(start + batch, objects))],
                [object_bytes] * min(batch, objects - start),
            )
            for start in range(0, objects, batch)
        ]

    def read(client: Any) -> None:
        for part in parts(read_names, objects):
            # On a busy machine Mooncake's lease may run out meanwhile; the bytes have arrived then, late.
            if codes := set(client.batch_get_into(*part)) - {object_bytes, LEASE_EXPIRED}:
                raise BenchmarkError(f"batch_get_into failed with codes {sorted(codes)}")

    def write(client: Any) -> None:
        for part in parts(write_names, 0):
            if codes := set(client.batch_put_from(*part)) - {0}:
                raise BenchmarkError(f"batch_put_from failed with codes {sorted(codes)}; is there room?")

    def raw_write() -> float:
        result = rate(lambda: session.call(write), objects * object_bytes)
        session.call(lambda client: client.batch_remove(write_names, True))
        return result

    return Raw([lambda: rate(lambda: session.call(read), objects * object_bytes)], [raw_write])


def measure_memory(options: argparse.Namespace, object_bytes: int, step: Callable[[str], None]) -> Result:
    objects = object_count(options, object_bytes)
    buffer = filled(objects, object_bytes)
    store = MemoryStore(object_bytes, objects)
    store.register(buffer)
    return measure("memory", store, buffer, objects, options.batch, options.repeat, None, step)


def measure_open(objects: int, path: Path | None) -> float:
    """Seconds to open a disk store of small objects whose process ended without closing it."""
    object_bytes = 4096
    settings_gb = objects * object_bytes / GB
    with working_folder(path) as folder:
        # A process of its own: its end must leave SQLite's log as a kill does.
        context = multiprocessing.get_context("spawn")
        child = context.Process(target=_fill_index, args=(folder / "store", objects, object_bytes))
        child.start()
        child.join()
        if child.exitcode != 0:
            raise BenchmarkError("the store to be opened could not be made")
        begin = time.perf_counter()
        store = DiskStore(DiskSettings(folder / "store", settings_gb), object_bytes)
        seconds = time.perf_counter() - begin
        found = store.stats().objects
        store.close()
    if found != objects:
        raise BenchmarkError(f"the store opened with {found} of {objects} objects")
    return seconds


def _fill_index(path: Path, objects: int, object_bytes: int) -> None:
    """Make a store with preallocated files and a full index, and end without closing anything."""
    folder = Folder(path, object_bytes, 1 << 30)
    per_file = folder.slots_per_file
    for file in range(-(-objects // per_file)):
        with (path / f"segment-{file:06d}").open("wb") as segment:
            os.posix_fallocate(segment.fileno(), 0, min(per_file, objects - file * per_file) * object_bytes)
    index = DiskIndex(path / "index.sqlite", every_commit_durable=False)
    for start in range(0, objects, 100):
        index.insert(
            Entry(slot, key, bytes(16), slot)
            for slot, key in enumerate(keys_of(start, min(100, objects - start)), start)
        )
    os._exit(0)


def object_count(options: argparse.Namespace, object_bytes: int) -> int:
    return max(1, (options.total_mb << 20) // object_bytes)


def filled(objects: int, object_bytes: int) -> np.ndarray:
    """Rows to write, of random bytes, and as many to read into."""
    buffer = page_aligned(2 * objects, object_bytes)
    words = buffer[:objects].reshape(-1).view(np.uint64)
    words[:] = np.random.default_rng(0).integers(0, 1 << 64, len(words), dtype=np.uint64)
    return buffer


@contextmanager
def working_folder(path: Path | None) -> Iterator[Path]:
    """A new folder below ``path``, or a temporary one; removed afterwards."""
    try:
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="hicache-ext-stores-", dir=path))
    except OSError as error:
        raise BenchmarkError(
            f"--path {path} cannot be used ({error.strerror}): name another folder"
        ) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def master(url: str | None) -> Iterator[str]:
    """The address of a Mooncake store: the given one, or that of a master started for the run."""
    if url is not None:
        yield url
        return
    with tempfile.TemporaryDirectory(prefix="hicache-ext-mooncake-") as folder:
        log = Path(folder) / "master.log"
        script = [str(ROOT / "scripts" / "mooncake_up.sh"), "--log", str(log)]
        ports = [word for name in ("--port", "--metadata-port", "--metrics-port") for word in (name, "0")]
        child = subprocess.Popen(["bash", *script, *ports], stdout=subprocess.PIPE, text=True)
        try:
            assert child.stdout is not None
            line = child.stdout.readline().strip()
            if not line:
                reason = log.read_text().strip().splitlines() if log.exists() else []
                raise BenchmarkError(reason[-1] if reason else "the Mooncake master did not start")
            yield line
        finally:
            child.terminate()
            child.wait()


@contextmanager
def peer(url: str, segment_gb: float) -> Iterator[None]:
    """Another process that gives memory to the store."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_peer, args=(url, segment_gb, theirs), daemon=True)
    child.start()
    try:
        if not ours.poll(60):
            raise BenchmarkError("the peer that gives memory to the store did not start within 60 s")
        if (problem := ours.recv()) is not None:
            raise BenchmarkError(problem)
        yield
    finally:
        ours.send(None)
        child.join(20)
        if child.is_alive():
            child.kill()


def _peer(url: str, segment_gb: float, pipe: Any) -> None:
    settings = parse_store_url(url)
    assert isinstance(settings, MooncakeSettings)
    store = MooncakeStore(MooncakeSettings(settings.master, settings.metadata, segment_gb=segment_gb), 512)
    store.register(page_aligned(8, 512))
    pipe.send(store.wait_connected(time.monotonic() + 30))
    pipe.recv()
    store.close()


def table(results: Sequence[Result]) -> Table:
    """Rates in GB/s and ratios."""
    made = Table(title="Stores beside the raw calls, GB/s (10^9 bytes per second)")
    made.add_column("store", no_wrap=True)
    for name in ("object", "read", "raw", "ratio", "write", "raw", "ratio", "exists/s"):
        made.add_column(name, justify="right", no_wrap=True)
    for r in results:
        made.add_row(
            r.store,
            _text(r.object_bytes),
            _gb(r.read),
            _gb(r.raw_read),
            _percent(r.read_ratio, TARGET),
            _gb(r.write),
            _gb(r.raw_write),
            _percent(r.write_ratio, 0),
            f"{r.exists_per_s / 1e3:,.0f} k",
        )
    return made


def plot(path: Path, results: Sequence[Result]) -> None:
    """Read and write rates as bars, in an image. Raises ImportError, OSError, ValueError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(4 + 1.4 * len(results), 4.8), layout="constrained")
    places = np.arange(len(results))
    labels = [f"{r.store}\n{_text(r.object_bytes)}" for r in results]
    for axis, title, raw, own in (
        (axes[0], "read", [r.raw_read for r in results], [r.read for r in results]),
        (axes[1], "write", [r.raw_write for r in results], [r.write for r in results]),
    ):
        axis.bar(places - 0.2, [(v or 0) / 1e9 for v in raw], 0.4, label="raw call", color="#bbbbbb")
        axis.bar(places + 0.2, [v / 1e9 for v in own], 0.4, label="store", color="#2b6cb0")
        axis.set_xticks(places, labels, fontsize="small")
        axis.set_ylabel("GB/s")
        axis.set_title(title)
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
    axes[0].legend()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _text(nbytes: int) -> str:
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:g} {unit}"
    return f"{nbytes} B"


def _gb(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e9:.2f}"


def _percent(ratio: float | None, target: float) -> str:
    if ratio is None:
        return "-"
    text = f"{100 * ratio:.0f}%"
    return f"[red]{text}[/]" if ratio < target else text


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """All measurements. Raises BenchmarkError, StoreError."""
    results: list[Result] = []
    total = len(options.stores) * len(options.sizes) * (options.repeat + 1)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(*columns, console=console, transient=True))
        task = progress.add_task("starting", total=total)
        seen: set[str] = set()

        def step(what: str) -> None:
            progress.update(task, description=what, advance=1)
            if not console.is_terminal and what not in seen:
                console.print(f"measuring {what}", highlight=False)
            seen.add(what)

        url = stack.enter_context(master(options.mooncake)) if "mooncake" in options.stores else ""
        for kind in options.stores:
            for object_bytes in options.sizes:
                if kind == "disk":
                    results.append(measure_disk(options, object_bytes, step))
                elif kind == "mooncake":
                    results.append(measure_mooncake(url, options, object_bytes, step))
                else:
                    results.append(measure_memory(options, object_bytes, step))
    opened = measure_open(options.open_objects, options.path) if options.open_objects else None
    return {
        "format": FORMAT,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
        "results": [asdict(r) | {"read_ratio": r.read_ratio, "write_ratio": r.write_ratio} for r in results],
        "open": None if opened is None else {"objects": options.open_objects, "seconds": opened},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report; returns the exit code."""
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.open_objects < 0:
        parser.error("--open-objects takes a number from 0")
    for name in ("json", "plot"):
        path = getattr(options, name)
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"--{name} {path}: the folder {path.absolute().parent} does not exist")
    log = Console(stderr=True)
    try:
        report = run(options, log)
        results = [
            Result(**{k: v for k, v in r.items() if not k.endswith("_ratio")}) for r in report["results"]
        ]
        Console().print(table(results))
        if report["open"]:
            opened = report["open"]
            print(f"a disk store of {opened['objects']:,} objects opened in {opened['seconds']:.2f} s")
        if options.json is not None:
            options.json.write_text(json.dumps(report, indent=2) + "\n")
        if options.plot is not None:
            plot(options.plot, results)
    except StoreError as error:
        log.print(f"stores: {error}", markup=False, highlight=False)
        return 2
    except (BenchmarkError, ImportError, OSError, ValueError) as error:
        log.print(f"stores: {error}", markup=False, highlight=False)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
