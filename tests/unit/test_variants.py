"""Tiles as variants: each that takes a problem is offered by name and can be built, that of
dispatch first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from kernelseam import Attention, AttentionBwd, BatchedGemmStrided, OutputProjection, QkvProjection
from kernelseam.contract import ArchRow, Device, DeviceLimits, Launches
from kernelseam.kernels import KernelImplementation, shared_implementations
from kernelseam.variants import variants_of

pytest.importorskip("kernelseam_cuda", reason="kernelseam-cuda is not installed")
from kernelseam_cuda import archs  # noqa: E402
from kernelseam_cuda.tiles import tiles  # noqa: E402


class Toolchain:
    """The tables of NVIDIA's archs, and no compiler."""

    backend, archs = "fake", tuple(archs.ROWS)

    def arch_row(self, arch: str) -> ArchRow:
        return archs.row(arch)


LIMITS = DeviceLimits(
    132, 227 << 10, 1 << 37, 4.9e12, {"float16": 1e15, "bfloat16": 1e15, "float32": 6.7e13}
)
DEVICE = Device("fake", 0, "sm_90a", limits=LIMITS)
IMPLEMENTATIONS: dict[str, KernelImplementation] = {
    i.operation: i
    for i in shared_implementations(Toolchain())
    if i.name == "shared"  # type: ignore[arg-type,misc]
}


def attention(**more: Any) -> Attention:
    extents: dict[str, Any] = {
        "batch": 1,
        "num_heads": 32,
        "S_q": 1,
        "S_k": 8192,
        "head_dim": 64,
        "dtype": "float16",
    }
    return Attention(**{**extents, **more})


PROBLEMS: dict[str, Callable[[], Any]] = {
    "gemm": lambda: BatchedGemmStrided(M=500, N=300, K=64, batch=7, dtype="float16"),
    "gemm, small": lambda: BatchedGemmStrided(M=16, N=16, K=16, batch=7000, dtype="float16"),
    "attention": lambda: attention(S_q=1000),
    "decoding": lambda: attention(kv_heads=4, num_heads=16),
    "gradients": lambda: AttentionBwd(forward=attention(S_q=1000, S_k=1000, head_dim=128, lse=0)),
    "any order": lambda: AttentionBwd(forward=attention(S_q=9, S_k=9, lse=0), deterministic=False),
    "qkv": lambda: QkvProjection(
        batch=2, S=300, hidden=256, num_heads=4, head_dim=64, dtype="float16"
    ),
    "output": lambda: OutputProjection(
        batch=2, S=300, hidden=256, num_heads=4, head_dim=64, dtype="float16"
    ),
}
NAMES = {
    "gemm": ["128x128x64-2x2-2", "128x64x64-2x2-3", "64x64x64-2x2-2", "32x32x32-1x2-2"],
    "gemm, small": [
        "16x16x32-1x1-2-8t",
        "128x128x64-2x2-2",
        "128x64x64-2x2-3",
        "64x64x64-2x2-2",
        "32x32x32-1x2-2",
    ],
    "attention": ["64x64-4w-2-resident", "128x64-4w-2", "64x32-4w-2-resident"],
    "decoding": [
        "64x64-4w-2-resident-grouped-32parts",
        "128x64-4w-2-grouped-32parts",
        "128x64-4w-2-grouped-16parts",
        "128x64-4w-2-grouped",
        "64x64-4w-2-resident-grouped-16parts",
        "64x64-4w-2-resident-grouped",
        "64x32-4w-2-resident-grouped-32parts",
        "64x32-4w-2-resident-grouped-16parts",
        "64x32-4w-2-resident-grouped",
    ],
    "gradients": ["128x64-8/2w-2-scores32", "128x32-8w-2", "64x32-8/2w-2"],
    "any order": ["64x64-4/2w-2-scores32-atomic32", "128x32-8/2w-2-scores16-atomic16"],
}


