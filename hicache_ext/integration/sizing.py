"""How many pages the host tier gets."""

from __future__ import annotations

import math

from hicache_ext.integration.settings import GB, SettingsError


def host_pages(
    host_gb: float | None, *, ranks: int, page_bytes: int, device_pages: int, free_bytes: int
) -> int:
    """Pages of one rank's host pool.

    Args:
        host_gb: what the user asked for, for all ranks on this machine; None for the default, twice the
            device pool but at most half of the free memory.
        ranks: ranks on this machine that share the memory.
        page_bytes: bytes of one page of this rank.
        device_pages: pages of this rank's device pool.
        free_bytes: free host memory.

    Raises:
        SettingsError: not even one page fits.
    """
    if host_gb is not None:
        pages = int(host_gb * GB) // ranks // page_bytes
    else:
        pages = min(2 * device_pages, free_bytes // 2 // ranks // page_bytes)
    if pages < 1:
        raise SettingsError(
            f"the host tier would not hold a single page of {page_bytes} bytes on {ranks} rank(s); "
            f"give --hicache-ext-host-gb at least {least_gb(page_bytes * ranks):.6f}"
        )
    return pages


def least_gb(needed: int) -> float:
    """``needed`` bytes in GB, rounded up to six decimals: what is advised must be enough."""
    return math.ceil(needed / 1000) * 1000 / GB
