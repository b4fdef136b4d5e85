"""Matrix products on arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kernelseam.contract import ArrayInfo
from kernelseam.descriptors.common.operands import check_rows
from kernelseam.descriptors.common.options import read_values, scalars_of, values_of
from kernelseam.descriptors.common.validation import number
from kernelseam.descriptors.gemm.fields import scale_block_of
from kernelseam.descriptors.gemm.options import ProductOptions
from kernelseam.descriptors.gemm.strided import group_of
from kernelseam.dtypes import DType
from kernelseam.epilogues import Epilogue
from kernelseam.errors import InvalidValue
from kernelseam.ops.calling import operate
from kernelseam.ops.expressions import epilogue_in, with_epilogue
from kernelseam.ops.operation import Operation, check_rank, not_none
from kernelseam.ops.products import check_matrices, matrices, multiply
from kernelseam.ops.signatures import Array


def bmm(
    a: Array,
    b: Array,
    *,
    a_transposed: bool = False,
    b_transposed: bool = False,
    alpha: float = 1,
    beta: float = 0,
    bias: Any = None,
    residual: Any = None,
    a_scales: Any = None,
    b_scales: Any = None,
    scale_block: tuple[int, int, int] | None = None,
    out: Any = None,
    out_dtype: DType | str | None = None,
    precision: str | None = None,
    epilogue: Epilogue | None = None,
    preactivation: Any = None,
    backend: str | None = None,
    implementation: str | None = None,
    stream: object = None,
) -> Array:
    """alpha·op(a)·op(b) + beta·out + bias + residual over a [B, M, K] and b [B, K, N], or a [B, H,
    M, K] and b [B, H_b, K, N], in one launch.

    ``a_transposed``: a holds K×M matrices, and op(a) is their transpose; likewise ``b_transposed``,
    N×K. With heads, H is a multiple of H_b, and head h of a is multiplied by head h // (H / H_b) of
    b. A transposed view (its other matrix axis contiguous) is read as it lies; other strides along
    the matrix axes are refused, and nothing is copied. Arrays of float16, bfloat16, float32 or
    float64, a and b of one dtype, from NumPy, torch or any library with DLPack, all on one device.

    ``bias`` [N], or [B, N], [H, N] or [B, H, N] (extent 1 broadcasts), is added to every row,
    ``residual``, shaped as the result, to the whole; neither is scaled, and their dtypes may differ
    from a's. A residual may be ``out`` itself, where beta is 0; its contiguous axis must be that of
    the result.

    a and b may both be float8_e4m3fn (float8_e4m3fnuz on gfx942); the result is float32 unless
    ``out`` or ``out_dtype`` says otherwise. ``a_scales`` [M], or [B, M], [H, M] or [B, H, M], and
    ``b_scales`` [N], or [B, N], [H_b, N] or [B, H_b, N], float32, both or none: factors of the rows
    of op(a) and of the columns of op(b); extent 1 broadcasts, so that [1] is one scale of a tensor.
    With ``scale_block`` = (m, n, k) scales are of blocks, ``a_scales`` [..., M / m, K / k] of m
    rows of op(a) by k values of k and ``b_scales`` [..., N / n, K / k], rounded up: (1, 128, 128)
    is DeepSeek-V3's, (1, 1, 32) that of MX formats, but with scales of float32.

    ``epilogue``: applied to each element before it is rounded: a function (acc, m, n, batch) of one
    element, a name of ``kernelseam.epilogues``, or a list of these, applied in order. ``acc`` is
    the sum above, in float32 (float64 where a is), m and n its row and column, ``batch`` its
    matrix, b·H + h. A gated one (``epilogues.gated``, "swiglu", …) makes one column of two: the
    result has N/2 columns, and beta and residual are not taken. ``preactivation`` [B, M, N] or [B,
    H, M, N], of the result's dtype: an array to which the epilogue's input is written. A list may
    have sums and maxima (``epilogues.row_sums``, ``column_sums``, ``amax``), each with its own
    array.

    ``out`` [B, M, N] or [B, H, M, N]: an array for the result, which may be wider than a and b;
    else a new one of a's library, of ``out_dtype`` (a's where that is None). beta ≠ 0 needs it,
    beta = 0 never reads it. ``precision`` says how float32 is multiplied: None or "ieee", "tf32" or
    "tf32x3", as in ``BatchedGemmStrided``. ``backend`` must be that of the arrays' device;
    ``implementation`` selects an implementation; ``stream`` is an int, an object with
    ``__cuda_stream__``, or None for the array library's current one.

    Returns the result (``out`` where it was given). Raises InvalidValue for what does not fit
    together, Unsupported with each implementation's reason.
    """
    if scale_block is not None:
        scale_block = of_three(scale_block)
    how = _values(
        batched=True,
        a_transposed=a_transposed,
        b_transposed=b_transposed,
        alpha=alpha,
        beta=beta,
        out_dtype=out_dtype,
        precision=precision,
        scale_block=scale_block,
    )
    added = bias, residual, a_scales, b_scales, preactivation
    return _multiplied(a, b, out, added, how, epilogue, backend, implementation, stream)


def matmul2d(
    a: Array,
    b: Array,
    *,
    a_transposed: bool = False,
    b_transposed: bool = False,
    alpha: float = 1,
    beta: float = 0,
    bias: Any = None,
    residual: Any = None,
    a_scales: Any = None,
    b_scales: Any = None,
    scale_block: tuple[int, int, int] | None = None,
    out: Any = None,
    out_dtype: DType | str | None = None,
    precision: str | None = None,
    epilogue: Epilogue | None = None,
    preactivation: Any = None,
    backend: str | None = None,
    implementation: str | None = None,
    stream: object = None,
) -> Array:
    """alpha·op(a)·op(b) + beta·out + bias + residual of a [M, K], b [K, N], bias [N], residual [M,
    N], a_scales [M], b_scales [N]; everything else as in ``bmm``."""
    if scale_block is not None:
        scale_block = of_three(scale_block)
    how = _values(
        batched=False,
        a_transposed=a_transposed,
        b_transposed=b_transposed,
        alpha=alpha,
        beta=beta,
        out_dtype=out_dtype,
        precision=precision,
        scale_block=scale_block,
    )
    added = bias, residual, a_scales, b_scales, preactivation
    return _multiplied(a, b, out, added, how, epilogue, backend, implementation, stream)


def _multiplied(
    a: Array,
    b: Array,
    out: Any,
    added: tuple[Any, Any, Any, Any, Any],
    how: tuple[Any, ...],
    epilogue: Epilogue | None,
    backend: str | None,
    implementation: str | None,
    stream: object,
) -> Array:
    """``added``: bias, residual, a_scales, b_scales, preactivation. Only what is given is
    collected, as that takes a part of a small product's time."""
    arrays: dict[str, Any] = {"a": a, "b": b}
    if out is not None:
        arrays["out"] = out
    bias, residual, a_scales, b_scales, preactivation = added
    if not (bias is residual is a_scales is b_scales is preactivation is None):
        arrays |= not_none(
            bias=bias,
            residual=residual,
            a_scales=a_scales,
            b_scales=b_scales,
            preactivation=preactivation,
        )
    if epilogue is not None:
        how = with_epilogue(how, arrays, epilogue)
    results = operate(gemm_work, arrays, how, backend, implementation, stream)
    product: Array = results["out"] if out is None else out
    return product


