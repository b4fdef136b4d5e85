"""The emulator in its own process: imports it, and runs kernels wave by wave. Only the worker's
child uses this.

The emulator executes instructions; blocks, waves, barriers, LDS and scratch are implemented here.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from elftools.elf.elffile import ELFFile
from kernelseam.contract import LaunchConfig
from kernelseam.errors import DeviceError
from kernelseam_rocm import codeobject

from kernelseam_rocm_emulator import loader, patches
from kernelseam_rocm_emulator.loader import Descriptor
from kernelseam_rocm_emulator.memory import Region
from kernelseam_rocm_emulator.wave import INVERSE_TWO_PI, Wave

GARBAGE = 0xA5
"""The initial content of LDS and scratch."""

_FAMILIES = {"gfx9": "cdna", "gfx11": "rdna3", "gfx12": "rdna4"}
_SHARED_GUARD = (1 << 32) + (1 << 20)
"""Around LDS: as far as a 32-bit address and an instruction's offset reach."""

_FLUSH = 0x8040  # DAZ and FTZ in MXCSR
_MXCSR_AT = 28  # in fenv_t of Linux on x86_64
_INVERSE_TWO_PI_BITS = 0x3E22F983

Instruction = tuple[Callable[..., object], tuple[int, ...] | None, int, bool]
"""What to call, with which of a wave's arguments (None: a patch, which takes the wave), its size,
whether it waits."""


Observer = Callable[[int, Wave], None]
"""Called with an instruction's address in the code object and the wave that is to execute it."""


def family(arch: str) -> str:
    """The emulator's name for an arch's instruction set. Raises DeviceError for one that it does
    not have."""
    for prefix, name in _FAMILIES.items():
        if arch.startswith(prefix):
            return name
    raise DeviceError(f"{arch} cannot be emulated")


@dataclass
class Module:
    """A code object in memory, and its decoded instructions."""

    code: codeobject.CodeObject
    arch: str
    memory: Region
    bytes: bytes
    program: dict[int, Instruction] = field(default_factory=dict)


@dataclass
class Where:
    """The wave that runs now, for the message of a fault."""

    kernel: str = ""
    arch: str = ""
    block: tuple[int, int, int] = (0, 0, 0)
    wave: int = 0
    pc: int = 0
    entry: int = 0
    regions: dict[str, Region] = field(default_factory=dict)

    def __str__(self) -> str:
        at = (
            f"block {self.block}, wave {self.wave}, {self.pc - self.entry:#x} bytes after its entry"
        )
        return f"kernel {self.kernel} ({self.arch}), {at}"


