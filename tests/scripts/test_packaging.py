"""The wheel holds everything and clashes with nothing; set-up takes its packages from pyproject.toml."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from scripts import environment

ROOT = Path(environment.__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """File names in a wheel built from a copy of the sources."""
    pytest.importorskip("setuptools")
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    for name in ("hicache_ext", "triton_kernels", "patches"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*command, "-w", str(work), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = work.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def sources(folder: str, *patterns: str) -> set[str]:
    found = [path for pattern in patterns for path in (ROOT / folder).rglob(pattern)]
    return {str(path.relative_to(ROOT)) for path in found if "__pycache__" not in path.parts}


def test_wheel_holds_every_module_and_patch(wheel_names: set[str]) -> None:
    expected = sources("hicache_ext", "*.py", "py.typed")
    expected |= {f"hicache_ext/{name}" for name in sources("triton_kernels", "*.py")}
    expected |= {f"hicache_ext/{name}" for name in sources("patches", "*.py", "*.patch", "*.toml")}
    assert any(name.endswith(".patch") for name in expected)
    assert not expected - wheel_names


def test_wheel_installs_one_top_level_package(wheel_names: set[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"hicache_ext"}


def test_the_name_of_the_shared_environment_follows_the_requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    before = environment.pins_hash(["cpu", "dev"])
    assert environment.pins_hash(["cpu", "dev"]) == before
    assert environment.pins_hash(["cpu"]) != before
    monkeypatch.setattr(environment, "requirements", lambda extras, release: ["sglang==9"])
    assert environment.pins_hash(["cpu", "dev"]) != before


def test_another_release_takes_the_place_of_the_pinned_one() -> None:
    assert "sglang==0.5.17" in environment.requirements(["cpu"], "0.5.17")
    assert environment.pins_hash(["cpu"], "0.5.17") != environment.pins_hash(["cpu"])
    assert environment.own_venv("0.5.17") != environment.own_venv(environment.DEFAULT_RELEASE)


def test_an_unknown_extra_is_refused() -> None:
    with pytest.raises(environment.EnvironmentProblem, match="no extra gpu"):
        environment.requirements(["gpu"])


def test_another_release_of_sglang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.5.17")
    with pytest.raises(environment.EnvironmentProblem, match=r"has sglang 0\.5\.17"):
        environment.missing(["cpu"])


def test_absent_packages_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert environment.missing(["cpu"]) == environment.requirements(["cpu"])
