"""Newton–Schulz on the GPU as users call it: what a call has to decide is decided once for each kind of matrix.

A kind is shape, strides, dtype and options. Its plan knows the products to launch (`chain_jobs` lists them) and where
X and the m×m factors lie (`buffers`).

    squares → divisors or scale → products          large matrices, and all while the caller captures a CUDA graph
    squares → divisors or scale → replay → copy     small ones, whose products take less time than launching them
    squares → divisors or scale → chain             batches that fill the chip (`chain`)

fp16 matrices are read where they are, or copied (for a replay, or where the copy engine cannot read them), and the
first products bring them to norm 1; others are divided and rounded first. The first product may overlap with the norms,
which it needs only at its end; where it takes lone tiles, it even finds the divisors, without a launch for them.

A replay runs a CUDA graph of the products, which has their addresses in the call's allocation. PyTorch gives a repeated
call the memory of the call before; so a graph is kept for each of the latest such addresses, and recorded when an
address is seen again. No two calls hold the same memory at a time, so replays of one graph, on whatever streams, never
overlap.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from optim_kernels._graphs import ONE_AT_A_TIME, side_stream
from optim_kernels._kernels.normalize import Norm, Start, apply_row_factors, size_of_room
from optim_kernels._newton_schulz.buffers import Buffers
from optim_kernels._newton_schulz.chain import ChainPlan, takes_chain
from optim_kernels._newton_schulz.chain_jobs import Job, Kind, Scale, jobs_of
from optim_kernels._newton_schulz.config import NSConfig
from optim_kernels._newton_schulz.copy_engine import ALIGNMENT, is_readable
from optim_kernels._newton_schulz.int8_start import first_step, starts_in_int8
from optim_kernels._newton_schulz.product_launches import general_product, symmetric_product
from optim_kernels._newton_schulz.tile_choice import finds_norm, takes_factors, takes_pairs
from optim_kernels._newton_schulz.tiles import cdiv

# Flops under which the products' launches take longer than the products.
MOST_REPLAYED_FLOPS = 6e11
# Addresses for which a plan keeps a graph.
NUM_GRAPHS = 16


def plan_for(x: Tensor, config: NSConfig) -> Callable[[Tensor], Tensor]:
    """A function for ``newton_schulz`` of ``x [..., M, N]`` and of tensors of its shape, strides, dtype and alignment.

    Its result is contiguous, or the transpose of a contiguous tensor.
    """
    if x.shape[-2] > x.shape[-1]:
        plan = plan_for(x.mT, config)
        return lambda x: plan(x.mT).mT
    shape = x.shape
    if x.numel() == 0:
        return lambda x: torch.empty(shape, dtype=x.dtype, device=x.device)
    count, m, n = prod(shape[:-2]), *shape[-2:]
    if x.is_cuda and takes_chain(count, m, n, config, config.compute_dtype(x), x.device):
        return ChainPlan(x.reshape(count, m, n), shape, config)
    return Plan(x.reshape(count, m, n), shape, config)


def is_small(shape: Sequence[int], config: NSConfig) -> bool:
    """Whether the products of ``shape [..., M, N]`` take the device less time than launching them takes the host."""
    return prod(shape[:-2]) * config.flops(shape[-2], shape[-1]) < MOST_REPLAYED_FLOPS


class _Places(NamedTuple):
    """Where a run has its square buffers, those of X, and the diagonals that a job keeps apart, one after the other."""

    squares: Sequence[Tensor]
    xs: Sequence[Tensor]
    diagonals: Tensor


class Plan:
    """Newton–Schulz of matrices like ``g [batch, M, N]``, product by product.

    Args:
        shape: ``[..., M, N]``, of the caller's matrices and of the results.
    """

    def __init__(self, g: Tensor, shape: torch.Size, config: NSConfig) -> None:
        dtype = config.compute_dtype(g)
        self._batch, self._shape, self._dtype, self._compute_dtype = g.shape, shape, g.dtype, dtype
        count, m, n = g.shape
        kind = dtype, g.device
        # row factors would have to scale both numbers of R
        in_factors = config.restarts_alone_in_factors and takes_factors(count, m, n, *kind)
        self._jobs = jobs_of(config, m, n, in_factors=in_factors, in_pairs=takes_pairs(count, m, *kind))
        self._ahead = _reads_ahead(self._jobs)
        self._config = config
        self._starts_in_int8 = starts_in_int8(m, n, config, g.device)
        is_direct = self._starts_in_int8 or not g.is_cuda or config.steps == 0
        self._is_replayed = not is_direct and is_small(shape, config)
        self._is_scaled = g.dtype == dtype == torch.float16 and config.steps > 0 and not config.row_factors
        can_find_norm = self._is_scaled and not self._starts_in_int8
        self._finds_norm = can_find_norm and finds_norm(count, m, n, *kind)
        # the start's, and behind them the diagonals' in fp32
        self._num_of_start = size_of_room(g)
        num_extra = self._num_of_start + (cdiv(count * m, 2) if any(job.apart for job in self._jobs) else 0)
        self._direct = Buffers(
            self._jobs,
            g.shape,
            dtype,
            reads_x=self._is_scaled and is_readable(g),
            writes_result=g.dtype == dtype and shape[-1] * dtype.itemsize % ALIGNMENT == 0,
            num_extra=num_extra,
        )
        self._movable = Buffers(self._jobs, g.shape, dtype, num_extra=num_extra)
        self._device = g.device
        # keyed by address, the latest used last; None where it has been seen once
        self._graphs: OrderedDict[int, torch.cuda.CUDAGraph | None] = OrderedDict()
        self._start: Start | None = None
        self._movable_start: Start | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """The result for ``x [..., M, N]``."""
        if self._device.type == "cuda" and self._device.index != torch.cuda.current_device():
            with torch.cuda.device(self._device):
                return self(x)
        result = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        if self._is_replayed and not torch.cuda.is_current_stream_capturing():
            self._replay(x.reshape(self._batch), result.view(self._batch))
        else:
            self._run(x.reshape(self._batch), result.view(self._batch))
        return result

    def _run(self, g: Tensor, result: Tensor) -> None:
        buffers = self._direct
        room = torch.empty(buffers.size, dtype=self._compute_dtype, device=self._device)
        places, of_start = self._places(buffers, room, g, result)
        x = None if buffers.reads_x else places.xs[0]
        if self._start is None:
            self._start = Start(g, x, self._config, is_scaled=self._is_scaled, in_product=self._finds_norm)
        self._multiply(places, self._start(g, x, room=of_start), is_ready=buffers.reads_x)
        if not buffers.writes_result:
            result.copy_(buffers.last_x(room))

    def _replay(self, g: Tensor, result: Tensor) -> None:
        buffers = self._movable
        room = torch.empty(buffers.size, dtype=self._compute_dtype, device=self._device)
        address = room.data_ptr()
        with ONE_AT_A_TIME:
            graph = self._graphs.get(address)
            if graph is None or self._movable_start is None:
                places, of_start = self._places(buffers, room)
                x = places.xs[0]
                start = Start(g, x, self._config, is_scaled=self._is_scaled, in_product=self._finds_norm)
                self._movable_start = start
                norm = start(g, x, room=of_start)
                self._multiply(places, norm)
                self._graphs[address] = self._recorded(places, norm) if address in self._graphs else None
                if len(self._graphs) > NUM_GRAPHS:
                    self._graphs.popitem(last=False)
            else:
                self._movable_start.again(g.data_ptr(), address + buffers.first_offset, address + buffers.extra_offset)
                graph.replay()
            self._graphs.move_to_end(address)
        result.copy_(buffers.last_x(room))

    def _places(
        self, buffers: Buffers, room: Tensor, x: Tensor | None = None, result: Tensor | None = None
    ) -> tuple[_Places, Tensor]:
        """Where a run has its tensors, and room for what the start finds."""
        extra = buffers.extra(room)
        places = _Places(*buffers.of(room, x, result), extra[self._num_of_start :].view(torch.float32))
        return places, extra[: self._num_of_start]

    def _multiply(self, places: _Places, norm: Tensor | Norm | None, *, is_ready: bool = False) -> None:
        """Launch the products; ``norm``: 1/N and 1/N² where X has not been divided, or what the first finds them from.

        ``is_ready``: the first X was complete before the launches that find its norm, so the first product may overlap.
        """
        first = 0
        scales = norm.inverses if isinstance(norm, Norm) else norm
        if self._starts_in_int8:
            gram, _, rectangle = self._jobs[:3]
            of_x = None if scales is None else scales[0]
            x, s, result = places.xs[gram.a], places.squares[gram.d][:1], places.xs[rectangle.d]
            first_step(x, self._config.triples[0], s, result, of_x)
            first = 3
        for number, job in enumerate(self._jobs[first:], start=first):
            scale = None if scales is None or job.scale is Scale.NONE else scales[job.scale - 1]
            if job.kind in (Kind.RECTANGLE, Kind.FULL):
                _general(job, places, scale)
                continue
            ahead, late = self._ahead[number : number + 2]
            given = norm if number == 0 and isinstance(norm, Norm) else scale
            _symmetric(job, places, given, early=is_ready and number == 0, ahead=ahead, late=late)
            if number == 0 and self._config.row_factors:
                apply_row_factors(places.xs[job.a], places.squares[job.d])

    def _recorded(self, places: _Places, norm: Tensor | Norm | None) -> torch.cuda.CUDAGraph:
        # `torch.cuda.graph` would synchronise; nothing is allocated here, and other threads may go on
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side_stream(self._device)):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._multiply(places, norm)
            finally:
                graph.capture_end()
        return graph


def _general(job: Job, places: _Places, scale: Tensor | None) -> None:
    """Launch a product with X, or one of two squares of which all is computed."""
    is_square = job.kind is Kind.FULL
    operands = places.squares if is_square else places.xs
    apart = places.diagonals if job.apart else None
    general_product(
        places.squares[job.a],
        operands[job.b],
        c=operands[job.c] if job.c >= 0 else None,
        alpha=job.alpha,
        beta=job.beta,
        out=operands[job.d],
        scale=scale,
        low=places.squares[job.q] if job.low else None,
        diagonal=apart if is_square else None,
        betas=None if is_square else apart,
        exact=job.exact,
    )


def _symmetric(job: Job, places: _Places, scale: Tensor | Norm | None, *, early: bool, ahead: bool, late: bool) -> None:
    """Launch X Xᵀ, or a symmetric product of two squares."""
    squares = places.squares
    operands = places.xs if job.kind is Kind.GRAM else squares
    a, b, d = operands[job.a], operands[job.b], squares[job.d]
    c, q = (squares[number] if number >= 0 else None for number in (job.c, job.q))
    if job.twice:
        assert c is not None
        a, c, d = map(Buffers.twice, (a, c, d))
    symmetric_product(
        a,
        b,
        c=c,
        alpha=job.alpha,
        beta=job.beta,
        out=d,
        shifted=None if q is None or job.low else (q, job.omega),
        low=q if job.low else None,
        scale=scale,
        early=early,
        ahead=ahead,
        late=late,
        exact=job.exact,
    )


def _reads_ahead(jobs: Sequence[Job]) -> list[bool]:
    """Whether the job before has not written a job's first operand, of two square ones; and ``False`` for the end.

    Not for the second job: the first may have begun before what came before it was complete.
    """
    found = [False, False]
    for before, job in pairwise(jobs[1:]):
        written = {before.d, before.d + before.twice, before.q}
        has_two = job.kind is Kind.SQUARE and job.a != job.b
        # a general product lets the next launch start too soon
        is_late = before.kind in (Kind.GRAM, Kind.SQUARE)
        found.append(has_two and is_late and written.isdisjoint({job.a, job.a + job.twice}))
    return [*found[: len(jobs)], False]
