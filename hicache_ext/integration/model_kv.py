"""The KV structures of a model as the installed SGLang sees it; no weights are read."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hicache_ext.core.model_kv import ModelKV


class ProbeError(Exception):
    """SGLang cannot read this configuration here; the text is one line."""


def probe(folder: Path, base: ModelKV) -> ModelKV:
    """``base``, which was read from config.json, corrected by SGLang's ``ModelConfig``; takes seconds.

    Code that a model brings with it is not run.

    Raises:
        ProbeError: SGLang is not there, or does not accept the configuration.
    """
    try:
        with _quiet():
            return _probe(folder, base)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ProbeError(f"{type(error).__name__}: {reason[:200]}") from error


def _probe(folder: Path, base: ModelKV) -> ModelKV:
    from sglang.srt.configs.model_config import AttentionArch, ModelConfig

    model = ModelConfig(str(folder), trust_remote_code=False)
    dtype = base.dtype if base.dtype.startswith("float8") else str(model.dtype).removeprefix("torch.")
    kinds = _kinds(model, base)
    if not model.get_total_num_kv_heads():
        return replace(base, kinds=tuple(key for key in kinds if key != "mha"), context=model.context_len)
    layers = base.layers
    if not {"ssm", "linear-attention"} & set(kinds):
        layers = model.num_attention_layers
    if model.attention_arch == AttentionArch.MLA:
        rank, rotary = model.kv_lora_rank, model.qk_rope_head_dim
        heads, elements, rows = 1, rank + rotary, f"latent {rank} + rotary {rotary}"
    else:
        heads, dim, value_dim = model.get_total_num_kv_heads(), model.head_dim, model.v_head_dim
        elements = heads * (dim + value_dim)
        rows = f"{heads} KV heads x {dim}" + (f" (V {value_dim})" if value_dim != dim else "")
    return replace(
        base,
        kinds=kinds,
        layers=layers,
        kv_heads=heads,
        row_elements=elements,
        rows=rows,
        dtype=dtype,
        context=model.context_len,
    )


def _kinds(model: Any, base: ModelKV) -> tuple[str, ...]:
    from sglang.srt.configs import hybrid_arch
    from sglang.srt.configs.model_config import (
        AttentionArch,
        is_deepseek_dsa,
        is_deepseek_v4,
        is_minimax_sparse,
    )

    hf = model.hf_config
    found = ["mla" if model.attention_arch == AttentionArch.MLA else "mha"]
    if is_deepseek_v4(hf):
        found.append("compressed")
    elif model.is_hybrid_swa:
        chunked = getattr(model, "attention_chunk_size", None) is not None
        found.append("chunked-local" if chunked else "sliding-window")
    if is_deepseek_dsa(hf) or is_minimax_sparse(hf):
        found.append("sparse-index")
    if hybrid_arch.mamba2_config(model) is not None:
        found.append("ssm")
    elif hybrid_arch.mambaish_config(model) is not None:
        found.append("linear-attention")
    # SGLang knows only the encoder-decoders that it serves; config.json knows them all.
    if model.is_encoder_decoder or "cross-attention" in base.kinds:
        found.append("cross-attention")
    if "quantized" in base.kinds:
        found.append("quantized")
    return tuple(found)


@contextmanager
def _quiet() -> Iterator[None]:
    """No network, no log lines and no warnings from what SGLang imports."""
    before = {name: os.environ.get(name) for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")}
    os.environ.update(dict.fromkeys(before, "1"))
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
