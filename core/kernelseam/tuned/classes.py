"""Problem classes: problems of one class are computed by one implementation in one tile, and share
a tuned choice.

A class is the spec (dtypes, views, options, access width of rows), the extents that a model fixes
(heads, head_dim, hidden), exactly, and the extents that vary by request in steps: rows of products
exactly below 64, then in 64s, then by the five leading bits of those, and queries and keys
likewise; columns and K by six bits, and by what divides them; up to 64 queries in steps of half an
octave, their keys and their batch by four bits, larger batches too. Where heads share keys, queries
of a class have as many tiles of whole queries of them.
Of strides it has what costs look at: whether an axis repeats, whether axes follow one another
without a gap, whether rows are whole lines of the cache, or a bias's multiples of 16 bytes.

A class is known by one of its problems, its representative, whose extents and strides follow from
the class alone. It decides for all. Tuned choices have wider classes, of representatives: extents
in steps of √2, 609 to 861 are "about 724".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import cache
from typing import Any, TypeVar, cast

from kernelseam.contract import Problem
from kernelseam.tuned.steps import FEW, about, columns, entries, few, near, rows, shared, total

T = TypeVar("T")
Strides = tuple[int, ...]
Extents = tuple[dict[str, object], dict[str, int]]
"""Extents that must be equal, and extents that are bucketed."""

_LINE = 64
"""Elements: a stride of so many, or of a multiple, is one of whole lines."""
_CHUNK_BYTES = 16
"""That kernels copy at once, of rows that lie multiples of so many apart."""
_ROW_APART, _HEAD_APART, _BATCH_APART = 8, (1 << 26) + _LINE, (1 << 29) + _LINE
"""Strides of a representative where axes do not follow one another: no powers of two, which whole
matrices and heads of them are."""
_WIDEST = 1 << 18
"""Elements of a projection's rows: of more heads and of wider ones than models have."""
_KEPT = "_representative"
"""Where a problem keeps its representative."""
_INVARIANT_BATCH, _INVARIANT_LENGTH = 16, 1024
"""Extents of the one class of a batch_invariant spec: they must not decide which kernel computes a
row."""


def representative(problem: T) -> T:
    """The problem that decides for those of the class; the problem itself where its operation is
    unknown here, which then is a class of its own."""
    represent = _REPRESENTATIVES.get(getattr(problem, "operation", ""))
    if represent is None:
        return problem
    kept = vars(problem)
    known: T | None = kept.get(_KEPT)
    if known is None:  # dispatch asks several times for a problem
        known = kept[_KEPT] = represent(problem)
        represents_itself(known)
    return known


def represents_itself(problem: object) -> None:
    """Of a problem that is a class's representative."""
    vars(problem)[_KEPT] = problem


