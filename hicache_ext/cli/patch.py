"""``hicache-ext patch``: put the patch series on an installed SGLang, check it, take it off."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from hicache_ext import patching
from hicache_ext.cli import CommandError

if TYPE_CHECKING:
    _SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]

_COLOURS = {"pristine": "yellow", "patched": "green", "foreign": "red"}


def add_parser(subparsers: _SubParsers) -> None:
    """Add ``patch`` with its four actions."""
    parser = subparsers.add_parser(
        "patch",
        help="apply, verify or revert the patches for SGLang",
        description="SGLang needs a few small patches before it knows --enable-hicache-ext. They change "
        "nothing unless that flag is given. Only files that are exactly as released are patched; anything "
        "else is refused before a file is touched.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, function, text in (
        ("apply", _apply, "patch SGLang; does nothing if it is patched, completes a run that was stopped"),
        ("verify", _verify, "exit with 0 only if every file carries its patch"),
        ("revert", _revert, "restore the released files, byte for byte"),
        ("status", _status, "show the state of every touched file; exit with 1 if one is foreign or missing"),
    ):
        action = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        action.add_argument(
            "--sglang-dir",
            type=Path,
            metavar="DIR",
            help="the folder 'sglang' or the site-packages that holds it (default: that of this Python)",
        )
        action.set_defaults(run=_reporting(function))


def _reporting(
    function: Callable[[patching.SGLangInstall, Console], int],
) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace) -> int:
        try:
            # soft_wrap: a path that is broken over two lines cannot be copied.
            console = Console(soft_wrap=True, highlight=False)
            return function(patching.find_sglang(arguments.sglang_dir), console)
        except patching.PatchError as error:
            raise CommandError(str(error)) from error

    return run


def _where(install: patching.SGLangInstall) -> str:
    return f"SGLang {install.version} in {install.root}"


def _apply(install: patching.SGLangInstall, console: Console) -> int:
    written = patching.apply(install)
    if not written:
        console.print(f"already applied: {_where(install)}", markup=False)
        return 0
    for path in written:
        console.print(f"patched {path}", markup=False)
    console.print(f"applied: {_where(install)}; restart running servers", markup=False)
    return 0


def _revert(install: patching.SGLangInstall, console: Console) -> int:
    written = patching.revert(install)
    if not written:
        console.print(f"nothing to revert: {_where(install)} is as released", markup=False)
        return 0
    for path in written:
        console.print(f"restored {path}", markup=False)
    console.print(f"reverted: {_where(install)}; restart running servers", markup=False)
    return 0


def _verify(install: patching.SGLangInstall, console: Console) -> int:
    status = patching.state(install)
    if status.state != "patched":
        cure = "; 'apply' patches them" if status.state == "pristine" else ""
        raise CommandError(f"not patched ({status.state}): {status.reason}{cure}")
    console.print(f"patched: {status.reason}", markup=False)
    return 0


def _status(install: patching.SGLangInstall, console: Console) -> int:
    series = patching.load_series(install.version)
    files = patching.file_states(install, series)
    titles = {patch.name: patch.title for patch in series.patches}
    table = Table(title=_where(install), title_justify="left")
    for heading in ("patch", "purpose", "file", "state"):
        table.add_column(heading, overflow="fold")
    for entry in files:
        colour = _COLOURS[entry.state]
        table.add_row(
            entry.file.patch, titles[entry.file.patch], entry.file.path, f"[{colour}]{entry.state}[/{colour}]"
        )
    console.print(table)
    status = patching.summarize(series, files)
    console.print(f"{status.state}: {status.reason}", markup=False)
    return 1 if status.state == "foreign" else 0
