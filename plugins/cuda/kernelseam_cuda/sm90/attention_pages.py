"""Keys and values in pages, as cuda_kernels/sm90/attention/paged_keys.h takes them: which pages,
which tensor maps and arguments."""

from __future__ import annotations

from math import gcd

from kernelseam.contract import TensorMap
from kernelseam.descriptors.attention.problem import AttentionProblem
from kernelseam.kernels.attention.arguments import PAGES, matrices
from kernelseam.kernels.elements import INT32, divider_values
from kernelseam.kernels.signature import Structure
from kernelseam.symbolic import recorded

from kernelseam_cuda.sm90.tiles import PANEL, panel_bytes, promotion

MOST_ROWS = 16
"""Of a page, that come at once: more are no faster."""
FEWEST_ROWS = 8
"""Fewer at once are slower than the shared kernel."""
PAGED_KEYS = Structure(
    (("k", matrices("k")), ("v", matrices("v")), ("pages", PAGES), ("page_rows", "i32"))
)
_SWIZZLED_ROWS = 8


@recorded
def rows_at_once(page_size: int) -> int:
    """Rows of a page that lie in one, of whichever block of keys."""
    return gcd(page_size, MOST_ROWS)


def together(itemsize: int, width: int, parts: int = 1) -> bool:
    """Whether a box brings all panels of so many columns, of which ``parts`` have whole panels."""
    return itemsize == 2 and width > PANEL and width % (PANEL * parts) == 0


def refuse_pages(p: AttentionProblem) -> str | None:
    """Why tensor maps find no rows of such pages, or None."""
    if p.spec.q_view not in ("strided", "packed"):
        return f"queries {p.spec.q_view} with keys paged: it takes strided and packed ones"
    if rows_at_once(p.page_size) < FEWEST_ROWS:
        return f"pages of {p.page_size} keys: it takes multiples of {FEWEST_ROWS}"
    for name, strides in (("k", p.k_strides), ("v", p.v_strides)):
        page, _, row = strides
        apart = row * FEWEST_ROWS
        if row <= 0 or (p.pages > 1 and (page % apart or page < row * p.page_size)):
            return (
                f"pages of {name} lie {page} elements apart, their rows {row}: it takes multiples "
                f"of {FEWEST_ROWS} rows from a page to the next"
            )
        if (rows := _pool_rows(p, strides)) >= INT32:
            return f"pages of {name} span {rows} rows: it takes less than 2^31"
    if page_stride(p, p.k_strides) != page_stride(p, p.v_strides):
        return "pages of k and of v lie different numbers of rows apart"
    return None


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
