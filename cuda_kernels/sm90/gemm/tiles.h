// The tile scheduler: the order of tiles over all matrices, the same for all roles of a block and all blocks of a cluster.
//
// The blocks of a cluster take neighbouring tiles along M, which share their columns of B, or with SHARED_A along N, which share
// rows of A. Tiles are rasterised in groups of
// GROUP_ROWS rows of clusters, column by column, so that A and B are reused in L2; matrices follow one another.
#pragma once
#include "generated/config.h"
#include "sm90/ptx.h"

constexpr int GROUP_ROWS = Config::GROUP_ROWS;

// A tile of C: its first row and column; the index, head and batch of its matrix. Of a grouped product the batch is the group;
// begin and end are those of its part of the grouped axis. Of a list the matrix is the group, whose maps have one, and they are its K and M.
// Of a tile that several blocks sum (LastWave), the first of a block's slices of K and how many, 0: all; and of how many blocks before it adds
// up the others', −1: one behind does.
struct TileCoord { int row, column, matrix, head, batch, begin, end, first = 0, slices = 0, before = 0; };

// The launch's tiles, computed on the host; the tiles of a cluster count as one.
struct TileScheduler {
  FastDivmod matrix;  // tiles of a matrix
  FastDivmod group;   // of a whole group of rows
  FastDivmod last;    // rows of the last group, where it is not whole
  FastDivmod heads;
  int rows, total;

  KS_DEVICE TileCoord tile(int t, int rank) const {
    const int number = matrix.quotient(t), in_matrix = t - number * matrix.d;
    const int g = group.quotient(in_matrix), in_group = in_matrix - g * group.d;
    const int high = min_of(GROUP_ROWS, rows - g * GROUP_ROWS);
    const int column = high == GROUP_ROWS ? in_group / GROUP_ROWS : last.quotient(in_group);
    const int row = g * GROUP_ROWS + in_group - column * high, batch = heads.quotient(number);
    if (Config::SHARED_A) return {row * Config::BM, (column * Config::CLUSTER + rank) * Config::BN, number, number - batch * heads.d, batch};
    return {(row * Config::CLUSTER + rank) * Config::BM, column * Config::BN, number, number - batch * heads.d, batch};
  }
};
