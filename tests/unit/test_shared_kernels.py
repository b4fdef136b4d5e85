"""Kernel definitions of the shared kernels, on a toolchain that compiles nothing: tiles, grids,
arguments, launches."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from compile_matrix import compile_matrix
from kernelseam import dispatch
from kernelseam.contract import (
    ArchRow,
    Device,
    DeviceLimits,
    KernelFacts,
    LaunchConfig,
    SourceBundle,
)
from kernelseam.descriptors.attention.problem import AttentionProblem, AttentionSpec
from kernelseam.descriptors.gemm.problem import GemmProblem, GemmSpec
from kernelseam.dtypes import DType
from kernelseam.errors import DeviceError, InvalidValue, Unsupported
from kernelseam.kernels import (
    KERNELS,
    AttentionTile,
    GemmTile,
    build_binary,
    shared_implementations,
)
from kernelseam.kernels.kernel import bundle
from kernelseam.kernels.signature import Signature
from kernelseam.kernels.sources import shared_sources
from kernelseam.plugins import plugins

HALF_PRECISION = frozenset({DType.float16, DType.bfloat16})
GEMM_TILES = (
    GemmTile(HALF_PRECISION, 128, 128, 64, 2, 4, 2),
    GemmTile(HALF_PRECISION, 32, 32, 32, 1, 2, 2, min_blocks=3),
)
ATTENTION_TILES = (
    AttentionTile(HALF_PRECISION, 64, 4, 32, 64, 2),
    AttentionTile(HALF_PRECISION, 64, 4, 16, 64, 2),
    AttentionTile(HALF_PRECISION, 128, 4, 16, 64, 2),
)


class FakeKernel:
    def __init__(self) -> None:
        self.facts: KernelFacts | None = None
        self.launched: list[tuple[tuple[int, int, int], bytes, int]] = []

    def prepare(self, config: LaunchConfig, arguments: bytes) -> Callable[[int], None]:
        return lambda stream: self.launched.append((config.grid, arguments, stream))


class FakeToolchain:
    backend = "fake"
    archs = ("fake1",)

    def __init__(self, parameters: tuple[tuple[int, int], ...] | None = None) -> None:
        self.parameters, self.kernel, self.compiled = parameters, FakeKernel(), 0

    def arch_row(self, arch: str) -> ArchRow:
        tiles = {"gemm": GEMM_TILES, "attention": ATTENTION_TILES}
        return ArchRow(arch, 32, 96 * 1024, 255, "fake.h", (("FAKE", "1"),), HALF_PRECISION, tiles)

    def platform_files(self, arch: str) -> Mapping[str, str]:
        return {"fake.h": '#include "tile/base.h"\n', "unused.h": "// of another arch"}

    def compiler(self) -> str:
        return "fake 1"

    def compile(self, bundle: SourceBundle, arch: str) -> bytes:
        self.compiled += 1
        return f"{bundle.name}\n{bundle.text()}".encode()

    def inspect(self, binary: bytes, arch: str) -> Mapping[str, KernelFacts]:
        name = binary.decode().splitlines()[0]
        kernel = next(h for h in KERNELS.values() if h.entry == name)
        spec = next(c.spec for c in compile_matrix() if c.kernel.entry == name)
        return {
            name: KernelFacts(name, 1, 0, 0, 0, 0, self.parameters or kernel.signature(spec).layout)
        }

    def load(self, binary: bytes, kernel: str, device: Device) -> FakeKernel:
        self.kernel.facts = self.inspect(binary, device.arch)[kernel]
        return self.kernel


DEVICE = Device("fake", 0, "fake1", limits=DeviceLimits(compute_units=100))
F16 = GemmSpec(DType.float16, DType.float16, DType.float32)


@pytest.fixture(autouse=True)
def _cache(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELSEAM_CACHE_DIR", str(tmp_path))


def gemm(M: int, N: int, K: int, batch: int = 1, **options: object) -> GemmProblem:
    return GemmProblem(
        F16, M, N, K, batch, 1, (M * K, 0, K), (K * N, 0, N), (M * N, 0, N), **options
    )  # type: ignore[arg-type]


def attention(S_q: int, heads: int = 16, batch: int = 16, S_k: int = 4096) -> AttentionProblem:
    strides = (heads * S_k * 64, S_k * 64, 64)
    spec = AttentionSpec(DType.float16, 64, 64)
    return AttentionProblem(
        spec, batch, heads, heads, S_q, S_k, strides, strides, strides, strides, scale=0.125
    )


def shared(operation: str, toolchain: FakeToolchain):  # type: ignore[no-untyped-def]
    return next(i for i in shared_implementations(toolchain) if i.operation == operation)


@pytest.mark.parametrize("batch", [1, 7, 65_536, 1_000_000])
def test_a_batched_gemm_is_one_launch_whatever_the_batch(batch: int) -> None:
    parts = shared("gemm", FakeToolchain()).build(gemm(64, 48, 32, batch), DEVICE)
    assert len(parts.steps) == 1
    assert parts.steps[0].record.grid == (min(2 * 2 * batch, 100 * 3), 1, 1), (
        "no more blocks than the device holds"
    )
    assert parts.workspace_bytes == 0


def test_attention_over_256_heads_is_one_launch() -> None:
    (step,) = shared("attention", FakeToolchain()).build(attention(4096), DEVICE).steps
    assert step.record.grid == (4096 // 128 * 256, 1, 1)
    assert step.record.block == (128, 1, 1)
    assert step.record.shared_bytes == 128 * 64 * 2 + 2 * 64 * 128 * 2


@pytest.mark.parametrize(
    ("S_q", "batch", "blocks"),
    [
        (1, 2**31 - 1, 2**31 - 1),
        (128 * 2**11, 2**20, 2**31),
        (128 * 2**11 - 128, 2**20, 2**31 - 2**20),
        (128 * 2**12, 2**20, 2**32),
        (129, 2**30, 2**31),
    ],
)
def test_a_grid_has_less_than_2_31_blocks(S_q: int, batch: int, blocks: int) -> None:
    """That is what drivers take along an axis: more are refused, not cut off."""
    problem = attention(S_q, 1, batch, 64)
    output = shared("attention", FakeToolchain()).supports(problem, DEVICE)
    assert output == (None if blocks < 2**31 else f"it needs {blocks} blocks, more than 2147483647")


def test_a_problem_of_more_blocks_is_refused_where_it_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        plugins().registry, "implementations", [shared("attention", FakeToolchain())]
    )
    with pytest.raises(
        Unsupported, match="shared: it needs 2147483648 blocks, more than 2147483647"
    ):
        dispatch.select(attention(128 * 2**11, 1, 2**20, 64), DEVICE)


def test_nothing_to_write_is_no_launch() -> None:
    assert shared("gemm", FakeToolchain()).build(gemm(0, 5, 5), DEVICE).steps == ()


def test_the_tile_follows_the_matrix() -> None:
    row = FakeToolchain().arch_row("fake1")
    kernel = KERNELS["gemm"]
    assert kernel.tile(gemm(1024, 1024, 64, 64), row, DEVICE).bm == 128
    assert kernel.tile(gemm(32, 32, 32, 8192), row, DEVICE).bm == 32
    assert kernel.tile(gemm(128, 128, 512), row, DEVICE).bm == 32, (
        "one matrix: small tiles fill more compute units"
    )
    assert KERNELS["attention"].tile(attention(4096), row, DEVICE).rows == 32
    assert KERNELS["attention"].tile(attention(40), row, DEVICE).rows == 16


def test_a_tile_that_does_not_fit_is_not_offered() -> None:
    row = FakeToolchain().arch_row("fake1")
    wide = replace(F16, dtype_c=DType.float32)
    assert [
        t.bm for t in KERNELS["gemm"].tiles(wide, replace(row, shared_bytes_per_block=128 * 1024))
    ] == [128, 32]
    assert [t.bm for t in KERNELS["gemm"].tiles(wide, row)] == [32]


def test_arguments_are_packed_where_the_signature_says() -> None:
    toolchain = FakeToolchain()
    problem = gemm(40, 24, 8, 3, alpha=2.0, beta=0.5)
    (step,) = shared("gemm", toolchain).build(problem, DEVICE).steps
    step.bind({"A": 0x1000, "B": 0x2000, "C": 0x3000}, 0)(77)
    ((grid, arguments, stream),) = toolchain.kernel.launched
    assert (grid, stream) == ((2 * 3, 1, 1), 77)
    assert struct.unpack("<6Q12q15i2f", arguments) == (
        0x1000,
        0x2000,
        0x3000,
        0,
        0,
        0,
        320,
        0,
        192,
        0,
        960,
        0,
        *[0] * 6,
        8,
        24,
        24,
        0,
        40,
        24,
        8,
        1,
        1,
        1,
        1,
        2,
        1,
        6,
        6,
        2.0,
        0.5,
    )


@pytest.mark.parametrize("dead", [{"alpha": 0.0}, {"K": 0}])
def test_where_nothing_is_summed_neither_a_nor_b_is_read(dead: dict[str, float]) -> None:
    kernel = KERNELS["gemm"]
    values = kernel.values(replace(gemm(8, 8, 8, beta=3.0), **dead), GEMM_TILES[1], DEVICE)  # type: ignore[arg-type]
    assert (values["K"], values["alpha"], values["beta"]) == (0, 0.0, 3.0)


def test_a_binary_with_other_parameters_is_refused() -> None:
    message = r"kernel gemm takes parameters at \(\(0, 8\),\), the host packs \(\(0, 8\), \(8, 8\)"
    with pytest.raises(DeviceError, match=message):
        shared("gemm", FakeToolchain(((0, 8),))).build(gemm(8, 8, 8), DEVICE)


def test_an_argument_out_of_its_type_is_named() -> None:
    with pytest.raises(DeviceError, match=r"argument n = 2147483648 is not a i32"):
        Signature((("n", "i32"),)).pack({"n": 2**31})


def test_what_float32_cannot_hold_is_an_infinity() -> None:
    pack = Signature((("n", "i32"), ("alpha", "f32"), ("beta", "f32"), ("wide", "f64"))).pack
    packed = pack({"n": 7, "alpha": -1e300, "beta": 0.5, "wide": 1e300})
    assert struct.unpack("<iffxxxxd", packed) == (7, -float("inf"), 0.5, 1e300)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (
            replace(gemm(8, 8, 8), spec=replace(F16, dtype=DType.float64)),
            "no tile of fake1 takes float64 to float16",
        ),
        (
            replace(gemm(8, 8, 8), spec=replace(F16, dtype_acc=DType.float64)),
            "sums of float64 are stored as float64 alone, not as float16",
        ),
        (
            replace(gemm(8, 8, 8), a_strides=(0, 0, 2**31)),
            "stride_a_row = 2147483648 elements: shared kernels take row strides below 2^31",
        ),
        (gemm(4096, 4096, 8, 10**7), "it has 10240000000 tiles of C, not fewer than 2^31"),
    ],
)
def test_gemm_refusals(problem: GemmProblem, reason: str) -> None:
    assert shared("gemm", FakeToolchain()).supports(problem, DEVICE) == reason
    assert shared("gemm", FakeToolchain()).supports(gemm(4096, 4096, 8, 10**6), DEVICE) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": DType.float64}, "it has no float64"),
        ({"head_dim": 257}, "no tile of fake1 takes float16 with head dims 257 and 64"),
        ({"value_dim": 0}, "value_dim = 0: it takes 1 and more"),
        ({"head_dim": 200}, "no tile of fake1 takes float16 with head dims 200 and 64"),
    ],
)
def test_attention_refusals(change: dict[str, object], reason: str) -> None:
    problem = attention(8)
    problem = replace(problem, spec=replace(problem.spec, **change))  # type: ignore[arg-type]
    assert shared("attention", FakeToolchain()).supports(problem, DEVICE) == reason


def test_an_arch_that_the_toolchain_lacks_is_refused() -> None:
    device = Device("fake", 0, "fake9")
    assert (
        shared("gemm", FakeToolchain()).supports(gemm(8, 8, 8), device)
        == "arch fake9 is not among fake1"
    )


def test_a_bundle_holds_what_its_main_file_includes_and_nothing_else() -> None:
    toolchain = FakeToolchain()
    source = bundle(KERNELS["gemm"], F16, GEMM_TILES[0], toolchain, "fake1")
    assert [n for n, _ in source.files] == [
        "gemm/epilogue.h",
        "gemm/gemm.h",
        "gemm/groups.h",
        "gemm/head_places.h",
        "gemm/heads.h",
        "gemm/joined.h",
        "gemm/reductions.h",
        "gemm/scales.h",
        "generated/config.h",
        "generated/epilogue.h",
        "generated/gemm.h",
        "platform.h",
        "tile/base.h",
        "tile/simt.h",
        "tile/tile.h",
    ]
    constants = dict(source.files)["generated/config.h"]
    assert "int BM = 128;" in constants and "bool POINTERS = false;" in constants
    assert dict(source.defines)["FAKE"] == "1"
    assert source.text().endswith('#include "generated/gemm.h"\n')


def test_device_sources_include_nothing_of_a_system() -> None:
    for name, text in shared_sources().items():
        assert "#include <" not in text, name


def test_binaries_are_kept_by_content() -> None:
    toolchain = FakeToolchain()
    first, _ = build_binary(toolchain, F16, "fake1")
    again, _ = build_binary(toolchain, F16, "fake1")
    other, _ = build_binary(toolchain, replace(F16, b_transposed=True), "fake1")
    assert (first.key == again.key, first.key == other.key, toolchain.compiled) == (True, False, 2)


def test_a_spec_without_a_tile_is_refused_by_name() -> None:
    with pytest.raises(InvalidValue, match="no tile of fake1 takes it"):
        build_binary(
            FakeToolchain(), GemmSpec(DType.float64, DType.float64, DType.float64), "fake1"
        )
