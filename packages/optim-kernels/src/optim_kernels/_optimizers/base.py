"""What the optimizer classes of this package share: loading of state, names of parameters, loss scaling.

An optimizer of ours is a ``torch.optim.Optimizer`` whose state keeps its own dtypes. torch casts every loaded tensor of
the state except ``step`` to the parameter's dtype (pytorch#43706), which turns the fp32 moments of a bf16 parameter, or
even its int8 codes, into bf16; ``StatefulOptimizer.load_state_dict`` puts the saved values back; each class places
them (``_place_state``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from optim_kernels._dtensors import placed_like
from optim_kernels._optimizers.adamw_state import MOMENTS, NEEDED
from optim_kernels._optimizers.explaining import log_fallback
from optim_kernels._optimizers.fitting import check_form, check_loaded
from optim_kernels._optimizers.followed_writes import FollowedWrites, can_be_followed, followed
from optim_kernels._optimizers.inference import as_normal, out_of_inference_mode
from optim_kernels._optimizers.plain_options import with_dtypes
from optim_kernels._optimizers.storage import MASTERS
from optim_utils.low_bit import from_plain

# What is done to a state dict, in place or by returning another.
Change = Callable[[Optimizer, dict[str, Any]], dict[str, Any] | None]
# The entries of a parameter's state that have the parameter's shape.
ELEMENTWISE_KEYS = ("momentum_buffer", *MOMENTS, *MASTERS)


class StatefulOptimizer(Optimizer):
    """A ``torch.optim.Optimizer`` whose state keeps its dtypes through ``load_state_dict``.

    A mixin for the classes here: it comes before torch's optimizer class among the bases.
    """

    # Options that belong to the instance rather than to a checkpoint: a loaded state is converted to them.
    _own_options: tuple[str, ...] = ()
    # The entries of a state that `_place_state` converts; the hooks of optim_utils leave them to it.
    _converted_state_keys: tuple[str, ...] = ("step", *ELEMENTWISE_KEYS)
    # GradScaler then leaves unscaling to `step`, which reads `grad_scale` and `found_inf` on the device.
    _step_supports_amp_scaling = True
    # Reasons for plain torch that were logged already.
    _logged_fallbacks: frozenset[str] = frozenset()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # never replaced: wrappers copy the attributes of the optimizer they wrap, and must share this object
        self._writes = FollowedWrites()
        super().__init__(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # a copy has other parameters, of which nobody has counted the writes
        return {**super().__getstate__(), "_written": self._written()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        written = state.get("_written", [])
        super().__setstate__({key: value for key, value in state.items() if key != "_written"})
        if "_writes" not in self.__dict__:
            self._writes = FollowedWrites()
            self._note_writes()
            self._writes.note_written(written)

    @property
    def _own_state(self) -> Any:
        """``state``, read by the optimizer itself."""
        if "state" not in self.__dict__:
            # wrappers that pretend to be of this class then ask the optimizer they wrap
            raise AttributeError(f"{type(self).__name__} has no state")
        return self.__dict__["state"]

    def _note_writes(self) -> None:
        """Assume that fp32 masters match their parameters now; later writes to the parameters are followed."""
        self._writes.note(self._with_masters(self.param_groups))

    def _with_masters(self, groups: Iterable[dict[str, Any]]) -> list[Tensor]:
        """The groups' parameters that have an fp32 master by now, and whose writes can be followed."""
        state, params = self._own_state, [param for group in groups for param in group["params"]]
        return [param for param in params if "master" in state.get(param, {}) and can_be_followed(param)]

    def _written(self) -> list[Tensor]:
        """The parameters with a master that others have written to since the last step."""
        return self._writes.written(self._with_masters(self.param_groups))

    def _state_dict(self, *changes: Change) -> dict[str, Any]:
        """torch's state dict after these changes; the user's hooks come last, and may change it in any way."""
        with ExitStack() as hooks:
            # the last to be prepended comes first
            for change in reversed((_follow_masters, *changes)):
                hooks.enter_context(self.register_state_dict_post_hook(change, prepend=True))
            return super().state_dict()

    @out_of_inference_mode
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over ``state_dict``, of this class or of torch's, in the dtypes this instance works with.

        Options that it lacks keep their values, and so do this instance's formats and its choice of implementation. A
        master that it lacks, or has in another format, is made by the next step from the parameter as it is then, so
        the model's own state may be loaded before or after. If ``state_dict`` does not fit, this raises and leaves the
        optimizer as it was.
        """
        before = {"state": self.state, "param_groups": self.param_groups}
        loaded: dict[str, Any] = {}

        # The user's hooks may replace the dict, and they run first: so ours sees the dict that torch loads.
        def complete(_: Optimizer, content: dict[str, Any]) -> dict[str, Any]:
            check_form(content)
            saved = content["param_groups"]
            if len(saved) != len(self.param_groups):  # torch's own error is the better one
                return content
            merged = [self._merged_group(i, *pair) for i, pair in enumerate(zip(self.param_groups, saved))]
            loaded.update(content, param_groups=merged)
            self._check_complete(loaded)
            return {**content, "param_groups": [_without_copies(group, own) for group, own in zip(merged, saved)]}

        def put_back(_: Optimizer) -> None:
            self._put_back(loaded)

        try:
            with (
                self.register_load_state_dict_pre_hook(complete),
                self.register_load_state_dict_post_hook(put_back, prepend=True),
            ):
                super().load_state_dict(state_dict)
        except BaseException:  # an interrupt too, which would leave what torch has cast
            self.__setstate__(before)
            raise

    def _merged_group(self, index: int, mine: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
        """The saved group ``index``, completed from ours."""
        kept = {key: value for key, value in mine.items() if key not in ("params", "param_names")}
        own = mine.keys() & self._own_options
        return {**kept, **with_dtypes({key: value for key, value in saved.items() if key not in own})}

    def _put_back(self, loaded: dict[str, Any]) -> None:
        """Replace each state value that torch cast by the loaded one, as ``_place_state`` wants it."""
        saved_ids = chain.from_iterable(group["params"] for group in loaded["param_groups"])
        for saved_id, (group, param) in zip(saved_ids, self._parameters(), strict=True):
            saved = loaded["state"].get(saved_id)
            if saved:
                self._check_shapes(param, saved)
                self.state[param] = self._place_state(param, group, as_normal(saved))
        self._note_writes()

    def _needed_state(self, group: dict[str, Any]) -> Sequence[str]:
        """The keys that the state of a parameter in this group must have; by default AdamW's."""
        return NEEDED

    def _check_complete(self, loaded: dict[str, Any]) -> None:
        """Raise ``ValueError`` where a state has no numbers, or lacks a key, whose value would silently start anew."""
        names = self._parameter_names()
        for group, own in zip(loaded["param_groups"], self.param_groups):
            needed = self._needed_state(group)
            for saved_id, param in zip(group["params"], own["params"]):
                saved = loaded["state"].get(saved_id, {})
                check_loaded(saved, param, (*ELEMENTWISE_KEYS, "second_momentum_buffer"), names[param])
                # a parameter that never had a gradient may have an empty state
                missing = [key for key in needed if key not in saved] if saved else []
                if missing:
                    raise ValueError(
                        f"the loaded state of {names[param]} has {list(saved)}, but needs {' and '.join(missing)} "
                        "too; load the state of an optimizer of this kind"
                    )

    def _check_shapes(self, param: Tensor, saved: dict[str, Any]) -> None:
        """Raise ``ValueError`` where a loaded tensor lacks its parameter's shape: kernels would read out of bounds."""
        for key in ELEMENTWISE_KEYS:
            value = saved.get(key)
            if isinstance(value, dict):
                try:
                    value = from_plain(value)
                except ValueError as error:
                    raise ValueError(
                        f"the loaded {key} of {self._parameter_names()[param]} cannot be read: {error}"
                    ) from error
            if isinstance(value, Tensor) and value.shape != param.shape:
                raise ValueError(
                    f"the loaded {key} has shape {tuple(value.shape)}, its parameter {self._parameter_names()[param]} "
                    f"{tuple(param.shape)}; load the state of an optimizer over parameters of these shapes"
                )

    def _place_state(self, param: Tensor, group: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
        """The state of ``param`` from a loaded one: each tensor on the parameter's device, in its saved dtype."""
        return {
            key: value.to(param.device) if isinstance(value, Tensor) and key != "step" else value
            for key, value in saved.items()
        }

    def _parameters(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """Every parameter with its group, in order."""
        return ((group, param) for group in self.param_groups for param in group["params"])

    def _parameter_names(self) -> dict[Tensor, str]:
        """A name for every parameter: the one it was given, or its place, ``param_groups[i]['params'][j]``."""
        names = {}
        for i, group in enumerate(self.param_groups):
            # a user who replaces parameters may leave their names as they were
            given = group.get("param_names", ())
            known = len(given) == len(group["params"])
            for j, param in enumerate(group["params"]):
                names[param] = given[j] if known else f"param_groups[{i}]['params'][{j}]"
        return names

    def _log_fallbacks(self, reasons: Iterable[str]) -> None:
        """Log each reason why plain torch updates parameters once."""
        new = frozenset(reasons) - self._logged_fallbacks
        self._logged_fallbacks |= new
        log_fallback(self, new)

    def _loss_scaling(self) -> tuple[Tensor | None, Tensor | None]:
        """``(grad_scale, found_inf)`` that a ``GradScaler`` put on this optimizer for the step."""
        return getattr(self, "grad_scale", None), getattr(self, "found_inf", None)


def _follow_masters(optimizer: Any, content: dict[str, Any]) -> None:
    """Let masters belong to the parameters as they are now, whoever wrote to them: the user's hooks, say."""
    written = set(optimizer._written())
    state = content["state"] = dict(content["state"])
    # torch's numbers, which leave one out where a parameter is twice in a group
    numbers = [number for group in content["param_groups"] for number in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, param in zip(numbers, params, strict=True):
        if param in written:
            master = state[number]["master"]
            state[number] = {**state[number], "master": placed_like(followed(param, master), param)}


def _without_copies(group: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """The group for torch, which deep-copies what it loads; what was here before is exempt from that.

    The user may hold those values, or they may not allow a copy.
    """
    return {key: value if key in saved else _Kept(value) for key, value in group.items()}


class _Kept:
    """Stands for a value in a deep copy, where the value itself takes its place."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._value
