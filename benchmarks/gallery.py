"""Pictures of the tables in benchmarks/results, for the README and the site; no GPU needed.

    python -m benchmarks.gallery [FOLDER]     by default docs/pictures

Every bar is a figure of a table. Peers' rates are not in the tables of forward attention and of
products: they are ours over the ratio of times, back to back.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, PICTURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "pictures"
COLOURS = {"kernelseam": "#1f6f8b", "FlashAttention-3": "#c9a227", "cuDNN": "#8a8a8a"}
COLOURS |= {"FlashAttention-2": "#cfcfcf", "cuBLAS": "#c9a227", "kernelseam, any order": "#6fb1c6"}
PARTS = {
    "norm, q, k, v": "#1f6f8b",
    "attention": "#6fb1c6",
    "output": "#c9a227",
    "norm, MLP": "#cfcfcf",
}
"""Of a decoder block."""
DEVICE = "one NVIDIA H200"
INK = "#767c85"
"""Of text and axes: it is read on white and on a dark page, behind which nothing is filled."""
Bars = Mapping[str, Sequence[float]]
"""By contestant, a bar a row."""

ATTENTION = (
    *("B4 H32 S4096 D64", "B4 H16 S4096 D128", "B4 H8 S4096 D256", "B4 H32 S4096 D64 causal"),
    *("B4 H16 S4096 D128 causal", "B4 H32/8 S4096 D128 causal", "B1 H8 S16384 D256 causal"),
)
PRODUCTS = (
    *("384 × 512×512×64 f16 NT", "256 × 2048×2048×128 f16 NT", "256 × 2048×128×2048 f16 NN"),
    *("64 × 1024×1024×1024 f16 NN", "1 × 8192×8192×8192 bf16 NN", "1 × 512×6144×4096 bf16 NT"),
    *("1 × 16384×4096×4096 bf16 NT bias residual", "384 × 1×512×64 f16 NT"),
    *("100 × 333×777×129 f16 NN", "256 × 2048×2048×128 f16 NT lists in one allocation, shuffled"),
    "64 × 1024×1024×1024 f16 NN lists allocated one by one, shuffled",
)
BLOCK = (
    "training, 2 × 8192 tokens, ms",
    "a step of decoding, 16 entries, 3584 + 512 keys, ms",
)


def table(file: str, column: str) -> list[dict[str, str]]:
    """The rows of a file's first Markdown table that has the column, by column."""
    lines = (RESULTS / file).read_text(encoding="utf-8").splitlines()
    for i, line in enumerate(lines):
        names = _cells(line)
        if line.startswith("|") and column in names:
            rows = []
            for row in lines[i + 2 :]:
                if not row.startswith("|"):
                    break
                rows.append(dict(zip(names, _cells(row), strict=True)))
            return rows
    raise LookupError(f"{file} has no table with a column {column!r}")


def _cells(line: str) -> list[str]:
    return [cell.strip().strip("*") for cell in line.strip().strip("|").split("|")]


def _ratio(cell: str) -> float:
    """The ratio back to back of "back to back / flushed"."""
    return float(cell.split("/")[0])


def attention() -> tuple[Sequence[str], Bars]:
    """TFLOP/s of the forward, causal counted half."""
    rows = {r["row"]: r for r in table("h200-peers.md", "FA3 / ours")}
    ours = [float(rows[n]["TFLOP/s"]) for n in ATTENTION]
    peers = {"FlashAttention-3": "FA3", "cuDNN": "cuDNN", "FlashAttention-2": "FA2"}
    return ATTENTION, {
        "kernelseam": ours,
        **{
            name: [
                x / _ratio(rows[n][f"{column} / ours"])
                for n, x in zip(ATTENTION, ours, strict=True)
            ]
            for name, column in peers.items()
        },
    }


def products() -> tuple[Sequence[str], Bars]:
    """cuBLAS's time over ours, back to back."""
    rows = {r["row"]: r for r in table("h200-peers.md", "cuBLAS / ours")}
    return PRODUCTS, {"kernelseam": [_ratio(rows[n]["cuBLAS / ours"]) for n in PRODUCTS]}


def gradients() -> tuple[Sequence[str], Bars]:
    """TFLOP/s of the gradients, causal counted half."""
    rows = table("h200-attention.md", "gradients")
    names = list(dict.fromkeys(r["gradients"] for r in rows))
    by_way = {
        way: [next(r for r in rows if r["gradients"] == n and r["way"] == way) for n in names]
        for way in ("in order", "any order")
    }

    def rate(r: dict[str, str], peer: str) -> float:
        return float(r["TFLOP/s"]) / _ratio(r[f"{peer} / ours"])

    return names, {
        "kernelseam": [float(r["TFLOP/s"]) for r in by_way["in order"]],
        "kernelseam, any order": [float(r["TFLOP/s"]) for r in by_way["any order"]],
        "FlashAttention-3": [rate(r, "FA3") for r in by_way["in order"]],
        "cuDNN": [rate(r, "cuDNN") for r in by_way["in order"]],
    }


