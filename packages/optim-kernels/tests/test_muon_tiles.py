"""Steps with ``tiles="shape"``: what a matrix becomes does not depend on which others are stepped with it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from h200 import on_an_h200
from random_tensors import DEVICE, random
from torch import Tensor
from torch._subclasses import FakeTensorMode

from optim_kernels import NSConfig, TritonMuon
from optim_kernels._optimizers.muon_entries import MuonEntry, init_state
from optim_kernels._optimizers.muon_planner import MuonPlanner
from optim_kernels.functional._muon_workspace import Workspace
from optim_utils.param_groups import MatrixView

pytest.importorskip("triton")
from optim_kernels._newton_schulz import chain as hopper_chain
from optim_kernels._newton_schulz import int8_start, job_launches, tile_choice
from optim_kernels._newton_schulz.chain_jobs import Ending, jobs_of, num_squares
from optim_kernels._newton_schulz.job_launches import JobLaunches, Part, Places
from optim_kernels._newton_schulz.tiles import FULL_PRECISION, Tile, general_tile, symmetric_tile
from optim_kernels.functional import _muon_batch_plan, _muon_families
from optim_kernels.functional._muon_batch_plan import MuonBatchPlan
from optim_kernels.functional._muon_families import LAST_TILE, SMALL_LAST_TILE, Batch, families_of

SMS = 132

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted where there is a GPU")


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles are chosen as on that GPU."""
    on_an_h200(monkeypatch)
    monkeypatch.setattr(hopper_chain, "has_gluon", lambda _: True)
    monkeypatch.setattr(hopper_chain, "num_multiprocessors", lambda _: SMS)
    monkeypatch.setattr(hopper_chain, "has_short_launch", lambda _: True)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The tile of every product that is launched, in order; nothing is computed."""
    found: list[Any] = []

    def symmetric(a: Tensor, b: Tensor, *, tile: Tile | None, shifted: Any = None, **_: Any) -> None:
        batch, m, k = a.shape
        found.append(tile or symmetric_tile(m, k, batch, SMS, a is b, True, shifted is not None))

    def general(a: Tensor, b: Tensor, *, tile: Tile | None, **_: Any) -> None:
        batch, m, k = a.shape
        found.append(tile or general_tile(m, b.shape[-1], k, batch, SMS, True))

    monkeypatch.setattr(job_launches, "symmetric_product", symmetric)
    monkeypatch.setattr(job_launches, "general_product", general)
    return found


@pytest.mark.parametrize("shape", [(64, 64), (256, 1024), (768, 768), (1280, 5120), (4096, 4096)], ids=str)
def test_tiles_are_those_of_one_matrix(h200: None, taken: list[Any], shape: tuple[int, int]) -> None:
    """Of every product of the iteration; and without the option they are others for many."""
    by_tiles: dict[Any, list[list[Any]]] = {"auto": [], "shape": []}
    ns, (m, n) = NSConfig(), shape
    for tiles, lists in by_tiles.items():
        for count in (1, 3, 400):
            x = torch.empty(count, m, n, dtype=torch.float16, device="meta")
            jobs = jobs_of(ns, m, n)
            squares = [x.new_empty(count, m, m) for _ in range(num_squares(jobs))]
            JobLaunches(jobs, ns, tiles=tiles).run(Places(squares, [Part((x, x, x), squares, None)]))
            assert len(taken) == len(jobs)
            lists.append(taken.copy())
            taken.clear()
    one, three, many = by_tiles["shape"]
    assert one == three == many == by_tiles["auto"][0]
    assert by_tiles["auto"][2] != one


def matrix(m: int, n: int) -> Any:
    return SimpleNamespace(shape=(m, n))


def test_chains_have_those_alone_that_take_one_however_few_they_are(
    h200: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda, ns = torch.device("cuda", 0), NSConfig(dtype=torch.float16)
    for name in ("takes_step_chain", "steps_in_factors"):
        function = getattr(hopper_chain, name)
        on_gpu = lambda *args, function=function, **options: function(*args[:-1], cuda, **options)  # noqa: E731
        monkeypatch.setattr(_muon_families, name, on_gpu)

    def placed(
        shapes: Sequence[tuple[int, int]], tiles: Any, ending: Ending = Ending.UPDATE
    ) -> tuple[dict[Any, Any], set[Any], list[int]]:
        matrices, meta = [matrix(*shape) for shape in sorted(shapes)], torch.device("meta")
        found, chains = families_of(matrices, ns, torch.float16, meta, ending=ending, tiles=tiles)
        batches = [batch for family in found for batch in family]
        chained = [batch for chain in chains for batch in chain.batches]
        firsts = sorted((batch.first, batch.shape[0]) for batch in batches + chained)
        assert [first for first, _ in firsts] == [sum(c for _, c in firsts[:i]) for i in range(len(firsts))]
        assert sum(count for _, count in firsts) == len(shapes)
        return (
            {batch.shape[1:]: (batch.last_tile, batch.takes_ping_pong) for batch in batches},
            {batch.shape[1:] for batch in chained},
            [count for _, count in firsts],
        )

    shapes = [(768, 768), (768, 3072), (768, 2304), (768, 1000), (1280, 1280), (2048, 8192), (2560, 10240), (64, 200)]
    assert placed(shapes * 40, "auto")[1] > {(768, 768), (768, 3072), (1280, 1280)}
    last_tiles, chained, _ = placed(shapes * 40, "shape")
    assert chained == {(768, 3072), (768, 2304), (2048, 8192)}
    assert set(last_tiles) == {*shapes} - chained
    for shape in shapes:
        alone = placed([shape], "shape")
        assert alone[0] == {each: how for each, how in last_tiles.items() if each == shape}
        assert alone[1] == chained & {shape}
        # where the number of matrices counts, few have launches; but not if X's last product is one of them
        assert placed([shape], "auto")[1] == placed([shape], "auto", Ending.SQUARES)[1] == set()
        assert placed([shape], "auto", Ending.STORE)[1] == chained & {shape}


def test_matrices_that_start_in_int8_do_whatever_others_there_are(h200: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer ones of the same iteration, which do not, are a family of their own."""
    monkeypatch.setattr(int8_start, "is_interpreted", lambda: False)
    monkeypatch.setattr(int8_start, "has_gluon", lambda _: True)
    gpu, ns = torch.device("cuda", 0), NSConfig(method="standard")

    def room(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    shapes = [(3584, 3584), (3584, 2**17), (3584, 2**17 + 8)]
    found, _ = families_of(
        [matrix(*shape) for shape in shapes], ns, torch.float16, gpu, ending=Ending.UPDATE, tiles="auto", memory=room
    )
    assert [[batch.shape for batch in family] for family in found] == [
        [(1, *shapes[0]), (1, *shapes[1])],
        [(1, *shapes[2])],
    ]


@pytest.mark.parametrize(
    ("shape", "chosen_for", "is_hoppers", "is_large"),
    [
        ((768, 768), 7, False, False),  # others of lone programs, which cannot update
        ((768, 768), 8, True, True),
        ((4096, 4096), 1, True, True),  # cooperative
        ((64, 64), 120, False, False),
        ((64, 64), 265, False, True),
        ((64, 64), 264, False, False),
    ],
    ids=str,
)
def test_tiles_of_last_products_are_chosen_as_those_of_others(
    h200: None,
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, int],
    chosen_for: int,
    is_hoppers: bool,
    is_large: bool,
) -> None:
    """By how many matrices they are chosen for, however many there are."""

    def batch_of(dtype: torch.dtype = torch.float16) -> Batch:
        with FakeTensorMode():
            x = torch.empty(2, *shape, dtype=dtype, device="cuda")
        last_tile = _muon_families._last_tile(x, chosen_for)
        return Batch(0, (2, *shape), x, x, last_tile, chosen_for, 1)

    assert batch_of().takes_ping_pong is is_hoppers
    assert batch_of().last_tile == (LAST_TILE if is_large else SMALL_LAST_TILE)
    assert not batch_of(torch.float32).takes_ping_pong
    assert batch_of(torch.float32).last_tile == FULL_PRECISION
    monkeypatch.setattr(tile_choice, "has_gluon", lambda _: False)
    monkeypatch.setattr(tile_choice, "shared_bytes", lambda _: 64 << 10)
    assert not batch_of().takes_ping_pong
    assert batch_of().last_tile.num_stages < LAST_TILE.num_stages


