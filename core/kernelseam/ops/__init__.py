"""The calls a user makes on arrays, one short file an operation."""
