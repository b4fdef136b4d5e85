"""Keys and values of 8 bits: their dtypes, their scales in descriptors, what the functions make of
them, every refusal word for word, and where dispatch takes them."""

from __future__ import annotations

from typing import Any

import kernelseam
import ml_dtypes
import numpy as np
import pytest
from kernelseam import Attention, AttentionBwd, plan
from kernelseam.descriptors import AttentionProblem
from kernelseam.descriptors.attention.options import SpecOption
from kernelseam.dtypes import E4M3, FLOATING, DType
from kernelseam.oracle import check
from kernelseam.oracle.formulas import Variant
from kernelseam.plugins import plugins
from refusals import Refused

Array = np.ndarray[Any, Any]
FN, FNUZ = E4M3
BASE: dict[str, Any] = {
    "batch": 2,
    "num_heads": 4,
    "kv_heads": 2,
    "S_q": 3,
    "S_k": 70,
    "head_dim": 64,
    "dtype": "float16",
    "dtype_kv": "float8_e4m3fn",
}
SCALES: dict[str, Any] = {"k_scales": 0, "v_scales": 0}
PAGED: dict[str, Any] = {"block_table": 0, "kv_lengths": 0, "pages": 9, "page_size": 16}


def problem(**more: Any) -> AttentionProblem:
    made = Attention(**{**BASE, **more}).problem()
    assert isinstance(made, AttentionProblem)
    return made


def rng(seed: int = 3) -> np.random.Generator:
    return np.random.default_rng(seed)


def drawn(
    kind: type = ml_dtypes.float8_e4m3fn, dtype: type = np.float16
) -> tuple[Array, Array, Array]:
    """q [2, 4, 3, 64] and k, v [2, 2, 70, 64]."""
    q = rng().standard_normal((2, 4, 3, 64)).astype(dtype)
    k, v = (rng(s).standard_normal((2, 2, 70, 64)).astype(kind) for s in (4, 5))
    return q, k, v


# ---------------------------------------------------------------- dtypes


@pytest.mark.parametrize("dtype", E4M3, ids=str)
def test_what_the_dtypes_say_is_what_ml_dtypes_has(dtype: DType) -> None:
    info = ml_dtypes.finfo(dtype.numpy)
    assert np.dtype(dtype.numpy).name == dtype.value
    assert (dtype.itemsize, dtype.unit_roundoff) == (1, float(info.eps) / 2)
    assert dtype.smallest_subnormal == float(info.smallest_subnormal)
    assert dtype.smallest_normal == float(info.smallest_normal)
    assert dtype.is_fp8 and not dtype.floating and dtype not in FLOATING
    assert dtype.accumulator is DType.float32


def test_arrays_of_them_are_read() -> None:
    _, k, _ = drawn()
    info = kernelseam.arrays.describe(k)
    assert (info.dtype, info.shape, info.strides) == (FN, k.shape, (8960, 4480, 64, 1))
    torch = pytest.importorskip("torch", reason="torch is missing")
    for dtype in E4M3:
        x = torch.zeros((3, 5), dtype=getattr(torch, dtype.value))
        assert kernelseam.arrays.describe(x).dtype is dtype
        assert kernelseam.arrays.describe(x).pointer == x.data_ptr()


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", E4M3, ids=str)
def test_both_are_exact_in_what_they_are_multiplied_in(dtype: DType, kind: type) -> None:
    """So that the bound has no rounding of keys and values."""
    values = np.arange(256, dtype=np.uint8).view(dtype.numpy)
    wide = values.astype(np.float32)
    assert np.array_equal(wide.astype(kind).astype(np.float32), wide, equal_nan=True)


# ---------------------------------------------------------------- descriptors


