"""Kernel definitions of cuda_kernels/sm90/attention/backward.h and backward_wide.h, and of the two
kernels before and after them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from kernelseam.contract import ArchRow, Device, Launch, LaunchConfig, Launches, TensorMap
from kernelseam.costs import Work
from kernelseam.descriptors.attention.backward_problem import AttentionBwdProblem, AttentionBwdSpec
from kernelseam.descriptors.attention.problem import AttentionSpec
from kernelseam.dtypes import DType
from kernelseam.kernels.attention.arguments import (
    SEQUENCES,
    STRIDES,
    matrices,
    row_values,
)
from kernelseam.kernels.attention.host import VIEWS
from kernelseam.kernels.attention.row_kernels import (
    ROW_DELTA,
    SINK_GRADIENT,
    DeltaProblem,
    DeltaSpec,
    RowTile,
    SinkProblem,
    SinkSpec,
)
from kernelseam.kernels.attention.scores import score_defines, score_values
from kernelseam.kernels.covered import Covered
from kernelseam.kernels.definition import KernelDefinition
from kernelseam.kernels.elements import DEVICE_TYPE, divide_up, refuse_row_strides
from kernelseam.kernels.signature import Signature, Structure

from kernelseam_cuda.sm90.attention import refuse_dims, refuse_rows
from kernelseam_cuda.sm90.attention_bwd_cost import (
    BackwardTile,
    gradient_work,
    row_work,
    sees_fewer,
    tile_count,
    total_blocks,
)
from kernelseam_cuda.sm90.attention_covering import COVERED_DIMS
from kernelseam_cuda.sm90.attention_tiles import (
    ATTENTION_BWD,
    BACKWARD_REGISTERS,
    HopperWideBackwardTile,
)
from kernelseam_cuda.sm90.tiles import promotion
from kernelseam_cuda.toolchain import sources

OPTIONS = frozenset(
    {"causal", "window", "softcap", "sinks", "q_view", "kv_view", "lengths", "batch_invariant"}
)
"""The forward's options that the kernel has the gradients of."""
WIDTHS = tuple(dict.fromkeys((t.head_dim, t.value_dim) for t in ATTENTION_BWD))
"""Head dims of queries and keys, and of values, up to which tiles are, the narrowest first."""
_CONSUMERS = 2
"""Of a block; each adds to a piece of its own of the sums: sums.h."""
_BOX_COLUMNS, _STORE_ROWS, _ROWS = 64, 16, 64
_COUNTERS_BYTES = 256

_MAPS = {
    "q_map": "q",
    "dout_map": "dout",
    "k_map": "k",
    "v_map": "v",
    "dk_map": "dk",
    "dv_map": "dv",
}
_SCALES = ("scale", "scale_log2", "cap", "cap_inverse")
_OPERANDS = {"lengths": "kv_lengths", "q_offsets": "cu_seqlens_q", "k_offsets": "cu_seqlens_k"}
_WORKSPACE = ("lse_base2", "delta", "sums", "turns")
_BLOCK_COUNT = ("query_blocks", "head_blocks", "num_heads")
_BLOCKS = Structure(tuple((n, "i32") for n in _BLOCK_COUNT))
_TILE_COUNT = (
    "key_tiles",
    "total",
    "section",
    "section_tiles",
    "cycle",
    "batch",
    "kv_heads",
    "head_group",
)
_SIGNATURE = Signature(
    (
        *((m, "tensor_map") for m in _MAPS),
        (
            "operands",
            Structure(
                (
                    ("dk", matrices("dk")),
                    ("dv", matrices("dv")),
                    *((p, "pointer") for p in (*_WORKSPACE, "counter")),
                ),
                ("dk", "dv", "lse", *_WORKSPACE[1:], "counter"),
            ),
        ),
        ("sequences", SEQUENCES),
        ("count", Structure((*((n, "i32") for n in _TILE_COUNT), ("blocks", _BLOCKS)))),
        ("left", "i32"),
        ("right", "i32"),
        *((f, "f32") for f in _SCALES),
    )
)


