"""The namespace of this server's pages: everything that changes their bytes without showing in the tokens."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from hicache_ext.core.page import Namespace
from hicache_ext.transfer.layout import PageLayout

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
SAMPLES = 16
SAMPLE_BYTES = 1 << 16


def namespace_of(server_args: Any, model_config: Any, layout: PageLayout, kv_dtype: str) -> Namespace:
    """Of a model as it was loaded; equal on all TP ranks."""
    hf = model_config.hf_text_config
    rotary = {
        key: getattr(hf, key, None)
        for key in ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    }
    heads = model_config.get_total_num_kv_heads()
    kind = "-".join(c.name for c in layout.components)
    return Namespace(
        model=fingerprint(model_config.model_path, model_config.revision, _loading(server_args)),
        weight_version=str(server_args.weight_version),
        kv_dtype=kv_dtype,
        layers=layout.layers,
        kv_heads=heads,
        head_dims=tuple(c.dim for c in layout.components),
        rotary=json.dumps(rotary, sort_keys=True, default=str),
        page_size=layout.page_size,
        # Groups of another number of heads are other objects.
        kind=f"{kind} of {layout.components[0].heads // layout.groups} heads a group",
    )


def fingerprint(model_path: str, revision: str | None, loading: str) -> str:
    """SHA-256 over what is loaded: the configuration, and size and samples of every weight file.

    A path says nothing about its content, and hashing all weights would take minutes. A model that is not a
    local folder is named by its path and revision.
    """
    h = hashlib.sha256(loading.encode())
    folder = Path(model_path).expanduser()
    if not folder.is_dir():
        h.update(f"{model_path}@{revision}".encode())
        return h.hexdigest()
    config = folder / "config.json"
    if config.is_file():
        h.update(config.read_bytes())
    for pattern in WEIGHT_FILES:
        for path in sorted(folder.glob(pattern)):
            size = path.stat().st_size
            h.update(f"{path.name}:{size}".encode())
            with path.open("rb") as file:
                for index in range(SAMPLES):
                    file.seek(index * max(size - SAMPLE_BYTES, 0) // (SAMPLES - 1))
                    h.update(file.read(SAMPLE_BYTES))
    return h.hexdigest()


def _loading(server_args: Any) -> str:
    """How the files become weights."""
    fields = ["load_format", "dtype", "quantization", "json_model_override_args"]
    if server_args.load_format == "dummy":
        fields.append("random_seed")
    return json.dumps({name: str(getattr(server_args, name, None)) for name in fields})


class WeightVersions:
    """The namespace as the weights change.

    Equal names of versions mean equal weights, on all servers that share a store. An update that names no
    version, or one that this server has had before, gets a name that no other server and no later update can
    have: nothing says that these are the weights of that time.
    """

    def __init__(self, namespace: Namespace, server_id: str) -> None:
        self._namespace = namespace
        self._server_id = server_id
        self._updates = 0
        self._had = {namespace.weight_version}

    def digest(self) -> bytes:
        return self._namespace.digest()

    def after_update(self, version: str | None) -> bytes:
        """The digest from now on; ``version`` is what the update calls the new weights."""
        self._updates += 1
        if version is None or version in self._had:
            version = f"{self._server_id}/{self._updates}"
        self._had.add(version)
        self._namespace = replace(self._namespace, weight_version=version)
        return self.digest()
