"""Random fields: a descriptor is either refused with InvalidValue, or its operands span what a
plain walk touches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from kernelseam import Attention, BatchedGemmPointers, BatchedGemmStrided
from kernelseam.contract import OperandRule
from kernelseam.descriptors.common.validation import shared_axis
from kernelseam.dtypes import DType
from kernelseam.errors import InvalidValue

small = st.integers(0, 4)
junk = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(),
    st.text(max_size=3),
    st.integers(-(2**70), 2**70),
    st.builds(np.zeros, st.just(3)),
    st.builds(object),
    st.sampled_from([2**31 - 1, 2**31, 2**61, 2**63, np.int64(2), float("nan"), -1]),
)
strides = st.one_of(st.none(), st.none(), st.none(), st.integers(0, 99))
factors = st.one_of(st.floats(), st.integers(-3, 3), st.just(0))
dtypes = st.sampled_from(["float16", "bfloat16", "float32", "float64", *DType])
addresses = st.one_of(
    st.none(), st.integers(0, 2**63 - 1), st.integers(1, 100).map(lambda i: 4096 * i)
)


def fields(required: dict[str, Any], optional: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Sensible fields, of which one or two may be spoiled."""
    spoiled = st.dictionaries(st.sampled_from([*required, *optional]), junk, max_size=2)
    both = st.tuples(
        st.fixed_dictionaries(required, optional=optional), st.one_of(st.just({}), spoiled)
    )
    return both.map(lambda x: {**x[0], **x[1]})


def stride_fields(*names: str) -> dict[str, Any]:
    return {f"stride_{x}_{axis}": strides for x in names for axis in ("batch", "head", "row")}


