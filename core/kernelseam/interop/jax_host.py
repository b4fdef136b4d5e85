"""What JAX's functions share: results' shapes while JAX traces, and calls by platform. Imports JAX.

On JAX's platform "cpu" a call is a ``jax.pure_callback``; on a GPU that a plugin here knows,
``jax_device`` launches. For other platforms lowering refuses it: a callback there would copy
everything to the host and compute on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.interpreters import batching, mlir

from kernelseam.arrays import describe
from kernelseam.descriptors.common.wording import Wording
from kernelseam.errors import InvalidValue
from kernelseam.interop import jax_device
from kernelseam.ops.calling import operate
from kernelseam.ops.operation import Operation

Array = Any
Work = Callable[..., None]
Run = Callable[[Work, Mapping[str, Any], tuple[Any, ...], Wording], dict[str, Any]]
_REMEDY = (
    "Run it on JAX's host platform (jax.default_device(jax.devices('cpu')[0])), or call kernelseam "
    "on the arrays outside of jax.jit"
)


def given(**arrays: Array) -> dict[str, Array]:
    """The arrays that are not None. Raises InvalidValue for what JAX does not know as an array."""
    result = {}
    for name, x in arrays.items():
        if x is None:
            continue
        if not isinstance(x, (jax.Array, np.ndarray)):
            raise InvalidValue(
                name, type(x).__name__, "must be an array of JAX or NumPy", "Pass jnp.asarray(…)"
            )
        result[name] = jnp.asarray(x)
    return dict(zip(result, varying_over(_axes(result.values()), result.values()), strict=True))


def varying_over(axes: Iterable[str], arrays: Iterable[Array]) -> list[Array]:
    """The arrays, as ones that vary over these axes of the mesh of a ``jax.shard_map``, which is
    what it says of callbacks' results only where told. It then sums gradients over the axes along
    which an operand did not vary."""
    return [
        jax.lax.pcast(x, more, to="varying") if (more := tuple(set(axes) - _axes([x]))) else x
        for x in arrays
    ]


def _axes(arrays: Iterable[Array]) -> frozenset[str]:
    """Those of a ``jax.shard_map``'s mesh along which any of the arrays varies."""
    types = (getattr(jax.typeof(x), "mat", None) for x in arrays)
    return frozenset().union(*(getattr(t, "varying", ()) for t in types))


def outline(
    work: Work, arrays: Mapping[str, Array], options: Sequence[Any], wording: Wording
) -> dict[str, jax.ShapeDtypeStruct]:
    """What an operation on arrays of these shapes and dtypes returns, by name. Nothing is computed.

    Raises InvalidValue for what does not fit together, as the operation would.
    """
    try:
        infos = {n: describe(np.empty(x.shape, x.dtype), n, "numpy") for n, x in arrays.items()}
        operation = Operation(infos, None)
        work(operation, *options)
    except InvalidValue as e:
        raise wording.reworded(e) from None
    return {
        r.name: jax.ShapeDtypeStruct(r.shape, np.dtype(r.dtype.numpy))
        for r in operation.planned().results
    }


def by_platform(
    function: str,
    call: Callable[..., Sequence[Any]],
    results: Sequence[jax.ShapeDtypeStruct],
    arrays: Sequence[Array],
) -> list[Array]:
    """``call(run, *arrays)``, which computes by ``run(work, arrays, options, wording)``: on NumPy
    arrays when the compiled function runs, or on JAX's own while it traces. jax.vmap calls it once
    an element. To differentiate it is refused: it is within gradients of ``function``, or is one.
    """

    def host(*values: Array) -> list[Any]:
        result = call(_run, *(np.asarray(x) for x in values))
        return [np.asarray(x, r.dtype) for x, r in zip(result, results, strict=True)]

    def call_back(*values: Array) -> list[Array]:
        return list(jax.pure_callback(host, list(results), *values, vmap_method="sequential"))

    def launch(*values: Array) -> list[Array]:
        return list(call(jax_device.launch, *values))

    def refuse(*values: Array) -> list[Array]:
        return list(_refused.bind(*values, results=tuple(results)))

    def choose(*values: Array) -> list[Array]:
        ways: dict[str, Callable[..., list[Array]]] = {"cpu": call_back}
        if (of := jax_device.backend()) is not None:
            ways[of.jax_platform] = launch
        return list(jax.lax.platform_dependent(*values, default=refuse, **ways))

    def differentiate(primals: Any, tangents: Any) -> Any:
        raise InvalidValue(
            "jax.grad",
            "of a gradient",
            f"gradients of {function} cannot be differentiated",
            "Use JAX's own operations where second derivatives are wanted",
        )

    chosen = jax.custom_jvp(choose)
    chosen.defjvp(differentiate)
    return varying_over(_axes(arrays), chosen(*arrays))


def _run(
    work: Work, arrays: Mapping[str, Any], options: tuple[Any, ...], wording: Wording
) -> dict[str, Any]:
    return operate(work, arrays, options, "numpy", None, None, wording)


def refuse_gradient(name: str) -> InvalidValue:
    """For an operand that is differentiated and has no gradient."""
    return InvalidValue(
        name,
        "differentiated",
        "gradients do not flow to it",
        f"Pass jax.lax.stop_gradient({name})",
    )


def _abstract(*operands: Any, results: tuple[jax.ShapeDtypeStruct, ...]) -> list[Any]:
    return [jax.core.ShapedArray(r.shape, r.dtype) for r in results]


def _lower(context: Any, *operands: Any, results: Any) -> Any:
    platforms = context.platforms or context.module_context.platforms
    raise InvalidValue(
        "platform",
        ", ".join(platforms),
        "kernelseam.interop.jax computes on hosts, and on a GPU that a plugin here knows",
        _REMEDY,
    )


def _batched(
    operands: Sequence[Array], axes: Sequence[int | None], *, results: Any
) -> tuple[list[Array], list[int]]:
    (size,) = {x.shape[a] for x, a in zip(operands, axes, strict=True) if a is not None}
    each = tuple(jax.ShapeDtypeStruct((size, *r.shape), r.dtype) for r in results)
    return list(_refused.bind(*operands, results=each)), [0] * len(each)


_refused = jax.extend.core.Primitive("kernelseam_refused")
_refused.multiple_results = True
_refused.def_abstract_eval(_abstract)
mlir.register_lowering(_refused, _lower)
batching.primitive_batchers[_refused] = _batched
