"""Many small tensors handled at once, so that a thousand cost about as much as one tensor of their total size.

In eager mode, allocating a small tensor takes longer than filling it, and encoding a tensor launches some dozens of
kernels, whatever its size. So tensors of one shape are concatenated, converted and split again, and tensors to be
encoded, decoded or rounded are concatenated to one row:

    a, b, c, ...  ->  one row of numbers or codes  ->  one row of codes or numbers  ->  its parts a, b, c, ...

A row grows only to a length that keeps a device busy. Under ``torch.compile`` each tensor is handled alone: the
compiler makes few kernels of that, and rows would only make its program longer. Tensors that are split from one row
share memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from optim_utils._dtensors import is_dtensor
from optim_utils._low_bit.blocks import decode_blocks
from optim_utils._low_bit.tensor import LowBitTensor
from optim_utils.low_bit import quantize
from optim_utils.rounding import stochastic_round, stochastic_round_

__all__ = ["Stacks", "copy_many", "decode_many", "encode_many", "round_many"]

_MAX_ROW = 1 << 22  # elements
_PLAIN = {Tensor, nn.Parameter}


class Stacks(NamedTuple):
    """Which of the given tensors are of one shape, dtype and device, and so can be converted as one."""

    tensors: tuple[Tensor, ...]
    stacks: list[list[int]]  # positions
    others: list[int]  # the other positions: 0-dim, large, not plain and contiguous, or alone of their kind

    @classmethod
    def of(cls, tensors: tuple[Tensor, ...]) -> Stacks:
        kinds = ((t.shape, t.dtype, t.device) if _is_plain(t) and t.dim() > 0 else None for t in tensors)
        stacks = list(_rows(zip(kinds, map(Tensor.numel, tensors))))
        alone = set(range(len(tensors))).difference(*stacks)
        return cls(tensors, stacks, sorted(alone))

    def converted(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """New tensors of the same values in ``dtype``."""
        made: dict[int, Tensor] = {}
        for members in self.stacks:
            tensors = [self.tensors[i] for i in members]
            # "unsafe": autograd is not told that the parts share memory, which saves a third of the time
            parts = torch.cat(tensors).to(dtype).unsafe_split_with_sizes([len(tensors[0])] * len(tensors))
            if len(parts) == len(self.tensors):
                return parts
            made.update(zip(members, parts))
        for position in self.others:
            made[position] = torch.empty_like(self.tensors[position], dtype=dtype)
        copy_many([made[i] for i in self.others], [self.tensors[i] for i in self.others])
        return tuple(map(made.__getitem__, range(len(self.tensors))))


def copy_many(targets: Sequence[Tensor], numbers: Sequence[Tensor]) -> None:
    """Fill each target with its numbers."""
    if torch.compiler.is_compiling() or {*map(type, targets), *map(type, numbers)} <= _PLAIN:
        alone = set()
    else:
        # torch has no operation on lists of DTensors
        alone = {i for i, pair in enumerate(zip(targets, numbers)) if any(map(is_dtensor, pair))}
    for i in sorted(alone):
        targets[i].copy_(numbers[i])
    if alone:
        targets, numbers = ([x for i, x in enumerate(row) if i not in alone] for row in (targets, numbers))
    if targets:
        torch._foreach_copy_(list(targets), list(numbers))


def decode_many(tensors: Sequence[LowBitTensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The numbers of each tensor."""
    decoded: dict[int, Tensor] = {}
    for members in _rows((_low_bit_kind(tensor), tensor.numel()) for tensor in tensors):
        codes, scale, offset = (_joined(parts) for parts in zip(*(tensors[i].parts for i in members)))
        assert codes is not None
        assert scale is not None
        sizes = [tensors[i].numel() for i in members]
        fmt = tensors[members[0]].fmt.with_(layout="flat")
        row = decode_blocks(codes, scale, offset, fmt, (sum(sizes),)).to(dtype)
        # neither is told to autograd, for which each part then is a tensor of its own
        for i, part in zip(members, row.unsafe_split_with_sizes(sizes)):
            decoded[i] = part.resize_(tensors[i].shape)
    return tuple(decoded[i] if i in decoded else tensor.dequantize(dtype) for i, tensor in enumerate(tensors))


def encode_many(
    targets: Sequence[LowBitTensor],
    numbers: Sequence[Tensor],
    *,
    stochastic: bool = False,
    generator: torch.Generator | None = None,
) -> None:
    """Fill each target with the codes of its numbers; the options are those of `quantize`."""
    alone = set(range(len(targets)))
    kinds = (None if is_dtensor(given) else _low_bit_kind(target) for target, given in zip(targets, numbers))
    for members in _rows(zip(kinds, map(Tensor.numel, numbers))):
        alone.difference_update(members)
        row = torch.cat([numbers[i].detach().flatten() for i in members])
        fmt = targets[members[0]].fmt.with_(layout="flat")
        coded = quantize(row, fmt, stochastic=stochastic, generator=generator).parts
        for mine, new in zip(zip(*(targets[i].parts for i in members)), coded):
            if new is not None:
                _fill(mine, new)
    for i in sorted(alone):
        targets[i].copy_(quantize(numbers[i], targets[i].fmt, stochastic=stochastic, generator=generator))


def round_many(targets: Sequence[Tensor], numbers: Sequence[Tensor], *, generator: torch.Generator | None) -> None:
    """Fill each target with its numbers rounded at random to its dtype, bf16 or fp16."""
    alone = set(range(len(targets)))
    kinds = (
        (target.dtype, target.device) if _is_plain(target) and _is_plain(given) else None
        for target, given in zip(targets, numbers)
    )
    for members in _rows(zip(kinds, map(Tensor.numel, targets))):
        alone.difference_update(members)
        row = torch.cat([numbers[i].detach().flatten() for i in members])
        mine = [targets[i] for i in members]
        _fill(mine, stochastic_round(row, mine[0].dtype, generator=generator))
    for i in sorted(alone):
        stochastic_round_(targets[i], numbers[i], generator=generator)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.is_contiguous()


def _low_bit_kind(tensor: LowBitTensor) -> Hashable:
    """What tensors must have in common to be coded in one row; None for a DTensor or one not made of whole blocks."""
    fmt = tensor.fmt
    run = tensor.numel() if fmt.layout == "flat" or tensor.dim() == 0 else tensor.shape[-1]
    return None if run % fmt.block_size or is_dtensor(tensor.codes) else (fmt, tensor.device)


def _rows(kinds_and_sizes: Iterable[tuple[Hashable, int]]) -> Iterator[list[int]]:
    """The positions of each row: two or more tensors of one kind. Kind None and large tensors are in no row."""
    if torch.compiler.is_compiling():
        return
    rows: dict[Hashable, list[int]] = {}
    lengths: dict[Hashable, int] = {}
    for position, (kind, size) in enumerate(kinds_and_sizes):
        if kind is None or not 0 < size <= _MAX_ROW // 2:
            continue
        if lengths.get(kind, 0) + size > _MAX_ROW:
            yield rows.pop(kind)
            lengths[kind] = 0
        rows.setdefault(kind, []).append(position)
        lengths[kind] = lengths.get(kind, 0) + size
    yield from (members for members in rows.values() if len(members) > 1)


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """All parts concatenated to one row; None if they are None."""
    given = [part.flatten() for part in parts if part is not None]
    return torch.cat(given) if given else None


def _fill(targets: Sequence[Tensor], row: Tensor) -> None:
    parts = row.split([target.numel() for target in targets])
    torch._foreach_copy_(list(targets), [part.view(target.shape) for part, target in zip(parts, targets)])
