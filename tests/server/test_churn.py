"""Two thousand short requests through pools that hold a fraction of them; a minority is aborted."""

from __future__ import annotations

import random
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server.harness import SGLangServer
from tests.server.workload import (
    abort,
    assert_all_back,
    details,
    moved,
    prompt,
    running,
    send,
    tiny_model,
    tiny_server,
    wait_until,
    waiting,
)

pytestmark = [pytest.mark.server, pytest.mark.timeout(1200)]

REQUESTS = 2000
THREADS = 8
PREFIXES = 24
DEVICE, HOST = 1024, 4096


def test_two_thousand_requests_leave_nothing(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    flags = ["--chunked-prefill-size", "128", "--max-running-requests", str(THREADS)]
    with tiny_server(
        tiny_model(tmp_path_factory),
        tmp_path,
        *flags,
        page_size=16,
        device_tokens=DEVICE,
        host_tokens=HOST,
        check_every=0,
        eviction_policy="cost",
    ) as server:
        resident, host_hits = _churn(server)
        wait_until("nothing runs", lambda: running(server) == 0 and waiting(server) == 0)
        assert_all_back(server)
        assert host_hits > 0
        assert moved(server, "host_to_device") > 0
        assert server.metric("hicache_ext_evicted_tokens_total", tier="device") > 10 * DEVICE
        assert server.metric("hicache_ext_evicted_tokens_total", tier="host") > HOST
        second, last = (statistics.fmean(_quarter(resident, number)) for number in (1, 3))
        assert last - second <= max(0.03 * second, 30e6), f"RSS grew from {second:.0f} to {last:.0f} bytes"


def _churn(server: SGLangServer) -> tuple[list[int], int]:
    """Resident bytes after every 20th request, and the number of answers that used the host."""
    resident: list[int] = []
    host_hits = 0
    answers: dict[int, list[int]] = {}
    done = 0
    lock = threading.Lock()

    def one(number: int) -> None:
        nonlocal done, host_hits
        rng = random.Random(number)
        which = rng.randrange(PREFIXES)
        ids = prompt(which, rng.choice([96, 200, 330]))
        kind = rng.random()
        if kind < 0.9:
            own = rng.randrange(3) * 25
            answer = server.generate(input_ids=[*ids, *prompt(5000 + number, own)], max_new_tokens=3)
            assert len(answer.output_ids) == 3
            with lock:
                host_hits += details(answer)[1] > 0
                if own == 0:
                    # The same prompt has one answer, wherever its KV came from.
                    key = which * 1000 + len(ids)
                    assert answers.setdefault(key, answer.output_ids) == answer.output_ids
        else:
            rid = f"churn-{number}"
            sampling = {"max_new_tokens": 40, "temperature": 0.0, "ignore_eos": True}
            client = send(server, {"input_ids": ids, "sampling_params": sampling, "rid": rid})
            time.sleep(rng.random() * 0.2)
            if kind < 0.97:
                abort(server, rid)
            client.close()
        with lock:
            done += 1
            if done % 20 == 0:
                resident.append(server.rss_bytes())

    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(one, range(REQUESTS)):
            pass
    return resident, host_hits


def _quarter(values: list[int], number: int) -> list[int]:
    size = len(values) // 4
    return values[number * size : (number + 1) * size]
