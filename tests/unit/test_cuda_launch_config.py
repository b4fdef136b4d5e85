"""Launches with clusters, programmatic and cooperative starts, and parameters that lie apart, on a
driver that only records."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from kernelseam.contract import KernelFacts, LaunchConfig
from kernelseam.errors import DeviceError, SlowBinary

pytest.importorskip("kernelseam_cuda", reason="kernelseam-cuda is not installed")
from kernelseam_cuda import bindings, launch, plugin  # noqa: E402

cu = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")


class Status(int):
    name = "CUDA_ERROR_FAKE"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The structures of the bindings; launches are recorded."""
    fake = SimpleNamespace(status=0, extended=[], version=12030)

    def extended(config: Any, function: object, parameters: int, extra: int) -> tuple[Status]:
        clusters = [
            (a.value.clusterDim.x, a.value.clusterDim.y, a.value.clusterDim.z)
            for a in config.attrs
            if a.id == cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        ]
        early = [
            a.value.programmaticStreamSerializationAllowed
            for a in config.attrs
            if a.id == cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        ]
        together = [
            a.value.cooperative
            for a in config.attrs
            if a.id == cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        ]
        assert config.numAttrs == len(config.attrs) == len(clusters + early + together)
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        block = (config.blockDimX, config.blockDimY, config.blockDimZ)
        fake.extended.append(
            (grid, block, config.sharedMemBytes, int(config.hStream), clusters, early, together)
        )
        fake.given = parameters, extra
        return (Status(fake.status),)

    fake.cuLaunchKernelEx = extended
    fake.cuDriverGetVersion = lambda: (0, fake.version)
    fake.cuGetErrorString = lambda status: (0, b"what it means")
    for name in ("CUlaunchConfig", "CUlaunchAttribute", "CUlaunchAttributeID"):
        setattr(fake, name, getattr(cu, name))
    monkeypatch.setattr(bindings, "driver", lambda: fake)
    yield fake


def kernel(*parameters: tuple[int, int]) -> launch.CudaKernel:
    return launch.CudaKernel("function", KernelFacts("k", 32, 0, 0, 0, 0, parameters))


@pytest.mark.parametrize(
    ("config", "clusters", "early", "together"),
    [
        (LaunchConfig((4, 2, 1), (64, 2, 1), 512), [], [], []),
        (LaunchConfig((4, 2, 1), (64, 2, 1), 512, (2, 1, 1)), [(2, 1, 1)], [], []),
        (LaunchConfig((4, 2, 1), (64, 2, 1), 512, programmatic=True), [], [1], []),
        (LaunchConfig((4, 2, 1), (64, 2, 1), 512, cooperative=True), [], [], [1]),
        (LaunchConfig((4, 2, 1), (64, 2, 1), 512, (2, 2, 1), True, True), [(2, 2, 1)], [1], [1]),
    ],
)
def test_clusters_early_and_cooperative_starts_are_attributes_of_the_launch(
    driver: SimpleNamespace,
    config: LaunchConfig,
    clusters: list[Any],
    early: list[int],
    together: list[int],
) -> None:
    run = kernel((0, 8)).prepare(config, bytes(8))
    assert driver.extended == []
    run(77)
    run(99)
    assert driver.extended == [
        ((4, 2, 1), (64, 2, 1), 512, stream, clusters, early, together) for stream in (77, 99)
    ]
    assert driver.given[0] == 0
    driver.status = 1
    with pytest.raises(
        DeviceError,
        match=r"^cuLaunchKernelEx failed with CUDA_ERROR_FAKE \(1\): what it means \(grid",
    ):
        run(77)


