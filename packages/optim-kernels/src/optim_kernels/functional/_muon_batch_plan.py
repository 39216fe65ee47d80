"""The whole Muon step of many matrices as a fixed sequence of grouped launches: tables once, then run.

    guess → momentum → norm → Newton–Schulz with the update in its last products

Newton–Schulz is one launch for all matrices of a short side where these fill a Hopper chip (`_muon_chains`). Elsewhere
an m×m product is one launch for a family, and a product with X, the last one with its update included, one for a batch.

With row equilibration the front is  strips → equilibrate.  Where an update needs all of O first (NorMuon,
renormalisation) the last product leaves sums of squares, and  variance → update  follow; with stochastic rounding
advance → update  follow the products (`_kernels.muon_momentum` and `_kernels.muon_update` say what each does).

All that Python would decide in each step is decided here once: addresses, tiles, batches. After a first run, which
compiles, the sequence is recorded as a CUDA graph and replayed; hyperparameters and gradient addresses live in device
tables, so a step with new ones replays the same graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain

import torch
from torch import Tensor

from optim_kernels._graphs import ONE_AT_A_TIME, is_capturing, side_stream
from optim_kernels._memory import ALIGNMENT
from optim_kernels._newton_schulz.chain import steps_in_factors
from optim_kernels._newton_schulz.config import NSConfig, Tiles, check_tiles
from optim_kernels._newton_schulz.tile_choice import tiles_agree
from optim_kernels.functional._lists import check_apart, check_shapes
from optim_kernels.functional._muon_explain import tile_words
from optim_kernels.functional._muon_families import does_move, families_of, in_order
from optim_kernels.functional._muon_inputs import StepInputs
from optim_kernels.functional._muon_launches import StepLaunches, StepOptions
from optim_kernels.functional._muon_matrices import (
    Matrix,
    MuonTensors,
    alignment_of,
    check_memory,
    check_moments,
    check_steps,
    is_aligned,
    matrices_of,
)
from optim_kernels.functional._muon_tables import MuonTables
from optim_kernels.functional._muon_workspace import Workspace, nbytes_of_diagonal, nbytes_of_factors, nbytes_of_x
from optim_kernels.reference.muon import MuonRule


class MuonBatchPlan:
    """Tables, buffers and the recorded launches of a Muon step on a fixed list of parameters.

    Args:
        tensors: every parameter's tensors; each must pass `why_not_plan`, and dtypes are the same for all.
        rule, ns: what is computed.
        variance: whether second moments are updated (NorMuon).
        stochastic_rounding: of bf16 parameters without masters.
        num_groups: rows of hyperparameters; a parameter names its own by ``group``.
        tiles: ``"auto"`` takes the fastest tiles for all matrices together, so that the bits of one may depend on how
            many others there are. With ``"shape"`` they depend on its own shape, if all have the same `alignment_of`;
            where all tiles give the same bits (`tiles_agree`), these are the fastest, too.
        spare: how many multiprocessors long launches leave free; see `MuonPlanner`.
        workspace: memory for X, reserved before (`Workspace.reserve`), and for factors; by default a plan has its own.

    Attributes:
        address_key: `MuonTensors.address_key` of every parameter, when the plan was built.
        has_run: whether a step was run, and so kernels are compiled and loaded.
        was_captured: whether a graph of the caller's holds launches of the plan, and so needs its tables.
    """

    def __init__(
        self,
        tensors: Sequence[MuonTensors],
        *,
        rule: MuonRule,
        ns: NSConfig,
        variance: bool,
        stochastic_rounding: bool = False,
        num_groups: int = 1,
        tiles: Tiles = "auto",
        spare: int = 0,
        workspace: Workspace | None = None,
    ) -> None:
        check_tiles(tiles)
        # taken now, since replacing a tensor's ``.data`` later changes its key
        self.address_key = tuple(t.address_key() for t in tensors)
        first = tensors[0]
        ns = ns.of(first.param)
        # kept, because the tables hold their addresses; gradients are the caller's, and may be freed after a step
        self._params, self._grad_dtype = [t.param for t in tensors], first.grad.dtype
        buffers, masters = [t.momentum_buffer for t in tensors], [t.master for t in tensors]
        grads = [t.grad for t in tensors]
        check_shapes(self._params, "params", grads=grads, momentum_buffers=buffers, masters=masters)
        check_memory(tensors)
        check_steps(tensors)
        check_apart(self._params, [t.called("params", i) for i, t in enumerate(tensors)])
        self._grad_names = [t.called("grads", i) for i, t in enumerate(tensors)]
        self._state = [(t.momentum_buffer, t.second_moment, t.master, t.step) for t in tensors]
        self._device = first.param.device
        unordered = [matrix for i, t in enumerate(tensors) for matrix in matrices_of(i, t, rule)]
        if variance:
            check_moments(tensors, unordered)
        self._matrices = in_order(unordered, ns)
        # for each matrix its parameter, and where it begins in the gradient, in bytes
        self._offsets = [(m.parameter, m.offset * first.grad.element_size()) for m in self._matrices]
        # but for sums of O² over lines, which are added tile by tile
        sums_lines = variance or rule.renormalize
        if not sums_lines and tiles_agree(ns.compute_dtype(first.param), self._device):
            tiles = "auto"
        options = StepOptions.of(
            first,
            ns,
            rule=rule,
            variance=variance,
            stochastic_rounding=stochastic_rounding,
            state_is_aligned=_state_is_aligned(tensors, self._matrices),
            tiles=tiles,
            spare_multiprocessors=spare,
        )
        families, chains = families_of(
            self._matrices,
            ns,
            options.x_dtype,
            self._device,
            ending=options.ending,
            tiles=tiles,
            memory=torch.zeros if workspace is None else workspace.memory(self._device),
        )
        self._workspace = workspace
        self._tile_words = tile_words(families, chains, ns, tiles)
        self._tables = MuonTables(tensors, self._matrices, families, chains)
        self._inputs = StepInputs(len(self._matrices), num_groups, self._device)
        self._launches = StepLaunches(self._tables, families, chains, self._inputs, options)
        # of the inputs that the launches read
        self._taken: Tensor | None = None
        self._grad_addresses: list[int] = []
        self._copies: list[Tensor] = []
        self.was_captured = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self.has_run = False
        self.refresh(grads)

    def let_go(self) -> None:
        """Keep no state alive, whose memory its owner may want to have back; by `address_key` others are known."""
        self._state = []

    def run(
        self,
        hyper: Sequence[Sequence[float | Tensor]],
        *,
        factor: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """One step; ``hyper``: (lr, weight_decay, momentum, beta2) of each group; ``factor`` multiplies gradients."""
        if self._device.type == "cuda" and self._device.index != torch.cuda.current_device():
            with torch.cuda.device(self._device):
                self.run(hyper, factor=factor, found_inf=found_inf)
            return
        capturing = is_capturing(self._device)
        self._inputs.update(hyper, factor, found_inf)
        if self._inputs.grads is not self._taken:
            self._launches.take_inputs()
            self._forget_recorded()
            # last: where this is interrupted, the next step does it again
            self._taken = self._inputs.grads
        if capturing:
            self._launches.keep_for_graph()
            self.was_captured = True
        # tell autograd, which then refuses to differentiate through the overwritten values
        torch.autograd.graph.increment_version(self._params)
        if capturing or self._device.type != "cuda" or not self.has_run:
            self._launches.run()
            self.has_run = True
            return
        if self._graph is None:
            graph, stream = torch.cuda.CUDAGraph(), side_stream(self._device)
            pool = None if self._workspace is None else self._workspace.pool(self._device)
            recording = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
            # the outer context restores the stream, which torch does not do where it cannot begin or end a recording
            with ONE_AT_A_TIME, torch.cuda.stream(stream), recording:
                # no branches in a shared pool: memory taken on a branch's stream is not reused on other graphs' streams
                self._launches.run(may_branch=self._workspace is None)
            # not before: a graph whose recording failed cannot be replayed
            self._graph = graph
            if self._workspace is not None:
                self._workspace.add_graph(graph, self._device)
        self._graph.replay()

    def refresh(self, grads: Sequence[Tensor], *, same_layout: bool = False) -> None:
        """Take over new gradients, from the next step on.

        ``same_layout``: dtypes and strides are known to be those of the gradients before.
        """
        used = list(grads)
        if not same_layout:
            self._check_dtypes(used)
        if not same_layout or self._copies:
            used = [_as_stored(grad, param) for grad, param in zip(grads, self._params, strict=True)]
            self._copies = [mine for mine, given in zip(used, grads) if mine is not given]
        addresses = list(map(Tensor.data_ptr, used))
        if addresses == self._grad_addresses:
            return
        if 0 in addresses and self._device.type != "meta":
            name = self._grad_names[addresses.index(0)]
            raise ValueError(f"{name} has elements but no memory: its storage was freed")
        # forget the old ones first: where this is interrupted, the inputs may be those of either
        self._grad_addresses = []
        starts = [addresses[parameter] + offset for parameter, offset in self._offsets]
        self._inputs.set_addresses(starts)
        # only starts matter: sizes are those of the parameters' matrices, which `state_is_aligned` covers
        aligned = all(start % ALIGNMENT == 0 for start in starts)
        if aligned != self._launches.gradients_are_aligned:
            # first: once the alignment is noted, nothing else drops a graph for the other one
            self._forget_recorded()
            self._launches.gradients_are_aligned = aligned
        self._grad_addresses = addresses

    def _check_dtypes(self, grads: Sequence[Tensor]) -> None:
        for name, grad in zip(self._grad_names, grads, strict=True):
            if grad.dtype != self._grad_dtype:
                raise ValueError(f"{name} must stay {self._grad_dtype}, got {grad.dtype}; build a new plan")

    def _forget_recorded(self) -> None:
        """Drop the recorded graph, so that the next step records anew."""
        # no graph may be dropped while another is captured; inputs that change in a capture change again after it
        if not is_capturing(self._device):
            self._graph = None

    @property
    def num_copied(self) -> int:
        """How many gradients were copied, once each, because their layout differs from their parameter's."""
        return len(self._copies)

    @property
    def launches(self) -> int:
        """Kernel launches of one step."""
        return self._launches.count

    @property
    def tiles(self) -> dict[int, str]:
        """How each parameter's products are cut into tiles, keyed by the parameter's id."""
        words: dict[int, dict[str, None]] = {id(param): {} for param in self._params}
        for matrix, tiles in zip(self._matrices, self._tile_words, strict=True):
            words[id(self._params[matrix.parameter])][tiles] = None
        return {param: "; ".join(distinct) for param, distinct in words.items()}


