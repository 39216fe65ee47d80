"""``optim-redist``: plans, bounds, proofs and measurements from the command line.

Layouts may be written in any of the four notations of ``parse_layout``. Every command takes ``--json``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from io import TextIOWrapper
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optim_redist._dtypes import dtype_name, itemsize
from optim_redist.cost import CommModel, Topology
from optim_redist.errors import RedistError
from optim_redist.layout import Layout, Mesh
from optim_redist.parsing import parse_layout, parse_mesh
from optim_redist.plan_text import bounds_lines
from optim_redist.units import is_count, parse_bytes

if TYPE_CHECKING:
    from optim_redist.plans import Plan

    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_MODELS = "h200x4, h200x8, nodes-400g, nccl, flat, or a file of calibrate"
_EXAMPLES = """examples:
  optim-redist plan --shape 8,8,8,4 --mesh 4,2,4 --src "D_[4,2,4]_|_{(0,1),-,-,-}(1,-,-,-)" \\
                    --dst "[-,1~4,0~2,-]" --topology nodes:axis0 --dtype bf16
  optim-redist explain --shape 65536,65536 --mesh dp=2,tp=4 --src "S(0),S(1)" --dst "S(1),S(0)" --model h200x8
  optim-redist bound --shape 16,16,16 --mesh x=4,y=2 --src "P('y',None,'x')" --dst "P(None,('x','y'),None)"
  optim-redist plan --shape 64,64 --mesh 2,4 --src "S(0),S(1)" --dst "S(1),S(0)" --json > swap.json
  optim-redist verify swap.json --execute gloo:8
  torchrun --nproc-per-node 8 -m optim_redist calibrate --out h200x8.json --seconds 60
  torchrun --nproc-per-node 8 -m optim_redist bench --against dtensor --sizes 64MiB,512MiB --out redist.json
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, 1 if a check failed, or 2 if the request or its files made no sense."""
    options = _parser().parse_args(arguments)
    if isinstance(sys.stdout, TextIOWrapper):
        # tables have characters that not every encoding has
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # the reader, `head` for example, has closed the pipe: what Python still flushes at exit goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except (RedistError, OSError) as error:
        print(f"optim-redist: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="optim-redist",
        description="Move tensors between distributed layouts: what no plan can beat, the cheapest plan, its proof.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    _task_command(commands, "plan", partial(_show, text=str), "the cheapest plan as a table")
    explain = partial(_show, text=methodcaller("explain"))
    _task_command(commands, "explain", explain, "the plan, what binds it, and what every alternative would cost")
    _task_command(commands, "bound", _bound, "what no plan can beat")

    verify = _command(commands, "verify", _verify, "prove plans right, and run them")
    verify.add_argument("file", type=Path, help="a file of examples, or a plan that plan --json printed")
    verify.add_argument(
        "--execute", metavar="HOW", help="run them as well: simulate, or gloo:8 for eight ranks of gloo"
    )
    verify.add_argument("--limit", type=_count, metavar="N", help="only the first N redistributions")

    calibrate = _command(commands, "calibrate", _calibrate, "measure the collectives of this machine (under torchrun)")
    calibrate.add_argument(
        "--out", type=Path, default=Path("costs.json"), help="where to write the model (default: costs.json)"
    )
    calibrate.add_argument(
        "--seconds", type=float, default=60, help="about how long it may take, if three calls fit (default: 60)"
    )
    calibrate.add_argument("--mesh", type=_read(parse_mesh), help="measure groups along the axes of this mesh too")
    calibrate.add_argument("--sizes", type=_read(_sizes), help="bytes per rank, such as 4KiB,1MiB,64MiB")

    bench = _command(commands, "bench", _bench, "time moves beside DTensor.redistribute (under torchrun)")
    bench.add_argument(
        "--against", choices=["dtensor", "none"], default="dtensor", help="what to time as well (default: dtensor)"
    )
    bench.add_argument(
        "--sizes",
        type=_read(_sizes),
        default=[64 << 20],
        help="bytes of the tensors, such as 64MiB,2GiB (default: 64MiB)",
    )
    bench.add_argument("--repeats", type=_count, default=9, help="calls, of which the median is taken (default: 9)")
    bench.add_argument("--model", type=_read(_model), help=f"cost model to plan with: {_MODELS}")
    bench.add_argument("--out", type=Path, help="write the rows as JSON")
    return parser


def _command(
    commands: _Commands, name: str, run: Callable[[argparse.Namespace], int], summary: str
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=summary)
    command.set_defaults(run=run)
    command.add_argument("--json", action="store_true", help="machine-readable output")
    return command


def _task_command(commands: _Commands, name: str, run: Callable[[argparse.Namespace], int], summary: str) -> None:
    command = _command(commands, name, run, summary)
    command.add_argument("--shape", type=_shape, required=True, help="global shape, such as 8,8,8,4")
    command.add_argument(
        "--mesh", type=_read(parse_mesh), help="ranks as a grid: 4,2,4 or x=4,y=2; D_[…] brings its own"
    )
    command.add_argument(
        "--dst-mesh", type=_read(parse_mesh), help="the target's grid where it differs; ranks start at 0"
    )
    command.add_argument("--src", required=True, help="the layout it has, in any notation")
    command.add_argument("--dst", required=True, help="the layout it should get, in any notation")
    command.add_argument("--dtype", default="bf16", help="such as bf16 (the default), float32, int8")
    command.add_argument(
        "--topology",
        help="flat, nodes:8 (ranks per node), nodes:axis0 or nodes:axis:dp (a mesh axis numbers the nodes)",
    )
    command.add_argument(
        "--partial-init",
        choices=["owner", "divide"],
        default="owner",
        help="how a sum that the target has pending begins: the value at one coordinate, or value / n at each of n",
    )
    command.add_argument("--model", type=_read(_model), help=f"cost model: {_MODELS}")
    if name != "bound":
        command.add_argument(
            "--memory-limit", type=_read(parse_bytes), help="bytes that no rank may exceed, such as 40GiB"
        )
        command.add_argument("--donate", action="store_true", help="the source may be given up once read")
        command.add_argument(
            "--picture",
            metavar="HOW",
            help="draw every layout and the traffic as well: ascii, svg (printed alone), or a file such as plan.svg or "
            "plan.png (matplotlib)",
        )


# -- reading options


def _shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in text.split(",")) if text.strip() else ()
    except ValueError:
        raise argparse.ArgumentTypeError(f"a shape is written 8,8,4, got {text!r}") from None


def _count(text: str) -> int:
    if not is_count(text) or not int(text):
        raise argparse.ArgumentTypeError(f"a whole number from 1 on, got {text!r}")
    return int(text)


def _read(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """``parse`` for argparse, which would drop the message of a ValueError."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except (RedistError, OSError) as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