class Interpreter:
    """The emulator's module with our patches, and the modules loaded so far."""

    def __init__(self, folder: str) -> None:
        # The repository's packages have names that others have too.
        for name in [
            n for n in sys.modules if n.partition(".")[0] in ("test", "tinygrad", "extra")
        ]:
            del sys.modules[name]
        sys.path.insert(0, folder)
        self._emulator: Any = importlib.import_module("test.mockgpu.amd.emu")
        patches.compiled.install(self._emulator)
        self._libm = ctypes.CDLL("libm.so.6")
        self.where = Where()
        self.executed = 0
        """Instructions of waves since the start."""

    def load(self, elf: bytes, arch: str) -> Module:
        """Put a code object into memory."""
        code = codeobject.parse(elf)
        file = ELFFile(BytesIO(elf))
        region = Region(loader.image_bytes(file) + 64)  # the decoder looks ahead
        image = loader.image(file, region.address)
        region.write(image)
        return Module(code, arch, region, image)

    def run(
        self,
        module: Module,
        kernel: str,
        launch: LaunchConfig,
        arguments: bytes,
        observe: Observer | None = None,
    ) -> None:
        """Launch a kernel and wait for its end. ``observe`` is called before each instruction.
        Raises DeviceError, or what the emulator raises."""
        facts = module.code.kernels[kernel]
        offset = module.code.symbols[facts[".symbol"]][0]
        d = Descriptor.read(module.bytes, offset)
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        if threads > facts[".max_flat_workgroup_size"]:
            raise DeviceError(
                f"kernel {kernel} takes {facts['.max_flat_workgroup_size']} threads a block: "
                f"{threads}"
            )
        segment = loader.kernarg(facts, d, arguments, launch)
        # scalar loads may fetch more than they need
        kernarg, packet = Region(len(segment) + 256), Region(64)
        kernarg.write(segment)
        packet.write(
            loader.dispatch_packet(d, launch, module.memory.address + offset, kernarg.address)
        )
        registers = loader.user_registers(d, segment, kernarg.address, packet.address)
        lanes = 64 if family(module.arch) == "cdna" else 32
        waves = -(-threads // lanes)
        # The emulator loads for lanes that take no part as well, from wherever their registers
        # point to.
        shared = Region(d.shared_bytes + launch.shared_bytes, _SHARED_GUARD, readable=True)
        scratch = [Region(d.scratch_bytes * lanes) for _ in range(waves)]
        entry = module.memory.address + offset + d.entry
        regions = {"the block's shared memory": shared, "the kernel's arguments": kernarg}
        regions.update((f"wave {i}'s scratch", r) for i, r in enumerate(scratch))
        self.where = where = Where(kernel, module.arch, entry=entry, regions=regions)
        with self._floats(d.flushes_single):
            for z in range(launch.grid[2]):
                for y in range(launch.grid[1]):
                    for x in range(launch.grid[0]):
                        where.block = (x, y, z)
                        shared.fill(GARBAGE)
                        states = []
                        for i, private in enumerate(scratch):
                            private.fill(GARBAGE)
                            state = self._emulator._init_wave(
                                entry,
                                i * lanes,
                                threads,
                                *launch.block,
                                kernarg.address,
                                d.rsrc2,
                                d.scratch_bytes,
                                family(module.arch),
                                x,
                                y,
                                z,
                                registers,
                                lanes,
                            )
                            states.append((self._wave(state, lanes, shared, private), state))
                        self._block(module, states, observe)

    def _wave(self, state: Any, lanes: int, shared: Region, scratch: Region) -> Wave:
        """The emulator's wave as patches see it. Its registers are the emulator's, and live as long
        as ``state``."""
        scalars, vectors, accumulators = (
            b._buf.va_addr for b in (state.sgpr_buf, state.vgpr_buf, state.accvgpr_buf)
        )
        wave = Wave(lanes, scalars, vectors, accumulators, shared.address, scratch.address)
        # where the emulator keeps an identity of the hardware
        wave.scalars[INVERSE_TWO_PI] = _INVERSE_TWO_PI_BITS
        return wave

    def _block(
        self, module: Module, states: list[tuple[Wave, Any]], observe: Observer | None
    ) -> None:
        """Every wave of a block, each up to the next barrier in its turn."""
        end, program, where = self._emulator.ENDPGM_PC, module.program, self.where
        base = module.memory.address
        waiting = list(enumerate(wave for wave, _ in states))
        while waiting:
            running, waiting = waiting, []
            for number, wave in running:
                where.wave = number
                while (pc := wave.pc) != end:
                    where.pc = pc
                    call, takes, size, waits = program.get(pc) or self._decode(module, pc)
                    self.executed += 1
                    if observe is not None:
                        observe(pc - base, wave)
                    if takes is None:
                        call(wave)
                        if size:
                            wave.pc = pc + size
                    else:
                        arguments = wave.arguments
                        call(*[arguments[i] for i in takes])
                    if waits:
                        waiting.append((number, wave))
                        break

    def _decode(self, module: Module, pc: int) -> Instruction:
        emulator, kind = self._emulator, family(module.arch)
        code = ctypes.string_at(pc, 16)
        try:
            instruction = emulator.decode_inst(code, kind)
            op, size = getattr(instruction, "op", None), instruction.size()
        except ValueError:  # an encoding that it does not know
            op, size = None, 8
        word, name = int.from_bytes(code, "little"), getattr(op, "name", "")
        patch = patches.find(word, name, kind, size, module.arch)
        if patch is not None and not patch.may_decline:
            decoded: Instruction = (patch.step, None, patch.size, False)
        else:
            (compiled, runtime), _ = emulator._decode_at(pc, kind)
            waits = any(op is b for b in (*emulator._BARRIER_OPS, *emulator._BARRIER_SOP1_OPS))
            takes = tuple(compiled.arg.globals)
            decoded = (runtime.fxn, takes, 0, waits)
            if patch is not None:
                decoded = (_either(patch, runtime.fxn, takes), None, 0, False)
        module.program[pc] = decoded
        return decoded

    @contextmanager
    def _floats(self, flush: bool) -> Iterator[None]:
        """Flush float32 subnormals, where the kernel's descriptor says so."""
        if not flush:
            yield
            return
        before, during = ctypes.create_string_buffer(64), ctypes.create_string_buffer(64)
        self._libm.fegetenv(before)
        ctypes.memmove(during, before, 64)
        control = ctypes.c_uint32.from_buffer(during, _MXCSR_AT)
        control.value |= _FLUSH
        self._libm.fesetenv(during)
        try:
            yield
        finally:
            self._libm.fesetenv(before)


def _either(
    patch: patches.Patch, call: Callable[..., object], takes: tuple[int, ...]
) -> Callable[[Wave], None]:
    """The patch's step where it does not decline, else the emulator's."""

    def step(wave: Wave) -> None:
        if patch.step(wave):
            wave.pc += patch.size
        else:
            call(*[wave.arguments[i] for i in takes])

    return step


def prepare(compiler: Sequence[str], cache: Path) -> None:
    """Set the environment that the emulator reads when it is imported. ``cache``: a folder for what
    it compiles."""
    for name in ("DEBUG", "PROFILE", "BEAM", "NOOPT", "CACHELEVEL", "SPEC", "VIZ"):
        os.environ.pop(name, None)
    program = cache / "clang"  # one word, as the emulator requires
    with tempfile.NamedTemporaryFile("w", dir=cache, delete=False) as file:
        file.write(f'#!/bin/sh\nexec {shlex.join(compiler)} "$@"\n')
    os.chmod(file.name, 0o700)
    os.replace(file.name, program)  # another process may be running it
    os.environ.update(
        DEV="CPU",
        CC=str(program),
        CACHEDB=str(cache / "instructions.db"),
        ZIG_GLOBAL_CACHE_DIR=str(cache / "zig"),
    )
