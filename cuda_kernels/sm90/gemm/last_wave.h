// The tiles of a last wave of few, each cut into parts, which blocks without a tile sum (tail_sums.h). `step`: blocks, or clusters.
#pragma once
#include "gemm/groups.h"
#include "sm90/gemm/tiles.h"

constexpr bool TAIL = Config::TAIL_PARTS > 1 && (Config::GROUPED == 0 || Config::GROUPED == ALONG_M);  // such tiles may be cut
constexpr int FEWEST_SLICES = 16;                                                                      // of a part

struct LastWave {
  int whole, tail = 0, parts = 0, total;  // tiles before the last wave, and of it; the parts of each; all that blocks take

  KS_DEVICE LastWave(int tiles, int step, int slices) : whole(tiles), total(tiles) {
    if constexpr (TAIL) {
      tail = tiles % step;
      if (tail) parts = min_of(min_of(step / tail, slices / FEWEST_SLICES), Config::TAIL_PARTS);
      if (parts > 1) whole = tiles - tail, total = whole + tail * parts;
    }
  }
  struct Place { int tile, part, parts, number; };
  KS_DEVICE Place place(int t) const {
    if (!TAIL || t < whole) return {t, 0, 0, 0};
    const int part = (t - whole) / tail, tile = t - part * tail;
    return {tile, part, parts, tile - whole};
  }
};

struct TailScheduler : LastWave {
  const TileScheduler& order;

  KS_DEVICE TailScheduler(const TileScheduler& order, int step, int slices) : LastWave(order.total, step, slices), order(order) {}
  KS_DEVICE TileCoord tile(int t, int rank) const {
    const Place at = place(t);
    TileCoord p = order.tile(at.tile, rank);
    p.part = at.part, p.parts = at.parts, p.number = at.number;
    return p;
  }
};
