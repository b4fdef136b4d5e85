"""On an NVIDIA GPU: ``kernelseam.interop.jax`` on JAX's platform "cuda", beside JAX's own
operations: on XLA's stream, over its memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import kernelseam
import kernelseam.interop.jax as ks
import numpy as np
import pytest
from kernelseam.errors import InvalidValue, Unsupported
from kernelseam.plugins import plugins

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other tests want memory, too
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")  # what is compiled runs once
jax: Any = pytest.importorskip("jax", reason="jax is missing")
if jax.default_backend() != "gpu":
    pytest.skip("gpu is missing: JAX's platform is the CPU", allow_module_level=True)
_backend = plugins().registry.backends.get("cuda")
if _backend is None or not _backend.runtime.devices():
    pytest.skip("gpu is missing: no NVIDIA device here", allow_module_level=True)

import jax.numpy as jnp  # noqa: E402
import jax_problems  # noqa: E402
from kernelseam.interop import jax_device  # noqa: E402

pytestmark = pytest.mark.gpu
Array = Any


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    """JAX's own products of float32 in float32."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_attention_and_its_gradients_under_jit(dtype: str) -> None:
    jax_problems.attention_and_its_gradients(dtype)


@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param(((1, 8, 1, 128), (1, 8, 5000, 128), (1, 8, 5000, 128)), id="split keys"),
        pytest.param(((2, 16, 300, 128), (2, 4, 300, 128), (2, 4, 300, 128)), id="groups"),
        pytest.param(((3, 6, 127, 64), (3, 2, 129, 64), (3, 2, 129, 64)), id="ragged"),
        pytest.param(((1, 4, 77, 80), (1, 4, 200, 80), (1, 4, 200, 80)), id="d80"),
        pytest.param(((1, 4, 130, 256), (1, 4, 130, 256), (1, 4, 130, 256)), id="d256"),
        pytest.param(((1, 2, 64, 128), (1, 2, 64, 128), (1, 2, 64, 64)), id="narrow values"),
    ],
)
def test_shapes(shapes: tuple[tuple[int, ...], ...]) -> None:
    jax_problems.attention_and_its_gradients("bfloat16", shapes)


