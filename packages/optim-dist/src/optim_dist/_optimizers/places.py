"""Where a model has the parameters of its optimizer, which would not step others that are put there later."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from optim_dist._optimizers.entries import Entry
from optim_dist._optimizers.live import live_optimizers


class Places:
    """The attributes of a model's modules that hold planned parameters, and which ones held them at that time.

    Only those of plain parameters: FSDP itself exchanges DTensors for whole parameters and back.
    """

    def __init__(self, model: nn.Module | None, entries: Sequence[Entry]) -> None:
        plain = {id(entry.parameter) for entry in entries if not isinstance(entry.parameter, DTensor)}
        # columns, so that `check` needs no Python code for each parameter
        self._names: list[str] = []
        self._held: list[dict[str, nn.Parameter | None]] = []
        self._keys: list[str] = []
        self._parameters: list[Tensor] = []
        for name, module in () if model is None else model.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in plain:
                    self._names.append(f"{name}.{key}" if name else key)
                    self._held.append(module._parameters)
                    self._keys.append(key)
                    self._parameters.append(parameter)

    def check(self) -> None:
        """Refuse a trained parameter that has taken the place of another, and that no optimizer of this package steps.

        Parameters without a successor may leave the model, as a head does that is needed no more.
        """
        if all(map(is_, map(dict.get, self._held, self._keys), self._parameters)):
            return
        known = {id(p) for optimizer in live_optimizers() for group in optimizer.param_groups for p in group["params"]}
        for name, held, key, parameter in zip(self._names, self._held, self._keys, self._parameters):
            now = held.get(key)
            if now is not None and now is not parameter and now.requires_grad and id(now) not in known:
                raise RuntimeError(
                    f"{name} is another parameter than when the optimizer was built, which does not step it: call "
                    "fully_shard, load_state_dict(assign=True) and the like before, or build a new optimizer"
                )
