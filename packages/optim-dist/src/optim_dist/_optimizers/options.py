"""The keyword arguments that the three optimizers share, checked once."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from numbers import Integral
from typing import Any, Literal, TypedDict, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from optim_dist._optimizers.gradient_dtype import check_grad_dtype
from optim_dist._reduction.collectives import Communicator
from optim_dist._reduction.grid import GridCommunicator
from optim_dist._reduction.peers import PeerCommunicator
from optim_dist._reduction.tree import is_power_of_two
from optim_dist.plan import DTYPES, BucketPlan
from optim_dist.planning import check_positive
from optim_kernels.muon_groups import MuonPlanner, Tiles, Workspace, workspace_for

Gradients = Literal["resident", "streamed"]
Reducer = Literal["rs", "exact"]
Order = Literal["rank", "tree"]
SyncParams = Literal["broadcast", "check"]
Transport = Literal["backend", "symm"]
_CHOICES = {
    "gradients": Gradients,
    "reducer": Reducer,
    "order": Order,
    "sync_params": SyncParams,
    "transport": Transport,
}

# Gradients exist for only a few buckets at a time; smaller buckets than the default save memory.
STREAMED_BUCKET_MB = 64
# Newton–Schulz leaves these to NCCL. On two H100s 16 serve NCCL as well as 24, and cost Newton–Schulz .4 to 2 %.
SPARE_MULTIPROCESSORS = 16


class CommonOptions(TypedDict, total=False):
    """What every optimizer of this package accepts after its own arguments."""

    model: torch.nn.Module | None
    mesh: DeviceMesh | None
    process_group: dist.ProcessGroup | None
    gradients: Gradients
    grad_dtype: torch.dtype | None
    reducer: Reducer
    order: Order
    reduce_dtype: torch.dtype | None
    reduced_dtype: torch.dtype | None
    average: bool
    accumulation_steps: int | None
    overlap: bool
    bucket_mb: float | None
    ns_workspace_mb: float | None
    max_norm: float | None
    skip_nonfinite: bool
    sync_params: SyncParams
    deterministic: bool
    transport: Transport
    timeout: float | None
    debug: bool


@dataclass(frozen=True)
class Options:
    """``CommonOptions`` with their defaults.

    Args:
        model: names parameters and orders buckets by its backward pass. Its modules wait for the parameters they use,
            so that gathers overlap with the next forward pass. Code that reads or writes parameters otherwise calls
            ``wait()`` first.
        mesh: a ``DeviceMesh`` of the ranks that share the work, in place of ``process_group``. With two dimensions
            (replicate, shard) gradients are reduced over the second first and parameters gathered over it last: let it
            be the one with the faster links. DTensors have meshes of their own, which cover the same ranks.
        process_group: the ranks that share the work; the default group if neither this nor ``mesh`` is given.
        gradients: ``"resident"``: a bucket's gradients stay until the step. ``"streamed"``: gradients live only until
            their bucket is full, and every backward pass reduces, so that a rank keeps only the sums of its own part:
            in fp32, or ``grad_dtype``, if several passes make a step. Needs ``accumulation_steps``, and leaves no
            ``.grad``. No effect on DTensors and, unless ``order="tree"``, on one rank.
        grad_dtype: dtype in which gradients are kept, added up and sent; the parameter's if None. fp32 beside 16-bit
            parameters lets micro-batches add up in fp32, for 2 bytes an element more in memory and, unless
            ``reduce_dtype`` says otherwise, on the wire. Needs torch 2.10. Refused for DTensors.
        reducer: ``"rs"`` or ``"exact"``, see ``optim_dist.reducers``.
        order: the order in which ``exact`` adds up. ``"rank"``: each rank adds its own micro-batches as they come; then
            the ranks' sums are added in rank order. ``"tree"``: all micro-batches of a step are added in one binary
            tree, in fp32; that of pass j on rank r is number j W + r. A step and its norm then have the same bits on 1,
            2, 4, 8, ... ranks that see the same micro-batches in that numbering. Needs ``reducer="exact"``,
            ``gradients="streamed"``, and powers of two of ranks and passes; keeps log2 of the passes more sums of the
            rank's part. Refused for DTensors.
        reduce_dtype: dtype of gradients on the wire; their own if None.
        reduced_dtype: ``exact`` only: dtype of the sums; the gradients' own if None.
        average: divide the sum over ranks by their number.
        accumulation_steps: every k-th backward pass reduces while it runs. None: reductions start at ``step()``.
        overlap: False keeps every collective inside ``step()``.
        bucket_mb: approximate size of a bucket, in 2^20 bytes; None chooses.
        ns_workspace_mb: 2^20 bytes that Newton–Schulz may take at a time on a rank (one parameter may take more):
            matrices are stepped in parts that fit, and all buckets share this memory. None: every bucket has memory of
            its own for all its matrices, some 6 bytes an element in 16-bit dtypes.
        max_norm: clip by the global norm inside ``step()``, in addition to an earlier ``clip_grad_norm_``.
        skip_nonfinite: leave everything untouched if the global norm is inf or NaN.
        sync_params: what construction does with parameters: ``"broadcast"`` the first rank's, or ``"check"`` that they
            are equal. DTensors are not broadcast; with ``"check"`` the first step compares those that ranks hold
            replicas of (HSDP).
        deterministic: the bits that Muon's kernels give a matrix depend on it alone, not on how many an owner has:
            with ``reducer="exact"`` the same gradients give the same bits on any number of ranks. On a CPU, and with
            ``impl="torch"`` in the group, they do so anyway. On Hopper it costs nothing for products in 16 bits without
            second moments and ``renormalize``; elsewhere speed, where owners have many small matrices.
        transport: how buckets travel. ``"backend"``: by the process group's collectives. ``"symm"``: by copies between
            GPUs of one host that see each other's memory (torch's symmetric memory), which take no multiprocessors;
            streamed gradients still go by the process group. With ``"symm"`` the reducer is always ``"exact"``. For one
            CUDA device a rank; no effect on DTensors, and on one rank.
        timeout: seconds that a collective may take; the process group's own limit if None.
        debug: compare hyperparameters, clipping, replicas of DTensors, and which of these have gradients over ranks
            before every update, and parameters after it. With ``model`` that is not compiled, also watch all operations
            of its forward pass: a parameter that is read before its own module runs is an error, since without
            ``debug`` it may be read before it is gathered.
    """

    model: torch.nn.Module | None = None
    mesh: DeviceMesh | None = None
    process_group: dist.ProcessGroup | None = None
    gradients: Gradients = "resident"
    grad_dtype: torch.dtype | None = None
    reducer: Reducer = "rs"
    order: Order = "rank"
    reduce_dtype: torch.dtype | None = None
    reduced_dtype: torch.dtype | None = None
    average: bool = True
    accumulation_steps: int | None = None
    overlap: bool = True
    bucket_mb: float | None = None
    ns_workspace_mb: float | None = 512
    max_norm: float | None = None
    skip_nonfinite: bool = False
    sync_params: SyncParams = "broadcast"
    deterministic: bool = False
    transport: Transport = "backend"
    timeout: float | None = None
    debug: bool = False

    def __post_init__(self) -> None:
        self._check_values()
        if self.transport == "symm":
            object.__setattr__(self, "reducer", "exact")
        if self.mesh is not None and self.process_group is not None:
            raise ValueError("give mesh or process_group, not both")
        if self.mesh is not None and self.mesh.ndim > 2:
            raise ValueError(
                f"mesh must have one dimension, or two (replicate, shard), got {self.mesh.ndim}; "
                "pass mesh['dp'] or the like"
            )
        if self.reduced_dtype is not None and self.reducer != "exact":
            raise ValueError("reduced_dtype belongs to reducer='exact'; with 'rs' give reduce_dtype")
        if self.is_streamed and self.accumulation_steps is None:
            raise ValueError(
                "gradients='streamed' reduces in every backward pass, as often on every rank: say by "
                "accumulation_steps= how many passes make a step (1 if you add up none)"
            )
        if self.is_streamed and not self.overlap:
            raise ValueError(
                "gradients='streamed' reduces while backward runs, which overlap=False rules out; leave one of them out"
            )
        if self.is_tree:
            self._check_tree()

    @classmethod
    def of(cls, optimizer: object, given: Mapping[str, Any], in_groups: Container[str] = ()) -> Options:
        """``Options`` from an optimizer's keyword arguments; the error for an unknown one names the optimizer.

        Args:
            in_groups: names that groups of this optimizer have, and it does not.
        """
        known = [field.name for field in fields(cls)]
        for name, value in given.items():
            if name in in_groups:
                raise TypeError(
                    f"{type(optimizer).__name__} takes {name} as an option of its groups: write "
                    f"{{'params': ..., {name!r}: {value!r}}}"
                )
            if name not in known:
                raise TypeError(
                    f"{type(optimizer).__name__} got an unexpected keyword argument {name!r}; beside its own arguments "
                    f"it takes {', '.join(known)}"
                )
        return cls(**given)

    def _check_values(self) -> None:
        """Refuse values of the wrong type, such as ``"no"``, which counts as true."""
        check_grad_dtype(self.grad_dtype)
        for name, kind in {"model": torch.nn.Module, "mesh": DeviceMesh}.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise ValueError(f"{name} must be None or a {kind.__name__}, got {value!r}")
        if self.process_group is not None and not _is_group(self.process_group):
            raise ValueError(f"process_group must be None or a ProcessGroup, got {self.process_group!r}")
        for name, kinds in _CHOICES.items():
            value, choices = getattr(self, name), get_args(kinds)
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
        for name in ("average", "overlap", "skip_nonfinite", "deterministic", "debug"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        for name in ("reduce_dtype", "reduced_dtype"):
            value = getattr(self, name)
            if value is not None and value not in DTYPES:
                raise ValueError(f"{name} must be None or one of {DTYPES}, got {value!r}")
        steps = self.accumulation_steps
        if steps is not None and (not isinstance(steps, Integral) or steps < 1):
            raise ValueError(f"accumulation_steps must be a whole number of at least 1, got {steps!r}")
        check_positive("max_norm", self.max_norm)
        check_positive("bucket_mb", self.bucket_mb, finite=True)
        if isinstance(self.timeout, timedelta):
            raise ValueError(f"timeout must be a number of seconds, got {self.timeout!r}; give its total_seconds()")
        check_positive("timeout", self.timeout, finite=True)
        workspace_for(self.ns_workspace_mb)  # refuses invalid values

    def _check_tree(self) -> None:
        if self.reducer != "exact" or not self.is_streamed:
            raise ValueError(
                "order='tree' adds up the micro-batches of all ranks, pass by pass: give reducer='exact' and "
                f"gradients='streamed' with it, got reducer={self.reducer!r}, gradients={self.gradients!r}"
            )
        if not is_power_of_two(self.accumulation_steps or 1):
            raise ValueError(
                "order='tree' adds up in pairs: accumulation_steps must be a power of two, got "
                f"{self.accumulation_steps}"
            )
        if self.reduce_dtype is not None or self.reduced_dtype is not None:
            raise ValueError(
                "order='tree' sends gradients as they are and adds them up in fp32; leave reduce_dtype and "
                "reduced_dtype out (grad_dtype says what gradients are)"
            )

    def check_ranks(self, world_size: int) -> None:
        """Refuse a number of ranks that the options do not allow."""
        if self.is_tree and not is_power_of_two(world_size):
            raise ValueError(
                f"order='tree' adds up in pairs, which {world_size} ranks do not fall into: use a power of two, or "
                "order='rank'"
            )

    def muon_planner(self, world_size: int, workspace: Workspace | None) -> MuonPlanner:
        """A planner for one rank's matrices that leaves multiprocessors to collectives in flight meanwhile."""
        spare = SPARE_MULTIPROCESSORS if self.overlap and world_size > 1 else 0
        tiles: Tiles = "shape" if self.deterministic or self.is_tree else "auto"
        return MuonPlanner(tiles, spare=spare, workspace=workspace)

    @property
    def is_tree(self) -> bool:
        return self.order == "tree"

    @property
    def is_streamed(self) -> bool:
        return self.gradients == "streamed"

    @property
    def compares_replicas(self) -> bool:
        """Whether DTensors that ranks hold replicas of are compared."""
        return self.debug or self.sync_params == "check"

    @property
    def planned_bucket_mb(self) -> float | None:
        """The ``bucket_mb`` that plans are made with."""
        return STREAMED_BUCKET_MB if self.is_streamed and self.bucket_mb is None else self.bucket_mb

    def dtype_of_sums(self, plan: BucketPlan) -> torch.dtype:
        """The dtype in which a rank keeps the sum of its chunk of a bucket, if gradients are streamed."""
        if self.is_tree:
            return torch.promote_types(plan.grad_dtype, torch.float32)
        if self.accumulation_steps != 1:
            return self.grad_dtype or torch.promote_types(plan.dtype, torch.float32)
        return (self.reduced_dtype or plan.grad_dtype) if self.reducer == "exact" else plan.wire_dtype

    @property
    def groups(self) -> list[dist.ProcessGroup | None]:
        """The process groups that connect the ranks that share the work; see ``groups_of``."""
        return groups_of(self.mesh, self.process_group)

    def communicator(self, device: torch.device) -> Communicator:
        """The ranks that share the work."""
        if self.transport == "backend":
            return self._backend_communicator(device)
        first, *others = self.groups
        if self.mesh is not None and others:
            raise ValueError(
                "transport='symm' is for the ranks of one host, which a mesh of one dimension has, got "
                f"{self.mesh.ndim} dimensions; leave it out, or pass mesh['shard'] or the like"
            )
        return PeerCommunicator(first, device, self.timeout)

    def backward_communicator(self, communicator: Communicator) -> Communicator:
        """A duplicate of ``communicator`` for reductions under backward: by the backend, whatever the transport.

        They may wait for ranks that are late by a whole backward pass, which copies between peers must not.
        """
        return self._backend_communicator(communicator.device, communicator)

    def _backend_communicator(self, device: torch.device, duplicate_of: Communicator | None = None) -> Communicator:
        first, *others = self.groups
        if self.mesh is None or not others:
            return Communicator(first, device, self.timeout, duplicate_of)
        return GridCommunicator(self.mesh, device, self.timeout, duplicate_of)

    def described(self) -> dict[str, str]:
        """What has to be the same on every rank, as text; of ``model`` only whether one was given."""
        shown = {field.name: getattr(self, field.name) for field in fields(self)}
        del shown["mesh"], shown["process_group"]
        shown["model"] = None if self.model is None else "a module"
        return {name: str(value) for name, value in shown.items()}

    def without_process(self) -> Options:
        """A copy without what belongs to this process and cannot be pickled."""
        return replace(self, model=None, mesh=None, process_group=None)


def groups_of(mesh: object, process_group: Any) -> list[dist.ProcessGroup | None]:
    """This rank's process groups: one along each mesh dimension of several ranks, or the given one; None: the default.

    Arguments of a wrong type are ignored here, as ``Options`` refuses them.
    """
    if not isinstance(mesh, DeviceMesh):
        return [process_group if _is_group(process_group) else None]
    return [mesh.get_group(dim) for dim, size in enumerate(mesh.shape) if size > 1] or [mesh.get_group(0)]


def _is_group(given: object) -> bool:
    """Whether it is a group, or what ``new_group`` gives to ranks outside of it: ``Communicator`` refuses those."""
    return isinstance(given, dist.ProcessGroup) or given == dist.GroupMember.NON_GROUP_MEMBER
