"""Libraries that are extended: what each differentiates. A module of one's own imports its library
only where it is used.
"""
