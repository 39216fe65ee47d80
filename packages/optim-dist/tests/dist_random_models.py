"""Random parameter sets under random use, over numbers of ranks that change on the way: the bits of one process.

Parameters have any shape, order in memory, dtype and group; some are DTensors, sharded or replicated, beside others in
buckets. Gradients are small multiples of 3 / 16, so that their sums over up to three ranks, and the averages, are exact
in every dtype and any order. The process beside it, the twin, has the whole model to itself, and takes a step with the
average (or sum) of what all ranks would have: parameters and state must agree to the last bit, whatever was done. Where
a factor of clipping meets that of averaging they may differ by rounding; then the twin goes on from ours.
"""

from __future__ import annotations

import copy
import io
import random
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dist_cases import normal
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from optim_dist import TritonDistAdamW, TritonDistMuon, TritonDistMuonAdamW, checkpoint
from optim_kernels import TritonAdamW, TritonMuon, TritonMuonAdamW
from optim_kernels.muon_groups import variant_options

GRID = 0  # among the meshes: the one of two dimensions
KINDS = ("adamw", "muon", "muon_adamw")
SIZES = (0, 1, 1, 2, 3, 5, 8, 13)
WIDE, NARROW = (torch.float64, torch.float32), (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Spec:
    """A parameter: ``order`` is that of its dimensions in memory."""

    name: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    group: int
    is_trained: bool = True

    def lay(self, value: Tensor) -> Tensor:
        """``value`` in this dtype and order of memory."""
        inverse = [self.order.index(dim) for dim in range(len(self.order))]
        return value.to(self.dtype).permute(self.order).contiguous().permute(inverse)


class Bag(nn.Module):
    """Parameters whose gradients are chosen: those of ``sum(parameter * gradient)``."""

    def __init__(self, specs: Sequence[Spec], values: Sequence[Tensor]) -> None:
        super().__init__()
        self.names = [spec.name for spec in specs]
        for spec, value in zip(specs, values, strict=True):
            setattr(self, spec.name, nn.Parameter(value, requires_grad=spec.is_trained))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return torch.stack([(getattr(self, name) * value).sum().double() for name, value in gradients.items()]).sum()

    def listed(self) -> list[nn.Parameter]:
        return [getattr(self, name) for name in self.names]


class RandomModel:
    """One sequence; every rank draws the same."""

    operations: ClassVar[Sequence[Callable[[Any], bool | None]]]

    def __init__(
        self, seed: int, rank: int, world_size: int, meshes: dict[int, DeviceMesh], folder: Path, log: list[str]
    ) -> None:
        self.seed, self.rank, self.most, self.meshes, self.folder, self.log = (
            seed,
            rank,
            world_size,
            meshes,
            folder,
            log,
        )
        self.draw = random.Random(f"{world_size}-{seed}")
        self.alone = dist.new_group([rank], use_local_synchronization=True)
        self.kind = self.draw.choice(KINDS)
        # without fp64, averages over three ranks are exact too
        self.dtypes = self.draw.choice([[*WIDE, torch.float32, *NARROW], [torch.float32, *NARROW], [torch.bfloat16]])
        self.specs = self.draw_specs(self.draw.randint(3, 9))
        self.groups = [self.draw_group(number) for number in range(2)]
        self.say(f"{self.kind} {self.specs} {self.groups}")
        self.count = 0
        self.saved: list[Any] = []
        self.size = self.draw.choice([self.most, self.most, *range(1, self.most + 1)])
        values = [spec.lay(normal(spec.shape, 7, number)) for number, spec in enumerate(self.specs)]
        self.twin = Bag(self.specs, [value.clone() for value in values])
        self.twin_optimizer = self.make(self.twin, {}, process_group=self.alone)
        self.grads: list[list[Tensor | None]] = []
        self.assemble(values)

    def say(self, text: str) -> None:
        self.log.append(text)

    @property
    def is_active(self) -> bool:
        """Whether this rank is among those that train now."""
        return self.rank < self.size

    # building

    def draw_specs(self, count: int, groups: Sequence[int] = (0, 1), first: int = 0) -> list[Spec]:
        draw, found = self.draw, []
        for number in range(first, first + count):
            group = groups[number % len(groups)] if number - first < len(groups) else draw.choice(groups)
            is_muon = self.is_muon(group)
            ndim = draw.choice([2, 2, 3, 4] if is_muon else [0, 1, 1, 2, 2, 3, 4])
            sizes = SIZES[1:] if is_muon else SIZES
            shape = tuple(draw.choice(sizes[:6] if ndim > 2 else sizes) for _ in range(ndim))
            order = list(range(ndim))
            if draw.random() < 0.4:
                draw.shuffle(order)
            dtype = draw.choice(self.dtypes)
            trained = number < len(groups) or draw.random() < 0.9
            found.append(Spec(f"p{number}", shape, tuple(order), dtype, group, trained))
        return found

    def is_muon(self, group: int) -> bool:
        return self.kind == "muon" or (self.kind == "muon_adamw" and group % 2 == 0)

    def draw_group(self, number: int) -> dict[str, Any]:
        draw = self.draw
        common = {"lr": draw.choice([0.01, 0.05]), "weight_decay": draw.choice([0.0, 0.1])}
        common["maximize"] = draw.random() < 0.2
        if self.is_muon(number):
            variant = draw.choice(["torch", "keller", "nanochat-2026-03", "nanochat-2026-07"])
            in_order = all(s.order == tuple(range(len(s.shape))) for s in self.specs if s.group == number)
            group = {**common, "variant": variant, "impl": "torch"}
            group["nd"] = draw.choice(["flatten", "batch"] if in_order else ["batch"])
            group["missing_grad"] = draw.choice(["skip", "skip", "zero"])
            if self.dtypes == [torch.bfloat16]:
                group["master_weights"] = draw.choice([None, "fp32", "split16"])
        else:
            group = {**common, "eps": 0.1, "betas": (0.9, 0.95), "amsgrad": draw.random() < 0.3}
            dtypes = set(self.dtypes)
            group["state_dtype"] = draw.choice([None, torch.float32, (None, torch.float32)])
            if dtypes <= {torch.bfloat16}:
                group["master_weights"] = draw.choice([None, "fp32", "split16"])
            elif dtypes <= set(NARROW):
                group["master_weights"] = draw.choice([None, "fp32"])
        if self.dtypes == [torch.bfloat16] and group.get("master_weights") is None and draw.random() < 0.5:
            group |= {"stochastic_rounding": True, "seed": draw.randrange(9)}
        return {**group, **({"kind": "muon" if self.is_muon(number) else "adamw"} if self.kind == "muon_adamw" else {})}

    def groups_of(self, net: Bag) -> list[dict[str, Any]]:
        groups = []
        for number, group in enumerate(self.groups):
            members = [(spec.name, getattr(net, spec.name)) for spec in self.specs if spec.group == number]
            groups.append({**copy.deepcopy(group), "params": members})
        return groups

    def make(self, net: Bag, model: dict[str, Any], **options: Any) -> Any:
        classes = {"adamw": TritonDistAdamW, "muon": TritonDistMuon, "muon_adamw": TritonDistMuonAdamW}
        return classes[self.kind](self.groups_of(net), **model, **options)

    def assemble(self, values: Sequence[Tensor]) -> None:
        """A model and an optimizer over the ranks that are active, from whole values."""
        draw = self.draw
        self.options = self.draw_options()
        self.placements = [self.draw_placement(spec, self.share) for spec in self.specs]
        self.with_model = draw.random() < 0.5
        self.grid = draw.choice([None, self.meshes.get(GRID)]) if self.size == 4 else None
        self.say(f"of {self.size} {self.grid}: {self.options} model={self.with_model} {self.placements}")
        self.eager = self.options["overlap"] and self.options["accumulation_steps"] is not None
        self.grads = [[None for _ in self.specs] for _ in range(self.size)]
        self.net = self.optimizer = None
        if self.is_active:
            self.net = Bag(self.specs, [self.placed(*each) for each in zip(values, self.placements, strict=True)])
            options = {**self.options, **({"model": self.net} if self.with_model else {})}
            where = {"process_group": self.group} if self.grid is None else {"mesh": self.grid}
            self.optimizer = self.make(self.net, options, **where)

    def draw_options(self) -> dict[str, Any]:
        """Of the optimizer; beside them the share of DTensors."""
        draw = self.draw
        self.share = draw.choice([0.0, 0.0, 0.5, 1.0])
        options: dict[str, Any] = {
            "reducer": draw.choice(["rs", "exact"]),
            "reduce_dtype": draw.choice([None, None, torch.float32, *NARROW]),
            "bucket_mb": draw.choice([1e-5, 1e-4, 5e-4, None]),
            "average": draw.random() < 0.6,
            "overlap": draw.random() < 0.8,
            "accumulation_steps": draw.choice([None, None, 1, 2]),
            "max_norm": draw.choice([None, None, None, 0.05]),
            "skip_nonfinite": draw.random() < 0.3,
            "debug": draw.random() < 0.2,
        }
        if options["reducer"] == "exact":
            options["reduced_dtype"] = draw.choice([None, torch.float32])
        if self.size == 3 and torch.float64 in self.dtypes:
            options["average"] = False  # the factor is fp32's third
        return options

    @property
    def group(self) -> Any:
        return self.meshes[self.size].get_group()

    def draw_placement(self, spec: Spec, share: float) -> Placement | None:
        """None: not a DTensor."""
        dims = range(len(spec.shape))
        if self.groups[spec.group].get("stochastic_rounding"):
            dims = dims[:1]  # whole rows
        choices = [Replicate(), *map(Shard, dims)]
        placement = self.draw.choice(choices)
        is_plain = self.draw.random() >= share or spec.order != tuple(range(len(spec.shape)))
        # the update of a matrix travels in its dtype
        return None if is_plain or (self.is_muon(spec.group) and spec.dtype in NARROW) else placement

    def placed(self, value: Tensor, placement: Placement | None) -> Tensor:
        if placement is None:
            return value.clone(memory_format=torch.preserve_format)
        return distribute_tensor(value, self.meshes[self.size], [placement])

    # gradients

    def draw_gradients(self, scale: float = 1.0, poisoned: int | None = None) -> list[dict[str, Tensor]]:
        """Of every rank; those of DTensors are the same on all."""
        draw, found = self.draw, [dict[str, Tensor]() for _ in range(self.size)]
        plain = [s for s, placement in zip(self.specs, self.placements) if s.is_trained and placement is None]
        for spec, placement in zip(self.specs, self.placements, strict=True):
            if not spec.is_trained or draw.random() < 0.1:
                continue
            if placement is not None:
                value = self.integers(spec) * scale
                for mine in found:
                    mine[spec.name] = value
                continue
            for mine in found:
                if draw.random() < 0.85:
                    mine[spec.name] = self.integers(spec) * scale
        for mine in found:
            # where backward reduces, a rank could not drop those of others that has no gradient at all, in every pass
            if plain and ((self.options["accumulation_steps"] or 1) > 1 or not any(s.name in mine for s in plain)):
                mine.setdefault(plain[0].name, self.integers(plain[0]) * scale)
        if poisoned is not None:
            candidates = [s for s in plain if s.name in found[poisoned] and found[poisoned][s.name].numel()]
            for spec in candidates[:1]:
                found[poisoned][spec.name] = torch.full_like(found[poisoned][spec.name], float("inf"))
        return found

    def integers(self, spec: Spec) -> Tensor:
        generator = torch.Generator().manual_seed(self.draw.randrange(2**31))
        return spec.lay(torch.randint(-3, 4, spec.shape, generator=generator) * 3.0 / 16)

    def backward(self, **how: Any) -> None:
        found = self.draw_gradients(**how)
        for rank, mine in enumerate(found):
            for number, spec in enumerate(self.specs):
                if spec.name in mine:
                    before = self.grads[rank][number]
                    self.grads[rank][number] = mine[spec.name] if before is None else before + mine[spec.name]
        if not self.is_active:
            return
        mine = found[self.rank]
        through = {}
        for number, (spec, placement) in enumerate(zip(self.specs, self.placements, strict=True)):
            if spec.name not in mine:
                continue
            p = getattr(self.net, spec.name)
            if placement is None:
                through[spec.name] = mine[spec.name]
            else:
                # what a scaler divides is not what the twin gets
                p.grad = self.placed(self.grads[self.rank][number].clone(), placement)
        if through:
            self.net(through).backward()

    def micro_batches(self, **how: Any) -> None:
        """As many as the optimizer wants before a step."""
        draw, wanted = self.draw, self.options["accumulation_steps"]
        held_back = draw.choice([0, 0, 0, 1, 2])
        if held_back:
            self.say(f"{held_back} without sync")
            with ExitStack() as stack:
                if self.is_active:
                    stack.enter_context(self.optimizer.no_sync())
                for _ in range(held_back):
                    self.backward(**how)
            self.eager = self.eager or self.options["overlap"]
        for _ in range(wanted or (1 if self.eager else draw.choice([1, 1, 2]))):
            self.backward(**how)

    def give_twin(self) -> None:
        """Sums or averages of what all ranks have."""
        for number, (spec, placement, p) in enumerate(
            zip(self.specs, self.placements, self.twin.listed(), strict=True)
        ):
            each = [mine[number] for mine in self.grads]
            given = [value.double() for value in each if value is not None]
            p.grad = None
            if given:
                total = given[0] if placement is not None else torch.stack(given).sum(0)
                if placement is None and self.options["average"]:
                    total = total / self.size
                p.grad = spec.lay(total)

    # a round: gradients, perhaps clipped or dropped, a step, and zero_grad

    def train(self) -> None:
        for _ in range(self.draw.choice([1, 1, 2])):
            self.round()

    def round(self) -> None:
        draw = self.draw
        how = draw.choice(["step"] * 6 + ["clip", "clip", "closure", "scaler", "drop"])
        self.say(how)
        if how == "scaler" and not self.may_scale():
            how = "step"
        if how == "closure":
            self.clear("optimizer", True)
            loss = self.optimizer.step(self.closure) if self.is_active else self.closure()
            assert loss is not None
            self.step_twin()
        elif how == "scaler":
            self.scaled_step()
        else:
            self.micro_batches()
            if how == "drop":
                # anything that is None afterwards
                self.clear(draw.choice(["optimizer", "model"]), True)
                return
            norm = None
            if how == "clip":
                limit, order = draw.choice([0.05, 0.5, 1e6]), draw.choice(self.norm_orders())
                self.say(f"{limit} {order}")
                if self.is_active:
                    norm = self.optimizer.clip_grad_norm_(limit, order)
                    self.compare_norm(norm, order)
            if self.is_active:
                self.optimizer.step()
            self.step_twin(None if norm is None else factor_of(norm, limit))
        self.clear(draw.choice(["optimizer", "model", "parameters"]), draw.random() < 0.7)

    def norm_orders(self) -> list[float]:
        return [2.0, 1.0, float("inf")]

    def closure(self) -> Tensor:
        self.micro_batches()
        return torch.zeros(())

    def may_scale(self) -> bool:
        """A scaler takes no DTensors beside others."""
        return len({placement is None for placement in self.placements}) == 1

    def scaled_step(self) -> None:
        draw = self.draw
        scale, poisoned = draw.choice([2.0, 64.0]), draw.choice([None, None, *range(self.size)])
        # torch unscales no fp16
        is_unscaled = not self.eager and torch.float16 not in {s.dtype for s in self.specs} and draw.random() < 0.5
        self.clear("optimizer", True)
        self.say(f"scale {scale} poisoned {poisoned} unscaled {is_unscaled}")
        held_back = self.options["accumulation_steps"] or 1
        for _ in range(held_back):
            self.backward(scale=scale, poisoned=poisoned)
        ours, theirs = (torch.amp.GradScaler("cpu", init_scale=scale) for _ in range(2))
        for scaler in (ours, theirs):
            scaler.scale(torch.zeros(()))
        if self.is_active:
            # as loops over several ranks do
            if is_unscaled:
                ours.unscale_(self.optimizer)
            ours.step(self.optimizer)
        self.step_twin(scaler=theirs, scale=scale)

    def step_twin(self, factor: Tensor | None = None, scaler: Any = None, scale: float = 1.0) -> None:
        if not self.is_active:
            return
        self.give_twin()
        given = [p.grad.double().reshape(-1) for p in self.twin.listed() if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.cat([*given, torch.zeros(1).double()])) / scale
        is_clipped = factor is not None and bool(factor < 1)
        if self.options["max_norm"] is not None:
            clipped = factor_of(norm, self.options["max_norm"])
            is_clipped = is_clipped or bool(clipped < 1)
            factor = clipped if factor is None else torch.minimum(factor, clipped)
        is_skipped = self.options["skip_nonfinite"] and not torch.isfinite(norm)
        if scaler is not None:
            if factor is not None:
                self.twin_optimizer.clip_with(factor, norm)
            scaler.step(self.twin_optimizer)
        elif not is_skipped:
            self.twin_optimizer.step(clip_factor=factor)
        self.compare(is_exact=not is_clipped)
        if is_clipped:
            self.follow()

    def clear(self, how: str, none: bool) -> None:
        self.say(f"zero_grad {how} {none}")
        if self.is_active:
            if how == "optimizer":
                self.optimizer.zero_grad(none)
            elif how == "model":
                self.net.zero_grad(none)
            else:
                for p in self.net.parameters():
                    if none:
                        p.grad = None
                    elif p.grad is not None:
                        p.grad.zero_()
        self.grads = [
            [None if none or value is None else torch.zeros_like(value) for value in mine] for mine in self.grads
        ]
        if self.is_active and not none:
            for spec, p, value in zip(self.specs, self.net.listed(), self.grads[self.rank], strict=True):
                assert (p.grad is None) == (value is None), spec.name

    # comparison

    def compare_norm(self, norm: Tensor, order: float) -> None:
        self.give_twin()
        given = [p.grad.double().reshape(-1) for p in self.twin.listed() if p.grad is not None]
        wanted = torch.linalg.vector_norm(torch.cat([*given, torch.zeros(1).double()]), order)
        torch.testing.assert_close(norm.double(), wanted, rtol=1e-6, atol=1e-12)

    def compare(self, is_exact: bool = True) -> None:
        """Parameters, and state."""
        self.optimizer.wait()
        for spec, p, theirs in zip(self.specs, self.net.listed(), self.twin.listed(), strict=True):
            same(whole(p), theirs.detach(), is_exact, spec.name)
        full, wanted = self.optimizer.full_state_dict(), self.twin_optimizer.full_state_dict()
        if self.rank == 0:
            compare_states(full["state"], wanted["state"], is_exact)

    def follow(self) -> None:
        """The twin goes on from ours."""
        sent = [self.optimizer.full_state_dict()]
        dist.broadcast_object_list(sent, src=0, group=self.group)
        self.twin_optimizer.load_full_state_dict(sent[0])
        with torch.no_grad():
            for p, theirs in zip(self.net.listed(), self.twin.listed(), strict=True):
                theirs.copy_(whole(p))

    # groups

    def tell_a_group(self) -> None:
        place = self.draw.randrange(len(self.groups))
        changes: dict[str, Any] = {
            "lr": self.draw.choice([0.0, 0.02, torch.tensor(0.03)]),
            "weight_decay": self.draw.choice([0.0, 0.2]),
            "maximize": self.draw.random() < 0.3,
        }
        self.say(f"{place} {changes}")
        for optimizer in self.both():
            optimizer.param_groups[place].update(copy.deepcopy(changes))

    def both(self) -> list[Any]:
        return [self.optimizer, self.twin_optimizer] if self.is_active else [self.twin_optimizer]

    def schedule(self) -> None:
        for optimizer in self.both():
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5).step()

    def add_a_group(self) -> bool | None:
        if len(self.groups) > 3:
            return False
        number = len(self.groups)
        new = self.draw_specs(self.draw.randint(1, 3), [number], len(self.specs))
        self.specs += new
        self.groups.append(self.draw_group(number))
        self.say(f"{new} {self.groups[-1]}")
        values = [spec.lay(normal(spec.shape, 8, len(self.specs), place)) for place, spec in enumerate(new)]
        placements = [self.draw_placement(spec, 0.3) for spec in new]
        self.placements += placements
        self.grads = [[*mine, *(None for _ in new)] for mine in self.grads]
        for net, optimizer in [(self.twin, self.twin_optimizer), (self.net, self.optimizer)]:
            if net is None:
                continue
            for spec, value, placement in zip(new, values, placements, strict=True):
                found = value.clone() if net is self.twin else self.placed(value, placement)
                setattr(net, spec.name, nn.Parameter(found, requires_grad=spec.is_trained))
                net.names.append(spec.name)
            members = [(spec.name, getattr(net, spec.name)) for spec in new]
            optimizer.add_param_group({**copy.deepcopy(self.groups[-1]), "params": members})
        return None

    # state out and in

    def exchange_states(self) -> None:
        """Out and in again, on the same ranks."""
        how, to = self.draw.choice(["parts", "full", "consolidated"]), self.draw.randrange(self.size)
        self.say(f"{how} {to}")
        if not self.is_active:
            return
        if how == "consolidated":
            self.optimizer.consolidate_state_dict(to)
        state = self.optimizer.full_state_dict() if how == "full" else self.optimizer.state_dict()
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        loaded = [torch.load(file, weights_only=True)]
        if how != "parts":
            dist.broadcast_object_list(loaded, src=0 if how == "full" else to, group=self.group)
        for state in self.optimizer.state.values():
            for value in state.values():
                if value.is_floating_point():
                    (value.to_local() if isinstance(value, DTensor) else value).fill_(float("nan"))
        load = self.optimizer.load_full_state_dict if how == "full" else self.optimizer.load_state_dict
        load(loaded[0])
        if how == "consolidated":
            self.optimizer.consolidate_state_dict(None)
        self.compare()

    def go_on_alone(self) -> bool | None:
        """The whole state in an optimizer of one device, which takes a step beside ours."""
        own = [group.get(key) for group in self.groups for key in ("amsgrad", "state_dtype", "master_weights")]
        own += [group.get("stochastic_rounding") for group in self.groups if group.get("kind") == "adamw"]
        # TritonMuonAdamW stores and rounds the AdamW part as torch does
        if self.options["max_norm"] is not None or (self.kind == "muon_adamw" and any(own)):
            return False
        self.clear("optimizer", True)
        to = self.draw.randrange(self.size)
        self.say(f"{to}")
        if self.is_active:
            self.optimizer.consolidate_state_dict(to)
            sent = [self.optimizer.state_dict()]
            dist.broadcast_object_list(sent, src=to, group=self.group)
            self.optimizer.consolidate_state_dict(None)
            net = Bag(self.specs, [whole(p) for p in self.twin.listed()])
            alone = self.make_alone(net)
            alone.load_state_dict(sent[0])
        self.micro_batches()
        if self.is_active:
            self.optimizer.step()
        self.step_twin()
        if self.is_active:
            for p, twin in zip(net.listed(), self.twin.listed(), strict=True):
                p.grad = twin.grad
            alone.step()
            for spec, p, twin in zip(self.specs, net.listed(), self.twin.listed(), strict=True):
                same(p.detach(), twin.detach(), False, spec.name)
        self.clear("optimizer", True)
        return None

    def make_alone(self, net: Bag) -> Any:
        groups = self.groups_of(net)
        if self.kind == "muon":
            return TritonMuon([{**variant_options(group.pop("variant")), **group} for group in groups])
        return {"adamw": TritonAdamW, "muon_adamw": TritonMuonAdamW}[self.kind](groups)

    def change_ranks(self) -> None:
        """Other ranks, another layout, other options; through a file or a folder."""
        draw = self.draw
        self.clear("optimizer", True)
        how, to = draw.choice(["ours", "consolidated", "torch's"]), draw.randrange(self.size)
        if how == "torch's" and 1 in (self.size, self.most):
            how = "ours"
        path = self.folder / f"{self.seed}-{self.count}"
        self.say(f"{how} {to}")
        net, optimizer = self.net, self.optimizer
        if self.is_active:
            values, optimizer_groups = [whole(p) for p in net.listed()], optimizer.param_groups
            if how == "ours":
                checkpoint.save(path, net, optimizer, extra=self.count)
            elif how == "consolidated":
                optimizer.consolidate_state_dict(to)
                if self.rank == to:
                    path.mkdir()
                    torch.save({"values": values, "optimizer": optimizer.state_dict()}, path / "file.pt")
            else:
                state = {"model": net.state_dict(), "optim": get_optimizer_state_dict(net, optimizer)}
                dcp.save(state, checkpoint_id=path, process_group=self.group)
            if draw.random() < 0.5:
                optimizer.close()
        else:
            draw.random()
        dist.barrier()
        self.size = draw.choice(range(1, self.most + 1)) if how != "torch's" else self.size
        self.assemble([spec.lay(torch.zeros(spec.shape)) for spec in self.specs])
        if self.is_active:
            if how == "ours":
                assert checkpoint.load(path, self.net, self.optimizer) == self.count
            elif how == "consolidated":
                saved = torch.load(path / "file.pt", weights_only=True)
                with torch.no_grad():
                    for p, value, placement in zip(self.net.listed(), saved["values"], self.placements, strict=True):
                        p.copy_(self.placed(value, placement))
                self.optimizer.load_state_dict(saved["optimizer"])
            else:
                for theirs, mine in zip(optimizer_groups, self.optimizer.param_groups, strict=True):
                    if isinstance(theirs["lr"], Tensor):  # torch loads no tensor where a number was
                        mine["lr"] = torch.zeros(())
                state = {
                    "model": self.net.state_dict(),
                    "optim": get_optimizer_state_dict(self.net, self.optimizer),
                }
                dcp.load(state, checkpoint_id=path, process_group=self.group)
                self.net.load_state_dict(state["model"])
                set_optimizer_state_dict(self.net, self.optimizer, state["optim"])
        # ranks that had been idle
        sent = [[whole(p) for p in self.twin.listed()], self.twin_optimizer.full_state_dict()]
        dist.broadcast_object_list(sent, src=0)
        with torch.no_grad():
            for p, value in zip(self.twin.listed(), sent[0], strict=True):
                p.copy_(value)
        self.twin_optimizer.load_full_state_dict(sent[1])
        if self.is_active:
            self.compare()
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(path)

    def run(self, length: int) -> None:
        while self.count < length:
            operation = self.draw.choice(self.operations)
            self.say(operation.__name__)
            if operation(self) is not False:
                self.count += 1
        if self.is_active:
            self.compare()
            self.optimizer.close()
        dist.barrier()


