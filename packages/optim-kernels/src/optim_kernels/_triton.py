"""Triton for the kernel modules: what they need beside ``triton.language``, compiled and interpreted alike.

Kernel modules import ``triton`` and ``tl`` from here, and are themselves imported only when a kernel is needed: the
package works without Triton. The interpreter (``TRITON_INTERPRET=1``, kernels on a machine without a GPU) lacks three
things, each with a helper here: products of bf16 (``dot``), rounding when a value is narrowed (``narrow``), and the
types of arguments (``wide``). Nothing is autotuned: tiles are chosen by shape.

Triton compiles a kernel once more for each integer that is 1, as a constant, or a multiple of 16, which helps where
addresses come from it. So kernels name numbers of tiles and lengths of products' sums in ``do_not_specialize``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from optim_kernels._impl import is_interpreted

# what kernel modules import from here but is Triton's
__all__ = ["tl", "triton"]

INTERPRETED = tl.constexpr(is_interpreted())
# An option of every launch: ``a * b + c`` is rounded once, whatever Triton's own default is (it changes with 3.10, and
# by environment variable). All bits and times that this package states are of kernels compiled this way.
FUSED: dict[str, Any] = {"enable_fp_fusion": True}
# The exception: elementwise formulas that have to give the bits of plain torch, which rounds every product. Memory
# bounds them, so this costs no time.
UNFUSED: dict[str, Any] = {"enable_fp_fusion": False}

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.uint8: tl.uint8,
}


@triton.jit
def div_rn(x, y):
    """``x / y`` correctly rounded in fp32, where ``/`` is an approximation good to 2 ulp."""
    return tl.div_rn(x, y)


@triton.jit
def sqrt_rn(x):
    """The square root correctly rounded in fp32, where ``tl.sqrt`` is an approximation."""
    return tl.sqrt_rn(x)


# How a launch overlaps with its neighbours (``launch_pdl=True``, Hopper and newer: it may start before the launch
# before it has ended): not at all; as far as any kernel may; or as the first or a later one of launches that do not
# depend on each other, and so may run side by side.
NO_OVERLAP, ALONE, FIRST, LATER = range(4)
_ALONE, _FIRST, _LATER = map(tl.constexpr, (ALONE, FIRST, LATER))


@triton.jit
def after_previous(OVERLAP: tl.constexpr):
    """Wait until what this launch depends on is complete; kernels with OVERLAP call this before they touch memory.

    Usually that is the launch before, and the next launch may get ready in the meantime. The FIRST of several
    independent launches lets the next one start only when its own wait is over, so that LATER ones need not wait.
    """
    if OVERLAP == _FIRST:
        gdc_wait()
        gdc_launch_dependents()
    elif OVERLAP != 0:
        gdc_launch_dependents()
        if OVERLAP == _ALONE:
            gdc_wait()


@triton.jit
def before_next(OVERLAP: tl.constexpr):
    """The end of every kernel with OVERLAP: a LATER launch, which has not waited, must not end before earlier ones."""
    if OVERLAP == _LATER:
        gdc_wait()


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """Wait, in a launch that overlaps with its neighbours, until the launch before is complete."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def let_next_start(OVERLAP: tl.constexpr):
    """Let the next launch's programs come to the device as soon as there is room, and wait there."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def no_load_across():
    """Have ptxas, which orders loads as it likes, issue those above before those below; this is no instruction."""
    if not INTERPRETED:
        tl.inline_asm_elementwise("bar.warp.sync 0xFFFFFFFF; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def fetch(address, size):
    """Prefetch ``size`` bytes (int32, a multiple of 16) at ``address`` (int64, a multiple of 16) to L2; does not wait.

    All launches read and write through L2, so this may come before ``after_previous``: what an earlier launch has yet
    to write goes to L2 as well. Hopper and newer.
    """
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            mov.u32 $0, 0;
            setp.eq.u32 first, thread, 0;
            @first cp.async.bulk.prefetch.L2.global [$1], $2;
            }""",
            "=&r,l,r",
            [address, size],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def dot(a, b, acc):
    """``acc + a @ b``, accumulated in fp32; or multiplied and accumulated in fp64, where ``acc`` is fp64.

    With sums in fp32, fp32 operands are each taken as the sum of two tf32 numbers, which keep 23 of 24 bits: three
    products on the tensor cores, of which the two small ones are added first. Such sums are closer to fp64 than those
    of fp32 FMAs.
    """
    if acc.dtype == tl.float64:
        acc = tl.dot(a.to(tl.float64), b.to(tl.float64), acc, input_precision="ieee", out_dtype=tl.float64)
    elif INTERPRETED:
        # triton#11584: the interpreter multiplies the bit patterns of bf16 operands, so they are widened there
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    elif a.dtype == tl.float32:
        acc = tl.dot(a, b, acc, input_precision="tf32x3")
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """fp32 ``x`` rounded to the nearest value of ``dtype``, ties to even."""
    # the interpreter truncates fp32 to bf16; integer arithmetic on the pattern rounds (NaN stays NaN)
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return tl.where(x == x, rounded, bits).to(tl.float32, bitcast=True).to(tl.bfloat16)
    return x.to(dtype)


