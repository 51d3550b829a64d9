"""``hicache-ext store``: what is in a store, whether it is sound, and how to get rid of what is old."""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from hicache_ext.cli import CommandError
from hicache_ext.cli.store_check import Checker, is_mark
from hicache_ext.cli.store_shelves import GONE, Item, Shelf, open_shelves
from hicache_ext.stores.base import StoreError

if TYPE_CHECKING:
    _SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]

_SHOWN = 16
_LEAST_DIGITS = 8
_UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_LISTED_BAD = 20


def add_parser(subparsers: _SubParsers) -> None:
    """Add ``store`` with its four actions."""
    parser = subparsers.add_parser(
        "store",
        help="list, measure, verify or clean up a store of pages",
        description="Looks into a store as --hicache-ext-remote names it: a folder of a disk, or a Mooncake "
        "master. ls, stat and verify change nothing and work beside a server that uses the store. Exits "
        "with 0 if all is well, 1 on a problem, 2 on a usage error.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    ls = _action(actions, "ls", _ls, "list namespaces and epochs: objects, bytes, last use")
    stat = _action(actions, "stat", _stat, "show size, room and use of each part of the store")
    verify = _action(actions, "verify", _verify, "read every object and check its header and checksums")
    verify.add_argument(
        "--remove-bad",
        action="store_true",
        help="remove what is bad (a disk store must not be in use; a server treats bad objects as misses and "
        "removes them by itself)",
    )
    gc = _action(
        actions,
        "gc",
        _gc,
        "remove objects that no server will ask for: those of epochs that a flush has ended, and with an "
        "option also whole namespaces",
    )
    which = gc.add_mutually_exclusive_group()
    which.add_argument(
        "--keep-namespace",
        action="append",
        metavar="HEX",
        help=f"remove every namespace but this one; {_LEAST_DIGITS} digits or more, as ls shows them; may be "
        "given several times",
    )
    which.add_argument(
        "--older-than",
        type=_age,
        metavar="AGE",
        help="remove epochs that were not used for so long, such as 12h, 7d, 2w (disk stores only)",
    )
    gc.add_argument("--dry-run", action="store_true", help="say what would be removed, remove nothing")
    for action in (ls, stat, verify, gc):
        action.add_argument(
            "url",
            metavar="URL",
            help="file:///PATH or mooncake://HOST:PORT?metadata=..., as the server got it",
        )
        action.add_argument(
            "--metrics",
            metavar="HOST:PORT",
            help="where the Mooncake master serves its metrics, which list its objects (default: port 9003 "
            "of the master's host)",
        )


def _action(
    actions: _SubParsers, name: str, function: Callable[[argparse.Namespace, Console], int], text: str
) -> argparse.ArgumentParser:
    action = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    action.set_defaults(run=_reporting(function))
    return action


def _reporting(
    function: Callable[[argparse.Namespace, Console], int],
) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace) -> int:
        try:
            return function(arguments, Console(soft_wrap=True, highlight=False))
        except StoreError as error:
            raise CommandError(str(error)) from error
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            raise CommandError(
                f"the store cannot be read{where}: {error.strerror or error}: check the path and its owner"
            ) from error

    return run


@dataclass
class Part:
    """The objects of one epoch of one namespace, over all parts of a store."""

    pages: int = 0
    bytes: int = 0
    used: int | None = None
    """Unix time; None if unknown."""
    items: list[tuple[Shelf, Item]] = field(default_factory=list)


@dataclass
class Content:
    parts: dict[tuple[bytes, int], Part]
    newest: dict[bytes, int]
    """The highest epoch of each namespace that has a mark; 0 if none has."""
    timed: bool

    def ended(self, name: tuple[bytes, int]) -> bool:
        """Whether a flush has ended this epoch."""
        return name[1] < self.newest[name[0]]


