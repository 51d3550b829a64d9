"""The series for SGLang 0.5.23 on copies of the files of the installed SGLang."""

from __future__ import annotations

import ast
import base64
import hashlib
import importlib.metadata
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_ext import patching

VERSION = "0.5.23"
REPOSITORY = Path(__file__).resolve().parents[2]
SCHEDULER = "sglang/srt/managers/scheduler.py"
BATCH = "sglang/srt/managers/schedule_batch.py"
LINE_BUDGET = 150
OURS = (
    "on_request_queued",
    "on_control",
    "on_batch_result",
    "transfers_idle",
    "attach_stores",
    "detach_stores",
)
"""Methods of the cache that SGLang's own interface does not have."""

SERIES = patching.load_series(VERSION, REPOSITORY / "patches")
PATHS = [file.path for file in SERIES.files]


def installed() -> patching.SGLangInstall:
    try:
        install = patching.find_sglang()
    except patching.PatchError as error:
        pytest.skip(str(error))
    if install.version != VERSION:
        pytest.skip(f"SGLang {install.version} is installed, these tests need {VERSION}")
    return install


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The released bytes of every touched file, whether or not the installed SGLang is patched."""
    source = installed()
    root = tmp_path_factory.mktemp("released")
    for path in PATHS:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.root / path, root / path)
    copy = patching.SGLangInstall(VERSION, root)
    if patching.state(copy).state == "foreign":
        pytest.fail(f"the installed SGLang is neither released nor patched: {patching.state(copy).reason}")
    patching.revert(copy)
    return {path: (root / path).read_bytes() for path in PATHS}


@pytest.fixture
def install(released: dict[str, bytes], tmp_path: Path) -> patching.SGLangInstall:
    """A pristine SGLang 0.5.23, as far as the series touches it."""
    for path, data in released.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    metadata = tmp_path / f"sglang-{VERSION}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.4\nName: sglang\nVersion: {VERSION}\n")
    return patching.find_sglang(tmp_path)


def contents(install: patching.SGLangInstall) -> dict[str, bytes]:
    return {path: (install.root / path).read_bytes() for path in PATHS}


def edit(install: patching.SGLangInstall, path: str, old: bytes, new: bytes) -> None:
    data = (install.root / path).read_bytes()
    assert data.count(old) == 1
    (install.root / path).write_bytes(data.replace(old, new))


def test_round_trip_is_byte_exact(install: patching.SGLangInstall, released: dict[str, bytes]) -> None:
    assert patching.state(install).state == "pristine"
    assert patching.apply(install) == PATHS
    assert patching.state(install).state == "patched"
    patched = contents(install)
    for path in PATHS:
        assert patched[path] != released[path]
        compile(patched[path], path, "exec")
    assert patching.apply(install) == []
    assert contents(install) == patched
    assert patching.revert(install) == PATHS
    assert contents(install) == released
    assert patching.revert(install) == []


def test_released_bytes_are_those_of_the_wheel(released: dict[str, bytes]) -> None:
    """The pristine hashes agree with SGLang's own RECORD: they were not taken from an edited tree."""
    files = importlib.metadata.distribution("sglang").files or []
    recorded = {str(entry): entry.hash for entry in files}
    if not any(path in recorded for path in PATHS):
        pytest.skip("SGLang was not installed from a wheel")
    for path, data in released.items():
        entry = recorded[path]
        assert entry is not None and entry.mode == "sha256"
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        assert digest == entry.value, path


def test_every_mix_of_pristine_and_patched_is_completed_or_taken_back(
    install: patching.SGLangInstall, released: dict[str, bytes]
) -> None:
    patching.apply(install)
    patched = contents(install)
    for mask in range(1, 2 ** len(PATHS) - 1):
        mixed = [path for bit, path in enumerate(PATHS) if mask >> bit & 1]
        for change, goal in ((patching.apply, patched), (patching.revert, released)):
            for path in PATHS:
                (install.root / path).write_bytes((patched if path in mixed else released)[path])
            status = patching.state(install)
            assert status.state == "partial"
            assert status.reason.startswith(f"{len(mixed)} of {len(PATHS)} files are patched")
            change(install)
            assert contents(install) == goal


