"""Which control requests of SGLang change the weights or an adapter, on its own request types."""

from __future__ import annotations

import importlib.util
import inspect
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.releases import only_on

with warnings.catch_warnings():
    # Some of what SGLang imports warns about itself.
    warnings.simplefilter("ignore")
    only_on("0.5.23")
    from sglang.srt.managers import io_struct as io

from hicache_ext.integration import control
from hicache_ext.integration.control import Adapters, WeightChange, weight_change

DISK = {"model_path": "m"}
TENSORS: dict[str, Any] = {"serialized_named_tensors": [b""]}
DISTRIBUTED: dict[str, Any] = {"names": [], "dtypes": [], "shapes": []}
IPC: dict[str, Any] = {"zmq_handles": {}}

IGNORED = {
    # Nothing of the model that serves changes.
    "InitWeightsSendGroupForRemoteInstanceReqInput",
    "SendWeightsToRemoteInstanceReqInput",
    "InitWeightsUpdateGroupReqInput",
    "DestroyWeightsUpdateGroupReqInput",
    "GetWeightsByNameReqInput",
    # Nothing is computed until memory comes back, and that is recognized.
    "ReleaseMemoryOccupationReqInput",
}


def requests() -> set[str]:
    """Names of SGLang's requests that may concern weights, adapters or the memory they lie in."""
    kinds = inspect.getmembers(io, inspect.isclass)
    return {
        name
        for name, kind in kinds
        if kind.__module__ == io.__name__
        and re.search(r"Weight|LoRA|MemoryOccupation", name)
        and re.search(r"Req(Input)?$", name)
    }


def source_of(module: str) -> str:
    """The text of a module; the scheduler takes many seconds to import."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text()


def test_no_request_type_is_forgotten() -> None:
    """Kind 4 begins with a new kind of update that nobody told the cache about."""
    known = set(control._WEIGHTS) | set(control._ADAPTERS) | IGNORED
    found = requests()
    assert len(found) > 15, found
    assert found - known == set(), "does it change weights? list it in control.py, or here with the reason"
    assert known - found == set(), "SGLang has no such request any more"
    assert not (set(control._WEIGHTS) | set(control._ADAPTERS)) & IGNORED


def test_every_type_that_the_scheduler_acts_on_is_a_request() -> None:
    """What is found by name above is all that is dispatched: no type of another name concerns weights."""
    source = source_of("sglang.srt.managers.scheduler").partition("def init_request_dispatcher")[2]
    source = source.partition("\n    def ")[0]
    dispatched = dict(re.findall(r"\(\s*(\w+),\s*self\.([\w.]+),?\s*\)", source))
    assert len(dispatched) > 30
    topic = re.compile("weight|lora|memory_occupation", re.IGNORECASE)
    concerned = {name for name, handler in dispatched.items() if topic.search(handler)}
    assert concerned <= requests(), concerned - requests()


@pytest.mark.parametrize(
    ("request_", "version"),
    [
        (io.UpdateWeightFromDiskReqInput(**DISK), None),
        (io.UpdateWeightFromDiskReqInput(**DISK, weight_version="v2"), "v2"),
        (io.UpdateWeightsFromDistributedReqInput(**DISTRIBUTED), None),
        (io.UpdateWeightsFromDistributedReqInput(**DISTRIBUTED, weight_version="v2"), "v2"),
        (io.UpdateWeightsFromDistributedReqInput(**DISTRIBUTED, flush_cache=False), None),
        (io.UpdateWeightsFromTensorReqInput(**TENSORS), None),
        (io.UpdateWeightsFromTensorReqInput(**TENSORS, weight_version="v2", flush_cache=False), "v2"),
        (io.UpdateWeightsFromIPCReqInput(**IPC), None),
        (io.UpdateWeightsFromIPCReqInput(**IPC, weight_version="v2"), "v2"),
        (io.UpdateWeightVersionReqInput(new_version="v2"), "v2"),
        (io.BeginWeightUpdateReqInput(), None),
        (io.EndWeightUpdateReqInput(), None),
        (io.ResumeMemoryOccupationReqInput(), None),
        (io.ResumeMemoryOccupationReqInput(tags=["weights"]), None),
        (io.CheckWeightsReqInput(action="reset_tensors"), None),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, io.BaseReq) else str(v),
)
def test_kind_stale_after_weight_update(request_: Any, version: str | None) -> None:
    assert weight_change(request_) == WeightChange(version)


def test_every_listed_request_is_tested_above() -> None:
    marks = test_kind_stale_after_weight_update.pytestmark  # type: ignore[attr-defined]
    (mark,) = (m for m in marks if m.name == "parametrize")
    assert {type(request).__name__ for request, _ in mark.args[1]} == set(control._WEIGHTS)


@pytest.mark.parametrize(
    "request_",
    [
        io.CheckWeightsReqInput(),
        io.CheckWeightsReqInput(action="compare"),
        io.GetWeightsByNameReqInput(name="lm_head"),
        io.ReleaseMemoryOccupationReqInput(),
        io.DestroyWeightsUpdateGroupReqInput(),
        io.FlushCacheReqInput(),
        io.AbortReq(rid="r"),
        io.LoadLoRAAdapterReqInput(lora_name="a", lora_path="p", lora_id="1"),
        io.UpdateWeightFromDiskReqOutput(success=True, message=""),
    ],
    ids=lambda v: type(v).__name__,
)
def test_what_leaves_the_weights_alone(request_: Any) -> None:
    assert weight_change(request_) is None


def test_the_only_other_check_of_weights_writes_nothing() -> None:
    """``reset_tensors`` overwrites weights; a new action of the checker would have to be looked at."""
    source = source_of("sglang.srt.utils.weight_checker")
    actions = set(re.findall(r'action == "(\w+)"', source))
    assert actions == {"snapshot", "reset_tensors", "compare", "checksum"}


def load(lora_id: str | None) -> Any:
    return io.LoadLoRAAdapterReqInput(lora_name="a", lora_path="p", lora_id=lora_id)


def unload(lora_id: str | None) -> Any:
    return io.UnloadLoRAAdapterReqInput(lora_name="a", lora_id=lora_id)


def load_tensors(lora_id: str | None) -> Any:
    return io.LoadLoRAAdapterFromTensorsReqInput(
        lora_name="a", config_dict={}, serialized_named_tensors=[b""], lora_id=lora_id
    )


def test_without_an_adapter_the_scope_is_empty() -> None:
    adapters = Adapters()
    adapters.apply(load("x"))
    assert adapters.scope(None) == adapters.scope("") == ""


@pytest.mark.parametrize("make", [load, unload, load_tensors])
def test_each_change_of_an_adapter_is_a_scope_of_its_own(make: Any) -> None:
    adapters = Adapters()
    seen = [adapters.scope("x")]
    for _ in range(3):
        adapters.apply(make("x"))
        seen.append(adapters.scope("x"))
        assert adapters.scope("x") == seen[-1], "until the next change"
    assert len(set(seen)) == 4 and adapters.scope("y") == "y"


def test_loading_an_adapter_again_never_brings_its_old_scope_back() -> None:
    adapters = Adapters()
    seen = set()
    for make in (load, unload, load_tensors, unload, load):
        adapters.apply(make("x"))
        adapters.apply(make("y"))
        seen |= {adapters.scope("x"), adapters.scope("y")}
    assert len(seen) == 10


def test_a_request_without_an_id_changes_no_scope() -> None:
    adapters = Adapters()
    for make in (load, unload, load_tensors):
        adapters.apply(make(None))
    adapters.apply(io.FlushCacheReqInput())
    assert adapters.scope("x") == "x"
