"""``kernelseam.interop.jax`` under jit, grad and vmap, held to JAX's own operations on whatever
platform JAX has. Imports JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import kernelseam.interop.jax as ks
import numpy as np
from attention_formula import attention

Array = Any
BOUND = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 4e-2}


def normal(seed: int, *shape: int, dtype: str = "float32") -> Array:
    host = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(host.astype(jnp.dtype(dtype)))


def own_attention(
    q: Array,
    k: Array,
    v: Array,
    bias: Array | None = None,
    sinks: Array | None = None,
    *,
    causal: bool = True,
    softcap: float | None = None,
    mask: Array | None = None,
    layout: str = "bhsd",
) -> tuple[Array, Array]:
    """(result, lse) by JAX's operations in float32."""
    if layout == "bshd":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    out, lse = attention(
        *(q, k, v), causal=causal, softcap=softcap, bias=bias, mask=mask, sinks=sinks
    )
    return out.swapaxes(1, 2) if layout == "bshd" else out, lse


def agree(found: Array, expected: Array, dtype: str = "float32") -> None:
    assert found.shape == expected.shape
    given = np.asarray(found, np.float32)
    assert np.isfinite(given).all()
    wanted = np.asarray(expected, np.float32)
    bound = BOUND[dtype]
    np.testing.assert_allclose(given, wanted, atol=bound * max(1, abs(wanted).max()), rtol=bound)


def attention_and_its_gradients(
    dtype: str,
    shapes: Sequence[Sequence[int]] = ((2, 4, 9, 16), (2, 2, 13, 16), (2, 2, 13, 16)),
) -> None:
    q, k, v = (normal(i, *shape, dtype=dtype) for i, shape in enumerate(shapes))

    def loss(attend: Callable[..., Array]) -> Callable[..., Array]:
        return lambda *x: jnp.sum(jnp.sin(attend(*x).astype(jnp.float32)))

    ours = jax.jit(lambda *x: ks.attention(*x, causal=True))
    assert ours(q, k, v).dtype == q.dtype
    agree(ours(q, k, v), jax.jit(own_attention)(q, k, v)[0], dtype)
    found = jax.jit(jax.grad(loss(ours), (0, 1, 2)))(q, k, v)
    expected = jax.jit(jax.grad(loss(lambda *x: own_attention(*x)[0]), (0, 1, 2)))(q, k, v)
    for f, e in zip(found, expected, strict=True):
        assert f.dtype == e.dtype == q.dtype
        agree(f, e, dtype)


def options_and_gradients_of_the_lse(layout: str, of: tuple[float, float]) -> None:
    shapes = [(2, 4, 9, 16), (2, 2, 11, 16), (2, 2, 11, 16)]
    q, k, v = (normal(i, *s) for i, s in enumerate(shapes))
    if layout == "bshd":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    bias, sinks = normal(3, 1, 4, 9, 11), normal(4, 4)
    mask = jnp.asarray(np.random.default_rng(5).random((2, 1, 9, 11)) < 0.7).at[..., 0].set(True)

    def loss(attend: Callable[..., Any], **options: Any) -> Callable[..., Array]:
        def total(q: Array, k: Array, v: Array, bias: Array, sinks: Array) -> Array:
            out, lse = attend(q, k, v, bias=bias, sinks=sinks, softcap=5.0, mask=mask, **options)
            return of[0] * jnp.sum(jnp.sin(out)) + of[1] * jnp.sum(jnp.cos(lse))

        return total

    arrays, every = (q, k, v, bias, sinks), (0, 1, 2, 3, 4)
    ours = loss(ks.attention, causal=True, layout=layout, return_lse=True)
    own = loss(own_attention, layout=layout)
    found, expected = (jax.jit(jax.value_and_grad(x, every))(*arrays) for x in (ours, own))
    agree(found[0], expected[0])
    for f, e in zip(found[1], expected[1], strict=True):
        agree(f, e)


