"""``bind(check=True)`` of projections: right results pass whatever their layout, wrong ones are
named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernelseam import OutputProjection, OutputProjectionBwd, QkvProjection, QkvProjectionBwd, plan
from kernelseam.errors import WrongResult
from kernelseam.oracle import sampling
from kernelseam.planning import Call
from kernelseam.planning.binding import in_order

Discovered = Callable[..., Any]
RNG = np.random.default_rng(0)
B, S, HIDDEN, H, G, D = 2, 9, 24, 4, 2, 8
WIDTH = (H + 2 * G) * D


def normal(*shape: int, dtype: Any = np.float32) -> Any:
    return RNG.standard_normal(shape).astype(dtype)


def i32(*values: int) -> Any:
    return np.array(values, np.int32)


def qkv(dtype: Any = np.float32, **more: Any) -> QkvProjection:
    """Token-major results, turned."""
    x, weight = normal(B, S, HIDDEN, dtype=dtype), normal(WIDTH, HIDDEN, dtype=dtype)
    q, k, v = (normal(B, S, n, D, dtype=dtype) for n in (H, G, G))
    angle = normal(20, 3)
    return QkvProjection.from_arrays(
        x,
        weight,
        q,
        k,
        v,
        **{
            "layout": "bshd",
            "bias": normal(WIDTH),
            "cos": np.cos(angle),
            "sin": np.sin(angle),
            "first_position": 4,
            **more,
        },
    )


def paged() -> QkvProjection:
    pages = normal(7, 4, G, D), normal(7, 4, G, D)
    return QkvProjection.from_arrays(
        normal(B, S, HIDDEN),
        normal(WIDTH, HIDDEN),
        normal(B, H, S, D),
        *pages,
        block_table=i32(6, 0, 3, 1, 2, 5).reshape(2, 3),
        positions=np.stack([RNG.permutation(12)[:S] for _ in range(B)]).astype(np.int32),
    )


def appended(kind: str, scaled: str, nan: bool = False) -> QkvProjection:
    """Two packed sequences, the first of which has fewer keys than rows; two rows are of none.
    ``nan``: a column of q and one of k are NaN."""
    weight = normal(WIDTH, HIDDEN)
    weight[[3, H * D + 2] if nan else []] = np.nan
    pages = [np.zeros((7, 4, G, D), kind) for _ in "kv"]
    shape = (7, 4, G) if scaled == "tokens" else (G,)
    scales = {n: np.full(shape, 0.1, np.float32) for n in ("k_scales", "v_scales")}
    angle = normal(20, 3)
    return QkvProjection.from_arrays(
        normal(S, HIDDEN),
        weight,
        normal(H, S, D),
        *pages,
        block_table=i32(6, 0, 3, 1, 2, 5).reshape(2, 3),
        cu_seqlens=i32(0, 4, 7),
        kv_lengths=i32(3, 11),
        cos=np.cos(angle),
        sin=np.sin(angle),
        **(scales if scaled else {}),
    )


def output(**more: Any) -> OutputProjection:
    return OutputProjection.from_arrays(
        **{
            "attn_out": normal(B, H, S, D),
            "weight": normal(HIDDEN, H * D),
            "bias": normal(HIDDEN),
            "residual": normal(B, S, HIDDEN),
            "out": normal(B, S, HIDDEN),
            **more,
        }
    )


def in_place() -> OutputProjection:
    residual = normal(B, S, HIDDEN)
    return output(residual=residual, out=residual)


def qkv_bwd(**more: Any) -> QkvProjectionBwd:
    return QkvProjectionBwd.from_arrays(
        **{
            "dq": normal(B, H, S, D),
            "dk": normal(B, G, S, D),
            "dv": normal(B, G, S, D),
            "input": normal(B, S, HIDDEN),
            "weight": normal(WIDTH, HIDDEN),
            "d_input": normal(B, S, HIDDEN),
            "d_weight": normal(WIDTH, HIDDEN),
            "d_bias": normal(WIDTH),
            **more,
        }
    )


def output_bwd(**more: Any) -> OutputProjectionBwd:
    return OutputProjectionBwd.from_arrays(
        **{
            "d_output": normal(B, S, HIDDEN),
            "attn_out": normal(B, H, S, D),
            "weight": normal(HIDDEN, H * D),
            "d_attn_out": normal(B, H, S, D),
            "d_weight": normal(HIDDEN, H * D),
            "d_bias": normal(HIDDEN),
            **more,
        }
    )


RIGHT: dict[str, Callable[[], Any]] = {
    "q, k and v": qkv,
    "in half precision": lambda: qkv(np.float16),
    "pairs": lambda: qkv(rotary_style="pairs"),
    "pages": paged,
    "appended": lambda: appended("float32", ""),
    "appended in 8 bits": lambda: appended("float8_e4m3fn", "heads"),
    "appended with scales": lambda: appended("float8_e4m3fn", "tokens"),
    "appended with NaN": lambda: appended("float8_e4m3fn", "tokens", nan=True),
    "without bias": lambda: qkv(bias=None, cos=None, sin=None, first_position=0),
    "output": output,
    "output in place": in_place,
    "output alone": lambda: output(bias=None, residual=None),
    "rows": lambda: output(attn_out=normal(B, S, H * D)),
    "gradients": qkv_bwd,
    "d_input alone": lambda: qkv_bwd(d_weight=None, d_bias=None),
    "d_bias alone": lambda: qkv_bwd(d_input=None, d_weight=None, input=None, weight=None),
    "gradients of the output": output_bwd,
    "d_weight alone": lambda: output_bwd(d_attn_out=None, d_bias=None),
    "no tokens": lambda: qkv_bwd(
        dq=normal(B, H, 0, D),
        dk=normal(B, G, 0, D),
        dv=normal(B, G, 0, D),
        input=normal(B, 0, HIDDEN),
        d_input=normal(B, 0, HIDDEN),
    ),
    "no batch": lambda: output(
        attn_out=normal(0, H, S, D), residual=normal(0, S, HIDDEN), out=normal(0, S, HIDDEN)
    ),
}


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("name", RIGHT)
def test_right_results_pass(
    name: str, sampled: bool, discovered: Discovered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether all of them are looked at or a few."""
    discovered()
    if sampled:
        monkeypatch.setattr(sampling, "ORACLE_ROWS", 4)
    call = plan(RIGHT[name]()).bind(check=True)
    call()
    call()  # of a residual in place what it is then counts
    call.rebind()()


