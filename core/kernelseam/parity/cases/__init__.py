"""The lists of cases, by operation."""