def bmm_and_its_gradients() -> None:
    a, b = normal(0, 2, 4, 5, 8), normal(1, 2, 2, 7, 8)
    bias, residual = normal(2, 4, 1, 7)[:, 0], normal(3, 2, 4, 5, 7)

    def ours(a: Array, b: Array, bias: Array, residual: Array) -> Array:
        return ks.bmm(a, b, b_transposed=True, alpha=0.5, bias=bias, residual=residual)

    def own(a: Array, b: Array, bias: Array, residual: Array) -> Array:
        made = 0.5 * jnp.einsum("bhmk,bhnk->bhmn", a, jnp.repeat(b, 2, 1))
        return made + bias[None, :, None] + residual

    arrays = (a, b, bias, residual)

    def loss(product: Callable[..., Array]) -> Callable[..., Array]:
        return lambda *x: jnp.sum(jnp.sin(product(*x)))

    every = (0, 1, 2, 3)
    found, expected = (jax.jit(jax.value_and_grad(loss(x), every))(*arrays) for x in (ours, own))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for f, e in zip(found[1], expected[1], strict=True):
        agree(f, e)
    wide = ks.bmm(
        a.astype("bfloat16"), b.astype("bfloat16"), b_transposed=True, out_dtype="float32"
    )
    assert wide.dtype == jnp.float32


def vmap_of_gradients() -> None:
    q, k, v = (normal(i, 3, 1, 2, 5, 8) for i in range(3))

    def gradient(attend: Callable[..., Array]) -> Any:
        return jax.vmap(jax.grad(lambda q, k, v: jnp.sum(attend(q, k, v) ** 2)), in_axes=(0, 0, 0))

    found = jax.jit(gradient(lambda *x: ks.attention(*x, causal=True)))(q, k, v)
    agree(found, jax.jit(gradient(lambda *x: own_attention(*x)[0]))(q, k, v))


def training_step_in_a_scan() -> None:
    """Two steps of a layer, compiled as one."""
    x, w = normal(0, 2, 6, 32), normal(1, 96, 32) / 6

    def loss(w: Array, attend: Callable[..., Array]) -> Array:
        q, k, v = ((x @ p.T).reshape(2, 6, 4, 8).swapaxes(1, 2) for p in jnp.split(w, 3))
        return jnp.mean(attend(q, k, v) ** 2)

    def train(attend: Callable[..., Array]) -> Array:
        def step(w: Array, _: Array) -> tuple[Array, Array]:
            value, slope = jax.value_and_grad(loss)(w, attend)
            return w - 0.5 * slope, value

        return jax.jit(lambda w: jax.lax.scan(step, w, jnp.arange(2)))(w)[1]

    found = train(lambda *x: ks.attention(*x, causal=True))
    agree(found, train(lambda *x: own_attention(*x)[0]))
    assert found[1] < found[0]


def in_a_fori_loop() -> None:
    """Each turn reads what the one before wrote, in buffers that XLA uses in turns."""
    q, k, v = (normal(i, 1, 4, s, 32) for i, s in enumerate((40, 56, 56)))

    def run(attend: Callable[..., Array]) -> Array:
        return jax.jit(
            lambda q: jax.lax.fori_loop(0, 5, lambda i, q: jnp.tanh(attend(q, k, v) * 3) + q / 2, q)
        )(q)

    agree(run(lambda *x: ks.attention(*x, causal=True)), run(lambda *x: own_attention(*x)[0]))


