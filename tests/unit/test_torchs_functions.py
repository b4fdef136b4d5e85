"""torch's functions in scores and masks: values and derivatives are torch's own, and
what has no such form is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernelseam.errors import InvalidValue
from kernelseam.expressions.derivatives import slope
from kernelseam.expressions.evaluation import evaluate
from kernelseam.expressions.scores import score_expression

torch = pytest.importorskip("torch", reason="torch is missing: the functions are its own")
F = torch.nn.functional
Mod = Callable[..., Any]


def without_gradient(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    with torch.no_grad():
        factor = torch.tanh(s)
    return factor * s


SCORES: dict[str, Mod] = {
    # exp of the largest is infinite
    "softplus": lambda s, b, h, q, kv: F.softplus(s) + F.softplus(s, beta=2.0, threshold=5.0),
    "to a device and a dtype": lambda s, b, h, q, kv: s + s.to(s.device, torch.int32),
    "to a device, dtype named": lambda s, b, h, q, kv: s + s.to("cpu", dtype=torch.int32),
    "to a dtype and a format": lambda s, b, h, q, kv: (
        s + q.to(torch.int64, memory_format=torch.preserve_format)
    ),
    "to a number's dtype": lambda s, b, h, q, kv: (
        s + (s / 3).to(torch.zeros((), dtype=torch.int32))
    ),
    "floor of a quotient by 1": lambda s, b, h, q, kv: s + (s.detach() * 0.3) // 1,
    "no_grad": without_gradient,
    "no_grad around a power": torch.no_grad()(lambda s, b, h, q, kv: s**2),
}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("traced_under", [torch.enable_grad, torch.no_grad])
def test_scores_are_torchs(name: str, traced_under: Callable[[], Any]) -> None:
    s = torch.tensor([-1000.0, -3.7, -0.2, 0.0, 0.6, 2.5, 30.0, 1000.0], dtype=torch.float64)
    q = torch.arange(len(s), dtype=torch.int32)
    s.requires_grad_()
    want = SCORES[name](s, q, q, q, q)
    with traced_under():
        e = score_expression(SCORES[name], None)
    at = {"score": s.detach().numpy(), **dict.fromkeys(("b", "h", "q_idx", "kv_idx"), q.numpy())}
    got, by = evaluate([e.structure.score, slope(e.structure.score)], at, e.numbers, [])
    np.testing.assert_allclose(got, want.detach(), rtol=1e-12)
    grad = torch.zeros_like(s)
    if want.requires_grad:
        (grad,) = torch.autograd.grad(want.sum(), s)
    np.testing.assert_allclose(np.broadcast_to(by, s.shape), grad, rtol=1e-9, atol=1e-12)


MASKS: dict[str, Mod] = {
    "not a product": lambda b, h, q, kv: ~((q >= kv) * (q % 2 == 0)),
    "not torch.mul": lambda b, h, q, kv: ~torch.mul(q >= kv, h == 1),
    "a product of a bool and an int": lambda b, h, q, kv: (q >= kv) * (q % 3),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_torchs(name: str) -> None:
    at = [torch.arange(n, dtype=torch.int32) for n in (1, 2, 5, 6)]
    grid = torch.meshgrid(*at, indexing="ij")
    e = score_expression(None, MASKS[name])
    named = dict(zip(("b", "h", "q_idx", "kv_idx"), map(np.asarray, grid), strict=True))
    (seen,) = evaluate([e.structure[1]], named, e.numbers, [])
    np.testing.assert_array_equal(seen, MASKS[name](*grid).bool())


REFUSED: dict[str, tuple[Mod, str]] = {
    "relu_": (
        lambda s, b, h, q, kv: (torch.relu_(s), s)[1],
        "relu_ changes its argument in place. Use what torch.relu returns",
    ),
    "inplace=True": (
        lambda s, b, h, q, kv: (F.relu(s, inplace=True), s)[1],
        "relu changes its argument in place. Use what torch.relu returns",
    ),
    "uint16": (
        lambda s, b, h, q, kv: s.to(torch.uint16),
        "uint16 is no type that an expression has. Convert to bool, int32, int64 or float32",
    ),
    "a tensor type": (
        lambda s, b, h, q, kv: s.type("torch.LongTensor"),
        "LongTensor is no type that an expression has",
    ),
    "half behind a device": (
        lambda s, b, h, q, kv: s.to("cpu", torch.float16),
        "the function rounds to float16",
    ),
    "a rounding_mode": (
        lambda s, b, h, q, kv: torch.div(s, 2, rounding_mode="up"),
        'rounding_mode = "up" is not supported. Use "floor"',
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_such_form_is_refused(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(InvalidValue) as e:
        score_expression(function, None)
    assert message in str(e.value)
