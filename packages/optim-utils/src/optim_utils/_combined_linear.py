"""`CombinedLinear`: a linear layer with one parameter, and the two functions between a pair and its joined matrix."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import has_torch_function

from optim_utils._arguments import sizes_of
from optim_utils._dtensors import is_dtensor
from optim_utils._state.tensor_fill import sharded_like

_FORMATS = ("combined", "linear")
# rows that start at multiples of this many bytes let a GEMM load them with its widest instructions
_ROW_ALIGNMENT = 16


def join_weight_bias(w: Tensor, b: Tensor | None) -> Tensor:
    """The matrix (out, in + 1) of a weight (out, in) and a bias (out) as the last column; ``w`` itself without one."""
    for name, tensor in (("w", w), ("b", b)):
        if not (isinstance(tensor, Tensor) or (tensor is None and name == "b")):
            raise TypeError(f"{name} of join_weight_bias has to be a tensor, got a {type(tensor).__name__}")
    if w.ndim != 2 or (b is not None and b.shape != w.shape[:1]):
        shape = None if b is None else tuple(b.shape)
        raise ValueError(f"expected a weight (out, in) and a bias (out), got shapes {tuple(w.shape)} and {shape}")
    return w if b is None else torch.cat((w, b[:, None]), dim=1)


def split_weight_bias(c: Tensor, has_bias: bool) -> tuple[Tensor, Tensor | None]:
    """The weight and the bias in a joined matrix, as views; the inverse of `join_weight_bias`."""
    if not isinstance(c, Tensor):
        raise TypeError(f"c of split_weight_bias has to be a tensor, got a {type(c).__name__}")
    if c.ndim != 2 or (has_bias and c.shape[1] == 0):
        raise ValueError(f"expected a matrix (out, in + {int(has_bias)}), got shape {tuple(c.shape)}")
    return (c[:, :-1], c[:, -1]) if has_bias else (c, None)


class _Product(torch.autograd.Function):
    """``F.linear`` with the two parts of a joined matrix (out, in + 1), whose gradient is joined in one pass.

    With two slices, autograd would make a matrix of zeros for each, fill its part, and add the two matrices. The
    gradient has the memory layout of the matrix, or is dense: then autograd keeps it as it is.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, combined: Tensor) -> Tensor:
        # the matrix product itself adds a bias only if that is contiguous
        return F.linear(input, combined[:, :-1], combined[:, -1].contiguous())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        input, combined = ctx.saved_tensors
        grad = grad.contiguous()  # an expanded one would be copied by each product
        of_input = grad @ combined[:, :-1].conj() if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return of_input, None
        rows, inputs = (x.reshape(x.shape[:-1].numel(), x.shape[-1]) for x in (grad, input.conj()))
        if combined.stride(0) == 1:  # column-major
            return of_input, torch.cat((inputs.mT @ rows, rows.sum(0)[None])).mT
        return of_input, join_weight_bias(rows.mT @ inputs, rows.sum(0))

    @staticmethod
    def jvp(ctx: Any, of_input: Tensor, of_combined: Tensor) -> Tensor:
        # torch gives zeros for what has no tangent
        input, combined = ctx.saved_tensors
        return F.linear(of_input, combined[:, :-1]) + F.linear(input, of_combined[:, :-1], of_combined[:, -1])


def _is_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


