"""Embedding requests: SGLang's worker never says which load their batch waits for, so the cache does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.harness import SGLangServer
from tests.server.workload import assert_all_back, moved, pages, prompt, tiny_model, tiny_server, wait_until


def embed(server: SGLangServer, seed: int, tokens: int = 500) -> tuple[list[float], int]:
    """The embedding, and how many prompt tokens came from the cache."""
    answer = server.post("/encode", {"input_ids": prompt(seed, tokens)})
    return answer["embedding"], answer["meta_info"].get("cached_tokens", 0)


@pytest.mark.server
def test_an_embedding_from_the_host_equals_one_from_the_device(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    with tiny_server(tiny_model(tmp_path_factory), tmp_path, "--is-embedding") as server:
        embed(server, 0)
        on_device, _ = embed(server, 0)
        assert moved(server, "host_to_device") == 0
        wait_until("the prompt is on the host", lambda: pages(server, "host") >= 31)
        for seed in range(1, 6):
            embed(server, seed)
        from_host, _ = embed(server, 0)
        wait_until("the load is counted", lambda: moved(server, "host_to_device") > 0)
        assert from_host == on_device
        assert_all_back(server)
