"""The plain Triton kernels compile for Hopper on any machine and every supported Triton, whose languages differ.

Some compile for other GPUs, too, whose programs may have less shared memory.

What they compute is tested in the interpreter and on a GPU; kernels in Gluon are compiled by `test_hopper_kernels`.
Here the compiler runs in a process of its own, because the interpreter that the other tests use replaces the functions
it would compile. The kinds are such that each branch of a kernel and each tile of a product is in one of them.
"""

import json
import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from compiling_apart import lines_of

import optim_kernels
from optim_kernels._newton_schulz.tiles import (
    FULL_PRECISION,
    GENERAL,
    GENERAL_ALONE,
    IN_FP64,
    JOINED,
    STAGES_ALONE,
    SYMMETRIC,
    Tile,
    fitted,
)

pytest.importorskip("triton")
from optim_kernels.functional._muon_families import LAST_TILE, SMALL_LAST_TILE

COMPILE = """
import json
import re
import sys
import traceback
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from tempfile import NamedTemporaryFile

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from optim_kernels.adamw_kernels import Format
from sass import disassembled

def constant(value):
    if isinstance(value, dict):
        return Format(**{name: constant(each) for name, each in value.items()})
    return getattr(tl, value) if isinstance(value, str) else value

def kernel_of(module, name):
    return getattr(import_module(f"optim_kernels.{module}"), name)

def make(module, name, constants, types, options):
    kernel = kernel_of(module, name)
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    # of a tuple of arguments each has its own
    signature = {name: tuple(type) if isinstance(type, list) else type for name, type in signature.items()}
    values = {(names.index(name),): constant(value) for name, value in constants.items()}
    # tensors start at multiples of 16 bytes, but for those of which a launch promises nothing
    places = {(names.index(name),): type for name, type in signature.items() if isinstance(type, str)}
    places |= {
        (names.index(name), number): type
        for name, each in signature.items() if isinstance(each, tuple) for number, type in enumerate(each)
    }
    unpromised = {names.index(name) for name in kernel.do_not_specialize or ()}
    promised = [place for place, type in places.items() if type[0] == "*" and place[0] not in unpromised]
    attributes = {place: [["tt.divisibility", 16]] for place in promised}
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    return triton.compile(ASTSource(kernel, signature, values, attributes), target=target, options=options)

def compiled(*kind):
    made = make(*kind)
    lines = made.asm["ttgir"].splitlines()
    layouts = dict(line.split(" = ", 1) for line in lines if line.startswith("#blocked"))
    shuffled = [line.split("-> tensor<")[1].split(", ", 1)[1] for line in lines if "shfl.sync.idx" in line]
    shuffled = [re.sub("#blocked[0-9]*", lambda name: layouts[name[0]], layout) for layout in shuffled]
    multiplies = re.search(r"wgmma|mma.sync.aligned.m[0-9a-z]+.row.col.f64", made.asm["ptx"])
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        text = disassembled(Path(file.name))
    first_load = re.search("LDG[.0-9A-Z]*", text)
    wide_first = first_load is not None and first_load[0].endswith(".128")
    return len(made.asm["cubin"]), made.metadata.shared, shuffled, bool(multiplies), "SHFL" in text, wide_first

def of_ones(module, name, constants, types, options):
    kernel, spills = kernel_of(module, name), {}
    numbers = [each for each in kernel.arg_names if each not in constants and types.get(each, "i32") in ("i32", "i64")]
    numbers = [each for each in numbers if each not in (kernel.do_not_specialize or ())]
    # what is kept has no log
    knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = True
    # each alone, and all
    for ones in [[each] for each in numbers] + [numbers] * (len(numbers) > 1):
        with redirect_stdout(StringIO()) as log:
            make(module, name, constants | dict.fromkeys(ones, 1), types, options)
        spills[" ".join(ones)] = int(re.search("([0-9]+) bytes spill stores", log.getvalue())[1])
    return spills

find = globals()[sys.argv[2]]
for kind in json.load(sys.stdin):
    try:
        print(json.dumps(find(*kind)))
    except Exception:
        print(json.dumps(traceback.format_exc()))
"""

