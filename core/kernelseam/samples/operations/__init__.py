"""Of each operation: operands, descriptor and verdict."""
