"""What every optimizer needs: configurations, state that survives a checkpoint, low-bit storage, balance, routing.

Names are importable from here and from the module that defines them; importing this package imports torch and nothing
else.
"""

from optim_utils.abstract_dataclass import AbstractDataclass, FrozenAbstractDataclass
from optim_utils.balance import BytesCost, CostModel, CubicCost, NewtonSchulzCost, Partition, partition
from optim_utils.block_info import BlockInfo, DTensorBlockInfo
from optim_utils.commons import batched, get_all_non_abstract_subclasses
from optim_utils.dict_zip_iterator import DictZipIterator
from optim_utils.optimizer_modules import LoadIssue, LoadReport, OptimizerModule, StateLoadError
from optim_utils.param_groups import (
    MatrixView,
    Route,
    RouteTable,
    Rule,
    UnroutedParameterError,
    route_parameters,
)
from optim_utils.shampoo_checkpoint_utils import (
    extract_state_dict_content,
    flatten,
    from_dotted,
    to_dotted,
    unflatten,
    update_param_state_dict_object,
)
from optim_utils.shampoo_model_utils import (
    CombinedLinear,
    combine_linears,
    join_weight_bias,
    split_weight_bias,
    uncombine_linears,
)
from optim_utils.shampoo_utils import (
    MergePlan,
    ParameterizeEnterExitContext,
    compress_list,
    distribute_buffer_sizes,
    generate_pairwise_indices,
    get_dtype_size,
    merge_small_dims,
    multi_dim_split,
    multi_dim_unsplit,
    pack_upper_triangular,
    plan_merge,
    unpack_upper_triangular,
)

__all__ = [
    "AbstractDataclass",
    "BlockInfo",
    "BytesCost",
    "CostModel",
    "CubicCost",
    "CombinedLinear",
    "DTensorBlockInfo",
    "DictZipIterator",
    "FrozenAbstractDataclass",
    "LoadIssue",
    "LoadReport",
    "MatrixView",
    "MergePlan",
    "NewtonSchulzCost",
    "OptimizerModule",
    "ParameterizeEnterExitContext",
    "Partition",
    "Route",
    "RouteTable",
    "Rule",
    "StateLoadError",
    "UnroutedParameterError",
    "batched",
    "combine_linears",
    "compress_list",
    "distribute_buffer_sizes",
    "extract_state_dict_content",
    "flatten",
    "from_dotted",
    "generate_pairwise_indices",
    "get_all_non_abstract_subclasses",
    "get_dtype_size",
    "join_weight_bias",
    "merge_small_dims",
    "multi_dim_split",
    "multi_dim_unsplit",
    "pack_upper_triangular",
    "partition",
    "plan_merge",
    "route_parameters",
    "split_weight_bias",
    "to_dotted",
    "uncombine_linears",
    "unflatten",
    "unpack_upper_triangular",
    "update_param_state_dict_object",
]
