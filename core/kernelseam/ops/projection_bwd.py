"""The projections' gradients on arrays."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, cast

from kernelseam.descriptors import OutputProjectionBwd, QkvProjectionBwd
from kernelseam.descriptors.common.layouts import LAYOUTS
from kernelseam.descriptors.common.options import read_values, values_of
from kernelseam.descriptors.common.validation import flag
from kernelseam.descriptors.projection.options import OutputGradientOptions, QkvGradientOptions
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.ops.calling import operate
from kernelseam.ops.operation import Operation, check_rank
from kernelseam.ops.projection import head_counts
from kernelseam.ops.signatures import Array


class QkvProjectionGradients(NamedTuple, Generic[Array]):
    """Gradients of ``fused_qkv_projection``'s operands; None for one that was not requested."""

    d_input: Array | None
    d_weight: Array | None
    d_bias: Array | None = None


class OutputProjectionGradients(NamedTuple, Generic[Array]):
    """Gradients of ``fused_output_projection_residual``'s operands; None for one that was not
    requested."""

    d_attn_out: Array | None
    d_weight: Array | None
    d_bias: Array | None
    d_residual: Array
    """d_output itself."""


def fused_qkv_projection_bwd(
    dq: Array,
    dk: Array,
    dv: Array,
    input: Any,
    weight: Any,
    has_bias: bool,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    layout: str = "bhsd",
    input_gradient: bool = True,
    weight_gradient: bool = True,
    bias_dtype: DType | str | None = None,
    backend: str | None = None,
    implementation: str | None = None,
    stream: object = None,
) -> QkvProjectionGradients[Array]:
    """d_input [B, S, hidden], d_weight [(num_heads + 2·num_kv_heads)·head_dim, hidden] and, where
    there is a bias, d_bias of ``fused_qkv_projection``, from the gradients of its q, k and v.

    dq [B, num_heads, S, head_dim], dk and dv [B, num_kv_heads, S, head_dim] (``layout`` "bshd": the
    head after the token), each with its own strides and of input's dtype. dq and dk are those of q
    and k before the rotary embedding. One launch for d_input and one for d_weight and d_bias; dq,
    dk and dv are never copied. Sums are float32 (float64 of float64) in a fixed order: results are
    bitwise reproducible. Gradients are new arrays of input's dtype, d_bias of ``bias_dtype`` where
    that is given.

    ``input_gradient=False`` and ``weight_gradient=False`` leave one out: ``weight`` may then be
    None, or ``input``. Raises InvalidValue for what does not fit together, Unsupported with each
    implementation's reason.
    """
    needed = _operands_read(
        has_bias,
        {"input": (input, weight_gradient), "weight": (weight, input_gradient)},
        input_gradient,
        weight_gradient,
    )
    options = _qkv_values(
        has_bias=has_bias,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layout=layout,
        input_gradient=input_gradient,
        weight_gradient=weight_gradient,
        bias_dtype=bias_dtype,
    )
    results = operate(
        qkv_work, {"dq": dq, "dk": dk, "dv": dv, **needed}, options, backend, implementation, stream
    )
    return QkvProjectionGradients(
        results.get("d_input"), results.get("d_weight"), results.get("d_bias")
    )


def qkv_work(operation: Operation, *values: Any) -> None:
    """``values``: those of ``QkvGradientOptions``."""
    asked, infos = read_values(QkvGradientOptions, values), operation.infos
    labels = LAYOUTS[asked.layout]
    first = infos["dq"]
    if len(first.shape) == 3:
        labels = labels.replace("B ", "")
    for name in ("dq", "dk", "dv"):
        check_rank(name, infos[name], labels.split())
    extents = dict(zip(labels.split(), first.shape, strict=True))
    lead = tuple(extents[n] for n in ("B", "S") if n in extents)
    given: Any = asked.num_heads, asked.num_kv_heads, asked.head_dim
    heads, kv_heads, dim = given
    if "weight" in infos:
        check_rank("weight", infos["weight"], ("columns", "hidden"))
        heads, kv_heads, dim = head_counts(heads, kv_heads, dim, infos["weight"].shape[0])
    if "input" in infos:
        check_rank("input", infos["input"], (*(n for n in ("B", "S") if n in extents), "hidden"))
    if (
        "weight" in infos
        and "input" in infos
        and infos["weight"].shape[1] != infos["input"].shape[-1]
    ):
        raise InvalidValue(
            "weight",
            f"an array of shape {list(infos['weight'].shape)}",
            f"must have as many columns as input, {infos['input'].shape[-1]}",
            "Check the order of the axes",
        )
    expected = {"num_heads": (heads, extents["H"]), "head_dim": (dim, extents["D"])}
    kv_axis = labels.split().index("H")
    expected["num_kv_heads"] = (kv_heads, infos["dk"].shape[kv_axis])
    for name, (value, extent) in expected.items():
        if value != extent:
            what = "dk" if name == "num_kv_heads" else "dq"
            raise InvalidValue(name, value, f"{what} has {extent}", "Check the order of the axes")
    hidden = next((infos[n].shape[-1] for n in ("weight", "input") if n in infos), 0)
    width = (heads + 2 * kv_heads) * dim
    if asked.input_gradient:
        operation.new_result("d_input", (*lead, hidden), first.dtype, "dq")
    if asked.weight_gradient:
        operation.new_result("d_weight", (width, hidden), first.dtype, "dq")
    bias = (width,) if asked.has_bias else None
    _launch(operation, QkvProjectionBwd, asked.layout, "dq", bias, asked.bias_dtype)