def test_launches_of_a_config_share_a_structure_for_each_stream(driver: SimpleNamespace) -> None:
    made: list[object] = []
    driver.CUlaunchConfig = lambda: made.append(None) or cu.CUlaunchConfig()
    shared, config = kernel((0, 8)), LaunchConfig((4, 2, 1), (64, 2, 1))
    for arguments in (bytes(8), bytes(7) + b"1"):
        run = shared.prepare(config, arguments)
        run(77)
        run(99)
    assert (len(made), len(driver.extended)) == (2, 4)
    shared.prepare(LaunchConfig((5, 2, 1), (64, 2, 1)), bytes(8))(77)
    assert len(made) == 3 and driver.extended[-1][0] == (5, 2, 1)


def test_a_driver_that_captures_no_early_starts_makes_none(driver: SimpleNamespace) -> None:
    driver.version = 12020
    config = LaunchConfig((4, 2, 1), (64, 2, 1), 512, (2, 1, 1), programmatic=True)
    kernel((0, 8)).prepare(config, bytes(8))(77)
    (*_, clusters, early, _) = driver.extended[0]
    assert (clusters, early) == ([(2, 1, 1)], [])


def test_parameters_by_cs_rules_go_as_one_buffer(driver: SimpleNamespace) -> None:
    run = kernel((0, 8), (8, 4), (16, 8)).prepare(
        LaunchConfig((1, 1, 1), (32, 1, 1)), bytes(range(24))
    )
    run(7)
    places, extra = driver.given
    assert places == 0 and ctypes.string_at(
        ctypes.c_void_p.from_address(extra + 8).value or 0, 24
    ) == bytes(range(24))


@pytest.mark.parametrize("cluster", [(1, 1, 1), (2, 1, 1)])
def test_parameters_with_gaps_are_passed_one_by_one(
    driver: SimpleNamespace, cluster: tuple[int, int, int]
) -> None:
    """A tensor map behind an int, at 48."""
    packed = bytes(range(184))
    run = kernel((0, 4), (48, 128), (176, 8)).prepare(
        LaunchConfig((2, 1, 1), (32, 1, 1), cluster=cluster), packed
    )
    run(7)
    places, extra = driver.given
    assert places and not extra
    actual = [ctypes.c_void_p.from_address(places + 8 * i).value or 0 for i in range(3)]
    assert [ctypes.string_at(p, n) for p, n in zip(actual, (4, 128, 8), strict=True)] == [
        packed[:4],
        packed[48:176],
        packed[176:],
    ]


LOG = (
    "ptxas info    : (C7517) wgmma.wait_group is injected\nptxas info    : (C7511) Potential "
    "Performance Loss: wgmma.mma_async instructions are serialized\nptxas info    : (C7508) "
    "Potential Performance Loss: 'setmaxnreg' ignored\n"
)


@pytest.mark.parametrize(("version", "uncached"), [((13, 0), True), ((12, 9), False)])
@pytest.mark.parametrize(
    ("log", "lost"), [("", []), (LOG, LOG.splitlines()[1:]), (LOG.splitlines()[0], [])]
)
def test_the_log_of_a_success_is_read(
    monkeypatch: pytest.MonkeyPatch,
    log: str,
    lost: list[str],
    version: tuple[int, int],
    uncached: bool,
) -> None:
    from kernelseam.contract import SourceBundle

    options: list[bytes] = []

    def fill(program: object, into: bytearray) -> tuple[int]:
        into[: len(log)] = log.encode()
        return (0,)

    monkeypatch.setattr(
        bindings,
        "nvrtc",
        lambda: SimpleNamespace(
            nvrtcVersion=lambda: (0, *version),
            nvrtcCreateProgram=lambda *_: (0, 1),
            nvrtcGetProgramLog=fill,
            nvrtcCompileProgram=lambda program, count, given: (options.extend(given), (0,))[1],
            nvrtcGetProgramLogSize=lambda _: (0, len(log) + 2),
            nvrtcGetCUBINSize=lambda _: (0, 4),
            nvrtcGetCUBIN=lambda *_: (0,),
            nvrtcGetPTXSize=lambda _: (0, 1),
            nvrtcGetPTX=lambda *_: (0,),
            nvrtcDestroyProgram=lambda _: (0,),
        ),
    )
    toolchain = plugin.backend().toolchain
    assert toolchain is not None
    source = SourceBundle("k", "k.h", (("k.h", ""),), (), ())
    if lost:
        monkeypatch.setattr(
            "kernelseam_cuda.toolchain.version", lambda: "nvrtc 13.0.88 (some build)"
        )
        with pytest.warns(SlowBinary) as caught:
            assert toolchain.compile(source, "sm_90a") == bytes(4)
        assert str(caught[0].message) == "\n".join(
            [
                (
                    "k compiles for sm_90a, but not as intended: its results are right, and it is "
                    "slow. nvrtc 13.0.88 (some build) says:"
                ),
                *lost,
            ]
        )
    else:
        assert toolchain.compile(source, "sm_90a") == bytes(4)
    assert (b"--no-cache" in options) == uncached