@pytest.mark.parametrize(
    ("name", "operand", "at", "where"),
    [
        ("q, k and v", "q", (1, 8, 3, 7), "q[1, 3, 8, 7] is"),
        ("q, k and v", "v", (0, 0, 1, 2), "v[0, 1, 0, 2] is"),
        ("output", "out", (1, 8, 23), "out[1, 0, 8, 23] is"),
        ("output in place", "out", (0, 3, 5), "out[0, 0, 3, 5] is"),
        ("gradients", "d_input", (1, 2, 3), "d_input[1, 0, 2, 3] is"),
        ("gradients", "d_bias", (63,), "d_bias[63] is"),
        ("gradients", "d_weight", (40, 3), "d_weight[0, 0, 40, 3] is"),
        ("gradients of the output", "d_attn_out", (1, 3, 8, 7), "d_attn_out[1, 3, 8, 7] is"),
        ("gradients of the output", "d_weight", (23, 31), "d_weight[0, 0, 23, 31] is"),
    ],
)
def test_one_element_that_is_off_is_found(
    name: str,
    operand: str,
    at: tuple[int, ...],
    where: str,
    discovered: Discovered,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    discovered()
    launch = Call.__init__

    def spoil(self: Call, *arguments: Any) -> None:
        launch(self, *arguments)
        given: Any = self._operands[operand]
        array = getattr(given, "owner", given)

        def off(stream: int) -> None:
            array[at] += 0.1

        self._run = in_order((self._run, off))

    monkeypatch.setattr(Call, "__init__", spoil)
    descriptor = RIGHT[name]()
    with pytest.raises(WrongResult) as caught:
        plan(descriptor).bind(check=True)()
    assert caught.value.finding.startswith(where) and "the oracle says" in caught.value.finding
    plan(descriptor).bind()()  # unasked, nothing is looked at


@pytest.mark.parametrize("name", ["pages", "appended", "appended with scales"])
def test_a_page_that_is_off_is_found(name: str, discovered: Discovered) -> None:
    discovered()
    descriptor = RIGHT[name]()
    made = plan(descriptor)
    made.bind(check=True)()
    swapped: Any = descriptor.operands()
    elsewhere = np.array(swapped["block_table"].owner[::-1])
    checked = made.bind(check=True)

    def moved(stream: int) -> None:
        swapped["block_table"].owner[...] = elsewhere

    checked._run = in_order((checked._run, moved))
    with pytest.raises(WrongResult, match=r"[kv](_scales)?\[\d, \d, \d(, \d)?\] is"):
        checked()