def read_content(shelves: Sequence[Shelf]) -> Content:
    parts: dict[tuple[bytes, int], Part] = defaultdict(Part)
    newest: dict[bytes, int] = defaultdict(int)
    timed = True
    for shelf in shelves:
        for item in shelf.items():
            name = item.key[:2]
            part = parts[name]
            part.items.append((shelf, item))
            part.bytes += item.size
            if is_mark(item.key):
                newest[name[0]] = max(newest[name[0]], name[1])
            else:
                part.pages += 1
        times = shelf.times()
        timed = timed and times is not None
        for name, used in (times or {}).items():
            if name in parts:
                parts[name].used = max(used, parts[name].used or 0)
    return Content(dict(sorted(parts.items())), newest, timed)


def _ls(arguments: argparse.Namespace, console: Console) -> int:
    shelves = open_shelves(arguments.url, arguments.metrics)
    content = read_content(shelves)
    _say_in_use(shelves, console)
    if not content.parts:
        console.print("the store is empty", markup=False)
        return 0
    table = Table()
    for heading, side in (
        ("namespace", "left"),
        ("epoch", "right"),
        ("state", "left"),
        ("objects", "right"),
        ("size", "right"),
        ("last used", "left"),
    ):
        table.add_column(heading, justify=side, no_wrap=True)  # type: ignore[arg-type]
    for (namespace, epoch), part in content.parts.items():
        table.add_row(
            namespace.hex()[:_SHOWN],
            str(epoch),
            "ended" if content.ended((namespace, epoch)) else "",
            str(part.pages),
            _size(part.bytes),
            "unknown" if part.used is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(part.used)),
        )
    console.print(table)
    if not content.timed:
        console.print("Mooncake keeps no times of use", markup=False)
    return 0


