"""On an NVIDIA GPU, docs/cuda-graphs.md: every function and plan is captured in a graph and
replayed over contents that change, each time held against the oracle; what is refused leaves the
capture as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kernelseam as ks
import pytest
from kernelseam import planning
from kernelseam.errors import InvalidValue
from nvidia_gpu import DEVICE, RUNTIME, cupy

torch: Any = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("gpu is missing: torch sees no device here", allow_module_level=True)

from graph_problems import PROBLEMS, Tensors, hold, normal, paged  # noqa: E402
from kernelseam.interop import torch as differentiable  # noqa: E402
from kernelseam_cuda import bindings  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    # torch's own, where a graph is refused everything that was to be in it
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
]
FUNCTIONS = [n for n in PROBLEMS if not n.endswith("lists")]


def by_torch(run: Callable[[int], Any]) -> tuple[Any, Callable[[], None]]:
    """What ``run(stream)`` returned while torch captured it, and the graph's replay."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run(torch.cuda.current_stream().cuda_stream)
    return made, graph.replay


def by_the_driver(run: Callable[[int], Any]) -> tuple[Any, Callable[[], None]]:
    """The same by the driver alone, on a stream that no library knows."""
    api = bindings.driver()
    stream = bindings.call("cuStreamCreate", 1)  # CU_STREAM_NON_BLOCKING
    mode = api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    bindings.call("cuStreamBeginCapture", stream, mode)
    made = run(int(stream))
    graph = bindings.call("cuStreamEndCapture", stream)
    executable = bindings.call("cuGraphInstantiate", graph, 0)
    return made, lambda: bindings.call("cuGraphLaunch", executable, stream)


def by_cupy(run: Callable[[int], Any]) -> tuple[Any, Callable[[], None]]:
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        made = run(stream.ptr)
        graph = stream.end_capture()
    return made, lambda: graph.launch(stream)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("capture", [by_torch, by_the_driver, by_cupy])
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_call_is_replayed(name: str, capture: Callable[..., Any]) -> None:
    problem = PROBLEMS[name]()
    results = problem.results()
    plan = problem.plan(results)[0]
    call = plan.bind()
    if plan.implementation.startswith("cublas"):
        call()  # the library's kernels are its own to load
    torch.cuda.synchronize()
    _, replay = capture(call)
    hold(problem, results, replay)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_replayed(name: str) -> None:
    problem = PROBLEMS[name]()
    function = problem.function
    assert function is not None
    problem.renew(0)
    function()
    torch.cuda.synchronize()
    results, replay = by_torch(lambda _: function())
    # memory that a graph's own pool has, and others may not take
    beside = [torch.full_like(x, 7) for x in results.values() for _ in range(4)]
    hold(problem, results, replay)
    assert all((x == 7).all() for x in beside)


@pytest.mark.parametrize("name", ["attention-shared", "paged", "bmm-shared", "qkv-paged", "merge"])
def test_a_first_call_is_captured(name: str) -> None:
    """Planned, loaded and bound while the stream is captured."""
    problem = PROBLEMS[name]()
    function = problem.function
    assert function is not None
    problem.renew(0)
    planning.forget()
    torch.cuda.synchronize()
    results, replay = by_torch(lambda _: function())
    hold(problem, results, replay)


@pytest.mark.parametrize("product", ["bmm", "matmul2d"])
def test_gradients_of_products_are_replayed(product: str) -> None:
    lead = (3,) if product == "bmm" else ()
    dc, a, b = normal(*lead, 60, 72), normal(*lead, 60, 96), normal(*lead, 96, 72)
    function = getattr(ks, f"{product}_bwd")
    function(dc, a, b)
    made, replay = by_torch(lambda _: function(dc, a, b))
    for _ in range(3):
        for x in (dc, a, b):
            x.normal_()
        replay()
        for found, want in zip(
            made, (dc.double() @ b.double().mT, a.double().mT @ dc.double()), strict=True
        ):
            assert torch.allclose(found.double(), want, rtol=2e-3, atol=2e-2)


