// The tiles of a last wave of few are cut along K into as many parts as there are blocks for (tail_sums.h adds up). Blocks that have tiles
// beside each other sum the same slices at the same time, so that L2 serves them at once: 128×128 tiles whose parts begin anywhere took 1.7
// times as long a slice (H200). Where tiles share no B, being a single row of them, or the power limit bounds all, being many waves, blocks
// may sum as many slices each (stream-K: Osama et al. 2023, arXiv:2301.03598): then a block may have the ends of two tiles.
#pragma once
#include "gemm/groups.h"
#include "sm90/gemm/tiles.h"

constexpr int FEWEST_SLICES = Config::TAIL_SLICES;  // of a part; 0: no tile is cut
constexpr bool TAIL = FEWEST_SLICES > 0 && (Config::GROUPED == 0 || Config::GROUPED == ALONG_M);
constexpr int MANY_WAVES = 4;
constexpr int MOST_SLICES = 1 << 20;  // of which all tiles' have 32-bit numbers

// Of the slices of all tiles, one tile's behind the other's, each block has `each`, and a tile's first is `apart` behind that of the tile before.
// step: blocks.
struct Cut {
  int tiles = 0, each = 1, apart = 1;

  KS_DEVICE Cut(int all, int rows, int step, int slices) {
    const int rest = all % step;
    if (rest == 0 || slices > MOST_SLICES) return;
    const int parts = min_of(step / rest, slices / FEWEST_SLICES);
    if (parts > 1) {
      tiles = rest, each = divide_up(slices, parts), apart = divide_up(slices, each) * each;
    } else if ((rows == 1 || all >= MANY_WAVES * step) && slices >= FEWEST_SLICES) {
      tiles = rest, each = max_of(divide_up(rest * slices, step), FEWEST_SLICES), apart = slices;
    }
  }
};

// number: which block this is.
struct LastWave {
  int tiles, rows, step, number, slices;  // rows of tiles; slices of K
  int whole, total;                       // tiles that are not cut; the end of what this block takes

  KS_DEVICE LastWave(int tiles, int rows, int step, int number, int slices)
      : tiles(tiles), rows(rows), step(step), number(number), slices(slices), whole(tiles), total(tiles) {
    if constexpr (TAIL) {
      const Cut cut(tiles, rows, step, slices);
      const int begin = number * cut.each, end = min_of(begin + cut.each, cut.tiles * cut.apart);
      total = whole -= cut.tiles;
      if (begin < end) total += step * ((end - 1) / cut.apart - begin / cut.apart + 1);
    }
  }
  // Of the t-th tile that is taken: its number, the slices of it that this block has (0: all), and how many blocks before have others; −1: one
  // behind adds up. What a block has of the later of two tiles comes first: the block behind waits for it.
  struct Place { int tile, first, slices, before; };
  KS_DEVICE Place place(int t) const {
    if (!TAIL || t < whole) return {t, 0, 0, 0};
    const Cut cut(tiles, rows, step, slices);  // again, as it would be kept from tile to tile
    const int begin = number * cut.each, end = min_of(begin + cut.each, cut.tiles * cut.apart);
    const int tile = (end - 1) / cut.apart - (t - whole) / step, origin = tile * cut.apart;
    const int first = max_of(begin - origin, 0), last = min_of(end - origin, slices);
    return {whole + tile, first, last - first, last == slices ? number - origin / cut.each : -1};
  }
};
KS_DEVICE int number_of(const LastWave& s) { return s.number; }
int number_of(const TileScheduler&);  // never called

struct TailScheduler : LastWave {
  const TileScheduler& order;

  KS_DEVICE TailScheduler(const TileScheduler& order, int step, int number, int slices)
      : LastWave(order.total, order.rows, step, number, slices), order(order) {}
  KS_DEVICE TileCoord tile(int t, int rank) const {
    const Place at = place(t);
    TileCoord p = order.tile(at.tile, rank);
    p.first = at.first, p.slices = at.slices, p.before = at.before;
    return p;
  }
};