RandomModel.operations = [
    *[RandomModel.train] * 6,
    RandomModel.tell_a_group,
    RandomModel.schedule,
    RandomModel.add_a_group,
    RandomModel.go_on_alone,
    *[RandomModel.exchange_states, RandomModel.change_ranks] * 2,
]


def factor_of(norm: Tensor, limit: float) -> Tensor:
    """What gradients are scaled by, as torch has it."""
    return torch.clamp(limit / (norm.double() + 1e-6), max=1.0).float()


def whole(tensor: Tensor) -> Tensor:
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().clone(memory_format=torch.preserve_format)


def same(found: Tensor, wanted: Tensor, is_exact: bool, what: str) -> None:
    assert found.dtype == wanted.dtype, what
    if is_exact:
        tolerance = {"rtol": 0.0, "atol": 0.0}
    else:
        tolerance = {"rtol": 0.02, "atol": 0.02} if found.dtype in NARROW else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(found, wanted, **tolerance, equal_nan=False, msg=lambda text: f"{what}: {text}")


def compare_states(ours: dict[int, Any], theirs: dict[int, Any], is_exact: bool) -> None:
    """Of what has had no gradient there is nothing, or it is as new."""
    for number in ours.keys() | theirs.keys():
        found, wanted = ours.get(number, {}), theirs.get(number, {})
        if not (found and wanted):
            rest = {key: value for key, value in (found or wanted).items() if key != "master"}
            assert not any(value.any() for value in rest.values()), (number, rest)
            continue
        assert found.keys() == wanted.keys(), number
        for key, value in wanted.items():
            if found[key].dtype == torch.int16:
                assert not is_exact or torch.equal(found[key], value), (number, key)
            else:
                same(found[key], value, is_exact, f"state {number} {key}")


def make_meshes(world_size: int) -> dict[int, DeviceMesh]:
    """Of the first ranks, by their number; all ranks make all."""
    meshes = {size: DeviceMesh("cpu", list(range(size))) for size in range(1, world_size + 1)}
    if world_size == 4:
        meshes[GRID] = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
    return meshes


def run(rank: int, world_size: int, kind: type[RandomModel], seeds: Sequence[int], length: int, folder: str) -> None:
    """One sequence a seed."""
    meshes = make_meshes(world_size)
    for seed in seeds:
        log: list[str] = []
        try:
            kind(seed, rank, world_size, meshes, Path(folder), log).run(length)
        except Exception as error:
            raise AssertionError(f"seed {seed} of {world_size} ranks: {'; '.join(log)}") from error
