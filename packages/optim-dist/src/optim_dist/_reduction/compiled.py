"""Which modules of a model are compiled, and which of them run inside of a compiled region.

torch.compile(module)    a module around it, whose hooks run before the region is entered
module.compile()         the same module, whose own hooks are compiled, too
"""

from __future__ import annotations

import sys

from torch import nn


def is_wrapped(module: nn.Module) -> bool:
    """Whether it is what ``torch.compile(module)`` gives."""
    # without importing Dynamo, which takes seconds: if it is not loaded, nothing is compiled;
    # while another thread loads it, it lacks the class
    wrapper = getattr(sys.modules.get("torch._dynamo"), "OptimizedModule", None)
    return wrapper is not None and isinstance(module, wrapper)


def is_compiled(module: nn.Module) -> bool:
    """Whether it is compiled as a whole, in either way."""
    return is_wrapped(module) or module._compiled_call_impl is not None


def inside_regions(model: nn.Module) -> set[int]:
    """``id`` of every module whose hooks would be compiled."""
    compiled = [module for module in model.modules() if is_compiled(module)]
    inside = {id(inner) for outer in compiled for inner in outer.modules()}
    return inside - {id(outer) for outer in compiled if is_wrapped(outer)}
