"""AMD instructions, parsed from the disassembler's text: their class and their memory accesses."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from kernelseam.forking import cached_property


class Class(StrEnum):
    """The classes that the model of a compute unit distinguishes."""

    MATRIX = "matrix"
    """MFMA and WMMA."""
    VECTOR = "vector"
    TRANSCENDENTAL = "transcendental"
    MOVE = "accumulator move"
    """A vector instruction that moves a register between VGPRs and AGPRs."""
    SCALAR = "scalar"
    """Scalar arithmetic and branches."""
    SCALAR_LOAD = "scalar load"
    WAIT = "wait"
    BARRIER = "barrier"
    HINT = "hint"
    """s_nop, s_delay_alu and others that compute nothing."""
    LDS_READ = "LDS read"
    LDS_WRITE = "LDS write"
    """Atomics on LDS included."""
    LDS_LANES = "LDS cross-lane"
    """Lane permutations, which use LDS's crossbar but no bank."""
    LOAD = "load"
    """Loads from global memory, those to LDS included."""
    STORE = "store"
    ATOMIC = "atomic"
    CACHE = "cache control"
    SCRATCH = "scratch"


VECTOR = frozenset({Class.VECTOR, Class.TRANSCENDENTAL, Class.MOVE})
"""Classes that the vector ALU executes, without matrix instructions."""
LDS = frozenset({Class.LDS_READ, Class.LDS_WRITE, Class.LDS_LANES})
MEMORY = frozenset({Class.LOAD, Class.STORE, Class.ATOMIC})

_CLASSES = tuple(
    (re.compile(pattern), kind)
    for pattern, kind in (
        (r"v_s?w?mf?mac?_", Class.MATRIX),
        (r"v_(s_)?(exp|log|rcp|rsq|sqrt|sin|cos)_", Class.TRANSCENDENTAL),
        (r"v_accvgpr_", Class.MOVE),
        (r"v_", Class.VECTOR),
        (r"ds_\w*(permute|swizzle)", Class.LDS_LANES),
        (r"ds_(read|load)", Class.LDS_READ),
        (r"ds_", Class.LDS_WRITE),
        (r"scratch_", Class.SCRATCH),
        (r"(global|flat|buffer)_(inv|wb|gl[01]|wbl2)", Class.CACHE),
        (r"(global|flat|buffer)_load", Class.LOAD),
        (r"(global|flat|buffer)_store", Class.STORE),
        (r"(global|flat|buffer)_", Class.ATOMIC),
        (r"s_wait", Class.WAIT),
        (r"s_barrier", Class.BARRIER),
        (r"s_(nop|delay_alu|sleep|clause|setprio|sethalt|set_inst|inst_prefetch)", Class.HINT),
        (r"s_(buffer_)?load|s_dcache|s_memtime|s_prefetch", Class.SCALAR_LOAD),
        (r"s_", Class.SCALAR),
    )
)
VCC = 106
"""The number of the scalar register with this name."""
_ENCODING = re.compile(r"(_e32|_e64|_dpp8?|_sdwa|_e64_dpp8?)+$")
_NAMED_WIDTHS = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4} | {
    f"{sign}{name}": width for sign in ("", "s", "u") for name, width in (("short", 2), ("byte", 1))
}


@dataclass(frozen=True)
class Instruction:
    """One instruction: its address in the code object and its text, as the disassembler gives it
    (simm16 of a branch as a number)."""

    address: int
    text: str

    @cached_property
    def name(self) -> str:
        """The mnemonic without the suffix of its encoding."""
        return _ENCODING.sub("", self.text.split(None, 1)[0])

    @cached_property
    def kind(self) -> Class:
        return classify(self.name)

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """The operands as written, without modifiers."""
        _, _, rest = self.text.partition(" ")
        return tuple(x.split()[0] for x in rest.split(",") if x.split())

    def modifier(self, name: str) -> int:
        """A modifier's value, for example 16 of offset:16; 0 if it is absent."""
        match = re.search(rf"\b{name}:(-?(?:0x[0-9a-f]+|\d+))", self.text)
        return int(match[1], 0) if match else 0

    @cached_property
    def target(self) -> int | None:
        """The target of a direct branch, by the ISA's rule: 4 bytes on, plus simm16 words."""
        if not re.match(r"s_c?branch", self.name) or not self.operands:
            return None
        word = int(self.operands[0], 0)
        return self.address + 4 + 4 * ((word & 0xFFFF ^ 0x8000) - 0x8000)

    @property
    def falls_through(self) -> bool:
        """Whether the next instruction may follow."""
        return not re.match(r"s_(branch|endpgm|setpc)", self.name)


