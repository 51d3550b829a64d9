"""SGLang platform plugin that lets the real server run on a CPU without AMX.

Entry point `hicache_ext_cpu` of the group `sglang.srt.platforms`. Importing this module imports nothing of
SGLang.
"""

from __future__ import annotations

import os

PLATFORM_NAME = "hicache_ext_cpu"
_PLATFORM_CLASS = "hicache_ext.integration.cpu_platform_class:HicacheExtCpuPlatform"


def activate() -> str | None:
    """Return the class path of the CPU platform if `SGLANG_PLATFORM` names it, else None.

    SGLang calls this on every machine where the package is installed while `SGLANG_PLATFORM` is unset; an
    answer there would take the server off its GPU.
    """
    if os.environ.get("SGLANG_PLATFORM") != PLATFORM_NAME:
        return None
    return _PLATFORM_CLASS
