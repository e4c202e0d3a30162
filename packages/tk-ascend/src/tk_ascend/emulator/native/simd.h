// Vector registers of 256 bytes, predicates, and the asc_* operations on them.
#pragma once

#include "functions.h"
#include "machine.h"
#include "types.h"

// Control constants differ in type, so that `if constexpr (part == HIGHER)` works on a parameter.
template <int Kind, int Value> struct Control {
  static constexpr int kind = Kind;
  static constexpr int value = Value;
};
template <int K1, int V1, int K2, int V2> constexpr bool operator==(Control<K1, V1>, Control<K2, V2>) {
  return K1 == K2 && V1 == V2;
}
namespace emu {
enum ControlKind { mode_kind, part_kind, round_kind, saturation_kind, half_kind, position_kind, order_kind, bin_kind,
                   pattern_kind, update_kind, distribution_kind };
enum { zeroing, merging, stored };
// Negative patterns are not a count of lanes.
enum { every_lane = -1, every_third = -3, every_fourth = -4, first_half = -5, first_quarter = -6 };
} // namespace emu
#define EMU_CONTROL(name, kind, value) inline constexpr Control<emu::kind, value> name{};
EMU_CONTROL(MODE_ZEROING, mode_kind, emu::zeroing)
EMU_CONTROL(MODE_MERGING, mode_kind, emu::merging)
EMU_CONTROL(MODE_STORED, mode_kind, emu::stored)
EMU_CONTROL(PART_EVEN, part_kind, 0)
EMU_CONTROL(PART_ODD, part_kind, 1)
EMU_CONTROL(PART_P0, part_kind, 0)
EMU_CONTROL(PART_P1, part_kind, 1)
EMU_CONTROL(PART_P2, part_kind, 2)
EMU_CONTROL(PART_P3, part_kind, 3)
EMU_CONTROL(ROUND_R, round_kind, to_nearest_even)
EMU_CONTROL(ROUND_A, round_kind, to_nearest_away)
EMU_CONTROL(ROUND_F, round_kind, to_floor)
EMU_CONTROL(ROUND_C, round_kind, to_ceiling)
EMU_CONTROL(ROUND_Z, round_kind, to_zero)
EMU_CONTROL(ROUND_O, round_kind, to_odd)
EMU_CONTROL(ROUND_H, round_kind, hybrid)
EMU_CONTROL(RS_DISABLE, saturation_kind, 0)
EMU_CONTROL(RS_ENABLE, saturation_kind, 1)
EMU_CONTROL(LOWER, half_kind, 0)
EMU_CONTROL(HIGHER, half_kind, 1)
EMU_CONTROL(POS_LOWEST, position_kind, 0)
EMU_CONTROL(POS_HIGHEST, position_kind, 1)
EMU_CONTROL(INC_ORDER, order_kind, 0)
EMU_CONTROL(DEC_ORDER, order_kind, 1)
EMU_CONTROL(Bin_N0, bin_kind, 0)
EMU_CONTROL(Bin_N1, bin_kind, 1)
EMU_CONTROL(POST_UPDATE, update_kind, 0)
EMU_CONTROL(DINTLV_B8, distribution_kind, 0)
EMU_CONTROL(DINTLV_B16, distribution_kind, 1)
EMU_CONTROL(DINTLV_B32, distribution_kind, 2)
EMU_CONTROL(PAT_ALL, pattern_kind, emu::every_lane)
EMU_CONTROL(PAT_ALLF, pattern_kind, 0)
EMU_CONTROL(PAT_VL1, pattern_kind, 1)
EMU_CONTROL(PAT_VL2, pattern_kind, 2)
EMU_CONTROL(PAT_VL3, pattern_kind, 3)
EMU_CONTROL(PAT_VL4, pattern_kind, 4)
EMU_CONTROL(PAT_VL8, pattern_kind, 8)
EMU_CONTROL(PAT_VL16, pattern_kind, 16)
EMU_CONTROL(PAT_VL32, pattern_kind, 32)
EMU_CONTROL(PAT_VL64, pattern_kind, 64)
EMU_CONTROL(PAT_VL128, pattern_kind, 128)
EMU_CONTROL(PAT_M3, pattern_kind, emu::every_third)
EMU_CONTROL(PAT_M4, pattern_kind, emu::every_fourth)
EMU_CONTROL(PAT_H, pattern_kind, emu::first_half)
EMU_CONTROL(PAT_Q, pattern_kind, emu::first_quarter)

// One bit per byte; an element belongs to the predicate when the bit of its lowest byte is set.
struct vector_bool {
  emu::Bits bits;
  template <class T> bool on(int lane) const { return bits.get(lane * static_cast<int>(sizeof(T))); }
};

// A register, with the bytes that come from memory that nothing was written to.
template <class T> struct Vector {
  static constexpr int lanes = 256 / sizeof(T);
  T lane[lanes];
  emu::Bits undefined = emu::Bits::all();
};
using vector_f32 = Vector<float>;
using vector_f16 = Vector<half>;
using vector_bf16 = Vector<bfloat16_t>;
using vector_u8 = Vector<uint8_t>;
using vector_u16 = Vector<uint16_t>;
using vector_u32 = Vector<uint32_t>;
using vector_u64 = Vector<uint64_t>;
using vector_s8 = Vector<int8_t>;
using vector_s16 = Vector<int16_t>;
using vector_s32 = Vector<int32_t>;
using vector_s64 = Vector<int64_t>;
using vector_f8e4m3 = Vector<float8_e4m3_t>;
using vector_f8e5m2 = Vector<float8_e5m2_t>;
using vector_f8e8m0 = Vector<float8_e8m0_t>;
using vector_f4e2m1x2 = Vector<float4_e2m1x2_t>;
using vector_f4e1m2x2 = Vector<float4_e1m2x2_t>;
using vector_uint16_t = vector_u16;
using vector_uint32_t = vector_u32;

