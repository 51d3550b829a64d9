"""Checks of the server's arguments, on SGLang's own records of them."""

from __future__ import annotations

import argparse
import json
import pickle
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.releases import only_on

with warnings.catch_warnings():
    # Some of what SGLang imports warns about itself.
    warnings.simplefilter("ignore")
    # A record of arguments of 0.5.17 checks itself when it is made.
    only_on("0.5.23")
    from sglang.srt.server_args import ServerArgs

from hicache_ext.integration import flags
from hicache_ext.integration.settings import Settings, SettingsError

if not hasattr(ServerArgs, "enable_hicache_ext"):
    pytest.skip("SGLang is not patched; run hicache-ext patch apply", allow_module_level=True)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    ServerArgs.add_cli_args(made)
    return made


def server_args(*argv: str, model: str = "some/model") -> Any:
    """What SGLang makes of a command line, before it resolves anything."""
    return ServerArgs.from_cli_args(
        parser().parse_args(["--model-path", model, "--enable-hicache-ext", *argv])
    )


def refused(args: Any) -> str:
    """The one line that ``prepare`` exits with."""
    with pytest.raises(SystemExit) as caught:
        flags.prepare(args)
    message = caught.value.code
    assert isinstance(message, str) and message.startswith("hicache-ext: error: ")
    assert "\n" not in message and message.count("hicache-ext: error:") == 1
    return message.removeprefix("hicache-ext: error: ")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))
    return tmp_path


# What is accepted


def test_defaults_select_the_backend_and_keep_the_settings() -> None:
    args = server_args()
    flags.prepare(args)
    assert args.radix_cache_backend == flags.BACKEND
    assert flags.settings_of(args) == Settings()


def test_flags_and_file_arrive_in_the_settings(tmp_path: Path) -> None:
    config = tmp_path / "s.toml"
    config.write_text('host_gb = 0.5\nwrite_policy = "write-back"\nevict_granule = 64')
    args = server_args("--hicache-ext-config", str(config), "--hicache-ext-host-gb", "0.25")
    flags.prepare(args)
    assert flags.settings_of(args) == Settings(host_gb=0.25, write_policy="write-back", evict_granule=64)


def test_every_flag_arrives_in_its_setting() -> None:
    plan = "tier=host,rate=0.5,kinds=flip"
    args = server_args(
        "--hicache-ext-integrity",
        "sample",
        "--hicache-ext-inject-faults",
        plan,
        "--hicache-ext-copy-backend",
        "torch",
    )
    flags.prepare(args)
    assert flags.settings_of(args) == Settings(integrity="sample", inject_faults=plan, copy_backend="torch")


def test_a_fault_plan_that_cannot_be_read_is_refused() -> None:
    message = refused(server_args("--hicache-ext-inject-faults", "tier=host,rate=2"))
    assert message.startswith("--hicache-ext-inject-faults tier=host,rate=2: rate must be a number")


def test_settings_travel_to_the_scheduler_processes() -> None:
    args = server_args("--hicache-ext-host-gb", "0.25")
    flags.prepare(args)
    copy = pickle.loads(pickle.dumps(args))
    assert flags.settings_of(copy).host_gb == 0.25 and copy.radix_cache_backend == flags.BACKEND
    server_id = getattr(copy, flags.SERVER_ID_ATTRIBUTE)
    assert server_id == getattr(args, flags.SERVER_ID_ATTRIBUTE), "all ranks name the same server"
    other = server_args()
    flags.prepare(other)
    assert getattr(other, flags.SERVER_ID_ATTRIBUTE) != server_id


def test_the_check_may_run_twice() -> None:
    """A record that was prepared may be prepared again: the backend is ours, not a conflict."""
    args = server_args()
    flags.prepare(args)
    flags.prepare(args)


@pytest.mark.parametrize("page", [1, 2, 16, 64, 2048])
def test_usual_page_sizes_are_accepted(page: int, model: Path) -> None:
    flags.prepare(server_args("--page-size", str(page), model=str(model)))


def test_a_model_of_the_hub_is_not_looked_for() -> None:
    flags.check_model("org/name")
    flags.check_model(None)


def test_settings_that_were_never_checked_are_refused() -> None:
    with pytest.raises(SystemExit, match="start the server with --enable-hicache-ext"):
        flags.settings_of(ServerArgs(model_path="some/model"))


# Conflicts

