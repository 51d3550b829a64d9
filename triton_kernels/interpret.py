"""``jit`` for kernels that also run without a GPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl


def jit(function: Callable[..., Any]) -> Any:
    """``triton.jit``; without a GPU, Triton's interpreter whatever the environment says.

    No argument is specialized on its value or alignment: a slice of an index tensor or another number of
    pages must not compile a kernel while requests wait. What the compiler should know is a ``constexpr``.
    """
    if not torch.cuda.is_available():
        from triton.runtime.interpreter import InterpretedFunction

        return InterpretedFunction(function)
    parameters = inspect.signature(function).parameters.values()
    plain = [p.name for p in parameters if p.annotation is not tl.constexpr]
    return triton.jit(function, do_not_specialize=plain, do_not_specialize_on_alignment=plain)
