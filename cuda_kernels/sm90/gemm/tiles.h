// Which tile of which matrix comes next. All roles of a block, and all blocks of a cluster, count alike.
//
// A cluster's blocks take tiles one below the other: they share their columns of B. Clusters walk GROUP_ROWS rows of such tiles
// together, down a column of the group and on to the next column, so that what they read of A and B stays in L2; matrices come
// one after the other.
#pragma once
#include "sm90/ptx.h"

constexpr int GROUP_ROWS = 8;

// A tile of C: its first row and column; its matrix by number, head and batch.
struct Place { int row, column, matrix, head, batch; };

// The launch's tiles, as the host counts them: a cluster's together are one.
struct TileOrder {
  Divider matrix;  // tiles of a matrix
  Divider group;   // of a whole group of rows
  Divider last;    // rows of the last group, where it is not whole
  Divider heads;
  int rows, total;

  KS_DEVICE Place at(int t, int rank) const {
    const int number = matrix.quotient(t), in_matrix = t - number * matrix.d;
    const int g = group.quotient(in_matrix), in_group = in_matrix - g * group.d;
    const int high = min_of(GROUP_ROWS, rows - g * GROUP_ROWS);
    const int column = high == GROUP_ROWS ? in_group / GROUP_ROWS : last.quotient(in_group);
    const int row = g * GROUP_ROWS + in_group - column * high, batch = heads.quotient(number);
    return {(row * KS_CLUSTER + rank) * KS_BM, column * KS_BN, number, number - batch * heads.d, batch};
  }
};