def described(launches: Launches) -> list[Any]:
    return [(x.kernel.entry, x.tile) for x in launches.steps]


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_tile_is_a_variant(name: str) -> None:
    problem = PROBLEMS[name]().problem()
    implementation = IMPLEMENTATIONS[problem.operation]
    assert implementation.supports(problem, DEVICE) is None
    actual = variants_of(implementation, problem, DEVICE)
    if name in NAMES:
        assert sorted(v.name for v in actual) == sorted(NAMES[name])
    assert len({v.name for v in actual}) == len(actual)
    assert actual[0].cost == implementation.cost(problem, DEVICE), "the first is dispatch's own"
    first = implementation.composition.launches(
        problem, implementation._tiles(problem, DEVICE)[actual[0].name], DEVICE
    )
    assert described(first) == described(implementation.launches(problem, DEVICE))


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_variant_is_built_with_its_tile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = PROBLEMS[name]().problem()
    implementation, built = IMPLEMENTATIONS[problem.operation], []
    monkeypatch.setattr(
        implementation,
        "_step",
        lambda launch, row, device: built.append((launch.kernel.entry, launch.tile)),
    )
    for v in variants_of(implementation, problem, DEVICE):
        built.clear()
        implementation.build_variant(problem, DEVICE, v.name)
        assert built == described(
            implementation.composition.launches(
                problem, implementation._tiles(problem, DEVICE)[v.name], DEVICE
            )
        )
        names = [t.name for _, t in built if hasattr(t, "name")]
        assert v.name in ("+".join(names), names[0])
    with pytest.raises(KeyError):
        implementation.build_variant(problem, DEVICE, "no such")


def test_a_batch_invariant_problem_has_one_variant() -> None:
    """A tile of another extent would be another order of the sums."""
    for created in (attention(batch_invariant=True), attention(batch_invariant=True, S_q=1000)):
        problem = created.problem()
        (one,) = variants_of(IMPLEMENTATIONS["attention"], problem, DEVICE)
        assert one.name == "128x64-4w-2"
    gradients = AttentionBwd(
        forward=attention(batch_invariant=True, S_q=1000, S_k=1000, head_dim=128, lse=0)
    ).problem()
    assert [v.name for v in variants_of(IMPLEMENTATIONS["attention_bwd"], gradients, DEVICE)] == [
        "128x64-8/2w-2-scores32"
    ]


def test_a_variant_that_is_too_large_is_not_offered() -> None:
    problem = PROBLEMS["decoding"]().problem()
    offered = {v.name for v in variants_of(IMPLEMENTATIONS["attention"], problem, DEVICE)}
    assert any(n.endswith("parts") for n in offered)
    small = replace(DEVICE, limits=replace(LIMITS, memory_bytes=50_000))
    left = {v.name for v in variants_of(IMPLEMENTATIONS["attention"], problem, small)}
    assert left and left == {n for n in offered if not n.endswith("parts")}, (
        "parts need a workspace"
    )


def test_several_products_have_every_pair_of_tiles() -> None:
    from kernelseam import OutputProjectionBwd

    descriptor = OutputProjectionBwd(
        batch=2,
        S=300,
        hidden=256,
        num_heads=4,
        head_dim=64,
        dtype="float16",
        d_attn_out=0,
        d_weight=0,
    )
    problem = descriptor.problem()
    actual = [
        v.name.split("+")
        for v in variants_of(IMPLEMENTATIONS["output_projection_bwd"], problem, DEVICE)
    ]
    assert {len(names) for names in actual} == {2}
    firsts, seconds = ({x[i] for x in actual} for i in (0, 1))
    assert len(actual) == len(firsts) * len(seconds) > 4


def test_names_of_tiles_tell_them_apart() -> None:
    for operation, rows in (*tiles(True, True, True).items(), *tiles(False, False, False).items()):
        kinds = [(t.dtypes, getattr(t, "precision", None)) for t in rows]
        for kind in set(kinds):
            names = [
                (getattr(t, "max_dim", 0), t.name)
                for t, k in zip(rows, kinds, strict=True)
                if k == kind
            ]
            assert len(names) == len(set(names)), operation


def test_an_implementation_of_one_way_has_none() -> None:
    unfused = next(i for i in shared_implementations(Toolchain()) if i.name == "gemm-softmax-gemm")  # type: ignore[arg-type]
    assert variants_of(unfused, PROBLEMS["attention"]().problem(), DEVICE) == ()
