"""The host's own half types against NumPy's and ml_dtypes': every pattern, and where rounding
changes its mind."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

TEXT = """
KS_KERNEL(16, 1) probe(const TYPE* patterns, float* wide, const float* values, TYPE* narrow, const i64* counts) {
  for (i64 i = lane(); i < counts[0]; i += WARP) wide[i] = to_sum(patterns[i]);
  for (i64 i = lane(); i < counts[1]; i += WARP) narrow[i] = convert<TYPE>(values[i]);
}
"""  # noqa: E501


def floats(dtype: type, mantissa_lost: int) -> np.ndarray:
    """Random patterns, every value of the type, every midpoint of two, and the neighbours of
    each."""
    rng = np.random.default_rng(5)
    patterns = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(dtype).astype(np.float32)
    exact = patterns[np.isfinite(patterns)]
    middle = (exact.view(np.uint32) + np.uint32(1 << (mantissa_lost - 1))).view(np.float32)
    # midpoints of float16's subnormals
    halves = (exact.astype(np.float64) + 2.0**-25).astype(np.float32)
    near = np.concatenate([exact, middle, halves])
    bits = near.view(np.uint32)
    random = rng.integers(0, 1 << 32, 1_000_000, dtype=np.uint32)
    special = np.array(
        [np.inf, -np.inf, np.nan, -np.nan, 65519.996, 65520, 3.4e38, 1e-45], np.float32
    )
    around = np.concatenate([bits, bits + 1, bits - 1, random]).view(np.float32)
    return np.concatenate([around, special])


@pytest.mark.parametrize(
    ("name", "dtype", "lost"), [("f16", np.float16, 13), ("bf16", ml_dtypes.bfloat16, 16)]
)
@pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning", "ignore:invalid value:RuntimeWarning"
)
def test_conversions(probe: Callable[..., None], name: str, dtype: type, lost: int) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    wide, values = np.zeros(1 << 16, np.float32), floats(dtype, lost)
    narrow = np.zeros(len(values), np.uint16)
    probe(
        TEXT.replace("TYPE", name),
        16,
        patterns,
        wide,
        values,
        narrow,
        np.array([1 << 16, len(values)]),
    )

    expected = patterns.view(dtype).astype(np.float32)
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(wide), nan)
    assert np.array_equal(wide.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])
    back: np.ndarray = values.astype(dtype)
    nan = np.isnan(values)
    assert nan.sum() > 1000 and np.isnan(narrow.view(dtype).astype(np.float32)[nan]).all()
    assert np.array_equal(narrow[~nan], back.view(np.uint16)[~nan])
    assert np.array_equal(narrow[nan] >> 15, values.view(np.uint32)[nan] >> 31), (
        "a NaN keeps its sign"
    )
