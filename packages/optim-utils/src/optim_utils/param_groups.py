"""Which optimizer updates which parameter: hidden matrices to Muon, everything else to AdamW, said in one table.

    model ──route_parameters──▶ RouteTable ──.param_groups(muon=…, adamw=…)──▶ groups of an optimizer

A parameter's role says which options it takes: ``matrix`` (Muon's, or AdamW's for a matrix that is updated elementwise,
such as a first convolution), ``embedding``, ``head``, ``vector`` (norm weights, biases, scalars), and ``frozen`` for
parameters that need no gradient and are in no group. Parameters that the defaults cannot place are refused, with rules
to paste.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args, overload

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from optim_utils._arguments import iterated
from optim_utils._routing.defaults import Decision, decide
from optim_utils._routing.leaf import Leaf, Refusal, unparametrized
from optim_utils._routing.matrix_view import MatrixView
from optim_utils._routing.rules import RESERVED_OPTIONS, Kind, Role, Rule

__all__ = ["MatrixView", "Route", "RouteTable", "Rule", "UnroutedParameterError", "route_parameters"]

_logger = logging.getLogger(__name__)

_ROLES: tuple[Role, ...] = ("matrix", "embedding", "head", "vector")


class UnroutedParameterError(ValueError):
    """Parameters that no rule and no default can place; ``unrouted`` maps each name to the reason."""

    def __init__(self, message: str, unrouted: Mapping[str, str]) -> None:
        super().__init__(message)
        self.unrouted = dict(unrouted)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.unrouted)


@dataclass(frozen=True, eq=False)
class Route:
    """A parameter's row: names (several if tied), destination (``kind``), the role whose options it takes, and why."""

    names: tuple[str, ...]
    param: Tensor
    kind: Kind
    role: Role
    reason: str
    view: MatrixView | None = None
    rule: Rule | None = None

    @property
    def name(self) -> str:
        """The first name, as ``named_parameters`` gives it."""
        return self.names[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The (global) shape."""
        return tuple(self.param.shape)

    @property
    def options(self) -> Mapping[str, Any]:
        """The hyperparameters that its rule gives it alone."""
        return (self.rule.options if self.rule is not None else None) or {}

    @property
    def num_matrices(self) -> int:
        """How many matrices Muon sees in the parameter."""
        return self.view.num_matrices if self.view is not None else 0


class RouteTable(Sequence[Route]):
    """Every parameter in exactly one `Route`, in ``named_parameters`` order; ``str(table)`` shows them all."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)

    def __len__(self) -> int:
        return len(self.routes)

    @overload
    def __getitem__(self, key: int | str) -> Route: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[Route, ...]: ...
    def __getitem__(self, key: int | str | slice) -> Route | tuple[Route, ...]:
        if not isinstance(key, str):
            return self.routes[key]
        if key not in self._by_name:
            raise KeyError(f"no parameter is named {key!r}")
        return self._by_name[key]

    def __iter__(self) -> Iterator[Route]:
        return iter(self.routes)

    def __contains__(self, key: object) -> bool:
        """Whether a parameter has this name, or ``key`` is one of the routes."""
        return key in self._by_name if isinstance(key, str) else any(route is key for route in self.routes)

    def to(self, kind: Kind) -> tuple[Route, ...]:
        """The routes to ``kind``."""
        if kind not in get_args(Kind):
            raise ValueError(f"kind has to be one of {', '.join(get_args(Kind))}, got {kind!r}")
        return tuple(route for route in self.routes if route.kind == kind)

    def param_groups(
        self,
        *,
        muon: Mapping[str, Any] | None = None,
        adamw: Mapping[str, Any] | None = None,
        embedding: Mapping[str, Any] | None = None,
        head: Mapping[str, Any] | None = None,
        vector: Mapping[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        """Groups for an optimizer that reads ``kind``: one per role, and one per rule with options.

        No group is empty. Each has ``params``, ``param_names``, ``kind`` ("muon" or "adamw"), ``role`` and its
        hyperparameters; a Muon group also has ``views``, one `MatrixView` per parameter. The options of ``embedding``,
        ``head`` and ``vector`` override those of ``adamw``, and a rule's options override those of the role. Option
        names are not checked here.
        """
        own = {"embedding": embedding, "head": head, "vector": vector}
        for name, given in {"muon": muon, "adamw": adamw, **own}.items():
            if not isinstance(given, Mapping | None):
                raise TypeError(f"{name} has to be a mapping of options, got a {type(given).__name__}")
            if reserved := RESERVED_OPTIONS.intersection(given or ()):
                raise ValueError(f"{name}: {sorted(reserved)} are written by the table and cannot be options")
        groups: dict[tuple[Any, ...], dict[str, Any]] = {}
        for route in self._in_group_order():
            key = (route.kind, route.role, id(route.rule) if route.options else None)
            if key not in groups:
                base = (muon or {}) if route.kind == "muon" else {**(adamw or {}), **(own.get(route.role) or {})}
                lists: dict[str, Any] = {"params": [], "param_names": []}
                if route.kind == "muon":
                    lists["views"] = []
                groups[key] = {**lists, "kind": route.kind, "role": route.role, **base, **route.options}
            group = groups[key]
            group["params"].append(route.param)
            group["param_names"].append(route.name)
            if route.kind == "muon":
                group["views"].append(route.view)
        return list(groups.values())

    def table(self) -> str:
        """One row per parameter, then totals; plain text of a fixed layout."""
        header = ("name", "shape", "dtype", "numel", "destination", "role", "matrices", "reason", "rule")
        rows = [header, *map(_row, self.routes)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, "", *self._totals()])

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"RouteTable({len(self)} parameters: {', '.join(self._totals())})"

    def fingerprint(self) -> str:
        """A hash of names, shapes, dtypes, destinations and views: equal on all ranks that route alike."""
        rows = [
            (r.names, r.shape, str(r.param.dtype), r.kind, r.role, r.view.to_plain() if r.view else None)
            for r in self.routes
        ]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    @cached_property
    def _by_name(self) -> dict[str, Route]:
        return {name: route for route in self.routes for name in route.names}

    def _in_group_order(self) -> list[Route]:
        """Trained parameters, Muon's first, then by role; otherwise in the order of the table."""
        trained = [route for route in self.routes if route.kind != "frozen"]
        return sorted(trained, key=lambda route: (route.kind != "muon", _ROLES.index(route.role)))

    def _totals(self) -> list[str]:
        lines = []
        for kind in ("muon", "adamw", "frozen"):
            if routes := self.to(kind):
                numel = sum(route.param.numel() for route in routes)
                matrices = f" = {sum(route.num_matrices for route in routes):,} matrices" if kind == "muon" else ""
                lines.append(f"{kind}: {len(routes):,} parameters{matrices}, {numel:,} elements")
        return lines


def route_parameters(
    model_or_named_parameters: nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    rules: Rule | Iterable[Rule] = (),
    *,
    on_unknown: Literal["raise", "adamw"] = "raise",
) -> RouteTable:
    """The table that says of every parameter whether Muon or AdamW updates it, and which matrices Muon sees in it.

    These decide, in this order: ``rules``; requires_grad; at most one dimension; biases, scales, and decays and skips
    of state spaces or RWKV, by name; norm modules; embeddings; the output head; convolutions of at most 4 channels and
    depthwise ones; a single row or column; learned positions, tokens, latents and queries, by name. The rest goes to
    Muon: other convolutions, flattened; hidden matrices, with fused ones split by their names and the gates of torch's
    LSTM and GRU by their modules; stacked experts. Parameters are told apart by identity: a tied parameter has one row
    with all its names. A tensor from which torch's parametrizations compute a weight counts as the weight; the
    magnitudes of a weight norm are vectors.

    Args:
        model_or_named_parameters: a module, or names with parameters; without the module only names and shapes decide.
        rules: the first that matches one of a parameter's names wins.
        on_unknown: "adamw" sends undecided parameters to AdamW, marked in the table, instead of raising. (Parameters
            that are not initialised yet are refused in any case.)

    Raises:
        UnroutedParameterError: listing every parameter that could not be placed, with rules to paste.
        ValueError: if a rule matches no parameter.
    """
    if on_unknown not in ("raise", "adamw"):
        raise ValueError(f'on_unknown must be "raise" or "adamw", got {on_unknown!r}')
    rules = [rules] if isinstance(rules, Rule) else list(iterated(rules, "rules"))
    for entry in rules:
        if not isinstance(entry, Rule):
            raise TypeError(f"rules are Rule objects, got {entry!r}; write Rule({entry!r}, to=...)")
    leaves = _leaves(model_or_named_parameters)
    matched = [_first_match(leaf, rules) for leaf in leaves]
    _check_rules_match(rules, matched, leaves)
    routes, refusals = [], []
    for leaf, rule in zip(leaves, matched, strict=True):
        try:
            decision = decide(leaf, rule)
        except Refusal as refusal:
            refusals.append((leaf, rule, refusal))
            decision = Decision("adamw", "matrix", f"UNKNOWN, by on_unknown: {refusal.reason}")
        routes.append(Route(leaf.names, leaf.param, decision.kind, decision.role, decision.reason, decision.view, rule))
    if on_unknown == "adamw":
        # an uninitialised parameter has no shape, so it can have no row in the table
        refusals = [refused for refused in refusals if is_lazy(refused[0].param)]
    if refusals:
        raise _unrouted(refusals)
    return RouteTable(routes)


def _leaves(source: nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> list[Leaf]:
    """Every parameter once, with all its names, in the order of the first names."""
    owners: dict[str, nn.Module] = {}
    if isinstance(source, nn.Module):
        owners = dict(source.named_modules(remove_duplicate=False))
        pairs: Iterable[Any] = source.named_parameters(remove_duplicate=False)
    elif isinstance(source, Iterable):
        pairs = source.items() if isinstance(source, Mapping) else source
    else:
        raise TypeError(f"expected a module or (name, parameter) pairs, got a {type(source).__name__}")
    names: dict[Tensor, list[str]] = {}
    named: dict[str, Tensor] = {}
    for pair in pairs:
        if not (
            isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], Tensor)
        ):
            raise TypeError(
                f"expected a module or (name, parameter) pairs, got a {type(pair).__name__} among them; "
                "pass the model, or model.named_parameters()"
            )
        name, param = pair
        if named.setdefault(name, param) is not param:
            raise ValueError(f"two different parameters are named {name!r}")
        names.setdefault(param, []).append(name)
    if not names:
        raise ValueError("there are no parameters to route (an iterator that was used up already?)")
    shapes = {name: tuple(param.shape) for name, param in named.items() if not is_lazy(param)}
    outputs = _softmax_outputs(owners.values())
    return [
        Leaf(
            names=tuple(all_names),
            param=param,
            modules=tuple(owners[parent] for name in all_names if (parent := _module_name(name)) in owners),
            shapes=shapes,
            is_softmax_output=param in outputs,
        )
        for param, all_names in names.items()
    ]


def _softmax_outputs(modules: Iterable[nn.Module]) -> set[Tensor]:
    """The parameters of those layers of torch's adaptive softmaxes whose rows are classes."""
    softmaxes = [module for module in modules if isinstance(module, nn.AdaptiveLogSoftmaxWithLoss)]
    # a cluster is a projection to fewer features, and the layer of its classes
    last = [[*cluster.children()][-1] for softmax in softmaxes for cluster in softmax.tail]
    return {param for layer in (*(softmax.head for softmax in softmaxes), *last) for param in layer.parameters()}


def _module_name(name: str) -> str:
    """The name of the module that uses the parameter; a parametrization between the two is looked through."""
    return ".".join(unparametrized(name.split("."))[:-1])


def _first_match(leaf: Leaf, rules: Sequence[Rule]) -> Rule | None:
    if not rules:
        return None
    # a rule about a weight applies to the direction of its weight norm, not to the magnitudes
    names = {*leaf.names, *(() if leaf.is_magnitude else map(".".join, leaf.paths))}
    return next((rule for rule in rules if any(rule.matches(name) for name in names)), None)


def _check_rules_match(rules: Sequence[Rule], matched: Sequence[Rule | None], leaves: Sequence[Leaf]) -> None:
    """Raise ValueError for a rule that matches no parameter; log a warning for one that only comes too late."""
    used = {id(rule) for rule in matched}
    for rule in rules:
        if id(rule) in used:
            continue
        if any(_first_match(leaf, [rule]) for leaf in leaves):
            _logger.warning("%s decides nothing: earlier rules match all of its parameters", rule)
            continue
        names = [name for leaf in leaves for name in leaf.names]
        similar = difflib.get_close_matches(rule.pattern, names, n=3, cutoff=0.0)
        raise ValueError(f"{rule} matches none of the {len(leaves)} parameters; names like it: {', '.join(similar)}")


def _unrouted(refusals: Sequence[tuple[Leaf, Rule | None, Refusal]]) -> UnroutedParameterError:
    lines = [
        f"{len(refusals)} parameter(s) could not be routed; nothing was guessed. "
        'Pass a rule for each, or on_unknown="adamw" for all:'
    ]
    for leaf, rule, refusal in refusals:
        name = leaf.names[0]
        lines.append(f"  {name}  {_shape(leaf.param)}  {leaf.param.dtype}: {refusal.reason}")
        lines += [f"      Rule({name!r}, {_with_what_is_kept(suggestion, rule)})" for suggestion in refusal.suggestions]
    return UnroutedParameterError("\n".join(lines), {leaf.names[0]: refusal.reason for leaf, _, refusal in refusals})


def _with_what_is_kept(suggestion: str, rule: Rule | None) -> str:
    """The suggested arguments of a rule for Muon, with those of ``rule``, in whose place it comes, that still fit."""
    if rule is None or suggestion in ("to='adamw'", "to='frozen'"):
        return suggestion
    kept = ["batched", "transposed", "options"]
    if "batched=" in suggestion:
        # nothing said what the matrices are, so nothing is known against what cuts them
        kept += ["split", "split_dim", "num_heads"]
    arguments = {name: getattr(rule, name) for name in kept if f"{name}=" not in suggestion}
    return ", ".join([suggestion, *(f"{name}={value!r}" for name, value in arguments.items() if value is not None)])


def _shape(param: Tensor) -> str:
    if is_lazy(param):
        return "(not known yet)"
    return "(" + ", ".join(str(size) for size in param.shape) + ")"


def _row(route: Route) -> tuple[str, ...]:
    return (
        " = ".join(route.names),
        _shape(route.param),
        str(route.param.dtype).removeprefix("torch."),
        f"{route.param.numel():,}",
        route.kind,
        route.role,
        route.view.describe() if route.view is not None else "",
        route.reason,
        str(route.rule) if route.rule is not None else "",
    )
