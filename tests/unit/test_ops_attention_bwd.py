"""attention_bwd on host arrays and torch's CPU tensors."""

from __future__ import annotations

import inspect
from typing import Any

import kernelseam
import ml_dtypes
import numpy as np
import pytest
from attention_formula import close, gradients
from refusals import Refused

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(77)
B, H, G, S_Q, S_K, D, D_V = 2, 4, 2, 9, 13, 8, 12


def normal(*shape: int, dtype: Any = np.float32) -> Array:
    return RNG.standard_normal(shape).astype(dtype)


def dense(dtype: Any = np.float32) -> dict[str, Array]:
    shapes = {
        "dout": (B, H, S_Q, D_V),
        "q": (B, H, S_Q, D),
        "k": (B, G, S_K, D),
        "v": (B, G, S_K, D_V),
    }
    return {name: normal(*shape, dtype=dtype) for name, shape in shapes.items()}


def call(
    x: dict[str, Any], *, bias_gradient: bool = False, sink_gradient: bool = False, **options: Any
) -> Any:
    """The forward and its gradients."""
    inputs = {n: a for n, a in x.items() if n != "dout"}
    forward = kernelseam.attention_varlen if "cu_seqlens_q" in x else kernelseam.attention
    out, lse = forward(**inputs, **options, return_lse=True)
    return (
        out,
        lse,
        kernelseam.attention_bwd(
            **x,
            out=out,
            lse=lse,
            bias_gradient=bias_gradient,
            sink_gradient=sink_gradient,
            **options,
        ),
    )


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("causal", [False, True])
def test_dense(dtype: Any, causal: bool) -> None:
    x = dense(dtype)
    out, lse, actual = call(x, causal=causal)
    wanted = gradients(**x, causal=causal)
    for name in ("dq", "dk", "dv"):
        result = getattr(actual, name)
        assert type(result) is np.ndarray and result.dtype == dtype and result.flags.c_contiguous
        # from a result of 16 bits; the matrix has the bound
        close(result, wanted[name], 8 if np.dtype(dtype).itemsize > 2 else 1000)
    assert actual.dbias is None and actual.dsinks is None


@pytest.mark.parametrize(
    "shape", [(B, H, S_Q, S_K), (H, S_Q, S_K), (1, 1, S_Q, S_K), (S_Q, S_K), (B, 1, 1, S_K), (1,)]
)
def test_a_bias_gives_its_own_shape_back(shape: tuple[int, ...]) -> None:
    x = {**dense(), "bias": normal(*shape), "sinks": normal(H)}
    out, lse, actual = call(x, bias_gradient=True, sink_gradient=True, window=[3, 2], softcap=2.0)
    padded = (1,) * (4 - len(shape)) + shape
    wanted = gradients(**x, bias_shape=padded, window=(3, 2), softcap=2.0)
    assert actual.dbias.shape == shape
    close(actual.dbias, wanted["dbias"].reshape(shape), 8)
    close(actual.dsinks, wanted["dsinks"], 8)
    close(actual.dk, wanted["dk"], 8)


def test_a_bias_that_repeats_by_its_strides() -> None:
    small = normal(1, H, 1, S_K)
    x = {**dense(), "bias": small}
    out, lse, actual = call(x, bias_gradient=True)
    *_, again = call({**x, "bias": np.broadcast_to(small, (B, H, S_Q, S_K))}, bias_gradient=True)
    assert again.dbias.shape == (1, H, 1, S_K)
    for name in ("dq", "dk", "dv", "dbias"):
        np.testing.assert_array_equal(getattr(again, name), getattr(actual, name))
    close(actual.dbias, gradients(**x, bias_shape=small.shape)["dbias"], 8)


def test_layouts_and_strides_agree() -> None:
    x = dense()
    *_, actual = call(x, causal=True)
    tokens = {n: a.swapaxes(1, 2) for n, a in x.items()}  # the same memory
    *_, swapped = call(tokens, causal=True, layout="bshd")
    apart = {n: np.repeat(a, 2, axis=2)[:, :, ::2] for n, a in x.items()}
    *_, gaps = call(apart, causal=True)
    for name in ("dq", "dk", "dv"):
        assert getattr(swapped, name).flags.c_contiguous
        np.testing.assert_array_equal(getattr(swapped, name).swapaxes(1, 2), getattr(actual, name))
        np.testing.assert_array_equal(getattr(gaps, name), getattr(actual, name))


