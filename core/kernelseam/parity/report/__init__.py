"""The report of a run: counts, and pages made of them."""
