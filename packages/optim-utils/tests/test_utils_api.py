"""The contract: every public name is where it is said to be, and importing costs torch and nothing more."""

import copy
import importlib
import pickle
import subprocess
import sys
from types import ModuleType

import pytest
import torch

import optim_utils
from optim_utils import (
    CombinedLinear,
    DictZipIterator,
    LoadIssue,
    LoadReport,
    MergePlan,
    ParameterizeEnterExitContext,
    StateLoadError,
)

pytestmark = pytest.mark.installed

MODULES = {
    "abstract_dataclass": "AbstractDataclass FrozenAbstractDataclass",
    "commons": "get_all_non_abstract_subclasses batched",
    "compiling": "not_compiled",
    "dict_zip_iterator": "DictZipIterator",
    "optimizer_modules": "OptimizerModule LoadReport LoadIssue StateLoadError",
    "shampoo_utils": "merge_small_dims multi_dim_split compress_list get_dtype_size generate_pairwise_indices "
    "distribute_buffer_sizes ParameterizeEnterExitContext MergePlan plan_merge multi_dim_unsplit "
    "pack_upper_triangular unpack_upper_triangular",
    "shampoo_model_utils": "CombinedLinear combine_linears uncombine_linears join_weight_bias split_weight_bias",
    "shampoo_checkpoint_utils": "flatten unflatten extract_state_dict_content update_param_state_dict_object "
    "to_dotted from_dotted attach_state_dict_hooks",
    "shampoo_quantization": "QuantizedTensor QuantizedTensorList DequantizeQuantizedTensorListContext FLOAT_DTYPES",
    "block_info": "BlockInfo DTensorBlockInfo",
    "low_bit": "LowBitFormat LowBitTensor quantize quantize_into dequantize to_plain from_plain aligned_bounds "
    "INT8 UINT8_AFFINE DYNAMIC8 DYNAMIC8_UNSIGNED MOMENT8 FP8_E4M3 FP8_E5M2 INT4 NF4 LOG4_UNSIGNED",
    "rounding": "stochastic_round stochastic_round_ philox_uint32",
    "balance": "partition Partition BytesCost CubicCost NewtonSchulzCost",
    "param_groups": "route_parameters Rule Route RouteTable MatrixView UnroutedParameterError",
}
NAMES = [(module, name) for module, names in MODULES.items() for name in names.split()]


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[f"{module}.{name}" for module, name in NAMES])
def test_names_are_importable_from_their_module_and_the_package(module, name):
    its_module = importlib.import_module(f"optim_utils.{module}")
    assert getattr(its_module, name) is getattr(optim_utils, name)
    assert name in its_module.__all__
    assert name in optim_utils.__all__


def test_all_is_complete_and_has_no_name_twice():
    assert len(set(optim_utils.__all__)) == len(optim_utils.__all__)
    for name in optim_utils.__all__:
        assert hasattr(optim_utils, name)


def test_the_name_that_users_of_the_original_know_is_the_public_one():
    assert optim_utils.shampoo_quantization._FLOAT_DTYPES is optim_utils.FLOAT_DTYPES


def test_importing_the_package_loads_no_slow_part_of_torch():
    code = """
import sys, torch
before = set(sys.modules)
import optim_utils
new = {name for name in set(sys.modules) - before if not name.startswith("optim_utils")}
slow = sorted(name for name in new if name.startswith(("torch.distributed.tensor", "torch._dynamo", "torch._inductor")))
assert not slow, slow
assert not {"numpy", "triton", "optim_kernels"} & new, new
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


EXAMPLES = {
    "CombinedLinear": CombinedLinear(2, 3, align_rows=True),
    "DictZipIterator": DictZipIterator({"a": [1, 2]}),
    "LoadIssue": LoadIssue("p", "missing", "a", "b"),
    "LoadReport": LoadReport((LoadIssue("p", "missing", "a", "b"),)),
    "MergePlan": MergePlan((2, 3), (6,)),
    "ParameterizeEnterExitContext": ParameterizeEnterExitContext([1], len, len),
    "StateLoadError": StateLoadError("text", LoadReport()),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_public_classes_can_be_copied_and_pickled(name):
    value = EXAMPLES[name]
    for twin in (copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert type(twin) is type(value)
        assert repr(twin) == repr(value) or type(twin).__repr__ is object.__repr__
    if name == "CombinedLinear":
        assert torch.equal(copy.deepcopy(value).combined_weight, value.combined_weight)


def test_a_thread_that_imports_dtensors_disturbs_no_other(monkeypatch):
    # as it is while the import goes on
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", ModuleType("torch.distributed.tensor"))
    x = torch.ones(64)
    assert torch.equal(optim_utils.dequantize(optim_utils.quantize(x, optim_utils.INT8)), x)
    assert torch.equal(optim_utils.stochastic_round(x, torch.bfloat16).float(), x)