@pytest.mark.parametrize(
    "options",
    [
        {"window": (40, 10)},
        {"causal": True, "softcap": 8.0, "scale": 0.2},
        {"alibi_slopes": np.linspace(0.1, 0.9, 4, dtype=np.float32)},
        {"causal": True, "prefix_lengths": np.array([3, 50], np.int32)},
        {"kv_lengths": np.array([90, 1], np.int32), "return_lse": True},
        {"sinks": np.linspace(-1, 1, 4, dtype=np.float32), "return_lse": True},
        {"mask": np.random.default_rng(3).random((2, 1, 70, 90)) < 0.5, "out_dtype": "float32"},
        {"batch_invariant": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_options(options: dict[str, Any]) -> None:
    """Beside the NumPy implementation."""
    q, k, v = (
        jax_problems.normal(i, 2, h, s, 64, dtype="float16")
        for i, (h, s) in enumerate(((4, 70), (2, 90), (2, 90)))
    )
    # a closed-over NumPy array is a constant of the compiled function
    found = jax.jit(lambda *x: ks.attention(*x, **options))(q, k, v)
    expected = kernelseam.attention(*(np.asarray(x) for x in (q, k, v)), **options, backend="numpy")
    pairs = zip(found, expected, strict=True) if "return_lse" in options else [(found, expected)]
    for f, e in pairs:
        assert f.dtype == e.dtype
        jax_problems.agree(f, e, "float16")


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("of", [(1.0, 0.5), (1.0, 0.0), (0.0, 1.0)])
def test_options_and_gradients_of_the_lse(layout: str, of: tuple[float, float]) -> None:
    jax_problems.options_and_gradients_of_the_lse(layout, of)


@pytest.mark.parametrize("problem", jax_problems.PROBLEMS, ids=lambda f: f.__name__)
def test_problems(problem: Callable[[], None]) -> None:
    problem()


@pytest.mark.parametrize(("m", "n", "k"), [(1, 4096, 512), (129, 257, 72), (1024, 512, 4096)])
@pytest.mark.parametrize("b_transposed", [False, True])
def test_products(m: int, n: int, k: int, b_transposed: bool) -> None:
    a = jax_problems.normal(0, 3, m, k, dtype="bfloat16")
    b = jax_problems.normal(1, 3, *((n, k) if b_transposed else (k, n)), dtype="bfloat16") / k**0.5
    dc = jax_problems.normal(2, 3, m, n, dtype="bfloat16")

    def gradients(product: Callable[..., Array]) -> Any:
        def run(a: Array, b: Array) -> Any:
            out, pull = jax.vjp(product, a, b)
            return out, *pull(dc)

        return jax.jit(run)(a, b)

    found = gradients(lambda a, b: ks.bmm(a, b, b_transposed=b_transposed))
    expected = gradients(lambda a, b: a @ (b.swapaxes(1, 2) if b_transposed else b))
    for f, e in zip(found, expected, strict=True):
        jax_problems.agree(f, e, "bfloat16")


def test_a_call_alone_in_a_graph_of_xlas() -> None:
    """Which replays it over other operands and results without asking Python."""
    options = {"xla_gpu_graph_min_graph_size": 1}
    product = jax.jit(ks.bmm, compiler_options=options)
    for seed in range(6):
        a = jax_problems.normal(seed, 4, 48, 64, dtype="bfloat16")
        b = jax_problems.normal(seed + 9, 4, 64, 32, dtype="bfloat16") / 8
        jax_problems.agree(product(a, b), a @ b, "bfloat16")


def test_products_and_gradients_of_many_in_one_function() -> None:
    """Enough for XLA to make a graph of what it may."""
    w = jax_problems.normal(0, 8, 96, 96, dtype="bfloat16") / 10
    x = jax_problems.normal(1, 8, 40, 96, dtype="bfloat16")

    def loss(product: Callable[..., Array], attend: Callable[..., Array]) -> Any:
        def run(w: Array, x: Array) -> Array:
            for _ in range(4):
                x = jnp.tanh(product(x, w))
                x = attend(*(x.reshape(8, 40, 3, 32).swapaxes(1, 2) for _ in range(3)))
                x = x.astype(w.dtype).swapaxes(1, 2).reshape(8, 40, 96)
            return jnp.sum(x.astype(jnp.float32) ** 2)

        return jax.jit(jax.value_and_grad(run, (0, 1)))

    ours = loss(ks.bmm, lambda *x: ks.attention(*x, causal=True))
    own = loss(jnp.matmul, lambda *x: jax_problems.own_attention(*x)[0])
    expected = jax.tree.leaves(own(w, x))
    for _ in range(3):
        for f, e in zip(jax.tree.leaves(ours(w, x)), expected, strict=True):
            jax_problems.agree(f, e, "bfloat16")


def chained(attend: Callable[..., Array]) -> Callable[..., Array]:
    """Attentions between XLA's own kernels: on another stream they would overtake one another."""

    def run(q: Array, k: Array, v: Array) -> Array:
        q, k = jnp.sin(q) * 2, jnp.cos(k)
        for _ in range(6):
            q = jnp.tanh(attend(q, k, v) * 3) + q
        return q

    return jax.jit(run)


@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
def test_launches_are_in_the_order_of_xlas_stream(heads: tuple[int, int]) -> None:
    ours = chained(lambda *x: ks.attention(*x, causal=True))
    own = chained(lambda *x: jax_problems.own_attention(*x)[0].astype(x[0].dtype))
    for turn in range(20):
        q, k, v = (
            jax_problems.normal(3 * turn + i, 2, h, 1024, 64, dtype="float16")
            for i, h in enumerate((heads[0], heads[1], heads[1]))
        )
        jax_problems.agree(ours(q, k, v), own(q, k, v), "float16")


def test_many_calls_in_flight() -> None:
    """Hundreds of launches and workspaces that nobody has waited for."""
    q, k, v = (
        jax_problems.normal(i, 4, 8, s, 64, dtype="bfloat16") for i, s in enumerate((1, 4096, 4096))
    )
    step = jax.jit(lambda q: ks.attention(q, k, v))
    results = [step(q * (1 + i / 100)) for i in range(300)]
    for i in (0, 1, 150, 299):
        expected = jax_problems.own_attention(q * (1 + i / 100), k, v, causal=False)[0]
        jax_problems.agree(results[i], expected, "bfloat16")


def test_lengths_in_device_memory() -> None:
    q, k, v = (jax_problems.normal(i, 2, 4, 40, 32) for i in range(3))
    step = jax.jit(lambda lengths: ks.attention(q, k, v, kv_lengths=lengths))
    for lengths in ([40, 1], [7, 23]):
        found = step(jnp.asarray(lengths, jnp.int32))
        for b, n in enumerate(lengths):
            expected = jax_problems.own_attention(
                *(x[b : b + 1, :, : n if x is not q else 40] for x in (q, k, v)), causal=False
            )[0]
            jax_problems.agree(found[b : b + 1], expected)


def test_nothing_is_copied_to_the_host() -> None:
    q, k, v = (jax_problems.normal(i, 1, 4, 128, 64, dtype="float16") for i in range(3))
    step = jax.jit(jax.grad(lambda q: ks.attention(q, k, v).astype(jnp.float32).sum()))
    step(q)
    with jax.transfer_guard("disallow"):
        step(q)
    text = step.lower(q).as_text()
    assert "xla_buffer_python_gpu_callback" in text
    assert "xla_ffi_python_gpu_callback" not in text


def test_calls_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (jax_problems.normal(i, 1, 4, 128, 64, dtype="float16") for i in range(3))
    step = jax.jit(lambda q: ks.attention(q, k, v))
    first = np.asarray(step(q))
    monkeypatch.setattr(jax_device._Outline, "launch", lambda *_: pytest.fail("planned again"))
    for _ in range(3):
        assert np.array_equal(np.asarray(step(q)), first)


def test_a_failing_launch_is_jaxs_error_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    q = jax_problems.normal(0, 1, 1, 8, 32)
    step = jax.jit(lambda q: ks.attention(q, q, q))
    expected = np.asarray(step(q))

    def fails(_: Any) -> int:
        raise RuntimeError("no stream today")

    with monkeypatch.context() as patched, pytest.raises(Exception, match="no stream today"):
        patched.setattr(jax_device, "_stream", fails)
        step(q).block_until_ready()
    assert np.array_equal(np.asarray(step(q)), expected)


def test_what_no_kernel_takes_is_refused_while_jax_traces() -> None:
    q = jax_problems.normal(0, 1, 1, 8, 300)
    with pytest.raises(Unsupported, match="no tile of .* takes float32 with head dims 300 and 300"):
        jax.jit(lambda q: ks.attention(q, q, q, kv_lengths=jnp.asarray([8])))(q)
    with pytest.raises(InvalidValue, match="^k = "):
        jax.jit(lambda q: ks.attention(q, q[..., :8], q))(q)
