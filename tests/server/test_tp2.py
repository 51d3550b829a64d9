"""Two TP ranks on one machine, each with its half of every page."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.releases import only_on
from tests.server.harness import SGLangServer
from tests.server.workload import (
    details,
    fill_device,
    generate_all,
    moved,
    prompt,
    reusable,
    tiny_model,
    tiny_server,
)

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores"),
]

# 0.5.17 starts NCCL for tensor parallelism, on a CPU too.
only_on("0.5.23")

PAGE = 16


@pytest.fixture(scope="module", params=["write-through", "write-back"])
def running_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SGLangServer]:
    flags = ["--tp", "2", "--chunked-prefill-size", "256", "--hicache-ext-write-policy", request.param]
    with tiny_server(
        tiny_model(tmp_path_factory),
        tmp_path_factory.mktemp("tp2"),
        *flags,
        page_size=PAGE,
        env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    ) as server:
        yield server


def test_device_and_host_hits_answer_alike(server: SGLangServer) -> None:
    assert len(server.schedulers()) == 2
    ids = prompt(1, 610)
    cold = server.generate(input_ids=ids, max_new_tokens=6, logprobs=True)
    on_device = server.generate(input_ids=ids, max_new_tokens=6, logprobs=True)
    fill_device(server, 1)
    on_host = server.generate(input_ids=ids, max_new_tokens=6, logprobs=True)
    reused = reusable(610, PAGE)
    assert details(cold) == (0, 0)
    assert (details(on_device), details(on_host)) == ((reused, 0), (0, reused))
    assert cold.output_ids == on_device.output_ids == on_host.output_ids
    # The same kernels on the same bytes: equal to the last bit, if the copies are.
    assert on_device.logprobs == on_host.logprobs
    assert moved(server, "host_to_device") > 0


def test_concurrent_churn_keeps_the_ranks_together(server: SGLangServer) -> None:
    bodies = [{"input_ids": prompt(30 + i % 8, 400 + 10 * i), "max_new_tokens": 4} for i in range(16)]
    first = generate_all(server, bodies, threads=4)
    second = generate_all(server, bodies, threads=4)
    assert [a.output_ids for a in first] == [a.output_ids for a in second]
    assert sum(details(answer)[1] for answer in second) > 0


def test_flush_empties_both_ranks(server: SGLangServer) -> None:
    ids = prompt(2, 400)
    server.generate(input_ids=ids, max_new_tokens=2)
    server.flush()
    assert server.generate(input_ids=ids, max_new_tokens=2).cached_tokens == 0
