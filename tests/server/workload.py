"""What the server tests share: a tiny model, prompts, servers with the extension, streams, the final check.

The tiny model has random weights of a size that makes every output token depend on the whole prompt, and
runs in float32: the same prompt gives the same tokens however it is batched, chunked or cached.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests

from hicache_ext.core.header import Geometry
from tests.server.harness import Generation, SGLangServer, wait_for

VOCAB = 4096
LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 4, 256, 512, 4, 2, 64
TOKEN_BYTES = LAYERS * 2 * KV_HEADS * HEAD_DIM * 4
"""KV of one token of the tiny model, float32."""

STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "SGLANG_DEBUG_MEMORY_POOL": "1",
}
PATIENCE = 90.0
"""Seconds to wait for something that takes a moment on an idle machine."""


def tiny_model(tmp_path_factory: pytest.TempPathFactory, seed: int = 0) -> Path:
    """The folder of the tiny model with that seed, written once a session."""
    folder = tmp_path_factory.getbasetemp() / f"tiny-model-{seed}"
    if not (folder / "config.json").exists():
        write_tiny_model(folder, seed)
    return folder


def write_tiny_model(folder: Path, seed: int = 0, context: int = 8192) -> Path:
    """A Llama model folder with random float32 weights and no tokenizer."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, scale: float) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * scale).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN, 1.0),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": matrix(VOCAB, HIDDEN, 0.1),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{prefix}.post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
            # Queries and keys large enough for attention that picks few tokens.
            f"{prefix}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN, 0.1),
            f"{prefix}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN, 0.1),
            f"{prefix}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN, 0.1),
            f"{prefix}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM, 0.1),
            f"{prefix}.mlp.gate_proj.weight": matrix(INNER, HIDDEN, 0.06),
            f"{prefix}.mlp.up_proj.weight": matrix(INNER, HIDDEN, 0.06),
            f"{prefix}.mlp.down_proj.weight": matrix(HIDDEN, INNER, 0.06),
        }
    save_file(weights, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def host_page_bytes(page_size: int, ranks: int = 1) -> int:
    """Of one rank's part of a page, headers included."""
    payload = page_size * TOKEN_BYTES // KV_HEADS
    return KV_HEADS // ranks * Geometry(groups=1, payload_bytes=payload, slabs=2 * LAYERS).object_bytes


def write_lora(folder: Path, seed: int, rank: int = 4) -> Path:
    """A random LoRA adapter for the tiny model on the query and value projections."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    weights = {}
    for layer in range(LAYERS):
        for name, rows in (("q_proj", HEADS * HEAD_DIM), ("v_proj", KV_HEADS * HEAD_DIM)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            a = rng.standard_normal((rank, HIDDEN)) * 0.1
            b = rng.standard_normal((rows, rank)) * 0.5
            weights[f"{prefix}.lora_A.weight"] = a.astype(np.float32)
            weights[f"{prefix}.lora_B.weight"] = b.astype(np.float32)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def prompt(seed: int, tokens: int) -> list[int]:
    """Random token ids of the tiny model; a longer prompt of the same seed starts with the shorter one."""
    return np.random.default_rng(seed).integers(3, VOCAB, tokens).tolist()


def whole_pages(tokens: int, page_size: int) -> int:
    return tokens // page_size * page_size


def reusable(tokens: int, page_size: int) -> int:
    """Prompt tokens that a cache can supply at most: the last one is always computed."""
    return whole_pages(tokens - 1, page_size)


def tiny_server(
    model: Path,
    folder: Path,
    *args: str,
    page_size: int = 16,
    device_tokens: int = 2048,
    host_tokens: int = 8192,
    check_every: int = 1,
    fetch: str = "auto",
    eviction_policy: str = "lru",
    ranks: int = 1,
    extension: bool = True,
    env: dict[str, str | None] | None = None,
) -> SGLangServer:
    """A server of the tiny model, not started; `folder` takes its log and its settings file.

    Its eviction policy is the one of which a test can say what will leave a tier, not the default.
    """
    flags = ["--dtype", "float32", "--skip-tokenizer-init", "--page-size", str(page_size)]
    if extension:
        settings = folder / "hicache-ext.toml"
        lines = [
            f"check_every = {check_every}",
            f'fetch = "{fetch}"',
            f'eviction_policy = "{eviction_policy}"',
        ]
        settings.write_text("\n".join(lines))
        flags += ["--enable-hicache-ext", "--hicache-ext-config", str(settings)]
        # Half a page more, so that rounding does not cost one.
        host_pages = (host_tokens // page_size + 0.5) * ranks
        flags += ["--hicache-ext-host-gb", str(host_pages * host_page_bytes(page_size, ranks) / 1e9)]
    return SGLangServer(
        model,
        args=[*flags, *args],
        # The model is too small to gain from a second thread.
        env={**STRICT, "OMP_NUM_THREADS": "1", **(env or {})},
        max_total_tokens=device_tokens,
        log_path=folder / "server.log",
    )


def details(answer: Generation) -> tuple[int, int]:
    """Cached prompt tokens that were on the device and that came from the host."""
    found = answer.raw["meta_info"].get("cached_tokens_details") or {}
    return found.get("device", 0), found.get("host", 0)


def generate_all(server: SGLangServer, requests_: Sequence[dict[str, Any]], threads: int) -> list[Generation]:
    """Answers in the order of the requests, `threads` of which are sent at a time."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda fields: server.generate(**fields), requests_))


def fill_device(server: SGLangServer, seed: int, tokens: int = 2048) -> None:
    """Push everything that is not in use off the device, with prompts nobody else sends."""
    for part in range(-(-tokens // 1000) + 1):
        server.generate(input_ids=prompt(1_000_000 + 100 * seed + part, 1000), max_new_tokens=1)


def pages(server: SGLangServer, tier: str) -> float:
    return server.metric("hicache_ext_pages", tier=tier)


def moved(server: SGLangServer, direction: str) -> float:
    """Bytes; `direction` is `device_to_host` or `host_to_device`."""
    # The server publishes what it counts every 0.2 seconds.
    time.sleep(0.5)
    return server.metric("hicache_ext_moved_bytes_total", direction=direction)


def running(server: SGLangServer) -> int:
    return sum(load["num_running_reqs"] for load in server.loads())


def waiting(server: SGLangServer) -> int:
    return sum(load["num_waiting_reqs"] for load in server.loads())


def wait_until(what: str, condition: Any, timeout: float = PATIENCE, step: float = 0.1) -> None:
    failed = wait_for(condition, timeout, lambda: True, step)
    assert not failed, f"waited {timeout:.0f} s in vain until {what}"


def assert_all_back(server: SGLangServer) -> None:
    """Flush; then no slot, host page, lock, ticket or waiting mark may be left, and the log is clean."""
    server.assert_no_leaks(timeout=PATIENCE)
    # Before that line, SGLang logs a harmless one of its own if the warm-up is skipped.
    log = server.log_text().partition("The server is fired up")[2]
    assert "Traceback" not in log, log[log.index("Traceback") - 2000 :][:8000]


@dataclass
class Stream:
    """An answer that arrives token by token and that the client may leave at any time."""

    response: requests.Response
    events: Iterator[dict[str, Any]]

    @classmethod
    def open(
        cls, server: SGLangServer, input_ids: Sequence[int], max_new_tokens: int, **fields: Any
    ) -> Stream:
        body = {
            "input_ids": list(input_ids),
            "sampling_params": {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": True},
            "stream": True,
            **fields,
        }
        response = requests.post(
            f"{server.url}/generate", json=body, stream=True, timeout=server.request_timeout
        )
        response.raise_for_status()
        return cls(response, _events(response.iter_lines()))

    def next(self) -> dict[str, Any] | None:
        """The next event, None after the last."""
        return next(self.events, None)

    def last(self) -> dict[str, Any]:
        """Read to the end."""
        return list(self.events)[-1]

    def close(self) -> None:
        self.response.close()


def _events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            yield json.loads(line[len(b"data: ") :])


def send(server: SGLangServer, body: dict[str, Any]) -> http.client.HTTPConnection:
    """Send a request to `/generate` and do not wait for the answer; closing the result leaves it."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=server.request_timeout)
    connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
    return connection


def abort(server: SGLangServer, rid: str) -> None:
    response = requests.post(f"{server.url}/abort_request", json={"rid": rid}, timeout=server.request_timeout)
    assert response.status_code == 200, response.text
