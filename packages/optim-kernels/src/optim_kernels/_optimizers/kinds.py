"""Groups of an optimizer for a whole model: by which update each asks for its ``kind``, and what it leaves out."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Literal

from optim_kernels._optimizers.muon_options import variant_options

Kind = Literal["muon", "adamw"]

# nanochat's options for what is not a matrix.
ADAMW_DEFAULTS: dict[str, Any] = {
    "lr": 3e-4,
    "betas": (0.9, 0.95),
    "eps": 1e-10,
    "weight_decay": 0.0,
    "maximize": False,
}
# The variant of Muon groups that name none, and of those with Keller Jordan's ``use_muon``.
CURRENT_VARIANT, KELLER_VARIANT = "nanochat-2026-07", "keller"


def kind_of(group: Mapping[str, Any]) -> Kind:
    """Which update a group asks for, by its ``kind`` or Keller Jordan's ``use_muon``.

    Raises:
        TypeError: it is no group, but a list of parameters, say.
        ValueError: it has neither, or another kind, or both and they differ.
    """
    if not isinstance(group, Mapping):
        raise TypeError(f"param_group must be a dict, but got {type(group)}; give it a kind and its params")
    use_muon = group.get("use_muon")
    switch: dict[Hashable, str] = {True: "muon", False: "adamw"}
    by_switch = switch.get(use_muon) if isinstance(use_muon, Hashable) else None
    kind = group.get("kind", by_switch)
    if kind not in ("muon", "adamw"):
        raise ValueError(
            f"each group needs kind='muon' or 'adamw' (or use_muon), got kind={kind!r}; "
            "optim_utils.route_parameters(model).param_groups() makes such groups"
        )
    if by_switch not in (None, kind):
        raise ValueError(f"a group has kind={kind!r}, but use_muon={use_muon!r}; leave one of them out")
    found: Kind = kind
    return found


def muon_defaults(variant: str) -> dict[str, Any]:
    """A variant's options, with ``missing_grad="skip"`` in place of ``"raise"``, which only a group may ask for."""
    options = variant_options(variant)
    if options["missing_grad"] == "raise":
        options["missing_grad"] = "skip"
    return options


def completed_group(group: Mapping[str, Any], *, variant: str = CURRENT_VARIANT, **shared: object) -> dict[str, Any]:
    """The group with its ``kind`` and all options of that kind.

    Args:
        variant: of Muon groups that name none and do not have ``use_muon``.
        shared: the optimizer's own options, for groups that leave them out.
    """
    kind = kind_of(group)
    if kind == "adamw":
        options = ADAMW_DEFAULTS
    else:
        options = muon_defaults(group.get("variant", KELLER_VARIANT if "use_muon" in group else variant))
    return {**options, **shared, **group, "kind": kind}
