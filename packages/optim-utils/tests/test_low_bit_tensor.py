"""LowBitTensor through everything a state goes through: bits stay bits, and what would lose them is refused."""

import copy
import importlib
import io
import logging
import math
import pickle
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor

from optim_utils._low_bit import graph_cache
from optim_utils.low_bit import (
    DYNAMIC8,
    INT4,
    INT8,
    MOMENT8,
    NF4,
    UINT8_AFFINE,
    LowBitFormat,
    LowBitTensor,
    dequantize,
    from_plain,
    quantize,
    quantize_into,
    rebuild_low_bit_tensor,
    to_plain,
)
from optim_utils.testing import run_ranks

FORMATS = [
    MOMENT8.with_(block_size=8),
    INT8.with_(block_size=8, layout="rows"),
    UINT8_AFFINE.with_(block_size=8),
    NF4.with_(block_size=8, layout="rows"),
    NF4.with_(block_size=8),
]
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f"{f.code}-{f.layout}")


def example(fmt: LowBitFormat, *shape: int, seed: int = 0) -> LowBitTensor:
    return quantize(torch.randn(shape or (6, 12), generator=torch.Generator().manual_seed(seed)), fmt)


def same_bits(a: LowBitTensor, b: LowBitTensor) -> bool:
    if type(a) is not type(b) or a.fmt != b.fmt or a.shape != b.shape or (a.offset is None) != (b.offset is None):
        return False
    return all(x is None or torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a.parts, b.parts))


def storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


@every_format
def test_copies_keep_the_bits_and_own_their_memory(fmt: LowBitFormat) -> None:
    q = example(fmt)
    for twin in (q.clone(), copy.deepcopy(q), pickle.loads(pickle.dumps(q)), q.to(torch.float32, copy=True)):
        assert same_bits(twin, q)
        assert storage(twin.codes) != storage(q.codes)
    shared = {"a": q, "b": [q]}
    twins = copy.deepcopy(shared)
    assert twins["a"] is twins["b"][0]
    assert same_bits(q.detach(), q)
    assert storage(q.detach().codes) == storage(q.codes)
    assert q.cpu() is q
    assert q.device == torch.device("cpu")


@every_format
def test_likes_and_dtype_and_device(fmt: LowBitFormat) -> None:
    q = example(fmt)
    assert torch.empty_like(q).shape == q.shape
    assert torch.empty_like(q).codes.shape == q.codes.shape
    assert (torch.zeros_like(q).dequantize() == 0).all()
    half = q.to(torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half.codes, q.codes)
    assert torch.equal(half.dequantize(), q.dequantize(torch.bfloat16))
    assert q.to("meta").codes.is_meta
    with pytest.raises(NotImplementedError, match=r"can't be torch.int64; use .dequantize"):
        q.to(torch.int64)
    with pytest.raises(NotImplementedError, match=r"can't be torch.float8_e4m3fn; use .dequantize"):
        q.to(torch.float8_e4m3fn)
    for like in (torch.zeros_like, torch.empty_like):
        assert like(q, dtype=torch.float16).dtype == torch.float16
        with pytest.raises(NotImplementedError, match=r"can't be torch.int64; use .dequantize"):
            like(q, dtype=torch.int64)
    assert "LowBitTensor(shape=(6, 12)" in repr(q)


@every_format
def test_copy_takes_codes_or_numbers_and_never_requantizes(fmt: LowBitFormat) -> None:
    q, other = example(fmt), example(fmt, seed=1)
    memory = storage(q.codes)
    assert q.copy_(other) is q
    assert same_bits(q, other)
    assert storage(q.codes) == memory
    numbers = torch.randn(6, 12)
    assert same_bits(q.copy_(numbers), quantize(numbers, fmt))
    with pytest.raises(NotImplementedError, match="same format"):
        q.copy_(quantize(numbers, fmt.with_(block_size=4)))
    with pytest.raises(NotImplementedError, match=r"copy its .dequantize"):
        numbers.copy_(q)
    with pytest.raises(ValueError, match="same shape"):
        q.copy_(torch.randn(12))
    with pytest.raises(TypeError, match=r"copy_ takes a tensor of shape \(6, 12\), got a float"):
        q.copy_(1.0)


