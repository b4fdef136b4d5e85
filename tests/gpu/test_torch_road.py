"""On an NVIDIA GPU: calls on torch's tensors that repeat or have new extents, by streams, threads,
graphs and devices."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import kernelseam
import pytest
from kernelseam import Attention, plan, planning
from kernelseam.ops import calling
from kernelseam.plugins import plugins

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.gpu
BACKEND = plugins().registry.backends.get("cuda")
if BACKEND is None or not BACKEND.runtime.devices() or not torch.cuda.is_available():
    pytest.skip(
        "gpu is missing: no NVIDIA device here, or a torch without CUDA", allow_module_level=True
    )


def operands(device: str = "cuda:0") -> tuple[Any, ...]:
    return tuple(torch.randn(1, 4, 128, 64, dtype=torch.float16, device=device) for _ in range(3))


def close(found: Any, q: Any, k: Any, v: Any) -> None:
    torch.cuda.synchronize(found.device)
    want = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in (q, k, v)))
    torch.testing.assert_close(found.double(), want, rtol=1e-2, atol=1e-2)


def test_a_call_that_repeats_describes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    planning.forget()
    q, k, v = operands()
    close(kernelseam.attention(q, k, v), q, k, v)
    monkeypatch.setattr(calling, "describe", lambda *_: pytest.fail("an array was described"))
    q, k, v = operands()
    for _ in range(3):
        close(kernelseam.attention(q, k, v), q, k, v)


def test_new_extents_are_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Causal and not, one query and many, by every kernel that dispatch chooses."""
    planning.forget()
    rng = random.Random(0)

    def check(rows: int, keys: int, causal: bool) -> None:
        q, k, v = (
            torch.randn(2, 4, n, 64, dtype=torch.float16, device="cuda:0")
            for n in (rows, keys, keys)
        )
        seen = torch.ones(rows, keys, dtype=torch.bool, device="cuda:0").tril(keys - rows)
        want = torch.nn.functional.scaled_dot_product_attention(
            q.double(), k.double(), v.double(), attn_mask=seen if causal else None
        )
        found = kernelseam.attention(q, k, v, causal=causal)
        torch.testing.assert_close(found.double(), want, rtol=1e-2, atol=1e-2)

    kinds = [(1, False), (1, True), (300, True), (300, False)]
    for keys in (400, 401, 402, 500, 501):
        for rows, causal in kinds:
            check(rows, keys, causal)
    monkeypatch.setattr(calling, "describe", lambda *_: pytest.fail("an array was described"))
    for _ in range(20):
        keys = rng.randrange(402, 448)  # of classes that are known
        for rows, causal in kinds:
            check(rows, keys, causal)


def test_streams_and_threads_and_a_graph() -> None:
    q, k, v = operands()
    for _ in range(2):
        kernelseam.attention(q, k, v)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        on_side = kernelseam.attention(q, k, v)
    close(on_side, q, k, v)
    with ThreadPoolExecutor(4) as pool:  # whose threads have no context yet
        for found in pool.map(lambda _: kernelseam.attention(q, k, v), range(40)):
            close(found, q, k, v)
    call = plan(Attention.from_arrays(q, k, v, out := torch.empty_like(q))).bind()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result()
    close(out, q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernelseam.attention(q, k, v)
    q.copy_(torch.randn_like(q))
    graph.replay()
    close(captured, q, k, v)


def test_products_by_streams_that_change() -> None:
    a, b = (torch.randn(4, 128, 128, dtype=torch.float16, device="cuda:0") for _ in range(2))
    streams = [None, torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(3):
        for implementation in ("shared", None):
            for stream in streams:
                with torch.cuda.stream(stream):
                    found = kernelseam.bmm(a, b, implementation=implementation)
                torch.cuda.synchronize()
                torch.testing.assert_close(found, a @ b, rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one device here")
def test_a_device_that_is_not_current() -> None:
    for device in ("cuda:1", "cuda:0"):
        q, k, v = operands(device)
        for current in (0, 1, 0):
            with torch.cuda.device(current):
                found = kernelseam.attention(q, k, v)
                assert torch.cuda.current_device() == current and str(found.device) == device
            close(found, q, k, v)
