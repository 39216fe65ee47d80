"""One elementwise launch over many tensors that lie flat in memory: checks, chunks, and the table of `muon_elements`.

    a tensor's row    addresses | numel, programs | what else stays from step to step        int64
    a group's row     for each number its value (fp64) and the address of a tensor that takes its place, or 0

All is one table, so that one upload brings all changes; if nothing has changed there is none. Tensors are checked again
when their kinds have changed; their addresses are compared in every step.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import chain
from struct import pack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optim_kernels._dtensors import is_wrapper
from optim_kernels._graphs import is_capturing, keep_for_graphs
from optim_kernels._impl import KERNEL_DTYPES, why_not_triton
from optim_kernels._memory import ALIGNMENT, sharing_memory
from optim_kernels._tensor_lists import KnownKinds
from optim_kernels.functional._device_scalars import on_device, readable
from optim_kernels.functional._lists import check_lengths, description
from optim_kernels.multi_tensor import ChunkMap, ChunkSize, DeviceTable
from optim_kernels.reference.muon import Scalar

if TYPE_CHECKING:
    from optim_kernels._triton import Launch

# Elements and warps of a program: a thread loads 16 bytes of each 16-bit tensor twice. And registers of a thread, few
# enough for six programs on a multiprocessor, which have 48 KB of two such tensors in flight: 2.9 TB/s on an H100.
TILE, NUM_WARPS, MAX_REGISTERS = 2048, 4, 80

# The dtypes of masters and step counts; tensors of other lists are in one of KERNEL_DTYPES.
DTYPES = {"masters": (torch.float32, torch.int16), "steps": (torch.float32,)}

Lists = Mapping[str, Sequence[Tensor] | None]


class ElementLaunch:
    """One launch over lists of tensors: those at the same place in all lists belong together, element by element.

    Args:
        kernel: its name in ``_kernels.muon_elements``.
        written: the lists that it writes to.
    """

    def __init__(self, kernel: str, written: Sequence[str]) -> None:
        self._kernel, self._written = kernel, written
        self._known = KnownKinds()
        # what tables were made for: kinds and addresses of all tensors, and the other arguments of `follow`
        self._kinds: list[Any] | None = None
        self._addresses: list[int] = []
        self._told: tuple[Any, ...] = ()
        # whether a capture fills the chunk map: it then has its content when that graph is replayed, for it alone
        self._filled_in_capture = False
        self._scalar_tensors: list[Tensor] = []
        self._aligned: list[bool]
        self._width: int
        self._rows: array[int]
        self._table: DeviceTable
        self._chunks: ChunkMap
        self._launch: Launch
        self.device: torch.device
        # the factor that changes nothing
        self.one: Tensor
        # a counter for each tensor: its programs count themselves in it, and the last one clears it
        self.counters: Tensor

    def follow(
        self, lists: Lists, columns: Sequence[Sequence[int]], constants: Sequence[Any], starts: Sequence[int] = ()
    ) -> None:
        """Take note of this step's tensors.

        Args:
            lists: keyed by the names that errors give them, including lists of one number a tensor (``steps``); the
                first list says how many elements each tensor has.
            columns: the further columns of the tensors' rows.
            constants: compile-time arguments of the kernel behind its tile.
            starts: how many elements of its parameter precede each tensor, where random bits are counted by them.
        """
        tensors = [*chain.from_iterable(each for each in lists.values() if each is not None)]
        kinds, addresses = self._known.of(tensors), list(map(Tensor.data_ptr, tensors))
        lengths = [None if each is None else len(each) for each in lists.values()]
        # copies, because the caller may write to its lists
        told = (tensors[0].device, lengths, [*map(list, columns)], list(constants))
        is_new = kinds != self._kinds or told != self._told or self._filled_in_capture
        if not is_new and addresses == self._addresses:
            return
        # forget the old list first: a call that fails midway may leave tables of either list
        self._kinds = None
        if is_new:
            self._take(lists, columns)
        if 0 in addresses:
            _check_memory(lists)
        if len(set(map(Tensor.get_device, tensors))) > 1:
            devices = sorted({str(tensor.device) for tensor in tensors})
            raise ValueError(f"{', '.join(lists)} must be on one device, got {', '.join(devices)}")
        aligned = self._locate(lists, addresses, starts)
        if is_new or aligned != self._aligned:
            self._cut(len(lists), aligned, constants)
        self._kinds, self._addresses, self._told = kinds, addresses, told

    def _take(self, lists: Lists, columns: Sequence[Sequence[int]]) -> None:
        """Check the tensors, and make a table with the columns that stay."""
        _check(lists, self._written)
        like = next(iter(lists.values())) or ()
        self.device = like[0].device
        self.counters = torch.zeros(len(like), dtype=torch.int32, device=self.device)
        self.one = torch.ones((), dtype=torch.float32, device=self.device)
        self._table = DeviceTable(self.device)
        self._width = len(lists) + 2 + len(columns)
        self._rows = array("q", bytes(8 * self._width * len(like)))
        self._write(len(lists), list(map(Tensor.numel, like)))
        for place, values in enumerate(columns):
            self._write(len(lists) + 2 + place, values)

    def _write(self, column: int, values: Sequence[int]) -> None:
        self._rows[column :: self._width] = array("q", values)

    def _locate(self, lists: Lists, addresses: Sequence[int], starts: Sequence[int]) -> list[bool]:
        """Write the addresses; return which tensors are at multiples of 16 bytes, and of 8 elements of a parameter."""
        count = len(self.counters)
        aligned = [start % 8 == 0 for start in starts] or [True] * count
        begin = 0
        for column, (name, tensors) in enumerate(lists.items()):
            if tensors is None:
                continue
            own = addresses[begin : begin + count]
            begin += count
            self._write(column, own)
            if name != "steps":
                aligned = [flag and address % ALIGNMENT == 0 for flag, address in zip(aligned, own, strict=True)]
        return aligned

    def _cut(self, num_lists: int, aligned: list[bool], constants: Sequence[Any]) -> None:
        """Cut the tensors into chunks, a program each, and bind the kernel to their number."""
        from optim_kernels._kernels import muon_elements
        from optim_kernels._triton import TRITON_DTYPES, UNFUSED, Launch

        numels = self._rows[num_lists :: self._width].tolist()
        self._chunks = ChunkMap.build(numels, aligned, [ChunkSize(TILE)], self.device)
        self._write(num_lists + 1, self._chunks.counts)
        compiled_for = [TRITON_DTYPES[each] if isinstance(each, torch.dtype) else each for each in constants]
        kernel = getattr(muon_elements, self._kernel)
        options: dict[str, Any] = {"num_warps": NUM_WARPS, "maxnreg": MAX_REGISTERS, **UNFUSED}
        self._launch = Launch.overlapping(
            kernel, self._chunks.num_chunks, (TILE, *compiled_for), self.device, **options
        )
        self._aligned, self._filled_in_capture = aligned, is_capturing(self.device)

    def run(self, groups: Sequence[Sequence[Scalar]], *tensors: Tensor) -> None:
        """Launch on the current stream, with the numbers of each group and further arguments of the kernel."""
        numbers = [readable(number, self.device) for number in chain.from_iterable(groups)]
        # kept while the launch may read them
        self._scalar_tensors = [number for number in numbers if on_device(number)]
        self._table.update(self._rows.tobytes() + b"".join(map(_words, numbers)))
        if is_capturing(self.device):
            self._table.keep_for_graph()
            keep_for_graphs(self._chunks.words, self.counters, self.one, *self._scalar_tensors)
        self._launch((self._chunks.words, self._table.words, *tensors), (len(self.counters), self._chunks.num_full))


def why_not_taken(name: str, tensor: Tensor, like: Tensor) -> str | None:
    """What keeps a launch from taking a tensor of the list ``name`` beside ``like``; ``None`` where it can."""
    if is_wrapper(tensor):
        return f"is a {type(tensor).__name__}, which has no memory of its own"
    taken = DTYPES.get(name, KERNEL_DTYPES)
    if tensor.dtype not in taken:
        return f"is {tensor.dtype}; the kernels take {', '.join(str(t).removeprefix('torch.') for t in taken)}"
    numel = 1 if name == "steps" else like.numel()
    if tensor.device != like.device or tensor.numel() != numel:
        return f"must have {numel} elements on {like.device}, but is {description(tensor)}"
    if tensor.is_neg():
        return "is negated lazily; give its resolve_neg()"
    return None if tensor.is_contiguous() else f"must be contiguous, but is {description(tensor)}"


def _check(lists: Lists, written: Sequence[str]) -> None:
    """Raise unless the kernels can take all the tensors."""
    (first, like), *_ = lists.items()
    assert like, "nothing is launched for no tensors"
    check_lengths(len(like), first, **lists)
    for name, tensors in lists.items():
        for place, (tensor, other) in enumerate(zip(tensors or (), like)):
            reason = why_not_taken(name, tensor, other)
            if reason is not None:
                raise ValueError(f"{name}[{place}] {reason}")
            if tensors and tensor.dtype != tensors[0].dtype:
                raise ValueError(
                    f"{name}[{place}] is {tensor.dtype}, {name}[0] {tensors[0].dtype}; give a call for each dtype"
                )
    reason = why_not_triton(like[0])
    if reason is not None:
        raise RuntimeError(f"the kernels cannot take {first}[0]: {reason}; compute it by optim_kernels.reference.muon")
    for name in written:
        shared = sharing_memory(lists[name] or ())
        if shared is not None:
            one, other_place = shared
            raise ValueError(
                f"{name}[{one}] and {name}[{other_place}] share memory, to which two programs would write at once; "
                "give each its own"
            )


def _check_memory(lists: Lists) -> None:
    for name, tensors in lists.items():
        for place, tensor in enumerate(tensors or ()):
            if tensor.numel() and tensor.data_ptr() == 0:
                # its kind is that of the tensor before it, so `_take` has not checked it
                reason = why_not_taken(name, tensor, tensor) or "has no memory: its storage was freed"
                raise ValueError(f"{name}[{place}] {reason}")


def _words(number: Scalar) -> bytes:
    """The two words of a hyperparameter."""
    return pack("dq", 0.0, number.data_ptr()) if on_device(number) else pack("dq", float(number), 0)