class HopperBackwardKernel(KernelDefinition):
    """What the three kernels have in common: one problem, one tile, blocks of ``step`` queries."""

    operation = "attention_bwd"
    name = "sm90"
    archs = ("sm_90a",)

    def sources(self) -> Mapping[str, str]:
        return sources()

    def refuse(self, problem: AttentionBwdProblem, row: ArchRow) -> str | None:
        p, spec = problem.forward, problem.spec.forward
        if unsupported := spec.options - OPTIONS:
            return f"it does not know {', '.join(sorted(unsupported))}"
        if spec.dtype.itemsize != 2:
            return f"it takes bfloat16 and float16, not {spec.dtype}"
        return (
            refuse_dims(spec)
            or refuse_rows(p)
            or refuse_row_strides(
                stride_q_row=p.q_strides[2],
                stride_k_row=p.k_strides[2],
                stride_v_row=p.v_strides[2],
                stride_out_row=p.out_strides[2],
                stride_dout_row=problem.dout_strides[2],
                stride_dq_row=problem.dq_strides[2],
                stride_dk_row=problem.dk_strides[2],
                stride_dv_row=problem.dv_strides[2],
            )
        )

    def tiles(self, spec: AttentionBwdSpec, row: ArchRow) -> tuple[BackwardTile, ...]:
        tiles = _tiles_of(spec.forward)
        ordered = tuple(replace(t, in_order=True) for t in tiles)
        return ordered if spec.deterministic or spec.forward.batch_invariant else tiles + ordered

    def tile(self, problem: AttentionBwdProblem, row: ArchRow, device: Device) -> BackwardTile:
        """In order also where any order is allowed and few keys are met: to set the sums to zero
        would take longer than turns."""
        first, *others = self.tiles(problem.spec, row)
        return others[0] if others and sees_fewer(problem.forward, first.few_keys) else first

    def main(self, tile: BackwardTile) -> HopperBackwardKernel:
        """The kernel that multiplies."""
        return WIDE if isinstance(tile, HopperWideBackwardTile) else self

    def launches(
        self, problem: AttentionBwdProblem, tile: BackwardTile, device: Device
    ) -> Launches:
        """Values of the rows, and sums set to zero; the gradients; dq of its sums; the sinks'
        gradient."""
        p, spec = problem.forward, problem.spec.forward
        blocks = total_blocks(problem, tile)
        rows = blocks * tile.step
        workspace, size = dict[str, int](), _COUNTERS_BYTES
        for name, needed in (
            ("lse_base2", 4 * rows),
            ("delta", 4 * rows),
            ("sums", 4 * rows * tile.columns(spec.head_dim, spec.value_dim)[0]),
            ("turns", 4 * _CONSUMERS * tile.cluster * blocks * tile.in_order),
        ):
            workspace[name] = size
            size += divide_up(needed, 256) * 256
        sums = {"sums": workspace["sums"]}
        steps = [
            Launch(ROW_VALUES, problem, tile, workspace),
            Launch(self.main(tile), problem, tile, {**workspace, "counter": 0}),
            Launch(QUERY_GRADIENT, problem, tile, sums),
        ]
        if problem.spec.sink_gradient:
            packed = spec.q_view == "packed"
            if packed:  # the sums' blocks are the sequences': their rows are laid out anew
                entries, length, delta = 1, p.total_q, (0, p.total_q)
                plain = DeltaProblem(
                    DeltaSpec(spec.dtype, spec.value_dim, packed),
                    entries,
                    p.num_heads,
                    length,
                    problem.dout_strides,
                    p.out_strides,
                    delta,
                    p.batch,
                )
                steps.append(Launch(ROW_DELTA, plain, RowTile(), {"delta": size, "zeros": size}))
                at, size = size, size + divide_up(4 * p.num_heads * length, 256) * 256
            else:
                entries, length, at = p.batch, p.S_q, workspace["delta"]
                padded = divide_up(p.S_q, tile.step) * tile.step
                delta = (p.num_heads * padded, padded)
            sinks = SinkProblem(
                SinkSpec(packed), entries, p.num_heads, length, p.lse_strides, delta, p.batch
            )
            steps.append(Launch(SINK_GRADIENT, sinks, RowTile(), {"delta": at}))
        return Launches(tuple(steps), size, zeroed_bytes=_COUNTERS_BYTES)

    def defines(
        self, spec: AttentionBwdSpec, tile: BackwardTile, row: ArchRow
    ) -> dict[str, object]:
        s = spec.forward
        columns, value_columns = tile.columns(s.head_dim, s.value_dim)
        return {
            "T": DEVICE_TYPE[s.dtype],
            "DQK": s.head_dim,
            "DV": s.value_dim,
            "QK_COLUMNS": columns,
            "V_COLUMNS": value_columns,
            **score_defines(s),
            "Q_VIEW": VIEWS[s.q_view],
            "KV_VIEW": VIEWS[s.kv_view],
            "LENGTHS": s.lengths,
            "STEP": tile.step,
            "IN_ORDER": tile.in_order,
        }

    def config(
        self, problem: AttentionBwdProblem, tile: Any, row: ArchRow, device: Device
    ) -> LaunchConfig:
        """Each starts while the one before it ends."""
        return replace(super().config(problem, tile, row, device), programmatic=True)

    def shared_bytes(self, spec: AttentionBwdSpec, tile: BackwardTile) -> int:
        return 0

    def pointers(self, spec: AttentionBwdSpec) -> dict[str, str]:
        return {
            p: _OPERANDS.get(p, p)
            for p, kind in _scalars(self.signature(spec))
            if kind == "pointer"
        }

    def values(
        self, problem: AttentionBwdProblem, tile: BackwardTile, device: Device
    ) -> dict[str, int | float]:
        p, count = problem.forward, tile_count(problem, tile)
        walks = {
            "out": p.out_strides,
            "dout": problem.dout_strides,
            "dq": problem.dq_strides,
            "dk": problem.dk_strides,
            "dv": problem.dv_strides,
        }
        scores = score_values(p)
        known: dict[str, int | float] = {
            **{
                f"{n}_{a}": x
                for n, walk in walks.items()
                for a, x in zip(STRIDES, walk, strict=True)
            },
            "lse_batch": p.lse_strides[0],
            "lse_head": p.lse_strides[1],
            "S_q": p.S_q,
            "S_k": p.S_k,
            **count,
            **{name: scores[name] for name in ("left", "right", *_SCALES[1:])},
            "scale": p.scale,
        }
        wanted = (n for n, kind in _scalars(self.signature(problem.spec)) if kind not in _ADDRESSES)
        return {n: known[n] for n in wanted}

    def work(self, problem: Any, tile: BackwardTile, device: Device) -> Work:
        return row_work(problem, tile, self.row_bytes(problem.spec, tile))

    def row_bytes(self, spec: AttentionBwdSpec, tile: BackwardTile) -> int:
        """Bytes that a row of queries moves."""
        raise NotImplementedError


