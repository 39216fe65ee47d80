"""Where a model has the parameters of its optimizer, which would not step others that are put there later."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from optim_dist._optimizers.entries import Entry
from optim_dist._optimizers.live import live_optimizers
from optim_dist._plain_names import plain_names

_get: Callable[[Any, str], Any] = dict.get


class Places:
    """The names under which a model has planned parameters, and what its modules held on the way there at that time.

    Only those of plain parameters: FSDP itself exchanges DTensors for whole parameters and back.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._model = model
        self._ids: set[int] = set()  # of parameters, which the plan's entries keep
        self._planned: dict[str, Tensor] = {}  # by names without torch's wrappers
        # Columns, so that `check` needs no Python code for each parameter: modules' own dicts, which of the dicts in
        # them (torch makes that anew where a module leaves a list), the key there, and what it held.
        self._dicts: list[dict[str, Any]] = []
        self._kinds: list[str] = []
        self._keys: list[str] = []
        self._held: list[Any] = []
        self._noted: set[tuple[int, str, str]] = set()  # places in these columns, with the dict's id

    def add(self, entries: Iterable[Entry]) -> None:
        """Add parameters that are planned now. What has taken the place of earlier ones stays to be found."""
        self._ids |= {id(entry.parameter) for entry in entries if not isinstance(entry.parameter, DTensor)}
        self._others()

    def check(self) -> None:
        """Refuse a trained parameter that has taken the place of another, and that no optimizer of this package steps.

        Parameters without a successor may leave the model, as a head does that is needed no more.
        """
        if all(map(is_, self._now(), self._held)):
            return
        known = {id(p) for optimizer in live_optimizers() for group in optimizer.param_groups for p in group["params"]}
        for name, other in self._others().items():
            if other.requires_grad and id(other) not in known:
                raise RuntimeError(
                    f"{name} is another parameter than when the optimizer was built, which does not step it: call "
                    "fully_shard, load_state_dict(assign=True) and the like before; add what is new by "
                    "add_param_group(), or build a new optimizer"
                )

    def _others(self) -> dict[str, Tensor]:
        """What has taken the place of planned parameters, by name; if nothing has, note what modules hold now."""
        if self._model is None:
            return {}
        # a module may have several names
        modules = dict(self._model.named_modules(remove_duplicate=False))
        parameters = {
            f"{path}.{key}" if path else key: parameter
            for path, module in modules.items()
            for key, parameter in module._parameters.items()
            if parameter is not None
        }
        plain = plain_names(parameters)
        found = {plain[name]: parameter for name, parameter in parameters.items()}
        self._planned |= {name: parameter for name, parameter in found.items() if id(parameter) in self._ids}
        others = {
            name: found[name] for name, planned in self._planned.items() if found.get(name, planned) is not planned
        }
        if not others:  # else the next step looks again
            for name in (name for name, parameter in parameters.items() if id(parameter) in self._ids):
                path, _, key = name.rpartition(".")
                self._note(modules[path], "_parameters", key)
                while path:
                    path, _, key = path.rpartition(".")
                    self._note(modules[path], "_modules", key)
            self._held = self._now()
        return others

    def _note(self, module: nn.Module, kind: str, key: str) -> None:
        own = vars(module)
        if (id(own), kind, key) not in self._noted:
            self._noted.add((id(own), kind, key))
            self._dicts.append(own)
            self._kinds.append(kind)
            self._keys.append(key)

    def _now(self) -> list[Any]:
        return list(map(_get, map(_get, self._dicts, self._kinds), self._keys))