def _strides(s: Strides, n: int, represented: int, width: int, heads: int = 1) -> Strides:
    """The strides (batch, row) or (batch, head, row) of a matrix of ``n`` rows, ``represented`` and
    of ``width`` columns in the class."""
    *outer, row = s
    line = -(-width // _LINE) * _LINE
    if row % _LINE:
        line += _ROW_APART
    if row == 0:
        line = 0
    result = [line]
    head, of_heads = 0, 0
    if len(outer) > 1:
        head = outer[-1]
        of_heads = 0 if head == 0 else represented * line if head == n * row else _HEAD_APART
        result.insert(0, of_heads)
    if outer:
        batch = outer[0]
        follows, is_even = batch == n * row, len(outer) > 1 and batch == heads * head
        apart = heads * of_heads if is_even else _BATCH_APART
        result.insert(0, 0 if batch == 0 else represented * line if follows else apart)
    return tuple(result)


def _steps(*strides: Strides) -> list[Strides]:
    """Strides of which only those that are 0 count."""
    return [tuple([0 if n == 0 else _HEAD_APART for n in s]) for s in strides]


def _plane(s: Strides, chunk: int) -> Strides:
    """Strides (…, column) of a matrix for each of some axes: which are 0, and whether columns
    follow one another in rows that lie multiples of ``chunk`` elements apart."""
    *outer, column = s
    whole = column == 1 and not any(n % chunk for n in outer)
    return (*_steps(tuple(outer))[0], 1) if whole else _steps(s)[0]


def _sign(x: float) -> float:
    """1.0 for what is above 0, 0.0 for 0, −1.0 for less and for a NaN."""
    return 1.0 if x > 0 else 0.0 if x == 0 else -1.0


def _attention(p: Any) -> Any:
    spec = p.spec
    group = p.head_group if 0 < p.head_group < FEW else 1  # heads that may share a tile's rows
    if p.S_q <= FEW:
        batch, s_q, s_k = entries(p.batch), shared(p.S_q, few(p.S_q), group), near(p.S_k)
    else:
        batch = entries(p.batch) if p.batch > FEW else p.batch
        s_q, s_k = shared(p.S_q, rows(p.S_q), group), rows(p.S_k)
    if spec.batch_invariant:
        batch, s_q, s_k = _INVARIANT_BATCH, _INVARIANT_LENGTH, _INVARIANT_LENGTH
    width = -(-s_k // p.page_size) if p.page_size else 0
    walks = (
        *("q_strides", "k_strides", "v_strides", "out_strides", "lse_strides"),
        *("alibi_strides", "bias_strides", "mask_strides"),
        *("q_scale_strides", "k_scale_strides", "v_scale_strides"),
    )
    strides = dict(zip(walks, _steps(*[getattr(p, n) for n in walks]), strict=True))
    for name in ("k_strides", "v_strides") if p.page_size else ():
        page, _, row = getattr(p, name)
        if row != 0:  # whether all pages' rows are one matrix's
            far, *others = strides[name]
            apart = far * p.page_size if page % row == 0 else far + far // 2
            strides[name] = (apart, *others)
    if spec.bias:
        strides["bias_strides"] = _plane(p.bias_strides, _CHUNK_BYTES // spec.bias.itemsize)
    return _replaced(
        p,
        batch=batch,
        S_q=s_q,
        S_k=s_k,
        **{f.name: _sign(getattr(p, f.name)) for f in fields(p) if f.type == "float"},
        left=None if p.left is None else about(p.left),
        right=None if p.right is None else about(p.right),
        total_q=_total(p, batch, p.total_q, p.S_q, s_q) if spec.q_view == "packed" else 0,
        total_k=_total(p, batch, p.total_k, p.S_k, s_k) if spec.kv_view == "packed" else 0,
        pages=batch * width if p.pages else 0,
        table_width=width,
        table_stride=width,
        **strides,
    )


def _total(p: Any, batch: int, rows: int, longest: int, represented: int) -> int:
    """Of packed sequences, all as long as the longest or not."""
    most = batch * represented
    return most if rows >= p.batch * longest else total(rows, p.batch, batch, most)


def _attention_bwd(p: Any) -> Any:
    walks = ("dout_strides", "dq_strides", "dk_strides", "dv_strides", "dbias_strides")
    given = dict(zip(walks, _steps(*[getattr(p, n) for n in walks]), strict=True))
    return _replaced(p, forward=_attention(p.forward), **given)


def _merge(p: Any) -> Any:
    walks = ("outs_strides", "lses_strides", "out_strides", "lse_strides")
    return _replaced(
        p,
        parts=about(p.parts),
        batch=about(p.batch),
        rows=rows(p.rows),
        sequences=about(p.sequences),
        **dict(zip(walks, _steps(*[getattr(p, n) for n in walks]), strict=True)),
    )


def _paged_cache(p: Any) -> Any:
    walks = tuple(n for n in _names(cast(Any, type(p))) if n.endswith("_strides"))
    return _replaced(
        p,
        batch=about(p.batch) if p.batch > 1 else p.batch,
        S=rows(p.S),
        pages=about(p.pages),
        table_width=about(p.table_width),
        table_stride=about(p.table_width),
        sequences=about(p.sequences),
        max_position=about(p.max_position),
        cos_stride=p.spec.rotary_dim // 2,
        eps=_sign(p.eps),
        **dict(zip(walks, _steps(*[getattr(p, n) for n in walks]), strict=True)),
    )


def _gemm(p: Any) -> Any:
    m, n, k, heads = rows(p.M), columns(p.N), columns(p.K), rows(p.num_heads)
    if p.spec.view == "pointers":
        walks = {}
    else:
        (of_a, _), (of_b, _) = p.a_shape, p.b_shape
        to_a, to_b = (k if p.spec.a_transposed else m), (n if p.spec.b_transposed else k)
        b_heads = p.num_heads // p.b_head_group
        walks = {
            "a_strides": _strides(p.a_strides, of_a, to_a, m + k - to_a, p.num_heads),
            "b_strides": _strides(p.b_strides, of_b, to_b, n + k - to_b, b_heads),
            "c_strides": _strides(p.c_strides, p.M, m, n, p.num_heads // p.c_head_group),
            "residual_strides": _strides(p.residual_strides, p.M, m, n, p.num_heads),
            "preactivation_strides": _strides(p.preactivation_strides, p.M, m, n, p.num_heads),
        }
    others = ("bias_strides", "sums_strides", "a_scale_strides", "b_scale_strides")
    return _replaced(
        p,
        M=m,
        N=n,
        K=k,
        batch=rows(p.batch),
        num_heads=heads if p.b_head_group == p.c_head_group == 1 else p.num_heads,
        alpha=0.0 if p.alpha == 0 else 1.0,
        beta=0.0 if p.beta == 0 else 1.0,
        **walks,
        **dict(zip(others, _steps(*[getattr(p, n) for n in others]), strict=True)),
    )


def _grouped_gemm(p: Any) -> Any:
    m, n, k, product = rows(p.M), columns(p.N), columns(p.K), p.spec.product
    a, b = (k, m) if product.a_transposed else (m, k), (n, k) if product.b_transposed else (k, n)
    return _replaced(
        p,
        M=m,
        N=n,
        K=k,
        a_rows=m if "a_indices" in p.spec.indices else 0,
        c_rows=m if "c_indices" in p.spec.indices else 0,
        alpha=0.0 if p.alpha == 0 else 1.0,
        beta=0.0 if p.beta == 0 else 1.0,
        a_strides=_strides(p.a_strides, p.a_shape[0], *a),
        b_strides=_strides(p.b_strides, p.b_shape[0], *b),
        c_strides=_strides(p.c_strides, p.M, m, n),
        **dict(
            zip(
                ("a_scale_strides", "b_scale_strides", "scale_k_strides"),
                _steps(p.a_scale_strides, p.b_scale_strides, p.scale_k_strides),
                strict=True,
            )
        ),
    )


def class_of_lists(p: Any) -> tuple[float, ...]:
    """Of lists of products the extents, number and row strides of those that decide for the class,
    and its factors."""
    even, product = p.even, p.spec.product
    m, n, k = rows(even.M), columns(even.N), columns(even.K)
    a, b = (k, m) if product.a_transposed else (m, k), (n, k) if product.b_transposed else (k, n)
    steps = [
        _strides((s[-1],), 1, 1, width)[0]
        for s, (_, width) in zip(
            (even.a_strides, even.b_strides, even.c_strides), (a, b, (m, n)), strict=True
        )
    ]
    return m, n, k, rows(even.batch), *steps, float(p.alpha != 0), float(p.beta != 0)


def _lists(p: Any) -> Any:
    m, n, k, count, *steps, alpha, beta = class_of_lists(p)
    return _replaced(
        p,
        sizes=((m, n, k),) * int(count),
        row_strides=(tuple(steps),) * int(count),
        alpha=alpha,
        beta=beta,
    )


def _projection(p: Any) -> Any:
    heads = getattr(p, "heads", None)  # the qkv projection describes its heads separately
    tokens = p.S if heads is None else heads.tokens
    # Where tokens of all entries are rows of one matrix, only their number counts.
    count = columns(tokens)
    given: dict[str, Any] = {"batch": about(p.batch) if p.batch > 1 else p.batch}
    for name in _names(cast(Any, type(p))):
        if name.endswith("_strides"):
            given[name] = _strides(getattr(p, name), tokens, count, _WIDEST)
        elif name.endswith("_stride"):
            given[name] = _strides((getattr(p, name),), 1, 1, _WIDEST)[0]
        elif name in ("max_position", "pages", "table_width"):
            given[name] = about(getattr(p, name))
    if heads is None:
        return _replaced(p, S=count, **given)
    walks = {
        n: _strides(getattr(heads, n), tokens, count, _WIDEST)
        for n in ("q_strides", "k_strides", "v_strides", "positions_strides")
    }
    if (append := getattr(p, "append", None)) is not None:
        given["append"] = _paged_cache(append)
    return _replaced(
        p,
        heads=_replaced(heads, tokens=count, first_position=0, table_stride=1, **walks),
        **given,
    )


def _replaced(problem: Any, **given: Any) -> Any:
    """The problem with other fields; those that it has."""
    known = _names(cast(Any, type(problem)))
    return replace(problem, **{n: x for n, x in given.items() if n in known})


@cache
def _names(kind: Any) -> frozenset[str]:
    return frozenset(f.name for f in fields(kind))


_REPRESENTATIVES: Mapping[str, Callable[[Any], Any]] = {
    "gemm": _gemm,
    "grouped_gemm": _grouped_gemm,
    "grouped_gemm_pointers": _lists,
    "attention": _attention,
    "attention_bwd": _attention_bwd,
    "merge_states": _merge,
    "paged_cache": _paged_cache,
    **dict.fromkeys(
        ("qkv_projection", "output_projection", "qkv_projection_bwd", "output_projection_bwd"),
        _projection,
    ),
}


def _of_gemm(p: Any) -> Extents:
    exact = {"N": p.N, "K": p.K, "group": p.b_head_group, "summed": p.summed}
    return exact | {"beta": p.beta != 0, "reads": p.reads_inputs}, {
        "M": p.M,
        "matrices": p.matrices,
    }


def _of_grouped_gemm(p: Any) -> Extents:
    along = p.spec.along
    extents = {"M": p.M, "N": p.N, "K": p.K}
    varied = {along.upper(): extents.pop(along.upper())}
    exact = {**extents, "groups": p.groups}
    return exact | {"beta": p.beta != 0, "reads": p.reads_inputs}, varied


def _of_lists(p: Any) -> Extents:
    return _of_gemm(p.even)


def _of_attention(p: Any) -> Extents:
    varied = {"batch": p.batch, "S_q": p.S_q, "S_k": p.S_k}
    varied |= {n: x for n, x in (("total_q", p.total_q), ("total_k", p.total_k)) if x}
    window = {n: x for n, x in (("left", p.left), ("right", p.right)) if x is not None}
    return {"heads": p.num_heads, "kv_heads": p.kv_heads, "page": p.page_size}, varied | window


def _of_projection(p: Any) -> Extents:
    heads = getattr(p, "heads", p)  # the qkv projections describe their heads separately
    exact = {
        n: getattr(heads, n) for n in ("num_heads", "kv_heads", "head_dim") if hasattr(heads, n)
    }
    tokens = heads.tokens if hasattr(heads, "tokens") else p.S
    return {"hidden": p.hidden, **exact}, {"tokens": p.batch * tokens}


_EXTENTS: Mapping[str, Callable[[Any], Extents]] = {
    "gemm": _of_gemm,
    "grouped_gemm": _of_grouped_gemm,
    "grouped_gemm_pointers": _of_lists,
    "attention": _of_attention,
    "attention_bwd": lambda p: _of_attention(p.forward),
    **dict.fromkeys(
        ("qkv_projection", "output_projection", "qkv_projection_bwd", "output_projection_bwd"),
        _of_projection,
    ),
}


def problem_class(problem: Problem) -> str:
    """The class of tuned choices as text: the representative's, all extents in steps of √2. Each
    problem of an operation that is unknown here is its own class."""
    extents = _EXTENTS.get(problem.operation)
    if extents is None:
        return repr(problem)
    exact, varied = extents(representative(problem))
    parts = [
        *(f"{n}={x}" for n, x in exact.items()),
        *(f"{n}~{about(x)}" for n, x in varied.items()),
    ]
    return f"{problem.spec!r} {' '.join(parts)}"


def batch_invariant(problem: Problem) -> bool:
    """Whether a row's bits must not depend on the rest of the batch. Such problems have no tuned
    choice, which could differ between batch sizes."""
    spec: Any = problem.spec
    return bool(getattr(getattr(spec, "forward", spec), "batch_invariant", False))
