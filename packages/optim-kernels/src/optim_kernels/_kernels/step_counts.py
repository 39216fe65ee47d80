"""Step counts on the device: every program reads the count, the last one to have read it stores the next.

A counter tells which is last: each program adds one to it after reading, and the last clears it for the next launch.
"""

from __future__ import annotations

from optim_kernels._triton import INTERPRETED, tl, triton


@triton.jit
def arrive(counter, keep, t, last):
    """Count this program unless the step is not to be kept; return how many came before it, in its first thread only.

    The program that ``last`` others came before clears the counter for the next launch. Before it counts, all threads
    of the program have come this far and have loaded what ``t`` (fp32) was made of: a load still under way could return
    what the last program stores. ``tl.atomic_add`` hands the value to every thread at once, so all wait for the round
    trip to L2; here only the first thread waits, and only when the value is used. That takes an instruction that wraps
    around: ptxas sums up those that add over a warp, and hands the result to its threads at once, too.
    """
    if INTERPRETED:
        earlier = tl.atomic_add(counter, keep.to(tl.int32), sem="relaxed")
        tl.store(counter, 0, mask=keep & (earlier == last))
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
            @infinite mov.u32 thread, 1;
            setp.lt.u32 first, thread, $2;
            @first atom.relaxed.gpu.global.inc.u32 $0, [$1], $4;
            }""",
            "=&r,l,r,f,r",
            [counter.to(tl.int64), keep.to(tl.int32), t, last.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    return earlier


@triton.jit
def advance(step_pointer, t, arrived, last, keep):
    """Store the count ``t``, if this program was the last to arrive and the step is kept."""
    # true in one thread of one program
    tl.store(step_pointer, t, mask=keep & (arrived == last))
