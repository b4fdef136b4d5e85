"""On an NVIDIA GPU: ``kernelseam.interop.jax`` on JAX's platform "cuda", beside JAX's own
operations: on XLA's stream, over its memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import kernelseam.interop.jax as ks
import numpy as np
import pytest
from kernelseam.errors import InvalidValue, Unsupported
from kernelseam.plugins import plugins

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other tests want memory, too
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


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("of", [(1.0, 0.5), (1.0, 0.0), (0.0, 1.0)])
def test_options_and_gradients_of_the_lse(layout: str, of: tuple[float, float]) -> None:
    jax_problems.options_and_gradients_of_the_lse(layout, of)


def test_bmm_and_its_gradients_under_jit() -> None:
    jax_problems.bmm_and_its_gradients()


def test_vmap_of_gradients() -> None:
    jax_problems.vmap_of_gradients()


def test_training_step_in_a_scan() -> None:
    jax_problems.training_step_in_a_scan()


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


def test_what_no_kernel_takes_is_refused_while_jax_traces() -> None:
    q = jax_problems.normal(0, 1, 1, 8, 300)
    with pytest.raises(Unsupported, match="no tile of .* takes float32 with head dims 300 and 300"):
        jax.jit(lambda q: ks.attention(q, q, q, kv_lengths=jnp.asarray([8])))(q)
    with pytest.raises(InvalidValue, match="^k = "):
        jax.jit(lambda q: ks.attention(q, q[..., :8], q))(q)
