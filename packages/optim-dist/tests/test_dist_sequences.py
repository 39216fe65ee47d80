"""Random sequences of what users do to optimizers between steps: over ranks as in one process, after each of them.

An operation is a method; one that makes no sense at the moment returns False and has done nothing.
"""

from __future__ import annotations

import copy
import io
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_cases import normal
from dist_peers import hold_copies, share_host_memory
from dist_sequences import LATE, Arm, Beside, Interruption, Net, close, compare_state, late_group, run
from torch import Tensor

from optim_dist import checkpoint
from optim_utils.testing import run_ranks


class PlainSequence(Beside):
    """Runs operations that every rank draws alike, with data of its own."""

    # gradients

    def backward(self) -> bool | None:
        if self.reduced or (self.eager and self.passes >= self.passes_of_step):
            return False
        self.on_each_rank(self.accumulate)
        self.passes += 1
        self.dropped = False
        return None

    def backward_without_sync(self) -> bool | None:
        if self.reduced or (self.eager and self.passes >= self.passes_of_step):
            return False
        with ExitStack() as stack:
            for optimizer in self.ours.optimizers:
                stack.enter_context(optimizer.no_sync())
            self.on_each_rank(self.accumulate)
        if self.options["overlap"] and not self.eager:
            self.eager, self.passes = True, 0
        self.dropped = False
        return None

    def interrupted_backward(self) -> bool | None:
        # a rank that gets no gradient could not tell that others have reductions to give up
        if self.reduced or self.dropped or (self.eager and self.passes):
            return False

        def act(arm: Arm, rank: int) -> None:
            with pytest.raises(Interruption):
                self.loss(arm, self.of_rank(rank), is_interrupted=True).backward()

        self.on_each_rank(act)
        if self.eager:
            self.passes = self.passes_of_step
        self.dropped = False
        return None

    def zero_grad(self) -> bool | None:
        how, none = self.draw.choice(["optimizer", "model", "parameters"]), self.draw.random() < 0.7
        is_underway = (self.launched or self.summed is not None) and not self.stepped
        # what only writes zeros is no end of a step that has begun to be reduced, or to count its passes
        has_begun = is_underway or (self.eager and self.passes > 0 and not self.stepped)
        if how != "optimizer" and ((has_begun and not none) or (is_underway and how == "parameters")):
            return False
        self.say(f"{how} {none}")

        def act(arm: Arm, rank: int) -> None:
            if how == "optimizer":
                arm.zero_grad(none)
            elif how == "model":
                arm.net.zero_grad(none)
            else:
                for p in arm.net.parameters():
                    if none:
                        p.grad = None
                    elif p.grad is not None:
                        p.grad.zero_()

        self.on_each_rank(act)
        self.dropped = (self.dropped or is_underway) and how != "optimizer"
        self.summed, self.stepped, self.passes = None, False, 0
        return None

    def edit_gradients(self) -> bool | None:
        if self.reduced or self.dropped or (self.eager and self.passes):
            return False
        kinds = ["keep", "clone", "none", "half", "new", "gaps", *(["inf"] if self.options["skip_nonfinite"] else [])]

        def act(arm: Arm, rank: int) -> None:
            draw = self.of_rank(rank)
            for number, p in enumerate(arm.trained):
                how, value = draw.choice(kinds), normal(tuple(p.shape), draw.randrange(9999), number).double()
                if how == "none":
                    p.grad = None
                elif how == "new":
                    p.grad = value
                elif how == "gaps":
                    p.grad = torch.stack((value, value), -1)[..., 0]
                elif how == "inf" and p.numel() and draw.random() < 0.1:
                    p.grad = torch.full_like(p, float("inf"))
                elif how == "clone" and p.grad is not None:
                    p.grad = p.grad.clone()
                elif how == "half" and p.grad is not None:
                    p.grad = p.grad * 0.5

        self.on_each_rank(act)
        return None

    # steps

    def clip(self) -> bool | None:
        if self.stepped or self.dropped:
            return False
        # torch adds 1e-6 to the norm, so that to clip again takes more off, of small limits much
        order, limit = self.draw.choice([2.0, 1.0, 3.0, float("inf")]), self.draw.choice([0.05, 0.1, 1e6, float("inf")])
        how = self.draw.choice(["each", "together", "parameters"])
        if self.options["skip_nonfinite"]:
            how = "each"  # else what is infinite in one optimizer's gradients makes the others skip too
        self.say(f"{how} {order} {limit}")
        is_first = self.summed is None
        self.put_sums()
        found, theirs = self.clip_ours(how, limit, order)
        wanted = [torch.nn.utils.clip_grad_norm_(parameters, limit, order) for parameters in theirs]
        if is_first:
            close(torch.stack(found).double(), torch.stack([norm.double() for norm in wanted]), "norm")
        return None

    def step(self) -> bool | None:
        if self.stepped or self.dropped:
            return False
        for optimizer in self.ours.optimizers:
            optimizer.step()
        self.put_sums()
        self.step_twin()
        return None

    def step_with_closure(self) -> bool | None:
        if self.dropped:
            return False

        def closure(arm: Arm, rank: int) -> Tensor:
            arm.zero_grad()
            return self.accumulate(arm, rank)

        first, *others = self.ours.optimizers
        mine = first.step(lambda: closure(self.ours, self.rank))
        for optimizer in others:
            optimizer.step()
        wanted = self.simulate(closure)[self.rank]
        close(mine, wanted, "loss")
        self.summed = None
        self.put_sums()
        self.step_twin()
        return None

    def scaled_step(self) -> bool | None:
        """By a ``GradScaler``, perhaps with an infinity on one rank."""
        if self.dropped:
            return False
        draw = self.draw
        scale, poisoned = draw.choice([2.0, 1024.0]), draw.choice([None, None, *range(self.world_size)])
        passes = self.passes_of_step
        unscaled = not (self.eager and self.world_size > 1) and draw.random() < 0.5
        self.say(f"scale {scale} poisoned {poisoned} unscaled {unscaled}")
        self.zero_grad_of_all()
        scalers = [torch.amp.GradScaler("cpu", init_scale=scale) for _ in range(2)]
        for scaler in scalers:
            scaler.scale(torch.zeros(()))
        for _ in range(passes):
            self.say("pass")
            self.on_each_rank(lambda arm, rank: self.accumulate(arm, rank, float("inf") if rank == poisoned else scale))
        ours, theirs = scalers
        if unscaled:
            for optimizer in self.ours.optimizers:
                ours.unscale_(optimizer)
        for optimizer in self.ours.optimizers:
            ours.step(optimizer)
        self.put_sums()
        for optimizer in self.twin.optimizers:
            theirs.unscale_(optimizer)
        self.step_twin(theirs)
        return None

    def zero_grad_of_all(self) -> None:
        self.on_each_rank(lambda arm, rank: arm.zero_grad())
        self.summed, self.stepped, self.passes = None, False, 0

    def forget_zero_grad(self) -> bool | None:
        """A second backward pass on top of sums: refused by every rank that has some."""
        if self.world_size == 1 or not self.stepped:
            return False
        # the late layer may have come after the step, when its gradient was there already
        late = {id(p) for p in self.ours.net.layers[LATE].parameters()}
        trained = {id(p) for p in self.ours.trained} - late
        counted = list(self.ours.net.parameters())
        if not all(
            any(g is not None and id(p) in trained and p.numel() for p, g in zip(counted, each))
            for each in self.gradients
        ):
            return False
        with pytest.raises(RuntimeError, match="arrived after its bucket was reduced"):
            self.ours.net(torch.arange(7), [0, 1, 2, 3, LATE]).backward()
        self.ours.net.layers[LATE].zero_grad()
        self.twin.net.layers[LATE].zero_grad()
        self.on_each_rank(lambda arm, rank: arm.net.zero_grad())
        self.zero_grad_of_all()
        return None

    # options and groups

    def add_a_group(self) -> bool | None:
        if self.with_late or (self.reduced and not self.stepped) or self.passes or self.dropped:
            return False
        self.with_late = True
        for arm in (self.ours, self.twin):
            arm.optimizers[-1].add_param_group(late_group(self.kind, arm.net))
        return None

    # what reads

    def evaluate(self) -> None:
        mode = self.draw.choice([torch.no_grad, torch.inference_mode])
        with mode():
            found = [self.loss(arm, self.of_rank(0)) for arm in (self.ours, self.twin)]
        close(*found, "evaluation")

    def copy_the_model(self) -> None:
        other = copy.deepcopy(self.ours.net)
        for left, right in zip(other.parameters(), self.twin.net.parameters(), strict=True):
            close(left.detach(), right.detach(), "copy")
        other.zero_grad()
        other(torch.arange(7), [0, 1, LATE]).backward()

    # state out and in

    def change_parameters(self) -> None:
        self.wait()
        for arm in (self.ours, self.twin):
            with torch.no_grad():
                for p in arm.net.parameters():
                    p.mul_(0.9)

    def save(self) -> None:
        file = io.BytesIO()
        torch.save([self.ours.net.state_dict(), [o.state_dict() for o in self.ours.optimizers]], file)
        theirs = copy.deepcopy([self.twin.net.state_dict(), [o.state_dict() for o in self.twin.optimizers]])
        self.saved.append((file, theirs, self.full_states(), [o.plan.hash for o in self.ours.optimizers]))

    def load(self) -> bool | None:
        found = [entry for entry in self.saved if len(entry[1][1][-1]["param_groups"]) == self.num_groups]
        if not found:
            return False
        file, theirs, full, hashes = self.draw.choice(found)
        file.seek(0)
        net, states = torch.load(file, weights_only=True)
        self.ours.net.load_state_dict(net)
        is_same = hashes == [o.plan.hash for o in self.ours.optimizers] and self.draw.random() < 0.7
        for optimizer, state, whole in zip(self.ours.optimizers, states, full, strict=True):
            optimizer.load_state_dict(state) if is_same else optimizer.load_full_state_dict(whole)
        self.twin.net.load_state_dict(theirs[0])
        for optimizer, state in zip(self.twin.optimizers, theirs[1], strict=True):
            optimizer.load_state_dict(copy.deepcopy(state))
        self.forget_left_out()
        self.compare_states()
        return None

    def checkpoint(self) -> bool | None:
        """To one rank and back."""
        if self.left_out:
            return False  # of an optimizer that trains fewer
        self.zero_grad_of_all()
        net = Net()
        alone = self.optimizers(net, process_group=self.alone)
        path = self.folder / f"{self.seed}-{self.count}"
        for number, (ours, other, theirs) in enumerate(zip(self.ours.optimizers, alone, self.twin.optimizers)):
            checkpoint.save(path / f"all-{number}", self.ours.net, ours, extra=self.count)
            assert checkpoint.load(path / f"all-{number}", net, other) == self.count
            compare_state(other.full_state_dict()["state"], theirs)
            if self.rank == 0:
                checkpoint.save(path / f"one-{number}", net, other)
            dist.barrier()
            checkpoint.load(path / f"one-{number}", self.ours.net, ours)
            other.close()
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(path)
        return None

    def rebuild_plans(self) -> None:
        """With other layers frozen than before perhaps, and in another order."""
        self.zero_grad_of_all()
        toggled = [place for place in range(1, 4) if self.draw.random() < 0.3]
        order = [name for name, _ in self.ours.net.named_parameters()]
        order += [name.replace(f"layers.{LATE}", "late") for name in order if f"layers.{LATE}" in name]
        self.draw.shuffle(order)
        given = order if self.draw.random() < 0.5 else None
        self.say(f"{toggled} {given}")
        for place in toggled:
            for arm in (self.ours, self.twin):
                for p in arm.net.layers[place].parameters():
                    p.requires_grad_(not p.requires_grad)
        self.left_out = {place for place in range(1, 4) if not self.ours.net.layers[place].weight.requires_grad}
        self.forget_left_out()
        if self.left_out:
            # who trains what is left out would be taken for its optimizer
            for optimizer in self.former:
                optimizer.close()
            self.former.clear()
        for optimizer in self.ours.optimizers:
            optimizer.rebuild_plan(given)
        self.compare_states()

    def build_anew(self) -> bool | None:
        if self.dropped:
            return False
        was_launched = self.launched
        self.replace_optimizers()
        if was_launched or self.reduced:
            self.zero_grad_of_all()
        return None


