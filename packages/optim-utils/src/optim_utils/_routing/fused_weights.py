"""Which matrices lie in a weight: Q, K, V; gate and up; recurrent gates; heads; experts; convolutions; (in, out).

`matrix_view` starts from what the module and the name say; a rule's arguments take precedence. If all of these leave
the matrices open, it raises a `Refusal` that proposes a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

from torch import Tensor, nn

from optim_utils._combined_linear import CombinedLinear
from optim_utils._routing.leaf import CONVOLUTIONS, Convolution, Leaf, Refusal, matcher
from optim_utils._routing.matrix_view import MatrixView
from optim_utils._routing.rules import Rule

__all__ = ["is_row_or_column", "matrix_view"]

_is_qkv = matcher("*qkv*", "*c_attn*", "in_proj_weight", "*query_key_value*", "w_pack")
# modules that compute keys and values of what other tokens attend to
_is_kv = matcher("kv", "to_kv", "kv_proj", "wkv")
_is_gate_up = matcher("gate_up_proj", "w13")
_is_experts = matcher("*experts*")
_is_shared = matcher("shared*")
_is_weight = matcher("weight*", "combined_weight*")
# The arguments of a rule that leaves a weight in one piece.
_WHOLE = "split=1"
# What the gate and up projections feed into; its shape tells along which dimension those two are fused.
_DOWN_OF = {"gate_up_proj": "down_proj", "w13": "w2"}
_GATE_UP_OF = {down: gate_up for gate_up, down in _DOWN_OF.items()}
# torch's recurrent layers, and how many matrices lie one below the other in each of their input and state weights.
_GATES: dict[type[nn.Module], int] = {
    nn.LSTM: 4,
    nn.LSTMCell: 4,
    nn.GRU: 3,
    nn.GRUCell: 3,
    nn.RNN: 1,
    nn.RNNCell: 1,
}
_is_recurrent = matcher("weight_ih*", "weight_hh*")


@dataclass(frozen=True)
class _Fusion:
    """``sizes`` of the parts along ``dim`` (-2 rows, -1 columns) of the stored matrix."""

    sizes: tuple[int, ...] = ()
    dim: int = -2


_NO_RULE = Rule("*")


def matrix_view(leaf: Leaf, rule: Rule = _NO_RULE) -> MatrixView:
    """The matrices of ``leaf``, as far as the rule does not say by what the module and the name say.

    Raises:
        Refusal: if the shape does not divide as asked, or nothing says how to divide it.
    """
    try:
        view = _stored_matrices(leaf, rule)
        transposed = view.transposed or _is_stored_transposed(leaf) if rule.transposed is None else rule.transposed
        if rule.split is not None or rule.split_dim is not None:
            fusion = _asked_fusion(leaf, view, rule, transposed)
        else:
            fusion = _named_fusion(leaf, view, rule, transposed)
        # If the parts of a fused weight lie side by side along its columns, it can only be stored (in, out).
        if rule.transposed is None and fusion.dim == -1 and (leaf.is_called(_is_qkv) or leaf.is_called(_is_gate_up)):
            transposed = True
        if fusion.sizes or transposed != view.transposed:
            view = replace(view, split=fusion.sizes, split_dim=fusion.dim, transposed=transposed)
        return view if rule.num_heads is None else replace(view, num_heads=_heads(view, rule.num_heads))
    except ValueError as error:
        raise Refusal(str(error), _WHOLE) from error


def is_row_or_column(leaf: Leaf) -> bool:
    """Whether each matrix of ``leaf`` is a single row or column."""
    if sum(size != 1 for size in leaf.shape) <= 1:
        return True
    try:
        return 1 in _stored_matrices(leaf, _NO_RULE).stored_matrix[-2:]
    except (Refusal, ValueError):
        return False


def _stored_matrices(leaf: Leaf, rule: Rule) -> MatrixView:
    """The tensor as a matrix or a batch of matrices, before anything is split."""
    shape, batched = leaf.shape, rule.batched
    if len(shape) < 2:
        raise Refusal(f"Muon takes matrices, got shape {shape}", "to='adamw'")
    if len(shape) == 2:
        return MatrixView.identity(shape)
    if batched is None and leaf.modules and isinstance(leaf.modules[0], CONVOLUTIONS):
        return _convolution(leaf, leaf.modules[0])
    if batched is None and len(shape) == 3 and any(_is_experts(name) for path in leaf.paths for name in path):
        batched = True
    if batched is None:
        raise Refusal(f"{len(shape)}-D, and nothing says what its matrices are", "to='adamw'", *_stacks(leaf, rule))
    return MatrixView.identity(shape) if batched else _flattening_view(leaf, (shape[0], prod(shape[1:])))


def _stacks(leaf: Leaf, rule: Rule) -> list[str]:
    """Arguments beside those of ``rule`` that may fit a weight of three or more dimensions that is no convolution."""
    by_name = rule.split is None and rule.split_dim is None
    if by_name and leaf.is_called(_is_gate_up):
        rows, columns = leaf.shape[-2:]
        by_rows = rows % 2 == 0 and rule.transposed is not True
        by_columns = columns % 2 == 0 and rule.transposed is not False
        guess = ["batched=True, split=2, split_dim=-2"] * by_rows
        guess += ["batched=True, split=2, split_dim=-1, transposed=True"] * by_columns
        return guess or [f"batched=True, {_WHOLE}"]
    if by_name and (leaf.is_called(_is_qkv) or _is_recurrent(leaf.paths[0][-1])):
        return [f"batched=True, {_WHOLE}"]
    return ["to='muon', batched=True", "to='muon', batched=False"]


def _convolution(leaf: Leaf, module: Convolution) -> MatrixView:
    """The matrix (out, in k) of a convolution, or (in, out k), read transposed, of a transposed one; one per group."""
    groups = (module.groups,) if module.groups > 1 else ()
    first = leaf.shape[0] // module.groups
    view = _flattening_view(leaf, (*groups, first, prod(leaf.shape[1:])))
    return replace(view, transposed=module.transposed)


def _flattening_view(leaf: Leaf, matrix_shape: tuple[int, ...]) -> MatrixView:
    """The view as ``matrix_shape`` that flattens dimensions in memory order: channels_last weights need no copy.

    The order of columns does not matter to Muon: the polar factor of G P is that of G times P for a permutation P.
    """
    strides = leaf.param.stride()
    inner = sorted(range(1, len(leaf.shape)), key=lambda dim: -strides[dim])
    is_permuted = not leaf.param.is_contiguous() and inner != sorted(inner)
    view = MatrixView(shape=leaf.shape, order=(0, *inner) if is_permuted else (), matrix_shape=matrix_shape)
    # the parts of a DTensor may be laid out in their own way
    if type(leaf.param) in (Tensor, nn.Parameter):
        try:
            view.views(leaf.param.detach())
        except ValueError:
            reason = f"strides {strides} allow no view as {matrix_shape}; make it contiguous"
            raise Refusal(reason, "to='adamw'") from None
    return view


def _is_stored_transposed(leaf: Leaf) -> bool:
    """Whether the weight is stored (in, out): transformers' Conv1D, or experts whose projections fit only so."""
    if any(type(module).__name__ == "Conv1D" for module in leaf.modules):
        return True
    return _experts_transposed(leaf) is True


