"""BatchedGemmStrided: what it derives, and what it refuses and how it says so."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kernelseam import BatchedGemmStrided, DType, plan
from kernelseam.descriptors import GemmSpec
from kernelseam_thirdvendor import AcmeArray
from refusals import Refused, refusals

ORDER = "Check the order of the axes of all arrays."
ROWS = "the last axis must be contiguous (stride 1). Copy the array into a contiguous one."
DTYPES = (
    "must be one of float16, bfloat16, float32, float64. Convert the array or name one of these."
)
BASE: dict[str, Any] = {"M": 4, "N": 6, "K": 8, "batch": 2, "num_heads": 4, "dtype": "float32"}


def gemm(**more: Any) -> BatchedGemmStrided:
    return BatchedGemmStrided(**{**BASE, **more})


# ---------------------------------------------------------------- what is derived


def test_packed_strides() -> None:
    p = gemm(b_head_group=2, b_transposed=True).problem()
    assert p.a_strides == (4 * 4 * 8, 4 * 8, 8)
    assert p.b_strides == (2 * 6 * 8, 6 * 8, 8)
    assert p.c_strides == (4 * 4 * 6, 4 * 6, 6)
    assert [r.shape for r in p.operands] == [(2, 4, 4, 8), (2, 2, 6, 8), (2, 4, 4, 6)]


def test_strides_left_out_pack_around_those_given() -> None:
    p = gemm(stride_a_row=10, stride_b_head=0).problem()
    assert p.a_strides == (160, 40, 10)
    assert p.b_strides == (0, 0, 6)
    assert gemm(a_transposed=True, stride_a_batch=7).problem().a_strides == (7, 32, 4)


def test_empty_axes_pack_as_one() -> None:
    assert gemm(K=0).problem().a_strides == (16, 4, 1)
    assert gemm(N=0).problem().c_strides == (16, 4, 1)
    assert gemm(batch=0, num_heads=0).problem().matrices == 0


def test_dtypes() -> None:
    s = gemm(dtype="float16").problem().spec
    assert s == GemmSpec(DType.float16, DType.float16, DType.float32, vector_b=2, vector_c=2)
    assert gemm(dtype=np.dtype("f8")).problem().spec.dtype_acc is DType.float64
    assert gemm(dtype=np.float32).problem().spec.dtype is DType.float32
    assert gemm(dtype=ml_dtypes.bfloat16).problem().spec.dtype is DType.bfloat16
    s = gemm(dtype="bfloat16", dtype_c=DType.float32, dtype_acc="float32").problem().spec
    assert (s.dtype, s.dtype_c, s.dtype_acc) == (DType.bfloat16, DType.float32, DType.float32)
    arrays = {"A": np.zeros((2, 4, 4, 8), ml_dtypes.bfloat16), "C": np.zeros((2, 4, 4, 6), "f4")}
    s = gemm(dtype=None, **arrays).problem().spec
    assert (s.dtype, s.dtype_c) == (DType.bfloat16, DType.float32)


@pytest.mark.parametrize(
    ("more", "vectors"),
    [
        ({}, (16, 4, 4)),  # rows of 8, 6 and 6 float32
        ({"N": 8}, (16, 16, 16)),
        ({"N": 8, "A": 0x1000, "B": 0x1008, "C": 0x1004}, (16, 4, 4)),
        ({"N": 8, "stride_a_head": 33}, (4, 16, 16)),
        # an axis of one entry has no stride
        ({"N": 8, "stride_a_head": 33, "num_heads": 1, "batch": 1}, (16, 16, 16)),
        ({"N": 8, "stride_a_batch": 0}, (16, 16, 16)),
        ({"N": 8, "dtype_c": "float16"}, (16, 16, 16)),
        ({"N": 4, "dtype_c": "float16"}, (16, 16, 2)),
        ({"N": 7, "dtype": "float64"}, (16, 8, 8)),
        ({"M": 1, "N": 6, "K": 1, "batch": 1, "num_heads": 1}, (16, 16, 16)),
        ({"K": 0, "N": 8, "A": 4}, (16, 16, 16)),  # nothing is read
    ],
)
def test_vector_class(more: dict[str, Any], vectors: tuple[int, int, int]) -> None:
    s = gemm(**more).problem().spec
    assert (s.vector_a, s.vector_b, s.vector_c) == vectors


def test_fields_become_plain_numbers() -> None:
    d = gemm(M=np.int64(4), alpha=np.float32(0.5), beta=2, a_transposed=np.bool_(True))
    assert [type(x) for x in (d.M, d.alpha, d.beta, d.a_transposed)] == [int, float, float, bool]
    assert (d.M, d.alpha, d.beta, d.a_transposed) == (4, 0.5, 2.0, True)


def test_alpha_and_beta_may_be_any_float() -> None:
    p = gemm(alpha=float("nan"), beta=float("-inf")).problem()
    assert np.isnan(p.alpha) and p.beta == -np.inf and p.reads_inputs


def test_frozen_and_replaced() -> None:
    d = gemm()
    with pytest.raises(FrozenInstanceError):
        d.M = 5  # type: ignore[misc]
    assert replace(d, M=5).problem().c_strides == (4 * 5 * 6, 5 * 6, 6)
    assert d.simplified() == (d, "")
    assert "A=" not in repr(gemm(A=4096))


def test_for_scores_fills_in_attentions_defaults() -> None:
    rng = np.random.default_rng(1)
    # [B, S, H + 2·H_kv, D] of a packed projection
    qkv = rng.standard_normal((2, 9, 8, 16), np.float32)
    q, k = (x.swapaxes(1, 2) for x in (qkv[:, :, :4], qkv[:, :, 4:6]))
    scores = np.full((2, 4, 9, 9), np.nan, np.float32)
    d = BatchedGemmStrided.for_scores(q, k, scores)
    p = d.problem()
    assert (p.M, p.N, p.K, p.batch, p.num_heads, p.b_head_group) == (9, 9, 16, 2, 4, 2)
    assert (p.spec.a_transposed, p.spec.b_transposed, p.alpha, p.beta) == (False, True, 0.25, 0.0)
    assert p.a_strides == p.b_strides == (9 * 8 * 16, 16, 8 * 16)
    plan(d).bind()()
    expected = 0.25 * q.astype("f8") @ np.repeat(k, 2, axis=1).astype("f8").swapaxes(-1, -2)
    assert abs(scores - expected).max() < 1e-5
    assert BatchedGemmStrided.for_scores(q, k, scores, scale=2).problem().alpha == 2.0


def test_for_output() -> None:
    rng = np.random.default_rng(2)
    weights, v = rng.random((2, 4, 5, 7), np.float32), rng.standard_normal((2, 2, 7, 3), np.float32)
    out = np.full((2, 5, 4, 3), np.nan, np.float32)  # [B, S_q, H, D_v]
    d = BatchedGemmStrided.for_output(weights, v, out.swapaxes(1, 2))
    p = d.problem()
    assert (p.M, p.N, p.K, p.b_head_group, p.spec.b_transposed, p.alpha) == (5, 3, 7, 2, False, 1.0)
    plan(d).bind()()
    expected = weights.astype("f8") @ np.repeat(v, 2, axis=1)
    assert abs(out - expected.swapaxes(1, 2)).max() < 1e-5


def test_unit_axes_get_packed_strides() -> None:
    """An axis of one entry may have any stride in an array; two equal problems must be one."""
    wide = np.zeros((2, 3, 8, 5, 16), np.float32)
    a = BatchedGemmStrided.for_scores(
        wide[:, :, :1, 0], wide[:, :, :, 1][:, :, :1], np.zeros((2, 3, 1, 1), np.float32)
    )
    assert a.problem().a_strides == (3 * 8 * 5 * 16, 8 * 5 * 16, 16)


def test_arrays_on_a_device(acme: Any) -> None:
    x = AcmeArray(np.zeros((2, 3, 4, 8), np.float32), 1)
    d = BatchedGemmStrided.for_scores(x, x, AcmeArray(np.zeros((2, 3, 4, 4), np.float32), 1))
    assert str(d.device) == "acme:1 (acme1)"
    assert gemm().device is None


# ---------------------------------------------------------------- what is refused

MESSAGES: list[tuple[dict[str, Any], str]] = [
    *refusals("gemm", "fields", globals()),
    (
        {
            "batch": 2**20,
            "M": 2**30,
            "K": 2**20,
            "stride_a_batch": 0,
            "stride_a_head": 0,
            "stride_a_row": 0,
            "N": 0,
        },
        None,  # nothing is read where C is empty
    ),
]


@pytest.mark.parametrize(("more", "message"), MESSAGES)
def test_refused(more: dict[str, Any], message: str | None, refused: Refused) -> None:
    if message is None:
        assert gemm(**more).problem().operations == 0
    else:
        refused(message, lambda: gemm(**more))


def test_interleaved_outputs_are_fine() -> None:
    """Token-major: heads lie between the columns of one row."""
    assert gemm(stride_c_head=6, stride_c_row=24, stride_c_batch=96).problem().c_strides == (
        96,
        6,
        24,
    )
    assert gemm(stride_c_head=7, stride_c_row=28, stride_c_batch=200).problem().c_strides == (
        200,
        7,
        28,
    )
    # Not nested, yet nothing is shared: heads at 0 and 5, rows at 0, 3 and 6, of one element each.
    p = gemm(M=3, N=1, num_heads=2, batch=1, stride_c_row=3, stride_c_head=5).problem()
    assert p.c_strides[1:] == (5, 3)


def arrays(**more: Any) -> dict[str, Any]:
    return {
        "A": np.zeros((2, 4, 4, 8), np.float32),
        "B": np.zeros((2, 4, 8, 6), np.float32),
        "C": np.zeros((2, 4, 4, 6), np.float32),
        "dtype": None,
        **more,
    }


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


ARRAY_MESSAGES: list[tuple[dict[str, Any], str]] = refusals("gemm", "arrays", globals())


@pytest.mark.parametrize(("more", "message"), ARRAY_MESSAGES)
def test_refused_arrays(more: dict[str, Any], message: str, refused: Refused) -> None:
    assert gemm(**arrays()).problem().a_strides == (128, 32, 8)
    refused(message, lambda: gemm(**arrays(**more)))


def test_the_last_element_counts(refused: Refused) -> None:
    flat = f32(256)
    strides = {"stride_a_batch": 128}
    assert gemm(A=flat, **strides).problem().operands[0].span == 256
    refused(
        "A = an array that spans 255 elements: the extents and strides walk over 256. "
        "Make them smaller, or give a larger array (or an address, where more memory follows).",
        lambda: gemm(A=flat[1:], **strides),
    )


def test_refused_strangers(refused: Refused, acme: Any) -> None:
    message = (
        "B = builtins.object: must be an array of a library and on a device known to acme, "
        "numpy. Pass a NumPy array, "
        "a torch tensor or anything with DLPack, and see `kernelseam doctor` for missing plugins."
    )
    refused(message, lambda: gemm(B=object()))
    refused(message.replace("object", "bool"), lambda: gemm(B=True))


def test_mixed_devices(acme: Any, refused: Refused) -> None:
    far, near = (AcmeArray(np.zeros((2, 4, 4, 8), np.float32), i) for i in (1, 0))
    refused(
        "B = an array on acme:0 (acme1): A is on acme:1 (acme1). Move all arrays to one device.",
        lambda: gemm(A=far, B=near, dtype=None),
    )
    refused(
        "C = an array on numpy:0 (cpu): A is on acme:1 (acme1). Move all arrays to one device.",
        lambda: gemm(A=far, C=np.zeros((2, 4, 4, 6), np.float32), dtype=None),
    )


def f32(*shape: int) -> np.ndarray[Any, Any]:
    return np.zeros(shape, np.float32)


FOR_SCORES: list[tuple[tuple[Any, Any, Any], dict[str, Any], str]] = [
    (
        (f32(4, 9, 16), f32(2, 2, 9, 16), f32(2, 4, 9, 9)),
        {},
        f"q = an array of shape [4, 9, 16]: must be [B, H, S_q, D]. {ORDER}",
    ),
    (
        (f32(2, 4, 9, 16), f32(2, 2, 9, 17), f32(2, 4, 9, 9)),
        {},
        f"k = an array of shape [2, 2, 9, 17]: must be [B=2, H_kv, S_k, D=16]. {ORDER}",
    ),
    (
        (f32(2, 4, 9, 16), f32(2, 2, 7, 16), f32(2, 4, 9, 9)),
        {},
        f"scores = an array of shape [2, 4, 9, 9]: must be [B=2, H=4, S_q=9, S_k=7]. {ORDER}",
    ),
    (
        (f32(2, 4, 9, 16), f32(2, 3, 9, 16), f32(2, 4, 9, 9)),
        {},
        f"k = an array of shape [2, 3, 9, 16]: 4 heads must be a multiple of its 3. {ORDER}",
    ),
    (
        (f32(2, 4, 9, 16), f32(2, 0, 9, 16), f32(2, 4, 9, 9)),
        {},
        f"k = an array of shape [2, 0, 9, 16]: 4 heads must be a multiple of its 0. {ORDER}",
    ),
    (
        (f32(2, 4, 16, 9).swapaxes(2, 3), f32(2, 2, 9, 16), f32(2, 4, 9, 9)),
        {},
        f"q = strides [576, 144, 1, 9]: {ROWS}",
    ),
    (
        (f32(2, 4, 9, 16), f32(2, 2, 9, 16), np.broadcast_to(np.float32(0), (2, 4, 9, 9))),
        {},
        f"scores = strides [0, 0, 0, 0]: {ROWS}",
    ),
]


@pytest.mark.parametrize(("given", "more", "message"), FOR_SCORES)
def test_for_scores_refuses(
    given: tuple[Any, Any, Any], more: dict[str, Any], message: str, refused: Refused
) -> None:
    refused(message, lambda: BatchedGemmStrided.for_scores(*given, **more))


def test_for_output_refuses(refused: Refused) -> None:
    refused(
        f"v = an array of shape [2, 2, 8, 3]: must be [B=2, H_kv, S_k=7, D_v]. {ORDER}",
        lambda: BatchedGemmStrided.for_output(f32(2, 4, 5, 7), f32(2, 2, 8, 3), f32(2, 4, 5, 3)),
    )
    refused(
        f"out = an array of shape [2, 4, 5, 4]: must be [B=2, H=4, S_q=5, D_v=3]. {ORDER}",
        lambda: BatchedGemmStrided.for_output(f32(2, 4, 5, 7), f32(2, 2, 7, 3), f32(2, 4, 5, 4)),
    )
