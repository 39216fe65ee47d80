"""Optimizers over ranks beside one process that sees every rank's gradients, for random sequences of operations.

Every rank draws the same operations. The process beside it, the twin, is plain: torch's AdamW, or the optimizers of
``optim_kernels``, on the whole model. It computes the gradients of all ranks, rank by rank, and steps with their
average or sum. All is in fp64, so that what differs by more than the fp32 factors of clipping and averaging is a fault.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from dist_cases import normal, sum_in_rank_order
from dist_loops import delay_gathers
from torch import Tensor, nn
from torch.nn import functional as F

from optim_dist import TritonDistAdamW, TritonDistMuon, TritonDistMuonAdamW, clip_grad_norm_
from optim_kernels import TritonMuon, TritonMuonAdamW

KINDS = ("adamw", "muon", "muon_adamw")
LATE, FROZEN = 4, 5  # layers: of a group that may be added later, and not trained
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class Interruption(Exception):
    """Raised by the user's code inside backward."""


class Net(nn.Module):
    """Layers in any order, a tied embedding, a scalar, and a parameter without elements."""

    def __init__(self, scale_shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.uses_empty = True
        self.embed = nn.Embedding(7, 5)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(6))
        self.scale = nn.Parameter(torch.ones(scale_shape))
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.layers[FROZEN].requires_grad_(False)
        self.double()
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(0.4 * normal(tuple(parameter.shape), 31, number))

    def forward(self, tokens: Tensor, path: list[int], interrupted_at: int | None = None) -> Tensor:
        x = self.embed(tokens)
        for number, place in enumerate(path):
            x = x + torch.tanh(self.layers[place](x))
            if number == interrupted_at:
                x.register_hook(_interrupt)
        loss = F.linear(x * self.scale, self.embed.weight).logsumexp(-1).mean()
        return loss + self.empty.sum() if self.uses_empty else loss


def _interrupt(gradient: Tensor) -> None:
    raise Interruption


def groups_of(kind: str, net: Net, with_late: bool) -> list[list[dict[str, Any]]]:
    """For each optimizer of a kind its groups."""
    late = {id(parameter) for parameter in net.layers[LATE].parameters()}
    named = [(name, p) for name, p in net.named_parameters() if id(p) not in late]
    muon = {"params": [pair for pair in named if ".weight" in pair[0] and "layers" in pair[0]], "lr": 0.02}
    muon |= {"ns_dtype": torch.float64, "weight_decay": 0.1, "momentum": 0.9, "missing_grad": "skip"}
    adamw = {"params": [pair for pair in named if pair not in muon["params"]], "lr": 0.03, "eps": 1e-6}
    if kind == "adamw":
        found = [[{**muon, "lr": 0.02, "amsgrad": True}, adamw]]
        for key in ("ns_dtype", "momentum", "missing_grad"):
            del found[0][0][key]
    elif kind == "muon":
        found = [[muon], [adamw]]
    else:
        found = [[{**muon, "kind": "muon"}, {**adamw, "kind": "adamw"}]]
    if with_late:
        found[-1].append(late_group(kind, net))
    return found


def late_group(kind: str, net: Net) -> dict[str, Any]:
    named = [(f"late.{name}", parameter) for name, parameter in net.layers[LATE].named_parameters()]
    return {"params": named, "lr": 0.05, "eps": 1e-6, **({"kind": "adamw"} if kind == "muon_adamw" else {})}


@dataclass
class Arm:
    """A model and its optimizers."""

    net: Net
    optimizers: list[Any]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    @property
    def trained(self) -> list[nn.Parameter]:
        return [p for optimizer in self.optimizers for p in listed_by(optimizer) if p.requires_grad]


