"""Fused attention for all vendors: forward.h and its kernel definition."""