def test_what_is_derived() -> None:
    p = problem()
    assert (p.spec.dtype, p.spec.kv, p.spec.out) == (DType.float16, FN, DType.float16)
    assert (p.spec.kv_scales, p.scale_block) == (None, 0)
    assert p.spec.options is SpecOption.dtype_kv
    assert str(p) == ("attention float16/float8_e4m3fn batch=2 heads=4/2 S_q=3 S_k=70 dim=64")
    assert {r.name: (r.dtype, r.alignment) for r in p.operands} == {
        "q": (DType.float16, 16),
        "k": (FN, 16),
        "v": (FN, 16),
        "out": (DType.float16, 16),
    }
    # rows of 72 bytes: k is read element by element, and its addresses may be odd
    narrow = {r.name: r.alignment for r in problem(head_dim=72).operands}
    assert narrow == {"q": 2, "k": 1, "v": 1, "out": 2}
    same = Attention(**{**BASE, "dtype_kv": "float16"}).problem().spec
    assert (same.dtype_kv, same.options) == (None, SpecOption(0))


def test_half_the_bytes_are_moved() -> None:
    q_and_out, keys = 2 * 2 * 4 * 3 * 64 * 2, 2 * 2 * 70 * 128
    assert problem().bytes_moved == q_and_out + keys
    assert problem(dtype_kv="float16").bytes_moved == q_and_out + 2 * keys
    blocks = problem(**SCALES, scale_block=10)
    assert blocks.bytes_moved == q_and_out + keys + 2 * 4 * 2 * 2 * 7


