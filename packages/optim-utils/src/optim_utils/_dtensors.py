"""DTensors, without importing them: ``torch.distributed.tensor`` costs seconds, and most programs never load it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(value: object) -> TypeIs[DTensor]:
    """Whether ``value`` is a DTensor; if nobody has imported the class, it cannot be one."""
    # while another thread imports the module, it lacks the class
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def to_local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor itself."""
    return tensor.to_local() if is_dtensor(tensor) else tensor
