"""Two programs that draw tiles together: a cluster of two, on neighbouring multiprocessors.

For tiles of one row both programs read the same blocks. Where they request them at about the same time, L2 reads and
answers once. So one program draws for both, and their producers meet before such tiles. Nothing else is shared: each
has a ring of its own, as waiting for each other at every step costs more than it saves.

They communicate through PAIR_BYTES of shared memory behind all that Triton knows of, which the launch requests
(`_triton.Cluster`), in inline assembly: Gluon cannot address the other program's memory.

    0, 8      barriers of the second program: a draw has arrived
    16, 24    barriers of the first program: a draw has been read
    32, 40    the draws
    48        barrier of each program: both producers have come
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

PAIR_BYTES = 64

_OWN = f"""
    .reg .pred first, done;
    .reg .u32 own, size, lane, peer;
    .reg .u64 state;
    mov.u32 own, global_smem;
    mov.u32 size, %dynamic_smem_size;
    add.u32 own, own, size;
    sub.u32 own, own, {PAIR_BYTES};
    mov.u32 lane, %laneid;
    setp.eq.u32 first, lane, 0;
    mov.u32 peer, %cluster_ctarank;
    xor.b32 peer, peer, 1;
"""


def _in_pair(lines: str) -> gl.constexpr:
    """Instructions that find this program's part of the memory in ``own``, and the other program's number in ``peer``.

    ``first`` is true for one thread of a warp.
    """
    return gl.constexpr("{" + _OWN + lines + "mov.b32 $0, $1;\n}")


# A wait orders memory for its own program alone unless it says cluster. Draws need that: without it the first program
# took a draw for read before the second had read it, and sent the next one too early. Meetings order nothing.
_WAIT = """
    AGAIN:
    mbarrier.try_wait.parity{order}.shared::cta.b64 done, [own], {parity};
    @!done bra.uni AGAIN;
"""
_OPEN = _in_pair(
    """
    .reg .u32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first mbarrier.init.shared::cta.b64 [own], 1;
    @first mbarrier.init.shared::cta.b64 [own + 8], 1;
    @first mbarrier.init.shared::cta.b64 [own + 16], 1;
    @first mbarrier.init.shared::cta.b64 [own + 24], 1;
    @first mbarrier.init.shared::cta.b64 [own + 48], 2;
    fence.mbarrier_init.release.cluster;
    """
)
_SEND = _in_pair(
    """
    .reg .u32 to, bar;
    add.u32 own, own, $2;
    add.u32 to, own, 32;
    mapa.shared::cluster.u32 to, to, peer;
    mapa.shared::cluster.u32 bar, own, peer;
    add.u32 own, own, 16;
    """
    + _WAIT.format(order=".acquire.cluster", parity="$3")
    + "@first st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [to], $1, [bar];\n"
)
_RECEIVE = gl.constexpr(
    "{"
    + _OWN
    + """
    .reg .u32 bar, from;
    add.u32 own, own, $1;
    add.u32 from, own, 32;
    add.u32 bar, own, 16;
    mapa.shared::cluster.u32 bar, bar, peer;
    @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [own], 4;
    """
    + _WAIT.format(order=".acquire.cluster", parity="$2")
    + """
    ld.volatile.shared.b32 $0, [from];
    bar.warp.sync -1;
    @first mbarrier.arrive.release.cluster.shared::cluster.b64 _, [bar];
    }"""
)
_MEET = _in_pair(
    """
    .reg .u32 bar;
    add.u32 own, own, 48;
    mapa.shared::cluster.u32 bar, own, peer;
    @first mbarrier.arrive.shared::cta.b64 state, [own];
    @first mbarrier.arrive.shared::cluster.b64 _, [bar];
    """
    + _WAIT.format(order="", parity="$1")
)


@gluon.jit
def rank():
    """Which of the two programs this is, by its number in the grid.

    Not by %cluster_ctarank: ptxas takes a branch on that for one that may diverge within a warp, with Triton 3.9 in all
    roles, so that addresses of products leave the uniform registers and come back for each product.
    """
    return gl.program_id(0) % 2


@gluon.jit
def open_pair(token):
    """Initialise the barriers; the kernel's first warps call this before everything else here."""
    gl.inline_asm_elementwise(_OPEN, "=r,r", [token], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def join_pair(token):
    """Wait for all warps of both programs: before the first message, and before either program ends."""
    gl.inline_asm_elementwise(
        "barrier.cluster.arrive.release; barrier.cluster.wait.acquire; mov.b32 $0, $1;",
        "=r,r",
        [token],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def draw(me, counter, number):
    """The number of the next pair of tiles, for both programs; their scouts call it, for the ``number``-th time."""
    place = 8 * (number % 2)
    parity = (number // 2) & 1
    if me == 0:
        pair = gl.atomic_add(counter, 1, sem="relaxed")
        gl.inline_asm_elementwise(_SEND, "=r,r,r,r", [pair, place, parity ^ 1], dtype=gl.int32, is_pure=False, pack=1)
    else:
        pair = gl.inline_asm_elementwise(_RECEIVE, "=&r,r,r", [place, parity], dtype=gl.int32, is_pure=False, pack=1)
    return pair


@gluon.jit
def meet(meetings):
    """Wait until both producers have come, after ``meetings`` earlier meetings; return how many there are now."""
    gl.inline_asm_elementwise(_MEET, "=r,r", [meetings & 1], dtype=gl.int32, is_pure=False, pack=1)
    return meetings + 1
