"""Step counts on the device: every program reads the count, the last one to have read it stores the next.

A counter tells which is last: each program adds one to it after reading, and the last clears it for the next launch.
"""

from __future__ import annotations

from optim_kernels._triton import INTERPRETED, tl, triton


@triton.jit
def arrive(counter, amount, t):
    """Add ``amount`` (int32) to the counter and return its earlier value, in the program's first thread only.

    Before it adds, all threads of the program have come this far and have loaded what ``t`` (fp32) was made of: a load
    still under way could return what the last program stores. ``tl.atomic_add`` hands the value to every thread at
    once, so all wait for the round trip to L2; here only the first thread waits, and only when the value is used.
    """
    if INTERPRETED:
        earlier = tl.atomic_add(counter, amount, sem="relaxed")
    else:
        # the barrier's predicate is on t, so each thread waits for its own; an infinite t is not counted
        earlier = tl.inline_asm_elementwise(
            """{
            .reg .pred first, infinite;
            .reg .u32 thread;
            setp.eq.f32 infinite, $3, 0f7F800000;
            bar.red.or.pred infinite, 0, infinite;
            mov.u32 thread, %tid.x;
            mov.u32 $0, 0;
            setp.eq.u32 first, thread, 0;
            @infinite setp.ne.u32 first, thread, thread;
            @first atom.relaxed.gpu.global.add.u32 $0, [$1], $2;
            }""",
            "=&r,l,r,f",
            [counter.to(tl.int64), amount, t],
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
