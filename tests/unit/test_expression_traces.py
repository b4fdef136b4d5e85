"""Traces of scores and masks: keys, what is traced again, known nodes, refusals."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernelseam.errors import InvalidValue
from kernelseam.expressions import tracing
from kernelseam.expressions.derivatives import affine
from kernelseam.expressions.evaluation import evaluate
from kernelseam.expressions.nodes import Type, constant, coordinate, make
from kernelseam.expressions.scores import ScoreExpression, score_expression

torch = pytest.importorskip("torch", reason="torch is missing: some functions are torch's")
H = 3


def of(w: int, doc: Any, extra: bool = False) -> Callable[..., Any]:
    return lambda b, h, q, kv: (doc[q] == doc[kv]) & (q - kv < w) & ((q > 3) if extra else (q > 2))


def test_keys() -> None:
    """Another number, length or array is the same binary; another structure or dtype is not."""
    doc = np.zeros(10, np.int64)
    first = score_expression(None, of(8, doc))
    assert first.numbers == (8,)
    same = score_expression(None, of(9, np.zeros(20, np.int64)))
    assert same.structure == first.structure
    assert same.structure.key == first.structure.key
    assert same.numbers == (9,)
    others = (of(8, doc.astype(np.int32)), of(8, doc, True), of(8.0, doc))  # type: ignore[arg-type]
    assert first.structure.key not in {score_expression(None, m).structure.key for m in others}
    assert first.structure.key == "9cea75753c33783cf86dd2a7"


def test_alike_functions_are_alike() -> None:
    a = score_expression(None, lambda b, h, q, kv: (kv <= q) & (kv > q - 5))
    b = score_expression(None, lambda b, h, q, kv: (q - 5 < kv) & (q >= kv))
    assert a.structure.key == b.structure.key
    one = score_expression(lambda s, b, h, q, kv: s + TABLE[q][kv])
    assert one.structure == score_expression(lambda s, b, h, q, kv: s + TABLE[q, kv]).structure


def traced_count(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    count = [0]
    whole = tracing._traced

    def counting(*args: Any) -> Any:
        count[0] += 1
        return whole(*args)

    monkeypatch.setattr(tracing, "_traced", counting)
    tracing.forget()
    return count


def test_traces_are_remembered_by_code(monkeypatch: pytest.MonkeyPatch) -> None:
    count = traced_count(monkeypatch)
    for w in range(5):
        doc = np.full(w + 3, w, np.int32)
        e = score_expression(None, of(w, doc))
        assert e.numbers == (w,)
        assert e.arrays[0] is doc
    assert count == [1]
    score_expression(None, of(3, np.zeros(4, np.int64)))  # another dtype
    assert count == [2]
    score_expression(None, of(3, np.zeros(4, np.int32), extra=True))  # a bool is a constant
    assert count == [3]
    score_expression(None, of(3, np.zeros(4, np.int32)))
    assert count == [3]


def test_numbers_that_python_needs_are_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    count = traced_count(monkeypatch)

    def looped(steps: int, w: float) -> ScoreExpression:
        def mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            if steps > 1:
                s = s + w
            for _ in range(steps):
                s = s * 0.5
            return s * math.log(steps)

        return score_expression(mod)

    assert looped(2, 3.0).numbers == (3.0,)
    assert looped(2, 4.0).numbers == (4.0,)
    assert count == [1]
    assert looped(2, 3.0).structure != looped(3, 3.0).structure
    assert count == [2]


def test_attributes_are_read_again() -> None:
    class Window:
        def __init__(self, w: int) -> None:
            self.w, self.table = w, {"slope": np.ones(H, np.float32) * w}

        def score(self, s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            return s + self.table["slope"][h] * self.w

    one, two = Window(1), Window(2)
    assert score_expression(one.score).numbers == (1,)
    e = score_expression(two.score)
    assert e.numbers == (2,)
    assert e.arrays[0] is two.table["slope"]
    two.w = 7
    assert score_expression(two.score).numbers == (7,)


def test_lengths_by_keyword() -> None:
    def bottom_right(b: Any, h: Any, q: Any, kv: Any, *, q_len: Any, kv_len: Any) -> Any:
        return kv - q <= kv_len - q_len

    e = score_expression(None, bottom_right)
    at = {"q_idx": np.arange(3)[:, None], "kv_idx": np.arange(5), "q_len": 3, "kv_len": 5}
    (seen,) = evaluate([e.structure.visible], at, (), ())
    np.testing.assert_array_equal(seen, np.tri(3, 5, 2, dtype=bool))


def test_known_nodes() -> None:
    cap = 30.0
    e = score_expression(lambda s, b, h, q, kv: cap * np.tanh(s / cap))
    assert e.structure.score.operation == "softcap"
    assert affine(e.structure.score) is None
    slopes = np.ones(H, np.float32)
    line = affine(
        score_expression(lambda s, b, h, q, kv: 2 * s - slopes[h] * abs(q - kv)).structure.score
    )
    assert line is not None
    assert line[0] == constant(2, Type.FLOAT)
    assert line[1].reads == {"h", "q_idx", "kv_idx"}
    x, y = coordinate("q_idx"), coordinate("kv_idx")
    assert make("add", x, y) == make("add", y, x)
    assert make("not", make("lt", x, y)) == make("le", y, x)
    assert affine(make("floor", coordinate("score", Type.FLOAT))) is None


# ---- refusals

TABLE = np.zeros((4, 4), np.float32)
BIG = 2**40


def branches(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    if q > kv:
        return s
    return -s


REFUSED: dict[str, tuple[Callable[..., Any], str, str]] = {
    "branch": (branches, "if q > kv:", "Write where(condition, a, b)"),
    "chain": (lambda s, b, h, q, kv: s if 0 < q < 3 else -s, "0 < q < 3", "(a <= x) & (x <= b)"),
    "math": (lambda s, b, h, q, kv: math.tanh(s), "math.tanh(s)", "the function of NumPy, torch"),
    "cumsum": (lambda s, b, h, q, kv: torch.cumsum(s, 0), "cumsum(s, 0)", "one element"),
    "near": (lambda s, b, h, q, kv: s.tanhh(), "s.tanhh()", "Near: tanh"),
    "whole": (lambda s, b, h, q, kv: s + TABLE, "s + TABLE", "used without indices"),
    "slice": (lambda s, b, h, q, kv: s + TABLE[:2][q, kv], "TABLE[:2]", "Slice it before"),
    "float index": (lambda s, b, h, q, kv: s + TABLE[s, q], "TABLE[s, q]", "to an integer"),
    "too many": (lambda s, b, h, q, kv: s + TABLE[b, h, q], "TABLE[b, h, q]", "array of 2 axes"),
    "rounding": (lambda s, b, h, q, kv: s.to(torch.float16), "torch.float16", "conversion out"),
    "shift": (lambda s, b, h, q, kv: s >> 1, "s >> 1", "are of integers and bools"),
    "shift by": (lambda s, b, h, q, kv: s * (q >> TABLE[q, kv]), "q >> TABLE", "Convert it, or"),
    "bits": (lambda s, b, h, q, kv: s * (TABLE[q, kv] & kv), "& kv", "are of integers and bools"),
    "xor": (
        lambda s, b, h, q, kv: s * (q ^ TABLE[q, kv]),
        "q ^ TABLE",
        "are of integers and bools",
    ),
    "invert": (lambda s, b, h, q, kv: ~s, "~s", "are of integers and bools"),
    "big": (lambda s, b, h, q, kv: s + BIG, "s + BIG", "does not fit int32"),
    "signature": (
        lambda s, b, h, q: s,
        "test_expression_traces.py:",
        "Write score_mod(score, b, h",
    ),
    "raises": (lambda s, b, h, q, kv: s + undefined, "undefined", "NameError"),  # type: ignore[name-defined]  # noqa: F821
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    """With the user's line and the remedy."""
    mod, line, rest = REFUSED[name]
    with pytest.raises(InvalidValue) as caught:
        score_expression(mod)
    assert str(caught.value).startswith("score_mod = ")
    assert line in str(caught.value)
    assert rest in str(caught.value).split("),: ")[-1]  # behind a line of this table
    assert "test_expression_traces.py:" in str(caught.value)


def test_partial_functions_and_values() -> None:
    e = score_expression(None, functools.partial(lambda w, b, h, q, kv: q - kv < w, 40))
    assert e.numbers == (40,)
    with pytest.raises(InvalidValue, match="mask_mod = 3: must be a function"):
        score_expression(None, 3)  # type: ignore[arg-type]
