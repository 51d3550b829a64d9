"""The patch tool on small trees made here: what it accepts, what it refuses, what it leaves behind."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from unidiff import PatchSet

from hicache_ext import patching
from hicache_ext.cli.main import main

REPOSITORY = Path(__file__).resolve().parents[1]
VERSION = "9.9.1"
FILE = "sglang/srt/one.py"

BEFORE = b"".join(b"line %d\n" % number for number in range(1, 31))
AFTER = BEFORE.replace(b"line 5\n", b"line 5\nadded\n").replace(b"line 20\n", b"changed 20\n")
DIFF = """Title

--- a/sglang/srt/one.py
+++ b/sglang/srt/one.py
@@ -3,6 +3,7 @@
 line 3
 line 4
 line 5
+added
 line 6
 line 7
 line 8
@@ -18,5 +19,5 @@
 line 18
 line 19
-line 20
+changed 20
 line 21
 line 22
"""


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_series(folder: Path, before: bytes = BEFORE, after: bytes = AFTER, diff: str = DIFF) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "0001-one.patch").write_bytes(diff.encode())
    (folder / "manifest.toml").write_text(
        f'sglang = "{VERSION}"\n[[patch]]\nname = "0001-one.patch"\ntitle = "One"\n'
        f'[[patch.files]]\npath = "{FILE}"\nbefore = "{sha256(before)}"\nafter = "{sha256(after)}"\n'
    )


@pytest.fixture
def series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of series with one for VERSION, in place of the real one."""
    root = tmp_path / "patches"
    write_series(root / f"sglang-{VERSION}")
    monkeypatch.setattr(patching, "series_root", lambda: root)
    return root


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A site-packages with an sglang of VERSION."""
    root = tmp_path / "site-packages"
    (root / FILE).parent.mkdir(parents=True)
    (root / FILE).write_bytes(BEFORE)
    (root / "sglang" / "__init__.py").write_text("raise RuntimeError('sglang must not be imported')\n")
    add_metadata(root, VERSION)
    return root


def add_metadata(root: Path, version: str) -> None:
    folder = root / f"sglang-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: sglang\nVersion: {version}\n")


def test_the_version_comes_from_the_metadata_or_the_version_file(tree: Path, tmp_path: Path) -> None:
    assert patching.find_sglang(tree) == patching.SGLangInstall(VERSION, tree)
    assert patching.find_sglang(tree / "sglang") == patching.SGLangInstall(VERSION, tree)

    clone = tmp_path / "clone" / "python"
    (clone / "sglang" / "srt").mkdir(parents=True)
    with pytest.raises(patching.PatchError, match="cannot tell the version"):
        patching.find_sglang(clone)
    (clone / "sglang" / "_version.py").write_text("__version__ = version = '9.9.2'\n")
    assert patching.find_sglang(clone).version == "9.9.2"


def test_metadata_of_two_versions_is_refused(tree: Path) -> None:
    add_metadata(tree, "9.9.0")
    with pytest.raises(patching.PatchError, match=r"several SGLang versions \(9\.9\.0, 9\.9\.1\)"):
        patching.find_sglang(tree)


def test_a_folder_that_is_no_sglang_is_refused(tmp_path: Path) -> None:
    with pytest.raises(patching.PatchError, match="is not an SGLang installation"):
        patching.find_sglang(tmp_path)


def test_the_interpreters_sglang_is_found_without_importing_it(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A fresh process: the one of the tests may have imported the real sglang.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tree), str(REPOSITORY))))
    code = (
        "import sys; from hicache_ext import patching\n"
        "print(patching.find_sglang().version, 'sglang' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == [VERSION, "False"]


def test_round_trip_restores_bytes_mode_and_removes_bytecode(series: Path, tree: Path) -> None:
    path = tree / FILE
    path.chmod(0o640)
    cache = path.parent / "__pycache__"
    cache.mkdir()
    stale, unrelated = cache / "one.cpython-311.pyc", cache / "one_more.cpython-311.pyc"
    install = patching.find_sglang(tree)

    for change, content, kind in (
        (patching.apply, AFTER, "patched"),
        (patching.revert, BEFORE, "pristine"),
    ):
        stale.write_bytes(b"old")
        unrelated.write_bytes(b"other")
        assert change(install) == [FILE]
        assert path.read_bytes() == content
        assert path.stat().st_mode & 0o7777 == 0o640
        assert not stale.exists() and unrelated.exists()
        assert patching.state(install).state == kind
        assert change(install) == [], "a second run has nothing to do"
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["__pycache__", "one.py"]


def test_a_hard_link_of_an_installers_cache_is_not_written_through(
    series: Path, tree: Path, tmp_path: Path
) -> None:
    shared = tmp_path / "cache.py"
    os.link(tree / FILE, shared)
    patching.apply(patching.find_sglang(tree))
    assert shared.read_bytes() == BEFORE
    assert (tree / FILE).read_bytes() == AFTER


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            BEFORE.replace(b"line 7\n", b"line seven\n"),
            r"hunk 1 \(@@ -3,6 \+3,7 @@\) does not fit: line 7 is",
        ),
        (BEFORE.replace(b"line 20\n", b"LINE 20\n"), r"hunk 2 .* line 20 is 'LINE 20', expected 'line 20'"),
        (b"new first line\n" + BEFORE, r"hunk 1 .* line 3 is 'line 2', expected 'line 3'"),
        (BEFORE[:28], r"hunk 1 .* past the end of the file"),
        (BEFORE + b"more\n", r"every hunk of 0001-one.patch fits, but the file differs elsewhere"),
        (AFTER + b"more\n", r"every hunk of 0001-one.patch is in, but the file was edited elsewhere"),
        (BEFORE.replace(b"\n", b"\r\n"), r"hunk 1 .* line 3 differs in white space or line end"),
        (BEFORE + b"\xff\n", r"not UTF-8"),
        (b"", r"hunk 1 .* past the end of the file"),
    ],
    ids=["context", "removed", "offset", "cut", "more", "patched-more", "crlf", "not-utf8", "empty"],
)
def test_a_foreign_file_is_refused_with_the_first_hunk_that_does_not_fit(
    series: Path, tree: Path, content: bytes, reason: str
) -> None:
    path = tree / FILE
    path.write_bytes(content)
    before = path.stat()
    install = patching.find_sglang(tree)
    assert patching.state(install).state == "foreign"
    for change in (patching.apply, patching.revert):
        with pytest.raises(patching.PatchError, match=reason) as caught:
            change(install)
        assert FILE in str(caught.value) and "\n" not in str(caught.value)
    after = path.stat()
    assert path.read_bytes() == content
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_missing_file_is_refused(series: Path, tree: Path) -> None:
    (tree / FILE).unlink()
    with pytest.raises(patching.PatchError, match=r"cannot read .*one\.py: No such file"):
        patching.apply(patching.find_sglang(tree))
    assert not (tree / FILE).exists()


def test_an_unsupported_version_is_refused_and_the_supported_ones_are_named(series: Path, tree: Path) -> None:
    install = patching.SGLangInstall("9.9.2", tree)
    assert patching.state(install) == (
        "unsupported",
        "SGLang 9.9.2 is not supported; there are patches for 9.9.1",
    )
    with pytest.raises(patching.PatchError, match=r"not supported; there are patches for 9\.9\.1$"):
        patching.apply(install)
    assert (tree / FILE).read_bytes() == BEFORE


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: write_series(folder, after=AFTER + b"x"), "does not give what the manifest promises"),
        (
            lambda folder: write_series(folder, diff=DIFF.replace("line 7", "line 77")),
            "hunk 1 .* does not fit",
        ),
        (
            lambda folder: write_series(folder, diff=DIFF.replace("one.py", "two.py")),
            "does not modify .* once",
        ),
        (lambda folder: write_series(folder, diff=DIFF.replace("-3,6 +3,7", "-3,9 +3,9")), "is damaged"),
        (lambda folder: (folder / "0001-one.patch").unlink(), "is damaged"),
        (lambda folder: (folder / "manifest.toml").write_text("patch = 1"), "is damaged"),
        (lambda folder: (folder / "manifest.toml").write_text("["), "is damaged"),
        (
            lambda folder: (folder / "manifest.toml").write_text(
                (folder / "manifest.toml").read_text().replace(FILE, "sglang/../../etc/passwd")
            ),
            "is damaged",
        ),
    ],
)
def test_a_damaged_series_is_refused(series: Path, tree: Path, damage, reason: str) -> None:  # type: ignore[no-untyped-def]
    damage(series / f"sglang-{VERSION}")
    with pytest.raises(patching.PatchError, match=reason) as caught:
        patching.apply(patching.find_sglang(tree))
    assert "reinstall hicache-ext" in str(caught.value)
    assert (tree / FILE).read_bytes() == BEFORE


def test_hunks_keep_bytes_that_text_tools_lose() -> None:
    before = "a\r\nb\x0cb\nß\u2028ß\nlast without line feed".encode()
    after = "a\r\nb\x0cb\nnew\nß\u2028ß\nlast without line feed".encode()
    diff = PatchSet("--- a/f\n+++ b/f\n@@ -1,3 +1,4 @@\n a\r\n b\x0cb\n+new\n ß\u2028ß\n")[0]
    assert patching.apply_hunks(before, diff) == after
    assert patching.apply_hunks(after, diff, reverse=True) == before


def test_a_file_without_write_permission_gives_one_line(
    series: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    # The tests may run as root, who is never refused.
    monkeypatch.setattr("tempfile.mkstemp", refuse)
    with pytest.raises(patching.PatchError, match=r"cannot replace .*one\.py: Permission denied"):
        patching.apply(patching.find_sglang(tree))
    assert (tree / FILE).read_bytes() == BEFORE


def test_leftovers_of_a_killed_run_are_removed(series: Path, tree: Path) -> None:
    leftover = (tree / FILE).parent / ".hicache-ext-patch-abc"
    leftover.write_bytes(b"half")
    patching.apply(patching.find_sglang(tree))
    assert not leftover.exists()


# The command line


def run_cli(tree: Path, action: str) -> int:
    return main(["patch", action, "--sglang-dir", str(tree)])


def test_cli_exit_codes_and_messages(series: Path, tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(tree, "verify") == 1
    assert "not patched (pristine)" in capsys.readouterr().err
    assert run_cli(tree, "apply") == 0
    assert f"patched {FILE}" in capsys.readouterr().out
    assert run_cli(tree, "apply") == 0
    assert "already applied" in capsys.readouterr().out
    assert run_cli(tree, "verify") == 0
    assert run_cli(tree, "status") == 0
    assert "patched" in capsys.readouterr().out
    assert run_cli(tree, "revert") == 0
    assert run_cli(tree, "revert") == 0
    assert "nothing to revert" in capsys.readouterr().out


def test_cli_error_is_one_line_on_stderr(
    series: Path, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / FILE).write_bytes(BEFORE + b"[bold]\n")
    for action in ("apply", "verify", "revert"):
        assert run_cli(tree, action) == 1
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.startswith("hicache-ext: ") and output.err.count("\n") == 1
    assert run_cli(tree, "status") == 1
    assert "foreign" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["patch"], ["patch", "apply", "--no-such-option"]])
def test_cli_misuse_exits_with_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: hicache-ext" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["apply", "verify", "revert", "status"])
def test_cli_help_explains_every_option(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["patch", action, "--help"])
    assert caught.value.code == 0
    assert "site-packages" in capsys.readouterr().out


def test_the_script_runs_from_a_clone_in_another_folder(tree: Path, tmp_path: Path) -> None:
    script = REPOSITORY / "scripts" / "apply_patches.py"
    result = subprocess.run(
        [sys.executable, str(script), "apply", "--sglang-dir", str(tree)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    # The clone has no series for the version of the tree: refused in one line that names those it has.
    assert result.returncode == 1
    assert "SGLang 9.9.1 is not supported; there are patches for" in result.stderr
    assert "0.5.23" in result.stderr and result.stderr.count("\n") == 1
