"""Structures among kernels' parameters: each member of one that is passed by value lies where the
host packs it, and of a kernel whose entry is generated each has its parameter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from compile_matrix import Covered, compile_matrix
from kernelseam.contract import Launch, SourceBundle
from kernelseam.descriptors.attention.problem import AttentionSpec
from kernelseam.dtypes import DType
from kernelseam.errors import CompileError, DeviceError
from kernelseam.kernels import COMPOSITIONS
from kernelseam.kernels.attention.decode import DECODE
from kernelseam.kernels.attention.softmax import SOFTMAX
from kernelseam.kernels.kernel import bundle
from kernelseam.kernels.signature import Structure
from kernelseam.parity.matrix import matrix
from kernelseam_hostcpp import HostToolchain, compiler
from kernelseam_hostcpp.executable import problem_of
from kernelseam_hostcpp.runtime import DEVICES

TOOLCHAIN = HostToolchain()


def _structures(covered: Covered) -> tuple[str, ...]:
    parameters = covered.kernel.signature(covered.spec).parameters
    return tuple(name for name, kind in parameters if isinstance(kind, Structure))


def _one_each() -> dict[str, Covered]:
    """Of every kernel with structures one binary for each set of them, plain and quickly
    compiled."""
    spec = AttentionSpec(DType.float32, 64, 64)
    chosen: dict[str, Covered] = {}
    for covered in (*compile_matrix(), Covered(SOFTMAX, spec)):
        if names := _structures(covered):
            chosen.setdefault(f"{covered.kernel.entry}-{'-'.join(names)}", covered)
    return chosen


CHOSEN = _one_each()


def _first(entry: str) -> Covered:
    return next(c for name, c in CHOSEN.items() if name.startswith(entry))


def planted(place: str, find: str, plant: str) -> Callable[[dict[str, str]], dict[str, str]]:
    def change(files: dict[str, str]) -> dict[str, str]:
        assert files[place].count(find) == 1
        return {**files, place: files[place].replace(find, plant)}

    return change


def compile_changed(
    covered: Covered, change: Callable[[dict[str, str]], dict[str, str]] = lambda x: x
) -> bytes:
    kernel, spec = covered.kernel, covered.spec
    tile: Any = covered.tiles(TOOLCHAIN.arch_row("host"))[0]
    source: SourceBundle = bundle(kernel, spec, tile, TOOLCHAIN, "host")
    files = change(dict(source.files))
    source = replace(
        source, files=tuple(files.items()), options=(*source.options, "-O0", "-fPIC", "-shared")
    )
    return compiler.compile_bundle(source, "host")


def test_every_kernel_with_structures_is_there() -> None:
    flat = {c.kernel.entry: c.kernel.signature(c.spec).flat for c in CHOSEN.values()}
    assert flat == {
        "attention_forward": True,
        "attention_backward": True,
        "attention_decode": True,
        "gemm": False,
        "softmax": True,
        "paged_cache": True,
    }


def _often() -> set[str]:
    """Of each kernel the sets with the most and with the fewest structures."""
    ordered = sorted(CHOSEN, key=lambda name: len(_structures(CHOSEN[name])))
    by_kernel = [{CHOSEN[n].kernel.entry: n for n in way} for way in (ordered, ordered[::-1])]
    return {name for found in by_kernel for name in found.values()}


OFTEN = _often()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow("structures that others have")] * (n not in OFTEN))
        for n in CHOSEN
    ],
)
def test_members_are_at_the_packed_offsets(name: str) -> None:
    covered = CHOSEN[name]
    binary = compile_changed(covered)
    facts = TOOLCHAIN.inspect(binary, "host")[covered.kernel.entry]
    signature = covered.kernel.signature(covered.spec)
    assert signature.placed(facts).layout == facts.parameters
    assert (len(facts.parameters) == len(signature.scalars)) is signature.flat


@pytest.mark.parametrize(
    ("place", "find", "plant", "message"),
    [
        (
            "gemm/head_places.h",
            "i64 batch, head; int row, first; }",
            "i64 head, batch; int row, first; }",
            "batch",
        ),
        (
            "gemm/head_places.h",
            "i64 batch, head; int row, first; }",
            "i64 batch, head, row; int first; }",
            "size",
        ),
        (
            "gemm/head_places.h",
            "i64 batch, head; int row, first; }",
            "i64 batch, head; int first, row; }",
            "row",
        ),
    ],
)
def test_a_member_by_value_elsewhere_does_not_compile(
    place: str, find: str, plant: str, message: str
) -> None:
    with pytest.raises(CompileError, match=rf"static assertion failed: (of.0..)?{message} of "):
        compile_changed(_first("gemm-segments"), planted(place, find, plant))


@pytest.mark.parametrize(
    ("place", "find", "plant", "message"),
    [
        (
            "attention/scores.h",
            "  float scale_log2, cap, cap_inverse;\n\n",
            "  float scale_log2, cap, cap_inverse;\n  i64 of_nobody;\n\n",
            "static assertion failed: size of score",
        ),
        (
            "attention/sequences.h",
            "const int *lengths, *q_offsets, *k_offsets;",
            "const int *q_offsets, *k_offsets; static constexpr int* lengths = nullptr;",
            "lengths",
        ),
    ],
)
def test_a_member_of_one_side_alone_does_not_compile(
    place: str, find: str, plant: str, message: str
) -> None:
    with pytest.raises(CompileError, match=message):
        compile_changed(_first("attention_forward"), planted(place, find, plant))


def test_a_member_of_another_width_is_refused() -> None:
    """Its parameter has the member's own type, and the binary says how wide that is."""
    covered = _first("attention_forward")
    change = planted(
        "attention/scores.h", "  int left, right;\n  float", "  i64 left, right;\n  float"
    )
    signature = covered.kernel.signature(covered.spec)

    def without_sizes(files: dict[str, str]) -> dict[str, str]:
        name = "generated/attention_forward.h"
        lines = files[name].splitlines(keepends=True)
        kept = [line for line in lines if not line.startswith("static_assert")]
        return change({**files, name: "".join(kept)})

    with pytest.raises(CompileError, match="size of score"):
        compile_changed(covered, change)
    binary = compile_changed(covered, without_sizes)
    facts = TOOLCHAIN.inspect(binary, "host")["attention_forward"]
    with pytest.raises(DeviceError, match=r"^kernel attention_forward takes parameters at "):
        signature.placed(facts)


