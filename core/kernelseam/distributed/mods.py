"""Scores and masks that users write, over parts of the whole: a call counts queries, keys and heads
from its own first, the functions from the whole's, or from those of a document."""

from __future__ import annotations

from typing import Any

from kernelseam.distributed.plan import Mask, Part
from kernelseam.errors import InvalidValue
from kernelseam.expressions.moved import moved
from kernelseam.expressions.scores import (
    MaskMod,
    ScoreExpression,
    ScoreMod,
    score_expression,
)
from kernelseam.frozen import dataclass


@dataclass(frozen=True, eq=False)
class Mods:
    """An expression over the whole, and a call's first head where ranks share heads."""

    expression: ScoreExpression
    mask: Mask
    head: int | None = None

    def of(self, part: Part) -> ScoreExpression:
        """The expression as a part's call has it."""
        ahead = {} if self.head is None else {"h": self.head}
        q_len, kv_len = self.mask.rows_q, self.mask.rows_k
        first_query, first_key = kv_len - q_len, 0
        if part.document is not None:
            assert self.mask.documents is not None
            ahead["b"] = part.document
            if part.offsets is not None:  # rows and lengths of whole documents are the call's own
                return moved(self.expression, ahead, {})
            first_key, stop = self.mask.documents[part.document : part.document + 2]
            first_query, q_len, kv_len = first_key, stop - first_key, stop - first_key
        ahead |= {"q_idx": part.first_query - first_query, "kv_idx": part.first_key - first_key}
        return moved(self.expression, ahead, {"q_len": q_len, "kv_len": kv_len})


def checked_mods(
    score_mod: ScoreMod | None, mask_mod: MaskMod | None, beside: dict[str, Any]
) -> ScoreExpression | None:
    """The functions as one expression, None where there is none. ``beside``: the call's other
    operands. Raises InvalidValue for what ranks cannot compute of parts."""
    if score_mod is mask_mod is None:
        return None
    expression = score_expression(score_mod, mask_mod)
    if any(getattr(x, "requires_grad", False) for x in expression.arrays):
        raise InvalidValue(
            "score_mod",
            "captures a tensor that wants a gradient",
            "over several ranks there is none by what it captures",
            "Detach the tensor, or call kernelseam.interop.torch.attention on one device",
        )
    s = expression.structure
    if s.has_score and beside.get("alibi_slopes") is not None:
        raise InvalidValue(
            "alibi_slopes",
            "given",
            "is added to parts of scores apart, and score_mod takes whole scores",
            "Add slopes[h] * -abs(q_idx - kv_idx) in the score_mod",
        )
    if beside.get("kv_lengths") is not None and {"q_len", "kv_len"} & (
        s.score.reads | s.visible.reads
    ):
        raise InvalidValue(
            "kv_lengths",
            "given",
            "are of entries, and a function that reads q_len or kv_len takes those of the whole",
            "Capture the lengths in the function: lengths[b]",
        )
    return expression


def in_words(expression: ScoreExpression | None) -> dict[str, object]:
    """What every rank must have alike."""
    if expression is None:
        return {}
    arrays = [tuple(x.shape) for x in expression.arrays]
    key = expression.structure.key
    return {"score_mod, mask_mod": f"{expression}; {expression.numbers}, {arrays}, {key}"}
