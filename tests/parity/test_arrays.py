"""Parity cases through the functions on arrays, with every kind of array there is here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import kernelseam
import numpy as np
import pytest
from kernelseam.dtypes import DType
from kernelseam.parity.matrix import named
from kernelseam.parity.running.stages import verdict
from kernelseam.samples.attention_case import AttentionCase
from kernelseam.samples.gemm_case import GemmCase
from kernelseam.samples.operations.operands import values

ATTENTION = (
    "attention-f16-64-ramp",
    "attention-f16-64-causal-masked-rows",
    "attention-bf16-128-causal-ramp",
    "attention-f32-64",
    "attention-f64-32-causal",
    "attention-f16-192v128-ramp",
    "attention-f16-64-gqa-6-2",
    "attention-f16-64-no-keys",
    "attention-f16-64-scale-negative",
)
GEMM = (
    "gemm-f16-nt",
    "gemm-f32-nn",
    "gemm-bf16-nn",
    "gemm-f16-tn",
    "gemm-f64-tt",
    "gemm-f16-nt-integers",
    "gemm-f16-nn-alpha-beta",
    "gemm-f16-nt-to-f32",
    "gemm-f16-nt-b-group-2",
    "gemm-f32-nn-k-0-beta-half",
)


@dataclass(frozen=True)
class Kind:
    """How arrays of one library are made from the host's, and brought back."""

    make: Callable[[np.ndarray], Any]
    back: Callable[[Any], np.ndarray]
    dtypes: frozenset[DType] = frozenset(DType)
    written: bool = True
    """Whether its arrays can take a result."""


def _torch(device: str) -> Kind:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if device != "cpu" and not torch.cuda.is_available():
        pytest.skip("gpu is missing: torch finds none")

    def make(x: np.ndarray) -> Any:
        if DType.of(x.dtype) is DType.bfloat16:
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).to(device)
        return torch.from_numpy(x).to(device)

    def back(x: Any) -> np.ndarray:
        x = x.cpu()
        if x.dtype is torch.bfloat16:
            return x.contiguous().view(torch.int16).numpy().view(DType.bfloat16.numpy)  # type: ignore[no-any-return]
        return x.numpy()  # type: ignore[no-any-return]

    return Kind(make, back)


def _cupy() -> Kind:
    cupy = pytest.importorskip("cupy", reason="cupy is not installed")
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        count = 0
    if not count:
        pytest.skip("gpu is missing: cupy finds none")
    return Kind(
        cupy.asarray, cupy.asnumpy, frozenset({DType.float16, DType.float32, DType.float64})
    )


def _jax() -> Kind:
    jax = pytest.importorskip("jax", reason="jax is not installed")
    host = jax.devices("cpu")[0]
    return Kind(
        lambda x: jax.device_put(x, host),
        np.asarray,
        frozenset({DType.float16, DType.bfloat16, DType.float32}),
        written=False,
    )


KINDS: dict[str, Callable[[], Kind]] = {
    "numpy": lambda: Kind(np.copy, np.asarray),
    "torch-cpu": lambda: _torch("cpu"),
    "jax-cpu": _jax,
    "cupy": _cupy,
    "torch-gpu": lambda: _torch("cuda"),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]()


def _require(kind: Kind, dtype: DType) -> None:
    if dtype not in kind.dtypes:
        pytest.skip(f"this library has no {dtype}")


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(kind: Kind, name: str, layout: str) -> None:
    case = named(name)
    assert isinstance(case, AttentionCase)
    _require(kind, case.dtype)
    arrays = values(case)
    order = (0, 2, 1, 3) if layout == "bshd" else (0, 1, 2, 3)
    q, k, v = (kind.make(np.ascontiguousarray(arrays[n].transpose(order))) for n in "qkv")
    out, lse = kernelseam.attention(
        q, k, v, causal=case.causal, scale=case.scale, layout=layout, return_lse=True
    )
    assert type(out) is type(lse) is type(q)
    results = {"out": kind.back(out).transpose(order), "lse": kind.back(lse)}
    assert [x.dtype for x in results.values()] == [case.dtype.numpy, case.dtype.accumulator.numpy]
    outcome = verdict(case, results)
    assert outcome.passed, outcome.message
    without = kernelseam.attention(q, k, v, causal=case.causal, scale=case.scale, layout=layout)
    outcome = verdict(case, {"out": kind.back(without).transpose(order)})
    assert outcome.passed, outcome.message


@pytest.mark.parametrize("name", GEMM)
def test_bmm(kind: Kind, name: str) -> None:
    case = named(name)
    assert isinstance(case, GemmCase)
    _require(kind, case.dtype)
    arrays = values(case)
    a, b = kind.make(arrays["A"]), kind.make(arrays["B"])
    options: dict[str, Any] = {"a_transposed": case.a_transposed, "b_transposed": case.b_transposed}
    given = None
    if case.beta != 0 or case.out_dtype is not case.dtype:
        if not kind.written:
            pytest.skip("this library's arrays cannot be written")
        blank = np.full((case.batch, case.num_heads, case.M, case.N), np.nan, case.out_dtype.numpy)
        given = options["out"] = kind.make(arrays.get("C", blank))
    out = kernelseam.bmm(a, b, alpha=case.alpha, beta=case.beta, **options)
    assert type(out) is type(a)
    assert given is None or out is given
    result = kind.back(out)
    assert result.dtype == case.out_dtype.numpy
    outcome = verdict(case, {"C": result})
    assert outcome.passed, outcome.message


def test_a_transposed_view_and_two_axes(kind: Kind) -> None:
    case = named("gemm-f32-nn")
    arrays = values(case)
    whole = np.stack(
        [
            np.stack(
                [
                    kind.back(
                        kernelseam.matmul2d(kind.make(np.ascontiguousarray(a.T)).T, kind.make(b))
                    )
                    for a, b in zip(arrays["A"][i], arrays["B"][i], strict=True)
                ]
            )
            for i in range(2)
        ]
    )
    outcome = verdict(case, {"C": whole})
    assert outcome.passed, outcome.message
