"""Scores and masks of users where torch compiles, exports or traces the call: one operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kernelseam as ks
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is missing: it is what compiles")
from kernelseam.interop import torch as ks_torch  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch.nn.attention.flex_attention import BlockMask  # noqa: E402

B, H, S, D = 2, 4, 40, 16
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0])


def inputs(*shape: int, gradients: bool = False) -> list[Any]:
    torch.manual_seed(0)
    return [torch.randn(shape or (B, H, S, D), requires_grad=gradients) for _ in range(3)]


def score_of(table: Any, flag: bool = False) -> Callable[..., Any]:
    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + table[h] * (j - i) if flag else s + table[h] * (i - j)

    return score


def mask_of(w: Any) -> Callable[..., Any]:
    return lambda b, h, i, j: abs(i - j) < w


def by_a_global(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s + SLOPES[h] * (i - j)


def counted(function: Callable[..., Any]) -> tuple[Callable[..., Any], Any]:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=counter, fullgraph=True), counter


@pytest.mark.parametrize("attention", [ks.attention, ks_torch.attention])
def test_other_functions_of_known_code_run_what_was_compiled(attention: Any) -> None:
    """Over other tensors; a constant that they capture is guarded."""

    def attend(q: Any, k: Any, v: Any, score: Any, mask: Any) -> Any:
        return attention(q, k, v, score_mod=score, mask_mod=mask)

    compiled, counter = counted(attend)
    q, k, v = inputs()
    mods = [(score_of(torch.rand(H)), mask_of(9)) for _ in range(3)]
    for given in mods:
        torch.testing.assert_close(compiled(q, k, v, *given), attend(q, k, v, *given))
    assert counter.frame_count == 1
    (graph,) = counter.graphs
    called = [n.target for n in graph.graph.nodes if n.op == "call_function"]
    assert [t for t in called if "kernelseam" in str(t)] == [
        torch.ops.kernelseam.attention_mods.default
    ]
    for given in (
        (score_of(torch.rand(H), flag=True), mask_of(9)),
        (score_of(torch.rand(H)), mask_of(7)),
        (by_a_global, mask_of(7)),
    ):
        torch.testing.assert_close(compiled(q, k, v, *given), attend(q, k, v, *given))
    assert counter.frame_count > 1


def test_gradients() -> None:
    def loss(q: Any, k: Any, v: Any, score: Any, mask: Any) -> Any:
        return ks_torch.attention(q, k, v, score_mod=score, mask_mod=mask).square().sum()

    compiled, _ = counted(loss)
    leaves, mods = inputs(gradients=True), (score_of(torch.rand(H)), mask_of(9))
    got, want = (torch.autograd.grad(f(*leaves, *mods), leaves) for f in (compiled, loss))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)
    learnt = score_of(torch.rand(H, requires_grad=True))
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match="captured_0.requires_grad"):
        compiled(*leaves, learnt, mods[1])


def test_block_masks() -> None:
    def attend(q: Any, k: Any, v: Any, blocks: Any) -> Any:
        return ks_torch.attention(q, k, v, block_mask=blocks)

    q, k, v = inputs()
    counts = torch.tensor([[[1, 2, 3]]], dtype=torch.int32)
    indices = torch.tensor([[[[0, 0, 0], [0, 1, 0], [0, 1, 2]]]], dtype=torch.int32)
    of_torch = BlockMask.from_kv_blocks(
        counts, indices, BLOCK_SIZE=16, mask_mod=lambda b, h, i, j: i >= j, seq_lengths=(S, S)
    )
    own = [ks.block_mask(mask_of(9), None, None, S, S, block_size=n) for n in (16, 8, 32)]
    compiled, _ = counted(attend)
    for blocks in (of_torch, *own):
        torch.testing.assert_close(compiled(q, k, v, blocks), attend(q, k, v, blocks))


def test_packed() -> None:
    offsets = torch.tensor([0, 13, 40], dtype=torch.int32)

    def attend(q: Any, k: Any, v: Any, score: Any, mask: Any) -> Any:
        given = {"score_mod": score, "mask_mod": mask}
        return ks_torch.attention_varlen(q, k, v, offsets, offsets, 27, 27, **given)

    compiled, _ = counted(attend)
    given = (*inputs(40, H, D), score_of(torch.rand(H)), mask_of(9))
    torch.testing.assert_close(compiled(*given), attend(*given))


def test_export() -> None:
    score, mask = score_of(torch.rand(H)), mask_of(9)

    class Model(torch.nn.Module):  # type: ignore[misc]
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return ks_torch.attention(q, k, v, score_mod=score, mask_mod=mask)

    q, k, v = inputs()
    exported = torch.export.export(Model(), (q, k, v))
    torch.testing.assert_close(exported.module()(q, k, v), Model()(q, k, v))


def test_vmap() -> None:
    """An element at a time: b and h count within each."""
    q, k, v = (x[None].expand(3, -1, -1, -1, -1) for x in inputs())
    mods = {"score_mod": score_of(torch.rand(H)), "mask_mod": mask_of(9)}
    got = torch.func.vmap(lambda *x: ks_torch.attention(*x, **mods))(q, k, v)
    torch.testing.assert_close(got[1], ks_torch.attention(q[1], k[1], v[1], **mods))


def test_too_many_arrays() -> None:
    tables = [np.full(S, n, np.float32) for n in range(9)]

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        for t in tables:
            s = s + t[i]
        return s

    x = torch.zeros(1, 1, S, D, device="meta")
    with pytest.raises(ks.errors.InvalidValue, match="capture 9 arrays: capture at most 8"):
        ks_torch.attention(x, x, x, score_mod=score)


@pytest.mark.parametrize("attention", [ks.attention, ks_torch.attention])
def test_what_cannot_be_traced_is_refused_by_its_message(attention: Any) -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, score_mod=lambda s, b, h, i, j: s if s > 0 else 0)

    compiled, _ = counted(attend)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="score_mod"):
        compiled(*inputs())
    torch._dynamo.reset()
    with pytest.raises(ks.errors.InvalidValue, match="score_mod = "):
        torch.compile(attend, backend="aot_eager")(*inputs())
