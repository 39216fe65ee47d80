"""Bounds of the notebook's search: they never say too much, and what they are made of is what happens."""

import random
from itertools import pairwise, product
from math import inf, prod

import pytest
from redist_notebook_pairs import cheapest_by_exhaustion, random_pairs

from optim_redist import Cost, IdealLowerBoundsCM, MultiAxisDist, OptimalRedist, TextbookCM
from optim_redist._multi_axis.codes import ACROSS, AWAY, FREE, HOME, OPEN, START, Codes
from optim_redist._multi_axis.estimate import Estimate
from optim_redist._multi_axis.floor import least_elements
from optim_redist._multi_axis.moves import State, max_local_size
from optim_redist._multi_axis.moves_left import MovesLeft
from optim_redist._multi_axis.steps import MoveSet
from optim_redist.redistributors import _Prices


def digits_of(codes: Codes, dist: MultiAxisDist) -> list[int]:
    code = sum(codes.code_of(d, axes, (block,)) for d, (axes, block) in enumerate(zip(*dist._state)))
    return [code >> 3 * axis & 7 for axis in range(len(codes.sizes))]


def test_codes_say_where_axes_are():
    mesh = (4, 2, 4)
    start = MultiAxisDist(mesh, ((), (1,), (2,)), (-1, 1, 4))
    target = MultiAxisDist(mesh, ((2,), (0,), (1,)), (2, 4, 1))
    codes = Codes(mesh, start._state, target._state)
    # 1 excludes, where it starts, that 0 is at home, and 2 that 1 is
    assert digits_of(codes, start) == [FREE, START, START]
    assert digits_of(codes, target) == [HOME, HOME, HOME]
    assert digits_of(codes, MultiAxisDist(mesh, ((0,), (2,), (1,)), (2, 4, 2))) == [ACROSS, AWAY, ACROSS]
    assert digits_of(codes, MultiAxisDist(mesh, ((0,), (), (2, 1)), (1, -1, 1))) == [AWAY, HOME, AWAY]
    # any of several blocks
    assert codes.code_of(0, (2,), (1, 2, 4)) == HOME << 6
    assert codes.code_of(0, (0,), (1, 2, 4)) == ACROSS
    assert codes.code_of(2, (2,), (4, 8)) == AWAY << 6
    assert codes.waits(START << 3)
    assert codes.waits(START << 6)
    assert not codes.waits(AWAY << 3 | AWAY << 6)


# what each digit stands for
STANDS_FOR = {
    FREE: {FREE},
    AWAY: {AWAY, START},
    HOME: {HOME, AWAY, START},
    ACROSS: {ACROSS, AWAY, START},
    OPEN: {HOME, ACROSS, AWAY, START},
}
SMALL = [(2, 2), (3, 3), (2, 2, 2), (4, 2, 4), (2, 3, 2), (2, 1, 1)]


def test_a_permutation_leads_where_the_codes_say():
    rng, seen = random.Random(8), set()
    for shape, start, target in random_pairs(8, 200, SMALL, max_dims=3):
        codes, dist = Codes(start.processorMesh, start._state, target._state), start
        for _ in range(6):
            here = digits_of(codes, dist)
            for i, j in codes.equal_axes:
                if here[i] or here[j]:
                    permuted, _, _ = dist.permute(shape, (i, j))
                    after = digits_of(codes, permuted)
                    for axis, other in ((i, j), (j, i)):
                        told = codes.taking(axis, other, here[other])
                        assert after[axis] in STANDS_FOR[told]
                        seen.add((here[other], after[axis]))
            dist = rng.choice(dist.neighbours(shape, target.blockSizes))[1]
    assert {(ACROSS, HOME), (HOME, ACROSS), (AWAY, AWAY), (START, HOME)} <= seen


