"""Problems with their operands: extents, memory layouts and seeded values, written down as data.

The command line, the parity matrix and the tests are made of them.
"""
