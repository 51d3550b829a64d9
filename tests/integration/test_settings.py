"""Settings from a TOML file and from flags: what is taken, and what is refused with one line."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from hicache_ext.core.cache import CacheConfig
from hicache_ext.integration.settings import Settings, SettingsError, load_settings


def toml(tmp_path: Path, text: str) -> str:
    path = tmp_path / "s.toml"
    path.write_text(text)
    return str(path)


def refused(config: str | None, **flags: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(config, **flags)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_defaults_without_file_and_flags() -> None:
    settings = load_settings(None, host_gb=None, write_policy=None)
    assert settings == Settings()
    assert settings.host_gb is None and settings.write_policy == "write-through"
    assert settings.integrity == "full" and settings.inject_faults is None
    assert settings.copy_backend == "auto"
    assert settings.check_every == 0, "the slow checks are off unless asked for"


def test_defaults_are_those_of_the_cache() -> None:
    config = CacheConfig(page_size=1, host_pages=1)
    settings = Settings()
    assert (config.write_policy, config.evict_granule, config.backup_limit) == (
        settings.write_policy,
        settings.evict_granule,
        settings.backup_limit,
    )


def test_every_setting_can_come_from_the_file(tmp_path: Path) -> None:
    text = """
    host_gb = 2.5
    write_policy = "write-back"
    integrity = "sample"
    inject_faults = "tier=host,rate=0.5"
    copy_backend = "torch"
    eviction_policy = "lru"
    queue_order = "cost"
    evict_granule = 64
    backup_limit = 1024
    metrics_interval = 1
    check_every = 3
    fetch = "always"
    remote = ["mooncake://10.0.0.1:50051", "file:///var/cache/kv?size_gb=10"]
    """
    settings = load_settings(toml(tmp_path, text))
    assert settings == Settings(
        host_gb=2.5,
        write_policy="write-back",
        integrity="sample",
        inject_faults="tier=host,rate=0.5",
        copy_backend="torch",
        eviction_policy="lru",
        queue_order="cost",
        evict_granule=64,
        backup_limit=1024,
        metrics_interval=1,
        check_every=3,
        fetch="always",
        remote=("mooncake://10.0.0.1:50051", "file:///var/cache/kv?size_gb=10"),
    )
    assert set(tomllib.loads(text)) == {f.name for f in fields(Settings)}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ('"file:///x?size_gb=1"', "remote = 'file:///x?size_gb=1' is not a list of addresses of stores"),
        ("[1]", "remote = [1] is not a list of addresses of stores"),
        ('["redis://x"]', "redis://x: a store's address begins with file:// or mooncake://"),
        ('["file:///x"]', "file:///x: say how much of the disk may be used, such as ?size_gb=100"),
        ('["file:///x?size_gb=1", "file:///x?size_gb=2"]', "the store /x is given twice"),
    ],
)
def test_addresses_of_stores_are_checked(tmp_path: Path, value: str, message: str) -> None:
    with pytest.raises(SettingsError) as error:
        load_settings(toml(tmp_path, f"remote = {value}"))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_stores_of_the_command_line_replace_those_of_the_file(tmp_path: Path) -> None:
    file = toml(tmp_path, 'remote = ["file:///x?size_gb=1"]')
    assert load_settings(file, remote=["file:///y?size_gb=2"]).remote == ("file:///y?size_gb=2",)
    assert load_settings(file, remote=None).remote == ("file:///x?size_gb=1",)


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert load_settings(toml(tmp_path, "# nothing\n")) == Settings()


def test_a_whole_number_will_do_for_gigabytes(tmp_path: Path) -> None:
    assert load_settings(toml(tmp_path, "host_gb = 3")).host_gb == 3


def test_a_flag_wins_over_the_file(tmp_path: Path) -> None:
    config = toml(tmp_path, 'host_gb = 2.5\nwrite_policy = "write-back"\ncheck_every = 7')
    settings = load_settings(config, host_gb=1.0, write_policy="write-through")
    assert (settings.host_gb, settings.write_policy, settings.check_every) == (1.0, "write-through", 7)


def test_a_flag_that_was_not_given_leaves_the_file_alone(tmp_path: Path) -> None:
    config = toml(tmp_path, 'host_gb = 2.5\nwrite_policy = "write-back"')
    settings = load_settings(config, host_gb=None, write_policy=None)
    assert (settings.host_gb, settings.write_policy) == (2.5, "write-back")


def test_an_unknown_key_is_refused_and_the_known_ones_are_told(tmp_path: Path) -> None:
    config = toml(tmp_path, "host_gigabytes = 3")
    message = refused(config)
    assert message.startswith(f"{config}: unknown setting 'host_gigabytes'; known are ")
    assert all(f.name in message for f in fields(Settings))


def test_a_table_is_an_unknown_key(tmp_path: Path) -> None:
    assert "unknown setting 'hicache_ext'" in refused(toml(tmp_path, "[hicache_ext]\nhost_gb = 1"))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        *[("host_gb", v, "positive number") for v in ('"4"', "nan", "inf", "-inf", "0", "-1", "true", "[1]")],
        *[
            ("write_policy", v, "string, one of write-through, write-back")
            for v in ('"write_through"', '""', "1", "true", '["write-back"]', "{}", "1979-05-27")
        ],
        *[
            ("integrity", v, "string, one of full, sample, off")
            for v in ('"none"', '""', "true", "0", '["full"]')
        ],
        *[
            ("copy_backend", v, "string, one of auto, staged, triton, torch")
            for v in ('"cuda"', '""', "true", '["torch"]')
        ],
        *[("inject_faults", v, "string like tier=host,rate=0.01") for v in ("true", "0.1", '["tier=host"]')],
        *[
            ("eviction_policy", v, "string, one of lru, lfu, slru, s3fifo, tlru, cost")
            for v in ("1", '"best"', "true")
        ],
        *[("evict_granule", v, "positive whole number") for v in ("0", "-1", "1.0", "true", "nan", '"1"')],
        *[("backup_limit", v, "positive whole number") for v in ("0", "1e3", "inf", "false")],
        *[("metrics_interval", v, "positive number") for v in ("0", "0.0", "nan", "inf", "-0.1", '"1"')],
        *[("check_every", v, "whole number from 0") for v in ("-1", "0.5", "true", "nan")],
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(tmp_path: Path, key: str, value: str, expected: str) -> None:
    config = toml(tmp_path, f"{key} = {value}")
    message = refused(config)
    assert message.startswith(f"{config}: {key} = ") and message.endswith(f" is not a {expected}")


def test_a_number_beyond_every_float_is_refused(tmp_path: Path) -> None:
    assert "is not a positive number" in refused(toml(tmp_path, "host_gb = 1" + 400 * "0"))


@pytest.mark.parametrize("value", [0, 0.0, -1.0, float("nan"), float("inf")])
def test_a_flag_out_of_range_is_named_by_its_flag(value: float) -> None:
    assert refused(None, host_gb=value) == f"--hicache-ext-host-gb {value} is not a positive number"


def test_a_policy_given_as_a_flag_is_checked_too() -> None:
    """Engine arguments do not pass the choices of the command line."""
    message = refused(None, write_policy="sometimes")
    assert message == "--hicache-ext-write-policy sometimes is not a string, one of write-through, write-back"


def test_a_mode_given_as_a_flag_is_checked_too() -> None:
    message = refused(None, integrity="none")
    assert message == "--hicache-ext-integrity none is not a string, one of full, sample, off"


@pytest.mark.parametrize("from_file", [True, False])
def test_a_fault_plan_that_cannot_be_read_is_told(tmp_path: Path, from_file: bool) -> None:
    plan = "tier=disk,rate=0.1"
    if from_file:
        message = refused(toml(tmp_path, f'inject_faults = "{plan}"'))
    else:
        message = refused(None, inject_faults=plan)
    assert message == f"--hicache-ext-inject-faults {plan}: tier must be one of transfer, host"


def test_an_empty_fault_plan_is_not_none(tmp_path: Path) -> None:
    assert "'' is unknown" in refused(toml(tmp_path, 'inject_faults = ""'))


def test_a_bad_value_in_the_file_is_refused_although_a_flag_overrides_it(tmp_path: Path) -> None:
    assert "host_gb" in refused(toml(tmp_path, "host_gb = -1"), host_gb=1.0)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "missing.toml"
    assert refused(str(path)) == f"--hicache-ext-config: cannot read {path}: No such file or directory"


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    assert refused(str(tmp_path)).endswith(f"cannot read {tmp_path}: Is a directory")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_bytes(b"host_gb = \xff\xfe")
    assert f"cannot read {path}" in refused(str(path))


@pytest.mark.parametrize("text", ["host_gb =", "host_gb = 1\nhost_gb = 2", "host gb = 1", "{"])
def test_invalid_toml_is_told_with_its_place(tmp_path: Path, text: str) -> None:
    config = toml(tmp_path, text)
    message = refused(config)
    assert message.startswith(f"--hicache-ext-config: {config} is not valid TOML: ") and "(at " in message


def test_settings_do_not_change_after_they_were_checked() -> None:
    with pytest.raises(AttributeError):
        load_settings(None).host_gb = 3  # type: ignore[misc]