@pytest.mark.parametrize("maps", [False, True])
def test_launches_that_run_once_are_packed_and_passed_by_address(
    driver: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, maps: bool
) -> None:
    seen: list[tuple[Any, ...]] = []

    def by_address(config: Any, function: Any, parameters: Any, extra: Any) -> int:
        made = cu.CUlaunchConfig(_ptr=config.value)
        at = (ctypes.c_void_p * 2).from_address(parameters.value or extra.value)
        places = at if parameters.value else (at[1], (at[1] or 0) + 8)
        content = b"".join(ctypes.string_at(x or 0, 8) for x in places)
        grid = (made.gridDimX, made.gridDimY, made.gridDimZ)
        block, stream = (made.blockDimX, made.blockDimY, made.blockDimZ), int(made.hStream)
        seen.append((function.value, grid, block, made.sharedMemBytes, stream, content))
        return driver.status

    monkeypatch.setattr(launch, "_launch_kernel", lambda: by_address)
    driver.CUresult = Status
    parameters = ((0, 8), (8, 128)) if maps else ((0, 8), (8, 8))
    facts = KernelFacts("k", 32, 0, 0, 0, 0, parameters)
    packer = struct.Struct("<qQ120x" if maps else "<qQ")
    config = LaunchConfig((1, 1, 1), (64, 2, 1), 512, (2, 1, 1))
    pack = launch.CudaKernel(cu.CUfunction(0x3000), facts).reusable(config, packer)
    first, other = pack(5, -1, 2), pack(7, -3, 4)
    first(77)
    other(99)
    pack(9, -5, 6)(77)
    assert seen == [
        (0x3000, (blocks, 1, 1), (64, 2, 1), 512, stream, struct.pack("<qQ", *values))
        for blocks, stream, values in ((5, 77, (-1, 2)), (7, 99, (-3, 4)), (9, 77, (-5, 6)))
    ]
    driver.status = 1
    with pytest.raises(
        DeviceError,
        match=r"^cuLaunchKernelEx failed with CUDA_ERROR_FAKE \(1\): what it means \(grid \(3, 1",
    ):
        pack(3, 0, 0)(77)
    driver.status, driver.CUresult = 77777, cu.CUresult
    with pytest.raises(DeviceError, match=r"^cuLaunchKernelEx failed with 77777: unknown \(grid"):
        pack(3, 0, 0)(77)


@pytest.mark.parametrize(
    ("variable", "name"), [(None, ""), ("", ""), ("0", ""), ("x", ""), ("1", "_ptsz")]
)
def test_the_default_stream_is_that_of_the_bindings(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, name: str
) -> None:
    if variable is None:
        monkeypatch.delenv(launch._PER_THREAD, raising=False)
    else:
        monkeypatch.setenv(launch._PER_THREAD, variable)
    monkeypatch.setattr(bindings, "by_ctypes", lambda name: name)
    assert launch._launch_kernel.__wrapped__() == f"cuLaunchKernelEx{name}"
