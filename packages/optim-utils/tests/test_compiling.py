"""Methods that compiled callers call as they are."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch._dynamo.testing import CompileCounter

from optim_utils import not_compiled


class Counted:
    def __init__(self) -> None:
        self.compiled = 0

    @not_compiled
    def look(self) -> None:
        """Nothing."""

    @not_compiled
    def host_work(self, x: torch.Tensor, *, times: int = 1) -> torch.Tensor:
        """Of the host."""
        self.compiled += torch.compiler.is_compiling()
        for _ in range(times):
            x = x + 1
        return x


class Derived(Counted):
    def host_work(self, x: torch.Tensor, *, times: int = 1) -> torch.Tensor:
        return super().host_work(x, times=times) * 2


def test_a_compiled_caller_calls_the_method_as_it_is() -> None:
    torch._dynamo.reset()
    counter, counted = CompileCounter(), Counted()
    # another method of the class
    counted.look()

    def caller(x: torch.Tensor) -> torch.Tensor:
        return counted.host_work(x.sin(), times=3).cos()

    x = torch.ones(3)
    compiled = torch.compile(caller, backend=counter)
    for _ in range(3):
        assert torch.equal(compiled(x), caller(x))
    assert counted.compiled == 0
    # before the call and behind it, and nothing of the method
    assert (counter.frame_count, counter.op_count) == (2, 2)


def test_it_is_a_method_like_any_other() -> None:
    x, counted = torch.zeros(2), Counted()
    assert torch.equal(counted.host_work(x), x + 1)
    assert torch.equal(Counted.host_work(counted, x, times=2), x + 2)
    assert torch.equal(Derived().host_work(x, times=2), 2 * (x + 2))
    assert Counted.host_work.__name__ == "host_work"
    assert Counted.host_work.__doc__ == "Of the host."
    assert Counted.host_work is Counted.host_work


def test_the_compiler_is_imported_at_the_first_look() -> None:
    code = """
import sys
from optim_utils import not_compiled
class A:
    @not_compiled
    def f(self):
        return 1
assert "torch._dynamo" not in sys.modules
assert A().f() == 1
assert "torch._dynamo" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
