"""Arrays of any library as views, and torch's tensors read without importing torch."""

from kernelseam.arrays.views import describe, runtime_of, same_device, tell_written

__all__ = ["describe", "runtime_of", "same_device", "tell_written"]