_ADDRESSES = ("pointer", "tensor_map")


class RowValues(HopperBackwardKernel):
    """A block 64 rows of queries: their values; their sums set to zero."""

    entry = "attention_backward_rows_sm90"
    source = "sm90/attention/backward/row_values.h"
    _signature = Signature(
        (
            ("out", matrices("out")),
            ("dout", matrices("dout")),
            ("lse", row_values("lse")),
            *((p, "pointer") for p in _WORKSPACE),
            ("sequences", SEQUENCES),
            ("blocks", _BLOCKS),
            ("left", "i32"),
            ("right", "i32"),
        )
    )

    def signature(self, spec: AttentionBwdSpec) -> Signature:
        return self._signature

    def grid(self, problem: AttentionBwdProblem, tile: BackwardTile, device: Device) -> int:
        p = problem.forward
        return p.batch * p.num_heads * divide_up(p.S_q, tile.step) * tile.step // _ROWS

    def threads(self, tile: BackwardTile, row: ArchRow) -> int:
        return 256

    def row_bytes(self, spec: AttentionBwdSpec, tile: BackwardTile) -> int:
        s = spec.forward
        columns, _ = tile.columns(s.head_dim, s.value_dim)
        return 4 * s.value_dim + (0 if tile.in_order else 4 * columns) + 12


