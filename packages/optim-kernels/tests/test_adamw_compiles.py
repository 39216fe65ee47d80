"""AdamW's kernels compile for Hopper on any machine and every supported Triton, whose languages differ.

What they compute is tested in the interpreter and on a GPU. Here the compiler runs in a process of its own, because the
interpreter that the other tests use replaces the functions it would compile.
"""

import json
import os
import subprocess
import sys

import pytest

triton = pytest.importorskip("triton")

COMPILE = """
import json
import sys
import traceback

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from optim_kernels import adamw_kernels

def compiled(kind):
    states, form = kind.split()
    state = getattr(tl, states)
    is_narrow = states != "float32"
    param = tl.bfloat16 if is_narrow else tl.float32
    tile, warps = (256, 1) if states == "uint8" else (1024, 4)
    format = adamw_kernels.Format(
        param=param, grad=param, exp_avg=state, exp_avg_sq=state, amsgrad=False, master=adamw_kernels.NO_MASTER,
        stochastic=False, num_slices=1,
    )
    kernel = adamw_kernels.adamw_kernel if form == "list" else adamw_kernels.adamw_kernel_of_one
    types = dict.fromkeys(("chunks", "records", "grads"), "*i64") | {"hyperparameters": "*fp64", "memos": "*fp64"}
    types |= dict.fromkeys(("clip_factor", "grad_scale", "found_inf"), "*fp32") | {"counters": "*i32"}
    types |= dict.fromkeys(("num_chunks", "num_full"), "i32")
    chunk = {"uint8": 0 if form == "list" else 768}.get(states, 2048)
    constants = dict(CHUNK=chunk, TILE=tile, TAIL_TILE=min(tile, 256), F=format, OVERLAP=1)
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i64") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    made = triton.compile(
        ASTSource(kernel, signature, values),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps, "maxnreg": 72, "launch_pdl": True},
    )
    return made.metadata.num_warps, len(made.asm["cubin"])

for kind in sys.argv[1:]:
    try:
        print(json.dumps(compiled(kind)))
    except Exception:
        print(json.dumps(traceback.format_exc()))
"""
KINDS = [f"{states} {form}" for states in ("bfloat16", "uint8", "float32") for form in ("list", "one")]


@pytest.fixture(scope="module")
def compiled() -> dict[str, tuple[int, int] | str]:
    """Of every kind the warps and bytes of code, or why there are none."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    result = subprocess.run(
        [sys.executable, "-c", COMPILE, *KINDS], env=environment, capture_output=True, text=True, timeout=500
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return dict(zip(KINDS, map(json.loads, result.stdout.splitlines()[-len(KINDS) :]), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_compile_for_hopper(kind: str, compiled: dict[str, tuple[int, int] | str]) -> None:
    found = compiled[kind]
    assert not isinstance(found, str), found[-3000:]
    warps, size = found
    assert warps == (1 if "uint8" in kind else 4)
    assert size > 10_000
