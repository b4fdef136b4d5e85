"""From kernel definitions, the core's or a plugin's own, to binaries and launches on any toolchain.
One class makes an implementation of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from functools import lru_cache
from typing import Any, cast

from kernelseam.compilation import Binary, compiled, compiled_together, is_cached, no_jit
from kernelseam.compilation.sources import included
from kernelseam.contract import (
    ArchRow,
    Composition,
    Cost,
    Device,
    DeviceLimits,
    KernelFacts,
    Launch,
    LaunchConfig,
    Launches,
    LaunchRecord,
    LoadedKernel,
    Memset,
    PlanParts,
    SourceBundle,
    Step,
    TensorMap,
    Toolchain,
)
from kernelseam.costs import Work, predicted, roofline
from kernelseam.errors import PluginError, Refusal, Unsupported
from kernelseam.frozen import dataclass
from kernelseam.kernels.config import CONFIG, config_header
from kernelseam.kernels.definition import KernelDefinition
from kernelseam.kernels.entry import entry
from kernelseam.kernels.expression import EPILOGUE, EXPRESSION, epilogue_header, expression_header
from kernelseam.kernels.signature import Signature, Value
from kernelseam.kernels.sources import shared_sources
from kernelseam.memset import MemsetStep
from kernelseam.tuned.classes import representative
from kernelseam.variants import Variant

MAX_BLOCKS = 2**31 - 1
"""Blocks along the one axis of a grid."""
_CHOICES, _CLASSES = 64, 128
"""Problems of an implementation whose launches are cached from ``supports`` to ``build``, and
classes whose tiles are."""


def bundle(
    kernel: KernelDefinition, spec: Any, tile: Any, toolchain: Toolchain, arch: str
) -> SourceBundle:
    """The sources and constants of one binary: the files that its main file includes, so that a
    change elsewhere does not change its key. Raises PluginError for a missing include."""
    row = toolchain.arch_row(arch)
    platform = dict(toolchain.platform_files(arch))
    files = {**shared_sources(), **platform, "platform.h": platform[row.platform]}
    for name, text in kernel.sources().items():
        if files.setdefault(name, text) != text:
            raise PluginError(
                f"{kernel.entry} brings a device source {name}, and there is another of that name"
            )
    defines = {
        **dict(row.defines),
        **{f"KS_{k}": v for k, v in kernel.defines(spec, tile, row).items()},
    }
    constants = tuple((k, str(int(v) if isinstance(v, bool) else v)) for k, v in defines.items())
    files[CONFIG] = config_header(kernel.constants(spec, tile, row), kernel.texts)
    files[EXPRESSION] = expression_header(spec)
    files[EPILOGUE] = epilogue_header(spec)
    main, signature = kernel.source, kernel.signature(spec)
    if signature.flat or signature.generated:
        main = f"generated/{kernel.entry}.h"
        files[main] = entry(kernel.entry, kernel.source, signature)
    return SourceBundle(
        name=kernel.entry,
        main=main,
        files=included(main, files, dict(constants)),
        defines=constants,
        options=row.options,
    )


def build(
    kernel: KernelDefinition, spec: Any, tile: Any, toolchain: Toolchain, arch: str
) -> tuple[Binary, KernelFacts]:
    """The binary, from the cache or the compiler, with its parameters checked. Needs no device."""
    binary = compiled(toolchain, bundle(kernel, spec, tile, toolchain, arch), arch)
    facts = toolchain.inspect(binary.data, arch)[kernel.entry]
    kernel.signature(spec).placed(facts)
    return binary, facts


@lru_cache(512)
def placed_signature(kernel: KernelDefinition, spec: Any, loaded: Any) -> Signature:
    """A loaded kernel's signature: one object for all plans, which makes its packer once."""
    return kernel.signature(spec).placed(loaded.facts)


