"""``torch.ops.kernelseam.attention``, ``attention_varlen`` and ``attention_paged``, with the
gradients of the first two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kernelseam.descriptors.attention.options import PAGED as PAGED_DEFAULTS
from kernelseam.descriptors.attention.options import (
    AttentionOptions,
    GradientOptions,
    ScaleOptions,
    ScoreOperands,
    ScoreScalars,
)
from kernelseam.descriptors.common.options import operands_of, options_of, scalars_of
from kernelseam.descriptors.common.validation import flag
from kernelseam.errors import InvalidValue
from kernelseam.interop import torch_attention
from kernelseam.interop.torch_function import check_bwd_implementation
from kernelseam.interop.torch_library import flops
from kernelseam.interop.torch_library.batches import (
    Batched,
    each,
    fold,
    one_by_one,
    repeats,
    unfold,
)
from kernelseam.interop.torch_library.define import (
    absent_result,
    define,
    fake_result_like,
    of_rank,
    refuse_gradients,
    refuse_second_derivative,
    result_like,
)
from kernelseam.interop.torch_library.dtypes import accumulator, dtype_name
from kernelseam.interop.torch_library.mods import CAPTURED, expression_of
from kernelseam.interop.torch_library.namespace import operator_of
from kernelseam.interop.torch_library.schemas import CHOSEN, given_by, schema_of, tensors_of
from kernelseam.ops.attention import attention_paged as paged_forward

Tensor = Any
_ADDED_NAMES = operands_of(ScoreOperands)
_OF_KEYS = tuple(n for n in _ADDED_NAMES if n != "kv_lengths")
"""Those that packed sequences and pages take, which have their own lengths."""


_ADDED = tensors_of(optional=_OF_KEYS)
SCALES = operands_of(ScaleOptions)
_SCALES, _GIVEN = tensors_of(optional=SCALES), "Tensor? out=None"
_DENSE = tensors_of("q", "k", "v", optional=_ADDED_NAMES)
_VARLEN = tensors_of("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", optional=_OF_KEYS)
_DEFAULTS = AttentionOptions()
_SCORED = scalars_of(ScoreScalars)
_SCORES = schema_of(_DEFAULTS, *_SCORED)
_LENGTHS = "SymInt max_seqlen_q, SymInt max_seqlen_k"
_FORWARD = (
    f"bool return_lse=True, {schema_of(_DEFAULTS, 'out_dtype', 'batch_invariant')}, "
    f"{schema_of(GradientOptions(), 'deterministic')}, "
    f"{CHOSEN}, str? bwd_implementation=None"
)
_BACKWARD = (
    "bool bias_gradient, bool sink_gradient, "
    f"{schema_of(GradientOptions(), 'deterministic')}, "
    f"{CHOSEN}"
)
_LAYOUT = schema_of(_DEFAULTS, "layout")
_LATENT = schema_of(_DEFAULTS, "latent", "row_scale_block")
_BLOCKS = schema_of(_DEFAULTS, "q_scale_block", "scale_block")
DENSE = ("q", "k", "v", *_ADDED_NAMES)
VARLEN = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", *_OF_KEYS)
BESIDE = (*SCALES, "out")
PAGED = (
    *("q", "k_pages", "v_pages", "block_table", "kv_lengths", "cu_seqlens_q"),
    *_OF_KEYS,
    *BESIDE,
)
FORWARD_DENSE, FORWARD_VARLEN = (*DENSE, *BESIDE), (*VARLEN, *BESIDE)
"""Operands of the operators; gradients have no scales. ``out`` says how a result is laid out, and
what rows of no sequence hold."""
_OF_GRADIENTS = (
    *(*scalars_of(GradientOptions), "window_left", "window_right", "backend"),
    *("expression", "captured_numbers"),
)


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """An operator's options as the functions on arrays take them."""
    result = dict(given)
    window = (result.pop("window_left", None), result.pop("window_right", None))
    return result if window == (None, None) else {**result, "window": window}


