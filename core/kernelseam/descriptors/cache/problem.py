"""The problem and spec of moving rows of k and v between tokens and the pages of a cache."""

from __future__ import annotations

from collections.abc import Iterator

from kernelseam.contract import OperandRule
from kernelseam.descriptors.common.validation import WIDE
from kernelseam.dtypes import DType
from kernelseam.forking import cached_property
from kernelseam.frozen import dataclass

Strides = tuple[int, int, int]


@dataclass(frozen=True)
class PagedCacheSpec:
    """What shapes the binary. ``dtype`` is that of the tokens' rows, ``dtype_pages`` of the
    pages'."""

    dtype: DType
    dtype_pages: DType
    head_dim: int
    value_dim: int
    """0: there is no v."""
    direction: str = "append"
    """"append": tokens to pages; "gather": pages to tokens; "copy": pages to pages."""
    q: bool = False
    """Queries are normalised and rotated beside k."""
    slots: DType | None = None
    """The dtype of slot_mapping; None: places follow from a block table."""
    position: str = ""
    """Where a token's position comes from: "given", "lengths" of the cache, or "": its number in
    its sequence."""
    packed: bool = False
    rotary: str = ""
    rotary_dim: int = 0
    norm: DType | None = None
    """The dtype of the weights of the RMS norms of q and k; None: no norm."""
    scaled: str = ""
    """What has a scale of k and one of v: "heads" (given), "tokens" (of each head, written)."""
    vector: int = 16

    operation = "paged_cache"

    @property
    def exact(self) -> bool:
        """Whether rows are copied as they are."""
        return self.dtype is self.dtype_pages and not (self.rotary or self.norm or self.scaled)

    def __str__(self) -> str:
        options = [f"{n}={x}" for n in ("rotary", "norm", "scaled") if (x := getattr(self, n))]
        options += ["packed"] * self.packed + ["slots"] * bool(self.slots) + ["q"] * self.q
        return " ".join(
            (f"{self.operation} {self.direction} {self.dtype}→{self.dtype_pages}", *options)
        )


