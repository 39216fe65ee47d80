"""TritonMuon and TritonMuonAdamW through random sequences of what users do to an optimizer between steps.

Beside the optimizer stands what its user knows of it (`muon_model`). A step moves that too; everything else leaves it
as it is, to the bit.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from muon_machine import BesideAnOptimizer
from muon_model import MASTERS, Group, Known, is_flattened, value_of
from random_tensors import NUMPY_MAY_WARN, laid_out, random
from state_machines import try_sequences
from torch import Tensor, nn

from optim_kernels import TritonMuon, TritonMuonAdamW
from optim_utils.param_groups import MatrixView

pytest.importorskip("triton")

MATRICES = [(4, 6), (6, 4), (4, 4), (5, 3), (1, 5), (5, 1), (0, 4), (2, 3, 2), (4, 2, 1, 3)]
ANY_SHAPES = [(), (5,), (4, 3), (0, 4), (2, 3, 2)]
# What storage there is in one run: the parameters' dtype, and options of Muon groups.
STORAGES: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float32, {}),
    (torch.float32, {}),
    (torch.bfloat16, {}),
    (torch.bfloat16, {"master_weights": "fp32"}),
    (torch.bfloat16, {"master_weights": "split16", "momentum_dtype": torch.float32}),
    (torch.bfloat16, {"stochastic_rounding": True, "seed": 3}),
]
# Options that belong to an optimizer rather than to what it loads.
OWN = ("impl", "momentum_dtype", "master_weights", "views")

seeds = st.integers(0, 2**31)
which = st.integers(0, 9)
impls = st.sampled_from(["torch", "triton"])
learning_rates = st.sampled_from([0.0, 0.02, 0.1, "tensor"])
shared_changes = {
    "lr": learning_rates,
    "weight_decay": st.sampled_from([0.0, 0.3]),
    "maximize": st.booleans(),
    "impl": impls,
}
muon_changes = {
    **shared_changes,
    "momentum": st.sampled_from([0.0, 0.5, 0.95]),
    "nesterov": st.booleans(),
    "ns_coefficients": st.sampled_from(["keller", "polar_express", (2.0, -1.5, 0.5)]),
    "ns_steps": st.integers(0, 2),
    "adjust_lr_fn": st.sampled_from([None, "original", "match_rms_adamw", "spectral_unclamped", "keller", "none"]),
    "eps_mode": st.sampled_from(["clamp", "add"]),
    "norm_scale": st.sampled_from([1.0, 1.02]),
    "missing_grad": st.sampled_from(["skip", "zero", "raise"]),
    "beta2": st.sampled_from([None, 0.5, 0.9]),
    "row_equilibrate": st.booleans(),
    "renormalize": st.booleans(),
    "cautious": st.booleans(),
    "split_rows": st.sampled_from([None, 1, "two"]),
    "nd": st.sampled_from(["batch", "flatten", "convolution"]),
    "momentum_dtype": st.sampled_from([None, torch.float32, torch.bfloat16]),
    "master_weights": st.sampled_from([None, "fp32", "split16"]),
}
adamw_changes = {**shared_changes, "betas": st.sampled_from([(0.9, 0.95), (0.0, 0.5)])}
kinds_of_change = {"muon": muon_changes, "adamw": adamw_changes}
changes = st.sampled_from(sorted(muon_changes | adamw_changes)).flatmap(
    lambda name: st.tuples(st.just(name), (muon_changes | adamw_changes)[name])
)
# how many matrices a parameter has, and which
RESHAPING = ("split_rows", "nd")
refused_options = st.sampled_from(
    [
        ("nd", "conv"),
        ("adjust_lr_fn", "rms"),
        ("missing_grad", "ignore"),
        ("impl", "gpu"),
        ("ns_steps", -1),
        ("ns_coefficients", "nobody's"),
        ("split_rows", 1000),
        ("momentum_dtype", torch.int8),
        ("master_weights", "fp64"),
    ]
)
new_groups = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["muon", "muon", "muon", "adamw"]),
        "shapes": st.lists(which, min_size=1, max_size=2),
        "variant": st.sampled_from([None, "torch", "keller", "nanochat-2025", "nanochat-2026-01", "nanochat-2026-07"]),
        "lr": learning_rates,
        "view": st.booleans(),
        "seed": seeds,
    }
)
gradients = st.lists(
    st.sampled_from(["new", "new", "kept", "none", "transposed", "gaps", "expanded", "half"]), min_size=1, max_size=3
)


def may_be_seen_otherwise(group: Group, known: Known, p: nn.Parameter, how: str) -> bool:
    rows, *columns = p.shape or (0,)
    is_plain = group.is_muon and p.ndim == 2 and not {*MASTERS.values()} & {*known.state} and not group.options["views"]
    fits = columns == [rows] if how == "transposed" else rows > 1
    return is_plain and fits and group.options["split_rows"] is None


class Sequences(BesideAnOptimizer):
    """Every rule is done to the optimizer, and to what is known of it; after each they must agree."""

    @initialize(
        whole=st.booleans(),
        impl=impls,
        max_norm=st.sampled_from([None, 0.5]),
        storage=st.sampled_from(STORAGES),
        named=st.booleans(),
        first=st.lists(new_groups, min_size=1, max_size=2),
        steps_every=st.integers(1, 3),
    )
    def build(
        self,
        whole: bool,
        impl: str,
        max_norm: float | None,
        storage: tuple[torch.dtype, dict[str, Any]],
        named: bool,
        first: list[dict[str, Any]],
        steps_every: int,
    ) -> None:
        self.whole, self.impl, self.named = whole, impl, named
        self.max_norm = max_norm if whole else None
        self.dtype, self.storage = storage
        self.num_made = self.num_rules = 0
        self.steps_every = steps_every
        self.groups = []
        self.optimizer = self.made([self.group(**options) for options in first])
        for group in self.optimizer.param_groups:
            self.know(group)

    def made(self, groups: list[dict[str, Any]]) -> TritonMuon | TritonMuonAdamW:
        return TritonMuonAdamW(groups, max_norm=self.max_norm) if self.whole else TritonMuon(groups)

    def new(self, shape: Sequence[int], seed: int) -> nn.Parameter:
        return nn.Parameter(random(shape, seed, self.dtype))

    def group(
        self, kind: str, shapes: list[int], variant: str | None, lr: Any, view: bool, seed: int
    ) -> dict[str, Any]:
        """What a user passes for a group."""
        muon = kind == "muon" or not self.whole
        choice = MATRICES if muon else ANY_SHAPES
        params: list[Any] = [self.new(choice[i % len(choice)], seed + i) for i in shapes]
        group: dict[str, Any] = {
            "params": params,
            "impl": self.impl,
            "lr": torch.tensor(0.05) if lr == "tensor" else lr,
        }
        if muon:
            group |= {"nd": "flatten", "ns_steps": 1, "ns_dtype": torch.float32, "missing_grad": "skip", **self.storage}
            group |= {} if variant is None else {"variant": variant}
            if view and params[0].ndim == 2 and params[0].shape[1] > 1:
                del params[1:]
                split = (1, params[0].shape[1] - 1)
                group["views"] = [MatrixView(shape=params[0].shape, split=split, split_dim=-1, transposed=True)]
        if self.whole:
            group["kind"] = "muon" if muon else "adamw"
        if self.named:
            group["params"] = [(f"p{self.num_made + i}", p) for i, p in enumerate(params)]
        self.num_made += len(params)
        return group

    @rule(
        kinds=gradients,
        seed=seeds,
        clip=st.sampled_from([None, None, 0.25]),
        overflow=st.sampled_from([None, None, False, True]),
        through_closure=st.booleans(),
    )
    def step(
        self, kinds: list[str], seed: int, clip: float | None, overflow: bool | None, through_closure: bool
    ) -> None:
        """With gradients of any kind; with ``overflow`` as a GradScaler makes it."""
        optimizer, scale = self.optimizer, 1.0
        self.give(kinds, seed)

        def closure() -> float:
            assert torch.is_grad_enabled()
            for _, _, p in self.pairs():
                p.grad = None if p.grad is None else p.grad.clone()
            return 7.0

        given = closure if through_closure else None, None if clip is None else torch.tensor(clip)
        if overflow is not None:
            scale = 4.0
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(float(overflow))
        missing = any(p.grad is None and group.options.get("missing_grad") == "raise" for group, _, p in self.pairs())
        with pytest.raises(RuntimeError, match="has no gradient") if missing else nullcontext():
            assert optimizer.step(given[0], clip_factor=given[1]) == (7.0 if through_closure else None)
        if overflow is not None:
            del optimizer.grad_scale, optimizer.found_inf
        if missing or overflow:
            self.nothing_happened()
        else:
            self.follow((self.clipped(scale) if clip is None else clip) / scale)

    @rule(seed=seeds, count=st.integers(1, 3))
    def train(self, seed: int, count: int) -> None:
        """Steps like one another."""
        for i in range(count):
            self.give(["new"], seed + i)
            self.optimizer.step()
            self.follow(self.clipped(1.0))
            self.agree()

    @rule(change=changes, number=which)
    def tell_a_group(self, change: tuple[str, Any], number: int) -> None:
        name, value = change
        known, group = self.chosen(number)
        if name not in kinds_of_change["muon" if known.is_muon else "adamw"]:
            return
        if name == "lr" and isinstance(group["lr"], Tensor):
            group["lr"].fill_(0.03 if value == "tensor" else value)
            known.options["lr"] = group["lr"].clone()
            return
        if value == "tensor":
            value = torch.tensor(0.03)
        if name == "master_weights" and value is not None and self.dtype != torch.bfloat16:
            return
        if name in RESHAPING:
            if known.options["views"] is not None:
                return
            if value == "two":
                value = self.two_rows(known, group)
            if name == "nd":
                self.tell(known, group, "split_rows", None)
            self.restart_variance(known, group)
        self.tell(known, group, name, value)

    def two_rows(self, known: Group, group: dict[str, Any]) -> int | tuple[int, int] | None:
        """Blocks of two rows; one row and the others, where all matrices have five; or none."""
        shapes = [p.shape for p in group["params"]]
        rows = {shape[0] if is_flattened(shape, known.options["nd"]) else shape[-2] for shape in shapes}
        return 2 if not any(r % 2 for r in rows) else (1, 4) if rows == {5} else None

    @rule(option=refused_options, number=which, seed=seeds)
    def tell_a_group_what_it_refuses(self, option: tuple[str, Any], number: int, seed: int) -> None:
        name, value = option
        known, group = self.chosen(number)
        if not known.is_muon or known.options["views"] is not None or not any(p.numel() for p in group["params"]):
            return
        before = group[name]
        group[name] = value
        self.give(["new"], seed)
        with pytest.raises((ValueError, TypeError)):
            self.optimizer.step()
        group[name] = before
        self.nothing_happened()

    @rule(number=which, seed=seeds)
    def step_with_a_sparse_gradient(self, number: int, seed: int) -> None:
        self.give(["new"], seed)
        *_, p = self.one(number)
        if p.ndim == 0:
            return
        p.grad = p.grad.to_sparse()
        with pytest.raises(RuntimeError, match=r"sparse|dense"):
            self.optimizer.step()
        p.grad = None
        self.nothing_happened()

    @precondition(lambda self: self.max_norm is None)
    @rule(number=which, seed=seeds)
    def step_with_a_nan(self, number: int, seed: int) -> None:
        """It stays in its matrix; then the user starts that parameter anew."""
        self.give(["new"], seed)
        _, known, p = self.one(number)
        if p.numel():
            p.grad.view(-1)[0] = float("nan")
        self.optimizer.step()
        self.follow()
        self.agree()
        self.overwrite(known, p, seed)

    @rule(options=new_groups)
    def add_a_group(self, options: dict[str, Any]) -> None:
        self.optimizer.add_param_group(self.group(**options))
        self.know(self.optimizer.param_groups[-1])

    @rule(options=new_groups, seed=seeds)
    def add_a_group_that_is_refused(self, options: dict[str, Any], seed: int) -> None:
        group = self.group(**{**options, "kind": "muon", "view": False})
        group["params"][-1] = ("vector", self.new((3,), seed)) if self.named else self.new((3,), seed)
        with pytest.raises(ValueError, match="Muon takes matrices"):
            self.optimizer.add_param_group(group)

    @rule(number=which)
    def remove_a_group(self, number: int) -> None:
        if len(self.groups) > 1:
            i = number % len(self.groups)
            for p in self.optimizer.param_groups[i]["params"]:
                self.optimizer.state.pop(p, None)
            del self.groups[i], self.optimizer.param_groups[i]

    @rule(number=which, shape=which, seed=seeds, as_before=st.booleans())
    def exchange_a_parameter(self, number: int, shape: int, seed: int, as_before: bool) -> None:
        known, group = self.chosen(number)
        place = number % len(known.members)
        old = group["params"][place]
        choice = MATRICES if known.is_muon else ANY_SHAPES
        fixed = as_before or known.options.get("views") or known.options.get("split_rows")
        self.optimizer.state.pop(old, None)
        group["params"][place] = self.new(old.shape if fixed else choice[shape % len(choice)], seed)
        known.members[place] = Known(value_of(group["params"][place], {}))

    @rule(number=which, other=which)
    def move_a_parameter(self, number: int, other: int) -> None:
        """To another group, whose options it follows from then on."""
        (known, group), (known_to, to) = self.chosen(number), self.chosen(other)
        if known is known_to or len(known.members) == 1 or known.is_muon != known_to.is_muon:
            return
        if known_to.is_muon:
            if known_to.options["views"] is not None:
                return
            self.tell(known_to, to, "split_rows", None)
        for key in ("params", *(["param_names"] if self.named else [])):
            to[key].append(group[key].pop())
        known_to.members.append(known.members.pop())
        if known_to.is_muon:
            self.restart_variance(known_to, to)

    @rule(number=which, key=st.sampled_from([None, "momentum_buffer", "second_momentum_buffer"]))
    def forget_a_state(self, number: int, key: str | None) -> None:
        group, known, p = self.one(number)
        if group.is_muon or key is None:
            self.forget(known, p, *([] if key is None else [key]))
            if key is None:
                known.value = value_of(p, {})

    @rule(whose=st.sampled_from(["parameters", "states", "exchanged states"]))
    def move(self, whose: str) -> None:
        """Elsewhere in memory, as by ``.to(device)`` there and back."""
        for _, _, p in self.pairs():
            state = self.optimizer.state.get(p, {})
            if whose == "parameters":
                p.data = p.data.clone()
            for key, value in state.items():
                if whose == "states":
                    value.data = value.data.clone()
                elif whose == "exchanged states":
                    state[key] = value.clone()

    @rule(number=which, how=st.sampled_from(["transposed", "gaps", "contiguous"]))
    def lay_out_a_parameter(self, number: int, how: str) -> None:
        group, _, p = self.one(number)
        # views of more dimensions ask for their layout, the kernels of AdamW for one without gaps
        if not (p.ndim > 3 if group.is_muon else how == "gaps"):
            p.data = laid_out(p.data.contiguous(), how)

    @rule(number=which, how=st.sampled_from(["transposed", "cut"]))
    def see_a_parameter_otherwise(self, number: int, how: str) -> None:
        """Other numbers at the old address; a parameter that is cut is so with its state."""
        may = [each for each in self.pairs() if may_be_seen_otherwise(*each, how)]
        if not may:
            return
        _, known, p = may[number % len(may)]
        p.grad = None
        if how == "transposed":
            p.data, known.value = p.data.t(), known.value.t().contiguous()
            return
        rows = p.shape[0] // 2
        self.forget(known, p, "second_momentum_buffer")
        p.data, known.value = p.data[:rows], known.value[:rows]
        if "momentum_buffer" in known.state:
            buffer = self.optimizer.state[p]["momentum_buffer"]
            buffer.data = buffer.data[:rows]
            known.state["momentum_buffer"] = known.state["momentum_buffer"][:rows]

    @rule(number=which, factor=st.sampled_from([0.5, -2.0]))
    def write_to_states(self, number: int, factor: float) -> None:
        _, known, p = self.one(number)
        for key in ("momentum_buffer", "exp_avg"):
            if key in known.state:
                self.optimizer.state[p][key].mul_(factor)
                known.state[key] *= factor

    @rule(number=which, seed=seeds)
    def load_weights(self, number: int, seed: int) -> None:
        _, known, p = self.one(number)
        self.overwrite(known, p, seed)

    @rule(impl=impls, same_optimizer=st.booleans(), dtype=st.sampled_from([None, None, torch.float32]))
    def resume(self, impl: str, same_optimizer: bool, dtype: torch.dtype | None) -> None:
        """From a file; a new optimizer may compute by other means, and keep its momentum otherwise."""
        file = io.BytesIO()
        torch.save(self.optimizer.state_dict(), file)
        file.seek(0)
        if not same_optimizer:
            for known in self.groups:
                known.options |= {"impl": impl, "momentum_dtype": dtype} if known.is_muon else {"impl": impl}
            self.optimizer = self.remade()
        self.optimizer.load_state_dict(torch.load(file, weights_only=True))
        for group, member, p in self.pairs():
            if group.is_muon:
                member.convert(p.dtype, group.options, makes_masters=False)

    def remade(self) -> TritonMuon | TritonMuonAdamW:
        """A new optimizer over groups as they are known."""
        groups = []
        for known, group in zip(self.groups, self.optimizer.param_groups):
            own = {key: known.options[key] for key in (*OWN, "kind") if key in known.options}
            groups.append({"params": group["params"], "nd": "batch", **own})
        return self.made(groups)

    @rule(how=st.sampled_from([copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))]))
    def copy(self, how: Any) -> None:
        self.optimizer = how(self.optimizer)

    @rule()
    def explain(self) -> None:
        assert len(self.optimizer.explain().split("\n")) >= 2 + len(list(self.pairs()))

    @invariant()
    def go_on(self) -> None:
        """What went wrong shows at once, or in the next step."""
        if hasattr(self, "groups"):
            self.agree()
            self.num_rules += 1
            if self.num_rules % self.steps_every == 0:
                self.train(self.num_rules, 1)


pytestmark = NUMPY_MAY_WARN


@pytest.mark.slow
def test_sequences() -> None:
    try_sequences(Sequences, examples=5, steps=5)


@pytest.mark.nightly
def test_many_sequences() -> None:
    try_sequences(Sequences, examples=200, steps=20)