@pytest.mark.parametrize("path", PATHS)
def test_one_foreign_file_keeps_all_files_untouched(install: patching.SGLangInstall, path: str) -> None:
    with (install.root / path).open("ab") as stream:
        stream.write(b"# a local change\n")
    before = contents(install)
    for change in (patching.apply, patching.revert):
        with pytest.raises(patching.PatchError, match=path):
            change(install)
    assert contents(install) == before


def test_kind_upgrade_breaks_it_silently(install: patching.SGLangInstall) -> None:
    """An engine other than the one the series was made for is refused, with the first misfit hunk."""
    gate = (
        b"            or self.enable_lmcache\n        ):\n            self.tree_cache.check_hicache_events()"
    )
    upgrades = {
        # A newer release renamed what a hunk leans on.
        "context": lambda: edit(install, SCHEDULER, gate, gate.replace(b"check_hicache_events", b"tick")),
        # A newer release only moved the code: fuzzy tools would apply this, and perhaps in the wrong place.
        "offset": lambda: edit(install, SCHEDULER, b"import torch\n", b"import torch\nimport zlib\n"),
        # All hunks fit, but something else in the file changed its meaning.
        "elsewhere": lambda: edit(install, SCHEDULER, b"def flush_cache(self", b"def flush_the_cache(self"),
    }
    expected = {
        "context": r"scheduler\.py: 0003-scheduler\.patch hunk 4 \(@@ -\d+,6 \+\d+,7 @@\) does not fit: line",
        "offset": r"scheduler\.py: 0003-scheduler\.patch hunk 1 \(",
        "elsewhere": r"every hunk of 0003-scheduler\.patch fits, but the file differs elsewhere",
    }
    original = contents(install)
    for kind, upgrade in upgrades.items():
        upgrade()
        upgraded = contents(install)
        assert upgraded != original
        with pytest.raises(patching.PatchError, match=expected[kind]):
            patching.apply(install)
        assert contents(install) == upgraded, "nothing may be half patched"
        assert patching.state(install).state == "foreign"
        (install.root / SCHEDULER).write_bytes(original[SCHEDULER])

    # A patched file that an upgrade has overwritten is not passed off as patched either.
    patching.apply(install)
    (install.root / SCHEDULER).write_bytes(original[SCHEDULER])
    assert patching.state(install).state == "partial"

    newer = patching.SGLangInstall("0.5.24", install.root)
    with pytest.raises(patching.PatchError, match=r"SGLang 0\.5\.24 is not supported; .*0\.5\.23"):
        patching.apply(newer)


# A run that is killed

_KILLED_AT_EVENT = """
import os, signal, sys
from pathlib import Path
from hicache_ext import patching
install = patching.find_sglang(Path(sys.argv[1]))
change, last = getattr(patching, sys.argv[2]), int(sys.argv[3])
count = 0
def hook(event, args):
    # From the first new file on; before it nothing has been written.
    global count
    if count or event == "tempfile.mkstemp":
        count += 1
    if count == last:
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
change(install)
print(count)
"""

_RUNS_UNTIL_KILLED = """
import sys
from pathlib import Path
from hicache_ext import patching
install = patching.find_sglang(Path(sys.argv[1]))
print("ready", flush=True)
while True:
    patching.apply(install)
    patching.revert(install)
"""


