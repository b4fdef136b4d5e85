// Blocks of threads on the host. A warp is a thread of the system. Its lanes are fibers that this thread runs in turn,
// each until it comes to a meeting: a barrier, an exchange of values, the end of the kernel. There all lanes must be at
// the same meeting, and for the block's meetings all warps: else the launch fails and says so, where a GPU would hang.
//
// Thread sanitizer sees every lane as a thread of its own, and only barriers as order between them: so it reports a
// missing block barrier and a missing warp barrier alike.
#pragma once
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "host/fibers.h"

// Those of <math.h> that tile/element.h calls: as C++ has it, that header takes as long to parse as a kernel.
extern "C" {
float expf(float) noexcept, exp2f(float) noexcept, logf(float) noexcept, log2f(float) noexcept, log1pf(float) noexcept;
float sqrtf(float) noexcept, fabsf(float) noexcept, sinf(float) noexcept, cosf(float) noexcept, floorf(float) noexcept, fmodf(float, float) noexcept;
float powf(float, float) noexcept, fmaf(float, float, float) noexcept;
}
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }

namespace host {

constexpr int LANES = 16, STACK = 1 << 18, PIECES = 1024, MAX_WARPS = 32;

enum Meeting { AT_WARP_BARRIER, AT_BLOCK_BARRIER, AT_EXCHANGE, AT_INDEX, AT_END, LOST };
static const char* const NAMES[] = {"a warp barrier", "a block barrier", "an exchange", "warp_index()", "the end", "a fault"};

// ---- lanes, warps, blocks

// 16 bytes of shared memory in flight: `bytes` from `from`, zeros after them.
struct Piece {
  char* to;
  const char* from;
  int bytes, group;
};

struct Warp;
struct Lane {
  Warp* warp;
  int number, thread;
  Context context;
  Told<int> meeting, mask;           // where it waits, and with which other lane it exchanges
  Told<unsigned long long> value;    // what it gives, then what it is given
  Told<const char*> fault;
  int phase;                         // of the clocks that order barriers
  Piece pieces[PIECES];
  int first, last, group;
};

struct Launch;
struct Warp {
  Launch* launch;
  int number, phase, turn;           // phase of its own barriers, turn of the block's
  unsigned block;
  Context context;
  Lane* lanes;
  char clocks[2], start;             // addresses that order accesses, for thread sanitizer
  pthread_t thread;
};

struct Launch {
  void (*kernel)(const char*);
  const char* arguments;
  unsigned grid;
  int warps;
  size_t shared_bytes;
  char* shared[2];                   // of even and of odd blocks: one is filled with NaN while the other is used
  Warp* all;
  pthread_barrier_t barriers[2];     // in turn, so that nobody passes one twice
  int meetings[2][MAX_WARPS], said[2][MAX_WARPS];
  pthread_mutex_t mutex;
  char* message;
  size_t message_size;
};

static thread_local Told<Lane*> running;

// The lane that asks. A fiber never changes, so that one answer serves a whole function.
__attribute__((const, noinline)) static Lane* self() { return running; }

// Waits until every lane of the warp is at this meeting.
__attribute__((noinline)) static void meet(Lane* me, int meeting) {
  const bool ordered = meeting != AT_EXCHANGE && meeting != AT_INDEX;
  Context* const thread = &me->warp->context;
  char* const clock = &me->warp->clocks[me->phase];
  me->meeting = meeting;
  if (ordered) {
    me->phase ^= 1;
    KS_RELEASE(clock);
  }
  switch_between(&me->context, thread);
  if (ordered) KS_ACQUIRE(clock);
}

// The launch fails with this reason; the caller does not go on.
[[noreturn]] __attribute__((noinline)) static void fail(const char* reason) {
  self()->fault = reason;
  for (;;) meet(self(), LOST);
}

static void lane_main() {
#if KS_ADDRESS_SANITIZER
  Context* home = &self()->warp->context;
  __sanitizer_finish_switch_fiber(nullptr, &home->bottom, &home->size);
#endif
  for (Lane* me = self();;) {
    KS_ACQUIRE(&me->warp->start);
    me->first = me->last = me->group = 0;
    me->warp->launch->kernel(me->warp->launch->arguments);
    meet(me, AT_END);
  }
}

static void complain(Warp* warp, const char* what, const char* where, const char* other) {
  Launch* launch = warp->launch;
  pthread_mutex_lock(&launch->mutex);
  if (!launch->message[0])
    snprintf(launch->message, launch->message_size, "block %u, warp %d: %s%s%s%s", warp->block, warp->number, what, where,
             other[0] ? " and " : "", other);
  pthread_mutex_unlock(&launch->mutex);
}

// Runs every lane to its next meeting, and says which.
static int run_lanes(Warp* warp, bool first) {
  for (int i = 0; i < LANES; i++) {
    // Every other time from the last to the first: so what one lane wants of another is not always there already.
    Lane* lane = &warp->lanes[warp->phase ? LANES - 1 - i : i];
    running = lane;
    if (first) enter(&warp->context, &lane->context);
    else switch_between(&warp->context, &lane->context);
  }
  const int meeting = warp->lanes[0].meeting, mask = warp->lanes[0].mask;
  for (int i = 0; i < LANES; i++) {
    const int here = warp->lanes[i].meeting;
    if (here == LOST) return complain(warp, warp->lanes[i].fault, "", ""), (int)LOST;
    if (here != meeting) return complain(warp, "lanes wait at ", NAMES[meeting], NAMES[here]), (int)LOST;
    if (here == AT_EXCHANGE && warp->lanes[i].mask != mask)
      return complain(warp, "lanes exchange over different distances", "", ""), (int)LOST;
  }
  return meeting;
}

// Waits for the block's other warps; whether all are at the same meeting. What each says is in launch->said[turn].
static bool meet_warps(Warp* warp, int meeting, int says) {
  Launch* launch = warp->launch;
  const int turn = warp->turn;
  KS_ACQUIRE(&warp->clocks[warp->phase]);
  launch->meetings[turn][warp->number] = meeting;
  launch->said[turn][warp->number] = says;
  pthread_barrier_wait(&launch->barriers[turn]);
  KS_RELEASE(&warp->clocks[warp->phase]);
  warp->phase ^= 1, warp->turn ^= 1;
  for (int i = 0; i < launch->warps; i++) {
    const int there = launch->meetings[turn][i];
    if (there == LOST) return false;
    if (there != launch->meetings[turn][0])
      return complain(warp, "warps wait at ", NAMES[launch->meetings[turn][0]], NAMES[there]), false;
  }
  return meeting != LOST;
}

static bool run_block(Warp* warp, bool first) {
  Launch* launch = warp->launch;
  for (;; first = false) {
    const int meeting = run_lanes(warp, first), turn = warp->turn;
    if (meeting == AT_INDEX) continue;  // nobody is told anything
    if (meeting == AT_WARP_BARRIER) {
      warp->phase ^= 1;
    } else if (meeting == AT_EXCHANGE) {
      unsigned long long given[LANES];
      for (int i = 0; i < LANES; i++) given[i] = warp->lanes[i].value;
      for (int i = 0; i < LANES; i++) warp->lanes[i].value = given[i ^ warp->lanes[i].mask];
    } else {
      int says = 0;
      for (int i = 0; i < LANES; i++) says |= warp->lanes[i].value == 1;
      if (!meet_warps(warp, meeting, says)) return false;
      int any = 0;
      for (int i = 0; i < launch->warps; i++) any |= launch->said[turn][i];
      for (int i = 0; i < LANES; i++) warp->lanes[i].value = any;
      if (meeting == AT_END) return true;
    }
  }
}

static void* warp_main(void* argument) {
  Warp* warp = (Warp*)argument;
  Launch* launch = warp->launch;
#if KS_THREAD_SANITIZER
  warp->context.tsan = __tsan_get_current_fiber();
#endif
  for (int i = 0; i < LANES; i++) {
    Lane* lane = &warp->lanes[i];
    getcontext(&lane->context.place);
    lane->context.place.uc_stack.ss_sp = malloc(STACK);
    lane->context.place.uc_stack.ss_size = STACK;
    lane->context.bottom = lane->context.place.uc_stack.ss_sp;
    lane->context.size = STACK;
#if KS_THREAD_SANITIZER
    lane->context.tsan = __tsan_create_fiber(0);
#endif
    makecontext(&lane->context.place, lane_main, 0);
  }
  for (warp->block = 0; warp->block < launch->grid; warp->block++) {
    // NaN of every type for the next block: the one before, which used that memory, has ended for all warps.
    if (warp->number == 0) memset(launch->shared[(warp->block + 1) % 2], 0xFF, launch->shared_bytes);
    for (int i = 0; i < LANES; i++) warp->lanes[i].phase = warp->phase, warp->lanes[i].value = 0;
    KS_RELEASE(&warp->start);
    if (!run_block(warp, warp->block == 0)) break;
  }
  for (int i = 0; i < LANES; i++) {
#if KS_THREAD_SANITIZER
    __tsan_destroy_fiber(warp->lanes[i].context.tsan);
#endif
    free(warp->lanes[i].context.place.uc_stack.ss_sp);
  }
  return nullptr;
}

// Runs a grid of blocks one after another. 0, or 1 with a message.
static int run(void (*kernel)(const char*), const char* arguments, unsigned grid, int warps, size_t shared_bytes,
               char* message, size_t message_size) {
  Launch launch = {};
  launch.kernel = kernel, launch.arguments = arguments, launch.grid = grid, launch.warps = warps;
  launch.message = message, launch.message_size = message_size, message[0] = 0;
  launch.shared_bytes = shared_bytes;
  for (char*& shared : launch.shared) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 128, shared_bytes ? shared_bytes : 1)) abort();
    shared = (char*)memset(memory, 0xFF, shared_bytes);
  }
  pthread_mutex_init(&launch.mutex, nullptr);
  for (auto& barrier : launch.barriers) pthread_barrier_init(&barrier, nullptr, warps);
  launch.all = (Warp*)calloc(warps, sizeof(Warp));
  for (int w = 0; w < warps; w++) {
    Warp* warp = &launch.all[w];
    warp->launch = &launch, warp->number = w;
    warp->lanes = (Lane*)calloc(LANES, sizeof(Lane));
    for (int i = 0; i < LANES; i++)
      warp->lanes[i].warp = warp, warp->lanes[i].number = i, warp->lanes[i].thread = w * LANES + i;
  }
  for (int w = 0; w < warps; w++)
    if (pthread_create(&launch.all[w].thread, nullptr, warp_main, &launch.all[w])) abort();  // others would wait for ever
  for (int w = 0; w < warps; w++) pthread_join(launch.all[w].thread, nullptr);
  for (int w = 0; w < warps; w++) free(launch.all[w].lanes);
  for (auto& barrier : launch.barriers) pthread_barrier_destroy(&barrier);
  pthread_mutex_destroy(&launch.mutex);
  for (char* shared : launch.shared) free(shared);
  free(launch.all);
  return message[0] != 0;
}

