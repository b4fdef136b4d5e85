"""Judges from outside: problems of other projects' tests, by their names, shapes and formulas,
computed by kernelseam on NumPy and held against float64."""