def child(code: str, *arguments: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


def assert_whole(install: patching.SGLangInstall) -> str:
    status = patching.state(install)
    assert status.state in ("pristine", "patched", "partial"), status.reason
    return status.state


@pytest.mark.slow
def test_killed_at_any_step_every_file_is_whole(
    install: patching.SGLangInstall, released: dict[str, bytes]
) -> None:
    """Killed by SIGKILL just before any file operation; the next run finishes the work."""
    seen = set()
    for action, back in (("apply", patching.revert), ("revert", patching.apply)):
        if action == "revert":
            patching.apply(install)
        process = child(_KILLED_AT_EVENT, str(install.root), action, "-1")
        events = int(process.communicate(timeout=60)[0])
        back(install)
        for last in range(1, events + 1):
            process = child(_KILLED_AT_EVENT, str(install.root), action, str(last))
            process.communicate(timeout=60)
            assert process.returncode == -signal.SIGKILL
            seen.add(assert_whole(install))
            getattr(patching, action)(install)
            back(install)
    assert "partial" in seen, "no kill hit a run between two files; the test would prove little"
    patching.revert(install)
    assert contents(install) == released
    assert not list(install.root.rglob(".hicache-ext-patch-*"))


def test_killed_at_random_times_every_file_is_whole(
    install: patching.SGLangInstall, released: dict[str, bytes]
) -> None:
    generator = random.Random(23)
    for _ in range(12):
        process = child(_RUNS_UNTIL_KILLED, str(install.root))
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            time.sleep(generator.uniform(0, 0.05))
        finally:
            process.kill()
            process.communicate(timeout=60)
        assert_whole(install)
    patching.apply(install)
    assert patching.state(install).state == "patched"
    patching.revert(install)
    assert contents(install) == released
    assert not list(install.root.rglob(".hicache-ext-patch-*"))


# What the hunks may contain


def test_the_series_stays_small() -> None:
    diffs = [patching.read_diff(SERIES, file) for file in SERIES.files]
    assert sum(diff.added + diff.removed for diff in diffs) <= LINE_BUDGET


def parents(tree: ast.AST) -> dict[ast.AST, ast.AST]:
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def ancestors(node: ast.AST, up: dict[ast.AST, ast.AST]) -> Iterator[tuple[ast.AST, ast.AST]]:
    """(ancestor, its child on the way to ``node``) pairs, from the inside out."""
    while node in up:
        yield up[node], node
        node = up[node]


def needs_flag(test: ast.expr) -> bool:
    """True if ``test`` can only hold when the flag is on: the flag itself, or an ``and`` with it."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(needs_flag(value) for value in test.values)
    return isinstance(test, ast.Attribute) and test.attr == "enable_hicache_ext"


def under_flag(node: ast.AST, up: dict[ast.AST, ast.AST]) -> bool:
    return any(
        isinstance(outer, ast.If) and inner in outer.body and needs_flag(outer.test)
        for outer, inner in ancestors(node, up)
    )


def is_ours(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").split(".")[0] == "hicache_ext"
    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] == "hicache_ext" for alias in node.names)
    # Methods that only this cache has.
    return isinstance(node, ast.Attribute) and node.attr in OURS


def test_without_the_flag_nothing_of_ours_is_imported_or_called(install: patching.SGLangInstall) -> None:
    patching.apply(install)
    found = 0
    for path in PATHS:
        source = (install.root / path).read_bytes()
        tree = ast.parse(source)
        up = parents(tree)
        for node in filter(is_ours, ast.walk(tree)):
            found += 1
            assert under_flag(node, up), f"{path}:{getattr(node, 'lineno', 0)} is not under the flag"
        imports = [
            line for line in source.decode().splitlines() if "import" in line and "hicache_ext" in line
        ]
        assert len(imports) == sum(
            is_ours(node) for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)
        )
    assert found == 1 + len(OURS)


def function(tree: ast.AST, name: str) -> ast.FunctionDef:
    return next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)


def calls(node: ast.AST) -> list[str]:
    """What a function calls, in the order of the source; without ``self``."""
    found = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
    found.sort(key=lambda n: (n.lineno, n.col_offset))
    return [ast.unparse(n.func).removeprefix("self.") for n in found]


def test_every_gate_is_where_it_is_needed(install: patching.SGLangInstall) -> None:
    patching.apply(install)
    scheduler = ast.parse((install.root / SCHEDULER).read_bytes())
    for name, call in (
        ("_process_hicache_events", "check_hicache_events"),
        ("_get_new_batch_prefill_raw", "ready_to_load_host_cache"),
    ):
        body = function(scheduler, name)
        up = parents(body)
        (node,) = (node for node in ast.walk(body) if isinstance(node, ast.Attribute) and node.attr == call)
        gates = [outer.test for outer, _ in ancestors(node, up) if isinstance(outer, ast.If)]
        assert any("self.enable_hicache_ext" in ast.unparse(gate) for gate in gates), name
        assert all(isinstance(gate, ast.BoolOp) and isinstance(gate.op, ast.Or) for gate in gates[:1])

    # Before the weights change, so that no page of the new epoch is of the old ones.
    controlled = calls(function(scheduler, "process_input_requests"))
    assert controlled.index("tree_cache.on_control") < controlled.index("_request_dispatcher")
    # Before any token of the batch is used, and in the one place that all batches pass.
    settled = calls(function(scheduler, "process_batch_result"))
    used = [call for call in settled if "process_batch_result" in call]
    assert len(used) >= 3 and settled.index("tree_cache.on_batch_result") < settled.index(used[0])

    # Under the overlap scheduler the result is processed with a copy of the batch.
    copied = function(ast.parse((install.root / BATCH).read_bytes()), "copy")
    made = next(node for node in ast.walk(copied) if isinstance(node, ast.Call))
    assert ast.unparse(made.func) == "ScheduleBatch"
    (index,) = (k.value for k in made.keywords if k.arg == "hicache_consumer_index")
    assert ast.unparse(index) == "self.hicache_consumer_index"

    queued = function(scheduler, "_prefetch_kvcache").body[0]
    assert ast.unparse(queued) == ("if self.enable_hicache_ext:\n    self.tree_cache.on_request_queued(req)")

    idle = function(scheduler, "is_fully_idle")
    up = parents(idle)
    (node,) = (
        node for node in ast.walk(idle) if isinstance(node, ast.Attribute) and node.attr == "transfers_idle"
    )
    tests = [ast.unparse(outer.test) for outer, _ in ancestors(node, up) if isinstance(outer, ast.If)]
    assert tests == ["self.enable_hicache_ext and idle", "not for_health_check"]


# The patched SGLang itself

_FLAGS = """
import sys
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.srt.arg_groups.field_order import POSITIONAL_FIELD_ORDER
from sglang.srt.runtime_context import get_memory, publish
fields = ServerArgs.__struct_fields__
ours = ("enable_hicache_ext", "hicache_ext_host_gb", "hicache_ext_remote")
ours += ("hicache_ext_write_policy", "hicache_ext_integrity")
ours += ("hicache_ext_copy_backend", "hicache_ext_inject_faults", "hicache_ext_config")
assert fields[-8:] == ours and set(fields) - set(ours) == set(POSITIONAL_FIELD_ORDER), fields[-9:]
arguments = prepare_server_args(
    ["--model-path", "dummy", "--hicache-ext-host-gb", "4", "--hicache-ext-write-policy", "write-back"]
    + ["--hicache-ext-integrity", "off", "--hicache-ext-inject-faults", "tier=host,rate=1"]
    + ["--hicache-ext-copy-backend", "torch", "--hicache-ext-remote", "file:///x?size_gb=1"]
)
publish(arguments, role="scheduler")
bag = get_memory()
assert bag.enable_hicache_ext is False
assert (bag.hicache_ext_host_gb, bag.hicache_ext_write_policy) == (4.0, "write-back")
assert (bag.hicache_ext_integrity, bag.hicache_ext_inject_faults) == ("off", "tier=host,rate=1")
assert bag.hicache_ext_copy_backend == "torch"
assert bag.hicache_ext_remote == ["file:///x?size_gb=1"]
assert bag.radix_cache_backend is None
import sglang.srt.managers.scheduler
# Entry points may load other modules of hicache_ext; a patch imports only this one.
print("hicache_ext.integration.flags" in sys.modules)
"""


@pytest.mark.slow
def test_patched_sglang_parses_the_flags_and_loads_nothing_without_the_first_one() -> None:
    install = installed()
    if patching.state(install).state != "patched":
        pytest.skip("the installed SGLang is not patched")
    process = child(_FLAGS)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0
    assert output.splitlines()[-1] == "False"


def test_the_series_is_what_the_generator_writes(
    install: patching.SGLangInstall, released: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    work = tmp_path_factory.mktemp("regenerated")
    shutil.copytree(install.root, work / "edited")
    patching.apply(patching.find_sglang(work / "edited"))
    shutil.copytree(SERIES.folder, work / "patches" / SERIES.folder.name)
    command = [sys.executable, str(REPOSITORY / "scripts" / "make_patches.py")]
    command += ["--pristine", str(install.root), "--edited", str(work / "edited")]
    command += ["--series", str(work / "patches")]
    for path in (work / "patches" / SERIES.folder.name).glob("*.patch"):
        path.unlink()
    subprocess.run(command, check=True, capture_output=True)
    for path in SERIES.folder.iterdir():
        assert (work / "patches" / SERIES.folder.name / path.name).read_bytes() == path.read_bytes(), (
            path.name
        )

    stray = work / "edited" / "sglang" / "srt" / "stray.py"
    stray.write_text("pass\n")
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 1
    assert "in no patch: sglang/srt/stray.py" in result.stderr
