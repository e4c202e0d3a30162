// Scalar and short vector types.
#pragma once

#include <bit>
#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

using half = _Float16;

// Values of the ROUND_* controls.
enum Rounding : int {
  to_nearest_even,
  to_nearest_away,
  to_floor,
  to_ceiling,
  to_zero,
  to_odd,
  hybrid,
};

namespace emu {

// Rounds `magnitude`, non-negative and in units of the last place, of a number with the given sign.
inline double round_magnitude(double magnitude, bool negative, int rounding) {
  double whole = std::floor(magnitude);
  double rest = magnitude - whole;
  bool odd = std::fmod(whole, 2.0) == 1.0;
  bool up = false;
  switch (rounding) {
  case to_nearest_even: up = rest > 0.5 || (rest == 0.5 && odd); break;
  case to_nearest_away:
  case hybrid: up = rest >= 0.5; break;
  case to_floor: up = negative && rest > 0; break;
  case to_ceiling: up = !negative && rest > 0; break;
  case to_zero: break;
  case to_odd: up = rest > 0 && !odd; break;
  }
  return whole + up;
}

// A binary format of `E` exponent and `M` mantissa bits; `Ieee` formats keep the top exponent for infinities.
template <int E, int M, bool Ieee> struct Format {
  static constexpr int bias = (1 << (E - 1)) - 1;
  static constexpr int bits = 1 + E + M;
  static constexpr bool has_nan = Ieee || bits == 8;
  static constexpr unsigned sign_bit = 1u << (E + M);
  static constexpr unsigned infinity = Ieee ? ((1u << E) - 1) << M : 0;
  static constexpr unsigned nan = Ieee ? infinity | 1u << (M - 1) : sign_bit - 1;
  static constexpr unsigned largest = Ieee ? infinity - 1 : has_nan ? sign_bit - 2 : sign_bit - 1;

  static float decode(unsigned code) {
    unsigned magnitude = code & (sign_bit - 1);
    int exponent = magnitude >> M;
    int mantissa = magnitude & ((1 << M) - 1);
    float value;
    if (Ieee && magnitude >= infinity) {
      value = magnitude == infinity ? INFINITY : NAN;
    } else if (!Ieee && has_nan && magnitude == nan) {
      value = NAN;
    } else if (exponent == 0) {
      value = std::ldexp(static_cast<float>(mantissa), 1 - bias - M);
    } else {
      value = std::ldexp(static_cast<float>(mantissa | 1 << M), exponent - bias - M);
    }
    return code & sign_bit ? -value : value;
  }

  // Overflow and infinities become the largest finite value when saturating, else infinity (or NaN without one).
  // Formats without NaN turn it into the largest value.
  static unsigned encode(double value, int rounding = to_nearest_even, bool saturate = true) {
    unsigned sign = std::signbit(value) ? sign_bit : 0;
    if (std::isnan(value)) return sign | (has_nan ? nan : largest);
    unsigned overflow = saturate || !has_nan ? largest : Ieee ? infinity : nan;
    double magnitude = std::fabs(value);
    if (std::isinf(magnitude)) return sign | overflow;
    if (magnitude == 0) return sign;
    int exponent = std::max(std::ilogb(magnitude), 1 - bias);
    double units = round_magnitude(std::ldexp(magnitude, M - exponent), sign != 0, rounding);
    // `units` counts from zero in the subnormal binade and from 2^M in the others; a carry moves to the next one.
    double code = units + std::ldexp(static_cast<double>(exponent + bias - 1), M);
    return sign | (code > largest ? overflow : static_cast<unsigned>(code));
  }
};

using Half = Format<5, 10, true>;
using Bfloat16 = Format<8, 7, true>;
using E4M3 = Format<4, 3, false>;
using E5M2 = Format<5, 2, true>;
using E2M1 = Format<2, 1, false>;
using E1M2 = Format<1, 2, false>;

} // namespace emu

struct bfloat16_t {
  uint16_t bits;

  bfloat16_t() = default;
  bfloat16_t(float value) : bits(nearest(value)) {}
  template <class N, class = std::enable_if_t<std::is_arithmetic_v<N> || std::is_same_v<N, half>>>
  explicit bfloat16_t(N value) : bits(nearest(static_cast<float>(value))) {}
  operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

private:
  static uint16_t nearest(float value) {
    uint32_t u = std::bit_cast<uint32_t>(value);
    if (std::isnan(value)) return static_cast<uint16_t>(u >> 16 | 0x40);
    return static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);
  }
};

