"""The CPU platform: silent unless asked for by name, and good enough to serve a real chat model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from hicache_ext.integration import cpu_platform
from tests.server.harness import ServerError, SGLangServer


@pytest.mark.parametrize("selected", [None, "", "cuda", "other_platform"])
def test_activate_is_silent_unless_named(monkeypatch: pytest.MonkeyPatch, selected: str | None) -> None:
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    if selected is not None:
        monkeypatch.setenv("SGLANG_PLATFORM", selected)
    assert cpu_platform.activate() is None


def test_activate_answers_to_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", cpu_platform.PLATFORM_NAME)
    module, _, name = (cpu_platform.activate() or "").partition(":")
    assert (module, name) == ("hicache_ext.integration.cpu_platform_class", "HicacheExtCpuPlatform")


def test_the_entry_point_has_the_name_that_activate_expects() -> None:
    found = entry_points(group="sglang.srt.platforms")
    ours = [ep for ep in found if ep.dist and ep.dist.name == "hicache-ext"]
    assert [ep.name for ep in ours] == [cpu_platform.PLATFORM_NAME]
    assert ours[0].load() is cpu_platform.activate


def test_importing_the_plugin_imports_nothing_of_sglang() -> None:
    code = "import hicache_ext.integration.cpu_platform, sys; print({'sglang', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.fixture(scope="module")
def server(model_path: Path) -> Iterator[SGLangServer]:
    with SGLangServer(model_path, max_total_tokens=2048) as running:
        yield running


@pytest.mark.server
def test_vanilla_server_answers(server: SGLangServer) -> None:
    answer = server.chat([{"role": "user", "content": "What is the capital of France?"}])
    assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert "Paris" in server.generate(text="The capital of France is", max_new_tokens=8).text


@pytest.mark.server
def test_second_prompt_hits_and_a_flush_forgets(server: SGLangServer) -> None:
    server.flush()
    prompt = list(range(1000, 1200))
    cold = server.generate(input_ids=prompt, max_new_tokens=4, logprobs=True)
    warm = server.generate(input_ids=prompt, max_new_tokens=4, logprobs=True)
    assert (cold.cached_tokens, warm.cached_tokens) == (0, len(prompt) - 1)
    assert warm.output_ids == cold.output_ids
    assert len(warm.logprobs) == 4
    server.flush()
    assert server.generate(input_ids=prompt, max_new_tokens=1).cached_tokens == 0


@pytest.mark.server
def test_harness_sees_what_the_server_holds(server: SGLangServer) -> None:
    assert len(server.schedulers()) == 1
    assert server.rss_bytes() > 100 << 20
    assert server.metrics()["sglang:max_total_num_tokens"] == 2048
    assert server.server_info()["version"].startswith("0.5.")
    server.assert_no_leaks()


@pytest.mark.server
def test_a_server_that_cannot_start_says_why(model_path: Path) -> None:
    with pytest.raises(ServerError, match="no-such-flag"):
        SGLangServer(model_path, args=["--no-such-flag"]).start()


@pytest.mark.server
def test_stop_leaves_no_process(server: SGLangServer) -> None:
    # Last, since it stops the module's server.
    workers = server.schedulers()
    log = server.log
    server.stop()
    assert workers and not any(worker.is_running() for worker in workers)
    assert not log.exists()