def gemm_work(operation: Operation, *values: Any) -> None:
    """``values``: those of ``ProductOptions``; where there is an epilogue, then what
    ``with_epilogue`` adds."""
    asked = read_values(ProductOptions, values[: len(_SCALARS)])
    epilogue = epilogue_in(values[len(_SCALARS) :], operation.infos)
    a_transposed, b_transposed = asked.a_transposed, asked.b_transposed
    infos = operation.infos
    check_added(asked.beta, "out" in infos)
    shape = result_shape(infos, asked.batched, a_transposed, b_transposed)
    pairs = epilogue is not None and bool(epilogue.structure.pairs)
    result(operation, "out", (*shape[:-1], shape[-1] // 2) if pairs else shape, asked.out_dtype)
    operands = {
        "A": matrices(infos["a"], a_transposed),
        "B": matrices(infos["b"], b_transposed),
        "C": matrices(infos["out"]),
    }
    if "bias" in infos:
        operands["bias"] = _by_column("bias", infos["bias"], (*shape[:-2], shape[-1]))
    of_b = infos["b"].shape[:-2]
    k = infos["a"].shape[-2 if a_transposed else -1]
    sizes = scale_block_of(asked.scale_block, "a_scales" in infos or "b_scales" in infos)
    for i, (name, wanted) in enumerate(
        (("a_scales", shape[:-1]), ("b_scales", (*of_b, shape[-1])))
    ):
        if name in infos and sizes is None:
            operands[name] = _by_column(name, infos[name], wanted)
        elif name in infos and sizes is not None:
            blocks = (*wanted[:-1], -(-wanted[-1] // sizes[i]), -(-k // sizes[2]))
            operands[name] = _by_block(name, infos[name], blocks)
    check_preactivation(infos, shape)
    if "residual" in infos:
        check_shape("residual", infos["residual"], shape)
    for name in ("residual", "preactivation"):
        if name in infos:
            operands[name] = matrices(infos[name])
    for name in ("a", "b", "out", "residual", "preactivation"):
        if name in infos:
            check_matrices(name, infos[name])
    names = {"A": "a", "B": "b", "C": "out"}
    multiply(operation, operands, names, asked.alpha, asked.beta, asked.precision, sizes, epilogue)


def check_added(beta: object, given: bool, name: str = "out") -> None:
    """Raise InvalidValue where ``beta`` asks for an array to add to that is not given."""
    if number("beta", beta) != 0 and not given:
        raise InvalidValue(
            name, None, f"is read, because beta = {beta}", "Pass the array to add to, or beta=0"
        )


def result_shape(
    infos: dict[str, ArrayInfo],
    batched: bool,
    a_transposed: bool,
    b_transposed: bool,
    remedy: str = "Check the order of the axes, a_transposed and b_transposed",
) -> tuple[int, ...]:
    """The shape of op(a)·op(b). Raises InvalidValue where a and b do not fit together."""
    first, second = infos["a"], infos["b"]
    lead = () if not batched else ("B", "H") if len(first.shape) == 4 else ("B",)
    lead_b = ("B", "H_b")[: len(lead)]
    check_rank("a", first, (*lead, "K", "M") if a_transposed else (*lead, "M", "K"))
    check_rank("b", second, (*lead_b, "N", "K") if b_transposed else (*lead_b, "K", "N"))
    M, K = first.shape[:-3:-1] if a_transposed else first.shape[-2:]
    K_b, N = second.shape[:-3:-1] if b_transposed else second.shape[-2:]
    if K_b != K:
        raise InvalidValue(
            "b",
            _shape(second),
            f"must have K = {K} {'columns' if b_transposed else 'rows'}, as a of shape "
            f"{list(first.shape)} says",
            remedy,
        )
    if second.dtype is not first.dtype:
        raise InvalidValue(
            "b",
            f"an array of {second.dtype}",
            f"must be {first.dtype} as a is",
            "Convert one of them",
        )
    if lead and first.shape[0] != second.shape[0]:
        raise InvalidValue(
            "b",
            _shape(second),
            f"must have as many batches as a, {first.shape[0]}",
            "Expand the array of one batch (a stride of 0 is fine)",
        )
    if len(lead) == 2:
        group_of("b", second, first.shape[1], second.shape[1])
    return (*first.shape[:-2], M, N)


def result(
    operation: Operation,
    name: str,
    shape: tuple[int, ...],
    dtype: DType | str | None,
    a: str = "a",
) -> None:
    """Check the caller's array for a result, or allocate one like the array ``a`` (of its dtype
    unless ``dtype`` names another)."""
    kind, infos = None if dtype is None else DType.of(dtype, "out_dtype", fp8=True), operation.infos
    if name not in infos:
        like = infos[a].dtype
        default = like.accumulator if like.is_fp8 else like
        operation.new_result(name, shape, kind or default, a, "out_dtype")
        return
    check_shape(name, infos[name], shape)
    if kind not in (None, infos[name].dtype):
        raise InvalidValue(
            "out_dtype", kind, f"{name} is an array of {infos[name].dtype}", "Give one of the two"
        )


def check_preactivation(infos: Mapping[str, Any], shape: tuple[int, ...]) -> None:
    """Raise InvalidValue for an array that what the epilogue is of cannot be written to.
    ``infos``: views, or tensors while torch traces the call."""
    if "preactivation" not in infos:
        return
    check_shape("preactivation", infos["preactivation"], shape)
    if infos["preactivation"].dtype is not infos["out"].dtype:
        raise InvalidValue(
            "preactivation",
            f"an array of {infos['preactivation'].dtype}",
            f"must be {infos['out'].dtype} as the result is",
            "Convert one of them",
        )


def check_shape(name: str, info: ArrayInfo, shape: tuple[int, ...]) -> None:
    """Raise InvalidValue for an array of another shape."""
    if info.shape != shape:
        raise InvalidValue(
            name, _shape(info), f"must have shape {list(shape)}", "Check the order of the axes"
        )


def _by_column(name: str, info: ArrayInfo, wanted: tuple[int, ...]) -> ArrayInfo:
    """A bias, or scales, viewed as [batch, head, column] where ``wanted`` is what it repeats to;
    extent 1 repeats."""
    bias = name == "bias"
    last = info.shape[-1:]
    fits = (
        0 < len(info.shape) <= len(wanted)
        and (last == wanted[-1:] or (last == (1,) and not bias))
        and all(n in (1, of) for n, of in zip(reversed(info.shape), reversed(wanted), strict=False))
    )
    if not fits:
        axis = "N" if name != "a_scales" else "M"
        raise InvalidValue(
            name,
            _shape(info),
            f"must be [{axis}={wanted[-1]}], or broadcast to {list(wanted)}",
            "A bias has no row axis: add batch or head axes with reshape"
            if bias
            else "Its axes are those of its matrices, from the right; extent 1 repeats",
        )
    if bias:
        check_rows(name, info)
    missing = len(wanted) - len(info.shape)
    axes = [(1, 0)] * missing + list(zip(info.shape[:-1], info.strides[:-1], strict=True))
    axes = (axes + [(1, 0)])[:2] if len(wanted) == 2 else axes or [(1, 0)] * 2
    step = info.strides[-1] if bias or info.shape[-1] == wanted[-1] > 1 else 0
    return replace(
        info,
        shape=(*(n for n, _ in axes), wanted[-1]),
        strides=(*(s for _, s in axes), step),
    )


def of_three(scale_block: Any) -> Any:
    """A list as a tuple: planned calls are cached by their options."""
    return tuple(scale_block) if isinstance(scale_block, list) else scale_block


def _by_block(name: str, info: ArrayInfo, wanted: tuple[int, ...]) -> ArrayInfo:
    """Scales of blocks viewed as [batch, head, block of rows or columns, block of k], where
    ``wanted`` is what their first axes repeat to."""
    lead, given = wanted[:-2], info.shape[:-2]
    missing = len(lead) - len(given)
    if (
        missing < 0
        or info.shape[-2:] != wanted[-2:]
        or any(n not in (1, of) for n, of in zip(given, lead[missing:], strict=True))
    ):
        raise InvalidValue(
            name,
            _shape(info),
            f"must be {list(wanted[-2:])}, or broadcast to {list(wanted)}",
            "Its axes are those of its matrices, then blocks of rows or columns, then blocks of k",
        )
    axes = [(1, 0)] * missing + [
        (n, s if n > 1 else 0) for n, s in zip(given, info.strides[:-2], strict=True)
    ]
    axes = (axes + [(1, 0)] * 2)[:2]
    return replace(
        info,
        shape=(*(n for n, _ in axes), *wanted[-2:]),
        strides=(*(s for _, s in axes), *info.strides[-2:]),
    )


_values, _SCALARS = values_of(ProductOptions), scalars_of(ProductOptions)


def _shape(info: ArrayInfo) -> str:
    return f"an array of shape {list(info.shape)}"
