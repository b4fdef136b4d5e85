"""Grouped matrix products on arrays."""

from __future__ import annotations

from typing import Any

from kernelseam.contract import ArrayInfo
from kernelseam.descriptors.common.options import by_name, read_values, scalars_of, values_of
from kernelseam.descriptors.common.wording import Wording
from kernelseam.descriptors.gemm.fields import SCALES, scale_block_of
from kernelseam.descriptors.gemm.grouped import GroupedGemm
from kernelseam.descriptors.gemm.options import GroupedOptions, ProductOptions
from kernelseam.dtypes import DType
from kernelseam.epilogues import Epilogue
from kernelseam.errors import InvalidValue
from kernelseam.expressions.epilogues import EpilogueExpression
from kernelseam.ops.calling import operate
from kernelseam.ops.expressions import captured_in, epilogue_in, with_epilogue
from kernelseam.ops.gemm import check_added, check_preactivation, gemm_work, of_three, result
from kernelseam.ops.operation import Operation, not_none
from kernelseam.ops.products import check_matrices, is_strided, transpose
from kernelseam.ops.signatures import Array

_values, _SCALARS = values_of(GroupedOptions), scalars_of(GroupedOptions)
_NAMES = {"A": "a", "B": "b", "C": "out", "offsets": "offs"}
_INDICES = {"a_indices": "a_indices", "c_indices": "out_indices", "c_factors": "out_factors"}
_FORMS = {(2, 3): "m", (3, 2): "n", (2, 2): "k"}
"""Axes of a and of b → the axis that ``offs`` divides."""


def grouped_mm(
    a: Array,
    b: Array,
    offs: Any = None,
    *,
    alpha: float = 1,
    beta: float = 0,
    a_scales: Any = None,
    b_scales: Any = None,
    scale_block: tuple[int, int, int] | None = None,
    a_indices: Any = None,
    out_indices: Any = None,
    out_factors: Any = None,
    out: Any = None,
    out_dtype: DType | str | None = None,
    precision: str | None = None,
    epilogue: Epilogue | None = None,
    preactivation: Any = None,
    backend: str | None = None,
    implementation: str | None = None,
    stream: object = None,
) -> Array:
    """alpha·a_g·b_g + beta·out_g for each group g, in one launch and without synchronisation, in
    the four forms of torch's ``grouped_mm``:

    * a [T, K], b [E, K, N] → [T, N]: ``offs`` divides the rows of a and of the result (tokens of
      experts);
    * a [E, M, K], b [K, T] → [M, T]: it divides the columns of b and of the result;
    * a [M, T], b [T, N] → [E, M, N]: it divides what is summed over (gradients of weights);
    * a [E, M, K], b [E, K, N] → [E, M, N]: a batch, without ``offs``.

    ``offs``, int32 [E] on the arrays' device, says where each group ends: group g is from offs[g −
    1] (0 for the first) to offs[g], empty where they are equal. T is a capacity: in the first two
    forms the result beyond offs[E − 1] is not written (in a new array it is undefined). The host
    does not read ``offs``, and a captured graph follows its contents; on host devices it is checked
    at every call.

    Arrays of one dtype, float16, bfloat16, float32, float64 or e4m3, whose matrices may be views
    that are transposed, as in ``bmm``. ``a_scales`` and ``b_scales``, float32, are for e4m3: of
    rows of a, [T], or [E, M] where a row is in every group, and of columns of b, [E, N], or [T] in
    the second form; extent 1 repeats. With ``scale_block`` = (1, n, k), in the first form alone,
    they are of blocks, a_scales [T, ⌈K/k⌉] and b_scales [E, ⌈N/n⌉, ⌈K/k⌉].

    In the first form rows need not be sorted in memory: with ``a_indices``, int32 [T], row i of the
    product is that of row a_indices[i] of a [tokens, K]; with ``out_indices``, int32 [T], all
    different, it is written to row out_indices[i] of the result, which has ``out``'s rows, else T;
    with ``out_factors``, float32 [T], it is multiplied by out_factors[i]. Rows of the result that
    no index names are left as they are. A layer of experts gathers its tokens by the first product
    and scatters results, times the router's weights, by the second.

    ``epilogue``, in the first form and the fourth, is as in ``bmm``, a function (acc, m, n, batch)
    or a name: ``batch`` is the group, and ``m`` the row of the product, wherever it is read from or
    written to; ``acc`` is multiplied by its factor. "swiglu" of [gate, up] columns makes the result
    [T, N/2]. ``preactivation`` [T, N], of the result's dtype and in the order of its rows: an array
    to which the epilogue's input is written.

    ``out``, ``out_dtype``, ``precision``, ``backend``, ``implementation``, ``stream`` as in
    ``bmm``. Returns the result. Raises InvalidValue for what does not fit together, Unsupported
    with each implementation's reason.
    """
    if scale_block is not None:
        scale_block = of_three(scale_block)
    arrays: dict[str, Any] = {"a": a, "b": b}
    arrays |= not_none(out=out, offs=offs, a_scales=a_scales, b_scales=b_scales)
    arrays |= not_none(a_indices=a_indices, out_indices=out_indices, out_factors=out_factors)
    arrays |= not_none(preactivation=preactivation)
    options = _values(
        alpha=alpha,
        beta=beta,
        out_dtype=out_dtype,
        precision=precision,
        scale_block=scale_block,
    )
    if epilogue is not None:
        options = with_epilogue(options, arrays, epilogue)
    results = operate(grouped_work, arrays, options, backend, implementation, stream)
    product: Array = results["out"] if out is None else out
    return product


