"""Apply, verify and revert the patch series of this package on an installed SGLang.

A series is a folder ``sglang-<version>`` with unified diffs and a ``manifest.toml`` that holds the SHA-256 of
every touched file before and after. Nothing here guesses: a file is *pristine* or *patched* by its hash, and
any other content is *foreign* and refused. Hunks are applied at the stated line, without fuzz or offset. A
file is replaced atomically, so a run that is killed leaves each file whole, in one state or the other.

SGLang is never imported.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

from unidiff import PatchedFile, PatchSet, UnidiffParseError
from unidiff.patch import Hunk, Line

FileState = Literal["pristine", "patched", "foreign"]
InstallState = Literal["pristine", "patched", "partial", "foreign", "unsupported"]

_TEMP_PREFIX = ".hicache-ext-patch-"


class PatchError(Exception):
    """The series cannot be used here; the text is one line with the cause and, if there is one, the cure."""


@dataclass(frozen=True)
class SGLangInstall:
    """An SGLang found on disk. ``root`` is the folder that holds the package folder ``sglang``."""

    version: str
    root: Path


@dataclass(frozen=True)
class SeriesFile:
    """One file of a series. ``path`` is relative to the root, the hashes are SHA-256 in hex."""

    path: str
    before: str
    after: str
    patch: str


@dataclass(frozen=True)
class Patch:
    """One diff of a series; a file belongs to exactly one diff."""

    name: str
    title: str
    files: tuple[SeriesFile, ...]


@dataclass(frozen=True)
class Series:
    """The diffs for one SGLang release, read from ``folder``."""

    version: str
    folder: Path
    patches: tuple[Patch, ...]

    @property
    def files(self) -> tuple[SeriesFile, ...]:
        return tuple(file for patch in self.patches for file in patch.files)


class Status(NamedTuple):
    """State of an installation and a one-line reason."""

    state: InstallState
    reason: str


class FileStatus(NamedTuple):
    """State of one touched file; ``reason`` says what does not fit, and is empty unless it is foreign."""

    file: SeriesFile
    state: FileState
    reason: str


class HunkMismatch(Exception):
    """A hunk does not fit the content; the text names the hunk and the first line that differs."""


# Finding SGLang and its series


def find_sglang(folder: Path | None = None) -> SGLangInstall:
    """Find the SGLang of the running interpreter, or the one in ``folder``, without importing it.

    ``folder`` may be the package folder ``sglang`` or the folder that holds it (site-packages).
    Raises PatchError if there is none or its version cannot be read.
    """
    if folder is None:
        spec = importlib.util.find_spec("sglang")
        locations = list(spec.submodule_search_locations or ()) if spec else []
        if not locations:
            raise PatchError(
                "no sglang in this Python environment; install it or name its folder with --sglang-dir"
            )
        root = Path(locations[0]).parent
    else:
        root = _root_of(folder.expanduser().absolute())
    return SGLangInstall(version=_read_version(root), root=root)


def _root_of(folder: Path) -> Path:
    if (folder / "sglang" / "srt").is_dir():
        return folder
    if folder.name == "sglang" and (folder / "srt").is_dir():
        return folder.parent
    raise PatchError(
        f"{folder} is not an SGLang installation; name the folder 'sglang' or the site-packages that holds it"
    )


def _read_version(root: Path) -> str:
    found = {dist.version for dist in importlib.metadata.distributions(name="sglang", path=[str(root)])}
    if len(found) > 1:
        raise PatchError(
            f"{root} holds metadata of several SGLang versions ({', '.join(sorted(found))}); reinstall one"
        )
    if found:
        return found.pop()
    # A source tree or an unpacked wheel has no metadata beside it.
    for name in ("_version.py", "version.py"):
        with suppress(OSError):
            text = (root / "sglang" / name).read_text(encoding="utf-8")
            if match := re.search(r"""^__version__\s*=.*?["']([^"']+)["']""", text, re.MULTILINE):
                return match.group(1)
    raise PatchError(f"cannot tell the version of SGLang in {root}: no dist-info and no sglang/version.py")


def series_root() -> Path:
    """Folder that holds the series: the package ``hicache_ext.patches``, or ``patches`` of a source tree."""
    beside = Path(__file__).resolve().parent.parent / "patches"
    try:
        spec = importlib.util.find_spec("hicache_ext.patches")
    except ModuleNotFoundError:
        spec = None
    for location in (*((spec.submodule_search_locations or ()) if spec else ()), beside):
        if supported_versions(Path(location)):
            return Path(location)
    raise PatchError("no patch series found beside the hicache_ext package; reinstall hicache-ext")


def supported_versions(root: Path | None = None) -> list[str]:
    """SGLang versions for which there is a series."""
    root = series_root() if root is None else root
    names = (path.parent.name for path in root.glob("sglang-*/manifest.toml"))
    return sorted(name.removeprefix("sglang-") for name in names)


def load_series(version: str, root: Path | None = None) -> Series:
    """Read the series for an SGLang version. Raises PatchError if there is none or it is damaged."""
    root = series_root() if root is None else root
    supported = supported_versions(root)
    if version not in supported:
        raise PatchError(
            f"SGLang {version} is not supported; there are patches for {', '.join(supported) or 'no version'}"
        )
    folder = root / f"sglang-{version}"
    manifest = folder / "manifest.toml"
    try:
        data = tomllib.loads(manifest.read_text(encoding="utf-8"))
        patches = tuple(
            Patch(
                name=entry["name"],
                title=entry["title"],
                files=tuple(
                    SeriesFile(
                        path=file["path"], before=file["before"], after=file["after"], patch=entry["name"]
                    )
                    for file in entry["files"]
                ),
            )
            for entry in data["patch"]
        )
        declared = data["sglang"]
    except (OSError, UnicodeError, tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise PatchError(f"{manifest} is damaged ({error!r}); reinstall hicache-ext") from error
    series = Series(version=version, folder=folder, patches=patches)
    paths = [file.path for file in series.files]
    if declared != version or len(set(paths)) != len(paths) or not all(map(_is_inside, paths)):
        raise PatchError(f"{manifest} is damaged (version or paths); reinstall hicache-ext")
    return series


def _is_inside(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return parts[:1] == ("sglang",) and ".." not in parts


# Diffs


def read_diff(series: Series, file: SeriesFile) -> PatchedFile:
    """The part of the diff that changes ``file``. Raises PatchError if the diff is damaged."""
    where = series.folder / file.patch
    try:
        # Decoded from bytes: reading as text would drop a carriage return that belongs to the content.
        parts = [part for part in PatchSet(where.read_bytes().decode("utf-8")) if part.path == file.path]
    except (OSError, UnicodeError, UnidiffParseError) as error:
        raise PatchError(f"{where} is damaged ({error}); reinstall hicache-ext") from error
    if len(parts) != 1 or not parts[0].is_modified_file:
        raise PatchError(f"{where} does not modify {file.path} exactly once; reinstall hicache-ext")
    return parts[0]


def split_lines(data: bytes) -> list[str]:
    """Lines with their ends, split at line feeds only as diffs count them. HunkMismatch if not UTF-8."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise HunkMismatch("the file is not UTF-8 text") from error
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def apply_hunks(data: bytes, diff: PatchedFile, *, reverse: bool = False) -> bytes:
    """Apply (or take back) every hunk of ``diff`` exactly where it says.

    Raises HunkMismatch, naming the first hunk that does not fit; ``data`` is never changed in place.
    """
    lines = split_lines(data)
    result: list[str] = []
    done = 0
    for number, hunk in enumerate(diff, start=1):
        old, new = _sides(hunk, reverse)
        # A side of length 0 names the line before the hunk.
        start = (hunk.target_start if reverse else hunk.source_start) - (1 if old else 0)
        for offset, expected in enumerate(old):
            found = lines[start + offset] if start + offset < len(lines) else None
            if found != expected:
                difference = _difference(start + offset + 1, found, expected)
                raise HunkMismatch(f"hunk {number} ({_heading(hunk)}) does not fit: {difference}")
        result += lines[done:start] + new
        done = start + len(old)
    return "".join(result + lines[done:]).encode("utf-8")


