"""Everything about an AdamW step that stays the same from step to step: checked and put on the device once.

A plan belongs to given parameters and states. Tensors of one device and one set of dtypes form a launch; a launch has
a chunk map, a table of records, and a table of gradient addresses and hyperparameters (``optim_kernels.adamw_kernels``
says what is in them).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from optim_kernels._impl import Impl, use_triton
from optim_kernels._tensor_lists import KnownAddresses, KnownKinds, TensorList
from optim_kernels.functional._adamw_launch import AdamWLaunch
from optim_kernels.functional._adamw_tensor import PlannedTensor, Signature, check_shared_steps, with_memory
from optim_kernels.functional._lists import Layout, are_same, check_apart
from optim_kernels.reference.adamw import AdamWScalars
from optim_utils.compiling import not_compiled


class AdamWPlan:
    """A planned AdamW step over given tensors; ``step`` runs it with this step's gradients and hyperparameters.

    ``AdamWPlan()`` is empty until ``prepare``, which plans anew whenever it is given other tensors than before.
    """

    def __init__(self) -> None:
        # looked up, so that a caller may be compiled (`not_compiled`)
        self.prepare  # noqa: B018
        self._launches: list[AdamWLaunch] = []
        # the arguments of the last `prepare`; of gradients only addresses, kinds and layouts, to compare others with
        self._tensors: list[Sequence[Tensor | None]] = []
        self._numbers: list[Sequence[int]] = []
        self._grads: tuple[list[int], list[Any], list[tuple[Any, ...]]] = [], [], []
        # all tensors with memory among those arguments
        self._stored: list[Tensor] = []
        self._addresses = KnownAddresses([])
        self._known_grads = KnownKinds()
        # addresses and kinds of the gradients that the launches know
        self._known: tuple[list[int], list[Any]] | None = None
        # see `launches_again`
        self._again: list[Callable[[], None]] | None = None
        self.num_tensors = 0

    def __reduce__(self) -> tuple[Any, ...]:
        # tables hold addresses, so a copy is empty and plans anew
        return type(self), ()

    @classmethod
    def build(
        cls, params: Sequence[Tensor], grads: Sequence[Tensor], *states: Sequence[Tensor], **options: Any
    ) -> AdamWPlan:
        """A plan for these tensors; the arguments are those of ``prepare``."""
        plan = cls()
        plan.prepare(params, grads, *states, **options)
        return plan

    @not_compiled
    def can_take(self, params: Sequence[Tensor], impl: Impl) -> bool:
        """Whether the kernels update all of these parameters; an error where ``impl`` asks for them in vain."""
        return all(use_triton(impl, p, f"params[{i}]") for i, p in enumerate(params))

    @not_compiled
    def look_at(self, grads: Sequence[Tensor]) -> TensorList:
        """This step's gradients, as both ``prepare`` and ``step`` take them."""
        return TensorList(grads, self._known_grads)

    @not_compiled
    def prepare(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor] | TensorList,
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        *,
        steps: Tensor | Sequence[Tensor],
        max_exp_avg_sqs: Sequence[Tensor | None] | None = None,
        masters: Sequence[Tensor | None] | None = None,
        groups: Sequence[int] | None = None,
        stochastic_rounding: bool | Sequence[bool] = False,
        seed: int | Sequence[int] = 0,
        indices: Sequence[int] | None = None,
        starts: Sequence[int] | None = None,
        present: Sequence[Tensor | None] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        """Check the tensors, sort them into launches and put their records on the device, unless that is done already.

        The arguments are those of ``adamw_``; ``groups`` says for each tensor which of the hyperparameters given to
        ``step`` are its own, and ``names`` what errors call the parameters.

        Raises:
            ValueError: a tensor whose shape, dtype, device or memory layout the kernels cannot take.
            TypeError: a DTensor, whose memory is that of its local part.
        """
        count = len(params)
        grads = grads if isinstance(grads, TensorList) else TensorList(grads)
        none: list[None] = [None] * count
        tensors: list[Sequence[Tensor | None]] = [
            params,
            exp_avgs,
            exp_avg_sqs,
            max_exp_avg_sqs or none,
            masters or none,
            [steps] * count if isinstance(steps, Tensor) else steps,
            present or none,
        ]
        numbers: list[Sequence[int]] = [
            groups or [0] * count,
            range(count) if indices is None else indices,
            starts or [0] * count,
            stochastic_rounding if isinstance(stochastic_rounding, Sequence) else [stochastic_rounding] * count,
            seed if isinstance(seed, Sequence) else [seed] * count,
        ]
        same = numbers == self._numbers and are_same(tensors, self._tensors)
        if same and self._addresses.are_those_of(self._stored) and self._fit(grads):
            return
        rows = zip(none if names is None else names, map(Layout.of, params), *tensors, *numbers, strict=True)
        planned = [PlannedTensor(i, *row) for i, row in enumerate(rows)]
        by_signature: dict[Signature, list[PlannedTensor]] = {}
        for tensor, grad in zip(planned, grads.tensors, strict=True):
            tensor.check(grad)
            by_signature.setdefault(tensor.signature(grad), []).append(tensor)
        check_apart(params, [tensor.called("params") for tensor in planned])
        check_shared_steps(planned, grads.tensors)
        # forget the old lists first: a call that is interrupted may leave launches of either
        self._tensors = []
        self._launches, self._known = _launches(list(by_signature.values()), grads.tensors), None
        self._again = None
        # copies, because the caller may change its lists
        self._numbers = [each[:] for each in numbers]
        stored = [part for each in tensors for tensor in each for part in with_memory(tensor)]
        # parameters may share one step count
        self._stored = list({id(part): part for part in stored}.values())
        self._addresses = KnownAddresses(self._stored)
        self.num_tensors = count
        self._grads = grads.addresses, grads.kinds, _layouts(grads)
        self._tensors = [list(each) for each in tensors]

    def let_go(self) -> None:
        """Keep no state alive, whose memory its owner may want to have back; the next ``prepare`` plans anew."""
        self._tensors, self._stored = [], []

    def _fit(self, grads: TensorList) -> bool:
        """Whether gradients have the addresses, or at least the layouts, of those that the plan was prepared with."""
        addresses, kinds, layouts = self._grads
        return grads.kinds == kinds and (grads.addresses == addresses or _layouts(grads) == layouts)

    def is_for(self, params: Sequence[Tensor]) -> bool:
        """Whether the plan was last prepared for these parameters."""
        return are_same([params], self._tensors[:1])

    @property
    def num_launches(self) -> int:
        """How many kernel launches a step takes."""
        return len(self._launches)

    @property
    def num_copied(self) -> int:
        """How many gradients the last step copied, because their layout differs from their parameter's."""
        return sum(len(launch.copies) for launch in self._launches)

    def refresh(self, grads: Sequence[Tensor] | TensorList) -> None:
        """Take note of this step's gradients."""
        self._again = None
        if not isinstance(grads, TensorList):
            grads = TensorList(grads)
        if len(grads.tensors) != self.num_tensors:
            raise ValueError(f"the plan is for {self.num_tensors} gradients, got {len(grads.tensors)}")
        if len(self._launches) == 1:
            self._launches[0].refresh(grads)
            return
        seen = grads.addresses, grads.kinds
        if seen == self._known and not self.num_copied:
            return
        self._known = None
        for launch in self._launches:
            launch.refresh(TensorList([grads.tensors[place] for place in launch.places]))
        self._known = None if any(launch.filled_in_capture for launch in self._launches) else seen

    @not_compiled
    def step(
        self,
        grads: Sequence[Tensor] | TensorList,
        scalars: Sequence[AdamWScalars],
        *,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        clip_factor: Tensor | None = None,
    ) -> None:
        """One step; ``scalars`` holds the hyperparameters of each group."""
        self.get_ready(grads, scalars, grad_scale=grad_scale, found_inf=found_inf, clip_factor=clip_factor)
        self.run()

    def get_ready(
        self,
        grads: Sequence[Tensor] | TensorList,
        scalars: Sequence[AdamWScalars],
        *,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        clip_factor: Tensor | None,
    ) -> None:
        """The part of ``step`` that may raise, before anything is launched."""
        self.refresh(grads)
        for launch in self._launches:
            launch.get_ready(scalars, grad_scale=grad_scale, found_inf=found_inf, clip_factor=clip_factor)

    def run(self) -> None:
        """The rest of ``step``: the launches."""
        for launch in self._launches:
            launch.run()

    def renumber(self, scalars: Sequence[AdamWScalars]) -> None:
        """Other hyperparameters, Python numbers, where nothing else has changed since ``get_ready``."""
        again, self._again = self._again, None
        are_others = [launch.renumber(scalars) for launch in self._launches]
        if not any(are_others):
            self._again = again

    def launches_again(self) -> list[Callable[[], None]]:
        """The launches of ``run`` outside of captures; another list once anything but ``run`` was called."""
        if self._again is None:
            self._again = [launch.again() for launch in self._launches]
        return self._again


def _launches(lists: list[list[PlannedTensor]], grads: Sequence[Tensor]) -> list[AdamWLaunch]:
    """A launch for each list; on a device the largest first, so that the others overlap its end."""
    lists.sort(key=lambda members: sum(member.param.numel() for member in members), reverse=True)
    devices = [members[0].param.device for members in lists]
    return [
        AdamWLaunch(members, grads, order=devices[:i].count(device), total=devices.count(device))
        for i, (members, device) in enumerate(zip(lists, devices))
    ]


def _layouts(grads: TensorList) -> list[tuple[Any, ...]]:
    return [(grad.dtype, grad.shape, grad.device) for grad in grads.tensors]
