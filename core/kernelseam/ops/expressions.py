"""Users' functions as a call on arrays hands them on: the text of their expression and the numbers
that they capture behind its options, arrays among its arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernelseam.contract import ArrayInfo
from kernelseam.descriptors.common.captured import captured
from kernelseam.epilogues import Epilogue, epilogue_expression
from kernelseam.expressions.block_mask import BlockMask
from kernelseam.expressions.epilogues import EpilogueExpression, epilogue_of, epilogue_text
from kernelseam.expressions.reductions import reduction, reduction_operands
from kernelseam.expressions.scores import MaskMod, ScoreExpression, ScoreMod, score_expression
from kernelseam.expressions.text import structure_of, text_of
from kernelseam.torch_dispatch import operator_of


def with_expression(
    options: tuple[Any, ...],
    arrays: dict[str, Any],
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | None,
    block_mask: BlockMask | Any,
) -> tuple[Any, ...]:
    """The options with the functions' expression; what they capture is added to the arrays."""
    expression = score_expression(score_mod, mask_mod, block_mask)
    arrays |= {captured(i): x for i, x in enumerate(expression.arrays)}
    return (*options, text_of(expression.structure), expression.numbers)


def _compiled(options: tuple[Any, ...], arrays: dict[str, Any], *mods: Any) -> Any:
    return operator_of("with_expression")(options, arrays, *mods)


with_expression._torchdynamo_inline = _compiled  # type: ignore[attr-defined]


def with_epilogue(
    options: tuple[Any, ...], arrays: dict[str, Any], epilogue: Epilogue
) -> tuple[Any, ...]:
    """The options with an epilogue's expression; what it captures is added to the arrays."""
    expression = epilogue_expression(epilogue)
    arrays |= {captured(i): x for i, x in enumerate(expression.arrays)}
    arrays |= reduction_operands(expression)
    return (*options, epilogue_text(expression.structure), expression.numbers)


def _compiled_epilogue(options: tuple[Any, ...], arrays: dict[str, Any], epilogue: Any) -> Any:
    return operator_of("with_epilogue")(options, arrays, epilogue)


with_epilogue._torchdynamo_inline = _compiled_epilogue  # type: ignore[attr-defined]


def epilogue_in(
    options: tuple[Any, ...], infos: Mapping[str, ArrayInfo]
) -> EpilogueExpression | None:
    """What ``with_epilogue`` added, over views of the arrays; None where it added nothing."""
    if not options:
        return None
    text, numbers = options
    arrays, results = (tuple(of(infos).values()) for of in (captured_in, reductions_in))
    return EpilogueExpression(epilogue_of(text), numbers, arrays, results=results)


def reductions_in(infos: Mapping[str, ArrayInfo]) -> dict[str, ArrayInfo]:
    """Those among a call's arrays that an epilogue's sums and maxima are written to."""
    return {n: x for n, x in infos.items() if n.startswith(reduction(0)[:-1])}


def captured_in(infos: Mapping[str, ArrayInfo]) -> dict[str, ArrayInfo]:
    """The captured ones among a call's arrays."""
    return {n: x for n, x in infos.items() if n.startswith(captured(0)[:-1])}


def expression_of(
    options: tuple[Any, ...], infos: Mapping[str, ArrayInfo]
) -> ScoreExpression | None:
    """What ``with_expression`` added, over views of the arrays; None where it added nothing."""
    if not options:
        return None
    text, numbers = options
    return ScoreExpression(structure_of(text), numbers, tuple(captured_in(infos).values()))
