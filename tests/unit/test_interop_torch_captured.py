"""Gradients of what users write are those of the forward's expression: of what a function captured
then, however its variables and tensors change later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is missing: these are torch's tensors")
from kernelseam.interop import torch as kt  # noqa: E402

B, H, S, D = 2, 3, 9, 8
Layer = Callable[[Any, Any], Any]


def drawn(*shape: int, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def attention(x: Any, score_mod: Any, mask_mod: Any = None) -> Any:
    return kt.attention(x, KEYS, VALUES, score_mod=score_mod, mask_mod=mask_mod)


KEYS, VALUES = drawn(B, H, S, D, seed=1), drawn(B, H, S, D, seed=2)


def layers_of_attention(x: Any, factors: list[Any]) -> Any:
    for factor in factors:  # the lambdas share one variable
        x = attention(x, lambda s, b, h, i, j: s * factor[h])  # noqa: B023
    return x


def attention_formula(x: Any, factors: list[Any]) -> Any:
    for factor in factors:
        scores = (x @ KEYS.mT) * D**-0.5 * factor[:, None, None]
        x = torch.softmax(scores, -1) @ VALUES
    return x


def layers_of_products(x: Any, factors: list[Any]) -> Any:
    for factor in factors:
        x = kt.bmm(x, KEYS[0, :, :D], epilogue=lambda acc, m, n, b: torch.tanh(acc * factor[b]))  # noqa: B023
    return x


def products_formula(x: Any, factors: list[Any]) -> Any:
    for factor in factors:
        x = torch.tanh((x @ KEYS[0, :, :D]) * factor[:, None, None])
    return x


@pytest.mark.parametrize("learnt", [False, True])
@pytest.mark.parametrize(
    "layers, formula, shape",
    [
        (layers_of_attention, attention_formula, (B, H, S, D)),
        (layers_of_products, products_formula, (H, S, D)),
    ],
    ids=["attention", "bmm"],
)
def test_layers_share_a_variable(
    layers: Any, formula: Any, shape: tuple[int, ...], learnt: bool
) -> None:
    x = drawn(*shape).requires_grad_()
    factors = [drawn(H, seed=s).requires_grad_(learnt) for s in (3, 4, 5)]
    wants = [x, *(factors if learnt else [])]
    arriving = drawn(*shape, seed=6)
    expected = torch.autograd.grad(formula(x, factors), wants, arriving)
    found = torch.autograd.grad(layers(x, factors), wants, arriving)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def of_a_score() -> tuple[Any, Any]:
    factor = torch.tensor([0.5, 1.0, 2.0])
    return attention(
        drawn(B, H, S, D).requires_grad_(), lambda s, b, h, i, j: s * factor[h]
    ), factor


def of_a_mask() -> tuple[Any, Any]:
    ends = torch.tensor([3, 5])
    x = drawn(B, H, S, D).requires_grad_()
    return attention(x, None, lambda b, h, i, j: j < i + ends[b]), ends


def of_packed_rows() -> tuple[Any, Any]:
    factor, offsets = torch.tensor([0.5, 1.0, 2.0]), torch.tensor([0, 4, S], dtype=torch.int32)
    x = drawn(S, H, D).requires_grad_()
    mod: Any = lambda s, b, h, i, j: s * factor[h]  # noqa: E731
    return kt.attention_varlen(x, x, x, offsets, offsets, S, S, score_mod=mod), factor


def of_an_epilogue() -> tuple[Any, Any]:
    factor, x = torch.tensor([0.5, 1.0, 2.0]), drawn(H, S, D).requires_grad_()
    mod: Any = lambda acc, m, n, b: torch.tanh(acc * factor[b])  # noqa: E731
    return kt.bmm(x, x, b_transposed=True, epilogue=mod), factor


def of_grouped_products() -> tuple[Any, Any]:
    factor, x = torch.arange(float(D)), drawn(S, D).requires_grad_()
    offs = torch.tensor([4, 6, S], dtype=torch.int32)
    mod: Any = lambda acc, m, n, b: torch.tanh(acc * factor[n])  # noqa: E731
    return kt.grouped_mm(x, KEYS[0, :, :D], offs, epilogue=mod), factor


@pytest.mark.parametrize(
    "case", [of_a_score, of_a_mask, of_packed_rows, of_an_epilogue, of_grouped_products]
)
def test_a_captured_tensor_that_was_changed_is_refused(
    case: Callable[[], tuple[Any, Any]],
) -> None:
    result, captured = case()
    result.sum().backward(retain_graph=True)
    captured += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_saved_tensors_may_be_others() -> None:
    """torch.autograd.graph.saved_tensors_hooks: they move to the host and back, say."""
    x, factor = drawn(B, H, S, D).requires_grad_(), drawn(H, seed=3).requires_grad_()
    arriving = drawn(B, H, S, D, seed=6)
    found = []
    for pack in (lambda t: t, lambda t: t.detach().clone()):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            result = layers_of_attention(x, [factor])
        found.append(torch.autograd.grad(result, [x, factor], arriving))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    assert found[0][1].abs().min() > 0


def test_a_tensor_of_the_score_and_the_mask_has_the_scores_gradient() -> None:
    x, factor = drawn(B, H, S, D).requires_grad_(), drawn(H, seed=3).requires_grad_()
    mask: Any = lambda b, h, i, j: (j <= i) | (factor[h] > 9)  # noqa: E731
    result = attention(x, lambda s, b, h, i, j: s * factor[h], mask)
    (found,) = torch.autograd.grad(result, [factor], arriving := drawn(B, H, S, D, seed=6))
    scores = (x @ KEYS.mT) * D**-0.5 * factor[:, None, None]
    hidden = torch.ones(S, S, dtype=torch.bool).triu(1)
    expected = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ VALUES
    (wanted,) = torch.autograd.grad(expected, [factor], arriving)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def test_a_tensor_of_the_mask_alone_has_no_gradient() -> None:
    x, least = drawn(B, H, S, D).requires_grad_(), drawn(H, seed=3).requires_grad_()
    result = attention(x, None, lambda b, h, i, j: (j <= i) | (least[h] > 9))
    by_x, by_least = torch.autograd.grad(result.sum(), [x, least], allow_unused=True)
    assert by_x is not None and by_least is None
