"""The NumPy implementation: in blocks, with BLAS inside. It enters through the same hooks as every
vendor."""
