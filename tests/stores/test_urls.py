"""Addresses of stores: what is understood, and one clear line for what is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hicache_ext.stores.base import StoreError
from hicache_ext.stores.disk import DiskSettings, DiskStore, Durability
from hicache_ext.stores.mooncake_client import MooncakeSettings
from hicache_ext.stores.urls import open_store, parse_store_url
from tests.stores.util import aligned_buffer, fill, key, soon


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("file:///var/kv?size_gb=100", DiskSettings(Path("/var/kv"), 100)),
        (
            "file:///a%20b/c%23?size_gb=0.5&durability=full&direct=off",
            DiskSettings(Path("/a b/c#"), 0.5, Durability.FULL, direct=False),
        ),
        ("file://localhost/kv?size_gb=1e3&direct=on", DiskSettings(Path("/kv"), 1000)),
        ("mooncake://10.0.0.1:50051", MooncakeSettings("10.0.0.1:50051")),
        ("mooncake://[::1]:50051/", MooncakeSettings("[::1]:50051")),
        (
            "mooncake://m:1?metadata=http://m:2/metadata&protocol=rdma&device=mlx5_0,mlx5_1&segment_gb=0"
            "&replicas=2&host=10.1.1.1&soft_pin_s=60&rpc_timeout_s=0.5",
            MooncakeSettings(
                "m:1", "http://m:2/metadata", "rdma", "mlx5_0,mlx5_1", 0, 2, "10.1.1.1", 60, 0.5
            ),
        ),
    ],
)
def test_addresses(url: str, expected: object) -> None:
    assert parse_store_url(url) == expected


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("/var/kv", "begins with file:// or mooncake://"),
        ("s3://bucket", "begins with file:// or mooncake://"),
        ("", "begins with file:// or mooncake://"),
        ("file://var/kv?size_gb=1", "three slashes: file:///var/kv"),
        ("file:///?size_gb=1", "name a folder, such as file:///"),
        ("file:///kv", "say how much of the disk may be used, such as ?size_gb=100"),
        ("file:///kv?size_gb=lots", "size_gb=lots must be a number above 0"),
        ("file:///kv?size_gb=0", "size_gb=0 must be a number above 0"),
        ("file:///kv?size_gb=nan", "must be a number above 0"),
        ("file:///kv?size_gb=inf", "must be a number above 0"),
        ("file:///kv?size_gb=1&durability=yes", "durability=yes must be one of none, data, full"),
        ("file:///kv?size_gb=1&direct=1", "direct=1 must be one of on, off"),
        ("file:///kv?size_gb=1&sizegb=2", "unknown option sizegb; known are size_gb, durability, direct"),
        ("file:///kv?size_gb=1&size_gb=2", "size_gb= is given twice"),
        ("file:///kv?size_gb", "is not an address"),
        ("file:///kv?size_gb=1#x", "a # in a path is written %23"),
        ("mooncake://", "name the master as HOST:PORT"),
        ("mooncake://host", "name the master as HOST:PORT, such as mooncake://127.0.0.1:50051"),
        ("mooncake://host:port", "name the master as HOST:PORT"),
        ("mooncake://host:99999", "name the master as HOST:PORT"),
        ("mooncake://[::1:5", "is not an address"),
        ("mooncake://h:1/x?replicas=1", "nothing may stand between the port and the ?"),
        ("mooncake://h:1?replicas=0", "replicas=0 must be a whole number from 1"),
        ("mooncake://h:1?replicas=1.5", "replicas=1.5 must be a whole number from 1"),
        ("mooncake://h:1?protocol=udp", "protocol=udp must be one of tcp, rdma"),
        ("mooncake://h:1?metadata=h:2", "metadata=h:2 must be an address that begins with http://"),
        ("mooncake://h:1?segment_gb=-1", "segment_gb=-1 must be a number from 0"),
        ("mooncake://h:1?device=mlx5_0", "device= is for protocol=rdma"),
        ("mooncake://h:1?size_gb=5", "unknown option size_gb; known are metadata, protocol"),
    ],
)
def test_wrong_addresses(url: str, problem: str) -> None:
    with pytest.raises(StoreError) as error:
        parse_store_url(url)
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


def test_opening(tmp_path: Path) -> None:
    store = open_store(parse_store_url(f"file://{tmp_path}/kv?size_gb=0.01&durability=data"), 4096)
    assert isinstance(store.inner, DiskStore)
    buffer = aligned_buffer(4, 4096)
    store.register(buffer)
    assert store.put([key(1)], fill(buffer, [1]), soon()).ok.all()
    assert store.stats().state == "closed"
    store.close()
    with pytest.raises(StoreError, match="this model's have 8192"):
        open_store(parse_store_url(f"file://{tmp_path}/kv?size_gb=0.01"), 8192)


def test_the_package_is_needed_only_for_its_own_stores() -> None:
    """Importing the stores must work where Mooncake is not installed."""
    program = (
        "import sys; sys.modules['mooncake'] = None\n"
        "import hicache_ext.stores.urls as urls\n"
        "urls.parse_store_url('mooncake://127.0.0.1:1')\n"
        "assert not any(name.startswith(('sglang', 'torch')) for name in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