def classify(name: str) -> Class:
    """The class of a mnemonic. Raises ValueError for one that no class knows."""
    for pattern, kind in _CLASSES:
        if pattern.match(name):
            return kind
    raise ValueError(f"{name} is of no class that is counted")


def shape(name: str) -> str:
    """A matrix instruction's shape with its types, as 32x32x8_f16."""
    match = re.search(r"\d+x\d+x\d+_?\w*", name)
    return match[0] if match else name


def width(name: str) -> int:
    """Bytes per lane of one access of a memory instruction."""
    for part in name.split("_")[1:]:
        if part in _NAMED_WIDTHS:
            return _NAMED_WIDTHS[part]
        if match := re.fullmatch(r"[buif](8|16|32|64|96|128)", part):
            return int(match[1]) // 8
    return 4


@dataclass(frozen=True)
class Access:
    """How an instruction addresses memory: enough to find every lane's addresses in a wave's
    registers."""

    kind: Class
    width: int
    """Bytes per lane."""
    register: int = -1
    """The vector register with the address or the offset (of 64-bit addresses, the first);
    -1: none."""
    base: int = -1
    """The first of the scalar registers with a 64-bit base; -1: the address is the vectors'."""
    offsets: tuple[int, ...] = (0,)
    """Constants in bytes: one access each."""
    to_lds: bool = False
    """Whether loaded data goes to LDS, lane after lane, instead of to registers."""


def access(instruction: Instruction) -> Access | None:
    """How an instruction addresses LDS or global memory; None where it does not."""
    kind = instruction.kind
    if kind in (Class.LDS_READ, Class.LDS_WRITE):
        return _lds(instruction, kind)
    return _memory(instruction, kind) if kind in MEMORY else None


def accesses(instructions: Iterable[Instruction]) -> Mapping[int, Access]:
    """Instruction address → access, for instructions that have one."""
    memory_accesses = ((x.address, access(x)) for x in instructions)
    return {address: a for address, a in memory_accesses if a is not None}


_TWO = re.compile(r"ds_(read2|write2|load_2addr|store_2addr)(_?st(?:ride)?64)?")


def _lds(instruction: Instruction, kind: Class) -> Access:
    name, operands = instruction.name, instruction.operands
    # With a result, the address is the second operand: reads, and atomics that return a value.
    second = kind is Class.LDS_READ or "_rtn" in name
    size = width(name.replace("2addr_", "").replace("stride64_", "").replace("st64_", "_"))
    if two := _TWO.match(name):
        step = size * (64 if two[2] else 1)
        offsets = tuple(instruction.modifier(f"offset{i}") * step for i in (0, 1))
    else:
        offsets = (instruction.modifier("offset"),)
    return Access(kind, size, _register(operands[int(second)]), offsets=offsets)


def _memory(instruction: Instruction, kind: Class) -> Access:
    name, operands = instruction.name, instruction.operands
    size, offsets = width(name), (instruction.modifier("offset"),)
    to_lds = "_lds" in name or bool(re.search(r"\blds\b", instruction.text))
    returns = kind is Class.ATOMIC and bool(
        re.search(r"\b(sc0|glc|th:\S*RETURN)", instruction.text)
    )
    first = int((kind is Class.LOAD and not to_lds) or returns)
    if name.startswith("buffer"):
        # vdata, vaddr, srsrc, soffset; loads to LDS have no vdata.
        at = 0 if to_lds else 1
        vector = _register(operands[at]) if "offen" in instruction.text else -1
        return Access(kind, size, vector, _register(operands[at + 1]), offsets, to_lds)
    base = _register(operands[-1]) if re.match(r"s\[|vcc", operands[-1]) else -1
    return Access(kind, size, _register(operands[first]), base, offsets, to_lds)


def _register(operand: str) -> int:
    """The number of a register, or of the first of a range; -1 for anything else."""
    if operand == "vcc":
        return VCC
    match = re.search(r"\d+", operand)
    return int(match[0]) if match else -1
