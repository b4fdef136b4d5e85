"""Raises while it is imported."""

raise RuntimeError("the vendor's library is damaged")
