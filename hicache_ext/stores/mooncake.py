"""A store shared between machines: Mooncake Store, through its own client.

Objects travel straight between the registered buffer and the memory of the server that holds them. The client
reconnects by itself when the master has been away; a client that does not is replaced.

Mooncake has no deadlines: a call that is late goes on in its thread, and its rows are held until it has
returned. Mooncake waits for all parts of a transfer before it reports a failure, so a row is quiet then,
with one exception: after its own limit of 60 s it gives up without stopping the transfer. Such rows are held
until the client has been closed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from hicache_ext.stores.base import (
    GB,
    Holds,
    Key,
    Outcome,
    Rack,
    Rows,
    StoreError,
    StoreStats,
    check_object_bytes,
    nothing,
)
from hicache_ext.stores.mooncake_client import (
    MooncakeSettings,
    Session,
    check_lockable,
    load,
    master_serves,
    unreachable,
)
from hicache_ext.stores.workers import Fate, Workers

logger = logging.getLogger(__name__)

PREFIX = "hx1"
"""First part of every key; changes with the format of objects, so that other formats are never found."""

_NO_HANDLE = -200
_NOT_FOUND = -704
_NOT_READY = -703
_ALREADY_EXISTS = -705
_MISSES = (_NOT_FOUND, _NOT_READY)
# Failures that say that a server cannot be reached, rather than that it declines.
_NO_ANSWER = (-1, -800, -900, -901)
_ENGINE_GIVES_UP_S = 55.0
# One after the other: more in flight at a time are slower over TCP, and a late one then holds few rows.
_CHUNK_BYTES = 16 << 20
_CHECK_S = 1.0
_RETRY_S = 0.5
_REPLACE_AFTER_S = 3.0
_CLOSE_S = 5.0
_PROBE = f"{PREFIX}/probe"


@dataclass(frozen=True)
class _Chunk:
    positions: list[int]
    names: list[str]
    rows: list[int]


@dataclass(frozen=True)
class _Answer:
    codes: list[int]
    seconds: float
    session: Session


class MooncakeStore:
    """Connects in the background once a buffer is registered; until then, and in outages, all is a miss."""

    def __init__(self, settings: MooncakeSettings, object_bytes: int, threads: int = 4) -> None:
        """Raises StoreError if Mooncake cannot work on this machine at all."""
        self.settings = settings
        self.object_bytes = check_object_bytes(object_bytes)
        self._module = load(settings)
        self._lock = threading.Lock()
        self._stats = StoreStats()
        self._holds = Holds()
        self._rack: Rack | None = None
        self._session: Session | None = None
        self._well_at = 0.0
        self._closed = threading.Event()
        self._tried = threading.Event()
        self.problem: str | None = None
        """Why there is no connection, in one line; None if there is one or none has been tried."""
        self._workers = Workers("mooncake store", threads)
        self._keeper = threading.Thread(target=self._keep, name="mooncake keeper", daemon=True)

    def register(self, buffer: np.ndarray) -> None:
        rack = Rack(buffer, self.object_bytes)
        if self.settings.protocol == "rdma":
            check_lockable(rack.nbytes + int(self.settings.segment_gb * GB))
        self._rack = rack
        self._keeper.start()

    def wait_connected(self, deadline: float) -> str | None:
        """Wait for the first attempt to connect. None if it succeeded, or one line with cause and cure."""
        if not self._tried.wait(max(0.0, deadline - time.monotonic())):
            return f"Mooncake at {self.settings.master} has not answered yet"
        return self.problem

    def exists(self, keys: Sequence[Key], deadline: float) -> Outcome:
        return self._simple(keys, deadline, lambda client, names: client.batch_is_exist(names), (1,))

    def get(self, keys: Sequence[Key], rows: Rows, deadline: float) -> Outcome:
        outcome = self._transfer(keys, rows, deadline, self._get_from, self.object_bytes)
        hits = int(outcome.ok.sum())
        with self._lock:
            self._stats.hits += hits
            self._stats.misses += len(keys) - hits
        return outcome

    def put(self, keys: Sequence[Key], rows: Rows, deadline: float, *, hot: bool = False) -> Outcome:
        config = self._module.ReplicateConfig()
        config.replica_num = self.settings.replicas
        if hot:
            config.soft_pin_action = self._module.SoftPinAction.ENABLE
            config.soft_pin_ttl_ms = int(1000 * self.settings.soft_pin_s)
        outcome = self._transfer(keys, rows, deadline, partial(self._put_to, config), 0)
        with self._lock:
            self._stats.stored += int(outcome.ok.sum())
        return outcome

    def remove(self, keys: Sequence[Key], deadline: float) -> Outcome:
        def remove(client: Any, names: list[str]) -> list[int]:
            # By force: a lease from a read must not keep what is to go.
            return client.batch_remove(names, True)

        outcome = self._simple(keys, deadline, remove, (0, _NOT_FOUND))
        with self._lock:
            self._stats.removed += int(outcome.ok.sum())
        return outcome

    def clear(self, namespace: bytes, below_epoch: int, deadline: float) -> bool:
        pattern = older_epochs(namespace, below_epoch)
        if pattern is None:
            return True
        count = self._ask(lambda client: client.remove_by_regex(pattern, True), deadline)
        if count is None or count < 0:
            return False
        with self._lock:
            self._stats.removed += count
        return True

    def ping(self, deadline: float) -> bool:
        codes = self._ask(lambda client: client.batch_is_exist([_PROBE]), deadline)
        return codes is not None and codes[0] >= 0

    def released(self) -> list[int]:
        return self._holds.released()

    def stats(self) -> StoreStats:
        with self._lock:
            return replace(self._stats, held=len(self._holds))

    def close(self) -> None:
        """Takes its memory out of the store: objects that only it held are gone."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._keeper.ident is not None:
            self._keeper.join(_CLOSE_S)
        self._workers.close(_CLOSE_S)
        session, self._session = self._session, None
        if session is not None:
            self._drop(session)

    # Calls

    def _transfer(
        self,
        keys: Sequence[Key],
        rows: Rows,
        deadline: float,
        work: Callable[[Session, _Chunk], list[int] | None],
        good: int,
    ) -> Outcome:
        """Move the first of equal keys; the others share its fate, and for a get its bytes."""
        ok, held = np.zeros(len(keys), np.bool_), np.zeros(len(keys), np.bool_)
        session = self._session
        if session is None or time.monotonic() >= deadline:
            return nothing(len(keys), down=session is None)
        first: dict[Key, int] = {}
        again: list[tuple[int, int]] = []
        for position, key in enumerate(keys):
            original = first.setdefault(key, position)
            if original != position:
                again.append((position, original))
        down = False
        timed = partial(self._timed, session, work, deadline)
        for chunk in self._chunks(list(first), list(first.values()), rows):
            (part,) = self._workers.run(timed, [chunk], deadline)
            answer = part.result
            if part.fate is Fate.RUNNING:
                held[chunk.positions] = True
                self._holds.add(chunk.rows)
                part.when_ended(partial(self._let_go, chunk, part.job.future))
            if answer is None:
                down = True
                self._count(late=len(chunk.positions))
                continue
            down |= self._judge(answer, chunk, good, ok)
            if _is_unfinished(answer):
                failed_rows = [r for r, p in zip(chunk.rows, chunk.positions, strict=True) if not ok[p]]
                held[chunk.positions] = ~ok[chunk.positions]
                self._holds.add(failed_rows)
                session.taint(failed_rows)
        for position, original in again:
            ok[position] = ok[original]
            if good and ok[original] and self._rack is not None:
                self._rack.view(int(rows[position]))[:] = self._rack.view(int(rows[original]))
        return Outcome(ok, held, down=down and not ok.any())

    def _timed(
        self,
        session: Session,
        work: Callable[[Session, _Chunk], list[int] | None],
        deadline: float,
        chunk: _Chunk,
    ) -> _Answer | None:
        """None if the chunk was not started."""
        begin = time.monotonic()
        if begin >= deadline:
            return None
        codes = work(session, chunk)
        return None if codes is None else _Answer(codes, time.monotonic() - begin, session)

    def _get_from(self, session: Session, chunk: _Chunk) -> list[int] | None:
        assert self._rack is not None
        addresses = [self._rack.address(row) for row in chunk.rows]
        sizes = [self.object_bytes] * len(addresses)
        return session.call(lambda client: client.batch_get_into(chunk.names, addresses, sizes))

    def _put_to(self, config: Any, session: Session, chunk: _Chunk) -> list[int] | None:
        assert self._rack is not None
        addresses = [self._rack.address(row) for row in chunk.rows]
        sizes = [self.object_bytes] * len(addresses)
        return session.call(lambda client: client.batch_put_from(chunk.names, addresses, sizes, config))

    def _judge(self, answer: _Answer, chunk: _Chunk, good: int, ok: np.ndarray) -> bool:
        """Enter the results; True if a server did not answer."""
        down = False
        for position, code in zip(chunk.positions, answer.codes, strict=True):
            if code == good or (not good and code == _ALREADY_EXISTS):
                ok[position] = True
            elif code == _NO_HANDLE:
                self._count(declined=1)
            elif code > 0 or (good and code == -600):
                # An object of another size has this name: not ours.
                self._count(corrupt=1)
            elif code not in _MISSES:
                self._count(errors=1)
                down = down or code in _NO_ANSWER
        return down

    def _let_go(self, chunk: _Chunk, future: Any) -> None:
        """A late transfer has ended."""
        answer = None if future.exception() else future.result()
        if answer is not None and _is_unfinished(answer):
            answer.session.taint(chunk.rows)
        else:
            self._holds.done(chunk.rows)

    def _simple(
        self,
        keys: Sequence[Key],
        deadline: float,
        call: Callable[[Any, list[str]], list[int]],
        good: tuple[int, ...],
    ) -> Outcome:
        outcome = nothing(len(keys))
        if not keys:
            return outcome
        names = [name_of(key) for key in keys]
        codes = self._ask(lambda client: call(client, names), deadline)
        if codes is None:
            return replace(outcome, down=True)
        outcome.ok[:] = [code in good for code in codes]
        return replace(outcome, down=not outcome.ok.any() and any(code in _NO_ANSWER for code in codes))

    def _ask(self, call: Callable[[Any], Any], deadline: float) -> Any:
        """The client's answer, or None if there is none in time."""
        session = self._session
        if session is None:
            return None
        (part,) = self._workers.run(lambda _: session.call(call), [None], deadline)
        return part.result

    def _chunks(self, keys: list[Key], positions: list[int], rows: Rows) -> list[_Chunk]:
        size = max(1, _CHUNK_BYTES // self.object_bytes)
        return [
            _Chunk(
                positions[i : i + size],
                [name_of(key) for key in keys[i : i + size]],
                [int(rows[p]) for p in positions[i : i + size]],
            )
            for i in range(0, len(keys), size)
        ]

    def _count(self, **numbers: int) -> None:
        with self._lock:
            for name, number in numbers.items():
                setattr(self._stats, name, getattr(self._stats, name) + number)

    # The client's life, on the keeper's thread

    def _keep(self) -> None:
        while not self._closed.is_set():
            try:
                if self._session is None:
                    self._connect()
                    self._tried.set()
                else:
                    self._replace_if_stuck(self._session)
            except Exception:
                logger.exception("hicache-ext: looking after the Mooncake client failed; it is tried again")
            self._closed.wait(_RETRY_S if self._session is None else _CHECK_S)

    def _replace_if_stuck(self, session: Session) -> None:
        """In an outage a client waits for the master by itself, so one is given up only if another could be
        set up. Its memory goes with it, and the objects in there."""
        now = time.monotonic()
        if self.ping(now + 2 * self.settings.rpc_timeout_s) or unreachable(self.settings) is not None:
            self._well_at = now
        stuck = now - self._well_at >= _REPLACE_AFTER_S and master_serves(self._module, self.settings)
        if stuck or session.tainted:
            logger.warning("hicache-ext: replacing the Mooncake client, which does not recover")
            self._session = None
            self._drop(session)

    def _connect(self) -> None:
        problem = unreachable(self.settings)
        if problem is None and self._rack is not None:
            try:
                session = Session(self._module, self.settings, self._rack, self._holds)
            except (StoreError, OSError) as error:
                problem = str(error)
            else:
                self.problem = None
                self._well_at = time.monotonic()
                self._session = session
                logger.info("hicache-ext: connected to Mooncake at %s", self.settings.master)
                if self._closed.is_set():
                    # Nobody waits for this thread any more.
                    self._session = None
                    self._drop(session)
                return
        if problem != self.problem:
            logger.warning("hicache-ext: %s; it is tried again until it answers", problem)
        self.problem = problem

    def _drop(self, session: Session) -> None:
        """Close a session, if need be later: a call in it may take as long as Mooncake's own limit."""
        session.retire()

        def close() -> None:
            while not session.close():
                time.sleep(0.1)

        closer = threading.Thread(target=close, name="mooncake close", daemon=True)
        closer.start()
        closer.join(3 * _CLOSE_S if self._closed.is_set() else _CLOSE_S)


def name_of(key: Key) -> str:
    """The object's key in Mooncake."""
    return f"{PREFIX}/{key.namespace.hex()}/{key.epoch:016x}/{key.identity.hex()}/{key.group}"


def key_of(name: str) -> Key | None:
    """The key that has this name; None if it is not one of ours."""
    try:
        prefix, namespace, epoch, identity, group = name.split("/")
        key = Key(bytes.fromhex(namespace), int(epoch, 16), bytes.fromhex(identity), int(group))
    except ValueError:
        return None
    return key if prefix == PREFIX and name_of(key) == name else None


def older_epochs(namespace: bytes, below: int) -> str | None:
    """Regular expression for the names of a namespace's objects whose epoch is below a number; None if there
    can be none."""
    digits = f"{below:016x}"
    smaller = []
    for i, digit in enumerate(digits):
        lower = "0123456789abcdef"[: int(digit, 16)]
        if lower:
            smaller.append(f"{digits[:i]}[{lower}]")
    if not smaller:
        return None
    return f"^{PREFIX}/{namespace.hex()}/({'|'.join(smaller)})[0-9a-f]*/.*"


def _is_unfinished(answer: _Answer) -> bool:
    """Whether Mooncake may have given up on a transfer without stopping it."""
    return answer.seconds >= _ENGINE_GIVES_UP_S and any(code == -800 for code in answer.codes)
