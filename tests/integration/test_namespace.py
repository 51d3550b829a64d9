"""What separates the pages of one server from those of another, or of itself before an update."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from hicache_ext.core.page import Namespace
from hicache_ext.integration import namespace as namespace_module
from hicache_ext.integration.namespace import (
    SAMPLE_BYTES,
    SAMPLES,
    WEIGHT_FILES,
    WeightVersions,
    fingerprint,
    namespace_of,
)
from hicache_ext.transfer.layout import Component, PageLayout

LAYOUT = PageLayout(16, 4, torch.bfloat16, (Component("K", 4, 64), Component("V", 4, 64)), 4)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder of two weight files, one smaller than a sample."""
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 4}')
    (tmp_path / "model-1.safetensors").write_bytes(bytes(range(256)) * (3 * SAMPLES * SAMPLE_BYTES // 256))
    (tmp_path / "model-2.safetensors").write_bytes(b"a small one")
    return tmp_path


def server_args(**changes: Any) -> Any:
    defaults: dict[str, Any] = {
        "load_format": "auto",
        "dtype": "auto",
        "quantization": None,
        "json_model_override_args": "{}",
        "random_seed": 1,
        "weight_version": "default",
    }
    return SimpleNamespace(**{**defaults, **changes})


def model_config(path: Path | str, **changes: Any) -> Any:
    text = SimpleNamespace(rope_theta=10000.0, rope_scaling=None, partial_rotary_factor=1.0)
    defaults: dict[str, Any] = {
        "model_path": str(path),
        "revision": None,
        "hf_text_config": text,
        "get_total_num_kv_heads": lambda: 4,
    }
    return SimpleNamespace(**{**defaults, **changes})


def digest(path: Path | str, args: Any = None, layout: PageLayout = LAYOUT, **changes: Any) -> bytes:
    kv_dtype = changes.pop("kv_dtype", "torch.bfloat16")
    return namespace_of(args or server_args(), model_config(path, **changes), layout, kv_dtype).digest()


# The model


def test_the_same_files_are_the_same_model_wherever_they_lie(model: Path, tmp_path_factory: Any) -> None:
    copy = tmp_path_factory.mktemp("copy")
    for path in model.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
        os.utime(copy / path.name, (1, 1))
    assert fingerprint(str(copy), None, "") == fingerprint(str(model), "main", "")
    (copy / "README.md").write_text("what the weights are")
    assert fingerprint(str(copy), None, "") == fingerprint(str(model), None, "")


def sampled(size: int) -> list[int]:
    """First and last byte of every sample of a file."""
    starts = [index * max(size - SAMPLE_BYTES, 0) // (SAMPLES - 1) for index in range(SAMPLES)]
    return [at for start in starts for at in (start, min(start + SAMPLE_BYTES, size) - 1)]


@pytest.mark.parametrize("name", ["model-1.safetensors", "model-2.safetensors"])
def test_a_changed_weight_is_seen_at_each_sample(model: Path, name: str) -> None:
    before = fingerprint(str(model), None, "")
    path = model / name
    size = path.stat().st_size
    places = sorted(set(sampled(size)))
    assert 0 in places and size - 1 in places, "both ends of every file"
    for at in places:
        content = bytearray(path.read_bytes())
        content[at] ^= 1
        path.write_bytes(bytes(content))
        assert fingerprint(str(model), None, "") != before, at
        content[at] ^= 1
        path.write_bytes(bytes(content))
    assert fingerprint(str(model), None, "") == before


def test_samples_lie_all_over_a_file() -> None:
    size = 1_000_000_000
    starts = sampled(size)[::2]
    assert max(b - a for a, b in pairwise(starts)) < size / (SAMPLES - 1) + 1


@pytest.mark.parametrize("name", ["model-1.safetensors", "model-2.safetensors"])
@pytest.mark.parametrize("change", ["shorter", "longer"])
def test_the_size_of_a_file_is_seen(model: Path, name: str, change: str) -> None:
    before = fingerprint(str(model), None, "")
    content = (model / name).read_bytes()
    (model / name).write_bytes(content[:-1] if change == "shorter" else content + b"\0")
    assert fingerprint(str(model), None, "") != before


def test_the_name_and_number_of_files_is_seen(model: Path) -> None:
    seen = {fingerprint(str(model), None, "")}
    (model / "model-2.safetensors").rename(model / "model-3.safetensors")
    seen.add(fingerprint(str(model), None, ""))
    (model / "model-3.safetensors").unlink()
    seen.add(fingerprint(str(model), None, ""))
    assert len(seen) == 3


@pytest.mark.parametrize("pattern", WEIGHT_FILES)
def test_weight_files_of_every_kind_are_seen(model: Path, pattern: str) -> None:
    before = fingerprint(str(model), None, "")
    (model / pattern.replace("*", "extra")).write_bytes(b"x")
    assert fingerprint(str(model), None, "") != before


def test_the_configuration_is_seen(model: Path) -> None:
    before = fingerprint(str(model), None, "")
    (model / "config.json").write_text('{"num_hidden_layers": 5}')
    assert fingerprint(str(model), None, "") != before


def test_an_empty_weight_file_is_no_error(model: Path) -> None:
    before = fingerprint(str(model), None, "")
    (model / "empty.bin").touch()
    assert fingerprint(str(model), None, "") != before


def test_a_model_of_the_hub_is_its_name_and_revision() -> None:
    names = [("org/a", None), ("org/b", None), ("org/a", "v1"), ("org/a", "v2")]
    assert len({fingerprint(*name, "") for name in names}) == 4
    assert fingerprint("org/a", "v1", "") == fingerprint("org/a", "v1", "")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("load_format", "dummy"),
        ("dtype", "float16"),
        ("quantization", "fp8"),
        ("json_model_override_args", '{"rope_theta": 1}'),
    ],
)
def test_how_the_files_become_weights_is_seen(model: Path, field: str, value: str) -> None:
    assert digest(model, server_args(**{field: value})) != digest(model)


def test_the_seed_of_dummy_weights_is_seen_and_no_other(model: Path) -> None:
    one, other = (digest(model, server_args(load_format="dummy", random_seed=s)) for s in (1, 2))
    assert one != other
    assert digest(model, server_args(random_seed=2)) == digest(model), "sampling changes no KV"


# The namespace


NAMESPACE = Namespace(
    model="m",
    weight_version="v",
    kv_dtype="bfloat16",
    layers=4,
    kv_heads=4,
    head_dims=(64, 64),
    rotary="r",
    page_size=16,
    kind="K-V",
)


@pytest.mark.parametrize("field", [f.name for f in fields(Namespace)])
def test_each_field_changes_the_digest(field: str) -> None:
    value = getattr(NAMESPACE, field)
    more: Any = {str: "x", int: 1, tuple: (1,)}[type(value)]
    assert replace(NAMESPACE, **{field: value + more}).digest() != NAMESPACE.digest()


def test_text_does_not_run_from_one_field_into_the_next() -> None:
    one, other = replace(NAMESPACE, model="ab", weight_version="c"), replace(NAMESPACE, model="a")
    assert one.digest() != replace(other, weight_version="bc").digest()


@pytest.mark.parametrize(
    "change",
    [
        {"layout": replace(LAYOUT, page_size=1)},
        {"layout": replace(LAYOUT, layers=5)},
        {"layout": replace(LAYOUT, components=(Component("K", 4, 64), Component("V", 4, 32)))},
        {"layout": replace(LAYOUT, components=(Component("K", 4, 32), Component("V", 4, 32)))},
        {"layout": replace(LAYOUT, components=(Component("latent", 1, 64),), groups=1)},
        {"layout": replace(LAYOUT, groups=2)},
        {"kv_dtype": "torch.float8_e4m3fn"},
        {"get_total_num_kv_heads": lambda: 8},
        {"hf_text_config": SimpleNamespace(rope_theta=1e6)},
        {"hf_text_config": SimpleNamespace(rope_theta=10000.0, rope_scaling={"factor": 2.0})},
        {"hf_text_config": SimpleNamespace(rope_parameters={"rope_theta": 10000.0})},
        {"args": server_args(weight_version="v2")},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_changes_the_bytes_changes_the_digest(model: Path, change: dict[str, Any]) -> None:
    assert digest(model, **change) != digest(model)


@pytest.mark.parametrize("size", [2, 4])
def test_kind_different_parallelism_no_sharing(model: Path, size: int) -> None:
    """Every TP degree that stores the same groups has the same namespace, whatever the rank."""
    components = tuple(replace(c, heads=c.heads // size) for c in LAYOUT.components)
    for rank in range(size):
        part = replace(LAYOUT, components=components, groups=4 // size, first_group=rank * 4 // size)
        assert digest(model, layout=part) == digest(model)


# Updates


def test_before_any_update_the_digest_is_that_of_the_namespace() -> None:
    assert WeightVersions(NAMESPACE, "s").digest() == NAMESPACE.digest()


def test_an_update_without_a_version_never_repeats() -> None:
    """On this server, on another one, and not as any version that was named."""
    versions, other = WeightVersions(NAMESPACE, "s1"), WeightVersions(NAMESPACE, "s2")
    seen = [NAMESPACE.digest()]
    for _ in range(5):
        seen.append(versions.after_update(None))
        assert versions.digest() == seen[-1]
        seen.append(other.after_update(None))
        versions.after_update("v2")
    seen.append(versions.digest())
    assert len(set(seen)) == len(seen)


def test_an_update_that_names_its_version_is_what_a_server_that_starts_with_it_has() -> None:
    versions = WeightVersions(NAMESPACE, "s")
    versions.after_update(None)
    assert versions.after_update("v2") == replace(NAMESPACE, weight_version="v2").digest()
    assert versions.after_update("v3") == replace(NAMESPACE, weight_version="v3").digest()


def test_a_version_may_be_empty() -> None:
    versions = WeightVersions(NAMESPACE, "s")
    assert versions.after_update("") == replace(NAMESPACE, weight_version="").digest()


def test_hashing_reads_little_of_a_large_file(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server must not read hundreds of gigabytes to name its model."""
    read = 0
    real = Path.open

    class Counting:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Counting:
            return self

        def __exit__(self, *exc: object) -> None:
            self.file.close()

        def seek(self, at: int) -> None:
            self.file.seek(at)

        def read(self, count: int = -1) -> bytes:
            nonlocal read
            got = self.file.read(count)
            read += len(got)
            return got

    monkeypatch.setattr(namespace_module.Path, "open", lambda self, mode="r": Counting(real(self, mode)))
    with real(model / "huge.safetensors", "wb") as file:
        file.truncate(1 << 33)
    fingerprint(str(model), None, "")
    assert 0 < read <= 3 * SAMPLES * SAMPLE_BYTES