namespace emu {

// The bits of the lowest bytes of elements, by their size.
inline constexpr uint64_t lowest_bytes[] = {
    0, ~uint64_t{0}, 0x5555555555555555, 0, 0x1111111111111111, 0, 0, 0, 0x0101010101010101,
};
// All bytes of the elements of T that a predicate selects.
template <class T> inline Bits spread(const vector_bool &mask) {
  constexpr uint64_t ones = (uint64_t{1} << (sizeof(T) & 63)) - 1;
  Bits bytes;
  for (int i = 0; i < 4; ++i) bytes.word[i] = (mask.bits.word[i] & lowest_bytes[sizeof(T)]) * ones;
  return bytes;
}
template <class T> inline bool is_undefined(const Vector<T> &a, int lane) {
  for (size_t byte = 0; byte < sizeof(T); ++byte) {
    if (a.undefined.get(lane * sizeof(T) + byte)) return true;
  }
  return false;
}
template <class T> inline void mark(Vector<T> &a, int lane, bool undefined) {
  for (size_t byte = 0; byte < sizeof(T); ++byte) a.undefined.set(lane * sizeof(T) + byte, undefined);
}
template <class T> inline T zero() {
  T value;
  std::memset(static_cast<void *>(&value), 0, sizeof value);
  return value;
}
template <class T> inline Vector<T> zeros() {
  Vector<T> a;
  std::memset(static_cast<void *>(a.lane), 0, sizeof a.lane);
  a.undefined = {};
  return a;
}
// Copies lane `from` of a register, with its definedness; the types may differ when T converts.
template <class D, class S> inline void copy_lane(Vector<D> &d, int to, const Vector<S> &s, int from) {
  d.lane[to] = static_cast<D>(s.lane[from]);
  mark(d, to, is_undefined(s, from));
}

template <class T, class F> inline void map(Vector<T> &d, const Vector<T> &a, const vector_bool &mask, F f) {
  ++vector_instructions;
  Vector<T> r;
  for (int i = 0; i < r.lanes; ++i) r.lane[i] = mask.on<T>(i) ? static_cast<T>(f(a.lane[i])) : zero<T>();
  r.undefined = a.undefined & spread<T>(mask);
  d = r;
}
template <class T, class S, class F>
inline void map(Vector<T> &d, const Vector<T> &a, const Vector<S> &b, const vector_bool &mask, F f) {
  ++vector_instructions;
  static_assert(sizeof(T) == sizeof(S));
  Vector<T> r;
  for (int i = 0; i < r.lanes; ++i) {
    r.lane[i] = mask.on<T>(i) ? static_cast<T>(f(a.lane[i], b.lane[i])) : zero<T>();
  }
  r.undefined = (a.undefined | b.undefined) & spread<T>(mask);
  d = r;
}
template <class T, class F>
inline void compare(vector_bool &d, const Vector<T> &a, const Vector<T> &b, const vector_bool &mask, F f) {
  ++vector_instructions;
  vector_bool r;
  for (int i = 0; i < a.lanes; ++i) {
    if (mask.on<T>(i) && f(a.lane[i], b.lane[i])) r.bits.set(i * static_cast<int>(sizeof(T)), true);
  }
  d = r;
}
template <class T> inline Vector<T> splat(T value) {
  Vector<T> a;
  for (int i = 0; i < a.lanes; ++i) a.lane[i] = value;
  a.undefined = {};
  return a;
}

template <class T> inline constexpr bool is_floating =
    std::is_same_v<T, float> || std::is_same_v<T, half> || std::is_same_v<T, bfloat16_t>;

// Floating maximum and minimum give NaN when an operand is NaN.
template <class T> inline T larger(T a, T b) {
  if constexpr (is_floating<T>) {
    if (std::isnan(static_cast<float>(a))) return a;
    if (std::isnan(static_cast<float>(b))) return b;
  }
  return a < b ? b : a;
}
template <class T> inline T smaller(T a, T b) {
  if constexpr (is_floating<T>) {
    if (std::isnan(static_cast<float>(a))) return a;
    if (std::isnan(static_cast<float>(b))) return b;
  }
  return b < a ? b : a;
}
template <class T, class F> inline T bitwise(T a, T b, F f) {
  T r;
  uint8_t x[sizeof(T)], y[sizeof(T)];
  std::memcpy(x, &a, sizeof a);
  std::memcpy(y, &b, sizeof b);
  for (size_t i = 0; i < sizeof(T); ++i) x[i] = static_cast<uint8_t>(f(x[i], y[i]));
  std::memcpy(static_cast<void *>(&r), x, sizeof r);
  return r;
}
// Shifts by the width or more (an unsigned amount) leave nothing, or the sign.
template <class T, class S> inline T shift_left(T a, S amount) {
  uint64_t n = static_cast<std::make_unsigned_t<S>>(amount);
  return n < 8 * sizeof(T) ? static_cast<T>(static_cast<std::make_unsigned_t<T>>(a) << n) : T{0};
}
template <class T, class S> inline T shift_right(T a, S amount) {
  uint64_t n = static_cast<std::make_unsigned_t<S>>(amount);
  if (n < 8 * sizeof(T)) return static_cast<T>(a >> n);
  return std::is_signed_v<T> && a < 0 ? static_cast<T>(-1) : T{0};
}
// a * b + c with one rounding.
template <class T> inline T fused(T a, T b, T c) {
  if constexpr (std::is_same_v<T, float>) {
    return std::fma(a, b, c);
  } else if constexpr (std::is_same_v<T, bfloat16_t>) {
    double exact = static_cast<double>(static_cast<float>(a)) * static_cast<float>(b) + static_cast<float>(c);
    bfloat16_t r;
    r.bits = static_cast<uint16_t>(Bfloat16::encode(exact, to_nearest_even, false));
    return r;
  } else if constexpr (std::is_same_v<T, half>) {
    return static_cast<half>(static_cast<double>(a) * static_cast<double>(b) + static_cast<double>(c));
  } else {
    return static_cast<T>(static_cast<std::make_unsigned_t<T>>(a) * static_cast<std::make_unsigned_t<T>>(b) +
                          static_cast<std::make_unsigned_t<T>>(c));
  }
}
template <class T> inline T absolute(T a) {
  if constexpr (is_floating<T>) {
    return static_cast<T>(std::fabs(static_cast<float>(a)));
  } else {
    return a < 0 ? static_cast<T>(-static_cast<std::make_unsigned_t<T>>(a)) : a;
  }
}

} // namespace emu

// ---- predicates ----------------------------------------------------------------------------------------------------

