"""Messages in a persistent Hopper kernel in Gluon: posts between warps, counts of finished tiles between programs.

A post is a few numbers about a tile, from the scout warp to the producer and the tile's consumer and porter, through a
box in shared memory. There are two boxes, one for each consumer; a box is free again when all three have read it.

Programs tell each other what they have stored by counters in memory. The copy engine stores a result; when it reports
that the result is in memory, the counter is raised with release. A program that reads the counter with acquire makes
the result visible to its own copy engine by a proxy fence.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from optim_kernels._hopper.ring import barrier, barriers

# Numbers of a post, and of a box, whose size has to be a power of two.
POST = gl.constexpr(13)
BOX = gl.constexpr(16)


@gluon.jit
def read_done(counter):
    """Read a counter of finished tiles, with acquire: what these tiles stored is visible to this thread."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [counter.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def fence_proxies(token):
    """Make what is visible to this thread in memory visible to its copy engine too."""
    return gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [token], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_stores(token):
    """Wait until the copy engine's stores are in memory; `tma.store_wait` only waits until their source is read."""
    return gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r", [token], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def allocate_mail():
    """Both boxes, with two barriers each: a post has arrived, all three receivers have read it."""
    boxes = gl.allocate_shared_memory(gl.int32, [2, BOX], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return boxes, barriers(2), barriers(2, 3)


@gluon.jit
def post(mail, number, values):
    """Put the POST values of the tile with this number into the box of the consumer whose turn it is."""
    boxes, posted, taken = mail
    layout: gl.constexpr = gl.BlockedLayout([BOX], [32], [1], [0])
    box = number % 2
    at = gl.arange(0, BOX, layout)
    content = gl.zeros([BOX], gl.int32, layout)
    for i in gl.static_range(POST):
        content = gl.where(at == i, values[i], content)
    mbarrier.wait(taken.index(box), ((number // 2) & 1) ^ 1)
    boxes.index(box).store(content)
    barrier()
    mbarrier.arrive(posted.index(box))


@gluon.jit
def receive(mail, number, NUM_WARPS: gl.constexpr):
    """The values of the tile with this number."""
    boxes, posted, taken = mail
    layout: gl.constexpr = gl.BlockedLayout([BOX], [32], [NUM_WARPS], [0])
    box = number % 2
    at = gl.arange(0, BOX, layout)
    mbarrier.wait(posted.index(box), (number // 2) & 1)
    content = boxes.index(box).load(layout)
    barrier()
    mbarrier.arrive(taken.index(box))
    return (
        _pick(content, at, 0),
        _pick(content, at, 1),
        _pick(content, at, 2),
        _pick(content, at, 3),
        _pick(content, at, 4),
        _pick(content, at, 5),
        _pick(content, at, 6),
        _pick(content, at, 7),
        _pick(content, at, 8),
        _pick(content, at, 9),
        _pick(content, at, 10),
        _pick(content, at, 11),
        _pick(content, at, 12),
    )


@gluon.jit
def _pick(content, at, i: gl.constexpr):
    return gl.sum(gl.where(at == i, content, 0), axis=0)
