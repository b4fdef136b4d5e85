"""The command line. The only part of the package that prints."""