@triton.jit
def wide(number):
    """``number`` as int64: the compiler takes that type from the annotation, the interpreter from the value."""
    return number.to(tl.int64)


def current_stream(device: torch.device) -> int:
    """The handle of the device's current stream, by the short path that Triton takes at every launch."""
    stream: int = triton.runtime.driver.active.get_current_stream(device.index)
    return stream


def can_overlap(device: torch.device) -> bool:
    """Whether a launch on the device may start before the one before it has ended."""
    is_compiled = device.type == "cuda" and not INTERPRETED.value
    return is_compiled and torch.cuda.get_device_capability(device) >= (9, 0)


# The first and last version of Triton whose compiled kernels are launched by
#     run(grid x, grid y, grid z, stream, function, packed metadata, launch metadata, enter hook, exit hook, *arguments)
# with (warps, programs of a cluster, bytes of shared memory) packed.
SHORT_LAUNCH = ((3, 5), (3, 9))


def has_short_launch(version: str) -> bool:
    """Whether `Launch` may bypass ``kernel[grid]`` with this version of Triton, and launch kernels in clusters."""
    first, last = SHORT_LAUNCH
    return first <= tuple(int(part) for part in version.split(".")[:2]) <= last


def has_launch_hooks() -> bool:
    """Whether a launch hook is set, by a profiler say; Triton keeps two chains of hooks, mostly empty."""
    knobs = triton.knobs.runtime
    enter, leave = knobs.launch_enter_hook, knobs.launch_exit_hook
    # a value without ``calls`` is a single hook, or None
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