class QueryGradient(HopperBackwardKernel):
    """A block 64 rows of queries."""

    entry = "attention_backward_dq_sm90"
    source = "sm90/attention/backward/query_gradient.h"
    _signature = Signature(
        (
            ("sums", "pointer"),
            ("dq", matrices("dq")),
            ("sequences", SEQUENCES),
            ("blocks", _BLOCKS),
            ("scale", "f32"),
        )
    )

    def signature(self, spec: AttentionBwdSpec) -> Signature:
        return self._signature

    def grid(self, problem: AttentionBwdProblem, tile: BackwardTile, device: Device) -> int:
        p = problem.forward
        return p.batch * p.num_heads * divide_up(p.S_q, _ROWS)

    def threads(self, tile: BackwardTile, row: ArchRow) -> int:
        return 128

    def row_bytes(self, spec: AttentionBwdSpec, tile: BackwardTile) -> int:
        s = spec.forward
        return 4 * tile.columns(s.head_dim, s.value_dim)[0] + 2 * s.head_dim


ROW_VALUES, QUERY_GRADIENT = RowValues(), QueryGradient()


class HopperAttentionBwd(HopperBackwardKernel):
    """Attention's gradients in half precision, a persistent block a multiprocessor."""

    entry = "attention_backward_sm90"
    source = "sm90/attention/backward.h"
    multiplies = True

    def defines(
        self, spec: AttentionBwdSpec, tile: BackwardTile, row: ArchRow
    ) -> dict[str, object]:
        producer, consumer = BACKWARD_REGISTERS
        return {
            **super().defines(spec, tile, row),
            "STAGES": tile.stages,
            "O_STAGES": tile.o_stages,
            **self.own_defines(tile),
            "PRODUCER_REGISTERS": producer,
            "CONSUMER_REGISTERS": consumer,
            "SHARED_BYTES": tile.shared_bytes,
        }

    def own_defines(self, tile: Any) -> dict[str, object]:
        return {"KV_STAGES": tile.kv_stages}

    def signature(self, spec: AttentionBwdSpec) -> Signature:
        return _SIGNATURE

    def grid(self, problem: AttentionBwdProblem, tile: BackwardTile, device: Device) -> int:
        clusters = max(device.limits.compute_units // tile.cluster, 1)
        return min(tile_count(problem, tile)["total"], clusters) * tile.cluster

    def threads(self, tile: BackwardTile, row: ArchRow) -> int:
        return 384

    def shared_bytes(self, spec: AttentionBwdSpec, tile: BackwardTile) -> int:
        return tile.shared_bytes

    def tensor_maps(
        self, problem: AttentionBwdProblem, tile: BackwardTile, device: Device
    ) -> dict[str, TensorMap]:
        """Axes column, row, head, batch; packed rows are of one entry. Boxes are panels of 64
        columns."""
        p, s = problem.forward, problem.spec.forward
        packed = s.q_view == "packed"
        batch = 1 if packed else p.batch
        queries, keys = (p.total_q, p.total_k) if packed else (p.S_q, p.S_k)
        of_queries, of_keys = (queries, p.num_heads), (keys, p.kv_heads)
        shapes = {
            "q_map": (s.head_dim, of_queries, p.q_strides, tile.step),
            "dout_map": (s.value_dim, of_queries, problem.dout_strides, tile.step),
            "k_map": (s.head_dim, of_keys, p.k_strides, tile.block_keys),
            "v_map": (s.value_dim, of_keys, p.v_strides, tile.block_keys),
            "dk_map": (s.head_dim, of_keys, problem.dk_strides, _STORE_ROWS),
            "dv_map": (s.value_dim, of_keys, problem.dv_strides, _STORE_ROWS),
        }
        return {
            name: TensorMap(
                _MAPS[name],
                s.dtype,
                (columns, *rows, batch),
                (1, *reversed(strides)),
                (_BOX_COLUMNS, box, 1, 1),
                swizzle=128,
                l2_promotion=promotion(columns * s.dtype.itemsize),
            )
            for name, (columns, rows, strides, box) in shapes.items()
        }

    def variants(
        self, problem: AttentionBwdProblem, row: ArchRow, device: Device
    ) -> dict[str, BackwardTile]:
        return {t.name: t for t in self.tiles(problem.spec, row)}

    def work(self, problem: AttentionBwdProblem, tile: BackwardTile, device: Device) -> Work:
        return gradient_work(problem, tile)

    def covering(self) -> Iterable[Covered]:
        """Every dtype and width of tiles with and without a causal mask, in order and in any; head
        dims that do not fill them; every option; packed sequences; and the two small kernels."""
        f16, bf16 = DType.float16, DType.bfloat16
        for dims in COVERED_DIMS:
            plain = AttentionSpec(f16, *dims, lse=True)
            packed = replace(plain, dtype=bf16, causal=True, q_view="packed", kv_view="packed")
            main = self.main(_tiles_of(plain)[0])
            yield Covered(main, AttentionBwdSpec(packed))
            yield Covered(main, AttentionBwdSpec(plain, deterministic=False), often=False)
            for small in (ROW_VALUES, QUERY_GRADIENT):
                yield Covered(small, AttentionBwdSpec(packed), often=False)
        for dims in WIDTHS:
            main = self.main(_tiles_of(AttentionSpec(f16, *dims, lse=True))[0])
            causal = AttentionSpec(bf16, *dims, True, True)
            yield Covered(main, AttentionBwdSpec(causal))
            yield Covered(
                main, AttentionBwdSpec(AttentionSpec(f16, *dims, lse=True), deterministic=False)
            )
            yield Covered(main, AttentionBwdSpec(causal, deterministic=False), often=False)
            every = replace(causal, causal=False, window=True, softcap=True, lengths=True)
            yield Covered(main, AttentionBwdSpec(every))
            packed = replace(causal, q_view="packed", kv_view="packed")
            yield Covered(main, AttentionBwdSpec(packed), often=False)
            window = replace(packed, dtype=f16, causal=False, window=True)
            yield Covered(main, AttentionBwdSpec(window, deterministic=False))
            for small in (ROW_VALUES, QUERY_GRADIENT):
                yield Covered(small, AttentionBwdSpec(AttentionSpec(f16, *dims, lse=True)))
                yield Covered(small, AttentionBwdSpec(packed))


class HopperWideAttentionBwd(HopperAttentionBwd):
    """The same where the gradients of 64 keys fill a block's registers, by clusters of two
    blocks."""

    entry = "attention_backward_wide_sm90"
    source = "sm90/attention/backward_wide.h"

    def own_defines(self, tile: Any) -> dict[str, object]:
        return {}

    def config(
        self, problem: AttentionBwdProblem, tile: Any, row: ArchRow, device: Device
    ) -> LaunchConfig:
        return replace(super().config(problem, tile, row, device), cluster=(tile.cluster, 1, 1))


WIDE = HopperWideAttentionBwd()


def _tiles_of(spec: AttentionSpec) -> tuple[BackwardTile, ...]:
    """Those of the narrowest width that holds the head dims."""
    width = next(w for w in WIDTHS if spec.head_dim <= w[0] and spec.value_dim <= w[1])
    return tuple(t for t in ATTENTION_BWD if (t.head_dim, t.value_dim) == width)


def _scalars(signature: Signature) -> Iterable[tuple[str, str]]:
    """Names and kinds of a signature's scalars, those of structures among them."""
    for name, kind in signature.parameters:
        if isinstance(kind, Structure):
            yield from ((n, k) for n, k, _ in kind.scalars)
        else:
            yield name, kind
