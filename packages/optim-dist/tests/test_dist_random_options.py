"""Random use of the options that change how gradients are kept and added up, and of parameters that change meanwhile.

Gradients are streamed, perhaps in a tree, or in fp32 beside 16-bit parameters; multipliers come and go; layers are
frozen and plans made anew. All else is as in ``dist_random_models``.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_random_models import RandomModel, factor_of, run
from torch.distributed.tensor import Placement

from optim_dist import clip_grad_norm_
from optim_utils.testing import run_ranks

IS_SUPPORTED = hasattr(torch.Tensor, "grad_dtype")


class RandomOptions(RandomModel):
    """One sequence; plain parameters are in all of them, for batches to be skipped anywhere."""

    def __init__(self, *arguments: Any) -> None:
        self.multipliers: dict[str, dict[str, float]] = {}
        self.frozen: set[str] = set()  # since the plan was made
        super().__init__(*arguments)

    # building

    def draw_options(self) -> dict[str, Any]:
        draw, options = self.draw, super().draw_options()
        options["accumulation_steps"] = draw.choice([None, 1, 2, 4])
        self.share = draw.choice([0.0, 0.0, 0.0, 0.5])
        if draw.random() < 0.6:
            steps = options["accumulation_steps"] or 3
            options |= {"gradients": "streamed", "overlap": True, "accumulation_steps": steps}
            if self.size != 3 and steps != 3 and draw.random() < 0.3:
                options |= {"order": "tree", "reducer": "exact", "reduce_dtype": None, "reduced_dtype": None}
                self.share = 0.0
        if IS_SUPPORTED and torch.float64 not in self.dtypes and draw.random() < 0.4:
            options["grad_dtype"] = torch.float32
            self.share = 0.0
        return options

    def assemble(self, values: Any) -> None:
        super().assemble(values)
        self.give_multipliers()

    def draw_placement(self, spec: Any, share: float) -> Placement | None:
        found = super().draw_placement(spec, share)
        return None if self.share == 0.0 else found

    @property
    def is_tree(self) -> bool:
        return self.options.get("order") == "tree"

    @property
    def is_streamed(self) -> bool:
        """Whether no gradients are kept; one rank keeps them, but in a tree."""
        return "gradients" in self.options and (self.size > 1 or self.is_tree)

    # a round

    def round(self) -> None:
        how = self.draw.choice(["usual"] * 4 + ["clip and drop", "clip by parameters", "interrupt"])
        if how == "usual":
            super().round()
            return
        self.say(how)
        if how == "interrupt":
            self.interrupt()
            return
        if how == "clip and drop":
            self.clear("optimizer", True)
        self.micro_batches()
        if how == "clip and drop":
            if self.is_active:
                self.optimizer.clip_grad_norm_(1e-3)
            self.clear("optimizer", True)
            return
        factors = []
        for limit in self.draw.choice([(0.5,), (0.5, 0.05), (0.05, 1e6)]):
            if self.is_active:
                # what is frozen with a gradient is stepped
                given = (p for p in self.net.parameters() if p.requires_grad or p.grad is not None)
                norm = clip_grad_norm_(given, limit)
                self.compare_norm(norm, 2.0)
                factors.append(factor_of(norm, limit))
        if self.is_active:
            self.optimizer.step()
            self.step_twin(torch.stack(factors).amin())
        self.clear(self.draw.choice(["optimizer", "model", "parameters"]), self.draw.random() < 0.7)

    def interrupt(self) -> None:
        """A pass that fails on one rank, and that all give up."""
        steps, failing = self.options["accumulation_steps"] or 1, self.draw.randrange(self.size)
        self.clear("optimizer", True)
        # a rank that has had no gradient in any pass would not know of those that others reduce
        is_known = not self.eager or self.size == 1 or (self.is_streamed and steps > 1)
        if is_known:
            for _ in range(steps - 1):
                self.backward()
            handles = []
            if self.is_active and self.rank == failing:
                handles = [p.register_hook(_interrupt) for p in self.net.parameters() if p.requires_grad]
            try:
                self.backward()
            except InterruptedError:
                assert self.rank == failing
            for handle in handles:
                handle.remove()
        self.clear("optimizer", True)

    def micro_batches(self, **how: Any) -> None:
        if not self.is_streamed:
            super().micro_batches(**how)
            return
        for _ in range(self.options["accumulation_steps"]):
            self.backward(**how)

    def norm_orders(self) -> list[float]:
        return [2.0, float("inf")] if self.is_tree else super().norm_orders()

    def may_scale(self) -> bool:
        """A scaler finds no streamed gradients, and takes those of the parameter's dtype alone."""
        return not self.is_streamed and "grad_dtype" not in self.options and super().may_scale()

    def clear(self, how: str, none: bool) -> None:
        # of sums that are streamed .grad says nothing, and of a step that is given up zeros are no end
        if self.is_streamed:
            how, none = "optimizer", True
        super().clear(how, none)

    # parameters that change

    def multiply(self) -> None:
        name = self.draw.choice(self.specs).name
        self.multipliers[name] = self.draw.choice([{}, {"lr_mul": 0.5}, {"wd_mul": 0.0}, {"lr_mul": 2, "wd_mul": 0.25}])
        self.say(f"{name} {self.multipliers[name]}")
        self.give_multipliers()

    def give_multipliers(self) -> None:
        for net in (self.twin, self.net):
            for name, p in () if net is None else net.named_parameters():
                for key in ("lr_mul", "wd_mul"):
                    setattr(p, key, self.multipliers.get(name, {}).get(key, 1.0))

    def freeze_or_thaw(self) -> bool | None:
        number = self.draw.randrange(1, len(self.specs))
        spec = self.specs[number]
        if self.placements[number] is not None or (not spec.is_trained and spec.name not in self.frozen):
            return False
        self.toggle(number)
        self.frozen ^= {spec.name}
        return None

    def toggle(self, number: int) -> None:
        spec = self.specs[number] = replace(self.specs[number], is_trained=not self.specs[number].is_trained)
        self.say(f"{spec.name} {spec.is_trained}")
        for net in (self.twin, self.net):
            if net is not None:
                getattr(net, spec.name).requires_grad_(spec.is_trained)

    def rebuild_plans(self) -> None:
        self.clear("optimizer", True)
        for p in self.twin.parameters():
            p.grad = None
        for number in range(1, len(self.specs)):
            if self.placements[number] is None and self.draw.random() < 0.25:
                self.toggle(number)
        self.frozen.clear()
        order = [spec.name for spec in self.specs]
        self.draw.shuffle(order)
        order = self.draw.choice([None, order])
        self.say(f"{order}")
        for optimizer in self.both():
            optimizer.rebuild_plan(order)
        if self.is_active:
            self.compare()

    def add_a_group(self) -> bool | None:
        if self.eager:
            self.clear("optimizer", True)
        found = super().add_a_group()
        self.give_multipliers()
        return found

    def change_ranks(self) -> None:
        """Of an optimizer that trains what the next one does."""
        self.clear("optimizer", True)
        for number, spec in enumerate(self.specs):
            if spec.name in self.frozen:
                self.toggle(number)
        self.frozen.clear()
        super().change_ranks()


def _interrupt(gradient: torch.Tensor) -> None:
    raise InterruptedError


RandomOptions.operations = [
    *[RandomOptions.train] * 7,
    RandomOptions.tell_a_group,
    RandomOptions.schedule,
    RandomOptions.add_a_group,
    RandomOptions.multiply,
    RandomOptions.freeze_or_thaw,
    RandomOptions.exchange_states,
    *[RandomOptions.rebuild_plans, RandomOptions.change_ranks] * 2,
]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_random_options(world_size: int, tmp_path: Path) -> None:
    run_ranks(run, world_size, RandomOptions, range(3), 12, str(tmp_path), timeout=120)


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("first", range(1000, 1200, 20))
def test_many_random_options(world_size: int, first: int, tmp_path: Path) -> None:
    run_ranks(run, world_size, RandomOptions, range(first, first + 20), 20, str(tmp_path), timeout=600)
