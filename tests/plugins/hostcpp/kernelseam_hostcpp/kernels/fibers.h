// Fibers: several stacks that one thread runs in turn, such that sanitizers follow.
#pragma once
#include <setjmp.h>
#include <stddef.h>
#include <ucontext.h>

#ifdef __has_feature
#define KS_HAS_FEATURE(x) __has_feature(x)
#else
#define KS_HAS_FEATURE(x) 0
#endif
#if defined(__SANITIZE_THREAD__) || KS_HAS_FEATURE(thread_sanitizer)
#include <sanitizer/tsan_interface.h>
#define KS_THREAD_SANITIZER 1
#define KS_RELEASE(clock) __tsan_release(clock)
#define KS_ACQUIRE(clock) __tsan_acquire(clock)
#else
#define KS_THREAD_SANITIZER 0
#define KS_RELEASE(clock) ((void)(clock))
#define KS_ACQUIRE(clock) ((void)(clock))
#endif
#if defined(__SANITIZE_ADDRESS__) || KS_HAS_FEATURE(address_sanitizer)
#include <sanitizer/common_interface_defs.h>
#define KS_ADDRESS_SANITIZER 1
#else
#define KS_ADDRESS_SANITIZER 0
#endif

namespace host {

// What fibers and their thread tell each other: plain words, but no order between memory accesses.
template<class T> struct Told {
  T x;
  operator T() const { return __atomic_load_n(&x, __ATOMIC_RELAXED); }
  void operator=(T y) { __atomic_store_n(&x, y, __ATOMIC_RELAXED); }
};

struct Context {
  ucontext_t place;
  jmp_buf jump;
  void* tsan;
  const void* bottom;
  size_t size;
};

#if KS_THREAD_SANITIZER || KS_ADDRESS_SANITIZER
// The way that sanitizers follow. What it reads itself is no access of the kernel's.
__attribute__((no_sanitize("thread"), noinline)) static void switch_between(Context* from, Context* to) {
#if KS_THREAD_SANITIZER
  __tsan_switch_to_fiber(to->tsan, __tsan_switch_to_fiber_no_sync);
#endif
#if KS_ADDRESS_SANITIZER
  void* kept = nullptr;
  __sanitizer_start_switch_fiber(&kept, to->bottom, to->size);
#endif
  swapcontext(&from->place, &to->place);
#if KS_ADDRESS_SANITIZER
  __sanitizer_finish_switch_fiber(kept, nullptr, nullptr);
#endif
}
static void enter(Context* from, Context* to) { switch_between(from, to); }
#else
// swapcontext saves the signal mask, which is a system call: 20 times the time of a jump.
static void switch_between(Context* from, Context* to) {
  if (!_setjmp(from->jump)) _longjmp(to->jump, 1);
}
static void enter(Context* from, Context* to) {
  if (!_setjmp(from->jump)) setcontext(&to->place);
}
#endif

}  // namespace host
