"""LoRA adapters: the same prompt under another adapter has other KV.

SGLang's LoRA layers ask for pinned memory on every device, which needs a CUDA driver; the server of this test
runs with that request dropped.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.harness import SGLangServer
from tests.server.workload import (
    assert_all_back,
    details,
    fill_device,
    prompt,
    reusable,
    tiny_model,
    tiny_server,
    write_lora,
)

pytestmark = pytest.mark.server

PAGE = 16
UNPINNED = """
import torch

def unpinned(make):
    return lambda *args, pin_memory=False, **fields: make(*args, **fields)

for name in ("tensor", "empty", "zeros"):
    setattr(torch, name, unpinned(getattr(torch, name)))
torch.Tensor.pin_memory = lambda self, *args: self
"""
ADAPTERS: list[str | None] = [None, "a", "b"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    folder = tmp_path_factory.mktemp("lora")
    paths = [f"{name}={write_lora(folder / name, seed)}" for seed, name in enumerate("ab")]
    flags = ["--enable-lora", "--lora-paths", *paths, "--lora-backend", "torch_native"]
    # Python runs a module of this name at start, in every process of the server.
    (folder / "sitecustomize.py").write_text(UNPINNED)
    with tiny_server(
        tiny_model(tmp_path_factory), folder, *flags, page_size=PAGE, env={"PYTHONPATH": str(folder)}
    ) as started:
        yield started
        assert_all_back(started)


def test_adapters_never_share_on_any_tier(server: SGLangServer) -> None:
    ids = prompt(1, 300)
    reused = reusable(len(ids), PAGE)

    def ask(adapter: str | None) -> tuple[tuple[int, int], list[int]]:
        answer = server.generate(input_ids=ids, max_new_tokens=6, lora_path=adapter)
        return details(answer), answer.output_ids

    first = {adapter: ask(adapter) for adapter in ADAPTERS}
    assert {cached for cached, _ in first.values()} == {(0, 0)}
    outputs = {adapter: output for adapter, (_, output) in first.items()}
    assert len({tuple(output) for output in outputs.values()}) == len(ADAPTERS), "the adapters change nothing"
    for adapter in ADAPTERS:
        assert ask(adapter) == ((reused, 0), outputs[adapter])
    fill_device(server, 1)
    for adapter in reversed(ADAPTERS):
        assert ask(adapter) == ((0, reused), outputs[adapter])


def test_an_adapter_is_not_an_extra_key(server: SGLangServer) -> None:
    """SGLang itself appends the adapter's id to the key; a client can send the same string."""
    from sglang.srt.lora.lora_registry import LoRARef

    ids = prompt(2, 200)
    cold = server.generate(input_ids=ids, max_new_tokens=6)
    server.generate(input_ids=ids, max_new_tokens=6, lora_path="a")
    key = LoRARef.deterministic_id("a", str(server.log.parent / "a"))
    forged = server.generate(input_ids=ids, max_new_tokens=6, extra_key=key)
    assert (forged.cached_tokens, forged.output_ids) == (0, cold.output_ids)


def test_kind_stale_after_weight_update_of_an_adapter(server: SGLangServer) -> None:
    """Unloaded, changed on disk and loaded again under the same name and path, it is another adapter."""
    ids = prompt(3, 300)
    folder = server.log.parent / "b"
    before = server.generate(input_ids=ids, max_new_tokens=6, lora_path="b")
    fill_device(server, 2)
    server.post("/unload_lora_adapter", {"lora_name": "b"})
    write_lora(folder, seed=7)
    server.post("/load_lora_adapter", {"lora_name": "b", "lora_path": str(folder)})
    after = server.generate(input_ids=ids, max_new_tokens=6, lora_path="b")
    truth = server.generate(input_ids=ids, max_new_tokens=6, lora_path="b", cache_salt="cold")
    assert (after.cached_tokens, truth.cached_tokens) == (0, 0)
    assert after.output_ids == truth.output_ids != before.output_ids