namespace emu {
template <int Width, int Pattern> inline vector_bool pattern(Control<pattern_kind, Pattern>) {
  vector_bool r;
  for (int i = 0; i < 256 / Width; ++i) {
    bool on = Pattern == every_lane      ? true
              : Pattern == every_third   ? i % 3 == 0
              : Pattern == every_fourth  ? i % 4 == 0
              : Pattern == first_half    ? i < 128 / Width
              : Pattern == first_quarter ? i < 64 / Width
                                         : i < Pattern;
    r.bits.set(i * Width, on);
  }
  return r;
}
// The first `remaining` lanes; `remaining` becomes what is left for the next registers.
template <int Width> inline vector_bool first_lanes(uint32_t &remaining) {
  vector_bool r;
  constexpr uint32_t lanes = 256 / Width;
  for (uint32_t i = 0; i < lanes; ++i) r.bits.set(static_cast<int>(i) * Width, i < remaining);
  remaining = remaining > lanes ? remaining - lanes : 0;
  return r;
}
} // namespace emu
template <class P> inline vector_bool asc_create_mask_b8(P pattern) { return emu::pattern<1>(pattern); }
template <class P> inline vector_bool asc_create_mask_b16(P pattern) { return emu::pattern<2>(pattern); }
template <class P> inline vector_bool asc_create_mask_b32(P pattern) { return emu::pattern<4>(pattern); }
template <class P> inline vector_bool asc_create_mask_b64(P pattern) { return emu::pattern<8>(pattern); }
inline vector_bool asc_update_mask_b8(uint32_t &remaining) { return emu::first_lanes<1>(remaining); }
inline vector_bool asc_update_mask_b16(uint32_t &remaining) { return emu::first_lanes<2>(remaining); }
inline vector_bool asc_update_mask_b32(uint32_t &remaining) { return emu::first_lanes<4>(remaining); }

inline void asc_and(vector_bool &d, vector_bool a, vector_bool b, vector_bool mask) {
  ++emu::vector_instructions;
  d.bits = a.bits & b.bits & mask.bits;
}
inline void asc_or(vector_bool &d, vector_bool a, vector_bool b, vector_bool mask) {
  ++emu::vector_instructions;
  d.bits = (a.bits | b.bits) & mask.bits;
}
inline void asc_xor(vector_bool &d, vector_bool a, vector_bool b, vector_bool mask) {
  ++emu::vector_instructions;
  d.bits = ((a.bits & ~b.bits) | (~a.bits & b.bits)) & mask.bits;
}
inline void asc_not(vector_bool &d, vector_bool a, vector_bool mask) {
  ++emu::vector_instructions;
  d.bits = ~a.bits & mask.bits;
}
inline void asc_select(vector_bool &d, vector_bool a, vector_bool b, vector_bool mask) {
  ++emu::vector_instructions;
  d.bits = (a.bits & mask.bits) | (b.bits & ~mask.bits);
}
inline void asc_pack_to_low(vector_bool &d, vector_bool s) {
  ++emu::vector_instructions;
  vector_bool r;
  for (int i = 0; i < 128; ++i) r.bits.set(i, s.bits.get(2 * i));
  d = r;
}
inline void asc_pack_to_high(vector_bool &d, vector_bool s) {
  ++emu::vector_instructions;
  vector_bool r;
  for (int i = 0; i < 128; ++i) r.bits.set(128 + i, s.bits.get(2 * i));
  d = r;
}
inline void asc_unpack_lower(vector_bool &d, vector_bool s) {
  ++emu::vector_instructions;
  vector_bool r;
  for (int i = 0; i < 128; ++i) r.bits.set(2 * i, s.bits.get(i));
  d = r;
}
inline void asc_unpack_upper(vector_bool &d, vector_bool s) {
  ++emu::vector_instructions;
  vector_bool r;
  for (int i = 0; i < 128; ++i) r.bits.set(2 * i, s.bits.get(128 + i));
  d = r;
}
namespace emu {
template <int Width> inline void interleave(vector_bool &low, vector_bool &high, vector_bool x, vector_bool y) {
  constexpr int lanes = 256 / Width;
  vector_bool r[2];
  for (int i = 0; i < 2 * lanes; ++i) r[i / lanes].bits.set(i % lanes * Width, (i % 2 ? y : x).bits.get(i / 2 * Width));
  low = r[0];
  high = r[1];
}
template <int Width> inline void deinterleave(vector_bool &even, vector_bool &odd, vector_bool x, vector_bool y) {
  constexpr int lanes = 256 / Width;
  vector_bool r[2];
  for (int i = 0; i < 2 * lanes; ++i) r[i % 2].bits.set(i / 2 * Width, (i < lanes ? x : y).bits.get(i % lanes * Width));
  even = r[0];
  odd = r[1];
}
} // namespace emu
#define EMU_PREDICATE_INTERLEAVE(suffix, width)                                                                        \
  inline void asc_intlv_##suffix(vector_bool &low, vector_bool &high, vector_bool x, vector_bool y) {                  \
    emu::interleave<width>(low, high, x, y);                                                                           \
  }                                                                                                                    \
  inline void asc_deintlv_##suffix(vector_bool &even, vector_bool &odd, vector_bool x, vector_bool y) {                \
    emu::deinterleave<width>(even, odd, x, y);                                                                         \
  }
EMU_PREDICATE_INTERLEAVE(b8, 1)
EMU_PREDICATE_INTERLEAVE(b16, 2)
EMU_PREDICATE_INTERLEAVE(b32, 4)

// ---- loads ---------------------------------------------------------------------------------------------------------

namespace emu {
// Reads `count` elements and lets lane i have element source(i); lanes with source(i) < 0 are zero.
template <int Count, class T, class F>
inline void load(Vector<T> &d, const T *from, const char *name, size_t alignment, F source) {
  ++vector_instructions;
  T memory[Count];
  uint64_t undefined[(Count * sizeof(T) + 63) / 64] = {};
  read(memory, from, sizeof memory, name, alignment, undefined);
  for (int i = 0; i < d.lanes; ++i) {
    int s = source(i);
    d.lane[i] = s < 0 ? zero<T>() : memory[s];
    for (size_t byte = 0; byte < sizeof(T); ++byte) {
      size_t b = s * sizeof(T) + byte;
      d.undefined.set(i * sizeof(T) + byte, s >= 0 && (undefined[b / 64] >> b % 64 & 1));
    }
  }
}
} // namespace emu
template <class T, class N> inline void asc_loadalign(Vector<T> &d, T *base, N offset) {
  ++emu::vector_instructions;
  emu::read(d.lane, base + offset, 256, "asc_loadalign", 32, d.undefined.word.data());
}
// Every distribution of a load, with its post-update form. `alignment` is in bytes.
#define EMU_LOAD(name, count, alignment, source)                                                                       \
  template <class T, class N> inline void name(Vector<T> &d, T *base, N offset) {                                      \
    constexpr int lanes = Vector<T>::lanes;                                                                            \
    constexpr int block = 32 / sizeof(T);                                                                              \
    (void)lanes, (void)block;                                                                                          \
    emu::load<count>(d, base + offset, #name, alignment, [](int i) { return source; });                                \
  }
EMU_LOAD(asc_loadalign_brc_elem, 1, sizeof(T), i * 0)
EMU_LOAD(asc_loadalign_upsample, lanes / 2, 32, i / 2)
EMU_LOAD(asc_loadalign_downsample, lanes * 2, 32, i * 2)
EMU_LOAD(asc_loadalign_unpack, lanes / 2, 32, i % 2 ? -1 : i / 2)
EMU_LOAD(asc_loadalign_unpack4, lanes / 4, 32, i % 4 ? -1 : i / 4)
EMU_LOAD(asc_loadalign_brc_datablock, block, 32, i % block)
EMU_LOAD(asc_loadalign_brc_elem2datablock, 8, 8 * sizeof(T), i / block)
#define EMU_LOAD_POSTUPDATE(name)                                                                                      \
  template <class T> inline void name##_postupdate(Vector<T> &d, T *&base, int32_t step) {                             \
    name(d, base, 0);                                                                                                  \
    base += step;                                                                                                      \
  }
