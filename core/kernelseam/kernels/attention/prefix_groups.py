"""Attention over pages of which groups of entries share the first: read once, with the queries of
all entries of a group as rows of one sequence; then each entry's own pages, and the merge."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from kernelseam.contract import (
    WORKSPACE_ALIGNMENT,
    ArchRow,
    Composition,
    Device,
    Launch,
    Launches,
    Memset,
)
from kernelseam.descriptors.attention.options import SpecOption
from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.dtypes import DType
from kernelseam.frozen import dataclass
from kernelseam.kernels.attention.decode import DECODE
from kernelseam.kernels.attention.forward import AttentionDefinition
from kernelseam.kernels.attention.merge import MERGE, MERGE_TILE, MergeProblem, MergeSpec
from kernelseam.kernels.attention.prefix_tables import (
    COMMON_PAGES,
    PREFIX_TABLES,
    TableProblem,
    TableSpec,
)
from kernelseam.kernels.attention.row_kernels import RowTile
from kernelseam.kernels.definition import KernelDefinition
from kernelseam.kernels.elements import INT32, divide_up, pad

SUPPORTED = (
    SpecOption.prefix_groups
    | SpecOption.causal
    | SpecOption.softcap
    | SpecOption.sinks
    | SpecOption.q_view
    | SpecOption.kv_view
    | SpecOption.lengths
    | SpecOption.dtype_out
    | SpecOption.dtype_kv
    | SpecOption.kv_scales
    | SpecOption.precision
)
"""Options by which a key's score depends on its distance from a query, or on the entry, are not
among them."""
FORWARD = AttentionDefinition()
_PARTS = 2


@dataclass(frozen=True)
class PrefixTile:
    """The kernel and the tile of the shared part and of the own one."""

    shared: tuple[KernelDefinition, Any]
    own: tuple[KernelDefinition, Any]


class PrefixGroups(Composition):
    """Two small kernels that divide the block table (prefix_tables), an attention over shared
    pages, one over own pages, and the merge of both."""

    operation = "attention"

    def __init__(
        self,
        shared: Iterable[KernelDefinition] = (FORWARD,),
        own: Iterable[KernelDefinition] = (DECODE, FORWARD),
        name: str = "prefix-groups",
        archs: tuple[str, ...] = (),
    ) -> None:
        """``shared`` and ``own``: kernels of the parts; the first that takes a part is used."""
        self._shared, self._own, self.name, self.archs = tuple(shared), tuple(own), name, archs

    def refuse(self, problem: AttentionProblem, row: ArchRow) -> str | None:
        p, spec = problem, problem.spec
        if not spec.prefix_groups:
            return "prefix_groups is not given: it computes the groups apart"
        if reason := spec.refused_by(SUPPORTED):
            return reason
        if not (p.batch and p.num_heads and p.S_q):
            return "there are no queries"
        batch, _, step = p.q_strides
        if spec.q_view != "packed" and 1 not in (p.S_q, p.batch) and batch != p.S_q * step:
            apart = f"queries of entries lie {batch} elements apart"
            return f"{apart}: it takes S_q·row, {p.S_q * step}"
        if spec.kv_scales == "heads" and (p.k_scale_strides[0] or p.v_scale_strides[0]):
            return "scales are of entries: it takes those of heads, of one number, or of blocks"
        tables = tables_of(p)
        if (places := (tables.batch + tables.sequences) * max(tables.width, 1)) >= INT32:
            return f"{places} places of block tables: it takes less than 2^31"
        for what, part, kernels in (
            ("the shared part", shared_part(p), self._shared),
            ("the own part", own_part(p), self._own),
        ):
            reasons = [k.refuse(part, row) for k in kernels]
            if all(reasons):
                return f"{what}: {reasons[-1]}"
        return None

    def tile(self, problem: AttentionProblem, row: ArchRow, device: Device) -> PrefixTile:
        return PrefixTile(
            _chosen(self._shared, _whole(problem), row, device),
            _chosen(self._own, own_part(problem), row, device),
        )

    def takes(
        self, problem: AttentionProblem, tile: PrefixTile, row: ArchRow, device: Device
    ) -> bool:
        return all(
            not kernel.refuse(part, row) and kernel.takes(part, t, row, device)
            for (kernel, t), part in (
                (tile.shared, _whole(problem)),
                (tile.own, own_part(problem)),
            )
        )

    def launches(self, problem: AttentionProblem, tile: PrefixTile, device: Device) -> Launches:
        p, tables, rows = problem, tables_of(problem), _rows(problem)
        sizes = {
            "outs": _PARTS * rows * p.num_heads * pad(p.spec.value_dim),
            "lses": _PARTS * rows * p.num_heads,
            "common": tables.batch,
            "shared_rows": tables.sequences + 1,
            "shared_lengths": tables.sequences,
            "shared_table": tables.sequences * tables.width,
            "own_lengths": tables.batch,
            "own_table": tables.batch * tables.width,
        }
        (shared, shared_tile), (own, own_tile) = tile.shared, tile.own
        parts = (
            shared.launches(shared_part(p), shared_tile, device),
            own.launches(own_part(p), own_tile, device),
        )
        end = zeroed = max(x.zeroed_bytes for x in parts)
        at = dict[str, int]()
        for name, count in sizes.items():
            end = _aligned(end)
            at[name], end = end, end + 4 * count
        outs, lses = sizes["outs"] // _PARTS * 4, sizes["lses"] // _PARTS * 4
        places: tuple[dict[str, int], ...] = (
            {
                "cu_seqlens_q": at["shared_rows"],
                "kv_lengths": at["shared_lengths"],
                "block_table": at["shared_table"],
                "out": at["outs"],
                "lse": at["lses"],
            },
            {
                "kv_lengths": at["own_lengths"],
                "block_table": at["own_table"],
                "out": at["outs"] + outs,
                "lse": at["lses"] + lses,
            },
        )
        steps = list[Launch | Memset]()
        for kernel in (COMMON_PAGES, PREFIX_TABLES):
            mine = {n: at[n] for n in kernel.pointer_names if n in at}
            steps.append(Launch(kernel, tables, RowTile(), mine))
        for part, operands in zip(parts, places, strict=True):
            end = _aligned(end)
            steps += _moved(part, operands, end, device)
            end += part.workspace_bytes
        steps.append(Launch(MERGE, _merge(p), MERGE_TILE, {"outs": at["outs"], "lses": at["lses"]}))
        return Launches(tuple(steps), end, zeroed_bytes=zeroed)


def tables_of(p: AttentionProblem) -> TableProblem:
    """How the block table is divided."""
    spec = TableSpec(p.spec.q_view == "packed")
    return TableProblem(
        spec,
        p.batch,
        p.S_q,
        p.S_k,
        p.page_size,
        p.table_width,
        p.table_stride,
        _rows(p),
        p.prefix_groups,
    )


def shared_part(p: AttentionProblem) -> AttentionProblem:
    """Groups as packed sequences whose queries are rows of all entries of the group."""
    batch, head, row = p.q_strides
    rows = _rows(p)
    return replace(
        _part(p),
        spec=replace(_part(p).spec, causal=False, sinks=False, q_view="packed"),
        batch=tables_of(p).sequences,
        S_q=rows,
        total_q=rows,
        right=None,
        q_strides=(0, head, batch if p.spec.q_view != "packed" and p.S_q == 1 else row),
        out_strides=(0, *_out_strides(p)[1:]),
        lse_strides=(0, rows),
    )


def own_part(p: AttentionProblem) -> AttentionProblem:
    """The entries with the pages that are their own."""
    return _part(p)


def _part(p: AttentionProblem) -> AttentionProblem:
    f32 = DType.float32
    spec = replace(
        p.spec,
        prefix_groups=False,
        lse=True,
        dtype_out=None if p.spec.dtype is f32 else f32,
    )
    return replace(
        p,
        spec=spec,
        prefix_groups=0,
        table_stride=p.table_width,
        out_strides=_out_strides(p),
        lse_strides=(_per_entry(p), _rows(p)),
    )


def _whole(p: AttentionProblem) -> AttentionProblem:
    """The shared part where all entries are one group: its tile is the choice for any."""
    return replace(shared_part(p), batch=1)


def _rows(p: AttentionProblem) -> int:
    """Rows of queries."""
    return p.total_q if p.spec.q_view == "packed" else p.batch * p.S_q


def _per_entry(p: AttentionProblem) -> int:
    """Rows from an entry's first to the next one's; 0 where that differs."""
    return 0 if p.spec.q_view == "packed" else p.S_q


def _out_strides(p: AttentionProblem) -> tuple[int, int, int]:
    """Of a part's results, [row, head, column]."""
    width = pad(p.spec.value_dim)
    row = p.num_heads * width
    return _per_entry(p) * row, width, row


