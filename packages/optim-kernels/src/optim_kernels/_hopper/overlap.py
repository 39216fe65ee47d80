"""How launches for Hopper in Gluon overlap with their neighbours (programmatic dependent launch)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def wait_for_previous(token):
    """Wait until the launch before is complete and what it has written is visible."""
    return gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, $1;", "=r,r", [token], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def computed_here(value):
    """``value``, which the compiler would else compute where it is used, and so behind the wait."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_next_start(token):
    """Let the next launch's programs come to the device as soon as there is room."""
    return gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, $1;", "=r,r", [token], dtype=gl.int32, is_pure=False, pack=1
    )
