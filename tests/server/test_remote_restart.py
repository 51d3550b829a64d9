"""A disk store outlives its server: what was stored before a kill is found and sound afterwards."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from hicache_ext.cli.main import main
from hicache_ext.core.page import PrefixScope, page_identities, root_salt
from hicache_ext.stores.base import Key
from hicache_ext.stores.disk_inspect import DiskInspector, store_folders
from tests.server.harness import ServerError
from tests.server.remote import (
    PAGE,
    HostServer,
    nudge,
    store_hits,
    stored,
    story,
    tiny_remote,
    wait_up,
)
from tests.server.workload import (
    KV_HEADS,
    PATIENCE,
    assert_all_back,
    prompt,
    reusable,
    tiny_model,
    wait_until,
)

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

TOKENS, PROMPTS, THREADS = 610, 40, 4
ENOUGH = 0.95


def keys_in(folder: Path) -> set[Key]:
    return {key for path in store_folders(folder) for key in DiskInspector(path).entries()[0].keys}


def persisted(keys: set[Key], tokens: list[int]) -> int:
    """Leading tokens of a prompt whose pages the store has, with all their head groups."""
    (namespace,) = {key.namespace for key in keys}
    identities = page_identities(
        root_salt(namespace, PrefixScope()), np.array(tokens[: len(tokens) // PAGE * PAGE]), PAGE
    )
    for number, identity in enumerate(identities):
        if not all(Key(namespace, 0, identity, group) in keys for group in range(KV_HEADS)):
            return number * PAGE
    return len(identities) * PAGE


def load(server: HostServer, prompts: list[list[int]], stop: threading.Event) -> None:
    """Requests until the server is gone."""

    def one(number: int) -> None:
        while not stop.is_set():
            try:
                server.generate(input_ids=prompts[number], max_new_tokens=2)
            except ServerError:
                return
            number = (number + THREADS) % len(prompts)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(one, range(THREADS)))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_pages_persisted_before_a_kill_are_hit_again(
    ranks: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model(tmp_path_factory)
    folder = tmp_path / "store"
    urls = [f"file://{folder}?size_gb=0.4"]
    prompts = [prompt(seed, TOKENS) for seed in range(PROMPTS)]
    stop = threading.Event()
    with tiny_remote(model, tmp_path / "first", urls, ranks=ranks, fetch="always") as server:
        wait_up(server)
        clients = threading.Thread(target=load, args=(server, prompts, stop))
        clients.start()
        try:
            half = PROMPTS * TOKENS // 2 * ranks
            wait_until("half of the prompts are stored", lambda: stored(server) >= half, 300)
            server.kill()
        finally:
            stop.set()
            clients.join(60)
    keys = keys_in(folder)
    expected = [min(persisted(keys, tokens), reusable(TOKENS, PAGE)) for tokens in prompts]
    assert sum(expected) >= PROMPTS * TOKENS // 3
    assert main(["store", "verify", f"file://{folder}"]) == 0, capsys.readouterr().out

    with tiny_remote(model, tmp_path / "second", urls, ranks=ranks, fetch="always") as server:
        wait_up(server)
        hit = truth = 0
        for tokens, bound in zip(prompts, expected, strict=True):
            if bound:
                hit += server.generate(input_ids=tokens, max_new_tokens=2).cached_tokens
                truth += bound
        assert hit >= ENOUGH * truth, (hit, truth, story(server))

        def all_from_the_store() -> bool:
            # A server that sleeps when idle publishes its last second with the next request.
            nudge(server)
            return store_hits(server) == hit * ranks

        # Prompts share nothing, and the server has just started.
        wait_until("all hits are counted as hits of the store", all_from_the_store, PATIENCE, step=0.3)
        assert server.metric("hicache_ext_store_refused_pages_total") == 0
        assert_all_back(server)
