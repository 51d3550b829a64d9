"""Imports point one way, and the core runs where neither SGLang nor torch is installed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hicache_ext"

ALLOWED = {
    "core": {"core"},
    "transfer": {"core", "transfer", "triton_kernels"},
    "triton_kernels": {"core", "transfer", "triton_kernels"},
    "stores": {"core", "stores"},
    "remote": {"core", "transfer", "stores", "remote"},
    "integration": {"core", "transfer", "stores", "remote", "integration", "patching"},
}
"""Parts of ``hicache_ext`` that each part may import."""


def imports(source: str, package: tuple[str, ...]) -> Iterator[str]:
    """Dotted names of everything a file of ``package`` imports, also inside functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def imports_of(path: Path) -> set[str]:
    return set(imports(path.read_text(), path.relative_to(ROOT).parts[:-1]))


def is_of(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def test_the_scan_sees_imports_of_every_form() -> None:
    source = "import a.b\nfrom c import d\nfrom . import e\nfrom ..f import g\ndef h():\n    import i\n"
    found = set(imports(source, ("hicache_ext", "core")))
    assert found == {"a.b", "c.d", "hicache_ext.core.e", "hicache_ext.f.g", "i"}


@pytest.mark.parametrize("part", list(ALLOWED))
def test_imports_point_one_way(part: str) -> None:
    # The kernels are packaged inside of hicache_ext, but lie beside it.
    folder = ROOT / part if part == "triton_kernels" else PACKAGE / part
    files = sorted(folder.rglob("*.py"))
    assert files
    for path in files:
        for name in imports_of(path):
            if is_of(name, "hicache_ext"):
                assert name.split(".")[1] in ALLOWED[part], f"{path.relative_to(ROOT)} imports {name}"


def test_only_the_integration_imports_sglang() -> None:
    users = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        if any(is_of(name, "sglang") for name in imports_of(path)):
            users.add(path.relative_to(PACKAGE).parts[0])
    assert users == {"integration"}


@pytest.mark.parametrize("forbidden", ["torch", "sglang", "triton", "transformers"])
def test_the_core_names_no_engine_package(forbidden: str) -> None:
    for path in (PACKAGE / "core").rglob("*.py"):
        assert not [name for name in imports_of(path) if is_of(name, forbidden)], path


PROGRAM = """
import importlib, pkgutil, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "sglang", "triton", "transformers"}:
            raise ImportError("blocked: " + name)

sys.meta_path.insert(0, Blocker())
sys.path.append(ROOT)
import hicache_ext.core
for module in pkgutil.walk_packages(hicache_ext.core.__path__, "hicache_ext.core."):
    importlib.import_module(module.name)
from tests.core.fakes import content, kv_of, make_rig, prompt, put, settle, to_host, node_at, PrefixScope
rig = make_rig()
tokens = prompt(4, 1, 2)
to_host(rig, tokens)
rig.cache.load(node_at(rig, tokens))
settle(rig)
assert (content(rig, tokens) == kv_of(PrefixScope(), tokens)).all()
print(len([name for name in sys.modules if name.startswith("hicache_ext.core.")]))
"""


def test_the_core_works_without_torch_and_sglang() -> None:
    """Not only imports: a page goes to the host and back in a process that has neither."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM.replace("ROOT", repr(str(ROOT)))],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(list((PACKAGE / "core").rglob("*.py"))) - 1
