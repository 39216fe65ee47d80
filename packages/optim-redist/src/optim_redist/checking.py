"""Check whole files: plan every redistribution, prove it, compare it with known bounds, and run it bit-exactly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from optim_redist._mesh import int_tuple
from optim_redist._tools.files import read_json, reading
from optim_redist._tools.progress import progress
from optim_redist.errors import RedistError
from optim_redist.index_sets import elements
from optim_redist.layout import Layout
from optim_redist.multi_axis import MultiAxisDist
from optim_redist.planning import plan
from optim_redist.plans import Plan
from optim_redist.units import is_count
from optim_redist.verification import verify

if TYPE_CHECKING:
    from torch import Tensor


class Task(NamedTuple):
    """One redistribution of a file, with the lower bound or the plan that the file gives for it."""

    name: str
    shape: tuple[int, ...]
    src: Layout
    dst: Layout
    lower_bound: int | None = None
    plan: Plan | None = None


def read_tasks(path: Path) -> list[Task]:
    """The redistributions of a file of examples, or the one plan that a file holds.

    Raises:
        RedistError: if the file is neither of them, or lacks something; names the file.
    """
    with reading(path):
        return _tasks_of(path, read_json(path))


def _tasks_of(path: Path, data: dict[str, Any]) -> list[Task]:
    form = str(data.get("format", "")).partition("/")[0]
    if form == "optim-redist.plan":
        made = Plan.from_json(data)
        return [Task(made.hash[:12], made.shape, made.src, made.dst, plan=made)]
    if form != "optim-redist.examples":
        raise RedistError(f"{path}: a file of examples or a plan, got format {data.get('format')!r}")
    rows = [*data.get("redistributions", ()), *data.get("named", ())]
    return [_task_of(row) for row in rows]


def _task_of(row: dict[str, Any]) -> Task:
    name, shape = row.get("id") or row["name"], int_tuple(row["shape"], "sizes")
    src, dst = (MultiAxisDist(row["mesh"], row[end]["map"], row[end]["block"]).to_layout() for end in ("src", "dst"))
    src.check_shape(shape)
    dst.check_shape(shape)
    return Task(name, shape, src, dst, row["bounds"]["lower_bound"])


def check_file(path: Path, execute: str | None = None, limit: int | None = None) -> list[dict[str, Any]]:
    """One result for every redistribution: name, planner, bound, ratio, executed, and the problem or None.

    What is wrong is not run: its messages may have no receiver, and its copies no room.

    Args:
        execute: None, "simulate" for all ranks in this process, or "gloo:8" for eight real ranks, which run the
            redistributions that fit on them.
    """
    num_ranks = _num_ranks(execute)
    tasks = read_tasks(path)[:limit]
    results = [_prove(task) for task in progress(tasks, "verify")]
    proven = [task for task, result in zip(tasks, results) if result["problem"] is None]
    outcomes: Sequence[str | None] = []
    if execute == "simulate":
        outcomes = [_simulated(task) for task in progress(proven, "simulate")]
    elif num_ranks:
        outcomes = _on_ranks(proven, num_ranks)
    for result, outcome in zip([result for result in results if result["problem"] is None], outcomes):
        if outcome is not None:
            result["executed"] = True
            result["problem"] = outcome or None
    return results


def _num_ranks(execute: str | None) -> int:
    """How many real ranks run the redistributions, 0 if none do."""
    if execute is None or execute == "simulate":
        return 0
    backend, _, count = execute.partition(":")
    if backend != "gloo" or not is_count(count) or not int(count):
        raise RedistError(f"--execute is simulate or gloo:8, got {execute!r}")
    return int(count)


def _made(task: Task) -> Plan:
    return task.plan or plan(task.shape, "int32", task.src, task.dst)


def _prove(task: Task) -> dict[str, Any]:
    made = _made(task)
    problem = None
    try:
        verify(made)
    except RedistError as error:
        problem = str(error)
    known = task.lower_bound
    if problem is None and known is not None and made.bounds.lb != known:
        problem = f"the bound is {made.bounds.lb} elements here and {known} in the file"
    return {
        "name": task.name,
        "planner": made.planner,
        "lower_bound": made.bounds.lb,
        "volume_ratio": made.volume_ratio,
        "executed": False,
        "problem": problem,
    }


# -- running


def _part(full: Tensor, layout: Layout, rank: int, dtype: str) -> Tensor | None:
    """A rank's part, as elements, of a tensor given as bytes (*shape, itemsize); None outside the layout's mesh."""
    import torch

    if rank not in layout.mesh.coordinates:
        return None
    for tensor_dim, held in enumerate(layout.indices(full.shape[:-1], rank)):
        full = full[(slice(None),) * tensor_dim + (elements(held),)]
    return full.clone().view(getattr(torch, dtype)).squeeze(-1)


def _full(made: Plan) -> Tensor:
    """A tensor of the plan's shape and random elements, each as its bytes: (*shape, itemsize)."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (*made.shape, made.itemsize), dtype=torch.uint8, generator=generator)


def _simulated(task: Task) -> str | None:
    """What goes wrong when all ranks run in this process; empty if nothing does, None for pending reductions."""
    from optim_redist.execute import simulate

    if task.src.partial or task.dst.partial:
        return None
    made = _made(task)
    full = _full(made)
    found = simulate(made, {rank: _part(full, task.src, rank, made.dtype) for rank in task.src.mesh.ranks})
    wrong = [rank for rank, local in found.items() if not _equal(local, _part(full, task.dst, rank, made.dtype))]
    return f"ranks {wrong} end with other elements than the target has" if wrong else ""


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two parts have the same shape and bits."""
    import torch

    if a is None or b is None:
        return a is b
    bits = [tensor.unsqueeze(-1).contiguous().view(torch.uint8) for tensor in (a, b)]
    return torch.equal(*bits)


def _on_ranks(tasks: Sequence[Task], num_ranks: int) -> list[str | None]:
    """As ``_simulated``, on real ranks, one process each; None also for tasks on more ranks than there are."""
    from optim_utils.testing import run_ranks

    highest = [max((*task.src.mesh.ranks, *task.dst.mesh.ranks)) for task in tasks]
    fitting = [
        number
        for number, task in enumerate(tasks)
        if highest[number] < num_ranks and not task.src.partial and not task.dst.partial
    ]
    outcomes: list[str | None] = [None] * len(tasks)
    if not fitting:
        return outcomes
    # the others would have nothing to do
    num_ranks = 1 + max(highest[number] for number in fitting)
    wrong = run_ranks(_run_on_rank, num_ranks, [tasks[number] for number in fitting], timeout=600.0)
    for place, number in enumerate(fitting):
        ranks = [rank for rank in range(num_ranks) if place in wrong[rank]]
        outcomes[number] = f"ranks {ranks} end with other elements than the target has" if ranks else ""
    return outcomes


def _run_on_rank(rank: int, world_size: int, tasks: Sequence[Task]) -> list[int]:
    """The places of the tasks whose result on this rank is wrong."""
    from optim_redist.program import compile

    wrong = []
    for place, task in enumerate(tasks):
        if rank not in {*task.src.mesh.ranks, *task.dst.mesh.ranks}:
            continue
        made = _made(task)
        full = _full(made)
        found = compile(made)(_part(full, task.src, rank, made.dtype))
        if not _equal(found, _part(full, task.dst, rank, made.dtype)):
            wrong.append(place)
    return wrong
