"""``hicache-ext doctor`` on the real chat model, on known architectures, and on folders that are no model."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("sglang")

from hicache_ext import patching
from hicache_ext.cli import doctor
from hicache_ext.cli.main import main
from hicache_ext.core.model_kv import ModelConfigError, from_config

BASE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}
DEEPSEEK: dict[str, Any] = {
    **BASE,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 8,
    "kv_lora_rank": 512,
    "q_lora_rank": 256,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "moe_intermediate_size": 256,
    "first_k_dense_replace": 1,
}
MHA_ROW = 2 * 2 * 128

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**BASE, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen2": {
        **BASE,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "sliding_window": 2048,
        "use_sliding_window": False,
    },
    "mistral": {
        **BASE,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 1024,
    },
    "gemma3": {
        **BASE,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": 128,
        "sliding_window": 512,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gpt-oss": {
        **BASE,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "head_dim": 128,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "deepseek-v3": DEEPSEEK,
    "deepseek-v3.2": {
        **DEEPSEEK,
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "index_topk": 2048,
        "index_n_heads": 64,
        "index_head_dim": 128,
    },
    "falcon-h1": {
        **BASE,
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "head_dim": 128,
        "mamba_d_state": 128,
        "mamba_d_ssm": 1024,
        "mamba_n_heads": 16,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
    },
    "qwen3-next": {
        **BASE,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "head_dim": 128,
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "full_attention_interval": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    },
    "mamba2": {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "state_size": 16,
        "num_heads": 8,
        "head_dim": 64,
        "expand": 2,
        "n_groups": 1,
        "vocab_size": 1000,
    },
    "llama4": {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "text_config": {**BASE, "model_type": "llama4_text", "head_dim": 128, "attention_chunk_size": 1024},
        "vision_config": {},
    },
    "deepseek-v4": {
        **DEEPSEEK,
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "head_dim": 512,
        "compress_ratios": [4, 128, 4, 128],
        "sliding_window": 128,
        "index_topk": 512,
        "index_n_heads": 64,
        "index_head_dim": 128,
    },
    "whisper": {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "is_encoder_decoder": True,
        "d_model": 384,
        "encoder_layers": 4,
        "decoder_layers": 4,
        "encoder_attention_heads": 6,
        "decoder_attention_heads": 6,
        "num_hidden_layers": 4,
        "vocab_size": 1000,
    },
    "t5": {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "d_model": 512,
        "d_kv": 64,
        "num_heads": 8,
        "num_layers": 6,
        "vocab_size": 1000,
    },
}

NOT_CARRIED = {
    "gpt-oss": "sliding-window attention",
    "deepseek-v3.2": "sparse-attention index keys",
    "falcon-h1": "SSM and convolution state",
    "qwen3-next": "linear-attention state",
    "mamba2": "SSM and convolution state",
    "llama4": "chunked local attention",
    "deepseek-v4": "compressed KV and state",
    "whisper": "encoder cross-attention",
    "t5": "encoder cross-attention",
}


def made(folder: Path, config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def report(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, dict[str, Any]]:
    with warnings.catch_warnings():
        # Some of what SGLang imports warns about itself.
        warnings.simplefilter("ignore")
        status = main(["doctor", "--json", *map(str, arguments)])
    return status, json.loads(capsys.readouterr().out)


def lines(found: dict[str, Any], check: str, level: str | None = None) -> list[str]:
    return [
        f"{f['text']}; {f['cure']}"
        for f in found["findings"]
        if f["check"] == check and level in (None, f["level"])
    ]


def test_the_chat_model_is_carried(model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--model", model_path, "--page-size", "16", "--host-gb", "0.5")
    status, found = report(capsys, *arguments)
    model = found["model"]
    assert model["kinds"] == ["mha"] and model["architecture"] == "LlamaForCausalLM"
    # 30 layers, K and V, 3 KV heads of 64, bfloat16.
    assert model["token_bytes"] == 30 * 2 * 3 * 64 * 2 == 23040
    # In 3 groups, each with a header for 60 checksums, up to a multiple of 512 bytes.
    assert model["kv_heads"] == 3 and model["page_bytes"] == 3 * (512 * 242)
    assert 512 * 241 < 96 + 60 * 8 + 16 * 23040 // 3 <= 512 * 242
    assert model["tokens"] == 500_000_000 // (3 * 512 * 242) * 16
    assert not lines(found, "model", "problem") and not lines(found, "KV structure", "problem")
    assert (status == 0) == found["ok"] == (not any(f["level"] == "problem" for f in found["findings"]))


def test_the_size_is_that_of_the_pool_that_sglang_makes(
    model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from hicache_ext.integration.pools import describe

    for page_size in (1, 4):
        _, found = report(capsys, "--model", model_path, "--page-size", str(page_size))
        pool = MHATokenToKVPool(
            size=8,
            page_size=page_size,
            dtype=torch.bfloat16,
            head_num=3,
            head_dim=64,
            layer_num=30,
            device="cpu",
            enable_memory_saver=False,
        )
        layout = describe(pool, page_size).layout
        assert found["model"]["page_bytes"] == layout.page_bytes
        assert found["model"]["token_bytes"] * page_size == layout.payload_bytes


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("heads", [1, 2, 8, 12, 16, 20])
def test_the_size_is_that_of_a_pool_with_any_number_of_heads(heads: int, page_size: int) -> None:
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from hicache_ext.integration.pools import describe

    config = {**CONFIGS["llama"], "num_key_value_heads": heads, "num_attention_heads": 4 * heads}
    model = from_config({**config, "head_dim": 64, "v_head_dim": 32})
    pool = MHATokenToKVPool(
        size=page_size,
        page_size=page_size,
        dtype=torch.bfloat16,
        head_num=heads,
        head_dim=64,
        v_head_dim=32,
        layer_num=4,
        device="cpu",
        enable_memory_saver=False,
    )
    assert model.kv_heads == heads
    assert model.page_bytes(page_size) == describe(pool, page_size).layout.page_bytes


@pytest.mark.parametrize("page_size", [1, 64])
def test_the_size_is_that_of_a_latent_pool(page_size: int) -> None:
    import torch
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    from hicache_ext.integration.pools import describe

    pool = MLATokenToKVPool(
        size=page_size,
        page_size=page_size,
        dtype=torch.bfloat16,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        layer_num=4,
        device="cpu",
        enable_memory_saver=False,
    )
    model = from_config(CONFIGS["deepseek-v3"])
    assert model.kv_heads == 1
    assert model.page_bytes(page_size) == describe(pool, page_size).layout.page_bytes


@pytest.mark.parametrize("name", CONFIGS)
def test_known_architectures(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = report(capsys, "--model", made(tmp_path / name, CONFIGS[name]))
    problems = lines(found, "KV structure", "problem")
    if name in NOT_CARRIED:
        assert status == 1 and not found["ok"]
        assert len(problems) == 1 and NOT_CARRIED[name] in problems[0]
        assert "start without --enable-hicache-ext" in problems[0]
    else:
        assert problems == []
    if name != "t5":
        assert not lines(found, "model", "warning"), "SGLang itself reads this configuration"


@pytest.mark.parametrize(
    ("name", "token_bytes"),
    [
        ("llama", 4 * MHA_ROW * 2),
        ("qwen2", 4 * MHA_ROW * 2),
        ("gemma3", 4 * MHA_ROW * 2),
        ("deepseek-v3", 4 * (512 + 64) * 2),
        ("t5", 6 * 2 * 8 * 64 * 2),
    ],
)
def test_bytes_a_token(
    name: str, token_bytes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert from_config(CONFIGS[name]).token_bytes == token_bytes
    _, found = report(capsys, "--model", made(tmp_path / name, CONFIGS[name]))
    assert found["model"]["token_bytes"] == token_bytes


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("llama", ("mha",)),
        ("qwen2", ("mha",)),
        ("mistral", ("mha", "sliding-window")),
        ("gemma3", ("mha", "sliding-window")),
        ("gpt-oss", ("mha", "sliding-window")),
        ("deepseek-v3", ("mla",)),
        ("deepseek-v3.2", ("mla", "sparse-index")),
        ("falcon-h1", ("mha", "ssm")),
        ("qwen3-next", ("mha", "linear-attention")),
        ("mamba2", ("ssm",)),
        ("llama4", ("mha", "chunked-local")),
        ("whisper", ("mha", "cross-attention")),
        ("t5", ("mha", "cross-attention")),
    ],
)
def test_signs_in_the_configuration_alone(name: str, kinds: tuple[str, ...]) -> None:
    assert from_config(CONFIGS[name]).kinds == kinds


def test_layers_of_another_kind_keep_no_kv_a_token() -> None:
    assert from_config(CONFIGS["qwen3-next"]).layers == 1


@pytest.mark.parametrize(
    ("quantization", "dtype", "kinds"),
    [
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "float8_e4m3fn", ("mha",)),
        ({"kv_cache_quant_algo": "FP8"}, "float8_e4m3fn", ("mha",)),
        ({"kv_cache_quant_algo": "NVFP4"}, "bfloat16", ("mha", "quantized")),
    ],
)
def test_kv_dtype_of_a_quantized_checkpoint(
    quantization: dict[str, Any], dtype: str, kinds: tuple[str, ...]
) -> None:
    model = from_config({**CONFIGS["llama"], "quantization_config": quantization})
    assert (model.dtype, model.kinds) == (dtype, kinds)


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_a_window_over_a_pool_of_all_tokens_is_carried(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, found = report(capsys, "--model", made(tmp_path / name, CONFIGS[name]))
    (line,) = [text for text in lines(found, "KV structure", "ok") if text.startswith("sliding-window")]
    assert "keeps all tokens" in line


def test_a_model_with_code_of_its_own_is_judged_by_config_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {**CONFIGS["llama"], "model_type": "novel", "auto_map": {"AutoConfig": "novel.NovelConfig"}}
    folder = made(tmp_path / "novel", config)
    (folder / "novel.py").write_text("raise SystemExit('the code of a model was run')\n")
    _, found = report(capsys, "--model", folder)
    (line,) = lines(found, "model", "warning")
    assert "judged by config.json alone" in line and "--trust-remote-code" in line
    assert found["model"]["token_bytes"] == 4 * MHA_ROW * 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no folder"),
        ("", "is not valid JSON"),
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[1, 2]", "does not hold a JSON object"),
        ("{}", "no num_hidden_layers"),
        ('{"num_hidden_layers": 2}', "no num_attention_heads"),
        ('{"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8}', "names no architecture"),
        ('{"num_hidden_layers": "two"}', "num_hidden_layers = 'two' is not a positive whole number"),
        ('{"num_hidden_layers": 2, "num_attention_heads": 0}', "num_attention_heads = 0"),
        ('{"num_hidden_layers": true}', "num_hidden_layers = True"),
        ('{"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 4}', "is less than 8 heads"),
        ("\udcff", "is not valid JSON"),
    ],
)
def test_a_folder_that_is_no_model(
    content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    if content is not None:
        folder.mkdir()
        (folder / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    status, found = report(capsys, "--model", folder)
    assert status == 1 and found["model"] is None
    (line,) = lines(found, "model")
    assert message in line and "\n" not in line


def test_a_file_and_an_empty_folder_are_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "weights.gguf"
    path.touch()
    assert "is not a folder" in lines(report(capsys, "--model", path)[1], "model")[0]
    assert "has no config.json" in lines(report(capsys, "--model", tmp_path)[1], "model")[0]


def test_a_page_longer_than_the_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made(tmp_path / "m", {**CONFIGS["llama"], "max_position_embeddings": 32})
    status, found = report(capsys, "--model", folder, "--page-size", "64")
    assert status == 1 and "larger than the model's context of 32" in lines(found, "page size")[0]


def test_a_host_that_holds_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made(tmp_path / "m", CONFIGS["llama"])
    status, found = report(capsys, "--model", folder, "--page-size", "64", "--host-gb", "0.0001")
    assert status == 1 and "give --host-gb at least 0.000264" in lines(found, "host memory", "problem")[0]


def test_more_host_memory_than_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = report(capsys, "--host-gb", "1000000")
    assert status == 1 and "more than the" in lines(found, "memory", "problem")[0]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--page-size", "\u00b2"],
        ["--page-size", "3"],
        ["--page-size", "0"],
        ["--page-size", "-4"],
        ["--page-size", "x"],
        ["--host-gb", "0"],
        ["--host-gb", "nan"],
        ["--host-gb", "much"],
        ["--unknown"],
        ["--model"],
    ],
)
def test_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", *arguments])
    assert caught.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_the_patch_state_decides(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(patching, "state", lambda install: patching.Status("pristine", "no file is patched"))
    status, found = report(capsys)
    assert status == 1 and "run `hicache-ext patch apply`" in lines(found, "SGLang", "problem")[0]


def test_another_python_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "PYTHONS", ((2, 7),))
    status, found = report(capsys)
    assert status == 1 and sys.version.split()[0] in lines(found, "Python", "problem")[0]


def test_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    folder = made(tmp_path / "m", CONFIGS["deepseek-v3.2"])
    assert main(["doctor", "--model", str(folder), "--page-size", "64", "--host-gb", "1"]) == 1
    out = capsys.readouterr().out
    assert "sparse-attention index keys" in out and "problem" in out
    sizes = "4,608 bytes a token, 295,424 bytes a page of 64 on the host; 1 GB of host memory hold "
    assert f"{sizes}{10**9 // 295_424 * 64:,} tokens" in out
    assert "divided by the TP size" in out


def test_a_value_of_a_config_that_is_no_markup() -> None:
    with pytest.raises(ModelConfigError, match="head_dim"):
        from_config({**CONFIGS["llama"], "head_dim": "[red]"})