# by their names, which kernels agree on; the others are int32
ARGUMENTS = {
    "*i64": "chunks records grads table step_addresses hyperparameters memos",
    "*i32": "counter counters progress state strip_map tile_map",
    "*fp64": "partials row_squares sums total",
    "*fp32": "clip_factor control factor factors found_inf grad_scale hyper inverses lr_scales norm_result parts scale "
    "scales squared_scales units",
    "fp32": "alpha beta eps max_norm norm_scale omega",
    # of AdamW's kernel of one tensor
    "i64": "exp_avg exp_avg_scale exp_avg_sq exp_avg_sq_scale grad group master max_exp_avg_sq numel param "
    "place present rates rates0 rates1 rates2 rates3 seed slice_stride start step",
}
TYPES = {name: type for type, names in ARGUMENTS.items() for name in names.split()}
SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
OVERLAPPING = {"launch_pdl": True}
# module, kernel, compile-time arguments (dtypes by name), types of the others, options
Kind = tuple[str, str, dict[str, Any], dict[str, str], dict[str, Any]]


def kind(kernel: str, constants: dict[str, Any], types: dict[str, Any] | None = None, **options: Any) -> Kind:
    module, name = kernel.rsplit(".", 1)
    return module, name, constants, TYPES | (types or {}), options


def adamw(
    states: str | Sequence[str], *, alone: bool, param: str = "bfloat16", grad: str | None = None, **stored: Any
) -> Kind:
    """With moments of one dtype, or of two; of a list of tensors or of one ``alone``."""
    first, second = (states, states) if isinstance(states, str) else states
    default: dict[str, Any] = {"amsgrad": False, "master": 0, "stochastic": False, "num_slices": 1}
    dtypes = {"param": param, "grad": grad or param, "exp_avg": first, "exp_avg_sq": second}
    has_codes = "uint8" in (first, second)
    chunk, tile, warps = (0, 256, 1) if has_codes else (2048, 1024, 4)
    constants = {"CHUNK": chunk, "TILE": tile, "TAIL_TILE": 256, "F": default | dtypes | stored}
    # alone in a step, or the first of several launches
    kernel, overlap = ("adamw_kernel_of_one", 1) if alone else ("adamw_kernel", 2)
    if alone:
        constants["ELEMENTS_FIRST"] = not has_codes and "master" not in stored
    options = {"num_warps": warps, "maxnreg": 72} | OVERLAPPING
    return kind(f"adamw_kernels.{kernel}", constants | {"OVERLAP": overlap}, **options)


ADAMW = {
    f"AdamW, {states}, {'alone' if alone else 'list'}": adamw(
        states, alone=alone, param="float32" if states == "float32" else "bfloat16"
    )
    for states, alone in product(("bfloat16", "uint8", "float32"), (False, True))
} | {
    "AdamW, random bits": adamw("bfloat16", alone=False, grad="float32", stochastic=True),
    "AdamW, slices and fp32 masters": adamw("float16", alone=True, param="float16", num_slices=2, master=1),
    "AdamW, uint8 beside float32, alone": adamw("uint8", alone=True, param="float32"),
    "AdamW, AMSGrad and low halves": adamw(("uint8", "bfloat16"), alone=False, amsgrad=True, master=2),
}


def clipping(kernel: str, dtype: str, overlap: int, **constants: int) -> Kind:
    options = {"num_warps": 4} | (OVERLAPPING if overlap else {})
    constants |= {"OVERLAP": overlap}
    return kind(f"clip_kernels.{kernel}_kernel", {"dtype": dtype, **constants}, {"rows": "*i64"}, **options)