def touched(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Every offset of a walk, one by one."""
    if 0 in shape:
        return []  # itertools.product would spread out the other axes
    return [
        sum(i * s for i, s in zip(index, strides, strict=True))
        for index in itertools.product(*map(range, shape))
    ]


def check(rules: Sequence[OperandRule]) -> None:
    for rule in rules:
        count = int(np.prod([float(n) for n in rule.shape]))
        if count > 5_000:
            assert max(count, rule.span) * (rule.dtype.itemsize if rule.dtype else 8) < 2**64
            continue
        offsets = touched(rule.shape, rule.strides)
        assert rule.span == (max(offsets) + 1 if offsets else 0)
        assert min(offsets, default=0) >= 0
        if rule.written:
            assert len(set(offsets)) == len(offsets)


GEMM: dict[str, Any] = {
    **dict.fromkeys(("M", "N", "K", "batch", "num_heads"), small),
    **dict.fromkeys(("a_transposed", "b_transposed"), st.booleans()),
    **dict.fromkeys(("alpha", "beta"), factors),
    "dtype": dtypes,
}
GROUPS: dict[str, Any] = dict.fromkeys(("c_batch_group", "c_head_group"), st.integers(1, 2))


@settings(max_examples=150)
@given(
    fields(
        GEMM,
        {
            "b_head_group": st.integers(1, 2),
            "dtype_c": dtypes,
            **stride_fields("a", "b", "c"),
            **GROUPS,
            **dict.fromkeys("ABC", addresses),
            **dict.fromkeys(("bias", "residual"), addresses),
            **dict.fromkeys(
                ("stride_bias_batch", "stride_bias_head", "stride_residual_head"), strides
            ),
        },
    )
)
def test_strided(given_fields: dict[str, Any]) -> None:
    try:
        p = BatchedGemmStrided(**given_fields).problem()
    except InvalidValue as e:
        assert e.field and e.rule and e.remedy
        return
    check(p.operands)
    hash(p)
    assert p.results * p.summed == p.matrices
    names = ["A", "B", "C", *(n for n in ("bias", "residual") if given_fields.get(n) is not None)]
    assert [r.name for r in p.operands] == names
    assert p.spec.plain == (names == ["A", "B", "C"] and p.summed == 1)


@settings(max_examples=150)
@given(
    fields(
        {**dict.fromkeys(("batch", "num_heads", "S_q", "S_k", "head_dim"), small), "dtype": dtypes},
        {
            "kv_heads": st.integers(1, 2),
            "value_dim": small,
            "causal": st.booleans(),
            "return_lse": st.booleans(),
            "scale": factors,
            **stride_fields("q", "k", "v", "out"),
            "stride_lse_batch": strides,
            "stride_lse_head": strides,
            **dict.fromkeys(("q", "k", "v", "out", "lse"), addresses),
        },
    )
)
def test_attention(given_fields: dict[str, Any]) -> None:
    try:
        p = Attention(**given_fields).problem()
    except InvalidValue as e:
        assert e.field and e.rule and e.remedy
        return
    check(p.operands)
    hash(p)
    assert np.isfinite(p.scale)
    if p.S_q < 100 and p.S_k < 100:
        seen = sum(
            not p.spec.causal or j <= i + p.S_k - p.S_q for i in range(p.S_q) for j in range(p.S_k)
        )
        assert p.visible == seen


@st.composite
def lists(draw: st.DrawFn) -> dict[str, Any]:
    """Lists of the right length, mostly: evenly spaced, scattered, or left out."""
    drawn = draw(
        fields(
            GEMM,
            {
                "dtype_c": dtypes,
                "alignment": st.sampled_from([None, 8, 16]),
                **dict.fromkeys(("stride_a_row", "stride_b_row", "stride_c_row"), strides),
                **GROUPS,
            },
        )
    )
    try:
        products = min(max(int(drawn["batch"] * drawn["num_heads"]), 0), 20)
        results = max(
            products // int(drawn.get("c_batch_group", 1) * drawn.get("c_head_group", 1)), 0
        )
    except (TypeError, ValueError, OverflowError, ZeroDivisionError):
        products = results = 2
    added = draw(st.sets(st.sampled_from(["bias_ptrs", "residual_ptrs"])))
    for name in ("A_ptrs", "B_ptrs", "C_ptrs", *sorted(added)):
        count = products if name in ("A_ptrs", "B_ptrs") else results
        kind = draw(st.sampled_from(["even"] * 6 + ["scattered", "scattered", "none", "spoiled"]))
        if kind == "even":
            start, step = 2**20 * draw(st.integers(1, 99)), 16 * draw(st.integers(0, 64))
            drawn[name] = [start + i * step for i in range(count)]
        elif kind == "scattered":
            where = st.integers(1, 2**20).map(lambda i: 64 * i)
            drawn[name] = draw(st.lists(where, min_size=count, max_size=count))
        elif kind == "spoiled":
            drawn[name] = draw(junk | st.lists(junk, max_size=4))
    return drawn


@settings(max_examples=150)
@given(lists())
def test_pointers(given_fields: dict[str, Any]) -> None:
    try:
        d = BatchedGemmPointers(**given_fields)
        simpler, note = d.simplified()
    except InvalidValue as e:
        assert e.field and e.rule and e.remedy
        return
    p = d.problem()
    check(
        [OperandRule("C", p.spec.dtype_c, (p.M, p.N), (p.c_strides[2], 1), 1, True)]
        if p.M and p.N
        else []
    )
    added = [n for n in ("bias", "residual") if given_fields.get(f"{n}_ptrs") is not None]
    assert [r.name for r in p.operands] == [f"{n}_ptrs" for n in ("A", "B", "C", *added)]
    if note:
        s: Any = simpler.problem()
        check(s.operands)
        assert (s.results, s.summed, s.matrices) == (p.results, p.summed, p.matrices)
        sizes = {
            "A": p.spec.dtype,
            "B": p.spec.dtype,
            "C": p.spec.dtype_c,
            "bias": p.spec.bias,
            "residual": p.spec.residual,
        }
        for name in ("A", "B", "C", *added) if p.reads_inputs else ("C", *added):
            first, walk = simpler.strided.operands()[name], getattr(s, f"{name.lower()}_strides")  # type: ignore[attr-defined]
            heads = s.num_heads // (1 if name in "AB" else s.c_head_group)
            batches = s.batch // (1 if name in "AB" else s.c_batch_group)
            entries = [
                first + (b * walk[0] + h * walk[1]) * sizes[name].itemsize
                for b in range(batches)
                for h in range(heads)
            ]
            assert list(given_fields[f"{name}_ptrs"]) == entries


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 40)), min_size=1, max_size=4))
def test_an_output_overlaps_itself_exactly_where_a_walk_meets_itself(
    axes: list[tuple[int, int]],
) -> None:
    shape, steps = (tuple(x) for x in zip(*axes, strict=True))
    offsets = touched(shape, steps)
    actual = shared_axis(OperandRule("C", DType.float32, shape, steps, 4, True))
    assert (actual is not None) == (len(set(offsets)) < len(offsets))


@settings(max_examples=150)
@given(
    rows=st.integers(1, 4),
    columns=st.integers(1, 4),
    gap=st.integers(-4, 3),
    apart=st.integers(0, 30),
)
def test_two_outputs_overlap_exactly_where_their_walks_meet(
    rows: int, columns: int, gap: int, apart: int
) -> None:
    # the stride of a single row says nothing
    step = columns + abs(gap) if rows > 1 else max(columns + gap, 0)
    one, other = (
        {start + i * step + j for i in range(rows) for j in range(columns)} for start in (0, apart)
    )
    try:
        BatchedGemmPointers(
            M=rows,
            N=columns,
            K=1,
            num_heads=2,
            dtype="float32",
            stride_c_row=step,
            C_ptrs=[4096, 4096 + 4 * apart],
        )
    except InvalidValue as e:
        assert e.field == "C_ptrs[1]" and one & other
    else:
        assert not one & other


@settings(max_examples=100)
@given(
    shape=st.tuples(small, small, small, small),
    take=st.tuples(*[st.sampled_from([1, 1, 2, -1])] * 4),
    order=st.permutations(range(4)),
    dtype=st.sampled_from(["f2", "f4", "f8", "i4"]),
)
def test_arrays_of_any_strides(
    shape: tuple[int, ...], take: tuple[int, ...], order: list[int], dtype: str
) -> None:
    """for_scores walks exactly the elements of the arrays it is given, or refuses them."""

    def view() -> np.ndarray[Any, Any]:
        return np.zeros(shape, dtype)[tuple(slice(None, None, t) for t in take)].transpose(order)

    q, k = view(), view()
    try:
        p = BatchedGemmStrided.for_scores(
            q, k, np.zeros((*q.shape[:3], k.shape[2]), dtype)
        ).problem()
    except InvalidValue as e:
        assert e.field and e.rule and e.remedy
        return
    if q.size and p.M * p.N:
        own = [s // q.itemsize for s in q.strides]
        assert sorted(touched(q.shape, own)) == sorted(touched(q.shape, (*p.a_strides, 1)))
