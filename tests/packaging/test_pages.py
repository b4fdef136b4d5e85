"""The pages' code runs, what they show is what there is, and the site is built of them."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import kernelseam
import pytest
from kernelseam.cli.commands import HELP
from kernelseam.cli.main import main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
QUICK_STARTS = sorted(p.name for p in DOCS.glob("quickstart-*.md"))


def blocks(page: str, language: str = "python") -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def test_there_are_three() -> None:
    assert [f"quickstart-{n}.md" for n in ("pointers", "serving", "torch")] == QUICK_STARTS


@pytest.mark.parametrize("page", QUICK_STARTS)
def test_a_quick_start_runs(page: str) -> None:
    """Block after block, each with what those before it made. Their asserts are their own."""
    if page == "quickstart-torch.md":
        pytest.importorskip("torch", reason="torch is not installed")
    code = "\n".join(blocks(page))
    assert len(blocks(page)) >= 5 and "assert " in code
    names: dict[str, Any] = {}
    with kernelseam.trace() as launches:
        exec(compile(code, page, "exec"), names)
    assert {r.kernel.removeprefix("numpy_") for r in launches} >= {
        "quickstart-pointers.md": {"gemm", "attention"},
        "quickstart-serving.md": {"gemm", "paged_cache", "attention"},
        "quickstart-torch.md": {"attention", "attention_bwd", "gemm"},
    }[page]


def test_serving_attends_to_what_is_in_the_pages() -> None:
    """Held against dense attention over the keys that the block table names."""
    import numpy as np

    names: dict[str, Any] = {}
    exec(compile("\n".join(blocks("quickstart-serving.md")[:4]), "serving", "exec"), names)
    q, out, lengths, table = (names[n] for n in ("q", "out", "kv_lengths", "block_table"))
    assert list(lengths) == [21, 6, 42]
    for b, n in enumerate(lengths):
        k, v = (
            names[f"{x}_pages"][table[b]].reshape(-1, 2, 64)[None, :n].swapaxes(1, 2) for x in "kv"
        )
        wanted = kernelseam.attention(q[b : b + 1].swapaxes(1, 2), k, v)
        assert np.abs(out[b, 0] - wanted[0, :, 0]).max() < 1e-5
        assert np.abs(k[0, :, n - 1]).max() > 0.01, "the projection wrote the new key"


def test_explain_is_read_as_it_was_printed() -> None:
    (shown,) = blocks("explain.md", "text")
    kept = (ROOT / "benchmarks/results/h200-tune.txt").read_text(encoding="utf-8")
    assert shown in kept
    header = shown.splitlines()[5]
    page = (DOCS / "explain.md").read_text(encoding="utf-8")
    for column in header.split()[2:]:
        assert f"| `{column}` |" in page, f"{column} is not explained"


def test_the_refusals_that_are_explained_are_those_that_are_given() -> None:
    """By their words, numbers and names left out."""
    page = (DOCS / "explain.md").read_text(encoding="utf-8")
    table = page.partition("| refused | means | so |")[2].partition("\n\n")[0]
    shown = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    assert len(shown) == 6
    rooms = (ROOT / "plugins/cuda/kernelseam_cuda", ROOT / "core/kernelseam/cli")
    files = [ROOT / "core/kernelseam/errors.py", *(p for r in rooms for p in r.rglob("*.py"))]
    given = "".join(p.read_text(encoding="utf-8") for p in files)
    names = r"\b(?:bias, mask|100|512|8|16|float32|numpy|cuda:0|cuBLAS)\b"
    for refusal in shown:
        for words in re.split(names, refusal):
            assert words.strip() in given, f"{refusal}: nobody says {words!r}"


def test_every_command_and_every_example_has_its_row(capsys: pytest.CaptureFixture[str]) -> None:
    """In the order of ``--help``; the options of a row's command are its own."""
    page = (DOCS / "command-line.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| .* \| `kernelseam (.+)` \|$", page, re.MULTILINE)
    assert [name for name, _ in rows] == list(HELP)
    for name, command in rows:
        words = command.split()
        end = next((i for i, w in enumerate(words) if w.startswith("--")), len(words))
        assert words[0] == name
        with pytest.raises(SystemExit) as ended:
            main([*words[:end], "--help"])
        said = capsys.readouterr().out
        assert not ended.value.code
        assert [w for w in words if w.startswith("--") and w not in said] == [], command
    listed = set(re.findall(r"examples/(\w+)", (DOCS / "examples.md").read_text(encoding="utf-8")))
    there = {p.stem for p in (ROOT / "examples").iterdir() if p.suffix == ".py"}
    assert listed == there | {"decoder_block"}


def test_every_public_name_is_in_the_reference() -> None:
    said = "".join(p.read_text(encoding="utf-8") for p in (DOCS / "api").glob("*.md"))
    shown = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", said, re.MULTILINE)}
    assert set(kernelseam.__all__) - shown - {"__version__", "errors"} == set()
    for interop in ("torch", "jax", "transformers", "diffusers", "vllm"):
        names = importlib.import_module(f"kernelseam.interop.{interop}").__all__
        for name in names:
            assert name == "NAME" or re.search(
                rf"^::: kernelseam.interop.{interop}\S*\.{name}$", said, re.M
            )


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A link or a name that leads nowhere is an error, and so is a page that the navigation lacks
    (with --quiet mkdocs would not count such warnings)."""
    if find_spec("mkdocs") is None or find_spec("mkdocstrings") is None:
        pytest.skip("mkdocs is missing: pip install '.[site]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_is_built(site: Path) -> None:
    assert len(list(site.rglob("index.html"))) == len(list(DOCS.rglob("*.md")))
    page = (site / "api" / "functions" / "index.html").read_text(encoding="utf-8")
    text = re.sub(r"<[^>]+>", "", page)
    for function in ("attention", "attention_paged", "bmm", "fused_qkv_projection", "devices"):
        assert f"{function}(" in text
    assert "Scaled dot-product attention, softmax(scores)·v" in text
    assert "tuple[Array, Array]" in text
    assert "**options" not in text and "kv_layout: str =" in text  # each option has its line
    assert (site / "pictures" / "attention.svg").exists() and (site / "search").is_dir()
