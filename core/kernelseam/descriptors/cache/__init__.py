"""Rows of k and v between tokens and the pages of a cache."""