def _experts_transposed(leaf: Leaf) -> bool | None:
    """Whether fused gate-and-up and down projections are stored (in, out); None if the neighbour does not tell.

    With width d and inner width f, (2f, d) and (d, f) are the usual storage, (d, 2f) and (f, d) the transposed one.
    """
    for name in leaf.names:
        path = name.split(".")
        for position in range(max(0, len(path) - 2), len(path)):
            component = path[position]
            if (neighbour := _DOWN_OF.get(component) or _GATE_UP_OF.get(component)) is None:
                continue
            other = leaf.shapes.get(".".join([*path[:position], neighbour, *path[position + 1 :]]))
            if other is None or len(other) != len(leaf.shape):
                continue
            gate_up, down = (leaf.shape, other) if component in _DOWN_OF else (other, leaf.shape)
            if gate_up[-2:] == (2 * down[-1], down[-2]):
                return False
            if gate_up[-2:] == (down[-1], 2 * down[-2]):
                return True
    return None


def _named_fusion(leaf: Leaf, view: MatrixView, rule: Rule, transposed: bool) -> _Fusion:
    """The parts that the name implies: three of QKV, two of gate and up or of K and V, one per recurrent gate."""
    if len(leaf.shape) == 2 and _is_of_all_experts(leaf):
        reason = "2-D, and nothing says where experts lie in it: split=<how many>, with split_dim, if side by side"
        raise Refusal(reason, _WHOLE, "to='adamw'")
    if leaf.is_called(_is_qkv):
        _check_is_weight(leaf, _is_qkv, view.stored_matrix[-1 if transposed else -2], parts=3)
        return _whole_groups(view, 3, "Q, K, V") or _qkv(leaf, view, transposed)
    if leaf.is_called(_is_gate_up):
        _check_is_weight(leaf, _is_gate_up, view.stored_matrix[-1 if transposed else -2], parts=2)
        return _whole_groups(view, 2, "gate and up") or _gate_up(leaf, view, rule, transposed)
    if any(_is_kv(path[-2]) and _is_weight(path[-1]) for path in leaf.paths if len(path) > 1):
        return _whole_groups(view, 2, "K and V") or _halves(view, transposed, "K and V")
    if _is_recurrent(leaf.paths[0][-1]):
        return _gates(leaf, view.stored_matrix[-2])
    return _Fusion()


