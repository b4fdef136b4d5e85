"""Structures among kernels' parameters: each member lies where the host packs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from kernelseam.contract import SourceBundle
from kernelseam.descriptors.attention.problem import AttentionSpec
from kernelseam.dtypes import DType
from kernelseam.errors import CompileError
from kernelseam.kernels import Covered, covering
from kernelseam.kernels.attention.softmax import SOFTMAX
from kernelseam.kernels.kernel import bundle
from kernelseam.kernels.signature import Structure
from kernelseam_hostcpp import HostToolchain, compiler

TOOLCHAIN = HostToolchain()


def _structures(covered: Covered) -> tuple[str, ...]:
    parameters = covered.kernel.signature(covered.spec).parameters
    return tuple(name for name, kind in parameters if isinstance(kind, Structure))


def _one_each() -> dict[str, Covered]:
    """Of every kernel with structures one binary for each set of them, plain and quickly
    compiled."""
    spec = AttentionSpec(DType.float32, 64, 64)
    chosen: dict[str, Covered] = {}
    for covered in (*covering(), Covered(SOFTMAX, spec)):
        if names := _structures(covered):
            chosen.setdefault(f"{covered.kernel.entry}-{'-'.join(names)}", covered)
    return chosen


CHOSEN = _one_each()


def compile_with_assertions(
    covered: Covered, change: Callable[[dict[str, str]], dict[str, str]] = lambda x: x
) -> bytes:
    kernel, spec = covered.kernel, covered.spec
    tile: Any = covered.tiles(TOOLCHAIN.arch_row("host"))[0]
    made: SourceBundle = bundle(kernel, spec, tile, TOOLCHAIN, "host")
    files = change(dict(made.files))
    made = replace(
        made, files=tuple(files.items()), options=(*made.options, "-O0", "-fPIC", "-shared")
    )
    return compiler.compile_bundle(made, "host", kernel.signature(spec).assertions(kernel.entry))


def test_every_kernel_with_structures_is_there() -> None:
    kernels = {name.split("-")[0] for name in CHOSEN}
    assert kernels == {"attention_forward", "attention_backward", "gemm", "softmax"}


@pytest.mark.parametrize("name", CHOSEN)
def test_members_lie_where_they_are_packed(name: str) -> None:
    assert compile_with_assertions(CHOSEN[name])


@pytest.mark.parametrize(
    ("place", "find", "plant", "said"),
    [
        (
            "attention/sequences.h",
            "i64 batch, head;\n  int row;",
            "i64 head, batch;\n  int row;",
            "batch",
        ),
        (
            "attention/sequences.h",
            "const int* table;\n  i64 table_row;",
            "i64 table_row;\n  const int* table;",
            "table",
        ),
        (
            "attention/sequences.h",
            "  int S_q, S_k;\n  KS_DEVICE Sequence at",
            "  i64 S_q, S_k;\n  KS_DEVICE Sequence at",
            "size",
        ),
        (
            "attention/scores.h",
            "  float scale_log2, cap, cap_inverse;\n\n",
            "  float scale_log2, cap_inverse, cap;\n\n",
            "cap",
        ),
    ],
)
def test_a_member_elsewhere_does_not_compile(place: str, find: str, plant: str, said: str) -> None:
    def change(files: dict[str, str]) -> dict[str, str]:
        assert files[place].count(find) == 1
        return {**files, place: files[place].replace(find, plant)}

    covered = next(c for name, c in CHOSEN.items() if name.startswith("attention_forward"))
    with pytest.raises(CompileError, match=rf"static assertion failed: {said} of "):
        compile_with_assertions(covered, change)
