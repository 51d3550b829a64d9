"""A hierarchical KV cache for SGLang: device, host and remote tiers behind one radix tree."""

from __future__ import annotations

from pathlib import Path

__version__ = "0.1.0"

_root = Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "triton_kernels").is_dir():
    # A checkout: triton_kernels/ and patches/ lie beside this package, in a wheel inside it.
    __path__.append(str(_root))