def _whole_groups(view: MatrixView, parts: int, fused: str) -> _Fusion | None:
    """No cuts for a grouped convolution each of whose groups lies in one of the parts; None for what has no groups."""
    if len(view.matrix_shape) < 3:
        return None
    groups = view.matrix_shape[0]
    if groups % parts:
        raise Refusal(f"the name says fused {fused}, but {groups} groups do not divide into {parts} parts", _WHOLE)
    return _Fusion()


def _is_of_all_experts(leaf: Leaf) -> bool:
    """Whether the name says experts without an expert's number; a linear layer among experts is a matrix of its own."""
    if leaf.is_in(nn.Linear, CombinedLinear):
        return False
    for path in leaf.paths:
        place = next((i for i, component in enumerate(path) if _is_experts(component)), None)
        if place is None or any(map(_is_shared, path)):
            continue
        # in the parameter's own name only a bare number is an expert's: `w1` is the first weight of every expert
        *modules, own = path[place + 1 :] or [""]
        if not (own.isdigit() or any(map(str.isdigit, "".join(modules)))):
            return True
    return False


def _gates(leaf: Leaf, rows: int) -> _Fusion:
    """As many equal parts as the recurrent layer has gates."""
    count = _num_gates(leaf)
    if count is None:
        in_parts = [f"split={gates}" for gates in (4, 3) if rows % gates == 0]
        raise Refusal("the name says a recurrent layer, and nothing says how many gates it has", *in_parts, _WHOLE)
    return _Fusion((rows // count,) * count if count > 1 else ())


def _num_gates(leaf: Leaf) -> int | None:
    """The gates in a weight of one of torch's recurrent layers."""
    return next((count for kind, count in _GATES.items() if leaf.is_in(kind)), None)


def _check_is_weight(leaf: Leaf, is_fused: Callable[[str], object], outputs: int, *, parts: int) -> None:
    """Refuse what is not the weight: a fused module's name does not say whether a low-rank factor in it is fused."""
    for path in leaf.paths:
        module, own = path[-2] if len(path) > 1 else "", path[-1]
        # a tied weight need not be in a fused module by all of its names
        if is_fused(module) and not is_fused(own) and not _is_weight(own):
            in_parts = [] if outputs % parts else [f"split={parts}"]
            reason = f"{module} is fused by its name, and nothing says whether its {own} is"
            raise Refusal(reason, _WHOLE, *in_parts)


def _qkv(leaf: Leaf, view: MatrixView, transposed: bool) -> _Fusion:
    """Three equal parts along the dimension that is three times the other."""
    is_conv = bool(view.matrix_shape)
    rows, columns = leaf.shape[:2] if is_conv else view.stored_matrix[-2:]
    # the last column is no input
    has_bias = any(isinstance(module, CombinedLinear) and module.has_bias for module in leaf.modules)
    columns -= has_bias
    if rows == 3 * columns:
        return _Fusion((columns,) * 3, -2)
    only_rows = is_conv or has_bias  # of these the parts cannot lie side by side
    if columns == 3 * rows and not only_rows:
        return _Fusion((rows,) * 3, -1)
    width, fused = sorted((rows, columns))
    rest = fused - width
    # grouped-query attention: as many query rows as the width, and the rest in equal parts for K and V, which are no
    # larger; or heads that are together wider or narrower than the model
    grouped = rest > 0 and rest % 2 == 0 and rest // 2 <= width and not (only_rows and fused == columns)
    guess = [f"split=({width}, {rest // 2}, {rest // 2})"] * grouped
    # three equal parts are taken of the outputs
    outputs, inputs = (-1, -2) if transposed else (-2, -1)
    extent = view.stored_matrix
    guess += ["split=3"] * (extent[outputs] % 3 == 0)
    if extent[inputs] > extent[outputs] and extent[inputs] % 3 == 0 and not only_rows:
        guess.append(f"split=3, split_dim={inputs}")
    raise Refusal(
        f"the name says fused Q, K, V, but neither of {rows} and {columns} is three times the other", *guess, _WHOLE
    )


def _gate_up(leaf: Leaf, view: MatrixView, rule: Rule, transposed: bool) -> _Fusion:
    """Two equal parts, where the dimension of the outputs is known."""
    is_stack = len(leaf.shape) > 2 and not leaf.is_in(*CONVOLUTIONS)
    if is_stack and not transposed and rule.transposed is None and _experts_transposed(leaf) is None:
        reason = "gate and up are fused, and no neighbouring down projection tells along which dimension"
        raise Refusal(reason, *_stacks(leaf, rule))
    return _halves(view, transposed, "gate and up")


def _halves(view: MatrixView, transposed: bool, fused: str) -> _Fusion:
    """Two equal parts along the output dimension; ``fused`` names them."""
    dim = -1 if transposed else -2
    size = view.stored_matrix[dim]
    if size % 2:
        raise Refusal(f"the name says fused {fused}, but {size} is odd", _WHOLE)
    return _Fusion((size // 2,) * 2, dim)


def _asked_fusion(leaf: Leaf, view: MatrixView, rule: Rule, transposed: bool) -> _Fusion:
    """The parts that a rule asks for; without ``split_dim`` along the dimension where they fit, outputs tried first."""
    rows, columns = view.stored_matrix[-2:]
    extent = {-2: rows, -1: columns}
    dims = [-1, -2] if transposed else [-2, -1]
    if rule.split_dim is not None:
        dims = [_matrix_dim(view, rule.split_dim)]
    split = rule.split
    if split is None:
        split = 3 if leaf.is_called(_is_qkv) else _num_gates(leaf) or 2
    if isinstance(split, int):
        # Equal parts lie along the dimension that is `split` times the other one, if there is such a dimension.
        dim = next((dim for dim in dims if extent[dim] == split * extent[-3 - dim]), dims[0])
        if split < 1 or extent[dim] % split:
            raise Refusal(f"{extent[dim]} does not divide into {split} equal parts", _WHOLE)
        return _Fusion((extent[dim] // split,) * split, dim)
    sizes = tuple(split)
    for dim in dims:
        if sum(sizes) == extent[dim]:
            return _Fusion(sizes, dim)
    extents = " or ".join(str(extent[dim]) for dim in dims)
    raise Refusal(f"split={sizes} adds up to {sum(sizes)}, not to {extents}", _WHOLE)


def _matrix_dim(view: MatrixView, dim: int) -> int:
    """-2 or -1 for ``dim``, a dimension of the stored tensor."""
    ndim = len(view.shape)
    if not -ndim <= dim < ndim:
        raise Refusal(f"split_dim={dim} is no dimension of a tensor of shape {view.shape}", _WHOLE)
    if view.matrix_shape and len(view.matrix_shape) == 2 and dim % ndim == 0:
        return -2
    if not view.matrix_shape and dim % ndim >= ndim - 2:
        return dim % ndim - ndim
    raise Refusal(f"dimension {dim} of shape {view.shape} is no row or column of its matrices", _WHOLE)


def _heads(view: MatrixView, num_heads: int | Sequence[int]) -> tuple[int, ...]:
    """Heads of each part: as given, or ``num_heads`` in the first part and heads of the same size in the others."""
    if not isinstance(num_heads, int):
        return tuple(num_heads)
    rows = [shape[-2] for shape in view.shapes]
    if num_heads < 1 or rows[0] % num_heads:
        raise Refusal(f"{rows[0]} rows do not divide into {num_heads} heads", _WHOLE)
    head_dim = rows[0] // num_heads
    # without rows each part has as many heads, and these have no rows either
    if head_dim == 0:
        return (num_heads,) * len(rows)
    if any(size % head_dim for size in rows):
        raise Refusal(f"parts of {rows} rows do not all divide into heads of {head_dim} rows", _WHOLE)
    return tuple(size // head_dim for size in rows)
