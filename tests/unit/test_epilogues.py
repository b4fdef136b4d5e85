"""Epilogues: ours against torch's functions, what users write, pairs of columns, second results,
and what is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import kernelseam as ks
import numpy as np
import pytest
from kernelseam import epilogues
from kernelseam.descriptors import BatchedGemmStrided
from kernelseam.dtypes import E4M3, LARGEST, DType
from kernelseam.errors import InvalidValue, KernelSeamError
from kernelseam.expressions.derivatives import slope
from kernelseam.expressions.epilogues import epilogue_of, epilogue_text
from kernelseam.expressions.evaluation import evaluate
from kernelseam.oracle import check
from kernelseam.oracle.epilogues import Epilogue

torch = pytest.importorskip("torch", reason="torch is missing: functions are compared with its")
F = torch.nn.functional
RNG = np.random.default_rng(0)
A = RNG.standard_normal((2, 33, 20)).astype(np.float32)
B = RNG.standard_normal((2, 20, 24)).astype(np.float32)

TORCH: dict[str, Callable[[Any], Any]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def test_all_activations_are_compared() -> None:
    assert TORCH.keys() == epilogues.ACTIVATIONS.keys()


@pytest.mark.parametrize("name", TORCH)
def test_activations_and_their_derivatives_are_torchs(name: str) -> None:
    """By name, and as torch's own function in a user's."""
    x = torch.linspace(-9, 9, 721, dtype=torch.float64).requires_grad_()
    want = TORCH[name](x)
    want.sum().backward()
    own, users = TORCH[name], epilogues.epilogue_expression(name)
    theirs = epilogues.epilogue_expression(lambda acc, m, n, batch: own(acc))
    for e in (users, theirs):
        at = {"acc": x.detach().numpy()}
        value, by = evaluate(
            [e.structure.value, slope(e.structure.value, "acc")], at, e.numbers, []
        )
        np.testing.assert_allclose(value, want.detach(), rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(by, x.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["relu", "gelu", "gelu_tanh", "silu", "quick_gelu"])
def test_nan_stays(name: str) -> None:
    a, b = np.full((1, 1), np.nan, np.float32), np.ones((1, 1), np.float32)
    assert np.isnan(ks.matmul2d(a, b, epilogue=name)[0, 0])


@pytest.mark.parametrize("gate", ["reglu", "geglu", "geglu_tanh", "swiglu"])
def test_gates_are_of_the_first_half(gate: str) -> None:
    left, right = np.split((A.astype(np.float64) @ B), 2, axis=-1)
    activation = {"reglu": "relu", "swiglu": "silu"}.get(gate, gate.replace("geglu", "gelu"))
    activated = TORCH[activation](torch.from_numpy(left)).numpy()
    found = ks.bmm(A, B, epilogue=gate)
    assert found.shape == (2, 33, 12)
    np.testing.assert_allclose(found, activated * right, rtol=1e-4, atol=1e-4)


def test_what_users_write() -> None:
    """Captured arrays by row, column and matrix, numbers, lists in turn, a second result."""
    bias, scale, cap = RNG.standard_normal((2, 24)), RNG.standard_normal(33), 3.0

    def own(acc: Any, m: Any, n: Any, batch: Any) -> Any:
        return ks.where(n % 2 == 0, acc, cap * np.tanh(acc / cap)) + bias[batch, n]

    sums = np.empty((2, 33, 24), np.float32)
    out = ks.bmm(A, B, alpha=0.5, epilogue=[own, epilogues.row_factor(scale)], preactivation=sums)
    acc = 0.5 * (A.astype(np.float64) @ B)
    np.testing.assert_allclose(sums, acc, rtol=1e-5, atol=1e-5)
    want = np.where(np.arange(24) % 2 == 0, acc, cap * np.tanh(acc / cap)) + bias[:, None]
    np.testing.assert_allclose(out, want * scale[:, None], rtol=1e-4, atol=1e-5)


def test_interleaved_pairs() -> None:
    acc = A.astype(np.float64) @ B
    pair = epilogues.gated(lambda gate, up, m, n, batch: gate - 2 * up + n, interleaved=True)
    want = acc[..., ::2] - 2 * acc[..., 1::2] + np.arange(12)
    np.testing.assert_allclose(ks.bmm(A, B, epilogue=pair), want, rtol=1e-4, atol=1e-5)


def test_batch_counts_results_whatever_axes_they_have() -> None:
    """Row-major over leading axes, also where these lie in another order in memory, which without
    an epilogue would be walked in that order."""
    a = RNG.standard_normal((4, 3, 5, 6)).astype(np.float32).transpose(1, 0, 2, 3)
    b = RNG.standard_normal((4, 3, 6, 7)).astype(np.float32).transpose(1, 0, 2, 3)
    out = np.empty((4, 3, 5, 7), np.float32).transpose(1, 0, 2, 3)
    ks.bmm(a, b, out=out, epilogue=lambda acc, m, n, batch: acc + 100 * batch)
    numbers = np.arange(12).reshape(3, 4, 1, 1)
    np.testing.assert_allclose(out, a @ b + 100 * numbers, rtol=1e-5, atol=1e-4)


def test_numbers_and_arrays_are_arguments() -> None:
    """Another value, another length: the same spec, and so the same binary."""

    def spec(cap: float, n: int) -> Any:
        x = np.zeros((n,), np.float32)
        e = epilogues.epilogue_expression([epilogues.softcap(cap), epilogues.column_bias(x)])
        return BatchedGemmStrided(M=4, N=n, K=8, dtype="float16", epilogue=e).problem().spec

    assert spec(2.0, 8) == spec(3.5, 16)
    assert spec(2.0, 8).epilogue_structure.key == epilogue_of(spec(3.5, 16).epilogue).key
    text = epilogue_text(epilogues.epilogue_expression("swiglu").structure)
    assert epilogue_text(epilogue_of(text)) == text
    assert epilogue_of(text).pairs == "halves"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown name": ({"epilogue": "gelo"}, "epilogue = gelo: must be one of relu, gelu"),
    "no function": ({"epilogue": 3}, "epilogue = 3: must be a function"),
    "none of a list": ({"epilogue": []}, "a list of epilogues must have one"),
    "a gate behind": ({"epilogue": ["relu", "swiglu"]}, "at most the first may be gated"),
    "too few coordinates": (
        {"epilogue": lambda acc: acc},
        r"it is called with 4 arguments.*Write epilogue\(acc, m, n, batch\)",
    ),
    "an if": ({"epilogue": lambda acc, m, n, batch: acc if acc > 0 else 0}, "Write where"),
    "a reduction": ({"epilogue": lambda acc, m, n, batch: acc + B}, "used without indices"),
    "pairs and beta": (
        {"epilogue": "swiglu", "beta": 0.5, "out": np.ones((2, 33, 12), "f4")},
        "beta",
    ),
    "pairs and residual": (
        {"epilogue": "swiglu", "residual": np.ones((2, 33, 24), "f4")},
        "residual = given: has the result's columns",
    ),
    "no epilogue": ({"preactivation": np.ones((2, 33, 24), "f4")}, "is what an epilogue is of"),
    "another shape": (
        {"epilogue": "swiglu", "preactivation": np.ones((2, 33, 12), "f4")},
        r"preactivation = an array of shape \[2, 33, 12\]: must have shape \[2, 33, 24\]",
    ),
    "another dtype": (
        {"epilogue": "relu", "preactivation": np.ones((2, 33, 24), "f8")},
        "preactivation = an array of float64: must be float32 as the result is",
    ),
    "columns of the result": (
        {"epilogue": "relu", "out": np.ones((2, 24, 33), "f4").transpose(0, 2, 1)},
        "must have contiguous rows where there is an epilogue",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusals(what: str) -> None:
    options, message = REFUSED[what]
    with pytest.raises(InvalidValue, match=message):
        ks.bmm(A, B, **options)


def test_an_odd_number_of_columns_has_no_pairs() -> None:
    with pytest.raises(InvalidValue, match=r"N = 3: must be even.*columns\. Give b the col"):
        ks.matmul2d(np.ones((2, 2), "f4"), np.ones((2, 3), "f4"), epilogue="swiglu")


def test_captured_arrays_are_empty_where_the_product_is() -> None:
    """A batch without tokens, and experts that get none."""
    x, w = np.ones((0, 8), "f4"), np.ones((3, 8, 6), "f4")
    factors, skip, sums = np.ones(0, "f4"), np.ones((0, 6), "f4"), np.full(6, 7, "f4")
    added = [
        epilogues.row_factor(factors),
        epilogues.residual(skip),
        epilogues.column_sums(sums),
    ]
    assert ks.matmul2d(x, w[0], epilogue=added).shape == (0, 6)
    np.testing.assert_array_equal(sums, np.zeros(6))
    scaled = epilogues.row_factor(factors)
    assert ks.grouped_mm(x, w, np.zeros(3, "i4"), epilogue=scaled).shape == (0, 6)
    message = r"captured_0 = an array of shape \[0\]: must have elements, as a function reads it"
    for product in (
        lambda: ks.matmul2d(np.ones((4, 8), "f4"), w[0], epilogue=scaled),
        lambda: ks.grouped_mm(np.ones((4, 8), "f4"), w, np.zeros(3, "i4"), epilogue=scaled),
    ):
        with pytest.raises(InvalidValue, match=message):
            product()


SHORT: dict[str, tuple[Any, str]] = {
    "column_bias": (epilogues.column_bias(np.ones(12, "f4")), r"\[12\]: is read at n along axis 0"),
    "row_factor": (epilogues.row_factor(np.ones((3, 33), "f4")), r"\[3, 33\]: is read at batch"),
    "residual": (epilogues.residual(np.ones((33, 25), "f4")[:32]), r"\[32, 25\]: is read at m"),
    "quantized": (epilogues.quantized(np.ones(2, "f4")), r"\[2\]: is read at m"),
    "sums of": (
        [epilogues.row_sums(np.ones(33, "f4"), lambda acc, m, n, batch: acc * FEW[n])],
        r"\[4\]: is read at n",
    ),
}
FEW = np.ones(4, "f4")


@pytest.mark.parametrize("what", SHORT)
def test_an_array_has_an_element_for_each_that_reads_it(what: str) -> None:
    epilogue, message = SHORT[what]
    a, b = np.ones((4, 33, 8), "f4"), np.ones((4, 8, 24), "f4")
    out_dtype = "float8_e4m3fn" if what == "quantized" else None
    with pytest.raises(InvalidValue, match=f"captured_0 = an array of shape {message}"):
        ks.bmm(a, b, epilogue=epilogue, out_dtype=out_dtype)


def test_an_array_of_experts_has_an_element_for_each() -> None:
    x, w, offs = np.ones((4, 8), "f4"), np.ones((3, 8, 6), "f4"), np.array([1, 1, 4], "i4")
    message = (
        "captured_0 = an array of shape [2, 6]: is read at batch along axis 0: must have 3 "
        "elements there, or 1. Give one for each, or make the index an expression that stays "
        "within it."
    )
    with pytest.raises(InvalidValue, match=re.escape(message)):
        ks.grouped_mm(x, w, offs, epilogue=epilogues.column_bias(np.ones((2, 6), "f4")))
    one = epilogues.column_bias(np.ones((1, 6), "f4"))
    np.testing.assert_array_equal(ks.grouped_mm(x, w, offs, epilogue=one), np.full((4, 6), 9))


@pytest.mark.parametrize("cap", [0, -1.0, math.inf, math.nan])
def test_caps_and_bounds_that_are_none(cap: float) -> None:
    with pytest.raises(InvalidValue, match=f"cap = {cap}: must be greater than 0, and finite"):
        epilogues.softcap(cap)
    with pytest.raises(InvalidValue, match=r"low = 2: must not exceed high = 1"):
        epilogues.clamp(2, 1)


def test_an_array_for_an_epilogue_has_its_axes() -> None:
    with pytest.raises(InvalidValue, match=r"\[2, 3, 4\]: must be \[n\] or \[batch, n\]"):
        epilogues.column_bias(np.ones((2, 3, 4)))


def test_the_oracle_calls_the_function_itself() -> None:
    """Wrong by more than its bound: an epilogue of another slope, and one left out."""

    def own(acc: Any, m: Any, n: Any, batch: Any) -> Any:
        return np.tanh(acc) * (m + 1)

    out = ks.bmm(A, B, epilogue=own)
    verdict = check.gemm(A, B, out, epilogue=Epilogue(own))
    assert verdict.passed
    assert verdict.checked == out.size
    assert not check.gemm(A, B, out)
    assert not check.gemm(A, B, out * np.float32(1.0001), epilogue=Epilogue(own))


def test_a_plan_has_no_functions_to_check() -> None:
    call = ks.plan(BatchedGemmStrided(M=2, N=2, K=2, dtype="float32", epilogue="relu"))
    a = np.ones((2, 2), np.float32)
    with pytest.raises(InvalidValue, match="the oracle calls an epilogue itself"):
        call.bind(A=a, B=a, C=np.empty((2, 2), np.float32), check=True)


SCALES = np.exp2(RNG.uniform(-6, 0, 33)).astype(np.float32)
QUANTIZED: dict[str, tuple[Any, Any]] = {
    "a number": (epilogues.quantized(0.25), 0.25),
    "a NumPy scalar": (epilogues.quantized(np.float32(0.25)), 0.25),
    "an array without axes": (epilogues.quantized(np.array(0.25, "f4")), 0.25),
    "of all": (epilogues.quantized(SCALES[:1]), SCALES[0]),
    "of rows": (epilogues.quantized(SCALES), SCALES[:, None]),
    "of matrices' rows": (
        epilogues.quantized(np.stack([SCALES, 2 * SCALES])),
        np.stack([SCALES, 2 * SCALES])[..., None],
    ),
    "of blocks": (
        epilogues.quantized(SCALES[:18].reshape(6, 3), (6, 10)),
        SCALES[:18].reshape(6, 3).repeat(6, 0)[:33].repeat(10, 1)[:, :24],
    ),
}


BAD_SCALES: dict[str, tuple[tuple[Any, ...], str]] = {
    "block of a number": ((0.5, (1, 128)), r"block = .*: goes with scales of blocks"),
    "block of a scalar": ((np.float32(0.5), (1, 128)), r"block = .*: goes with scales of blocks"),
    "block of no rows": ((SCALES[None], (0, 128)), r"block = .*: must be \(rows, columns\)"),
    "block of one size": ((SCALES[None], (1,)), r"block = .*: must be \(rows, columns\)"),
    "block of a number of columns": ((SCALES[None], 128), "block = 128: must be"),
    "block of halves": ((SCALES[None], (1, 0.5)), r"block = .*: must be \(rows, columns\)"),
    "a list": (([0.5, 0.25],), "scales = a list: must be an array, or a number"),
    "True": ((True,), "scales = a bool: must be an array, or a number"),
    "0": ((0,), "scales = 0: must be finite and not 0"),
    "infinite": ((math.inf,), "scales = inf: must be finite and not 0"),
    "infinite in float32": ((1e300,), r"scales = 1e\+300: must be finite and not 0"),
    "0 in float32": ((1e-60,), "scales = 1e-60: must be finite and not 0"),
}


@pytest.mark.parametrize("what", BAD_SCALES)
def test_scales_that_are_none(what: str) -> None:
    given, message = BAD_SCALES[what]
    with pytest.raises(InvalidValue, match=message):
        epilogues.quantized(*given)
    with pytest.raises(InvalidValue, match="epilogue = a list: must be an array"):
        epilogues.row_bias([1.0, 2.0])


@pytest.mark.parametrize("dtype", E4M3, ids=str)
@pytest.mark.parametrize("what", QUANTIZED)
def test_results_of_8_bits(what: str, dtype: DType) -> None:
    """Divided by their scales, rounded to nearest, and saturated."""
    epilogue, scales = QUANTIZED[what]
    found = ks.bmm(A, B, alpha=64, out_dtype=dtype, epilogue=["relu", epilogue])
    exact = np.maximum(64 * A.astype("f8") @ B, 0) / scales
    assert found.dtype == dtype.numpy
    most = LARGEST[dtype]
    assert (exact > most).any() and found.astype("f8").max() == most
    np.testing.assert_allclose(found.astype("f8"), exact.clip(0, most), rtol=2**-4, atol=2**-9)


def test_results_of_8_bits_of_torch() -> None:
    a, b = torch.from_numpy(A[0]), torch.from_numpy(B[0])
    found = ks.matmul2d(a, b, alpha=8, out_dtype=torch.float8_e4m3fn)
    assert found.dtype is torch.float8_e4m3fn
    want = (8 * a @ b).to(torch.float8_e4m3fn)
    assert ((found.float() - want.float()).abs() <= 2**-3 * want.float().abs()).all()
    for other in (torch.uint8, torch.float8_e5m2):
        with pytest.raises(KernelSeamError, match="out.dtype = .* 8 bits are taken float8_e4m3fn"):
            ks.matmul2d(a, b, out=found.view(other))
    with pytest.raises(InvalidValue, match=r"must be \[M / m, N / n\] or \[batch"):
        epilogues.quantized(np.ones(3, np.float32), (1, 128))


@pytest.mark.parametrize("dtype", E4M3, ids=str)
def test_a_preactivation_of_8_bits_is_saturated(dtype: DType) -> None:
    sums = np.empty((2, 33, 24), dtype.numpy)
    ks.bmm(A, B, alpha=999, out_dtype=dtype, epilogue="relu", preactivation=sums)
    most, exact = LARGEST[dtype], 999 * A.astype("f8") @ B
    assert (abs(exact) > most).any()
    np.testing.assert_allclose(sums.astype("f8"), exact.clip(-most, most), rtol=2**-4, atol=2**-9)


@pytest.mark.parametrize("wants", ["a", "captured"])
def test_results_of_8_bits_have_no_gradients(wants: str) -> None:
    """Refused at the forward: they would start from sums rounded to 8 bits."""
    from kernelseam.interop import torch as interop

    a, b = torch.from_numpy(A), torch.from_numpy(B)
    scales = torch.full((1,), 0.1, requires_grad=wants == "captured")
    own = epilogues.quantized(scales)
    given = {"out_dtype": torch.float8_e4m3fn, "epilogue": own}
    with pytest.raises(InvalidValue, match="out_dtype = float8_e4m3fn: must be wider than 8 bits"):
        interop.bmm(a.requires_grad_(wants == "a"), b, **given)
    with torch.no_grad():
        assert interop.bmm(a, b, **given).dtype is torch.float8_e4m3fn


T, S, ONE = (
    torch.from_numpy(RNG.standard_normal(n)).requires_grad_() for n in ((6, 8), (5,), (1, 8))
)
GRADIENTS: dict[str, tuple[Any, Callable[[Any], Any], tuple[Any, ...]]] = {
    "name": ("gelu", F.gelu, ()),
    "NumPy's function": (
        lambda acc, m, n, batch: np.tanh(acc) * (m + 1),
        lambda x: torch.tanh(x) * torch.arange(1, 6)[:, None],
        (),
    ),
    "gate": ("swiglu", lambda x: F.silu(x[..., :4]) * x[..., 4:], ()),
    "interleaved": (
        epilogues.gated(lambda gate, up, m, n, batch: torch.tanh(gate) * up, interleaved=True),
        lambda x: torch.tanh(x[..., ::2]) * x[..., 1::2],
        (),
    ),
    "one row for all": (epilogues.column_bias(ONE), lambda x: x + ONE[0], (ONE,)),
    "NumPy's function of captured tensors": (
        lambda acc, m, n, batch: np.tanh(acc * S[m]) + np.maximum(m, n),
        lambda x: (
            torch.tanh(x * S[:, None]) + torch.maximum(torch.arange(5)[:, None], torch.arange(8))
        ),
        (S,),
    ),
    "captured tensors": (
        lambda acc, m, n, batch: torch.sin(acc * S[m]) + T[batch, n],
        lambda x: torch.sin(x * S[:, None]) + T.reshape(2, 3, 1, 8),
        (T, S),
    ),
}


@pytest.mark.parametrize("what", GRADIENTS)
def test_gradients_are_torchs(what: str) -> None:
    from kernelseam.interop import torch as interop

    epilogue, formula, learnt = GRADIENTS[what]
    shapes = ((2, 3, 5, 7), (2, 3, 7, 8), (8,), (2, 3, 5, 8))
    drawn = (torch.from_numpy(RNG.standard_normal(n)).requires_grad_() for n in shapes)
    a, b, bias, residual = drawn
    added = (
        {"bias": bias} if epilogues.as_one(epilogue).pairs else {"bias": bias, "residual": residual}
    )
    out = interop.bmm(a, b, alpha=0.5, epilogue=epilogue, **added)
    want = formula(0.5 * a @ b + sum(added.values()))
    torch.testing.assert_close(out, want)
    arriving = torch.from_numpy(RNG.standard_normal(want.shape))
    inputs = (a, b, *added.values(), *learnt)
    found = torch.autograd.grad(out, inputs, arriving)
    for x, y in zip(found, torch.autograd.grad(want, inputs, arriving), strict=True):
        torch.testing.assert_close(x, y)
