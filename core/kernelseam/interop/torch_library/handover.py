"""Where torch traces or compiles a function on arrays, its call goes to an operator of
torch.ops.kernelseam, with the options as that operator takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kernelseam.descriptors.attention.options import AttentionOptions, GradientOptions
from kernelseam.descriptors.cache.options import AppendOptions, GatherOptions
from kernelseam.descriptors.common.options import scalars_of
from kernelseam.descriptors.gemm.fields import scale_block_of
from kernelseam.descriptors.gemm.options import (
    GroupedOptions,
    ListOptions,
    ProductGradientOptions,
    ProductOptions,
)
from kernelseam.descriptors.projection.options import (
    OutputGradientOptions,
    OutputOptions,
    QkvGradientOptions,
    QkvOptions,
)
from kernelseam.epilogues import refused_reductions
from kernelseam.errors import InvalidValue
from kernelseam.interop.torch_function import uncompiled
from kernelseam.interop.torch_library import (
    attention,
    cache,
    epilogues,
    gemm,
    gemm_epilogues,
    grouped,
    grouped_epilogues,
    grouped_list,
    merge,
    mods,
    projection,
)
from kernelseam.interop.torch_library.apart import check_distinct
from kernelseam.interop.torch_library.define import unrepeated
from kernelseam.interop.torch_library.dtypes import dtype_name
from kernelseam.interop.torch_library.mods import CAPTURED
from kernelseam.ops import attention_bwd as attention_bwd_ops
from kernelseam.ops import cache as cache_ops
from kernelseam.ops import gemm as gemm_ops
from kernelseam.ops import gemm_bwd as gemm_bwd_ops
from kernelseam.ops import grouped_gemm as grouped_ops
from kernelseam.ops import grouped_list as list_ops
from kernelseam.ops import merge as merge_ops
from kernelseam.ops import projection as projection_ops
from kernelseam.ops import projection_bwd as projection_bwd_ops
from kernelseam.ops.attention_work import CLEARED_ATTENTION, attention_work
from kernelseam.ops.calling import operate
from kernelseam.ops.expressions import reductions_in, with_epilogue, with_expression

Tensor = Any
Arrays = Mapping[str, Tensor]
Results = dict[str, Any]
_SCALARS, _OF_GRADIENTS = scalars_of(AttentionOptions), scalars_of(GradientOptions)
_OF_PRODUCTS, _OF_GROUPS = scalars_of(ProductOptions), scalars_of(GroupedOptions)
_OF_LISTS = scalars_of(ListOptions)
_OF_PRODUCT_GRADIENTS = scalars_of(ProductGradientOptions)
_OF_QKV, _OF_QKV_GRADIENTS = scalars_of(QkvOptions), scalars_of(QkvGradientOptions)
_OF_GATHER = scalars_of(GatherOptions)
_OF_OUTPUT_GRADIENTS = scalars_of(OutputGradientOptions)


uncompiled(operate, with_epilogue, with_expression)


def _copied_to_given(arrays: Arrays, results: Results) -> Results:
    """The results by name; those that the caller gave arrays for are copied there. Raises
    InvalidValue for one array that is given for two."""
    given = {name: arrays[name] for name in results if name in arrays}
    check_distinct(given)
    for name, x in given.items():
        x.copy_(results[name])
    return results


def _calling(
    operator: Any, operands: tuple[str, ...], options: tuple[str, ...], *results: str
) -> Callable[..., Results]:
    """A function that hands a call over to the operator of these operands, options and results."""

    def hand_over(arrays: Arrays, values: Any, backend: Any, implementation: Any) -> Results:
        given = dict(zip(options, values, strict=True))
        given |= {"backend": backend, "implementation": implementation}
        made = operator(*_ordered(arrays, operands), **given)
        every = made if isinstance(made, tuple) else (made,)
        return _copied_to_given(arrays, dict(zip(results, every, strict=False)))

    return hand_over


def _window(window: Any) -> dict[str, Any]:
    left, right = (None, None) if window is None else window
    return {"window_left": left, "window_right": right}


def _ordered(arrays: Arrays, names: tuple[str, ...]) -> list[Tensor | None]:
    return [arrays.get(n) for n in names]


def _functions(values: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """The operator's options for what ``with_expression`` added to those of these names."""
    if len(values) == len(names):
        return {}
    text, numbers, *beside = values[len(names) :]
    if beside and beside[0]:
        raise InvalidValue(
            "score_gradient",
            True,
            "is not supported where torch traces, compiles or transforms the call",
            "Call it outside, for example under torch.compiler.disable",
        )
    return {"expression": text, "captured_numbers": [float(x) for x in numbers]}