@pytest.mark.parametrize("cost_model", [IdealLowerBoundsCM(), TextbookCM()], ids=lambda model: type(model).__name__)
def test_what_is_known_of_an_axis_never_lowers_the_estimate(cost_model):
    # h(OPEN) <= h(HOME), h(ACROSS) <= h(AWAY) whatever the others, and the floor is below all of them
    raised = 0
    for shape, start, target in random_pairs(9, 60, SMALL, max_dims=3):
        prices, sizes = _Prices(OptimalRedist(cost_model)), start.processorMesh
        codes = Codes(sizes, start._state, target._state)
        estimate = Estimate(shape, codes, prices, inf, target.maxNumElements(shape))
        starts = [axis for axis, digit in enumerate(digits_of(codes, start)) if digit == START]
        choices = [
            [
                FREE,
                *([HOME] if codes.with_home >> 3 * axis & 1 else ()),
                *([] if codes.never_away >> 3 * axis & 1 else [AWAY]),
                *([ACROSS] if codes.across >> 3 * axis & 1 else ()),
                *([START] if axis in starts else ()),
            ]
            for axis in range(len(sizes))
        ]
        for digits in product(*choices):
            code = sum(digit << 3 * axis for axis, digit in enumerate(digits))
            bound = estimate(code, inf)
            assert estimate.floor(code) <= bound * (1 + 1e-12)
            for axis, digit in enumerate(digits):
                better = {AWAY: (HOME, ACROSS), HOME: (OPEN,), ACROSS: (OPEN,)}.get(digit, ())
                for other in set(better) & {*choices[axis], OPEN}:
                    if other != OPEN or {HOME, ACROSS} <= set(choices[axis]):
                        found = estimate(code ^ (digit ^ other) << 3 * axis, inf)
                        assert found <= bound * (1 + 1e-12)
                        raised += found < bound
    assert raised > 100


@pytest.mark.parametrize("gone, come", [(0, 1), (1, 0)])
def test_a_permutation_puts_an_axis_out_of_use_for_one_that_was_not_in_use(gone, come):
    shape, mesh = (8, 8), (4, 4)
    start, target = (MultiAxisDist(mesh, ((axis,), ()), 2) for axis in (gone, come))
    # where rounds are dear: one, where gathering takes two
    redistributor = OptimalRedist(IdealLowerBoundsCM(), alpha=1000)
    # whether it was there from the start or came there
    for first, digit in ((start, START), (MultiAxisDist(mesh, ((), (gone,)), 2), ACROSS)):
        codes = Codes(mesh, first._state, target._state)
        estimate = Estimate(shape, codes, _Prices(redistributor), inf, 16)
        code = codes.code_of(0, (gone,), (2,))
        assert code == digit << 3 * gone
        assert estimate.floor(code) == estimate(code, inf) == 1000 + 2 * 16
    sequence, cost = redistributor.redistribute(shape, start, target)
    assert [name for name, *_ in sequence] == ["", "permute_0_1"]
    assert cost == 1032


class CheaperInNumbers(TextbookCM):
    """Groups gather for less the larger they are, so that moving axes together with others can pay."""

    @staticmethod
    def allgather(n_procs, n_elements):
        return Cost(9 / n_procs, 3.0 * n_elements / n_procs) if n_procs > 1 else Cost()


def test_a_model_may_get_cheaper_with_more_processes():
    def price(name, n_procs, volume):
        collective = name.split("_")[0]
        return getattr(CheaperInNumbers, collective if collective in ("allgather", "permute") else "alltoall")(
            n_procs, volume
        ).scalar()

    for shape, start, target in random_pairs(10, 30, [(2, 2), (2, 3), (3, 2), (4, 2)], max_dims=2):
        _, cost = OptimalRedist(CheaperInNumbers()).redistribute(shape, start, target)
        assert cost == pytest.approx(cheapest_by_exhaustion(shape, start, target, price), rel=1e-12)


@pytest.mark.parametrize("cost_model", [IdealLowerBoundsCM, TextbookCM])
def test_models_that_say_so_get_no_cheaper_with_more_processes(cost_model):
    assert cost_model.grows_with_processes
    for collective in ("allgather", "permute", "allreduce", "reduce_scatter", "alltoall"):
        costs = [getattr(cost_model, collective)(n_procs, 24) for n_procs in range(1, 40)]
        for one, more in pairwise(costs):
            assert one.latency <= more.latency
            assert one.bandwidth <= more.bandwidth
            assert one.computation <= more.computation


@pytest.mark.parametrize("cost_model", [IdealLowerBoundsCM, TextbookCM])
def test_formulas_are_the_costs(cost_model):
    assert cost_model.formulas.keys() == {"allgather", "permute", "alltoall"}
    for collective, formula in cost_model.formulas.items():
        for n_procs in range(1, 20):
            for elements in (0, 1, 7, 2**40 + 1):
                latency, bandwidth, computation = formula(n_procs, elements)
                assert getattr(cost_model, collective)(n_procs, elements) == Cost(latency, bandwidth, computation)


def test_moves_know_what_a_rank_holds_after_them():
    for shape, start, target in random_pairs(11, 20, SMALL, max_dims=3):
        moves = MoveSet(shape, start.processorMesh, list(zip(start.blockSizes, target.blockSizes)))
        for move in moves.moves(start._state):
            assert move.elements == max_local_size(shape, start.processorMesh, move.state)