@pytest.mark.parametrize(
    ("more", "shape", "strides"),
    [
        ({}, (2, 2, 1), (2, 1, 0)),
        ({"stride_k_scales_batch": 0}, (2, 2, 1), (0, 1, 0)),
        ({"scale_block": 16}, (2, 2, 5), (10, 5, 1)),
        ({"scale_block": 1000}, (2, 2, 1), (2, 1, 1)),
        ({"scale_block": 6, **PAGED}, (9, 2, 3), (6, 1, 2)),
        ({"scale_block": 16, **PAGED}, (9, 2, 1), (2, 1, 2)),
        (PAGED, (2, 2, 1), (2, 1, 0)),
        ({"scale_block": 8, "cu_seqlens_k": 0, "total_k": 130}, (1, 2, 17), (0, 1, 2)),
        ({"cu_seqlens_k": 0, "total_k": 130}, (2, 2, 1), (2, 1, 0)),
    ],
)
def test_where_scales_lie(
    more: dict[str, Any], shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    p = problem(**SCALES, **more)
    (rule,) = (r for r in p.operands if r.name == "k_scales")
    assert (rule.dtype, rule.shape, rule.strides) == (DType.float32, shape, strides)
    assert p.spec.kv_scales == ("blocks" if "scale_block" in more else "heads")
    assert p.scale_block == more.get("scale_block", 0)


def test_scales_of_arrays_lie_as_the_keys_do() -> None:
    q = np.zeros((2, 1, 4, 64), np.float16)
    pages = np.zeros((9, 16, 2, 64), ml_dtypes.float8_e4m3fn)
    scales = np.zeros((9, 4, 2), np.float32)
    given: dict[str, Any] = {
        "layout": "bshd",
        "block_table": np.zeros((2, 5), np.int32),
        "kv_lengths": np.zeros(2, np.int32),
        "scale_block": 4,
    }
    made = Attention.from_arrays(q, pages, pages, q, k_scales=scales, v_scales=scales, **given)
    assert made.problem().k_scale_strides == (8, 1, 2)
    heads_first, own = pages.transpose(0, 2, 1, 3).copy(), scales.transpose(0, 2, 1).copy()
    given["kv_layout"] = "hnd"
    made = Attention.from_arrays(
        q, heads_first, heads_first, q, k_scales=own, v_scales=own, **given
    )
    assert made.problem().k_scale_strides == (8, 4, 1)


def test_what_descriptors_refuse(refused: Refused) -> None:
    refused(
        "dtype_kv = complex64: must be one of float16, bfloat16, float32, float64, float8_e4m3fn, "
        "float8_e4m3fnuz. Convert the array or name one of these.",
        lambda: problem(dtype_kv="complex64"),
    )
    refused(
        "scale_block = 17: must be at most page_size, 16. Give each page's rows scales.",
        lambda: problem(**SCALES, **PAGED, scale_block=17),
    )
    refused(
        "dtype_kv = int32: must be float16 as q's, or one of float8_e4m3fn, float8_e4m3fnuz. "
        "Convert k and v.",
        lambda: problem(dtype_kv="int32"),
    )
    refused(
        "dtype = float32: must be float16 or bfloat16 where k and v are float8_e4m3fn. Convert q, "
        "or k and v.",
        lambda: problem(dtype="float32"),
    )
    refused(
        "v_scales = None: must be given where k_scales is. Give it: ones change nothing.",
        lambda: problem(k_scales=0),
    )
    refused(
        "k_scales = given: scales are for k and v of 8 bits. Leave it out, or give dtype_kv.",
        lambda: problem(dtype_kv=None, **SCALES),
    )
    refused(
        "scale_block = 4: is about scales. Give k_scales and v_scales too.",
        lambda: problem(scale_block=4),
    )
    refused(
        "scale_block = 0: must be from 1 to 2**31 - 1. Give a count in that range.",
        lambda: problem(**SCALES, scale_block=0),
    )
    refused(
        "stride_k_scales_block = 3: describes blocks of keys. Give scale_block too.",
        lambda: problem(**SCALES, stride_k_scales_block=3),
    )
    refused(
        "stride_v_scales_head = 3: describes v_scales. Give v_scales too (0: it will be bound).",
        lambda: problem(stride_v_scales_head=3),
    )
    refused(
        "forward = an attention over float8_e4m3fn keys and values: gradients are of keys and "
        "values of q's dtype. Convert k and v.",
        lambda: AttentionBwd(forward=Attention(**BASE, return_lse=True)),
    )


# ---------------------------------------------------------------- the functions on arrays


@pytest.mark.parametrize("kind", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_scales_of_every_kind(kind: type, dtype: type) -> None:
    q, k, v = drawn(kind, dtype)
    ones = np.ones((2, 2, 70), np.float32)
    draw = rng(6)
    for shape, block, per_key in (
        ((), None, lambda x: ones * x),
        ((2,), None, lambda x: ones * x[:, None]),
        ((2, 1), None, lambda x: ones * x[:, :, None]),
        ((2, 2), None, lambda x: ones * x[..., None]),
        ((2, 2, 18), 4, lambda x: np.repeat(x, 4, 2)[:, :, :70]),
    ):
        k_scales, v_scales = (draw.uniform(0.1, 2, shape).astype(np.float32) for _ in "kv")
        k_scales, v_scales = np.asarray(k_scales), np.asarray(v_scales)
        out = kernelseam.attention(q, k, v, k_scales=k_scales, v_scales=v_scales, scale_block=block)
        variant = Variant(k_scales=per_key(k_scales), v_scales=per_key(v_scales))
        assert out.dtype == q.dtype
        assert check.attention(q, k, v, out, causal=False, variant=variant)
        assert not check.attention(q, k, v, out, causal=False)


def test_without_scales_it_is_the_attention_of_the_numbers() -> None:
    q, k, v = drawn()
    out, lse = kernelseam.attention(q, k, v, causal=True, return_lse=True)
    wide, wide_lse = kernelseam.attention(
        q, k.astype(np.float16), v.astype(np.float16), causal=True, return_lse=True
    )
    assert np.array_equal(out, wide) and np.array_equal(lse, wide_lse)


def test_torch_tensors_and_addresses() -> None:
    torch = pytest.importorskip("torch", reason="torch is missing")
    q, k, v = drawn()
    scales = rng().uniform(0.1, 2, (2, 2, 18)).astype(np.float32)
    options: dict[str, Any] = {"scale_block": 4}
    expected = kernelseam.attention(q, k, v, k_scales=scales, v_scales=scales, **options)

    def tensor(x: Array) -> Any:
        return torch.from_numpy(x.view(np.uint8)).view(torch.float8_e4m3fn)

    own = torch.from_numpy(scales)
    for _ in range(2):  # described, then by the shortcut
        actual = kernelseam.attention(
            torch.from_numpy(q), tensor(k), tensor(v), k_scales=own, v_scales=own, **options
        )
        assert actual.dtype is torch.float16 and np.array_equal(actual.numpy(), expected)
    out = np.zeros_like(q)
    addresses = {
        n: x.ctypes.data
        for n, x in {
            "q": q,
            "k": k,
            "v": v,
            "out": out,
            "k_scales": scales,
            "v_scales": scales,
        }.items()
    }
    plan(Attention(**BASE, **addresses, **options)).bind()()
    assert np.array_equal(out, expected)


def test_torchs_function_over_pages() -> None:
    torch = pytest.importorskip("torch", reason="torch is missing")
    from kernelseam.interop.torch import attention_paged

    draw = lambda *shape: torch.from_numpy(rng().standard_normal(shape).astype(np.float32))  # noqa: E731
    q, pages = draw(2, 1, 4, 64).half(), draw(9, 16, 2, 64)
    table = torch.arange(8, dtype=torch.int32).reshape(2, 4)
    lengths = torch.tensor([50, 64], dtype=torch.int32)
    k, v = pages.to(torch.float8_e4m3fn), (pages + 1).to(torch.float8_e4m3fn)
    scales = draw(9, 4, 2).abs() + 0.5
    options: dict[str, Any] = {"k_scales": scales, "v_scales": scales / 8, "scale_block": 4}
    actual = attention_paged(q, k, v, table, lengths, **options)
    wide = [
        x.float() * s.repeat_interleave(4, 1)[..., None] for x, s in ((k, scales), (v, scales / 8))
    ]
    expected = attention_paged(q.float(), *wide, table, lengths)
    assert (actual.float() - expected).abs().max() < 2e-3 * expected.abs().max()
    compiled = torch.compile(attention_paged, backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v, table, lengths, **options), actual)


def test_what_the_functions_refuse(refused: Refused) -> None:
    q, k, v = drawn()
    scales = np.ones((2, 2, 18), np.float32)
    refused(
        "v = an array of float16: must be float8_e4m3fn as k is. Convert the array: k and v share "
        "their dtype.",
        lambda: kernelseam.attention(q, k, v.astype(np.float16)),
    )
    refused(
        "k_scales = an array of shape [2, 2, 18]: must repeat to [2, 2]. Its axes are batch, head, "
        "from the right; extent 1 repeats.",
        lambda: kernelseam.attention(q, k, v, k_scales=scales, v_scales=scales),
    )
    refused(
        "k_scales = an array of shape [2, 2, 18]: must be [B=2, H_kv=2, blocks=14]. Check the "
        "order of the axes of all arrays.",
        lambda: kernelseam.attention(q, k, v, k_scales=scales, v_scales=scales, scale_block=5),
    )
    refused(
        "v_scales = an array of float64: must be float32. Convert the array, or plan for its "
        "dtype.",
        lambda: kernelseam.attention(
            q, k, v, k_scales=scales, v_scales=scales.astype(float), scale_block=4
        ),
    )
    refused(
        "k = an array of float16: must be float8_e4m3fn as q is. Convert the array: with q of 8 "
        "bits, q, k and v share their dtype.",
        lambda: kernelseam.attention(k, q, q),
    )


# ---------------------------------------------------------------- archs


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "gfx90a", "gfx1100", "gfx1151"])
def test_archs_without_conversions_say_so(arch: str) -> None:
    backend = "cuda" if arch.startswith("sm") else "rocm"
    toolchain = plugins().backend(backend).toolchain
    assert toolchain is not None
    row = toolchain.arch_row(arch)
    assert row.fp8_dtypes == frozenset()
    for kernel in (kernelseam.kernels.DECODE, kernelseam.kernels.COMPOSITIONS["attention"]):
        assert kernel.refuse(problem(), row) == (
            f"k and v are float8_e4m3fn: {arch} has no instructions that convert it"
        )


@pytest.mark.parametrize(
    ("arch", "converts", "other"),
    [
        *((a, FN, FNUZ) for a in ("sm_89", "sm_90a", "sm_100a", "sm_120", "gfx950", "gfx1201")),
        ("gfx942", FNUZ, FN),
    ],
)
def test_archs_convert_one_of_the_two(arch: str, converts: DType, other: DType) -> None:
    toolchain = plugins().backend("cuda" if arch.startswith("sm") else "rocm").toolchain
    assert toolchain is not None
    row, forward = toolchain.arch_row(arch), kernelseam.kernels.COMPOSITIONS["attention"]
    assert forward.refuse(problem(dtype_kv=converts), row) is None
    assert forward.refuse(problem(dtype_kv=other), row) == (
        f"k and v are {other}: {arch} converts {converts}"
    )
