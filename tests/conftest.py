"""Fixtures that every test may use."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Last, so that an installed package of the same name as a folder here, such as triton_kernels, comes first.
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Campaigns take many minutes: they run only if `-m` names their marker."""
    if "campaign" in (config.option.markexpr or ""):
        return
    chosen = [item for item in items if item.get_closest_marker("campaign") is None]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def _prepared_model(dtype: str) -> Path:
    from scripts import prepare_model

    target = prepare_model.default_output(dtype)
    prepare_model.prepare(target, dtype, quiet=True)
    return target


@pytest.fixture(scope="session")
def model_path() -> Path:
    """Folder of the chat model in bfloat16."""
    return _prepared_model("bfloat16")


@pytest.fixture(scope="session")
def float32_model_path() -> Path:
    """Folder of the chat model in float32: equal prompts give bit-identical logprobs."""
    return _prepared_model("float32")
