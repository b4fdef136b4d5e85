"""An attention's gradients on arrays."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple

from kernelseam.contract import ArrayInfo
from kernelseam.descriptors import AttentionBwd
from kernelseam.descriptors.attention.forward_problem import band
from kernelseam.descriptors.common.validation import flag
from kernelseam.descriptors.common.wording import Wording
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.ops.attention_options import GradientOptions
from kernelseam.ops.attention_work import EXTENTS
from kernelseam.ops.calling import operate
from kernelseam.ops.operation import Operation, not_none, unexpanded_shape
from kernelseam.ops.signatures import Array


class AttentionGradients(NamedTuple, Generic[Array]):
    """Gradients of an attention's inputs, of their shapes; None for one that was not requested."""

    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None = None
    dsinks: Array | None = None


def attention_bwd(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    prefix_lengths: Any = None,
    kv_lengths: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    layout: str = "bhsd",
    bias_gradient: bool = False,
    sink_gradient: bool = False,
    deterministic: bool = True,
    backend: str | None = None,
    implementation: str | None = None,
    stream: object = None,
) -> AttentionGradients[Array]:
    """dq, dk, dv (and dbias, dsinks where asked for) of ``attention`` or ``attention_varlen`` with
    the same options.

    ``out`` and ``lse`` are what it returned with ``return_lse=True``; ``dout`` is shaped as out.
    Gradients are new row-major arrays of the inputs' dtypes (dsinks float32), of q's kind; dbias
    has the bias's own shape, with extent 1 where the bias repeats by a stride of 0. They are summed
    in float32 (float64 where q is); ``deterministic=False`` allows an implementation whose order of
    summation varies (atomics), where one is faster. Rows that belong to no sequence are not
    written.

    Raises InvalidValue for what does not fit together, Unsupported with each implementation's
    reason.
    """
    for name, x in (("out", out), ("lse", lse)):
        if x is None:
            raise InvalidValue(
                name, None, "must be what attention returned", "Call it with return_lse=True"
            )
    arrays = {
        "q": q,
        "k": k,
        "v": v,
        "out": out,
        "lse": lse,
        **not_none(
            bias=bias,
            mask=mask,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            prefix_lengths=prefix_lengths,
            kv_lengths=kv_lengths,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
        ),
        "dout": dout,
    }
    options = GradientOptions(
        bias_gradient,
        sink_gradient,
        deterministic,
        causal,
        None if window is None else band("window", window),
        scale,
        softcap,
        layout,
        max_seqlen_q,
        max_seqlen_k,
    )
    results = operate(gradient_work, arrays, options, backend, implementation, stream, _WORDING)
    return AttentionGradients(*map(results.get, ("dq", "dk", "dv", "dbias", "dsinks")))


def gradient_work(operation: Operation, *values: Any) -> None:
    """``values``: those of ``GradientOptions``."""
    asked = GradientOptions(*values)
    bias_gradient, sink_gradient = asked.bias_gradient, asked.sink_gradient
    infos = operation.infos
    for name, operand, wanted in (
        ("bias_gradient", "bias", bias_gradient),
        ("sink_gradient", "sinks", sink_gradient),
    ):
        if flag(name, wanted) and operand not in infos:
            raise InvalidValue(
                name, True, f"the attention has no {operand}", f"Give {operand}, or leave it out"
            )
    for name, model in (("dq", "q"), ("dk", "k"), ("dv", "v")):
        operation.new_result(name, infos[model].shape, infos[model].dtype, "q")
    if bias_gradient:
        operation.new_result("dbias", unexpanded_shape(infos["bias"]), infos["bias"].dtype, "q")
    if sink_gradient:
        operation.new_result("dsinks", infos["sinks"].shape, DType.float32, "q")
    options, deterministic = asked.of_forward(), flag("deterministic", asked.deterministic)
    operation.launch(infos, lambda: _descriptor(infos, options, deterministic))


def _descriptor(
    infos: dict[str, ArrayInfo], options: dict[str, Any], deterministic: bool
) -> AttentionBwd:
    """The descriptor over the views of all operands, by their names."""
    arrays: dict[str, Any] = dict(infos)
    return AttentionBwd.from_arrays(**arrays, **options, deterministic=deterministic)


_WORDING = Wording({}, EXTENTS)
