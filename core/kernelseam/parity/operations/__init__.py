"""What the matrix asks of each operation: cases, operands, descriptor, verdict."""