CONFLICTS: dict[str, dict[str, Any]] = {
    "--enable-hierarchical-cache": {"enable_hierarchical_cache": True},
    "--disable-radix-cache": {"disable_radix_cache": True},
    "--radix-cache-backend": {"radix_cache_backend": "other"},
    "--hicache-storage-backend": {"hicache_storage_backend": "file"},
    "--enable-lmcache": {"enable_lmcache": True},
    "--enable-flexkv": {"enable_flexkv": True},
    "--enable-unified-cache-external-linker": {"enable_unified_cache_external_linker": True},
    "--speculative-algorithm": {"speculative_algorithm": "EAGLE"},
    "--pp-size": {"pp_size": 2},
    "--attn-cp-size": {"attn_cp_size": 2},
    "--dcp-size": {"dcp_size": 2},
    "--disaggregation-mode": {"disaggregation_mode": "prefill"},
    "--enable-pdmux": {"enable_pdmux": True},
    "--enable-hisparse": {"enable_hisparse": True},
    "--dllm-algorithm": {"dllm_algorithm": "LowConfidence"},
    "--enable-unified-memory": {"enable_unified_memory": True},
    "--enable-streaming-session": {"enable_streaming_session": True},
    "--enable-session-radix-cache": {"enable_session_radix_cache": True},
    "--kv-events-config": {"kv_events_config": "{}"},
    "--use-ray": {"use_ray": True},
}


def test_every_conflict_is_tried_here() -> None:
    assert sorted(CONFLICTS) == sorted(flag for flag, _, _ in flags._CONFLICTS)


def test_every_flag_that_is_named_exists() -> None:
    known = parser()._option_string_actions
    assert [flag for flag, _, _ in flags._CONFLICTS if flag not in known] == []


@pytest.mark.parametrize("flag", CONFLICTS)
def test_conflict(flag: str) -> None:
    args = server_args()
    for name, value in CONFLICTS[flag].items():
        assert hasattr(ServerArgs(model_path="x"), name), f"SGLang has no {name} any more"
        setattr(args, name, value)
    message = refused(args)
    assert message.startswith(f"--enable-hicache-ext cannot be combined with {flag}: ")
    assert args.radix_cache_backend in (None, "other"), "the cache was selected all the same"


def test_a_conflict_given_on_the_command_line() -> None:
    assert "--enable-lmcache" in refused(server_args("--enable-lmcache"))


def test_sglang_itself_stops_before_it_loads_anything() -> None:
    """Through the patch: the call that resolves the arguments of a server that starts."""
    with pytest.raises(SystemExit, match=r"^hicache-ext: error: .*--disable-radix-cache"):
        server_args("--disable-radix-cache").resolve_once()


def test_without_the_flag_nothing_is_checked() -> None:
    args = ServerArgs.from_cli_args(parser().parse_args(["--model-path", "x", "--enable-lmcache"]))
    assert args.enable_hicache_ext is False and not hasattr(args, flags.SETTINGS_ATTRIBUTE)


# Settings


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_host_gb_out_of_range(value: str) -> None:
    assert refused(server_args(f"--hicache-ext-host-gb={value}")) == (
        f"--hicache-ext-host-gb {float(value)} is not a positive number"
    )


def test_an_unreadable_settings_file(tmp_path: Path) -> None:
    path = tmp_path / "none.toml"
    assert refused(server_args("--hicache-ext-config", str(path))) == (
        f"--hicache-ext-config: cannot read {path}: No such file or directory"
    )


def test_policies_are_told_by_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        server_args("--hicache-ext-write-policy", "sometimes")
    assert "write-through" in capsys.readouterr().err


def test_every_flag_explains_itself() -> None:
    ours = [a for a in parser()._actions if a.dest.startswith(("hicache_ext", "enable_hicache_ext"))]
    assert len(ours) == 8 and all(a.help and len(a.help) > 40 for a in ours)


# Stores


def test_stores_may_be_given_one_by_one_or_together() -> None:
    one, two, three = (f"file:///nowhere/{n}?size_gb=1" for n in range(3))
    args = parser().parse_args(
        ["--model-path", "x", "--hicache-ext-remote", one, "--hicache-ext-remote", two, three]
    )
    assert args.hicache_ext_remote == [one, two, three]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nfs://x", "--hicache-ext-remote nfs://x: a store's address begins with file:// or mooncake://"),
        (
            "file:///dev/null/k?size_gb=1",
            "--hicache-ext-remote file:///dev/null/k?size_gb=1: /dev/null is not a folder; name another path",
        ),
    ],
)
def test_a_store_that_cannot_be_is_refused_before_anything_is_loaded(url: str, message: str) -> None:
    assert refused(server_args("--hicache-ext-remote", url)) == message


# Host memory


