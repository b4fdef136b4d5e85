"""Attention that JAX compiles and differentiates. Imports JAX: ``kernelseam.interop.jax`` imports
this at its first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from kernelseam.descriptors.attention.options import (
    AttentionOptions,
    GradientOptions,
    ScoreOperands,
    ScoreScalars,
)
from kernelseam.descriptors.common.options import (
    as_values,
    operands_of,
    refuse_others,
    scalars_of,
    spelled_out,
    taken,
)
from kernelseam.descriptors.common.wording import Wording
from kernelseam.errors import InvalidValue
from kernelseam.expressions.scores import MaskMod, ScoreMod
from kernelseam.interop.jax_host import Run, by_platform, given, outline, refuse_gradient
from kernelseam.ops.attention_bwd import gradient_work
from kernelseam.ops.attention_work import EXTENTS, attention_work
from kernelseam.ops.expressions import with_expression
from kernelseam.ops.signatures import DenseJax

Array = Any
DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")
_OPERANDS = operands_of(ScoreOperands)
_TAKEN = (
    *scalars_of(ScoreScalars),
    *("layout", "out_dtype", "batch_invariant"),
    *_OPERANDS,
)
_WORDING = Wording({}, EXTENTS)
_KEPT = 256
"""Functions by operands and options, each of which JAX compiles for itself."""


@overload
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[DenseJax],
) -> jax.Array: ...


@overload
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    return_lse: Literal[True],
    **options: Unpack[DenseJax],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, return_lse: bool, **options: Unpack[DenseJax]
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


@spelled_out(AttentionOptions(), *_TAKEN)
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    return_lse: bool = False,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    **options: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """``kernelseam.attention`` on JAX's arrays under jax.jit, jax.grad and jax.vmap, with gradients
    to q, k, v, ``bias`` and ``sinks``, and of the LSE too.

    q [B, H, S_q, D], k [B, H_kv, S_k, D], v [B, H_kv, S_k, D_v]; options as there, and static.
    Shapes, dtypes and options are checked while JAX traces. Lengths that point outside of memory
    are refused when the compiled function runs; JAX wraps that error in one of its own.

    ``score_mod`` and ``mask_mod`` may use ``jax.numpy``'s functions of one element, and index
    arrays of JAX, also such as ``jax.jit`` traces. Gradients do not flow to these.

    It computes on JAX's platform "cpu", and on a GPU that a plugin here knows; lowering for another
    one raises InvalidValue. On a GPU lengths are not checked: as everywhere, they are cut.
    Gradients are differentiable once: a second derivative raises InvalidValue.

    Returns the result [B, H, S_q, D_v], or (result, lse). Raises InvalidValue.
    """
    refuse_others("attention", options, _TAKEN)
    arrays = given(q=q, k=k, v=v, **taken(_OPERANDS, options))
    for name, convert in (("window", tuple), ("out_dtype", lambda x: str(np.dtype(x)))):
        if options.get(name) is not None:
            options[name] = convert(options[name])
    asked = AttentionOptions(return_lse=return_lse, **options)
    mods: tuple[Any, ...] = ()
    if not (score_mod is mask_mod is None):
        captured: dict[str, Any] = {}
        mods = with_expression((), captured, score_mod, mask_mod, None)
        for x in captured.values():
            if (kept := jax.dtypes.canonicalize_dtype(x.dtype)) != x.dtype:
                raise InvalidValue(
                    "score_mod, mask_mod",
                    f"capture an array of {x.dtype}",
                    f"JAX keeps it in {kept} where jax_enable_x64 is off",
                    "Capture jnp.asarray(array)",
                )
        arrays = given(**arrays, **captured)
    outline(attention_work, arrays, (*as_values(asked), *mods), _WORDING)
    result = _differentiable(tuple(arrays), asked, mods)(*arrays.values())
    return (result[0], result[1]) if return_lse else result[0]


@lru_cache(_KEPT)
def _differentiable(
    names: tuple[str, ...], options: AttentionOptions, mods: tuple[Any, ...]
) -> Callable[..., list[Array]]:
    """The attention of these operands and options, as a function of the operands alone. Returns
    [result] or [result, lse]. ``mods``: what ``with_expression`` adds to options."""

    def compute(arrays: tuple[Array, ...], return_lse: bool) -> list[Array]:
        asked = (*as_values(replace(options, return_lse=return_lse)), *mods)
        shapes = outline(attention_work, dict(zip(names, arrays, strict=True)), asked, _WORDING)

        def call(run: Run, *values: Any) -> list[Any]:
            outputs = run(attention_work, dict(zip(names, values, strict=True)), asked, _WORDING)
            return [outputs[n] for n in shapes]

        return by_platform("attention", call, list(shapes.values()), arrays)

    def primal(*arrays: Array) -> list[Array]:
        return compute(arrays, options.return_lse)

    def fwd(*primals: Any) -> tuple[list[Array], Any]:
        arrays = tuple(p.value for p in primals)
        wanted = tuple(n for n, p in zip(names, primals, strict=True) if p.perturbed)
        for name in wanted:
            if name not in DIFFERENTIABLE:
                raise refuse_gradient(name if name in _OPERANDS else "captured array")
        out, lse = compute(arrays, True)
        kept = [out, lse] if options.return_lse else [out]
        return kept, (arrays, out, lse, _Wanted(wanted))

    def bwd(residuals: Any, cotangents: Any) -> tuple[Array | None, ...]:
        arrays, out, lse, wanted = residuals
        dout, dlse = (*cotangents, None)[:2]
        gradients = _gradients(
            dict(zip(names, arrays, strict=True)),
            out,
            lse,
            None if isinstance(dout, SymbolicZero) else dout,
            None if isinstance(dlse, SymbolicZero) else dlse,
            wanted.names,
            options,
            mods,
        )
        return tuple(gradients.get(n) for n in names)

    function: Callable[..., list[Array]] = jax.custom_vjp(primal)
    function.defvjp(fwd, bwd, symbolic_zeros=True)  # type: ignore[attr-defined]
    # else every eager call compiles it anew, and jax.shard_map refuses its symbolic zeros
    jitted: Callable[..., list[Array]] = jax.jit(function)
    return jitted


@jax.tree_util.register_static
class _Wanted:
    """Names of operands, of which JAX makes no array."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Wanted) and other.names == self.names

    def __hash__(self) -> int:
        return hash(self.names)