@pytest.mark.parametrize("cost_model", [IdealLowerBoundsCM(), TextbookCM()], ids=lambda model: type(model).__name__)
@pytest.mark.parametrize("merged", [False, True], ids=["single blocks", "open blocks"])
def test_no_move_brings_the_estimate_down_by_more_than_it_costs(cost_model, merged):
    # else the estimate of the search could be too high; alpha weighs latency, so that moving axes together pays
    rng, distances = random.Random(5), []
    for shape, start, target in random_pairs(3, 60, [(4,), (2, 2), (2, 3), (4, 4), (2, 2, 2), (2, 3, 2), (2, 1, 2)]):
        prices = _Prices(OptimalRedist(cost_model, alpha=rng.choice([1, 1000])))
        sizes, target_size = start.processorMesh, target.maxNumElements(shape)
        codes = Codes(sizes, start._state, target._state)
        estimate = Estimate(shape, codes, prices, inf, target_size)
        blocks = list(zip(start.blockSizes, target.blockSizes))
        arrivals = [codes.arrivals(tensor_dim) for tensor_dim in range(len(shape))]
        moves = MoveSet(shape, sizes, blocks, codes.code_of, arrivals, merged=merged)

        def bound(parts, estimate=estimate):
            return estimate(sum(part.code for part in parts), inf)

        def floor(parts, estimate=estimate):
            return estimate.floor(sum(part.code for part in parts))

        assert bound(moves.parts(target._state)) == 0
        distances.append(bound(moves.parts(start._state)))
        state = moves.parts(start._state)
        for _ in range(12):
            elements, reachable = prod(part.share for part in state), []
            assert bound(state) <= prices["alltoall", prod(sizes), max(elements, target_size)]
            for collective, n_procs, kept, arrived, steps in moves.steps_from(tuple(part.axes for part in state)):
                price = prices[collective, n_procs, elements]
                best = estimate(sum(part.code for part in state) & kept | arrived, inf)
                for after in [after for step in steps for after in moves.after(state, step)]:
                    assert best <= bound(after)
                    assert bound(state) <= price + bound(after) + 1e-9 * price
                    assert floor(state) <= price + floor(after) + 1e-9 * price
                    reachable.append(after)
            state = rng.choice(reachable)
    assert sum(distance > 0 for distance in distances) > len(distances) // 2


@pytest.mark.parametrize("cost_model", [IdealLowerBoundsCM(), TextbookCM()], ids=lambda model: type(model).__name__)
def test_no_walk_is_cheaper_or_shorter_than_the_estimates_of_its_states(cost_model):
    # walks of which the end is made the target: what is left of them bounds what the search may believe is left
    rng, tight, exact = random.Random(7), 0, 0
    meshes = [(4,), (2, 2), (2, 3), (2, 2, 2), (2, 3, 2), (2, 1, 2), (3, 3)]
    for shape, start, _ in random_pairs(4, 150, meshes, max_dims=3):
        prices = _Prices(OptimalRedist(cost_model, alpha=rng.choice([1, 1000])))
        walk, spent = [start], [0.0]
        for _ in range(rng.randint(1, 5)):
            name, after, volume, n_procs = rng.choice(walk[-1].neighbours(shape))
            collective = name.split("_")[0].replace("changeBlockSize", "alltoall")
            walk.append(after)
            spent.append(prices[collective, n_procs, volume])
        sizes, target = start.processorMesh, walk[-1]
        codes = Codes(sizes, start._state, target._state)
        estimate = Estimate(shape, codes, prices, inf, target.maxNumElements(shape))
        blocks = list(zip(start.blockSizes, target.blockSizes))
        arrivals = [codes.arrivals(tensor_dim) for tensor_dim in range(len(shape))]
        moves = MoveSet(shape, sizes, blocks, codes.code_of, arrivals, merged=True)
        moves_left = MovesLeft(sizes, target._state, codes.equal_axes)
        assert moves_left(moves.parts(target._state), codes.with_home) == 0
        for place, dist in enumerate(walk[:-1]):
            parts, left = moves.parts(dist._state), sum(spent[place + 1 :])
            code = sum(part.code for part in parts)
            bound = estimate(code, inf)
            assert max(bound, estimate.floor(code)) <= left * (1 + 1e-9)
            at_least, remaining = moves_left(parts, (code | code >> 1) & codes.all), len(walk) - 1 - place
            assert at_least <= remaining
            exact += at_least == remaining > 1
            tight += bound == left > 0
    assert tight > 20
    assert exact > 20


