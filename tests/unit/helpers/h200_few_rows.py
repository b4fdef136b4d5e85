"""What an H200 measured of few queries, short sequences and small problems: each implementation and
tile whose time is near the best, in µs, as ``python -m benchmarks choices`` has them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from kernelseam import Attention
from kernelseam.descriptors.attention.problem import AttentionProblem


class FewRow(NamedTuple):
    """A problem, and µs by what ``configuration`` calls a tile."""

    name: str
    problem: AttentionProblem
    us: dict[str, float]


def configuration(implementation: str, tile: Any) -> str:
    """A tile's rows and keys, "g" where heads share its rows, and parts of the keys: "p", or of a
    cluster "c"; of Hopper's own kernel, "s" before the shared one's, "d" before decoding's, which
    has its stages, too."""
    parts = getattr(tile, "parts", getattr(tile, "splits", 1))
    if implementation == "decode":
        return f"d{tile.rows}x{tile.bn}-{tile.stages}"
    grouped = getattr(tile, "grouped", False) or getattr(tile, "group_heads", 1) > 1
    kind = "c" if getattr(tile, "in_cluster", False) else "p"
    shape = f"{'s' * (implementation == 'shared')}{tile.bm}x{tile.bn}{'g' * grouped}"
    return f"{shape}-{parts}{kind}" if parts > 1 else shape


def _problem(text: str) -> AttentionProblem:
    """B: entries; H: heads/of keys; S × keys; D; "full" where nothing is masked; "page n": keys in
    pages of n, whose numbers are in device memory, "of n": of packed queries in all; "packed n":
    packed sequences of n rows in all."""
    batch, heads, kv_heads, queries, keys, dim = map(
        int,
        re.match(r"B(\d+) H(\d+)/(\d+) (\d+)×(\d+) D(\d+)", text).groups(),  # type: ignore[union-attr]
    )
    made = Attention(
        batch=batch,
        num_heads=heads,
        kv_heads=kv_heads,
        S_q=queries,
        S_k=keys,
        head_dim=dim,
        dtype="bfloat16",
        causal="full" not in text and queries > 1,
    ).problem()
    assert isinstance(made, AttentionProblem)
    if total := re.search(r"packed (\d+)", text):
        spec, rows = replace(made.spec, q_view="packed", kv_view="packed"), int(total[1])
        return replace(made, spec=spec, total_q=rows, total_k=rows)
    if not (page := re.search(r"page (\d+)", text)):
        return made
    size, total = int(page[1]), re.search(r"of (\d+)", text)
    spec = replace(
        made.spec, kv_view="paged", lengths=True, q_view="packed" if total else "strided"
    )
    width, walk = -(-keys // size), (kv_heads * size * dim, size * dim, dim)
    pages: dict[str, int] = {"pages": batch * width, "page_size": size}
    pages |= {"table_width": width, "table_stride": width, "total_q": int(total[1]) if total else 0}
    return replace(made, spec=spec, k_strides=walk, v_strides=walk, **pages)  # type: ignore[arg-type]


def few_rows() -> Iterator[FewRow]:
    for line in MEASURED.strip().splitlines():
        name, _, found = line.partition(" | ")
        us = {x.rpartition(" ")[0]: float(x.rpartition(" ")[2]) for x in found.split(", ")}
        yield FewRow(name, _problem(name), us)


MEASURED = """
B16 H20/4 62×1740 D64 | 192x96g 24.7, 256x64g 31.3
B64 H32/4 69×2563 D64 page 16 of 4416 | 192x96g 191.9, 256x64g 221.4
B2 H16/16 369×12846 D64 | 192x96-2p 83.7, 128x128-4p 96.9, 256x64-2p 101.4, 128x128 103.2
B1 H32/8 762×762 D64 | 192x96 12.1, 128x128 12.6, 64x64 13.1, 256x64 13.6
B63 H16/16 283×283 D64 | 192x96 64.9, 256x64 80.3
B3 H16/16 384×384 D64 | 64x64 8.2, 192x96 8.3, 128x128 8.9, 256x64 9.5, s64x64 10.4
B4 H20/4 32×8192 D64 | 256x64g-8p 20.9, 192x96g-8p 20.9, 64x64g-5p 22.7, 128x128g-4p 23.8
B4 H28/4 200×8192 D64 | 192x96g 95.8, 256x64g-4p 106.0, 128x128g-2p 109.9, 256x64 112.6
B1 H16/16 1408×1408 D64 | 128x128 17.6, 64x64 18.8, 192x96 19.4
B61 H32/4 41×504 D64 page 16 of 2461 | 192x96g 22.8, 256x64g 23.8
B4 H16/16 768×768 D64 | 256x64 14.7, 192x96 16.1
B10 H28/4 174×6604 D64 page 16 of 702 | 192x96g 87.2, 256x64g-4p 92.3, 128x128g-3p 93.4
B4 H8/8 150×150 D80 | 64x128 5.9, 128x128 6.4, 192x96 7.0
B3 H8/1 395×4476 D64 | 256x64g-3p 31.9, 192x96g-2p 33.3, 128x128g-5p 34.2, 128x128g-3p 34.4
B2 H16/4 60×60 D96 | 64x128 4.6, 128x128 5.3, 192x96 5.8
B1 H20/4 80×2652 D64 page 16 of 80 | 64x128g-4c 11.0, 64x128g-3c 11.7, 64x64g-4p 12.3
B8 H12/12 200×200 D72 full | 128x128 11.4, 192x96 14.3
B6 H24/8 334×334 D64 | 256x64g 14.1, 192x96 15.0, 256x64 17.8
B1 H32/8 300×2000 D96 | 128x128 22.8, 192x96-2p 25.0, 192x96g-2p 25.4, 192x96 28.6
B2 H32/8 30×1488 D64 | 128x128g-6c 9.1, 64x128g-3c 9.6, 64x64-2p 9.7, 128x128g-4c 9.8
B16 H4/4 64×64 D80 full | 64x128 4.5, 128x128 5.1
B12 H16/16 175×2927 D64 page 16 of 2100 | 192x96 75.1, 192x96-2p 77.0, 256x64-2p 91.7, 256x64 94.6
B138 H20/4 37×37 D256 packed 1316 full | 64x64g 25.6, 128x64g 25.7
B6 H12/12 612×612 D64 | 256x64 18.1, 192x96 18.9
B24 H16/16 32×2414 D64 | 64x128 62.9, s64x64 64.5, 128x128 65.3, 64x64-2p 69.5, 64x64 70.6
B12 H64/8 51×1853 D64 page 64 of 612 | 256x64g 59.4, 192x96g 63.5, 256x64g-2p 69.3
B60 H8/1 49×49 D256 packed 710 | 64x64g 9.1, 128x64g 10.0, s128x16g 11.2
B8 H20/4 288×288 D64 | 192x96g 13.4, 256x64g 13.8, 192x96 15.9
B100 H64/8 30×30 D128 packed 931 full | s64x48g 29.9, 128x128g 30.9
B12 H32/8 96×1353 D64 | 192x96g 36.6, 256x64g 41.0, 192x96g-2p 47.4
B8 H8/1 164×3457 D64 page 16 of 1312 | 192x96g-2p 30.4, 192x96-2p 31.3, 128x128g-3p 31.5
B8 H32/8 157×157 D64 | 192x96 9.6, 256x64 10.7, s64x32g 12.2, 256x64g 12.3
B1 H16/16 595×3758 D64 | 192x96-2p 29.8, 128x128-3p 30.8, 128x128 33.2, 64x64-3p 34.0
B12 H20/4 67×872 D64 page 64 of 804 | 192x96g 17.2, 256x64g 20.9, 128x128 21.2, 128x128g 21.6
B64 H16/1 1×4096 D128 page 16 | 64x128g 39.2, 128x128g-2p 40.0, 128x128g 40.1, d16x16-3 43.9
B8 H24/8 65×1830 D128 page 64 of 520 | 128x128g 31.6, 64x64g 34.0, 64x128g 39.1
B2 H64/8 13×3249 D128 | 64x64g-4p 14.4, 128x128g-6c 15.2, 128x128g-8p 15.3, 64x64g-8p 15.3
B1 H40/8 255×15629 D128 page 64 of 255 | 128x128-3p 141.8, 128x128 153.0, 128x128-8p 155.9
B8 H4/4 302×302 D128 packed 1476 full | 64x64 7.5, 64x128 8.6, 128x128 9.3
B1 H16/16 1×88 D64 page 16 | s64x32 4.8, 64x128 4.9, d16x16-5 4.9, d32x32-3 5.0, 128x128 5.3
B2 H16/16 712×712 D80 | 128x128 14.1, 192x96 14.1
B6 H64/8 201×2329 D128 | 128x128g 154.1, 128x128 186.8
B10 H28/4 1×661 D64 page 16 | 64x128g 8.2, 64x128g-2p 8.3, 128x128g-2p 8.3, d16x16-5 8.8
B12 H8/1 7×7190 D64 page 64 of 84 | 64x128g-11p 13.5, 128x128g-11p 14.0, 64x128g-5p 15.4
B1 H16/16 185×185 D64 | 64x64 4.4, 64x128 4.8
B1 H16/16 1×1052 D256 page 16 | 64x64-4p 10.7, d16x16-2 11.8, d16x16-3 11.9, 64x64-2p 13.4
B1 H16/16 71×71 D128 full | 64x64 4.2, 64x128 4.3
B17 H4/4 24×3114 D128 page 16 of 109 | 64x64-3p 16.8, 64x128-3p 18.3, 64x128-5p 18.3
B7 H40/8 22×22 D128 packed 80 full | s64x48g 5.2, 64x64g 5.8
B1 H16/16 97×4956 D128 | 128x128-6c 18.3, 128x128-8p 18.8, 64x128-4p 20.3, 64x64-8p 21.0
B29 H4/4 1×4730 D128 page 16 | d16x16-3 15.7, d16x16-2 19.0
B2 H64/8 84×3348 D128 page 256 of 168 | 128x128g 38.5, 128x128 40.6, 64x64g 45.8, 64x64g-3p 49.3
B1 H40/8 164×164 D128 full | 64x64 5.2, 64x128 6.0
B4 H8/2 140×14320 D256 | 128x64g-3p 122.1, 64x64g-5p 138.4, 64x64g-9p 145.7, 64x64g-3p 146.2
B1 H20/4 1×15326 D64 page 16 | 64x128g-33p 12.0, 64x128g-16p 12.1, 128x128g-33p 12.3
B8 H8/2 3×3577 D256 page 64 of 24 | 64x64g-8p 21.8, 64x64g-4p 22.3, 128x64g-4p 22.8
B2 H64/8 229×229 D64 full | 256x64 8.0, 64x64 8.8, 128x128 9.0
B2 H16/16 45×7854 D256 | 64x64-2p 70.3, 64x64-4p 71.7, 64x64-2c 71.9, 128x64-4p 74.0
B11 H32/8 1×3641 D128 page 16 | d16x16-3 13.1, d16x16-2 14.0, d32x16-3 16.1
B172 H64/8 142×142 D64 packed 11184 | 256x64g 108.0
B3 H4/4 263×3173 D128 page 256 of 789 | 64x64-4p 20.2, 64x128-2c 20.5, 128x128-3p 22.1
B1 H16/16 97×97 D80 | 64x128 4.4, 128x128 5.1
B3 H8/1 203×21434 D64 | 256x64g-6p 59.2, 128x128g-3p 61.5, 256x64-5p 66.5
B31 H8/2 1×168 D256 page 16 | 64x64g 7.1, 128x64g 7.3
B6 H64/8 185×1391 D128 | 128x128g 94.2, 128x128 110.1
B8 H16/16 120×2707 D256 page 32 of 960 | 128x64 101.8, 64x64 116.7
B2 H16/16 1×970 D128 page 16 | 64x128-3p 10.0, d16x16-2 10.9, d16x16-3 11.0, 128x128-3p 11.1
B3 H20/4 446×446 D64 full | 256x64 10.6, 64x64 12.1, 256x64g 12.7, 128x128 12.9
B1 H20/4 261×1561 D64 | 64x128 12.7, 128x128g-3p 12.9, 64x64 13.6, 256x64g-5p 13.7
B28 H8/2 1×7464 D256 page 16 | d16x16-2 27.6, d16x16-3 28.4
B2 H64/8 7×2099 D64 page 256 of 14 | 64x128g-8p 10.5, 64x128g-4p 10.8, 128x128g-8p 10.8
B3 H20/4 204×204 D64 | 64x64 5.8, 128x128 6.0, 128x128g 6.8, 64x128 7.5
B4 H24/8 367×1191 D128 page 16 of 736 | 128x128g 33.4, 128x128 34.9, 64x64 35.3
B291 H32/8 70×70 D128 packed 8499 | 128x128g 98.7
B2 H40/8 342×2402 D128 | 128x128 53.6, 64x64 63.0
B42 H16/16 1×1894 D64 page 16 | d16x16-5 21.7, 64x128 23.5, d32x32-3 24.1
B8 H16/16 105×716 D64 page 256 of 840 | 128x128 12.3, 64x64 12.6
B6 H20/4 255×255 D64 | 256x64 6.8, 64x64 8.3, 128x128 8.6
B8 H4/4 236×17244 D128 | 128x128-2p 127.3, 128x128-2c 133.2, 64x128 146.3
B1 H4/4 1×45 D128 page 16 | d16x16-2 4.9, d16x16-3 4.9, s64x48 4.9, d32x16-3 5.5, 64x128 5.7
B3 H8/1 7×10662 D256 page 256 of 21 | 64x64g-20p 16.3, 128x64g-20p 16.7, 64x64g-41p 18.7
B2 H16/16 335×335 D128 | 64x64 8.9, 128x128 9.0, 64x128 9.6
B48 H64/8 1×105 D64 page 16 | s64x32g 6.8
B37 H4/4 111×289 D128 page 16 of 1797 | 64x64 13.8, 64x128 14.9
B175 H64/8 134×134 D64 packed 9937 | 256x64g 97.7
B12 H4/4 3×3164 D128 page 32 of 36 | d16x16-3 27.2, 64x128-2p 27.3, 128x128-2p 28.3, 64x128 29.1
B1 H16/16 306×306 D80 | 64x128 6.7, 128x128 7.4
B4 H24/8 113×12634 D128 | 128x128-4p 133.6, 128x128 149.0, 64x128-2p 156.6
B5 H32/8 1×304 D128 page 16 | 64x128g 7.5, 128x128g 7.7
B8 H16/16 81×81 D80 | 128x128 6.0, 192x96 6.2, 64x128 7.4
B2 H8/1 1×132 D256 page 16 | 64x64g 7.0, 64x64 7.6
B60 H16/2 17×125 D128 page 32 of 1020 | 64x64g 13.5
B100 H32/2 9×125 D128 page 32 of 900 | 128x128g 26.2, s64x48g 29.3
B45 H32/4 11×1340 D64 page 16 of 225 | 64x64g 25.6, 64x128g 27.0
B13 H32/8 70×6436 D128 page 16 of 220 | 64x128g 59.8, 64x128g-2p 70.6, 128x128g 74.8
B61 H32/8 78×78 D128 | 128x128 46.8, 128x128g 48.6, s64x48g 60.7
B8 H32/8 16×2048 D128 | 64x128g 21.3, 128x128g 22.1, 64x128g-2c 23.3, 128x128g-2c 25.2
B4 H32/8 210×1216 D256 | 128x64 60.7, 128x64g 61.8
B16 H24/8 261×2317 D128 | 128x128g 224.4, 128x128 259.6
B3 H64/8 257×2164 D128 | 128x128g 91.7, 128x128 114.6
B18 H32/8 8×43 D128 page 16 of 123 | s64x48g 7.1, d16x16-3 7.6
B51 H16/4 4×36 D128 page 16 of 204 | s64x48g 7.2, d16x16-3 7.5
B7 H16/2 4×6437 D64 page 16 of 25 | d32x32-3 10.9, 64x128g-9p 12.1, 128x128g-9p 12.3
B40 H4/1 1×9364 D256 page 16 | d16x16-2 21.2, d16x16-3 21.5
B95 H16/4 1×703 D128 page 16 | 128x128g 39.0, 64x128g 40.0, d16x16-3 42.6, d16x16-2 47.7
B1 H32/8 1×8192 D128 page 16 | 64x128g-16p 11.2, 128x128g-16p 11.9, 64x128g-8p 13.5
B1 H32/8 4×4096 D128 page 16 of 4 | 64x128g-8p 10.8, 128x128g-8p 11.1, 64x128g-16p 11.5
B4 H32/8 16×1024 D128 page 16 of 64 | 64x128g-3c 10.8, 64x64g-4p 10.8, 64x128g-2c 11.1
B2 H8/2 1×25411 D128 page 16 | 64x128g-16p 20.4, 128x128g-16p 21.4, 64x128g-33p 21.9
B2 H32/8 107×2136 D64 page 16 of 214 | 128x128-2c 16.7, 64x128g 16.9, 64x128 16.9, 64x64g 19.1
B4 H40/8 107×5584 D128 page 16 of 428 | 128x128-3p 121.8, 128x128-4p 121.9, 128x128-2p 127.4
B16 H40/8 427×3078 D64 page 16 of 6832 | 256x64g 420.2, 256x64 469.2
B1 H40/8 220×1856 D128 | 128x128 23.1, 128x128g 24.3, 64x64 25.4, 128x128-3p 28.1
B1 H64/8 126×1675 D64 page 64 of 126 | 64x128 15.2, 128x128-2c 15.2, 64x64 16.4, 128x128-2p 17.6
B4 H32/4 90×6454 D256 | 128x64 146.8, 128x64g 148.5, 128x64g-4p 152.9, 64x64g-2p 168.7
B8 H28/4 16×6647 D128 page 16 of 128 | 64x128g-2p 38.6, 128x128g-3c 40.3, 128x128g-4p 40.4
B1 H28/4 39×10329 D128 | 64x64g-13p 19.7, 128x128g-11p 19.9, 64x128g-6p 20.8, 64x64g-6p 21.3
B1 H32/8 181×2496 D128 page 32 of 181 | 128x128g-2c 22.0, 128x128-2c 22.0, 64x128 23.9
B2 H24/8 97×3330 D64 | 192x96g-4p 18.2, 64x64g-3p 18.6, 256x64g-4p 20.7, 128x128-2c 21.1
"""
