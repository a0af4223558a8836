"""Keeps torch's compiler unloaded where nothing is compiled: importing it takes one to four seconds.

torch loads it for the first call of any function that it excludes from compilation, among them those of every
optimiser. Until something else has loaded the compiler there is nothing to be excluded from, so these functions are
called directly; from then on they are excluded as torch does it.
"""

import inspect
import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar

import torch

_Call = TypeVar("_Call", bound=Callable[..., Any])
_COMPILER = "torch._dynamo"


def uncompiled(function: _Call) -> _Call:
    """A function that the compiler does not see into; as torch.compiler.disable, which loads it."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (_excluded(function) if _COMPILER in sys.modules else function)(*args, **kwargs)

    return call  # type: ignore[return-value]


@cache
def _excluded(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call, no-any-return]


@cache
def spare_the_compiler() -> None:
    """Use optimisers without loading the compiler; has no effect on a torch with other internals."""
    for function in vars(torch.optim.Optimizer).values():
        inner = getattr(function, "__wrapped__", None)
        code = getattr(function, "__code__", None)
        if inner is not None and code is not None and code.co_filename.endswith("_compile.py"):
            # torch's own name for the excluded form of a function, which it makes at the first call
            inner.__dict__.setdefault("__dynamo_disable", uncompiled(inner))


class PlainAdamW(torch.optim.AdamW):
    """torch's AdamW, whose step loads the compiler in every process; nothing here compiles an optimiser."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return inspect.unwrap(torch.optim.AdamW.step)(self, closure)
