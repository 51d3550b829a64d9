"""The registry of KV structures: consistent, documented, and complete for the SGLang that is installed."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from hicache_ext.core import kv_spec
from hicache_ext.core.kv_spec import KINDS, Reuse, Role

ROOT = Path(__file__).resolve().parents[2]

BASES = {"KVCache", "MambaPool", "ReqToTokenPool", "DecodeReqToTokenPool", "BaseTokenToKVPoolAllocator"}
POOL_NAME = re.compile(r"(Pool|KVCache|PoolMixin|SlotAllocator)$")
HOST_NAME = re.compile(r"Host(Pool|Mixin|KVCache)?|HostPoolMixin$")
# Multimodal embeddings, not KV.
NOT_KV = {"EmbeddingPool"}
FOLDERS = ("mem_cache", "hardware_backend")
# Outside these folders a file is only parsed if it may subclass a pool.
SUBCLASS = re.compile(
    r"^\s*class \w+\([^)]*(Pool|KVCache|Allocator)|^class \w+(Pool|KVCache)\b", re.MULTILINE
)


class Found(NamedTuple):
    module: str
    name: str
    bases: frozenset[str]


def scan(package: Path) -> set[tuple[str, str]]:
    """(module, name) of every class below ``sglang/srt`` that holds KV or state; nothing is imported."""
    found = [entry for path in sorted((package / "srt").rglob("*.py")) for entry in _classes(package, path)]
    derived, size = set(BASES), 0
    while len(derived) != size:
        size = len(derived)
        derived |= {entry.name for entry in found if entry.bases & derived}
    return {(entry.module, entry.name) for entry in found if _is_pool(entry, derived)}


def _classes(package: Path, path: Path) -> list[Found]:
    parts = path.relative_to(package).with_suffix("").parts
    text = path.read_text(encoding="utf-8-sig")
    if parts[1] not in FOLDERS and not SUBCLASS.search(text):
        return []
    module = ".".join(("sglang", *parts))
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = frozenset(ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases)
            found.append(Found(module, node.name, bases))
    return found


def _is_pool(entry: Found, derived: set[str]) -> bool:
    if entry.name in derived:
        return True
    parts = entry.module.split(".")
    if parts[2] not in FOLDERS or "storage" in parts or entry.name in NOT_KV:
        return False
    return bool(POOL_NAME.search(entry.name)) and not HOST_NAME.search(entry.name)


def registered(version: str) -> set[tuple[str, str]]:
    return {(cls.full_module, cls.name) for kind in KINDS for cls in kind.classes if version in cls.releases}


@pytest.mark.slow
def test_kind_a_second_pool_forgotten_every_pool_class_of_the_installed_sglang_is_registered() -> None:
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("sglang is not installed")
    version = importlib.metadata.version("sglang")
    if version not in kv_spec.RELEASES:
        pytest.fail(f"the registry does not say which pool classes SGLang {version} has")
    found = scan(Path(spec.submodule_search_locations[0]))
    assert found - registered(version) == set(), "classes that core/kv_spec.py does not know"
    assert registered(version) - found == set(), "classes that core/kv_spec.py takes from another release"


@pytest.mark.parametrize("version", kv_spec.RELEASES)
def test_every_pool_class_of_an_unpacked_release_is_registered(version: str) -> None:
    """For releases that are not installed: HICACHE_EXT_SGLANG_0_5_17=FOLDER_WITH_THE_PACKAGE_SGLANG."""
    name = "HICACHE_EXT_SGLANG_" + version.replace(".", "_")
    folder = os.environ.get(name)
    if not folder:
        pytest.skip(f"{name} names no unpacked wheel of SGLang {version}")
    found = scan(Path(folder) / "sglang")
    assert len(found) > 50
    assert found ^ registered(version) == set()


def test_the_scan_notices_a_new_pool_class(tmp_path: Path) -> None:
    sources = {
        "srt/mem_cache/memory_pool.py": "class KVCache: ...\nclass MHATokenToKVPool(KVCache): ...\n",
        "srt/mem_cache/novel.py": "import m\nclass Novel(m.MHATokenToKVPool): ...\nclass TapePool: ...\n",
        "srt/mem_cache/pool_host/mha.py": "class MHATokenToKVPoolHost: ...\nclass HostPoolGroup: ...\n",
        "srt/mem_cache/storage/x.py": "class ConnectionPool: ...\n",
        "srt/layers/late.py": "class Late(MHATokenToKVPool): ...\nclass ThreadPool: ...\n",
    }
    for name, text in sources.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    names = {name for _, name in scan(tmp_path)}
    assert names == {"KVCache", "MHATokenToKVPool", "Novel", "TapePool", "Late"}


def test_entries_are_unique_and_consistent() -> None:
    assert max(Counter(kind.key for kind in KINDS).values()) == 1
    places = Counter((cls.module, cls.name) for kind in KINDS for cls in kind.classes)
    assert max(places.values()) == 1
    names = {cls.name for kind in KINDS for cls in kind.classes}
    for kind in KINDS:
        assert kind.classes or kind.shares, kind.key
        assert set(kind.shares) <= names - {cls.name for cls in kind.classes}
        assert kind.reason and kind.page and not kind.reason.endswith(".")
        assert bool(kind.cure) is not kind.carried, "a cure exactly if it is not carried"
        assert not (kind.carried and kind.reuse is not Reuse.ANY_PAGE)
        for cls in kind.classes:
            assert cls.releases and set(cls.releases) <= set(kv_spec.RELEASES)


def test_carried_are_exactly_the_layouts_that_the_copies_know() -> None:
    carried = {cls.name for kind in KINDS if kind.carried for cls in kind.classes if cls.role is Role.KV}
    assert carried == {"MHATokenToKVPool", "MLATokenToKVPool"}


def test_lookup_wants_the_module_too() -> None:
    found = kv_spec.lookup("sglang.srt.mem_cache.memory_pool", "MHATokenToKVPool")
    assert found is not None and found[0] is kv_spec.kind_of("mha")
    assert kv_spec.lookup("elsewhere", "MHATokenToKVPool") is None


def test_refusals_name_pool_kind_reason_and_cure() -> None:
    for kind in KINDS:
        if kind.carried:
            continue
        for cls in kind.classes:
            text = kv_spec.refusal(cls.full_module, cls.name, "here")
            assert all(part in text for part in (cls.name, "here", kind.title, kind.reason, kind.cure))
            assert "\n" not in text
    unknown = kv_spec.refusal("my.pools", "Tape")
    assert "my.pools.Tape" in unknown and "does not know" in unknown and kv_spec.DROP_FLAG in unknown


def test_the_documentation_is_up_to_date() -> None:
    path = ROOT / "docs" / "kv-structures.md"
    assert path.read_text(encoding="utf-8") == kv_spec.document(), (
        "run: python -m hicache_ext.core.kv_spec > docs/kv-structures.md"
    )
