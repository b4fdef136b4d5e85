"""Plots of a run: ratio bars by row, a page a suite, and a roofline with the ceilings that the run
measured."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.comparing.results import BACK_TO_BACK, FLUSHED, OURS, PEER, Record, Timed

OURS_COLOUR, PEER_COLOUR, BELOW_COLOUR, GRID = "#1f6f8b", "#c9a227", "#b23a48", "#dddddd"


def draw(head: dict[str, Any], records: Sequence[Record], folder: Path) -> list[Path]:
    """Write what the records have into a folder; the files."""
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    whole = [r for r in records if not r.failure]
    for suite, rows in groupby(whole, key=lambda r: r.suite):
        if bars := [r for r in rows if any(r.counted(t) is not None for t in r.of(OURS))]:
            written.append(_ratios(suite, bars, head, folder / f"ratios-{suite}.svg"))
    points = [r for r in whole if r.operations and r.of(OURS)]
    if points:
        written.append(_roofline(points, head, folder / "roofline.svg"))
    return written


def _ratios(suite: str, rows: Sequence[Record], head: dict[str, Any], path: Path) -> Path:
    """A bar a row, the ratio that counts; beside it each peer's, back to back and flushed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.8 + 0.3 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    marks = {BACK_TO_BACK: "o", FLUSHED: "s"}
    labelled: set[str] = set()
    for y, row in enumerate(rows):
        ours = row.of(OURS)[0]
        counted = row.counted(ours) or 0.0
        axes.barh(y, counted, 0.62, color=BELOW_COLOUR if counted < row.least else OURS_COLOUR)
        axes.annotate(
            f"{counted:.2f}",
            (counted, y),
            (-4, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            color="white",
            fontsize=8,
        )
        for i, peer in enumerate(row.of(PEER)):
            for way, ratio in row.ratios(ours, peer).items():
                label = f"{peer.name}, {way}"
                axes.plot(
                    ratio,
                    y,
                    marks.get(way, "d"),
                    color=f"C{i + 1}",
                    markersize=4,
                    fillstyle="none",
                    label=None if label in labelled else label,
                )
                labelled.add(label)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(rows)), [r.name for r in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0)
    axes.set_xlabel("peer's time over ours; bars: the best peer in the way in which it is closer")
    axes.set_title(f"{suite}, {head.get('device', {}).get('name', '')}", fontsize=10)
    axes.grid(axis="x", color=GRID)
    axes.set_axisbelow(True)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path)
    return path


def _roofline(rows: Sequence[Record], head: dict[str, Any], path: Path) -> Path:
    """Operations a byte against TFLOP/s, each row's best peer a hollow mark under or over ours."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.add_subplot()
    marks = dict(zip(dict.fromkeys(r.suite for r in rows), "osD^vP*", strict=False))
    labelled: set[str] = set()

    def point(row: Record, timed: Timed, colour: str, fill: str, label: str) -> None:
        us = timed.median(BACK_TO_BACK)
        if us:
            axes.plot(
                row.operations / row.bytes,
                row.operations / us / 1e6,
                marks.get(row.suite, "o"),
                color=colour,
                fillstyle=fill,
                markersize=5,
                linestyle="none",
                label=None if label in labelled else label,
            )
            labelled.add(label)

    for row in rows:
        timed = [t for t in row.of(PEER) if t.median(BACK_TO_BACK)]
        if timed:
            point(
                row,
                min(timed, key=lambda t: t.median(BACK_TO_BACK) or 0),
                PEER_COLOUR,
                "none",
                "best peer",
            )
        point(row, row.of(OURS)[0], OURS_COLOUR, "full", f"ours, {row.suite}")
    if ceilings := head.get("ceilings"):
        low = min(r.operations / r.bytes for r in rows) / 2
        high = max(r.operations / r.bytes for r in rows) * 2
        ridge = ceilings["cublas_tflops"] * 1e3 / ceilings["copy_gbs"]
        xs = [low, min(max(ridge, low), high), high]
        ys = [min(x * ceilings["copy_gbs"] / 1e3, ceilings["cublas_tflops"]) for x in xs]
        axes.plot(xs, ys, color="black", linewidth=1)
        axes.annotate(
            f"copy {ceilings['copy_gbs']:.0f} GB/s; cuBLAS 8192³ bf16 "
            f"{ceilings['cublas_tflops']:.0f} TFLOP/s",
            (xs[1], ys[1]),
            (0, 6),
            textcoords="offset points",
            fontsize=8,
            ha="center",
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations a byte (each input read once, each result written once)")
    axes.set_ylabel("TFLOP/s, back to back")
    axes.set_title(f"Roofline, {head.get('device', {}).get('name', '')}", fontsize=10)
    axes.grid(color=GRID)
    axes.set_axisbelow(True)
    axes.legend(fontsize=7)
    figure.savefig(path)
    return path
