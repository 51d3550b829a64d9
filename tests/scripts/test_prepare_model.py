"""The chat model's preparation: the arithmetic of the conversion, the stamp, and errors a user can act on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scripts import prepare_model as pm

SCRIPT = Path(pm.__file__)


def test_rotary_permutation_is_undone() -> None:
    heads, head_dim, hidden = 3, 8, 5
    original = np.arange(heads * head_dim * hidden, dtype=np.float32).reshape(heads * head_dim, hidden)
    # What the GGUF converter does to q and k.
    permuted = (
        original.reshape(heads, 2, head_dim // 2, hidden).swapaxes(1, 2).reshape(heads * head_dim, hidden)
    )
    assert not np.array_equal(permuted, original)
    assert np.array_equal(pm.undo_rotary_permutation(permuted, heads), original)


@pytest.mark.parametrize(
    ("gguf", "name"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.7.attn_k.weight", "model.layers.7.self_attn.k_proj.weight"),
        ("blk.29.ffn_norm.weight", "model.layers.29.post_attention_layernorm.weight"),
    ],
)
def test_tensor_names(gguf: str, name: str) -> None:
    assert pm.hf_name(gguf) == name


@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.1.unknown.weight", "blk.attn_k.weight"])
def test_unknown_tensors_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="unknown tensor"):
        pm.hf_name(name)


def test_model_is_whole_and_idempotent(model_path: Path) -> None:
    assert pm.is_complete(model_path, "bfloat16")
    assert pm.prepare(model_path, "bfloat16") is False
    config = json.loads((model_path / "config.json").read_text())
    sizes = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size")
    assert [config[name] for name in sizes] == [30, 9, 3, 576]
    assert (model_path / "tokenizer.json").is_file()


def test_a_truncated_file_or_another_dtype_is_not_complete(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"12345678")
    stamp = {
        "format": pm.FORMAT,
        "dtype": "float32",
        "package": pm.PACKAGE,
        "files": {"model.safetensors": 8},
    }
    (tmp_path / pm.STAMP).write_text(json.dumps(stamp))
    assert pm.is_complete(tmp_path, "float32")
    assert not pm.is_complete(tmp_path, "bfloat16")
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    assert not pm.is_complete(tmp_path, "float32")


@pytest.mark.parametrize("stamp", ["", "[]", "{}", "null", '{"format": 1}'])
def test_a_damaged_stamp_is_not_complete(tmp_path: Path, stamp: str) -> None:
    (tmp_path / pm.STAMP).write_text(stamp)
    assert not pm.is_complete(tmp_path, "bfloat16")


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True)


def test_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "thesis.txt"
    precious.write_text("years of work")
    done = run_script("--output", str(tmp_path), "--force")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "choose another --output" in done.stderr
    assert precious.read_text() == "years of work"


def test_a_file_as_output_is_a_clear_error(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_text("x")
    done = run_script("--output", str(target))
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "is a file" in done.stderr


def test_help_explains_every_option() -> None:
    done = run_script("--help")
    assert done.returncode == 0
    assert all(option in done.stdout for option in ("--output", "--dtype", "--force", "--quiet"))


@pytest.mark.slow
def test_a_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pm, "GGUF_SHA256", "0" * 64)
    with pytest.raises(pm.PrepareError, match="damaged"):
        pm.prepare(tmp_path / "model", quiet=True)
    assert [p.name for p in tmp_path.iterdir()] == [".model.lock"]


@pytest.mark.slow
def test_the_model_speaks(model_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output[0][prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."