def test_a_training_step_is_replayed() -> None:
    """Forward and backward through torch's autograd, in one graph."""
    x, w, out = (
        (normal(*s, dtype=torch.bfloat16) * 0.1).requires_grad_()
        for s in ((2, 128, 512), (768, 512), (512, 512))
    )

    def step(x: Any, w: Any, out: Any, ours: bool) -> Any:
        if ours:
            q, k, v = differentiable.fused_qkv_projection(x, w, None, 8, 2)
            y = differentiable.attention(q, k, v, causal=True)
            y = differentiable.fused_output_projection_residual(y, out, residual=x)
        else:
            heads = (x @ w.mT).unflatten(-1, (12, 64)).transpose(1, 2)
            q, k, v = heads.split([8, 2, 2], 1)
            y = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )
            y = y.transpose(1, 2).flatten(2) @ out.mT + x
        return torch.autograd.grad(y.float().square().mean(), (x, w, out))

    side = torch.cuda.Stream()  # as torch asks for: gradients are made on the forward's stream
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(x, w, out, True)
    torch.cuda.current_stream().wait_stream(side)
    made, replay = by_torch(lambda _: step(x, w, out, True))
    for _ in range(3):
        with torch.no_grad():
            for tensor in (x, w, out):
                tensor.normal_().mul_(0.1)
        replay()
        exact = [t.detach().double().requires_grad_() for t in (x, w, out)]
        for found, want in zip(made, step(*exact, False), strict=True):
            assert (found.double() - want).abs().max() < 2e-2 * want.abs().max()


def test_a_decoding_step_is_replayed_with_lengths_that_grow() -> None:
    """A graph that counts its own lengths up: 300 tokens without the host."""
    problem = paged("decode", most=400)
    problem.renew(0)
    problem.operands["kv_lengths"].copy_(torch.arange(1, 6))
    results = problem.results()
    call = problem.plan(results)[0].bind()
    torch.cuda.synchronize()

    def step(stream: int) -> None:
        call(stream)
        problem.operands["kv_lengths"].add_(1)

    _, replay = by_torch(step)
    plan, pointers = problem.plan(results)
    from kernelseam.oracle.verification import Verification

    for turn in range(300):
        if turn % 60 == 59:
            torch.cuda.synchronize()
            problem.operands["q"].normal_()
            verification = Verification(plan, pointers, RUNTIME)
            call()  # of the lengths as they are before the graph counts on
            torch.cuda.synchronize()
            verification.require()
            seen = results["out"].clone()
            replay()
            torch.cuda.synchronize()
            assert torch.equal(results["out"], seen)
        else:
            replay()
    torch.cuda.synchronize()
    assert problem.operands["kv_lengths"].tolist() == [301, 302, 303, 304, 305]


# ---- what is refused, and leaves the capture as it is


