// How a compiled kernel is found and started from outside: included after the kernel, whose name is KS_ENTRY.
#pragma once
#include <utility>

namespace host {

// A kernel's parameters, taken from its type: each lies at the next multiple of its own alignment.
template<class... P> struct Parameters {
  static constexpr int COUNT = sizeof...(P);
  static constexpr int SIZES[] = {(int)sizeof(P)...}, ALIGNMENTS[] = {(int)alignof(P)...};
  static constexpr int offset(int n) {
    int at = 0;
    for (int i = 0; i < n; i++) at = (at + ALIGNMENTS[i] - 1) / ALIGNMENTS[i] * ALIGNMENTS[i] + SIZES[i];
    return n == COUNT ? at : (at + ALIGNMENTS[n] - 1) / ALIGNMENTS[n] * ALIGNMENTS[n];
  }
  template<class X> static X read(const char* from) {
    X x;
    memcpy(&x, from, sizeof x);
    return x;
  }
  template<size_t... I> static void call(void (*kernel)(P...), const char* arguments, std::index_sequence<I...>) {
    kernel(read<P>(arguments + offset((int)I))...);
  }
  static void call(void (*kernel)(P...), const char* arguments) { call(kernel, arguments, std::index_sequence_for<P...>{}); }
};
template<class... P> Parameters<P...> parameters_of(void (*)(P...));
typedef decltype(parameters_of(&KS_ENTRY)) KernelParameters;

static void call_kernel(const char* arguments) { KernelParameters::call(&KS_ENTRY, arguments); }

}  // namespace host

#define KS_VISIBLE extern "C" __attribute__((visibility("default")))

#define KS_TEXT(x) #x
#define KS_NAME(x) KS_TEXT(x)
KS_VISIBLE const char* kernelseam_name() { return KS_NAME(KS_ENTRY); }

// The number of parameters; and where parameter i lies: its offset, its size.
KS_VISIBLE int kernelseam_parameter_count() { return host::KernelParameters::COUNT; }
KS_VISIBLE void kernelseam_parameter(int i, int* offset, int* size) {
  *offset = host::KernelParameters::offset(i);
  *size = host::KernelParameters::SIZES[i];
}

// Runs the kernel over packed arguments. 0, or 1 with a message.
KS_VISIBLE int kernelseam_launch(const char* arguments, size_t argument_bytes, unsigned grid, unsigned threads,
                                 size_t shared_bytes, char* message, size_t message_size) {
  if (argument_bytes != (size_t)host::KernelParameters::offset(host::KernelParameters::COUNT))
    return snprintf(message, message_size, "%zu bytes of arguments, the kernel takes %d", argument_bytes,
                    host::KernelParameters::offset(host::KernelParameters::COUNT)), 1;
  if (threads != (unsigned)KERNEL_THREADS || threads % WARP || threads / WARP > host::MAX_WARPS)
    return snprintf(message, message_size, "%u threads a block, the kernel takes %d", threads, KERNEL_THREADS), 1;
  return host::run(host::call_kernel, arguments, grid, threads / WARP, shared_bytes, message, message_size);
}
