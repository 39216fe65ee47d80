"""How compiled kernels round sums of products, on which it depends whether kernels of one product give the same bits.

A multiplication may be fused with the addition behind it, and is not rounded then. `_kernels.product` writes out where
it is; a compiler that fuses elsewhere as well would only be noticed on a GPU.
"""

from __future__ import annotations

import re

_SUMS = re.compile(r"wgmma[.]mma_async[^{]*[{]([^}]*)[}]")
_INSTRUCTION = re.compile(r"\s*([a-z][\w.]*)\s+(%\w+),\s*(.*?);")


def fused_with_sums(text: str) -> list[str]:
    """The instructions of a kernel's PTX that multiply its sums in a fused addition, or may yet be fused so by ptxas.

    That is a fused addition that multiplies them, and an addition of a product that says nothing of rounding.

    Raises:
        ValueError: no sums are found, so that nothing could be said of them.
    """
    sums = {register for found in _SUMS.findall(text) for register in re.findall(r"%\w+", found)}
    if not sums:
        raise ValueError("no products of the tensor cores in this text, or they are written in another way")
    names: dict[str, str] = {}
    found = []
    for line in text.splitlines():
        if (instruction := _INSTRUCTION.match(line)) is None:
            continue
        name, result, operands = instruction[1], instruction[2], re.split(r",\s*", instruction[3])
        if name == "mul.f32" and not sums.isdisjoint(operands):
            sums.add(result)
        if name.startswith("fma.") and not sums.isdisjoint(operands[:2]):
            found.append(line.strip())
        if name in ("sub.f32", "add.f32") and any(names.get(each) == "mul.f32" and each in sums for each in operands):
            found.append(line.strip())
        names[result] = name
    return found
