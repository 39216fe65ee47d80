"""What ranks tell each other at every step: which parameters have gradients and, if watched, which step it is."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from optim_dist._optimizers.agreement import check_step
from optim_dist._reduction.collectives import Communicator


class StepMessages:
    """The messages of one optimizer's steps; those of steps that are watched also tell which optimizer and step."""

    _latest_number: ClassVar[int] = 0

    def __init__(self, communicator: Communicator, *, is_watched: bool) -> None:
        self._communicator = communicator
        self.is_watched = is_watched
        self.number = 0  # of the optimizer among those of this process, the same on all ranks
        self._num_steps = 0
        self._num_parameters = 0
        # kept, as most steps' are alike
        self._numbers: list[float] | None = None
        self._on_device: Tensor | None = None

    def agree_on_number(self) -> None:
        """Give the optimizer a number if it has none. Collective."""
        if not self.number:
            numbers = self._communicator.gather_json(StepMessages._latest_number)
            self.number = StepMessages._latest_number = max(numbers) + 1

    def write(self, present: list[float], num_given_up: int) -> None:
        """Write the message of the next step: ``present [K]``, and how many batches this rank has given up."""
        self._num_steps += 1
        self._num_parameters = len(present)
        numbers = present
        if self.is_watched:
            numbers = [*present, self.number, self._num_steps % 2**20, num_given_up % 2**20]
        if self._numbers != numbers:
            self._on_device = torch.tensor(numbers, dtype=torch.float32, device=self._communicator.device)
            self._numbers = numbers

    def gathered(self) -> Tensor:
        """Every rank's ``present``, ``[W, K]``. Collective.

        Raises:
            RuntimeError: if steps are watched, unless all ranks are in the same one.
        """
        assert self._on_device is not None, "the message is written"
        found = self._communicator.gather_numbers(self._on_device)
        if self.is_watched:
            check_step(found[:, self._num_parameters :].tolist(), self._communicator.ranks)
        return found[:, : self._num_parameters]
