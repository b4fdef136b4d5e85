"""``bind(check=True)``: right results pass whatever their layout, wrong ones raise and name the
worst element."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import wrong_problem
from kernelseam import (
    Attention,
    AttentionPointers,
    BatchedGemmPointers,
    BatchedGemmStrided,
    GroupedGemm,
    GroupedGemmPointers,
    MergeStates,
    PagedCache,
    plan,
)
from kernelseam.errors import WrongResult
from kernelseam.oracle import check, sampling
from kernelseam_thirdvendor import AcmeArray
from wrong_problem import WrongProblem

Discovered = Callable[..., Any]
RNG = np.random.default_rng(0)


def normal(*shape: int, dtype: Any = np.float32) -> Any:
    return RNG.standard_normal(shape).astype(dtype)


def strided(**more: Any) -> BatchedGemmStrided:
    """A batch of 2 by 3 heads, rows of A and C with gaps, B transposed and shared by all heads."""
    pool, out = normal(2, 3, 5, 24), normal(2, 3, 5, 9)
    return BatchedGemmStrided(
        **{
            "M": 5,
            "N": 7,
            "K": 8,
            "batch": 2,
            "num_heads": 3,
            "b_head_group": 3,
            "b_transposed": True,
            "A": pool[..., 8:16],
            "B": normal(2, 1, 7, 8),
            "C": out[..., :7],
            "stride_a_batch": 360,
            "stride_a_head": 120,
            "stride_a_row": 24,
            "stride_c_batch": 135,
            "stride_c_head": 45,
            "stride_c_row": 9,
            **more,
        }
    )


def added(**more: Any) -> BatchedGemmStrided:
    """Groups of 2 batches and 3 heads, two of which share a B; one bias for all; a residual in half
    precision."""
    return BatchedGemmStrided(
        **{
            "M": 5,
            "N": 7,
            "K": 8,
            "batch": 4,
            "num_heads": 6,
            "b_head_group": 2,
            "c_batch_group": 2,
            "c_head_group": 3,
            "A": normal(4, 6, 5, 8),
            "B": normal(4, 3, 8, 7),
            "C": normal(2, 2, 5, 7),
            "bias": normal(7),
            "residual": normal(2, 2, 5, 7, dtype="f2"),
            "stride_bias_batch": 0,
            "stride_bias_head": 0,
            **more,
        }
    )


def in_place() -> BatchedGemmStrided:
    c = normal(2, 3, 5, 7)
    return BatchedGemmStrided(
        A=normal(2, 3, 5, 8),
        B=normal(2, 3, 8, 7),
        C=c,
        residual=c,
        M=5,
        N=7,
        K=8,
        batch=2,
        num_heads=3,
    )


def added_lists(in_place: bool = False) -> BatchedGemmPointers:
    """Six products in two groups."""
    c = [normal(5, 4) for _ in range(2)]
    return BatchedGemmPointers(
        M=5,
        N=4,
        K=8,
        batch=2,
        num_heads=3,
        c_head_group=3,
        A_ptrs=[normal(5, 8) for _ in range(6)],
        B_ptrs=[normal(8, 4) for _ in range(6)],
        C_ptrs=c,
        bias_ptrs=[normal(4) for _ in range(2)],
        residual_ptrs=c if in_place else [normal(5, 9)[:, :4] for _ in range(2)],
    )


def attention(**more: Any) -> Attention:
    """Tokens before heads, two KV heads for four of queries."""
    q, k, v, out = (
        normal(2, 33, 4, 16),
        normal(2, 65, 2, 16),
        normal(2, 65, 2, 24),
        normal(2, 33, 4, 24),
    )
    return Attention.from_arrays(
        q, k, v, out, normal(2, 4, 33), layout="bshd", **{"causal": True, **more}
    )


def i32(*values: int) -> Any:
    return np.array(values, np.int32)


def packed(dtype: Any = np.float32, **more: Any) -> Attention:
    """Rows of no sequence before, between no two, and after."""
    shapes = (20, 4, 16), (40, 2, 16), (40, 2, 24), (20, 4, 24), (4, 20)
    return Attention.from_arrays(
        *(normal(*s, dtype=dtype) for s in shapes),
        **{
            "cu_seqlens_q": i32(2, 9, 9, 18),
            "cu_seqlens_k": i32(0, 5, 20, 39),
            "max_seqlen_q": 9,
            "max_seqlen_k": 19,
            "causal": True,
            **more,
        },
    )


def paged(**more: Any) -> Attention:
    """Two entries over shuffled pages of four rows."""
    q, k, v, out = (
        normal(2, 3, 4, 16),
        normal(6, 4, 2, 16),
        normal(6, 4, 2, 24),
        normal(2, 3, 4, 24),
    )
    return Attention.from_arrays(
        q,
        k,
        v,
        out,
        normal(2, 4, 3),
        layout="bshd",
        **{
            "block_table": i32(3, 0, 5, 2, 1, 77).reshape(2, 3),
            "kv_lengths": i32(9, 8),
            "causal": True,
            **more,
        },
    )


def lists(**more: Any) -> AttentionPointers:
    """Entries of lengths 9 and 6, in matrices no longer than that."""
    lengths = (9, 6)
    return AttentionPointers(
        **{
            "batch": 2,
            "num_heads": 4,
            "kv_heads": 2,
            "S_q": 5,
            "S_k": 9,
            "head_dim": 16,
            **{f"{n}_ptrs": [normal(5, 16) for _ in range(8)] for n in ("q", "out")},
            **{
                f"{n}_ptrs": [normal(length, 16) for length in lengths for _ in range(2)]
                for n in "kv"
            },
            "kv_lengths": i32(*lengths),
            "lse": normal(2, 4, 5),
            "softcap": 1.5,
            **more,
        }
    )


def grouped(along: str) -> GroupedGemm:
    extents = {"M": 7, "N": 6, "K": 5, along.upper(): 14}
    m, n, k = extents.values()
    stacked = {"m": "B", "n": "A", "k": "C"}[along]
    shapes = {"A": (m, k), "B": (k, n), "C": (m, n)}
    whole = {x: normal(*((3,) if x == stacked else ()), *shape) for x, shape in shapes.items()}
    ends = np.array([5, 5, 12], np.int32)
    return GroupedGemm(groups=3, along=along, **extents, **whole, offsets=ends, beta=0.5)


def grouped_lists(**more: Any) -> GroupedGemmPointers:
    sizes = ((5, 6, 8), (0, 3, 2), (7, 4, 0), (12, 20, 40))
    m, n, k = zip(*sizes, strict=True)
    return GroupedGemmPointers(
        M=m,
        N=n,
        K=k,
        A_ptrs=[normal(x, z) for x, _, z in sizes],
        B_ptrs=[normal(y, z) for _, y, z in sizes],
        C_ptrs=[normal(x, y) for x, y, _ in sizes],
        b_transposed=True,
        **more,
    )


def merge(dtype: Any = np.float32, **more: Any) -> MergeStates:
    shapes = {"outs": (3, 2, 2, 5, 8), "lses": (3, 2, 2, 5), "out": (2, 2, 5, 8), "lse": (2, 2, 5)}
    return MergeStates(
        **{
            "parts": 3,
            "batch": 2,
            "num_heads": 2,
            "rows": 5,
            "value_dim": 8,
            **{name: normal(*shape, dtype=dtype) for name, shape in shapes.items()},
            **more,
        }
    )


def cache(direction: str = "append", **more: Any) -> PagedCache:
    eight = np.zeros((6, 4, 2, 8), ml_dtypes.float8_e4m3fn)
    places = {"block_table": np.array([[0, 2], [5, 1]], np.int32), "kv_lengths": i32(6, 3)}
    fields = {"v_pages": eight.copy(), "k_scales": np.full(2, 0.1, "f4"), **places, **more}
    v = fields.pop("v", normal(2, 3, 2, 8))
    fields.setdefault("v_scales", np.full(2, 0.1, "f4"))
    if direction == "gather":
        fields["direction"] = "gather"
    return PagedCache.from_arrays(normal(2, 3, 2, 8), v, eight, **fields)


def cached_with_all() -> PagedCache:
    angles = np.arange(9)[:, None] / 10.0 ** np.arange(4)
    of_q = {"q": normal(7, 4, 8), "q_norm": normal(8), "k_norm": normal(8)}
    of_q["q_out"] = of_q["q"]
    scales = {f"{n}_scales": np.zeros((6, 4, 2), "f4") for n in "kv"}
    pages = [np.zeros((6, 4, 2, 8), ml_dtypes.float8_e4m3fn) for _ in range(2)]
    return PagedCache.from_arrays(
        normal(7, 2, 8),
        normal(7, 2, 8),
        *pages,
        block_table=np.array([[0, 2], [5, 1]], np.int32),
        kv_lengths=i32(6, 3),
        cu_seqlens=i32(1, 3, 6),
        cos=np.cos(angles).astype("f4"),
        sin=np.sin(angles).astype("f4"),
        **of_q,
        **scales,
    )


RIGHT: dict[str, Callable[[], Any]] = {
    "strided": strided,
    "beta": lambda: strided(alpha=0.5, beta=-2.0),
    "alpha 0": lambda: strided(alpha=0.0, beta=2.0),
    "alpha 0 without inputs": lambda: strided(alpha=0.0, beta=2.0, A=None, B=None, dtype="float32"),
    "bias, residual and sums": lambda: added(),
    "residual in place": lambda: in_place(),
    "alpha 0 with a bias": lambda: added(alpha=0.0, A=None, B=None, dtype="float32"),
    "no rows with a bias": lambda: added(
        M=0, A=normal(4, 6, 0, 8), C=normal(2, 2, 0, 7), residual=normal(2, 2, 0, 7)
    ),
    "K 0": lambda: BatchedGemmStrided(
        A=normal(5, 0), B=normal(0, 4), C=normal(5, 4), M=5, N=4, K=0, beta=1.0
    ),
    "no rows": lambda: BatchedGemmStrided(
        A=normal(0, 8), B=normal(8, 4), C=normal(0, 4), M=0, N=4, K=8
    ),
    "no batch": lambda: strided(batch=0),
    "repeated rows": lambda: strided(stride_a_row=0),
    "not finite": lambda: BatchedGemmStrided(
        A=np.array([[np.inf, 1], [np.nan, 1]]), B=np.eye(2), C=np.zeros((2, 2)), M=2, N=2, K=2
    ),
    "not of zero mean": lambda: BatchedGemmStrided(
        A=np.abs(normal(9, 4000)), B=np.abs(normal(4000, 9)), C=normal(9, 9), M=9, N=9, K=4000
    ),
    "pointers": lambda: BatchedGemmPointers(
        M=5,
        N=4,
        K=8,
        num_heads=3,
        alpha=2.0,
        beta=1.0,
        A_ptrs=[normal(5, 8) for _ in range(3)],
        B_ptrs=[normal(8, 4) for _ in range(3)],
        C_ptrs=[normal(5, 4) for _ in range(3)],
    ),
    "pointers with bias, residual and sums": lambda: added_lists(),
    "pointers with residuals in place": lambda: added_lists(in_place=True),
    "pointers, alpha 0": lambda: BatchedGemmPointers(
        M=5,
        N=4,
        K=8,
        num_heads=3,
        alpha=0.0,
        beta=1.0,
        dtype="float32",
        C_ptrs=[normal(5, 4) for _ in range(3)],
    ),
    "pointers, none": lambda: BatchedGemmPointers(
        M=5,
        N=4,
        K=8,
        batch=0,
        dtype="float32",
        A_ptrs=[],
        B_ptrs=[],
        C_ptrs=[],
    ),
    "attention": attention,
    "attention in half precision": lambda: Attention.from_arrays(
        *(normal(1, 2, 40, 32, dtype="f2") for _ in range(4))
    ),
    "attention with all options": lambda: attention(
        window=(9, 2),
        softcap=2.0,
        bias=normal(4, 33, 65),
        mask=RNG.random((2, 1, 33, 65)) < 0.7,
        alibi_slopes=normal(4) ** 2,
        sinks=normal(4),
        prefix_lengths=i32(5, 0),
        kv_lengths=i32(65, 40),
    ),
    "attention of packed sequences": lambda: packed(),
    "attention of packed sequences in double precision": lambda: packed(np.float64),
    "attention of packed queries": lambda: Attention.from_arrays(
        normal(9, 4, 8),
        normal(2, 2, 7, 8),
        normal(2, 2, 7, 8),
        normal(9, 4, 8),
        cu_seqlens_q=i32(1, 4, 8),
        max_seqlen_q=4,
        kv_lengths=i32(7, 0),
        causal=True,
    ),
    "attention of pages": lambda: paged(),
    "attention over lists": lambda: lists(),
    "attention in half precision with results in single": lambda: Attention.from_arrays(
        *(normal(1, 2, 40, 32, dtype="f2") for _ in range(3)), normal(1, 2, 40, 32)
    ),
    "grouped GEMM": lambda: grouped("m"),
    "grouped GEMM along N": lambda: grouped("n"),
    "grouped GEMM along K": lambda: grouped("k"),
    "grouped GEMM over lists": lambda: grouped_lists(beta=0.5),
    "append to pages": lambda: cache(),
    "append with everything": lambda: cached_with_all(),
    "gather from pages": lambda: cache("gather"),
    "merge": lambda: merge(),
    "merge in double precision": lambda: merge(np.float64),
    "merge of nothing": lambda: MergeStates(
        parts=0,
        batch=1,
        num_heads=2,
        rows=3,
        value_dim=4,
        dtype="float32",
        out=normal(1, 2, 3, 4),
    ),
    "attention without keys": lambda: Attention.from_arrays(
        normal(1, 2, 5, 8),
        normal(1, 2, 0, 8),
        normal(1, 2, 0, 8),
        normal(1, 2, 5, 8),
        normal(1, 2, 5),
    ),
    "attention without queries": lambda: Attention.from_arrays(
        normal(1, 2, 0, 8), normal(1, 2, 5, 8), normal(1, 2, 5, 8), normal(1, 2, 0, 8)
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_results_pass(name: str, discovered: Discovered) -> None:
    discovered()
    call = plan(RIGHT[name]()).bind(check=True)
    call()
    call()  # of beta, the C of then is what counts
    call.rebind()()


def shifted(discovered: Discovered, monkeypatch: pytest.MonkeyPatch) -> None:
    """The NumPy reference's way, with one element of the result a little off."""
    from kernelseam.planning import Call
    from kernelseam.planning.binding import in_order

    discovered()
    launch = Call.__init__

    def spoil(self: Call, *arguments: Any) -> None:
        launch(self, *arguments)
        name, place = next(
            (n, self._operands[n])
            for n in ("C", "C_ptrs", "out", "out_ptrs")
            if n in self._operands
        )
        last = place[-1] if name.endswith("_ptrs") else place
        array = getattr(last, "owner", last)
        at = (17 if "cu_seqlens_q" in self._operands else -1, *(-1,) * (array.ndim - 1))

        def off(stream: int) -> None:
            array[at] *= 1.01

        self._run = in_order((self._run, off))

    monkeypatch.setattr(Call, "__init__", spoil)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("strided", "C[1, 2, 4, 6] is"),
        ("beta", "C[1, 2, 4, 6] is"),
        ("pointers", "C[0, 2, 4, 3] is"),
        ("bias, residual and sums", "C[1, 1, 4, 6] is"),
        ("pointers with bias, residual and sums", "C[1, 0, 4, 3] is"),
        ("attention", "out[1, 3, 32, 23] is"),
        ("attention with all options", "out[1, 3, 32, 23] is"),
        ("attention of packed sequences", "out[2, 3, 8, 23] is"),
        ("attention of pages", "out[1, 3, 2, 23] is"),
        ("attention over lists", "out[1, 3, 4, 15] is"),
        ("merge", "out[1, 1, 4, 7] is"),
        ("grouped GEMM along K", "C[2, 6, 5] is"),
    ],
)
def test_one_element_that_is_off_is_found(
    name: str, where: str, discovered: Discovered, monkeypatch: pytest.MonkeyPatch
) -> None:
    shifted(discovered, monkeypatch)
    descriptor = RIGHT[name]()
    with pytest.raises(WrongResult) as caught:
        plan(descriptor).bind(check=True)()
    e = caught.value
    assert (
        e.finding.startswith(where)
        and "the oracle says" in e.finding
        and "error/tolerance" in e.finding
    )
    assert (e.implementation, e.device, e.problem) == (
        "numpy",
        "numpy:0 (cpu)",
        plan(descriptor).problem,
    )
    again = pickle.loads(pickle.dumps(e))
    assert str(again) == str(e) and type(again) is WrongResult
    plan(descriptor).bind()()  # unasked, nothing is looked at


