"""What of torch follows calls whose tensors have memory: torch.jit.trace, dispatch modes, which
count and record, and backward passes of batched gradients."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import kernelseam
import pytest
from kernelseam.interop import torch as ks

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.utils.flop_counter import (  # noqa: E402
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)
from torch_operators import (  # noqa: E402
    S_K,
    S_Q,
    B,
    D,
    G,
    H,
    cells,
    functions,
    gradient_functions,
    pages,
    qkv,
    several,
)

FUNCTIONS = tuple(functions())
DIFFERENTIABLE = [n for n in FUNCTIONS if n != "attention_paged"]
HOMES = ("plain", "differentiable")


def calls_of(name: str, home: str) -> Callable[..., Any]:
    call: Any = getattr(functions()[name], home)
    return call or ks.attention_paged


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_jit_trace_records_the_operator(name: str, home: str) -> None:
    """Also where the same call has a shortcut, whose result would be a constant of the trace."""
    call = calls_of(name, home)
    operands = tuple(x.detach() for x in functions()[name].operands)
    for _ in range(3):
        call(*operands)
    traced = torch.jit.trace(call, operands, check_trace=False)
    assert f"kernelseam::{name}" in str(traced.graph)
    others = tuple(x * 2 if x.is_floating_point() else x for x in operands)
    for a, b in zip(several(traced(*others)), several(call(*others)), strict=True):
        torch.testing.assert_close(a, b)


def counted(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as mode:
        call()
    return int(mode.get_total_flops())


_DENSE = (B, H, S_Q, D), (B, H, S_K, D), (B, H, S_K, D)
_PACKED = [((1, H, n, D), (1, H, m, D), (1, H, m, D)) for n, m in ((2, 5), (4, 4))]
_PAGED = [((1, H, 1, D), (1, H, n, D), (1, H, n, D)) for n in (9, 6)]
FLOPS = {
    "attention": (
        sdpa_flop_count(*_DENSE),
        sdpa_backward_flop_count((B, H, S_Q, D), *_DENSE),
    ),
    "attention_varlen": (
        sum(sdpa_flop_count(*x) for x in _PACKED),
        sum(sdpa_backward_flop_count(x[0], *x) for x in _PACKED),
    ),
    "attention_paged": (sum(sdpa_flop_count(*x) for x in _PAGED), 0),
    "bmm": (2 * B * 5 * 7 * 4, 4 * B * 5 * 7 * 4),
    "matmul2d": (2 * 5 * 7 * 4, 4 * 5 * 7 * 4),
    "grouped_mm": (2 * 5 * 7 * 4, 4 * 5 * 7 * 4),
    "grouped_mm_list": (2 * (5 * 7 * 4 + 6 * 12 * 3), 4 * (5 * 7 * 4 + 6 * 12 * 3)),
    "fused_qkv_projection": (2 * B * S_Q * 12 * 64, 4 * B * S_Q * 12 * 64),
    "fused_output_projection_residual": (2 * B * S_Q * 12 * 32, 4 * B * S_Q * 12 * 32),
    "merge_states": (0, 0),
}
"""Of the forward and of the backward, as torch counts its own attention and products."""


_FIRST = """
import os, torch; from torch.utils.flop_counter import FlopCounterMode
from kernelseam.interop.torch import attention, attention_varlen
q, rows, at = torch.ones(1, 1, 10, 4), torch.ones(10, 1, 4), torch.tensor([0, 10]).int()
for looked_up in (False, True):
    if os.fork():
        os.wait()
        continue
    before, within = FlopCounterMode(display=False), FlopCounterMode(display=False)
    attention(q, q, q)
    if looked_up: torch.ops.kernelseam.attention
    with within: attention(q, q, q)
    with before: attention_varlen(rows, rows, rows, at, at, 10, 10)
    print(within.get_total_flops(), before.get_total_flops(), flush=True)
    os._exit(0)
