"""General layouts as multi-axis distributions; ``MultiAxisDist.to_layout`` is the way back."""

from __future__ import annotations

from collections.abc import Sequence

from optim_redist.errors import LayoutError, NotRepresentableError
from optim_redist.index_sets import same
from optim_redist.layout import Cyclic, Layout
from optim_redist.multi_axis import MultiAxisDist


def from_layout(layout: Layout, shape: Sequence[int] | None) -> MultiAxisDist:
    """The multi-axis distribution with the ownership of ``layout``; ``shape`` is needed for all kinds but ``Cyclic``.

    Raises:
        NotRepresentableError: if the layout has pending reductions, lists its ranks in another order, or divides a
            dimension in a way that no block length gives.
    """
    if layout.partial or layout.mesh.ranks != tuple(range(layout.mesh.num_ranks)) or not layout.mesh.num_axes:
        raise NotRepresentableError(f"{layout} on {layout.mesh}: MultiAxisDist has ranks in order and nothing pending")
    if shape is not None:
        layout.check_shape(shape)
    blocks: list[int | None] = []
    for tensor_dim, split in enumerate(layout.dims):
        if split is None:
            blocks.append(None)
        elif isinstance(split.kind, Cyclic):
            blocks.append(split.kind.block)
        elif shape is None:
            raise LayoutError(f"{layout}: a block length can only be told for a shape; pass shape")
        else:
            sizes = layout.axis_sizes(tensor_dim)
            sets = split.kind.index_sets(shape[tensor_dim], sizes)
            # if any block length fits, it is the length of the first run
            block = max(1, sets[0][0].length if sets[0] else 1)
            if not all(map(same, sets, Cyclic(block).index_sets(shape[tensor_dim], sizes))):
                raise NotRepresentableError(f"dimension {tensor_dim} of {layout} is not dealt out in equal blocks")
            blocks.append(block)
    mapping = [None if split is None else split.axes for split in layout.dims]
    return MultiAxisDist(layout.mesh.sizes, mapping, blocks)
