"""Entry point ``hicache_ext`` of the group ``sglang.srt.plugins``: registers the cache backend.

SGLang calls ``load`` in the main process before it parses the command line, and in every scheduler process.
"""

from __future__ import annotations

import sys
from typing import Any

from hicache_ext.integration.flags import BACKEND, asked_for, check_patches
from hicache_ext.integration.settings import SettingsError


def load() -> None:
    """Register the backend; exits with one line if the command line wants it and SGLang is not ready."""
    if asked_for(sys.argv):
        # SGLang itself would only say that it does not know the flag.
        try:
            check_patches()
        except SettingsError as error:
            raise SystemExit(f"hicache-ext: error: {error}") from None
    from sglang.srt.mem_cache.registry import get_radix_cache_factory, register_radix_cache_backend

    if get_radix_cache_factory(BACKEND) is None:
        register_radix_cache_backend(BACKEND, _factory)


def _factory(ctx: Any) -> Any:
    from hicache_ext.integration.build import build_cache

    return build_cache(ctx)
