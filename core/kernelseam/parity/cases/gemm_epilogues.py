"""GEMM cases of epilogues: activations, what functions capture, pairs of columns, and what the
epilogue is of as a second result."""

from __future__ import annotations

from collections.abc import Iterator

from kernelseam.dtypes import DType
from kernelseam.samples.common import (
    BF16,
    F16,
    F32,
    INF,
    NAN,
    SHORT_8_BITS,
    TOKENS,
    InjectedValue,
)
from kernelseam.samples.gemm_case import TALL, GemmCase, both, case
from kernelseam.samples.operand_layout import OperandLayout


def epilogues() -> Iterator[GemmCase]:
    for name in (
        *("gelu", "silu", "geglu_tanh", "softcap", "clamp", "residual", "row_factor"),
        *("powers", "gated_options", "swiglu_interleaved"),
    ):
        yield case("f32-nn", f"epilogue-{name}", epilogue=name, N=72, K=40)
    options = both(F16, alpha=0.5, preactivation=True)
    for kind in ("f16-nt", "f16-nn"):
        yield case(kind, "epilogue-options", epilogue="in_turn", **options, beta=0.5)
        for name in ("gated_options", "interleaved_options"):
            yield case(kind, f"epilogue-{name}", epilogue=name, N=136, **_preactivation())
            ragged = {"M": 33, "N": 54, "bias": F16, "preactivation": True}
            yield case(kind, f"epilogue-{name}-ragged", epilogue=name, **ragged)
    yield case("bf16-nn", "epilogue", epilogue="silu", bias=BF16, K=130)
    yield case("bf16-tn", "epilogue-to-f32", epilogue="powers", dtype_c=F32, preactivation=True)
    yield case("f64-nn", "epilogue", epilogue="gelu", may_refuse=frozenset({"shared"}))
    yield case("f16-nt", "epilogue-tall", epilogue="powers", **{**TALL, "batch": 4})
    yield case("f16-nt", "epilogue-token-major", epilogue="checkerboard", c=TOKENS, a=TOKENS)
    large = {"M": 1100, "N": 1032, "K": 70, "sample": 300, "batch": 1, "num_heads": 2}
    for name in ("gelu_tanh", "swiglu"):
        yield case("f16-nt", f"epilogue-{name}-large", epilogue=name, **large)
    nan = (InjectedValue("A", NAN, (0, 1, 5, 6)), InjectedValue("B", INF, (1, 0, 7, 3)))
    yield case("f16-nt", "epilogue-nan-inf", epilogue="relu", injected=nan)
    yield case("f16-nt", "epilogue-k-0", epilogue="column_bias", K=0)
    yield case("f16-nt", "epilogue-no-rows", epilogue="column_bias", M=0)
    yield case("f16-nt", "epilogue-integers", epilogue="relu", data="integers")
    yield from _rounded_to_8_bits()
    yield from _reductions()
    yield case("f16-nt", "epilogue-sums", epilogue="checkerboard", batch=4, c_batch_group=2)


def _rounded_to_8_bits() -> Iterator[GemmCase]:
    """With either of the two dtypes, of which an arch has one, or none."""
    for dtype, short in SHORT_8_BITS.items():
        to: dict[str, object] = {"dtype_c": dtype, "may_refuse": frozenset({"shared"}), "N": 144}
        large = {**to, "M": 1100, "N": 1056, "K": 70, "sample": 300, "num_heads": 2}
        yield case("bf16-nt", f"epilogue-large-{short}", epilogue="quantized_rows", **large)
        ragged = {**to, "M": 33, "N": 54, "epilogue": "quantized_tensor", "data": "huge"}
        ragged["preactivation"] = True  # saturated, too
        yield case("f16-nt", f"epilogue-saturated-{short}", **ragged)
        if dtype is DType.float8_e4m3fnuz:
            continue
        for name in ("quantized_blocks", "quantized_gate"):
            yield case("f16-nt", f"epilogue-{name}-{short}", epilogue=name, **{**to, "N": 288})
        yield case("f16-nt", f"to-{short}", alpha=4.0, **to)
        added = {**to, **both(F16), "preactivation": True, "beta": 0.5}
        yield case("f16-nn", f"epilogue-added-{short}", epilogue="quantized", **added)


def _reductions() -> Iterator[GemmCase]:
    """Sums and maxima, of values before and behind what else the epilogue does."""
    sums, maxima = ("row_squares", "column_sums"), ("amax", "amax_rows")
    others = ("row_sums", "column_products", "amax_blocks", "amax_squares")
    yield case("f32-nn", "epilogue-reductions", reductions=(*sums, *maxima), epilogue="gelu")
    yield case("f32-nt", "epilogue-reductions-others", reductions=others, N=200, M=150)
    for kind in ("f16-nt", "bf16-nn"):
        own = {"epilogue": "quantized_rows", "reductions": (*sums, *others[1:]), "N": 264, "M": 130}
        yield case(kind, "epilogue-reductions", **own)
    tall = {**TALL, "sample": None, "reductions": (*sums, "amax")}  # a maximum of many parts
    yield case("f16-nt", "epilogue-reductions-tall", **tall)
    for name in ("gated_options", "interleaved_options"):
        own = {"epilogue": name, "reductions": (*sums, "amax_blocks"), "N": 136, "bias": F16}
        yield case("f16-nn", f"epilogue-reductions-{name}", **own)
    exact = {"data": "integers", "K": 16, "num_heads": 1}
    yield case("f16-nt", "epilogue-reductions-exact", reductions=("row_sums", "amax"), **exact)
    nan = (InjectedValue("A", NAN, (0, 1, 5, 6)), InjectedValue("B", INF, (1, 0, 7, 3)))
    own = {"reductions": (*maxima, *sums, "amax_squares"), "injected": nan}
    yield case("f16-nt", "epilogue-reductions-nan-inf", **own)
    for axis in "MNK":
        yield case(
            "f16-nt", f"epilogue-reductions-no-{axis}", reductions=(*sums, "amax"), **{axis: 0}
        )
    small = {"reductions": ("amax_small_squares",), "may_refuse": frozenset({"shared"})}
    yield case("f16-nt", "epilogue-reductions-small-squares", M=70, N=150, **small)
    to = {"dtype_c": DType.float8_e4m3fn, "may_refuse": frozenset({"shared"}), "N": 144}
    own = {"epilogue": "quantized_rows", "reductions": ("amax", "amax_blocks"), **to}
    yield case("f16-nt", "epilogue-reductions-e4m3fn", **own)
    yield case("f64-nn", "epilogue-reductions", reductions=sums, may_refuse=frozenset({"shared"}))


def _preactivation() -> dict[str, object]:
    layout = OperandLayout(gaps=(40, 24, 8))
    return {"bias": F16, "preactivation": True, "preactivation_layout": layout}
