// Where the sums of dq and the values of query rows lie: in the workspace, by blocks of STEP queries. Nobody but the three kernels
// of the gradients knows the order.
//
// A block of sums is STEP × QK_COLUMNS float32 in pieces of 64 rows and 64 columns, the last of what is left of these, and a piece is the fragments of one
// warpgroup: 16 rows a warp, 4 KB, of which every 8 columns are 512 bytes, a lane's 16 beside the next's. So each reduction of a
// warp covers whole lines.
// Blocks are numbered head by head; a dense entry of the batch has query_blocks of them for each head. A packed sequence that
// begins at row r of all and has n rows takes ⌈n / STEP⌉ from number ⌊r / STEP⌋ + its own number on; the next one's begin
// behind them: ⌊(r + n) / STEP⌋ + 1 ≥ ⌊r / STEP⌋ + ⌈n / STEP⌉.
//
// Extra memory: 4·QK_COLUMNS bytes a query and head for the sums, 8 for the row values, and of each piece's rows 4 for the semaphore of an
// order.
#pragma once
#include "attention/sequences.h"

// Head dims, and the columns that are multiplied, multiples of 16 of which those beyond the head are zeros: a tensor map's rows end with
// the head, so TMA fills tiles with zeros behind it.
constexpr int DQK = Config::DQK, DV = Config::DV, QK_COLUMNS = Config::QK_COLUMNS, V_COLUMNS = Config::V_COLUMNS, STEP = Config::STEP;
static_assert(DQK <= QK_COLUMNS && DV <= V_COLUMNS && QK_COLUMNS % 16 == 0 && V_COLUMNS % 16 == 0);
constexpr int PIECE = 64 * (QK_COLUMNS < 64 ? QK_COLUMNS : 64);  // float32 of a whole piece
constexpr int PANELS = (QK_COLUMNS + 63) / 64, PIECES = STEP / 64 * PANELS;  // of 64 columns or what is left of them, and of a block
KS_DEVICE constexpr int piece_columns(int panel) { return QK_COLUMNS - panel * 64 < 64 ? QK_COLUMNS - panel * 64 : 64; }

// The blocks of a launch, numbered; `query_blocks`: of the longest sequence; `head_blocks`: from a head to the next.
struct SumBlocks {
  int query_blocks, head_blocks, num_heads;
  KS_DEVICE int first(int batch, int q_first) const {
    return Config::Q_VIEW == PACKED ? q_first / STEP + batch : batch * num_heads * head_blocks;
  }
};
