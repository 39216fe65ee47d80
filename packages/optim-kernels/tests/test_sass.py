"""Registers that nothing has written are found on every way through a kernel (`sass`)."""

import pytest

pytest.importorskip("triton")
from sass import unwritten_reads

# as ptxas 12.8 has compiled two branches
BRANCHES = """
        /*0000*/                   ULDC.64 UR14, c[0x0][0x198] ;
        /*0008*/                   ULDC.64 UR10, c[0x0][0x1a0] ;
        /*0010*/              @!P1 BRA `(.L_x_1) ;
        /*0020*/                   UMOV UR8, UR20 ;
        /*0030*/                   UMOV UR9, 0x40000040 ;
.L_x_0:
        /*0040*/                   HGMMA.64x64x16.F32 R24, gdesc[UR8], R24 ;
        /*0050*/                   UTMASTG.3D [UR8], [UR14] ;
        /*0060*/                   EXIT ;
.L_x_1:
        /*0070*/                   HGMMA.64x64x16.F32 R24, gdesc[UR8], R24, gsb0 ;
        /*0080*/                   UIADD3.64 UR8, UR8, 0x2, URZ ;
        /*0090*/                   BRA `(.L_x_0) ;
"""


STORE, LOWER, UPPER = (
    "UTMASTG.3D [UR8], [UR14] ;",
    "HGMMA.64x64x16.F32 R24, gdesc[UR8], R24 ;",
    "HGMMA.64x64x16.F32 R24, gdesc[UR8], R24, gsb0 ;",
)


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("", "", [UPPER]),
        # written before they part
        ("ULDC.64 UR14", "ULDC.64 UR8", [STORE]),
        # one of two
        ("ULDC.64 UR14", "ULDC UR14", [STORE, UPPER]),
        # one way writes nothing, also behind its own read
        ("UIADD3.64", "NOP", [LOWER, STORE, UPPER]),
        # B's place, behind A's
        ("ULDC.64 UR10", "ULDC UR10", [LOWER, UPPER]),
        # A in other registers
        ("R24, gdesc[UR8], R24, gsb0", "R24, R4, gdesc[UR8], R24, gsb0", []),
        # the other way is none
        ("BRA `(.L_x_1)", "EXIT", []),
        # a table of jumps
        ("@!P1 BRA `(.L_x_1)", 'BRX R2 -0x10 (*"BRANCH_TARGETS .L_x_0,.L_x_1"*)', [LOWER, STORE, UPPER]),
    ],
)
def test_reads_of_what_nothing_has_written(old: str, new: str, found: list[str]) -> None:
    assert unwritten_reads(BRANCHES.replace(old, new)) == found