def decoder_block(column: str) -> tuple[Sequence[str], Bars]:
    """The contestants of a pass, and of each part their milliseconds, forward and backward
    together."""
    rows = table("h200-decoder-block.md", column)
    names = [name for name in rows[0] if name != column]
    return names, {
        part: [sum(float(r[n]) for r in rows if r[column].startswith(part)) for n in names]
        for part in PARTS
    }


def draw(folder: Path) -> list[Path]:
    """Write every picture into a folder; the files."""
    folder.mkdir(parents=True, exist_ok=True)
    rate = "TFLOP/s, causal counted half"
    wanted: dict[str, tuple[tuple[Sequence[str], Bars], str, str]] = {
        "attention": (attention(), "attention forward, bfloat16", f"{rate}: higher is better"),
        "products": (
            products(),
            "batched products beside cuBLAS",
            "cuBLAS's time over ours: higher is better, above 1 ours is faster",
        ),
        "gradients": (gradients(), "attention's gradients, bfloat16", f"{rate}: higher is better"),
    }
    written = [
        _bars(folder / f"{name}.svg", rows, f"{title}, {DEVICE}", unit)
        for name, (rows, title, unit) in wanted.items()
    ]
    passes = {column: decoder_block(column) for column in BLOCK}
    return [*written, _stacked(folder / "decoder-block.svg", passes)]


@contextmanager
def _settings() -> Iterator[None]:
    """Text stays text, and the same figures make the same file."""
    import matplotlib

    matplotlib.use("Agg")
    settings: dict[str, Any] = {"svg.fonttype": "none", "svg.hashsalt": "kernelseam"}
    for part in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"):
        settings[part] = INK
    with matplotlib.rc_context(settings):
        yield


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, metadata={"Date": None, "Creator": None}, transparent=True)
    text = path.read_text(encoding="utf-8")
    path.write_text(re.sub(r"[ \t]+\n", "\n", text), encoding="utf-8")
    return path


def _stacked(path: Path, passes: Mapping[str, tuple[Sequence[str], Bars]]) -> Path:
    """A panel a pass, a bar a contestant, of its parts one after the other."""
    with _settings():
        from matplotlib.figure import Figure

        heights = [len(names) for names, _ in passes.values()]
        figure = Figure(figsize=(9, 1 + 0.42 * sum(heights)), layout="constrained")
        panels = figure.subplots(len(passes), squeeze=False, height_ratios=heights)[:, 0]
        for axes, (title, (names, parts)) in zip(panels, passes.items(), strict=True):
            ends = [0.0] * len(names)
            for part, values in parts.items():
                axes.barh(names, values, 0.7, left=ends, color=PARTS[part], label=part)
                ends = [end + x for end, x in zip(ends, values, strict=True)]
            for y, end in enumerate(ends):
                text = f"{end:.1f}" if end > 1 else f"{end:.3f}"
                place: dict[str, Any] = {"textcoords": "offset points", "va": "center"}
                axes.annotate(text, (end, y), (4, 0), fontsize=8, **place)
            axes.invert_yaxis()
            axes.tick_params(labelsize=8)
            axes.set_title(title, fontsize=9, loc="left")
            axes.spines[["top", "right"]].set_visible(False)
        panels[0].legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
        figure.suptitle(
            f"where a decoder block's time goes, bfloat16, {DEVICE}: lower is better", fontsize=10
        )
        return _save(figure, path)


def _bars(path: Path, drawn: tuple[Sequence[str], Bars], title: str, unit: str) -> Path:
    names, bars = drawn
    with _settings():
        from matplotlib.figure import Figure

        figure = Figure(
            figsize=(9, 1.2 + 0.12 * len(names) * (len(bars) + 1)), layout="constrained"
        )
        axes = figure.add_subplot()
        height = 0.84 / len(bars)
        for i, (name, values) in enumerate(bars.items()):
            places = [y + height * i for y in range(len(names))]
            axes.barh(places, values, height * 0.94, color=COLOURS[name], label=name)
            if name.startswith("kernelseam"):
                for y, x in zip(places, values, strict=True):
                    text = f"{x:.0f}" if x > 10 else f"{x:.2f}"
                    axes.annotate(
                        text,
                        (0, y),
                        (4, 0),
                        textcoords="offset points",
                        ha="left",
                        va="center",
                        color="white",
                        fontsize=8,
                    )
        if len(bars) == 1:
            axes.axvline(1, color=INK, linewidth=1)
        middle = height * (len(bars) - 1) / 2
        axes.set_yticks([y + middle for y in range(len(names))], names, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel(unit, fontsize=9)
        axes.set_title(title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        if len(bars) > 1:
            axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
        return _save(figure, path)


if __name__ == "__main__":
    for picture in draw(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES):
        print(picture)
