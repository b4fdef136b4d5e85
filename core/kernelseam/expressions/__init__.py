"""Users' scores, masks and epilogues: Python functions of one element as expressions, for NumPy
and every kernel, with derivatives and bounds.

A function is traced once (``scores``, ``tracing``, ``captures``, ``values``, ``functions``) into a
graph (``nodes``, ``operations``), which is evaluated in NumPy (``evaluation``), derived
(``derivatives``), bounded over blocks (``bounds``) and lowered to device code (``lowering``, and
``epilogues`` for products). What a mask leaves of blocks may be kept, too (``block_mask``,
``blocks``).
"""