def _attention(arrays: Arrays, values: Any, backend: Any, implementation: Any) -> Results:
    functions = _functions(values, _SCALARS)
    options = dict(zip(_SCALARS, values, strict=False))
    paged, packed = "block_table" in arrays, "cu_seqlens_q" in arrays
    names: tuple[str, ...]
    if paged:
        operator, names = attention.ATTENTION_PAGED, attention.PAGED
        arrays = {**arrays, "k_pages": arrays["k"], "v_pages": arrays["v"]}
    elif packed:
        operator, names = attention.ATTENTION_VARLEN, attention.FORWARD_VARLEN
    else:
        operator, names = attention.ATTENTION, attention.FORWARD_DENSE
    taken = attention.TAKEN[names]
    given = {n: x for n, x in options.items() if n in taken}
    if functions:
        operator, names = attention.MODS[names]
        given |= functions
    out, lse = operator(
        *_ordered(arrays, names),
        **given,
        **_window(options["window"]),
        backend=backend,
        implementation=implementation,
    )
    return _copied_to_given(arrays, {"out": out, "lse": lse})


def _attention_bwd(arrays: Arrays, values: Any, backend: Any, implementation: Any) -> Results:
    functions = _functions(values, _OF_GRADIENTS)
    given = dict(zip(_OF_GRADIENTS, values, strict=False))
    packed = "cu_seqlens_q" in arrays or "cu_seqlens_k" in arrays
    _check_axis("dout", arrays["dout"])
    of_q = getattr(arrays["q"], "dtype", None)
    for name in ("dout", "out"):
        if getattr(arrays[name], "dtype", of_q) != of_q:
            raise InvalidValue(
                name,
                f"an array of {dtype_name(arrays[name].dtype)}",
                f"must be {dtype_name(of_q)} as q is",
                "Convert it",
            )
    operator, names = (
        (attention.VARLEN_BWD, attention.VARLEN)
        if packed
        else (attention.ATTENTION_BWD, attention.DENSE)
    )
    if functions:
        operator, names = attention.MODS[names]
        given |= functions
    window = _window(given.pop("window"))
    if packed:
        del given["layout"]
    made = operator(
        arrays["dout"],
        None,
        arrays["out"],
        arrays["lse"],
        *_ordered(arrays, names),
        **given,
        **window,
        backend=backend,
        implementation=implementation,
    )
    results = dict(zip(("dq", "dk", "dv", "dbias", "dsinks"), made, strict=True))
    if not given["bias_gradient"]:
        del results["dbias"]
    elif "bias" in arrays:  # the operator's has the bias's whole shape
        results["dbias"] = results["dbias"].sum_to_size(unrepeated(arrays["bias"]))
    if not given["sink_gradient"]:
        del results["dsinks"]
    return results


def _product(arrays: Arrays, values: Any, backend: Any, implementation: Any) -> Results:
    given = dict(zip(_OF_PRODUCTS, values, strict=False))
    operator = gemm.BMM if given.pop("batched") else gemm.MATMUL2D
    functions = _functions(values, _OF_PRODUCTS)
    ways = operator, gemm_epilogues.WITH_EPILOGUE[operator], gemm.OPERANDS
    return _maybe_with_epilogue(ways, arrays, given, functions, (backend, implementation))


