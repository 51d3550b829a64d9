"""Tests that are written for one release of SGLang."""

from __future__ import annotations

import pytest

from hicache_ext import patching


def only_on(release: str) -> None:
    """Skip the calling module unless this release of SGLang is installed; to be called before its imports."""
    pytest.importorskip("torch")
    pytest.importorskip("sglang")
    installed = patching.find_sglang().version
    if installed != release:
        pytest.skip(f"SGLang {installed} is installed, these tests need {release}", allow_module_level=True)
