"""Moves of a graph that torch's inductor compiles run in the order of their calls.

Ordered effects pass a token from call to call. Inductor drops it and notes the order beside its graph, but under the
names of buffers, while its scheduler asks by those of operations and finds nothing: it may run calls in another order
that saves memory. That depends on which results a rank needs, so ranks would give each other the values of different
calls (seen with torch 2.14). Here each move is noted as one that waits for the move before it.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from torch._ops import OpOverload


# drop when inductor keeps the order of effects in every torch that is supported (pytorch#189209)
def keep_order(operator: OpOverload) -> None:
    """Let inductor run the calls of ``operator`` in a graph in their order; nothing before inductor is imported."""
    # it imports this before it traces what it compiles; importing it here would cost other compilers seconds
    inductor: Any = sys.modules.get("torch._inductor.lowering")
    if inductor is not None and operator not in inductor.lowerings:
        # read where an effect is lowered, in versions that lack the order; others have kernels that keep it
        inductor.lowerings[operator] = partial(_lowered, operator)


def _lowered(operator: OpOverload, *args: object, **options: object) -> Any:
    """A call of the operator, as inductor has it without this, after the last one of the graph."""
    # torch has no public part for this
    from torch._inductor.lowering import fallback_handler  # noqa: PLC2701
    from torch._inductor.virtualized import V  # noqa: PLC2701

    graph: Any = V.graph
    earlier = [each for each in graph.operations if getattr(each, "op_overload", None) is operator]
    num_before = len(graph.operations)
    result: Any = fallback_handler(operator, add_to_fallback_set=False)(*args, **options)
    for operation in graph.operations[num_before:]:
        for last in earlier[-1:]:
            # the order alone: the memory of what is waited for is not kept
            graph.additional_buffer_deps[operation.get_operation_name()].add(last.get_name())
    return result
