"""Norms and scaling of gradients of any devices and dtypes, by the kernels where they can: for `optim_kernels.clip`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optim_kernels import reference
from optim_kernels._dtensors import is_wrapper
from optim_kernels._graphs import is_capturing, is_cuda
from optim_kernels._impl import Impl, use_triton
from optim_kernels._memory import is_dense
from optim_kernels._norm_launches import NormLaunches
from optim_kernels._tensor_lists import KnownKinds, TensorList

# How many lists of one length a ``GradientNorms`` with ``any_stream`` remembers, keyed by their first address; and of
# how many lengths, dtypes, devices and streams any remembers some.
MOST_LISTS, MOST_KINDS = 32, 32
# The orders of norms that kernels compute.
_KERNEL_NORMS = (1.0, 2.0, math.inf)


class _Split(NamedTuple):
    """A list of gradients by device and dtype."""

    kinds: list[Any]
    addresses: list[int]
    devices: list[torch.device]
    # of each part: device, dtype, and the places of its gradients in the list
    parts: list[tuple[torch.device, torch.dtype, list[int]]]
    # whether the kernels can read all of them where they are
    is_dense: bool


class _Whole(NamedTuple):
    """A list of gradients that one `NormLaunches` reads where they are, for when it comes again."""

    part: NormLaunches
    kinds: list[Any]
    stream: int
    # whether no gradient is listed twice; a list that has only been read may not have been asked
    are_apart: bool


class GradientNorms:
    """Norms of gradients of any devices and dtypes: one `NormLaunches` for each pair, kept from step to step.

    Args:
        any_stream: whether calls bring many lists, in several streams at once; each list and stream then has scratch of
            its own. Otherwise all calls bring one list, whose addresses may change.
    """

    def __init__(self, impl: Impl = "auto", *, any_stream: bool = False) -> None:
        self._impl = impl
        self._any_stream = any_stream
        self._parts: dict[Any, dict[int, NormLaunches]] = {}
        self._split: _Split | None = None
        # keyed by their first address
        self._wholes: dict[int, _Whole] = {}
        # the latest list of addresses that was found to have no duplicates
        self._apart: list[int] = []
        self._kinds = KnownKinds(with_shapes=True)
        # kernel launches of the latest `norm_and_factor`; unless it is 1, plain torch does part of the work
        self.num_launches = 0

    def norm_and_factor(
        self, grads: Sequence[Tensor] | TensorList, norm_type: float, max_norm: float
    ) -> tuple[Tensor, Tensor]:
        """``(norm, clip factor)``, 0-d on the first gradient's device; no synchronisation if all are on one device.

        The factor is overwritten by the next call.
        """
        seen = self.look_at(grads)
        parts = self._refreshed(seen, norm_type)
        self.num_launches = len(parts or ())
        if parts is not None and len(parts) == 1:
            return parts[0].norm(norm_type, max_norm), parts[0].factor
        norm = self._combined(parts, grads.tensors if isinstance(grads, TensorList) else grads, norm_type)
        return norm, reference.clip_factor(norm, max_norm)

    def clip_(self, grads: Sequence[Tensor], norm_type: float, max_norm: float) -> Tensor | None:
        """Scale the gradients down to ``max_norm``; return their norm before, or ``None`` if the kernels cannot."""
        seen = self.look_at(grads)
        parts = self._refreshed(seen, norm_type, in_place=True)
        if seen is None or parts is None:
            return None
        if len(parts) == 1:
            _count_as_changed(seen)
            return parts[0].clip_(norm_type, max_norm)
        norm, factor = self.norm_and_factor(seen, norm_type, max_norm)
        self.scale_(seen, factor)
        return norm

    def norm(self, grads: Sequence[Tensor], norm_type: float) -> Tensor:
        """The norm alone."""
        return self.norm_and_factor(grads, norm_type, 1.0)[0]

    def norm_in_one_launch(self, grads: Sequence[Tensor], norm_type: float) -> Tensor | None:
        """The norm alone, if a single kernel launch computes it; else ``None``."""
        seen = self.look_at(grads)
        parts = self._refreshed(seen, norm_type)
        return parts[0].norm(norm_type, 1.0) if parts is not None and len(parts) == 1 else None

    def totals(self, grads: Sequence[Tensor], norm_type: float) -> list[Tensor]:
        """Σ|g|^p, or the maximum, of the gradients of each device and dtype: 0-d fp64; empty if the kernels cannot."""
        seen = self.look_at(grads)
        parts = self._refreshed(seen, norm_type)
        return [] if parts is None else [part.total(norm_type) for part in parts]

    def scale_(self, grads: Sequence[Tensor] | TensorList, factor: Tensor) -> bool:
        """Multiply the gradients by ``factor``; ``False``, and nothing done, if the kernels cannot."""
        seen = self.look_at(grads)
        parts = self._refreshed(seen, 2.0, in_place=True)
        if seen is None or parts is None:
            return False
        _count_as_changed(seen)
        for part in parts:
            part.scale_(factor.to(device=part.device, dtype=torch.float32))
        return True

    def look_at(self, grads: Sequence[Tensor] | TensorList) -> TensorList | None:
        """The gradients as a `TensorList`, made once for several calls; ``None`` if the kernels cannot take them."""
        if isinstance(grads, TensorList):
            return grads
        if self._impl == "torch" or not grads or (self._impl == "auto" and not grads[0].is_cuda):
            return None
        # tensors that are traced, or fake, have no address
        if torch.compiler.is_compiling() or is_wrapper(grads[0]):
            return None
        try:
            return TensorList(grads, self._kinds)
        except RuntimeError:  # a sparse tensor has no address
            return None

    def _refreshed(
        self, seen: TensorList | None, norm_type: float, *, in_place: bool = False
    ) -> list[NormLaunches] | None:
        """The launches whose tables hold these gradients; ``None`` if the kernels cannot read one of them.

        The caller keeps ``seen`` until it has launched, since ``seen`` owns the copies of gradients that are not dense.
        """
        if seen is None or not seen.tensors or norm_type not in _KERNEL_NORMS:
            return None
        whole = self._wholes.get(seen.addresses[0])
        if whole is not None and self._comes_again(whole, seen) and (whole.are_apart or not in_place):
            return [whole.part]
        split = self._split_of(seen)
        if split is None:
            return None
        addresses, numels = split.addresses, split.kinds[1]
        # two programs at once would scale a gradient that is listed twice; torch scales it twice in turn
        if in_place and not self._are_apart(addresses, numels):
            return None
        if not split.is_dense:
            if in_place:
                return None
            readable = [grad if is_dense(grad) else grad.detach().contiguous() for grad in seen.tensors]
            seen.copies = [copy for copy, grad in zip(readable, seen.tensors) if copy is not grad]
            addresses = list(map(Tensor.data_ptr, readable))
        parts = []
        for device, dtype, places in split.parts:
            own_addresses, own_numels = addresses, numels
            if len(split.parts) > 1:
                own_addresses, own_numels = ([values[place] for place in places] for values in (addresses, numels))
            part = self._part(device, dtype, own_addresses, own_numels)
            part.refresh(own_addresses, own_numels)
            parts.append(part)
        if len(parts) == 1 and split.is_dense:
            self._keep(parts[0], seen, are_apart=in_place)
        return parts

    def _comes_again(self, whole: _Whole, seen: TensorList) -> bool:
        """Whether these are the gradients that the tables hold, and the scratch may be used by a launch now."""
        if seen.kinds is not whole.kinds or not whole.part.knows(seen.addresses, seen.kinds[1]):
            return False
        device = whole.part.device
        return not self._any_stream or (_stream(device) == whole.stream and not is_capturing(device))

    def _keep(self, part: NormLaunches, seen: TensorList, *, are_apart: bool) -> None:
        if is_capturing(part.device):
            return
        if len(self._wholes) >= MOST_LISTS:
            self._wholes.clear()
        self._wholes[seen.addresses[0]] = _Whole(part, seen.kinds, _stream(part.device), are_apart)

    def _are_apart(self, addresses: list[int], numels: list[int]) -> bool:
        """Whether no gradient is listed twice, as those of tied parameters may be."""
        if addresses is not self._apart:
            if len(set(addresses)) < len(addresses):
                held = [address for address, numel in zip(addresses, numels) if numel]
                if len(set(held)) < len(held):
                    return False
            self._apart = addresses
        return True

    def _part(self, device: torch.device, dtype: torch.dtype, addresses: list[int], numels: list[int]) -> NormLaunches:
        """The launches whose tables hold these gradients, or else launches that need ``refresh`` first."""
        kind = (device, dtype, len(addresses), _stream(device) if self._any_stream else 0)
        if self._any_stream and is_capturing(device):
            # prefer tables that hold the gradients already, from a warm-up in any stream: otherwise every replay would
            # repeat the upload
            for other, parts in self._parts.items():
                if other[:-1] == kind[:-1] and addresses[0] in parts and parts[addresses[0]].knows(addresses, numels):
                    return parts[addresses[0]].for_graph()
            return NormLaunches(device, dtype)
        if kind not in self._parts:
            if is_capturing(device):
                return NormLaunches(device, dtype)
            if len(self._parts) >= MOST_KINDS:
                self._parts.pop(next(iter(self._parts)), None)
        parts = self._parts.setdefault(kind, {})
        part = parts.get(addresses[0])
        if part is None:
            oldest = next(iter(parts), 0)
            known = MOST_LISTS if self._any_stream else 1
            part = parts[addresses[0]] = parts.pop(oldest) if len(parts) == known else NormLaunches(device, dtype)
        return part

    def _split_of(self, grads: TensorList) -> _Split | None:
        """The gradients by device and dtype, reused if unchanged; ``None`` if the kernels cannot read one of them."""
        split = self._split
        if split is not None and grads.kinds == split.kinds and grads.addresses == split.addresses:
            return split
        devices = [grad.device for grad in grads.tensors]
        # check again at address 0: empty tensors have it, but also wrappers, which may be of a known kind
        if split is None or grads.kinds != split.kinds or devices != split.devices or 0 in grads.addresses:
            if not all(use_triton(self._impl, grad, f"gradient {i}") for i, grad in enumerate(grads.tensors)):
                return None
            # DTensors, say, whose norm torch reduces over ranks
            if any(map(is_wrapper, grads.tensors)):
                return None
            for place, (address, grad) in enumerate(zip(grads.addresses, grads.tensors)):
                if not address and grad.numel():
                    raise ValueError(f"gradient {place} has elements but no memory: its storage was freed")
            by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
            for place, grad in enumerate(grads.tensors):
                by_kind.setdefault((grad.device, grad.dtype), []).append(place)
            parts = [(*kind, places) for kind, places in by_kind.items()]
            dense = all(map(is_dense, grads.tensors))
        else:
            parts, dense = split.parts, split.is_dense
        split = self._split = _Split(grads.kinds, grads.addresses, devices, parts, dense)
        return split

    def _combined(self, parts: list[NormLaunches] | None, grads: Sequence[Tensor], norm_type: float) -> Tensor:
        if parts is None:
            return reference.total_norm(grads, norm_type)
        totals = torch.stack([part.total(norm_type).to(grads[0].device) for part in parts])
        if norm_type == math.inf:
            norm = totals.amax()
        else:
            norm = totals.sum().sqrt() if norm_type == 2 else totals.sum()
        return norm.to(torch.float32)


def _count_as_changed(grads: TensorList) -> None:
    """Tell autograd of the write: it then refuses to differentiate through the overwritten values."""
    torch.autograd.graph.increment_version(grads.tensors)


def _stream(device: torch.device) -> int:
    """The stream that a launch on the device would go to."""
    return _current_stream()(device) if is_cuda(device) else 0


@cache
def _current_stream() -> Callable[[torch.device], int]:
    from optim_kernels._triton import current_stream

    return current_stream