EMU_LOAD_POSTUPDATE(asc_loadalign)
EMU_LOAD_POSTUPDATE(asc_loadalign_brc_elem)
EMU_LOAD_POSTUPDATE(asc_loadalign_upsample)
EMU_LOAD_POSTUPDATE(asc_loadalign_downsample)
EMU_LOAD_POSTUPDATE(asc_loadalign_unpack)
EMU_LOAD_POSTUPDATE(asc_loadalign_unpack4)
EMU_LOAD_POSTUPDATE(asc_loadalign_brc_datablock)
EMU_LOAD_POSTUPDATE(asc_loadalign_brc_elem2datablock)

template <class T> inline void asc_loadalign_deintlv(Vector<T> &even, Vector<T> &odd, T *base, int64_t offset = 0) {
  ++emu::vector_instructions;
  Vector<T> memory[2];
  for (int i = 0; i < 2; ++i) {
    emu::read(memory[i].lane, base + offset + i * memory[i].lanes, 256, "asc_loadalign_deintlv", 32,
              memory[i].undefined.word.data());
  }
  for (int i = 0; i < 2 * even.lanes; ++i) {
    emu::copy_lane(i % 2 ? odd : even, i / 2, memory[i / even.lanes], i % even.lanes);
  }
}
// Address registers count elements.
inline int64_t asc_update_addr_reg_b8(int64_t offset) { return offset; }
inline int64_t asc_update_addr_reg_b16(int64_t offset) { return offset; }
inline int64_t asc_update_addr_reg_b32(int64_t offset) { return offset; }

// Predicates in memory have one bit for each byte of a register; offsets are in bytes.
inline void asc_loadalign(vector_bool &d, uint32_t *base, int32_t offset) {
  ++emu::vector_instructions;
  emu::read(d.bits.word.data(), reinterpret_cast<uint8_t *>(base) + offset, 32, "asc_loadalign (predicate)", 32);
}
inline void asc_loadalign_upsample(vector_bool &d, uint32_t *base, int32_t offset) {
  ++emu::vector_instructions;
  uint64_t memory[2];
  emu::read(memory, reinterpret_cast<uint8_t *>(base) + offset, 16, "asc_loadalign_upsample (predicate)", 16);
  for (int i = 0; i < 256; ++i) d.bits.set(i, memory[i / 128] >> (i / 2 % 64) & 1);
}
inline void asc_loadalign_downsample(vector_bool &d, uint32_t *base, int32_t offset) {
  ++emu::vector_instructions;
  uint64_t memory[8];
  emu::read(memory, reinterpret_cast<uint8_t *>(base) + offset, 64, "asc_loadalign_downsample (predicate)", 32);
  for (int i = 0; i < 256; ++i) d.bits.set(i, memory[i / 32] >> (i * 2 % 64) & 1);
}
inline void asc_storealign(uint32_t *base, vector_bool &s, int32_t offset) {
  ++emu::vector_instructions;
  emu::write(reinterpret_cast<uint8_t *>(base) + offset, s.bits.word.data(), 32, "asc_storealign (predicate)", 32);
}
inline void asc_storealign_pack(uint32_t *base, vector_bool &s, int32_t offset) {
  ++emu::vector_instructions;
  uint64_t memory[2] = {};
  for (int i = 0; i < 128; ++i) memory[i / 64] |= static_cast<uint64_t>(s.bits.get(2 * i)) << i % 64;
  emu::write(reinterpret_cast<uint8_t *>(base) + offset, memory, 16, "asc_storealign_pack (predicate)", 16);
}

// ---- stores --------------------------------------------------------------------------------------------------------

namespace emu {
// Writes the bytes of `memory` that `bytes` selects, run by run.
inline void store(uint8_t *to, const uint8_t *memory, const Bits &undefined, const Bits &bytes, int first, int last,
                  const char *name, size_t alignment) {
  if (reinterpret_cast<uintptr_t>(to) % alignment) {
    fail(name, "address %#zx of UB is not aligned to %zu bytes", static_cast<size_t>(to - ub()), alignment);
    return;
  }
  for (int i = first; i < last;) {
    if (!bytes.get(i)) {
      ++i;
      continue;
    }
    int end = i;
    while (end < last && bytes.get(end)) ++end;
    uint64_t marks[4] = {};
    for (int k = i; k < end; ++k) marks[(k - i) / 64] |= static_cast<uint64_t>(undefined.get(k)) << (k - i) % 64;
    write(to + (i - first), memory + i, static_cast<size_t>(end - i), name, 1, marks);
    i = end;
  }
}
// The low `Size` bytes of each selected element, packed.
template <int Size, class T>
inline void store_low(uint8_t *to, const Vector<T> &s, const vector_bool &mask, const char *name, size_t alignment) {
  uint8_t memory[256] = {};
  Bits undefined, bytes;
  for (int i = 0; i < s.lanes; ++i) {
    std::memcpy(memory + i * Size, &s.lane[i], Size);
    for (int byte = 0; byte < Size; ++byte) {
      bytes.set(i * Size + byte, mask.on<T>(i));
      undefined.set(i * Size + byte, s.undefined.get(i * static_cast<int>(sizeof(T)) + byte));
    }
  }
  store(to, memory, undefined, bytes, 0, s.lanes * Size, name, alignment);
}
template <class T> inline const uint8_t *bytes_of(const Vector<T> &s) {
  return reinterpret_cast<const uint8_t *>(s.lane);
}
} // namespace emu
template <class T> inline void asc_storealign(T *base, Vector<T> s, int32_t offset, vector_bool mask) {
  ++emu::vector_instructions;
  emu::store(reinterpret_cast<uint8_t *>(base + offset), emu::bytes_of(s), s.undefined, emu::spread<T>(mask), 0, 256,
             "asc_storealign", 32);
}
template <class T> inline void asc_storealign_1st(T *base, Vector<T> s, int32_t offset) {
  ++emu::vector_instructions;
  emu::write(base + offset, s.lane, sizeof(T), "asc_storealign_1st", sizeof(T), s.undefined.word.data());
}
template <class T> inline void asc_storealign_pack(T *base, Vector<T> s, int32_t offset, vector_bool mask) {
  ++emu::vector_instructions;
  constexpr int size = sizeof(T) / 2;
  emu::store_low<size>(reinterpret_cast<uint8_t *>(base) + offset * size, s, mask, "asc_storealign_pack", 32);
}
template <class T> inline void asc_storealign_pack_quarter(T *base, Vector<T> s, int32_t offset, vector_bool mask) {
  ++emu::vector_instructions;
  emu::store_low<1>(reinterpret_cast<uint8_t *>(base) + offset, s, mask, "asc_storealign_pack_quarter", 32);
}
// Blocks of 32 bytes, `block_stride` blocks apart.
template <class T>
inline void asc_storealign(T *base, Vector<T> s, uint16_t block_stride, uint16_t, vector_bool mask) {
  ++emu::vector_instructions;
  emu::Bits bytes = emu::spread<T>(mask);
  for (int block = 0; block < 8; ++block) {
    uint8_t *to = reinterpret_cast<uint8_t *>(base) + static_cast<int64_t>(block) * block_stride * 32;
    emu::store(to, emu::bytes_of(s), s.undefined, bytes, 32 * block, 32 * block + 32, "asc_storealign (blocks)", 32);
  }
}
template <class T>
inline void asc_storealign_postupdate(T *&base, Vector<T> s, uint16_t block_stride, uint16_t step, vector_bool mask) {
  asc_storealign(base, s, block_stride, step, mask);
  base += step * (32 / sizeof(T));
}

