"""Time redistributions against ``DTensor.redistribute`` on the running group: the same moves, sizes and tensors.

A row is a move on a mesh; its times are medians of the slowest rank, in milliseconds, with plans cached on both
sides. Both results are compared element by element before the timing; a row whose results differ has no times.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from optim_redist._running import collectives
from optim_redist._tools.progress import progress
from optim_redist.calibration import slowest_seconds
from optim_redist.cost import CommModel
from optim_redist.dtensor import mesh_from, to_placements
from optim_redist.execute import default_model, program_for
from optim_redist.layout import Layout
from optim_redist.parsing import parse_layout
from optim_redist.planning import plan
from optim_redist.units import align

# moves on a mesh of one axis and on a mesh of two, as placements
FLAT_MOVES = [
    ("S(0)", "S(1)"),
    ("S(1)", "S(0)"),
    ("S(0)", "R"),
    ("R", "S(0)"),
    ("Partial(sum)", "S(0)"),
    ("Partial(sum)", "R"),
]
GRID_MOVES = [
    ("S(0),S(0)", "S(1),R"),
    ("S(0),S(0)", "S(1),S(1)"),
    ("S(0),S(1)", "S(1),S(0)"),
    ("S(1),S(0)", "S(0),S(0)"),
    ("S(0),S(0)", "S(0),S(1)"),
    ("R,S(0)", "R,S(1)"),
    ("S(0),R", "R,S(0)"),
    ("R,S(0)", "S(0),R"),
    ("S(0),S(0)", "R,S(0)"),
    ("S(0),S(1)", "R,R"),
    ("S(0),S(0)", "R,R"),
    ("Partial(sum),S(0)", "S(0),R"),
    ("Partial(sum),Partial(sum)", "S(0),S(1)"),
]


@dataclass(frozen=True)
class Row:
    """One measured move; times in ms, volumes in bytes, None where nothing was timed.

    Attributes:
        bound: bytes that the busiest rank must move.
        raw_ms: ``all_to_all_single`` in which every rank receives ``bound`` bytes.
        same: whether both results agree.
    """

    mesh: str
    src: str
    dst: str
    shape: tuple[int, ...]
    bound: int
    planner: str
    ours_ms: float | None
    dtensor_ms: float | None
    raw_ms: float | None
    ours_peak: int | None
    dtensor_peak: int | None
    same: bool

    @property
    def speedup(self) -> float | None:
        return self.dtensor_ms / self.ours_ms if self.ours_ms and self.dtensor_ms else None


def matrix_shape(num_bytes: int) -> tuple[int, int]:
    """A matrix of about ``num_bytes`` of bf16, square or twice as long as wide: 64 MiB are 8192×4096."""
    exponent = round(math.log2(max(1, num_bytes // 2)))
    return 2 ** ((exponent + 1) // 2), 2 ** (exponent // 2)


def measure(
    sizes: Sequence[int], *, against: str = "dtensor", repeats: int = 9, cost_model: CommModel | None = None
) -> list[Row]:
    """Measure FLAT_MOVES on the world's ranks, and GRID_MOVES on 2 × (ranks / 2) if they are 4 or more and even."""
    world = dist.get_world_size()
    device = collectives.device_of(dist.group.WORLD)
    meshes: list[tuple[tuple[int, ...], list[tuple[str, str]]]] = [((world,), FLAT_MOVES)]
    if world >= 4 and world % 2 == 0:
        meshes.append(((2, world // 2), GRID_MOVES))
    tasks = []
    for size in sizes:
        for mesh_sizes, moves in meshes:
            mesh = init_device_mesh(device.type, mesh_sizes)
            tasks += [(size, mesh, *move) for move in moves]
    row_of = partial(_measure_row, device=device, against=against, repeats=repeats, cost_model=cost_model)
    shown = progress(tasks, "bench") if dist.get_rank() == 0 else tasks
    return [row_of(matrix_shape(size), mesh, src, dst) for size, mesh, src, dst in shown]


def _measure_row(
    shape: tuple[int, int],
    mesh: DeviceMesh,
    src_text: str,
    dst_text: str,
    *,
    device: torch.device,
    against: str,
    repeats: int,
    cost_model: CommModel | None,
) -> Row:
    grid = mesh_from(mesh)
    src, dst = (parse_layout(text, grid, num_dims=len(shape)) for text in (src_text, dst_text))
    made = plan(shape, torch.bfloat16, src, dst, cost_model=cost_model or default_model(None))
    local = _local_tensor(src, shape, device)
    theirs = DTensor.from_local(local, mesh, to_placements(src, shape), shape=torch.Size(shape), stride=(shape[1], 1))
    placements = to_placements(dst, shape)
    program = program_for(made)
    ours_call, theirs_call = lambda: program(local), lambda: theirs.redistribute(placements=placements).to_local()
    same = _agree(ours_call(), theirs_call()) if against == "dtensor" else True
    ours_ms = theirs_ms = raw_ms = ours_peak = theirs_peak = None
    bound = made.bounds.lb * made.itemsize
    if same:
        ours_ms, ours_peak = _median_ms(ours_call, device, repeats)
        if against == "dtensor":
            theirs_ms, theirs_peak = _median_ms(theirs_call, device, repeats)
        raw_ms = _raw_ms(bound, device, repeats)
    return Row(
        mesh="×".join(map(str, grid.sizes)),
        src=src_text,
        dst=dst_text,
        shape=shape,
        bound=bound,
        planner=made.planner,
        ours_ms=ours_ms,
        dtensor_ms=theirs_ms,
        raw_ms=raw_ms,
        ours_peak=ours_peak,
        dtensor_peak=theirs_peak,
        same=same,
    )


def _local_tensor(layout: Layout, shape: Sequence[int], device: torch.device) -> Tensor:
    """This rank's part, of whole numbers so small that bf16 holds sums over a few ranks exactly."""
    rank = dist.get_rank()
    local_shape = layout.local_shape(shape, rank)
    # replicas draw the same numbers, all other ranks different ones
    point = layout.mesh.coordinates[rank]
    seed = layout.linear(point, [axis for axis in range(layout.mesh.num_axes) if axis not in layout.replicated_axes])
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randint(-8, 8, local_shape, device=device, generator=generator).to(torch.bfloat16)


def _agree(ours: Tensor | None, theirs: Tensor) -> bool:
    """Whether both tensors are equal on every rank."""
    assert ours is not None, "every rank has a part"
    wrong = torch.tensor([not torch.equal(ours, theirs)], dtype=torch.int32, device=ours.device)
    dist.all_reduce(wrong, op=dist.ReduceOp.MAX)
    return not wrong.item()


def _median_ms(call: Callable[[], object], device: torch.device, repeats: int) -> tuple[float, int | None]:
    """The slowest rank's median time, and the peak of allocated device memory in bytes, None on a CPU."""
    world = dist.group.WORLD
    assert world is not None
    for _ in range(2):
        slowest_seconds(call, world, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times = [slowest_seconds(call, world, device) for _ in range(repeats)]
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return 1e3 * statistics.median(times), peak


def _raw_ms(received_bytes: int, device: torch.device, repeats: int) -> float | None:
    world = dist.get_world_size()
    # NCCL is half as fast on parts that are no multiple of 16 bytes
    part = received_bytes // max(1, world - 1) // 512 * 512
    if not part:
        return None
    sent, received = (torch.zeros(part * world, dtype=torch.uint8, device=device) for _ in range(2))
    return _median_ms(lambda: dist.all_to_all_single(received, sent), device, repeats)[0]


def table(rows: Sequence[Row]) -> str:
    """The rows as text, with the geometric mean of the speedups of the rows that move something."""
    lines = [("mesh", "move", "MiB", "planner", "bound MiB", "ours ms", "DTensor ms", "speedup", "raw ms", "peak GiB")]
    for row in rows:
        tensor = math.prod(row.shape) * 2
        lines.append(
            (
                row.mesh,
                f"{row.src} → {row.dst}",
                f"{tensor / 2**20:g}",
                row.planner,
                f"{row.bound / 2**20:.4g}",
                "differs" if not row.same else _number(row.ours_ms),
                _number(row.dtensor_ms),
                _number(row.speedup, "{:.2f}×"),
                _number(row.raw_ms),
                _number(None if row.ours_peak is None else row.ours_peak / 2**30, "{:.2f}"),
            )
        )
    text = align(lines, right=(2, 4, 5, 6, 7, 8, 9))
    for size in sorted({row.shape for row in rows}):
        moving = [row.speedup for row in rows if row.shape == size and row.bound and row.speedup]
        if moving:
            mean = math.exp(statistics.fmean(map(math.log, moving)))
            text += (
                f"\ngeometric mean over {len(moving)} moving rows at {math.prod(size) * 2 / 2**20:g} MiB: {mean:.2f}×"
            )
    return text


def _number(value: float | None, form: str = "{:.3g}") -> str:
    return "-" if value is None else form.format(value)


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """The rows, with the versions and the machine they were measured on."""
    return {
        "format": "optim-redist.bench/1",
        "torch": torch.__version__,
        "backend": dist.get_backend(),
        "world": dist.get_world_size(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "rows": [asdict(row) for row in rows],
    }
