"""``torch.ops.kernelseam``: the functions as operators that torch compiles, exports, transforms and
differentiates. Imports torch; each module defines the operators of one operation when it is
imported, at the latest where ``torch.ops.kernelseam`` is asked for one.
"""

from kernelseam.interop.torch_library import namespace as namespace