template <class D, class T, class I> inline void asc_gather(Vector<D> &d, T *base, Vector<I> index, vector_bool mask) {
  ++emu::vector_instructions;
  Vector<D> r = emu::zeros<D>();
  for (int i = 0; i < r.lanes; ++i) {
    if (!mask.on<D>(i)) continue;
    T value;
    uint64_t undefined = 0;
    emu::read(&value, base + index.lane[i], sizeof value, "asc_gather", sizeof value, &undefined);
    r.lane[i] = static_cast<D>(value);
    emu::mark(r, i, undefined != 0);
  }
  d = r;
}
template <class T, class I> inline void asc_scatter(T *base, Vector<T> s, Vector<I> index, vector_bool mask) {
  ++emu::vector_instructions;
  // An index is as wide as an element, or 16 bits for 8-bit elements, of which then the even ones are stored.
  constexpr int step = sizeof(I) > sizeof(T) ? sizeof(I) / sizeof(T) : 1;
  for (int i = 0; i < s.lanes; i += step) {
    if (!mask.on<T>(i)) continue;
    uint64_t undefined = emu::is_undefined(s, i) ? ~uint64_t{0} : 0;
    emu::write(base + index.lane[i / step], &s.lane[i], sizeof(T), "asc_scatter", sizeof(T), &undefined);
  }
}
template <class T> inline void asc_gather_datablock(Vector<T> &d, T *base, vector_u32 offset, vector_bool mask) {
  ++emu::vector_instructions;
  d = emu::zeros<T>();
  for (int block = 0; block < 8; ++block) {
    if (!mask.on<uint32_t>(block)) continue;
    uint64_t undefined = 0;
    emu::read(reinterpret_cast<uint8_t *>(d.lane) + 32 * block,
              reinterpret_cast<const uint8_t *>(base) + offset.lane[block], 32, "asc_gather_datablock", 32, &undefined);
    for (int byte = 0; byte < 32; ++byte) d.undefined.set(32 * block + byte, undefined >> byte & 1);
  }
}
template <class T> inline void asc_gather_datablock(Vector<T> &d, T *base, vector_u32 offset) {
  asc_gather_datablock(d, base, offset, asc_create_mask_b32(PAT_ALL));
}
// The emulator runs accesses in program order; a barrier tells it that later loads may rely on earlier stores.
enum emu_memory_barrier {
  VST_VLD, VLD_VST, VST_VST, VST_LD, VST_ST, VLD_ST, ST_VLD, ST_VST, LD_VST, VV_ALL, VS_ALL, SV_ALL
};
inline void asc_mem_bar(emu_memory_barrier kind) {
  if (kind == VST_VLD || kind == VV_ALL) emu::order_vector_memory();
}

// ---- elementwise ---------------------------------------------------------------------------------------------------

#define EMU_BINARY(name, expression)                                                                                   \
  template <class T> inline void name(Vector<T> &d, Vector<T> a, Vector<T> b, vector_bool mask) {                      \
    emu::map(d, a, b, mask, [](T x, T y) { return expression; });                                                      \
  }
#define EMU_SCALAR_BINARY(name, expression)                                                                            \
  template <class T, class S> inline void name(Vector<T> &d, Vector<T> a, S scalar, vector_bool mask) {                \
    T y = static_cast<T>(scalar);                                                                                      \
    emu::map(d, a, mask, [y](T x) { return expression; });                                                             \
  }
#define EMU_UNARY(name, expression)                                                                                    \
  template <class T> inline void name(Vector<T> &d, Vector<T> a, vector_bool mask) {                                   \
    emu::map(d, a, mask, [](T x) { return expression; });                                                              \
  }
