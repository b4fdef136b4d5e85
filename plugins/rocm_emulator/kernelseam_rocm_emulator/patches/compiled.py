"""Patches of the emulator's own compiler: 24-bit operands, the newer patterns of DPP, and
CDNA's registers from 128 on in instructions of 16 bits."""

from __future__ import annotations

import re
from typing import Any

_NEW_PATTERNS = range(0x150, 0x170)
_ROTATE_BY_ONE = 0x121
_UPPER_HALVES = (128, 384)
"""From these codes on a 16-bit operand is the upper half of a register: on RDNA."""
_NEVER = 1 << 12


def install(emulator: Any) -> None:
    """Replace functions of the emulator's module by ones that know more."""
    _whole_registers(emulator)
    meaning, pattern = emulator.get_pcode, emulator._dpp16_ctrl

    def get_pcode(op: Any) -> str:
        """The meaning of an instruction in AMD's own words; operands of 24 bits are cut to 24
        bits."""
        text: str = meaning(op)
        if "24" in op.name:
            text = re.sub(r"(S[01])\.u24", r"(\1.u32 & 16777215U)", text)
            text = re.sub(r"(S[01])\.i24", r"((\1.i32 << 8U) >> 8U)", text)
        return text

    def dpp16(lane: Any, code: int, row_mask: int, bank_mask: int, wave_size: int) -> Any:
        """Lane to read from, enabled, in bounds: row_share (row_newbcast on CDNA) and row_xmask as
        well."""
        shares, share = code < 0x160, code & 15
        if code not in _NEW_PATTERNS or (wave_size == 64 and not shares):
            return pattern(lane, code, row_mask, bank_mask, wave_size)
        _, enabled, valid = pattern(lane, _ROTATE_BY_ONE, row_mask, bank_mask, wave_size)
        index = lane.cast(emulator.dtypes.int)

        def constant(value: int) -> Any:
            return emulator._c(value, emulator.dtypes.int)

        source = (index & constant(~15)) + constant(share) if shares else index ^ constant(share)
        return source, enabled, valid

    emulator.get_pcode, emulator._dpp16_ctrl = get_pcode, dpp16


def _whole_registers(emulator: Any) -> None:
    """CDNA has no names for upper halves: there an operand from v128 on is a whole register, as any
    other."""
    constant = emulator._c

    def never(value: Any, *more: Any) -> Any:
        return constant(_NEVER if value in _UPPER_HALVES else value, *more)

    def whole(handler: Any) -> Any:
        def compile(instruction: Any, context: Any) -> Any:
            if 16 not in instruction.canonical_op_bits.values():
                return handler(instruction, context)
            emulator._c = never
            try:
                return handler(instruction, context)
            finally:
                emulator._c = constant

        return compile

    for kind, handler in emulator._INST_HANDLERS.items():
        if ".cdna." in kind.__module__ and kind.__name__.startswith(("VOP1", "VOP2", "VOPC")):
            emulator._INST_HANDLERS[kind] = whole(handler)
