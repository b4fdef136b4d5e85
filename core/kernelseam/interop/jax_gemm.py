"""Products that JAX compiles and differentiates. Imports JAX: ``kernelseam.interop.jax`` imports
this at its first use."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernelseam.descriptors.common.options import as_values
from kernelseam.descriptors.common.wording import Wording
from kernelseam.descriptors.gemm.options import ProductGradientOptions, ProductOptions
from kernelseam.interop.jax_host import Run, by_platform, given, outline
from kernelseam.ops.gemm import gemm_work
from kernelseam.ops.gemm_bwd import gradient_work

Array = Any
_WORDING = Wording()
_KEPT = 256
"""Functions by operands and options, each of which JAX compiles for itself."""


def bmm(
    a: jax.Array,
    b: jax.Array,
    *,
    a_transposed: bool = False,
    b_transposed: bool = False,
    alpha: float = 1,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    out_dtype: Any = None,
    precision: str | None = None,
) -> jax.Array:
    """``kernelseam.bmm`` on JAX's arrays under jax.jit, jax.grad and jax.vmap, with gradients to a,
    b, ``bias`` and ``residual``.

    a [B, M, K] and b [B, K, N], or [B, H, M, K] and [B, H_b, K, N]; options as there, and static.
    Shapes, dtypes and options are checked while JAX traces. It computes on JAX's platform "cpu",
    and on a GPU that a plugin here knows; lowering for another one raises InvalidValue.
    Gradients are differentiable once: a second derivative raises InvalidValue.

    Returns [B, M, N] or [B, H, M, N]. Raises InvalidValue.
    """
    arrays = given(a=a, b=b, bias=bias, residual=residual)
    out_dtype = None if out_dtype is None else str(np.dtype(out_dtype))
    options = ProductOptions(
        batched=True,
        a_transposed=a_transposed,
        b_transposed=b_transposed,
        alpha=alpha,
        out_dtype=out_dtype,
        precision=precision,
    )
    outline(gemm_work, arrays, as_values(options), _WORDING)
    result: jax.Array = _differentiable(tuple(arrays), options)(*arrays.values())
    return result


@lru_cache(_KEPT)
def _differentiable(names: tuple[str, ...], options: ProductOptions) -> Callable[..., Array]:
    """The product of these operands and options, as a function of the operands alone."""

    def primal(*arrays: Array) -> Array:
        asked = as_values(options)
        shapes = outline(gemm_work, dict(zip(names, arrays, strict=True)), asked, _WORDING)

        def call(run: Run, *values: Any) -> list[Any]:
            return [run(gemm_work, dict(zip(names, values, strict=True)), asked, _WORDING)["out"]]

        (product,) = by_platform("bmm", call, [shapes["out"]], arrays)
        return product

    def fwd(*arrays: Array) -> tuple[Array, Any]:
        return primal(*arrays), arrays

    def bwd(arrays: tuple[Array, ...], dc: Array) -> tuple[Array, ...]:
        operands = dict(zip(names, arrays, strict=True))
        a, b = operands["a"], operands["b"]

        def call(run: Run, dc: Any, a: Any, b: Any) -> list[Any]:
            factors = {n: getattr(options, n) for n in ("a_transposed", "b_transposed", "alpha")}
            asked = as_values(ProductGradientOptions(batched=True, sum_repeats=False, **factors))
            outputs = run(gradient_work, {"dc": dc, "a": a, "b": b}, asked, _WORDING)
            return [outputs["da"], outputs["db"]]

        results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (a, b)]
        outputs = by_platform("bmm", call, results, (dc.astype(a.dtype), a, b))
        gradients = dict(zip(("a", "b"), outputs, strict=True))
        if "bias" in operands:
            gradients["bias"] = _of_bias(dc, operands["bias"])
        if "residual" in operands:
            gradients["residual"] = dc.astype(operands["residual"].dtype)
        return tuple(gradients[n] for n in names)

    function: Callable[..., Array] = jax.custom_vjp(primal)
    function.defvjp(fwd, bwd)  # type: ignore[attr-defined]
    jitted: Callable[..., Array] = jax.jit(function)  # else every eager call compiles it anew
    return jitted


def _of_bias(dc: Array, bias: Array) -> Array:
    """Summed over rows, and over what the bias repeats along."""
    wide = dc.astype(jnp.promote_types(dc.dtype, jnp.float32))
    _, pull = jax.vjp(
        lambda x: jnp.broadcast_to(x[..., None, :], dc.shape), jnp.zeros(bias.shape, wide.dtype)
    )
    (result,) = pull(wide)
    return result.astype(bias.dtype)