EMU_BINARY(asc_add, x + y)
EMU_BINARY(asc_sub, x - y)
EMU_BINARY(asc_mul, x *y)
EMU_BINARY(asc_max, emu::larger(x, y))
EMU_BINARY(asc_min, emu::smaller(x, y))
EMU_BINARY(asc_and, (emu::bitwise(x, y, [](int p, int q) { return p & q; })))
EMU_BINARY(asc_or, (emu::bitwise(x, y, [](int p, int q) { return p | q; })))
EMU_BINARY(asc_xor, (emu::bitwise(x, y, [](int p, int q) { return p ^ q; })))
EMU_BINARY(asc_abs_sub, std::fabs(static_cast<float>(x) - static_cast<float>(y)))
EMU_BINARY(asc_exp_sub, emu::exp_(static_cast<float>(x) - static_cast<float>(y)))
EMU_BINARY(asc_prelu, (x >= T(0) ? x : T(x * y)))
EMU_SCALAR_BINARY(asc_add_scalar, x + y)
EMU_SCALAR_BINARY(asc_mul_scalar, x *y)
EMU_SCALAR_BINARY(asc_max_scalar, emu::larger(x, y))
EMU_SCALAR_BINARY(asc_min_scalar, emu::smaller(x, y))
EMU_SCALAR_BINARY(asc_leakyrelu, (x >= T(0) ? x : T(x * y)))
EMU_UNARY(asc_ln, emu::log_(static_cast<float>(x)))
EMU_UNARY(asc_exp, emu::exp_(static_cast<float>(x)))
EMU_UNARY(asc_sqrt, emu::sqrt_(static_cast<float>(x)))
EMU_UNARY(asc_abs, emu::absolute(x))
EMU_UNARY(asc_neg, -x)
EMU_UNARY(asc_relu, (x > T(0) ? x : T(0)))
EMU_UNARY(asc_not, (emu::bitwise(x, x, [](int p, int) { return ~p; })))
// Integer division by zero gives all ones, as there is no trap.
template <class T> inline void asc_div(Vector<T> &d, Vector<T> a, Vector<T> b, vector_bool mask) {
  emu::map(d, a, b, mask, [](T x, T y) {
    if constexpr (std::is_integral_v<T>) {
      if (y == 0) return static_cast<T>(-1);
      return static_cast<T>(static_cast<int64_t>(x) / static_cast<int64_t>(y));
    } else {
      return static_cast<T>(static_cast<float>(x) / static_cast<float>(y));
    }
  });
}
template <class T, class S> inline void asc_shiftleft(Vector<T> &d, Vector<T> a, Vector<S> b, vector_bool mask) {
  emu::map(d, a, b, mask, [](T x, S n) { return emu::shift_left(x, n); });
}
template <class T, class S> inline void asc_shiftright(Vector<T> &d, Vector<T> a, Vector<S> b, vector_bool mask) {
  emu::map(d, a, b, mask, [](T x, S n) { return emu::shift_right(x, n); });
}
template <class T, class S> inline void asc_shiftleft_scalar(Vector<T> &d, Vector<T> a, S n, vector_bool mask) {
  emu::map(d, a, mask, [n](T x) { return emu::shift_left(x, n); });
}
template <class T, class S> inline void asc_shiftright_scalar(Vector<T> &d, Vector<T> a, S n, vector_bool mask) {
  emu::map(d, a, mask, [n](T x) { return emu::shift_right(x, n); });
}
#define EMU_COMPARE(name, op)                                                                                          \
  template <class T> inline void asc_##name(vector_bool &d, Vector<T> a, Vector<T> b, vector_bool mask) {              \
    emu::compare(d, a, b, mask, [](T x, T y) { return x op y; });                                                      \
  }                                                                                                                    \
  template <class T, class S> inline void asc_##name##_scalar(vector_bool &d, Vector<T> a, S s, vector_bool mask) {    \
    emu::compare(d, a, emu::splat(static_cast<T>(s)), mask, [](T x, T y) { return x op y; });                          \
  }
EMU_COMPARE(eq, ==)
EMU_COMPARE(ne, !=)
EMU_COMPARE(gt, >)
EMU_COMPARE(ge, >=)
EMU_COMPARE(lt, <)
EMU_COMPARE(le, <=)

namespace emu {
// The selected lanes of a, the other ones of b.
template <class T> inline void merge(Vector<T> &d, const Vector<T> &a, const Vector<T> &b, const vector_bool &mask) {
  Vector<T> r;
  for (int i = 0; i < r.lanes; ++i) r.lane[i] = mask.on<T>(i) ? a.lane[i] : b.lane[i];
  Bits chosen = spread<T>(mask);
  r.undefined = (a.undefined & chosen) | (b.undefined & ~chosen);
  d = r;
}
} // namespace emu
template <class T> inline void asc_select(Vector<T> &d, Vector<T> a, Vector<T> b, vector_bool mask) {
  ++emu::vector_instructions;
  emu::merge(d, a, b, mask);
}

// d = d + a * b, and d = d * a + b.
template <class T, class M> inline void vmula(Vector<T> &d, Vector<T> a, Vector<T> b, vector_bool mask, M) {
  Vector<T> old = d, r;
  emu::map(r, a, b, mask, [](T, T) { return emu::zero<T>(); });
  for (int i = 0; i < r.lanes; ++i) {
    if (mask.on<T>(i)) r.lane[i] = emu::fused(a.lane[i], b.lane[i], old.lane[i]);
  }
  r.undefined = r.undefined | (old.undefined & emu::spread<T>(mask));
  if (M::value == emu::merging) {
    emu::merge(d, r, old, mask);
  } else {
    d = r;
  }
}
template <class T, class M> inline void vmadd(Vector<T> &d, Vector<T> a, Vector<T> b, vector_bool mask, M mode) {
  Vector<T> factor = d;
  Vector<T> sum = b;
  if (M::value == emu::merging) {
    vmula(sum, factor, a, mask, MODE_ZEROING);
    emu::merge(d, sum, factor, mask);
  } else {
    vmula(sum, factor, a, mask, mode);
    d = sum;
  }
}
template <class T> inline void asc_madd(Vector<T> &d, Vector<T> a, Vector<T> b, vector_bool mask) {
  vmadd(d, a, b, mask, MODE_ZEROING);
}
template <class T, class S> inline void asc_axpy(Vector<T> &d, Vector<T> a, S s, vector_bool mask) {
  vmula(d, a, emu::splat(static_cast<T>(s)), mask, MODE_ZEROING);
}

namespace emu {
// Sum of a, b (inverted for subtraction) and a carry; the predicate gets the carry out.
inline void add_carry(vector_bool &carry, vector_u32 &d, const vector_u32 &a, const vector_u32 &b, bool subtract,
                      const vector_bool *carry_in, const vector_bool &mask) {
  ++vector_instructions;
  vector_bool out;
  vector_u32 r = zeros<uint32_t>();
  for (int i = 0; i < 64; ++i) {
    if (!mask.on<uint32_t>(i)) continue;
    uint64_t in = carry_in ? carry_in->on<uint32_t>(i) : subtract;
    uint64_t sum = uint64_t{a.lane[i]} + (subtract ? ~b.lane[i] : b.lane[i]) + in;
    r.lane[i] = static_cast<uint32_t>(sum);
    out.bits.set(4 * i, sum >> 32);
  }
  r.undefined = (a.undefined | b.undefined) & spread<uint32_t>(mask);
  d = r;
  carry = out;
}
} // namespace emu
inline void asc_add(vector_bool &carry, vector_u32 &d, vector_u32 a, vector_u32 b, vector_bool mask) {
  emu::add_carry(carry, d, a, b, false, nullptr, mask);
}
inline void asc_sub(vector_bool &carry, vector_u32 &d, vector_u32 a, vector_u32 b, vector_bool mask) {
  emu::add_carry(carry, d, a, b, true, nullptr, mask);
}
inline void asc_addc(vector_bool &carry, vector_u32 &d, vector_u32 a, vector_u32 b, vector_bool in, vector_bool mask) {
  emu::add_carry(carry, d, a, b, false, &in, mask);
}
inline void asc_subc(vector_bool &carry, vector_u32 &d, vector_u32 a, vector_u32 b, vector_bool in, vector_bool mask) {
  emu::add_carry(carry, d, a, b, true, &in, mask);
}
template <class T> inline void asc_mull(Vector<T> &low, Vector<T> &high, Vector<T> a, Vector<T> b, vector_bool mask) {
  using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
  Vector<T> l, h;
  emu::map(l, a, b, mask, [](T x, T y) { return static_cast<Wide>(x) * y; });
  emu::map(h, a, b, mask, [](T x, T y) { return (static_cast<Wide>(x) * y) >> 32; });
  low = l;
  high = h;
}