"""


def test_counters_count_that_were_made_before_operators_are_registered() -> None:
    """In processes where none is, and in such where one was looked up."""
    done = subprocess.run(
        [sys.executable, "-c", _FIRST],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )
    expected = sdpa_flop_count(*[(1, 1, 10, 4)] * 3)
    assert (done.stdout, done.stderr) == (f"{expected} {expected}\n" * 2, "")


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_flops_are_counted(name: str, home: str) -> None:
    call, operands = calls_of(name, home), functions()[name].operands
    forward, backward = FLOPS[name]
    assert counted(lambda: call(*(x.detach() for x in operands))) == forward
    if home == "differentiable" and name in DIFFERENTIABLE:

        def trained() -> None:
            sum(x.nan_to_num(neginf=0).sum() for x in several(call(*operands))).backward()

        assert counted(trained) == forward + backward


def test_flops_of_pages_written_and_of_contents_that_are_not_known() -> None:
    q, k, v, table, now = pages()
    with FlopCounterMode(display=False) as mode:
        kernelseam.attention_paged(*(x.to("meta") for x in (q, k, v, table, now)))
    whole = table.shape[1] * k.shape[1]
    assert mode.get_total_flops() == B * sdpa_flop_count(
        (1, H, 1, D), (1, H, whole, D), (1, H, whole, D)
    )
    x, w = cells(B, 4, 12, grad=False), cells((H + 2 * G) * D, 12, grad=False)
    into = {"k_pages": k.clone(), "v_pages": v.clone(), "block_table": table}
    assert counted(lambda: kernelseam.fused_qkv_projection(x, w, None, H, G, **into)) == (
        2 * B * 4 * 12 * 64
    )


@pytest.mark.parametrize("name", gradient_functions())
def test_gradients_on_arrays_are_followed(name: str) -> None:
    """By a mode that counts, and by torch.vmap."""
    call, operands = gradient_functions()[name]
    assert counted(lambda: call(*operands)) > 0
    many = [torch.stack([x, 2 * x]) if x.is_floating_point() else x for x in operands]
    dims = tuple(0 if x.is_floating_point() else None for x in operands)
    got = torch.vmap(call, in_dims=dims)(*many)
    for i in (0, 1):
        want = call(*[x if d is None else x[i] for x, d in zip(many, dims, strict=True)])
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a[i], b)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_batched_gradients_are_those_of_each(name: str) -> None:
    function = functions()[name]
    wanted = [x for x in function.operands if x.requires_grad]
    made = several(function.differentiable(*function.operands))  # type: ignore[misc]
    gradients = [torch.stack([torch.full_like(x, 0.5), x.detach().cos()]) for x in made]
    got = torch.autograd.grad(made, wanted, gradients, is_grads_batched=True, retain_graph=True)
    for i in (0, 1):
        one = [x[i] for x in gradients]
        want = torch.autograd.grad(made, wanted, one, retain_graph=True)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a[i], b)


@pytest.mark.parametrize("result", [0, 1], ids=["out", "lse"])
def test_vectorized_jacobian(result: int) -> None:
    q, k, v = (x.detach().double()[:1, :2, :3] for x in qkv())

    def call(q: Any) -> Any:
        return ks.attention(q, k, v, causal=True, return_lse=True)[result]

    got, want = (
        torch.autograd.functional.jacobian(call, q, vectorize=vectorize)
        for vectorize in (True, False)
    )
    assert want.abs().max() > 0.01
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("learnt", [(1,), (2,), (1, 2), (0,)], ids=str)
@pytest.mark.parametrize("name", ["fused_qkv_projection", "fused_output_projection_residual"])
def test_gradients_of_some_operands_alone(name: str, learnt: tuple[int, ...]) -> None:
    """torch leaves out the last operands of an operator where they are None, as an input is that
    no gradient needs."""
    call = calls_of(name, "differentiable")
    operands = [x.detach().clone() for x in functions()[name].operands]
    for i in learnt:
        operands[i].requires_grad_()
    eager = several(call(*operands))
    with FlopCounterMode(display=False):
        followed = several(call(*operands))
    asked = [operands[i] for i in learnt]
    want = torch.autograd.grad(sum(x.square().sum() for x in eager), asked)
    got = torch.autograd.grad(sum(x.square().sum() for x in followed), asked)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