def test_every_other_operation_is_refused_by_name() -> None:
    q = example(INT8)
    for operation, name in (
        (lambda: q + 1, "aten.add"),
        (lambda: q.mul_(2), "aten.mul_"),
        (lambda: q[0], "aten.select"),
        (lambda: torch.cat([q, q]), "aten.cat"),
        (lambda: torch._foreach_add_([torch.zeros(6, 12)], [q]), "aten._foreach_add_"),
        (lambda: torch.add(torch.zeros(6, 12), 1, out=q), "aten.add.out"),
    ):
        with pytest.raises(NotImplementedError, match=rf"{name}.*LowBitTensor of shape \(6, 12\).*\.dequantize\(\)"):
            operation()
    with pytest.raises(NotImplementedError, match=r"aten\.view"):
        q.view(-1)


def test_what_would_read_memory_that_is_not_there_is_refused() -> None:
    """Of torch's own methods one gave what happens to lie in memory, others killed the process."""
    q = example(INT8)
    for read in (
        lambda: np.from_dlpack(q),
        lambda: torch.from_dlpack(q),
        lambda: q.apply_(lambda x: x),
        lambda: q.map2_(q, q, lambda x, y, z: x),
    ):
        with pytest.raises(NotImplementedError, match=r"shape \(6, 12\) has no memory of numbers for .*\.dequantize"):
            read()
    with pytest.raises(NotImplementedError, match=r"can't be torch.sparse_coo"):
        torch.empty_like(q, layout=torch.sparse_coo)
    for ask in (q.is_pinned, q.pin_memory):
        with pytest.raises(NotImplementedError, match=r"for pinned memory take t.with_parts\(torch.Tensor.pin_memory"):
            ask()


@every_format
def test_data_can_be_exchanged(fmt: LowBitFormat) -> None:
    q, other = example(fmt), quantize(torch.randn(3, 8).bfloat16(), DYNAMIC8)
    assert same_bits(q.data, q)
    assert storage(q.data.codes) == storage(q.codes)
    kept = q
    q.data = other
    assert q is kept
    assert (q.shape, q.dtype) == (other.shape, torch.bfloat16)
    assert same_bits(q, other)
    assert torch.equal(dequantize(q), dequantize(other))
    with pytest.raises(TypeError, match=r"of shape \(3, 8\) must be a LowBitTensor, got a Tensor"):
        q.data = torch.zeros(3, 8)


IN_INFERENCE_MODE = {
    "clone": torch.clone,
    "contiguous": Tensor.contiguous,
    "deepcopy": copy.deepcopy,
    "to a dtype": lambda q: q.to(torch.bfloat16),
    "half": Tensor.half,
    "cpu": Tensor.cpu,
    "type": lambda q: q.type(torch.float16),
    "zeros_like": torch.zeros_like,
    "copy_": lambda q: q.copy_(torch.ones(q.shape)),
    # and what shares memory
    "detach": Tensor.detach,
    "data": lambda q: q.data,
    "slice": lambda q: q[8:16],
    "narrow": lambda q: q.narrow(0, 8, 8),
    "chunk": lambda q: q.chunk(2)[1],
    "split": lambda q: q.split(8)[1],
    "split in sizes": lambda q: q.split([8, 16])[1],
    "tensor_split": lambda q: q.tensor_split(3)[1],
}


@pytest.mark.parametrize("name", IN_INFERENCE_MODE)
@pytest.mark.parametrize("made_there", [False, True], ids=["normal", "inference"])
@every_format
def test_inference_mode_changes_no_result(fmt: LowBitFormat, made_there: bool, name: str) -> None:
    operation = IN_INFERENCE_MODE[name]
    with torch.inference_mode(made_there):
        q = example(fmt, 24, 8)
    expected, of_floats = operation(example(fmt, 24, 8)), torch.zeros(24, 8)
    with torch.inference_mode(made_there):
        of_floats = of_floats.clone()
    with torch.inference_mode():
        result, of_floats = operation(q), operation(of_floats)
    assert same_bits(result, expected)
    assert result.dtype == expected.dtype
    # torch's views of normal tensors are normal ones, which are written outside of the mode too
    assert result.is_inference() == result.codes.is_inference() == of_floats.is_inference()


