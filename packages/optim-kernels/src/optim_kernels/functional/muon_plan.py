"""Everything about a Muon step that stays the same from step to step: checked and put on the device once.

Parameters of one device and one set of dtypes form a batch, which is stepped in a few grouped launches
(`_muon_batch_plan`). Parameters that these launches cannot take are left to `muon_`, which steps them one by one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from optim_kernels._graphs import is_capturing
from optim_kernels._impl import Impl, why_not_grouped_on
from optim_kernels._memory import is_aligned
from optim_kernels._newton_schulz.config import NSConfig, Tiles, check_tiles
from optim_kernels._options import check_seed, check_switches
from optim_kernels._tensor_lists import KnownAddresses, KnownKinds
from optim_kernels.functional._lists import are_same, check_shapes, check_tensors, check_whole
from optim_kernels.functional._muon_checks import Views, check_step
from optim_kernels.multi_tensor import upload
from optim_kernels.reference.muon import MuonRule, Scalar, ScaleRule
from optim_utils.compiling import not_compiled
from optim_utils.param_groups import MatrixView

if TYPE_CHECKING:
    from optim_kernels.functional._muon_batch_plan import MuonBatchPlan
    from optim_kernels.functional._muon_matrices import MuonTensors

# The kernels count steps in fp32, which has all whole numbers up to this one.
MOST_STEPS = 2**24
# A capture allows neither tables to be filled nor kernels to be loaded.
NOT_READY = (
    "a step is being captured into a CUDA graph, but there is no plan of its tensors and options that has run before; "
    "call muon_ with the plan once before the capture"
)


class _Batch(NamedTuple):
    """A plan of some of the parameters, and what these have in common.

    Args:
        draws_bits: whether its parameters are rounded at random.
        places: of its parameters in the lists.
    """

    key: tuple[Any, ...]
    device: torch.device
    draws_bits: bool
    places: list[int]
    plan: MuonBatchPlan

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Its own tensors of a list."""
        return [tensors[place] for place in self.places]


class _Prepared:
    """The arguments of a `prepare`, to tell whether later ones are like them; of gradients only types and layouts.

    Args:
        with_starts: whether it matters where gradients start: alignment chooses their plan.
    """

    def __init__(
        self,
        options: tuple[Any, ...],
        tensors: Sequence[Sequence[Tensor | None]],
        grads: Sequence[Tensor],
        *,
        with_starts: bool,
    ) -> None:
        # copies of lists, because the caller may change its own
        self._options, self._tensors = options, [list(each) for each in tensors]
        self._stored = [tensor for each in tensors for tensor in each if tensor is not None]
        self._addresses = KnownAddresses(self._stored)
        self._types, self._known = list(map(type, grads)), KnownKinds(with_shapes=True)
        self._kinds = self._known.of(grads)
        self._starts = _are_aligned(grads) if with_starts else None

    def is_of(self, options: tuple[Any, ...], tensors: Sequence[Sequence[Tensor | None]]) -> bool:
        """Whether options and tensors are the same, and the tensors where they were."""
        return (
            options == self._options and are_same(tensors, self._tensors) and self._addresses.are_those_of(self._stored)
        )

    def fits(self, grads: Sequence[Tensor]) -> bool:
        """Whether gradients have the layouts of before."""
        return (
            # types first: what is no tensor has no layout
            list(map(type, grads)) == self._types
            and self._known.of(grads) == self._kinds
            and (self._starts is None or _are_aligned(grads) == self._starts)
        )


