"""Bad input ends the server before the model loads, with one line that names the cause and the cure."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.server.harness import SGLangServer, cpu_args, free_port
from tests.server.workload import PATIENCE, prompt, tiny_model, tiny_server, write_tiny_model

pytestmark = pytest.mark.server

ROOT = Path(__file__).resolve().parents[2]
HOST = "--hicache-ext-host-gb"


@dataclass(frozen=True)
class Case:
    """Arguments after `--enable-hicache-ext`; `{tmp}` stands for the folder of `_files`."""

    args: str
    says: tuple[str, ...]
    sglang: str = ""
    """A folder of `_files` whose SGLang is used instead of the installed one."""
    model: str = "{tmp}/model"
    own_process: bool = False
    """Started as a user does; the others are forks of a process that has imported SGLang, to save time."""


CASES = {
    "host-too-large": Case(
        f"{HOST} 1000000", ("--hicache-ext-host-gb 1e+06", "GB that this machine has"), own_process=True
    ),
    "host-negative": Case(f"{HOST} -1", ("--hicache-ext-host-gb -1", "positive number")),
    "host-zero": Case(f"{HOST} 0", ("--hicache-ext-host-gb 0", "positive number")),
    "host-nan": Case(f"{HOST} nan", ("--hicache-ext-host-gb nan", "positive number")),
    "page-zero": Case("--page-size 0", ("--page-size 0", "power of two")),
    "page-three": Case("--page-size 3", ("--page-size 3", "power of two")),
    "page-over-context": Case("--page-size 512", ("--page-size 512", "context of 256 tokens")),
    "hierarchical": Case("--enable-hierarchical-cache", ("--enable-hierarchical-cache", "drop one")),
    "no-radix-cache": Case("--disable-radix-cache", ("--disable-radix-cache", "drop it")),
    "no-model": Case("", ("--model-path", "no-such-model does not exist"), model="{tmp}/no-such-model"),
    "not-a-model": Case("", ("--model-path", "config.json"), model="{tmp}/empty"),
    "no-config": Case("--hicache-ext-config {tmp}/none.toml", ("none.toml", "No such file")),
    "config-is-a-folder": Case("--hicache-ext-config {tmp}", ("cannot read", "directory")),
    "unknown-key": Case("--hicache-ext-config {tmp}/key.toml", ("'host_gib'", "known are", "host_gb")),
    "wrong-value": Case("--hicache-ext-config {tmp}/value.toml", ("host_gb = 'much'", "positive number")),
    "invalid-toml": Case(
        "--hicache-ext-config {tmp}/broken.toml", ("broken.toml", "not valid TOML", "line 1")
    ),
    "config-not-text": Case("--hicache-ext-config {tmp}/bytes.toml", ("bytes.toml", "cannot read")),
    "unpatched": Case("", ("are as released", "`hicache-ext patch apply`"), sglang="unpatched"),
    "flags-missing": Case("", ("2 of 4 files", "`hicache-ext patch apply`"), sglang="no-flags"),
    "scheduler-missing": Case("", ("2 of 4 files", "`hicache-ext patch apply`"), sglang="no-scheduler"),
    "startup-missing": Case("", ("2 of 4 files", "`hicache-ext patch apply`"), sglang="no-startup"),
    "edited": Case("", ("edited elsewhere", "reinstall SGLang"), sglang="edited"),
}


def _files(folder: Path) -> None:
    write_tiny_model(folder / "model", context=256)
    (folder / "empty").mkdir()
    (folder / "key.toml").write_text("host_gib = 1\n")
    (folder / "value.toml").write_text('host_gb = "much"\n')
    (folder / "broken.toml").write_text("host_gb 1\n")
    (folder / "bytes.toml").write_bytes(b"host_gb = \xff\n")
    for name in {case.sglang for case in CASES.values()} - {""}:
        _private_sglang(folder / name)
    files = {
        "no-flags": "arg_groups/fields/memory.py",
        "no-startup": "server_args.py",
        "no-scheduler": "managers/scheduler.py",
    }
    for name, kept in files.items():
        patched = {path: (folder / name / "sglang/srt" / path).read_bytes() for path in files.values()}
        _revert(folder / name)
        for path, data in patched.items():
            if path != kept:
                # Replaced, never written to: it may be a link to the installed file.
                target = folder / name / "sglang/srt" / path
                target.unlink()
                target.write_bytes(data)
    _revert(folder / "unpatched")
    scheduler = folder / "edited/sglang/srt/managers/scheduler.py"
    text = scheduler.read_text()
    scheduler.unlink()
    scheduler.write_text(text + "# a local change\n")


def _private_sglang(folder: Path) -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    installed = Path(spec.submodule_search_locations[0])
    shutil.copytree(installed, folder / "sglang", copy_function=os.symlink)


def _revert(folder: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/apply_patches.py"), "revert", "--sglang-dir", str(folder)]
    subprocess.run(command, check=True, capture_output=True)


def _launch(args: list[str], env: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return _run([sys.executable, "-m", "sglang.launch_server", *args], env, cwd)


def _run(command: list[str], env: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONSAFEPATH": "1",
        "SGLANG_PLATFORM": "hicache_ext_cpu",
        "OMP_NUM_THREADS": "1",
        **env,
    }
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=400)


# Runs each command line of argv[1:] in a fork, the way `python -m sglang.launch_server` would.
FORKS = """
import json, os, runpy, sys
def launch(args):
    sys.argv[1:] = args
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
jobs = [json.loads(job) for job in sys.argv[1:]]
try:
    # Once here: what it imports need not be imported in every fork.
    launch(["--model-path", "/no/model", "--enable-hicache-ext"])