@pytest.mark.parametrize("fault", wrong_problem.GEMM)
def test_faults_of_a_gemm(fault: str, discovered: Discovered) -> None:
    loaded = discovered()
    loaded.registry.implementations.append(WrongProblem("gemm", fault))
    pool, b, c = normal(2, 3, 9, 65), normal(4, 1, 33, 7), np.full((2, 3, 9, 7), np.nan, "f4")
    pool[..., 33:] = np.nan
    planned = plan(
        BatchedGemmStrided(
            A=pool[..., :33],
            B=b[:2],
            C=c,
            M=9,
            N=7,
            K=33,
            batch=2,
            num_heads=3,
            b_head_group=3,
            stride_a_batch=27 * 65,
            stride_a_head=9 * 65,
            stride_a_row=65,
        ),
        implementation=f"wrong-{fault}",
    )
    if fault == "right":
        planned.bind(check=True)()
        return
    with pytest.raises(WrongResult, match=f"^wrong-{fault} on numpy"):
        planned.bind(check=True)()


@pytest.mark.parametrize("fault", wrong_problem.ATTENTION)
def test_faults_of_an_attention(fault: str, discovered: Discovered) -> None:
    loaded = discovered()
    loaded.registry.implementations.append(WrongProblem("attention", fault))
    q, k, v = normal(2, 4, 33, 16), normal(2, 2, 99, 16), normal(2, 2, 99, 16)
    q[..., 0], k[..., 0] = 4, np.arange(99) / 16  # later keys weigh more
    given = Attention.from_arrays(
        q, k, v, np.empty_like(q), np.empty((2, 4, 33), "f4"), causal=True
    )
    planned = plan(given, implementation=f"wrong-{fault}")
    if fault == "right":
        planned.bind(check=True)()
        return
    with pytest.raises(WrongResult, match=f"^wrong-{fault} on numpy"):
        planned.bind(check=True)()


