"""Latent keys of 8 bits whose rows have their scales, as FlashMLA's of 656 bytes."""

from __future__ import annotations

from typing import Any

import kernelseam as ks
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from attention_problems import latent_attention
from kernelseam.descriptors import Attention
from kernelseam.errors import InvalidValue, WrongResult
from kernelseam.oracle.scaled_rows import scaled_rows
from kernelseam.reference.attention_views import Views

Array = npt.NDArray[Any]
E4M3 = ml_dtypes.float8_e4m3fn


def rows_of(numbers: Array, scales: Array, others: Array) -> Array:
    """Rows in memory."""
    parts = (
        numbers.astype(E4M3),
        scales.astype(np.float32),
        others.astype(ml_dtypes.bfloat16),
    )
    return np.concatenate([x.view(np.uint8) for x in parts], axis=-1).view(E4M3)


def random_rows(*shape: int) -> Array:
    rng = np.random.default_rng(3)
    numbers, others = rng.normal(0, 8, (*shape, 512)), rng.normal(0, 1, (*shape, 64))
    return rows_of(numbers, 2.0 ** rng.uniform(-6, -2, (*shape, 4)), others)


def test_a_number_stands_for_its_product() -> None:
    """Which bfloat16 need not hold."""
    numbers = np.resize([1.0, -0.0625, 448.0, 2.0**-9], 512)
    scales = np.array([1.0, 0.0, 1.005859375, -2.0], np.float32)
    rows = rows_of(numbers, scales, np.arange(64))
    assert rows.shape == (656,)
    keys, values = (x.astype(np.float64) for x in scaled_rows(rows, 512, 128))
    assert keys.shape == (576,) and np.array_equal(keys[:512], values)
    assert values[:4].tolist() == [1.0, -0.0625, 448.0, 2.0**-9]
    assert not values[128:256].any()
    assert values[256:259].tolist() == [1.005859375, -0.0628662109375, 450.625]
    assert values[384:388].tolist() == [-2.0, 0.125, -896.0, -(2.0**-8)]
    assert np.array_equal(keys[512:], np.arange(64))


@pytest.mark.parametrize("causal", [False, True])
def test_results_are_those_of_the_numbers_they_stand_for(causal: bool) -> None:
    rng = np.random.default_rng(5)
    q = rng.normal(0, 1, (2, 3, 16, 576)).astype(ml_dtypes.bfloat16)
    pages = random_rows(5, 64, 1)
    table, lengths = np.array([[4, 1], [0, 3]], np.int32), np.array([100, 7], np.int32)
    options: dict[str, Any] = {"latent": True, "causal": causal}
    own = ks.attention_paged(
        q, pages, pages[..., :512], table, lengths, row_scale_block=128, **options
    )
    keys, _ = scaled_rows(pages, 512, 128)
    keys = keys.astype(ml_dtypes.bfloat16)  # as NumPy multiplies them
    plain = ks.attention_paged(q, keys, keys[..., :512], table, lengths, **options)
    assert own.shape == (2, 3, 16, 512) and np.array_equal(own, plain)


def test_the_oracle_reads_such_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    q = np.ones((1, 16, 1, 576), ml_dtypes.bfloat16)
    k, out = random_rows(1, 1, 90), np.empty((1, 16, 1, 512), ml_dtypes.bfloat16)
    d = Attention.from_arrays(q, k, k[..., :512], out, latent=True, row_scale_block=128)
    call = ks.plan(d).bind(check=True)
    call()
    right = Views._scaled
    monkeypatch.setattr(Views, "_scaled", lambda *x: right(*x) * ml_dtypes.bfloat16(1.125))
    with pytest.raises(WrongResult, match="out"):
        call()


def described(**changes: Any) -> Attention:
    scaled: dict[str, Any] = {"dtype_kv": "float8_e4m3fn", "row_scale_block": 128}
    return latent_attention(656, **{**scaled, **changes})


def test_a_row_is_bytes() -> None:
    p = described().problem()
    assert p.spec.key_width == 656 and p.k_strides == (64 * 656, 64 * 656, 656)
    shapes = {r.name: r.shape for r in p.operands}
    assert shapes["k"] == (2, 1, 64, 656) and shapes["v"] == (2, 1, 64, 512)
    assert p.bytes_moved == 2 * (64 * 656 + 16 * (576 + 512) * 2)
    finer = described(row_scale_block=64, stride_v_row=672, stride_v_batch=64 * 672).problem()
    assert finer.spec.key_width == 672


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"latent": False},
            "row_scale_block = 128: is about latent keys, whose first columns are the values. Give",
        ),
        (
            {"dtype": "float16"},
            "row_scale_block = 128: rows are float8_e4m3fn, then bfloat16 as q: q is float16, k f",
        ),
        (
            {"dtype_kv": None},
            "row_scale_block = 128: rows are .*: q is bfloat16, k bfloat16. Give k as such rows",
        ),
        (
            {"k_scales": 0, "v_scales": 0},
            "row_scale_block = 128: says that scales lie in the rows of k, and others are given",
        ),
        (
            {"row_scale_block": 100},
            "row_scale_block = 100: must divide value_dim, 512 of head_dim 576. FlashMLA's rows",
        ),
        ({"row_scale_block": 0}, "row_scale_block = 0: must be"),
        (
            {"stride_v_row": 512},
            r"its strides are \(41984, .*, 512\), those of k \(41984, .*, 656\)",
        ),
    ],
)
def test_what_is_no_such_row_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        described(**changes)


def test_an_array_has_that_width() -> None:
    q, out = (np.ones((1, 4, 1, n), ml_dtypes.bfloat16) for n in (576, 512))
    k = np.zeros((1, 1, 9, 640), E4M3)
    options: dict[str, Any] = {"latent": True, "row_scale_block": 128}
    with pytest.raises(InvalidValue, match=r"k = .*\[1, 1, 9, 640\].*656"):
        Attention.from_arrays(q, k, k[..., :512], out, **options)
