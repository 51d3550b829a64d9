"""Control requests that change what the model would compute."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

_WEIGHTS = {
    "UpdateWeightFromDiskReqInput": "weight_version",
    "UpdateWeightsFromDistributedReqInput": "weight_version",
    "UpdateWeightsFromTensorReqInput": "weight_version",
    "UpdateWeightsFromIPCReqInput": "weight_version",
    "UpdateWeightVersionReqInput": "new_version",
    # Weights may be written by RDMA between these two, with no other call.
    "BeginWeightUpdateReqInput": None,
    "EndWeightUpdateReqInput": None,
    # Weights come back as whatever is loaded next.
    "ResumeMemoryOccupationReqInput": None,
    "CheckWeightsReqInput": None,
}
_ADAPTERS = {
    "LoadLoRAAdapterReqInput",
    "LoadLoRAAdapterFromTensorsReqInput",
    "UnloadLoRAAdapterReqInput",
}


@dataclass(frozen=True)
class WeightChange:
    """``version`` is None if the request names none."""

    version: str | None


def weight_change(request: Any) -> WeightChange | None:
    """What a control request does to the weights; None if nothing."""
    name = type(request).__name__
    if name not in _WEIGHTS:
        return None
    if name == "CheckWeightsReqInput" and request.action != "reset_tensors":
        return None
    field = _WEIGHTS[name]
    return WeightChange(getattr(request, field, None) if field else None)


def is_flush(request: Any) -> bool:
    """Whether a control request asks for the cache to be forgotten."""
    return type(request).__name__ == "FlushCacheReqInput"


class Adapters:
    """How often each LoRA adapter was loaded: SGLang may give a changed file the id it had before."""

    def __init__(self) -> None:
        self._loads: Counter[str] = Counter()

    def apply(self, request: Any) -> None:
        if type(request).__name__ in _ADAPTERS and request.lora_id is not None:
            self._loads[request.lora_id] += 1

    def scope(self, lora_id: str | None) -> str:
        """What separates the KV of an adapter's present content from all others."""
        if not lora_id:
            return ""
        loads = self._loads[lora_id]
        return f"{lora_id}#{loads}" if loads else lora_id
