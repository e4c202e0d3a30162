// SIMT regions: threads are fibers; warp operations meet at their call site.
#pragma once

#include "machine.h"
#include "types.h"

namespace emu {

struct Warp {
  int lane;
  uint32_t active;
  uint64_t value[32];
};

// Runs `body` once for each thread of `threads`.
void run_threads(dim3 threads, const std::function<void()> &body);
void sync_threads();
// Gives `value` to the lanes of the warp that are at the same `site`, and gets theirs.
Warp meet(uint64_t value, const void *site);

template <class T> inline uint64_t pack(T value) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}
template <class T> inline T unpack(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Combines the active lanes pairwise, neighbours first.
template <class T, class Combine> inline T reduce(const Warp &warp, Combine combine) {
  T value[32];
  uint32_t active = warp.active;
  for (int i = 0; i < 32; ++i) value[i] = unpack<T>(warp.value[i]);
  for (int width = 1; width < 32; width *= 2) {
    for (int i = 0; i < 32; i += 2 * width) {
      if (!(active >> (i + width) & 1)) continue;
      value[i] = active >> i & 1 ? combine(value[i], value[i + width]) : value[i + width];
      active |= 1u << i;
    }
  }
  return value[0];
}

template <class T, class Combine> inline T atomic_update(T *address, T operand, const char *name, Combine combine) {
  if (!atomic(address, sizeof(T), name)) return T{};
  T old;
  std::memcpy(&old, address, sizeof old);
  T updated = static_cast<T>(combine(old, operand));
  std::memcpy(address, &updated, sizeof updated);
  return old;
}

template <class T> struct Identity {
  using type = T;
};
template <class T> using Same = typename Identity<T>::type;

} // namespace emu

// A call site is the return address of `meet`, so the functions between must be inlined.
#define EMU_WARP [[gnu::always_inline]] inline
#define EMU_MEET(value) emu::meet(emu::pack(value), ({ __label__ here; here: (const void *)&&here; }))
