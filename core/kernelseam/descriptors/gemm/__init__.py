"""Batched GEMM: its descriptors, strided and by pointers, and its problem."""
