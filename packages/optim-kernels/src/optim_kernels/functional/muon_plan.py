"""The whole Muon step of many matrices as a fixed sequence of grouped launches: tables once, then run.

    momentum → lines → equilibrate → normalize → Newton–Schulz, family by family → squares → lines → variance → update

(`_muon_momentum_kernels` and `_muon_update_kernels` say what each does; the three before the last run with NorMuon or
renormalisation only). Matrices of one shape are one batch, batches with one short side and one iteration are a family
and share their m×m products. Everything decided per step in Python is decided here once: addresses, tiles, batches.
After a first run, which compiles, the sequence is recorded as a CUDA graph and replayed, families on parallel branches;
hyperparameters and gradient addresses live in device tables, so a step with new ones replays the same graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from optim_kernels import _muon_momentum_kernels, _muon_update_kernels
from optim_kernels import _muon_table as fields
from optim_kernels._muon_tiles import lines_kernel
from optim_kernels._tiles import cdiv
from optim_kernels._triton import TRITON_DTYPES
from optim_kernels.functional._muon_matrices import (
    TILE,
    MuonTensors,
    address_of,
    is_aligned,
    matrices_of,
    on_device,
    why_not_plan,
)
from optim_kernels.muon_kernels import PingPongProducts
from optim_kernels.orthogonalization import NSConfig, iterate
from optim_kernels.reference.muon import MuonRule

__all__ = ["MuonPlan", "MuonTensors", "why_not_plan"]

# Values that one program of a per-matrix kernel reduces at a time.
LINE_BLOCK = 1024
# Elements to which rows of X are padded: 16 bytes in 16-bit dtypes.
ROW_STEP = 8


class MuonPlan:
    """Tables, buffers and the recorded launches of a Muon step on a fixed list of parameters.

    Args:
        tensors: every parameter's tensors; each must pass `why_not_plan`.
        rule, ns: what is computed.
        variance: whether second moments are moved (NorMuon).
        num_groups: rows of hyperparameters; a parameter names its own by ``group``.
    """

    def __init__(
        self, tensors: Sequence[MuonTensors], *, rule: MuonRule, ns: NSConfig, variance: bool, num_groups: int = 1
    ) -> None:
        self._rule, self._ns, self._variance = rule, ns, variance
        self._tensors = list(tensors)
        self._grads = [t.grad for t in tensors]
        first = tensors[0].param
        self._device = first.device
        self._x_dtype = ns.compute_dtype(first)
        self._matrices = [matrix for i, t in enumerate(tensors) for matrix in matrices_of(i, t, rule)]
        self._aligned = False
        self._grad_addresses: list[int] = []
        # A graph of the caller's writes its own addresses and hyperparameters at every replay, so once there is one,
        # nothing may be assumed to be as the latest step left it.
        self._was_captured = False
        self._captured_addresses: list[Any] = []
        self._build_batches()
        self._build_tables()
        self._hyper = torch.zeros(num_groups, fields.NUM_HYPER.value, device=self._device)
        self._hyper_values: list[list[Any]] | None = None
        # what gradients are multiplied with, and found_inf
        self._control = torch.tensor([1.0, 0.0], device=self._device)
        self._control_is_default = True
        self._graph: torch.cuda.CUDAGraph | None = None
        self._has_run = False

    @classmethod
    def build(cls, tensors: Sequence[MuonTensors], **options: Any) -> MuonPlan:
        """The plan of a list of parameters; see the class."""
        return cls(tensors, **options)

    def run(
        self,
        hyper: Sequence[Sequence[float | Tensor]],
        *,
        factor: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """One step; ``hyper``: (lr, weight_decay, momentum, beta2) of each group; ``factor`` multiplies gradients."""
        capturing = self._is_capturing()
        self._write_hyper(hyper, capturing)
        self._write_control(factor, found_inf)
        if capturing or self._device.type != "cuda" or not self._has_run:
            self._launch()
            self._has_run = True
            return
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._launch(parallel=True)
        self._graph.replay()

    def refresh(self, grads: Sequence[Tensor]) -> None:
        """Take over new gradients; the table is uploaded only if an address has changed."""
        used = [
            grad if grad.stride() == t.param.stride() else torch.empty_like(t.param, dtype=grad.dtype).copy_(grad)
            for grad, t in zip(grads, self._tensors, strict=True)
        ]
        addresses = [grad.data_ptr() for grad in used]
        self._grads = used
        capturing = self._is_capturing()
        if addresses == self._grad_addresses and not (capturing or self._was_captured):
            return
        if any(grad.dtype != t.grad.dtype for grad, t in zip(used, self._tensors, strict=True)):
            raise ValueError("gradients changed their dtype; build a new plan")
        self._grad_addresses = addresses
        sizes = [grad.element_size() for grad in used]
        column = [addresses[m.parameter] + m.offset * sizes[m.parameter] for m in self._matrices]
        host = torch.tensor(column, dtype=torch.int64)
        if self._aligned and any(address % 16 for address in column):
            self._aligned, self._graph = False, None
        host = host.pin_memory() if self._device.type == "cuda" else host
        if capturing:
            # every replay reads it again
            self._captured_addresses.append((host, used))
            self._was_captured = True
        self._table[:, fields.G.value].copy_(host, non_blocking=True)

    @property
    def launches(self) -> int:
        """Kernel launches of one step."""
        step = 5 + (3 if self._variance or self._rule.renormalize else 0)
        return step + sum(_launches_of(family, self._ns) for family in self._families)

    def address_key(self) -> tuple[tuple[int, ...], ...]:
        """`MuonTensors.address_key` of every parameter the plan was built for."""
        return tuple(t.address_key() for t in self._tensors)

    # ---- construction ------------------------------------------------------------------------------------------

    def _build_batches(self) -> None:
        """X buffers, two for each shape, and the families that share their m×m products."""
        by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number, matrix in enumerate(self._matrices):
            by_shape[matrix.short_and_long].append(number)
        self._x_of: dict[int, Tensor] = {}
        self._o_of: dict[int, Tensor] = {}
        families: dict[tuple[int, str], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for (m, n), numbers in sorted(by_shape.items()):
            method = self._ns.method_for(m, n)
            padded = cdiv(n, ROW_STEP) * ROW_STEP
            pair = [
                torch.empty(len(numbers), m, padded, dtype=self._x_dtype, device=self._device)[..., :n]
                for _ in range(2)
            ]
            families[m, method].append((pair[0], pair[1]))
            swaps = len(self._ns.blocks) if method == "gram" else self._ns.steps
            for place, number in enumerate(numbers):
                self._x_of[number] = pair[0][place]
                self._o_of[number] = pair[swaps % 2][place]
        self._families = [families[key] for key in sorted(families)]

    def _build_tables(self) -> None:
        """Device tables of matrices, tiles and blocks of lines."""
        rows: list[list[int]] = []
        scales: list[float] = []
        tile_map: list[tuple[int, int, int]] = []
        line_map: list[tuple[int, int]] = []
        first_line = 0
        for number, matrix in enumerate(self._matrices):
            t = self._tensors[matrix.parameter]
            outer_tiles, inner_tiles = matrix.tiles
            row = [0] * fields.NUM_FIELDS.value
            row[fields.P] = address_of(t.param, matrix.offset)
            row[fields.G] = address_of(t.grad, matrix.offset)
            row[fields.B] = address_of(t.momentum_buffer, matrix.offset)
            row[fields.MASTER] = 0 if t.master is None else address_of(t.master, matrix.offset)
            row[fields.X] = self._x_of[number].data_ptr()
            row[fields.P_STRIDE] = row[fields.G_STRIDE] = row[fields.B_STRIDE] = matrix.stride
            row[fields.X_STRIDE] = self._x_of[number].stride(0)
            row[fields.OUTER], row[fields.INNER] = matrix.outer, matrix.inner
            row[fields.FIRST_TILE] = len(tile_map)
            row[fields.OUTER_TILES], row[fields.INNER_TILES] = outer_tiles, inner_tiles
            row[fields.FIRST_LINE] = first_line
            row[fields.ROWS_ARE_INNER] = matrix.rows_are_inner
            row[fields.GROUP] = t.group
            rows.append(row)
            scales.append(matrix.scale)
            tile_map += [(number, i * TILE, j * TILE) for i, j in product(range(outer_tiles), range(inner_tiles))]
            blocks = max(outer_tiles, inner_tiles)
            line_map += [(number, block) for block in range(blocks)]
            first_line += blocks * TILE
        self._place_second_moments(rows)
        device = self._device
        self._table = torch.tensor(rows, dtype=torch.int64, device=device)
        after = [[*row] for row in rows]
        for number, row in enumerate(after):
            row[fields.X] = self._o_of[number].data_ptr()
        self._table_after = torch.tensor(after, dtype=torch.int64, device=device)
        self._scales = torch.tensor(scales, dtype=torch.float32, device=device)
        self._tile_map = torch.tensor(tile_map, dtype=torch.int32, device=device)
        self._line_map = torch.tensor(line_map, dtype=torch.int32, device=device)
        self._sums = torch.empty(len(tile_map), TILE, dtype=torch.float64, device=device)
        self._lines = torch.empty(first_line, dtype=torch.float64, device=device)
        self._factors = torch.empty(first_line, dtype=torch.float32, device=device)
        self._grad_addresses = [t.grad.data_ptr() for t in self._tensors]
        self._aligned = all(is_aligned(row, self._tensors[m.parameter]) for row, m in zip(rows, self._matrices))
        if any(t.grad.stride() != t.param.stride() for t in self._tensors):
            self._grad_addresses = []
            self.refresh([t.grad for t in self._tensors])

    def _place_second_moments(self, rows: list[list[int]]) -> None:
        """Each matrix's part of its parameter's second moment, which holds them in order."""
        if not self._variance:
            return
        taken: dict[int, int] = defaultdict(int)
        for row, matrix in zip(rows, self._matrices, strict=True):
            moment = self._tensors[matrix.parameter].second_moment
            if moment is None or moment.dtype != torch.float32 or not moment.is_contiguous():
                raise ValueError("second moments must be contiguous fp32 tensors (functional.new_second_moment)")
            row[fields.V] = address_of(moment, taken[matrix.parameter])
            taken[matrix.parameter] += max(matrix.outer, matrix.inner)

    # ---- a step ------------------------------------------------------------------------------------------------

    def _write_hyper(self, hyper: Sequence[Sequence[float | Tensor]], capturing: bool) -> None:
        """Bring the device's hyperparameters up to date: floats when they changed, device scalars always."""
        values = [list(row) for row in hyper]
        floats = [[0.0 if on_device(value) else float(value) for value in row] for row in values]
        if capturing:
            # constants of the captured graph; an upload would read host memory at every replay
            for i, j in product(range(len(values)), range(fields.NUM_HYPER.value)):
                self._hyper[i, j].fill_(floats[i][j])
            self._hyper_values = None
        elif floats != self._hyper_values or self._was_captured:
            host = torch.tensor(floats, dtype=torch.float32)
            self._hyper.copy_(host.pin_memory() if self._device.type == "cuda" else host, non_blocking=True)
            self._hyper_values = floats
        for i, row in enumerate(values):
            for j, value in enumerate(row):
                if isinstance(value, Tensor) and on_device(value):
                    self._hyper[i, j].copy_(value.reshape(()))
                    self._hyper_values = None

    def _write_control(self, factor: Tensor | None, found_inf: Tensor | None) -> None:
        if factor is None and found_inf is None:
            if not self._control_is_default or self._was_captured:
                self._control[0].fill_(1.0)
                self._control[1].fill_(0.0)
                self._control_is_default = True
            return
        self._control_is_default = False
        for slot, value, default in ((self._control[0], factor, 1.0), (self._control[1], found_inf, 0.0)):
            if value is None:
                slot.fill_(default)
            else:
                slot.copy_(value.reshape(()))

    def _is_capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _launch(self, *, parallel: bool = False) -> None:
        self._momentum()
        self._orthogonalize(parallel)
        self._update()

    def _momentum(self) -> None:
        rule = self._rule
        first = self._tensors[0]
        dtypes = {"G_DTYPE": TRITON_DTYPES[first.grad.dtype], "B_DTYPE": TRITON_DTYPES[first.momentum_buffer.dtype]}
        of_gradient = {"NESTEROV": rule.nesterov, "MAXIMIZE": rule.maximize, "ALIGNED": self._aligned}
        tiles = (len(self._tile_map),)
        tables = (self._table, self._tile_map, self._hyper, self._control)
        _muon_momentum_kernels.momentum_kernel[tiles](*tables, self._sums, **dtypes, **of_gradient)
        self._add_lines(self._table, by_rows=True)
        _muon_momentum_kernels.equilibrate_kernel[(len(self._matrices),)](
            self._table,
            self._lines,
            self._factors,
            self._ns.norm_scale,
            self._ns.eps,
            EQUILIBRATE=rule.row_equilibrate,
            ADD_EPS=self._ns.eps_mode == "add",
            BLOCK=LINE_BLOCK,
        )
        _muon_momentum_kernels.normalize_kernel[tiles](
            *tables, self._factors, **dtypes, **of_gradient, X_DTYPE=TRITON_DTYPES[self._x_dtype]
        )

    def _add_lines(self, table: Tensor, *, by_rows: bool) -> None:
        lines_kernel[(len(self._line_map),)](table, self._line_map, self._sums, self._lines, BY_ROWS=by_rows)

    def _orthogonalize(self, parallel: bool) -> None:
        """Newton–Schulz on every family; recorded, each on a branch of its own, filling the others' last rounds."""
        if not parallel or len(self._families) == 1:
            for family in self._families:
                self._iterate(family)
            return
        main = torch.cuda.current_stream()
        branches = [torch.cuda.Stream() for _ in self._families]
        for branch, family in zip(branches, self._families, strict=True):
            branch.wait_stream(main)
            with torch.cuda.stream(branch):
                self._iterate(family)
        for branch in branches:
            main.wait_stream(branch)

    def _iterate(self, family: list[tuple[Tensor, Tensor]]) -> None:
        iterate([start for start, _ in family], self._ns, PingPongProducts(family))

    def _update(self) -> None:
        rule, first = self._rule, self._tensors[0]
        x_dtype = TRITON_DTYPES[self._x_dtype]
        has_factors = self._variance or rule.renormalize
        tiles = (len(self._tile_map),)
        if has_factors:
            _muon_update_kernels.squares_kernel[tiles](
                self._table_after, self._tile_map, self._sums, X_DTYPE=x_dtype, ALIGNED=self._aligned
            )
            self._add_lines(self._table_after, by_rows=False)
            _muon_update_kernels.variance_kernel[(len(self._matrices),)](
                self._table_after,
                self._hyper,
                self._control,
                self._lines,
                self._factors,
                RENORMALIZE=rule.renormalize,
                VARIANCE=self._variance,
                BLOCK=LINE_BLOCK,
            )
        _muon_update_kernels.update_kernel[tiles](
            self._table_after,
            self._tile_map,
            self._hyper,
            self._control,
            self._scales,
            self._factors,
            P_DTYPE=TRITON_DTYPES[first.param.dtype],
            X_DTYPE=x_dtype,
            CAUTIOUS=rule.cautious,
            HAS_FACTORS=has_factors,
            HAS_MASTER=first.master is not None,
            ALIGNED=self._aligned,
        )


def _launches_of(family: list[tuple[Tensor, Tensor]], ns: NSConfig) -> int:
    """Launches of one family's iteration: two for each shape a step or block, the others once."""
    shapes = len(family)
    if ns.method_for(*family[0][0].shape[-2:]) == "standard":
        return sum(2 * shapes + (1 if c != 0.0 else 0) for _, _, c in ns.triples)
    # of a block of k steps: Z each, P and R in all but the last, Q in all but the first
    return sum(len(block) + 3 * (len(block) - 1) + 2 * shapes for block in ns.blocks)