def _maybe_with_epilogue(
    ways: tuple[Any, Any, tuple[str, ...]],
    arrays: Arrays,
    given: dict[str, Any],
    functions: dict[str, Any],
    chosen: tuple[Any, Any],
) -> Results:
    """``ways``: a product's operator, the operator with an epilogue, and the first's operands."""
    plain, own, names = ways
    if not functions and "preactivation" not in arrays:
        return _multiplied(plain, names, arrays, given, *chosen)
    if not functions:
        raise InvalidValue(
            "preactivation", "given", "is what an epilogue is of", "Give epilogue too, or use C"
        )
    if reductions_in(arrays):
        raise refused_reductions()
    given |= functions
    placed = {n: torch.as_tensor(x) if n in CAPTURED else x for n, x in arrays.items()}
    out, sums = _called(own, (*names, "preactivation", *CAPTURED), placed, given, *chosen)
    return _copied_to_given(arrays, {"preactivation": sums, "out": out})


def _grouped(arrays: Arrays, values: Any, backend: Any, implementation: Any) -> Results:
    given = dict(zip(_OF_GROUPS, values, strict=False))
    ways = grouped.GROUPED_MM, grouped_epilogues.GROUPED_MM, grouped.OPERANDS
    functions = _functions(values, _OF_GROUPS)
    return _maybe_with_epilogue(ways, arrays, given, functions, (backend, implementation))


def _listed(arrays: Arrays, values: Any, backend: Any, implementation: Any) -> Results:
    given = dict(zip(_OF_LISTS, values, strict=True))
    count, has_out = given.pop("products"), "out[0]" in arrays
    gemm_ops.check_added(given["beta"], has_out)
    a, b, out = ([arrays.get(f"{n}[{g}]") for g in range(count)] for n in ("a", "b", "out"))
    chosen = {"backend": backend, "implementation": implementation}
    made = grouped_list.multiply(a, b, out if has_out else None, **given, **chosen)
    return _copied_to_given(arrays, {f"out[{g}]": x for g, x in enumerate(made)})


def _multiplied(operator: Any, names: tuple[str, ...], arrays: Arrays, *chosen: Any) -> Results:
    return _copied_to_given(arrays, {"out": _called(operator, names, arrays, *chosen)})


def _called(
    operator: Any,
    names: tuple[str, ...],
    arrays: Arrays,
    given: dict[str, Any],
    backend: Any,
    implementation: Any,
) -> Any:
    gemm_ops.check_added(given["beta"], "out" in arrays)
    scale_block_of(given["scale_block"], "a_scales" in arrays or "b_scales" in arrays)
    operands = _ordered(arrays, names)
    return operator(*operands, **given, backend=backend, implementation=implementation)


def _product_bwd(arrays: Arrays, values: Any, backend: Any, implementation: Any) -> Results:
    given = dict(zip(_OF_PRODUCT_GRADIENTS, values, strict=True))
    for name in ("da", "db"):
        if name in arrays:
            raise InvalidValue(
                name, "given", "a traced call makes new gradients", "Leave it out, or add outside"
            )
    gemm_ops.check_added(given.pop("beta"), False, "da")
    _check_axis("dc", arrays["dc"], 2)
    operator = gemm.BMM_BWD if given.pop("batched") else gemm.MATMUL2D_BWD
    operands = _ordered(arrays, ("dc", "a", "b"))
    made = operator(*operands, **given, backend=backend, implementation=implementation)
    return _requested(("da", "db"), made, (given["a_gradient"], given["b_gradient"]))


def _gathered(arrays: Arrays, values: Any, backend: Any, implementation: Any) -> Results:
    given = dict(zip(_OF_GATHER, values, strict=True))
    given |= {"backend": backend, "implementation": implementation}
    k, v = cache.GATHER_PAGED(*_ordered(arrays, cache.GATHER), **given)
    return _copied_to_given(arrays, {"k": k, "v": v} if "v_pages" in arrays else {"k": k})