def test_inference_mode_refuses_the_same_operations() -> None:
    q = example(INT8)
    for operation in (lambda: q + 1, lambda: q @ q.mT, lambda: q.reshape(-1), lambda: q.sum()):
        with torch.inference_mode(), pytest.raises(NotImplementedError, match="dequantize"):
            operation()


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("is_parameter", [False, True])
def test_copies_of_parameters_are_parameters(is_parameter: bool, requires_grad: bool) -> None:
    q = example(INT8)
    tensor = torch.nn.Parameter(q, requires_grad) if is_parameter else q.requires_grad_(requires_grad)
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    for twin in (copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor)), torch.load(file, weights_only=True)):
        assert isinstance(twin, torch.nn.Parameter) == is_parameter
        assert (twin.requires_grad, twin.is_leaf) == (requires_grad, True)
        assert same_bits(twin, q)
        assert storage(twin.codes) != storage(q.codes)


@every_format
def test_a_copy_of_several_tensors_shares_what_the_originals_share(fmt: LowBitFormat) -> None:
    whole = example(fmt, 24, 8)
    of_all = {"whole": whole, "part": whole[8:16], "codes": whole.codes, "again": whole}
    twins = copy.deepcopy(of_all)
    assert twins["again"] is twins["whole"]
    assert storage(twins["whole"].codes) != storage(whole.codes)
    twins["part"].copy_(torch.zeros(8, 8))
    expected = dequantize(whole)
    expected[8:16] = 0
    assert torch.equal(dequantize(twins["whole"]), expected)
    assert torch.equal(twins["codes"], twins["whole"].codes)


def test_a_fake_tensor_is_copied_without_a_look_at_its_memory() -> None:
    # of which torch warns, once in a process
    with FakeTensorMode():
        twin = copy.deepcopy(example(INT8))
    assert isinstance(twin.codes, FakeTensor)


def test_copies_and_files_keep_what_others_have_set() -> None:
    q = example(INT8)
    q.label, q.owner = {"role": "moment"}, q  # type: ignore[attr-defined]
    twin = copy.deepcopy(q)
    assert twin.label == {"role": "moment"}
    assert twin.label is not q.label  # type: ignore[attr-defined]
    assert twin.owner is twin
    del q.owner
    file = io.BytesIO()
    torch.save(q, file)
    file.seek(0)
    for other in (copy.copy(q), pickle.loads(pickle.dumps(q)), torch.load(file, weights_only=True)):
        assert other.label == {"role": "moment"}
        assert same_bits(other, q)


def test_parts_on_two_devices_and_shapes_that_are_none_are_refused() -> None:
    q = example(INT8)
    with pytest.raises(ValueError, match=r"scale must be on cpu, as the codes are, found meta"):
        LowBitTensor(q.codes, q.scale.to("meta"), None, INT8, (6, 12))
    with pytest.raises(ValueError, match=r"scale must be on cpu, as the codes are, found meta"):
        quantize_into(q.codes, q.scale.to("meta"), torch.ones(6, 12), INT8)
    for shape in (72, None, (6.0, 12.0), "ab"):
        with pytest.raises(TypeError, match=r"shape must hold integers, the sizes of a tensor, got"):
            LowBitTensor(q.codes, q.scale, None, INT8, shape)  # type: ignore[arg-type]


