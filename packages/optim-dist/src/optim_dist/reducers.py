"""Two ways to sum a bucket's gradients so that every rank ends with the sum of its own chunk.

    rs      one in-place reduce-scatter; the backend adds, in the dtype of the wire and in an order of its own.
            bf16 rings round at every hop: |error| <= (W - 1) 2^-8 sum_r |g_r|.
    exact   one all-to-all of the same bytes, then the W contributions are added here, in rank order, in fp32, and
            rounded once. Bitwise what one process gets that sums W gradients in that order, at any W and bucket size.

Neither divides by W: the factor is folded into the update, which reads the gradient anyway. Only sums in fp16, which
overflow at 65504, are averages already: ``rs`` divides gradients before it sends them, ``exact`` the fp32 sum before it
is rounded.

FSDP2 sums its gradients itself; with ``for_fsdp()`` it does so as ``exact`` does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from optim_dist._reduction.collectives import Communicator, Waitable
from optim_dist._reduction.peers import PeerCommunicator
from optim_dist._reduction.storage import Contribution, ParameterBucket
from optim_dist._reduction.tree import sum_in_pairs
from optim_kernels.functional import sum_slices


class Reducer(Protocol):
    """Every rank calls ``launch`` in plan order; ``finish``, at any time later, returns the sum of its own chunk."""

    communicator: Communicator

    def connect(self, buckets: Sequence[ParameterBucket]) -> None:
        """Run each collective of these buckets once, on other memory. Collective.

        NCCL connects ranks when it first uses an algorithm, which may depend on the size, and the host waits for all
        ranks meanwhile: under backward, ranks that lack a gradient would not come.
        """

    @property
    def starts_alone(self) -> bool:
        """Whether ``launch`` waits for no other rank, once there is room."""

    def is_ready(self, bucket: ParameterBucket) -> bool:
        """Whether ``launch`` would not wait, on the host or in the stream, for other ranks' earlier launches."""

    def launch(self, bucket: Contribution) -> None: ...

    def finish(self, bucket: Contribution) -> Tensor: ...


class ReduceScatter:
    """``rs``: the backend's reduce-scatter, in ``reduce_dtype`` if one is given."""

    def __init__(self, communicator: Communicator, reduce_dtype: torch.dtype | None) -> None:
        self.communicator = communicator
        self.reduce_dtype = reduce_dtype

    def connect(self, buckets: Sequence[ParameterBucket]) -> None:
        for flat in _like_wires(buckets):
            self.communicator.rehearse(partial(self.communicator.reduce_scatter_, flat))

    @property
    def starts_alone(self) -> bool:
        return not self.communicator.waits_on_host

    def is_ready(self, bucket: ParameterBucket) -> bool:
        # else it would wait under backward for ranks that lack a gradient: till step(), or for ever in a dropped batch
        return self.starts_alone

    def launch(self, bucket: Contribution) -> None:
        bucket.is_averaged = (self.reduce_dtype or bucket.gradients.dtype) == torch.float16
        wire = _on_the_wire(bucket, self.reduce_dtype, 1 / self.communicator.world_size if bucket.is_averaged else 1.0)
        bucket.work = self.communicator.reduce_scatter_(wire)

    def finish(self, bucket: Contribution) -> Tensor:
        _wait(bucket)
        return bucket.own(bucket.gradients if bucket.wire is None else bucket.wire)


