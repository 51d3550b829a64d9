"""Starts the real SGLang server for a test, talks to it and makes sure that nothing of it is left.

with SGLangServer(model_path, max_total_tokens=2048) as server:
    answer = server.generate(text="The capital of France is", max_new_tokens=8)
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import requests
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

# Gauges of the extension that must be zero on an idle server whose caches were flushed.
HELD_STATE = re.compile(r"^hicache_ext_(pages|open_tickets|waiting_requests)$")


class ServerError(Exception):
    """The server did not start, died, or gave an error; the message ends with the tail of its log."""


@dataclass(frozen=True)
class Generation:
    """One answer of `/generate`."""

    text: str
    """Empty if the server runs without a tokenizer."""
    output_ids: list[int]
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that came from a cache of any tier."""
    logprobs: list[float]
    """Of the output tokens; empty unless asked for."""
    raw: dict[str, Any]


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def cpu_args() -> list[str]:
    """Flags that make the server run on the CPU."""
    return ["--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph"]


@dataclass
class SGLangServer:
    """A server process on 127.0.0.1 and its HTTP interface; use it as a context manager.

    `args` go to `sglang.launch_server` after the defaults, so they win. `env` is added to this process's
    environment; a value of None removes a variable. Times are seconds.
    """

    model: Path | str
    args: Sequence[str] = ()
    env: dict[str, str | None] = field(default_factory=dict)
    max_total_tokens: int = 4096
    """Size of the device pool, tokens."""
    port: int = field(default_factory=free_port)
    log_path: Path | None = None
    """Where stdout and stderr go; by default a temporary file that goes with the server unless it failed."""
    start_timeout: float = 240.0
    request_timeout: float = 240.0
    cpu: bool = True
    """False leaves the device to SGLang."""
    admin_key: str | None = None
    """Some of SGLang's endpoints exist only with one; sent with every request."""

    _process: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)
    _scratch: Path | None = field(default=None, init=False, repr=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        if self.log_path is None:
            raise ServerError("the server was not started")
        return self.log_path

    def command(self) -> list[str]:
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(self.model)]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--max-total-tokens", str(self.max_total_tokens), "--mem-fraction-static", "0.3"]
        command += ["--enable-metrics", "--enable-cache-report", "--skip-server-warmup"]
        command += ["--random-seed", "0"]
        if self.admin_key is not None:
            command += ["--admin-api-key", self.admin_key]
        if self.cpu:
            command += cpu_args()
        return [*command, *self.args]

    def environment(self) -> dict[str, str]:
        result = dict(os.environ)
        # The checkout's triton_kernels/ must not stand in for SGLang's package of that name.
        result["PYTHONSAFEPATH"] = "1"
        result["PYTHONUNBUFFERED"] = "1"
        if self.cpu:
            result["SGLANG_PLATFORM"] = "hicache_ext_cpu"
            result.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
            # Spinning OpenMP threads of one server starve whatever else runs on a small machine.
            result.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        for name, value in self.env.items():
            if value is None:
                result.pop(name, None)
            else:
                result[name] = value
        return result

    # --- life cycle ---

    def start(self) -> SGLangServer:
        """Start the process and wait until it answers; ServerError with the end of the log if it does not."""
        if self._process is not None:
            raise ServerError("the server was started already")
        self._scratch = Path(tempfile.mkdtemp(prefix="hicache-ext-server-"))
        if self.log_path is None:
            self.log_path = self._scratch / "server.log"
        with self.log_path.open("wb") as log:
            # A session of its own: its process group holds all of its workers and nothing else.
            self._process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment(),
                cwd=self._scratch,
                start_new_session=True,
            )
        try:
            self.wait_ready()
        except BaseException:
            self.stop(keep_log=True)
            raise
        return self

    def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until `/health` answers 200; ServerError if the process ends or time runs out first."""
        limit = self.start_timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            code = self._running().poll()
            if code is not None:
                raise ServerError(f"the server ended with code {code} while starting\n{self.log_tail()}")
            try:
                if requests.get(f"{self.url}/health", timeout=20).status_code == 200:
                    return
            except requests.RequestException:
                pass
            time.sleep(0.25)
        raise ServerError(f"the server did not answer within {limit:.0f} s\n{self.log_tail()}")

    def stop(self, grace: float = 20.0, keep_log: bool = False) -> None:
        """End every process of the server: ask it, after `grace` seconds kill it. Safe to call again."""
        process = self._process
        if process is not None:
            # To the main process only: it takes a worker that ends on its own for a crash to be diagnosed.
            process.terminate()
            if not self._wait_gone(grace):
                self._signal_group(signal.SIGKILL)
                self._wait_gone(10.0)
            process.wait(timeout=10)
            self._process = None
        if self._scratch is not None and not keep_log:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def kill(self) -> None:
        """End every process at once, as a crash of the machine would."""
        self._signal_group(signal.SIGKILL)
        self.stop(grace=0.0, keep_log=True)

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def __enter__(self) -> SGLangServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self.log_path is not None:
            print(f"--- end of the server's log, {self.log_path} ---\n{self.log_tail()}")
        self.stop(keep_log=kind is not None)

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log_text().splitlines()[-lines:])

    # --- requests ---

    def generate(
        self,
        text: str | None = None,
        input_ids: Sequence[int] | None = None,
        max_new_tokens: int = 16,
        logprobs: bool = False,
        ignore_eos: bool = True,
        sampling: dict[str, Any] | None = None,
        **fields: Any,
    ) -> Generation:
        """Ask `/generate` at temperature 0; `sampling` and `fields` are merged into the request."""
        if (text is None) == (input_ids is None):
            raise ValueError("give either text or input_ids")
        body: dict[str, Any] = {
            "sampling_params": {
                "temperature": 0.0,
                "max_new_tokens": max_new_tokens,
                "ignore_eos": ignore_eos,
                **(sampling or {}),
            },
            "return_logprob": logprobs,
            **fields,
        }
        if text is not None:
            body["text"] = text
        else:
            body["input_ids"] = list(input_ids or ())
        raw = self.post("/generate", body)
        info = raw["meta_info"]
        return Generation(
            text=raw.get("text", ""),
            output_ids=list(raw["output_ids"]),
            prompt_tokens=info["prompt_tokens"],
            cached_tokens=info["cached_tokens"],
            logprobs=[entry[0] for entry in info.get("output_token_logprobs") or ()],
            raw=raw,
        )

    def chat(self, messages: Sequence[dict[str, str]], max_tokens: int = 32, **fields: Any) -> dict[str, Any]:
        """Ask `/v1/chat/completions` at temperature 0; returns the response."""
        body = {"model": "default", "messages": list(messages), "temperature": 0.0, "max_tokens": max_tokens}
        return self.post("/v1/chat/completions", {**body, **fields})

    def flush(self, timeout: float = 30.0) -> None:
        """Empty the caches; waits for running requests up to `timeout`, then ServerError."""
        response = self._request("POST", "/flush_cache", params={"timeout": timeout}, timeout=timeout + 30)
        if response.status_code != 200:
            raise ServerError(f"flush_cache answered {response.status_code}: {response.text.strip()}")

    def storage_backend(self, method: str, **options: Any) -> requests.Response:
        """SGLang's endpoint that attaches (PUT) and detaches (DELETE) storage; needs an `admin_key`."""
        return self._request(method, "/hicache/storage-backend", **options)

    def server_info(self) -> dict[str, Any]:
        return self.get("/server_info")

    def metrics(self) -> dict[str, float]:
        """Samples of `/metrics` by name, summed over their labels.

        SGLang sets its gauges when it runs a batch: they lag behind a flush. `loads()` does not.
        """
        result: dict[str, float] = {}
        for sample in self.samples():
            result[sample.name] = result.get(sample.name, 0.0) + sample.value
        return result

    def samples(self) -> list[Sample]:
        """All samples of `/metrics`."""
        return [sample for family in self._metric_families() for sample in family.samples]

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of that name that carry these labels; 0 if there is none."""
        return sum(
            sample.value
            for sample in self.samples()
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def loads(self) -> list[dict[str, Any]]:
        """What each scheduler holds right now; `num_used_tokens` counts slots that are in use or locked."""
        return list(self.get("/v1/loads")["loads"])

    def get(self, path: str, **options: Any) -> Any:
        return self._json(self._request("GET", path, **options))

    def post(self, path: str, body: dict[str, Any], **options: Any) -> Any:
        return self._json(self._request("POST", path, json=body, **options))

    # --- what the server holds ---

    def rss_bytes(self) -> int:
        """Resident memory of the scheduler processes together, all TP ranks, bytes."""
        total = sum(process.memory_info().rss for process in self.schedulers())
        if total == 0:
            raise ServerError("the server has no scheduler process")
        return total

    def schedulers(self) -> list[psutil.Process]:
        """The scheduler processes, one for each rank."""
        children = psutil.Process(self._running().pid).children(recursive=True)
        return [child for child in children if "sglang::scheduler" in " ".join(child.cmdline())]

    def assert_no_leaks(self, timeout: float = 15.0) -> None:
        """Flush, then assert that no slot, request or extension state is held by an idle server."""
        self.flush()
        held = wait_for(lambda: not self.held_state(), timeout, lambda: self.held_state())
        assert not held, f"held by the idle server after a flush: {held}"
        assert self.alive(), f"the server died\n{self.log_tail()}"

    def held_state(self) -> dict[str, float]:
        """Counts that are not zero though they must be once the server is idle and flushed."""
        held: dict[str, float] = {}
        for load in self.loads():
            for name in ("num_used_tokens", "num_running_reqs", "num_waiting_reqs"):
                if load[name]:
                    held[f"{name}[{load['dp_rank']}]"] = load[name]
        for family in self._metric_families():
            for sample in family.samples:
                if family.type == "gauge" and HELD_STATE.match(sample.name) and sample.value:
                    held[sample.name] = held.get(sample.name, 0.0) + sample.value
        return held

    # --- plumbing ---

    def _metric_families(self) -> list[Any]:
        return list(text_string_to_metric_families(self._request("GET", "/metrics").text))

    def _request(self, method: str, path: str, **options: Any) -> requests.Response:
        options.setdefault("timeout", self.request_timeout)
        if self.admin_key is not None:
            options.setdefault("headers", {"Authorization": f"Bearer {self.admin_key}"})
        try:
            return requests.request(method, self.url + path, **options)
        except requests.RequestException as error:
            raise ServerError(f"{method} {path} failed: {error}\n{self.log_tail()}") from error

    def _json(self, response: requests.Response) -> Any:
        if response.status_code != 200:
            raise ServerError(f"{response.url} answered {response.status_code}: {response.text[:2000]}")
        return response.json()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerError("the server is not running")
        return self._process

    def _wait_gone(self, patience: float) -> bool:
        deadline = time.monotonic() + patience
        while self._signal_group(0):
            self._running().poll()
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        return True

    def _signal_group(self, sig: int) -> bool:
        """Send `sig` to the server's process group (0 only asks); False if no process of it is left."""
        if self._process is None:
            return False
        try:
            os.killpg(self._process.pid, sig)
        except ProcessLookupError:
            return False
        return True


def wait_for(
    condition: Callable[[], bool],
    timeout: float,
    otherwise: Callable[[], Any] = lambda: None,
    step: float = 0.2,
) -> Any:
    """Poll `condition` until it holds and return None, or return `otherwise()` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= deadline:
            return otherwise()
        time.sleep(step)
    return None
