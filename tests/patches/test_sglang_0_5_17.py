"""The series for SGLang 0.5.17 on copies of the files of the installed SGLang."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from hicache_ext import patching
from tests.patches import test_sglang_0_5_23 as other

VERSION = "0.5.17"
REPOSITORY = Path(__file__).resolve().parents[2]
SCHEDULER = "sglang/srt/managers/scheduler.py"
OURS = (
    "on_request_queued",
    "on_control",
    "on_batch_result",
    "transfers_idle",
    "fetch_ended",
    "attach_stores",
    "detach_stores",
)

SERIES = patching.load_series(VERSION, REPOSITORY / "patches")
PATHS = [file.path for file in SERIES.files]


@pytest.fixture
def install(tmp_path: Path) -> patching.SGLangInstall:
    """A pristine SGLang 0.5.17, as far as the series touches it."""
    try:
        source = patching.find_sglang()
    except patching.PatchError as error:
        pytest.skip(str(error))
    if source.version != VERSION:
        pytest.skip(f"SGLang {source.version} is installed, these tests need {VERSION}")
    for path in PATHS:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.root / path, tmp_path / path)
    metadata = tmp_path / f"sglang-{VERSION}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.4\nName: sglang\nVersion: {VERSION}\n")
    copy = patching.find_sglang(tmp_path)
    patching.revert(copy)
    return copy


def test_the_series_stays_small() -> None:
    diffs = [patching.read_diff(SERIES, file) for file in SERIES.files]
    assert sum(diff.added + diff.removed for diff in diffs) <= 150


def test_round_trip_is_byte_exact(install: patching.SGLangInstall) -> None:
    released = {path: (install.root / path).read_bytes() for path in PATHS}
    assert patching.apply(install) == PATHS
    assert patching.state(install).state == "patched"
    for path in PATHS:
        compile((install.root / path).read_bytes(), path, "exec")
    assert patching.revert(install) == PATHS
    assert {path: (install.root / path).read_bytes() for path in PATHS} == released


def test_without_the_flag_nothing_of_ours_is_imported_or_called(install: patching.SGLangInstall) -> None:
    patching.apply(install)
    found = []
    for path in PATHS:
        tree = ast.parse((install.root / path).read_bytes())
        up = other.parents(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in OURS:
                found.append(node.attr)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hicache_ext"):
                found.append("import")
            else:
                continue
            # The call in a condition stands behind the flag in the same condition.
            gated = other.under_flag(node, up) or getattr(node, "attr", "") == "fetch_ended"
            assert gated, f"{path}:{node.lineno} is not under the flag"
    assert sorted(found) == sorted([*OURS, "import"])


def test_the_gates_are_open(install: patching.SGLangInstall) -> None:
    patching.apply(install)
    text = (install.root / SCHEDULER).read_text()
    tree = ast.parse(text)
    step = other.calls(other.function(tree, "get_next_batch_to_run"))
    assert step.index("tree_cache.check_hicache_events") < step.index("process_pending_chunked_abort")
    controlled = other.calls(other.function(tree, "process_input_requests"))
    assert controlled.index("tree_cache.on_control") < controlled.index("_request_dispatcher")
    settled = other.calls(other.function(tree, "process_batch_result"))
    used = [call for call in settled if "process_batch_result" in call]
    assert len(used) >= 3 and settled.index("tree_cache.on_batch_result") < settled.index(used[0])
    admitted = other.calls(other.function(tree, "_get_new_batch_prefill_raw"))
    assert admitted.index("tree_cache.fetch_ended") < admitted.index("req.init_next_round_input")
    assert "if self.enable_hicache_ext and (not self.tree_cache.fetch_ended(req))" in ast.unparse(tree)
    batch = ast.parse((install.root / "sglang/srt/managers/schedule_batch.py").read_bytes())
    assert "hicache_consumer_index=self.hicache_consumer_index" in ast.unparse(other.function(batch, "copy"))
