"""The operations of the matrix: cases, operands, descriptor and verdict of each."""
