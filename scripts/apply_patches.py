#!/usr/bin/env python3
"""``hicache-ext patch`` from a clone, without installing it: any Python 3.11 with unidiff and rich."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

try:
    from hicache_ext.cli.main import main
except ModuleNotFoundError as error:
    if error.name not in ("rich", "unidiff"):
        raise
    sys.exit(f"apply_patches.py needs the package {error.name}: {sys.executable} -m pip install unidiff rich")

if __name__ == "__main__":
    sys.exit(main(["patch", *sys.argv[1:]]))