def test_a_module_can_hold_them() -> None:
    class Holder(torch.nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(example(INT8, seed=seed), requires_grad=False)
            self.register_buffer("moment", example(MOMENT8, seed=seed))

    module, other = Holder(0), copy.deepcopy(Holder(1))
    assert dict(other.named_parameters()).keys() == {"weight"}
    other.load_state_dict(module.state_dict())
    for twin in (other, copy.deepcopy(module), module.to(torch.bfloat16)):
        assert same_bits(twin.weight.detach(), example(INT8))
        assert same_bits(twin.moment, example(MOMENT8))
    assert module.weight.dtype == module.moment.dtype == torch.bfloat16
    module.load_state_dict({"weight": torch.ones(6, 12), "moment": torch.ones(6, 12)})
    assert torch.equal(dequantize(module.weight), torch.ones(6, 12, dtype=torch.bfloat16))


@every_format
def test_torch_save_is_bit_exact_with_weights_only(fmt: LowBitFormat) -> None:
    state = {"whole": example(fmt), "plain": to_plain(example(fmt, seed=2))}
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert same_bits(loaded["whole"], state["whole"])
    assert same_bits(from_plain(loaded["plain"], fmt), example(fmt, seed=2))


FRESH = """
import pickle, sys, torch
import optim_utils
from optim_utils.low_bit import dequantize
path = sys.argv[1]
pickled = pickle.load(open(path + ".pickle", "rb"))
saved = torch.load(path + ".pt", weights_only=True)
torch.save([dequantize(pickled), dequantize(saved)], path + ".out")
"""


@pytest.mark.parametrize("module", ["optim_utils.low_bit", "optim_utils._low_bit_tensor"], ids=["now", "0.3"])
def test_pickle_and_save_are_read_in_a_fresh_process(module: str, tmp_path: Path) -> None:
    q = example(UINT8_AFFINE.with_(block_size=8))
    path = str(tmp_path / "state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rebuild_low_bit_tensor, "__module__", module)
        Path(path + ".pickle").write_bytes(pickle.dumps(q))
        torch.save(q, path + ".pt")
    assert module.encode() in Path(path + ".pickle").read_bytes()
    subprocess.run([sys.executable, "-c", FRESH, path], check=True, timeout=120)
    for numbers in torch.load(path + ".out"):
        assert torch.equal(numbers, dequantize(q))


@every_format
def test_plain_form_holds_ints_and_shares_memory(fmt: LowBitFormat) -> None:
    q = example(fmt).to(torch.bfloat16)
    plain = to_plain(q)
    assert {type(value) for value in plain["format"].values()} == {int}
    assert ("offset" in plain) == fmt.has_offset
    back = from_plain(plain, fmt)
    assert same_bits(back, q)
    assert back.dtype == torch.bfloat16
    assert storage(back.codes) == storage(q.codes)


def test_plain_forms_that_changed_are_refused_with_what_was_found() -> None:
    plain = to_plain(example(DYNAMIC8.with_(block_size=8)))
    with pytest.raises(ValueError, match="found block_size 8, expected 256"):
        from_plain(plain, DYNAMIC8)
    with pytest.raises(ValueError, match="found code 'dynamic', expected 'int'"):
        from_plain(plain, INT8.with_(block_size=8))
    with pytest.raises(ValueError, match="found layout 'flat', expected 'rows'"):
        from_plain(plain, DYNAMIC8.with_(block_size=8, layout="rows"))
    with pytest.raises(ValueError, match=r"codes .* must be torch.uint8, found torch.bfloat16"):
        from_plain({**plain, "codes": plain["codes"].bfloat16()})
    with pytest.raises(ValueError, match=r"scale .* must be torch.float32, found torch.bfloat16"):
        from_plain({**plain, "scale": plain["scale"].bfloat16()})
    with pytest.raises(ValueError, match="must have shape"):
        from_plain({**plain, "scale": plain["scale"][:-1]})
    with pytest.raises(ValueError, match=r"without \['scale'\]"):
        from_plain({key: value for key, value in plain.items() if key != "scale"})
    with pytest.raises(ValueError, match="lacks its shape"):
        from_plain({**plain, "format": plain["format"] | {"dims": 5}})
    with pytest.raises(ValueError, match="codes of a plain form must be a tensor, found a NoneType"):
        from_plain({**plain, "codes": None})
    with pytest.raises(ValueError, match="offset of a plain form must be a tensor, found a str"):
        from_plain({**plain, "offset": "0"})
    for wrong in (torch.zeros(2), 5, [1]):
        with pytest.raises(ValueError, match=f"must be a dict of ints, found a {type(wrong).__name__}"):
            from_plain({**plain, "format": wrong})
    for wrong in ({"dtype": -1}, {"dtype": 9}, {"dims": -1}, {"size_0": -6}, {"size_0": 2**63}):
        with pytest.raises(ValueError, match="lacks its shape or dtype"):
            from_plain({**plain, "format": plain["format"] | wrong})
    # more elements than torch can count
    with pytest.raises(ValueError, match="codes"):
        from_plain({**plain, "format": plain["format"] | {"size_0": 2**62}})


@pytest.mark.parametrize("fmt", [INT8, UINT8_AFFINE], ids=["symmetric", "affine"])
def test_sharing_memory_with_other_processes_shares_the_parts(fmt: LowBitFormat) -> None:
    q = example(fmt)
    assert not q.is_shared()
    assert q.share_memory_() is q
    assert q.is_shared()
    assert all(part is None or part.is_shared() for part in q.parts)


def test_a_split_into_parts_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="split takes a size of at least 1 for the 6 elements of dimension 0, got 0"):
        example(INT8).split(0)


@pytest.mark.parametrize("shape", [(4, 8), ()], ids=str)
def test_a_cut_of_a_dimension_that_is_not_there_is_refused(shape: tuple[int, ...]) -> None:
    q = quantize(torch.ones(shape), INT8)
    for cut in (lambda: q.split(2, dim=2), lambda: q.split([2, 2], dim=2), lambda: torch.ops.aten.slice(q, 2, 0, 1)):
        with pytest.raises(IndexError, match=re.escape(f"a LowBitTensor of shape {shape} has no dimension 2 to cut")):
            cut()


@every_format
def test_torchs_cache_of_graphs_tells_tensors_apart_by_all_but_their_numbers(fmt: LowBitFormat) -> None:
    q = example(fmt)
    described = q._stable_hash_for_caching()
    assert described == example(fmt, seed=1)._stable_hash_for_caching()
    strided = q.clone()
    strided.scale = torch.empty(*q.scale.shape, 2).select(-1, 0)
    others = [
        example(fmt, 6, 13),
        example(fmt.with_(block_size=16)),
        q.to(torch.bfloat16),
        q.to("meta"),
        q.clone().requires_grad_(),
        strided,
    ]
    assert len({described, *(other._stable_hash_for_caching() for other in others)}) == 1 + len(others)


def test_torchs_cache_of_graphs_knows_the_numbers_behind_symbols() -> None:
    described = []

    def backend(graph: Any, inputs: Any) -> Any:
        described.extend(x._stable_hash_for_caching() for x in inputs if isinstance(x, LowBitTensor))
        return graph

    # which way the code goes, as whether a block is short, depends on the numbers
    for rows in (24, 25, 24):
        torch._dynamo.reset()
        torch.compile(dequantize, backend=backend, dynamic=True)(example(INT8, rows, 12))
    assert len(described) == 3
    assert described[0] == described[2] != described[1]


def test_torchs_cache_of_graphs_knows_all_code_that_is_traced() -> None:
    """That of this folder, and what its modules import, which import nothing more of the package."""
    folder = Path(graph_cache.__file__).parent

    def imported(file: Path) -> set[str]:
        names = re.findall(r"^ *(?:from|import) optim_utils[. ](?:import )?(\w+)", file.read_text(), re.MULTILINE)
        return set(names) - {"_low_bit"}

    assert set().union(*map(imported, folder.glob("*.py"))) == set(graph_cache.BESIDE)
    for name in graph_cache.BESIDE:
        assert imported(folder.parent / f"{name}.py") <= set(graph_cache.BESIDE)


def test_torchs_cache_of_graphs_knows_code_in_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for name, more in (("as_it_is", b""), ("updated", b"#")):
        with ZipFile(tmp_path / name, "w") as archive:
            for file in Path(graph_cache.__file__).parent.glob("*.py"):
                archive.writestr(f"{name}/{file.name}", file.read_bytes() + more)
        monkeypatch.syspath_prepend(tmp_path / name)
        found.append(importlib.import_module(f"{name}.graph_cache")._code())
    assert found[0] == graph_cache._code() != found[1]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(DTensor, "_stable_hash_for_caching"), reason="this torch asks no tensor for a hash")