def _sides(hunk: Hunk, reverse: bool) -> tuple[list[str], list[str]]:
    lines: Sequence[Line] = list(hunk)
    source = [line.value for line in lines if line.is_context or line.is_removed]
    target = [line.value for line in lines if line.is_context or line.is_added]
    return (target, source) if reverse else (source, target)


def _heading(hunk: Hunk) -> str:
    return f"@@ -{hunk.source_start},{hunk.source_length} +{hunk.target_start},{hunk.target_length} @@"


def _difference(number: int, found: str | None, expected: str) -> str:
    if found is None:
        return f"line {number} is past the end of the file, expected {_quoted(expected)}"
    if found.strip() == expected.strip():
        return f"line {number} differs in white space or line end from {_quoted(expected)}"
    return f"line {number} is {_quoted(found)}, expected {_quoted(expected)}"


def _quoted(line: str) -> str:
    text = line.strip()
    return repr(text if len(text) <= 60 else text[:57] + "...")


# States


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _content(install: SGLangInstall, file: SeriesFile) -> bytes:
    try:
        return (install.root / file.path).read_bytes()
    except OSError as error:
        raise PatchError(f"cannot read {install.root / file.path}: {error.strerror}") from error


def _file_state(file: SeriesFile, data: bytes) -> FileState:
    digest = _sha256(data)
    return "pristine" if digest == file.before else "patched" if digest == file.after else "foreign"


def _why_foreign(series: Series, file: SeriesFile, data: bytes) -> str:
    diff = read_diff(series, file)
    try:
        apply_hunks(data, diff)
    except HunkMismatch as forward:
        with suppress(HunkMismatch):
            apply_hunks(data, diff, reverse=True)
            return f"every hunk of {file.patch} is in, but the file was edited elsewhere"
        return f"{file.patch} {forward}"
    return f"every hunk of {file.patch} fits, but the file differs elsewhere from SGLang {series.version}"


