"""Gathers that run into the next forward pass: a module waits for the parameters that it is about to use.

A pre-hook on every module that holds trained parameters lets the current stream wait for their buckets. Hooks on the
modules' ``state_dict`` and ``load_state_dict``, and the first module that runs without gradients, be it one that holds
parameters only by others within it, wait for all buckets.

Hooks do not see a parameter that is used without the forward of a module that holds it (the output projection of
``nn.MultiheadAttention``, a weight handed to ``F.linear``), nor one inside a compiled region, unless that is entered by
a wrapper in the model (see ``compiled``). Such a parameter has a gradient though none of its modules has run with
gradients. The first step, before which nothing is in flight, finds such parameters; from then on every step waits for
their buckets at its end. One that turns up later may have been read before its gather ended, and is an error. Not found
is a parameter that is read before its module runs in the same pass, unless every operation is watched
(``watches_reads``, see ``early_reads``): then it is an error when its module begins.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from optim_dist._reduction.collectives import Communicator
from optim_dist._reduction.compiled import inside_regions, is_wrapped
from optim_dist._reduction.early_reads import watch
from optim_dist._reduction.storage import Member, ParameterBucket

# the methods that a model and the watch over it hold
_HOOKS = (
    "_before_forward",
    "_before_evaluation",
    "_before_eager_evaluation",
    "_before_state",
    "_begin",
    "_before_read",
)


class Held(list[tuple[ParameterBucket, Member]]):
    """What the hook of a module waits for; a copied or pickled hook waits for nothing.

    Given to the hook itself, not looked up by the module: compiled hooks of equal modules are then equal, too.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return list, ()


