"""Operands of a case: seeded values, and where they lie."""
