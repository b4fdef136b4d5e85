"""Operands of a case: seeded values and their memory."""
