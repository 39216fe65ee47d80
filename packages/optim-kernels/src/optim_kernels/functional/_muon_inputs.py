"""The inputs of a Muon step on the device: addresses of gradients, hyperparameters, a factor and found_inf."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from optim_kernels._kernels import muon_table as fields
from optim_kernels.functional._device_scalars import on_device
from optim_kernels.multi_tensor import DeviceTable

NUM_HYPER: int = fields.NUM_HYPER.value


class StepInputs:
    """All inputs in one table, so that one upload brings all changes; scalars on the device are copied into it.

        words   an address for each matrix (int64) | hyperparameters of each group (fp32) | factor, found_inf (fp32)

    A captured step keeps its own table: later steps do not write to the table that a graph reads.

    Attributes:
        grads, hyper, control: the three parts of the table.
    """

    def __init__(self, num_matrices: int, num_groups: int, device: torch.device) -> None:
        self._device, self._table = device, DeviceTable(device)
        # a multiple of 16 bytes, so that all parts are aligned alike
        self._num_addresses = num_matrices + num_matrices % 2
        self._shape = (num_groups, NUM_HYPER)
        self._addresses = b""
        # the words of the table of which the parts are views
        self._viewed: Tensor | None = None

    def set_addresses(self, addresses: Sequence[int]) -> None:
        """Set where each matrix's gradient begins, from the next ``update`` on."""
        padding = [0] * (self._num_addresses - len(addresses))
        self._addresses = array("q", [*addresses, *padding]).tobytes()

    def update(
        self, hyper: Sequence[Sequence[float | Tensor]], factor: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """Bring the table up to date; its parts may then be new tensors, which recorded launches do not read."""
        control: list[Any] = [1.0 if factor is None else factor, 0.0 if found_inf is None else found_inf]
        values = [*chain.from_iterable(hyper), *control]
        # a factor differs from step to step, and a graph must not keep the present value of one on the host: so it is
        # copied as well, which torch refuses to capture
        are_tensors = [*map(on_device, values[:-2]), *(isinstance(value, Tensor) for value in control)]
        numbers = array("f", [0.0 if is_tensor else float(x) for x, is_tensor in zip(values, are_tensors)])
        # so that a number replaces what a tensor has left in its place, even a 0, which stands for tensors above
        kinds = bytes(are_tensors) + bytes(-len(are_tensors) % 8)
        # before the table changes, since one without a value (a meta tensor) raises
        tensors = {
            place: value.reshape(()).to(self._device) for place, value in enumerate(values) if are_tensors[place]
        }
        self._table.update(self._addresses + numbers.tobytes() + kinds)
        words = self._table.words
        # asked of the tensor, because a call that made it may have been interrupted before it made the views
        if words is not self._viewed:
            split = self._num_addresses
            self._floats = self._table.part(split, split + len(numbers) // 2, dtype=torch.float32)
            self.hyper, self.control = self._floats[:-2].view(self._shape), self._floats[-2:]
            self.grads = self._table.part(0, split)
            self._viewed = words
        for place, value in tensors.items():
            self._floats[place].copy_(value)

    def keep_for_graph(self) -> None:
        """Take note that launches which read the table are being captured."""
        self._table.keep_for_graph()
