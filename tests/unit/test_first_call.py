"""The table of a first call's stages."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest
from kernelseam.contract import SourceBundle

from benchmarks import first_call

ROOT = Path(__file__).parents[2]


class Compiler:
    """A toolchain whose compiler writes its phases as nvrtc does."""

    def compile_with_ptx(self, bundle: SourceBundle, arch: str) -> tuple[bytes, bytes]:
        path = dict(o.split("=") for o in bundle.options)["--time"]
        with open(path, "w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["File name", " phase name", " metric", " unit"])
            rows.writerow(["unit.cu", " CUDA C++ Frontend", " 250", " ms"])
            rows.writerow(["unit.cu", " PTX Translation", " 1500", " ms"])
        return b"binary", b""

    def inspect(self, binary: bytes, arch: str) -> dict[str, Any]:
        return {}

    def load(self, binary: bytes, kernel: str, device: object) -> str:
        return kernel


def test_phases_of_the_compiler_are_added_up(tmp_path: Path) -> None:
    laps, toolchain = first_call.Laps(), Compiler()
    first_call.observe(toolchain, laps, tmp_path)
    for _ in range(2):
        assert toolchain.compile_with_ptx(SourceBundle("k", "k.h", (), (), ()), "sm_90a")[0]
    assert toolchain.load(b"", "k", None) == "k" and len(os.listdir(tmp_path)) == 2
    assert laps.seconds["front end"] == 0.5 and laps.seconds["ptxas"] == 3.0
    assert 0 <= laps.seconds["loading"] < 1


def test_the_table_leaves_torch_out_of_what_is_ours() -> None:
    stages = {"import torch": 2.0, "context": 0.5, "import": 0.25, "ptxas": 1.0, "rest": 0.125}
    lines = first_call.table([("forward, cache empty", stages), ("torch", {"rest": 0.09})])
    assert lines.splitlines() == [
        "| seconds | import torch | context | import | ptxas | rest | after torch |",
        "|---|---|---|---|---|---|---|",
        "| forward, cache empty | 2.00 | 0.50 | 0.25 | 1.00 | 0.12 | 1.38 |",
        "| torch |  |  |  |  | 0.09 | 0.09 |",
    ]


@pytest.mark.slow("compiles in fresh processes")
def test_up_to_the_binary(capsys: pytest.CaptureFixture[str]) -> None:
    assert first_call.main(["--arch", "H200"]) == 0
    empty, full = capsys.readouterr().out.splitlines()[2:4]
    assert empty.count("|") == full.count("|") == 10 and full.count("|  ") == 3, json.dumps(full)
