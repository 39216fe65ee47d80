"""Step counts on the device: every program reads the count, the last one to have read it stores the next.

A counter tells which is last: each program adds one to it after reading, and wraps it around to zero, for the next
launch, if it is the last. L2 adds to one address after the other, so that where thousands of programs begin at once,
each waits for all before it; those arrive in groups, at a counter each, and the last of each group at one above them.

Here a counter is ``(pointer, last)``, where ``last`` is how many others come before the last.
"""

from __future__ import annotations

from optim_kernels._triton import INTERPRETED, tl, triton

_NUM_GROUPS = tl.constexpr(32)
# words from one counter of a group to the next, and those of all, the one above included: each has lines of its own
_STRIDE = tl.constexpr(64)
GROUPED_SIZE = (_NUM_GROUPS.value + 1) * _STRIDE.value


@triton.jit
def grouped(counters, program, num_programs):
    """The counter of a program's group, and the one above all groups, of ``GROUPED_SIZE`` words."""
    group = program % _NUM_GROUPS
    last = (num_programs - 1 - group) // _NUM_GROUPS
    return (counters + (1 + group) * _STRIDE, last), (counters, tl.minimum(num_programs, _NUM_GROUPS) - 1)


@triton.jit
def arrive(counter, keep, t):
    """Count this program unless the step is not to be kept; return how many came before it, in its first thread only.

    Before it counts, all threads of the program have come this far and have loaded what ``t`` (fp32) was made of: a
    load still under way could return what the last program stores.

    ``tl.atomic_add`` hands the value to every thread at once, so all wait for the round trip to L2; here only the first
    thread waits, and only when the value is used. That takes an instruction that wraps around: ptxas sums up those that
    add over a warp, and hands the result to its threads at once, too.
    """
    pointer, last = counter
    if INTERPRETED:
        return _arrive_interpreted(counter, keep)
    else:
        # the barrier's predicate is on t, so each thread waits for its own; an infinite t is not counted
        return tl.inline_asm_elementwise(
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
            [pointer.to(tl.int64), keep.to(tl.int32), t, last.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def arrive_above(above, arrived, counter, keep):
    """Count this program's group, if it ``arrived`` at the group's counter as the last; return as ``arrive`` does.

    Programs that do not count their group return -1.
    """
    pointer, last = above
    is_last = keep & (arrived == counter[1])
    if INTERPRETED:
        return tl.where(is_last, _arrive_interpreted(above, is_last), -1)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            mov.u32 $0, 0xFFFFFFFF;
            setp.lt.u32 first, thread, $2;
            @first atom.relaxed.gpu.global.inc.u32 $0, [$1], $3;
            }""",
            "=&r,l,r,r",
            [pointer.to(tl.int64), is_last.to(tl.int32), last.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _arrive_interpreted(counter, condition):
    pointer, last = counter
    earlier = tl.atomic_add(pointer, condition.to(tl.int32), sem="relaxed")
    tl.store(pointer, 0, mask=condition & (earlier == last))
    return earlier


@triton.jit
def advance(step_pointer, t, arrived, counter, keep):
    """Store the count ``t``, if this program ``arrived`` at the counter above all as the last and the step is kept."""
    _, last = counter
    # true in one thread of one program
    tl.store(step_pointer, t, mask=keep & (arrived == last))