def entries_of(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, **options: Any
) -> tuple[dict[str, Any], list[MuonEntry]]:
    """A group and what a planner is told of it; numbers depend on the shape alone."""
    (group,) = TritonMuon([torch.nn.Parameter(torch.zeros(8, 8))], lr=0.1, **options).param_groups
    entries = []
    for place, shape in enumerate(shapes):
        p, view = random(shape, 1, dtype), MatrixView.identity(shape)
        state: dict[str, Any] = {}
        init_state(p, view, group, state)
        entries.append(MuonEntry(p, random(shape, 2, dtype), state, view, place))
    return group, entries


def stepped(
    shapes: Sequence[tuple[int, ...]], tiles: Any, dtype: torch.dtype, steps: int = 2, **options: Any
) -> list[list[Tensor]]:
    """Of each shape the parameter and its state after some steps together."""
    planner = MuonPlanner(tiles)
    group, entries = entries_of(shapes, dtype, **options)
    for _ in range(steps):
        planner.step([(group, entries)])
    return [[entry.param, *entry.state.values()] for entry in entries]


def assert_same(found: Sequence[Tensor], wanted: Sequence[Tensor], what: Any) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b), what


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("variance", [False, True])
@pytest.mark.parametrize("tiles", ["auto", "shape"])
def test_a_matrix_that_cannot_be_aligned_is_nobody_elses_matter(tiles: Any, variance: bool) -> None:
    """Beside it others are updated by a launch of its own; O is rounded either way."""
    options: dict[str, Any] = {"impl": "triton", "ns_dtype": torch.float16, "beta2": 0.9 if variance else None}
    (wanted,) = stepped([(16, 24)], tiles, torch.float32, **options)
    found = stepped([(16, 24), (9, 7), (16, 24), (24, 16)], tiles, torch.float32, **options)
    assert_same(found[0], wanted, "beside others")
    assert_same(found[2], wanted, "beside others")