class Session:
    """Ours and the twin, and what can be done to them whoever computes gradients; subclasses say how to ``check``."""

    operations: ClassVar[Sequence[Callable[[Any], bool | None]]]

    def __init__(self, seed: int, rank: int, world_size: int, folder: Path, log: list[str]) -> None:
        self.seed, self.rank, self.world_size, self.folder, self.log = seed, rank, world_size, folder, log
        self.draw = random.Random(f"{world_size}-{seed}")
        self.count = 0
        self.alone = dist.new_group([rank], use_local_synchronization=True)
        self.kind = self.draw.choice(KINDS)
        self.with_late = False
        self.former: list[Any] = []  # optimizers that others took over from, still there
        self.left_out: set[int] = set()  # layers that were frozen when the plan was rebuilt
        net = self.make_net()
        self.ours = Arm(net, self.build(net))
        twin = self.make_twin()
        self.twin = Arm(twin, self.build_twin(twin))
        self.summed: list[Tensor | None] | None = None  # gradients over ranks, clipped
        self.stepped = False  # the gradients were used by a step
        self.dropped = False  # the model has set reduced gradients to None

    def make_net(self) -> Net:
        return Net()

    def make_twin(self) -> Net:
        return Net()

    def check(self) -> None:
        raise NotImplementedError

    def run(self, length: int) -> None:
        while self.count < length:
            operation = self.draw.choice(self.operations)
            place = len(self.log)
            self.say(operation.__name__)
            if operation(self) is False:
                del self.log[place:]
            else:
                self.count += 1
                self.check()
        self.wait()
        self.check()
        self.compare_states()
        for optimizer in self.ours.optimizers:
            optimizer.close()

    # building

    def build(self, net: Net) -> list[Any]:
        draw = self.draw
        self.options: dict[str, Any] = {
            "reducer": draw.choice(["rs", "exact"]),
            "bucket_mb": draw.choice([1e-5, 1e-4, 5e-4, None]),
            "average": draw.random() < 0.8,
            "overlap": draw.random() < 0.8,
            "accumulation_steps": draw.choice([None, None, 1, 2]),
            "max_norm": draw.choice([None, None, 0.05]),
            "skip_nonfinite": draw.random() < 0.3,
            "debug": draw.random() < 0.2,
        }
        with_model = draw.random() < 0.6
        late_gathers = draw.random() < 0.7
        self.say(f"build {self.kind} {self.options} model={with_model}")
        optimizers = self.optimizers(net, **self.options, model=net if with_model else None)
        if late_gathers:
            for optimizer in optimizers:
                delay_gathers(optimizer)
        self.eager = self.options["overlap"] and self.options["accumulation_steps"] is not None
        self.waits_by_itself = not with_model or not self.options["overlap"]
        self.passes = 0  # outside no_sync since the last step
        return optimizers

    def optimizers(self, net: Net, **options: Any) -> list[Any]:
        groups = groups_of(self.kind, net, self.with_late)
        if self.kind == "adamw":
            return [TritonDistAdamW(groups[0], **options)]
        if self.kind == "muon":
            return [TritonDistMuon(groups[0], variant="keller", **options), TritonDistAdamW(groups[1], **options)]
        return [TritonDistMuonAdamW(groups[0], variant="keller", **options)]

    def build_twin(self, net: Net) -> list[Any]:
        groups = groups_of(self.kind, net, self.with_late)
        if self.kind == "adamw":
            return [torch.optim.AdamW(groups[0])]
        if self.kind == "muon":
            return [TritonMuon.keller(groups[0]), torch.optim.AdamW(groups[1])]
        return [TritonMuonAdamW([{"variant": "keller", **group} for group in groups[0]])]

    # what operations need

    def say(self, text: str) -> None:
        self.log.append(text)

    def wait(self) -> None:
        for optimizer in self.ours.optimizers:
            optimizer.wait()

    def put(self, gradients: list[Tensor | None]) -> None:
        for p, gradient in zip(self.twin.net.parameters(), gradients, strict=True):
            p.grad = gradient

    def step_twin(self, scaler: Any = None) -> None:
        for optimizer in self.twin.optimizers:
            gradients = [p.grad for p in listed_by(optimizer) if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
            if self.options["skip_nonfinite"] and not torch.isfinite(norm):
                continue
            if self.options["max_norm"] is not None:
                torch.nn.utils.clip_grads_with_norm_(listed_by(optimizer), self.options["max_norm"], norm)
            optimizer.step() if scaler is None else scaler.step(optimizer)
        self.stepped, self.passes = True, 0

    @property
    def passes_of_step(self) -> int:
        """How many backward passes there are before reductions are launched, if they are under backward."""
        return self.options["accumulation_steps"] or 1

    def clip_ours(self, how: str, limit: float, order: float) -> tuple[list[Tensor], list[list[nn.Parameter]]]:
        """Norms, and the twin's parameters of each."""
        # torch has no maximum of an empty tensor
        theirs = [[p for p in listed_by(optimizer) if p.numel()] for optimizer in self.twin.optimizers]
        if how == "each":
            return [optimizer.clip_grad_norm_(limit, order) for optimizer in self.ours.optimizers], theirs
        ours = self.ours.optimizers if how == "together" else list(chain(*map(listed_by, self.ours.optimizers)))
        return [clip_grad_norm_(ours, limit, order)], [list(chain(*theirs))]

    def thaw(self) -> None:
        """What is frozen when an optimizer is built is not trained later."""
        for arm in (self.ours, self.twin):
            for layer in arm.net.layers[:LATE]:
                layer.requires_grad_(True)
        self.left_out.clear()

    def retire(self, is_closed: bool) -> None:
        """Another optimizer takes over."""
        if is_closed:
            for optimizer in self.ours.optimizers:
                optimizer.close()
        else:
            self.former += self.ours.optimizers

    def replace_optimizers(self) -> None:
        """Others over the same parameters, with or without the state, the former closed or not."""
        self.thaw()
        full, is_fresh, is_closed = self.full_states(), self.draw.random() < 0.3, self.draw.random() < 0.5
        self.say(f"fresh {is_fresh} closed {is_closed}")
        self.retire(is_closed)
        self.ours.optimizers = self.build(self.ours.net)
        for optimizer, state in zip(self.ours.optimizers, full):
            if not is_fresh:
                optimizer.load_full_state_dict(state)
        if is_fresh:
            self.twin.optimizers = self.build_twin(self.twin.net)

    @property
    def num_groups(self) -> int:
        return len(self.ours.optimizers[-1].param_groups)

    def full_states(self) -> list[Any]:
        found = [optimizer.full_state_dict() for optimizer in self.ours.optimizers]
        dist.broadcast_object_list(found, src=0)
        return found

    # operations

    def compare_states(self) -> None:
        for ours, theirs in zip(self.ours.optimizers, self.twin.optimizers, strict=True):
            compare_state(ours.full_state_dict().get("state", {}), theirs)

    def freeze_or_thaw(self) -> bool | None:
        place = self.draw.randrange(1, 4)
        is_trained = not self.ours.net.layers[place].weight.requires_grad
        if place in self.left_out:
            return False
        self.say(f"layer {place} {is_trained}")
        for arm in (self.ours, self.twin):
            arm.net.layers[place].requires_grad_(is_trained)
        return None

    def forget_left_out(self) -> None:
        """The twin gives up the state that ours have dropped."""
        dropped = {id(p) for place in self.left_out for p in self.twin.net.layers[place].parameters()}
        for optimizer in self.twin.optimizers:
            for p in [p for p in optimizer.state if id(p) in dropped]:
                del optimizer.state[p]

    def tell_a_group(self) -> None:
        number, place = self.draw.randrange(9), self.draw.randrange(9)
        changes: dict[str, Any] = {
            "lr": self.draw.choice([0.0, 0.01, torch.tensor(0.02)]),
            "weight_decay": self.draw.choice([0.0, 0.2]),
            "maximize": self.draw.random() < 0.3,
        }
        self.say(str(changes))
        for arm in (self.ours, self.twin):
            optimizer = arm.optimizers[number % len(arm.optimizers)]
            group = optimizer.param_groups[place % len(optimizer.param_groups)]
            group.update(copy.deepcopy(changes))
            if "betas" in group:
                group["betas"] = (0.8, 0.95)
            if "momentum" in group:
                group["momentum"] = 0.7

    def schedule(self) -> None:
        for arm in (self.ours, self.twin):
            for optimizer in arm.optimizers:
                torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9).step()

    def take_part_elsewhere(self) -> None:
        total = torch.full((3,), self.rank + 1.0)
        dist.all_reduce(total)
        assert total.tolist() == [sum(range(self.world_size + 1))] * 3

    def swap_states(self) -> None:
        """Ours go on from theirs, theirs from ours."""
        full = self.full_states()
        for ours, theirs, state in zip(self.ours.optimizers, self.twin.optimizers, full, strict=True):
            ours.load_full_state_dict(copy.deepcopy(theirs.state_dict()))
            theirs.load_state_dict(copy.deepcopy(state))


