"""pyelftools, as much of it as reads a cubin."""