class Cluster(NamedTuple):
    """How to launch a kernel in clusters of programs, although Triton has compiled it for single programs.

    Args:
        size: programs of a cluster; the grid then counts clusters.
        bytes: shared memory of each program for the kernel's own use, behind what Triton has allocated.
    """

    size: int
    bytes: int

    def apply(self, compiled: Any) -> None:
        """Make this compiled kernel launch in clusters from now on, where `has_short_launch` says that Triton can."""
        warps, _, _ = compiled.packed_metadata
        shared = -(-compiled.metadata.shared // 16) * 16 + self.bytes
        compiled.packed_metadata = (warps, self.size, shared)


_address = torch.Tensor.data_ptr


class Launch:
    """A kernel with its grid and compile-time arguments, launched again and again.

    Triton binds and specialises arguments on every launch, which costs tens of microseconds; here only the first launch
    does, later ones pass addresses to the compiled kernel. So arguments have to keep their types from launch to launch,
    and tensors that are not always aligned to 16 bytes have to be named in the kernel's ``do_not_specialize``. The
    compiled kernel's own ``kernel[grid]`` prepares for hooks whether there are any or not, which takes longer than the
    launch; where there are none, launches bypass it.

    Args:
        cluster: how programs are launched in clusters, if they are.
    """

    def __init__(
        self,
        kernel: Any,
        grid: int | tuple[int, int, int],
        constants: Sequence[Any],
        *,
        cluster: Cluster | None = None,
        **options: Any,
    ) -> None:
        self._kernel = kernel
        self._cluster = cluster
        self._grid = grid if isinstance(grid, tuple) else (grid, 1, 1)
        self._constants = tuple(constants)
        self._options = {**FUSED, **options}
        # the compiled kernel, bound to the grid; the device it was loaded on
        self._run: Any = None
        self._device = -1
        # the same without hooks: the function, its arguments behind the stream, and how to get the stream
        self._run_short: Any = None
        self._loaded: tuple[Any, ...] = ()
        self._stream: Callable[[int], int]

    @classmethod
    def overlapping(
        cls,
        kernel: Any,
        grid: int | tuple[int, int, int],
        constants: Sequence[Any],
        device: torch.device,
        *,
        overlap: int = ALONE,
        **options: Any,
    ) -> Launch:
        """A launch that overlaps with others where the device can; ``overlap`` is the kernel's last constant."""
        if not can_overlap(device):
            return cls(kernel, grid, (*constants, NO_OVERLAP), **options)
        return cls(kernel, grid, (*constants, overlap), launch_pdl=True, **options)

    def __call__(
        self, tensors: Sequence[torch.Tensor], numbers: Sequence[float] = (), results: Sequence[torch.Tensor] = ()
    ) -> None:
        """Launch with the kernel's tensors, its numbers, then more tensors, on the current stream of their device."""
        if self._run is None:
            self._first(tensors[0].device, (*tensors, *numbers, *results))
        else:
            self.again((*map(_address, tensors), *numbers, *map(_address, results)))

    def bound(self, tensors: Sequence[torch.Tensor], numbers: Sequence[float] = ()) -> Callable[[], None]:
        """This launch with these arguments, which the caller keeps alive for as long as it is repeated."""
        if self._run is None:
            return partial(self, tensors, numbers)
        return partial(self.again, (*map(_address, tensors), *numbers))

    def bound_but_result(
        self, tensors: Sequence[torch.Tensor], numbers: Sequence[float] = ()
    ) -> Callable[[torch.Tensor], None]:
        """As ``bound``, for a kernel whose last argument is a tensor that differs from launch to launch."""
        if self._run is None:
            return lambda result: self(tensors, numbers, (result,))
        fixed = (*map(_address, tensors), *numbers)
        return lambda result: self.again((*fixed, result.data_ptr()))

    def _first(self, device: torch.device, arguments: Sequence[Any]) -> None:
        if INTERPRETED.value:
            self._kernel[self._grid](*arguments, *self._constants, **self._options)
            return
        number = torch.cuda.current_device() if device.index is None else device.index
        with torch.cuda.device(number):
            if self._cluster is None:
                self._keep(self._kernel[self._grid](*arguments, *self._constants, **self._options), number)
                return
            compiled = self._kernel.warmup(*arguments, *self._constants, grid=self._grid, **self._options)
            self._cluster.apply(compiled)
            compiled[self._grid](*arguments, *self._constants)
            self._keep(compiled, number)

    def _keep(self, compiled: Any, device: int) -> None:
        """Launch this compiled kernel from now on; it is loaded on the device of this number."""
        self._device = device
        if has_short_launch(triton.__version__):
            self._loaded = (compiled.function, compiled.packed_metadata, None, None, None)
            self._stream = triton.runtime.driver.active.get_current_stream
            self._run_short = compiled.run
        # last: with it other threads launch the kernel again
        self._run = compiled[self._grid]

    def again(self, arguments: Sequence[Any]) -> None:
        """Launch with the tensors' addresses; for launches after the first."""
        if torch.cuda.current_device() != self._device:
            with torch.cuda.device(self._device):
                self.again(arguments)
        elif self._run_short is None or has_launch_hooks():
            self._run(*arguments, *self._constants)
        else:
            stream = self._stream(self._device)
            self._run_short(*self._grid, stream, *self._loaded, *arguments, *self._constants)
