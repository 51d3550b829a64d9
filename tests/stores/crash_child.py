"""Writes to a disk store until it is killed: ``crash_child FOLDER SEED SLOTS DURABILITY``.

Prints ``ready`` once the store is open, then the number of each object when its put has returned.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from hicache_ext.stores.disk import DiskSettings, DiskStore, Durability
from tests.stores.util import aligned_buffer, fill, key, soon

OBJECT_BYTES = 8 * 1024
NUMBERS = 30_000
"""Different objects that are written."""


def settings(folder: Path, slots: int, durability: str) -> DiskSettings:
    return DiskSettings(
        folder,
        slots * OBJECT_BYTES / 1e9,
        Durability(durability),
        threads=2,
        segment_bytes=100 * OBJECT_BYTES,
    )


def main() -> None:
    folder, seed, slots, durability = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    rng = random.Random(seed)
    buffer = aligned_buffer(16, OBJECT_BYTES)
    store = DiskStore(settings(folder, slots, durability), OBJECT_BYTES)
    store.register(buffer)
    print("ready", flush=True)
    while True:
        numbers = [rng.randrange(NUMBERS) for _ in range(rng.randrange(1, 16))]
        if rng.random() < 0.1:
            store.get([key(n) for n in numbers], range(len(numbers)), soon())
            continue
        outcome = store.put([key(n) for n in numbers], fill(buffer, numbers), soon())
        done = " ".join(str(n) for n, ok in zip(numbers, outcome.ok, strict=True) if ok)
        # One write, so that a kill leaves whole lines or a last one without its end.
        sys.stdout.write(done + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