class Exact:
    """``exact``: contributions summed in rank order in fp32 and rounded once to ``reduced_dtype``.

    ``in_pairs``: neighbours first, see ``_reduction.tree``.
    """

    _num_scratch = 2  # how many buckets' received contributions there is memory for

    def __init__(
        self,
        communicator: Communicator,
        reduce_dtype: torch.dtype | None,
        reduced_dtype: torch.dtype | None,
        buckets: Sequence[ParameterBucket],
        in_pairs: bool = False,
    ) -> None:
        self.communicator = communicator
        self._in_pairs = in_pairs
        self.reduce_dtype = reduce_dtype
        self.reduced_dtype = reduced_dtype
        self._make_scratch(buckets)
        self._in_flight: deque[Contribution] = deque()

    def _make_scratch(self, buckets: Sequence[ParameterBucket]) -> None:
        sizes: dict[tuple[torch.device, torch.dtype], int] = {}
        for bucket in buckets:
            key = (bucket.values.device, bucket.plan.wire_dtype)
            sizes[key] = max(sizes.get(key, 0), bucket.plan.numel)
        self._free = {
            (device, dtype): [torch.empty(numel, dtype=dtype, device=device) for _ in range(self._num_scratch)]
            for (device, dtype), numel in sizes.items()
        }

    def connect(self, buckets: Sequence[ParameterBucket]) -> None:
        for flat in _like_wires(buckets):
            self.communicator.rehearse(partial(self.communicator.exchange, torch.empty_like(flat), flat))

    @property
    def starts_alone(self) -> bool:
        return True

    def is_ready(self, bucket: ParameterBucket) -> bool:
        # to free scratch an earlier bucket must be summed, which waits for all ranks, and some come only at step()
        return bool(self._free[bucket.values.device, bucket.plan.wire_dtype])

    def launch(self, bucket: Contribution) -> None:
        wire = _on_the_wire(bucket, self.reduce_dtype)
        free = self._free[wire.device, wire.dtype]
        while not free:
            self.finish(self._in_flight[0])
        scratch = free.pop()
        bucket.received = scratch
        bucket.is_averaged = self._dtype_of_sums(bucket) == torch.float16
        bucket.work = self.communicator.exchange(scratch[: wire.numel()], wire)
        self._in_flight.append(bucket)

    def finish(self, bucket: Contribution) -> Tensor:
        if bucket.received is not None:
            _wait(bucket)
            received = bucket.received[: bucket.plan.numel]
            self._add(bucket, received.view(self.communicator.world_size, -1), self._sums(bucket))
            self._free[bucket.received.device, bucket.received.dtype].append(bucket.received)
            bucket.received = None
            self._in_flight.remove(bucket)
        assert bucket.sums is not None, "finish follows launch"
        return bucket.sums

    def _sums(self, bucket: Contribution) -> Tensor:
        """Memory for the sum of the own chunk: the gradients' own, if the sum has their dtype."""
        dtype = self._dtype_of_sums(bucket)
        if dtype == bucket.gradients.dtype:
            bucket.sums = bucket.own(bucket.gradients)
        elif bucket.sums is None:
            bucket.sums = torch.empty(bucket.plan.chunk, dtype=dtype, device=bucket.gradients.device)
        return bucket.sums

    def _add(self, bucket: Contribution, contributions: Tensor | Sequence[Tensor], sums: Tensor) -> None:
        divisor = self.communicator.world_size if bucket.is_averaged else 1
        if self._in_pairs:
            total = sum_in_pairs(contributions)
            sums.copy_(total if divisor == 1 else total / divisor)
        else:
            sum_slices(contributions, sums, divisor=divisor)

    def _dtype_of_sums(self, bucket: Contribution) -> torch.dtype:
        return self.reduced_dtype or bucket.sums_dtype or bucket.gradients.dtype


class ExactOfPeers(Exact):
    """``exact`` between ranks that see each other's memory; each bucket has its own room for others' contributions.

    So no copy waits for another bucket's sum, and no sum for another bucket's copy.
    """

    def _make_scratch(self, buckets: Sequence[ParameterBucket]) -> None:
        assert isinstance(self.communicator, PeerCommunicator), "what runs under backward is Exact's"
        self._peers = self.communicator
        others = self._peers.world_size - 1
        self._rooms: dict[object, Tensor] = {
            bucket: torch.empty(others, bucket.plan.chunk, dtype=bucket.plan.wire_dtype, device=bucket.values.device)
            for bucket in buckets
        }
        for room in self._rooms.values():
            self._peers.keep(room)
        self._latest_sums: dict[object, Waitable] = {}  # keyed by bucket: what has read its room

    def launch(self, bucket: Contribution) -> None:
        wire = _on_the_wire(bucket, self.reduce_dtype)
        bucket.is_averaged = self._dtype_of_sums(bucket) == torch.float16
        latest_sum = self._latest_sums.get(bucket)
        # otherwise the copy waits for the current stream: it has just written the wire, or it may still use the memory
        # that a new room was allocated from
        full = bucket.full if wire is bucket.gradients and latest_sum is not None else None
        bucket.received = self._rooms[bucket]
        bucket.work = self._peers.collect(wire, bucket.received, latest_sum, full)

    def finish(self, bucket: Contribution) -> Tensor:
        if bucket.received is not None:
            _wait(bucket)
            wire = bucket.gradients if bucket.wire is None else bucket.wire
            self._add(bucket, self._peers.contributions(wire, bucket.received), self._sums(bucket))
            self._latest_sums[bucket] = self._peers.mark()
            bucket.received = None
        assert bucket.sums is not None, "finish follows launch"
        return bucket.sums