def grouped_work(operation: Operation, *values: Any) -> None:
    """``values``: those of ``GroupedOptions``; where there is an epilogue, then what
    ``with_epilogue`` adds."""
    asked, added = read_values(GroupedOptions, values[: len(_SCALARS)]), values[len(_SCALARS) :]
    infos = operation.infos
    epilogue = epilogue_in(added, infos)
    forms = len(infos["a"].shape), len(infos["b"].shape)
    if forms != (2, 3):
        _refuse_indices(infos)
    if forms == (3, 3):
        if "offs" in infos:
            raise InvalidValue(
                "offs",
                "given",
                "divides an array of two axes, and a and b have three",
                "Leave it out: each entry is a group",
            )
        gemm_work(operation, *values_of(ProductOptions)(batched=True, **by_name(asked)), *added)
        return
    along = _FORMS.get(forms)
    if along is None:
        raise InvalidValue(
            "a",
            f"an array of {forms[0]} axes, and b of {forms[1]}",
            "must be two or three each",
            "Give [T, K] and [E, K, N], [E, M, K] and [K, T], or [M, T] and [T, N]",
        )
    if "offs" not in infos:
        raise InvalidValue(
            "offs", None, "must say where groups end", "Give int32 ends, or two batches"
        )
    check_added(asked.beta, "out" in infos)
    groups, shape = _shape(infos, along)
    pairs = epilogue is not None and bool(epilogue.structure.pairs)
    of_result = (*shape[:-1], shape[-1] // 2) if pairs else shape
    result(operation, "out", of_result, asked.out_dtype)
    check_preactivation(infos, shape)
    sizes = scale_block_of(asked.scale_block, "a_scales" in infos or "b_scales" in infos)
    for name in ("a", "b", "out", "preactivation"):
        if name in infos:
            check_matrices(name, infos[name])
    operands = {given: infos[name] for given, name in _NAMES.items()}
    operands |= {n: infos[n] for n in SCALES if n in infos}
    operands |= {given: infos[name] for given, name in _INDICES.items() if name in infos}
    others = {n: x for n, x in infos.items() if n == "preactivation"} | captured_in(infos)
    operands |= others
    names = {**_NAMES, **_INDICES, **{n: n for n in (*SCALES, *others)}}
    reword = Wording(names).reworded
    try:
        operation.launch(
            operands,
            lambda: _descriptor(infos, along, groups, asked, sizes, epilogue),
            names,
            reword,
        )
    except InvalidValue as e:
        raise reword(e) from None


def _refuse_indices(infos: dict[str, ArrayInfo]) -> None:
    for name in _INDICES.values():
        if name in infos:
            raise InvalidValue(
                name, "given", "is of rows of a [T, K], with b [E, K, N]", "Leave it out"
            )


def _rows_of(infos: dict[str, ArrayInfo]) -> int:
    """Of the product along "m". Raises InvalidValue where indices do not have as many."""
    rows: int | None = None if "a_indices" in infos else infos["a"].shape[0]
    for name in _INDICES.values():
        if name not in infos:
            continue
        info = infos[name]
        if len(info.shape) != 1 or rows not in (None, info.shape[0]):
            raise InvalidValue(
                name,
                f"an array of shape {list(info.shape)}",
                f"must have an entry for each of {'the' if rows is None else rows} rows",
                "Give [T]",
            )
        rows = info.shape[0]
    assert rows is not None
    return rows


def _shape(infos: dict[str, ArrayInfo], along: str) -> tuple[int, tuple[int, ...]]:
    """Groups, and the shape of the result. Raises InvalidValue where a, b and offs do not fit
    together."""
    a, b, offs = (infos[n] for n in ("a", "b", "offs"))
    if len(offs.shape) != 1 or (offs.shape[0] > 1 and offs.strides[0] != 1):
        raise InvalidValue(
            "offs",
            f"an array of shape {list(offs.shape)} with strides {list(offs.strides)}",
            "must be one contiguous row of ends",
            "Give [E]",
        )
    groups = offs.shape[0]
    (M, K), (K_b, N) = a.shape[-2:], b.shape[-2:]
    if K_b != K:
        raise InvalidValue(
            "b",
            f"an array of shape {list(b.shape)}",
            f"must have K = {K} rows, as a of shape {list(a.shape)} says",
            "Check the order of the axes; give a transposed view",
        )
    if b.dtype is not a.dtype:
        raise InvalidValue(
            "b", f"an array of {b.dtype}", f"must be {a.dtype} as a is", "Convert one of them"
        )
    for name in ("a", "b"):
        if len(infos[name].shape) == 3 and infos[name].shape[0] != groups:
            raise InvalidValue(
                name,
                f"an array of shape {list(infos[name].shape)}",
                f"must have a matrix for each of the {groups} entries of offs",
                "Give as many ends as matrices",
            )
    if along == "m":
        M = _rows_of(infos)
        if "out_indices" in infos and "out" in infos:
            M = infos["out"].shape[0]
    return groups, (groups, M, N) if along == "k" else (M, N)


def _descriptor(
    infos: dict[str, ArrayInfo],
    along: str,
    groups: int,
    asked: GroupedOptions,
    sizes: tuple[int, int, int] | None,
    epilogue: EpilogueExpression | None,
) -> GroupedGemm:
    a, b, out = (infos[n] for n in ("a", "b", "out"))
    fields: dict[str, Any] = {n: infos[n] for n in SCALES if n in infos}
    if is_strided(out):
        raise InvalidValue(
            "out",
            f"strides {list(out.strides)}",
            "must have contiguous rows",
            "Give a row-major array",
        )
    if "preactivation" in infos:
        if is_strided(second := infos["preactivation"]):
            raise InvalidValue(
                "preactivation",
                f"strides {list(second.strides)}",
                "must have contiguous rows",
                "Give a row-major array",
            )
        fields["preactivation"] = second
        fields["stride_preactivation_row"] = second.strides[0] if second.shape[0] > 1 else None
    for name, info in (("a", a), ("b", b), ("c", out)):
        transposed = is_strided(info)
        rows = transpose(info) if transposed else info
        fields[f"stride_{name}_row"] = rows.strides[-2] if rows.shape[-2] > 1 else None
        if len(info.shape) == 3:
            fields[f"stride_{name}_group"] = info.strides[0] if groups > 1 else None
        if name != "c":
            fields[f"{name}_transposed"] = transposed
    extents = (_rows_of(infos) if along == "m" else a.shape[-2], b.shape[-1], a.shape[-1])
    fields |= {given: infos[name] for given, name in _INDICES.items() if name in infos}
    if "a_indices" in fields:
        fields["a_rows"] = a.shape[0]
    if "c_indices" in fields:
        fields["c_rows"] = out.shape[0]
    for name, axis, outer in (("a_scales", "row", 0), ("b_scales", "column", 1)):
        if name in infos:
            of = (a.shape[-2], *extents[1:])
            fields |= _scales(name, infos[name], axis, of, outer, along, groups, sizes)
    return GroupedGemm(
        groups=groups,
        M=extents[0],
        N=extents[1],
        K=extents[2],
        along=along,
        A=a,
        B=b,
        C=out,
        offsets=infos["offs"],
        **fields,
        alpha=asked.alpha,
        beta=asked.beta,
        precision=asked.precision,
        scale_block=sizes,
        epilogue=epilogue,
    )


def _scales(
    name: str,
    info: ArrayInfo,
    axis: str,
    extents: tuple[int, int, int],
    outer: int,
    along: str,
    groups: int,
    sizes: tuple[int, int, int] | None,
) -> dict[str, Any]:
    """The strides of scales, where extent 1 repeats. Raises InvalidValue for another shape."""
    wanted: tuple[int, ...] = (extents[outer],)
    labels: tuple[str, ...] = (axis,)
    if sizes is not None:
        wanted = -(-extents[outer] // sizes[outer]), -(-extents[2] // sizes[2])
        labels = axis, "k"
    if "mn"[outer] != along:
        wanted, labels = (groups, *wanted), ("group", *labels)
    fits = len(info.shape) <= len(wanted) and all(
        n in (1, of) for n, of in zip(reversed(info.shape), reversed(wanted), strict=False)
    )
    if not fits or not info.shape:
        raise InvalidValue(
            name,
            f"an array of shape {list(info.shape)}",
            f"must be {list(wanted)}; extent 1 repeats",
            "Give a scale a row or a column of each group",
        )
    missing = len(wanted) - len(info.shape)
    steps = (0,) * missing + tuple(
        s if n > 1 else 0 for n, s in zip(info.shape, info.strides, strict=True)
    )
    return {f"stride_{name}_{label}": step for label, step in zip(labels, steps, strict=True)}
