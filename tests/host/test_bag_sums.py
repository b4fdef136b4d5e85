"""Sums of listed rows on the host platform beside float64."""

from __future__ import annotations

import numpy as np
import pytest
from kernelseam.contract import Device
from kernelseam.dtypes import DType
from kernelseam.kernels.gemm.bag_sums import BAG_SUMS, CHUNK, BagSumsProblem, BagSumsSpec
from kernelseam.kernels.kernel import KernelImplementation
from kernelseam.plugins import Plugins
from kernelseam_hostcpp import HostToolchain
from kernelseam_hostcpp.runtime import DEVICES

HOST_TOOLCHAIN = HostToolchain()
UNIT = {DType.float16: 2.0**-11, DType.float32: 2.0**-24, DType.float64: 2.0**-53}
COUNTS = (1, 0, 3, 4, 5, 9, 0, 2)
"""Rows of each result: fewer than are read together, as many, more, none."""


def sums(
    dtype: DType, columns: int, vector: int, parts: int, device: Device
) -> tuple[float, np.ndarray]:
    """The largest error beside the sum of magnitudes, and the result. Rows of x lie 16 elements
    apart beyond their columns, NaN; the first 5 of the list are no result's."""
    kind, rng = np.dtype(dtype.value), np.random.default_rng(columns)
    x = np.full((40, columns + 16), np.nan, kind)
    x[:, :columns] = rng.standard_normal((40, columns))
    ends = 5 + np.r_[0, np.cumsum(COUNTS)].astype(np.int64)
    rows = rng.integers(0, len(x), ends[-1])
    out = np.full((len(COUNTS) + 1, columns), np.nan, kind)
    plus = rng.standard_normal((parts, len(COUNTS), columns)).astype(kind)
    problem = BagSumsProblem(
        BagSumsSpec(dtype, vector), len(rows), len(COUNTS), columns, x.shape[1], parts
    )
    kernel = KernelImplementation(BAG_SUMS, HOST_TOOLCHAIN)
    assert kernel.supports(problem, device) is None
    arrays = {"x": x, "rows": rows, "ends": ends, "plus": plus, "out": out}
    (step,) = kernel.build(problem, device).steps
    step.bind({n: a.ctypes.data for n, a in arrays.items()}, 0)(0)
    wide = x[:, :columns].astype(np.longdouble)
    listed = [
        np.concatenate([plus[:, i], wide[rows[ends[i] : ends[i + 1]]]]) for i in range(len(COUNTS))
    ]
    wanted, sizes = (np.stack([f(y).sum(0) for y in listed]) for f in (np.asarray, np.abs))
    error = np.abs(out[:-1] - wanted) / np.maximum(sizes, 1e-30)
    return float(error.max()), out


@pytest.mark.parametrize("device", DEVICES[:2], ids=str)
@pytest.mark.parametrize("parts", [0, 3])
@pytest.mark.parametrize(
    ("dtype", "columns", "vector"),
    [
        *((DType.float16, 48, CHUNK), (DType.float16, 33, 2)),
        *((DType.float32, 20, CHUNK), (DType.float32, 1, 4), (DType.float64, 6, CHUNK)),
    ],
)
def test_sums(
    hostcpp: Plugins, dtype: DType, columns: int, vector: int, parts: int, device: Device
) -> None:
    error, out = sums(dtype, columns, vector, parts, device)
    assert error < 4 * UNIT[dtype]
    assert parts or not out[[1, 6]].any(), "nothing is listed"
    assert np.isnan(out[-1]).all(), "a row behind the last result"


def test_too_many_results_are_refused(hostcpp: Plugins) -> None:
    problem = BagSumsProblem(BagSumsSpec(DType.float16), 1, 2**23, 2048, 2048)
    refused = BAG_SUMS.refuse(problem, HOST_TOOLCHAIN.arch_row("host"))
    assert refused == f"its results have {2**31} chunks, not fewer than 2^31"
