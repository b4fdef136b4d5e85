"""Matrix products on arrays."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from kernelseam.contract import ArrayInfo
from kernelseam.descriptors import BatchedGemmStrided
from kernelseam.descriptors.gemm import strides_of
from kernelseam.descriptors.validation import flag, multiple, number
from kernelseam.errors import InvalidValue
from kernelseam.ops.calling import fresh, handed_back, rank, run, views


def bmm(
    a: Any,
    b: Any,
    *,
    a_transposed: bool = False,
    b_transposed: bool = False,
    alpha: float = 1,
    beta: float = 0,
    out: Any = None,
    backend: str | None = None,
    implementation: str | None = None,
    stream: object = None,
) -> Any:
    """alpha·op(a)·op(b) + beta·out over a [B, M, K] and b [B, K, N], or a [B, H, M, K] and b [B, H_b, K, N].

    ``a_transposed``: a holds K×M matrices, and op(a) is their transpose; so for b (N×K). With heads, H is a multiple of
    H_b and head h of a meets head h // (H / H_b) of b. An array whose other matrix axis is the contiguous one is taken
    as the transpose that it is; any other strides along the matrix axes are refused, and nothing is copied. Arrays of
    float16, bfloat16, float32 or float64, a and b of one dtype, from NumPy, torch or any library with DLPack, all on
    one device.

    ``out`` [B, M, N] or [B, H, M, N]: an array for the result, which may be wider than a and b; else a new one of a's
    kind and dtype. beta ≠ 0 needs it, beta = 0 never reads it. ``backend`` must be that of the arrays' device;
    ``implementation`` names one of its ways; ``stream`` is an int, an object with ``__cuda_stream__``, or None for the
    array library's current one.

    Returns the result (``out`` where it was given). Raises InvalidValue for what does not fit together, Unsupported
    with each implementation's reason.
    """
    infos = views(backend, a=a, b=b, out=out)
    lead, lead_b = (("B", "H"), ("B", "H_b")) if len(infos["a"].shape) == 4 else (("B",), ("B",))
    return _gemm(infos, lead, lead_b, a_transposed, b_transposed, alpha, beta, out, implementation, stream)


def matmul2d(
    a: Any,
    b: Any,
    *,
    a_transposed: bool = False,
    b_transposed: bool = False,
    alpha: float = 1,
    beta: float = 0,
    out: Any = None,
    backend: str | None = None,
    implementation: str | None = None,
    stream: object = None,
) -> Any:
    """alpha·op(a)·op(b) + beta·out of a [M, K] and b [K, N]; everything else as in ``bmm``."""
    infos = views(backend, a=a, b=b, out=out)
    return _gemm(infos, (), (), a_transposed, b_transposed, alpha, beta, out, implementation, stream)


def _gemm(
    infos: dict[str, ArrayInfo], lead: tuple[str, ...], lead_b: tuple[str, ...], a_transposed: bool, b_transposed: bool,
    alpha: float, beta: float, out: Any, implementation: str | None, stream: object,
) -> Any:
    a_transposed, b_transposed = flag("a_transposed", a_transposed), flag("b_transposed", b_transposed)
    alpha, beta = number("alpha", alpha), number("beta", beta)
    if out is None and beta != 0:
        raise InvalidValue("out", None, f"is read, because beta = {beta}", "Pass the array to add to, or beta=0")
    first, second = infos["a"], infos["b"]
    rank("a", first, (*lead, "K", "M") if a_transposed else (*lead, "M", "K"))
    rank("b", second, (*lead_b, "N", "K") if b_transposed else (*lead_b, "K", "N"))
    M, K = first.shape[:-3:-1] if a_transposed else first.shape[-2:]
    K_b, N = second.shape[:-3:-1] if b_transposed else second.shape[-2:]
    if K_b != K:
        raise InvalidValue(
            "b", _shape(second),
            f"must have K = {K} {'columns' if b_transposed else 'rows'}, as a of shape {list(first.shape)} says",
            "Check the order of the axes, a_transposed and b_transposed",
        )
    if second.dtype is not first.dtype:
        raise InvalidValue("b", f"an array of {second.dtype}", f"must be {first.dtype} as a is", "Convert one of them")
    if lead and first.shape[0] != second.shape[0]:
        raise InvalidValue(
            "b", _shape(second), f"must have as many batches as a, {first.shape[0]}",
            "Expand the array of one batch (a stride of 0 is fine)",
        )
    shape = (*first.shape[:-2], M, N)
    if out is None:
        infos["out"] = fresh("out", shape, first.dtype, first)
    elif infos["out"].shape != shape:
        raise InvalidValue("out", _shape(infos["out"]), f"must have shape {list(shape)}", "Check the order of the axes")
    operands, names = (first, second, infos["out"]), ("a", "b", "out")
    if _columns_apart(infos["out"]) and not _columns_apart(_swapped(infos["out"])):  # outᵀ = op(b)ᵀ·op(a)ᵀ
        if first.shape[:-2] != second.shape[:-2]:
            raise InvalidValue(
                "out", f"strides {list(infos['out'].strides)}", "must have contiguous rows where heads share a b",
                "Give a row-major out",
            )
        operands, names = (_swapped(second), _swapped(first), _swapped(infos["out"])), ("b", "a", "out")
        a_transposed, b_transposed = b_transposed, a_transposed
    try:
        run(
            dict(zip("ABC", operands, strict=True)), ("gemm", a_transposed, b_transposed, alpha, beta),
            lambda: _descriptor(operands, names, a_transposed, b_transposed, alpha, beta), implementation, stream,
        )
    except InvalidValue as e:
        raise _renamed(e, dict(zip("abc", names, strict=True))) from None
    return handed_back(infos["out"], first, stream) if out is None else out


def _descriptor(
    operands: tuple[ArrayInfo, ...], names: tuple[str, ...], a_transposed: bool, b_transposed: bool, alpha: float,
    beta: float,
) -> BatchedGemmStrided:
    """The GEMM of arrays of two to four axes, with each matrix as it lies in memory."""
    a, _, c = operands
    M, N = c.shape[-2:]
    K = a.shape[-2 if a_transposed else -1]
    (A, a_swapped), (B, b_swapped), (C, _) = (_in_memory(n, i) for n, i in zip(names, operands, strict=True))
    batch, heads = C.shape[:2]
    return BatchedGemmStrided(
        A=A, B=B, C=C, M=M, N=N, K=K, batch=batch, num_heads=heads, a_transposed=a_transposed != a_swapped,
        b_transposed=b_transposed != b_swapped, alpha=alpha, beta=beta,
        b_head_group=multiple("H", heads, "H_b", B.shape[1]), **strides_of(A=A, B=B, C=C),
    )


def _renamed(error: InvalidValue, names: dict[str, str]) -> InvalidValue:
    """The descriptor's refusal with the arrays' names here for A, B, C, and words for their strides."""

    def told(text: str) -> str:
        text = re.sub(r"\bstride_([abc])_(batch|head|row)\b", lambda m: f"the {m[2]} stride of {names[m[1]]}", text)
        return re.sub(r"\b[ABC]\b", lambda m: names[m[0].lower()], text)

    field, value = error.field, error.value
    if stride := re.fullmatch(r"stride_([abc])_(\w+)", field):
        field, value = stride[1], f"{stride[2]} stride {value}"
    return type(error)(names.get(field.lower(), field), value, told(error.rule), told(error.remedy))


def _in_memory(name: str, info: ArrayInfo) -> tuple[ArrayInfo, bool]:
    """The array as [batch, head, row, column] with contiguous columns, and whether that swapped its matrix axes."""
    swapped = _columns_apart(info)
    if swapped:
        info = _swapped(info)
        if _columns_apart(info):
            raise InvalidValue(
                name, f"strides {list(info.strides[:-2] + info.strides[:-3:-1])}",
                "one of the two matrix axes must be contiguous (stride 1)", "Copy the array into a contiguous one",
            )
    lead = 4 - len(info.shape)
    shape, strides = info.shape, info.strides
    if lead == 1:
        shape, strides = (shape[0], 1, *shape[1:]), (strides[0], 0, *strides[1:])
    elif lead == 2:
        shape, strides = (1, 1, *shape), (0, 0, *strides)
    return replace(info, shape=shape, strides=strides), swapped


def _columns_apart(info: ArrayInfo) -> bool:
    """Whether the entries of a row do not lie side by side."""
    return info.strides[-1] != 1 and info.shape[-1] > 1 and 0 not in info.shape


def _swapped(info: ArrayInfo) -> ArrayInfo:
    """The matrices' transposes, in the same memory."""
    return replace(
        info, shape=(*info.shape[:-2], *info.shape[:-3:-1]), strides=(*info.strides[:-2], *info.strides[:-3:-1])
    )


def _shape(info: ArrayInfo) -> str:
    return f"an array of shape {list(info.shape)}"