CLIP = {
    "maximum": clipping("norm", "float32", 0, NORM=0, TILE=1024, VECTOR=4, PARTIALS=1024),
    "sum of magnitudes": clipping("norm", "float16", 1, NORM=1, TILE=1024, VECTOR=8, PARTIALS=1),
    "sum of squares": clipping("norm", "bfloat16", 1, NORM=2, TILE=1024, VECTOR=8, PARTIALS=1024),
    "clipping": clipping("scale", "bfloat16", 1, CHUNK=4096, TILE=2048),
    "clipping, not overlapping": clipping("scale", "float32", 0, CHUNK=4096, TILE=1024),
}


def normalizing(kernel: str, types: dict[str, str], *, overlap: int | None = None, **constants: Any) -> Kind:
    if overlap is not None:
        constants["OVERLAP"] = overlap
    if kernel != "divisors":
        constants |= {"BLOCK_M": 32, "BLOCK_N": 256}
    options = OVERLAPPING if overlap else {}
    return kind(f"_kernels.normalize.{kernel}_kernel", constants, {"parts": "i32"} | types, **options)


NORMALIZE = {
    "squares in fp32": normalizing("squares", {"g": "*fp16", "x": "*fp16"}, overlap=2, HAS_STATE=True, COPIES=True),
    "squares in fp64": normalizing("squares", {"g": "*fp32", "x": "*fp64"}, overlap=0, HAS_STATE=False, COPIES=False),
    "division": normalizing("scale", {"g": "*bf16", "x": "*fp16"}, overlap=1, ADD_EPS=False, PARTS=1024),
    "division, eps added": normalizing("scale", {"g": "*fp32", "x": "*bf16"}, overlap=0, ADD_EPS=True, PARTS=1),
    "divisors": normalizing("divisors", {}, overlap=1, ADD_EPS=False, PARTS=1024),
    "row factors": kind("_kernels.normalize.factors_kernel", {"BLOCK": 1024}, {"a": "*fp16"}),
    "rows": normalizing("row_factors", {"x": "*fp16"}, BOTH_SIDES=False),
    "rows and columns": normalizing("row_factors", {"x": "*fp32"}, BOTH_SIDES=True),
}


def rounding(*, has_scale: bool) -> Kind:
    constants = {"HAS_SCALE": has_scale, "LARGEST": 126.0, "PARTS": 32, "SIDE": 64}
    types = {"x": "*fp16", "limits": "*i32", "by_rows": "*i8", "by_columns": "*i8", "parts": "i32"}
    types |= dict.fromkeys(("scale", "squares", "row_units", "column_units", "diagonal", "roots"), "*fp32")
    return kind("_kernels.int8_rounding.rounding_kernel", constants, types)


LIMITS = kind(
    "_kernels.int8_rounding.limits_kernel",
    {"ROWS": 32, "COLUMNS": 64},
    {"x": "*fp16", "limits": "*i32", "squares": "*fp32"},
    num_warps=1,
)
DIAGONAL = kind(
    "_kernels.int8_rounding.diagonal_kernel",
    {"PARTS": 32, "ADDED": 32},
    dict.fromkeys(("partials", "a_diagonal", "diagonal", "roots"), "*fp32")
    | {"largest": "*i32", "parts": "i32", "b": "fp32", "c": "fp32"},
)
INT8 = {
    "limits of rows and columns": LIMITS,
    "rounding to int8": rounding(has_scale=False),
    "rounding to int8, scaled": rounding(has_scale=True),
    "a diagonal": DIAGONAL,
}


def adding(slices: str, out: str, *, divides: bool) -> Kind:
    types = {"slices": f"*{SHORT[slices]}", "out": f"*{SHORT[out]}", "stride": "i64", "numel": "i64", "divisor": "fp32"}
    return kind("_kernels.slices.sum_kernel", {"DIVIDES": divides, "BLOCK": 1024}, types)


def adding_apart(slices: str, count: int, out: str, *, divides: bool) -> Kind:
    types = {"slices": [f"*{SHORT[slices]}"] * count, "out": f"*{SHORT[out]}", "numel": "i64", "divisor": "fp32"}
    return kind("_kernels.slices.sum_apart_kernel", {"DIVIDES": divides, "BLOCK": 1024}, types)


