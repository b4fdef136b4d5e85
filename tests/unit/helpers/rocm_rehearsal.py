"""``python -m benchmarks …`` as beside an AMD card, rehearsed: run by a test in a process of its
own, since it changes torch and the ROCm plugin.

torch is one that is built for ROCm: its ``cuda`` has the functions that the benchmarks use of such
a build, its tensors lie in host memory, and its events tell a made-up time. kernelseam dispatches,
plans, packs and launches as for a gfx942, without compiling: a kernel does nothing, and after a
call's launches the NumPy reference computes the results.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from kernelseam.arrays import torch as torch_arrays
from kernelseam.contract import (
    ArrayInfo,
    Backend,
    CallState,
    Device,
    KernelFacts,
    LaunchConfig,
    SourceBundle,
)
from kernelseam.kernels.signature import Signature
from kernelseam.planning import Call, Plan
from kernelseam.plugins import plugins
from kernelseam_rocm import plugin, toolchain
from kernelseam_rocm_emulator.devices import EmulatedRuntime
from kernelseam_rocm_emulator.memory import Arena
from torch.overrides import TorchFunctionMode

ABSENT = {"kernelseam_cuda", "cuda", "cupy", "flash_attn_interface", "flashinfer", "triton"}
"""What is not installed beside a card of AMD's, or is NVIDIA's alone."""
ARCH = "gfx942"
STEP_MS = 0.05
"""Between any two events."""
STREAM = 0x5EA
capturing = False


class Without:
    """A finder of modules that finds none of those that are absent."""

    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        absent = name.partition(".")[0] in ABSENT
        return None if absent else self._finder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


class OnHost(TorchFunctionMode):  # type: ignore[misc]
    """Tensors of torch's device "cuda" in host memory."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {n: "cpu" if _is_gpu(x) else x for n, x in (kwargs or {}).items()}
        return function(*("cpu" if _is_gpu(x) else x for x in args), **given)


def _is_gpu(x: object) -> bool:
    return (isinstance(x, str) and x.partition(":")[0] == "cuda") or (
        isinstance(x, torch.device) and x.type == "cuda"
    )


class Event:
    """On a clock that goes on by a step an event."""

    _clock = itertools.count()

    def __init__(self, enable_timing: bool = False) -> None:
        self._timing, self._at = enable_timing, 0

    def record(self, stream: object = None) -> None:
        self._at = next(Event._clock)

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        assert self._timing, "torch raises where an event was not made to be timed"
        return (end._at - self._at) * STEP_MS


class Graph:
    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        global capturing
        capturing = True

    def capture_end(self) -> None:
        global capturing
        capturing = False

    def replay(self) -> None:
        pass


class Stream:
    cuda_stream = STREAM

    def __init__(self, device: object = None) -> None:
        pass


@contextmanager
def stream(of: Stream) -> Iterator[None]:
    yield


def rehearse_torch() -> None:
    """Have torch's CPU build look like one for ROCm 6.4 with an MI300X."""
    api: Any = torch
    api.version.hip, api.version.cuda = "6.4.43484-123eb5128", None
    properties = SimpleNamespace(
        name="AMD Instinct MI300X",
        major=9,
        minor=4,
        total_memory=205_520_896_000,
        multi_processor_count=304,
        is_integrated=0,
        is_multi_gpu_board=0,
        max_threads_per_multi_processor=2048,
        warp_size=64,
        regs_per_multiprocessor=65536,
        gcnArchName="gfx942:sramecc+:xnack-",
        L2_cache_size=4 << 20,
    )
    of_rocm = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (9, 4),
        "get_device_name": lambda device=None: properties.name,
        "synchronize": lambda device=None: None,
        "current_stream": lambda device=None: Stream(),
        "Stream": Stream,
        "stream": stream,
        "Event": Event,
        "CUDAGraph": Graph,
    }
    for name, function in of_rocm.items():
        setattr(api.cuda, name, function)
    api._C._cuda_getCurrentRawStream = lambda index: STREAM
    # a compiler's time is not rehearsed
    api.compile = lambda function=None, **options: function
    api._dynamo.reset = lambda: None
    OnHost().__enter__()


