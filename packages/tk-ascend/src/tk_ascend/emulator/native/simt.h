// SIMT regions: threads are fibers; warp operations meet at their call site.
#pragma once

#include "machine.h"
#include "types.h"

#include <string>

namespace emu {

struct Warp {
  int lane;
  uint32_t active;
  uint64_t value[32];
};

// Runs `body` once for each thread of `threads`.
void run_threads(dim3 threads, const std::function<void()> &body);
void sync_threads();
// Exchanges `value` with the lanes of the warp that are at the same call site. The site is the return address, so
// the functions between it and the kernel must be inlined.
Warp meet(uint64_t value);

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
  copy_unchecked(&old, address, sizeof old);
  T updated = static_cast<T>(combine(old, operand));
  copy_unchecked(address, &updated, sizeof updated);
  return old;
}

// The name of a function template argument, as the compiler prints it.
template <auto Function> inline const char *function_name() {
  static std::string name;
  if (name.empty()) {
    std::string text = __PRETTY_FUNCTION__;
    size_t begin = text.find("Function = ") + 11;
    name = text.substr(begin, text.find_first_of(";]", begin) - begin);
  }
  return name.c_str();
}

template <class T> struct Identity {
  using type = T;
};
template <class T> using Same = typename Identity<T>::type;

} // namespace emu

#define EMU_WARP [[gnu::always_inline]] inline

inline void asc_syncthreads() { emu::sync_threads(); }
inline void asc_threadfence() {}
inline uint32_t laneid() { return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) & 31; }

template <auto Function, class... Arguments> inline void asc_vf_call(dim3 threads, Arguments... arguments) {
  emu::issue(PIPE_V, emu::function_name<Function>(),
             [=] { emu::run_threads(threads, [&] { Function(arguments...); }); });
}

EMU_WARP uint32_t asc_activemask() { return emu::meet(0).active; }
EMU_WARP uint32_t asc_ballot(int predicate) {
  emu::Warp warp = emu::meet(predicate != 0);
  uint32_t votes = 0;
  for (int i = 0; i < 32; ++i) votes |= static_cast<uint32_t>(warp.active >> i & warp.value[i] & 1) << i;
  return votes;
}
template <class T> EMU_WARP T asc_shfl(T value, int lane) {
  return emu::unpack<T>(emu::meet(emu::pack(value)).value[lane & 31]);
}
template <class T> EMU_WARP T asc_shfl_xor(T value, int mask) {
  emu::Warp warp = emu::meet(emu::pack(value));
  return emu::unpack<T>(warp.value[(warp.lane ^ mask) & 31]);
}
template <class T> EMU_WARP T asc_shfl_up(T value, int delta) {
  emu::Warp warp = emu::meet(emu::pack(value));
  return warp.lane < delta ? value : emu::unpack<T>(warp.value[warp.lane - delta]);
}
template <class T> EMU_WARP T asc_shfl_down(T value, int delta) {
  emu::Warp warp = emu::meet(emu::pack(value));
  return warp.lane + delta > 31 ? value : emu::unpack<T>(warp.value[warp.lane + delta]);
}
template <class T> EMU_WARP T asc_reduce_add(T value) {
  return emu::reduce<T>(emu::meet(emu::pack(value)), [](T a, T b) { return static_cast<T>(a + b); });
}
template <class T> EMU_WARP T asc_reduce_max(T value) {
  return emu::reduce<T>(emu::meet(emu::pack(value)), [](T a, T b) { return a < b ? b : a; });
}
template <class T> EMU_WARP T asc_reduce_min(T value) {
  return emu::reduce<T>(emu::meet(emu::pack(value)), [](T a, T b) { return b < a ? b : a; });
}

template <class T> inline T asc_atomic_add(T *address, emu::Same<T> value) {
  return emu::atomic_update(address, value, "asc_atomic_add", [](T a, T b) { return a + b; });
}
template <class T> inline T asc_atomic_max(T *address, emu::Same<T> value) {
  return emu::atomic_update(address, value, "asc_atomic_max", [](T a, T b) { return a < b ? b : a; });
}
template <class T> inline T asc_atomic_min(T *address, emu::Same<T> value) {
  return emu::atomic_update(address, value, "asc_atomic_min", [](T a, T b) { return b < a ? b : a; });
}

namespace cooperative_groups {
struct coalesced_group {
  EMU_WARP void sync() const { emu::meet(0); }
};
inline coalesced_group coalesced_threads() { return {}; }
} // namespace cooperative_groups
