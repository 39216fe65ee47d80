"""The launches of a Muon step, in order; a `MuonBatchPlan` says when they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from optim_kernels._impl import is_interpreted
from optim_kernels._kernels import muon_momentum as front
from optim_kernels._kernels import muon_update as back
from optim_kernels._newton_schulz.chain_jobs import Ending
from optim_kernels._newton_schulz.config import NSConfig, Tiles
from optim_kernels._newton_schulz.tile_choice import num_multiprocessors
from optim_kernels._newton_schulz.tiles import PING_PONG, TILE_GROUP, cdiv
from optim_kernels._triton import FUSED, TRITON_DTYPES, can_overlap
from optim_kernels.functional._muon_chains import StepChain
from optim_kernels.functional._muon_families import ChainedBatches, Family
from optim_kernels.functional._muon_inputs import StepInputs
from optim_kernels.functional._muon_matrices import MuonTensors
from optim_kernels.functional._muon_products import FamilyProducts, LastProduct
from optim_kernels.functional._muon_tables import MuonTables
from optim_kernels.reference.muon import MuonRule
from optim_kernels.reference.storage import MASTER_KINDS

# Values that one program of a per-matrix kernel reduces at a time.
LINE_BLOCK = 1024
# Programs that share writing a matrix's X again if its guessed norm was far off; interpreted ones always cost time.
RESCUERS = 2 if is_interpreted() else 16


@dataclass(frozen=True)
class StepOptions:
    """What a step computes, and the dtypes of its tensors.

    Args:
        state_is_aligned: whether parameters, momentum and masters keep the promise of ALIGNED (`_kernels.muon_tiles`).
        tiles: what tiles are chosen by.
        spare_multiprocessors: how many long launches leave free for other kernels.
    """

    rule: MuonRule
    ns: NSConfig
    tiles: Tiles
    spare_multiprocessors: int
    variance: bool
    stochastic_rounding: bool
    state_is_aligned: bool
    x_dtype: torch.dtype
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    buffer_dtype: torch.dtype
    master_dtype: torch.dtype | None

    @classmethod
    def of(cls, tensors: MuonTensors, ns: NSConfig, **options: Any) -> StepOptions:
        master = None if tensors.master is None else tensors.master.dtype
        return cls(
            ns=ns,
            x_dtype=ns.compute_dtype(tensors.param),
            param_dtype=tensors.param.dtype,
            grad_dtype=tensors.grad.dtype,
            buffer_dtype=tensors.momentum_buffer.dtype,
            master_dtype=master,
            **options,
        )

    @property
    def has_factors(self) -> bool:
        """Whether O is multiplied by factors that are computed from all of O."""
        return self.variance or self.rule.renormalize

    @property
    def draws_bits(self) -> bool:
        """Whether parameters are rounded at random."""
        return self.stochastic_rounding and self.param_dtype == torch.bfloat16 and self.master_dtype is None

    @property
    def updates_in_last_product(self) -> bool:
        """Whether the last product updates the parameters in its epilogue, without storing O."""
        return not self.has_factors and not self.draws_bits and self.state_is_aligned

    @property
    def ending(self) -> Ending:
        """What follows the last product."""
        if self.has_factors:
            return Ending.SQUARES
        return Ending.UPDATE if self.updates_in_last_product else Ending.STORE

    @property
    def of_update(self) -> dict[str, Any]:
        """Compile-time arguments of every kernel that updates parameters."""
        return {
            "P_DTYPE": TRITON_DTYPES[self.param_dtype],
            "MASTER_KIND": MASTER_KINDS[self.master_dtype],
            "CAUTIOUS": self.rule.cautious,
        }


class StepLaunches:
    """Everything a step launches, on the tables of a plan.

    Attributes:
        gradients_are_aligned: whether the gradients in the tables begin where ALIGNED promises (`_kernels.muon_tiles`).
    """

    gradients_are_aligned = False

    def __init__(
        self,
        tables: MuonTables,
        families: Sequence[Family],
        chains: Sequence[ChainedBatches],
        inputs: StepInputs,
        options: StepOptions,
    ) -> None:
        self._tables, self._inputs, self._options = tables, inputs, options
        self._x_dtype = TRITON_DTYPES[options.x_dtype]
        self._families = families
        self._products = [FamilyProducts(family, options.ns, tables, options.tiles) for family in families]
        common: dict[str, Any] = {"ending": options.ending, "of_update": options.of_update}
        common["spare_multiprocessors"] = options.spare_multiprocessors
        self._chains = [StepChain(chain, number, options.ns, tables, **common) for number, chain in enumerate(chains)]

    def take_inputs(self) -> None:
        """Let the chains read the tensors that the inputs have now."""
        for chain in self._chains:
            chain.take(self._inputs)

    def keep_for_graph(self) -> None:
        """Take note that the step is being captured into a graph of the caller's."""
        self._inputs.keep_for_graph()
        for chain in self._chains:
            chain.keep_for_graph()

    def run(self, *, may_branch: bool = False) -> None:
        """Launch the whole step; with ``may_branch``, for recording a graph, small families go on parallel branches."""
        if self._options.rule.row_equilibrate:
            self._equilibrated_momentum()
        else:
            self._momentum()
        for chain in self._chains:
            chain.run()
        if may_branch and self._gains_by_branches:
            self._orthogonalize_in_parallel()
        else:
            for products in self._products:
                self._orthogonalize(products)
        if self._options.has_factors:
            self._variance()
        # as in plain torch, steps are counted also for parameters that need no bits
        if self._options.stochastic_rounding:
            back.advance_kernel[(len(self._tables.steps),)](self._tables.steps, self._inputs.control, **FUSED)
        if not self._options.updates_in_last_product:
            self._update()

    @property
    def count(self) -> int:
        """How many launches a step takes."""
        options = self._options
        around = 2 if options.rule.row_equilibrate else 3
        around += options.has_factors + options.stochastic_rounding + (not options.updates_in_last_product)
        return around + len(self._chains) + sum(products.count for products in self._products)

    @property
    def _gains_by_branches(self) -> bool:
        """Whether families fill each other's last waves; on the ping-pong schedule each fills the chip by itself."""
        batches = [batch for family in self._families for batch in family]
        return len(self._families) > 1 and not all(batch.takes_ping_pong for batch in batches)

    @property
    def _of_gradient(self) -> dict[str, Any]:
        options = self._options
        return {
            "G_DTYPE": TRITON_DTYPES[options.grad_dtype],
            "B_DTYPE": TRITON_DTYPES[options.buffer_dtype],
            "NESTEROV": options.rule.nesterov,
            "MAXIMIZE": options.rule.maximize,
            "ALIGNED": options.state_is_aligned and self.gradients_are_aligned,
        }

    @property
    def _of_norm(self) -> dict[str, Any]:
        ns = self._options.ns
        return {"norm_scale": ns.norm_scale, "eps": ns.eps, "ADD_EPS": ns.eps_mode == "add", "BLOCK": LINE_BLOCK}

    def _momentum(self) -> None:
        t, common = self._tables, (self._inputs.grads, self._inputs.hyper, self._inputs.control)
        num_matrices = len(t.matrices)
        overlap = can_overlap(t.matrices.device)
        early: dict[str, Any] = {"OVERLAP": overlap, **({"launch_pdl": True} if overlap else {}), **FUSED}
        front.guess_kernel[(num_matrices,)](t.matrices, *common, t.units, **self._of_gradient, **early)
        front.momentum_kernel[(len(t.tile_map),)](
            t.matrices, t.tile_map, *common, t.units, t.sums, **self._of_gradient, X_DTYPE=self._x_dtype, **early
        )
        front.norm_kernel[(num_matrices, RESCUERS)](
            t.matrices,
            *common,
            t.units,
            t.sums,
            t.scales,
            t.squared_scales,
            t.progress,
            len(self._chains),
            **self._of_norm,
            **self._of_gradient,
            X_DTYPE=self._x_dtype,
            **early,
        )

    def _equilibrated_momentum(self) -> None:
        t = self._tables
        front.strips_kernel[(len(t.strip_map),)](
            t.matrices,
            t.strip_map,
            self._inputs.grads,
            self._inputs.hyper,
            self._inputs.control,
            t.row_squares,
            **self._of_gradient,
            X_DTYPE=self._x_dtype,
            **FUSED,
        )
        front.equilibrate_kernel[(len(t.matrices),)](
            t.matrices,
            t.row_squares,
            t.scales,
            t.squared_scales,
            t.progress,
            len(self._chains),
            **self._of_norm,
            **FUSED,
        )

    def _orthogonalize_in_parallel(self) -> None:
        main = torch.cuda.current_stream()
        branches = [torch.cuda.Stream() for _ in self._products]
        for branch, products in zip(branches, self._products, strict=True):
            branch.wait_stream(main)
            with torch.cuda.stream(branch):
                self._orthogonalize(products)
        for branch in branches:
            main.wait_stream(branch)

    def _orthogonalize(self, products: FamilyProducts) -> None:
        if self._options.ending is Ending.STORE:
            products.run()
            return
        for last in products.run_but_last():
            self._last_product(last)

    def _last_product(self, last: LastProduct) -> None:
        """The last product of a batch, with the update of its parameters, or the sums over O that the update needs."""
        t, tile = self._tables, last.batch.last_tile
        count, m, n = last.x.shape
        if self._options.updates_in_last_product and last.batch.takes_ping_pong and last.betas is None:
            self._ping_pong_update(last)
            return
        rows, columns = cdiv(m, tile.rows), cdiv(n, tile.columns)
        back.last_product_kernel[(count * rows * columns,)](
            TensorDescriptor.from_tensor(last.s, [1, tile.rows, tile.depth]),
            TensorDescriptor.from_tensor(last.x, [1, tile.depth, tile.columns]),
            TensorDescriptor.from_tensor(last.x if last.c is None else last.c, [1, tile.rows, tile.columns]),
            TensorDescriptor.from_tensor(last.out, [1, tile.rows, tile.columns]),
            t.matrices,
            self._inputs.hyper,
            self._inputs.control,
            t.lr_scales,
            t.scales if last.scale is None else last.scale,
            t.parts,
            t.scales if last.betas is None else last.betas,
            last.batch.first,
            rows * columns,
            rows,
            columns,
            m,
            last.alpha,
            last.beta,
            HAS_C=last.c is not None,
            HAS_SCALE=last.scale is not None,
            HAS_BETAS=last.betas is not None,
            SQUARES=self._options.has_factors,
            **self._options.of_update,
            ALIGNED=self._options.state_is_aligned,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.columns,
            BLOCK_K=tile.depth,
            TILE_GROUP=TILE_GROUP,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **FUSED,
        )

    def _ping_pong_update(self, last: LastProduct) -> None:
        """The last product of a large batch on Hopper, and the update of its parameters."""
        from optim_kernels._hopper.ring import descriptor
        from optim_kernels._hopper.update_kernel import update_product_kernel

        t, tile = self._tables, PING_PONG
        count, m, n = last.x.shape
        rows, columns = cdiv(m, tile.rows), cdiv(n, tile.columns)
        total = count * rows * columns
        c = last.x if last.c is None else last.c
        update_product_kernel[(min(total, num_multiprocessors(last.x.device.index)),)](
            descriptor(last.s, tile.rows, tile.depth),
            descriptor(last.x, tile.depth, tile.columns),
            descriptor(c, tile.rows, tile.columns),
            t.matrices,
            self._inputs.hyper,
            self._inputs.control,
            t.lr_scales,
            t.scales if last.scale is None else last.scale,
            last.batch.first,
            total,
            rows * columns,
            rows,
            columns,
            m,
            last.alpha,
            last.beta,
            HAS_C=last.c is not None,
            HAS_SCALE=last.scale is not None,
            **self._options.of_update,
            GROUP=TILE_GROUP,
            DEPTH=tile.depth,
            STAGES=tile.num_stages,
            num_warps=4,
            **FUSED,
        )

    def _variance(self) -> None:
        t, options = self._tables, self._options
        back.variance_kernel[(len(t.matrices),)](
            t.matrices,
            self._inputs.hyper,
            self._inputs.control,
            t.parts,
            t.factors,
            RENORMALIZE=options.rule.renormalize,
            VARIANCE=options.variance,
            BLOCK=LINE_BLOCK,
            num_warps=8,
            **FUSED,
        )

    def _update(self) -> None:
        t, options = self._tables, self._options
        back.update_kernel[(len(t.tile_map),)](
            t.matrices,
            t.tile_map,
            self._inputs.hyper,
            self._inputs.control,
            t.lr_scales,
            t.factors,
            X_DTYPE=self._x_dtype,
            **options.of_update,
            HAS_FACTORS=options.has_factors,
            STOCHASTIC=options.draws_bits,
            ALIGNED=options.state_is_aligned,
            **FUSED,
        )