def over_devices() -> None:
    """A batch over all devices with keys on each, and arrays on the last of them alone."""
    devices, spec = jax.devices(), jax.sharding.PartitionSpec
    mesh = jax.sharding.Mesh(np.array(devices), ("batch",))
    q, k = normal(0, 2 * len(devices), 2, 24, 32), normal(1, 1, 2, 24, 32)

    def slopes(attend: Callable[..., Array], *arrays: Array) -> tuple[Array, Array]:
        found: tuple[Array, Array] = jax.jit(
            jax.grad(lambda q, k: jnp.sum(jnp.sin(attend(q, k))), (0, 1))
        )(*arrays)
        return found

    def ours(q: Array, k: Array) -> Array:
        k = jnp.repeat(k, q.shape[0], 0)
        return ks.attention(q, k, jnp.ones_like(q) * k, causal=True)

    def own(q: Array, k: Array) -> Array:
        k = jnp.repeat(k, q.shape[0], 0)
        return own_attention(q, k, k)[0]

    specs = (spec("batch"), spec())
    mapped = jax.shard_map(ours, mesh=mesh, in_specs=specs, out_specs=specs[0])
    last = jax.device_put((q, k), devices[-1])
    for found in (slopes(mapped, q, k), slopes(ours, *last)):
        for f, e in zip(found, slopes(own, q, k), strict=True):
            agree(f, e)
    agree(mapped(q, k), own(q, k))  # eagerly
    assert slopes(ours, *last)[0].devices() == {devices[-1]}


def users_scores_and_masks() -> None:
    """Functions over jax.numpy, which capture arrays that jax.jit traces, and their gradients."""
    q, k, v = (normal(i, 2, 4, 9, 16) for i in range(3))
    slopes, seen = normal(3, 4), jnp.arange(9) % 4 != 1
    i, j = jnp.arange(9)[:, None], jnp.arange(9)

    def ours(q: Array, k: Array, v: Array, slopes: Array, seen: Array, cap: float) -> Array:
        def score_mod(score: Array, b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
            near = jnp.minimum(jnp.abs(q_idx - kv_idx), 5).astype(jnp.float32)
            return cap * jax.nn.sigmoid(score) + jnp.where(b == 0, slopes[h], jnp.pi) * near

        def mask_mod(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> Array:
            return jnp.logical_or(seen[kv_idx], q_idx == kv_idx) & (q_idx >= kv_idx)

        return ks.attention(q, k, v, score_mod=score_mod, mask_mod=mask_mod)

    def own(q: Array, k: Array, v: Array, slopes: Array, seen: Array, cap: float) -> Array:
        score = jnp.einsum("bhid,bhjd->bhij", q, k) / 4
        factor = jnp.stack([slopes, jnp.full(4, jnp.pi)])[:, :, None, None]
        score = cap * jax.nn.sigmoid(score) + factor * jnp.minimum(abs(i - j), 5)
        score = jnp.where((seen | (i == j)) & (i >= j), score, -jnp.inf)
        return jax.nn.softmax(score) @ v

    given = (q, k, v, slopes, seen)
    of_ours, of_own = (
        jax.jit(jax.value_and_grad(lambda *x, f=f: jnp.sin(f(*x, 3.0)).sum(), (0, 1, 2)))
        for f in (ours, own)
    )
    for found, expected in zip(
        *map(jax.tree.leaves, (of_ours(*given), of_own(*given))), strict=True
    ):
        agree(found, expected)


def eager_calls_compile_once() -> None:
    q, k, v = (normal(i, 1, 2, 9, 16) for i in range(3))
    compiled = []

    def listen(event: str, seconds: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for softcap in (3.25, 4.25):
            before = len(compiled)
            ks.attention(q, k, v, softcap=softcap)
            ks.bmm(q, k.swapaxes(2, 3), alpha=softcap)
            assert len(compiled) >= before + 2  # what is asked for the first time
            before = len(compiled)
            ks.attention(2 * q, k, v, softcap=softcap)
            ks.bmm(2 * q, k.swapaxes(2, 3), alpha=softcap)
            assert len(compiled) <= before + 1  # 2 * q
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


PROBLEMS = (
    eager_calls_compile_once,
    bmm_and_its_gradients,
    vmap_of_gradients,
    training_step_in_a_scan,
    in_a_fori_loop,
    over_devices,
    users_scores_and_masks,
)
"""Those without parameters, which every platform computes."""
