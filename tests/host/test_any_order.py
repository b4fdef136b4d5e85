"""Gradients that may be summed in any order, on arrays: what is launched, and that nothing of an
earlier call stays."""

from __future__ import annotations

from typing import Any

import kernelseam
import numpy as np
import numpy.typing as npt
import pytest
from kernelseam.kernels.attention import row_kernels
from kernelseam.plugins import Plugins
from kernelseam_hostcpp.runtime import HostArray

NAMES = ("dq", "dk", "dv", "dbias", "dsinks")


def inputs(bias: tuple[int, ...] = (40, 70)) -> dict[str, Any]:
    rng = np.random.default_rng(5)
    shapes = {
        "q": (2, 4, 40, 32),
        "k": (2, 2, 70, 32),
        "v": (2, 2, 70, 16),
        "dout": (2, 4, 40, 16),
        "bias": bias,
    }
    created = {n: rng.standard_normal(s).astype(np.float16) for n, s in shapes.items()}
    return {
        n: HostArray(x)
        for n, x in {**created, "sinks": rng.standard_normal(4).astype(np.float32)}.items()
    }


def gradients(
    x: dict[str, Any], deterministic: bool
) -> tuple[list[str], dict[str, npt.NDArray[Any]]]:
    given = {n: a for n, a in x.items() if n != "dout"}
    out, lse = kernelseam.attention(**given, return_lse=True, layout="bhsd")
    with kernelseam.trace() as launches:
        result = kernelseam.attention_bwd(
            **given,
            dout=x["dout"],
            out=out,
            lse=lse,
            layout="bhsd",
            bias_gradient=True,
            sink_gradient=True,
            deterministic=deterministic,
        )
    return [r.kernel for r in launches], {
        n: getattr(result, n).host.astype(np.float32) for n in NAMES
    }


def test_three_launches_and_one_for_each_that_is_reduced(hostcpp: Plugins) -> None:
    x, reduced = inputs(), ["sum_axes", "sink_gradient"]
    ordered, wanted = gradients(x, True)
    assert ordered == ["row_delta", "attention_backward", *reduced], "keys and queries in one"
    for _ in range(2):  # the second starts from zeros again
        free, actual = gradients(x, False)
        assert free == ["row_delta", "attention_backward", "query_gradient", *reduced]
        for name, y in wanted.items():
            size = float(np.abs(y).max())
            assert size > 0.02
            np.testing.assert_allclose(actual[name], y, rtol=0, atol=2e-3 * size, err_msg=name)


@pytest.mark.parametrize("bias", [(40, 70), (4, 40, 70), (2, 1, 1, 70), (2, 4, 40, 1)])
def test_a_bias_is_summed_alike_by_lanes_and_by_warps(
    bias: tuple[int, ...], hostcpp: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, sums = inputs(bias), []
    for fewest in (1, 1 << 40):
        monkeypatch.setattr(row_kernels, "_FEWEST_ALONE", fewest)
        hostcpp.forget()
        sums.append(gradients(x, True)[1]["dbias"])
    size = float(np.abs(sums[0]).max())
    assert size > 0.02
    np.testing.assert_allclose(*sums, rtol=0, atol=2e-3 * size)