// ---- broadcast, permute --------------------------------------------------------------------------------------------

template <class T, class S> inline void asc_duplicate_scalar(Vector<T> &d, S s, vector_bool mask) {
  T value = static_cast<T>(s);
  emu::map(d, emu::zeros<T>(), mask, [value](T) { return value; });
}
namespace emu {
template <class T> inline void duplicate_lane(Vector<T> &d, const Vector<T> &s, int lane, const vector_bool &mask) {
  T value = s.lane[lane];
  bool undefined = is_undefined(s, lane);
  map(d, zeros<T>(), mask, [value](T) { return value; });
  if (undefined) d.undefined = spread<T>(mask);
}
} // namespace emu
template <class T> inline void asc_duplicate(Vector<T> &d, Vector<T> s, vector_bool mask) {
  emu::duplicate_lane(d, s, 0, mask);
}
template <class T> inline void asc_duplicate_highest(Vector<T> &d, Vector<T> s, vector_bool mask) {
  emu::duplicate_lane(d, s, s.lanes - 1, mask);
}
template <class T, class S> inline void asc_arange(Vector<T> &d, S start) {
  ++emu::vector_instructions;
  for (int i = 0; i < d.lanes; ++i) d.lane[i] = static_cast<T>(start + static_cast<S>(i));
  d.undefined = {};
}
template <class T, class S> inline void asc_arange_descend(Vector<T> &d, S start) {
  ++emu::vector_instructions;
  for (int i = 0; i < d.lanes; ++i) d.lane[i] = static_cast<T>(start - static_cast<S>(i));
  d.undefined = {};
}
template <class T> inline void asc_intlv(Vector<T> &low, Vector<T> &high, Vector<T> x, Vector<T> y) {
  ++emu::vector_instructions;
  Vector<T> r[2];
  for (int i = 0; i < 2 * x.lanes; ++i) emu::copy_lane(r[i / x.lanes], i % x.lanes, i % 2 ? y : x, i / 2);
  low = r[0];
  high = r[1];
}
template <class T> inline void asc_deintlv(Vector<T> &even, Vector<T> &odd, Vector<T> x, Vector<T> y) {
  ++emu::vector_instructions;
  Vector<T> r[2];
  for (int i = 0; i < 2 * x.lanes; ++i) emu::copy_lane(r[i % 2], i / 2, i < x.lanes ? x : y, i % x.lanes);
  even = r[0];
  odd = r[1];
}
// Interleaves two registers into 512 bytes of memory; no predicate.
template <class T> inline void asc_storealign_intlv(T *base, Vector<T> x, Vector<T> y, int64_t offset = 0) {
  Vector<T> low, high;
  asc_intlv(low, high, x, y);
  asc_storealign(base, low, static_cast<int32_t>(offset), asc_create_mask_b8(PAT_ALL));
  asc_storealign(base, high, static_cast<int32_t>(offset) + low.lanes, asc_create_mask_b8(PAT_ALL));
}
// TileLang's wrapper passes one register and a predicate, which no documented form takes.
template <class T> inline void asc_storealign_intlv(T *, Vector<T>, int32_t, vector_bool) {
  static_assert(sizeof(T) == 0, "asc_storealign_intlv interleaves two registers; use vintlv and two plain stores");
}

template <class D, class S> inline void asc_pack_to_low(Vector<D> &d, Vector<S> s) {
  ++emu::vector_instructions;
  Vector<D> r = emu::zeros<D>();
  for (int i = 0; i < s.lanes; ++i) emu::copy_lane(r, i, s, i);
  d = r;
}
template <class D, class S> inline void asc_pack_to_high(Vector<D> &d, Vector<S> s) {
  ++emu::vector_instructions;
  Vector<D> r = emu::zeros<D>();
  for (int i = 0; i < s.lanes; ++i) emu::copy_lane(r, s.lanes + i, s, i);
  d = r;
}
template <class D, class S> inline void asc_unpack_lower(Vector<D> &d, Vector<S> s) {
  ++emu::vector_instructions;
  Vector<D> r;
  for (int i = 0; i < r.lanes; ++i) emu::copy_lane(r, i, s, i);
  d = r;
}
template <class D, class S> inline void asc_unpack_upper(Vector<D> &d, Vector<S> s) {
  ++emu::vector_instructions;
  Vector<D> r;
  for (int i = 0; i < r.lanes; ++i) emu::copy_lane(r, i, s, r.lanes + i);
  d = r;
}
// Lane i becomes lane index[i], modulo the number of lanes.
template <class T, class I> inline void asc_gather(Vector<T> &d, Vector<T> s, Vector<I> index) {
  ++emu::vector_instructions;
  Vector<T> r;
  for (int i = 0; i < r.lanes; ++i) {
    emu::copy_lane(r, i, s, static_cast<int>(static_cast<std::make_unsigned_t<I>>(index.lane[i]) % r.lanes));
  }
  d = r;
}
template <class T> inline void asc_squeeze(Vector<T> &d, Vector<T> s, vector_bool mask) {
  ++emu::vector_instructions;
  Vector<T> r = emu::zeros<T>();
  int count = 0;
  for (int i = 0; i < s.lanes; ++i) {
    if (mask.on<T>(i)) emu::copy_lane(r, count++, s, i);
  }
  d = r;
}
// The number of selected lanes below each lane.
template <class T> inline void asc_unsqueeze(Vector<T> &d, vector_bool mask) {
  ++emu::vector_instructions;
  int count = 0;
  for (int i = 0; i < d.lanes; ++i) {
    d.lane[i] = static_cast<T>(count);
    count += mask.on<T>(i);
  }
  d.undefined = {};
}

