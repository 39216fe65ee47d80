"""Where a model has the parameters of its optimizer, which would not step others that are put there later."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from optim_dist._optimizers.entries import Entry
from optim_dist._optimizers.live import live_optimizers


class Places:
    """The names under which a model has planned parameters, and what its modules held on the way there at that time.

    Only those of plain parameters: FSDP itself exchanges DTensors for whole parameters and back.
    """

    def __init__(self, model: nn.Module | None, entries: Sequence[Entry]) -> None:
        self._model = model
        plain = {id(entry.parameter) for entry in entries if not isinstance(entry.parameter, DTensor)}
        self._planned: dict[str, Tensor] = {}
        # columns, so that `check` needs no Python code for each parameter: attributes of modules, and what they hold
        self._dicts: list[dict[str, Any]] = []
        self._keys: list[str] = []
        above: set[int] = set()  # modules with such parameters
        for path, module in () if model is None else model.named_modules():
            if any(id(parameter) in plain for parameter in module.parameters()):
                above.add(id(module))
                self._note(module._parameters, plain)
                self._planned |= {
                    f"{path}.{key}" if path else key: parameter
                    for key, parameter in module._parameters.items()
                    if id(parameter) in plain
                }
        for module in () if model is None else model.modules():
            self._note(module._modules, above)
        self._held = self._now()

    def check(self) -> None:
        """Refuse a trained parameter that has taken the place of another, and that no optimizer of this package steps.

        Parameters without a successor may leave the model, as a head does that is needed no more.
        """
        now = self._now()
        if self._model is None or all(map(is_, now, self._held)):
            return
        known = {id(p) for optimizer in live_optimizers() for group in optimizer.param_groups for p in group["params"]}
        found = dict(self._model.named_parameters(remove_duplicate=False))
        others = {
            name: found[name] for name, planned in self._planned.items() if found.get(name, planned) is not planned
        }
        for name, other in others.items():
            if other.requires_grad and id(other) not in known:
                raise RuntimeError(
                    f"{name} is another parameter than when the optimizer was built, which does not step it: call "
                    "fully_shard, load_state_dict(assign=True) and the like before, or build a new optimizer"
                )
        if not others:  # as where a module was compiled since; other steps need not look again
            self._held = now

    def _note(self, attributes: dict[str, Any], wanted: set[int]) -> None:
        keys = [key for key, value in attributes.items() if id(value) in wanted]
        self._dicts += [attributes] * len(keys)
        self._keys += keys

    def _now(self) -> list[Any]:
        return list(map(dict.get, self._dicts, self._keys))