def test_on_another_vendors_memory(acme: Any) -> None:
    x = {n: AcmeArray(normal(2, 5, 5)) for n in "ABC"}
    planned = plan(BatchedGemmStrided(**x, M=5, N=5, K=5, batch=2, beta=1.0))
    assert planned.implementation == "acme-gemm"
    planned.bind(check=True)()
    planned.bind(
        check=True, **{n: a.host.ctypes.data for n, a in x.items()}
    )()  # addresses are enough
    lists = {f"{n}_ptrs": [AcmeArray(m) for m in reversed(a.host)] for n, a in x.items()}
    planned = plan(BatchedGemmPointers(**lists, M=5, N=5, K=5, batch=2))
    planned.bind(check=True)()


def test_large_results_are_sampled(discovered: Discovered, monkeypatch: pytest.MonkeyPatch) -> None:
    discovered()
    requested: list[Any] = []
    real = check.gemm
    monkeypatch.setattr(sampling, "ORACLE_OPERATIONS", 1e6)
    monkeypatch.setattr(
        check, "gemm", lambda *a, **k: requested.append(real(*a, **k)) or requested[-1]
    )
    x = {"A": normal(500, 100), "B": normal(100, 50), "C": normal(500, 50)}
    plan(BatchedGemmStrided(**x, M=500, N=50, K=100)).bind(check=True)()
    (verdict,) = requested
    assert verdict.passed and verdict.checked == 64 * 50