def fused_output_projection_residual_bwd(
    d_output: Array,
    attn_out: Any,
    weight: Any,
    has_bias: bool,
    *,
    layout: str = "bhsd",
    input_gradient: bool = True,
    weight_gradient: bool = True,
    bias_dtype: DType | str | None = None,
    backend: str | None = None,
    implementation: str | None = None,
    stream: object = None,
) -> OutputProjectionGradients[Array]:
    """d_attn_out, d_weight [hidden, columns], d_bias [hidden] where there is a bias, and d_residual
    of ``fused_output_projection_residual``, from the gradient of its result.

    ``d_output`` [B, S, hidden]; ``attn_out`` as there, [B, S, columns] or [B, H, S, D]
    (``layout``), and d_attn_out is shaped as it is. d_residual is d_output, the same array. One
    launch for d_attn_out and one for d_weight and d_bias; all else as in
    ``fused_qkv_projection_bwd``: ``input_gradient=False`` leaves out d_attn_out (``weight`` may
    then be None).
    """
    needed = _operands_read(
        has_bias, {"weight": (weight, input_gradient)}, input_gradient, weight_gradient
    )
    arrays = {"d_output": d_output, "attn_out": attn_out, **needed}
    options = _output_values(
        has_bias=has_bias,
        layout=layout,
        input_gradient=input_gradient,
        weight_gradient=weight_gradient,
        bias_dtype=bias_dtype,
    )
    results = operate(output_work, arrays, options, backend, implementation, stream)
    return OutputProjectionGradients(
        results.get("d_attn_out"), results.get("d_weight"), results.get("d_bias"), d_output
    )


def output_work(operation: Operation, *values: Any) -> None:
    """``values``: those of ``OutputGradientOptions``."""
    asked, infos = read_values(OutputGradientOptions, values), operation.infos
    labels = LAYOUTS[asked.layout].split()
    first, of = infos["d_output"], infos["attn_out"]
    if len(of.shape) not in (2, 3):
        check_rank("attn_out", of, labels)
    check_rank("d_output", first, ("S", "hidden") if len(of.shape) == 2 else ("B", "S", "hidden"))
    extents = (
        dict(zip(labels, of.shape, strict=True))
        if len(of.shape) == 4
        else {"H": 1, "D": of.shape[-1]}
    )
    if asked.input_gradient:
        operation.new_result("d_attn_out", of.shape, first.dtype, "d_output")
    if asked.weight_gradient:
        operation.new_result(
            "d_weight", (first.shape[-1], extents["H"] * extents["D"]), first.dtype, "d_output"
        )
    _launch(
        operation,
        OutputProjectionBwd,
        asked.layout,
        "d_output",
        first.shape[-1:] if asked.has_bias else None,
        asked.bias_dtype,
    )


def _operands_read(
    has_bias: bool, read: dict[str, tuple[Any, bool]], input_gradient: bool, weight_gradient: bool
) -> dict[str, Any]:
    """The operands that the requested gradients read."""
    requested = (
        flag("has_bias", has_bias),
        flag("input_gradient", input_gradient),
        flag("weight_gradient", weight_gradient),
    )
    if not any(requested):
        raise InvalidValue(
            "input_gradient", False, "no gradient is requested", "Leave the call out"
        )
    return {name: x for name, (x, reads) in read.items() if reads}


def _launch(
    operation: Operation,
    descriptor: Any,
    layout: str,
    like: str,
    bias_shape: tuple[int, ...] | None,
    bias_dtype: DType | str | None,
) -> None:
    infos = operation.infos
    if bias_shape is not None:
        dtype = infos[like].dtype if bias_dtype is None else DType.of(bias_dtype, "bias_dtype")
        operation.new_result("d_bias", bias_shape, dtype, like, "bias_dtype")
    elif bias_dtype is not None:
        raise InvalidValue(
            "bias_dtype", bias_dtype, "describes d_bias", "Say has_bias=True, or leave it out"
        )
    operation.launch(
        infos, lambda: descriptor.from_arrays(**cast(dict[str, Any], infos), layout=layout)
    )


_qkv_values = values_of(QkvGradientOptions)
_output_values = values_of(OutputGradientOptions)
