"""The remote tier from addresses of stores, as users write them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hicache_ext.remote.engine import Place, RemoteEngine, RemoteSettings
from hicache_ext.remote.planning import Planner
from hicache_ext.stores.base import Store
from hicache_ext.stores.breaker import GuardedStore
from hicache_ext.stores.disk import DiskSettings
from hicache_ext.stores.grouped import GroupedDiskStore, Placement
from hicache_ext.stores.mooncake import MooncakeStore
from hicache_ext.stores.urls import Settings, parse_urls
from hicache_ext.transfer.host_pool import HostPagePool
from hicache_ext.transfer.layout import PageLayout
from hicache_ext.transfer.seal import Seal

Wrap = Callable[[Store, str], Store]

_MOONCAKE_THREADS = 8
# Two fetches, a write and a trial must not keep a lookup waiting.


def open_remote(
    urls: Sequence[str],
    layout: PageLayout,
    pool: HostPagePool,
    seal: Seal,
    planner: Planner,
    *,
    total_groups: int | None = None,
    replica: int = 0,
    replicas: int = 1,
    writes: bool = True,
    settings: RemoteSettings | None = None,
    wrap: Wrap | None = None,
) -> RemoteEngine:
    """Open the stores, the nearest first, for one TP rank.

    A service that does not answer is no error: the rank runs without it until it does.

    Args:
        total_groups: head groups of the model, by default those of this rank.
        replica: which copy of its groups this rank holds, of ``replicas``; each has folders of its own.
        writes: whether this rank writes to a shared service; False if another has the same pages.
        wrap: for tests: puts something around each store, given its name.

    Raises:
        StoreError: one line with cause and cure; nothing stays open.
    """
    geometry = layout.geometry
    placement = Placement(geometry.groups, geometry.first_group, total_groups, replica, replicas)
    places: list[Place] = []
    try:
        for one in parse_urls(urls):
            store, name = _open(one, geometry.object_bytes, placement)
            guarded = GuardedStore(wrap(store, name) if wrap is not None else store, name)
            places.append(Place(guarded, isinstance(one, DiskSettings) or writes))
    except BaseException:
        for place in places:
            place.store.close()
        raise
    return RemoteEngine(places, pool, seal, planner, settings)


def _open(settings: Settings, object_bytes: int, placement: Placement) -> tuple[Store, str]:
    if isinstance(settings, DiskSettings):
        return GroupedDiskStore(settings, object_bytes, placement), f"disk {settings.path}"
    # What the server gives to the store is given by its ranks together.
    settings = replace(settings, segment_gb=settings.segment_gb / placement.ranks)
    store = MooncakeStore(settings, object_bytes, _MOONCAKE_THREADS)
    return store, f"Mooncake {settings.master}"