class ExactReduceScatter:
    """``exact`` in place of FSDP2's reduce-scatter; torch's ``ReduceScatter`` interface has these two methods.

    It keeps nothing between calls, so that modules may share one.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for gradients to send, or for their sums."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Fill ``output_tensor [C]`` with this rank's chunk of the sum of all ``input_tensor [W * C]``, times a factor.

        The current stream, which FSDP2 has chosen for this, waits for the contributions and adds them up.
        """
        if async_op:
            raise ValueError("async_op=True: what follows the exchange runs in the current stream; leave it out")
        if input_tensor.is_complex():
            # real and imaginary parts can be summed, and multiplied by real factors, one by one
            output_tensor, input_tensor = (torch.view_as_real(x).view(-1) for x in (output_tensor, input_tensor))
        factor = _factor(op)
        communicator = Communicator(group, input_tensor.device)
        received = torch.empty_like(input_tensor)
        communicator.exchange(received, input_tensor).wait()
        contributions = received.view(communicator.world_size, -1)
        if factor is None or (not isinstance(factor, Tensor) and factor == 1):
            sum_slices(contributions, output_tensor, divisor=communicator.world_size if factor is None else 1)
        else:
            wide = torch.promote_types(torch.float32, contributions.dtype)
            total = sum_slices(contributions, torch.empty_like(output_tensor, dtype=wide))
            output_tensor.copy_(total.mul_(factor))


def for_fsdp(reducer: Literal["exact"] = "exact") -> Any:
    """An argument for ``FSDPModule.set_custom_reduce_scatter``: FSDP2 then sums gradients as ``exact`` does.

    Sums are in rank order, in fp32 (fp64 for fp64), averaged or scaled as FSDP2 asks for it, and rounded once to the
    dtype in which FSDP2 reduces: bitwise what one process gets, whatever the backend. HSDP's all-reduce between
    replicas is still FSDP2's own, in the backend's order.

    Raises:
        ValueError: for another reducer; ``"rs"`` is what FSDP2 does without this.
    """
    if reducer != "exact":
        raise ValueError(
            f"reducer must be 'exact', got {reducer!r}; a reduce-scatter of the backend is what FSDP2 does by itself"
        )
    return ExactReduceScatter()


def _factor(op: dist.ReduceOp | dist.ReduceOp.RedOpType) -> float | Tensor | None:
    """What a sum over ranks is to be multiplied by; None: divide it by their number."""
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return None
    if op == dist.ReduceOp.PREMUL_SUM and isinstance(op, dist.ReduceOp):
        # torch tells the factor only when the operation is pickled
        _, factor = cast("tuple[object, float | Tensor]", op.__getstate__())
        return factor
    raise ValueError(f"op must be SUM, AVG or PREMUL_SUM, which FSDP2 asks for, got {op}")


def _like_wires(buckets: Sequence[ParameterBucket]) -> Iterator[Tensor]:
    """Zeros of every device, dtype and size in which these buckets travel."""
    kinds = ((bucket.values.device, bucket.plan.wire_dtype, bucket.plan.numel) for bucket in buckets)
    for device, wire_dtype, numel in dict.fromkeys(kinds):
        yield torch.zeros(numel, dtype=wire_dtype, device=device)


def _on_the_wire(bucket: Contribution, dtype: torch.dtype | None, factor: float = 1.0) -> Tensor:
    """The bucket's gradients times ``factor`` in the dtype of the wire: in place, or copied if that is another."""
    if dtype is None or dtype == bucket.gradients.dtype:
        return bucket.gradients if factor == 1.0 else bucket.gradients.mul_(factor)
    assert bucket.wire is not None, "who makes a contribution makes what is sent of it"
    if factor == 1.0:
        return bucket.wire.copy_(bucket.gradients)
    return torch.mul(bucket.gradients, factor, out=bucket.wire)  # multiplied before it is rounded


def _wait(bucket: Contribution) -> None:
    if bucket.work is not None:
        bucket.work.wait()
        bucket.work = None