// ---- reductions: neighbours first, which is the emulator's choice --------------------------------------------------

namespace emu {
template <class T> inline bool any_undefined(const Vector<T> &s, const vector_bool &mask) {
  return (s.undefined & spread<T>(mask)).any();
}
template <class T, bool Maximum> inline T reduction_identity() {
  if constexpr (is_floating<T>) {
    return static_cast<T>(Maximum ? -INFINITY : INFINITY);
  } else {
    return Maximum ? std::numeric_limits<T>::min() : std::numeric_limits<T>::max();
  }
}
// The extreme element in lane 0 and the index of its first occurrence in lane 1.
template <bool Maximum, class T> inline void extreme(Vector<T> &d, const Vector<T> &s, const vector_bool &mask) {
  ++vector_instructions;
  Vector<T> r = zeros<T>();
  T best = reduction_identity<T, Maximum>();
  uint32_t index = 0;
  bool found = false;
  for (int i = 0; i < s.lanes; ++i) {
    if (!mask.on<T>(i)) continue;
    T x = s.lane[i];
    bool better = Maximum ? best < x : x < best;
    if constexpr (is_floating<T>) {
      better = better || (std::isnan(static_cast<float>(x)) && !std::isnan(static_cast<float>(best)));
    }
    if (!found || better) {
      best = x;
      index = static_cast<uint32_t>(i);
    }
    found = true;
  }
  r.lane[0] = best;
  std::memcpy(static_cast<void *>(&r.lane[1]), &index, sizeof(T) < 4 ? sizeof(T) : 4);
  bool undefined = any_undefined(s, mask);
  mark(r, 0, undefined);
  mark(r, 1, undefined);
  d = r;
}
template <class T, class F>
inline void reduce_blocks(Vector<T> &d, const Vector<T> &s, const vector_bool &mask, T identity, F combine) {
  ++vector_instructions;
  constexpr int block = 32 / sizeof(T);
  Vector<T> r = zeros<T>();
  for (int k = 0; k < 8; ++k) {
    bool undefined = false;
    T value[block];
    for (int i = 0; i < block; ++i) {
      bool on = mask.on<T>(k * block + i);
      value[i] = on ? s.lane[k * block + i] : identity;
      undefined |= on && is_undefined(s, k * block + i);
    }
    for (int width = block / 2; width; width /= 2) {
      for (int i = 0; i < width; ++i) value[i] = static_cast<T>(combine(value[2 * i], value[2 * i + 1]));
    }
    r.lane[k] = value[0];
    mark(r, k, undefined);
  }
  d = r;
}
} // namespace emu
template <class D, class T> inline void asc_reduce_sum(Vector<D> &d, Vector<T> s, vector_bool mask) {
  ++emu::vector_instructions;
  constexpr int lanes = Vector<T>::lanes;
  D value[lanes];
  for (int i = 0; i < lanes; ++i) value[i] = mask.on<T>(i) ? static_cast<D>(s.lane[i]) : D(0);
  for (int width = lanes / 2; width; width /= 2) {
    for (int i = 0; i < width; ++i) value[i] = static_cast<D>(value[2 * i] + value[2 * i + 1]);
  }
  bool undefined = emu::any_undefined(s, mask);
  d = emu::zeros<D>();
  d.lane[0] = value[0];
  emu::mark(d, 0, undefined);
}
template <class T> inline void asc_reduce_max(Vector<T> &d, Vector<T> s, vector_bool mask) {
  emu::extreme<true>(d, s, mask);
}
template <class T> inline void asc_reduce_min(Vector<T> &d, Vector<T> s, vector_bool mask) {
  emu::extreme<false>(d, s, mask);
}
template <class T> inline void asc_pair_reduce_sum(Vector<T> &d, Vector<T> s, vector_bool mask) {
  ++emu::vector_instructions;
  Vector<T> r = emu::zeros<T>();
  for (int i = 0; i < s.lanes / 2; ++i) {
    bool even = mask.on<T>(2 * i), odd = mask.on<T>(2 * i + 1);
    r.lane[i] = static_cast<T>((even ? s.lane[2 * i] : T(0)) + (odd ? s.lane[2 * i + 1] : T(0)));
    emu::mark(r, i, (even && emu::is_undefined(s, 2 * i)) || (odd && emu::is_undefined(s, 2 * i + 1)));
  }
  d = r;
}
template <class T> inline void asc_reduce_sum_datablock(Vector<T> &d, Vector<T> s, vector_bool mask) {
  emu::reduce_blocks(d, s, mask, T(0), [](T a, T b) { return a + b; });
}
template <class T> inline void asc_reduce_max_datablock(Vector<T> &d, Vector<T> s, vector_bool mask) {
  emu::reduce_blocks(d, s, mask, emu::reduction_identity<T, true>(), emu::larger<T>);
}
template <class T> inline void asc_reduce_min_datablock(Vector<T> &d, Vector<T> s, vector_bool mask) {
  emu::reduce_blocks(d, s, mask, emu::reduction_identity<T, false>(), emu::smaller<T>);
}

// Histograms add to d; bin 0 has the values below 128, bin 1 the others.
inline void asc_frequency_histogram_bin0(vector_u16 &d, vector_u8 s, vector_bool mask) {
  ++emu::vector_instructions;
  for (int i = 0; i < 256; ++i) {
    if (mask.on<uint8_t>(i) && s.lane[i] < 128) d.lane[s.lane[i]]++;
  }
}
inline void asc_frequency_histogram_bin1(vector_u16 &d, vector_u8 s, vector_bool mask) {
  ++emu::vector_instructions;
  for (int i = 0; i < 256; ++i) {
    if (mask.on<uint8_t>(i) && s.lane[i] >= 128) d.lane[s.lane[i] - 128]++;
  }
}
namespace emu {
inline void accumulate_histogram(vector_u16 &d, const vector_u8 &s, const vector_bool &mask, int first) {
  ++vector_instructions;
  for (int i = 0; i < 256; ++i) {
    for (int value = 0; value < 128; ++value) {
      if (mask.on<uint8_t>(i) && s.lane[i] <= first + value) d.lane[value]++;
    }
  }
}
} // namespace emu
inline void asc_cumulative_histogram_bin0(vector_u16 &d, vector_u8 s, vector_bool mask) {
  emu::accumulate_histogram(d, s, mask, 0);
}
inline void asc_cumulative_histogram_bin1(vector_u16 &d, vector_u8 s, vector_bool mask) {
  emu::accumulate_histogram(d, s, mask, 128);
}
