"""GEMMs of A and B of 8 bits: their descriptors, scales, NumPy's result, and who refuses them."""

from __future__ import annotations

from typing import Any

import kernelseam
import numpy as np
import pytest
from kernelseam.contract import Device
from kernelseam.descriptors import BatchedGemmPointers, BatchedGemmStrided
from kernelseam.dispatch import consider
from kernelseam.dtypes import E4M3, DType
from kernelseam.oracle import check
from kernelseam.planning import plan
from kernelseam.plugins import plugins
from refusals import Refused, refusals

BASE: dict[str, Any] = {"M": 4, "N": 6, "K": 8, "batch": 2, "num_heads": 4, "dtype": E4M3[0]}
SCALES: dict[str, Any] = {"a_scales": 0, "b_scales": 0}


def gemm(**more: Any) -> BatchedGemmStrided:
    return BatchedGemmStrided(**{**BASE, **more})


def drawn(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(E4M3[0].numpy)


def test_dtypes() -> None:
    spec = gemm().problem().spec
    assert (spec.dtype, spec.dtype_c, spec.dtype_acc) == (E4M3[0], DType.float32, DType.float32)
    assert not spec.scales
    assert gemm(dtype_c="float16", bias=0).problem().spec.bias is DType.float16
    listed = BatchedGemmPointers(**{**BASE, "dtype": "float8_e4m3fnuz"}).problem().spec
    assert (listed.dtype, listed.dtype_c, listed.vector_a) == (E4M3[1], DType.float32, 1)


def test_scales_pack_as_their_matrices_do() -> None:
    p = gemm(**SCALES, b_head_group=2).problem()
    assert p.spec.scales and not p.spec.plain and "scales" in str(p.spec)
    assert (p.a_scale_strides, p.b_scale_strides) == ((16, 4, 1), (12, 6, 1))
    rules = {r.name: r for r in p.operands}
    assert (rules["a_scales"].shape, rules["b_scales"].shape) == ((2, 4, 4), (2, 2, 6))
    assert rules["a_scales"].dtype is DType.float32 and rules["a_scales"].alignment == 4
    one = gemm(
        **SCALES,
        **{f"stride_a_scales_{axis}": 0 for axis in ("batch", "head", "row")},
        **{f"stride_b_scales_{axis}": 0 for axis in ("batch", "head", "column")},
    ).problem()
    assert one.a_scale_strides == one.b_scale_strides == (0, 0, 0)
    assert {r.span for r in one.operands if r.name in SCALES} == {1}
    assert {r.span for r in gemm(**SCALES, K=0).problem().operands if r.name in SCALES} == {0}


@pytest.mark.parametrize(
    ("more", "message"),
    refusals("fp8_factors", "factors", globals()),
)
def test_refused(refused: Refused, more: dict[str, Any], message: str) -> None:
    refused(message, lambda: gemm(**more))


def held(a: Any, b: Any, out: Any, **more: Any) -> None:
    verdict = check.gemm(a, b, out, zero_mean=False, **more)
    assert verdict, verdict.message


@pytest.mark.parametrize("shape", ["one", "rows", "heads"])
def test_bmm_scales(shape: str) -> None:
    a, b = drawn(2, 4, 5, 33), drawn(2, 2, 7, 33, seed=1)
    rng = np.random.default_rng(2)
    of_a, of_b = {
        "one": ((1,), (1, 1)),
        "rows": ((2, 4, 5), (2, 2, 7)),
        "heads": ((4, 1), (2, 7)),
    }[shape]
    sa, sb = (rng.uniform(0.2, 3, n).astype(np.float32) for n in (of_a, of_b))
    out = kernelseam.bmm(
        a, b, b_transposed=True, a_scales=sa, b_scales=sb, alpha=-1.5, backend="numpy"
    )
    assert out.dtype == np.float32
    whole = {
        "a_scales": np.broadcast_to(sa, (2, 4, 5)),
        "b_scales": np.broadcast_to(sb, (2, 2, 7)),
    }
    held(a, b, out, b_transposed=True, alpha=-1.5, **whole)
    if shape != "heads":  # by columns: heads of a would repeat those of b
        turned = np.empty((2, 4, 7, 5), np.float16).swapaxes(2, 3)
        kernelseam.bmm(a, b, b_transposed=True, a_scales=sa, b_scales=sb, out=turned)
        held(a, b, turned, b_transposed=True, **whole)


def test_bmm_scales_of_a_repeated_b() -> None:
    """B is one matrix, and each batch has scales of its own for it."""
    a, b = drawn(3, 5, 16), np.broadcast_to(drawn(7, 16, seed=1), (3, 7, 16))
    sa, sb = np.ones(1, np.float32), np.arange(1, 22, dtype=np.float32).reshape(3, 7)
    out = kernelseam.bmm(a, b, b_transposed=True, a_scales=sa, b_scales=sb)
    held(a, b, out, b_transposed=True, a_scales=np.ones((3, 5)), b_scales=sb)
    flat = kernelseam.matmul2d(a[0], b[0], b_transposed=True, a_scales=sa, b_scales=sb[1])
    held(a[0], b[0], flat, b_transposed=True, a_scales=np.ones(5), b_scales=sb[1])


def test_what_bmm_refuses(refused: Refused) -> None:
    a, b, ones = drawn(5, 16), drawn(7, 16), np.ones(7, np.float32)
    refused(
        "a_scales = an array of shape [7]: must be [M=5], or broadcast to [5]. Its axes are those "
        "of its matrices, from the right; extent 1 repeats.",
        lambda: kernelseam.matmul2d(a, b, b_transposed=True, a_scales=ones, b_scales=ones),
    )
    refused(
        "b = an array of float16: must be float8_e4m3fn as a is. Convert one of them.",
        lambda: kernelseam.matmul2d(a, b.astype(np.float16), b_transposed=True),
    )


@pytest.mark.parametrize("gap", [0, 3])
def test_lists_of_scales(gap: int) -> None:
    """At gaps, and evenly spaced, where they become strides."""
    rng, M, N, K = np.random.default_rng(5), 5, 7, 16
    a, b = [drawn(M, K, seed=i) for i in range(3)], [drawn(N, K, seed=9 + i) for i in range(3)]
    c = np.empty((3, M, N), np.float32)
    of_a = rng.uniform(0.2, 3, (3, M + gap)).astype(np.float32)
    of_b = rng.uniform(0.2, 3, (3, N)).astype(np.float32)
    made = BatchedGemmPointers(
        M=M,
        N=N,
        K=K,
        num_heads=3,
        A_ptrs=a,
        B_ptrs=b,
        C_ptrs=list(c),
        a_scales_ptrs=[x[:M] for x in of_a[[0, 2, 1] if gap else [0, 1, 2]]],
        b_scales_ptrs=list(of_b),
        b_transposed=True,
        alpha=0.5,
    )
    assert made.problem().spec.scales
    call = plan(made).bind(check=True)
    call()
    order = [0, 2, 1] if gap else [0, 1, 2]
    held(
        np.stack(a)[None],
        np.stack(b)[None],
        c[None],
        b_transposed=True,
        alpha=0.5,
        a_scales=of_a[None, order, :M],
        b_scales=of_b[None],
    )


def test_what_lists_refuse(refused: Refused) -> None:
    refused(
        "b_scales_ptrs = None: must be given where a_scales_ptrs is. Give it: ones change nothing.",
        lambda: BatchedGemmPointers(**BASE, a_scales_ptrs=0),
    )
    refused(
        "a_scales_ptrs = 3 entries: must have batch·num_heads = 8. Give one entry a matrix, "
        "batch-major.",
        lambda: BatchedGemmPointers(**BASE, a_scales_ptrs=[4096] * 3, b_scales_ptrs=0),
    )


def _device(backend: str, arch: str) -> Device:
    chain = plugins().backend(backend).toolchain
    assert chain is not None
    product = chain.arch_row(arch).product
    assert product is not None
    return product


def refusals(device: Device, **more: Any) -> dict[str, str | None]:
    wide = {"M": 256, "N": 256, "K": 256, "b_transposed": True}
    problem = gemm(**{**wide, **more}).problem()
    return {c.implementation.name: c.refusal for c in consider(problem, device)}


def test_who_takes_it_on_nvidia() -> None:
    pytest.importorskip("kernelseam_cuda")
    hopper = refusals(_device("cuda", "sm_90a"), **SCALES, dtype_c="bfloat16")
    assert hopper["shared"] is None and hopper["sm90"] is None
    assert hopper["cublas"] == hopper["cublaslt"] == "has no float8_e4m3fn products"
    along = refusals(_device("cuda", "sm_90a"), b_transposed=False)
    assert along["shared"] is None
    assert along["sm90"] == "it takes e4m3 out of shared memory, where A and B must lie along K"
    other = refusals(_device("cuda", "sm_90a"), dtype=E4M3[1])
    assert (
        other["shared"] == other["sm90"] == "sm_90a multiplies float8_e4m3fn, not float8_e4m3fnuz"
    )
    assert refusals(_device("cuda", "sm_89"))["shared"] is None
    assert (
        refusals(_device("cuda", "sm_80"))["shared"]
        == "sm_80 multiplies no numbers of 8 bits, not float8_e4m3fn"
    )


def test_who_takes_it_on_amd() -> None:
    pytest.importorskip("kernelseam_rocm")
    for arch in ("gfx950", "gfx1201"):
        assert refusals(_device("rocm", arch), **SCALES)["shared"] is None
    mine = refusals(_device("rocm", "gfx942"), dtype=E4M3[1])
    assert mine["shared"] is None and mine["hipblas"] == "has no float8_e4m3fnuz products"
    assert (
        refusals(_device("rocm", "gfx942"))["shared"]
        == "gfx942 multiplies float8_e4m3fnuz, not float8_e4m3fn"
    )
    assert (
        refusals(_device("rocm", "gfx1100"))["shared"]
        == "gfx1100 multiplies no numbers of 8 bits, not float8_e4m3fn"
    )


def blocks(a: Any, rows: Any, of: int, k: int) -> Any:
    """The scale of each element of a [..., rows, K]."""
    return rows.repeat(of, -2)[..., : a.shape[-2], :].repeat(k, -1)[..., : a.shape[-1]]


@pytest.mark.parametrize("sizes", [(1, 128, 128), (1, 1, 32), (16, 8, 50)])
@pytest.mark.parametrize("columns_first", [False, True])
def test_bmm_scales_of_blocks(sizes: tuple[int, int, int], columns_first: bool) -> None:
    """Where the result's columns are contiguous, A and B change places, and so do their blocks."""
    m, n, k = sizes
    a, b = drawn(2, 3, 20, 300), drawn(2, 3, 150, 300, seed=1)
    rng = np.random.default_rng(4)
    rows = rng.uniform(0.1, 2, (2, 3, -(-20 // m), -(-300 // k))).astype(np.float32)
    columns = rng.uniform(0.1, 2, (3, -(-150 // n), -(-300 // k))).astype(np.float32)
    out = np.zeros((2, 3, 150, 20), np.float32).swapaxes(2, 3) if columns_first else None
    made = kernelseam.bmm(
        a, b, b_transposed=True, a_scales=rows, b_scales=columns, scale_block=sizes, out=out
    )
    of_b = np.broadcast_to(columns, (2, *columns.shape))
    verdict = check.gemm(
        a,
        b,
        np.ascontiguousarray(made),
        b_transposed=True,
        a_scales=blocks(a, rows, m, k),
        b_scales=blocks(b, of_b, n, k),
    )
    assert verdict, verdict.message


def test_scales_of_blocks_in_descriptors(refused: Refused) -> None:
    p = gemm(**SCALES, scale_block=(1, 4, 3), b_head_group=2).problem()
    assert p.spec.scale_block == (1, 4, 3) and "scale_block=1×4×3" in str(p.spec)
    rules = {r.name: r for r in p.operands}
    assert (rules["a_scales"].shape, rules["b_scales"].shape) == ((2, 4, 4, 3), (2, 2, 2, 3))
    assert rules["a_scales"].strides == (48, 12, 3, 1)
    steps = {"batch": 48, "head": 12, "row": 1, "k": 4}
    given = {f"stride_a_scales_{axis}": step for axis, step in steps.items()}
    along = {r.name: r for r in gemm(**SCALES, scale_block=[1, 4, 3], **given).problem().operands}
    assert along["a_scales"].strides == (48, 12, 1, 4)
    refused(
        "scale_block = (1, 4, 3): is about scales. Give a_scales and b_scales too.",
        lambda: gemm(scale_block=(1, 4, 3)),
    )
    refused(
        "scale_block = 128: must be (rows of A, columns of B, values of k) that share a scale. "
        "For example (1, 128, 128).",
        lambda: gemm(**SCALES, scale_block=128),
    )
    refused(
        "scale_block[2] = 0: must be from 1 to 2**31 - 1. Give a count in that range.",
        lambda: gemm(**SCALES, scale_block=(1, 4, 0)),
    )
    refused(
        "stride_a_scales_k = 1: describes blocks of k. Give scale_block too.",
        lambda: gemm(**SCALES, stride_a_scales_k=1),
    )
    a, b = drawn(5, 16), drawn(16, 7)
    ones = np.ones((5, 3), np.float32)
    refused(
        "a_scales = an array of shape [5, 3]: must be [5, 2], or broadcast to [5, 2]. Its axes are "
        "those of its matrices, then blocks of rows or columns, then blocks of k.",
        lambda: kernelseam.matmul2d(a, b, a_scales=ones, b_scales=ones, scale_block=(1, 7, 8)),
    )


def test_torch_compiles_products_with_scales() -> None:
    torch = pytest.importorskip("torch", reason="torch is missing")
    a, b = (torch.from_numpy(drawn(2, n, 16, seed=n).view(np.uint8)) for n in (5, 7))
    a, b = (x.view(torch.float8_e4m3fn) for x in (a, b))
    rows, columns = torch.rand(2, 5) + 0.5, torch.rand(7) + 0.5
    bias = torch.rand(7)
    scales: dict[str, Any] = {"a_scales": rows, "b_scales": columns}

    def batched(a: Any, b: Any) -> Any:
        return kernelseam.bmm(a, b, b_transposed=True, **scales, out_dtype=torch.bfloat16)

    def single(a: Any, b: Any) -> Any:
        own = {"a_scales": rows[0], "b_scales": columns[:1]}
        return kernelseam.matmul2d(a[0], b[1], b_transposed=True, **own, bias=bias)

    for function, dtype in ((batched, torch.bfloat16), (single, torch.float32)):
        expected = function(a, b)
        actual = torch.compile(function, backend="eager", fullgraph=True)(a, b)
        assert expected.dtype is dtype and torch.equal(actual, expected)


def test_torchs_operators_take_scales(refused: Refused) -> None:
    torch = pytest.importorskip("torch", reason="torch is missing")
    from kernelseam.interop.torch_library.gemm import BMM

    a, b = (torch.from_numpy(drawn(2, n, 16, seed=n)[..., :16].view(np.uint8)) for n in (5, 7))
    a, b = (x.view(torch.float8_e4m3fn) for x in (a, b))
    rows, columns = torch.rand(2, 5) + 0.5, torch.rand(2, 7) + 0.5
    arrays, options = (a, b, None, None, rows, columns), {"b_transposed": True}
    operator = torch.ops.kernelseam.bmm
    expected = kernelseam.bmm(a, b, **options, a_scales=rows, b_scales=columns)
    assert torch.equal(operator(*arrays, **options), expected)
    # its other utilities compare tensors of 8 bits, which torch has no products of
    torch.library.opcheck(operator.default, arrays, options, test_utils="test_faketensor")
    mapped = torch.vmap(lambda s: BMM(*arrays[:4], s, columns, **options))
    assert torch.equal(mapped(torch.stack([rows, 2 * rows]))[1], 2 * expected)
    deep: dict[str, Any] = {"scale_block": (1, 7, 8)}
    parts = torch.rand(5, 2), torch.rand(1, 2)
    by_block = kernelseam.bmm(a, b, **options, a_scales=parts[0], b_scales=parts[1], **deep)
    assert torch.equal(operator(*arrays[:4], *parts, **options, **deep), by_block)
    bias = torch.rand(7, requires_grad=True)
    operator(a, b, bias, None, rows, columns, **options).sum().backward()
    assert torch.equal(bias.grad, torch.full((7,), 10.0))
    refused(
        "a_scales.requires_grad = True: gradients do not flow to it. Pass tensor.detach().",
        lambda: operator(a, b, None, None, rows.clone().requires_grad_(), columns, **options),
    )
