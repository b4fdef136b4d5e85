"""Checks of operands' addresses before a launch: null, misaligned, overlapping."""

from __future__ import annotations

from kernelseam.contract import OperandRule
from kernelseam.descriptors.common.protocol import Resolved
from kernelseam.errors import InvalidValue
from kernelseam.overlap import proven_overlap


def check_operands(rules: tuple[OperandRule, ...], resolved: Resolved) -> None:
    """Raise InvalidValue, naming the operand, for null, misaligned and overlapping addresses."""
    check_addresses(rules, resolved)
    check_overlap(rules, resolved)


def check_addresses(rules: tuple[OperandRule, ...], resolved: Resolved) -> None:
    """Raise InvalidValue, naming the operand, for null and misaligned addresses, and for views that
    begin elsewhere than what they are views of."""
    for rule in rules:
        pointer = resolved.pointers.get(rule.name)
        if pointer is None or (pointer == 0 and rule.span):
            if pointer is None and (rule.optional or not rule.span):
                continue
            raise InvalidValue(
                rule.name,
                "null" if pointer == 0 else "missing",
                "must be the address of memory on the device",
                f"Give {rule.name} in the descriptor or to bind",
            )
        if rule.span and pointer % rule.alignment:
            raise InvalidValue(
                rule.name,
                hex(pointer),
                f"must be a multiple of {rule.alignment} bytes",
                "Align the array"
                if rule.dtype is None or rule.alignment == rule.dtype.itemsize
                else "Align the array, or put its address into the descriptor before planning, "
                "so that a kernel "
                "without wide accesses is planned",
            )
        if rule.same_as and pointer != resolved.pointers.get(rule.same_as):
            raise InvalidValue(
                rule.name,
                hex(pointer),
                f"must be the address of {rule.same_as}, of which it is a view",
                f"Give a view of {rule.same_as}, or plan without latent",
            )


def check_overlap(rules: tuple[OperandRule, ...], resolved: Resolved) -> None:
    """Raise InvalidValue, naming the operand, where what is written overlaps another operand."""
    for out in rules:
        if (
            not out.written
            or not out.span
            or out.dtype is None
            or out.name not in resolved.pointers
        ):
            continue
        for other in rules:
            if (
                other is out
                or not other.span
                or other.dtype is None
                or other.name not in resolved.pointers
            ):
                continue
            same = resolved.pointers[out.name] == resolved.pointers[other.name]
            if same and other.may_alias == out.name and other.same_layout_as(out):
                continue
            if proven_overlap(
                resolved.pointers[out.name], out, resolved.pointers[other.name], other
            ):
                raise InvalidValue(
                    out.name,
                    hex(resolved.pointers[out.name]),
                    f"overlaps {other.name}",
                    "Give the output memory of its own",
                )