SLICES = {
    "sum of slices that lie apart": adding_apart("bfloat16", 2, "bfloat16", divides=False),
    "average of eight slices that lie apart": adding_apart("float16", 8, "float32", divides=True),
    "sum of slices": adding("bfloat16", "bfloat16", divides=False),
    "average of slices": adding("float16", "float32", divides=True),
}


def momentum(kernel: str, *, nesterov: bool, **constants: Any) -> Kind:
    """With one or the other of everything else, too."""
    constants |= {"G_DTYPE": "bfloat16" if nesterov else "float32", "B_DTYPE": "bfloat16" if nesterov else "float32"}
    constants |= {"NESTEROV": nesterov, "MAXIMIZE": not nesterov, "ALIGNED": nesterov}
    overlaps = nesterov and kernel != "strips"
    constants |= {} if kernel == "strips" else {"OVERLAP": overlaps}
    return kind(f"_kernels.muon_momentum.{kernel}_kernel", constants, **(OVERLAPPING if overlaps else {}))


MOMENTUM = {
    f"{name}{', Nesterov' if nesterov else ''}": momentum(kernel, nesterov=nesterov, **constants)
    for nesterov in (False, True)
    for name, kernel, constants in (
        ("guess", "guess", {}),
        ("momentum", "momentum", {"X_DTYPE": "float16"}),
        ("norm", "norm", {"X_DTYPE": "float16", "ADD_EPS": nesterov, "BLOCK": 1024}),
    )
} | {
    "strips": momentum("strips", nesterov=True, X_DTYPE="float16"),
    "equilibration": kind("_kernels.muon_momentum.equilibrate_kernel", {"ADD_EPS": False, "BLOCK": 1024}),
}


def updating(param: str, master: int, *, cautious: bool, factors: bool, random: bool, aligned: bool) -> Kind:
    constants = {"X_DTYPE": "float16", "P_DTYPE": param, "MASTER_KIND": master, "HAS_FACTORS": factors}
    constants |= {"CAUTIOUS": cautious, "STOCHASTIC": random, "ALIGNED": aligned}
    return kind("_kernels.muon_update.update_kernel", constants)


def variance(*, renormalize: bool, moves: bool) -> Kind:
    constants = {"RENORMALIZE": renormalize, "VARIANCE": moves, "BLOCK": 1024}
    return kind("_kernels.muon_update.variance_kernel", constants, num_warps=8)


UPDATE = {
    "renormalization": variance(renormalize=True, moves=False),
    "variance": variance(renormalize=False, moves=True),
    "step counts": kind("_kernels.muon_update.advance_kernel", {}),
    "update": updating("float32", 0, cautious=True, factors=True, random=False, aligned=False),
    "update, fp32 masters": updating("bfloat16", 1, cautious=False, factors=False, random=False, aligned=True),
    "update, low halves": updating("bfloat16", 2, cautious=True, factors=False, random=False, aligned=False),
    "update, random bits": updating("bfloat16", 0, cautious=False, factors=True, random=True, aligned=True),
    "update, random bits one by one": updating(
        "bfloat16", 0, cautious=False, factors=False, random=True, aligned=False
    ),
}


def elements(kernel: str, **constants: Any) -> Kind:
    """As ``functional._element_launch`` launches them."""
    options: dict[str, Any] = {"num_warps": 4, "maxnreg": 80, "enable_fp_fusion": False} | OVERLAPPING
    return kind(f"_kernels.muon_elements.{kernel}_kernel", constants | {"TILE": 2048, "OVERLAP": 1}, **options)


def moving(grad: str, buffer: str, u: str, *, nesterov: bool) -> Kind:
    dtypes = {"G_DTYPE": grad, "B_DTYPE": buffer, "U_DTYPE": u}
    return elements("momenta", **dtypes, NESTEROV=nesterov, MAXIMIZE=not nesterov)


