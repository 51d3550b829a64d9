"""Taking the stores of a running server out of use, and back into use, as asked over HTTP."""

from __future__ import annotations

import logging
from typing import Any

from hicache_ext.core.cache import TieredCache

logger = logging.getLogger(__name__)

NAME = "hicache-ext"
"""By which all stores of the server are meant, in SGLang's request to attach a storage backend."""

_NO_STORES = "this server has no stores; start it with --hicache-ext-remote"


def detach(cache: TieredCache) -> tuple[bool, str]:
    """(Done, what happened in a line.) Every rank calls it in the same step."""
    if cache.remote is None:
        return False, _NO_STORES
    if not cache.remote.attached:
        return True, "the stores were detached before"
    cache.remote.detach()
    logger.info("hicache-ext: the stores are detached: nothing is read from them or written to them")
    return True, "the stores are detached"


def attach(cache: TieredCache, request: Any) -> tuple[bool, str]:
    """As ``detach``; ``request`` is SGLang's ``AttachHiCacheStorageReqInput``."""
    if cache.remote is None:
        return False, _NO_STORES
    more = (
        request.hicache_storage_backend_extra_config_json,
        request.hicache_storage_prefetch_policy,
        request.hicache_write_policy,
    )
    if request.hicache_storage_backend != NAME or any(more):
        return False, (
            f'the stores are chosen at start, with --hicache-ext-remote; only {{"hicache_storage_backend": '
            f'"{NAME}"}} can be attached, with no other settings'
        )
    if cache.remote.attached:
        return True, "the stores were attached before"
    cache.remote.attach()
    logger.info("hicache-ext: the stores are attached")
    return True, "the stores are attached"