class RehearsedRuntime(EmulatedRuntime):
    """One emulated device, whose arrays torch's are."""

    def devices(self) -> tuple[Device, ...]:
        return tuple(d for d in self._devices if d.arch == ARCH)

    def describe(self, array: object) -> ArrayInfo | None:
        if torch_arrays.is_tensor(array):
            return torch_arrays.describe(array, self.devices()[0])
        return super().describe(array)

    def empty(self, shape: Any, dtype: Any, device: Device, like: Any = None) -> object:
        if like is not None and like.kind == "torch":
            return torch_arrays.empty(shape, dtype, "cpu")
        return super().empty(shape, dtype, device, like)

    def current_stream(self, device: Device, array: ArrayInfo | None = None) -> int:
        return STREAM

    def call_state(self, device: Device, kind: str | None) -> CallState:
        return CallState(lambda: True, lambda: STREAM)


@dataclass(frozen=True)
class RehearsedKernel:
    facts: KernelFacts

    def prepare(self, config: LaunchConfig, arguments: bytes) -> Callable[[int], None]:
        config.require_plain("rocm")
        return self._launched

    def _launched(self, stream: int) -> None:
        assert stream in (0, STREAM), f"launched on stream {stream:#x}, not on torch's"


class Facts(dict[str, KernelFacts]):
    """Of any kernel."""

    def __missing__(self, name: str) -> KernelFacts:
        return KernelFacts(name, 64, 0, 0, 0, 8, ())


class RehearsedToolchain(toolchain.HipToolchain):
    """The ROCm plugin's, without a compiler: a binary is its sources."""

    def compiler(self) -> str:
        return "rehearsed"

    def compile(self, bundle: SourceBundle, arch: str) -> bytes:
        self.arch_row(arch)
        return repr(bundle).encode()

    def inspect(self, binary: bytes, arch: str) -> Mapping[str, KernelFacts]:
        return Facts()

    def load(self, binary: bytes, kernel: str, device: Device) -> Any:
        return RehearsedKernel(Facts()[kernel])