def stepping(param: str, update: str, *, master: int, counted: bool) -> Kind:
    dtypes = {"P_DTYPE": param, "O_DTYPE": update}
    return elements("updates", **dtypes, MASTER=master, CAUTIOUS=not counted, COUNTED=counted)


ELEMENTS = {
    "momenta": moving("bfloat16", "bfloat16", "bfloat16", nesterov=True),
    "momenta, mixed": moving("float32", "float16", "bfloat16", nesterov=False),
    "updates": stepping("bfloat16", "bfloat16", master=0, counted=False),
    "updates, random bits": stepping("bfloat16", "bfloat16", master=0, counted=True),
    "updates, fp32 masters": stepping("float16", "float16", master=1, counted=True),
    "updates, low halves": stepping("bfloat16", "float32", master=2, counted=False),
}


Block = tuple[int, int]


def multiplying(
    kernel: str, tile: Tile, dtype: str, matrices: dict[str, Block | None], *, full: bool, **constants: Any
) -> Kind:
    """Matrices by the shape of their blocks, ``None`` where the kernel does without.

    A ``full`` product has C, Q and scale, and the next launch under its end; other ones α and β by their addresses.
    """
    short = SHORT[dtype]
    types = {f"{name}_desc": f"tensordesc<{short}{[1, *block]}>" for name, block in matrices.items() if block}
    if not full:
        types |= {"alpha": "*fp32", "beta": "*fp32", "scale": f"*{short}"}
    constants |= {f"{name}_desc": None for name, block in matrices.items() if block is None}
    constants |= {"HAS_C": full, "HAS_SCALE": full, "BY_ADDRESS": not full, "BLOCK_K": tile.depth, "GROUP": 8}
    overlaps = full and not tile.quartered
    if not tile.quartered:
        constants["OVERLAP"] = overlaps
    if not (tile.quartered or tile.joined):
        constants["IN_FP64"] = tile.in_fp64
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages} | (OVERLAPPING if overlaps else {})
    return kind(kernel, constants, types, **options)


def general(tile: Tile, *, full: bool, dtype: str = "float16") -> Kind:
    block = tile.rows, tile.columns
    matrices = {"a": (tile.rows, tile.depth), "b": (tile.depth, tile.columns), "c": block if full else None, "d": block}
    sides = {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns}
    return multiplying("_kernels.product.general_kernel", tile, dtype, matrices, full=full, **sides)


def of_symmetric(rows: int, columns: int, tile: Tile, *, full: bool, same: bool) -> dict[str, Block | None]:
    block = rows, columns
    of_b = None if same and rows == columns else (columns, tile.depth)
    given = block if full else None
    return {"a": (rows, tile.depth), "b": of_b, "c": given, "d": block, "q": given}


def symmetric(tile: Tile, *, full: bool, same: bool = True, dtype: str = "float16") -> Kind:
    of_tile = of_symmetric(tile.rows, tile.columns, tile, full=full, same=same)
    flags: dict[str, Any] = {"HAS_Q": full}
    if tile.joined:
        matrices = {"x": of_tile["a"], **{name: of_tile[name] for name in "cdq"}}
        return multiplying(
            "_kernels.symmetric.joined_kernel", tile, dtype, matrices, full=full, BLOCK=tile.rows, **flags
        )
    flags["SAME"] = same
    if tile.quartered:
        half = tile.rows // 2
        of_half = of_symmetric(half, half, tile, full=full, same=same)
        matrices = of_tile | {f"small_{name}": block for name, block in of_half.items()}
        return multiplying(
            "_kernels.symmetric.quartered_kernel", tile, dtype, matrices, full=full, BLOCK=tile.rows, **flags
        )
    mirror = None if tile.rows == tile.columns else (tile.columns, tile.rows)
    matrices = of_tile | {"mirror": mirror, "q_mirror": mirror if full else None}
    flags |= {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns}
    return multiplying("_kernels.symmetric.symmetric_kernel", tile, dtype, matrices, full=full, **flags)


