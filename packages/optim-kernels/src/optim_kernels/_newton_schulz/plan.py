"""Newton–Schulz on the GPU as users call it: what a call has to decide is decided once for each kind of matrix.

A kind is shape, strides, dtype and options. Its plan knows the products to launch (`job_launches`) and where
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
from functools import partial
from math import prod

import torch
from torch import Tensor

from optim_kernels._graphs import ONE_AT_A_TIME, side_stream
from optim_kernels._kernels.normalize import Norm, Start, size_of_room
from optim_kernels._newton_schulz.buffers import Buffers
from optim_kernels._newton_schulz.chain import ChainPlan, takes_chain
from optim_kernels._newton_schulz.chain_jobs import jobs_of
from optim_kernels._newton_schulz.config import NSConfig
from optim_kernels._newton_schulz.copy_engine import ALIGNMENT, is_readable
from optim_kernels._newton_schulz.int8_start import starts_in_int8
from optim_kernels._newton_schulz.job_launches import JobLaunches, Part, Places
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
        in_factors = config.restarts_alone_in_factors and takes_factors(count, m, n, *kind)
        jobs = jobs_of(config, m, n, in_factors=in_factors, in_pairs=takes_pairs(count, m, *kind))
        in_int8 = starts_in_int8(m, n, config, g.device)
        self._config, self._launches = config, JobLaunches(jobs, config, in_int8=in_int8)
        is_direct = in_int8 or not g.is_cuda or config.steps == 0
        self._is_replayed = not is_direct and is_small(shape, config)
        self._is_scaled = g.dtype == dtype == torch.float16 and config.steps > 0 and not config.row_factors
        self._finds_norm = self._is_scaled and not in_int8 and finds_norm(count, m, n, *kind)
        # the start's, and behind them the diagonals' in fp32
        self._num_of_start = size_of_room(g)
        num_extra = self._num_of_start + (cdiv(count * m, 2) if any(job.apart for job in jobs) else 0)
        self._direct = Buffers(
            jobs,
            g.shape,
            dtype,
            reads_x=self._is_scaled and is_readable(g),
            writes_result=g.dtype == dtype and shape[-1] * dtype.itemsize % ALIGNMENT == 0,
            num_extra=num_extra,
        )
        self._movable = Buffers(jobs, g.shape, dtype, num_extra=num_extra)
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
        squares, xs = buffers.of(room, g, result)
        x = None if buffers.reads_x else xs[0]
        if self._start is None:
            self._start = Start(g, x, self._config, is_scaled=self._is_scaled, in_product=self._finds_norm)
        extra = buffers.extra(room)
        norm = self._start(g, x, room=extra[: self._num_of_start])
        self._products(squares, xs, extra, norm, is_ready=buffers.reads_x)()
        if not buffers.writes_result:
            result.copy_(buffers.last_x(room))

    def _replay(self, g: Tensor, result: Tensor) -> None:
        buffers = self._movable
        room = torch.empty(buffers.size, dtype=self._compute_dtype, device=self._device)
        address = room.data_ptr()
        with ONE_AT_A_TIME:
            graph = self._graphs.get(address)
            if graph is None or self._movable_start is None:
                squares, xs = buffers.of(room)
                x, extra = xs[0], buffers.extra(room)
                start = Start(g, x, self._config, is_scaled=self._is_scaled, in_product=self._finds_norm)
                self._movable_start = start
                products = self._products(squares, xs, extra, start(g, x, room=extra[: self._num_of_start]))
                products()
                self._graphs[address] = self._recorded(products) if address in self._graphs else None
                if len(self._graphs) > NUM_GRAPHS:
                    self._graphs.popitem(last=False)
            else:
                self._movable_start.again(g.data_ptr(), address + buffers.first_offset, address + buffers.extra_offset)
                graph.replay()
            self._graphs.move_to_end(address)
        result.copy_(buffers.last_x(room))

    def _products(
        self,
        squares: Sequence[Tensor],
        xs: Sequence[Tensor],
        extra: Tensor,
        norm: Tensor | Norm | None,
        *,
        is_ready: bool = False,
    ) -> Callable[[], None]:
        """What launches the products.

        Args:
            extra: the buffers' extra numbers.
            norm: 1/N and 1/N² where X has not been divided, or what the first product finds them from.
            is_ready: the first X was complete before the launches that find its norm.
        """
        in_product = norm if isinstance(norm, Norm) else None
        diagonals = extra[self._num_of_start :].view(torch.float32)
        part = Part(xs, squares, norm.inverses if isinstance(norm, Norm) else norm, diagonals)
        return partial(self._launches.run, Places(squares, [part], diagonals), in_product, is_ready=is_ready)

    def _recorded(self, products: Callable[[], None]) -> torch.cuda.CUDAGraph:
        # `torch.cuda.graph` would synchronise; nothing is allocated here, and other threads may go on
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side_stream(self._device)):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                products()
            finally:
                graph.capture_end()
        return graph
