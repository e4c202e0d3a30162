// The matrix unit: copies between GM, L1, L0 and UB, and multiplication. Implemented in cube.cpp.
//
// Pointers to L1 and L0 are offsets into the memory. All of them hold matrices as fractals of 16 rows by 32 bytes:
// element (row, column) is at ((column / C0) * pitch + row) * C0 + column % C0, C0 elements being 32 bytes.
#pragma once

#include "dma.h"
#include "machine.h"
#include "simd.h"
#include "types.h"

enum asc_unit_flag_mode : int {};
enum asc_quant_mode : int {};
enum asc_relu_pre_mode : int {};
enum asc_dual_dst_mode : int {};
enum class asc_hf32_round_mode { NEAREST_AWAY, NEAREST_EVEN };

namespace emu {

// The address of `bytes` bytes of a memory of this core, checked and recorded; null when out of range.
uint8_t *touch(Memory memory, uint64_t offset, size_t bytes, bool writes, const char *instruction);
// UB of a vector core of this block; null when there is none.
uint8_t *vector_ub(int sub_block);

// Orders the matrix unit and the copies out of L0C where unit flags replace events.
void lock_unit(pipe_t pipe);
void unlock_unit(pipe_t pipe);

template <class T> inline uint64_t offset_of(T *pointer) { return reinterpret_cast<uint64_t>(pointer); }

struct Fractals {
  uint64_t to;
  const uint8_t *from;
  uint64_t row_bytes;
  uint32_t rows, columns, element;
  bool transpose; // rows of the result are contiguous in GM
};
void set_fractal_pitch(uint32_t rows);
void load_fractals(const Fractals &copy);
void fill_l1(uint64_t to, uint32_t word, uint32_t word_bytes, uint64_t repeat, uint64_t blocks, uint64_t gap);
void store_l1(uint64_t to, const uint8_t *from, int bursts, int length, int from_gap, int to_gap);

struct Tile {
  uint64_t to, from;
  int row, column, rows, columns; // fractals of the source
  int from_pitch, to_pitch;       // in fractals
  uint32_t element;
  bool transpose;
};
void load_l0(Memory memory, const Tile &tile);
void load_scales(Memory memory, uint64_t to, uint64_t from, int row, int pair, int rows, int pairs, int from_pitch,
                 int to_pitch);

enum class Operand { f32, f16, bf16, e4m3, e5m2, e2m1, s8 };
template <class T> constexpr Operand operand() {
  if constexpr (std::is_same_v<T, float>) {
    return Operand::f32;
  } else if constexpr (std::is_same_v<T, half>) {
    return Operand::f16;
  } else if constexpr (std::is_same_v<T, bfloat16_t>) {
    return Operand::bf16;
  } else if constexpr (std::is_same_v<T, float8_e4m3_t>) {
    return Operand::e4m3;
  } else if constexpr (std::is_same_v<T, float4_e2m1x2_t>) {
    return Operand::e2m1;
  } else if constexpr (std::is_same_v<T, int8_t>) {
    return Operand::s8;
  } else {
    // TileLang has its own type of this format besides the one of the C API.
    static_assert(sizeof(T) == 1 && std::is_convertible_v<T, float> && !std::is_integral_v<T>,
                  "asc_mmad does not take this type");
    return Operand::e5m2;
  }
}
struct Multiply {
  uint64_t to, left, right;
  int rows, depth, columns;
  Operand operand;
  bool integer, clear, scaled;
  int unit_flag;
};
void multiply(const Multiply &product);
extern uint64_t multiplications; // of the launch

struct Drain {
  uint64_t from;
  int columns, rows, to_pitch, from_pitch;
  int unit_flag, conversion;
  bool relu, integer;
  uint32_t element;
};
// To UB of the vector core `sub_block`, or halves of the rows (dual 1) or columns (dual 2) to both.
void drain_to_ub(uint8_t *to, const Drain &copy, int sub_block, int dual);
void drain_to_gm(uint8_t *to, const Drain &copy);

void enable_hf32(bool on);

} // namespace emu

struct asc_fill_l1_config {
  uint64_t repeat, blk_num, dst_gap;
};

