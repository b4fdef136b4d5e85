"""Numbers that record what is computed with them, so that a computation over numbers becomes a
function of them.

A `Trace` gives symbols with values. Arithmetic on symbols makes symbols and is recorded; whatever
turns a symbol into a plain number, a truth value, a hash or text is recorded as a condition: the
computation went one way because of it. So the function that is made of a trace (`Trace.code`) does
the same arithmetic on other numbers, and says None where they do not fulfil its conditions.

Code that is traced needs nothing but operators: ``isinstance(x, int)`` holds for a symbol of an
int. ``least`` and ``most`` stand for ``min`` and ``max``, which would make a condition of which is
smaller; ``recorded`` makes one step of a whole function.
"""

from kernelseam.symbolic.functions import as_float, least, most, recorded
from kernelseam.symbolic.symbol import Symbol, Untraceable
from kernelseam.symbolic.trace import Facts, Trace

__all__ = ["Facts", "Symbol", "Trace", "Untraceable", "as_float", "least", "most", "recorded"]
