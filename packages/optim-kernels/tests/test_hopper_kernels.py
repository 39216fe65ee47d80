"""The Gluon kernels compile for Hopper on any machine: the language they are written in still changes with Triton.

What they compute is tested on a GPU in `test_muon_kernels` and `test_muon_step`. Here the compiler runs in a process of
its own, because the interpreter that the other tests use replaces the functions it would compile.
"""

import importlib.util
import re
from pathlib import Path

import pytest
from compiling_apart import lines_of

import optim_kernels

triton = pytest.importorskip("triton")

# importing takes as long as compiling two of them, so that one process does all
COMPILE = """
import json
import re
import subprocess
import sys
import traceback
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from optim_kernels._hopper.int8_kernel import GRAM, POLYNOMIAL, STEP, int8_product_kernel
from optim_kernels._hopper.lone_kernel import lone_kernel
from optim_kernels._hopper.ping_pong_kernels import product_kernel
from optim_kernels._hopper.update_kernel import update_product_kernel
from optim_kernels._hopper.wide_kernel import wide_product_kernel
from ptx import fused_with_sums
from sass import disassembled, unwritten_reads

def block(rows, columns, dtype=gl.float16):
    layout = gl.NVMMASharedLayout.get_default_for([1, rows, columns], dtype)
    name = "i8" if dtype == gl.int8 else dtype.name
    return f"tensordesc<{name}[1, {rows}, {columns}],{layout!r}>"

def compiled(kind):
    symmetric, update, wide, lone = "symmetric" in kind, kind == "update", "wide" in kind, "lone" in kind
    types = dict.fromkeys(("c_desc", "d_desc", "q_desc"), block(128, 128))
    types |= {"a_desc": block(128, 64), "scale": "*fp32"}
    types |= {"b_desc": block(128, 64) if symmetric else block(64, 128)}
    types |= dict.fromkeys(("total", "tiles", "T", "columns", "K"), "i32")
    types |= dict.fromkeys(("alpha", "beta", "omega"), "fp32")
    types |= {"s_desc": block(128, 64), "x_desc": block(64, 128), "table": "*i64", "first_matrix": "i32"}
    types |= dict.fromkeys(("hyper", "control", "lr_scales"), "*fp32")
    if lone:
        types |= dict.fromkeys(("a_desc", "b_desc", "c_desc", "d_desc", "q_desc"), block(64, 64))
        types |= {"d": "*fp16", "q": "*fp16", "inverses": "*fp32", "parts": "i32", "norm_scale": "fp32", "eps": "fp32"}
    elif wide:
        types |= {"b_desc": block(256, 64) if symmetric else block(64, 256), "mirror_desc": block(256, 64)}
        types |= dict.fromkeys(("c_desc", "d_desc"), block(64, 256))
    kernel = update_product_kernel if update else wide_product_kernel if wide else product_kernel
    kernel = lone_kernel if lone else int8_product_kernel if "int8" in kind else kernel
    if "int8" in kind:
        types |= dict.fromkeys(("a_desc", "b_desc"), block(128, 128, gl.int8))
        types |= {"rounded_desc": block(128, 64, gl.int8), "mirror_desc": block(64, 128, gl.int8)}
        types |= dict.fromkeys(("left_units", "right_units", "diagonal", "roots", "left_largest", "largest"), "*fp32")
        types |= {"partials": "*fp32", "num_rows": "i32", "num_columns": "i32"}
    constants = dict(HAS_C=True, HAS_SCALE=True, GROUP=8, DEPTH=64, STAGES=5)
    if update:
        constants |= dict(P_DTYPE=tl.bfloat16, MASTER_KIND=2, CAUTIOUS=True)
    elif lone:
        del constants["DEPTH"], constants["GROUP"]
        blocks = {"small": (1, 1 if symmetric else 2), "half": (1, 2), "tall": (3, 2), "square": (2, 2)}
        tall, broad = blocks.get(kind.split()[1], (2, 2 if symmetric else 4))
        square = symmetric and tall == broad
        same = square and "shifted" not in kind
        is_low, is_apart = "low" in kind, "apart" in kind
        has_q = symmetric and same >= square and not is_low
        constants |= dict(SYMMETRIC=symmetric, SAME=same, HAS_Q=has_q, LOW=is_low, APART=is_apart)
        # X Xᵀ has no C, and where the diagonal goes apart there is nothing but the product
        constants |= dict(HAS_C=not (is_apart or kind == "symmetric low lone"), HAS_SCALE=not is_apart)
        constants |= dict(BANDED=square, OVERLAP=True)
        types |= {"q": "*fp32"} if is_apart else {}
        constants |= dict(AHEAD=symmetric and not square, LATE=symmetric and not square)
        constants |= dict(IN_EIGHTS="half" not in kind)
        finds_norm = symmetric and kind not in ("symmetric lone", "symmetric shifted lone")
        types |= {"scale": "*fp64"} if finds_norm else {}
        constants |= dict(PARTS=1024 if finds_norm else 0, ADD_EPS=False)
        stages = 5 if tall == 3 or "shifted" in kind else 3 if broad == 4 else 4
        constants |= dict(STAGES=stages, TALL=tall, BROAD=broad, EARLY=square)
    elif wide:
        types |= {"betas": "*fp32"}
        constants |= dict(SYMMETRIC=symmetric, APART="apart" in kind, STAGES=3)
    elif "int8" in kind:
        del constants["HAS_C"]
        kinds = {"int8 A": GRAM, "int8 S": POLYNOMIAL, "int8 X": STEP}
        is_last = kind == "int8 X"
        constants |= dict(KIND=kinds[kind].value, HAS_SCALE=is_last, DEPTH=128, STAGES=4 + is_last)
    else:
        constants |= dict(SYMMETRIC=symmetric, SAME=False, HAS_Q=symmetric)
    names = [parameter.name for parameter in kernel.params]
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    made = triton.compile(
        GluonASTSource(kernel, signature, values),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 4} | ({"maxnreg": 128} if "small" in kind or "half" in kind else {}),
    )
    products = len(re.findall(r"wgmma[.]mma_async", made.asm["ptx"]))
    path = Path(sys.argv[1])
    path.write_text(made.asm["ptx"])
    command = [get_ptxas(90).path, "-arch=sm_90a", "-v", path, "-o", path.with_suffix(".cubin")]
    messages = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    numbers = [each.name for each in kernel.params if signature[each.name] == "i32" and not each.do_not_specialize]
    unwritten = unwritten_reads(disassembled(path.with_suffix(".cubin")))
    fused = fused_with_sums(made.asm["ptx"])
    return made.metadata.shared, made.metadata.num_warps, products, numbers, unwritten, fused, messages

for kind in sys.argv[2:]:
    try:
        print(json.dumps(compiled(kind)))
    except Exception:
        print(json.dumps(traceback.format_exc()))
"""
# and how often each multiplies, in its text: consumers, halves of 64 rows or parts of the sum between which a wide tile
# stores, steps of 16 along a depth of 64; or the ways of a lone tile's consumers, tiles on the diagonal included
KINDS = {
    "symmetric": 2 * 2 * 4,
    "general": 2 * 2 * 4,
    "int8 A": 2 * 2 * 4,
    "int8 S": 2 * 2 * 4,
    "int8 X": 2 * 2 * 4,
    "update": 2 * 2 * 4,
    "symmetric wide": 2 * 3 * 4,
    "general wide": 2 * 2 * 4,
    "general wide apart": 2 * 2 * 4,
    "symmetric lone": (2 + 1 + 2) * 4,
    "general lone": 2 * 4,
    "symmetric shifted lone": (2 + 2 + 2) * 4,
    "symmetric low lone": (2 + 1 + 2) * 4,
    "general low lone": 2 * 4,
    "general apart lone": 2 * 4,
    "symmetric small lone": (2 + 4) * 4,
    "general small lone": 2 * 4,
    "general tall lone": 3 * 4,
    "symmetric half lone": 2 * 4,
    "general square lone": 2 * 4,
}
# memory, warps, products, numbers that Triton makes constants where they are 1, reads of nothing, sums multiplied in a
# fused addition, ptxas's messages
Compiled = tuple[int, int, int, list[str], list[str], list[str], str]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Compiled | str]:
    """Of every kind what COMPILE finds, or why it does not."""
    path = tmp_path_factory.mktemp("hopper") / "kernel.ptx"
    return dict(zip(KINDS, lines_of(COMPILE, str(path), *KINDS, count=len(KINDS)), strict=True))


