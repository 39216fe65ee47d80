"""Move tensors between distributed layouts: bounds that no plan can beat, the cheapest plan, and running it.

Names are loaded when they are first used, so that describing layouts, bounds and plans imports no torch.

What is where:

    layout _mesh _kinds                 what a layout is, ranks as a grid, ways to divide a dimension
    parsing placements dtensor          layouts as texts, as one placement for each mesh axis, of DTensors
    index_sets boxes                    sets of indices, and products of them
    ownership canonical                 who holds what; the one layout for all in which ranks hold the same
    problem overlap _inside             two layouts laid over each other: as a whole, in one dimension, in groups
    lower_bounds                        what no plan can beat
    cost calibration _machine           what a step costs on a machine, and measuring it
    planning planners _methods moves    choosing a plan, candidates, ways to make them, what they consist of
    plans plan_text                     a plan, its table and its explanation
    verification checking               proofs of plans, and of files of them
    pictures _drawing                   layouts and plans as pictures
    program execute handle _running     plans compiled, called, under way, and at work on tensors
    many repeated                       many tensors at once, and one exchange again and again
    redistribution _places              what ``DTensor.redistribute`` does, and what it keeps for the next call
    gradients shares _autograd          where gradients go, shares of a sum, moves that autograd follows
    _compiling                          ``torch.compile``
    multi_axis redistributors           the notebook's distributions, and ways from one to another
    collective_costs dist optim         the notebook's cost models, and its two namespaces
    _multi_axis                         searches and bounds behind the notebook's names
    __main__ cli benchmarking           the command line, and times beside DTensor's
    errors units _dtypes _tools         errors, quantities in words, types of elements, other tools
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers; at run time ``__getattr__`` below imports the names
    from optim_redist import dist, optim
    from optim_redist.calibration import calibrate
    from optim_redist.collective_costs import Cost, CostModel, IdealLowerBoundsCM, TextbookCM
    from optim_redist.cost import CommModel, Topology
    from optim_redist.errors import (
        LayoutError,
        NotRepresentableError,
        PlanInfeasibleError,
        PlanMismatchError,
        RedistError,
        UnsupportedError,
    )
    from optim_redist.execute import redistribute_local, simulate
    from optim_redist.handle import Handle
    from optim_redist.layout import Block, Chunk, Cyclic, Intervals, Layout, Mesh, Ragged, Strided
    from optim_redist.lower_bounds import Bounds, bounds
    from optim_redist.many import Item, redistribute_many
    from optim_redist.moves import Step
    from optim_redist.multi_axis import MultiAxisDist
    from optim_redist.ownership import same_ownership
    from optim_redist.parsing import parse_layout
    from optim_redist.plan_text import explain
    from optim_redist.planning import plan
    from optim_redist.plans import Plan
    from optim_redist.program import Program, compile
    from optim_redist.redistribution import redistribute
    from optim_redist.redistributors import MemoryConstrainedRedist, NaiveGathererRedist, OptimalRedist, Redistributor
    from optim_redist.repeated import RepeatedExchange
    from optim_redist.verification import Verification, verify

_MODULE_OF = {
    "calibration": ["calibrate"],
    "cost": ["CommModel", "Topology"],
    "errors": [
        "LayoutError",
        "NotRepresentableError",
        "PlanInfeasibleError",
        "PlanMismatchError",
        "RedistError",
        "UnsupportedError",
    ],
    "execute": ["redistribute_local", "simulate"],
    "handle": ["Handle"],
    "layout": ["Block", "Chunk", "Cyclic", "Intervals", "Layout", "Mesh", "Ragged", "Strided"],
    "many": ["Item", "redistribute_many"],
    "lower_bounds": ["Bounds", "bounds"],
    "ownership": ["same_ownership"],
    "parsing": ["parse_layout"],
    "plan_text": ["explain"],
    "moves": ["Step"],
    "planning": ["plan"],
    "plans": ["Plan"],
    "verification": ["Verification", "verify"],
    "program": ["Program", "compile"],
    "repeated": ["RepeatedExchange"],
    "collective_costs": ["Cost", "CostModel", "IdealLowerBoundsCM", "TextbookCM"],
    "multi_axis": ["MultiAxisDist"],
    "redistribution": ["redistribute"],
    "redistributors": ["MemoryConstrainedRedist", "NaiveGathererRedist", "OptimalRedist", "Redistributor"],
}
_HOME = {name: module for module, names in _MODULE_OF.items() for name in names}

# submodules that the notebook uses after `import optim_redist as tc`
_NAMESPACES = ["dist", "optim"]

__all__ = [
    "Block",
    "Bounds",
    "Chunk",
    "CommModel",
    "Cost",
    "CostModel",
    "Cyclic",
    "Handle",
    "IdealLowerBoundsCM",
    "Intervals",
    "Item",
    "Layout",
    "LayoutError",
    "MemoryConstrainedRedist",
    "Mesh",
    "MultiAxisDist",
    "NaiveGathererRedist",
    "NotRepresentableError",
    "OptimalRedist",
    "Plan",
    "PlanInfeasibleError",
    "PlanMismatchError",
    "Program",
    "Ragged",
    "RedistError",
    "Redistributor",
    "RepeatedExchange",
    "Step",
    "Strided",
    "TextbookCM",
    "Topology",
    "UnsupportedError",
    "Verification",
    "bounds",
    "calibrate",
    "compile",
    "dist",
    "explain",
    "optim",
    "parse_layout",
    "plan",
    "redistribute",
    "redistribute_local",
    "redistribute_many",
    "same_ownership",
    "simulate",
    "verify",
]


if not TYPE_CHECKING:  # a type checker that sees this accepts every name

    def __getattr__(name: str) -> Any:
        if name in _NAMESPACES:
            return import_module(f"{__name__}.{name}")
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
