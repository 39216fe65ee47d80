"""The only place that calls ``torch.distributed``: exchanges, groups, and the comparison of plans.

Names differ between versions of torch; what is deprecated in one is chosen here by what the installed one has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from optim_redist.errors import PlanMismatchError, UnsupportedError

_groups: dict[tuple[int, ...], tuple[object, ProcessGroup]] = {}


def is_initialized() -> bool:
    """Whether there is a process group to exchange with."""
    return dist.is_available() and dist.is_initialized()


def my_rank() -> int:
    """This process' global rank, 0 without a process group."""
    return dist.get_rank() if is_initialized() else 0


def group_of(ranks: Sequence[int], group: ProcessGroup | None = None) -> ProcessGroup:
    """A group whose members include ``ranks``: the given one, the world if it fits, else one made once for them.

    A group made here is made by its members alone, so every rank of ``ranks`` has to call and no other.
    """
    if not is_initialized():
        raise UnsupportedError(
            f"ranks {list(ranks)} have to exchange data; call torch.distributed.init_process_group first"
        )
    if group is not None:
        missing = set(ranks) - set(dist.get_process_group_ranks(group))
        if missing:
            raise UnsupportedError(f"the group lacks ranks {sorted(missing)} of the layouts; give one that has them")
        return group
    world = dist.group.WORLD
    assert world is not None
    key = tuple(sorted(ranks))
    if key and key[-1] >= dist.get_world_size():
        raise UnsupportedError(f"the layouts name rank {key[-1]}, the world has {dist.get_world_size()} ranks")
    if len(key) == dist.get_world_size():
        return world
    known = _groups.get(key)
    if known is None or known[0] is not world:
        made = dist.new_group(list(key), use_local_synchronization=True)
        _groups[key] = known = (world, made)
    return known[1]


def world() -> object:
    """The default process group, None without one: programs compiled for one are void for the next."""
    return dist.group.WORLD if is_initialized() else None


def members(group: ProcessGroup) -> list[int]:
    """The group's global ranks in group order."""
    return list(dist.get_process_group_ranks(group))


def device_of(group: ProcessGroup | None) -> torch.device:
    """Where the group's tensors live: the current CUDA device for NCCL, else the CPU."""
    if group is not None and is_nccl(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def is_nccl(group: ProcessGroup) -> bool:
    """Whether the group's collectives run on CUDA streams."""
    return "nccl" in dist.get_backend(group)


def exchange(
    received: Tensor,
    sent: Tensor,
    received_sizes: list[int],
    sent_sizes: list[int],
    group: ProcessGroup,
    *,
    async_op: bool = False,
) -> Work | None:
    """One all-to-all of flat byte buffers with uneven sizes, in group order."""
    return dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=group, async_op=async_op)


def compare_texts(text: str, group: ProcessGroup) -> None:
    """Raise on every member unless all of them bring the same text.

    Digests travel first; texts only if they differ, so that the error can say where.

    Raises:
        PlanMismatchError: names the first rank that differs and the first difference.
    """
    device = device_of(group)
    digest = torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8).to(device)
    num_ranks = dist.get_world_size(group)
    digests = [torch.empty_like(digest) for _ in range(num_ranks)]
    dist.all_gather(digests, digest, group=group)
    if all(torch.equal(other, digest) for other in digests):
        return
    texts: list[str] = [""] * num_ranks
    dist.all_gather_object(texts, text, group=group)
    ranks = members(group)
    other = next(k for k in range(num_ranks) if texts[k] != texts[0])
    raise PlanMismatchError(
        f"rank {ranks[other]} holds another plan than rank {ranks[0]}: {_first_difference(texts[0], texts[other])}; "
        "every rank has to call with the same shape, dtype, layouts and options, in the same order"
    )


def _first_difference(a: str, b: str) -> str:
    """The first line in which two texts differ."""
    for x, y in zip(a.splitlines(), b.splitlines()):
        if x != y:
            return f"{x.strip()!r} against {y.strip()!r}"
    return f"one text has {len(a)} characters, the other {len(b)}"
