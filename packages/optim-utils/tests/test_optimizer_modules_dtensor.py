"""Objects with sharded state: loads between tensors of any layout, and checkpoints at another world size."""

import copy
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from stateful_bag import Bag

from optim_utils import StateLoadError, update_param_state_dict_object
from optim_utils.low_bit import INT8, quantize
from optim_utils.testing import run_ranks


def every_pair_of_layouts(rank: int, world_size: int) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.arange(15.0).view(5, 3)
    layouts = [None, Shard(0), Shard(1), Replicate()]

    def place(values: torch.Tensor, layout: object) -> torch.Tensor:
        return values.clone() if layout is None else distribute_tensor(values, mesh, [layout])

    for live_layout in layouts:
        for loaded_layout in layouts:
            live, loaded = place(torch.zeros(5, 3), live_layout), place(whole.double(), loaded_layout)
            bag = Bag(t=live, listed=[copy.deepcopy(live)])
            report = bag.load_state_dict({"t": loaded, "listed": {0: loaded}}, strict=True)
            assert report.ok
            assert len(report.cast) == 2
            assert bag.t is live
            for tensor in (bag.t, bag.listed[0]):
                assert tensor.dtype == torch.float32
                assert torch.equal(tensor if live_layout is None else tensor.full_tensor(), whole)
                if live_layout is not None:
                    assert tensor.placements == (live_layout,)
            current = {"t": place(torch.zeros(5, 3), live_layout)}
            update_param_state_dict_object(current, {"t": loaded})
            assert torch.equal(current["t"] if live_layout is None else current["t"].full_tensor(), whole)
    # a local part is not the whole
    live = place(torch.zeros(5, 3), Shard(0))
    with pytest.raises(StateLoadError):
        Bag(t=live).load_state_dict({"t": live.to_local()[:1]})
    assert not live.full_tensor().any()


def test_loads_between_layouts():
    run_ranks(every_pair_of_layouts, 2)


def onto_meta(rank: int, world_size: int) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.arange(15.0).view(5, 3)
    for loaded in (whole, distribute_tensor(whole, mesh, [Shard(1)])):
        param = torch.nn.Parameter(distribute_tensor(torch.zeros(5, 3, device="meta"), mesh, [Shard(0)]))
        bag = Bag(t=param.detach(), param=param)
        assert bag.load_state_dict({"t": loaded, "param": loaded}, strict=True, assign=True).ok
        assert isinstance(bag.param, torch.nn.Parameter)
        for tensor in (bag.t, bag.param):
            assert torch.equal(tensor.full_tensor(), whole)
            # a DTensor itself takes the place
            assert tensor.placements == ((Shard(0),) if loaded is whole else loaded.placements)


def test_what_takes_the_place_of_a_sharded_tensor_on_meta_is_sharded():
    run_ranks(onto_meta, 2)


def another_mesh(rank: int, world_size: int) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    whole = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    loaded = distribute_tensor(whole, init_device_mesh("cpu", (4,)), [Shard(1)])
    live = distribute_tensor(torch.zeros(8, 6), init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(1)])
    assert Bag(t=live).load_state_dict({"t": loaded}, strict=True).ok
    assert torch.equal(live.full_tensor(), whole)


def test_a_load_between_meshes():
    run_ranks(another_mesh, 4)


def sharded_bag(world_size: int, filled: bool) -> Bag:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.randn(8, 256, generator=torch.Generator().manual_seed(0)) if filled else torch.zeros(8, 256)
    fmt = INT8.with_(layout="rows")
    return Bag(
        sharded=distribute_tensor(whole, mesh, [Shard(0)]),
        low=quantize(distribute_tensor(whole, mesh, [Shard(0)]), fmt),
        plain={3: [whole.clone(), 7 if filled else 0]},
    )


def save_bag(rank: int, world_size: int, folder: str) -> None:
    dcp.save({"bag": sharded_bag(world_size, filled=True).state_dict()}, checkpoint_id=folder)


def load_bag(rank: int, world_size: int, folder: str) -> None:
    live, expected = sharded_bag(world_size, filled=False), sharded_bag(world_size, filled=True)
    state = {"bag": live.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        dcp.load(state, checkpoint_id=folder)
    assert live.load_state_dict(state["bag"], strict=True).ok
    assert live.plain[3][1] == 7
    assert torch.equal(live.sharded.full_tensor(), expected.sharded.full_tensor())
    assert torch.equal(live.low.codes.full_tensor(), expected.low.codes.full_tensor())
    assert torch.equal(live.low.scale.full_tensor(), expected.low.scale.full_tensor())


@pytest.mark.parametrize(("savers", "loaders"), [(2, 1), (1, 2)], ids=["2 to 1", "1 to 2"])
def test_sharded_state_at_another_world_size(savers, loaders, tmp_path):
    run_ranks(save_bag, savers, str(tmp_path))
    run_ranks(load_bag, loaders, str(tmp_path))
