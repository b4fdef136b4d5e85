"""Arrays of any library as ``ArrayInfo`` views; torch tensors are read without importing torch."""

from kernelseam.arrays.views import describe, mark_written, runtime_of, same_device

__all__ = ["describe", "runtime_of", "same_device", "mark_written"]
