// Types and sizes of decode.h: tiles of queries, keys and values, and the rings of a block's warps in shared memory.
#pragma once
#include "attention/decode_state.h"
#include "attention/fp8.h"

typedef Config::T T;
typedef Config::OUT Out;
typedef Engine<T> E;
typedef Engine<T, KV> EV;  // of products with keys and values as they are stored

constexpr int WARPS = Config::WARPS, ROWS = Config::ROWS, BN = Config::BN, STAGES = Config::STAGES, THREADS = WARP * WARPS;
constexpr int DQ = (Config::DQK + 15) / 16 * 16, DO = (Config::DV + 15) / 16 * 16;
constexpr int AHEAD = COPY_THROUGH_REGISTERS ? 1 : STAGES - 1;
typedef Engine<T, Query>::Tile<ROWS, DQ, true> TileQ;
typedef EV::Tile<BN, DQ, true> TileK;
typedef EV::Tile<DO, BN, false> TileV;
typedef PlainTile<float, ROWS, DO> TileO;
constexpr int GROUPS = DO / COLUMNS;
constexpr int COPIED_BYTES = TileK::BYTES + TileV::BYTES;
constexpr int STAGE_BYTES = COPIED_BYTES > TileO::BYTES ? COPIED_BYTES : TileO::BYTES;
constexpr int LOOK_UPS = (BN + WARP - 1) / WARP;
constexpr int CONTROL_BYTES = 8 * ROWS + 16 * BN + 16;  // of a warp
static_assert(TileQ::BYTES + WARPS * (STAGES * STAGE_BYTES + CONTROL_BYTES) <= Config::SHARED_BYTES, "the tiles fit");
static_assert(STAGES >= 2 || COPY_THROUGH_REGISTERS, "a copy that is in flight needs a stage of its own");
static_assert(E::operand_bytes<ROWS, BN>() == 0, "a matrix engine keeps operands in registers");
