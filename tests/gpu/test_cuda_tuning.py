"""On an NVIDIA GPU: every tile and algorithm by its name and within tolerance; and tuning them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kernelseam as ks
import numpy as np
import pytest
from kernelseam import planning
from kernelseam.dispatch import consider
from kernelseam.tuned import store
from kernelseam.tuning import tune
from kernelseam.variants import SEPARATOR, variants_of
from nvidia_gpu import DEVICE, cupy

pytestmark = pytest.mark.gpu
RNG = np.random.default_rng(0)


def normal(*shape: int) -> Any:
    return cupy.asarray(RNG.standard_normal(shape).astype(np.float16))


def product(batch: int) -> ks.BatchedGemmStrided:
    M, N, K = 200, 144, 96
    a, b, c = normal(batch, M, K), normal(batch, K, N), cupy.empty((batch, M, N), np.float16)
    return ks.BatchedGemmStrided(M=M, N=N, K=K, batch=batch, A=a, B=b, C=c)


def attention(S_q: int, S_k: int) -> ks.Attention:
    q, k, v, out = (normal(2, h, s, 64) for h, s in ((8, S_q), (2, S_k), (2, S_k), (8, S_q)))
    return ks.Attention.from_arrays(q, k, v, out)


def heads() -> ks.QkvProjection:
    """131 tokens and 512 columns: the last tiles of rows are short, of 96 columns too."""
    x, weight, bias = normal(1, 131, 320), normal(512, 320), normal(512)
    q, k, v = (normal(1, n, 131, 64) for n in (6, 1, 1))
    return ks.QkvProjection.from_arrays(x, weight, q, k, v, bias=bias)


PROBLEMS = {
    "heads": heads,
    "one product": lambda: product(1),
    "products": lambda: product(3),
    "attention": lambda: attention(300, 300),
    "decoding": lambda: attention(1, 5000),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_variant_computes_what_it_should(name: str) -> None:
    descriptor = PROBLEMS[name]()
    seen = 0
    for candidate in consider(descriptor.problem(), DEVICE):
        if candidate.refusal is None:
            for v in variants_of(candidate.implementation, descriptor.problem(), DEVICE):
                name = candidate.implementation.name + SEPARATOR + v.name
                ks.plan(descriptor, implementation=name).bind(check=True)()
                seen += 1
    assert seen > 2


def test_one_matrix_goes_to_the_function_that_is_not_batched() -> None:
    for batch, function in ((1, "cublasGemmEx"), (2, "cublasGemmStridedBatchedEx")):
        plan = ks.plan(product(batch), implementation="cublas")
        plan.bind(check=True)()
        assert [r.kernel for r in plan.launches] == [function]


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_tuned_choice_is_used(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERNELSEAM_CACHE_DIR", str(tmp_path / "cache"))
    descriptor = PROBLEMS[name]()
    try:
        tuning = tune(descriptor, DEVICE)
        assert all(w.samples and not w.failure for w in tuning.configurations)
        assert (tuning.chosen.seconds or 1.0) <= 1.01 * (tuning.configurations[0].seconds or 0.0)
        plan = ks.plan(descriptor)
        assert (plan.implementation, plan.choice.variant) == (
            tuning.chosen.implementation,
            tuning.chosen.variant,
        )
        assert plan.choice.by == "tuned" and {"driver", "compiler"} <= set(
            store.environment(DEVICE)
        )
        plan.bind(check=True)()
    finally:
        planning.forget()
