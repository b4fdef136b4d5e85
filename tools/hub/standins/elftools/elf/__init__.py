"""The ELF format."""
