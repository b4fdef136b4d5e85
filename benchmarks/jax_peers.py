"""JAX on a GPU: attention beside cuDNN's through jax.nn.dot_product_attention, products beside
jnp.matmul, and what a small call costs the host.

    python -m benchmarks.jax_peers

Each function is compiled by jax.jit. Sides take turns; a time is the median over the turns of the
mean of calls that nobody waits for one by one, so that it holds the host's part only where the GPU
is faster than the host. The L2 cache is not cleared. Errors are against JAX's own operations in
float32. Without a GPU it runs small on the host, beside JAX's own attention, which shows that it
runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import kernelseam.interop.jax as ks
from kernelseam.interop import jax_device

Array = Any
Step = Callable[..., Any]
TURNS = 7
ATTENTIONS = (
    # B, H, H_kv, S, D, causal
    (4, 16, 16, 4096, 64, True),
    (2, 16, 16, 4096, 128, False),
    (2, 16, 16, 4096, 128, True),
    (2, 32, 8, 4096, 128, True),
    (1, 16, 16, 16384, 128, True),
    (32, 16, 16, 512, 128, True),
)
PRODUCTS = (
    (1, 8192, 8192, 8192),
    (1, 4096, 4096, 4096),
    (16, 1024, 1024, 1024),
    (64, 256, 256, 256),
    (64, 256, 256, 64),
    (8, 64, 64, 64),
)
CHAIN = 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=["attention", "products", "host"])
    parser.add_argument("--seconds", type=float, default=0.03, help="of one turn of one side")
    options = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    print(f"JAX {jax.__version__}, {jax.devices()[0].device_kind}, bf16\n", flush=True)
    if "attention" in options.only:
        print("| attention | pass | ours ms | cuDNN ms | cuDNN / ours | error, ours | cuDNN |")
        print("|---" * 7 + "|", flush=True)
        for shape in ATTENTIONS if on_gpu else [(1, 2, 2, 32, 16, True)]:
            _attention(shape, on_gpu, options.seconds)
    if "products" in options.only:
        print("\n| product B×M×N×K | ours ms | XLA ms | XLA / ours | the same in a graph |")
        print("|---" * 5 + "|", flush=True)
        for product in PRODUCTS if on_gpu else [(2, 16, 16, 16)]:
            _product(product, on_gpu, options.seconds)
    if "host" in options.only:
        print(
            "\n| small calls, µs each | ours in graphs | ours | XLA or cuDNN |\n" + "|---" * 4 + "|"
        )
        _host(on_gpu, options.seconds)


def _attention(shape: tuple[Any, ...], on_gpu: bool, turn: float) -> None:
    batch, heads, kv_heads, rows, dim, causal = shape
    q, k, v, dout = (
        _normal(i, batch, rows, h, dim) for i, h in enumerate((heads, kv_heads, kv_heads, heads))
    )
    ours, peer = _ours(causal), _peer(causal, on_gpu)
    exact = jax.jit(partial(_exact, causal=causal))(q, k, v) if rows <= 4096 else None
    errors = [
        "" if exact is None else f"{float(_error(jax.jit(x)(q, k, v), exact)):.1e}"
        for x in (ours, peer)
    ]
    name = f"{batch}×{heads}/{kv_heads}×{rows}×{dim}{' causal' if causal else ''}"
    for direction, make, arrays in (
        ("forward", jax.jit, (q, k, v)),
        ("forward and gradient", _with_gradient, (q, k, v, dout)),
    ):
        a, b = _in_turns([make(ours), make(peer)], arrays, turn)
        cells = (name, direction, f"{a * 1e3:.3f}", f"{b * 1e3:.3f}", f"{b / a:.2f}", *errors)
        print("| " + " | ".join(cells) + " |", flush=True)
        errors = ["", ""]


def _product(shape: tuple[int, int, int, int], on_gpu: bool, turn: float) -> None:
    """Each alone in a function, as XLA runs it and with a graph (command buffer) of one kernel."""
    batch, m, n, k = shape
    arrays = _normal(0, batch, m, k), _normal(1, batch, k, n)
    graph = {"compiler_options": {"xla_gpu_graph_min_graph_size": 1}} if on_gpu else {}
    sides = [jax.jit(f, **o) for o in ({}, graph) for f in (partial(ks.bmm), partial(jnp.matmul))]
    a, b, *graphs = _in_turns(sides, arrays, turn)
    cells = [f"{batch}×{m}×{n}×{k}", f"{a * 1e3:.4f}", f"{b * 1e3:.4f}", f"{b / a:.2f}"]
    cells.append(f"{graphs[0] * 1e3:.4f}, {graphs[1] * 1e3:.4f}: {graphs[1] / graphs[0]:.2f}")
    print("| " + " | ".join(cells) + " |", flush=True)


def _host(on_gpu: bool, turn: float) -> None:
    """Calls too small for the GPU to matter, within XLA's graphs (its command buffers) and not."""
    q, x = _normal(0, 1, 64, 4, 64), _normal(1, 64 if on_gpu else 1, 256, 256) / 16
    attend, peer = _ours(True), _peer(True, on_gpu)

    def attentions(f: Step, count: int) -> Step:
        def run(q: Array) -> Array:
            for _ in range(count):
                q = f(q, q, q)
            return q

        return run

    def between(f: Step, count: int) -> Step:
        def run(q: Array) -> Array:
            for _ in range(count):
                q = jnp.tanh(f(q, q, q)) * 0.5 + q
            return q

        return run

    def gradient(f: Step, count: int) -> Any:
        layer = between(f, count)
        return jax.grad(lambda q: layer(q).astype(jnp.float32).sum())

    def products(f: Step, count: int) -> Step:
        def run(x: Array) -> Array:
            for _ in range(count):
                x = f(x, x)
            return x

        return run

    for name, make, count, array, ours, theirs in (
        ("attention, alone", attentions, 1, q, attend, peer),
        (f"… one of {CHAIN}", attentions, CHAIN, q, attend, peer),
        (f"… one of {CHAIN}, XLA's kernels between", between, CHAIN, q, attend, peer),
        ("… and their gradients", gradient, CHAIN, q, attend, peer),
        ("bmm 64×256×256×256, alone", products, 1, x, ks.bmm, jnp.matmul),
        ("… one of 10", products, 10, x, ks.bmm, jnp.matmul),
    ):
        sides = []
        for f, graphs in ((ours, True), (ours, False), (theirs, True)):
            step = jax.jit(make(f, count))
            with _graphs(graphs):
                jax.block_until_ready(step(array))
            sides.append(step)
        result = (x / count * 1e6 for x in _in_turns(sides, (array,), turn))
        print(f"| {name} | " + " | ".join(f"{x:.1f}" for x in result) + " |", flush=True)


