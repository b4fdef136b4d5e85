"""Keys and values in pages, as cuda_kernels/sm90/attention/paged_keys.h takes them: which pages,
which tensor maps and arguments."""

from __future__ import annotations

from math import gcd

from kernelseam.contract import TensorMap
from kernelseam.descriptors.attention.problem import AttentionProblem, AttentionSpec
from kernelseam.kernels.attention.arguments import PAGES, matrices
from kernelseam.kernels.elements import INT32, divider_values
from kernelseam.kernels.signature import Structure
from kernelseam.symbolic import recorded

from kernelseam_cuda.sm90.attention_blocks import by_element
from kernelseam_cuda.sm90.tiles import PANEL, panel_bytes, promotion

MOST_ROWS = 16
"""Of a page, that a box brings: more are no faster."""
BOX_ROWS = 8
"""The fewest that a box brings: fewer are copied row by row."""
COPIED_DIMS = range(97, 257)
"""The wider of the head dims, where rows are copied: in narrower tiles, of more consumers, and in
those of 512 columns the loading threads have no registers for it."""
COPIED_RATE = 0.72
"""Of the rate with boxes, where rows are copied."""
PAGED_KEYS = Structure(
    (("k", matrices("k")), ("v", matrices("v")), ("pages", PAGES), ("page_rows", "i32"))
)
_SWIZZLED_ROWS = 8
_COPIED = (
    f"it takes multiples of {BOX_ROWS}, and others in half precision with head dims of "
    f"{COPIED_DIMS[0]} to {COPIED_DIMS[-1]}, without scores by element"
)


def rows_at_once(p: AttentionProblem) -> int:
    """Rows of a box, which lie in one page of whichever block of keys, or 1 where pages have no
    boxes: threads copy their rows."""
    return _box_rows(p.page_size, page_stride(p, p.k_strides))


@recorded
def _box_rows(page_size: int, stride: int) -> int:
    rows = gcd(page_size, stride, MOST_ROWS)
    return rows if rows >= BOX_ROWS else 1


def together(itemsize: int, width: int, parts: int = 1) -> bool:
    """Whether a box brings all panels of so many columns, of which ``parts`` have whole panels."""
    return itemsize == 2 and width > PANEL and width % (PANEL * parts) == 0


def refuse_pages(p: AttentionProblem) -> str | None:
    """Why pages are no rows of one matrix for each head, or None."""
    if p.spec.q_view not in ("strided", "packed"):
        return f"queries {p.spec.q_view} with keys paged: it takes strided and packed ones"
    for name, strides in (("k", p.k_strides), ("v", p.v_strides)):
        page, _, row = strides
        if row <= 0 or (p.pages > 1 and (page % row or page < row * p.page_size)):
            return (
                f"pages of {name} lie {page} elements apart, their rows {row}: it takes whole rows "
                "from a page to the next"
            )
        if (rows := _pool_rows(p, strides)) >= INT32:
            return f"pages of {name} span {rows} rows: it takes less than 2^31"
    if page_stride(p, p.k_strides) != page_stride(p, p.v_strides):
        return "pages of k and of v lie different numbers of rows apart"
    if not copies(p.spec):
        return _refuse_copies(p)
    return (
        None if p.pages or rows_at_once(p) > 1 else "no pages: rows behind an end are copied, too"
    )


def forms(spec: AttentionSpec) -> tuple[int, ...]:
    """Rows of pages that may come at once, as tiles have them; (0,) without pages."""
    if spec.kv_view != "paged":
        return (0,)
    return (MOST_ROWS, 1) if copies(spec) else (MOST_ROWS,)


def copies(spec: AttentionSpec) -> bool:
    """Whether rows of pages without boxes are copied."""
    widest = max(spec.head_dim, spec.value_dim)
    return spec.kv.itemsize == 2 and widest in COPIED_DIMS and not by_element(spec)


def _refuse_copies(p: AttentionProblem) -> str | None:
    if rows_at_once(p) > 1:
        return None
    if p.page_size % BOX_ROWS:
        return f"pages of {p.page_size} keys: {_COPIED}"
    return f"pages of k and v lie {page_stride(p, p.k_strides)} rows apart: {_COPIED}"


def page_stride(p: AttentionProblem, strides: tuple[int, int, int]) -> int:
    """Rows from a page's first to the next one's."""
    return strides[0] // strides[2] if p.pages > 1 else p.page_size


def _pool_rows(p: AttentionProblem, strides: tuple[int, int, int]) -> int:
    """Of all pages, as rows of one matrix for each head."""
    return max(p.pages - 1, 0) * page_stride(p, strides) + p.page_size


def page_map(
    p: AttentionProblem,
    operand: str,
    width: int,
    strides: tuple[int, int, int],
    rows: int,
    parts: int = 1,
) -> TensorMap:
    """Of k or v, ``rows`` at once. Axes column, row of a unit, panel where panels come together,
    head, unit of up to eight rows."""
    _, head, row = strides
    itemsize, unit = p.spec.kv.itemsize, min(rows, _SWIZZLED_ROWS)
    panel = panel_bytes(itemsize, width) // itemsize
    units = _pool_rows(p, strides) // unit
    columns = [(width, 1, panel), (unit, row, unit)]
    if together(itemsize, width, parts):
        panels = width // panel
        columns = [(panel, 1, panel), (unit, row, unit), (panels, panel, panels)]
    axes = [*columns, (p.kv_heads, head, 1), (units, unit * row, rows // unit)]
    extents, steps, box = zip(*axes, strict=True)
    return TensorMap(
        operand,
        p.spec.kv,
        extents,
        steps,
        box,
        swizzle=panel * itemsize,
        l2_promotion=promotion(width * itemsize),
    )


def page_values(p: AttentionProblem) -> dict[str, int]:
    """The numbers of ``PAGED_KEYS`` beside those of its matrices."""
    return {
        "table_row": p.table_stride,
        **divider_values("page_size", p.page_size),
        "page_rows": page_stride(p, p.k_strides),
    }