def _computed(names: tuple[str, ...]) -> Any:
    def compute(*tensors: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
        operands = given_by(names, tensors)
        operands, options = expression_of(operands, _options(given))
        options = {"return_lse": True, **options}  # torch leaves defaults out
        check_bwd_implementation(
            options.pop("bwd_implementation", None), "attention_bwd", "q", operands
        )
        options.pop("deterministic", None)
        if "out_dtype" in options:
            options["out_dtype"] = dtype_name(options["out_dtype"])
        if "out" in operands:
            operands["out"] = result_like(operands["out"], "cu_seqlens_q" in operands)
        with torch.no_grad():
            if "block_table" in operands:
                result = paged_forward(**operands, **options)
            else:
                result = torch_attention.forward(operands, options)
        return result if options["return_lse"] else (result, absent_result(operands["q"]))

    return compute


def _shapes(operands: Mapping[str, Any], packed: bool, given: Mapping[str, Any]) -> Any:
    q, given_out = operands["q"], operands.get("out")
    of_rank("q", q, 3 if packed else 4)
    if given_out is not None:
        out = fake_result_like(given_out)
    else:
        v = operands["v"]
        dtype = given.get("out_dtype") or (torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype)
        out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype)
    if not given.get("return_lse", True):
        return out, absent_result(q)
    rows = q.shape[:-1]
    if packed:
        rows = (rows[1], rows[0])
    elif given.get("layout", "bhsd") == "bshd":
        rows = (rows[0], rows[2], rows[1])
    return out, q.new_empty(rows, dtype=accumulator(q.dtype))


def _faked(names: tuple[str, ...]) -> Any:
    def fake(*tensors: Tensor, **given: Any) -> Any:
        operands = dict(zip(names, tensors, strict=False))
        packed = operands.get("cu_seqlens_q") is not None
        for name in ("k", "v"):
            of_rank(name, operands[name], 3 if packed else 4)
        return _shapes(operands, packed, given)

    return fake


def _paged_fake(*tensors: Tensor, **given: Any) -> Any:
    operands = dict(zip(PAGED, tensors, strict=False))
    for name in ("k_pages", "v_pages"):
        of_rank(name, operands[name], 4)
    given = {"layout": PAGED_DEFAULTS.layout, **given}
    packed = operands.get("cu_seqlens_q") is not None
    return _shapes({**operands, "v": operands["v_pages"]}, packed, given)