class Beside(Session):
    """The twin computes the gradients of every rank."""

    def __init__(self, seed: int, rank: int, world_size: int, folder: Path, log: list[str]) -> None:
        super().__init__(seed, rank, world_size, folder, log)
        self.saved: list[Any] = []
        # of each rank, as the twin has computed them
        self.gradients: list[list[Tensor | None]] = [
            [None for _ in self.twin.net.parameters()] for _ in range(world_size)
        ]

    def check(self) -> None:
        """Hyperparameters, gradients that are still a rank's own, and parameters, which may have to be waited for."""
        for ours, theirs in zip(self.ours.optimizers, self.twin.optimizers, strict=True):
            for mine, wanted in zip(ours.param_groups, theirs.param_groups, strict=True):
                assert float(mine["lr"]) == pytest.approx(float(wanted["lr"]))
                assert mine["weight_decay"] == wanted["weight_decay"]
        named = dict(self.ours.net.named_parameters())
        for (name, p), gradient in zip(named.items(), self.gradients[self.rank], strict=True):
            assert (p.grad is None) == (gradient is None), name
            if gradient is not None and not self.reduced:
                close(p.grad, gradient, name)
        if not self.waits_by_itself and self.draw.random() < 0.5:
            return
        if not self.waits_by_itself:
            self.draw.choice([self.wait, self.ours.net.state_dict])()
        for (name, p), theirs in zip(named.items(), self.twin.net.parameters(), strict=True):
            close(p.detach(), theirs.detach(), name)

    @property
    def launched(self) -> bool:
        """Whether reductions may have been launched under backward."""
        return self.eager and self.passes >= self.passes_of_step and self.world_size > 1

    @property
    def reduced(self) -> bool:
        """Whether gradients are no longer each rank's own."""
        return self.launched or self.summed is not None or self.stepped

    def simulate(self, act: Callable[[Arm, int], Any]) -> list[Any]:
        """``act`` on the twin with every rank's gradients in turn."""
        results = []
        for rank, gradients in enumerate(self.gradients):
            self.put(gradients)
            results.append(act(self.twin, rank))
            self.gradients[rank] = [p.grad for p in self.twin.net.parameters()]
        return results

    def on_each_rank(self, act: Callable[[Arm, int], Any]) -> None:
        """``act`` on our model and on the twin; what it returns must be the same."""
        mine = act(self.ours, self.rank)
        wanted = self.simulate(act)[self.rank]
        if mine is not None:
            close(mine, wanted, "result")

    def put_sums(self) -> None:
        """The twin gets what a step sees."""
        if self.summed is None:
            divisor = self.world_size if self.options["average"] else 1
            sums = [sum_in_rank_order(list(each)) for each in zip(*self.gradients, strict=True)]
            self.summed = [None if each is None else each / divisor for each in sums]
        self.put(self.summed)

    def of_rank(self, rank: int) -> random.Random:
        return random.Random(f"{self.seed}-{self.count}-{rank}-{len(self.log)}")

    def loss(self, arm: Arm, draw: random.Random, is_interrupted: bool = False) -> Tensor:
        """Of a batch that leaves out some layers, never the first."""
        tokens = torch.tensor([draw.randrange(7) for _ in range(3)])
        path = [0, *(place for place in range(1, 6) if draw.random() < 0.6)]
        draw.shuffle(path)
        at = len(path) - 1 if self.eager else draw.randrange(len(path))
        return arm.net(tokens, path, at if is_interrupted else None)

    def accumulate(self, arm: Arm, rank: int, scale: float = 1.0) -> Tensor:
        draw = self.of_rank(rank)
        loss = self.loss(arm, draw)
        # Where backward reduces, ranks without any gradient could not tell that others have reductions to give up.
        if self.eager or self.dropped or scale != 1.0 or draw.random() < 0.9:
            (loss * scale).backward()
        return loss.detach()


def listed_by(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def close(found: Tensor, wanted: Tensor, what: str) -> None:
    torch.testing.assert_close(found, wanted, **CLOSE, equal_nan=True, msg=lambda text: f"{what}: {text}")


def compare_state(ours: dict[int, dict[str, Tensor]], optimizer: torch.optim.Optimizer) -> None:
    """A whole state beside torch's; of what has had no gradient torch has none."""
    theirs = optimizer.state_dict()["state"]
    for number, state in ours.items():
        for key, value in state.items():
            if number in theirs:
                close(value.double(), torch.as_tensor(theirs[number][key]).double(), f"state {number} {key}")
            else:
                assert not value.any(), (number, key)
    if ours:
        missing = {number: state for number, state in theirs.items() if number not in ours}
        assert not any(value.any() for state in missing.values() for value in state.values()), missing


def run(rank: int, world_size: int, sequence: Callable[..., Session], seeds: range, length: int, folder: str) -> None:
    """One sequence a seed."""
    for seed in seeds:
        log: list[str] = []
        try:
            sequence(seed, rank, world_size, Path(folder), log).run(length)
        except Exception as error:
            raise AssertionError(f"seed {seed} of {world_size} ranks: {'; '.join(log)}") from error
