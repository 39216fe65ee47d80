"""Sources that their caller gives up: which ones torch can free, and freeing them."""

from __future__ import annotations

from torch import Tensor

from optim_redist.errors import LayoutError


def refuse_undonatable(tensor: Tensor, what: str) -> None:
    """Raise LayoutError for a tensor whose memory is also another's, or is not torch's to free."""
    storage = tensor.untyped_storage()
    if storage.nbytes() != tensor.numel() * tensor.element_size():
        raise LayoutError(
            f"{what} that is donated has to be all of its storage, this one is a view; clone it, or leave donate out"
        )
    if not storage.resizable():
        raise LayoutError(
            f"{what} that is donated is freed by torch, and this one's memory is not torch's own (NumPy's, perhaps); "
            "clone it, or leave donate out"
        )


def give_up(tensor: Tensor | None) -> None:
    """Free the memory of a tensor that is not needed any more, whoever still refers to it."""
    if tensor is not None:
        tensor.untyped_storage().resize_(0)
