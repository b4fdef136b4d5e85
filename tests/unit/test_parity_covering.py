"""A choice of specs that has every value of every field, those of a spec within a spec among
them."""

from __future__ import annotations

from compile_matrix.choice import covering, fewest, flat
from kernelseam.descriptors import AttentionBwdSpec, AttentionSpec
from kernelseam.dtypes import DType

F16, F32 = DType.float16, DType.float32


def test_fields_of_a_spec_within_count_as_its_own() -> None:
    actual = dict(flat(AttentionBwdSpec(AttentionSpec(F16, 64, 32, True), bias_gradient=True)))
    assert (
        actual["value_dim"],
        actual["causal"],
        actual["bias_gradient"],
        "forward" in actual,
    ) == (
        32,
        True,
        True,
        False,
    )


def test_what_adds_no_value_is_left_out() -> None:
    plain, causal, both = (
        AttentionSpec(F16, 64, 64),
        AttentionSpec(F16, 64, 64, True),
        AttentionSpec(F16, 64, 64, True, mask=True),
    )
    other = AttentionSpec(F32, 64, 64, True)
    assert covering([plain, causal, plain, both, AttentionSpec(F16, 64, 64, mask=True), other]) == [
        plain,
        causal,
        both,
        other,
    ]
    again = AttentionSpec(F32, 64, 64, mask=True)
    assert covering([plain, both, other, again]) == [plain, both, other, again]
    assert covering([plain, both, other, again], each_dtype=False) == [plain, both, other]
    assert covering(
        [AttentionBwdSpec(plain), AttentionBwdSpec(causal), AttentionBwdSpec(causal)]
    ) == [AttentionBwdSpec(plain), AttentionBwdSpec(causal)]


def test_few_have_every_value() -> None:
    plain, causal, both = (
        AttentionSpec(F16, 64, 64),
        AttentionSpec(F16, 64, 64, True),
        AttentionSpec(F16, 64, 64, True, mask=True),
    )
    other = AttentionSpec(F32, 64, 32, True)
    assert fewest([plain, causal, both, other]) == [plain, other, both]
    assert fewest([both, plain, causal, other, plain]) == [both, other, plain]
    assert fewest([]) == []