class ComputedCall:
    """A call whose results the NumPy reference computes."""

    def __init__(self, call: Call, reference: Call) -> None:
        self._call, self._reference = call, reference

    def __call__(self, stream: object = None) -> None:
        self._call(stream)
        if not capturing:
            self._reference(None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


def rehearse_plugin() -> None:
    """Have the ROCm plugin find one device."""
    runtime = RehearsedRuntime(Arena(1 << 30), 0)
    chain = RehearsedToolchain(runtime)
    made = plugin.backend()
    found = Backend("rocm", runtime, chain, made.implementations, kernels=made.kernels, priority=10)
    plugin.backend = lambda: found  # type: ignore[assignment]
    # parameters lie where the host packs them: there is no binary that says so
    Signature.placed = lambda self, facts: self  # type: ignore[method-assign]
    bind = Plan.bind

    def computed(self: Plan, **operands: Any) -> Any:
        call = bind(self, **operands)
        if self.device.backend != "rocm":
            return call
        numpy = plugins().backend("numpy").runtime.devices()[0]
        operation = self.choice.implementation.operation
        (reference,) = plugins().registry.implementations_of(operation, "numpy")
        parts = reference.build(self.problem, numpy)
        by_reference = Plan(self.descriptor, self.problem, self.device, (self.choice, parts))
        return ComputedCall(call, bind(by_reference, **operands))

    Plan.bind = computed  # type: ignore[method-assign]


def rows() -> dict[str, list[Any]]:
    """Small ones of every suite."""
    from benchmarks.comparing.attention import AttentionRow
    from benchmarks.comparing.backward import BackwardRow
    from benchmarks.comparing.decoding import DecodeRow
    from benchmarks.comparing.epilogues import EpilogueRow
    from benchmarks.comparing.fp8 import Fp8Row
    from benchmarks.comparing.gemm import LISTS, GemmRow
    from benchmarks.comparing.grouped import GroupedRow
    from benchmarks.comparing.host import host_rows
    from benchmarks.comparing.host_cpu import CpuRow, _products
    from benchmarks.comparing.models import model_rows
    from benchmarks.comparing.paging import PagedRow
    from benchmarks.comparing.projections import ProjectionRow
    from benchmarks.comparing.rows import NamedRow
    from benchmarks.comparing.scores import ScoreRow

    def forward(suite: str, **options: Any) -> AttentionRow:
        return AttentionRow(suite, 2, 4, 70, 32, **options)

    def experts(**options: Any) -> GroupedRow:
        return GroupedRow("grouped", 4, 70, 32, 48, "skewed", **options)

    few = DecodeRow(3, 100, 8, 2, 64, 16)
    return {
        "attention": [forward("attention", causal=True, kv_heads=2)],
        "attention-options": [
            forward("attention-options", window=(9, 0)),
            forward("attention-options", causal=True, packed=(70, 1)),
        ],
        "attention-adversarial": [forward("attention-adversarial", scores="rising")],
        "attention-few": [replace(forward("attention-few", causal=True), S=5, keys=70)],
        "attention-small": [forward("attention-small", causal=True)],
        "attention-dims": [replace(forward("attention-dims"), D=40)],
        "attention-paged": [PagedRow(((1, 20, 50), (2, 3, 0)), 4, 2, 64, 16)],
        "attention-scores": [
            ScoreRow(n, 2, 4, 128, 32) for n in ("mask random", "alibi causal, written")
        ],
        "backward": [BackwardRow(2, 4, 48, 32, True, kv_heads=2)],
        "backward-dims": [BackwardRow(2, 2, 48, 40, suite="backward-dims")],
        "decode": [few, replace(few, kv_heads=1, latent=40)],
        "definitions": [NamedRow("gqa", replace(few, suite="definitions"), "definitions")],
        "drawn": [NamedRow("0.0", replace(few, suite="drawn"), "drawn")],
        "gemm": [
            GemmRow("gemm", 1, 33, 17, 40, "bfloat16", True, True, True),
            GemmRow("gemm", 6, 33, 17, 40, "float16", True, lists=next(iter(LISTS))),
        ],
        "gemm-e4m3": [Fp8Row("gemm-e4m3", 1, 20, 256, 128, "equal", block=n) for n in (0, 128)],
        "gemm-f32": [GemmRow("gemm-f32", 2, 33, 17, 40, "float32")],
        "gemm-epilogue": [
            EpilogueRow("gemm-epilogue", 33, 20, 40, "relu", bias=True),
            EpilogueRow("gemm-epilogue", 33, 20, 40, "swiglu", preactivation=True),
        ],
        "grouped": [experts(), experts(by_rows=True), experts(form="weight gradient")],
        "projections": [
            ProjectionRow(kind, 20, 64, 4, 2, 32) for kind in ("qkv turned", "output backward")
        ],
        "host": [r for r in host_rows() if not r.name.startswith("known") or "matmul" in r.name],
        "host-cpu": [CpuRow("bmm 4 of 8³", lambda: _products(4, 8), 0.7)],
        "models": model_rows()[-1:],
    }


def main(arguments: list[str], rehearse: Callable[[], None] = rehearse_plugin) -> int:
    """The command's exit status."""
    sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
    rehearse_torch()
    rehearse()
    from benchmarks import precompile
    from benchmarks.comparing import (
        clocks,
        command,
        host,
        host_cpu,
        host_new,
        machine,
        models,
        running,
    )

    small = {name: (lambda found=found: found) for name, found in rows().items()}
    missing = running.SUITES.keys() - small.keys()
    assert missing == {"compile"}, f"no small rows of {missing}"
    running.SUITES |= small
    ceilings = machine.ceilings
    changes: list[tuple[Any, dict[str, Any]]] = [
        (clocks, {"INFINITY_CACHE": 1 << 16}),
        (machine, {"ceilings": lambda device, clock: ceilings(device, clock, 1 << 12, 16)}),
        (host, {"CALLS": 2, "GOES": 1, "ROUNDS": 1}),
        (host_new, {"NEW": 2, "KNOWN": 3, "ROUNDS": 1}),
        (host_cpu, {"SECONDS": 0.0, "FEWEST": 1}),
        (models, {"BATCHES": 2, "LAYERS": 1, "HEADS": 2, "HEAD_DIM": 16, "ROUNDS": 1}),
        (precompile, {"compile_all": compiled_here}),
    ]
    for module, values in changes:
        for name, value in values.items():
            assert hasattr(module, name)
            setattr(module, name, value)
    return command.main(arguments)


def compiled_here(units: Any, device: Device, **options: Any) -> list[str]:
    """As ``precompile.compile_all``, whose processes would find the plugin as it is."""
    from benchmarks import precompile

    for unit in units:
        precompile._compile(unit, device)
    return []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