class CombinedLinear(nn.Module):
    """``torch.nn.Linear`` with weight and bias in one parameter ``combined_weight``, the bias in the last column.

    It starts from the same values as ``torch.nn.Linear`` does under the same seed.

    Args:
        in_features: size of each input.
        out_features: size of each output.
        bias: whether there is a bias. ``layer.bias`` stays this flag; the bias itself is ``layer.bias_vector``.
        device: of the parameter.
        dtype: of the parameter.
        checkpoint_format: what ``state_dict`` has: ``combined_weight``, or ``weight`` and ``bias`` as a Linear does.
            Both are loaded.
        align_rows: pad the memory of each row to 16 bytes. Rows of in + 1 elements are rarely aligned, which slows the
            matrix products down several times; the shape does not change. The parameter is not dense then: fused
            optimizers do not take it, and torch's fused AdamW on a CPU updates it wrongly without an error (2.13).
        column_major: keep the columns in memory one after another, the bias as the last of them. Then all products are
            aligned and the parameter stays dense: the fastest layout, whose strides are those of a transposed matrix.
    """

    __constants__ = ("in_features", "out_features", "in_features_with_bias", "bias", "has_bias")
    # properties that TorchScript must not compile: they are for people
    __jit_unused_properties__ = ("weight", "bias_vector")
    # for layers pickled by version 0.3, which have no such attribute
    column_major = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        checkpoint_format: Literal["combined", "linear"] = "combined",
        align_rows: bool = False,
        column_major: bool = False,
    ) -> None:
        if checkpoint_format not in _FORMATS:
            raise ValueError(f"{checkpoint_format=} has to be one of {_FORMATS}")
        if align_rows and column_major:
            raise ValueError("align_rows and column_major are two layouts of the same memory: give one of them")
        in_features, out_features = sizes_of((in_features, out_features), "(in_features, out_features)")
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.in_features_with_bias = in_features + bool(bias)
        self.bias = bool(bias)
        self.has_bias = bool(bias)
        self.checkpoint_format = checkpoint_format
        self.align_rows = align_rows
        self.column_major = column_major
        shape = (out_features, self.in_features_with_bias)
        self.combined_weight = nn.Parameter(self._laid_out(torch.empty(shape, device=device, dtype=dtype)))
        self.reset_parameters()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "bias" and isinstance(value, Tensor):
            # torch would register it as a parameter, which nothing reads
            raise TypeError(
                "bias of a CombinedLinear says whether there is one, and cannot be a tensor: write to bias_vector, the "
                "last column of combined_weight"
            )
        super().__setattr__(name, value)

    def reset_parameters(self) -> None:
        """Draw new values, in the order in which ``torch.nn.Linear`` draws them."""
        with torch.no_grad():
            # drawn into memory of a Linear's layout: the generator fills it in the order of memory
            weight = torch.empty_like(self.weight, memory_format=torch.contiguous_format)
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
            self.weight.copy_(weight)
            if self.bias_vector is not None:
                bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0.0
                bias = torch.empty_like(self.bias_vector, memory_format=torch.contiguous_format)
                self.bias_vector.copy_(nn.init.uniform_(bias, -bound, bound))

    def forward(self, input: Tensor) -> Tensor:
        """``input`` (..., in) to (..., out)."""
        if not self.has_bias:
            return F.linear(input, self.combined_weight)
        combined = self.combined_weight
        if not torch.jit.is_scripting():
            # the slices are left to compilers and to tensors with a `__torch_function__`, which see through them, and
            # to autocast, which sets the dtypes of a product but not of an autograd function around it
            seen_through = (
                torch.compiler.is_compiling()
                or has_torch_function((input, combined))
                or _is_autocast(combined.device.type)
            )
            if not seen_through and combined.requires_grad:
                return _Product.apply(input, combined)
        return F.linear(input, combined[:, :-1], combined[:, -1])

    @property
    def weight(self) -> Tensor:
        """The weight (out, in), a view of ``combined_weight``."""
        return split_weight_bias(self.combined_weight, self.has_bias)[0]

    @property
    def bias_vector(self) -> Tensor | None:
        """The bias (out), a view of ``combined_weight``, or None."""
        return split_weight_bias(self.combined_weight, self.has_bias)[1]

    def extra_repr(self) -> str:
        return f"{self.in_features=}, {self.out_features=}, {self.in_features_with_bias=}"

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        checkpoint_format: Literal["combined", "linear"] = "combined",
        align_rows: bool = False,
        column_major: bool = False,
    ) -> CombinedLinear:
        """A layer with the values, device, dtype, ``requires_grad`` and mode of ``linear``.

        Raises:
            TypeError: for what is no ``torch.nn.Linear``.
            ValueError: if weight and bias differ in ``requires_grad``, dtype or device: one parameter has one of each.
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"from_linear takes a torch.nn.Linear, got a {type(linear).__name__}")
        weight, bias = linear.weight, linear.bias
        for name in ("requires_grad", "dtype", "device"):
            if bias is not None and getattr(weight, name) != getattr(bias, name):
                raise ValueError(
                    f"weight and bias become one parameter, but {name} is {getattr(weight, name)} for the weight and "
                    f"{getattr(bias, name)} for the bias; give both the same"
                )
        layer = cls(
            linear.in_features,
            linear.out_features,
            bias is not None,
            # nothing is allocated or drawn: the parameter is replaced below
            device="meta",
            dtype=weight.dtype,
            checkpoint_format=checkpoint_format,
            align_rows=align_rows,
            column_major=column_major,
        )
        with torch.no_grad():
            joined = layer._laid_out(join_weight_bias(weight, bias).clone())
        layer.combined_weight = nn.Parameter(joined, requires_grad=weight.requires_grad)
        return layer.train(linear.training)

    def to_linear(self) -> nn.Linear:
        """A ``torch.nn.Linear`` with this layer's values, device, dtype, ``requires_grad`` and mode."""
        weight = self.combined_weight
        linear = nn.Linear(self.in_features, self.out_features, self.has_bias, device="meta", dtype=weight.dtype)
        linear.weight = nn.Parameter(self.weight.detach().clone(), requires_grad=weight.requires_grad)
        if self.bias_vector is not None:
            linear.bias = nn.Parameter(self.bias_vector.detach().clone(), requires_grad=weight.requires_grad)
        return linear.train(self.training)

    def _laid_out(self, matrix: Tensor) -> Tensor:
        """``matrix`` in the memory layout that this layer wants: itself, or a copy."""
        if self.column_major:
            return matrix if matrix.mT.is_contiguous() else matrix.mT.contiguous().mT
        columns = matrix.shape[1]
        multiple = max(1, _ROW_ALIGNMENT // matrix.element_size())
        padded = -(-columns // multiple) * multiple
        if not self.align_rows or matrix.stride() == (padded, 1):
            return matrix
        return matrix.new_empty(matrix.shape[0], padded)[:, :columns].copy_(matrix)

    def _has_parameter(self) -> bool:
        """False if torch has put the parameter elsewhere, as parametrizations and pruning do.

        ``combined_weight`` is then computed, which may change state, as the power iteration of a spectral norm does.
        """
        return "combined_weight" in self._parameters

    def _restore_layout(self) -> None:
        """Lay the parameter out again after torch has copied it into memory of another layout."""
        if not self._has_parameter():
            return
        present = self.combined_weight.data
        laid_out = self._laid_out_if_plain(present)
        if laid_out is not present:
            self.combined_weight.data = laid_out

    @torch.no_grad()
    def _laid_out_if_plain(self, matrix: Tensor) -> Tensor:
        """``matrix`` in this layer's layout; a DTensor stays as it is, as whatever shards it decides its layout."""
        return matrix if is_dtensor(matrix) else self._laid_out(matrix)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CombinedLinear:
        super()._apply(fn, recurse)
        self._restore_layout()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._restore_layout()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.checkpoint_format == "linear" and self._has_parameter():
            combined = destination.pop(prefix + "combined_weight")
            destination[prefix + "weight"], bias = split_weight_bias(combined, self.has_bias)
            if bias is not None:
                destination[prefix + "bias"] = bias

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load either form. If a Linear's form lacks weight or bias, the other one is still loaded if not strict."""
        arguments = (prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if not self._has_parameter():
            super()._load_from_state_dict(state_dict, *arguments)
            return
        combined = prefix + "combined_weight"
        live = {prefix + "weight": self.weight.detach()}
        if self.bias_vector is not None:
            live[prefix + "bias"] = self.bias_vector.detach()
        found = {name: state_dict[name] for name in live if name in state_dict}
        errors = _misfits(found, live)
        if found and state_dict.get(combined) is self.combined_weight:
            # torch's set_model_state_dict puts the present parameters beside full states
            del state_dict[combined]
        if found and combined in state_dict:
            errors.insert(0, f"{combined} and {', '.join(found)} are two forms of the same values: give one of them")
        if errors:
            error_msgs += errors
            return
        if found:
            missing_keys += [name for name in live if name not in found]
            for name in found:
                del state_dict[name]
            if len(found) < len(live):
                found = {name: sharded_like(live[name], value) for name, value in found.items()}
            values = live | found
            joined = join_weight_bias(values[prefix + "weight"], values.get(prefix + "bias"))
            state_dict[combined] = sharded_like(self.combined_weight, joined)
        loaded = state_dict.get(combined)
        if local_metadata.get("assign_to_params_buffers") and isinstance(loaded, Tensor) and loaded.ndim == 2:
            # the loaded tensor becomes the parameter, so it needs the layout of this layer
            state_dict[combined] = self._laid_out_if_plain(loaded)
        super()._load_from_state_dict(state_dict, *arguments)


def _misfits(found: dict[str, object], live: dict[str, Tensor]) -> list[str]:
    """An error for each found value that is no tensor of the live one's shape."""
    return [
        f"size mismatch for {name}: copying a param with shape {value.shape} from checkpoint, "
        f"the shape in current model is {live[name].shape}."
        if isinstance(value, Tensor)
        else f"expected a tensor for {name}, got a {type(value).__name__}"
        for name, value in found.items()
        if not isinstance(value, Tensor) or value.shape != live[name].shape
    ]
