"""How much of a large result the oracle computes."""

from __future__ import annotations

ORACLE_OPERATIONS = 2e9
"""How much the oracle computes; of a larger problem it computes some rows."""

ORACLE_ROWS = 20_000


def sampled(operations_per_row: int) -> int:
    """How many rows the oracle may compute."""
    return int(min(max(ORACLE_OPERATIONS / max(operations_per_row, 1), 64), ORACLE_ROWS))