def _sizes(text: str) -> list[int]:
    found = [parse_bytes(part) for part in text.split(",")]
    if min(found) < 1:
        raise RedistError(f"sizes are of 1 byte or more, got {text!r}")
    return found


def _model(text: str) -> CommModel:
    try:
        return CommModel.preset(text)
    except RedistError:
        if Path(text).suffix == ".json" or Path(text).is_file():
            return CommModel.load(text)
        raise


def _topology(text: str | None, mesh: Mesh) -> Topology | None:
    if text is None:
        return None
    if text == "flat":
        return Topology.flat(mesh.num_ranks)
    kind, _, what = text.partition(":")
    if kind == "nodes" and is_count(what):
        return Topology.nodes(int(what))
    if kind == "nodes" and what.startswith("axis"):
        axis = what.removeprefix("axis").lstrip(":")
        return Topology.from_mesh_axis(mesh, int(axis) if is_count(axis) else axis)
    raise RedistError(f"--topology is flat, nodes:8, nodes:axis0 or nodes:axis:dp, got {text!r}")


def _layouts(options: argparse.Namespace) -> tuple[Layout, Layout]:
    """Source and target; a target without a mesh of its own takes the source's."""
    num_dims = len(options.shape)
    src_mesh = options.mesh or _mesh_of(options.src)
    dst_mesh = _mesh_of(options.dst)
    if dst_mesh is None or dst_mesh == src_mesh:
        # the source's may have names
        dst_mesh = src_mesh
    found = []
    for option, text, mesh in (("--src", options.src, src_mesh), ("--dst", options.dst, options.dst_mesh or dst_mesh)):
        try:
            found.append(parse_layout(text, mesh, num_dims=num_dims))
        except RedistError as error:
            raise type(error)(f"{option}: {error}") from error
    return found[0], found[1]


def _mesh_of(text: str) -> Mesh | None:
    """The mesh that a layout in the notebook's notation brings; None for the other notations, which bring none."""
    return parse_layout(text).mesh if text.strip().startswith("D_") else None


def _made_plan(options: argparse.Namespace) -> Plan:
    from optim_redist.planning import plan

    src, dst = _layouts(options)
    return plan(
        options.shape,
        options.dtype,
        src,
        dst,
        cost_model=options.model,
        topology=_topology(options.topology, src.mesh),
        memory_limit=options.memory_limit,
        donate=options.donate,
        partial_init=options.partial_init,
    )


def _print_json(data: object) -> None:
    print(json.dumps(data, indent=1))


# -- commands


