"""Sums and maxima that an epilogue writes beside the result: what they are of, where they lie, and
what is refused."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import kernelseam as ks
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernelseam import epilogues, planning
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.expressions.epilogues import epilogue_of, epilogue_text
from kernelseam.oracle import check
from kernelseam.reference import gemm
from kernelseam.reference.gemm_blocks import Blocks
from kernelseam.samples.epilogues import for_oracle
from traced_memory import peak_of

RNG = np.random.default_rng(0)
A = RNG.standard_normal((3, 33, 20)).astype(np.float32)
B = RNG.standard_normal((3, 20, 24)).astype(np.float32)
ACC = A.astype(np.float64) @ B
E4M3 = DType.float8_e4m3fn


def squares(acc: Any, m: Any, n: Any, batch: Any) -> Any:
    return acc * acc


def empty(*shape: int) -> Any:
    """What must be overwritten."""
    return np.full(shape, np.nan, np.float32)


def close(found: Any, want: Any) -> None:
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-4)


def test_each_is_of_the_element_at_its_place() -> None:
    """Several, before and behind what else the epilogue does; of all matrices and of each."""
    rows, columns, each, largest = empty(33), empty(24), empty(3, 24), empty()
    out = ks.bmm(
        A,
        B,
        epilogue=[
            epilogues.row_sums(rows, squares),
            epilogues.column_sums(each, lambda acc, m, n, batch: acc * m + batch),
            "relu",
            epilogues.amax(largest),
            lambda acc, m, n, batch: 0.5 * acc - n,
            epilogues.column_sums(columns),
        ],
    )
    y = np.maximum(ACC, 0)
    close(out, 0.5 * y - np.arange(24))
    close(rows, (ACC**2).sum((0, 2)))
    numbers = np.arange(3)[:, None]
    close(each, (ACC * np.arange(33)[:, None]).sum(1) + 33 * numbers)
    close(largest, y.max())
    close(columns, (0.5 * y - np.arange(24)).sum((0, 1)))


def test_gates_are_reduced_in_the_results_columns() -> None:
    columns, rows = empty(3, 12), empty(3, 33)
    parts = ["swiglu", epilogues.column_sums(columns), epilogues.amax(rows)]
    out = ks.bmm(A, B, epilogue=parts)
    close(columns, out.sum(1))
    close(rows, np.abs(out).max(2))


def test_maxima_are_of_absolute_values_before_the_result_is_rounded() -> None:
    """What a saturated result no longer tells, and what the next scale is made of."""
    a = np.float32([[30.0, -40.0], [1.0, 2.0]])
    blocks, whole = empty(2, 1), empty(1)
    parts = [
        epilogues.amax(whole),
        epilogues.quantized(0.5),
        epilogues.amax(blocks, block=(1, 128)),
    ]
    out = ks.matmul2d(a, 40 * np.eye(2, dtype=np.float32), epilogue=parts, out_dtype=E4M3)
    assert whole.tolist() == [1600] and blocks.tolist() == [[3200], [160]]
    assert out.astype(np.float32)[0].tolist() == [448, -448]


def test_a_nan_is_a_maximum_and_a_sum() -> None:
    a = A[0].copy()
    a[4, 0], a[7, 1] = np.nan, np.inf
    rows, sums, whole = empty(33), empty(33), empty(1)
    parts = [epilogues.amax(rows), epilogues.row_sums(sums, squares), epilogues.amax(whole)]
    ks.matmul2d(a, np.abs(B[0]), epilogue=parts)
    assert np.flatnonzero(np.isnan(rows)).tolist() == [4] == np.flatnonzero(np.isnan(sums)).tolist()
    assert np.flatnonzero(np.isinf(rows)).tolist() == [7] == np.flatnonzero(np.isinf(sums)).tolist()
    assert np.isnan(whole).all()


@pytest.mark.parametrize("M, N, K", [(0, 24, 20), (33, 0, 20), (33, 24, 0), (0, 0, 0)])
def test_of_nothing_they_are_zero(M: int, N: int, K: int) -> None:
    outs = {
        "rows": empty(M),
        "columns": empty(N),
        "all": empty(1),
        "blocks": empty(-(-M // 8), -(-N // 8)),
    }
    parts = [
        epilogues.row_sums(outs["rows"]),
        epilogues.column_sums(outs["columns"]),
        epilogues.amax(outs["all"]),
        epilogues.amax(outs["blocks"], block=(8, 8)),
    ]
    ks.matmul2d(A[0, :M, :K], B[0, :K, :N], epilogue=parts)
    assert all((x == 0).all() for x in outs.values())


def test_arrays_have_any_strides_and_nothing_beside_them_is_written() -> None:
    memory = np.full((3, 2, 48), 7, np.float32)
    columns, rows = memory[:, 0, ::2], np.full((2, 33, 3), 7, np.float32)[1].T
    ks.bmm(A, B, epilogue=[epilogues.column_sums(columns), epilogues.amax(rows)])
    close(columns, ACC.sum(1))
    close(rows, np.abs(ACC).max(2))
    assert (memory[:, 1] == 7).all() and (memory[:, 0, 1::2] == 7).all()


def test_batches_are_counted_in_the_order_of_the_arrays_axes() -> None:
    """Also where memory has them in another, in which a product without an epilogue is walked."""
    a = RNG.standard_normal((4, 3, 5, 6)).astype(np.float32).transpose(1, 0, 2, 3)
    b = RNG.standard_normal((4, 3, 6, 7)).astype(np.float32).transpose(1, 0, 2, 3)
    out, sums = np.empty((4, 3, 5, 7), np.float32).transpose(1, 0, 2, 3), empty(12, 7)
    ks.bmm(a, b, out=out, epilogue=epilogues.column_sums(sums))
    close(sums, (a @ b).sum(-2).reshape(12, 7))


def test_they_repeat_bit_for_bit() -> None:
    a, b = (RNG.standard_normal((8, 300, 300)).astype(np.float32) for _ in "ab")
    found = []
    for _ in range(3):
        rows, columns = empty(8, 300), empty(300)
        ks.bmm(a, b, epilogue=[epilogues.row_sums(rows), epilogues.column_sums(columns)])
        found.append((rows.tobytes(), columns.tobytes()))
    assert len(set(found)) == 1


def test_bits_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of as many matrices whatever the device, as each adds its own up."""
    a, b = RNG.standard_normal((300, 33, 20)), RNG.standard_normal((300, 20, 24))
    found = []
    for threads in (1, 3, 16):
        planning.forget()
        with monkeypatch.context() as patched:
            patched.setattr(gemm, "threads_for", lambda operations, device, n=threads: n)
            rows, columns, each = np.empty(33), np.empty(24), np.empty((300, 24))
            sums = [epilogues.column_sums(x) for x in (columns, each)]
            ks.bmm(a, b, epilogue=[epilogues.row_sums(rows), *sums])
        found.append([x.tobytes() for x in (rows, columns, each)])
    planning.forget()
    assert found[0] == found[1] == found[2]
    np.testing.assert_allclose(columns, (a @ b).sum((0, 1)), rtol=1e-12, atol=1e-9)
    np.testing.assert_allclose(each, (a @ b).sum(1), rtol=1e-12, atol=1e-9)


