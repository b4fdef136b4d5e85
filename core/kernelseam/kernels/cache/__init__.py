"""The kernel of paged caches and its definition."""