@pytest.mark.parametrize(
    "shape, sizes", [((5, 7), (2, 3)), ((9, 4, 6), (4, 2)), ((8, 3), (2, 2, 2)), ((2, 3), (2, 3, 2))]
)
def test_least_elements_are_those_of_the_best_placement(shape, sizes):
    expected = {0: prod(shape)}
    for places in product(range(-1, len(shape)), repeat=len(sizes)):
        used = sum(1 << 3 * axis for axis, place in enumerate(places) if place >= 0)
        mapping = tuple(tuple(axis for axis, at in enumerate(places) if at == d) for d in range(len(shape)))
        processes = [prod(sizes[axis] for axis in axes) for axes in mapping]
        if all(p <= n for p, n in zip(processes, shape)):
            size = max_local_size(shape, sizes, State(mapping, (1,) * len(shape)))
            expected[used] = min(size, expected.get(used, size))
    found = least_elements(shape, sizes, inf)
    assert {used: size for used, size in found.items() if size} == expected
    limited = least_elements(shape, sizes, 10)
    assert limited == {used: size if size <= 10 else 0 for used, size in found.items()}


@pytest.mark.parametrize("share", [1.0, 1.5])
def test_a_limit_raises_the_estimate_by_no_more_than_it_costs(share):
    # walks that stay within it, and may end in a target that does not
    rng, raised = random.Random(6), 0
    for shape, start, target in random_pairs(12, 250, [(2, 2), (2, 3), (4, 2), (2, 2, 2), (2, 3, 2)], max_dims=3):
        sizes, target_size = start.processorMesh, target.maxNumElements(shape)
        limit = int(start.maxNumElements(shape) * share)
        prices = _Prices(OptimalRedist(IdealLowerBoundsCM()))
        codes = Codes(sizes, start._state, target._state)
        estimate, free = (Estimate(shape, codes, prices, most, target_size) for most in (limit, inf))
        blocks = list(zip(start.blockSizes, target.blockSizes))
        arrivals = [codes.arrivals(tensor_dim) for tensor_dim in range(len(shape))]
        moves = MoveSet(shape, sizes, blocks, codes.code_of, arrivals, merged=True)
        state, goal = moves.parts(start._state), moves.parts(target._state)
        for _ in range(8):
            code, elements, reachable = sum(part.code for part in state), prod(part.share for part in state), []
            assert free(code, inf) <= estimate(code, inf)
            raised += free(code, inf) < estimate(code, inf)
            for collective, n_procs, kept, arrived, steps in moves.steps_from(tuple(part.axes for part in state)):
                price = prices[collective, n_procs, elements]
                best = estimate.at_least[code & kept | arrived]
                for after in [after for step in steps for after in moves.after(state, step)]:
                    if after == goal or prod(part.share for part in after) <= limit:
                        after_code = sum(part.code for part in after)
                        # nor is a step left out that stays within it
                        assert best <= estimate(after_code, inf) < inf
                        assert estimate(code, inf) <= price + estimate(after_code, inf)
                        assert estimate.floor(code) <= price + estimate.floor(after_code)
                        reachable.append(after)
            if not reachable or state == goal:
                break
            state = rng.choice(reachable)
    assert raised > 20


@pytest.mark.parametrize("of_ends", [max, min])
@pytest.mark.parametrize("max_depth", [None, 3])
def test_the_search_finds_the_optimum_within_a_limit(max_depth, of_ends):
    def price(name, n_procs, volume):
        collective = name.split("_")[0]
        return getattr(IdealLowerBoundsCM, collective if collective in ("allgather", "permute") else "alltoall")(
            n_procs, volume
        ).scalar()

    found = leaps = 0
    for shape, start, target in random_pairs(13, 40, [(2, 2), (2, 3), (3, 2), (4, 2)], max_dims=2):
        limit = of_ends(start.maxNumElements(shape), target.maxNumElements(shape))
        redistributor = OptimalRedist(IdealLowerBoundsCM(), memory_limit=limit, max_depth=max_depth)
        sequence, cost = redistributor.redistribute(shape, start, target)
        expected = cheapest_by_exhaustion(shape, start, target, price, limit, max_depth)
        if expected < inf:
            assert cost == expected
            found += cost > OptimalRedist(IdealLowerBoundsCM()).redistribute(shape, start, target)[1]
        else:
            assert [name for name, *_ in sequence] == ["", "exchange_*"]
            leaps += 1
    assert found > 3
    assert of_ends is max or leaps > 2
