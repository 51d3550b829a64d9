#!/usr/bin/env python3
"""The Python side of scripts/setup.sh: what to install, and this checkout's own environment on top of it.

The heavy packages (SGLang, torch: 11 GB) live in one environment that every checkout on the machine shares
and nothing changes. Each checkout gets a small one of its own under .build/venv that sees the shared packages
and adds an editable install of the project and a private copy of SGLang, the one that is patched. So two
checkouts with different patches work at the same time.

Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / ".build"
VENV = BUILD / "venv"
# Files of an environment's bin/ that belong to that environment alone.
NO_COMMANDS = ("activate", "python", "pip")


class EnvironmentProblem(Exception):
    """A failure with a cause and a cure in one line."""


def requirements(extras: list[str]) -> list[str]:
    """Requirement lines of pyproject.toml: the runtime dependencies and those of `extras`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = list(project["dependencies"])
    for extra in extras:
        if extra not in project["optional-dependencies"]:
            raise EnvironmentProblem(f"pyproject.toml has no extra {extra}")
        lines += project["optional-dependencies"][extra]
    return sorted(set(lines))


def pins_hash(extras: list[str]) -> str:
    """Name of the shared environment: changes with the requirements and the Python version."""
    pins = json.dumps([sys.version_info[:2], requirements(extras)])
    return hashlib.sha256(pins.encode()).hexdigest()[:12]


def missing(extras: list[str]) -> list[str]:
    """Requirements that the running interpreter's environment does not meet.

    Raises EnvironmentProblem if it has an SGLang of another release: replacing that is the owner's decision.
    """
    # pip's own copy: it is there before anything is installed.
    from pip._vendor.packaging.requirements import Requirement

    result = []
    for line in requirements(extras):
        requirement = Requirement(line)
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            result.append(line)
            continue
        if requirement.specifier.contains(version, prereleases=True):
            continue
        if requirement.name == "sglang":
            raise EnvironmentProblem(
                f"{sys.prefix} has sglang {version}, this project needs {requirement.specifier}: "
                "unset HICACHE_EXT_VENV or name an environment with that release"
            )
        result.append(line)
    return result


def tree_hash(paths: list[Path], extra: str) -> str:
    """Hash of the contents of files and folders, and of `extra`."""
    digest = hashlib.sha256(extra.encode())
    for top in paths:
        files = sorted(p for p in top.rglob("*") if p.is_file()) if top.is_dir() else [top]
        for path in files:
            if "__pycache__" not in path.parts and path.is_file():
                digest.update(str(path.relative_to(ROOT)).encode() + b"\0")
                digest.update(path.read_bytes())
    return digest.hexdigest()


def is_current(stamp: Path, value: str) -> bool:
    return stamp.is_file() and stamp.read_text() == value


def site_packages(venv: Path) -> Path:
    found = sorted(venv.glob("lib/python3.*/site-packages"))
    if not found:
        raise EnvironmentProblem(f"{venv} is no virtual environment: it has no lib/python3.*/site-packages")
    return found[0]


def link_scripts(base: Path) -> None:
    """Offer the shared environment's commands here, each running on this checkout's interpreter."""
    own = VENV / "bin"
    for source in sorted((base / "bin").iterdir()):
        target = own / source.name
        if target.exists() or source.is_dir() or source.name.lower().startswith(NO_COMMANDS):
            continue
        with source.open("rb") as file:
            head = file.read(4096)
        if head.startswith(b"#!") and str(base).encode() in head.split(b"\n", 1)[0]:
            body = source.read_bytes().split(b"\n", 1)[1]
            target.write_bytes(f"#!{own / 'python'}\n".encode() + body)
            target.chmod(0o755)
        else:
            target.symlink_to(source)


def make_venv(base: Path) -> None:
    """Create .build/venv over the shared environment `base`, unless it is there."""
    stamp = VENV / ".base"
    # The shared environment's packages belong to the name, so that an update there rebuilds this one.
    value = f"{base}\n{ROOT}\n{(base / '.complete').read_text() if (base / '.complete').is_file() else ''}"
    if is_current(stamp, value):
        return
    shutil.rmtree(VENV, ignore_errors=True)
    subprocess.run([base / "bin" / "python", "-m", "venv", "--without-pip", VENV], check=True)
    shared = str(site_packages(base))
    # addsitedir, and not a plain path, so that the shared .pth files count too.
    (site_packages(VENV) / "zz_shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")
    # Last on the path: benchmarks and tests are found, and SGLang's triton_kernels comes before this one.
    (site_packages(VENV) / "zzz_checkout.pth").write_text(f"{ROOT}\n")
    link_scripts(base)
    stamp.write_text(value)


def install_project(base: Path) -> None:
    """Editable install of this checkout into .build/venv, when its packaging changed."""
    stamp = VENV / ".project"
    value = tree_hash([ROOT / "pyproject.toml", ROOT / "setup.py"], str(ROOT))
    if is_current(stamp, value):
        return
    command = [str(base / "bin" / "python"), "-m", "pip", "--python", str(VENV / "bin" / "python"), "install"]
    command += ["--quiet", "--disable-pip-version-check", "--no-warn-script-location"]
    command += ["--no-deps", "--no-build-isolation", "--editable", str(ROOT)]
    subprocess.run(command, check=True)
    stamp.write_text(value)


def copy_sglang(base: Path) -> None:
    """Give .build/venv its own SGLang, copied again whenever the patch series changed; patches nothing."""
    stamp = VENV / ".sglang"
    value = tree_hash([ROOT / "patches", ROOT / "scripts" / "apply_patches.py"], str(base))
    if is_current(stamp, value):
        return
    stamp.unlink(missing_ok=True)
    own = site_packages(VENV)
    sources = [site_packages(base) / "sglang", *site_packages(base).glob("sglang-*.dist-info")]
    for source in sources:
        target = own / source.name
        shutil.rmtree(target, ignore_errors=True)
        subprocess.run(["cp", "-a", source, target], check=True)
    stamp.write_text(value)


def overlay(base: Path) -> None:
    """Bring .build/venv up to date with the shared environment `base` and with this checkout."""
    BUILD.mkdir(exist_ok=True)
    make_venv(base)
    install_project(base)
    copy_sglang(base)
    (BUILD / "env.sh").write_text(
        f"# Written by scripts/setup.sh: source it to use this checkout's environment.\n"
        f"export VIRTUAL_ENV={str(VENV)!r}\n"
        f'export PATH="$VIRTUAL_ENV/bin:$PATH"\n'
        f"# Without it, python -m in the checkout imports its triton_kernels/ in place of SGLang's package.\n"
        f"export PYTHONSAFEPATH=1\n"
    )


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description="Used by scripts/setup.sh.")
    commands = result.add_subparsers(dest="command", required=True)
    for name, text in [
        ("requirements", "print the requirement lines"),
        ("hash", "print the name of the shared environment"),
        ("missing", "print the requirements that this interpreter's environment does not meet"),
    ]:
        command = commands.add_parser(name, help=text)
        command.add_argument("--extras", required=True, metavar="A,B", help="extras of pyproject.toml")
    command = commands.add_parser("overlay", help="bring .build/venv up to date")
    command.add_argument("--base", required=True, type=Path, metavar="DIR", help="the shared environment")
    return result


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    try:
        if options.command == "overlay":
            overlay(options.base.absolute())
            return 0
        extras = options.extras.split(",")
        if options.command == "hash":
            print(pins_hash(extras))
        else:
            print("\n".join({"requirements": requirements, "missing": missing}[options.command](extras)))
    except EnvironmentProblem as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"setup: this command failed: {' '.join(map(str, error.cmd))}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
