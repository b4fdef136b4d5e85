"""What stands in for the emulator in the tests of its worker: the same names, and a few
instructions of one word.

The low byte says what an instruction does; the others are its operand. ``write`` makes a checkout
of it.
"""

from __future__ import annotations

from pathlib import Path

END, STORE, HANG, ABORT, RAISE, BARRIER, SHARE = range(7)

SOURCE = """
import ctypes, enum, os, time

ENDPGM_PC = 2**64 - 1
_INST_HANDLERS = {}


class dtypes:
    int = int


class Op(enum.Enum):
    END, STORE, HANG, ABORT, RAISE, BARRIER, SHARE = range(7)


_BARRIER_OPS, _BARRIER_SOP1_OPS = {Op.BARRIER}, set()


def _c(value): return value
def get_pcode(op): return ""
def _dpp16_ctrl(*a): return None


class Instruction:
    def __init__(self, code): self.op = Op(code[0])
    def size(self): return 4


class Memory:
    def __init__(self, count):
        self.words = (ctypes.c_uint32 * count)()
        self._buf, self.va_addr = self, ctypes.addressof(self.words)


class State:
    pass


def decode_inst(code, kind):
    return Instruction(code)


def _init_wave(entry, first, threads, bx, by, bz, arguments, rsrc2, scratch, kind, x, y, z, user, lanes):
    state = State()
    state.sgpr_buf, state.vgpr_buf, state.accvgpr_buf = Memory(260), Memory(256 * lanes), Memory(256 * lanes)
    words = state.sgpr_buf.words
    for i, value in enumerate(user): words[i] = value
    words[len(user)], words[len(user) + 1] = x, first // lanes
    words[256], words[257] = entry & 0xFFFFFFFF, entry >> 32
    return state


class Compiled:
    class arg:
        globals = [0, 3]


class Runtime:
    def __init__(self, pc): self.pc = pc

    def fxn(self, scalars, shared):
        code = ctypes.string_at(self.pc, 4)
        op, operand = Op(code[0]), int.from_bytes(code[1:4], "little")
        words = (ctypes.c_uint32 * 260).from_address(scalars.value)
        following = self.pc + 4
        if op is Op.END: following = ENDPGM_PC
        elif op is Op.HANG: time.sleep(1000)
        elif op is Op.ABORT: print("about to abort", flush=True); os.abort()
        elif op is Op.RAISE: raise RuntimeError("no such instruction")
        elif op is Op.SHARE: ctypes.c_uint32.from_address(shared.value + operand).value = 1
        elif op is Op.STORE:  # to the pointer in the first argument, past as many bytes as the second says
            kernarg = words[0] | words[1] << 32
            pointer, offset = (ctypes.c_int64.from_address(kernarg + 8 * i).value for i in range(2))
            slot = 2 * words[2] + words[3]
            ctypes.c_uint32.from_address(pointer + offset + 4 * slot).value = 100 * words[2] + 10 * words[3] + operand
        words[256], words[257] = following & 0xFFFFFFFF, following >> 32


def _decode_at(pc, kind):
    return (Compiled, Runtime(pc)), None
"""  # noqa: E501


def write(folder: Path) -> Path:
    """A checkout with the fake in the emulator's place."""
    place = folder / "test" / "mockgpu" / "amd"
    place.mkdir(parents=True)
    (place / "emu.py").write_text(SOURCE)
    for package in (place, *place.parents[:2]):
        (package / "__init__.py").touch()
    (folder / "tinygrad").mkdir()
    return folder


def program(*instructions: tuple[int, int] | int) -> bytes:
    """Machine code: instructions, each alone or with its operand, and an end."""
    pairs = [i if isinstance(i, tuple) else (i, 0) for i in (*instructions, END)]
    return b"".join(bytes([op]) + operand.to_bytes(3, "little") for op, operand in pairs)