@pytest.mark.filterwarnings("default:LowBitTensor does not")  # as an error it would hide what inductor logs then
def test_inductor_has_nothing_to_warn_of(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("torch._inductor.codecache")
    logger.addHandler(caplog.handler)
    try:
        torch._dynamo.reset()
        doubled = torch.compile(lambda q: 2 * dequantize(q), fullgraph=True, dynamic=True)(q := example(INT8, 24, 12))
    finally:
        logger.removeHandler(caplog.handler)
    assert torch.allclose(doubled, 2 * dequantize(q))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_torch_optimizers_do_to_states_keeps_codes_but_is_noticed_in_plain_forms() -> None:
    """``Optimizer.load_state_dict`` casts floating state to the parameter's dtype."""
    parameter = torch.nn.Parameter(torch.randn(6, 12).bfloat16())
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    q = example(MOMENT8.with_(block_size=8))
    optimizer.state[parameter] = {"whole": q, "plain": to_plain(q)}
    optimizer.load_state_dict(optimizer.state_dict())
    loaded = optimizer.state[parameter]
    assert loaded["whole"].dtype == torch.bfloat16
    assert torch.equal(loaded["whole"].codes, q.codes)
    assert torch.equal(loaded["whole"].scale, q.scale)
    with pytest.raises(ValueError, match="something cast them"):
        from_plain(loaded["plain"])


SHARDED = [
    MOMENT8.with_(block_size=8),
    DYNAMIC8.with_(block_size=8, layout="rows"),
    NF4.with_(block_size=8, layout="rows"),
]


def numbers(rows: int = 8) -> Tensor:
    return torch.randn(rows, 24, generator=torch.Generator().manual_seed(7))


def full(q: LowBitTensor) -> LowBitTensor:
    """The same tensor without DTensors."""
    return q.with_parts(lambda part: part.full_tensor())


def dtensor_rank(rank: int, world_size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (world_size,))
    for fmt in SHARDED:
        for placement in (Shard(0), Replicate()):
            sharded = quantize(distribute_tensor(numbers(), mesh, [placement]), fmt)
            assert isinstance(sharded.codes, DTensor)
            assert sharded.codes.placements == sharded.scale.placements == (placement,)
            assert same_bits(full(sharded), quantize(numbers(), fmt))
            decoded = dequantize(sharded)
            assert decoded.placements == (placement,)
            assert torch.equal(decoded.full_tensor(), dequantize(quantize(numbers(), fmt)))
            assert sharded[:].codes.placements == (placement,)
            assert same_bits(full(sharded[:]), full(sharded))
            assert same_bits(full(sharded.split(len(sharded))[0]), full(sharded))
            twin = torch.zeros_like(sharded)
            twin.copy_(sharded)
            assert same_bits(full(twin), full(sharded))
            assert same_bits(full(twin.copy_(distribute_tensor(numbers(), mesh, [placement]))), full(sharded))
    if world_size == 1:
        return
    uneven = distribute_tensor(numbers(3), mesh, [Shard(0)])
    rows = quantize(uneven, SHARDED[1])
    assert same_bits(full(rows), quantize(numbers(3), SHARDED[1]))
    columns = distribute_tensor(numbers(), mesh, [Shard(1)])
    for fmt, message in (
        (SHARDED[0], "run across its sharded dimension 1"),
        (SHARDED[1], "next aligned offset is 16"),
    ):
        with pytest.raises(ValueError, match=message):
            quantize(columns, fmt)
    with pytest.raises(ValueError, match=r"shard 0 of 2 .* has 6 scales, but of a DTensor of all 9 it would have 5:"):
        quantize(uneven, SHARDED[0])
    with pytest.raises(ValueError, match="next aligned offset is 80"):
        quantize(uneven, SHARDED[0].with_(block_size=80))
    for placement in (Partial(), _StridedShard(0, split_factor=2)):
        wrong = DTensor.from_local(numbers(), mesh, [placement])
        with pytest.raises(ValueError, match=r"must have placements Shard or Replicate, got \S.*; redistribute it$"):
            quantize(wrong, SHARDED[0])
    with pytest.raises(TypeError, match="codes that are DTensors are made from a DTensor, got a Tensor"):
        rows.copy_(numbers(3))
    for wrong in (uneven, rows):
        with pytest.raises(TypeError, match="codes that are plain tensors are made from a plain tensor, got a DTensor"):
            quantize(numbers(3), SHARDED[1]).copy_(wrong)
    with pytest.raises(TypeError, match="out must be a DTensor, as the codes of t are, got a Tensor"):
        dequantize(rows, out=torch.empty(3, 24))


@pytest.mark.parametrize("world_size", [1, 2])
def test_dtensors_give_dtensors_of_the_same_bits(world_size: int) -> None:
    run_ranks(dtensor_rank, world_size)


def cut_rank(rank: int, world_size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    line, grid, nibbles = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2)), INT4.with_(block_size=4)
    for fmt, shape, mesh, message in (
        # two axes cut 3 rows in 2 and 1: element 3 begins a shard
        (
            INT8.with_(block_size=2),
            (6,),
            grid,
            "4 shards of dimension 0 .* element 3 is no multiple .* next aligned offset is 4",
        ),
        (
            INT8.with_(block_size=2),
            (14, 4),
            grid,
            "shard 0 of 4 of dimension 0 .* has 8 scales, but of a DTensor of all 28 .* have 7:",
        ),
        (nibbles, (6, 4), line, "shard 0 of 4 of dimension 0 .* has 4 bytes of codes, but .* of all 12 .* have 3:"),
        (INT8.with_(block_size=4), (6, 4), grid, None),
        (nibbles, (8, 4), grid, None),
        (nibbles.with_(layout="rows"), (6, 4), line, None),
    ):
        whole = numbers(14).flatten()[: math.prod(shape)].view(shape)
        part = distribute_tensor(whole, mesh, [Shard(0)] * mesh.ndim, src_data_rank=None)
        if message is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # two gathers, one for each axis
                assert same_bits(full(quantize(part, fmt)), quantize(whole, fmt)), (fmt, shape)
        else:
            with pytest.raises(ValueError, match=message):
                quantize(part, fmt)
    # a dimension that flat scales, and 4-bit codes, do not have, though its parts are whole blocks
    row = distribute_tensor(numbers(1).flatten()[:16].view(1, 16), line, [Shard(1)], src_data_rank=None)
    for fmt in (INT8.with_(block_size=4), nibbles):
        with pytest.raises(ValueError, match=r"of shape \(1, 16\) .* its sharded dimension 1: shard dimension 0"):
            quantize(row, fmt)
        rows = fmt.with_(layout="rows")
        assert same_bits(full(quantize(row, rows)), quantize(row.full_tensor(), rows))


