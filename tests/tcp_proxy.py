"""A TCP proxy in a process of its own that can be slow, late, silent or gone.

    with Proxy("127.0.0.1:50051") as proxy:
        connect(proxy.address)
        proxy.set(bytes_per_s=10e6, delay_s=0.05)
        proxy.set(frozen=True)

Limits count for each direction of all connections together. A frozen proxy accepts connections and passes
nothing on; one that refuses closes what there is and accepts none.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any

from tests.conftest import ROOT

_PIECE = 1 << 16


@dataclass(frozen=True)
class Link:
    bytes_per_s: float | None = None
    delay_s: float = 0.0
    """One way."""
    frozen: bool = False
    refuse: bool = False


class Proxy:
    """Listens on a free port of ``listen``; ``command_prefix`` runs it elsewhere, such as on another host."""

    def __init__(self, target: str, listen: str = "127.0.0.1", command_prefix: tuple[str, ...] = ()) -> None:
        self.link = Link()
        self._process = subprocess.Popen(
            [*command_prefix, sys.executable, "-P", "-m", "tests.tcp_proxy", listen, target],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT)},
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.address = f"{listen}:{self.port}"

    def set(self, **fields: Any) -> None:
        """Change fields of ``Link``; counts when this returns."""
        self.link = replace(self.link, **fields)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(self.link)) + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Server:
    def __init__(self, target: str) -> None:
        self.host, _, port = target.rpartition(":")
        self.port = int(port)
        self.link = Link()
        self.changed = asyncio.Event()
        self.free_at = [0.0, 0.0]
        self.writers: set[asyncio.StreamWriter] = set()

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other: asyncio.StreamWriter | None = None
        self.writers.add(writer)
        try:
            if self.link.refuse:
                return
            answers, other = await asyncio.open_connection(self.host, self.port)
            self.writers.add(other)
            await asyncio.gather(self._pass(reader, other, 0), self._pass(answers, writer, 1))
        except OSError:
            pass
        finally:
            for one in (writer, other):
                if one is not None:
                    self.writers.discard(one)
                    one.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: int) -> None:
        line: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)

        async def deliver() -> None:
            while True:
                due, piece = await line.get()
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                while self.link.frozen:
                    self.changed.clear()
                    await self.changed.wait()
                if not piece:
                    with suppress(OSError):
                        writer.write_eof()
                    return
                writer.write(piece)
                await writer.drain()

        delivery = asyncio.create_task(deliver())
        try:
            piece = b"-"
            while piece:
                piece = await reader.read(_PIECE)
                now = time.monotonic()
                if self.link.bytes_per_s is not None:
                    start = max(now, self.free_at[direction])
                    self.free_at[direction] = start + len(piece) / self.link.bytes_per_s
                    await asyncio.sleep(self.free_at[direction] - now)
                await line.put((time.monotonic() + self.link.delay_s, piece))
            await delivery
        finally:
            delivery.cancel()

    async def control(self) -> None:
        """One line of JSON after the other on standard input."""
        loop = asyncio.get_running_loop()
        while text := await loop.run_in_executor(None, sys.stdin.readline):
            self.link = Link(**json.loads(text))
            self.changed.set()
            if self.link.refuse:
                for writer in list(self.writers):
                    writer.transport.abort()
            print("done", flush=True)


async def _main(listen: str, target: str) -> None:
    made = _Server(target)
    server = await asyncio.start_server(made.connection, listen, 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await made.control()


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:3]))
