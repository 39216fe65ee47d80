"""Step counts on the device: every program reads the count, the last one to have read it stores the next.

Who is last is known from a counter that each program adds one to after reading; the last clears it for the next launch.
"""

from __future__ import annotations

from optim_kernels._triton import INTERPRETED, tl, triton


@triton.jit
def arrive(counter, amount):
    """Add ``amount`` (int32) to the counter; its earlier value, in the program's first thread only.

    All threads of the program have come this far. ``tl.atomic_add`` hands the value to every thread at once, so all
    wait for the round trip to L2; here the first thread waits, and not before the value is used.
    """
    tl.debug_barrier()
    if INTERPRETED:
        earlier = tl.atomic_add(counter, amount, sem="relaxed")
    else:
        earlier = tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            mov.u32 $0, 0;
            setp.eq.u32 first, thread, 0;
            @first atom.relaxed.gpu.global.add.u32 $0, [$1], $2;
            }""",
            "=&r,l,r",
            [counter.to(tl.int64), amount],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    return earlier


@triton.jit
def advance(step_pointer, t, counter, arrived, last, keep):
    """Store the count ``t`` and clear the counter, if this program was the last to arrive and the step is kept."""
    # true in one thread of one program
    mask = keep & (arrived == last)
    tl.store(counter, 0, mask=mask)
    tl.store(step_pointer, t, mask=mask)
