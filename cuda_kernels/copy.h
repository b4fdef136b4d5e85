// Copies from global to shared memory: cp.async, on sm_75 loads and stores.
#pragma once

KS_DEVICE unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

#if __CUDA_ARCH__ >= 800
KS_DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template<int PENDING> KS_DEVICE void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
#else  // a copy has ended when it returns, and the block's next barrier shows it
KS_DEVICE void copies_commit() {}
template<int PENDING> KS_DEVICE void copies_wait() {}
#endif

// The copy of one tile by THREADS threads. VECTOR = 16: every row starts 16-byte aligned; else elements are loaded one by one.
// EXACT: the tile is as wide as the matrix, so that no column is out of bounds. BRIEF: for less code, one path for
// tiles inside the matrix and at its end.
template<class Tile, int THREADS, int VECTOR, bool EXACT, bool BRIEF = false> struct Copy {
  typedef typename Tile::T T;
  typedef Share<Tile, THREADS> Mine;
  static constexpr int V = Mine::V;

  template<class View> KS_DEVICE void fetch(Tile t, View v, int row0, int row_end, int col0, int col_end) {
    const int r0 = Mine::row(), c = Mine::column(), left = col_end - col0 - c;
    auto walk = v.template walk<Mine::STEP>(row0 + r0);
    const unsigned to = shared_address(&t.chunk(r0, c));
    // The shared address of round i. Layouts' masks are exclusive ors of bits of the row, and where STEP is a power of two r0 has others
    // of these than i · STEP: no round needs a register of its own.
    auto place = [&](int i) {
      const int row = i * Mine::STEP;
      if constexpr ((Mine::STEP & (Mine::STEP - 1)) != 0 && Mine::STEP % Tile::Layout::PERIOD != 0)
        return shared_address(&t.chunk(r0 + row, c));
      else return (to ^ Tile::Layout::mask(row) * 16) + row * Tile::COLS * (int)sizeof(T);
    };
#if __CUDA_ARCH__ >= 800
    if constexpr (BRIEF && VECTOR == 16 && EXACT) {
      const T* at[Mine::ROUNDS];  // all at once: no load passes a copy
#pragma unroll
      for (int i = 0; i < Mine::ROUNDS; i++, walk.next()) at[i] = walk.at + col0 + c;
#pragma unroll
      for (int i = 0; i < Mine::ROUNDS; i++)
        if (Mine::takes(i)) {
          const int bytes = row0 + r0 + i * Mine::STEP < row_end ? 16 : 0;
          if constexpr (Tile::COLS * sizeof(T) > 64)
            asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(place(i)), "l"(at[i]), "r"(bytes) : "memory");
          else  // rows of other heads may lie beside it, which are not wanted yet
            asm volatile("cp.async.cg.shared.global.L2::64B [%0], [%1], 16, %2;" ::"r"(place(i)), "l"(at[i]), "r"(bytes) : "memory");
        }
      return;
    }
#endif
    if (VECTOR == 16 && row0 + Tile::ROWS <= row_end && (EXACT || col0 + Tile::COLS <= col_end)) {
#if __CUDA_ARCH__ >= 800
#pragma unroll
      for (int i = 0; i < Mine::ROUNDS; i++, walk.next())
        if (Mine::takes(i))
          asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(place(i)), "l"(walk.at + col0 + c)
                       : "memory");
#else
      constexpr int AT_ONCE = 4;  // loads before their stores
#pragma unroll
      for (int i = 0; i < Mine::ROUNDS; i += AT_ONCE) {
        uint4 x[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
          if (i + j < Mine::ROUNDS) {
            if (Mine::takes(i + j)) x[j] = *(const uint4*)(walk.at + col0 + c);
            walk.next();
          }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
          if (i + j < Mine::ROUNDS && Mine::takes(i + j)) store(place(i + j), x[j]);
      }
#endif
      return;
    }
#pragma unroll 1
    for (int i = 0; i < Mine::ROUNDS; i++, walk.next()) {
      if (!Mine::takes(i)) break;
      const bool row_in = row0 + r0 + i * Mine::STEP < row_end;
      const T* from = walk.at + col0 + c;
      const bool none = !row_in || left <= 0;
      if (VECTOR == 16 && (none || left >= V)) {
#if __CUDA_ARCH__ >= 800
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(place(i)), "l"(from),
                     "r"(none ? 0 : 16) : "memory");
#else
        store(place(i), none ? uint4{} : *(const uint4*)from);
#endif
      } else {
        Chunk<T> x;
#pragma unroll
        for (int e = 0; e < V; e++) x.v[e] = row_in && e < left ? from[e] : zero_of<T>();
        t.chunk(r0 + i * Mine::STEP, c) = x;
      }
    }
  }
  KS_DEVICE void land(Tile) {}
  template<class View> KS_DEVICE void load(Tile t, View v, int row0, int row_end, int col0, int col_end) {
    const int r0 = Mine::row(), c = Mine::column(), left = col_end - col0 - c;
    Chunk<T> x[Mine::ROUNDS];
#pragma unroll
    for (int i = 0; i < Mine::ROUNDS; i++) {
      const bool there = Mine::takes(i) && row0 + r0 + i * Mine::STEP < row_end;
      const T* const from = v.row(there ? row0 + r0 + i * Mine::STEP : row0) + col0 + c;
      x[i] = {};
      if (VECTOR == 16 && (EXACT || left >= V)) {
        if (there) x[i] = *(const Chunk<T>*)from;
      } else {
#pragma unroll
        for (int e = 0; e < V; e++)
          if (there && e < left) x[i].v[e] = from[e];
      }
    }
#pragma unroll
    for (int i = 0; i < Mine::ROUNDS; i++)
      if (Mine::takes(i)) t.chunk(r0 + i * Mine::STEP, c) = x[i];
  }
  static KS_DEVICE void store(unsigned place, uint4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(place), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
  }
};