@contextmanager
def _graphs(allowed: bool) -> Iterator[None]:
    """What is traced within may be put into XLA's graphs, or not."""
    device: Any = jax_device
    own = device.buffer_callback
    if not allowed:
        device.buffer_callback = lambda *a, command_buffer_compatible, **k: own(*a, **k)
    try:
        yield
    finally:
        device.buffer_callback = own


def _normal(seed: int, *shape: int) -> Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def _ours(causal: bool) -> Step:
    return partial(ks.attention, causal=causal, layout="bshd")


def _peer(causal: bool, on_gpu: bool) -> Step:
    return partial(
        jax.nn.dot_product_attention,
        is_causal=causal,
        implementation="cudnn" if on_gpu else None,
    )


def _with_gradient(attend: Step) -> Any:
    def run(q: Array, k: Array, v: Array, dout: Array) -> Any:
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(dout)

    return jax.jit(run)


def _exact(q: Array, k: Array, v: Array, causal: bool) -> Array:
    """Of the first entry, in float32."""
    q, k, v = (x[:1].astype(jnp.float32) for x in (q, k, v))
    with jax.default_matmul_precision("highest"):
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="xla")


def _error(result: Array, exact: Array) -> Array:
    """|result − exact| / |exact|, Euclidean."""
    return jnp.linalg.norm(result[:1].astype(jnp.float32) - exact) / jnp.linalg.norm(exact)


def _in_turns(sides: Iterable[Step], arrays: tuple[Array, ...], turn: float) -> list[float]:
    """Seconds a call of each."""
    sides, calls, times = list(sides), [], []
    for side in sides:
        _seconds(side, arrays, 2)
        calls.append(max(1, round(turn / _seconds(side, arrays, 3))))
    for _ in range(TURNS):
        times.append([_seconds(s, arrays, n) for s, n in zip(sides, calls, strict=True)])
    return [statistics.median(x) for x in zip(*times, strict=True)]


def _seconds(step: Step, arrays: tuple[Array, ...], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        result = step(*arrays)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


if __name__ == "__main__":
    main()