@interpreted
@pytest.mark.parametrize(("beta2", "tiles"), [(None, "auto"), (0.9, "shape")], ids=["plain", "normuon"])
def test_where_all_tiles_agree_the_fastest_are_taken(
    monkeypatch: pytest.MonkeyPatch, beta2: float | None, tiles: str
) -> None:
    """Unless the update sums over lines, which are added tile by tile."""
    group, entries = entries_of([(16, 24)], torch.float32, impl="triton", ns_dtype=torch.float16, beta2=beta2)
    for agree, expected in ((False, "shape"), (True, tiles)):
        monkeypatch.setattr(_muon_batch_plan, "tiles_agree", lambda *_, agree=agree: agree)
        planner = MuonPlanner("shape")
        planner.step([(group, entries)])
        assert [plan._launches._options.tiles for plan in planner.plans] == [expected]


def test_tiles_agree_for_16_bits_on_hopper(h200: None) -> None:
    cuda = torch.device("cuda", 0)
    for dtype, agree in ((torch.float16, True), (torch.bfloat16, True), (torch.float32, False)):
        assert tile_choice.tiles_agree(dtype, cuda) is agree
        assert not tile_choice.tiles_agree(dtype, torch.device("cpu"))


def test_tiles_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tiles must be one of .*'auto', 'shape'.*, got 'matrix'"):
        MuonPlanner("matrix")  # type: ignore[arg-type]
    for spare in (-1, 1.0, True):
        with pytest.raises(ValueError, match="spare must be a number of multiprocessors, 0 or more, got"):
            MuonPlanner(spare=spare)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tiles must be one of"):
        MuonBatchPlan([], rule=None, ns=None, variance=False, tiles=None)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "options",
    [{}, {"beta2": 0.9}, {"beta2": 0.9, "row_equilibrate": True, "renormalize": True}, {"ns_dtype": torch.float32}],
    ids=["plain", "normuon", "equilibrated", "fp32-products"],
)
@pytest.mark.parametrize(
    "shape",
    [
        *((64, 64), (100, 60), (256, 1024), (768, 768), (3072, 768), (1280, 1280), (1600, 400), (2048, 1024)),
        *((3, 256, 256), (2048, 2048)),
    ],
    ids=str,
)
@pytest.mark.parametrize("tiles", ["shape", "auto"])
def test_alone_in_a_batch_of_3_and_of_40(
    tiles: Any, shape: tuple[int, ...], options: dict[str, Any], dtype: torch.dtype
) -> None:
    """And beside matrices of other shapes, aligned or not, of the same short side or another."""
    assert DEVICE == "cuda"
    products = options.get("ns_dtype", torch.float16)
    if tiles == "auto" and ("beta2" in options or not tile_choice.tiles_agree(products, torch.device(DEVICE))):
        pytest.skip("bits may depend on how many matrices there are")
    # launched, recorded, replayed
    (wanted,) = stepped([shape], tiles, dtype, steps=3, **options)
    short = min(shape[-2:])
    others: list[tuple[int, ...]] = [(short, 3 * short), (short, short + 8), (short, short + 1), (96, 200), (9, 7)]
    for mates in ([shape] * 3, [shape] * 40, [*others, shape, *others], [shape, *others * 5, shape]):
        found = stepped(mates, tiles, dtype, steps=3, **options)
        for place, (mate, tensors) in enumerate(zip(mates, found, strict=True)):
            if mate == shape:
                assert_same(tensors, wanted, (place, len(mates)))