def refused_in_capture(attempt: Callable[[], object], message: str) -> None:
    """``attempt()`` is refused while torch captures; what was captured beside it is replayed."""
    x = torch.zeros(16, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        with pytest.raises(InvalidValue) as error:
            attempt()
        x.add_(1)
    assert str(error.value) == f"stream = one that is being captured in a graph: {message}"
    graph.replay()
    torch.cuda.synchronize()
    assert (x == 2).all()


CHECKED = (
    "check=True copies operands to the host, which synchronises. "
    "Bind without check, or launch outside of the capture."
)


def descriptor(a: Any, c: Any) -> Any:
    return ks.BatchedGemmStrided(A=a, B=a, C=c, M=64, N=64, K=64, batch=4)


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize(
    ("batch", "queries", "keys", "heads", "kv_heads", "dim"),
    [
        (1, 64, 4096, 32, 8, 128),
        (1, 128, 16384, 32, 8, 128),
        (1, 1024, 1024, 16, 16, 64),
        (8, 128, 128, 32, 8, 64),
    ],
)
def test_launches_that_start_early_read_what_those_before_wrote(
    batch: int, queries: int, keys: int, heads: int, kv_heads: int, dim: int, between: bool
) -> None:
    """Attention of results of attention, on a stream and in a graph, alone and with torch's kernels
    in between: the bits of calls that are waited for."""

    def rows(n: int, heads: int) -> Any:
        return torch.randn(batch, n, heads, dim, device="cuda", dtype=torch.bfloat16)

    first, k, v = 2 * rows(queries, heads), rows(keys, kv_heads), rows(keys, kv_heads)
    there, back = first.clone(), torch.empty_like(first)
    calls = [
        ks.plan(
            ks.Attention.from_arrays(q, k, v, out, None, layout="bshd", causal=True), device=DEVICE
        ).bind()
        for q, out in ((there, back), (back, there))
    ]

    def run(stream: int, waits: bool = False) -> None:
        for i in range(20):
            calls[i % 2](stream)
            if between:
                (back, there)[i % 2].mul_(1.5)
            if waits:
                torch.cuda.synchronize()

    def results(run: Callable[[], Any]) -> list[Any]:
        there.copy_(first)
        torch.cuda.synchronize()
        run()
        torch.cuda.synchronize()
        return [there.clone(), back.clone()]

    stream = torch.cuda.current_stream().cuda_stream
    expected = results(lambda: run(stream, waits=True))
    assert all(bool(torch.isfinite(x).all()) for x in expected)
    _, replay = by_torch(run)
    for again in 3 * [lambda: run(stream), replay]:
        assert all(map(torch.equal, results(again), expected))


def test_checked_calls_are_refused() -> None:
    a, c = normal(4, 64, 64), torch.empty(4, 64, 64, dtype=torch.float16, device="cuda")
    plan = ks.plan(descriptor(a, c), device=DEVICE)
    checked = plan.bind(check=True)
    refused_in_capture(lambda: plan.bind(check=True), CHECKED)
    refused_in_capture(checked, CHECKED)


def test_plans_that_zero_their_workspace_are_bound_before() -> None:
    problem = paged("decode")
    plan = problem.plan(problem.results())[0]
    assert plan.zeroing is not None
    refused_in_capture(
        plan.bind,
        "binding this plan sets the start of its workspace to 0 and synchronises. "
        "Bind before the capture.",
    )


def test_lists_on_the_host_are_bound_before() -> None:
    message = (
        "lists of addresses are copied to the device first, which synchronises. "
        "Bind before the capture, over lists in device memory where they change."
    )
    held = normal(16, 64, 64)  # of which each list has three that are not evenly spaced
    listed = ks.BatchedGemmPointers(
        **{
            f"{n}_ptrs": [held[i], held[i + 1], held[i + 3]]
            for n, i in (("A", 0), ("B", 4), ("C", 8))
        },
        M=64,
        N=64,
        K=64,
        batch=3,
    )
    plan = ks.plan(listed, device=DEVICE)
    refused_in_capture(plan.bind, message)


@pytest.mark.parametrize("repeated", [False, True])
def test_workspaces_of_another_stream_are_refused(repeated: bool) -> None:
    """Which torch would give to others once the function has returned."""
    problem = paged("shared")
    problem.renew(2)
    q, k, v, table, lengths = problem.operands.values()

    def call(stream: Any = None) -> Any:
        return ks.attention_paged(
            q, k, v, table, lengths, max_seqlen_k=1500, implementation="shared", stream=stream
        )

    planning.forget()
    for _ in range(2 * repeated):
        call()
    api, captured = bindings.driver(), torch.cuda.Stream()
    torch.cuda.synchronize()
    mode = api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    bindings.call("cuStreamBeginCapture", captured.cuda_stream, mode)
    with pytest.raises(InvalidValue) as error:
        call(captured.cuda_stream)
    assert str(error.value) == (
        "stream = one that is being captured in a graph: this call's workspace is freed when it "
        "returns, and the graph would use it later. Capture torch's tensors on torch's current "
        "stream, or plan and bind before the capture."
    )
    bindings.call("cuStreamEndCapture", captured.cuda_stream)
    torch.cuda.synchronize()


def test_the_runtime_sees_captures() -> None:
    assert not RUNTIME.is_capturing(DEVICE)
    seen: Tensors = {}

    def look(stream: int) -> None:
        seen.update(current=RUNTIME.is_capturing(DEVICE), own=RUNTIME.is_capturing(DEVICE, stream))
        seen.update(other=RUNTIME.is_capturing(DEVICE, other.cuda_stream))

    other = torch.cuda.Stream()
    by_torch(look)
    assert seen == {"current": True, "own": True, "other": False}
    by_cupy(look)
    assert seen == {"current": True, "own": True, "other": False}
    by_the_driver(look)
    assert seen == {"current": False, "own": True, "other": False}
