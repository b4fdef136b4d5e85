"""Numbers that record what is computed with them: the function that a trace makes computes what the
computation does wherever it says anything, and says nothing where that would go another way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernelseam.symbolic import Symbol, Trace, Untraceable, as_float, least, most, recorded

Function = Callable[..., Any]


def traced(compute: Function, *values: Any) -> Function:
    """``compute`` as a function traced at these values; a list is what it computes."""
    trace = Trace()
    result = compute(*[trace.input(f"x{i}", v) for i, v in enumerate(values)])
    results = result if isinstance(result, list) else [result]
    lines, late = trace.code(results, frozenset())
    assert not late
    texts = ", ".join(map(trace.text, results))
    parameters = ", ".join(f"x{i}" for i in range(len(values)))
    body = "\n    ".join([*lines, f"return [{texts}]"])
    namespace = dict(trace.namespace)
    exec(f"def run({parameters}):\n    {body}", namespace)
    run: Function = namespace["run"]
    return run


@recorded
def collatz(n: int) -> int:
    steps = 0
    while n > 1:
        n, steps = (n // 2, steps + 1) if n % 2 == 0 else (3 * n + 1, steps + 1)
    return steps


def branching(a: int, b: int, c: int) -> list[Any]:
    """Of all that kernels' definitions do with numbers."""
    tiles = -(-a // 64) * most(b, 1)
    kept = least(tiles, 132) if c > 3 else tiles
    row = a * 128 if a % 8 == 0 else a * 128 + (8 - a % 8)
    shared = {b: "b", c: "c"}.get(5, "none")  # a hash, and equality
    waves = list(range(least(c, 4)))  # an index
    return [
        tiles,
        kept,
        row * 2 % 16,
        len(shared) + len(waves),
        collatz(a),
        (b - 1).bit_length() if b > 1 else 0,
        a / (c + 1),
        max(a, b, c) - min(a, b, c),
        bool(a == b) + (a != c) + (b <= c),
        math.prod((a, b, c)) + sum((a, b)),
        as_float(a) * 0.5,
    ]


@given(*[st.integers(0, 400)] * 3, st.lists(st.tuples(*[st.integers(0, 400)] * 3), max_size=9))
def test_a_function_says_what_the_computation_says_or_nothing(
    a: int, b: int, c: int, others: list[tuple[int, int, int]]
) -> None:
    run = traced(branching, a, b, c)
    assert run(a, b, c) == branching(a, b, c)
    for other in others:
        assert run(*other) in (None, branching(*other))


@given(st.floats(), st.floats(), st.lists(st.tuples(st.floats(), st.floats()), max_size=9))
def test_so_with_floats(x: float, y: float, others: list[tuple[float, float]]) -> None:
    def compute(x: float, y: float) -> list[Any]:
        sign = 1 if x > 0 else 0 if x == 0 else -1
        return [x * 2.5 + y, sign, x <= y, x >= y, 0.0 if y - y != 0 else y / 3]

    run = traced(compute, x, y)
    for values in [(x, y), *others]:
        actual, expected = run(*values), compute(*values)
        assert actual is None or repr(actual) == repr(expected)
    assert run(x, y) is not None


def test_what_is_known_is_not_asked_again() -> None:
    trace = Trace()
    n, m = trace.input("n", 100), trace.input("m", 100)
    assert n > 10 and n >= 8 and not n < 11 and n != 0 and n * 64 % 64 == 0 and n // 4 < 2**60
    assert (n - n % 64) % 1 == 0 and least(n, 5) == 5 and most(n, -1) is n
    assert n == m and m == n and n * 3 == m * 3
    assert (n - 1) * m + m == n * n and not n * 3 < m * 3 and n * 2 != m - 7
    assert -(-(n * 512) // 256) * 256 == n * 512 and n * 24 // 16 == n * 3 // 2
    assert (n * 2 % 16 == 0) is (m % 8 == 0) and -n * 3 + 5 < -294
    lines, _ = trace.code([], frozenset())
    conditions = "n == m and n >= 100 and (n // 4) <= 1152921504606846975 and (n % 8)"
    assert lines == [f"if not ({conditions}): return None"]


def test_a_branch_ends_and_leaves_no_trace() -> None:
    trace = Trace()
    n = trace.input("n", 100)
    assert n > 3
    before = trace.code([n * 2], frozenset())
    with trace.branch(frozenset()):
        assert n > 50 and (n * 2) % 8 == 0
        lines, _ = trace.code([n * 2], frozenset())
        assert "n >= 51" in "\n".join(lines) and "n >= 4" not in "\n".join(lines)
    assert trace.code([n * 2], frozenset()) == before


def test_late_numbers_and_what_needs_them_come_last() -> None:
    trace = Trace()
    n, address = trace.input("n", 6), trace.input("a", 1 << 20)
    assert address % 16 == 0 and n > 2
    early, late = trace.code([address + n], frozenset(("a",)))
    assert early == ["if not (n >= 3): return None"]
    assert late[0].endswith("= a + n") and late[1] == "if not (a % 16 == 0): return None"


def test_a_symbol_passes_for_its_number() -> None:
    trace = Trace()
    n, x = trace.input("n", 6), trace.input("x", 0.5)
    assert isinstance(n, int) and not isinstance(n, bool) and isinstance(x, float)
    assert type(n) is Symbol and n not in (None, "n") and n != "6"
    assert [10, 20, 30, 40, 50, 60, 70][n] == 70 and f"{n}" == "6" and {6: "six"}[n] == "six"
    lines, _ = trace.code([], frozenset())
    assert lines == ["if not (n == 6): return None"]
    with pytest.raises(TypeError, match="another trace"):
        trace.text(Trace().input("m", 1) * 1)
    nan = trace.input("y", math.nan)
    with pytest.raises(Untraceable, match="NaN"):
        int(nan)
