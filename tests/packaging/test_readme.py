"""What the READMEs and the pages show is true."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from kernelseam.cli.main import app

from benchmarks import gallery

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PUBLISHED = "https://github.com/kernelseam/kernelseam"
RAW = "https://raw.githubusercontent.com/kernelseam/kernelseam/main/"
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
PEERS = {"FlashAttention-3": "FA3", "FlashAttention-2": "FA2"}


def test_the_torch_example_runs() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(compile(code, "README.md", "exec"), names)
    q, k, v, out = (names[n] for n in ("q", "k", "v", "out"))
    sees = torch.ones(256, 256, dtype=torch.bool).tril().triu(-127)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *(x.detach().double().cpu() for x in (q, k, v)), attn_mask=sees, enable_gqa=True
    )
    assert (out.detach().double().cpu() - wanted).abs().max() < 1e-5
    assert all(x.grad is not None and x.grad.abs().max() > 0 for x in (q, k, v))


@pytest.mark.parametrize(("page", "fewest"), [("README.md", 5), ("docs/amd-card.md", 2)])
def test_the_commands_are_there(page: str, fewest: int) -> None:
    commands: Any = typer.main.get_command(app)
    context = typer.Context(commands)
    shown = [
        shlex.split(line.partition(" > ")[0], comments=True)
        for line in re.findall(
            r"^kernelseam .*$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE
        )
    ]
    assert len(shown) >= fewest
    for _, *words in shown:
        command, options = commands, list(words)
        while options and options[0] in getattr(command, "list_commands", lambda _: ())(context):
            command = command.get_command(context, options.pop(0))
        assert command.make_context("kernelseam", options).params


def test_the_benchmarks_for_an_amd_card_are_there() -> None:
    pytest.importorskip("torch", reason="torch is missing: the benchmarks' peer")
    from benchmarks.comparing import command, running

    page = (ROOT / "docs/amd-card.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^python -m benchmarks (.*)$", page, re.MULTILINE)
    options = command._parser(tuple(running.SUITES)).parse_args(shlex.split(line))
    assert options.suites == ["attention", "backward", "gemm"]
    assert (options.json.name, options.report.name) == ("amd.json", "amd.md")
    for glob in re.findall(r"`--only '(.+?)'`", page):
        assert running.chosen(options.suites, [glob]), f"no row is called {glob}"


def test_the_table_of_speed_is_as_measured() -> None:
    forward = {r["row"]: r for r in gallery.table("h200-peers.md", "FA3 / ours")}
    products = {r["row"]: r for r in gallery.table("h200-peers.md", "cuBLAS / ours")}
    gradients = {
        (r["gradients"], r["way"]): r for r in gallery.table("h200-attention.md", "gradients")
    }
    decode = {r["paged decode"]: r for r in gallery.table("h200-attention.md", "paged decode")}
    rows = re.findall(
        r"^\| (attention|its gradients(?:, `deterministic=False`)?|paged decode|products?) (.+?)"
        r" \| (.+?) \| (.+?) \|$",
        README,
        re.M,
    )
    assert len(rows) == 11
    for kind, problem, ours, beside in rows:
        number, unit = ours.split()
        peers = dict(x.rsplit(" ", 1) for x in beside.split(", "))
        if kind.startswith("product"):
            name = problem if kind == "products" else f"1 × {problem}"
            row = next(r for n, r in products.items() if re.fullmatch(rf"{name} N[NT]", n))
        else:
            name = problem.replace(" bf16", "").replace(", causal", " causal")
            ways = {
                "its gradients": "in order",
                "its gradients, `deterministic=False`": "any order",
            }
            if kind in ways:
                row = gradients[name, ways[kind]]
            else:
                row = (forward if kind == "attention" else decode)[name]
        assert row[unit] == number, problem
        for peer, ratio in peers.items():
            cell = row[f"{PEERS.get(peer, peer)} / ours"].split(" / ")[0]
            assert cell == ratio, f"{problem} beside {peer}"


def test_the_pictures_are_of_the_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    drawn = gallery.draw(tmp_path)
    names = ["attention.svg", "products.svg", "gradients.svg", "decoder-block.svg"]
    assert [p.name for p in drawn] == names
    for path in drawn:
        kept = (gallery.PICTURES / path.name).read_text(encoding="utf-8")

        def said(text: str) -> list[str]:
            return re.findall(r"<text[^>]*>([^<]*)</text>", text)

        assert said(path.read_text(encoding="utf-8")) == said(kept), path.name


@pytest.mark.parametrize(
    "page",
    [
        *("README.md", "CONTRIBUTING.md", "docs"),
        *(f"plugins/{p}/README.md" for p in ("cuda", "rocm", "rocm_emulator")),
    ],
)
def test_links_lead_somewhere(page: str) -> None:
    place = ROOT / page
    for file in sorted(place.rglob("*.md")) if place.is_dir() else [place]:
        for link in LINK.findall(file.read_text(encoding="utf-8")):
            if link.startswith(RAW):
                target = ROOT / link.removeprefix(RAW)
            elif link.startswith(PUBLISHED):
                path = link.removeprefix(PUBLISHED).lstrip("/")
                kind, _, rest = path.partition("/main/")
                if kind == "issues/new":
                    continue
                assert kind in ("", "blob", "tree"), link
                target = ROOT / rest
                assert not path or target.is_dir() == (kind == "tree"), f"{file} links to {link}"
            elif "://" in link:
                continue
            else:
                target = file.parent / link
            assert target.exists(), f"{file} links to {link}"
