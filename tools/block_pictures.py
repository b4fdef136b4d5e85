"""The picture of docs/scores.md: which blocks the masks of ``kernelseam.samples.mods`` leave.

python tools/block_pictures.py            show in words what they leave
python tools/block_pictures.py --write    … and draw docs/pictures/blocks.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kernelseam
from kernelseam.expressions.block_mask import BlockMask
from kernelseam.samples.mods import MODS, Extents

PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "blocks.svg"
EXTENTS, SIZE = Extents(2, 4, 256, 256), 8
SHOWN = (
    *(("causal", 0, 0), ("bottom_right_causal", 0, 0), ("window", 0, 0), ("sink_window", 0, 0)),
    *(("recent", 0, 0), ("dilated", 0, 0), ("prefix", 0, 0), ("prefix", 1, 0)),
    *(("documents", 0, 0), ("blocks_of_documents", 0, 0), ("neighbourhood", 0, 0), ("tree", 0, 0)),
    *(("block_diffusion", 0, 0), ("heads_apart", 0, 0), ("heads_apart", 0, 3)),
)
"""A mod's name, an entry and a head."""
CELL, GAP, TITLE, COLUMNS = 4, 14, 16, 5
COLOURS = {1: "#9ec5e8", 2: "#2f6ea5"}
"""Of mixed blocks, and of those that are seen whole; empty ones are the ground."""


def masks() -> Iterator[tuple[str, BlockMask, int, int]]:
    """A title, the blocks, and the entry and head of each that is shown."""
    for name, b, h in SHOWN:
        mask = MODS[name](EXTENTS).mask_mod
        assert mask is not None
        title = name.replace("_", " ") + f", entry {b}" * (b > 0) + f", head {h}" * (h > 0)
        yield title, kernelseam.block_mask(mask, *EXTENTS, block_size=SIZE), b, h


def _path(states: Any, state: int) -> str:
    """The runs of a state, row by row."""
    parts = []
    for r, row in enumerate(states):
        c = 0
        while c < len(row):
            n = 1
            while c + n < len(row) and row[c + n] == row[c]:
                n += 1
            if row[c] == state:
                parts.append(f"M{c} {r}h{n}v1h-{n}z")
            c += n
    return "".join(parts)


def drawn() -> str:
    """The picture: queries downwards, keys to the right."""
    count = EXTENTS.S_q // SIZE
    side = count * CELL
    step, rows = side + GAP, -(-len(SHOWN) // COLUMNS)
    width, height = COLUMNS * step - GAP, rows * (step + TITLE) - GAP
    about = f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="10"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {about}>']
    for i, (title, mask, b, h) in enumerate(masks()):
        x, y = i % COLUMNS * step, i // COLUMNS * (step + TITLE)
        lines.append(f'<g transform="translate({x} {y})">')
        lines.append(f'<text y="11" fill="#666">{title}</text>')
        lines.append(f'<g transform="translate(0 {TITLE}) scale({CELL})">')
        lines.append(f'<rect width="{count}" height="{count}" fill="#eee"/>')
        states = mask.states()[b, h].tolist()
        for state, colour in COLOURS.items():
            lines.append(f'<path fill="{colour}" d="{_path(states, state)}"/>')
        lines.append("</g></g>")
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="draw docs/pictures/blocks.svg")
    write = parser.parse_args().write
    for title, mask, *_ in masks():
        print(f"{title}: {mask}")
    if write:
        PICTURE.write_text(drawn(), encoding="utf-8")


if __name__ == "__main__":
    main()