def _qkv(arrays: Arrays, values: Any, backend: Any, implementation: Any) -> Results:
    given = dict(zip(_OF_QKV, values, strict=True))
    given |= {"backend": backend, "implementation": implementation}
    if "block_table" in arrays or "slot_mapping" in arrays:
        operands = {**arrays, "k_pages": arrays["k"], "v_pages": arrays["v"]}
        result = projection.FUSED_QKV_PAGED(*_ordered(operands, projection.PAGED), **given)
        return _copied_to_given(arrays, {"q": result})
    result = projection.FUSED_QKV(*_ordered(arrays, projection.QKV), **given)
    return _copied_to_given(arrays, dict(zip(projection.RESULTS, result, strict=True)))


def _qkv_bwd(arrays: Arrays, values: Any, backend: Any, implementation: Any) -> Results:
    given = dict(zip(_OF_QKV_GRADIENTS, values, strict=True))
    for name in ("dq", "dk", "dv"):
        _check_axis(name, arrays[name])
    operands = _ordered(arrays, ("dq", "dk", "dv", "input", "weight"))
    made = projection.FUSED_QKV_BWD(
        *operands, **given, backend=backend, implementation=implementation
    )
    return _requested(("d_input", "d_weight", "d_bias"), made, _wanted(given))


def _wanted(given: dict[str, Any]) -> tuple[bool, ...]:
    return given["input_gradient"], given["weight_gradient"], given["has_bias"]


def _check_axis(name: str, x: Tensor, axes: int = 1) -> None:
    """Refuse a gradient none of whose last ``axes`` is contiguous, as the functions on arrays do:
    the operators copy it, for torch's own gradients may repeat one number."""
    if not isinstance(x, torch.Tensor):  # which the operator refuses
        return
    last = zip(x.shape[-axes:], x.stride()[-axes:], strict=True)
    if 0 not in x.shape and all(n > 1 and s != 1 for n, s in last):
        which = "the last axis" if axes == 1 else "one of the two matrix axes"
        raise InvalidValue(
            name,
            f"strides {list(x.stride())}",
            f"{which} must be contiguous (stride 1)",
            "Copy the array into a contiguous one",
        )


def _requested(names: tuple[str, ...], made: Any, asked: tuple[bool, ...]) -> Results:
    return {n: x for n, x, a in zip(names, made, asked, strict=True) if a}


def _output_bwd(arrays: Arrays, values: Any, backend: Any, implementation: Any) -> Results:
    given = dict(zip(_OF_OUTPUT_GRADIENTS, values, strict=True))
    _check_axis("d_output", arrays["d_output"])
    operands = _ordered(arrays, ("d_output", "attn_out", "weight"))
    made = projection.FUSED_OUTPUT_BWD(
        *operands, **given, backend=backend, implementation=implementation
    )
    return _requested(("d_attn_out", "d_weight", "d_bias"), made, _wanted(given))


OPERATORS: dict[Any, Any] = {
    "with_expression": mods.with_expression,
    "with_epilogue": epilogues.with_epilogue,
    attention_work: _attention,
    CLEARED_ATTENTION: _attention,
    attention_bwd_ops.gradient_work: _attention_bwd,
    attention_bwd_ops.CLEARED_GRADIENTS: _attention_bwd,
    gemm_ops.gemm_work: _product,
    gemm_bwd_ops.gradient_work: _product_bwd,
    grouped_ops.grouped_work: _grouped,
    list_ops.list_work: _listed,
    merge_ops.merge_work: _calling(
        merge.MERGE_STATES, ("outs", "lses", "out"), ("out_dtype", "layout"), "out", "lse"
    ),
    cache_ops.append_work: _calling(
        cache.APPEND_PAGED, cache.APPEND, scalars_of(AppendOptions), "q_out"
    ),
    cache_ops.gather_work: _gathered,
    cache_ops.copy_work: _calling(cache.COPY_PAGES, cache.COPY, ("kv_layout",)),
    projection_ops.qkv_work: _qkv,
    projection_ops.output_work: _calling(
        projection.FUSED_OUTPUT, projection.OUTPUT, scalars_of(OutputOptions), "out"
    ),
    projection_bwd_ops.qkv_work: _qkv_bwd,
    projection_bwd_ops.output_work: _output_bwd,
}
