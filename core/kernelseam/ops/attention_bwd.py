"""An attention's gradients on arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, Unpack

from kernelseam.contract import ArrayInfo
from kernelseam.descriptors import AttentionBwd
from kernelseam.descriptors.attention.arrays import PACKED
from kernelseam.descriptors.attention.options import GradientOptions, band
from kernelseam.descriptors.common.layouts import LAYOUTS
from kernelseam.descriptors.common.options import (
    checked,
    of_values,
    operands_of,
    scalars_of,
    spelled_out,
    taken,
    values_of,
)
from kernelseam.descriptors.common.validation import flag
from kernelseam.descriptors.common.wording import Wording
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue
from kernelseam.expressions.block_mask import BlockMask
from kernelseam.expressions.scores import MaskMod, ScoreMod
from kernelseam.ops.attention_work import EXTENTS
from kernelseam.ops.calling import operate
from kernelseam.ops.expressions import captured_in, expression_of, with_expression
from kernelseam.ops.operation import Cleared, Operation, unexpanded_shape
from kernelseam.ops.signatures import Array, Gradients


class AttentionGradients(NamedTuple, Generic[Array]):
    """Gradients of an attention's inputs, of their shapes; None for one that was not requested."""

    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None = None
    dsinks: Array | None = None
    dscores: Array | None = None


@spelled_out(GradientOptions())
def attention_bwd(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: BlockMask | Any = None,
    score_gradient: bool = False,
    backend: str | None = None,
    implementation: str | None = None,
    stream: object = None,
    **options: Unpack[Gradients],
) -> AttentionGradients[Array]:
    """dq, dk, dv (and dbias, dsinks where asked for) of ``attention`` or ``attention_varlen`` with
    the same options.

    ``out`` and ``lse`` are what it returned with ``return_lse=True``; ``dout`` is shaped as out.
    Gradients are new row-major arrays of the inputs' dtypes (dsinks float32), of q's kind; dbias
    has the bias's own shape, with extent 1 where the bias is broadcast by a stride of 0. They are
    summed in float32 (float64 where q is). Arrays that ``score_mod`` and ``mask_mod`` capture have
    no gradients here. ``deterministic=False`` allows an implementation whose order of summation
    varies (atomics), where one is faster. Rows that belong to no sequence are not written.

    ``score_gradient``: dscores [B, H, S_q, S_k], row-major, float32 (float64 where q is): the
    gradient by the result of ``score_mod``; of packed rows S_q and S_k are the longest sequence's.

    Raises InvalidValue for what does not fit together, Unsupported with each implementation's
    reason.
    """
    functions, where = (score_mod, mask_mod, block_mask), (backend, implementation, stream)
    arrays = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
    return gradients_by(gradient_work, dout, arrays, functions, score_gradient, where, **options)


def gradients_by(
    work: Callable[..., None],
    dout: Array,
    arrays: dict[str, Array],
    functions: tuple[Any, Any, Any],
    score_gradient: bool,
    where: tuple[str | None, str | None, object],
    **options: Any,
) -> AttentionGradients[Array]:
    """``attention_bwd``. ``arrays``: q, k, v, out, lse. ``functions``: score_mod, mask_mod and
    block_mask. ``where``: backend, implementation and stream."""
    for name in ("out", "lse"):
        if arrays[name] is None:
            raise InvalidValue(
                name, None, "must be what attention returned", "Call it with return_lse=True"
            )
    given: dict[str, Any] = {**options}
    operands = {} if given.keys() <= _SCALAR.keys() else taken(_OPERANDS, given)
    if given.get("window") is not None:
        given["window"] = band("window", given["window"])
    values = gradient_values(**given)
    arrays = {**arrays, **operands, "dout": dout}
    if score_gradient is not False:
        flag("score_gradient", score_gradient)
    score_mod, mask_mod, block_mask = functions
    if not (score_mod is mask_mod is block_mask is None):
        mods = with_expression(values, arrays, *functions)
        values = (*mods, score_gradient)
    elif score_gradient:
        raise InvalidValue(
            "score_gradient", True, "the attention has no score_mod", "Give it, or leave this out"
        )
    results = operate(work, arrays, values, *where, WORDING)
    return AttentionGradients(*map(results.get, AttentionGradients._fields))


def gradient_work(operation: Operation, *values: Any) -> None:
    """``values``: the scalars of ``GradientOptions``; where there are a score_mod and a mask_mod,
    then what ``with_expression`` adds."""
    given, functions = values[: len(_SCALARS)], values[len(_SCALARS) :]
    options = checked(of_values(GradientOptions, given))
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
    if functions and functions[2]:
        shape = _plane(infos, options)
        operation.new_result("dscores", shape, infos["q"].dtype.accumulator, "q")
    arrays: dict[str, Any] = {n: x for n, x in infos.items() if n not in captured_in(infos)}
    expression = expression_of(functions[:2], infos)
    operation.launch(
        infos, lambda: AttentionBwd.from_arrays(**arrays, **options, expression=expression)
    )


CLEARED_GRADIENTS = Cleared(gradient_work, ("dq", "dk", "dv"))
"""Rows of no sequence, which no launch writes, are 0."""


def _plane(infos: Mapping[str, ArrayInfo], options: Mapping[str, Any]) -> tuple[int, ...]:
    """[B, H, S_q, S_k], of packed rows the longest's."""
    packed = {n: f"cu_seqlens_{n}" in infos for n in "qk"}
    axes = {n: (PACKED if packed[n] else LAYOUTS[options["layout"]]).split() for n in "qk"}
    extents = {n: dict(zip(axes[n], infos[n].shape, strict=False)) for n in "qk"}
    batch = infos["cu_seqlens_q"].shape[0] - 1 if packed["q"] else extents["q"]["B"]
    rows = [options[f"max_seqlen_{n}"] if packed[n] else extents[n]["S"] for n in "qk"]
    return batch, extents["q"]["H"], *rows


_OPERANDS, _SCALARS = operands_of(GradientOptions), scalars_of(GradientOptions)
_SCALAR = dict.fromkeys(_SCALARS)
gradient_values = values_of(GradientOptions, "attention_bwd")
WORDING = Wording({}, EXTENTS)
