"""Names of operations between multi-axis distributions, as plans print them: naming moves and replaying names.

split_{dim}_{axis}_{block}      split_minor_…         at the back of the dimension's axes
alltoall_{from}_{to}_{block}    alltoall_minor_…      the last axis, to the back of ``to``
                                alltoall_mf_…         the last axis, to the front
                                alltoall_mt_…         all axes, to the back
allgather_{axis}                allgather_*           everything
permute_{i}_{j}                 permuation_{i}_{j}    an old spelling
changeBlockSize_{dim}_{block}
split_*                         exchange_*            straight to a target
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from optim_redist._multi_axis.moves import UNSPLIT, State

if TYPE_CHECKING:
    from optim_redist.multi_axis import MultiAxisDist, Outcome

# ``MultiAxisDist.apply`` takes names as they were printed, so the misspelt one has to stay
_OP_NAME = re.compile(
    r"(?P<op>alltoall|split)(?:_(?P<how>minor|mf|mt))?_(?P<first>\d+)_(?P<second>\d+)_(?P<block>-?\d+)"
    r"|(?P<gather>allgather)_(?P<axis>\d+|\*)"
    r"|(?P<permute>permute|permuation)_(?P<i>\d+)_(?P<j>\d+)"
    r"|(?P<change>changeBlockSize)_(?P<dim>\d+)_(?P<new>\d+)"
    r"|(?P<toward>split|exchange)_\*"
)


def name_of(collective: str, before: State, after: State) -> str:
    """The name of the operation that leads from one distribution to another by ``collective``."""
    changed = [d for d, (old, new) in enumerate(zip(before.mapping, after.mapping)) if old != new]
    if collective in ("permute", "allgather"):
        gone, come = ([axis for d in changed for axis in side.mapping[d]] for side in (before, after))
        if collective == "permute":
            first, second = next(pair for pair in zip(gone, come) if pair[0] != pair[1])
            return f"permute_{min(first, second)}_{max(first, second)}"
        gathered = [axis for axis in gone if axis not in come]
        return f"allgather_{gathered[0] if len(gathered) == 1 else '*'}"
    if not changed:
        tensor_dim = next(d for d, (old, new) in enumerate(zip(before.blocks, after.blocks)) if old != new)
        return f"changeBlockSize_{tensor_dim}_{after.blocks[tensor_dim]}"
    target, source = changed[0], changed[-1]
    if len(after.mapping[target]) < len(before.mapping[target]):
        target, source = source, target
    old, new, block = before.mapping[target], after.mapping[target], after.blocks[target]
    at_back = new[: len(old)] == old
    if collective == "split":
        axis = new[-1] if at_back else new[0]
        return f"{'split_minor' if old and at_back else 'split'}_{target}_{axis}_{block}"
    last = bool(after.mapping[source])
    if old or block == before.blocks[source]:
        block = UNSPLIT
    how = ("alltoall_mf", "alltoall_minor") if last else ("alltoall", "alltoall_mt")
    verb = how[at_back] if old else how[last]
    return f"{verb}_{source}_{target}_{block}"


def replay(dist: MultiAxisDist, shape: Sequence[int], op_name: str, target: MultiAxisDist | None) -> Outcome:
    """What the operation called ``op_name`` makes of ``dist``."""
    match = _OP_NAME.fullmatch(op_name)
    if match is None:
        raise ValueError(f"op_name {op_name!r} is no operation; names look like split_0_1_4, allgather_2, exchange_*")
    if match["gather"]:
        return dist.allgather(shape, None if match["axis"] == "*" else int(match["axis"]))
    if match["permute"]:
        return dist.permute(shape, (int(match["i"]), int(match["j"])))
    if match["change"]:
        return dist.change_block_size(shape, int(match["dim"]), int(match["new"]))
    if match["toward"]:
        if target is None:
            raise ValueError(f"op_name {op_name!r} does not say where it leads; pass target")
        return dist.exchange(shape, target) if match["toward"] == "exchange" else dist.split_all(shape, target)
    how, first, second, block = match["how"], int(match["first"]), int(match["second"]), int(match["block"])
    if match["op"] == "alltoall":
        from_minor, to_minor = how in ("minor", "mf"), how in ("minor", "mt")
        return dist.alltoall(shape, first, second, block, from_minor=from_minor, to_minor=to_minor)
    if how in (None, "minor"):
        return dist.split(shape, first, second, block, minor=how == "minor")
    raise ValueError(f"op_name {op_name!r}: a split is split_… or split_minor_…")
