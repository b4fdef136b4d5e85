"""The self-test: a kernel for each instruction or rule that an emulator got wrong, compared with
NumPy.

Emulated devices of an arch are used once it has passed: it guards against another version of the
emulator that has a fault which our patches do not cover.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from kernelseam.contract import LaunchConfig

from kernelseam_rocm_emulator.loader import Extents
from kernelseam_rocm_emulator.selftest import instruction, kernels, matrix, narrow, vector
from kernelseam_rocm_emulator.selftest.instruction import InstructionTest, Words
from kernelseam_rocm_emulator.selftest.kernels import KernelTest

if TYPE_CHECKING:
    from kernelseam_rocm_emulator.interpreter import Interpreter, Module

_BUFFER_FLAGS = {"gfx9": "0x27000", "gfx11": "0x31014000"}
"""Word 3 of a raw buffer's descriptor."""


def tests(arch: str) -> Iterator[tuple[str, InstructionTest | KernelTest]]:
    """The tests of an arch by the names of their kernels."""
    for i, test in enumerate((*vector.tests(), *narrow.tests())):
        if arch in test.archs:
            yield f"instruction{i}", test
    for i, whole in enumerate((*matrix.tests(arch), *kernels.tests(arch))):
        yield f"kernel{i}", whole


_KEY = '#ifdef KS_KEY\nextern "C" __constant__ char kernelseam_key[] = KS_KEY;\n#endif\n'
"""What every binary of the cache carries."""


def source(arch: str) -> str:
    """All of them as one translation unit."""
    parts = [_KEY, "typedef unsigned u32;\n", matrix.prelude()]
    flags = next((f for prefix, f in _BUFFER_FLAGS.items() if arch.startswith(prefix)), "0")
    for name, test in tests(arch):
        if isinstance(test, InstructionTest):
            parts.append(instruction.kernel(test, name, arch))
        else:
            parts.append(test.source.replace("NAME", name).replace("FLAGS", flags))
    return "".join(parts)


def run(interpreter: Interpreter, elf: bytes, arch: str) -> list[str]:
    """Run every test in the emulator's process; the failures."""
    module, failures = interpreter.load(elf, arch), []
    for name, test in tests(arch):
        rng = np.random.default_rng(3)
        try:
            if isinstance(test, InstructionTest):
                failure = _instruction(interpreter, module, name, test, rng)
            else:
                failure = test.check(_Launcher(interpreter, module, name), rng)
        except Exception as e:
            traceback.print_exc()
            failure = f"{type(e).__name__}: {e}"
        if failure:
            failures.append(f"{test.name}: {failure}")
    return failures


def _instruction(
    interpreter: Interpreter,
    module: Module,
    name: str,
    test: InstructionTest,
    rng: np.random.Generator,
) -> str:
    lanes = 64 if module.arch in instruction.CDNA else 32
    operands = [instruction.operand(kind, lanes, rng) for kind in test.kinds]
    actual: Words = np.zeros(lanes, np.uint32)
    _Launcher(interpreter, module, name)((1, 1, 1), (lanes, 1, 1), *operands, actual)
    return instruction.difference(
        test, actual, np.asarray(test.expected(*operands)).astype(np.uint32)
    )


class _Launcher:
    """kernels.Launcher of one kernel."""

    def __init__(self, interpreter: Interpreter, module: Module, kernel: str) -> None:
        self._interpreter, self._module, self._kernel = interpreter, module, kernel

    def __call__(self, grid: Extents, block: Extents, *arrays: npt.NDArray[Any]) -> None:
        arguments = b"".join(x.ctypes.data.to_bytes(8, "little") for x in arrays)
        self._interpreter.run(self._module, self._kernel, LaunchConfig(grid, block), arguments)