struct float8_e4m3_t {
  uint8_t data;
  float8_e4m3_t() = default;
  float8_e4m3_t(float value) : data(static_cast<uint8_t>(emu::E4M3::encode(value))) {}
  operator float() const { return emu::E4M3::decode(data); }
};
struct float8_e5m2_t {
  uint8_t data;
  float8_e5m2_t() = default;
  float8_e5m2_t(float value) : data(static_cast<uint8_t>(emu::E5M2::encode(value))) {}
  operator float() const { return emu::E5M2::decode(data); }
};
struct float8_e8m0_t {
  uint8_t data;
};
using fp8_e8m0_t = float8_e8m0_t;
struct float4_e2m1x2_t {
  uint8_t data;
};
struct float4_e1m2x2_t {
  uint8_t data;
};

// Short vectors of SIMT code, with the operators that the code generator prints for them.
#define EMU_OPERATOR1(type, op)                                                                                        \
  inline type operator op(type a, type b) {                                                                            \
    return {static_cast<decltype(a.x)>(a.x op b.x)};                                                                   \
  }
#define EMU_OPERATOR2(type, op)                                                                                        \
  inline type operator op(type a, type b) {                                                                            \
    return {static_cast<decltype(a.x)>(a.x op b.x), static_cast<decltype(a.x)>(a.y op b.y)};                           \
  }
#define EMU_OPERATOR4(type, op)                                                                                        \
  inline type operator op(type a, type b) {                                                                            \
    return {static_cast<decltype(a.x)>(a.x op b.x), static_cast<decltype(a.x)>(a.y op b.y),                            \
            static_cast<decltype(a.x)>(a.z op b.z), static_cast<decltype(a.x)>(a.w op b.w)};                           \
  }
#define EMU_ARITHMETIC(n, type)                                                                                        \
  EMU_OPERATOR##n(type, +) EMU_OPERATOR##n(type, -) EMU_OPERATOR##n(type, *) EMU_OPERATOR##n(type, /)
#define EMU_BITWISE(n, type)                                                                                           \
  EMU_OPERATOR##n(type, %) EMU_OPERATOR##n(type, &) EMU_OPERATOR##n(type, |) EMU_OPERATOR##n(type, ^)                  \
  EMU_OPERATOR##n(type, <<) EMU_OPERATOR##n(type, >>)
#define EMU_VECTOR_TYPES(element, name)                                                                                \
  struct name##1 {                                                                                                     \
    element x;                                                                                                         \
  };                                                                                                                   \
  struct alignas(2 * sizeof(element)) name##2 {                                                                        \
    element x, y;                                                                                                      \
  };                                                                                                                   \
  struct alignas(4 * sizeof(element)) name##4 {                                                                        \
    element x, y, z, w;                                                                                                \
  };                                                                                                                   \
  inline name##1 make_##name##1(element x) { return {x}; }                                                             \
  inline name##2 make_##name##2(element x, element y) { return {x, y}; }                                               \
  inline name##4 make_##name##4(element x, element y, element z, element w) { return {x, y, z, w}; }                   \
  EMU_ARITHMETIC(1, name##1) EMU_ARITHMETIC(2, name##2) EMU_ARITHMETIC(4, name##4)
#define EMU_INTEGER_VECTOR_TYPES(element, name)                                                                        \
  EMU_VECTOR_TYPES(element, name) EMU_BITWISE(1, name##1) EMU_BITWISE(2, name##2) EMU_BITWISE(4, name##4)

EMU_VECTOR_TYPES(float, float)
EMU_INTEGER_VECTOR_TYPES(int8_t, char)
EMU_INTEGER_VECTOR_TYPES(uint8_t, uchar)
EMU_INTEGER_VECTOR_TYPES(int16_t, short)
EMU_INTEGER_VECTOR_TYPES(uint16_t, ushort)
EMU_INTEGER_VECTOR_TYPES(int32_t, int)
EMU_INTEGER_VECTOR_TYPES(uint32_t, uint)
EMU_INTEGER_VECTOR_TYPES(int64_t, longlong)
EMU_INTEGER_VECTOR_TYPES(uint64_t, ulonglong)

struct half2 {
  half x, y;
};
struct bfloat16x2_t {
  bfloat16_t x, y;
};
EMU_ARITHMETIC(2, half2)
EMU_ARITHMETIC(2, bfloat16x2_t)
struct float8_e4m3x2_t {
  uint16_t data;
};
struct float8_e5m2x2_t {
  uint16_t data;
};
