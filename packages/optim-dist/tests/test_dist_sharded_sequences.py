"""Random sequences of what users do to optimizers whose parameters are DTensors, some or all of them.

The twin, one plain model in each process, steps with our gradients, put together from all ranks: who computes them
(FSDP2, tensor parallelism, ourselves) does not matter, and sequences turn from one layout to another on their way.
"""

from __future__ import annotations

import copy
import io
import shutil
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dist_cases import mesh_of, normal, sum_in_rank_order
from dist_sequences import Arm, Net, Session, close, late_group, listed_by, run
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from optim_dist import checkpoint
from optim_utils.testing import run_ranks

# FSDP2 of the model, of some layers; tensor parallelism of some layers; any placements, of any part of the model
FSDP, LAYERS, TENSOR, ANY = "fsdp", "fsdp of layers", "tensor", "any"
HYBRID, BOTH, GRID = "hsdp", "fsdp of tensor", "any on a grid"
FORMS = {1: [FSDP, LAYERS, ANY], 4: [FSDP, LAYERS, TENSOR, ANY, HYBRID, BOTH, GRID]}
SHAPE = (1,)  # of the scale: FSDP2 takes no scalars


class ShardedSequence(Session):
    """Runs operations that every rank draws alike."""

    def __init__(self, seed: int, rank: int, world_size: int, folder: Path, log: list[str]) -> None:
        self.saved: list[Any] = []
        super().__init__(seed, rank, world_size, folder, log)

    # building

    def make_net(self) -> Net:
        """A model in a form that is drawn."""
        net, draw = Net(SHAPE), self.draw
        self.form = draw.choice(FORMS.get(self.world_size, [FSDP, LAYERS, TENSOR, ANY]))
        self.say(f"form {self.form}")
        self.is_exact = True  # forward passes are those of the twin
        net.uses_empty = self.form not in (FSDP, HYBRID, BOTH)  # FSDP2 cannot reduce a gradient without elements
        if self.form in (FSDP, HYBRID, LAYERS):
            mesh = mesh_of(2, 2, names=("replicate", "shard")) if self.form == HYBRID else mesh_of(self.world_size)
            options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": draw.random() < 0.5}
            if self.form != LAYERS and draw.random() < 0.3:
                # torch does not accumulate without sync where gradients are reduced in another dtype
                options["mp_policy"] = MixedPrecisionPolicy(torch.float32, torch.float32)
                self.is_exact = False
            self.say(f"{options}")
            for layer in draw.sample(list(net.layers), draw.randrange(1, 5)):
                fully_shard(layer, **options)
            if self.form != LAYERS:
                fully_shard(net, **options)
        elif self.form in (TENSOR, BOTH):
            mesh = mesh_of(2, 2, names=("dp", "tp")) if self.form == BOTH else mesh_of(self.world_size, names=("tp",))
            styles = {
                "layers.0": ColwiseParallel(output_layouts=Replicate()),
                "layers.1": RowwiseParallel(input_layouts=Replicate()),
                "layers.4": ColwiseParallel(output_layouts=Replicate()),
            }
            parallelize_module(net, mesh["tp"], styles)
            if self.form == BOTH:
                fully_shard(net, mesh=mesh["dp"])
        else:
            mesh = mesh_of(2, 2) if self.form == GRID else mesh_of(self.world_size)
            share = draw.choice([0.5, 0.9, 1.0])
            for module in net.modules():
                for name, p in list(module.named_parameters(recurse=False)):
                    choices: list[Placement] = [Replicate(), *map(Shard, range(p.ndim))]
                    placements = [draw.choice(choices) for _ in range(mesh.ndim)]
                    if draw.random() < share:
                        cut = distribute_tensor(p.detach(), mesh, placements)
                        setattr(module, name, nn.Parameter(cut, requires_grad=p.requires_grad))
        self.params = dict(net.named_parameters())
        plain = {name for name, p in self.params.items() if not isinstance(p, DTensor)}
        # the gradients of this rank, which buckets replace by sums
        self.mine: dict[str, Tensor | None] = dict.fromkeys(plain)
        for name in plain:
            if self.params[name].requires_grad:
                self.params[name].register_hook(lambda gradient, name=name: self.note(name, gradient))
        return net

    def make_twin(self) -> Net:
        return Net(SHAPE)

    def note(self, name: str, gradient: Tensor) -> None:
        before = self.mine[name]
        self.mine[name] = gradient.detach().clone() if before is None else before + gradient

    @property
    def is_by_hand(self) -> bool:
        return self.form in (ANY, GRID)

    @property
    def has_buckets(self) -> bool:
        """Gradients that are reduced stay reduced."""
        return bool(self.mine) and self.world_size > 1

    def settle(self) -> None:
        """FSDP2 leaves whole parameters in a model that was evaluated."""
        for module in self.ours.net.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def check(self) -> None:
        if not self.waits_by_itself:
            if self.draw.random() < 0.5:
                return
            self.wait()
        found = []
        for (name, p), theirs in zip(self.params.items(), self.twin.net.parameters(), strict=True):
            found.append(whole(p))
            close(found[-1], theirs.detach(), name)
            for key, value in self.state_of(p).items():
                if isinstance(p, DTensor) and value.shape == p.shape and p.ndim:
                    assert isinstance(value, DTensor), (name, key)
                    assert value.placements == p.placements, (name, key)
                    assert value.to_local().shape == p.to_local().shape, (name, key)
        bits = torch.cat([each.reshape(-1) for each in found])
        first = bits.clone()
        dist.broadcast(first, 0)
        assert torch.equal(bits, first), "replicas differ"

    def state_of(self, p: Tensor) -> dict[str, Any]:
        return next((o.state[p] for o in self.ours.optimizers if p in o.state), {})

    # gradients

    @property
    def may_accumulate(self) -> bool:
        """Whether another backward pass may come."""
        if self.summed is not None:
            return False
        if not self.has_buckets:
            return True
        return not self.stepped and not (self.eager and self.passes >= self.passes_of_step)

    def put_sums(self) -> None:
        """The twin gets what a step sees."""
        if self.summed is None:
            gathered: list[Any] = [None] * self.world_size
            dist.all_gather_object(gathered, self.mine)
            divisor = self.world_size if self.options["average"] else 1
            self.summed = []
            for name, p in self.params.items():
                if name in self.mine:
                    found = sum_in_rank_order([each[name] for each in gathered])
                    self.summed.append(None if found is None else found / divisor)
                else:
                    self.summed.append(None if p.grad is None else whole(p.grad))
        self.put(self.summed)

    def loss(self, arm: Arm, scale: float = 1.0) -> Tensor:
        """Of a batch of this rank's own, unless ranks share the work on one, through layers that are drawn for all."""
        shared = {TENSOR: 0, BOTH: self.rank // 2}.get(self.form, self.rank)
        draw, of_all = self.random_of(shared), self.random_of(-1)
        tokens = torch.tensor([draw.randrange(7) for _ in range(3)])
        path = [0, *(place for place in range(1, 6) if of_all.random() < 0.6)]
        of_all.shuffle(path)
        return arm.net(tokens, path).sum() * scale

    def random_of(self, rank: int) -> Any:
        return type(self.draw)(f"{self.seed}-{self.count}-{rank}-{len(self.log)}")

    def accumulate(self, scale: float = 1.0) -> Tensor:
        if self.is_by_hand:
            self.add_by_hand(scale)
            return torch.zeros(())
        loss = self.loss(self.ours)
        (loss * scale).backward()
        return loss.detach()

    def add_by_hand(self, scale: float = 1.0, share: float = 0.8) -> None:
        """Gradients of DTensors exist on all ranks alike, those of plain parameters need not."""
        self.wait()  # for what is used without its module's forward
        draw, of_all, losses = self.random_of(self.rank), self.random_of(-1), []
        for number, p in enumerate(self.params.values()):
            how, seed, is_there = of_all.choice(["placed", "placed", "sum"]), of_all.randrange(9999), of_all.random()
            if isinstance(p, DTensor):
                if is_there > share or not p.requires_grad:
                    continue
                value = scale * normal(tuple(p.shape), seed, number).double()
                if how == "sum" and p.grad is None and self.is_by_hand:
                    part = value * (0.25 if self.rank else 1 - 0.25 * (self.world_size - 1))
                    p.grad = DTensor.from_local(part, p.device_mesh, [Partial()] * p.device_mesh.ndim)
                elif p.grad is None:
                    p.grad = cut(value, p)
                else:
                    p.grad = p.grad.redistribute(placements=p.placements) + cut(value, p)
            elif p.requires_grad and (draw.random() < share or self.eager):
                # where backward reduces, a rank that has no gradient at all could not drop those of others
                losses.append((p * (scale * normal(tuple(p.shape), draw.randrange(9999), number).double())).sum())
        if losses:
            torch.stack(losses).sum().backward()  # through autograd, to which optimizers may listen

    def backward(self) -> bool | None:
        if not self.may_accumulate:
            return False
        self.accumulate()
        self.summed, self.passes, self.dropped, self.stepped = None, self.passes + 1, False, False
        return None

    def backward_without_sync(self) -> bool | None:
        if not self.may_accumulate:
            return False
        modules = [module for module in self.ours.net.modules() if isinstance(module, FSDPModule)]
        for module in modules:
            module.set_requires_gradient_sync(False, recurse=False)
        with ExitStack() as stack:
            for optimizer in self.ours.optimizers:
                stack.enter_context(optimizer.no_sync())
            self.accumulate()
        for module in modules:
            module.set_requires_gradient_sync(True, recurse=False)
        if self.options["overlap"] and not self.eager:
            self.eager, self.passes = True, 0
        self.summed, self.dropped, self.stepped = None, False, False
        return None

    def edit_gradients(self) -> bool | None:
        """By hand beside what backward has left."""
        if not self.may_accumulate or self.dropped or (self.has_buckets and self.eager):
            return False
        self.add_by_hand(share=0.3)
        if self.options["skip_nonfinite"] and self.draw.random() < 0.3:
            self.say("infinite")
            p = self.draw.choice([p for p in self.ours.trained if p.numel()])
            if isinstance(p, DTensor):
                p.grad = cut(torch.full(p.shape, float("inf"), dtype=p.dtype), p)
        self.summed = None
        return None

    def zero_grad(self) -> bool | None:
        how, none = self.draw.choice(["optimizer", "model", "parameters"]), self.draw.random() < 0.7
        is_launched = self.has_buckets and self.eager and self.passes >= self.passes_of_step
        is_underway = (is_launched or self.summed is not None) and not self.stepped
        has_begun = is_underway or (self.has_buckets and self.eager and self.passes > 0 and not self.stepped)
        if how != "optimizer" and ((has_begun and not none) or (is_underway and how == "parameters")):
            return False
        self.say(f"{how} {none}")
        self.settle()
        if how == "optimizer":
            self.ours.zero_grad(none)
            touched = {id(p) for o in self.ours.optimizers for p in listed_by(o)}
        else:
            touched = {id(p) for p in self.params.values()}
            if how == "model":
                self.ours.net.zero_grad(none)
            for p in self.params.values():
                if how == "parameters" and none:
                    p.grad = None
                elif how == "parameters" and p.grad is not None:
                    p.grad.zero_()
        for name, gradient in self.mine.items():
            if id(self.params[name]) in touched:
                self.mine[name] = None if none or gradient is None else torch.zeros_like(gradient)
        self.dropped = self.has_buckets and (self.dropped or is_underway) and how != "optimizer"
        self.summed, self.stepped, self.passes = None, False, 0
        return None

    def zero_grad_of_all(self) -> None:
        self.settle()
        self.ours.zero_grad()
        self.ours.net.zero_grad()
        self.mine = dict.fromkeys(self.mine)
        self.summed, self.stepped, self.passes, self.dropped = None, False, 0, False

    def freeze_or_thaw(self) -> bool | None:
        if not self.is_exact:
            return False  # what is frozen at the first forward pass under mixed precision FSDP2 cannot train later
        self.settle()
        super().freeze_or_thaw()
        return None

    # steps

    def clip(self) -> bool | None:
        if self.stepped or self.dropped:
            return False
        order, limit = self.draw.choice([2.0, 1.0, 3.0, 0.0, float("inf")]), self.draw.choice([0.05, 1e6, float("inf")])
        how = "each" if self.options["skip_nonfinite"] else self.draw.choice(["each", "together", "parameters"])
        is_first = self.summed is None
        if order == 0 and not is_first:
            return False  # it stays as it was when gradients are scaled, so that in place they are scaled again
        self.say(f"{how} {order} {limit}")
        self.put_sums()
        found, theirs = self.clip_ours(how, limit, order)
        wanted = [norm_of(parameters, order) for parameters in theirs]
        for parameters, norm in zip(theirs, wanted):
            torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        if is_first:
            close(torch.stack(found).double(), torch.stack(wanted), "norm")
        return None

    def clip_by_torch(self) -> bool | None:
        if self.has_buckets or self.summed is not None or self.form == BOTH:  # torch adds no norms of two meshes
            return False
        torch.nn.utils.clip_grad_norm_([p for p in self.ours.trained if isinstance(p, DTensor) and p.numel()], 0.1)
        return None

    def step(self) -> bool | None:
        if self.stepped or self.dropped:
            return False
        self.put_sums()
        for optimizer in self.ours.optimizers:
            optimizer.step()
        self.finish_step()
        return None

    def finish_step(self, scaler: Any = None) -> None:
        self.step_twin(scaler)
        self.stepped = self.has_buckets
        if not self.has_buckets:
            self.summed = None  # gradients are there as they were

    def step_with_closure(self) -> bool | None:
        if self.dropped:
            return False

        def closure() -> Tensor:
            self.zero_grad_of_all()
            return self.accumulate()

        first, *others = self.ours.optimizers
        first.step(closure)
        for optimizer in others:
            optimizer.step()
        self.summed = None
        self.put_sums()
        self.finish_step()
        return None

    def scaled_step(self) -> bool | None:
        """By a ``GradScaler``, perhaps with an infinity on one rank; it takes no mixture of DTensors and others."""
        if self.dropped or any(len({isinstance(p, DTensor) for p in listed_by(o)}) > 1 for o in self.ours.optimizers):
            return False
        draw = self.draw
        scale, poisoned = draw.choice([2.0, 1024.0]), draw.choice([None, None, *range(self.world_size)])
        if self.is_by_hand or self.form in (TENSOR, BOTH):
            poisoned = None if poisoned is None else self.rank
        unscaled = not (self.eager and self.has_buckets) and draw.random() < 0.5
        self.say(f"scale {scale} poisoned {poisoned is not None} unscaled {unscaled}")
        self.zero_grad_of_all()
        ours, theirs = (torch.amp.GradScaler("cpu", init_scale=scale) for _ in range(2))
        for scaler in (ours, theirs):
            scaler.scale(torch.zeros(()))
        for _ in range(self.passes_of_step):
            self.say("pass")
            self.accumulate(float("inf") if self.rank == poisoned else scale)
        self.put_sums()
        if unscaled:
            for optimizer in self.ours.optimizers:
                ours.unscale_(optimizer)
        for optimizer in self.ours.optimizers:
            ours.step(optimizer)
        for optimizer in self.twin.optimizers:
            theirs.unscale_(optimizer)
        self.finish_step(theirs)
        self.zero_grad_of_all()
        return None

    # groups

    def add_a_group(self) -> bool | None:
        if (
            self.with_late
            or ((self.summed is not None or self.eager) and not self.stepped)
            or self.passes
            or self.dropped
        ):
            return False
        self.with_late = True
        self.settle()
        for arm in (self.ours, self.twin):
            arm.optimizers[-1].add_param_group(late_group(self.kind, arm.net))
        return None

    # what reads

    def evaluate(self) -> bool | None:
        if self.is_by_hand:
            return False
        self.wait()
        # FSDP2 reads what an earlier evaluation has left whole, whatever optimizer has stepped since
        self.settle()
        with torch.no_grad():
            found = [self.loss(arm) for arm in (self.ours, self.twin)]
        if self.is_exact:
            close(*found, "evaluation")
        return None

    # state out and in

    def change_parameters(self) -> None:
        self.wait()
        with torch.no_grad():
            for p in chain(self.params.values(), self.twin.net.parameters()):
                p.mul_(0.9)

    def save(self) -> None:
        file = io.BytesIO()
        torch.save([self.ours.net.state_dict(), [o.state_dict() for o in self.ours.optimizers]], file)
        theirs = copy.deepcopy([self.twin.net.state_dict(), [o.state_dict() for o in self.twin.optimizers]])
        self.saved.append(
            (file, theirs, self.full_states(), self.ours.net, [o.plan.hash for o in self.ours.optimizers])
        )

    def load(self) -> bool | None:
        saved = [each for each in self.saved if each[3] is self.ours.net]
        found = [entry for entry in saved if len(entry[1][1][-1]["param_groups"]) == self.num_groups]
        if not found:
            return False
        file, theirs, full, _, hashes = self.draw.choice(found)
        file.seek(0)
        net, states = torch.load(file, weights_only=False)
        self.ours.net.load_state_dict(net)
        is_same = hashes == [o.plan.hash for o in self.ours.optimizers] and self.draw.random() < 0.7
        for optimizer, state, whole_state in zip(self.ours.optimizers, states, full, strict=True):
            optimizer.load_state_dict(state) if is_same else optimizer.load_full_state_dict(whole_state)
        self.twin.net.load_state_dict(theirs[0])
        for optimizer, state in zip(self.twin.optimizers, theirs[1], strict=True):
            optimizer.load_state_dict(copy.deepcopy(state))
        self.compare_states()
        return None

    def build_anew(self) -> bool | None:
        if self.dropped:
            return False
        self.zero_grad_of_all()
        self.replace_optimizers()
        return None

    def change_form(self) -> bool | None:
        """Through a checkpoint into another model, which lies otherwise."""
        if self.dropped:
            return False
        self.zero_grad_of_all()
        self.thaw()
        before, params = self.ours, self.params
        path = self.folder / f"{self.seed}-{self.count}"
        # one process has no state before the first step, and torch makes one by a step
        how = self.draw.choice(["ours", "whole", "torch's"][: 2 if self.world_size == 1 else 3])
        self.say(how)
        self.settle()
        net = self.make_net()
        with torch.no_grad():
            for p in net.parameters():
                p.zero_()
        after = Arm(net, self.build(net))
        if how == "ours":
            for number, (former, optimizer) in enumerate(zip(before.optimizers, after.optimizers)):
                checkpoint.save(path / f"{number}", before.net, former, extra=self.count)
                assert checkpoint.load(path / f"{number}", net, optimizer) == self.count
        elif how == "torch's":
            for former, optimizer in zip(before.optimizers, after.optimizers):
                for theirs, mine in zip(former.param_groups, optimizer.param_groups):
                    if isinstance(theirs["lr"], Tensor):  # torch loads no tensor where a number was
                        mine["lr"] = torch.zeros(())
            dcp.save(state_of_all(before), checkpoint_id=path)
            state = state_of_all(after)
            dcp.load(state, checkpoint_id=path)
            net.load_state_dict(state["model"])
            set_optimizer_state_dict(net, after.optimizers, state["optim"])
        else:
            full = self.full_states()
            self.wait()  # for the former's parameters, of which no hook sees that they are read
            with torch.no_grad():
                for p, former in zip(net.parameters(), params.values(), strict=True):
                    value = whole(former)
                    p.copy_(cut(value, p) if isinstance(p, DTensor) else value)
            for optimizer, state in zip(after.optimizers, full):
                optimizer.load_full_state_dict(state)
        self.ours = before
        self.retire(self.draw.random() < 0.5)
        self.ours = after
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
        self.compare_states()
        return None


def state_of_all(arm: Arm) -> dict[str, Any]:
    return {"model": arm.net.state_dict(), "optim": get_optimizer_state_dict(arm.net, arm.optimizers)}


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def cut(value: Tensor, like: DTensor) -> DTensor:
    """A whole tensor, the same on every rank, as ``like`` lies."""
    if any(type(placement).__name__ == "_StridedShard" for placement in like.placements):
        replicated = DTensor.from_local(value, like.device_mesh, [Replicate()] * like.device_mesh.ndim)
        return replicated.redistribute(placements=like.placements)
    return distribute_tensor(value, like.device_mesh, like.placements)


def norm_of(parameters: list[nn.Parameter], order: float) -> Tensor:
    """Of order 0 the number of elements that are not zero, where torch takes it of the tensors' norms."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    return torch.linalg.vector_norm(torch.cat([each.reshape(-1) for each in gradients]), order)


ShardedSequence.operations = [
    *[ShardedSequence.backward] * 5,
    *[ShardedSequence.step] * 5,
    *[ShardedSequence.zero_grad] * 4,
    *[ShardedSequence.backward_without_sync, ShardedSequence.edit_gradients, ShardedSequence.clip] * 2,
    ShardedSequence.clip_by_torch,
    ShardedSequence.step_with_closure,
    ShardedSequence.scaled_step,
    ShardedSequence.freeze_or_thaw,
    ShardedSequence.tell_a_group,
    ShardedSequence.schedule,
    ShardedSequence.add_a_group,
    ShardedSequence.evaluate,
    ShardedSequence.take_part_elsewhere,
    ShardedSequence.compare_states,
    ShardedSequence.change_parameters,
    ShardedSequence.save,
    ShardedSequence.load,
    ShardedSequence.swap_states,
    ShardedSequence.build_anew,
    ShardedSequence.change_form,
]


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "seeds"), [(1, range(2)), (2, range(2)), (3, range(1)), (4, range(1))])
def test_sharded_sequences(world_size: int, seeds: range, tmp_path: Path) -> None:
    run_ranks(run, world_size, ShardedSequence, seeds, 20, str(tmp_path), timeout=120)


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("first", range(1000, 1200, 20))
def test_many_sharded_sequences(world_size: int, first: int, tmp_path: Path) -> None:
    run_ranks(run, world_size, ShardedSequence, range(first, first + 20), 40, str(tmp_path), timeout=400)