def _stat(arguments: argparse.Namespace, console: Console) -> int:
    shelves = open_shelves(arguments.url, arguments.metrics)
    for shelf in shelves:
        items = shelf.items()
        pages = Counter(item.key.group for item in items if not is_mark(item.key))
        groups = ", ".join(f"{count} of head group {group}" for group, count in sorted(pages.items()))
        facts = [
            ("objects", f"{pages.total()}" + (f" ({groups})" if len(pages) > 1 else "")),
            ("marks of epochs", str(len(items) - pages.total())),
            ("bytes", _size(sum(item.size for item in items))),
            ("namespaces", str(len({item.key.namespace for item in items}))),
            *shelf.facts(),
        ]
        table = Table(title=shelf.name, title_justify="left", show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for fact in facts:
            table.add_row(*fact)
        console.print(table)
    console.print(
        "hits, misses and the circuit breaker are counted by each server: see its /metrics",
        markup=False,
    )
    return 0


def _verify(arguments: argparse.Namespace, console: Console) -> int:
    shelves = open_shelves(arguments.url, arguments.metrics)
    _say_in_use(shelves, console)
    if arguments.remove_bad:
        _refuse_in_use(shelves)
    checker = Checker()
    found: Counter[str] = Counter()
    bad: list[tuple[Shelf, Item, str]] = []
    sound = gone = read = 0
    with _progress(console) as progress:
        for shelf in shelves:
            items = shelf.items()
            task = progress.add_task(shelf.name, total=len(items))
            for item, problem in shelf.check(items, checker):
                progress.advance(task)
                read += item.size
                if problem is None:
                    sound += 1
                elif problem == GONE:
                    gone += 1
                else:
                    found[problem] += 1
                    bad.append((shelf, item, problem))
    for _, item, problem in bad[:_LISTED_BAD]:
        key = item.key
        name = f"{key.namespace.hex()}/{key.epoch}/{key.identity.hex()}/{key.group}"
        console.print(f"bad ({problem}): {name}", markup=False)
    if len(bad) > _LISTED_BAD:
        console.print(f"and {len(bad) - _LISTED_BAD} more", markup=False)
    line = f"{sound} objects sound, {len(bad)} bad, {_size(read)} read"
    if found:
        line += "; " + ", ".join(f"{problem}: {count}" for problem, count in sorted(found.items()))
    if gone:
        line += f"; {gone} replaced or removed meanwhile"
    if checker.unproven:
        line += (
            f"; {checker.unproven} of the sound carry no checksum of their payload (--hicache-ext-integrity)"
        )
    console.print(line, markup=False)
    if not bad:
        return 0
    if arguments.remove_bad:
        _remove([(shelf, item) for shelf, item, _ in bad], console)
    else:
        console.print("servers treat bad objects as misses; --remove-bad removes them", markup=False)
    return 1


def _gc(arguments: argparse.Namespace, console: Console) -> int:
    shelves = open_shelves(arguments.url, arguments.metrics)
    content = read_content(shelves)
    if arguments.older_than is not None and not content.timed:
        raise CommandError(
            "Mooncake keeps no times of use, so --older-than cannot be told: use --keep-namespace"
        )
    going = {name for name in content.parts if content.ended(name)}
    if arguments.keep_namespace is not None:
        kept = {_namespace(text, content) for text in arguments.keep_namespace}
        going |= {name for name in content.parts if name[0] not in kept}
    if arguments.older_than is not None:
        limit = time.time() - arguments.older_than
        # An epoch of unknown age stays.
        going |= {n for n, part in content.parts.items() if part.used is not None and part.used < limit}
    victims = _victims(content, going)
    if not victims:
        console.print("nothing to remove", markup=False)
        return 0
    for namespace, epoch in sorted({item.key[:2] for _, item in victims}):
        part = content.parts[namespace, epoch]
        verb = "would remove" if arguments.dry_run else "removing"
        console.print(
            f"{verb} {namespace.hex()[:_SHOWN]} epoch {epoch}: {part.pages} objects, {_size(part.bytes)}",
            markup=False,
        )
    if not arguments.dry_run:
        _refuse_in_use(shelves)
        _remove(victims, console)
    return 0


def _victims(content: Content, going: set[tuple[bytes, int]]) -> list[tuple[Shelf, Item]]:
    """All objects of these parts; a mark only together with all that its flush has ended.

    Without the mark, a server that starts later would ask for the pages of before the flush.
    """
    staying = {namespace for namespace, _ in content.parts.keys() - going}
    return [
        (shelf, item)
        for name in sorted(going)
        for shelf, item in content.parts[name].items
        if not (is_mark(item.key) and name[0] in staying and name[1] == content.newest[name[0]])
    ]


def _remove(victims: list[tuple[Shelf, Item]], console: Console) -> None:
    by_shelf: dict[int, tuple[Shelf, list[Item]]] = {}
    for shelf, item in victims:
        by_shelf.setdefault(id(shelf), (shelf, []))[1].append(item)
    for shelf, items in by_shelf.values():
        shelf.remove(items)
    size = _size(sum(item.size for _, item in victims))
    console.print(f"removed {len(victims)} objects, {size}; their room is for new ones", markup=False)


def _say_in_use(shelves: Sequence[Shelf], console: Console) -> None:
    for shelf in shelves:
        if (user := shelf.in_use()) is not None:
            console.print(f"{shelf.name} is {user}; this is its state a moment ago", markup=False)


def _refuse_in_use(shelves: Sequence[Shelf]) -> None:
    """Before anything is removed from any of them."""
    for shelf in shelves:
        if (user := shelf.in_use()) is not None:
            raise CommandError(f"{shelf.name} is {user}, nothing was removed: stop that server first")


def _namespace(text: str, content: Content) -> bytes:
    """The one that begins with these digits: a typing error must not remove what was to be kept."""
    digits = text.lower()
    if not re.fullmatch(rf"[0-9a-f]{{{_LEAST_DIGITS},64}}", digits):
        raise CommandError(
            f"--keep-namespace {text}: give {_LEAST_DIGITS} to 64 hexadecimal digits, as ls shows them"
        )
    found = sorted({n for n, _ in content.parts if n.hex().startswith(digits)})
    if not found:
        raise CommandError(
            f"--keep-namespace {text}: the store has no such namespace, see ls; nothing was removed"
        )
    if len(found) > 1:
        raise CommandError(f"--keep-namespace {text} fits {len(found)} namespaces: give more digits")
    return found[0]


def _age(text: str) -> float:
    """Seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([mhdw])", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text}: give a number and m, h, d or w, such as 7d")
    return float(found[1]) * _UNITS[found[2]]


def _size(count: int) -> str:
    return f"{count / 1e9:.3f} GB" if count >= 10**7 else f"{count / 1e6:.3f} MB"


def _progress(console: Console) -> Progress:
    """On the terminal only; a log gets the results alone."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