def _show(options: argparse.Namespace, text: Callable[[Plan], str]) -> int:
    if options.json and options.picture in ("ascii", "svg"):
        raise RedistError(f"--json and --picture {options.picture} both print; give --picture a file such as plan.svg")
    made = _made_plan(options)
    if options.picture not in (None, "ascii", "svg"):
        # what cannot be written is said before anything is printed
        _save_picture(made, options.picture)
    if options.json:
        _print_json(made.to_json())
    elif options.picture == "svg":
        print(made.picture("svg"), end="")
    else:
        print(text(made))
        if options.picture == "ascii":
            print("\n" + made.picture())
        elif options.picture:
            print(f"\npicture written to {options.picture}")
    return 0


def _save_picture(made: Plan, name: str) -> None:
    from optim_redist.pictures import save_picture

    path = Path(name)
    if not path.suffix:
        raise RedistError(f"--picture is ascii, svg, or a file such as plan.svg or plan.png, got {name!r}")
    save_picture(made.picture, path)


def _bound(options: argparse.Namespace) -> int:
    from optim_redist.lower_bounds import bounds

    src, dst = _layouts(options)
    topology = _topology(options.topology, src.mesh)
    if options.model is not None:
        # as plan does, whose bounds these are
        topology = options.model.in_groups_of(topology).topology
    width = itemsize(dtype_name(options.dtype))
    found = bounds(options.shape, src, dst, topology, itemsize=width, partial_init=options.partial_init)
    if options.json:
        _print_json({"shape": list(options.shape), "dtype": options.dtype, "itemsize": width, **found.to_json()})
    else:
        print(f"from {src} on {src.mesh}\nto   {dst} on {dst.mesh}")
        print("\n".join(bounds_lines(found, width)))
    return 0


def _verify(options: argparse.Namespace) -> int:
    from optim_redist.checking import check_file

    results = check_file(options.file, options.execute, options.limit)
    failed = [result for result in results if result["problem"] is not None]
    if options.json:
        _print_json({"checked": len(results), "failed": len(failed), "results": results})
    else:
        for result in failed:
            print(f"{result['name']}: {result['problem']}")
        executed = sum(result["executed"] for result in results)
        proven = len(results) - len(failed)
        print(f"{proven} redistributions proven, {executed} executed, {len(failed)} wrong")
        if options.execute and executed < len(results):
            number = len(results) - executed
            print(f"not executed: {number}, wrong, with pending reductions or on more ranks than there are")
    return 1 if failed else 0


def _calibrate(options: argparse.Namespace) -> int:
    import torch.distributed as dist

    from optim_redist.calibration import calibrate

    with joined_ranks() as device:
        mesh = None
        if options.mesh is not None:
            from torch.distributed.device_mesh import init_device_mesh

            if options.mesh.num_ranks != dist.get_world_size():
                raise RedistError(f"--mesh {options.mesh} is of other ranks than the {dist.get_world_size()} here")
            mesh = init_device_mesh(device, options.mesh.sizes, mesh_dim_names=options.mesh.names)
        model = calibrate(mesh=mesh, sizes=options.sizes, seconds=options.seconds, out=options.out)
        if dist.get_rank() == 0:
            if options.json:
                _print_json(model.to_json())
            else:
                print(f"{model.id}: {len(model.curves)} collectives measured, written to {options.out}")
    return 0


def _bench(options: argparse.Namespace) -> int:
    import torch.distributed as dist

    from optim_redist import benchmarking
    from optim_redist.calibration import check_folder

    with joined_ranks():
        whole = dist.group.WORLD
        assert whole is not None, "the ranks have joined"
        check_folder(options.out, whole)
        rows = benchmarking.measure(
            options.sizes, against=options.against, repeats=options.repeats, cost_model=options.model
        )
        if dist.get_rank() == 0:
            data = benchmarking.as_json(rows)
            if options.out is not None:
                options.out.write_text(json.dumps(data, indent=1) + "\n")
            if options.json:
                _print_json(data)
            else:
                print(benchmarking.table(rows))
    return 0 if all(row.same for row in rows) else 1


@contextmanager
def joined_ranks() -> Iterator[str]:
    """Join the process group of the ranks that torchrun started, while the block runs; yields "cuda" or "cpu"."""
    import torch
    import torch.distributed as dist

    if "RANK" not in os.environ:
        raise RedistError(
            "this command measures running ranks; start it with torchrun --nproc-per-node N -m optim_redist …"
        )
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
        # a rank that refuses its options would otherwise exit while other ranks still connect to it
        dist.barrier()
    try:
        yield kind
    finally:
        # A thread of gloo may still hold tensors of the last collective. It needs the GIL to release them, and aborts a
        # process that ends meanwhile (torch 2.13), so leave it the GIL for a moment.
        time.sleep(0.1)
        dist.destroy_process_group()