@pytest.mark.slow
def test_a_step_is_made_again_with_the_hyperparameters_of_then() -> None:
    shapes, options = [(8, 12), (8, 8), (12, 8)], {"impl": "triton", "ns_dtype": torch.float32}
    (group, entries), (twin_group, twins) = (entries_of(shapes, torch.float32, **options) for _ in range(2))
    planner, twin = MuonPlanner(), MuonPlanner()
    assert not planner.again(), "nothing was done yet"
    planner.step([(group, entries)])
    twin.step([(twin_group, twins)])
    factor = torch.full((), 0.5, device=entries[0].param.device)
    for lr in (0.1, 0.2):
        group["lr"] = twin_group["lr"] = lr
        for entry, other in zip(entries, twins, strict=True):
            for each in (entry, other):
                each.grad.mul_(1.5)
        assert planner.again(clip_factor=factor)
        twin.step([(twin_group, twins)], clip_factor=factor)
        for entry, other in zip(entries, twins, strict=True):
            assert_same([entry.param, *entry.state.values()], [other.param, *other.state.values()], lr)
    group["nesterov"] = not group["nesterov"]
    assert not planner.again(), "another option"
    planner.step([(group, entries)])
    assert planner.again()
    planner.forget()
    assert not planner.again()
    planner.step([({**group, "impl": "torch"}, entries[:1]), (group, entries[1:])])
    assert not planner.again(), "plans did not do all of it"


def test_a_step_that_copies_gradients_is_not_made_again_of_the_copies() -> None:
    (group, (entry,)) = entries_of([(8, 12)], torch.float32, impl="triton", ns_dtype=torch.float32)
    transposed = replace(entry, grad=entry.grad.mT.contiguous().mT)
    planner = MuonPlanner()
    planner.step([(group, [transposed])])
    assert not planner.again()


class Graph:
    replayed: ClassVar[list[Graph]] = []

    def replay(self) -> None:
        self.replayed.append(self)

    def pool(self) -> tuple[int, int]:
        return (id(self), 0)


class Current:
    """As ``torch.cuda.stream``."""

    stream: ClassVar[Any] = None

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before, Current.stream = Current.stream, self._stream

    def __exit__(self, *_: object) -> None:
        Current.stream = self._before