// ---- what a kernel may ask for

static inline unsigned long long exchange(unsigned long long x, int mask) {
  Lane* me = self();
  me->value = x, me->mask = mask;
  meet(me, AT_EXCHANGE);
  return me->value;
}

// As on NVIDIA, where the lanes tell each other that it is the same for all of them.
static inline int warp_index() {
  Lane* me = self();
  meet(me, AT_INDEX);
  return me->warp->number;
}

static inline bool any_of_block(bool x) {
  Lane* me = self();
  me->value = x;
  meet(me, AT_BLOCK_BARRIER);
  return me->value;
}

static inline char* shared(size_t bytes) {
  Launch* launch = self()->warp->launch;
  if (bytes > launch->shared_bytes) fail("the kernel uses more shared memory than the launch gives");
  return launch->shared[self()->warp->block % 2];
}

// As assignments, because thread sanitizer does not see a memset or memcpy that the compiler makes short.
static inline void store_16(void* to, unsigned long long low, unsigned long long high) {
  ((unsigned long long*)to)[0] = low;
  ((unsigned long long*)to)[1] = high;
}

// The 16 bytes at `to` are on their way: nobody may read or write them until the copy has been waited for, and who
// does finds NaN.
static inline void start_copy(void* to, const void* from, int bytes) {
  Lane* me = self();
  if (me->last == PIECES) {
    memmove(me->pieces, me->pieces + me->first, (me->last - me->first) * sizeof(Piece));
    me->last -= me->first, me->first = 0;
    if (me->last == PIECES) fail("too many copies in flight");
  }
  store_16(to, ~0ull, ~0ull);
  me->pieces[me->last++] = {(char*)to, (const char*)from, bytes, me->group};
}

static inline void close_group() { self()->group++; }

// Copies arrive that belong to groups older than the newest `pending` closed ones.
static inline void finish_copies(int pending) {
  Lane* me = self();
  for (; me->first < me->last && me->pieces[me->first].group < me->group - pending; me->first++) {
    const Piece& x = me->pieces[me->first];
    if (x.bytes == 16 && (unsigned long long)x.from % 16 == 0) {
      const unsigned long long* from = (const unsigned long long*)x.from;
      store_16(x.to, from[0], from[1]);
    } else {
      store_16(x.to, 0, 0);
      for (int i = 0; i < x.bytes; i++) x.to[i] = x.from[i];
    }
  }
  if (me->first == me->last) me->first = me->last = 0;
}

}  // namespace host
