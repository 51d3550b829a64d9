"""Weight updates on the real server, in every way that SGLang offers on a CPU.

None of them but one is told to flush: SGLang itself would go on using the old KV then. The truth for the new
weights is the same prompt under a `cache_salt` that nobody used before, so that all of it is computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.server.harness import Generation, SGLangServer, free_port
from tests.server.workload import (
    Stream,
    details,
    fill_device,
    prompt,
    reusable,
    tiny_model,
    tiny_server,
    wait_until,
)

pytestmark = pytest.mark.server

PAGE = 16
GROUP = "updates"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models that differ in all weights."""
    return [tiny_model(tmp_path_factory, seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def running_server(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    with tiny_server(models[0], tmp_path_factory.mktemp("weights"), page_size=PAGE) as started:
        yield started


class Weights:
    """Which weights the server has, and the ways to change them to the other ones."""

    def __init__(self, server: SGLangServer, models: list[Path]) -> None:
        self.server = server
        self.models = models
        self.now = 0
        self.to(0)

    def to(self, index: int) -> None:
        self._post("/update_weights_from_disk", model_path=str(self.models[index]))
        self.now = index

    def from_disk(self, **fields: Any) -> None:
        self.now = 1 - self.now
        fields = {"model_path": str(self.models[self.now]), "flush_cache": False, **fields}
        self._post("/update_weights_from_disk", **fields)

    def from_disk_with_flush(self) -> None:
        self.from_disk(flush_cache=True)

    def from_disk_with_version(self) -> None:
        self.from_disk(weight_version="step-7")

    def from_tensor(self) -> None:
        import torch
        from sglang.srt.utils import MultiprocessingSerializer

        self.now = 1 - self.now
        tensors = list(self._tensors().items())
        # Descriptors are passed between relatives only; names of shared memory work for any process.
        torch.multiprocessing.set_sharing_strategy("file_system")
        data = MultiprocessingSerializer.serialize(tensors, output_str=True)
        with self._session():
            self._post("/update_weights_from_tensor", serialized_named_tensors=[data], flush_cache=False)

    def from_distributed(self) -> None:
        """This process broadcasts, as a trainer would."""
        import torch
        from sglang.srt.utils import init_custom_process_group

        self.now = 1 - self.now
        tensors, port = self._tensors(), free_port()
        joined: list[Any] = []
        join = {"world_size": 2, "group_name": GROUP, "backend": "gloo"}
        address = f"tcp://127.0.0.1:{port}"
        trainer = threading.Thread(
            target=lambda: joined.append(init_custom_process_group(init_method=address, rank=0, **join))
        )
        trainer.start()
        self._post(
            "/init_weights_update_group",
            master_address="127.0.0.1",
            master_port=port,
            rank_offset=1,
            **join,
        )
        trainer.join(30)
        sender = threading.Thread(
            target=lambda: [torch.distributed.broadcast(t, 0, group=joined[0]) for t in tensors.values()]
        )
        with self._session():
            sender.start()
            self._post(
                "/update_weights_from_distributed",
                names=list(tensors),
                dtypes=["float32"] * len(tensors),
                shapes=[list(t.shape) for t in tensors.values()],
                group_name=GROUP,
                flush_cache=False,
            )
            sender.join(30)
        self._post("/destroy_weights_update_group", group_name=GROUP)

    def in_a_session_without_loads(self) -> None:
        """Weights may be written by RDMA in between; here nothing is."""
        with self._session():
            pass

    def by_version(self) -> None:
        self._post("/update_weight_version", new_version="step-8", abort_all_requests=False)

    def _tensors(self) -> dict[str, Any]:
        from safetensors.torch import load_file

        return load_file(self.models[self.now] / "model.safetensors")

    def _session(self) -> _Session:
        return _Session(self._post)

    def _post(self, path: str, **body: Any) -> None:
        answer = requests.post(self.server.url + path, json=body, timeout=120)
        assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text}"


class _Session:
    def __init__(self, post: Callable[..., None]) -> None:
        self.post = post

    def __enter__(self) -> None:
        self.post("/begin_weight_update")

    def __exit__(self, *_: object) -> None:
        self.post("/end_weight_update")


WAYS = {
    "disk": Weights.from_disk,
    "disk, flushed": Weights.from_disk_with_flush,
    "disk, with a version": Weights.from_disk_with_version,
    "tensor": Weights.from_tensor,
    "distributed": Weights.from_distributed,
    "session": Weights.in_a_session_without_loads,
    "version only": Weights.by_version,
}


def ask(server: SGLangServer, ids: list[int], **fields: Any) -> Generation:
    return server.generate(input_ids=ids, max_new_tokens=6, **fields)


@pytest.mark.parametrize("way", WAYS)
def test_kind_stale_after_weight_update(way: str, server: SGLangServer, models: list[Path]) -> None:
    weights = Weights(server, models)
    on_host, on_device = prompt(1, 700), prompt(2, 700)
    before = ask(server, on_host)
    fill_device(server, 1)
    before_on_device = ask(server, on_device)
    assert details(ask(server, on_host)) == (0, reusable(700, PAGE))
    fill_device(server, 2)
    assert ask(server, on_device).output_ids == before_on_device.output_ids
    era = server.metric("hicache_ext_era")

    old = weights.now
    WAYS[way](weights)

    for ids, cold_before in ((on_host, before), (on_device, before_on_device)):
        after = ask(server, ids)
        assert after.cached_tokens == 0, "KV of the old weights was reused"
        truth = ask(server, ids, cache_salt=f"{way} {ids[0]}")
        assert truth.cached_tokens == 0 and after.output_ids == truth.output_ids
        assert (after.output_ids != cold_before.output_ids) == (weights.now != old)
        assert ask(server, ids).cached_tokens == reusable(700, PAGE), "the new weights are not cached"
    wait_until("the update shows", lambda: server.metric("hicache_ext_era") > era)


def test_kind_stale_after_weight_update_under_a_running_request(
    server: SGLangServer, models: list[Path]
) -> None:
    """A request that goes on over an update keeps its KV to itself."""
    weights = Weights(server, models)
    ids = prompt(3, 500)
    stream = Stream.open(server, ids, max_new_tokens=200)
    assert stream.next() is not None
    weights._post("/pause_generation", mode="in_place")
    weights.from_disk()
    weights._post("/continue_generation")
    answer = stream.last()
    assert len(answer["output_ids"]) == 200
    again = ask(server, ids + answer["output_ids"])
    assert again.cached_tokens == 0
    truth = ask(server, ids + answer["output_ids"], cache_salt="running")
    assert again.output_ids == truth.output_ids
