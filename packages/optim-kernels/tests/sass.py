"""What compiled kernels read of uniform registers, which must have been written on every way there.

ptxas has left such a write out (`_hopper.ring`); on a CPU nothing else would notice.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import triton

# instructions of the tensor cores and of the copy engine, which find their operands by uniform registers
_READERS = ("HGMMA", "IGMMA", "UTMA")
_JUMPS = ("BRA", "BRX", "CALL")
_IN_BRACKETS = re.compile(r"\[(.*?)\]")
_INSTRUCTION = re.compile(r"(?P<condition>@\S+\s+)?(?P<name>\S+)\s*(?P<operands>.*)")
_LABEL = re.compile(r"[.]L_x_\d+")
_A_IN_REGISTERS = re.compile(r"R\d+, R\d+, gdesc")
_REGISTER = re.compile(r"\bUR(\d+)\b")


def disassembled(cubin: Path) -> str:
    """The instructions of a compiled kernel, with labels."""
    command = [triton.knobs.nvidia.nvdisasm.path, "-c", cubin]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def unwritten_reads(text: str) -> list[str]:
    """The instructions that read a uniform register which, on some way there, nothing has written."""
    code: list[str] = []
    places: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"([.]L_x_\d+):", line):
            places[label[1]] = len(code)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*)", line):
            code.append(instruction[1])
    # of each instruction that is reached the registers that are written on all ways to it
    written: dict[int, set[int]] = {0: set()}
    pending = [0]
    while pending:
        place = pending.pop()
        after = written[place] | _writes(code[place])
        for each in _following(place, code[place], places):
            before = written.get(each)
            if before is None or not before <= after:
                written[each] = after if before is None else before & after
                pending.append(each)
    return [code[place] for place, known in sorted(written.items()) if not _reads(code[place]) <= known]


def _parts(instruction: str) -> tuple[bool, str, str]:
    """Whether it has a condition, its name, its operands."""
    found = _INSTRUCTION.match(instruction)
    assert found is not None, instruction
    return found["condition"] is not None, found["name"], found["operands"]


def _reads(instruction: str) -> set[int]:
    """Of a reader the registers: each that it names and the next one, for a place takes two at least.

    Of tensor cores A's place and then B's; where A is in other registers, the room for its place is not read.
    """
    _, name, operands = _parts(instruction)
    if not name.startswith(_READERS):
        return set()
    named = _REGISTER.findall(" ".join(_IN_BRACKETS.findall(operands)))
    taken = (0, 1) if "gdesc" not in operands else (2, 3) if _A_IN_REGISTERS.match(operands) else (0, 1, 2, 3)
    return {int(number) + more for number in named for more in taken}


def _writes(instruction: str) -> set[int]:
    """The registers that it writes, under whatever condition."""
    _, name, operands = _parts(instruction)
    target = _REGISTER.match(operands)
    if target is None or name.startswith(_READERS):
        return set()
    size = 2 if ".64" in name or ".WIDE" in name else 1
    return {int(target[1]) + more for more in range(size)}


def _following(place: int, instruction: str, places: dict[str, int]) -> list[int]:
    """Where it leads to; a jump by a table names all labels in it."""
    is_conditional, name, operands = _parts(instruction)
    targets = [places[label] for label in _LABEL.findall(operands)] if name.startswith(_JUMPS) else []
    # a jump may have a condition among its operands
    is_jump = name.startswith("BRX") or (name.startswith("BRA") and "," not in operands)
    ends = is_jump or name.startswith(("EXIT", "RET"))
    return targets if ends and not is_conditional else [*targets, place + 1]
