"""What is found in PTX about how sums are rounded, on texts of a few lines."""

import pytest
from ptx import fused_with_sums

SUMS = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1,%f2}, %rd1, %rd2, p, 1, 1, 0, 0;\n"


@pytest.mark.parametrize(
    ("lines", "fused"),
    [
        (["mul.f32 %f3, %f1, %f9;", "fma.rn.f32 %f4, %f8, %f7, %f3;"], []),
        (["fma.rn.f32 %f4, %f9, %f1, %f3;"], [0]),
        (["mul.f32 %f3, %f2, %f9;", "fma.rn.f32 %f4, %f3, %f8, %f7;"], [1]),
        (["mul.f32 %f3, %f1, %f9;", "sub.f32 %f4, %f3, %f7;"], [1]),
        (["mul.rn.f32 %f3, %f1, %f9;", "sub.f32 %f4, %f3, %f7;"], []),
        (["mul.f32 %f3, %f8, %f9;", "sub.f32 %f4, %f3, %f7;"], []),
    ],
    ids=["addend", "factor", "product as factor", "may be fused", "rounded", "no sums"],
)
def test_which_instructions_fuse(lines: list[str], fused: list[int]) -> None:
    assert fused_with_sums(SUMS + "\n".join(lines)) == [lines[number] for number in fused]


def test_a_text_without_sums_says_nothing() -> None:
    with pytest.raises(ValueError, match="no products of the tensor cores in this text"):
        fused_with_sums("fma.rn.f32 %f4, %f9, %f1, %f3;")
