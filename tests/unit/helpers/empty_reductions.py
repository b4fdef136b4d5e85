"""Calls of every operation with an empty axis or empty sequences, and their results: an empty sum
is zero, plus bias, residual and beta·C."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import kernelseam
import numpy as np
from attention_formula import Array, attention, gradients

Lay = Callable[[Array], Any]
"""From a NumPy array to one on the device that is tested."""
RNG = np.random.default_rng(16)
F32 = np.float32


@dataclass(frozen=True)
class Case:
    """A call, and its results in their order."""

    name: str
    call: Callable[[Lay], Sequence[Any]]
    wanted: Sequence[Array]
    refused: str = ""
    """The extent for which shared kernels refuse it."""

    def __str__(self) -> str:
        return self.name

    def check(self, actual: Sequence[Array]) -> None:
        """Hold results to what is wanted: shapes, every element, and nothing that was not
        written."""
        assert [x.shape for x in actual] == [x.shape for x in self.wanted]
        for x, expected in zip(actual, self.wanted, strict=True):
            np.testing.assert_allclose(x, expected, rtol=1e-4, atol=1e-5)


def calling(
    function: Callable[..., Any], *given: Any, **options: Any
) -> Callable[[Lay], Sequence[Any]]:
    """The call with the arrays among its arguments laid, ``out`` as a copy: its results but those
    that are None."""

    def call(lay: Lay) -> Sequence[Any]:
        def laid(x: Any) -> Any:
            return lay(x) if isinstance(x, np.ndarray) else x

        named = {n: laid(x.copy() if n == "out" else x) for n, x in options.items()}
        result = function(*map(laid, given), **named)
        return [x for x in (result if isinstance(result, tuple) else (result,)) if x is not None]

    return call


def normal(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(F32)


# ---------------------------------------------------------------- products


def _products() -> Iterator[Case]:
    whole = {"B": 2, "H": 4, "M": 3, "N": 5, "K": 8}
    for empty in ("B", "H", "M", "N", "K", "MN", "MK", "NK", "MNK"):
        n = whole | dict.fromkeys(empty, 0)
        lead = n["B"], n["H"]
        a, b = normal(*lead, n["M"], n["K"]), normal(n["B"], n["H"] // 2, n["K"], n["N"])
        out, bias, residual = (
            normal(*lead, n["M"], n["N"]),
            normal(n["N"]),
            normal(*lead, n["M"], n["N"]),
        )
        each = np.repeat(b, 2, axis=1)
        yield Case(f"bmm-{empty}", calling(kernelseam.bmm, a, b), [a @ each])
        yield Case(
            f"bmm-added-{empty}",
            calling(kernelseam.bmm, a, b, alpha=2, beta=-1, out=out, bias=bias, residual=residual),
            [2 * (a @ each) - out + bias + residual],
        )
        dc = normal(*lead, n["M"], n["N"])
        # what is empty has its own shape
        for kept in ("", "b", "h", "m", "bh") if a.size else ("",):
            keep = tuple(slice(0, 1) if x in kept else slice(None) for x in "bhmk")
            da = (dc @ each.swapaxes(2, 3)).sum(tuple("bhmk".index(x) for x in kept), keepdims=True)
            other = np.broadcast_to(a[keep], a.shape)
            db = (other.swapaxes(2, 3) @ dc).reshape(n["B"], n["H"] // 2, 2, n["K"], n["N"]).sum(2)
            yield Case(
                f"bmm-bwd-{empty}-{kept}",
                calling(kernelseam.bmm_bwd, dc, other, b),
                [da, db],
            )


# ---------------------------------------------------------------- attention


_OF_BIAS = {"B": "b", "H": "h", "S_q": "q", "S_k": "k"}
"""The axis of a bias of an extent: it repeats along none, all, and each that is empty."""


def _attentions() -> Iterator[Case]:
    whole = {"B": 2, "H": 4, "G": 2, "S_q": 3, "S_k": 5, "D": 16, "D_v": 16}
    for empty in (("B",), ("H",), ("H", "G"), ("S_q",), ("S_k",), ("S_q", "S_k"), ("D",), ("D_v",)):
        n = whole | dict.fromkeys(empty, 0)
        own = [_OF_BIAS[x] for x in empty if x in _OF_BIAS]
        for repeats in ("", "bhqk", *own, *["BH"] * (empty == ("B",))):
            yield from _attention("-".join(empty), n, repeats, repeats.lower())
    yield from _attention(
        "lengths-of-split-keys", whole | {"B": 1, "H": 1, "G": 1, "S_k": 600}, "", "", [0]
    )
    yield from _paged()
    for name, repeats in (("", ""), ("bhqk", "bhqk"), ("b", "b")):
        yield from _attention("lengths", whole, repeats, name, [0, 0])
        for q, k in (("empty", "empty"), ("empty", "some"), ("some", "empty"), ("none", "none")):
            yield from _sequences(q, k, repeats, name)


def _bias(n: dict[str, int], repeats: str) -> tuple[Array, Array]:
    """A bias with extent 1 where it repeats, or without the axis (capitals); and as the plane that
    it stands for."""
    plane = tuple(n[x] for x in ("B", "H", "S_q", "S_k"))
    kept = tuple(1 if x in repeats.lower() else m for x, m in zip("bhqk", plane, strict=True))
    own = normal(*kept)
    return own.reshape(kept[sum(x.isupper() for x in repeats) :]), np.broadcast_to(own, plane)


def _attention(
    empty: str, n: dict[str, int], repeats: str, of: str, kv_lengths: list[int] | None = None
) -> Iterator[Case]:
    q, dout = normal(n["B"], n["H"], n["S_q"], n["D"]), normal(n["B"], n["H"], n["S_q"], n["D_v"])
    k, v = normal(n["B"], n["G"], n["S_k"], n["D"]), normal(n["B"], n["G"], n["S_k"], n["D_v"])
    sinks = normal(n["H"])
    own, plane = _bias(n, repeats)
    arrays = {"bias": own, "sinks": sinks}
    more: dict[str, Any] = {"scale": 0.5}
    given: dict[str, Any] = {**more, "bias": plane, "sinks": sinks}
    if kv_lengths is not None:
        arrays["kv_lengths"] = np.array(kv_lengths, np.int32)
        given["mask"] = np.arange(n["S_k"]) < arrays["kv_lengths"][:, None, None, None]
    out, lse = (x.astype(F32) for x in attention(q, k, v, **given))
    bias_shape = (1,) * (4 - own.ndim) + own.shape
    wanted = gradients(q, k, v, dout, **given, bias_shape=bias_shape)
    wanted["dbias"] = wanted["dbias"].reshape(own.shape)

    yield Case(
        f"attention-{empty}-{of}",
        calling(kernelseam.attention, q, k, v, **arrays, **more, return_lse=True),
        [out, lse],
    )
    for deterministic in (True, False):
        yield Case(
            f"attention-bwd-{empty}-{of}{'' if deterministic else '-any-order'}",
            calling(
                kernelseam.attention_bwd,
                *(dout, q, k, v, out, lse),
                **arrays,
                **more,
                bias_gradient=True,
                sink_gradient=True,
                deterministic=deterministic,
            ),
            list(wanted.values()),
            {"D": "head_dim", "D_v": "value_dim"}.get(empty, ""),
        )


def _paged() -> Iterator[Case]:
    q, sinks = normal(2, 3, 4, 16), normal(4)
    for pages, width in ((3, 2), (0, 2), (3, 0)):
        k, table = normal(pages, 4, 2, 16), np.full((2, width), 99, np.int32)
        yield Case(
            f"paged-{pages}-{width}",
            calling(
                kernelseam.attention_paged,
                *(q, k, k, table, np.zeros(2, np.int32)),
                sinks=sinks,
                return_lse=True,
            ),
            [np.zeros(q.shape), np.broadcast_to(sinks[None, :, None], (2, 4, 3))],
        )


def _sequences(of_q: str, of_k: str, repeats: str, of: str) -> Iterator[Case]:
    """Rows of two sequences, or of none, that are all empty on one side or both."""
    batch = 0 if of_q == "none" else 2
    offsets = {"empty": [0, 0, 0], "some": [0, 2, 3], "none": [0]}
    rows = {"empty": 0, "some": 3, "none": 0}
    n = {"B": batch, "H": 4, "S_q": 3, "S_k": 5}
    q, dout = normal(rows[of_q], 4, 16), normal(rows[of_q], 4, 16)
    k, v = normal(rows[of_k], 2, 16), normal(rows[of_k], 2, 16)
    sinks = normal(4)
    own, _ = _bias(n, repeats)
    out, lse = np.zeros(q.shape, F32), np.repeat(sinks[:, None], rows[of_q], axis=1)
    packed = {
        "cu_seqlens_q": np.array(offsets[of_q], np.int32),
        "cu_seqlens_k": np.array(offsets[of_k], np.int32),
    }
    more = {"max_seqlen_q": 3, "max_seqlen_k": 5}
    arrays = {"bias": own, "sinks": sinks, **packed}
    yield Case(
        f"sequences-{of_q}-{of_k}-{of}",
        calling(kernelseam.attention_varlen, q, k, v, **arrays, **more, return_lse=True),
        [out, lse],
    )
    for deterministic in (True, False):
        yield Case(
            f"sequences-bwd-{of_q}-{of_k}-{of}{'' if deterministic else '-any-order'}",
            calling(
                kernelseam.attention_bwd,
                *(dout, q, k, v, out, lse),
                **arrays,
                **more,
                bias_gradient=True,
                sink_gradient=True,
                deterministic=deterministic,
            ),
            [np.zeros(x.shape) for x in (q, k, v, own, sinks)],
        )


# ---------------------------------------------------------------- projections


def _projections() -> Iterator[Case]:
    heads, kv_heads, dim = 2, 1, 8
    width = (heads + 2 * kv_heads) * dim
    for empty, has_bias in (("B", True), ("S", True), ("hidden", True), ("B", False)):
        n = {"B": 2, "S": 3, "hidden": 16, empty: 0}
        lead, hidden = (n["B"], n["S"]), n["hidden"]
        name = f"{empty}{'-bias' if has_bias else ''}"
        x, weight, bias = normal(*lead, hidden), normal(width, hidden), normal(width)
        columns = x @ weight.T + (bias if has_bias else 0)
        counts = (heads, kv_heads, kv_heads)
        ends = np.cumsum([0, *counts]) * dim
        created = [
            columns[..., i:j].reshape(*lead, c, dim).swapaxes(1, 2)
            for i, j, c in zip(ends, ends[1:], counts, strict=False)
        ]
        yield Case(
            f"qkv-{name}",
            calling(
                kernelseam.fused_qkv_projection,
                *(x, weight, bias if has_bias else None),
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=dim,
            ),
            created,
        )
        given = [normal(n["B"], c, n["S"], dim) for c in counts]
        d = np.concatenate(
            [g.swapaxes(1, 2).reshape(*lead, c * dim) for g, c in zip(given, counts, strict=True)],
            2,
        )
        wanted = [
            d @ weight,
            np.einsum("bsc,bsh->ch", d, x),
            *([d.sum((0, 1))] if has_bias else []),
        ]
        yield Case(
            f"qkv-bwd-{name}",
            calling(
                kernelseam.fused_qkv_projection_bwd,
                *(*given, x, weight, has_bias, heads, kv_heads, dim),
            ),
            wanted,
        )
        if has_bias:
            yield Case(
                f"qkv-bwd-alone-{name}",
                calling(
                    kernelseam.fused_qkv_projection_bwd,
                    *(*given, None, None, True, heads, kv_heads, dim),
                    input_gradient=False,
                    weight_gradient=False,
                ),
                [d.sum((0, 1))],
            )
    for empty, has_bias in (("B", True), ("S", True), ("hidden", True), ("D", True), ("B", False)):
        n = {"B": 2, "S": 3, "hidden": 16, "H": 2, "D": 8, empty: 0}
        lead, wide = (n["B"], n["S"]), n["H"] * n["D"]
        name = f"{empty}{'-bias' if has_bias else ''}"
        attn, weight = normal(n["B"], n["H"], n["S"], n["D"]), normal(n["hidden"], wide)
        bias, residual = normal(n["hidden"]), normal(*lead, n["hidden"])
        rows = attn.swapaxes(1, 2).reshape(*lead, wide)
        yield Case(
            f"output-{name}",
            calling(
                kernelseam.fused_output_projection_residual,
                *(attn, weight, bias if has_bias else None, residual),
            ),
            [rows @ weight.T + (bias if has_bias else 0) + residual],
        )
        d = normal(*lead, n["hidden"])
        by_attn = (d @ weight).reshape(*lead, n["H"], n["D"]).swapaxes(1, 2)
        by_weight = np.einsum("bsh,bsc->hc", d, rows)
        yield Case(
            f"output-bwd-{name}",
            calling(kernelseam.fused_output_projection_residual_bwd, d, attn, weight, has_bias),
            [by_attn, by_weight, *([d.sum((0, 1))] if has_bias else []), d],
        )


# ---------------------------------------------------------------- merged states


def _merges() -> Iterator[Case]:
    for empty in ("N", "B", "H", "S", "D_v"):
        n = {"N": 3, "B": 2, "H": 2, "S": 5, "D_v": 16, empty: 0}
        outs, lses = normal(*n.values()), normal(*list(n.values())[:4])
        with np.errstate(all="ignore"):
            total = np.exp(lses.astype(np.float64)).sum(axis=0)
            lse = np.log(total)
            out = (np.exp(lses)[..., None] * outs).sum(axis=0) / np.where(total == 0, 1, total)[
                ..., None
            ]
        yield Case(
            f"merge-{empty}",
            calling(kernelseam.merge_states, outs, lses),
            [out, lse],
            "value_dim" if empty == "D_v" else "",
        )


CASES = [*_products(), *_attentions(), *_projections(), *_merges()]
