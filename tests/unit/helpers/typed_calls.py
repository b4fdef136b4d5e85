"""What a type checker makes of the public functions: mypy, which reads this, fails where a result
is of another type. Nothing here runs."""

from __future__ import annotations

from typing import assert_type

import kernelseam as ks
import numpy as np
import numpy.typing as npt
from kernelseam.ops.attention_bwd import AttentionGradients
from kernelseam.ops.gemm_bwd import ProductGradients

Half = npt.NDArray[np.float16]


class Mine:
    """An array of a library that nobody knows."""


def of_arrays(x: Half, lengths: Half, asked: bool) -> None:
    assert_type(ks.attention(x, x, x), Half)
    assert_type(ks.attention(x, x, x, causal=True, return_lse=False, layout="bshd"), Half)
    assert_type(ks.attention(x, x, x, return_lse=True), tuple[Half, Half])
    assert_type(ks.attention(x, x, x, return_lse=asked), Half | tuple[Half, Half])
    assert_type(ks.attention_varlen(x, x, x, lengths, lengths, 3, 4, softcap=2.0), Half)
    assert_type(ks.attention_paged(x, x, x, x, x, kv_layout="hnd"), Half)
    assert_type(ks.attention_bwd(x, x, x, x, x, x), AttentionGradients[Half])
    assert_type(ks.attention_bwd(x, x, x, x, x, x).dq, Half)
    assert_type(ks.bmm(x, x, b_transposed=True), Half)
    assert_type(ks.matmul2d(x, x, bias=x), Half)
    assert_type(ks.bmm_bwd(x, x, x), ProductGradients[Half])
    assert_type(ks.merge_states(x, x), tuple[Half, Half])
    assert_type(ks.fused_qkv_projection(x, x), tuple[Half, Half, Half])
    assert_type(ks.fused_qkv_projection(x, x, k_pages=x, v_pages=x, block_table=x), Half)
    assert_type(ks.fused_qkv_projection(x, x, k_pages=x, v_pages=x, slot_mapping=lengths), Half)
    assert_type(ks.fused_output_projection_residual(x, x, residual=x), Half)


def of_any_library(x: Mine) -> None:
    assert_type(ks.attention(x, x, x), Mine)
    assert_type(ks.attention(x, x, x, return_lse=True), tuple[Mine, Mine])
    assert_type(ks.bmm(x, x), Mine)


def refused(x: Half) -> None:
    """What mypy must complain about: an ignore that is not needed is an error, too."""
    ks.attention(x, x, x, casual=True)  # type: ignore[call-overload]
    ks.attention(x, x, x, causal="yes")  # type: ignore[call-overload]
    ks.attention(x, x, x, return_lse="yes")  # type: ignore[call-overload]
    ks.attention_varlen(x, x, x, x, x, 3, 4, layout="bshd")  # type: ignore[call-overload]
