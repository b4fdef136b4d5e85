"""Parity cases: problems with their data, written down as data. ``run`` executes one, ``matrix``
lists them all."""

from __future__ import annotations

from dataclasses import dataclass

from kernelseam.dtypes import DType
from kernelseam.parity.memory import Walk
from kernelseam.parity.projection_case import ProjectionCase

NAN, INF = float("nan"), float("inf")
SHORT = {"f16": DType.float16, "bf16": DType.bfloat16, "f32": DType.float32, "f64": DType.float64}
"""Dtypes as the names of cases abbreviate them."""
TOKENS = Walk(order="brh")
ODD = Walk(offset=1)
UNFUSED = "gemm-softmax-gemm"
LEAKS = (
    (
        UNFUSED,
        (
            "a hidden value has weight 0 there, and 0·NaN and 0·inf are NaN: see Edges in "
            "docs/accuracy.md"
        ),
    ),
)
"""For cases whose hidden values are not finite."""


@dataclass(frozen=True)
class Plant:
    """A value put into an operand after its data were made: [batch, head, row, column], or whatever
    its axes are, None meaning all of one."""

    operand: str
    value: float
    index: tuple[int | None, ...]


@dataclass(frozen=True)
class GemmCase:
    """One batched GEMM. Field names are the descriptor's."""

    name: str
    dtype: DType
    a_transposed: bool = False
    b_transposed: bool = False
    M: int = 65
    N: int = 72
    K: int = 33
    batch: int = 2
    num_heads: int = 3
    alpha: float = 1.0
    beta: float = 0.0
    b_head_group: int = 1
    c_batch_group: int = 1
    c_head_group: int = 1
    dtype_c: DType | None = None
    bias: DType | None = None
    residual: DType | None = None
    in_place: bool = False
    """The residual is C itself."""
    precision: str | None = None
    a: Walk = Walk()
    b: Walk = Walk()
    c: Walk = Walk()
    bias_walk: Walk = Walk()
    """Of a row each."""
    residual_walk: Walk = Walk()
    view: str = "strided"
    """"strided"; or pointer lists: "host" or "device" (where the list lies)."""
    scattered: bool = False
    """Pointer lists: matrices in a random order with uneven gaps, else evenly spaced."""
    data: str = "normal"
    """"normal" N(0,1), "positive" U(0,1), "integers" −3…3 (results must agree bit for bit), "tiny"
    or "huge" normal."""
    plants: tuple[Plant, ...] = ()
    sample: int | None = None
    """Compare so many rows instead of all."""
    may_refuse: frozenset[str] = frozenset()
    """Names of the core's own implementations that may refuse; a plugin's own always may, with a
    reason."""
    group: str = ""
    """What the case is about, a heading of the report."""

    operation = "gemm"

    @property
    def out_dtype(self) -> DType:
        """That of C."""
        return self.dtype_c or self.dtype

    @property
    def lead(self) -> tuple[int, int]:
        """C's batches and heads."""
        return self.batch // self.c_batch_group, self.num_heads // self.c_head_group

    @property
    def terms(self) -> int:
        """Products of numbers that an element of C is the sum of."""
        return self.K * self.c_batch_group * self.c_head_group

    @property
    def exact(self) -> bool:
        """Whether the oracle must be met bit for bit."""
        return self.data == "integers"