@dataclass(frozen=True)
class KernelStep:
    """One launch of a loaded kernel."""

    kernel: LoadedKernel
    signature: Signature
    config: LaunchConfig
    values: Mapping[str, int | float]
    pointers: Mapping[str, str]
    """Parameters that take an operand's address, or a tensor map over it, with its name."""
    record: LaunchRecord
    workspace: Mapping[str, int] = field(default_factory=dict)
    """Parameters that point into the workspace, with their offset."""
    tensor_maps: Mapping[str, TensorMap] = field(default_factory=dict)
    encode: Callable[[TensorMap, int], bytes] | None = None
    _encoded: dict[str, tuple[int, bytes]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """By tensor map parameter, the last address and the encoded bytes; encoded again only for
    another address."""

    def bind(self, pointers: Mapping[str, int], workspace: int) -> Callable[[int], None]:
        addresses = {p: pointers.get(name, 0) for p, name in self.pointers.items()}
        for parameter, offset in self.workspace.items():
            addresses[parameter] = workspace + offset
        arguments: dict[str, Value] = {**self.values, **addresses}
        for parameter, tensor_map in self.tensor_maps.items():
            arguments[parameter] = self._tensor_map(parameter, tensor_map, addresses[parameter])
        return self.kernel.prepare(self.config, self.signature.pack(arguments))

    def _tensor_map(self, parameter: str, tensor_map: TensorMap, address: int) -> bytes:
        encoded = self._encoded.get(parameter)
        if encoded is None or encoded[0] != address:
            assert self.encode is not None
            self._encoded[parameter] = encoded = (address, self.encode(tensor_map, address))
        return encoded[1]


class KernelImplementation:
    """A kernel definition or a composition on a toolchain: kernelseam.contract.Implementation."""

    def __init__(self, composition: Composition, toolchain: Toolchain) -> None:
        self.composition, self.toolchain = composition, toolchain
        self.name, self.operation = composition.name, composition.operation
        self.backend = toolchain.backend
        # The limits are a key of their own: devices are equal without them.
        self._chosen = lru_cache(_CHOICES)(self._choose)
        self._of_class = lru_cache(_CLASSES)(self._tile_of_class)

    def supports(self, problem: Any, device: Device) -> str | None:
        archs = self.composition.archs or self.toolchain.archs
        if device.arch not in archs:
            return f"arch {device.arch} is not among {', '.join(archs)}"
        row = self.toolchain.arch_row(device.arch)
        return (
            self.composition.refuse(problem, row)
            or self.refuse_launches(problem, launches := self.launches(problem, device), device)
            or self.refuse_missing(launches, device)
        )

    def refuse_launches(self, problem: Any, launches: Launches, device: Device) -> str | None:
        """Why the device or its toolchain does not take these launches, or None."""
        row, memory = self.toolchain.arch_row(device.arch), device.limits.memory_bytes
        if launches.workspace_bytes > memory > 0:
            return (
                f"it needs a workspace of {launches.workspace_bytes} bytes, more than the "
                f"device's memory, {memory}"
            )
        for launch in launches.kernels:
            config = launch.kernel.config(launch.problem, launch.tile, row, device)
            if (blocks := max(config.grid)) > MAX_BLOCKS:
                return f"it needs {blocks} blocks, more than {MAX_BLOCKS}"
            if reason := config.refuse(row) or self._refuse_tensor_maps(
                launch, problem, launches, device
            ):
                return reason
        return None

    def refuse_missing(self, launches: Launches, device: Device) -> str | None:
        """With KERNELSEAM_NO_JIT, a kernel that no installed bundle has."""
        if not no_jit():
            return None
        for launch, source in self._sources(launches, device):
            if not is_cached(self.toolchain, source, device.arch):
                return (
                    f"KERNELSEAM_NO_JIT is set, and no installed bundle has {launch.kernel.entry} "
                    f"for {device.arch}, {launch.problem.spec}, in a tile that takes this problem"
                )
        return None

    def _sources(self, launches: Launches, device: Device) -> Iterator[tuple[Launch, SourceBundle]]:
        """Each kernel that is launched, and what it is compiled from."""
        row = self.toolchain.arch_row(device.arch)
        for launch in launches.kernels:
            config: LaunchConfig = launch.kernel.config(launch.problem, launch.tile, row, device)
            if 0 not in config.grid:
                yield (
                    launch,
                    bundle(
                        launch.kernel,
                        launch.problem.spec,
                        launch.tile,
                        self.toolchain,
                        device.arch,
                    ),
                )

    def source_bundles(
        self, problem: Any, device: Device, variant: str = ""
    ) -> tuple[SourceBundle, ...]:
        """What the launches of a problem that it supports are compiled from; nothing is compiled.
        An unknown variant counts as the default."""
        launches = self.launches(problem, device, variant)
        return tuple(source for _, source in self._sources(launches, device))

    def _refuse_tensor_maps(
        self, launch: Launch, problem: Any, launches: Launches, device: Device
    ) -> str | None:
        tensor_maps = launch.kernel.tensor_maps(launch.problem, launch.tile, device)
        if not tensor_maps:
            return None
        alignments = {rule.name: rule.alignment for rule in problem.operands}
        for parameter, tensor_map in tensor_maps.items():
            if parameter in launch.workspace:
                alignment, offset = launches.workspace_alignment, launch.workspace[parameter]
                if offset % alignment:
                    alignment = math.gcd(alignment, offset)
            else:
                name = launch.operands.get(parameter, tensor_map.operand)
                if name not in alignments:
                    raise PluginError(
                        f"{launch.kernel.entry} has a tensor map over {name}, which is no operand "
                        f"of {problem.operation}"
                    )
                alignment = alignments[name]
            reason: str | None = self.toolchain.refuse_tensor_map(
                tensor_map, device.arch, alignment
            )
            if reason:
                return reason
        return None

    def launches(self, problem: Any, device: Device, variant: str = "") -> Launches:
        """Its kernels for a problem that it supports. The first of ``supports``, ``cost`` and
        ``build`` chooses their tiles. An unknown variant counts as the default."""
        tile = self._tiles(problem, device).get(variant) if variant else None
        if tile is None:
            return self._chosen(problem, device, device.limits)
        return self.composition.launches(problem, tile, device)

    def tile(self, problem: Any, device: Device, variant: str = "") -> Any:
        """The tile of a variant's name; else that of the problem's class: the one that its
        representative has, unless it does not take this problem."""
        if variant and (named := self._tiles(problem, device).get(variant)) is not None:
            return named
        row, ranked = self.toolchain.arch_row(device.arch), representative(problem)
        if ranked is problem or ranked == problem:
            return self._of_class(problem, device, device.limits)
        try:
            tile = self._of_class(ranked, device, device.limits)
            if self.composition.takes(problem, tile, row, device):
                return tile
        except Exception:  # a representative may have no tile where its problems have
            pass
        return self.composition.tile(problem, row, device)

    def _tile_of_class(self, ranked: Any, device: Device, limits: DeviceLimits) -> Any:
        return self.composition.tile(ranked, self.toolchain.arch_row(device.arch), device)

    def _choose(self, problem: Any, device: Device, limits: DeviceLimits) -> Launches:
        chosen = self.composition.launches(problem, self.tile(problem, device), device)
        if not self.refuse_missing(chosen, device):
            return chosen
        # without a compiler, the best of the tiles that a bundle has
        others = (
            self.composition.launches(problem, tile, device)
            for tile in self._tiles(problem, device).values()
        )
        bundled = [
            x
            for x in others
            if not (self.refuse_launches(problem, x, device) or self.refuse_missing(x, device))
        ]
        return min(bundled, key=lambda x: self.cost_of(problem, x, device).seconds, default=chosen)

    def cost(self, problem: Any, device: Device) -> Cost:
        """Its launches one after the other."""
        return self.cost_of(problem, self.launches(problem, device), device)

    def cost_of(self, problem: Any, launches: Launches, device: Device) -> Cost:
        """By the arch's cost model; without one, by the problem's roofline."""
        coefficients = self.toolchain.arch_row(device.arch).costs
        if coefficients is None:
            return roofline(problem, device.limits)
        works = [
            Work(x.size) if isinstance(x, Memset) else x.kernel.work(x.problem, x.tile, device)
            for x in launches.steps
        ]
        seconds = sum(
            [predicted(w, coefficients, device.limits) for w in works if w.blocks or w.bytes]
        )
        return Cost(
            sum([w.bytes for w in works]),
            problem.operations,
            seconds or device.limits.launch_seconds,
        )

    def records(self, problem: Any, device: Device, variant: str = "") -> tuple[LaunchRecord, ...]:
        """The launches of a problem that it supports; nothing is compiled."""
        launches = self.launches(problem, device, variant)
        row = self.toolchain.arch_row(device.arch)
        steps = (self._record(x, row, device) for x in launches.steps)
        return tuple(x for x in steps if x is not None)

    def _record(self, launch: Launch | Memset, row: ArchRow, device: Device) -> LaunchRecord | None:
        """None where there is nothing to do."""
        if isinstance(launch, Memset):
            return (
                MemsetStep(device, launch.offset, launch.size, launch.value).record
                if launch.size
                else None
            )
        config: LaunchConfig = launch.kernel.config(launch.problem, launch.tile, row, device)
        return (
            None
            if 0 in config.grid
            else LaunchRecord(
                launch.kernel.entry,
                config.grid,
                config.block,
                config.shared_bytes,
                device.arch,
                evidence=device.evidence,
                cluster=config.cluster,
                programmatic=config.programmatic,
            )
        )

    def build(self, problem: Any, device: Device) -> PlanParts:
        """Raises Unsupported where the arch has no such launch, CompileError, DeviceError."""
        return self._build(problem, self.launches(problem, device), device)

    def variants(self, problem: Any, device: Device) -> tuple[Variant, ...]:
        """Its tiles, by the names that its kernel definition gives them."""
        launches_by_name = {
            n: self.composition.launches(problem, t, device)
            for n, t in self._tiles(problem, device).items()
        }
        return tuple(
            Variant(n, self.cost_of(problem, x, device))
            for n, x in launches_by_name.items()
            if self.refuse_launches(problem, x, device) is None
            and self.refuse_missing(x, device) is None
        )

    def build_variant(self, problem: Any, device: Device, variant: str) -> PlanParts:
        """The plan with one of ``variants``."""
        return self._build(
            problem,
            self.composition.launches(problem, self._tiles(problem, device)[variant], device),
            device,
        )

    def _tiles(self, problem: Any, device: Device) -> Mapping[str, Any]:
        """By name, that of ``launches`` first."""
        row = self.toolchain.arch_row(device.arch)
        tiles = self.composition.variants(problem, row, device)
        if not tiles:
            return tiles
        tile = self.tile(problem, device)
        return {
            n: t for is_first in (True, False) for n, t in tiles.items() if (t == tile) is is_first
        }

    def _build(self, problem: Any, launches: Launches, device: Device) -> PlanParts:
        row = self.toolchain.arch_row(device.arch)
        self._compile(launches, row, device)
        steps = tuple(
            s for launch in launches.steps if (s := self._step(launch, row, device)) is not None
        )
        if not any(isinstance(s, KernelStep) for s in steps):
            return PlanParts(())
        return PlanParts(
            steps, launches.workspace_bytes, launches.workspace_alignment, launches.zeroed_bytes
        )

    def _compile(self, launches: Launches, row: ArchRow, device: Device) -> None:
        """Compile the steps' binaries together, up to the first step that is refused or broken:
        that one raises when it is built."""
        if len(launches.kernels) < 2:
            return
        bundles = []
        for launch in launches.kernels:
            try:
                config: LaunchConfig = launch.kernel.config(
                    launch.problem, launch.tile, row, device
                )
                if config.refuse(row):
                    break
                if 0 not in config.grid:
                    bundles.append(
                        bundle(
                            launch.kernel,
                            launch.problem.spec,
                            launch.tile,
                            self.toolchain,
                            device.arch,
                        )
                    )
            except Exception:
                break
        if len(bundles) > 1:
            compiled_together(self.toolchain, bundles, device.arch)

    def _step(self, launch: Launch | Memset, row: ArchRow, device: Device) -> Step | None:
        """One kernel, compiled and loaded, or memory to set; None where there is nothing to do."""
        if isinstance(launch, Memset):
            return (
                MemsetStep(device, launch.offset, launch.size, launch.value)
                if launch.size
                else None
            )
        kernel, problem, tile = launch.kernel, launch.problem, launch.tile
        config: LaunchConfig = kernel.config(problem, tile, row, device)
        record = self._record(launch, row, device)
        if record is None:
            return None
        if reason := config.refuse(row):
            raise Unsupported(problem, [Refusal(self.name, reason)])
        binary = compiled(
            self.toolchain,
            bundle(kernel, problem.spec, tile, self.toolchain, device.arch),
            device.arch,
        )
        loaded = self.toolchain.load(binary.data, kernel.entry, device)
        tensor_maps = kernel.tensor_maps(problem, tile, device)
        map_operands = {parameter: x.operand for parameter, x in tensor_maps.items()}
        return KernelStep(
            loaded,
            placed_signature(kernel, problem.spec, cast(Any, loaded)),
            config,
            kernel.values(problem, tile, device),
            {**kernel.pointers(problem.spec), **map_operands, **launch.operands},
            record,
            launch.workspace,
            tensor_maps,
            self.toolchain.encode_tensor_map if tensor_maps else None,
        )
