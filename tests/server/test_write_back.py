"""Write-back: the host gets a page when the device gives it up, not before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.harness import SGLangServer
from tests.server.workload import (
    TOKEN_BYTES,
    details,
    fill_device,
    generate_all,
    moved,
    pages,
    prompt,
    reusable,
    tiny_model,
    tiny_server,
)

pytestmark = pytest.mark.server

PAGE = 16


@pytest.fixture(scope="module")
def running_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    flags = ["--chunked-prefill-size", "256", "--hicache-ext-write-policy", "write-back"]
    with tiny_server(
        tiny_model(tmp_path_factory), tmp_path_factory.mktemp("write-back"), *flags, page_size=PAGE
    ) as server:
        yield server


def test_nothing_is_written_while_the_device_has_room(server: SGLangServer) -> None:
    before = moved(server, "device_to_host")
    for seed in range(3):
        server.generate(input_ids=prompt(seed, 500), max_new_tokens=4)
        server.generate(input_ids=prompt(seed, 500), max_new_tokens=4)
    assert moved(server, "device_to_host") == before
    assert pages(server, "host") == 0


def test_evicted_pages_come_back_from_the_host(server: SGLangServer) -> None:
    written = moved(server, "device_to_host")
    lost = server.metric("hicache_ext_lost_tokens_total")
    sessions = [prompt(10 + seed, 620) for seed in range(6)]
    first = [server.generate(input_ids=ids, max_new_tokens=4) for ids in sessions]
    for ids, cold in zip(sessions, first, strict=True):
        again = server.generate(input_ids=ids, max_new_tokens=4)
        assert again.cached_tokens == sum(details(again)) == reusable(620, PAGE)
        assert details(again)[1] > 0
        assert again.output_ids == cold.output_ids
    # The metrics are published some steps later than the answer.
    server.generate(input_ids=[5], max_new_tokens=1)
    fill_device(server, 1)
    assert moved(server, "device_to_host") - written >= 6 * 600 * TOKEN_BYTES
    assert server.metric("hicache_ext_lost_tokens_total") == lost


def test_evictions_amid_concurrent_requests(server: SGLangServer) -> None:
    bodies = [{"input_ids": prompt(30 + i % 8, 400 + 10 * i), "max_new_tokens": 8} for i in range(24)]
    first = generate_all(server, bodies, threads=6)
    second = generate_all(server, bodies, threads=6)
    assert [a.output_ids for a in first] == [a.output_ids for a in second]
    assert sum(details(answer)[1] for answer in second) > 0


def test_working_set_larger_than_the_host(server: SGLangServer) -> None:
    sessions = [prompt(60 + seed, 900) for seed in range(16)]
    first = [server.generate(input_ids=ids, max_new_tokens=2).output_ids for ids in sessions]
    for number in reversed(range(len(sessions))):
        again = server.generate(input_ids=sessions[number], max_new_tokens=2)
        assert again.output_ids == first[number]
    assert server.metric("hicache_ext_evicted_tokens_total", tier="host") > 0
