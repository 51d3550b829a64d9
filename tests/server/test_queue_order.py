"""With ``--schedule-policy lpm`` the server serves first what costs least to finish."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from tests.server.workload import (
    assert_all_back,
    prompt,
    running,
    send,
    tiny_model,
    tiny_server,
    wait_until,
    waiting,
)

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

TOKENS = 400


def test_less_to_compute_goes_first_not_what_has_matched_more(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    flags = ["--schedule-policy", "lpm", "--max-running-requests", "1"]
    with tiny_server(tiny_model(tmp_path_factory), tmp_path, *flags, device_tokens=4096) as server:
        server.generate(input_ids=prompt(1, TOKENS), max_new_tokens=1)
        blocker = {"input_ids": prompt(2, 40), "sampling_params": {"max_new_tokens": 600, "ignore_eos": True}}
        connections = [send(server, blocker)]
        wait_until("one runs", lambda: running(server) == 1)
        bodies = {
            "matched most": prompt(1, TOKENS + 600),
            "matched nothing, longer": prompt(3, 500),
            "short": prompt(4, 80),
        }
        ended: list[str] = []
        threads = []
        for number, (name, ids) in enumerate(bodies.items(), 1):
            connections.append(send(server, {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}}))

            def read(name: str = name, number: int = number) -> None:
                answer = json.loads(connections[number].getresponse().read())
                assert answer["meta_info"]["completion_tokens"] == 1, answer
                ended.append(name)

            threads.append(threading.Thread(target=read))
            threads[-1].start()
            wait_until(f"{number} wait", lambda number=number: waiting(server) == number)
        for thread in threads:
            thread.join(120)
        connections[0].getresponse().read()
        for connection in connections:
            connection.close()
        assert ended == ["short", "matched nothing, longer", "matched most"]
        assert_all_back(server)
