# C = alpha · A · B, a block a tile of KS_ROWS rows; A through a tensor map. Blocks draw their tiles from a counter.
#include "acme/words.h"


# kernel rows: 128s Q Q Q q q i i i f
def rows(grid, a, b, c, counter, b_row, c_row, M, N, K, alpha):
    drawn = host_array(counter, (1,), (1,), DType.float32).view("int32")
    x, y = mapped(a, DType.float32), host_array(b, (K, N), (b_row, 1), DType.float32)
    z = host_array(c, (M, N), (c_row, 1), DType.float32)
    for _ in range(grid):
        first = int(drawn[0]) * KS_ROWS
        drawn[0] += 1
        z[first : first + KS_ROWS] = alpha * (x[first : first + KS_ROWS] @ y)
