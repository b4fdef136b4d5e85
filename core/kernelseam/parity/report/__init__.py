"""What became of a run: counts, and pages of them."""
