// The machine around the vector units: memories, pipes, flags, cores. Implemented in memory.cpp and pipes.cpp.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>

enum pipe_t { PIPE_S, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_FIX, PIPE_ALL };
enum event_t : int {};
enum asc_lock_mode { ASC_LOCK_BLOCK, ASC_LOCK_NON_BLOCK };

struct dim3 {
  uint32_t x, y, z;
  constexpr dim3(uint32_t x = 1, uint32_t y = 1, uint32_t z = 1) : x(x), y(y), z(z) {}
};
namespace cce {
using ::dim3;
}
extern dim3 threadIdx, blockIdx, blockDim, gridDim;
extern int64_t block_idx, block_num;

namespace emu {

// One bit for each byte of a 256-byte vector register.
struct Bits {
  std::array<uint64_t, 4> word{};

  bool get(int i) const { return word[i >> 6] >> (i & 63) & 1; }
  void set(int i, bool on) {
    uint64_t bit = uint64_t{1} << (i & 63);
    word[i >> 6] = on ? word[i >> 6] | bit : word[i >> 6] & ~bit;
  }
  bool any() const { return word[0] | word[1] | word[2] | word[3]; }
  static Bits all() { return {{~uint64_t{0}, ~uint64_t{0}, ~uint64_t{0}, ~uint64_t{0}}}; }
  friend Bits operator&(Bits a, Bits b) {
    for (int i = 0; i < 4; ++i) a.word[i] &= b.word[i];
    return a;
  }
  friend Bits operator|(Bits a, Bits b) {
    for (int i = 0; i < 4; ++i) a.word[i] |= b.word[i];
    return a;
  }
  friend Bits operator~(Bits a) {
    for (int i = 0; i < 4; ++i) a.word[i] = ~a.word[i];
    return a;
  }
};

// Memories of one core. Pointers to UB and GM are real addresses; the others are offsets, as gemm.h makes them.
enum class Memory { ub, l1, l0a, l0b, l0c, l0a_scale, l0b_scale };

uint8_t *ub();
bool is_cube_core();
int sub_block();
void fail(const char *instruction, const char *format, ...) __attribute__((format(printf, 2, 3)));

// Vector instructions of the launch, for reports on kernels.
extern uint64_t vector_instructions;

// Checked accesses of the running instruction to UB or GM. `undefined`, when given, has a bit for each byte that
// was read before anything was written to it, or that is to be marked so. A faulty access is reported and skipped
// (a skipped read gives the poison pattern).
void read(void *to, const void *from, size_t bytes, const char *instruction, size_t alignment = 1,
          uint64_t *undefined = nullptr);
void write(void *to, const void *from, size_t bytes, const char *instruction, size_t alignment = 1,
           const uint64_t *undefined = nullptr);
// Marks an atomic update; false when it must be skipped.
bool atomic(const void *address, size_t bytes, const char *instruction);
// Lets loads of this vector function read what it stored before.
void order_vector_memory();
// A copy that is part of a checked access.
void copy_unchecked(void *to, const void *from, size_t bytes);

// `work` runs on `pipe` after everything that the pipe was given before. Names must be literals or live as long.
void issue(pipe_t pipe, const char *instruction, std::function<void()> work);
void notify(pipe_t from, pipe_t to, int event);
void wait(pipe_t from, pipe_t to, int event);
void barrier(pipe_t pipe);
enum class Scope { inter, sub_block, block, intra };
void arrive(Scope scope, pipe_t pipe, int flag);
void await(Scope scope, pipe_t pipe, int flag);
void lock(pipe_t pipe, int buffer, asc_lock_mode mode);
void unlock(pipe_t pipe, int buffer, asc_lock_mode mode);

} // namespace emu

#define ASC_IS_AIC (emu::is_cube_core())
#define ASC_IS_AIV (!emu::is_cube_core())

inline void asc_init() {}
inline int64_t asc_get_sub_block_id() { return emu::sub_block(); }
inline void asc_sync_notify(pipe_t from, pipe_t to, int event) { emu::notify(from, to, event); }
inline void asc_sync_wait(pipe_t from, pipe_t to, int event) { emu::wait(from, to, event); }
inline void asc_sync_pipe(pipe_t pipe) { emu::barrier(pipe); }
inline void asc_sync() { emu::barrier(PIPE_ALL); }
inline void asc_lock(pipe_t pipe, int buffer, asc_lock_mode mode) { emu::lock(pipe, buffer, mode); }
inline void asc_unlock(pipe_t pipe, int buffer, asc_lock_mode mode) { emu::unlock(pipe, buffer, mode); }

#define EMU_CROSS_CORE(name, scope)                                                                                    \
  inline void asc_sync_##name##_arrive(pipe_t pipe, int flag) { emu::arrive(emu::Scope::scope, pipe, flag); }          \
  inline void asc_sync_##name##_wait(pipe_t pipe, int flag) { emu::await(emu::Scope::scope, pipe, flag); }
EMU_CROSS_CORE(inter, inter)
EMU_CROSS_CORE(subblock, sub_block)
EMU_CROSS_CORE(block, block)
EMU_CROSS_CORE(intra, intra)