class ForwardGathers:
    """The hooks of one model on behalf of some buckets."""

    def __init__(self, model: nn.Module, buckets: Sequence[ParameterBucket], *, watches_reads: bool = False) -> None:
        self._buckets = buckets
        self.in_flight = False
        # those that were read in this pass before a module that holds them
        self._early: set[int] = set()
        # whether a module has run without gradients in this pass (checkpointing with use_reentrant=True, a target
        # network that shares parameters): all have arrived then, though that does not tell how training uses them
        self._has_waited = False
        self._homes = homes = {id(member.parameter): (bucket, member) for bucket, member in self._members()}
        self._handles: list[Any] = []
        self._held: list[Held] = []  # what each hook waits for
        inside = inside_regions(model)
        for module in model.modules():
            within = [parameter for parameter in module.parameters() if id(parameter) in homes]
            if not within:
                continue
            # before its region is entered, a compiled module waits for all parameters inside
            own = within if is_wrapped(module) else module.parameters(recurse=False)
            held = Held(homes[id(parameter)] for parameter in own if id(parameter) in homes)
            # one that holds none of its own is hooked for evaluations, which may read what is within in any way
            hook: Callable[..., None] = self._before_evaluation
            if id(module) in inside:
                hook = self._before_eager_evaluation
            elif held:
                self._held.append(held)
                hook = partial(self._before_forward, held)
            # before hooks that compute a weight from parameters: weight and spectral norms, pruning
            self._handles.append(module.register_forward_pre_hook(hook, prepend=True))
            self._handles.append(module.register_state_dict_pre_hook(self._before_state))
            self._handles.append(module.register_load_state_dict_pre_hook(self._before_state))
        if watches_reads:
            self._handles += watch(model, self._begin, self._before_read)
        hooked = {id(member) for held in self._held for _, member in held}
        for bucket, member in self._members():
            if id(member) not in hooked:
                bucket.waits_at_step = True

    def check(self) -> None:
        """Before a step: find parameters that hooks do not see; no gather is in flight afterwards.

        Raises:
            RuntimeError: if such a parameter may have been in flight when it was used.
        """
        for bucket in self._buckets:
            for member in bucket.members:
                if member.arrived and not member.entered:
                    if bucket.deferred:
                        self.wait()
                        raise RuntimeError(
                            f"{member.name} was used outside the forward pass of its module, perhaps before its gather "
                            "was finished; call prefetch(module) or wait() before such a use, or build the optimizer "
                            "with overlap=False"
                        )
                    bucket.waits_at_step = True
                member.entered = False
        self._early.clear()
        self.wait()

    def _members(self) -> Iterator[tuple[ParameterBucket, Member]]:
        return ((bucket, member) for bucket in self._buckets for member in bucket.members)

    def defer(self) -> None:
        """After a step: leave gathers in flight, except those that no hook would wait for."""
        for bucket in self._buckets:
            if bucket.waits_at_step:
                bucket.finish_gathering()
            else:
                bucket.deferred = True
                self.in_flight = True

    def wait(self) -> None:
        """Wait for everything."""
        for bucket in self._buckets:
            bucket.finish_gathering()
            bucket.deferred = False
        self.in_flight = False

    def fetch(self, parameters: Collection[int]) -> None:
        """Wait for the parameters with these ids, as their module does before it uses them."""
        for bucket, member in self._members():
            if id(member.parameter) in parameters:
                member.entered = True
                bucket.finish_gathering()

    def release(self, communicator: Communicator) -> None:
        """Close when the optimizer is gone: whoever kept the model cannot wait for what its last step left in flight.

        Waits for nothing if ranks are known to be lost.
        """
        try:
            if self.in_flight and communicator.is_usable:
                self.wait()
        finally:
            self.close()

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        # this object may outlive the buckets
        for held in self._held:
            held.clear()
        self._buckets, self._homes = (), {}
        self.in_flight = False

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardGathers:
        """Hooks of a copied model do nothing; parameters that were copied during a gather are copied again after it."""
        if self.in_flight:
            self.wait()
            with torch.no_grad():
                for _, member in self._members():
                    if id(member.parameter) in memo:
                        memo[id(member.parameter)].copy_(member.value)
        return ForwardGathers(nn.Module(), ())

    def __reduce__(self) -> tuple[Any, ...]:
        if self.in_flight:
            raise RuntimeError(
                "the model is pickled while its parameters are gathered; call the optimizer's wait() first"
            )
        # all of the standard library, since the model may be loaded where this package is not installed
        does_nothing = nullcontext().__exit__  # whatever its arguments
        return SimpleNamespace, (), dict.fromkeys(_HOOKS, does_nothing)

    def _before_forward(self, held: Held, module: nn.Module, arguments: object) -> None:
        if not torch.compiler.is_compiling():
            self._enter(held)
        elif any(bucket.deferred for bucket, _ in held) if torch.is_grad_enabled() else self.in_flight:
            # compiled after the first step, else the step would have waited: correct, at the price of a graph break
            torch.compiler.disable(self._enter)(held)

    def _before_evaluation(self, module: nn.Module, arguments: object) -> None:
        # cheap in training, where a compiled region would break here for nothing
        if not torch.is_grad_enabled():
            self._before_forward(Held(), module, arguments)

    def _before_eager_evaluation(self, module: nn.Module, arguments: object) -> None:
        # of the original of a compiled module, say; in its region all has arrived
        if not torch.compiler.is_compiling():
            self._before_evaluation(module, arguments)

    def _enter(self, held: Held) -> None:
        if self.in_flight and not torch.is_grad_enabled():
            self.wait()
        if self._early:
            self._refuse_early(held)
        for bucket, member in held:
            # an evaluation does not tell how training uses a parameter
            member.entered |= torch.is_grad_enabled()
            bucket.finish_gathering()
        self._has_waited |= not torch.is_grad_enabled()

    def _begin(self) -> None:
        self._has_waited = False

    def _before_read(self, tensor: Tensor) -> None:
        bucket, member = self._homes.get(id(tensor), (None, None))
        if bucket is None or member is None or member.entered or self._has_waited:
            return
        if not bucket.waits_at_step:
            self._early.add(id(tensor))

    def _refuse_early(self, held: Held) -> None:
        for _, member in held:
            if id(member.parameter) in self._early:
                # the next pass may read it in time
                self._early.clear()
                raise RuntimeError(
                    f"{member.name} has been read before the forward pass of its module, which begins now; without "
                    "debug such a read may come before the parameter is gathered: call prefetch(module) or wait() "
                    "before it, or build the optimizer with overlap=False"
                )

    def _before_state(self, *arguments: object) -> None:
        self.wait()
