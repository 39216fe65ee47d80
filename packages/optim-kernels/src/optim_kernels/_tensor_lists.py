"""Lists of tensors as the host sees them at each step: where they lie, what they are, and whether they came before."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor

try:
    from torch._C._dynamo import guards as dynamo_guards
except ImportError:
    dynamo_guards = None  # type: ignore[assignment]


class TensorList:
    """Tensors as the host sees them in one pass: where they lie (``addresses``), and what they are (``kinds``).

    Two lists with equal addresses and kinds are the same to a kernel. An address alone says too little: memory that
    was freed comes back as another dtype or layout.

    Args:
        known: the kinds of earlier lists from the same caller.
    """

    def __init__(self, tensors: Sequence[Tensor], known: KnownKinds | None = None) -> None:
        self.tensors = tensors
        # dense copies that the kernels read in place of other tensors; they live as long as the list
        self.copies: list[Tensor] = []
        self.addresses = list(map(Tensor.data_ptr, tensors))
        self.kinds = _kinds(tensors) if known is None else known.of(tensors)


def _kinds(tensors: Sequence[Tensor]) -> list[Any]:
    """Dtypes, numbers of elements, whether each is contiguous, and shapes and strides of those that are not.

    If any are lazily negated (``is_neg``), a last entry says which.
    """
    contiguous, negated = list(map(Tensor.is_contiguous, tensors)), list(map(Tensor.is_neg, tensors))
    kinds: list[Any] = [list(map(_dtype, tensors)), list(map(Tensor.numel, tensors)), contiguous]
    if not all(contiguous):
        kinds.append([(t.shape, t.stride()) for t, plain in zip(tensors, contiguous) if not plain])
    if any(negated):
        kinds.append(("negated", negated))
    return kinds


_dtype = attrgetter("dtype")

# Not torch's public API: where it is gone, kinds are read tensor by tensor.
TensorGuards: Any = getattr(dynamo_guards, "TensorGuards", None)


def _guards(tensors: Sequence[Tensor]) -> Any:
    """Check of other tensors' types, dtypes, devices, shapes and strides against these; ``None`` if torch lacks it."""
    if TensorGuards is None:
        return None
    return TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    )


class KnownKinds:
    """The kinds of a list that comes again and again, recognised by one call for all its tensors.

    That call is Dynamo's check of a compiled function's arguments: types, dtypes, devices, shapes and strides. It holds
    no tensor and takes half as long as `_kinds`, but making it takes ten times as long: so it is made once, when a list
    comes for the second time.

    Args:
        with_shapes: whether contiguous tensors of different shapes, but equally many elements, differ in kind, and
            tensors on different devices, and those of inference mode from others.
    """

    def __init__(self, *, with_shapes: bool = False) -> None:
        self._with_shapes = with_shapes
        # kinds, whether they came again, and the check; one tuple, since lists may come from several threads
        self._last: tuple[list[Any], bool, Any] = [[]], False, None

    def of(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The kinds of these tensors: the same list object as long as they stay the same."""
        last, came_again, guards = self._last
        if guards is not None and len(tensors) == len(last[0]) and guards.check(*tensors):
            return last
        kinds = _kinds(tensors)
        if self._with_shapes:
            kinds.append([(tensor.shape, tensor.device, tensor.is_inference()) for tensor in tensors])
        if kinds != last:
            self._last = kinds, False, None
            return kinds
        # if a check failed on something kernels ignore (the autograd state, say), a new one would fail as well
        if not came_again:
            guards = _guards(tensors)
        self._last = last, True, guards
        return last


class KnownAddresses:
    """Addresses and kinds of tensors, to tell whether tables on the device still describe them.

    A tensor that stays the same object may move: ``tensor.data = tensor.data.to(device)``, ``share_memory_()``, a
    storage that is freed for a while. Or its kind changes at the same address: ``tensor.data = tensor.data.t()``.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._known = KnownKinds(with_shapes=True)
        self._kinds = self._known.of(tensors)
        self._addresses = list(map(Tensor.data_ptr, tensors))

    def are_those_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these tensors have the addresses and kinds of those given at first."""
        return list(map(Tensor.data_ptr, tensors)) == self._addresses and self._known.of(tensors) == self._kinds