@pytest.mark.slow
@pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6)
    or importlib.util.find_spec("triton.experimental.gluon") is None,
    reason="needs Gluon of Triton 3.6",
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_compile_for_hopper(kind: str, compiled: dict[str, Compiled | str]) -> None:
    """Within their shared memory, without spilled numbers or products that wait for one another; rounded alike."""
    found = compiled[kind]
    assert not isinstance(found, str), found[-3000:]
    shared, warps, products, numbers, unwritten, fused, messages = found
    assert shared <= 232_448  # bytes that a program on Hopper may have
    # three, two or one consumers of four, and the producer's group
    assert warps == (8 if "small" in kind or "half" in kind else 16 if "tall" in kind else 12)
    assert products == KINDS[kind]
    # of a sum of one term ptxas does not write all that it reads: see `_hopper.ring`
    assert set(numbers) <= {"num_rows", "num_columns"}  # of matrices in int8, which are never so small
    assert unwritten == []
    # sums in int8 are exact, and no chain takes them
    assert fused == [] or "int8" in kind
    assert "serialized" not in messages
    # Triton 3.9's ptxas keeps both uses of a mask of 256 columns; that product is one of 22
    most = 48 if kind == "general apart lone" and triton.__version__.startswith("3.9.") else 0
    assert max(map(int, re.findall(r"(\d+) bytes spill stores", messages))) <= most


def test_no_kernel_is_left_out() -> None:
    """But `chain_kernel`, which `test_hopper_chain` compiles."""
    definition = re.compile(r"^@gluon\.jit.*\ndef (?!_)(\w*kernel)\(", re.MULTILINE)
    sources = [path.read_text() for path in (Path(optim_kernels.__file__).parent / "_hopper").glob("*.py")]
    kernels = {name for source in sources for name in definition.findall(source)}
    assert kernels == {"chain_kernel", *re.findall(r"import .*?(\w+_kernel)$", COMPILE, re.MULTILINE)}