def file_states(install: SGLangInstall, series: Series) -> list[FileStatus]:
    """State of every touched file. A missing file is foreign."""
    result = []
    for file in series.files:
        try:
            data = _content(install, file)
        except PatchError as error:
            result.append(FileStatus(file, "foreign", str(error)))
            continue
        kind = _file_state(file, data)
        result.append(FileStatus(file, kind, _why_foreign(series, file, data) if kind == "foreign" else ""))
    return result


def state(install: SGLangInstall) -> Status:
    """State of an installation. Reads and hashes only the touched files: cheap enough for server start."""
    try:
        series = load_series(install.version)
    except PatchError as error:
        return Status("unsupported", str(error))
    return summarize(series, file_states(install, series))


def summarize(series: Series, files: Sequence[FileStatus]) -> Status:
    """One state for all files: foreign if any file is, partial if pristine and patched are mixed."""
    foreign = [entry for entry in files if entry.state == "foreign"]
    if foreign:
        more = f" (and {len(foreign) - 1} more)" if len(foreign) > 1 else ""
        return Status("foreign", f"{foreign[0].file.path}: {foreign[0].reason}{more}")
    patched = sum(entry.state == "patched" for entry in files)
    if patched == len(files):
        return Status("patched", f"all {len(files)} files carry the patches for SGLang {series.version}")
    if patched == 0:
        return Status("pristine", f"all {len(files)} files are as released in SGLang {series.version}")
    return Status(
        "partial",
        f"{patched} of {len(files)} files are patched; 'apply' completes the rest, 'revert' takes them back",
    )


# Changing files


def apply(install: SGLangInstall) -> list[str]:
    """Bring every pristine file to the patched state; return the paths written, none if all were patched.

    A half-applied series is completed. Raises PatchError before anything is written if a file is foreign, if
    the version has no series, or if the result would not be what the manifest promises.
    """
    return _transform(install, "patched")


def revert(install: SGLangInstall) -> list[str]:
    """Restore the released bytes of every patched file; return the paths written. Refuses like ``apply``."""
    return _transform(install, "pristine")


def _transform(install: SGLangInstall, goal: Literal["patched", "pristine"]) -> list[str]:
    series = load_series(install.version)
    with _exclusive(install):
        files = file_states(install, series)
        status = summarize(series, files)
        if status.state == "foreign":
            raise PatchError(
                f"{status.reason}. Nothing was changed; to get the released files back: "
                f"pip install --force-reinstall --no-deps sglang=={series.version}"
            )
        # Everything is computed and checked before the first byte is written.
        pending = [
            (entry.file, _converted(install, series, entry.file, goal))
            for entry in files
            if entry.state != goal
        ]
        for file, data in pending:
            _replace(install.root / file.path, data)
        _remove_leftovers(install, series)
    return [file.path for file, _ in pending]


def _converted(
    install: SGLangInstall, series: Series, file: SeriesFile, goal: Literal["patched", "pristine"]
) -> bytes:
    try:
        data = apply_hunks(_content(install, file), read_diff(series, file), reverse=goal == "pristine")
    except HunkMismatch as error:
        raise PatchError(f"{file.path}: {file.patch} {error}; reinstall hicache-ext") from error
    if _file_state(file, data) != goal:
        raise PatchError(
            f"{file.path}: {file.patch} does not give what the manifest promises; reinstall hicache-ext"
        )
    return data


def _replace(path: Path, data: bytes) -> None:
    """Put ``data`` in place of ``path`` in one step, with the same mode and owner.

    The old file is never written to: an installer may share it with its cache by a hard link.
    """
    try:
        # First, so that no unchecked bytecode of the old source can outlive a kill after the replacement.
        for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            cached.unlink(missing_ok=True)
        before = path.stat()
        handle, name = tempfile.mkstemp(prefix=_TEMP_PREFIX, dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as stream:
                os.fchmod(stream.fileno(), before.st_mode & 0o7777)
                if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                    with suppress(PermissionError):
                        os.fchown(stream.fileno(), before.st_uid, before.st_gid)
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)
    except OSError as error:
        raise PatchError(
            f"cannot replace {path}: {error.strerror}; files done before it stay done, so run the command "
            "again as a user who may write there"
        ) from error


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_leftovers(install: SGLangInstall, series: Series) -> None:
    """Remove temporary files that a killed run left; safe because runs exclude each other."""
    for folder in {(install.root / file.path).parent for file in series.files}:
        for path in folder.glob(f"{_TEMP_PREFIX}*"):
            with suppress(OSError):
                path.unlink()


@contextmanager
def _exclusive(install: SGLangInstall) -> Iterator[None]:
    """Keep two runs on one installation apart; the lock ends with the process and leaves no file."""
    try:
        handle = os.open(install.root / "sglang", os.O_RDONLY)
    except OSError as error:
        raise PatchError(f"cannot open {install.root / 'sglang'}: {error.strerror}") from error
    try:
        # A network file system may not lock; atomic replacement still keeps every file whole.
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
