"""What a collective costs in the models of the notebook: latency steps, elements on the wire, additions, memory.

Notation: p processes, V elements on each of them before the collective. A cost has no unit until it is weighted:
``scalar = alpha·latency + beta·bandwidth + gamma·computation + epsilon·max_memory_delta``. For seconds and bytes on a
real machine see ``CommModel``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, init=False)
class Cost:
    """The cost of one step, or of several: their sums, but for memory the largest growth."""

    latency: float = 0
    bandwidth: float = 0
    computation: float = 0
    max_memory_delta: float = 0

    def __init__(
        self, latency: float = 0, bandwidth: float = 0, computation: float = 0, max_memory_delta: float = 0
    ) -> None:
        # the __init__ that a frozen dataclass generates takes twice as long, and searches make many costs
        values = self.__dict__
        values["latency"] = latency
        values["bandwidth"] = bandwidth
        values["computation"] = computation
        values["max_memory_delta"] = max_memory_delta

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.latency + other.latency,
            self.bandwidth + other.bandwidth,
            self.computation + other.computation,
            max(self.max_memory_delta, other.max_memory_delta),
        )

    def scalar(self, alpha: float = 1, beta: float = 1, gamma: float = 1, epsilon: float = 1) -> float:
        """The weighted sum, a float."""
        weighted = alpha * self.latency + beta * self.bandwidth + gamma * self.computation
        return float(weighted + epsilon * self.max_memory_delta)


# (processes, elements of each) -> latency, bandwidth and computation of a collective
Formula = Callable[[int, int], tuple[float, float, float]]


def _rounds(n_procs: int) -> int:
    """ceil(log2 p): the rounds of messages in a tree or by doubling."""
    return (n_procs - 1).bit_length()


class CostModel(ABC):
    """Five collectives as functions of the number of processes and of the elements each of them holds before.

    Searches are faster with a model whose class defines these attributes itself; inherited ones do not count.

    Attributes:
        grows_with_processes: whether no collective gets cheaper with more processes of as many elements each.
        formulas: allgather, permute and alltoall as plain numbers, so that pricing one makes no ``Cost``.
    """

    grows_with_processes: ClassVar[bool] = False
    formulas: ClassVar[Mapping[str, Formula]] = {}

    @staticmethod
    @abstractmethod
    def allgather(n_procs: int, n_elements: int) -> Cost:
        """Every process ends with what all of them hold."""

    @staticmethod
    @abstractmethod
    def permute(n_procs: int, n_elements: int) -> Cost:
        """Every process sends all it holds to one other."""

    @staticmethod
    @abstractmethod
    def allreduce(n_procs: int, n_elements: int) -> Cost:
        """Every process ends with the sum."""

    @staticmethod
    @abstractmethod
    def reduce_scatter(n_procs: int, n_elements: int) -> Cost:
        """Every process ends with its part of the sum."""

    @staticmethod
    @abstractmethod
    def alltoall(n_procs: int, n_elements: int) -> Cost:
        """Every process sends a different part of what it holds to every other."""


def _to_all(p: int, v: int) -> tuple[float, float, float]:
    """What every process holds arrives at every other."""
    return _rounds(p), float((p - 1) * v), 0


def _parts_to_all(p: int, v: int) -> tuple[float, float, float]:
    """A p-th of what every process holds arrives at every other."""
    return _rounds(p), (p - 1) * v / p, 0


def _swapped(p: int, v: int) -> tuple[float, float, float]:
    """What every process holds goes to one other."""
    return (1, float(v), 0) if p > 1 else (0, 0, 0)


def _swapped_by_all(p: int, v: int) -> tuple[float, float, float]:
    """As ``_swapped``, with the elements of all processes charged to each."""
    return (1, float(p * v), 0) if p > 1 else (0, 0, 0)


class IdealLowerBoundsCM(CostModel):
    """The numbers of the notebook, kept so that its results can be compared.

    It charges an all-to-all (p-1)·V, p times what a process sends, and a permutation p·V, where a process sends V at
    most; so gathers win too often. ``TextbookCM`` counts what is sent.
    """

    grows_with_processes = True
    formulas: ClassVar[Mapping[str, Formula]] = {
        "allgather": _to_all,
        "permute": _swapped_by_all,
        "alltoall": _to_all,
    }

    @staticmethod
    def allgather(n_procs: int, n_elements: int) -> Cost:
        return Cost(*_to_all(n_procs, n_elements))

    @staticmethod
    def permute(n_procs: int, n_elements: int) -> Cost:
        return Cost(*_swapped_by_all(n_procs, n_elements))

    @staticmethod
    def allreduce(n_procs: int, n_elements: int) -> Cost:
        volume = float((n_procs - 1) * n_elements)
        return Cost(_rounds(n_procs), 2 * volume, volume)

    @staticmethod
    def reduce_scatter(n_procs: int, n_elements: int) -> Cost:
        volume = float((n_procs - 1) * n_elements)
        return Cost(_rounds(n_procs), volume, volume / n_procs)

    @staticmethod
    def alltoall(n_procs: int, n_elements: int) -> Cost:
        return Cost(*_to_all(n_procs, n_elements))


class TextbookCM(CostModel):
    """What a process really sends in the usual bandwidth-optimal algorithms."""

    grows_with_processes = True
    formulas: ClassVar[Mapping[str, Formula]] = {
        "allgather": _to_all,
        "permute": _swapped,
        "alltoall": _parts_to_all,
    }

    @staticmethod
    def allgather(n_procs: int, n_elements: int) -> Cost:
        return Cost(*_to_all(n_procs, n_elements))

    @staticmethod
    def permute(n_procs: int, n_elements: int) -> Cost:
        return Cost(*_swapped(n_procs, n_elements))

    @staticmethod
    def allreduce(n_procs: int, n_elements: int) -> Cost:
        volume = (n_procs - 1) * n_elements / n_procs
        return Cost(_rounds(n_procs), 2 * volume, volume)

    @staticmethod
    def reduce_scatter(n_procs: int, n_elements: int) -> Cost:
        volume = (n_procs - 1) * n_elements / n_procs
        return Cost(_rounds(n_procs), volume, volume)

    @staticmethod
    def alltoall(n_procs: int, n_elements: int) -> Cost:
        return Cost(*_parts_to_all(n_procs, n_elements))
