"""What AMD's kernels cost, by count: instructions by class, LDS bank conflicts, segments of memory.

Of a code object alone, `iteration.compiled` counts the hot loop. Of a launch on an emulated device,
`recording.recorded` counts what ran: executions, and the addresses that lanes really used. `model`
is the table that turns counts into cycles, with the sources of its entries. Never a second.
"""
