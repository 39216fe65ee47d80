"""Block-cyclic distributions of a tensor over a mesh of processes, and the collectives that lead from one to another.

``MultiAxisDist(mesh, mapping, blocks)`` splits dimension d of N elements over the mesh axes ``mapping[d]``, P processes
in all, in blocks of b = ``blocks[d]``: block j, elements j·b to min((j+1)·b, N) - 1, lives on linear coordinate
j mod P, row-major over the axes in mapping order. b = 1 is cyclic, b = ceil(N/P) contiguous. Axes that no dimension
uses replicate. Ranks are row-major over the mesh.

The names are those of the notebook from which this package descends. Every operation returns the distribution it
leads to, the elements that the most loaded rank holds before it, and the number of processes of one group; a split,
which sends nothing, gives 0 for both numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

from optim_redist._mesh import coordinates
from optim_redist._multi_axis.moves import (
    UNSPLIT,
    Axes,
    State,
    axes_size,
    local_length,
    max_local_size,
    replace_dims,
    split_fits,
    swap_axes,
    whole_numbers,
)
from optim_redist._multi_axis.steps import MoveSet
from optim_redist.layout import Cyclic, Layout, Mesh

if TYPE_CHECKING:
    from torch import Tensor

Outcome = tuple["MultiAxisDist", int, int]


@dataclass(frozen=True, init=False, repr=False)
class MultiAxisDist:
    """A distribution of tensors with ``len(dims_mapping)`` dimensions over ``processor_mesh``.

    Args:
        processor_mesh: sizes of the mesh axes, or one int for a mesh of one axis.
        dims_mapping: for each tensor dimension the mesh axes that split it, major to minor, or one int; ``()`` or
            ``None`` where it is not split.
        block_sizes: one int for all split dimensions or one for each dimension; ``None`` or -1 means 1 where split.
            A dimension that is not split always stores -1.

    All methods that take a shape, except ``compatible`` itself, raise ``ValueError`` if it is not ``compatible``.
    """

    processorMesh: tuple[int, ...]
    dimsMapping: tuple[Axes, ...]
    blockSizes: tuple[int, ...]

    def __init__(
        self,
        processor_mesh: Sequence[int] | int,
        dims_mapping: Sequence[Sequence[int] | int | None],
        block_sizes: Sequence[int | None] | int | None = None,
    ) -> None:
        mesh = whole_numbers(processor_mesh, "processor_mesh", "sizes")
        if not mesh or min(mesh) < 1:
            raise ValueError(
                f"processor_mesh must have at least one axis, each of size 1 or more, got {processor_mesh}"
            )
        if not isinstance(dims_mapping, Iterable):
            raise ValueError(f"dims_mapping has one entry for each tensor dimension, got {dims_mapping!r}")
        mapping = tuple(() if axes is None else whole_numbers(axes, "dims_mapping", "axes") for axes in dims_mapping)
        used = list(chain.from_iterable(mapping))
        if any(axis not in range(len(mesh)) for axis in used):
            raise ValueError(f"dims_mapping names axes {used}, but the mesh {list(mesh)} has axes 0 to {len(mesh) - 1}")
        if len(set(used)) != len(used):
            raise ValueError(f"dims_mapping uses a mesh axis twice: {mapping}")
        given: list[Any] = [block_sizes] * len(mapping)
        if isinstance(block_sizes, Iterable) and not isinstance(block_sizes, str):
            given = list(block_sizes)
        if len(given) != len(mapping):
            raise ValueError(
                f"block_sizes has {len(given)} entries for {len(mapping)} tensor dimensions; give as many, or one int"
            )
        blocks = whole_numbers([UNSPLIT if block is None else block for block in given], "block_sizes", "lengths")
        if any(block == 0 or block < UNSPLIT for block in blocks):
            raise ValueError(f"block_sizes must be positive, or -1 or None where unset, got {given}")
        stored = (abs(block) if axes else UNSPLIT for axes, block in zip(mapping, blocks))
        object.__setattr__(self, "processorMesh", mesh)
        object.__setattr__(self, "dimsMapping", mapping)
        object.__setattr__(self, "blockSizes", tuple(stored))

    @classmethod
    def _of(cls, mesh: tuple[int, ...], state: State) -> MultiAxisDist:
        """The distribution with this state, without the checks: what ``state`` was made from has passed them."""
        dist = object.__new__(cls)
        dist.__dict__.update(processorMesh=mesh, dimsMapping=state.mapping, blockSizes=state.blocks)
        return dist

    # -- printing

    def __str__(self) -> str:
        def axes_text(axes: Axes) -> str:
            inner = ",".join(map(str, axes))
            return f"({inner})" if len(axes) > 1 else inner or "∅"

        mesh = ",".join(map(str, self.processorMesh))
        mapping = ",".join(map(axes_text, self.dimsMapping))
        blocks = ",".join("∅" if block == UNSPLIT else str(block) for block in self.blockSizes)
        return f"D_[{mesh}]⊥{{{mapping}}}({blocks})"

    def __repr__(self) -> str:
        return f"MultiAxisDist({self.processorMesh}, {self.dimsMapping}, {self.blockSizes})"

    def latexStr(self) -> str:
        """The distribution as LaTeX, without its mesh: ``$T_{\\perp\\{ 0,\\emptyset \\}(4,\\emptyset)}$``."""
        _, _, text = str(self).partition("⊥{")
        mapping, _, blocks = text.replace("∅", r"\emptyset").partition("}")
        return rf"$T_{{\perp\{{ {mapping} \}}{blocks}}}$"

    # -- what it says about tensors

    @property
    def _state(self) -> State:
        return State(self.dimsMapping, self.blockSizes)

    @property
    def numProcessors(self) -> int:
        """The number of processes of the mesh."""
        return prod(self.processorMesh)

    def isDistributed(self) -> bool:
        """Whether any dimension is split."""
        return any(self.dimsMapping)

    def compatible(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of ``shape`` has as many dimensions and leaves no process empty."""
        if len(shape) != len(self.dimsMapping):
            return False
        for length, axes, block in zip(shape, self.dimsMapping, self.blockSizes):
            if axes and not split_fits(length, axes_size(self.processorMesh, axes), block):
                return False
        return True

    def _check(self, shape: Sequence[int], what: str) -> tuple[int, ...]:
        if not self.compatible(shape):
            raise ValueError(
                f"{what}: {self} is not compatible with shape {tuple(shape)}; it needs "
                f"{len(self.dimsMapping)} dimensions, each with at least one element for every process it is split over"
            )
        return tuple(shape)

    def _coordinates(self, rank: int) -> list[int]:
        """The linear coordinate of ``rank`` along the axes of each dimension, row-major in mapping order."""
        return [coordinates(self.processorMesh, axes)[rank] for axes in self.dimsMapping]

    def localShape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """The shape of what ``rank`` holds of a tensor of ``shape``."""
        self._check(shape, "localShape")
        if rank not in range(self.numProcessors):
            raise ValueError(f"rank must be from 0 to {self.numProcessors - 1}, got {rank}")
        return tuple(
            local_length(length, axes_size(self.processorMesh, axes), block, coordinate) if axes else length
            for length, axes, block, coordinate in zip(
                shape, self.dimsMapping, self.blockSizes, self._coordinates(rank)
            )
        )

    def maxNumElements(self, shape: Sequence[int]) -> int:
        """Elements of a tensor of ``shape`` on the most loaded rank."""
        return max_local_size(self._check(shape, "maxNumElements"), self.processorMesh, self._state)

    def processorView(self, shape: Sequence[int]) -> Tensor:
        """A bool tensor [*shape, processes]: who holds which element."""
        import torch

        self._check(shape, "processorView")
        view = torch.ones(self.numProcessors, dtype=torch.bool)
        for tensor_dim, (axes, block) in enumerate(zip(self.dimsMapping, self.blockSizes)):
            index = torch.arange(shape[tensor_dim])
            holder = index // block % axes_size(self.processorMesh, axes) if axes else torch.zeros_like(index)
            held = holder[:, None] == torch.tensor(coordinates(self.processorMesh, axes))  # [N, P]
            view = view & held.view(-1, *(1,) * (len(shape) - tensor_dim - 1), self.numProcessors)
        return view

    def getElementLocation(self, shape: Sequence[int], index: int | Sequence[int]) -> Tensor:
        """A bool tensor [processes]: who holds the element at ``index``, row-major or one index per dimension."""
        import torch

        self._check(shape, "getElementLocation")
        if isinstance(index, int):
            if index not in range(prod(shape)):
                raise ValueError(f"index must be from 0 to {prod(shape) - 1} for shape {tuple(shape)}, got {index}")
            indices = [index // prod(shape[tensor_dim + 1 :]) % length for tensor_dim, length in enumerate(shape)]
        else:
            indices = list(index)
        if len(indices) != len(shape) or any(i not in range(length) for i, length in zip(indices, shape)):
            raise ValueError(f"index must name one element of shape {tuple(shape)}, got {index}")
        wanted = [
            i // block % axes_size(self.processorMesh, axes) if axes else 0
            for i, axes, block in zip(indices, self.dimsMapping, self.blockSizes)
        ]
        return torch.tensor([self._coordinates(rank) == wanted for rank in range(self.numProcessors)])

    # -- operations: (where it leads, elements of the most loaded rank before, processes of one group)

    def _outcome(self, shape: tuple[int, ...], state: State, n_procs: int, what: str) -> Outcome:
        result = MultiAxisDist._of(self.processorMesh, state)
        result._check(shape, what)
        return result, max_local_size(shape, self.processorMesh, self._state), n_procs

    def allgather(self, shape: Sequence[int], gather_mesh_dim: int | None = None) -> Outcome:
        """Collect what is split: everything, or over the one mesh axis ``gather_mesh_dim``.

        An axis can be collected if it is the first or the last of its dimension. Collecting the last axis multiplies
        the block of the dimension by the size of the axis; collecting the first keeps the block.
        """
        sizes = self.processorMesh
        checked = self._check(shape, "allgather")
        if not self.isDistributed():
            raise ValueError(f"allgather: {self} is replicated, there is nothing to gather")
        if gather_mesh_dim is None:
            replicated = State(((),) * len(shape), (UNSPLIT,) * len(shape))
            return self._outcome(
                checked, replicated, axes_size(sizes, [*chain.from_iterable(self.dimsMapping)]), "allgather"
            )
        tensor_dim = next((i for i, axes in enumerate(self.dimsMapping) if gather_mesh_dim in axes), None)
        if tensor_dim is None:
            raise ValueError(f"allgather: gather_mesh_dim {gather_mesh_dim} splits no dimension of {self}")
        axes, block = self.dimsMapping[tensor_dim], self.blockSizes[tensor_dim]
        size = sizes[gather_mesh_dim]
        if axes[-1] == gather_mesh_dim:
            change = (tensor_dim, axes[:-1], block * size)
        elif axes[0] == gather_mesh_dim:
            change = (tensor_dim, axes[1:], block)
        else:
            raise ValueError(
                f"allgather: gather_mesh_dim {gather_mesh_dim} is neither first nor last in {axes} of {self}"
            )
        return self._outcome(checked, replace_dims(self._state, change), size, "allgather")

    def split(
        self,
        shape: Sequence[int],
        tensor_axis: int,
        mesh_dims: int | Sequence[int],
        block_size: int = 1,
        minor: bool = False,
    ) -> Outcome:
        """Split a dimension over unused mesh axes: each rank keeps a part of what it has, nothing is sent.

        A dimension that is split already takes the new axes in front and keeps its block, or with ``minor`` takes them
        at the back and divides its block by their size.
        """
        checked = self._check(shape, "split")
        self._dimension(tensor_axis, "split", "tensor_axis")
        added = (mesh_dims,) if isinstance(mesh_dims, int) else tuple(mesh_dims)
        used = set(chain.from_iterable(self.dimsMapping))
        free = set(range(len(self.processorMesh))) - used
        if not added or len(set(added)) != len(added) or not free.issuperset(added):
            raise ValueError(f"split: mesh_dims must be unused axes of {self}, among {sorted(free)}, got {mesh_dims}")
        change = self._receive(tensor_axis, added, block_size, minor, "split")
        outcome, _, _ = self._outcome(checked, replace_dims(self._state, change), 0, "split")
        return outcome, 0, 0

    def alltoall(
        self,
        shape: Sequence[int],
        from_tensor_axis: int,
        to_tensor_axis: int,
        block_size: int = UNSPLIT,
        minor: bool = False,
        *,
        from_minor: bool | None = None,
        to_minor: bool | None = None,
    ) -> Outcome:
        """Move mesh axes from one dimension to another.

        All axes of ``from_tensor_axis`` move, or with ``from_minor`` only its last. They go to the front of
        ``to_tensor_axis``, or with ``to_minor`` to its back. An unsplit ``to_tensor_axis`` takes ``block_size``, or the
        block of ``from_tensor_axis`` if ``block_size`` is -1. ``minor=True`` sets both flags.
        """
        checked = self._check(shape, "alltoall")
        axes, block = self._dimension(from_tensor_axis, "alltoall", "from_tensor_axis")
        self._dimension(to_tensor_axis, "alltoall", "to_tensor_axis")
        if not axes:
            raise ValueError(f"alltoall: from_tensor_axis {from_tensor_axis} of {self} is not split")
        if from_tensor_axis == to_tensor_axis:
            raise ValueError(f"alltoall: from_tensor_axis and to_tensor_axis are both {to_tensor_axis}")
        moved = axes[-1:] if (minor if from_minor is None else from_minor) else axes
        n_procs = axes_size(self.processorMesh, moved)
        leave = (from_tensor_axis, axes[: len(axes) - len(moved)], block * n_procs)
        new_block = block if block_size == UNSPLIT else block_size
        to_back = minor if to_minor is None else to_minor
        enter = self._receive(to_tensor_axis, moved, new_block, to_back, "alltoall")
        return self._outcome(checked, replace_dims(self._state, leave, enter), n_procs, "alltoall")

    def permute(self, shape: Sequence[int], mesh_dims: Sequence[int]) -> Outcome:
        """Exchange two mesh axes of equal size, wherever they are."""
        checked = self._check(shape, "permute")
        if not self.isDistributed():
            raise ValueError(f"permute: {self} is replicated, there is nothing to permute")
        if len(mesh_dims) != 2 or any(axis not in range(len(self.processorMesh)) for axis in mesh_dims):
            raise ValueError(f"permute: mesh_dims must be two axes of mesh {list(self.processorMesh)}, got {mesh_dims}")
        first, second = mesh_dims
        if self.processorMesh[first] != self.processorMesh[second]:
            raise ValueError(f"permute: axes {first} and {second} of mesh {list(self.processorMesh)} differ in size")
        return self._outcome(checked, swap_axes(self._state, first, second), 2, "permute")

    def change_block_size(self, shape: Sequence[int], tensor_axis: int, block_size: int) -> Outcome:
        """Keep the axes of a dimension and change its block to a multiple or a divisor."""
        checked = self._check(shape, "change_block_size")
        axes, block = self._dimension(tensor_axis, "change_block_size", "tensor_axis")
        if not axes:
            raise ValueError(f"change_block_size: tensor_axis {tensor_axis} of {self} is not split")
        if block_size < 1 or block_size == block or (block_size % block and block % block_size):
            raise ValueError(
                f"change_block_size: block_size must be another multiple or divisor of {block}, got {block_size}"
            )
        state = replace_dims(self._state, (tensor_axis, axes, block_size))
        return self._outcome(checked, state, axes_size(self.processorMesh, axes), "change_block_size")

    def exchange(self, shape: Sequence[int], target: MultiAxisDist) -> Outcome:
        """Go to any distribution on the same mesh at once: every rank sends to every rank what it lacks."""
        checked = self._check(shape, "exchange")
        if target.processorMesh != self.processorMesh:
            raise ValueError(f"exchange: target must be on mesh {list(self.processorMesh)}, got {target}")
        return self._outcome(checked, target._state, self.numProcessors, "exchange")

    def _dimension(self, tensor_dim: int, what: str, name: str) -> tuple[Axes, int]:
        if tensor_dim not in range(len(self.dimsMapping)):
            raise ValueError(f"{what}: {name} must be from 0 to {len(self.dimsMapping) - 1}, got {tensor_dim}")
        return self.dimsMapping[tensor_dim], self.blockSizes[tensor_dim]

    def _receive(
        self, tensor_dim: int, added: Axes, block_size: int, to_back: bool, what: str
    ) -> tuple[int, Axes, int]:
        """The change by which a dimension takes further axes."""
        axes, block = self.dimsMapping[tensor_dim], self.blockSizes[tensor_dim]
        if not axes:
            if block_size < 1:
                raise ValueError(f"{what}: block_size must be positive, got {block_size}")
            return tensor_dim, added, block_size
        if not to_back:
            return tensor_dim, (*added, *axes), block
        shorter, remainder = divmod(block, axes_size(self.processorMesh, added))
        if remainder:
            raise ValueError(f"{what}: block {block} of dimension {tensor_dim} cannot be divided over the axes {added}")
        return tensor_dim, (*axes, *added), shorter

    # -- the graph of operations

    def neighbours(
        self, shape: Sequence[int], block_sizes: Iterable[int] = ()
    ) -> list[tuple[str, MultiAxisDist, int, int]]:
        """Every distribution one operation away: (op name, distribution, volume, n_procs).

        Block lengths tried are 1, those of this distribution, ``block_sizes``, and these multiplied or divided by sizes
        of mesh axes. A split over several axes counts as several; ``exchange`` leads everywhere and is left out.
        """
        checked = self._check(shape, "neighbours")
        volume = max_local_size(checked, self.processorMesh, self._state)
        blocks = [(*self.blockSizes, *block_sizes)] * len(checked)
        moves = MoveSet(checked, self.processorMesh, blocks).moves(self._state)
        return [
            (
                move.name,
                MultiAxisDist._of(self.processorMesh, move.state),
                0 if move.collective == "split" else volume,
                move.n_procs,
            )
            for move in moves
        ]

    def apply(self, shape: Sequence[int], op_name: str, target: MultiAxisDist | None = None) -> Outcome:
        """Replay an operation by its printed name; ``split_*`` and ``exchange_*`` need to be told their ``target``."""
        from optim_redist._multi_axis.names import replay

        return replay(self, shape, op_name, target)

    def split_all(self, shape: Sequence[int], target: MultiAxisDist) -> Outcome:
        """Go from a replicated tensor straight to ``target``, each rank keeping its part."""
        checked = self._check(shape, "split")
        if self.isDistributed() or target.processorMesh != self.processorMesh:
            raise ValueError(
                f"split_*: leads from a replicated tensor to a target on the same mesh, got {self} and {target}"
            )
        outcome, _, _ = self._outcome(checked, target._state, 0, "split")
        return outcome, 0, 0

    def to_layout(self) -> Layout:
        """The same distribution as a general layout: every split dimension cyclic in its blocks."""
        dims = [(axes, Cyclic(block)) if axes else None for axes, block in zip(self.dimsMapping, self.blockSizes)]
        return Layout(Mesh(self.processorMesh), dims)