def _gradients(
    operands: Mapping[str, Array],
    out: Array,
    lse: Array,
    dout: Array | None,
    dlse: Array | None,
    wanted: tuple[str, ...],
    options: AttentionOptions,
    mods: tuple[Any, ...],
) -> dict[str, Array]:
    """Gradients by operand, of those that are wanted."""
    if dout is None and dlse is None:
        return {}
    shared = {n: getattr(options, n) for n in scalars_of(ScoreScalars)}
    given = GradientOptions(
        bias_gradient="bias" in wanted,
        sink_gradient="sinks" in wanted,
        layout=options.layout,
        **shared,
    )
    asked = (*as_values(given), *((*mods, False) if mods else ()))  # no gradient by each score
    differentiated = [n for n in DIFFERENTIABLE if n in ("q", "k", "v") or n in wanted]
    results = [
        jax.ShapeDtypeStruct(
            operands[n].shape, np.dtype(np.float32) if n == "sinks" else operands[n].dtype
        )
        for n in differentiated
    ]
    names, cotangents = tuple(operands), [x for x in (dout, dlse) if x is not None]

    def call(run: Run, *values: Any) -> list[Any]:
        """The gradients by the result and by the LSE, added up."""
        known, (out, lse, *rest) = dict(zip(names, values, strict=False)), values[len(names) :]
        on_host = isinstance(lse, np.ndarray)
        if on_host:
            lse = np.array(lse)  # JAX's own cannot be written, as descriptors want it

        def part(**given: Any) -> dict[str, Any]:
            return run(gradient_work, given, asked, _WORDING)

        parts = []
        if dout is not None:
            kind = known["q"].dtype
            parts.append(part(**known, out=out.astype(kind), lse=lse, dout=rest[0].astype(kind)))
        if dlse is not None:
            space = np if on_host else jnp
            parts.append(_of_lse(part, space, rest[-1], known, out, lse, options.layout))
        wide = np.float64 if on_host else np.float32
        return [
            sum(p[f"d{n}"].astype(wide) for p in parts) if len(parts) > 1 else parts[0][f"d{n}"]
            for n in differentiated
        ]

    result = by_platform("attention", call, results, (*operands.values(), out, lse, *cotangents))
    return {
        n: x.astype(operands[n].dtype)
        for n, x in zip(differentiated, result, strict=True)
        if n in wanted
    }


def _of_lse(
    part: Callable[..., dict[str, Any]],
    space: Any,
    dlse: Any,
    operands: Mapping[str, Any],
    out: Any,
    lse: Any,
    layout: str,
) -> dict[str, Any]:
    """Gradients of the LSE alone. The gradient of a score is p·(dp − delta), delta = Σ dout·out.
    That of the LSE is p·dlse: dp is 0 where v is, and delta is −dlse where out is 1 and dout is
    −dlse, in two parts where its dtype has fewer bits."""
    q, v = operands["q"], operands["v"]
    if layout == "bshd":
        dlse = dlse.swapaxes(-1, -2)
    high = (-dlse).astype(q.dtype)
    low = (-dlse - high.astype(dlse.dtype)).astype(q.dtype)
    rest = [space.zeros_like(high)] * 6  # 8 columns: 16 bytes of halves
    rows = space.stack([high, low, *rest], -1)
    ones = space.stack([space.ones_like(high)] * 2 + rest, -1)
    values = space.zeros((*v.shape[:-1], 8), v.dtype)
    result = part(**{**operands, "v": values}, out=ones, lse=lse, dout=rows)
    return {**result, "dv": space.zeros_like(v)}
