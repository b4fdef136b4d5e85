"""The cases as data: a dataclass for each operation, and lists of its cases."""