PlainSequence.operations = [
    *[PlainSequence.backward] * 5,
    *[PlainSequence.step] * 5,
    *[PlainSequence.zero_grad] * 5,
    *[PlainSequence.backward_without_sync, PlainSequence.edit_gradients, PlainSequence.clip] * 2,
    PlainSequence.interrupted_backward,
    PlainSequence.step_with_closure,
    PlainSequence.scaled_step,
    PlainSequence.forget_zero_grad,
    PlainSequence.freeze_or_thaw,
    PlainSequence.tell_a_group,
    PlainSequence.schedule,
    PlainSequence.add_a_group,
    PlainSequence.evaluate,
    PlainSequence.copy_the_model,
    PlainSequence.take_part_elsewhere,
    PlainSequence.compare_states,
    PlainSequence.change_parameters,
    PlainSequence.save,
    PlainSequence.load,
    PlainSequence.swap_states,
    PlainSequence.checkpoint,
    PlainSequence.build_anew,
    *[PlainSequence.rebuild_plans] * 2,
]


class CopiedSequence(PlainSequence):
    """Between ranks that see each other's memory, where copies come and go as late as they may."""

    def optimizers(self, net: Net, **options: Any) -> list[Any]:
        share_host_memory()
        found = super().optimizers(net, **{**options, "transport": "symm"})
        if self.world_size > 1:
            for optimizer in found:
                hold_copies(optimizer, pytest.MonkeyPatch())
        return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sequences(world_size: int, tmp_path: Path) -> None:
    run_ranks(run, world_size, PlainSequence, range(3), 25, str(tmp_path), timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_sequences_by_copies(world_size: int, tmp_path: Path) -> None:
    run_ranks(run, world_size, CopiedSequence, range(3), 25, str(tmp_path), timeout=120)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [PlainSequence, CopiedSequence])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("first", range(1000, 1300, 20))
def test_many_sequences(kind: type[PlainSequence], world_size: int, first: int, tmp_path: Path) -> None:
    run_ranks(run, world_size, kind, range(first, first + 20), 40, str(tmp_path), timeout=240)