def _merge(p: AttentionProblem) -> MergeProblem:
    packed, rows = p.spec.q_view == "packed", _rows(p)
    batch, head, row = _out_strides(p)
    spec = MergeSpec(
        DType.float32, p.spec.out, p.spec.value_dim, p.spec.lse, p.spec.vector, packed=packed
    )
    return MergeProblem(
        spec,
        _PARTS,
        1 if packed else p.batch,
        p.num_heads,
        rows if packed else p.S_q,
        (rows * row, batch, head, row),
        (rows * p.num_heads, _per_entry(p), rows),
        p.out_strides,
        p.lse_strides,
        p.batch,
    )


def _chosen(
    kernels: tuple[KernelDefinition, ...], part: AttentionProblem, row: ArchRow, device: Device
) -> tuple[KernelDefinition, Any]:
    kernel = next((k for k in kernels if not k.refuse(part, row)), kernels[-1])
    return kernel, kernel.tile(part, row, device)


def _moved(
    launches: Launches, operands: Mapping[str, int], first: int, device: Device
) -> Iterator[Launch | Memset]:
    """Launches whose operands of these names lie in the workspace, and whose own workspace, but for
    what is zeroed, begins at ``first``. What is zeroed they share with others at the front: each
    leaves it 0."""

    def moved(offset: int) -> int:
        return offset if offset < launches.zeroed_bytes else first + offset

    for step in launches.steps:
        if isinstance(step, Memset):
            yield replace(step, offset=moved(step.offset))
            continue
        kernel = step.kernel
        maps = kernel.tensor_maps(step.problem, step.tile, device)
        names = {
            **kernel.pointers(step.problem.spec),
            **{parameter: x.operand for parameter, x in maps.items()},
            **step.operands,
        }
        inside = {parameter: operands[n] for parameter, n in names.items() if n in operands}
        workspace = inside | {n: moved(x) for n, x in step.workspace.items()}
        yield replace(step, workspace=workspace)


def _aligned(offset: int) -> int:
    return divide_up(offset, WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT


PREFIX_GROUPS = PrefixGroups()