def test_memory_does_not_grow_with_the_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a block, of some thousand matrices, where a sum or a maximum is of all."""
    planning.forget()
    monkeypatch.setattr(gemm, "threads_for", lambda operations, device: 1)
    a = np.ones((20000, 8, 8), np.float32)
    out, sums, largest = np.empty_like(a), empty(8), empty(1)
    parts = [epilogues.column_sums(sums), epilogues.amax(largest)]
    ks.bmm(a, a, out=out, epilogue=parts)
    _, peak = peak_of(lambda: ks.bmm(a, a, out=out, epilogue=parts))
    planning.forget()
    assert peak < 2.5 * 2**20 and largest == 8 and (sums == 20000 * 64).all()


def test_infinities_between_blocks_raise_no_warning() -> None:
    """Of either sign: their sum is NaN."""
    a = np.zeros((1, 2100, 1), np.float32)
    a[0, 0], a[0, -1] = np.inf, -np.inf
    sums = empty(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ks.bmm(a, np.ones((1, 1, 1), np.float32), epilogue=epilogues.column_sums(sums))
    assert np.isnan(sums).all()


def test_an_interrupted_launch_leaves_nothing_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = np.ones((1, 2100, 8), np.float32), np.ones((1, 8, 5), np.float32)
    sums, c = empty(2100), empty(1, 2100, 5)
    d = ks.BatchedGemmStrided(A=a, B=b, C=c, M=2100, N=5, K=8, epilogue=[epilogues.row_sums(sums)])
    launch = ks.plan(d, backend="numpy").bind()
    run, blocks = Blocks.run, []

    def interrupted(*given: Any) -> None:
        run(*given)
        blocks.append(given)
        if len(blocks) == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Blocks, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            launch()
    launch()
    assert (sums == 40).all() and len(blocks) == 1


def test_only_arrays_and_functions_tell_binaries_apart() -> None:
    def text(n: int, cap: float) -> str:
        parts = [
            "silu",
            epilogues.amax(empty(n)),
            epilogues.softcap(cap),
            epilogues.row_sums(empty(n)),
        ]
        return epilogue_text(epilogues.epilogue_expression(parts).structure)

    assert text(4, 2.0) == text(9, 3.0)
    assert epilogue_text(epilogue_of(text(4, 2.0))) == text(4, 2.0)
    found = epilogue_of(text(4, 2.0))
    assert [(r.operation, r.axes) for r in found.reductions] == [("max", "M"), ("sum", "M")]
    assert found.operations["softcap"] == 1
    with pytest.raises(InvalidValue, match="is no text of an expression"):
        epilogue_of(text(4, 2.0).replace('"max"', '"least"'))


@st.composite
def problems(draw: Any) -> tuple[Any, ...]:
    results, M, N, K = (draw(st.integers(0, n)) for n in (3, 20, 20, 4))
    block = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    return results, M, N, K, block, draw(st.booleans()), draw(st.booleans())


@settings(max_examples=25)
@given(problems())
def test_random_problems_are_within_the_oracles_bounds(problem: tuple[Any, ...]) -> None:
    results, M, N, K, block, batched, first = problem
    lead = (results,) if batched else ()
    a = RNG.standard_normal((results, M, K)).astype(np.float32)
    b = RNG.standard_normal((results, K, N)).astype(np.float32)
    blocks = tuple(-(-n // size) for n, size in zip((M, N), block, strict=True))
    outs = [empty(*lead, M), empty(*lead, N), empty(*lead, *blocks), empty(1)]
    parts: list[Any] = [
        epilogues.row_sums(outs[0], squares),
        epilogues.column_sums(outs[1]),
        epilogues.amax(outs[2], block=block),
        epilogues.amax(outs[3]),
    ]
    parts.insert(0 if first else 4, "silu")
    out = ks.bmm(a, b, epilogue=parts)
    verdict = check.gemm(a, b, out, epilogue=for_oracle(parts), reductions=outs)
    assert verdict.passed, verdict.message
    assert verdict.checked == out.size + sum(x.size for x in outs)


FAULTS: dict[str, tuple[int, Callable[[Any, Any], None]]] = {
    "a tail counted twice": (0, lambda x, y: x.__iadd__(y[0, :, 16:].astype(np.float32).sum(1))),
    "a column left out": (1, lambda x, y: x.__setitem__(23, 0)),
    "a maximum of a row beyond the last": (
        2,
        lambda x, y: x.__setitem__(0, np.abs(y[0]).max() * 1.01),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_oracle_finds(fault: str) -> None:
    which, plant = FAULTS[fault]
    outs = [empty(33), empty(24), empty(1)]
    parts = [epilogues.row_sums(outs[0]), epilogues.column_sums(outs[1]), epilogues.amax(outs[2])]
    out = ks.bmm(A[:1], B[:1], epilogue=parts)
    given = {"epilogue": for_oracle(parts), "reductions": outs}
    assert check.gemm(A[:1], B[:1], out, **given).passed
    plant(outs[which], ACC)
    verdict = check.gemm(A[:1], B[:1], out, **given)
    assert not verdict.passed and verdict.message.startswith(f"reduction {which}[")


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "another shape": (
        lambda: epilogues.row_sums(empty(24)),
        r"epilogue = sum into an array of shape \[24\]: must be \[M\], \[33\]",
    ),
    "of too many matrices": (
        lambda: epilogues.amax(empty(4, 33)),
        r"epilogue = max into an array of shape \[4, 33\]: must be \[batch, M\], \[3, 33\]",
    ),
    "another dtype": (
        lambda: epilogues.column_sums(np.empty(24, np.float16)),
        "epilogue = sum into an array of float16: must be float32, in which it is computed",
    ),
    "broadcast": (
        lambda: epilogues.column_sums(np.broadcast_to(np.float32(0), (24,))),
        "must have memory of its own for each element",
    ),
    "no array": (lambda: epilogues.row_sums(3), "row_sums = a int: must be an array"),
    "a matrix too many": (
        lambda: epilogues.row_sums(empty(1, 3, 33)),
        r"row_sums = an array of shape \[1, 3, 33\]: must be \[M\] or \[batch, M\]",
    ),
    "a block of none": (lambda: epilogues.amax(empty(33, 2), block=(0, 16)), "block = "),
    "a gate behind": (
        lambda: [epilogues.row_sums(empty(33)), "swiglu"],
        "at most the first may be gated",
    ),
    "no function": (lambda: epilogues.row_sums(empty(33), 3), "must be a function"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused(what: str) -> None:
    make, message = REFUSED[what]
    with pytest.raises(InvalidValue, match=message):
        ks.bmm(A, B, epilogue=make())


def test_grouped_products_have_none() -> None:
    offsets = np.int32([10, 20, 33])
    with pytest.raises(InvalidValue, match="is of products that are not grouped"):
        ks.grouped_mm(A[0], B, offsets, epilogue=epilogues.column_sums(empty(24)))


def test_torch_writes_maxima_and_refuses_gradients_of_sums() -> None:
    torch = pytest.importorskip("torch", reason="torch is missing")
    from kernelseam.interop import torch as interop

    a, b = torch.from_numpy(A.copy()).requires_grad_(), torch.from_numpy(B.copy())
    sums, largest = torch.full((24,), math.nan), torch.full((1,), math.nan)
    version = largest._version
    out = interop.bmm(a, b, epilogue=["gelu", epilogues.amax(largest)])
    want = torch.nn.functional.gelu(a @ b)
    torch.testing.assert_close(largest, want.detach().abs().max()[None])
    assert largest._version > version
    arriving = torch.from_numpy(RNG.standard_normal(out.shape).astype(np.float32))
    for x, y in zip(*(torch.autograd.grad(z, a, arriving) for z in (out, want)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
    with pytest.raises(InvalidValue, match="row_sums or column_sums: has no gradients, and some"):
        interop.bmm(a, b, epilogue=epilogues.column_sums(sums))
    with torch.no_grad():
        out = interop.bmm(a, b, epilogue=["gelu", epilogues.column_sums(sums)])
    torch.testing.assert_close(sums, out.sum((0, 1)), rtol=1e-4, atol=1e-4)
