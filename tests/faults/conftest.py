"""Fixtures of the fault tests: they start the real server as tests/server does."""

from __future__ import annotations

from tests.server.conftest import pytest_collection_modifyitems, server

__all__ = ["pytest_collection_modifyitems", "server"]