def _setup(names: tuple[str, ...]) -> Any:
    def setup(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        without = ("bias",) if "expression" in keyword_only_inputs else ()
        own = tuple(n for n in torch_attention.DIFFERENTIABLE if n not in without)
        refuse_gradients(ctx, names, own)
        options = dict(keyword_only_inputs)
        if not options["return_lse"]:
            raise InvalidValue(
                "return_lse", False, "gradients start from the LSE", "Pass return_lse=True"
            )
        kept = {n: x for n, x in options.items() if n in _OF_GRADIENTS}
        ctx.options = {**kept, "implementation": options["bwd_implementation"]}
        ctx.set_materialize_grads(False)
        given = zip(names, inputs, strict=True)
        ctx.save_for_backward(*[x for n, x in given if n not in BESIDE], *output)

    return setup


def _backward(names: tuple[str, ...], operator: Any) -> Any:
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        *tensors, out, lse = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * len(names)
        wanted = dict(zip(names, ctx.wanted, strict=False))
        gradients = operator(
            dout,
            dlse,
            out,
            lse,
            *tensors,
            **ctx.options,
            bias_gradient=wanted["bias"],
            sink_gradient=wanted["sinks"],
        )
        by_name = dict(zip(torch_attention.DIFFERENTIABLE, gradients, strict=True))
        return tuple(by_name[n] if wanted.get(n) else None for n in names)

    return backward


_GIVEN_TO_GRADIENTS = ("dout", "dlse", "out", "lse")


def _bwd_computed(names: tuple[str, ...]) -> Any:
    def compute(*tensors: Tensor | None, **given: Any) -> Any:
        operands = given_by((*_GIVEN_TO_GRADIENTS, *names), tensors)
        dout, dlse, out, lse = (operands.pop(n, None) for n in _GIVEN_TO_GRADIENTS)
        operands, options = expression_of(operands, _options(given))
        with torch.no_grad():
            result = torch_attention.gradients(dout, dlse, operands, out, lse, **options)
        own = [getattr(result, f"d{n}") for n in torch_attention.DIFFERENTIABLE]
        return tuple(absent_result(operands["q"]) if x is None else x for x in own)

    return compute


def _bwd_fake(names: tuple[str, ...]) -> Any:
    def fake(*tensors: Tensor | None, **given: Any) -> Any:
        operands = given_by((*_GIVEN_TO_GRADIENTS, *names), tensors)
        q, bias, sinks = operands["q"], operands.get("bias"), operands.get("sinks")
        return (
            *(operands[n].new_empty(operands[n].shape) for n in ("q", "k", "v")),
            bias.new_empty(bias.shape)
            if given["bias_gradient"] and bias is not None
            else absent_result(q),
            sinks.new_empty(sinks.shape, dtype=torch.float32)
            if given["sink_gradient"] and sinks is not None
            else absent_result(q),
        )

    return fake


def _foldable(in_dims: Any, args: Any, first: int) -> bool:
    """Whether nothing but rows and lengths differs from entry to entry: ``args[first:]`` are q, k
    and v and what comes after."""
    given = dict(zip(FORWARD_DENSE, zip(args[first:], in_dims[first:], strict=True), strict=False))
    return all(given.get(n, (None, None))[0] is None for n in SCALES) and all(
        repeats(*given.get(n, (None, None)), rank) for n, rank in _REPEATED.items()
    )


def _dense_batched(info: Any, in_dims: Any, *args: Any, **options: Any) -> Batched:
    count = info.batch_size
    if options.get("latent") or not _foldable(in_dims, args, 0):  # folded keys may be a copy
        return each(ATTENTION, count, in_dims, args, options)
    whole = [
        x if n in _REPEATED else fold(x, d, count)
        for n, x, d in zip(FORWARD_DENSE, args, in_dims, strict=False)
    ]
    return unfold(ATTENTION(*whole, **options), count)


def _dense_bwd_batched(info: Any, in_dims: Any, *args: Any, **options: Any) -> Batched:
    count = info.batch_size
    summed = options.get("bias_gradient") or options.get("sink_gradient")
    if summed or not _foldable(in_dims, args, 4):
        return each(ATTENTION_BWD, count, in_dims, args, options)
    whole: list[Any] = [
        x if n in _REPEATED else fold(x, d, count)
        for n, x, d in zip((*_GIVEN_TO_GRADIENTS, *DENSE), args, in_dims, strict=False)
    ]
    results = slice(2, 4)  # of the forward, in which no two entries may share memory
    whole[results] = [x.contiguous() for x in whole[results]]
    return unfold(ATTENTION_BWD(*whole, **options), count)


def _with_lse(*schema: Any, **rules: Any) -> Any:
    """``define``, of an operator that is asked for the LSE wherever gradients may be wanted: they
    start from it."""

    def call(*tensors: Tensor | None, return_lse: bool = True, **options: Any) -> Any:
        kept = torch.is_grad_enabled() and any(
            isinstance(x, torch.Tensor) and x.requires_grad for x in tensors
        )
        asked = flag("return_lse", return_lse)
        return operator(*tensors, return_lse=asked or kept, **options)

    operator = define(*schema, **{"batched": one_by_one(call), **rules})
    return call


_REPEATED = {
    n: len({"B", *o.axes}) for n, o in options_of(ScoreOperands).items() if o.axes and o.axes != "B"
}
"""Operands that may repeat along the batch, and how many axes they have with it."""

_GRADIENTS = "Tensor? dout, Tensor? dlse, Tensor out, Tensor lse"
_FIVE = "(Tensor, Tensor, Tensor, Tensor, Tensor)"
_DENSE_BWD = (
    f"attention_bwd({_GRADIENTS}, {_DENSE}, *, {_SCORES}, {_LAYOUT}, "
    f"{schema_of(_DEFAULTS, 'max_seqlen_q', 'max_seqlen_k')}, {_BACKWARD}) -> {_FIVE}"
)
_DENSE_FORWARD = (
    f"attention({_DENSE}, {_SCALES}, {_GIVEN}, *, {_SCORES}, {_LAYOUT}, {_LATENT}, {_BLOCKS}, "
    f"{_FORWARD}) -> (Tensor, Tensor)"
)
_VARLEN_BWD = (
    f"attention_varlen_bwd({_GRADIENTS}, {_VARLEN}, *, {_LENGTHS}, {_SCORES}, {_BACKWARD}) "
    f"-> {_FIVE}"
)
_VARLEN_FORWARD = (
    f"attention_varlen({_VARLEN}, {_SCALES}, {_GIVEN}, *, {_LENGTHS}, {_SCORES}, {_LATENT}, "
    f"{_BLOCKS}, {_FORWARD}) -> (Tensor, Tensor)"
)
_PAGED_FORWARD = (
    "attention_paged(Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_table, "
    f"Tensor kv_lengths, Tensor? cu_seqlens_q=None, {_ADDED}, {_SCALES}, {_GIVEN}, "
    f"*, {schema_of(_DEFAULTS, 'max_seqlen_q', 'max_seqlen_k')}, "
    f"{schema_of(PAGED_DEFAULTS, *_SCORED, 'layout', 'kv_layout')}, {_LATENT}, {_BLOCKS}, "
    f"{schema_of(PAGED_DEFAULTS, 'prefix_groups')}, "
    f"bool return_lse=True, {schema_of(_DEFAULTS, 'out_dtype', 'batch_invariant')}, "
    f"{CHOSEN}) -> (Tensor, Tensor)"
)


def _paged_setup(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    refuse_gradients(ctx, (*PAGED, *CAPTURED)[: len(ctx.wanted)], ())


def _differentiated(
    names: tuple[str, ...],
    forward: str,
    of_gradients: tuple[str, ...],
    backward: str,
    batched: tuple[dict[str, Any], dict[str, Any]] = ({}, {}),
) -> tuple[Any, Any]:
    """(forward, gradients), by their operands and schemas and what batches each."""
    function = forward.partition("(")[0].removesuffix("_mods")
    gradients = define(
        backward,
        _bwd_computed(of_gradients),
        _bwd_fake(of_gradients),
        backward=refuse_second_derivative(function),
        flops=flops.attention_bwd(of_gradients),
        **batched[1],
    )
    result = _with_lse(
        forward,
        _computed(names),
        _faked(names),
        setup=_setup(names),
        backward=_backward(names, gradients),
        flops=flops.attention(names),
        **batched[0],
    )
    return result, gradients


def _in_pages(names: tuple[str, ...], schema: str) -> Any:
    return define(
        schema,
        _computed(names),
        _paged_fake,
        setup=_paged_setup,
        backward=refuse_second_derivative("attention_paged"),
        flops=flops.attention(names),
    )


def _of_mods(schema: str) -> str:
    """An operator's schema with an expression among its options, of a score_mod, a mask_mod or a
    block mask, and operands for the arrays that it captured."""
    name, _, rest = schema.partition("(")
    more = f"{tensors_of(optional=CAPTURED)}, *, str expression, float[] captured_numbers, "
    return f"{name}_mods({rest}".replace("*, ", more, 1)


def _mods(
    names: tuple[str, ...], forward: str, of_gradients: tuple[str, ...], backward: str
) -> dict[tuple[str, ...], tuple[Any, tuple[str, ...]]]:
    own, own_bwd = (*names, *CAPTURED), (*of_gradients, *CAPTURED)
    result, gradients = _differentiated(own, _of_mods(forward), own_bwd, _of_mods(backward))
    return {names: (result, own), of_gradients: (gradients, own_bwd)}


_OF_DENSE = FORWARD_DENSE, _DENSE_FORWARD, DENSE, _DENSE_BWD
_OF_VARLEN = FORWARD_VARLEN, _VARLEN_FORWARD, VARLEN, _VARLEN_BWD
ATTENTION, ATTENTION_BWD = _differentiated(
    *_OF_DENSE, ({"batched": _dense_batched}, {"batched": _dense_bwd_batched})
)
ATTENTION_VARLEN, VARLEN_BWD = _differentiated(*_OF_VARLEN)
ATTENTION_PAGED = _in_pages(PAGED, _PAGED_FORWARD)
_PAGED_MODS = (*PAGED, *CAPTURED)
MODS: dict[tuple[str, ...], tuple[Any, tuple[str, ...]]] = {
    **_mods(*_OF_DENSE),
    **_mods(*_OF_VARLEN),
    PAGED: (_in_pages(_PAGED_MODS, _of_mods(_PAGED_FORWARD)), _PAGED_MODS),
}
"""By the operands of an operator: the one that takes an expression, too, and its operands."""
TAKEN = {
    names: frozenset(a.name for a in operator_of(name).default._schema.arguments)
    for names, name in (
        (FORWARD_DENSE, "attention"),
        (FORWARD_VARLEN, "attention_varlen"),
        (PAGED, "attention_paged"),
    )
}
"""Arguments of the operators, by the names of their operands."""
