"""The launches of a Muon step, in order; `muon_plan` says when they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from optim_kernels import _muon_momentum_kernels as front
from optim_kernels import _muon_table as fields
from optim_kernels import _muon_update_kernels as back
from optim_kernels._impl import is_interpreted
from optim_kernels._muon_tiles import lines_kernel
from optim_kernels._tiles import FULL_PRECISION, INTERPRETED, Tile, cdiv
from optim_kernels._triton import TRITON_DTYPES
from optim_kernels.functional._muon_matrices import MuonTensors
from optim_kernels.functional._muon_products import LastProduct, StepProducts
from optim_kernels.functional._muon_tables import Family, MuonTables
from optim_kernels.orthogonalization import NSConfig, iterate
from optim_kernels.reference.muon import MuonRule

# Values that one program of a per-matrix kernel reduces at a time.
LINE_BLOCK = 1024
# Of the kernels that stream parameters through registers, a tile a program.
TILE_WARPS = 4
# Programs that share the writing of a matrix's X once more.
RESCUERS = 16
# Of the last product, whose epilogue hides behind the other program's main loop; and where those are too few.
LAST_TILE, SMALL_LAST_TILE = Tile(128, 128, 64, 4, 3), Tile(64, 128, 64, 4, 3)
PANEL = 8


@dataclass(frozen=True)
class StepOptions:
    """What a step computes, and the dtypes of its tensors."""

    rule: MuonRule
    ns: NSConfig
    variance: bool
    stochastic_rounding: bool
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    buffer_dtype: torch.dtype
    master_dtype: torch.dtype | None

    @classmethod
    def of(cls, tensors: MuonTensors, **options: Any) -> StepOptions:
        master = None if tensors.master is None else tensors.master.dtype
        return cls(
            param_dtype=tensors.param.dtype,
            grad_dtype=tensors.grad.dtype,
            buffer_dtype=tensors.momentum_buffer.dtype,
            master_dtype=master,
            **options,
        )

    @property
    def has_factors(self) -> bool:
        """Whether O is multiplied with factors that need all of it first."""
        return self.variance or self.rule.renormalize

    @property
    def draws_bits(self) -> bool:
        return self.stochastic_rounding and self.param_dtype == torch.bfloat16 and self.master_dtype is None

    @property
    def of_update(self) -> dict[str, Any]:
        """Compile-time arguments of every kernel that updates parameters."""
        kinds = {None: fields.NO_MASTER, torch.float32: fields.MASTER_FP32, torch.int16: fields.MASTER_LOW}
        return {
            "P_DTYPE": TRITON_DTYPES[self.param_dtype],
            "MASTER_KIND": kinds[self.master_dtype].value,
            "CAUTIOUS": self.rule.cautious,
        }


class Launches:
    """Everything a step launches, on the tables of a plan."""

    state_is_aligned: bool
    gradients_are_aligned: bool

    def __init__(
        self, tables: MuonTables, families: Sequence[Family], hyper: Tensor, control: Tensor, options: StepOptions
    ) -> None:
        self._tables, self._families, self._options = tables, families, options
        self._hyper, self._control = hyper, control
        self._x_dtype = TRITON_DTYPES[families[0][0].x.dtype]

    def launch(self, *, parallel: bool = False) -> None:
        """The whole step; with ``parallel`` each family on a branch of its own, filling the others' last rounds."""
        options = self._options
        if options.rule.row_equilibrate:
            self._momentum_of_equilibrated()
        else:
            self._momentum()
        if parallel and len(self._families) > 1:
            main = torch.cuda.current_stream()
            branches = [torch.cuda.Stream() for _ in self._families]
            for branch, family in zip(branches, self._families, strict=True):
                branch.wait_stream(main)
                with torch.cuda.stream(branch):
                    self._orthogonalize(family)
            for branch in branches:
                main.wait_stream(branch)
        else:
            for family in self._families:
                self._orthogonalize(family)
        if options.has_factors:
            self._variance()
        if options.draws_bits:
            back.advance_kernel[(len(self._tables.steps),)](self._tables.steps, self._control)
        if not self._updates_in_last_product:
            self._update()

    @property
    def count(self) -> int:
        """How many launches that is."""
        options, ns = self._options, self._options.ns
        front_and_back = 4 if options.rule.row_equilibrate else 3
        front_and_back += (3 if options.has_factors else 0) + (1 if options.draws_bits else 0)
        front_and_back += 0 if self._updates_in_last_product else 1
        return front_and_back + sum(_iteration_launches(family, ns) for family in self._families)

    @property
    def _updates_in_last_product(self) -> bool:
        options = self._options
        return not options.has_factors and not options.draws_bits and self.state_is_aligned

    @property
    def _of_gradient(self) -> dict[str, Any]:
        options = self._options
        return {
            "G_DTYPE": TRITON_DTYPES[options.grad_dtype],
            "B_DTYPE": TRITON_DTYPES[options.buffer_dtype],
            "NESTEROV": options.rule.nesterov,
            "MAXIMIZE": options.rule.maximize,
            "ALIGNED": self.state_is_aligned and self.gradients_are_aligned,
        }

    @property
    def _of_norm(self) -> tuple[dict[str, float], dict[str, Any]]:
        ns = self._options.ns
        return {"norm_scale": ns.norm_scale, "eps": ns.eps}, {"ADD_EPS": ns.eps_mode == "add", "BLOCK": LINE_BLOCK}

    def _momentum(self) -> None:
        t, common = self._tables, (self._hyper, self._control)
        numbers, constants = self._of_norm
        num_matrices = len(t.matrices)
        front.guess_kernel[(num_matrices,)](t.matrices, *common, t.units, **self._of_gradient)
        self._move_momentum(equilibrate=False)
        front.norm_kernel[(num_matrices, RESCUERS)](
            t.matrices,
            *common,
            t.units,
            t.sums,
            t.scales,
            t.squared_scales,
            **numbers,
            **constants,
            **self._of_gradient,
            X_DTYPE=self._x_dtype,
        )

    def _momentum_of_equilibrated(self) -> None:
        t = self._tables
        numbers, constants = self._of_norm
        self._move_momentum(equilibrate=True)
        self._add_lines(by_rows=True)
        front.equilibrate_kernel[(len(t.matrices),)](t.matrices, t.lines, t.factors, **numbers, **constants)
        front.normalize_kernel[(len(t.tile_map),)](
            t.matrices,
            t.tile_map,
            self._hyper,
            self._control,
            t.factors,
            **self._of_gradient,
            X_DTYPE=self._x_dtype,
            num_warps=TILE_WARPS,
        )

    def _move_momentum(self, *, equilibrate: bool) -> None:
        t = self._tables
        front.momentum_kernel[(len(t.tile_map),)](
            t.matrices,
            t.tile_map,
            self._hyper,
            self._control,
            t.units,
            t.sums,
            **self._of_gradient,
            X_DTYPE=self._x_dtype,
            EQUILIBRATE=equilibrate,
            num_warps=TILE_WARPS,
        )

    def _add_lines(self, *, by_rows: bool) -> None:
        t = self._tables
        lines_kernel[(len(t.line_map),)](t.matrices, t.line_map, t.sums, t.lines, BY_ROWS=by_rows)

    def _orthogonalize(self, family: Family) -> None:
        options = self._options
        tables = None if options.rule.row_equilibrate else self._tables
        products = StepProducts(family, options.ns, tables=tables, leave_last=self._updates_in_last_product)
        iterate([batch.x for batch in family], options.ns, products)
        for last in products.last:
            self._update_by(last)

    def _update_by(self, last: LastProduct) -> None:
        """The last product of a batch, and the update of its parameters."""
        count, m, n = last.x.shape
        tile = _last_tile(last.x)
        rows, columns = cdiv(m, tile.rows), cdiv(n, tile.columns)
        back.last_product_kernel[(count * rows * columns,)](
            TensorDescriptor.from_tensor(last.s, [1, tile.rows, tile.depth]),
            TensorDescriptor.from_tensor(last.x, [1, tile.depth, tile.columns]),
            TensorDescriptor.from_tensor(last.x if last.c is None else last.c, [1, tile.rows, tile.columns]),
            self._tables.matrices,
            self._hyper,
            self._control,
            self._tables.lr_scales,
            self._tables.scales if last.scale is None else last.scale,
            last.batch.first,
            rows * columns,
            rows,
            columns,
            m,
            last.alpha,
            last.beta,
            HAS_C=last.c is not None,
            HAS_SCALE=last.scale is not None,
            **self._options.of_update,
            ALIGNED=self.state_is_aligned,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.columns,
            BLOCK_K=tile.depth,
            PANEL=PANEL,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )

    def _variance(self) -> None:
        t, options = self._tables, self._options
        back.squares_kernel[(len(t.tile_map),)](
            t.matrices, t.tile_map, t.sums, X_DTYPE=self._x_dtype, ALIGNED=self.state_is_aligned
        )
        self._add_lines(by_rows=False)
        back.variance_kernel[(len(t.matrices),)](
            t.matrices,
            self._hyper,
            self._control,
            t.lines,
            t.factors,
            RENORMALIZE=options.rule.renormalize,
            VARIANCE=options.variance,
            BLOCK=LINE_BLOCK,
        )

    def _update(self) -> None:
        t, options = self._tables, self._options
        back.update_kernel[(len(t.tile_map),)](
            t.matrices,
            t.tile_map,
            self._hyper,
            self._control,
            t.lr_scales,
            t.factors,
            X_DTYPE=self._x_dtype,
            **options.of_update,
            HAS_FACTORS=options.has_factors,
            STOCHASTIC=options.draws_bits,
            ALIGNED=self.state_is_aligned,
            num_warps=TILE_WARPS,
        )


def _last_tile(x: Tensor) -> Tile:
    if is_interpreted():
        return INTERPRETED
    if x.dtype == torch.float32:
        return FULL_PRECISION
    count, m, n = x.shape
    num_sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    tiles = count * cdiv(m, LAST_TILE.rows) * cdiv(n, LAST_TILE.columns)
    return LAST_TILE if tiles > 2 * num_sms else SMALL_LAST_TILE


def _iteration_launches(family: Family, ns: NSConfig) -> int:
    """Launches of one family's iteration: two for each shape a step or block, the others once."""
    shapes = len(family)
    if ns.method_for(*family[0].x.shape[-2:]) == "standard":
        return sum(2 * shapes + (1 if c != 0.0 else 0) for _, _, c in ns.triples)
    # of a block of k steps: Z each, P and R in all but the last, Q in all but the first
    return sum(len(block) + 3 * (len(block) - 1) + 2 * shapes for block in ns.blocks)