def workspace_of(
    tensors: Sequence[MuonTensors], *, rule: MuonRule, ns: NSConfig, variance: bool, stochastic_rounding: bool
) -> list[tuple[int, int]]:
    """The most bytes of a workspace that each parameter's matrices take for X, and for factors.

    This holds for plans of any part of the parameters, with these options.
    """
    first = tensors[0]
    ns, dtype, device = ns.of(first.param), ns.compute_dtype(first.param), first.param.device
    options = StepOptions.of(
        first,
        ns,
        rule=rule,
        variance=variance,
        stochastic_rounding=stochastic_rounding,
        # a plan is aligned only if all its parameters are
        state_is_aligned=all(alignment_of(t)[0] for t in tensors),
        tiles="auto",
        spare_multiprocessors=0,
    )

    @cache
    def in_factors(m: int, n: int) -> bool:
        return steps_in_factors(m, n, ns, dtype, device)

    shapes = [[matrix.shape for matrix in matrices_of(0, t, rule)] for t in tensors]
    # a chain may keep a diagonal for every matrix up to its own last one
    diagonal = nbytes_of_diagonal(max((m for m, n in chain.from_iterable(shapes) if in_factors(m, n)), default=0))

    @cache
    def nbytes_of(m: int, n: int) -> tuple[int, int]:
        moves = does_move(m, n, ns, options.ending, in_factors=in_factors(m, n))
        return nbytes_of_x(m, n, dtype, moves=moves), nbytes_of_factors(m, n, ns, dtype) + diagonal

    sizes = [[nbytes_of(*shape) for shape in each] for each in shapes]
    return [(sum(x for x, _ in each), sum(factors for _, factors in each)) for each in sizes]


def _state_is_aligned(tensors: Sequence[MuonTensors], matrices: Sequence[Matrix]) -> bool:
    """Whether parameters, momentum and masters keep the promise of ALIGNED (`_kernels.muon_tiles`)."""
    owners = ((matrix, tensors[matrix.parameter]) for matrix in matrices)
    return all(is_aligned(matrix, t.param, t.momentum_buffer, t.master) for matrix, t in owners)


def _as_stored(grad: Tensor, param: Tensor) -> Tensor:
    """The gradient in the parameter's strides, copied only if it has others, or is lazily negated."""
    if grad.stride() == param.stride() and not grad.is_neg():
        return grad
    # torch.empty_like would leave out gaps between the parameter's elements
    copy = torch.empty_strided(param.shape, param.stride(), dtype=grad.dtype, device=param.device)
    return copy.copy_(grad)