@dataclass(frozen=True)
class PagedCacheProblem:
    """Token s of entry b (of packed rows: row s, b = 0) and its place in the pages. Strides in
    elements; (batch, head, row) of tokens, (page, head, row) of pages and of scales."""

    spec: PagedCacheSpec
    batch: int
    S: int
    num_heads: int
    """Of q; 0 where there is none."""
    kv_heads: int
    pages: int
    page_size: int
    k_strides: Strides
    v_strides: Strides
    k_pages_strides: Strides
    v_pages_strides: Strides
    q_strides: Strides = (0, 0, 0)
    q_out_strides: Strides = (0, 0, 0)
    k_scales_strides: Strides = (0, 0, 0)
    v_scales_strides: Strides = (0, 0, 0)
    slots_strides: tuple[int, int] = (0, 0)
    positions_strides: tuple[int, int] = (0, 0)
    table_width: int = 0
    table_stride: int = 0
    sequences: int = 0
    """Of packed rows: how many cu_seqlens tells of."""
    max_position: int = 0
    cos_stride: int = 0
    eps: float = 0.0

    operation = "paged_cache"

    @property
    def tokens(self) -> int:
        return self.batch * self.S

    @property
    def entries(self) -> int:
        """Sequences that a table and lengths tell of."""
        return self.sequences if self.spec.packed else self.batch

    @cached_property
    def operands(self) -> tuple[OperandRule, ...]:
        return tuple(self._operands())

    def _align(self, dtype: DType) -> int:
        """Of an operand of another dtype than the rows', which may be wider than it is."""
        return max(WIDE if self.spec.vector == WIDE else 0, dtype.itemsize)

    def _operands(self) -> Iterator[OperandRule]:
        s, live = self.spec, int(self.tokens > 0)
        gather, copy = s.direction == "gather", s.direction == "copy"
        lead = self.pages * live if copy else self.batch
        heads = {"k": (s.head_dim, self.k_strides), "v": (s.value_dim, self.v_strides)}
        if s.q:
            shape = (self.batch, self.num_heads, self.S, s.head_dim)
            align = max(s.vector, s.dtype.itemsize)
            yield OperandRule(
                "q", s.dtype, shape, (*self.q_strides, 1), align, False, may_alias="q_out"
            )
            yield OperandRule("q_out", s.dtype, shape, (*self.q_out_strides, 1), align, True)
        for name, (dim, strides) in heads.items():
            if dim:
                yield OperandRule(
                    name,
                    s.dtype,
                    (lead, self.kv_heads, self.S, dim),
                    (*strides, 1),
                    max(s.vector, s.dtype.itemsize),
                    gather,
                    may_alias=f"{name}_pages" if copy else "",
                )
        for name, (dim, _) in heads.items():
            if dim:
                yield OperandRule(
                    f"{name}_pages",
                    s.dtype_pages,
                    (self.pages * live, self.kv_heads, self.page_size, dim),
                    (*getattr(self, f"{name}_pages_strides"), 1),
                    max(s.vector, s.dtype_pages.itemsize),
                    not gather,
                )
        yield from self._places(live)
        yield from self._factors(live)

    def _places(self, live: int) -> Iterator[OperandRule]:
        s, i32 = self.spec, DType.int32
        rows = (self.batch, self.S)
        if s.slots:
            yield OperandRule("slot_mapping", s.slots, rows, self.slots_strides, s.slots.itemsize)
        else:
            shape = (self.entries * live, self.table_width)
            yield OperandRule("block_table", i32, shape, (self.table_stride, 1), 4)
        if s.packed and not s.slots:
            yield OperandRule("cu_seqlens", i32, (self.sequences + 1,), (1,), 4)
        if s.position == "given":
            yield OperandRule("positions", i32, rows, self.positions_strides, 4)
        if s.position == "lengths":
            yield OperandRule("kv_lengths", i32, (self.entries * live,), (1,), 4)
        if s.direction == "copy":
            yield OperandRule("sources", i32, (self.batch,), (1,), 4)

    def _factors(self, live: int) -> Iterator[OperandRule]:
        s, f32 = self.spec, DType.float32
        if s.rotary:
            shape = (self.max_position * live, s.rotary_dim // 2)
            for name in ("cos", "sin"):
                yield OperandRule(name, f32, shape, (self.cos_stride, 1), self._align(f32))
        if s.norm:
            for name in ("q_norm",) * s.q + ("k_norm",):
                yield OperandRule(name, s.norm, (s.head_dim * live,), (1,), self._align(s.norm))
        if s.scaled:
            of_tokens = s.scaled == "tokens"
            pages, rows = (self.pages * live, self.page_size) if of_tokens else (live, 1)
            for name in ("k_scales",) + ("v_scales",) * bool(s.value_dim):
                yield OperandRule(
                    name,
                    f32,
                    (pages, self.kv_heads, rows),
                    getattr(self, f"{name}_strides"),
                    4,
                    of_tokens and s.direction == "append",
                )

    @property
    def operations(self) -> int:
        s = self.spec
        rotated = (self.num_heads + self.kv_heads) * s.head_dim
        return self.tokens * rotated * (6 * bool(s.rotary) + 4 * bool(s.norm))

    @property
    def bytes_moved(self) -> int:
        s, each = self.spec, self.kv_heads * (self.spec.head_dim + self.spec.value_dim)
        queries = 2 * self.num_heads * s.head_dim * s.dtype.itemsize
        scales = 8 * self.kv_heads * (s.scaled == "tokens")
        rows = each * (s.dtype.itemsize + s.dtype_pages.itemsize)
        return self.tokens * (rows + queries + scales)

    @property
    def compute_dtype(self) -> DType:
        return self.spec.dtype.accumulator

    def __str__(self) -> str:
        s = self.spec
        return (
            f"{s} batch={self.batch} S={self.S} heads={self.num_heads}/{self.kv_heads} "
            f"dim={s.head_dim}/{s.value_dim} page={self.page_size}"
        )