def test_members_may_change_places() -> None:
    """What is entered member by member goes by name."""
    covered = _first("attention_forward")
    change = planted(
        "attention/sequences.h", "i64 batch, head;\n  int row;", "i64 head, batch;\n  int row;"
    )
    facts = TOOLCHAIN.inspect(compile_changed(covered, change), "host")["attention_forward"]
    assert covered.kernel.signature(covered.spec).layout == facts.parameters


def test_what_a_kernel_reads_is_an_operand_or_in_the_workspace() -> None:
    """An address by another name would be null, as those here are: of parts that are merged by
    themselves, without atomics, and of a projection's append, which norms and copies nothing."""
    device, problems = DEVICES[0], dict[Any, Any]()
    row = TOOLCHAIN.arch_row(device.arch)
    for case in matrix():
        problem = problem_of(case, device)
        problems.setdefault(problem.spec, problem)
    operands = {(p.operation, rule.name) for p in problems.values() for rule in p.operands}
    unknown = set()
    for problem in problems.values():
        for composition in (COMPOSITIONS[problem.operation], DECODE):
            if composition.operation != problem.operation or composition.refuse(problem, row):
                continue
            tile = composition.tile(problem, row, device)
            for launch in composition.launches(problem, tile, device).steps:
                if not isinstance(launch, Launch):
                    continue
                own = {*launch.workspace, *launch.operands}
                for parameter, name in launch.kernel.pointers(launch.problem.spec).items():
                    if name and (problem.operation, name) not in operands and parameter not in own:
                        unknown.add((launch.kernel.entry, parameter, name))
    assert unknown == {
        ("merge_states", "offsets", "cu_seqlens_q"),
        ("row_delta", "zeros", "zeros"),
        ("attention_backward", "sums", "sums"),
        *(("paged_cache", name, name) for name in ("k_norm", "q_norm", "sources")),
    }