class MuonPlan:
    """A planned Muon step over given tensors, for `muon_`, which then steps the matrices of a shape together.

    ``MuonPlan()`` is empty until `muon_` is called with it, which plans anew whenever it is given other tensors or
    options than before. Where the kernels do not run, a plan changes nothing. It keeps parameters and state alive but
    no gradients, and a copy of it is empty.

    Args:
        tiles: with ``"auto"`` the bits of a parameter may depend on how many others are stepped with it. With
            ``"shape"`` they depend on its own shape and alignment alone, which costs speed, except where tiles change
            no bits: on Hopper, for products in 16 bits, without second moments and ``renormalize``.

    Attributes:
        others: for each parameter that is stepped alone, by its place in the lists, the reason.
        views: how each parameter is read as matrices.

    Raises:
        ValueError: for unknown ``tiles``.
    """

    def __init__(self, *, tiles: Tiles = "auto") -> None:
        check_tiles(tiles)
        # looked up, so that a caller may be compiled (`not_compiled`)
        self.prepare  # noqa: B018
        self._tiles = tiles
        self.others: dict[int, str] = {}
        self.views: list[MatrixView] = []
        self._batches: list[_Batch] = []
        # former ones that graphs of the caller's read
        self._captured: list[_Batch] = []
        # with stochastic rounding, the steps that all parameters have taken, on each device
        self._counts: dict[torch.device, Tensor] = {}
        # the last `prepare`, if nothing was left to others, and if gradients are still laid out as then
        self._prepared: _Prepared | None = None
        self._params: list[Tensor] = []

    def __reduce__(self) -> tuple[Any, ...]:
        # tables hold addresses, so a copy is empty and plans anew
        return partial(type(self), tiles=self._tiles), ()

    @classmethod
    def build(
        cls,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        momentum_buffers: Sequence[Tensor],
        *,
        tiles: Tiles = "auto",
        **options: Any,
    ) -> MuonPlan:
        """A plan for these tensors; ``options`` are those of `prepare`."""
        plan = cls(tiles=tiles)
        plan.prepare(params, grads, momentum_buffers, **options)
        return plan

    @not_compiled
    @torch.no_grad()
    def prepare(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        momentum_buffers: Sequence[Tensor],
        *,
        nesterov: bool = True,
        ns: NSConfig | None = None,
        scale: ScaleRule = "original",
        second_moments: Sequence[Tensor] | None = None,
        row_equilibrate: bool = False,
        renormalize: bool = False,
        cautious: bool = False,
        maximize: bool = False,
        views: Views | None = None,
        masters: Sequence[Tensor | None] | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        indices: Sequence[int] | None = None,
        impl: Impl = "auto",
    ) -> None:
        """Check the tensors, sort them into batches and put their tables on the device, unless that is done already.

        The arguments are those of `muon_`, but for hyperparameters and ``steps``, which may change from step to step.

        Raises:
            ValueError: as `muon_`; and parameters that share memory, or second moments that the kernels cannot take.
            TypeError: as `muon_`.
            RuntimeError: as `muon_`; and in a CUDA graph's capture, if these tensors were not planned before.
        """
        none: list[None] = [None] * len(params)
        tensors: list[Sequence[Tensor | None]] = [
            params,
            momentum_buffers,
            none if second_moments is None else second_moments,
            none if masters is None else masters,
        ]
        places = range(len(params)) if indices is None else _ints(indices)
        options = (
            *(nesterov, row_equilibrate, renormalize, cautious, maximize, scale, ns, second_moments is None),
            *(stochastic_rounding, seed, places, None if views is None else list(views), impl),
        )
        if self._prepared is not None and self._prepared.is_of(options, tensors) and self._prepared.fits(grads):
            for batch in self._batches:
                batch.plan.refresh(batch.of(grads), same_layout=True)
            return
        self._prepared, self._params = None, []
        check_switches(stochastic_rounding=stochastic_rounding)
        check_seed(seed)
        rule = MuonRule(
            nesterov=nesterov,
            scale=scale,
            row_equilibrate=row_equilibrate,
            renormalize=renormalize,
            cautious=cautious,
            maximize=maximize,
        )
        self.views = check_step(
            params,
            grads,
            momentum_buffers,
            ns=ns,
            second_moments=second_moments,
            views=views,
            masters=masters,
            steps=None,
            indices=indices,
            impl=impl,
        )
        members = self._sort([*tensors, grads, places], ns or NSConfig(), impl, seed if stochastic_rounding else None)
        self._plan(members, rule, ns or NSConfig(), variance=second_moments is not None)
        self._params = list(params)
        if not self.others:
            self._prepared = _Prepared(options, tensors, grads, with_starts=self._tiles == "shape")

    def _sort(
        self, lists: Sequence[Sequence[Any]], ns: NSConfig, impl: Impl, seed: int | None
    ) -> dict[tuple[Any, ...], list[MuonTensors]]:
        """The parameters that grouped launches take, by kind, with their step counts; ``others`` become the rest.

        ``seed``: of stochastic rounding, ``None`` without.
        """
        former, self._counts, self.others = self._counts, {}, {}
        *_, places = lists
        kinds: dict[tuple[Any, ...], list[MuonTensors]] = {}
        for i, (p, momentum_buffer, second_moment, master, grad, place) in enumerate(zip(*lists, strict=True)):
            reason = why_not_grouped_on(impl, p.device)
            if reason is not None:
                self.others[i] = reason
                continue
            # needs Triton
            from optim_kernels.functional._muon_matrices import MuonTensors, why_not_plan

            draws_bits = seed is not None and p.dtype == torch.bfloat16 and master is None
            if draws_bits and p.device not in self._counts:
                self._counts[p.device] = _counts(len(places), p.device, former.get(p.device))
            tensors = MuonTensors(
                param=p,
                grad=grad,
                momentum_buffer=momentum_buffer,
                second_moment=second_moment,
                master=master,
                step=self._counts[p.device][i] if draws_bits else None,
                view=self.views[i],
                place=place & 0xFFFFFFFF if draws_bits else 0,
                seed=(seed or 0) if draws_bits else 0,
                number=i,
            )
            reason = why_not_plan(tensors, ns)
            if reason is None:
                kinds.setdefault((tensors.kind(self._tiles), draws_bits), []).append(tensors)
            else:
                self.others[i] = reason
        return kinds

    def _plan(
        self, kinds: dict[tuple[Any, ...], list[MuonTensors]], rule: MuonRule, ns: NSConfig, *, variance: bool
    ) -> None:
        """Have a plan for the parameters of each kind: one of before, if it is of the same tensors and options."""
        wanted = []
        for kind, members in kinds.items():
            key = (kind, rule, ns, variance)
            plan = self._known_plan(key, tuple(t.address_key() for t in members))
            if plan is None and is_capturing(members[0].param.device):
                raise RuntimeError(NOT_READY)
            wanted.append((key, members, plan))
        aside = [batch.plan for batch in self._captured]
        # no graph may be dropped while another is captured
        read = [batch for batch in self._batches if batch.plan.was_captured or is_capturing(batch.device)]
        self._captured += [batch for batch in read if batch.plan not in aside]
        # what is dropped gives its memory back before more is taken
        self._batches = []
        for key, members, plan in wanted:
            first, places = members[0], [t.number for t in members if t.number is not None]
            draws_bits = first.step is not None
            if plan is None:
                from optim_kernels.functional._muon_batch_plan import MuonBatchPlan

                options: dict[str, Any] = {"rule": rule, "ns": ns, "variance": variance, "tiles": self._tiles}
                plan = MuonBatchPlan(members, stochastic_rounding=draws_bits, **options)
            else:
                plan.refresh([t.grad for t in members])
            self._batches.append(_Batch(key, first.param.device, draws_bits, places, plan))

    def _known_plan(self, key: tuple[Any, ...], addresses: tuple[Any, ...]) -> MuonBatchPlan | None:
        """A plan of before, of the same options and of tensors at the same addresses."""
        known = (batch.plan for batch in (*self._batches, *self._captured) if batch.key == key)
        return next((plan for plan in known if plan.address_key == addresses), None)

    @torch.no_grad()
    def refresh(self, grads: Sequence[Tensor]) -> None:
        """Take note of other gradients, of the same shapes and dtypes; `muon_` does so itself.

        Raises:
            ValueError: other numbers, shapes, devices or dtypes of gradients than the plan is for.
            TypeError: something else in place of a tensor.
        """
        if len(grads) != len(self._params):
            raise ValueError(f"the plan is for {len(self._params)} gradients, got {len(grads)}")
        check_tensors(grads=grads)
        check_shapes(self._params, "params", grads=grads)
        if self._prepared is not None and not self._prepared.fits(grads):
            self._prepared = None
        for batch in self._batches:
            batch.plan.refresh(batch.of(grads))

    @not_compiled
    def check_run(self, steps: Sequence[int] | None) -> None:
        """Raise where `run` cannot take these steps, one for each parameter; before anything is written.

        Raises:
            ValueError: a number that is not from 1 to 2**24.
            RuntimeError: in a CUDA graph's capture, if the plan has not run before.
        """
        for batch in self._batches:
            if not batch.plan.has_run and is_capturing(batch.device):
                raise RuntimeError(NOT_READY)
            if steps is None or not batch.draws_bits:
                continue
            for place in batch.places:
                if not 1 <= steps[place] <= MOST_STEPS:
                    raise ValueError(
                        f"steps[{place}] must be the number of this step, from 1 to 2**24, got {steps[place]}"
                    )

    @not_compiled
    def run(
        self,
        *,
        lr: Scalar,
        weight_decay: Scalar,
        momentum: Scalar,
        beta2: Scalar,
        factor: Tensor | None,
        found_inf: Tensor | None,
        steps: Sequence[int] | None,
    ) -> None:
        """Step all parameters but ``others``; gradients are multiplied by ``factor``."""
        if steps is not None:
            taken = array("f", [int(step) - 1 for step in steps]).tobytes()
            for count in self._counts.values():
                upload(taken, count)
        for batch in self._batches:
            batch.plan.run([(lr, weight_decay, momentum, beta2)], factor=factor, found_inf=found_inf)
            # the plan may have been made for other objects with the same memory
            torch.autograd.graph.increment_version(batch.of(self._params))

    @property
    def num_launches(self) -> int:
        """How many kernel launches a step takes, without those for ``others``."""
        return sum(batch.plan.launches for batch in self._batches)

    @property
    def num_copied(self) -> int:
        """How many gradients the last step copied, because their layout differs from their parameter's."""
        return sum(batch.plan.num_copied for batch in self._batches)


def _counts(count: int, device: torch.device, former: Tensor | None) -> Tensor:
    """Room for so many step counts: the ``former``, to which tables point, if there are as many."""
    if former is not None and len(former) == count:
        return former
    # made in inference mode they could not be written outside of it
    with torch.inference_mode(False):
        return torch.zeros(count, dtype=torch.float32, device=device)


def _ints(indices: Sequence[Any]) -> list[int]:
    if not {int}.issuperset(map(type, indices)):
        check_whole(indices=indices)
    return list(map(int, indices))


def _are_aligned(grads: Sequence[Tensor]) -> list[bool]:
    return list(map(is_aligned, map(Tensor.data_ptr, grads)))