@dataclass(frozen=True)
class AttentionCase:
    """One attention. Field names are the descriptor's; q, k, v and out say how each lies in
    memory."""

    name: str
    dtype: DType
    head_dim: int = 64
    value_dim: int = 64
    S_q: int = 65
    S_k: int = 129
    batch: int = 2
    num_heads: int = 2
    kv_heads: int = 2
    causal: bool = False
    lse: bool = True
    scale: float | None = None
    """None: 1/√head_dim."""
    q: Walk = Walk()
    k: Walk = Walk()
    v: Walk = Walk()
    out: Walk = Walk()
    packed: bool = False
    """q, k and v are slices of one [B, S, H + 2·H_kv, D] array."""
    view: str = "strided"
    """"strided"; or pointer lists of q, k, v and out: "host" or "device" (where the lists lie)."""
    scattered: bool = False
    """Pointer lists: heads in a random order with uneven gaps, else evenly spaced."""
    lse_gap: int = 0
    """Elements left free after every head's row of the LSE."""
    window: tuple[int | None, int | None] | None = None
    prefix: tuple[int, ...] | None = None
    """One an entry of the batch; so q_sequences, k_sequences and kv_lengths."""
    softcap: float | None = None
    alibi: tuple[float, ...] = ()
    """A slope a head."""
    alibi_batch: bool = False
    """Every entry of the batch has slopes of its own, those of entry b (b + 1) times as steep."""
    bias: DType | None = None
    bias_walk: Walk = Walk()
    bias_data: str = "normal"
    """"normal" N(0,1), "holes" (−inf for a third of the pairs), "voids" (−inf for every third
    query), "low" (−60000 for half of the pairs), "lowest" (the most negative number for a third of
    the pairs and for every third query)."""
    mask: str = ""
    """Hidden are: "random" a third of the pairs, "rows" all keys from every third query, "keys" the
    same third of the keys from all queries, "all" all."""
    mask_walk: Walk = Walk()
    sinks: tuple[float, ...] = ()
    """One a head."""
    q_sequences: tuple[int, ...] | None = None
    """Lengths: q and out are packed."""
    k_sequences: tuple[int, ...] | None = None
    """Lengths: k and v are packed."""
    margin: int = 0
    """Rows of packed memory that are nobody's, before the first sequence and after the last."""
    kv_lengths: tuple[int, ...] | None = None
    page_size: int = 0
    """k and v are paged: shuffled pages, some of them nobody's, and a table whose entries beyond
    the lengths name none."""
    dtype_out: DType | None = None
    batch_invariant: bool = False
    data: str = "normal"
    """"normal" N(0,1); with scores made "extreme" (sd 256), "falling" (near −512), "climbing" (4 a
    key); or with keys whose score is −inf: "holes" (every third), "voids" (all); or "faint": scores
    are the steps alone, values are not negative, and 0 where the score is the highest."""
    steps: tuple[tuple[int, float], ...] = ()
    """(first key, score): with the default scale, what keys from there to the next step gain."""
    steps_every: int = 1
    """The steps are for every so many-th query."""
    ramp: bool = False
    """q[…,0] = √D and k[j,0] = j/16: later keys weigh more, so that a lost one shows."""
    plants: tuple[Plant, ...] = ()
    sample: int | None = None
    may_refuse: frozenset[str] = frozenset()
    exempt: tuple[tuple[str, str], ...] = ()
    """The core's own implementations that promise less than the case asks, each with the reason:
    not run there."""
    group: str = ""

    operation = "attention"

    @property
    def scale_used(self) -> float:
        """The scale in force."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def out_dtype(self) -> DType:
        """That of out."""
        return self.dtype_out or self.dtype

    @property
    def keys(self) -> tuple[int, ...] | None:
        """How many keys each entry of the batch has, where they differ."""
        return self.kv_lengths if self.k_sequences is None else self.k_sequences


@dataclass(frozen=True)
class MergeCase:
    """Partial attentions merged. Field names are the descriptor's; outs and out say how each lies
    in memory."""

    name: str
    dtype: DType
    dtype_out: DType
    parts: int = 3
    batch: int = 2
    num_heads: int = 3
    rows: int = 17
    value_dim: int = 64
    lse: bool = True
    outs: Walk = Walk()
    out: Walk = Walk()
    part_gap: int = 0
    """Elements left free after every part's results, and after every head's row of an LSE."""
    data: str = "normal"
    """LSEs: "normal" N(0,4), "apart" (parts outweigh each other by up to e^200), "absent" (−inf for
    half of them, their results NaN), "nothing" (−inf for all), "nan" or "inf" (one of them)."""
    may_refuse: frozenset[str] = frozenset()
    group: str = ""

    operation = "merge_states"
    sample = None


@dataclass(frozen=True)
class BackwardCase:
    """The gradients of an attention. ``forward`` says what was computed and how its operands lie:
    q, k, v, out, lse."""

    name: str
    forward: AttentionCase
    dout: Walk = Walk()
    dq: Walk = Walk()
    dk: Walk = Walk()
    dv: Walk = Walk()
    packed: bool = False
    """dq, dk and dv are slices of one [B, S, H + 2·H_kv, D] array."""
    bias_gradient: bool = False
    dbias: Walk = Walk()
    """Of the bias's own axes: 1 long where it repeats."""
    sink_gradient: bool = False
    deterministic: bool = True
    plants: tuple[Plant, ...] = ()
    may_refuse: frozenset[str] = frozenset()
    group: str = ""

    operation = "attention_bwd"
    sample = None

    @property
    def dtype(self) -> DType:
        """That of q, k, v and all that lies as they do."""
        return self.forward.dtype

    @property
    def batch(self) -> int:
        return self.forward.batch

    @property
    def num_heads(self) -> int:
        return self.forward.num_heads


Case = GemmCase | AttentionCase | MergeCase | BackwardCase | ProjectionCase


def matrix(pattern: str = "", operation: str | None = None) -> list[Case]:
    """All cases, or those whose name contains one of the comma-separated parts of ``pattern``."""
    from kernelseam.parity.attention_bwd_cases import attention_bwd_cases
    from kernelseam.parity.attention_cases import attention_cases
    from kernelseam.parity.gemm_cases import gemm_cases
    from kernelseam.parity.merge_cases import merge_cases
    from kernelseam.parity.projection_bwd_cases import projection_bwd_cases
    from kernelseam.parity.projection_cases import projection_cases

    parts = [p.strip() for p in pattern.split(",") if p.strip()]
    found: list[Case] = [
        *gemm_cases(),
        *attention_cases(),
        *attention_bwd_cases(),
        *merge_cases(),
        *projection_cases(),
        *projection_bwd_cases(),
    ]
    return [
        c
        for c in found
        if (not parts or any(p in c.name for p in parts))
        and (operation is None or c.operation == operation)
    ]


def named(name: str) -> Case:
    """The case of exactly that name; raises KeyError."""
    return {c.name: c for c in matrix()}[name]