def last(tile: Tile, *, full: bool, squares: bool, param: str, master: int, dtype: str = "float16") -> Kind:
    """Muon's last product: ``full`` has C, scale, and all else that there is."""
    block = tile.rows, tile.columns
    shapes = {"s": (tile.rows, tile.depth), "x": (tile.depth, tile.columns), "c": block, "o": block}
    types = {f"{name}_desc": f"tensordesc<{SHORT[dtype]}{[1, *shape]}>" for name, shape in shapes.items()}
    types["betas"] = "*fp32"
    constants = {
        "HAS_C": full,
        "HAS_SCALE": full,
        "HAS_BETAS": full,
        "SQUARES": squares,
        "P_DTYPE": param,
        "MASTER_KIND": master,
    }
    constants |= {"CAUTIOUS": full, "ALIGNED": full, "BLOCK_M": tile.rows, "BLOCK_N": tile.columns}
    constants |= {"BLOCK_K": tile.depth, "TILE_GROUP": 8}
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return kind("_kernels.muon_update.last_product_kernel", constants, types, **options)


PRODUCTS = {
    **{f"general, {tile.rows} × {tile.columns}": general(tile, full=True) for tile, _ in GENERAL},
    "general, alone": general(GENERAL_ALONE[0], full=False, dtype="bfloat16"),
    "general, fp32": general(FULL_PRECISION, full=True, dtype="float32"),
    "general, fp32 in fp64": general(IN_FP64, full=True, dtype="float32"),
    **{
        f"symmetric, {tile.rows} × {tile.columns}{', quartered' if tile.quartered else ''}": symmetric(tile, full=True)
        for tile, _ in SYMMETRIC
    },
    **{
        f"symmetric, {tile.rows} × {tile.columns}, alone": symmetric(
            tile._replace(num_stages=STAGES_ALONE[tile.columns][0]), full=False
        )
        for tile, _ in SYMMETRIC
        if not tile.quartered
    },
    "symmetric, two matrices, quartered": symmetric(SYMMETRIC[-1][0], full=False, same=False),
    "symmetric, fp32, two matrices": symmetric(FULL_PRECISION, full=True, same=False, dtype="float32"),
    "symmetric, fp32 in fp64": symmetric(IN_FP64, full=True, dtype="float32"),
    "joined": symmetric(JOINED[0]._replace(num_stages=STAGES_ALONE[64][0]), full=True),
    "last, update": last(LAST_TILE, full=True, squares=False, param="float32", master=0),
    "last, small": last(SMALL_LAST_TILE, full=False, squares=False, param="bfloat16", master=2),
    "last, fp32, squares": last(FULL_PRECISION, full=True, squares=True, param="bfloat16", master=1, dtype="float32"),
}
KINDS = ADAMW | CLIP | NORMALIZE | INT8 | SLICES | MOMENTUM | UPDATE | ELEMENTS | PRODUCTS


# bytes of code and of shared memory, layouts that are shuffled, whether tensor cores multiply, whether a warp's threads
# exchange numbers
Compiled = tuple[int, int, list[str], bool, bool, bool]


@pytest.fixture(scope="module")
def compiled() -> dict[str, Compiled | str]:
    """Of every kind what COMPILE finds, or why it does not."""
    return compiled_for(90, KINDS)


