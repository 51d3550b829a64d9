"""What the tests of the remote tier share: services and servers on hosts of their own, and chats.

A chat is told in token ids, so that what an infinite cache could have supplied is known exactly.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hicache_ext.stores.mooncake_client import MooncakeSettings, unreachable
from tests.conftest import ROOT
from tests.netns import Host
from tests.server.harness import Generation, SGLangServer, free_port
from tests.server.workload import PATIENCE, prompt, tiny_server, wait_until, whole_pages

PAGE = 16


@dataclass
class HostServer(SGLangServer):
    """A server that runs in a network namespace, if it is given one."""

    host: Host | None = None
    start_timeout: float = 600.0

    def __enter__(self) -> HostServer:
        super().__enter__()
        return self

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.port}"

    @property
    def address(self) -> str:
        return "127.0.0.1" if self.host is None else self.host.address

    def command(self) -> list[str]:
        command = super().command()
        if self.host is None:
            return command
        command[command.index("--host") + 1] = self.address
        return self.host.command(command)


def tiny_remote(
    model: Path,
    folder: Path,
    urls: Sequence[str],
    *flags: str,
    host: Host | None = None,
    ranks: int = 1,
    device_tokens: int = 2048,
    host_tokens: int = 4096,
    fetch: str = "auto",
) -> HostServer:
    """A server of the tiny model with stores, not started; with none it has no remote tier."""
    folder.mkdir(exist_ok=True)
    remote = ("--hicache-ext-remote", *urls) if urls else ()
    tp = ("--tp", str(ranks)) if ranks > 1 else ()
    # Another host has no route to the address of this machine's name.
    env: dict[str, str | None] = {"GLOO_SOCKET_IFNAME": "lo"} if host is not None else {}
    if ranks > 1:
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank) for rank in range(ranks))
    plain = tiny_server(
        model,
        folder,
        "--sleep-on-idle",
        *flags,
        *tp,
        *remote,
        page_size=PAGE,
        ranks=ranks,
        device_tokens=device_tokens,
        host_tokens=host_tokens,
        check_every=10,
        fetch=fetch,
        env=env,
    )
    return HostServer(
        plain.model,
        args=plain.args,
        env=plain.env,
        max_total_tokens=plain.max_total_tokens,
        log_path=plain.log_path,
        host=host,
    )


def chat_remote(
    model: Path,
    folder: Path,
    urls: Sequence[str],
    *flags: str,
    host: Host | None = None,
    device_tokens: int = 4096,
    host_gb: float = 0.4,
    extension: bool = True,
    fetch: str = "auto",
    eviction_policy: str = "cost",
) -> HostServer:
    """A server of the chat model with stores, not started."""
    folder.mkdir(exist_ok=True)
    # Two idle schedulers would take both cores of a small machine.
    args = ["--page-size", str(PAGE), "--sleep-on-idle", *flags]
    if extension:
        settings = folder / "hicache-ext.toml"
        settings.write_text(f'fetch = "{fetch}"\neviction_policy = "{eviction_policy}"\n')
        args += ["--enable-hicache-ext", "--hicache-ext-host-gb", f"{host_gb}"]
        args += ["--hicache-ext-config", str(settings)]
    if urls:
        args += ["--hicache-ext-remote", *urls]
    return HostServer(
        model,
        args=args,
        env={"GLOO_SOCKET_IFNAME": "lo"} if host is not None else {},
        max_total_tokens=device_tokens,
        log_path=folder / "server.log",
        host=host,
    )


@dataclass
class Turn:
    session: int
    round: int
    answer: Generation
    bound: int
    """Prompt tokens that one server with infinite memory would have had."""
    seconds: float


@dataclass
class Chats:
    """Sessions that grow by a question and an answer a round; ``first`` and ``more`` in tokens."""

    sessions: int
    first: int
    more: int
    new_tokens: int
    salt: str | None = None
    """Chats with another salt share nothing."""
    turns: list[Turn] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._texts: list[list[int]] = [[] for _ in range(self.sessions)]

    def play_round(self, number: int, servers: Sequence[SGLangServer]) -> list[Turn]:
        """All sessions one after the other, each on the next server of the list; a failed request raises."""
        made = []
        for session in range(self.sessions):
            server = servers[(session + number) % len(servers)]
            made.append(self.play(session, number, server))
        self.turns += made
        return made

    def play(self, session: int, number: int, server: SGLangServer) -> Turn:
        text = self._texts[session]
        # The last token that was generated went through no model yet.
        known = max(len(text) - 1, 0)
        text += prompt(10_000 + 100 * session + number, self.more if text else self.first)
        fields: dict[str, Any] = {} if self.salt is None else {"cache_salt": self.salt}
        begin = time.monotonic()
        answer = server.generate(input_ids=text, max_new_tokens=self.new_tokens, **fields)
        seconds = time.monotonic() - begin
        text += answer.output_ids
        bound = whole_pages(min(known, answer.prompt_tokens - 1), PAGE)
        return Turn(session, number, answer, bound, seconds)


def share_of_bound(turns: Sequence[Turn]) -> float:
    """Cached prompt tokens by what an infinite cache would have had."""
    return sum(t.answer.cached_tokens for t in turns) / sum(t.bound for t in turns)


def outputs(turns: Sequence[Turn]) -> list[list[int]]:
    return [turn.answer.output_ids for turn in turns]


def store_hits(server: SGLangServer) -> float:
    """Prompt tokens that came from a store."""
    return server.metric("hicache_ext_hit_tokens_total", tier="store")


def settled_hits(server: SGLangServer) -> float:
    """``store_hits``, with all that the server has done so far."""
    nudge(server)
    time.sleep(0.3)
    nudge(server)
    return store_hits(server)


@dataclass
class InTurns:
    """Two servers that get the same prompts in turns; each goes first every other time.

    TTFT in seconds, one for each prompt, in the same order for both.
    """

    with_store: list[float] = field(default_factory=list)
    without: list[float] = field(default_factory=list)
    equal: int = 0
    """Prompts that both answered alike."""

    def ask(self, prompts: Iterable[list[int]], with_store: SGLangServer, without: SGLangServer) -> None:
        """A failed request raises."""
        pair = [(with_store, self.with_store), (without, self.without)]
        for number, ids in enumerate(prompts):
            answers = []
            for server, times in pair if number % 2 else pair[::-1]:
                begin = time.monotonic()
                answers.append(server.generate(input_ids=ids, max_new_tokens=1).output_ids)
                times.append(time.monotonic() - begin)
            self.equal += answers[0] == answers[1]


def stored(server: SGLangServer) -> float:
    """Tokens, over all ranks."""
    return server.metric("hicache_ext_stored_tokens_total")


def up(server: SGLangServer) -> bool:
    """Whether every rank uses every store."""
    values = [s.value for s in server.samples() if s.name == "hicache_ext_store_up"]
    return bool(values) and all(values)


def attach(server: SGLangServer) -> None:
    """Use the stores again; the server needs an admin key."""
    answer = server.storage_backend("PUT", json={"hicache_storage_backend": "hicache-ext"})
    assert answer.status_code == 200, answer.text


def detach(server: SGLangServer) -> None:
    answer = server.storage_backend("DELETE")
    assert answer.status_code == 200, answer.text


def story(server: SGLangServer) -> dict[str, float]:
    """What the stores did and why not, for the message of a failed test."""
    told: dict[str, float] = {}
    wanted = (
        "missed_tokens",
        "plans_total",
        "store_lookups",
        "unstored",
        "fetched",
        "store_outages",
        "store_up",
    )
    for sample in server.samples():
        name = sample.name.removeprefix("hicache_ext_")
        if sample.value and name.startswith(wanted):
            label = next((sample.labels[k] for k in ("reason", "result", "store") if k in sample.labels), "")
            told[f"{name} {label}"] = told.get(f"{name} {label}", 0.0) + sample.value
    return told


def nudge(server: SGLangServer) -> None:
    """An idle scheduler publishes nothing."""
    server.generate(input_ids=[5], max_new_tokens=2)


def working(server: SGLangServer) -> bool:
    """Whether its stores are in use."""
    nudge(server)
    return up(server)


def think(*servers: SGLangServer, quiet: float = 0.6) -> None:
    """As long as a user reads: until the servers write nothing more to their stores."""

    def counts() -> list[float]:
        for server in servers:
            nudge(server)
        return [stored(server) for server in servers]

    before = counts()
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        time.sleep(quiet)
        now = counts()
        if now == before:
            return
        before = now
    raise AssertionError("the servers go on writing to their stores")


def wait_up(server: SGLangServer, timeout: float = PATIENCE) -> None:
    wait_until("all stores are in use", lambda: working(server), timeout, step=0.3)


def percentile(values: Sequence[float], share: float) -> float:
    return float(np.percentile(np.array(values), 100 * share))


class MooncakeUp:
    """A master with its metadata service, by ``scripts/mooncake_up.sh``; keeps its ports over restarts."""

    def __init__(self, folder: Path, host: Host | None = None, *options: str) -> None:
        self.address = "127.0.0.1" if host is None else host.address
        self.port, self.metadata_port, self.metrics_port = free_port(), free_port(), free_port()
        self._host = host
        self._options = options
        self._log = folder / "mooncake.log"
        self._script: subprocess.Popen[str] | None = None
        self.pid = 0

    @property
    def metadata(self) -> str:
        return f"http://{self.address}:{self.metadata_port}/metadata"

    def url(self, **options: object) -> str:
        """The store's address with further options, such as ``segment_gb=0.2``."""
        extra = "".join(f"&{name}={value}" for name, value in options.items())
        return f"mooncake://{self.address}:{self.port}?metadata={self.metadata}{extra}"

    def start(self) -> MooncakeUp:
        command = ["bash", str(ROOT / "scripts" / "mooncake_up.sh"), "--host", self.address]
        command += ["--port", str(self.port), "--metadata-port", str(self.metadata_port)]
        command += ["--metrics-port", str(self.metrics_port), "--log", str(self._log)]
        command += ["--", *self._options] if self._options else []
        if self._host is not None:
            command = self._host.command(command)
        self._script = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert self._script.stdout is not None
        line = self._script.stdout.readline()
        assert line.startswith("mooncake://"), f"no Mooncake master; see {self._log}"
        children = Path(f"/proc/{self._script.pid}/task/{self._script.pid}/children").read_text().split()
        self.pid = next(int(pid) for pid in children if "mooncake_master" in _command_of(int(pid)))
        return self

    def answers(self) -> bool:
        settings = MooncakeSettings(f"{self.address}:{self.port}", self.metadata)
        return unreachable(settings) is None

    def freeze(self) -> None:
        stop(self.pid)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """As a crash: at once, with all that it knew."""
        if self._script is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._script.pid, signal.SIGKILL)
        self._script.wait()
        self._script = None

    def close(self) -> None:
        self.kill()


class Segment:
    """Another process that gives memory to the store and does nothing else."""

    def __init__(self, master: MooncakeUp, megabytes: int, host: Host | None = None) -> None:
        address = "127.0.0.1" if host is None else host.address
        program = (
            "import sys\n"
            "from mooncake.store import MooncakeDistributedStore\n"
            "store = MooncakeDistributedStore()\n"
            f"code = store.setup('{address}', '{master.metadata}', {megabytes << 20}, 16 << 20, 'tcp', '', "
            f"'{master.address}:{master.port}')\n"
            "print(code, flush=True)\n"
            "sys.stdin.read()\n"
        )
        command = [sys.executable, "-P", "-c", program]
        self.process = subprocess.Popen(
            command if host is None else host.command(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"MC_TCP_BIND_ADDRESS": address},
            text=True,
        )
        self.pid = self.process.pid
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "0\n", "the segment could not be set up"

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def stop(pid: int) -> None:
    """Freeze a process, and wait until all its threads stand still."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")

    def still() -> bool:
        return all((t / "stat").read_text().rsplit(")", 1)[1].split()[0] == "T" for t in tasks.iterdir())

    wait_until("the process has stopped", still, 10.0, step=0.01)


def _command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()