def test_all_options_reach_it() -> None:
    x = {
        **dense(),
        "mask": RNG.random((B, 1, S_Q, S_K)) < 0.8,
        "alibi_slopes": normal(H) ** 2,
        "prefix_lengths": np.array([2, 0], np.int32),
        "kv_lengths": np.array([S_K, 6], np.int32),
    }
    options: dict[str, Any] = {"causal": True, "softcap": 1.5, "scale": 0.6}
    out, lse, actual = call(x, **options)
    for name, expected in gradients(**x, **options).items():
        close(getattr(actual, name), expected, 8)
    assert (actual.dk[1, :, 6:] == 0).all() and (actual.dv[1, :, 6:] == 0).all()
    names = set(inspect.signature(kernelseam.attention).parameters) - {
        "return_lse",
        "out_dtype",
        "batch_invariant",
        "latent",  # for decoding
        # what is of 8 bits has no gradients
        *("q_scales", "k_scales", "v_scales"),
        *("q_scale_block", "scale_block", "row_scale_block"),
    }
    assert names <= set(inspect.signature(kernelseam.attention_bwd).parameters)


def test_packed_sequences() -> None:
    q, k, v, dout = normal(9, H, D), normal(13, G, D), normal(13, G, D_V), normal(9, H, D_V)
    x = {
        "q": q,
        "k": k,
        "v": v,
        "dout": dout,
        "cu_seqlens_q": np.array([0, 4, 9], np.int32),
        "cu_seqlens_k": np.array([0, 7, 13], np.int32),
    }
    out, lse, actual = call(x, causal=True, max_seqlen_q=5, max_seqlen_k=7)
    for queries, keys in ((slice(0, 4), slice(0, 7)), (slice(4, 9), slice(7, 13))):
        rows = (q[queries], k[keys], v[keys], dout[queries])
        wanted = gradients(*(y.swapaxes(0, 1)[None] for y in rows), causal=True)
        for name, at in (("dq", queries), ("dk", keys), ("dv", keys)):
            close(getattr(actual, name)[at], wanted[name][0].swapaxes(0, 1), 8)


def test_the_plan_is_remembered_for_the_options_too() -> None:
    x = dense()
    out, lse, first = call(x)
    *_, other = call(x, scale=0.1)
    *_, again = call(x)
    np.testing.assert_array_equal(first.dq, again.dq)
    assert abs(first.dq - other.dq).max() > 0.01
    with kernelseam.trace() as records:
        kernelseam.attention_bwd(**x, out=out, lse=lse, deterministic=False)
    (record,) = records
    assert (record.kernel, record.grid, record.arch) == ("numpy_attention_bwd", (1, H, B), "cpu")


def test_refusals(refused: Refused) -> None:
    x = dense()
    out, lse = kernelseam.attention(x["q"], x["k"], x["v"], return_lse=True)

    def bwd(**more: Any) -> Any:
        return kernelseam.attention_bwd(**{**x, "out": out, "lse": lse, **more})

    for name in ("out", "lse"):
        refused(
            f"{name} = None: must be what attention returned. Call it with return_lse=True.",
            lambda name=name: bwd(**{name: None}),
        )
    refused(
        "bias_gradient = True: the attention has no bias. Give bias, or leave it out.",
        lambda: bwd(bias_gradient=True),
    )
    refused(
        "sink_gradient = True: the attention has no sinks. Give sinks, or leave it out.",
        lambda: bwd(sink_gradient=True),
    )
    bwd(deterministic=True)
    for name in ("deterministic", "bias_gradient", "sink_gradient", "causal"):
        refused(
            f"{name} = 1: must be True or False. Pass a bool.", lambda name=name: bwd(**{name: 1})
        )
    refused(
        "scale = nan: must be finite. Give a finite number, or None for the default.",
        lambda: bwd(scale=float("nan")),
    )
    refused(
        "layout = hsbd: must be one of bhsd, bshd. Name the order of the axes.",
        lambda: bwd(layout="hsbd"),
    )
    order = "Check the order of the axes of all arrays."
    refused(
        f"dout = an array of shape [2, 4, 9, 11]: must be [B=2, H=4, S_q=9, D_v=12]. {order}",
        lambda: bwd(dout=x["dout"][..., :11]),
    )
    refused(
        f"out = an array of shape [2, 4, 9, 11]: must be [B=2, H=4, S_q=9, D_v=12]. {order}",
        lambda: bwd(out=out[..., :11]),
    )
    refused(
        f"lse = an array of shape [2, 4, 8]: must be [B=2, H=4, S_q=9]. {order}",
        lambda: bwd(lse=lse[:, :, :8]),
    )
    refused(
        "dout = an array of float16: must be float32. Convert the array, or plan for its dtype.",
        lambda: bwd(dout=x["dout"].astype(np.float16)),
    )
    refused(
        "dout = strides [0, 0, 0, 0]: the last axis must be contiguous (stride 1). Copy the array "
        "into a contiguous one.",
        lambda: bwd(dout=np.broadcast_to(np.ones((), np.float32), out.shape)),
    )
    refused(
        "lse = an array of float64: must be float32. Convert the array, or plan for its dtype.",
        lambda: bwd(lse=lse.astype(np.float64)),
    )
