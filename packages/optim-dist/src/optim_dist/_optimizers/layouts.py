"""DTensors: this rank's part, and which rank holds which elements."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from optim_redist import Layout, Mesh


def local(tensor: Tensor) -> Tensor:
    """A DTensor's local part, anything else as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def layout_of(parameter: DTensor) -> Layout:
    """Which rank holds which elements; raises ``RedistError`` if the placements do not say so.

    Where FSDP has cut a dimension that was cut before, torch's strided placement encodes the order of the two cuts.
    """
    is_strided = any(type(placement).__name__ == "_StridedShard" for placement in parameter.placements)
    return Layout.from_dtensor(parameter, strided="ordered" if is_strided else "replay")


def joint_layout(parameter: DTensor, meshes: Sequence[Sequence[int]]) -> Layout:
    """``layout_of`` over all of a parameter's meshes, which hold replicas of each other."""
    if len(meshes) == 1:
        return layout_of(parameter)
    mesh = Mesh((len(meshes), *parameter.device_mesh.shape), ranks=[rank for ranks in meshes for rank in ranks])
    return Layout.from_placements(mesh, (Replicate(), *parameter.placements), parameter.shape)
