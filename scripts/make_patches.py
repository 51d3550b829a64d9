#!/usr/bin/env python3
"""Write the diffs and hashes of a patch series anew, from an edited and a pristine SGLang tree.

For developers. The series is what its manifest.toml lists: names, titles and files. To add a file or a patch,
add an entry there with empty hashes, edit the tree and run this again.
"""

from __future__ import annotations

import argparse
import difflib
import filecmp
import hashlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hicache_ext import patching

_HEADER = "# Written by scripts/make_patches.py; names, titles and paths may be edited by hand.\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, help_text in (
        ("--pristine", "folder that holds the released 'sglang'"),
        ("--edited", "folder that holds the edited 'sglang'"),
    ):
        parser.add_argument(name, type=Path, required=True, metavar="DIR", help=help_text)
    parser.add_argument(
        "--series", type=Path, metavar="DIR", help="folder of all series (default: that of this clone)"
    )
    arguments = parser.parse_args()
    try:
        return make(arguments.pristine, arguments.edited, arguments.series)
    except (patching.PatchError, patching.HunkMismatch, OSError) as error:
        print(f"make_patches.py: {error}", file=sys.stderr)
        return 1


def make(pristine: Path, edited: Path, series_folder: Path | None) -> int:
    install = patching.find_sglang(pristine)
    series = patching.load_series(install.version, series_folder)
    edited = patching.find_sglang(edited).root
    listed = {file.path for file in series.files}
    if strays := sorted(changed_files(install.root, edited) - listed):
        raise patching.PatchError(f"changed in the edited tree, but in no patch: {', '.join(strays)}")
    manifest = [_HEADER, f'sglang = "{series.version}"\n']
    changed = 0
    for patch in series.patches:
        manifest.append(f'\n[[patch]]\nname = "{patch.name}"\ntitle = "{patch.title}"\n')
        text = f"{patch.title}\n\n"
        for file in patch.files:
            before, after = ((root / file.path).read_bytes() for root in (install.root, edited))
            diff = unified_diff(file.path, before, after)
            changed += sum(line[:1] in "+-" for line in diff[2:])
            text += "".join(diff)
            manifest.append(
                f'[[patch.files]]\npath = "{file.path}"\n'
                f'before = "{_sha256(before)}"\nafter = "{_sha256(after)}"\n'
            )
        (series.folder / patch.name).write_bytes(text.encode("utf-8"))
    (series.folder / "manifest.toml").write_text("".join(manifest), encoding="utf-8")
    print(f"SGLang {series.version}: {len(series.patches)} patches, {changed} changed lines")
    return 0


def changed_files(pristine: Path, edited: Path) -> set[str]:
    """Files below ``sglang``, relative to the roots, that differ or exist on one side; not bytecode."""

    def listing(root: Path) -> set[str]:
        return {
            path.relative_to(root).as_posix()
            for path in (root / "sglang").rglob("*")
            if path.is_file() and path.suffix != ".pyc"
        }

    left, right = listing(pristine), listing(edited)
    same = {path for path in left & right if filecmp.cmp(pristine / path, edited / path, shallow=False)}
    return (left | right) - same


def unified_diff(path: str, before: bytes, after: bytes) -> list[str]:
    """Diff lines with three lines of context. Raises PatchError for what the series cannot express."""
    if before == after:
        raise patching.PatchError(f"{path} is the same in both trees")
    if not (before.endswith(b"\n") and after.endswith(b"\n")):
        raise patching.PatchError(f"{path} does not end with a line feed in both trees")
    old, new = patching.split_lines(before), patching.split_lines(after)
    return list(difflib.unified_diff(old, new, f"a/{path}", f"b/{path}"))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
