"""The examples run on the host, and what they print is what they claim."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

import kernelseam

EXAMPLES = Path(__file__).parents[2] / "examples"


def said(python_command: list[str], name: str) -> list[str]:
    core = Path(kernelseam.__file__).parents[1]
    environment = {
        **os.environ, "KERNELSEAM_PLUGINS": "", "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(core), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [*python_command, str(EXAMPLES / name)], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_every_example_is_run_here() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert [e.name for e in EXAMPLES.glob("*.py") if f'"{e.name}"' not in text] == []


def test_raw_pointers(python_command: list[str]) -> None:
    strided, rebound, listed, refused = said(python_command, "raw_pointers.py")
    for line, view in ((strided, "strided: attention float32 causal "), (listed, "listed: attention float32 causal ")):
        assert line.startswith(view) and "1 launch, off by " in line
    assert "pointers/pointers" in listed
    assert rebound == "rebound: the same bits in other memory"
    assert refused == (
        "refused: num_heads = 8: must be a multiple of kv_heads = 3. Make num_heads a multiple of kv_heads."
    )


def test_paged_decoding(python_command: list[str]) -> None:
    prompts, steps, drawn = said(python_command, "paged_decoding.py")
    assert prompts.startswith("prompts of 13, 5, 16 tokens in 5 pages: off by ")
    assert steps.startswith("24 tokens each in 24 launches, 37, 29, 40 keys in 14 pages: off by ")
    assert drawn == "dense attention draws the same tokens"


def test_train_attention(python_command: list[str]) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    *steps, last = said(python_command, "train_attention.py")
    losses = [float(line.split()[-1]) for line in steps]
    assert losses[-1] == min(losses) and len(losses) == 5
    found = re.fullmatch(r"on cpu: loss (\S+) → (\S+), (\d+)% of the tokens right", last)
    assert found and float(found[1]) > 2 and float(found[2]) < 0.2 and int(found[3]) > 90
