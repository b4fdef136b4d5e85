"""Ours beside the peers, row by row: errors checked, times taken in turns, written as JSON, as
tables and as plots.

``rows`` has the words; ``attention``, ``backward``, ``decoding``, ``gemm``, ``projections``,
``host`` and ``compiling`` the rows, the last by ``binaries``, host times also by ``idle_device``
that there is a GPU; ``definitions`` those of a public list of kernels; ``timing`` how times are
taken, on ``clocks``; ``machine`` what they were taken on; ``running`` one run; ``results``,
``tables`` and ``plots`` what is read off it; ``command`` the command line.
"""