except SystemExit:
    pass
for job in jobs:
    if os.fork() == 0:
        for stream, name in enumerate(("stdout", "stderr"), 1):
            os.dup2(os.open(job["name"] + "." + name, os.O_WRONLY | os.O_CREAT, 0o600), stream)
        launch(job["args"])
        sys.exit(0)
    code = os.waitstatus_to_exitcode(os.wait()[1])
    print(json.dumps({job["name"]: code}))
"""


def _launch_forks(jobs: dict[str, list[str]], cwd: Path) -> dict[str, subprocess.CompletedProcess[str]]:
    lines = [json.dumps({"name": name, "args": args}) for name, args in jobs.items()]
    done = _run([sys.executable, "-c", FORKS, *lines], {}, cwd)
    codes: dict[str, int] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            codes |= json.loads(line)
    assert codes.keys() == jobs.keys(), done.stderr
    return {
        name: subprocess.CompletedProcess(
            jobs[name], code, (cwd / f"{name}.stdout").read_text(), (cwd / f"{name}.stderr").read_text()
        )
        for name, code in codes.items()
    }


Outcomes = Callable[[str], subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    """What became of a case; all selected ones start at once, two at a time."""
    folder = tmp_path_factory.mktemp("bad-input")
    _files(folder)
    selected = {item.callspec.id for item in request.session.items if hasattr(item, "callspec")}
    forks: dict[str, list[str]] = {}
    futures: dict[str, Future[subprocess.CompletedProcess[str]]] = {}
    with ThreadPoolExecutor(2) as pool:
        for name, case in CASES.items():
            if name not in selected:
                continue
            args = ["--model-path", case.model.format(tmp=folder), "--host", "127.0.0.1"]
            args += ["--port", str(free_port()), "--skip-tokenizer-init", *cpu_args()]
            args += ["--enable-hicache-ext", *case.args.format(tmp=folder).split()]
            if case.sglang:
                futures[name] = pool.submit(_launch, args, {"PYTHONPATH": str(folder / case.sglang)}, folder)
            elif case.own_process:
                futures[name] = pool.submit(_launch, args, {}, folder)
            else:
                forks[name] = args
        forked = pool.submit(_launch_forks, forks, folder)
        yield lambda name: futures[name].result() if name in futures else forked.result()[name]
        for future in futures.values():
            future.cancel()


@pytest.mark.parametrize("name", CASES)
def test_one_clear_line(outcome: Outcomes, name: str) -> None:
    done = outcome(name)
    said = done.stdout + done.stderr
    assert done.returncode != 0, said
    errors = [line for line in done.stderr.splitlines() if line.startswith("hicache-ext: error: ")]
    assert len(errors) == 1, said
    assert [part for part in CASES[name].says if part not in errors[0]] == [], errors[0]
    assert "Traceback" not in said
    assert "Load weight" not in said


def test_help_explains_every_flag() -> None:
    done = _launch(["--help"], {"COLUMNS": "200"}, ROOT)
    assert done.returncode == 0, done.stderr
    for flag, words in {
        "--enable-hicache-ext": "Extend the prefix cache from device memory to host memory",
        "--hicache-ext-host-gb": "Host memory in GB",
        "--hicache-ext-write-policy": "When hicache-ext copies a page to host memory",
        "--hicache-ext-integrity": "How many pages hicache-ext checks",
        "--hicache-ext-copy-backend": "What moves KV pages of hicache-ext",
        "--hicache-ext-inject-faults": "Damage KV pages on purpose",
        "--hicache-ext-config": "TOML file with the settings of hicache-ext",
    }.items():
        assert f"  {flag}" in done.stdout
        text = " ".join(done.stdout.split(f"  {flag}", 1)[1].split())
        assert words in text[:300], text[:300]


def test_without_the_flag_nothing_changes(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    server: SGLangServer = tiny_server(tiny_model(tmp_path_factory), tmp_path, extension=False)
    with server:
        ids = prompt(1, 200)
        for expected in (0, 192):
            assert server.generate(input_ids=ids, max_new_tokens=2).cached_tokens == expected
        server.assert_no_leaks(timeout=PATIENCE)
        assert "impl=UnifiedRadixCache" in server.log_text()
        assert "hicache-ext:" not in server.log_text()
        assert not [name for name in server.metrics() if name.startswith("hicache_ext")]
