"""An attention's gradients on arrays."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, Unpack

from kernelseam.descriptors import AttentionBwd
from kernelseam.descriptors.attention.options import GradientOptions, band
from kernelseam.descriptors.common.options import (
    checked,
    of_values,
    operands_of,
    spelled_out,
    taken,
    values_of,
)
from kernelseam.descriptors.common.wording import Wording
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.ops.attention_work import EXTENTS
from kernelseam.ops.calling import operate
from kernelseam.ops.operation import Operation, unexpanded_shape
from kernelseam.ops.signatures import Array, Gradients


class AttentionGradients(NamedTuple, Generic[Array]):
    """Gradients of an attention's inputs, of their shapes; None for one that was not requested."""

    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None = None
    dsinks: Array | None = None


@spelled_out(GradientOptions())
def attention_bwd(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    backend: str | None = None,
    implementation: str | None = None,
    stream: object = None,
    **options: Unpack[Gradients],
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
    given: dict[str, Any] = {**options}
    operands = taken(_OPERANDS, given)
    if given.get("window") is not None:
        given["window"] = band("window", given["window"])
    values = _values(**given)
    arrays = {"q": q, "k": k, "v": v, "out": out, "lse": lse, **operands, "dout": dout}
    results = operate(gradient_work, arrays, values, backend, implementation, stream, _WORDING)
    return AttentionGradients(*map(results.get, ("dq", "dk", "dv", "dbias", "dsinks")))


def gradient_work(operation: Operation, *values: Any) -> None:
    """``values``: the scalars of ``GradientOptions``."""
    options = checked(of_values(GradientOptions, values))
    bias_gradient, sink_gradient = options.pop("bias_gradient"), options.pop("sink_gradient")
    infos = operation.infos
    for name, operand, wanted in (
        ("bias_gradient", "bias", bias_gradient),
        ("sink_gradient", "sinks", sink_gradient),
    ):
        if wanted and operand not in infos:
            raise InvalidValue(
                name, True, f"the attention has no {operand}", f"Give {operand}, or leave it out"
            )
    for name, model in (("dq", "q"), ("dk", "k"), ("dv", "v")):
        operation.new_result(name, infos[model].shape, infos[model].dtype, "q")
    if bias_gradient:
        operation.new_result("dbias", unexpanded_shape(infos["bias"]), infos["bias"].dtype, "q")
    if sink_gradient:
        operation.new_result("dsinks", infos["sinks"].shape, DType.float32, "q")
    arrays: dict[str, Any] = infos
    operation.launch(infos, lambda: AttentionBwd.from_arrays(**arrays, **options))


_OPERANDS = operands_of(GradientOptions)
_values = values_of(GradientOptions, "attention_bwd")
_WORDING = Wording({}, EXTENTS)