def test_host_memory_above_the_machine() -> None:
    message = refused(server_args("--hicache-ext-host-gb", "1e9"))
    assert message.startswith("--hicache-ext-host-gb 1e+09 is more than the ") and "machine has" in message


def memory(monkeypatch: pytest.MonkeyPatch, total: float, free: float, cgroup: float | None) -> None:
    """A machine of another size."""
    found = SimpleNamespace(total=total * flags.GB, available=free * flags.GB)
    monkeypatch.setattr(flags.psutil, "virtual_memory", lambda: found)
    monkeypatch.setattr(flags, "cgroup_limit", lambda: None if cgroup is None else int(cgroup * flags.GB))


@pytest.mark.parametrize(
    ("wanted", "cgroup", "message"),
    [
        (50, None, None),
        (51, None, "is more than the 50.0 GB that are free now"),
        (101, None, "is more than the 100.0 GB that this machine has; 50.0 GB are free now"),
        (20, 10, "is more than the 10.0 GB that this machine has"),
        (10, 10, None),
        # A cgroup without a limit of its own may show an absurd one.
        (101, 9e9, "is more than the 100.0 GB that this machine has"),
    ],
)
def test_host_memory_is_checked_against_the_machine_the_container_and_what_is_free(
    monkeypatch: pytest.MonkeyPatch, wanted: float, cgroup: float | None, message: str | None
) -> None:
    memory(monkeypatch, total=100, free=50, cgroup=cgroup)
    if message is None:
        flags.check_host_memory(Settings(host_gb=wanted))
    else:
        with pytest.raises(SettingsError, match=message):
            flags.check_host_memory(Settings(host_gb=wanted))


def test_the_default_needs_no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    memory(monkeypatch, total=1, free=0, cgroup=None)
    flags.check_host_memory(Settings())


def test_the_containers_limit_is_a_number_or_nothing() -> None:
    limit = flags.cgroup_limit()
    assert limit is None or limit > 0


# Page size


@pytest.mark.parametrize("page", [0, -1, 3, 12, 100])
def test_a_page_size_that_is_no_power_of_two(page: int) -> None:
    assert refused(server_args("--page-size", str(page))).startswith(
        f"--page-size {page} is not a power of two from 1"
    )


@pytest.mark.parametrize("flag", ["--max-total-tokens", "--context-length"])
def test_a_page_larger_than_a_limit(flag: str) -> None:
    message = refused(server_args("--page-size", "64", flag, "32"))
    assert message == f"--page-size 64 is larger than {flag} 32; no page would ever fill"
    flags.prepare(server_args("--page-size", "64", flag, "64"))


def test_a_page_larger_than_the_models_context(model: Path) -> None:
    message = refused(server_args("--page-size", "4096", model=str(model)))
    assert message.startswith("--page-size 4096 is larger than the model's context of 2048 tokens")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"max_position_embeddings": "many"}', "{}"])
def test_a_model_that_does_not_tell_its_context_is_not_checked(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    flags.prepare(server_args("--page-size", "4096", model=str(tmp_path)))


# The model


@pytest.mark.parametrize("form", ["{}", "./{}", "../{}"])
def test_a_missing_model_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    path = str(tmp_path / "no-model") if form == "{}" else form.format("no-model")
    assert refused(server_args(model=path)) == f"--model-path {path} does not exist"


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    message = refused(server_args(model=str(tmp_path)))
    assert message == f"--model-path {tmp_path} has no config.json, so it is not a model folder"


def test_a_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setenv("HOME", str(model))
    flags.check_model("~")
    with pytest.raises(SettingsError, match="--model-path ~/none does not exist"):
        flags.check_model("~/none")


# The plugin


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (["x", "--enable-hicache-ext"], True),
        (["x", "--enable-hicache-ext-soon"], False),
        (["x"], False),
    ],
)
def test_the_command_line_asks_for_the_extension(argv: list[str], wanted: bool) -> None:
    assert flags.asked_for(argv) is wanted


def test_the_plugin_registers_the_backend_once() -> None:
    from sglang.srt.mem_cache.registry import get_radix_cache_factory

    from hicache_ext.integration import plugin

    plugin.load()
    plugin.load()
    assert get_radix_cache_factory(flags.BACKEND) is plugin._factory


def test_the_plugin_is_found_by_its_entry_point() -> None:
    from importlib.metadata import entry_points

    from hicache_ext.integration import plugin

    (found,) = [e for e in entry_points(group="sglang.srt.plugins") if e.name == "hicache_ext"]
    assert found.load() is plugin.load
