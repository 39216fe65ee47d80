"""The ping-pong kernels compile for Hopper on any machine: the language they are written in still changes with Triton.

What they compute is tested on a GPU in `test_muon_kernels` and `test_muon_step`. Here the compiler runs in a process of
its own, because the interpreter that the other tests use replaces the functions it would compile.
"""

import importlib.util
import os
import subprocess
import sys

import pytest

triton = pytest.importorskip("triton")

COMPILE = """
import re
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from optim_kernels._hopper_kernels import product_kernel
from optim_kernels._hopper_update_kernel import update_product_kernel
from optim_kernels._hopper_wide_kernel import wide_product_kernel

def block(rows, columns):
    layout = gl.NVMMASharedLayout.get_default_for([1, rows, columns], gl.float16)
    return f"tensordesc<fp16[1, {rows}, {columns}],{layout!r}>"

symmetric, update, wide = "symmetric" in sys.argv[1], sys.argv[1] == "update", "wide" in sys.argv[1]
types = dict.fromkeys(("c_desc", "d_desc", "q_desc"), block(128, 128)) | {"a_desc": block(128, 64), "scale": "*fp32"}
types |= {"b_desc": block(128, 64) if symmetric else block(64, 128)}
types |= dict.fromkeys(("total", "tiles", "T", "columns", "K"), "i32")
types |= dict.fromkeys(("alpha", "beta", "omega"), "fp32")
types |= {"s_desc": block(128, 64), "x_desc": block(64, 128), "table": "*i64", "first_matrix": "i32"}
types |= dict.fromkeys(("hyper", "control", "lr_scales"), "*fp32")
if wide:
    types |= {"b_desc": block(256, 64) if symmetric else block(64, 256), "mirror_desc": block(256, 64)}
    types |= dict.fromkeys(("c_desc", "d_desc"), block(64, 256))
kernel = update_product_kernel if update else wide_product_kernel if wide else product_kernel
constants = dict(HAS_C=True, HAS_SCALE=True, GROUP=8, DEPTH=64, STAGES=5)
if update:
    constants |= dict(P_DTYPE=tl.bfloat16, MASTER_KIND=2, CAUTIOUS=True)
elif wide:
    constants |= dict(SYMMETRIC=symmetric, STAGES=3)
else:
    constants |= dict(SYMMETRIC=symmetric, SAME=False, HAS_Q=symmetric)
names = [parameter.name for parameter in kernel.params]
signature = {name: "constexpr" if name in constants else types[name] for name in names}
values = {(names.index(name),): value for name, value in constants.items()}
compiled = triton.compile(
    GluonASTSource(kernel, signature, values), target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}
)
products = len(re.findall(r"wgmma[.]mma_async", compiled.asm["ptx"]))
print(compiled.metadata.shared, compiled.metadata.num_warps, products)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6)
    or importlib.util.find_spec("triton.experimental.gluon") is None,
    reason="needs Gluon of Triton 3.6",
)
@pytest.mark.parametrize("kind", ["symmetric", "general", "update", "symmetric wide", "general wide"])
def test_the_ping_pong_kernels_compile_for_hopper(kind: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    result = subprocess.run(
        [sys.executable, "-c", COMPILE, kind], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr[-3000:]
    shared, warps, products = map(int, result.stdout.split()[-3:])
    assert shared <= 232_448  # bytes that a program on Hopper may have
    assert warps == 12  # two consumers of four, and the producer's group
    # consumers, halves of 64 rows or parts of the sum between which a wide tile stores, steps of 16 along a depth of 64
    assert products == 2 * (3 if kind == "symmetric wide" else 2) * 4
