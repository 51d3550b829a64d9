#!/usr/bin/env python3
"""The Python side of scripts/setup.sh: what to install, and this checkout's own environment on top of it.

The heavy packages (SGLang, torch: 11 GB) live in one environment that every checkout on the machine shares
and nothing changes. Each checkout gets a small one of its own under .build/venv that sees the shared packages
and adds an editable install of the project and a private copy of SGLang, the one that is patched. So two
checkouts with different patches work at the same time. Another SGLang release has environments of its own.

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
RELEASES = sorted(path.name.removeprefix("sglang-") for path in (ROOT / "patches").glob("sglang-*"))
DEFAULT_RELEASE = "0.5.23"
# Files of an environment's bin/ that belong to that environment alone.
NO_COMMANDS = ("activate", "python", "pip")


class EnvironmentProblem(Exception):
    """A failure with a cause and a cure in one line."""


def own_venv(release: str) -> Path:
    """This checkout's environment for an SGLang release."""
    return BUILD / ("venv" if release == DEFAULT_RELEASE else f"venv-{release}")


def requirements(extras: list[str], release: str = DEFAULT_RELEASE) -> list[str]:
    """Requirement lines of pyproject.toml: the runtime dependencies and those of `extras`.

    The extras name the default release of SGLang; another one takes its place.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = list(project["dependencies"])
    for extra in extras:
        if extra not in project["optional-dependencies"]:
            raise EnvironmentProblem(f"pyproject.toml has no extra {extra}")
        lines += project["optional-dependencies"][extra]
    if release != DEFAULT_RELEASE:
        lines = [f"sglang=={release}" if line.startswith("sglang>") else line for line in lines]
    return sorted(set(lines))


def pins_hash(extras: list[str], release: str = DEFAULT_RELEASE) -> str:
    """Name of the shared environment: changes with the requirements and the Python version."""
    pins = json.dumps([sys.version_info[:2], requirements(extras, release)])
    return hashlib.sha256(pins.encode()).hexdigest()[:12]


def missing(extras: list[str], release: str = DEFAULT_RELEASE) -> list[str]:
    """Requirements that the running interpreter's environment does not meet.

    Raises EnvironmentProblem if it has an SGLang of another release: replacing that is the owner's decision.
    """
    # pip's own copy: it is there before anything is installed.
    from pip._vendor.packaging.requirements import Requirement

    result = []
    for line in requirements(extras, release):
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


def link_scripts(base: Path, venv: Path) -> None:
    """Offer the shared environment's commands here, each running on this checkout's interpreter."""
    own = venv / "bin"
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


def make_venv(base: Path, venv: Path) -> None:
    """Create `venv` over the shared environment `base`, unless it is there."""
    stamp = venv / ".base"
    # The shared environment's packages belong to the name, so that an update there rebuilds this one.
    value = f"{base}\n{ROOT}\n{(base / '.complete').read_text() if (base / '.complete').is_file() else ''}"
    if is_current(stamp, value):
        return
    shutil.rmtree(venv, ignore_errors=True)
    subprocess.run([base / "bin" / "python", "-m", "venv", "--without-pip", venv], check=True)
    shared = str(site_packages(base))
    # addsitedir, and not a plain path, so that the shared .pth files count too.
    (site_packages(venv) / "zz_shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")
    # Last on the path: benchmarks and tests are found, and SGLang's triton_kernels comes before this one.
    (site_packages(venv) / "zzz_checkout.pth").write_text(f"{ROOT}\n")
    link_scripts(base, venv)
    stamp.write_text(value)


def install_project(base: Path, venv: Path) -> None:
    """Editable install of this checkout into `venv`, when its packaging changed."""
    stamp = venv / ".project"
    value = tree_hash([ROOT / "pyproject.toml", ROOT / "setup.py"], str(ROOT))
    if is_current(stamp, value):
        return
    command = [str(base / "bin" / "python"), "-m", "pip", "--python", str(venv / "bin" / "python"), "install"]
    command += ["--quiet", "--disable-pip-version-check", "--no-warn-script-location"]
    command += ["--no-deps", "--no-build-isolation", "--editable", str(ROOT)]
    subprocess.run(command, check=True)
    stamp.write_text(value)


def copy_sglang(base: Path, venv: Path) -> None:
    """Give `venv` its own SGLang, copied again whenever the patch series changed; patches nothing."""
    stamp = venv / ".sglang"
    value = tree_hash([ROOT / "patches", ROOT / "scripts" / "apply_patches.py"], str(base))
    if is_current(stamp, value):
        return
    stamp.unlink(missing_ok=True)
    own = site_packages(venv)
    sources = [site_packages(base) / "sglang", *site_packages(base).glob("sglang-*.dist-info")]
    for source in sources:
        target = own / source.name
        shutil.rmtree(target, ignore_errors=True)
        subprocess.run(["cp", "-a", source, target], check=True)
    stamp.write_text(value)


def overlay(base: Path, release: str = DEFAULT_RELEASE) -> None:
    """Bring this checkout's environment up to date with the shared one `base` and with this checkout."""
    BUILD.mkdir(exist_ok=True)
    venv = own_venv(release)
    make_venv(base, venv)
    install_project(base, venv)
    copy_sglang(base, venv)
    (BUILD / f"{venv.name.removeprefix('v')}.sh").write_text(
        f"# Written by scripts/setup.sh: source it to use this checkout's environment.\n"
        f"export VIRTUAL_ENV={str(venv)!r}\n"
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
        _add_release(command)
    command = commands.add_parser("overlay", help="bring this checkout's environment up to date")
    _add_release(command)
    command.add_argument("--base", required=True, type=Path, metavar="DIR", help="the shared environment")
    return result


def _add_release(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--sglang", choices=RELEASES, default=DEFAULT_RELEASE, help="SGLang release (default: %(default)s)"
    )


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    try:
        if options.command == "overlay":
            overlay(options.base.absolute(), options.sglang)
            return 0
        extras = options.extras.split(",")
        if options.command == "hash":
            print(pins_hash(extras, options.sglang))
        else:
            listing = {"requirements": requirements, "missing": missing}[options.command]
            print("\n".join(listing(extras, options.sglang)))
    except EnvironmentProblem as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"setup: this command failed: {' '.join(map(str, error.cmd))}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
