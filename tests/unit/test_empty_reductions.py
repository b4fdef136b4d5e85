"""Results of empty reductions, on NumPy and through autograd: every element is written, over memory
that held NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from empty_reductions import CASES, Case
from kernelseam.arrays import torch as torch_arrays
from kernelseam.interop import torch as ks
from kernelseam.reference.runtime import HostRuntime


@pytest.fixture(autouse=True)
def _memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    def filled(empty: Any) -> Any:
        def made(*args: Any, **more: Any) -> Any:
            x = empty(*args, **more)
            x[...] = np.nan
            return x

        return made

    monkeypatch.setattr(HostRuntime, "empty", filled(HostRuntime.empty))
    monkeypatch.setattr(torch_arrays, "empty", filled(torch_arrays.empty))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_numpy(case: Case) -> None:
    case.check(case.call(lambda x: x))


@pytest.mark.parametrize("empty", ["batch", "heads", "queries", "keys", "lengths"])
@pytest.mark.parametrize(
    "own", [(1, 2, 3, 5), (2, 1, 3, 5), (2, 2, 1, 5), (2, 2, 3, 1), (1, 1, 1, 1), (3, 5), (5,)]
)
def test_a_bias_in_torch(empty: str, own: tuple[int, ...]) -> None:
    torch: Any = pytest.importorskip(
        "torch", reason="torch is missing: it is what differentiates here"
    )
    sizes = {"batch": 2, "heads": 2, "queries": 3, "keys": 5, empty: 0}
    batch, heads, queries, keys = (sizes[n] for n in ("batch", "heads", "queries", "keys"))
    whole, plane = (2, 2, 3, 5), (batch, heads, queries, keys)
    shape = [n if n == 1 else now for n, now in zip(own, plane[4 - len(own) :], strict=True)]
    assert all(n in (1, m) for n, m in zip(own, whole[4 - len(own) :], strict=True))
    q = torch.zeros(batch, heads, queries, 4, requires_grad=True)
    k = torch.zeros(batch, heads, keys, 4, requires_grad=True)
    lengths = torch.zeros(batch, dtype=torch.int32) if empty == "lengths" else None
    for bias in (
        torch.zeros(shape, requires_grad=True),
        torch.zeros(shape).expand(plane).detach().requires_grad_(),
    ):
        out = ks.attention(q, k, k, bias=bias, kv_lengths=lengths)
        out.sum().backward()
        assert bias.grad.shape == bias.shape and (bias.grad == 0).all()
    assert (q.grad == 0).all() and (k.grad == 0).all()