inline void asc_set_gm2l1_nz_para(int, int, uint16_t pitch, int) { emu::set_fractal_pitch(pitch); }
inline void asc_set_l0c_copy_nz_para(int, int, int) {}
template <class T>
inline void asc_copy_gm2l1_nd2nz(T *to, T *from, uint64_t row_bytes, asc_load_l2_cache_mode, uint32_t rows,
                                 uint32_t columns, int, int) {
  emu::load_fractals({emu::offset_of(to), reinterpret_cast<const uint8_t *>(from), row_bytes, rows, columns, sizeof(T),
                      false});
}
template <class T>
inline void asc_copy_gm2l1_dn2nz(T *to, T *from, uint64_t row_bytes, asc_load_l2_cache_mode, uint32_t rows,
                                 uint32_t columns, int, int) {
  emu::load_fractals({emu::offset_of(to), reinterpret_cast<const uint8_t *>(from), row_bytes, rows, columns, sizeof(T),
                      true});
}
template <class T> inline void asc_fill_l1(T *to, uint32_t word, asc_fill_l1_config config) {
  emu::fill_l1(emu::offset_of(to), word, sizeof(T), config.repeat, config.blk_num, config.dst_gap);
}
inline void asc_copy_ub2l1(void *to, void *from, int bursts, int length, int from_gap, int to_gap) {
  emu::store_l1(emu::offset_of(to), static_cast<const uint8_t *>(from), bursts, length, from_gap, to_gap);
}
#define EMU_LOAD_L0(name, memory, transpose)                                                                           \
  template <class T>                                                                                                   \
  inline void name(T *to, T *from, int row, int column, int rows, int columns, int from_pitch, int to_pitch) {         \
    emu::load_l0(emu::Memory::memory, {emu::offset_of(to), emu::offset_of(from), row, column, rows, columns,           \
                                       from_pitch, to_pitch, sizeof(T), transpose});                                   \
  }
EMU_LOAD_L0(asc_copy_l12l0a, l0a, false)
EMU_LOAD_L0(asc_copy_l12l0a_transpose, l0a, true)
EMU_LOAD_L0(asc_copy_l12l0b, l0b, false)
EMU_LOAD_L0(asc_copy_l12l0b_transpose, l0b, true)
// The destination is the address of the data tile in units of 16 bytes.
inline void asc_copy_l12l0a_mx(uint64_t to, fp8_e8m0_t *from, int row, int pair, int rows, int pairs, int from_pitch,
                               int to_pitch) {
  emu::load_scales(emu::Memory::l0a_scale, to, emu::offset_of(from), row, pair, rows, pairs, from_pitch, to_pitch);
}
inline void asc_copy_l12l0b_mx(uint64_t to, fp8_e8m0_t *from, int row, int pair, int rows, int pairs, int from_pitch,
                               int to_pitch) {
  emu::load_scales(emu::Memory::l0b_scale, to, emu::offset_of(from), row, pair, rows, pairs, from_pitch, to_pitch);
}
template <class A, class T>
inline void asc_mmad(A *to, T *left, T *right, int rows, int depth, int columns, int unit_flag, bool, bool,
                     bool clear) {
  emu::multiply({emu::offset_of(to), emu::offset_of(left), emu::offset_of(right), rows, depth, columns,
                 emu::operand<T>(), std::is_integral_v<A>, clear, false, unit_flag});
}
template <class A, class T>
inline void asc_mmad_mx(A *to, T *left, T *right, int rows, int depth, int columns, int unit_flag, bool, bool,
                        bool clear) {
  emu::multiply({emu::offset_of(to), emu::offset_of(left), emu::offset_of(right), rows, depth, columns,
                 emu::operand<T>(), std::is_integral_v<A>, clear, true, unit_flag});
}
template <class D, class S>
inline void asc_copy_l0c2ub(D *to, S *from, int columns, int rows, int to_pitch, int from_pitch, int sub_block,
                            asc_dual_dst_mode dual, asc_unit_flag_mode unit_flag, asc_quant_mode conversion,
                            asc_relu_pre_mode relu, int, int, int, int) {
  emu::drain_to_ub(reinterpret_cast<uint8_t *>(to),
                   {emu::offset_of(from), columns, rows, to_pitch, from_pitch, unit_flag, conversion, relu != 0,
                    std::is_integral_v<S>, sizeof(D)},
                   sub_block, dual);
}
template <class D, class S>
inline void asc_copy_l0c2gm(D *to, S *from, int columns, int rows, int to_pitch, int from_pitch,
                            asc_store_l2_cache_mode, asc_unit_flag_mode unit_flag, asc_quant_mode conversion,
                            asc_relu_pre_mode relu, int, int, int, int) {
  emu::drain_to_gm(reinterpret_cast<uint8_t *>(to),
                   {emu::offset_of(from), columns, rows, to_pitch, from_pitch, unit_flag, conversion, relu != 0,
                    std::is_integral_v<S>, sizeof(D)});
}
inline void asc_enable_hf32() { emu::enable_hf32(true); }
inline void asc_disable_hf32() { emu::enable_hf32(false); }
inline void asc_set_hf32_round_mode(asc_hf32_round_mode) {}
// Only the order in which the unit visits its results.
inline void asc_set_mmad_direction_m() {}
inline void asc_set_mmad_direction_n() {}