def seemingly_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, recording: Any, workspace: Workspace | None = None
) -> MuonPlanner:
    """A planner whose first step seems to have been on the second GPU; ``recording`` is its ``torch.cuda.graph``."""
    (group, (entry,)) = entries_of([(8, 12)], torch.float32, impl="triton", ns_dtype=torch.float32)
    planner, gpu = MuonPlanner(workspace=workspace), torch.device("cuda", 1)
    planner.step([(group, [entry])])
    (plan,) = planner.plans
    # held by its caller, as long as that takes the step again
    monkeypatch.setattr(planner, "entry", entry, raising=False)
    monkeypatch.setattr(plan, "_device", gpu)
    monkeypatch.setattr(Graph, "replayed", [])
    monkeypatch.setattr(_muon_batch_plan, "side_stream", lambda device: SimpleNamespace(device=device), raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: gpu.index)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "stream", Current)
    return planner


@interpreted
def test_a_recording_that_fails_is_made_at_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = [MemoryError("no room"), None]

    @contextmanager
    def recording(graph: Graph, **_: Any) -> Iterator[None]:
        yield
        if (error := outcomes.pop(0)) is not None:
            raise error

    planner = seemingly_on_a_gpu(monkeypatch, recording)
    replayed = Graph.replayed
    with pytest.raises(MemoryError):
        planner.again()
    assert not replayed
    for _ in range(2):
        assert planner.again()
    assert not outcomes, "recorded"
    assert len(replayed) == 2
    assert replayed[0] is replayed[1]


@interpreted
def test_a_recording_that_cannot_end_leaves_the_current_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `torch.cuda.graph` ends one before it goes back to the stream that was."""

    @contextmanager
    def recording(graph: Graph, *, stream: Any = None, **_: Any) -> Iterator[None]:
        Current.stream = stream
        yield
        raise RuntimeError("capture_end")

    planner = seemingly_on_a_gpu(monkeypatch, recording)
    monkeypatch.setattr(Current, "stream", "the user's")
    with pytest.raises(RuntimeError, match="capture_end"):
        planner.again()
    assert Current.stream == "the user's"


@interpreted
def test_graphs_allocate_where_others_do_that_are_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a pool whose graphs have all gone torch makes no other."""
    pools = []

    @contextmanager
    def recording(graph: Graph, *, pool: Any = None, **_: Any) -> Iterator[None]:
        pools.append(pool)
        yield

    planner = seemingly_on_a_gpu(monkeypatch, recording, Workspace(2**20))
    (plan,) = planner.plans
    assert planner.again()
    (first,) = Graph.replayed
    plan._forget_recorded()
    assert planner.again()
    assert pools == [None, first.pool()]
    del first
    Graph.replayed.clear()
    plan._forget_recorded()
    assert planner.again()
    assert pools[2:] == [None]


@interpreted
def test_a_step_is_recorded_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream that torch records on otherwise is on the device where the process recorded first."""
    streams = []

    @contextmanager
    def recording(graph: Graph, *, stream: Any = None, **_: Any) -> Iterator[None]:
        streams.append(stream)
        yield

    assert seemingly_on_a_gpu(monkeypatch, recording).again()
    (stream,) = streams
    assert stream.device == torch.device("cuda", 1)


@interpreted
def test_threads_record_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may have one capture under way."""
    under_way, together = [], []

    @contextmanager
    def recording(graph: Graph, **_: Any) -> Iterator[None]:
        under_way.append(graph)
        # until the other one is here, too
        time.sleep(0.2)
        together.append(len(under_way))
        under_way.remove(graph)
        yield

    planners = [seemingly_on_a_gpu(monkeypatch, recording) for _ in range(2)]
    for planner in planners:
        # the interpreter has one thread
        monkeypatch.setattr(planner.plans[0]._launches, "run", lambda **_: None)
    threads = [threading.Thread(target=planner.again) for planner in planners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == [1, 1]
