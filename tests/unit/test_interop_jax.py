"""``kernelseam.interop.jax`` under jit, grad and vmap, beside JAX's own operations."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernelseam.errors import InvalidValue

jax = pytest.importorskip("jax", reason="jax is missing")
import jax.numpy as jnp  # noqa: E402
import kernelseam.interop.jax as ks  # noqa: E402
from jax.export import export  # noqa: E402

Array = Any
BOUND = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 4e-2}


@pytest.fixture(autouse=True)
def platform() -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("JAX's platform is a GPU, and the host is meant")


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
    group = q.shape[1] // k.shape[1]
    k, v = (jnp.repeat(x.astype(jnp.float32), group, 1) for x in (k, v))
    scores = jnp.einsum("bhqd,bhkd->bhqk", q.astype(jnp.float32), k) / q.shape[-1] ** 0.5
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    if bias is not None:
        scores += bias
    rows, columns = scores.shape[-2:]
    seen = jnp.tril(jnp.ones((rows, columns), bool), columns - rows) if causal else True
    scores = jnp.where(seen if mask is None else seen & mask, scores, -jnp.inf)
    every = scores
    if sinks is not None:
        sink = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
        every = jnp.concatenate([scores, sink], -1)
    lse = jax.nn.logsumexp(every, -1)
    out = jnp.exp(scores - lse[..., None]) @ v
    return out.swapaxes(1, 2) if layout == "bshd" else out, lse


def agree(actual: Array, expected: Array, dtype: str = "float32") -> None:
    assert actual.shape == expected.shape
    values = np.asarray(actual, np.float32)
    assert np.isfinite(values).all()
    np.testing.assert_allclose(
        values, np.asarray(expected, np.float32), atol=BOUND[dtype], rtol=BOUND[dtype]
    )


@pytest.mark.parametrize(
    "dtype",
    [
        "float32",
        "bfloat16",
        pytest.param("float16", marks=pytest.mark.slow("another half: JAX compiles it again")),
    ],
)
def test_attention_and_its_gradients_under_jit(dtype: str) -> None:
    q, k, v = (
        normal(i, 2, h, s, 16, dtype=dtype) for i, (h, s) in enumerate(((4, 9), (2, 13), (2, 13)))
    )

    def loss(attend: Callable[..., Array]) -> Callable[..., Array]:
        return lambda *x: jnp.sum(jnp.sin(attend(*x).astype(jnp.float32)))

    ours = jax.jit(lambda *x: ks.attention(*x, causal=True))
    assert ours(q, k, v).dtype == q.dtype
    agree(ours(q, k, v), jax.jit(own_attention)(q, k, v)[0], dtype)
    actual = jax.jit(jax.grad(loss(ours), (0, 1, 2)))(q, k, v)
    expected = jax.jit(jax.grad(loss(lambda *x: own_attention(*x)[0]), (0, 1, 2)))(q, k, v)
    for f, e in zip(actual, expected, strict=True):
        assert f.dtype == e.dtype == q.dtype
        agree(f, e, dtype)


@pytest.mark.parametrize(
    ("layout", "of"),
    [
        pytest.param("bhsd", (1.0, 0.5), id="both"),
        pytest.param("bshd", (1.0, 0.5), id="both-bshd"),
        pytest.param("bhsd", (1.0, 0.0), id="out"),
        pytest.param("bhsd", (0.0, 1.0), id="lse"),
    ],
)
def test_options_and_gradients_of_the_lse(layout: str, of: tuple[float, float]) -> None:
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
    actual, expected = (jax.jit(jax.value_and_grad(x, every))(*arrays) for x in (ours, own))
    agree(actual[0], expected[0])
    for f, e in zip(actual[1], expected[1], strict=True):
        agree(f, e)


def test_only_what_is_wanted_is_differentiated() -> None:
    """A bias without a gradient is no matter of the backward pass: it is that of q alone."""
    q, k, v = (normal(i, 1, 2, 8, 16) for i in range(3))
    bias = normal(3, 1, 2, 8, 8)
    actual = jax.grad(lambda q: ks.attention(q, k, v, bias=bias).sum())(q)
    own = jax.grad(lambda q: own_attention(q, k, v, bias, causal=False)[0].sum())
    agree(actual, jax.jit(own)(q))
    with pytest.raises(InvalidValue) as caught:
        jax.grad(lambda s: ks.attention(q, k, v, alibi_slopes=s).sum())(jnp.ones(2))
    assert str(caught.value) == (
        "alibi_slopes = differentiated: gradients do not flow to it. Pass "
        "jax.lax.stop_gradient(alibi_slopes)."
    )


def test_bmm_and_its_gradients_under_jit() -> None:
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
    actual, expected = (jax.jit(jax.value_and_grad(loss(x), every))(*arrays) for x in (ours, own))
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
    for f, e in zip(actual[1], expected[1], strict=True):
        agree(f, e)
    wide = ks.bmm(
        a.astype("bfloat16"), b.astype("bfloat16"), b_transposed=True, out_dtype="float32"
    )
    assert wide.dtype == jnp.float32


def test_vmap_of_gradients() -> None:
    q, k, v = (normal(i, 3, 1, 2, 5, 8) for i in range(3))

    def gradient(attend: Callable[..., Array]) -> Callable[..., Array]:
        return jax.vmap(jax.grad(lambda q, k, v: jnp.sum(attend(q, k, v) ** 2)), in_axes=(0, 0, 0))

    actual = jax.jit(gradient(lambda *x: ks.attention(*x, causal=True)))(q, k, v)
    agree(actual, jax.jit(gradient(lambda *x: own_attention(*x)[0]))(q, k, v))


def test_training_step_in_a_scan() -> None:
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

    actual = train(lambda *x: ks.attention(*x, causal=True))
    agree(actual, train(lambda *x: own_attention(*x)[0]))
    assert actual[1] < actual[0]


def test_what_does_not_fit_is_refused_while_jax_traces() -> None:
    q, k = normal(0, 1, 4, 8, 16), normal(1, 1, 3, 8, 16)
    with pytest.raises(InvalidValue) as caught:
        jax.jit(lambda q, k: ks.attention(q, k, k))(q, k)
    assert str(caught.value) == (
        "q = num_heads 4: must be a multiple of kv_heads = 3. Make num_heads a multiple of "
        "kv_heads."
    )
    with pytest.raises(InvalidValue, match=r"^layout = sbhd: must be one of "):
        jax.eval_shape(lambda q: ks.attention(q, q, q, layout="sbhd"), q)
    with pytest.raises(InvalidValue) as caught:
        ks.attention([1.0], q, q)
    assert str(caught.value) == ("q = list: must be an array of JAX or NumPy. Pass jnp.asarray(…).")
    with pytest.raises(InvalidValue, match="^b = "):
        jax.jit(ks.bmm)(q, k)


def test_second_derivatives_are_refused_by_name() -> None:
    q = normal(0, 1, 1, 4, 8)
    for name, function in (
        ("attention", lambda x: ks.attention(x, x, x).sum()),
        ("bmm", lambda x: ks.bmm(x, x, b_transposed=True).sum()),
    ):
        with pytest.raises(InvalidValue) as caught:
            jax.grad(lambda x, f=function: jax.grad(f)(x).sum())(q)
        assert str(caught.value) == (
            f"jax.grad = of a gradient: gradients of {name} cannot be differentiated. Use JAX's "
            "own operations where second derivatives are wanted."
        )


@pytest.mark.parametrize("mapped", [False, True])
def test_other_platforms_are_refused_when_lowered(mapped: bool) -> None:
    """No GPU is needed: JAX lowers for a platform that is not here."""
    q = normal(0, 3, 1, 2, 4, 8) if mapped else normal(0, 1, 2, 4, 8)

    def attend(x: Array) -> Array:
        return ks.attention(x, x, x)

    with pytest.raises(InvalidValue) as caught:
        export(jax.jit(jax.vmap(attend) if mapped else attend), platforms=["cuda"])(q)
    assert str(caught.value) == (
        "platform = cuda: kernelseam.interop.jax computes on hosts. Run it on JAX's host platform "
        "(jax.default_device(jax.devices('cpu')[0])), or call kernelseam on the arrays outside of "
        "jax.jit."
    )


def test_functions_are_compiled_once_for_equal_shapes_and_options() -> None:
    q = normal(0, 1, 2, 4, 8)
    traced = []

    @jax.jit
    def attend(x: Array) -> Array:
        traced.append(x.shape)
        return ks.attention(x, x, x, window=(2, 0))

    for _ in range(3):
        attend(q)
    assert traced == [(1, 2, 4, 8)]


def test_importing_the_door_imports_no_jax() -> None:
    code = "import sys, kernelseam.interop.jax; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
