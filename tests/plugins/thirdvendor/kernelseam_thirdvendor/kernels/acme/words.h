# The words of Acme's language, which is Python: memory by address, and what a tensor map says.
import struct

from kernelseam.contract import host_array
from kernelseam.dtypes import DType


def mapped(tensor_map, dtype):
    """The matrix that a tensor map walks."""
    address, columns, rows, row = struct.unpack_from("<4Q", tensor_map)
    return host_array(address, (rows, columns), (row, 1), dtype)