def test_parts_of_dtensors_that_codes_and_scales_do_not_have_are_refused() -> None:
    run_ranks(cut_rank, 4)


def stochastic_rank(rank: int, world_size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    rows = DYNAMIC8.with_(block_size=4, layout="rows")
    for fmt, num_rows, placement in (
        (MOMENT8.with_(block_size=8), 8, Shard(0)),
        (rows, 3, Shard(0)),
        (rows, 3, Shard(1)),
        (rows, 3, Replicate()),
    ):
        whole = numbers(num_rows)
        sharded = distribute_tensor(whole, mesh, [placement])
        coded = quantize(sharded, fmt, stochastic=True, seed=11)
        assert same_bits(full(coded), quantize(whole, fmt, stochastic=True, seed=11)), (fmt, placement)
        options = {"stochastic": True}
        if placement == Replicate():
            with pytest.raises(ValueError, match=r"replicas .* shape \(3, 24\) .* give a seed, .* on all"):
                quantize(sharded, fmt, **options)
            # whose generators agree may say so
            options["generator"] = torch.Generator().manual_seed(3)
        assert quantize(sharded, fmt, **options).codes.placements == (placement,)


def test_a_seed_rounds_a_sharded_tensor_as_the_whole() -> None:
    run_ranks(stochastic_rank, 2)


def state_of(world_size: int, fmt: LowBitFormat, *, zeros: bool = False) -> dict[str, Any]:
    """The state that is saved and loaded: plain forms of DTensor and replicated tensors, and a leaf of the subclass."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    x = torch.zeros_like(numbers()) if zeros else numbers()
    return {
        "sharded": to_plain(quantize(distribute_tensor(x, mesh, [Shard(0)]), fmt)),
        "replicated": to_plain(quantize(x, fmt)),
    }


def dcp_save(rank: int, world_size: int, folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({f"{i}": state_of(world_size, fmt) for i, fmt in enumerate(SHARDED)}, checkpoint_id=folder)


def dcp_load(rank: int, world_size: int, folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    state = {f"{i}": state_of(world_size, fmt, zeros=True) for i, fmt in enumerate(SHARDED)}
    dcp.load(state, checkpoint_id=folder)
    for i, fmt in enumerate(SHARDED):
        expected = quantize(numbers(), fmt)
        assert same_bits(full(from_plain(state[f"{i}"]["sharded"], fmt)), expected)
        assert same_bits(from_plain(state[f"{i}"]["replicated"], fmt), expected)


@pytest.mark.parametrize(("saved_at", "loaded_at"), [(2, 1), (1, 2), (2, 2)])
def test_dcp_round_trips_are_bit_exact_across_world_sizes(tmp_path: Path, saved_at: int, loaded_at: int) -> None:
    run_ranks(dcp_save, saved_at, str(tmp_path))
    run_ranks(dcp_load, loaded_at, str(tmp_path))


def dcp_leaf(rank: int, world_size: int, folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    fmt = MOMENT8.with_(block_size=8)
    q = quantize(numbers(), fmt)
    with pytest.raises(dcp.api.CheckpointException, match=r"store optim_utils.to_plain"):
        dcp.save({"leaf": q}, checkpoint_id=folder)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_leaf_handed_to_dcp_is_refused(tmp_path: Path, world_size: int) -> None:
    run_ranks(dcp_leaf, world_size, str(tmp_path))
