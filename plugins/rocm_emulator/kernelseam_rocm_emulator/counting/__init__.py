"""Costs of AMD's kernels by counting: instructions by class, LDS bank conflicts, memory segments.

For a code object alone, `iteration.compiled` counts the hot loop. For a launch on an emulated
device, `emulation.recorded` counts executions, with the addresses that lanes really used. `model`
is the table that converts counts to cycles, with the sources of its entries. It predicts no
seconds.
"""
