"""The trip count of an inner loop that the compiler did not fully unroll, from its counter: a
scalar register with constant start, step and bound, which is compared itself or with a constant
added."""

from __future__ import annotations

import re

from kernelseam_rocm_emulator.counting.instructions import Instruction
from kernelseam_rocm_emulator.counting.loops import Flow, Loop

MOST = 256
"""The most trips that are simulated; a loop with more counts as one without a constant bound."""

_COMPARE = re.compile(r"s_cmpk?_(eq|lg|lt|le|gt|ge)_[iu]32$")
_HOLDS = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


def trips(graph: Flow, loop: Loop) -> int | None:
    """The loop's trip count each time it is entered; None where it is unknown."""
    body = list(graph.instructions(loop.blocks))
    latch = [x for x in body if x.target == loop.header and x.name.startswith("s_cbranch_scc")]
    if len(latch) != 1:
        return None
    (branch,) = latch
    before = [x for x in body if x.address < branch.address]
    compared = next((x for x in reversed(before) if _COMPARE.match(x.name)), None)
    if compared is None:
        return None
    counter, bound = compared.operands[0], _constant(compared.operands[1])
    if not re.match(r"s\d+$", counter):
        return None
    if bound is not None and compared.name.startswith("s_cmpk") and compared.name.endswith("i32"):
        bound = _signed16(bound)
    # In the block of the comparison: a register that holds a sum may hold others before.
    (block,) = [graph.blocks[b] for b in loop.blocks if compared in graph.blocks[b]]
    written = [x for x in block if x.address < compared.address and _writes(x, counter)]
    sum_of, added = _sum_of(written[-1]) if written else None, 0
    if is_sum := sum_of is not None and sum_of[0] != counter:
        counter, added = sum_of
    steps = [x for x in body if _writes(x, counter)]
    step = _step(steps[0], counter) if len(steps) == 1 else None
    start = _start(graph, loop, counter)
    if bound is None or step is None or start is None:
        return None
    if is_sum and written[-1].address < steps[0].address:  # it is of the value before the step
        added -= step
    compare = _COMPARE.match(compared.name)
    assert compare is not None
    unsigned, taken = compared.name.endswith("u32"), branch.name.endswith("scc1")
    value = start
    for trip in range(1, MOST + 1):
        value += step
        a, b = (_wrapped(value + added, unsigned), _wrapped(bound, unsigned))
        if _HOLDS[compare[1]](a, b) is not taken:
            return trip
    return None


def _start(graph: Flow, loop: Loop, counter: str) -> int | None:
    """The constant in the counter where the loop is entered: from the nearest write to it before
    the header, in the order of addresses."""
    initial: Instruction | None = None
    for block, instructions in sorted(graph.blocks.items()):
        if block < loop.header:
            initial = next((x for x in reversed(instructions) if _writes(x, counter)), initial)
    if initial is None or not re.match(r"s_movk?_[bi]32$", initial.name):
        return None
    value = _constant(initial.operands[1])
    return _signed16(value) if value is not None and initial.name == "s_movk_i32" else value


def _writes(instruction: Instruction, counter: str) -> bool:
    """Whether an instruction's first operand, which is its result, holds the counter."""
    if instruction.name.startswith(("s_cmp", "s_bitcmp", "s_cbranch", "s_store")):
        return False
    operand = instruction.operands[:1]
    if operand == (counter,):
        return True
    pair = re.match(r"s\[(\d+):(\d+)\]$", operand[0]) if operand else None
    return pair is not None and int(pair[1]) <= int(counter.lstrip("s")) <= int(pair[2])


def _step(instruction: Instruction, counter: str) -> int | None:
    if instruction.name in ("s_addk_i32", "s_addk_co_i32"):
        value = _constant(instruction.operands[1])
        return None if value is None else _signed16(value)
    register, value = _sum_of(instruction) or (None, None)
    return value if register == counter else None


def _sum_of(instruction: Instruction) -> tuple[str, int] | None:
    """A scalar register and the constant that an instruction adds to it."""
    if not re.match(r"s_(add|sub)_(co_)?[iu]32$", instruction.name):
        return None
    _, register, operand = instruction.operands
    value = _constant(operand)
    if value is None or not re.match(r"s\d+$", register):
        return None
    return register, -value if instruction.name.startswith("s_sub") else value


def _signed16(value: int) -> int:
    return ((value & 0xFFFF) ^ 0x8000) - 0x8000


def _constant(operand: str) -> int | None:
    try:
        return int(operand, 0)
    except ValueError:
        return None


def _wrapped(value: int, unsigned: bool) -> int:
    word = value & 0xFFFFFFFF
    return word if unsigned else (word ^ 0x80000000) - 0x80000000
