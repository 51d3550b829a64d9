"""Command line of hicache-ext: one module a subcommand, assembled in ``main``."""

from __future__ import annotations


class CommandError(Exception):
    """A problem the user can cure; ``main`` prints its one line of text and exits with 1."""
