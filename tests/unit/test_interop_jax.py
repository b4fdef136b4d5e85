"""``kernelseam.interop.jax`` under jit, grad and vmap, beside JAX's own operations."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from kernelseam.errors import InvalidValue
from kernelseam.expressions.evaluation import evaluate
from kernelseam.expressions.scores import score_expression
from kernelseam.plugins import plugins

jax = pytest.importorskip("jax", reason="jax is missing")
import jax.numpy as jnp  # noqa: E402
import jax_problems  # noqa: E402
import kernelseam.interop.jax as ks  # noqa: E402
from jax.export import export  # noqa: E402
from jax_problems import agree, normal, own_attention  # noqa: E402

Array = Any


@pytest.fixture(autouse=True)
def platform() -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("JAX's platform is a GPU, and the host is meant")


@pytest.mark.parametrize(
    "dtype",
    [
        "float32",
        "bfloat16",
        pytest.param("float16", marks=pytest.mark.slow("another half: JAX compiles it again")),
    ],
)
def test_attention_and_its_gradients_under_jit(dtype: str) -> None:
    jax_problems.attention_and_its_gradients(dtype)


@pytest.mark.parametrize(
    ("layout", "of"),
    [
        pytest.param("bshd", (1.0, 0.5), id="both-bshd"),
        pytest.param("bhsd", (0.0, 1.0), id="lse"),
    ],
)
def test_options_and_gradients_of_the_lse(layout: str, of: tuple[float, float]) -> None:
    jax_problems.options_and_gradients_of_the_lse(layout, of)


def test_only_what_is_wanted_is_differentiated() -> None:
    """A bias without a gradient is no matter of the backward pass: it is that of q alone."""
    q, k, v = (normal(i, 1, 2, 8, 16) for i in range(3))
    bias = normal(3, 1, 2, 8, 8)
    found = jax.grad(lambda q: ks.attention(q, k, v, bias=bias).sum())(q)
    own = jax.grad(lambda q: own_attention(q, k, v, bias, causal=False)[0].sum())
    agree(found, jax.jit(own)(q))
    with pytest.raises(InvalidValue) as caught:
        jax.grad(lambda s: ks.attention(q, k, v, alibi_slopes=s).sum())(jnp.ones(2))
    assert str(caught.value) == (
        "alibi_slopes = differentiated: gradients do not flow to it. Pass "
        "jax.lax.stop_gradient(alibi_slopes)."
    )


def test_users_scores_and_masks_that_are_refused() -> None:
    q = normal(0, 1, 2, 8, 16)
    with pytest.raises(InvalidValue, match=r"^captured array = differentiated: gradients do not"):
        jax.grad(lambda x: ks.attention(q, q, q, score_mod=lambda s, b, h, i, j: s + x[h]).sum())(
            jnp.ones(2)
        )
    for mod, message in (
        (lambda s, b, h, i, j: jnp.cumsum(s), "cumsum is not a function of one element"),
        (lambda s, b, h, i, j: jax.lax.div(i, j), "div is not supported. Use jax.numpy's functi"),
        (lambda s, b, h, i, j: s + TABLE[i], "JAX keeps it in float32 where jax_enable_x64 is off"),
    ):
        with pytest.raises(InvalidValue, match=re.escape(message)):
            ks.attention(q, q, q, score_mod=mod)


TABLE = np.linspace(0, 1, 8)


@jax.jit
def _helper(x: Array) -> Array:
    return jnp.tanh(x) * 2


FUNCTIONS: list[Any] = [
    jnp.tanh, jnp.sin, jnp.floor, jax.nn.gelu, jax.nn.softplus, jax.nn.silu, jax.nn.relu, _helper,
    partial(jax.nn.gelu, approximate=False), np.tanh, lambda x: x * jax.nn.softplus(2.0),
    lambda x: jnp.float32(x.astype(jnp.int32)), lambda x: jnp.where(x > 0, x, jnp.pi),
]  # fmt: skip


def test_each_function_of_jax_is_itself() -> None:
    """Functions of one closure, whose code is the same."""

    def of(f: Any) -> Any:
        return lambda s, b, h, i, j: f(s)

    x = np.asarray(normal(0, 16))
    for f in FUNCTIONS:
        expression = jax.jit(lambda _, f=f: _traced(of(f)))(0)
        (found,) = evaluate([_seen[-1].structure.score], {"score": x}, _seen[-1].numbers, ())
        np.testing.assert_allclose(found, f(jnp.asarray(x)), rtol=2e-5, atol=2e-6)
        assert expression == 0


_seen: list[Any] = []


def _traced(mod: Any) -> int:
    _seen.append(score_expression(mod))
    return 0


@pytest.mark.parametrize("problem", jax_problems.PROBLEMS, ids=lambda f: f.__name__)
def test_problems(problem: Callable[[], None]) -> None:
    problem()


@pytest.mark.parametrize(
    "problem",
    [
        partial(jax_problems.attention_and_its_gradients, "bfloat16"),
        partial(jax_problems.options_and_gradients_of_the_lse, "bshd", (1.0, 0.5)),
        jax_problems.bmm_and_its_gradients,
        jax_problems.vmap_of_gradients,
        jax_problems.in_a_fori_loop,
    ],
    ids=lambda f: getattr(f, "func", f).__name__,
)
def test_buffers_of_a_device(problem: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on a GPU, on buffers of the host, which have no stream."""
    from kernelseam.interop import jax_attention, jax_device, jax_gemm

    launches = []
    for name, value in (
        ("backend", lambda: replace(plugins().backend("numpy"), jax_platform="cpu")),
        ("_stream", lambda context: launches.append(context) or 0),
    ):
        monkeypatch.setattr(jax_device, name, value)
    for module in (jax_attention, jax_gemm):
        module._differentiable.cache_clear()
    problem()
    for module in (jax_attention, jax_gemm):
        module._differentiable.cache_clear()
    assert len(launches) >= 3


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
        "platform = cuda: kernelseam.interop.jax computes on hosts, and on a GPU that a plugin "
        "here knows. Run it on JAX's host platform (jax.default_device(jax.devices('cpu')[0])), "
        "or call kernelseam on the arrays outside of jax.jit."
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


def test_importing_it_imports_no_jax() -> None:
    code = "import sys, kernelseam.interop.jax; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