def compiled_for(target: int, kinds: dict[str, Kind], find: str = "compiled") -> dict[str, Any]:
    found = lines_of(COMPILE, str(target), find, count=len(kinds), stdin=json.dumps(list(kinds.values())))
    return dict(zip(kinds, found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_the_kernels_compile_for_hopper(name: str, compiled: dict[str, Compiled | str]) -> None:
    found = compiled[name]
    assert not isinstance(found, str), found[-3000:]
    code, shared, shuffled, on_tensor_cores, exchanges, wide_first = found
    assert code > 1000
    assert shared <= 232_448  # bytes that a program on Hopper may have
    assert on_tensor_cores == name.startswith(("general, ", "symmetric", "joined", "last, "))
    # or a warp's threads would wait for their step's counter at once, which one of them asks for later (`step_counts`)
    assert not (exchanges and name in ADAMW and not shuffled)
    if name in ADAMW:
        assert wide_first == KINDS[name][2].get("ELEMENTS_FIRST", False)
    # a warp has the scales of its own blocks where each thread has one, in their order
    assert bool(shuffled) == ("uint8" in json.dumps(KINDS[name]))
    warps = KINDS[name][-1].get("num_warps")
    plain = f"sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [{warps}], order = [0]"
    row = f"sizePerThread = [1, 1], threadsPerWarp = [1, 32], warpsPerCTA = [1, {warps}], order = [1, 0]"
    for layout in shuffled:
        assert layout.startswith(("#ttg.blocked<{" + plain, "#ttg.slice<{dim = 0, parent = #ttg.blocked<{" + row)), (
            layout
        )


@pytest.fixture(scope="module")
def spilled_with_ones() -> dict[str, dict[str, int] | str]:
    """Of every kind the bytes that are spilled with numbers of 1, by their names, or why it does not compile."""
    return compiled_for(90, KINDS, "of_ones")


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_numbers_of_one_compile(name: str, spilled_with_ones: dict[str, dict[str, int] | str]) -> None:
    """Triton makes them constants, unless the kernel names them in ``do_not_specialize``; the interpreter does not."""
    found = spilled_with_ones[name]
    assert not isinstance(found, str), found[-3000:]
    # one number, in `rounding_kernel` with Triton 3.5
    assert max(found.values(), default=0) <= 4, found


def not_overlapping(kind: Kind) -> Kind:
    """The kind as GPUs before Hopper run it, which have no dependent launch."""
    module, name, constants, types, options = kind
    options = {name: value for name, value in options.items() if name not in OVERLAPPING}
    return module, name, constants | {"OVERLAP": 0}, types, options


# What each kind of GPU may differ in; the target, and the shared memory of a program in KiB.
ELEMENTWISE = ("AdamW, bfloat16, list", "AdamW, uint8, alone", "sum of squares", "clipping", "momentum, Nesterov")
LARGEST_ALONE = SYMMETRIC[0][0]._replace(num_stages=STAGES_ALONE[128][0])
OTHERS: dict[str, tuple[int, int, dict[str, Kind]]] = {
    "Ampere": (80, 163, {name: not_overlapping(KINDS[name]) for name in ELEMENTWISE}),
    "Blackwell": (100, 227, {"general": PRODUCTS["general, 128 × 256"], "symmetric": PRODUCTS["symmetric, 128 × 128"]}),
    "Blackwell with little shared memory": (
        120,
        99,
        {
            "general": general(fitted(GENERAL[0][0], 99 << 10), full=True),
            "general, alone": general(fitted(GENERAL_ALONE[0], 99 << 10), full=True),
            "symmetric, alone": symmetric(fitted(LARGEST_ALONE, 99 << 10), full=True),
            "joined": symmetric(fitted(JOINED[0]._replace(num_stages=STAGES_ALONE[64][0]), 99 << 10), full=True),
            "last": last(fitted(LAST_TILE, 99 << 10), full=True, squares=False, param="bfloat16", master=2),
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_kernels_compile_for_other_gpus(name: str) -> None:
    target, kib, kinds = OTHERS[name]
    for label, found in compiled_for(target, kinds).items():
        assert not isinstance(found, str), (label, found[-3000:])
        code, shared, *_ = found
        assert code > 1000, label
        assert shared <= kib << 10, label


def test_no_kernel_is_left_out() -> None:
    folder = Path(optim_kernels.__file__).parent
    sources = {".".join(path.relative_to(folder).with_suffix("").parts): path for path in folder.rglob("*.py")}
    definition = re.compile(r"^@triton\.jit.*\ndef (?!_)(\w*kernel\w*)\(", re.MULTILINE)
    kernels = {(module, name) for module, path in sources.items() for name in definition.findall(path.read_text())}
    assert kernels == {(module, name) for module, name, *_ in KINDS.values()}
