"""Parity: the oracle, its bounds, the cases, and how an implementation is held against them."""

from kernelseam.parity.check import Verdict, attention, gemm

__all__ = ["Verdict", "attention", "gemm"]
