"""Refusals of a descriptor with the caller's names for operands and extents."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field

from kernelseam.errors import InvalidValue
from kernelseam.forking import cached_property
from kernelseam.frozen import dataclass

_STRIDE = r"stride_([a-z_]+?)_(part|batch|page|head|row|column)(\[\d+\])?"
_SHORT = {"alibi": "alibi_slopes", "table": "block_table", "slots": "slot_mapping"}
"""Short names of operands in stride fields."""


@dataclass(frozen=True)
class Wording:
    """The names of a call that differ from the descriptor's."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Operand, or word of a rule → the caller's name; of a list "A_ptrs[3]" may have its own."""
    extents: Mapping[str, str] = field(default_factory=dict)
    """Field that is read from an array → the operand of that array."""

    @cached_property
    def _words(self) -> re.Pattern[str]:
        names = {re.sub(r"\[\d+\]$", "", n) for n in self.names}
        longest_first = sorted(map(re.escape, names), key=len, reverse=True)
        return re.compile(rf"\b({'|'.join(longest_first) or '(?!)'})(_ptrs)?(\[\d+\])?(?!\w)")

    def reworded(self, error: InvalidValue) -> InvalidValue:
        """The refusal with the caller's names."""
        name, value = error.field, error.value
        if stride := re.fullmatch(_STRIDE, name):
            name = self._operand(stride[1], stride[3])
            value = f"{stride[2]} stride {value}"
        elif name in self.extents:
            name, value = self._operand(self.extents[name]), f"{name} {value}"
        elif (word := self._words.match(name)) is not None:
            name = self._word(word) + name[word.end() :]
        rule, remedy = self._text(error.rule), self._text(error.remedy)
        return type(error)(name, value, rule, remedy)

    def _word(self, found: re.Match[str]) -> str:
        if (own := self.names.get(found[0])) is not None:
            return own
        name, of_list, entry = self.names.get(found[1]), found[2], found[3] or ""
        return found[0] if name is None else name + ("" if of_list else entry)

    def _operand(self, name: str, entry: str | None = None) -> str:
        """The caller's name of an operand, or of an entry of a list; stride fields are in lower
        case."""
        name = _SHORT.get(name, name)
        if entry is not None and (own := self.names.get(f"{name.upper()}_ptrs{entry}")):
            return own
        return self.names.get(name) or self.names.get(name.upper(), name)

    def _text(self, text: str) -> str:
        text = re.sub(
            rf"\b{_STRIDE}(?!\w)",
            lambda m: f"the {m[2]} stride of {self._operand(m[1], m[3])}",
            text,
        )
        return self._words.sub(self._word, text.removesuffix(" (0: it will be bound)"))
