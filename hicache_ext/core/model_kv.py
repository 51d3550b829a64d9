"""Which KV structures a model has and how large they are, read from its ``config.json`` alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache_ext.core.header import Geometry, head_groups

_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}

_DECODER_WITH_ENCODER = {
    "WhisperForConditionalGeneration",
    "MllamaForConditionalGeneration",
    "MossVLForConditionalGeneration",
}
_SSM_KEYS = ("mamba_d_state", "ssm_state_size", "mamba_num_heads", "conv_L_cache", "mamba_d_ssm")
_LINEAR_KEYS = ("linear_num_value_heads", "linear_attn_config", "linear_key_head_dim")
_SPARSE_KEYS = ("index_topk", "sparse_attention_config", "qsa_config")


class ModelConfigError(ValueError):
    """The folder or its config.json cannot be used; the text is one line with cause and cure."""


@dataclass(frozen=True)
class ModelKV:
    """KV of a model at TP 1.

    Attributes:
        architecture: as SGLang names it.
        kinds: keys of ``kv_spec.KINDS``, the main structure first.
        layers: attention layers that keep KV a token.
        kv_heads: KV heads; a latent row counts as one.
        row_elements: elements a token and layer, K and V together, or the latent row.
        rows: what a row is, for people.
        dtype: of the stored elements, as torch names it.
        context: longest prompt in tokens, None if the config does not say.
    """

    architecture: str
    kinds: tuple[str, ...]
    layers: int
    kv_heads: int
    row_elements: int
    rows: str
    dtype: str
    context: int | None

    @property
    def token_bytes(self) -> int:
        """Bytes a token of all layers."""
        return self.layers * self.row_elements * _BYTES.get(self.dtype, 2)

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page in host memory, headers included."""
        groups = head_groups(self.kv_heads)
        slabs = self.layers * (1 if "mla" in self.kinds else 2)
        return groups * Geometry(groups, page_size * self.token_bytes // groups, slabs).object_bytes


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a local model folder.

    Raises:
        ModelConfigError: no such folder, no such file, or not a JSON object.
    """
    path = folder / "config.json"
    if not folder.exists():
        raise ModelConfigError(f"there is no folder {folder}; name the local folder of a downloaded model")
    if not folder.is_dir():
        raise ModelConfigError(f"{folder} is not a folder; name the folder that holds config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelConfigError(f"{folder} has no config.json, so it is not a model folder") from None
    except OSError as error:
        raise ModelConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ModelConfigError(f"{path} is not valid JSON: {reason}; download it again") from error
    if not isinstance(config, dict):
        raise ModelConfigError(f"{path} does not hold a JSON object; download it again")
    return config


def from_config(config: Mapping[str, Any]) -> ModelKV:
    """The KV of a model from its configuration.

    Raises:
        ModelConfigError: what is needed is missing, or is not a positive whole number.
    """
    text = text_config(config)
    layers = _count(text, "num_hidden_layers", "n_layer", "num_layers", "decoder_layers")
    kinds = signs(config)
    if "mla" in kinds:
        rank, rotary = _count(text, "kv_lora_rank"), _count(text, "qk_rope_head_dim")
        kv_heads, elements, rows = 1, rank + rotary, f"latent {rank} + rotary {rotary}"
    elif _is_attention_free(text):
        kv_heads, elements, rows, layers = 0, 0, "no attention layer", 0
    else:
        heads = _count(text, "num_attention_heads", "n_head", "num_heads", "decoder_attention_heads")
        kv_heads = _optional(text, "num_key_value_heads") or (1 if text.get("multi_query") else heads)
        head_dim = _optional(text, "head_dim", "d_kv")
        if head_dim is None:
            hidden = _count(text, "hidden_size", "n_embd", "d_model")
            if hidden < heads:
                raise ModelConfigError(f"config.json: hidden_size {hidden} is less than {heads} heads")
            head_dim = hidden // heads
        value_dim = _optional(text, "v_head_dim") or head_dim
        elements = kv_heads * (head_dim + value_dim)
        rows = f"{kv_heads} KV heads x {head_dim}" + (f" (V {value_dim})" if value_dim != head_dim else "")
        layers = _attention_layers(text, layers)
    return ModelKV(
        architecture=architecture(config),
        kinds=kinds,
        layers=layers,
        kv_heads=kv_heads,
        row_elements=elements,
        rows=rows,
        dtype=_dtype(config, text),
        context=_optional(text, "max_position_embeddings", "n_positions"),
    )


def architecture(config: Mapping[str, Any]) -> str:
    """First entry of ``architectures``, else the model type."""
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    kind = config.get("model_type")
    if isinstance(kind, str) and kind:
        return kind
    raise ModelConfigError("config.json names no architecture; it does not belong to a language model")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of the configuration that describes the language model."""
    for key in ("text_config", "llm_config", "language_config"):
        part = config.get(key)
        if isinstance(part, dict) and ("num_hidden_layers" in part or "num_hidden_layers" not in config):
            return part
    return config


def signs(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Kinds that the configuration shows signs of; the main one first."""
    text = text_config(config)
    types = _layer_types(text)
    model_type = str(text.get("model_type", ""))
    if _is_attention_free(text):
        return ("ssm",)
    found = ["mla" if text.get("kv_lora_rank") and text.get("qk_rope_head_dim") else "mha"]
    if text.get("compress_ratios") or model_type == "deepseek_v4":
        found.append("compressed")
    if any(text.get(key) for key in _SPARSE_KEYS):
        found.append("sparse-index")
    if any("linear" in t for t in types) or any(text.get(key) for key in _LINEAR_KEYS):
        found.append("linear-attention")
    if any(text.get(key) for key in _SSM_KEYS) or {"mamba", "conv"} & set(types):
        found.append("ssm")
    if text.get("attention_chunk_size") or "chunked_attention" in types:
        found.append("chunked-local")
    elif "sliding_attention" in types or (
        text.get("sliding_window") and text.get("use_sliding_window") is not False and not types
    ):
        found.append("sliding-window")
    names = config.get("architectures")
    names = {n for n in names if isinstance(n, str)} if isinstance(names, list) else set()
    if config.get("is_encoder_decoder") is True or names & _DECODER_WITH_ENCODER:
        found.append("cross-attention")
    if _kv_bits(config) == 4:
        found.append("quantized")
    return tuple(found)


def _is_attention_free(text: Mapping[str, Any]) -> bool:
    return str(text.get("model_type", "")) in ("mamba", "mamba2", "falcon_mamba")


def _layer_types(text: Mapping[str, Any]) -> list[str]:
    for key in ("layer_types", "layers_block_type"):
        value = text.get(key)
        if isinstance(value, list):
            return [item for item in value if isinstance(item, str)]
    return []


def _attention_layers(text: Mapping[str, Any], layers: int) -> int:
    types = _layer_types(text)
    return sum("attention" in t and "linear" not in t for t in types) if len(types) == layers else layers


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    value = config.get("quantization_config")
    return value if isinstance(value, dict) else {}


def _kv_bits(config: Mapping[str, Any]) -> int | None:
    quantization = _quantization(config)
    scheme = quantization.get("kv_cache_scheme")
    if isinstance(scheme, dict) and isinstance(scheme.get("num_bits"), int):
        return scheme["num_bits"]
    algorithm = str(quantization.get("kv_cache_quant_algo") or "").upper()
    return 8 if "FP8" in algorithm and "MX" not in algorithm else 4 if "FP4" in algorithm else None


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    if _kv_bits(config) == 8:
        return "float8_e4m3fn"
    for part in (text, config):
        for key in ("dtype", "torch_dtype"):
            name = str(part.get(key) or "").removeprefix("torch.")
            if name in _BYTES:
                # SGLang serves a float32 checkpoint in float16 unless it is told otherwise.
                return "float16" if name in ("float32", "float64") else name
    return "float16"


def _optional(config: Mapping[str, Any], *keys: str) -> int | None:
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelConfigError(f"config.json: {key} = {value!r} is not a positive whole number")
        return value
    return None


def _count(config: Mapping[str, Any], *keys: str) -> int:
    value = _optional(config, *keys)
    if value is None:
        raise ModelConfigError(f"config.json has no {keys[0]}; it does not belong to a language model")
    return value
