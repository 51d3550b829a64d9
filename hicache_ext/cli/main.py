"""Entry point of the console script ``hicache-ext``.

A subcommand is a module with ``add_parser(subparsers)`` that sets ``run``, a function from the parsed
arguments to the exit status. Heavy imports belong inside ``run``, so that ``--help`` stays fast.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hicache_ext.cli import CommandError, doctor, patch, store

_COMMANDS = (doctor, patch, store)


def build_parser() -> argparse.ArgumentParser:
    """Parser with every subcommand."""
    parser = argparse.ArgumentParser(
        prog="hicache-ext",
        description="Tools for hicache-ext, the hierarchical KV cache extension for SGLang.",
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; return 0 on success, 1 on an error the user can cure, 130 if interrupted."""
    arguments = build_parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except CommandError as error:
        print(f"hicache-ext: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
