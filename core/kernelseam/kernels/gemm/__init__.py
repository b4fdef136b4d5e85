"""Batched GEMM for all vendors: gemm.h and its kernel definition."""
