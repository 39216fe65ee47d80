"""Random sequences of redistributions by every entry point: over ranks as one process would slice and add.

An operation is a method; one that makes no sense at the moment returns False and has done nothing. Every rank draws
alike, and calls what it takes part in.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from redist_sequences import (
    IS_NEW,
    SIZES,
    StridedShard,
    Tracked,
    Wire,
    check_moved,
    check_plan,
    disguised,
    everyones,
    fresh,
    random_layout,
    random_order,
    random_placements,
    random_shape,
    same_bits,
)
from redist_wanderers import Wanderers, replicated
from torch.distributed.tensor import DTensor, Partial

from optim_redist import (
    Item,
    Layout,
    LayoutError,
    Mesh,
    NotRepresentableError,
    Plan,
    PlanMismatchError,
    UnsupportedError,
    compile,
    execute,
    many,
    plan,
    redistribute,
    redistribute_local,
    redistribute_many,
    simulate,
)
from optim_redist._running.refusals import bytes_with_out
from optim_redist.cli import main
from optim_redist.parsing import format_layout
from optim_redist.planning import clear_cache
from optim_utils.testing import run_ranks


class Sequence(Wanderers):
    """Moves them about."""

    def run(self, length: int) -> None:
        while self.count < length:
            while len(self.tensors) < 3:
                self.tensors.append(self.new_tensor())
            operation = self.draw.choice(OPERATIONS)
            place = len(self.log)
            self.say(operation.__name__)
            if operation(self) is False:
                del self.log[place:]
            else:
                self.count += 1
            if self.draw.random() < 0.15:
                del self.tensors[self.draw.randrange(len(self.tensors))]

    # one tensor

    def move(self) -> bool | None:
        """By ``redistribute_local``, in every way."""
        draw, (number, tensor) = self.draw, self.pick()
        dst = self.target(tensor)
        found = self.options(tensor, dst)
        if found is None:
            return False
        made, options = found
        how = draw.choice(["wait", "wait", "async", "out", "out", "view"])
        group = self.group_with(tensor.layout, dst) if draw.random() < 0.4 else None
        mine = self.held(tensor, made)
        if options["donate"] and mine is not None:
            mine = mine.clone(memory_format=torch.preserve_format)
            if mine.untyped_storage().nbytes() != mine.nbytes:
                mine = mine.contiguous()
        self.say(
            how, "with group of" if group else "", group[1] if group else "", None if mine is None else mine.stride()
        )
        limit = made.memory_limit
        refuses_out = how == "out" and limit is not None and bytes_with_out(made) > limit
        # of a given group every rank calls
        if not (self.inside(tensor.layout, dst) or (group is not None and made.communicates and self.rank in group[1])):
            self.tensors[number] = tensor if refuses_out else check_moved(tensor, dst, None, self.rank)
            return None
        call: dict[str, Any] = {"group": group and group[0], "dtype": tensor.dtype, "copy": how != "view", **options}
        out = None
        if how == "out" and self.rank in dst.mesh.coordinates:
            shape = dst.local_shape(tensor.shape, self.rank)
            out = call["out"] = disguised(self.own, torch.empty(shape, dtype=tensor.dtype), is_written=True)
        if refuses_out:
            if out is not None:
                with pytest.raises(UnsupportedError, match="out would be held from the start"):
                    redistribute_local(mine, tensor.shape, tensor.layout, dst, **call)
            return None
        kept = None if mine is None or options["donate"] else mine.clone()
        with self.wire.expecting([made]):
            moved = redistribute_local(mine, tensor.shape, tensor.layout, dst, async_op=how == "async", **call)
            if how == "async":
                moved = moved.wait()
        if out is not None:
            assert moved is out
        if kept is not None and moved is not mine:
            assert same_bits(kept, mine), "a source that was written to"
        self.tensors[number] = check_moved(tensor, dst, moved, self.rank)
        if how == "view" and moved is not None:
            self.tensors[number].mine = moved.clone()
        return None

    def move_by_program(self) -> bool | None:
        """By a compiled plan, perhaps one that was written down, and once more with other values."""
        draw, (number, tensor) = self.draw, self.pick()
        dst = self.target(tensor)
        found = self.options(tensor, dst)
        if found is None:
            return False
        made, options = found
        made = draw.choice(
            [
                lambda: made,
                lambda: Plan.from_json(json.loads(json.dumps(made.to_json()))),
                lambda: pickle.loads(pickle.dumps(made)),
                lambda: copy.deepcopy(made),
            ]
        )()
        is_inside = self.inside(tensor.layout, dst)
        program = compile(made) if is_inside else None
        again = tensor
        if draw.random() < 0.7:
            again = fresh(draw, self.rank, tensor.layout, tensor.shape, tensor.dtype, is_number=tensor.is_number)
        for one in (tensor, again):
            mine = None if one.mine is None else one.mine.clone()
            moved = None
            if program is not None:
                with self.wire.expecting([made]):
                    moved = program(mine)
            done = check_moved(one, dst, moved, self.rank)
        if options["donate"]:
            return None
        self.programs.append((program, made))
        self.tensors[number] = done
        return None

    def run_known_program(self) -> bool | None:
        """New values by a program of before."""
        if not self.programs:
            return False
        program, made = self.draw.choice(self.programs)
        tensor = fresh(
            self.draw, self.rank, made.src, made.shape, getattr(torch, made.dtype), is_number=bool(made.dst.partial)
        )
        self.say(made.dtype, made.shape, made.src, "to", made.dst)
        moved = None
        if program is not None:
            with self.wire.expecting([made]):
                moved = program(self.held(tensor, made), async_op=True).wait()
        check_moved(tensor, made.dst, moved, self.rank)
        return None

    def held(self, tensor: Tracked, made: Plan) -> torch.Tensor | None:
        """This rank's part in some memory; under a limit, which may leave no room for that, not to be conjugated."""
        mine = disguised(self.own, tensor.mine)
        return mine if mine is None or made.memory_limit is None else mine.resolve_conj()

    def simulate_it(self) -> None:
        """All ranks in this process."""
        _, tensor = self.pick()
        dst = self.target(tensor)
        made = plan(tensor.shape, tensor.dtype, tensor.layout, dst, topology=self.topology(tensor.layout, dst))
        check_plan(made)
        parts = everyones(tensor)
        kept = [None if part is None else part.clone() for part in parts]
        found = simulate(made, parts)
        assert all(a is None or same_bits(a, b) for a, b in zip(parts, kept))
        check_moved(tensor, dst, found.get(self.rank), self.rank)

    # several

    def move_many(self) -> bool | None:
        """In one call, perhaps with what stays, in any order of names."""
        draw = self.draw
        tensors = self.tensors + [self.new_tensor() for _ in range(draw.randrange(3))]
        draw.shuffle(tensors)
        targets = [self.target(tensor) for tensor in tensors]
        layouts = [layout for tensor, dst in zip(tensors, targets) for layout in (tensor.layout, dst)]
        plans = [
            plan(tensor.shape, tensor.dtype, tensor.layout, dst, planners=("direct", "relay"))
            for tensor, dst in zip(tensors, targets)
        ]
        bucket_bytes = draw.choice([1, 50, 2**20])
        is_async, kind = draw.random() < 0.4, draw.choice(["list", "tuples", "dict"])
        self.say(bucket_bytes, is_async, kind)
        moved: list[Any] = [None] * len(tensors)
        if self.inside(*layouts):
            given = [disguised(self.own, tensor.mine) for tensor in tensors]
            kept = [None if part is None else part.clone() for part in given]
            items: Any = [
                Item(part, tensor.shape, tensor.layout, dst, tensor.dtype)
                for part, tensor, dst in zip(given, tensors, targets)
            ]
            if kind == "tuples":
                items = tuple(tuple(item) for item in items)
            if kind == "dict":
                order = list(range(len(items)))
                self.own.shuffle(order)
                items = {f"t{number}": items[number] for number in order}
            with self.wire.expecting(plans, aligned_to=16):
                found = redistribute_many(items, bucket_bytes=bucket_bytes, async_op=is_async)
                found = found.wait() if is_async else found
            moved = [found[f"t{k}"] for k in range(len(tensors))] if kind == "dict" else found
            assert kind != "dict" or list(found) == list(items)
            assert all(a is None or same_bits(a, b) for a, b in zip(given, kept)), "a source that was written to"
        self.tensors = [check_moved(t, dst, part, self.rank) for t, dst, part in zip(tensors, targets, moved)][:4]
        return None

    def several_under_way(self) -> None:
        """Handles waited for in another order than they were begun, while the world does something else."""
        draw = self.draw
        tasks = [(tensor, self.target(tensor)) for tensor in self.tensors]
        handles: list[Any] = []
        for tensor, dst in tasks:
            handle = None
            if self.inside(tensor.layout, dst):
                mine = disguised(self.own, tensor.mine)
                handle = redistribute_local(mine, tensor.shape, tensor.layout, dst, dtype=tensor.dtype, async_op=True)
            handles.append(handle)
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total.tolist() == [self.world_size] * 3
        order = list(range(len(tasks)))
        draw.shuffle(order)
        for k in order:
            moved = None if handles[k] is None else handles[k].wait()
            self.tensors[k] = check_moved(*tasks[k], moved, self.rank)
            assert handles[k] is None or handles[k].wait() is moved

    # DTensors

    def move_dtensors(self) -> bool | None:
        """From mesh to mesh, and gradients all the way back."""
        draw = self.draw
        dtype = draw.choice([torch.float32, torch.float64, torch.complex64, torch.bfloat16])
        op = draw.choice(["sum", "sum", "avg" if dtype in (torch.float32, torch.bfloat16) else "sum"])
        mesh, shape = self.random_device_mesh(), random_shape(draw)
        placements: Any = random_placements(draw, mesh.ndim, len(shape), op)
        layout = Layout.from_placements(mesh, placements, shape)
        tensor = fresh(draw, self.rank, layout, shape, dtype, is_number=True)
        gradient = fresh(
            draw, self.rank, Layout(Mesh(self.world_size), [None] * len(shape)), shape, dtype, is_number=True
        )
        is_trained = draw.random() < 0.7
        self.say(dtype, shape, placements, mesh.mesh.tolist(), "trained" if is_trained else "")
        start = current = self.dtensor(tensor.mine, dtype, mesh, placements, shape).requires_grad_(is_trained)
        ends: list[tuple[DTensor, Layout]] = []
        for hop in range(draw.randint(1, 3)):
            other = mesh if draw.random() < 0.4 else self.random_device_mesh()
            wanted = random_placements(draw, other.ndim, len(shape), op)
            order = random_order(draw, wanted)
            target = Layout.from_placements(other, wanted, shape, order)
            options: dict[str, Any] = {"shard_order": order}
            if draw.random() < 0.2:
                options["memory_limit"] = 2**20
            if draw.random() < 0.2:
                options["backward_dtype"] = torch.complex128 if dtype.is_complex else torch.float32
            is_async = not is_trained and draw.random() < 0.3
            self.say("to", wanted, order, other.mesh.tolist(), options)
            if not self.inside(tensor.layout, target):
                ends.append((current, tensor.layout))
                current = self.dtensor(None, dtype, other, wanted, shape, order).requires_grad_(is_trained)
                tensor = check_moved(tensor, target, None, self.rank)
            else:
                if is_async:
                    moved = redistribute(current, other, wanted, async_op=True, **options).wait()
                else:
                    moved = redistribute(current, other, wanted, **options)
                assert (moved.device_mesh, moved.placements) == (other, tuple(wanted))
                assert (moved.dtype, moved.shape, moved.requires_grad) == (dtype, tuple(shape), is_trained)
                assert moved.stride() == torch.empty(shape, device="meta").stride()
                part = moved._local_tensor.detach() if self.inside(target) else None
                assert not self.inside(target) or Layout.from_dtensor(moved) == target
                tensor = check_moved(tensor, target, part, self.rank)
                if hop == 0 and other is mesh and order is None:
                    self.compare_with_torch(start, moved, gradient)
                current = moved
            mesh = other
        if is_trained:
            start.grad = None
            # what was moved last goes back first
            for end, at in reversed([*ends, (current, tensor.layout)]):
                if end.requires_grad and not end.is_leaf:
                    end.backward(self.gradient(gradient, end, at))
            found = start.grad
            if self.inside(layout):
                assert found is not None
                assert found.dtype == dtype
                assert same_bits(found._local_tensor, gradient.part(replicated(layout), self.rank))
        return None

    def compare_with_torch(self, start: DTensor, moved: DTensor, gradient: Tracked) -> None:
        """With DTensor's own, which knows no strange orders of ranks and starts no reductions."""
        mesh, src, dst = start.device_mesh, start.placements, moved.placements
        ranks = mesh.mesh.flatten().tolist()
        if ranks != sorted(ranks) or any(isinstance(p, Partial) and p != q for p, q in zip(dst, src)):
            return
        if any(isinstance(p, StridedShard) for p in (*src, *dst)) or self.rank not in ranks:
            return
        if not IS_NEW and any(isinstance(p, Partial) for p in dst):
            return
        self.say("beside torch")
        given = start.detach().requires_grad_(start.requires_grad)
        theirs = given.redistribute(placements=dst)
        if not any(isinstance(p, Partial) for p in dst):
            assert torch.equal(theirs._local_tensor, moved._local_tensor)
        if given.requires_grad:
            layout = Layout.from_placements(mesh, dst, moved.shape)
            theirs.backward(self.gradient(gradient, theirs, layout))
            again = start.detach().requires_grad_()
            redistribute(again, None, dst).backward(self.gradient(gradient, theirs, layout))
            assert again.grad.placements == given.grad.placements
            assert torch.equal(again.grad._local_tensor, given.grad._local_tensor)

    # what is refused

    def wrong_parts(self) -> bool | None:
        """Every rank that calls brings what its layout does not say."""
        _, tensor = self.pick()
        dst = self.target(tensor)
        if not self.inside(tensor.layout, dst):
            return None
        task = (tensor.shape, tensor.layout, dst)
        wrong = torch.empty((*tensor.layout.local_shape(tensor.shape, self.rank), 1), dtype=tensor.dtype)
        with pytest.raises(LayoutError, match=f"rank {self.rank}: the source tensor has shape"):
            redistribute_local(wrong, *task)
        with pytest.raises(LayoutError, match="local shape"):
            redistribute_many([(wrong, *task)])
        if tensor.mine is not None:
            with pytest.raises(LayoutError, match="dtype="):
                other = torch.int8 if tensor.dtype != torch.int8 else torch.uint8
                redistribute_local(tensor.mine, *task, dtype=other)
        return None

    def another_plan_on_one_rank(self) -> bool | None:
        """Refused on all of them, and no harm done."""
        draw = self.draw
        if self.world_size == 1:
            return False
        ranks = sorted(draw.sample(range(self.world_size), draw.randint(2, self.world_size)))
        odd, mesh = draw.choice(ranks), Mesh(len(ranks), ranks=ranks)
        # a shape that no one has had
        shape, dtype = (len(ranks), 1000 + self.seed, 1 + self.count), torch.int8
        other = draw.choice([(shape, torch.uint8), ((*shape[:2], shape[2] + 1000), dtype)])
        shape, dtype = other if self.rank == odd else (shape, dtype)
        if self.rank in ranks:
            src, dst = Layout(mesh, [0, None, None]), Layout(mesh, [None, 0, None])
            with pytest.raises(PlanMismatchError, match="holds another plan than"):
                redistribute_local(torch.zeros(1, *shape[1:], dtype=dtype), shape, src, dst)
        return None

    def forget(self) -> None:
        """What some ranks have forgotten the others still know."""
        if self.own.random() < 0.5:
            clear_cache()
            execute._programs.clear()
            many._many_programs.clear()

    # the command line

    def ask_the_command_line(self) -> bool | None:
        draw = self.draw
        shape = random_shape(draw)
        sides = []
        for _ in range(2):
            sizes = draw.choice(SIZES)
            names = draw.choice([None, "abc"[: len(sizes)]])
            layout = random_layout(draw, Mesh(sizes, names=names), shape, ["sum"])
            notations = []
            for notation in ("own", "notebook", "partition_spec", "placements"):
                try:
                    notations.append(format_layout(layout, notation, shape))
                except NotRepresentableError:
                    continue
            sides.append((layout, draw.choice(notations)))
        (src, src_text), (dst, dst_text) = sides
        if not shape:
            return False
        dtype = draw.choice(["bf16", "int64", "complex64"])
        meshes = [
            ",".join(
                f"{n}={s}" if layout.mesh.names else str(s) for n, s in zip(layout.mesh.axis_names, layout.mesh.sizes)
            )
            for layout in (src, dst)
        ]
        self.say(shape, src_text, dst_text, meshes, dtype)
        arguments = ["--shape", ",".join(map(str, shape)), "--mesh", meshes[0], "--dst-mesh", meshes[1]]
        arguments += [f"--src={src_text}", f"--dst={dst_text}", "--dtype", dtype]
        made = Plan.from_json(self.printed("plan", *arguments, "--json"))
        expected = plan(shape, dtype, src, dst)
        assert made.hash == expected.hash or src.partial or dst.partial
        assert made.bounds == expected.bounds
        found = self.printed("bound", *arguments, "--json")
        assert found["lb"] == expected.bounds.lb
        path = self.folder / f"{self.seed}-{self.rank}.json"
        path.write_text(json.dumps(made.to_json()))
        report = self.printed("verify", str(path), "--execute", "simulate", "--json")
        assert (report["checked"], report["failed"]) == (1, 0)
        return None

    def printed(self, *arguments: str) -> Any:
        text = io.StringIO()
        with redirect_stdout(text), redirect_stderr(io.StringIO()):
            assert main(arguments) == 0
        return json.loads(text.getvalue())


OPERATIONS = [
    *[Sequence.move] * 6,
    *[Sequence.move_by_program] * 3,
    *[Sequence.run_known_program] * 2,
    *[Sequence.move_many] * 3,
    *[Sequence.several_under_way] * 2,
    *[Sequence.move_dtensors] * 4,
    Sequence.simulate_it,
    Sequence.wrong_parts,
    Sequence.another_plan_on_one_rank,
    Sequence.forget,
    Sequence.ask_the_command_line,
]


def run(rank: int, world_size: int, seeds: range, length: int, folder: str) -> None:
    wire = Wire()
    with wire.tapped():
        for seed in seeds:
            log: list[str] = []
            try:
                Sequence(seed, rank, world_size, Path(folder), log, wire).run(length)
            except Exception as error:
                raise AssertionError(f"seed {seed} of {world_size} ranks: {'; '.join(log[-12:])}") from error


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_sequences(world_size: int, tmp_path: Path) -> None:
    run_ranks(run, world_size, range(3), 25, str(tmp_path), timeout=120)


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("first", range(1000, 1160, 20))
def test_many_sequences(world_size: int, first: int, tmp_path: Path) -> None:
    run_ranks(run, world_size, range(first, first + 20), 40, str(tmp_path), timeout=240)
