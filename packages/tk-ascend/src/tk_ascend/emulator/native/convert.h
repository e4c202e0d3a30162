// vcvt and the merging forms of the operations.
#pragma once

#include "simd.h"

namespace emu {

// The value of the control of `Kind` among the trailing arguments, wherever it stands.
template <int Kind, class... Controls> constexpr int control(int otherwise) {
  int value = otherwise;
  ((value = Controls::kind == Kind ? Controls::value : value), ...);
  return value;
}

inline double round_to_integer(double value, int rounding) {
  double magnitude = round_magnitude(std::fabs(value), std::signbit(value), rounding);
  return std::signbit(value) ? -magnitude : magnitude;
}

// Saturation clamps integers; a float that is NaN becomes zero. Without it, integers keep their low bits.
template <class D, class S> inline D to_integer(S x, int rounding, bool saturate) {
  constexpr D lowest = std::numeric_limits<D>::min(), highest = std::numeric_limits<D>::max();
  if constexpr (std::is_integral_v<S>) {
    if (!saturate) return static_cast<D>(x);
    __int128 wide = x;
    return wide < lowest ? lowest : wide > highest ? highest : static_cast<D>(x);
  } else {
    double value = round_to_integer(static_cast<double>(static_cast<float>(x)), rounding);
    if (std::isnan(value)) return 0;
    constexpr double two63 = 9223372036854775808.0;
    if (saturate && value < static_cast<double>(lowest)) return lowest;
    if (saturate && value >= static_cast<double>(highest) + (sizeof(D) < 8)) return highest;
    if (value >= two63) return static_cast<D>(std::numeric_limits<int64_t>::max());
    if (value < -two63) return static_cast<D>(std::numeric_limits<int64_t>::min());
    return static_cast<D>(static_cast<int64_t>(value));
  }
}

// An infinity stays one in the 16-bit formats; only finite values saturate there.
template <class F> inline unsigned encode_wide(double value, int rounding, bool saturate) {
  return F::encode(value, rounding, saturate && !std::isinf(value));
}

template <class D, class S> inline D convert(S x, int rounding, bool saturate) {
  if constexpr (std::is_integral_v<D>) {
    return to_integer<D>(x, rounding, saturate);
  } else {
    double value;
    if constexpr (std::is_integral_v<S>) {
      value = static_cast<double>(x);
    } else {
      value = static_cast<double>(static_cast<float>(x));
    }
    D result;
    if constexpr (std::is_same_v<D, float>) {
      result = static_cast<float>(value);
      if constexpr (std::is_integral_v<S> && sizeof(S) >= 4) {
        if (rounding != to_nearest_even) {
          int exponent = value == 0 ? 0 : std::ilogb(value) - 23;
          double units = round_to_integer(std::ldexp(value, -exponent), rounding);
          result = static_cast<float>(std::ldexp(units, exponent));
        }
      }
    } else if constexpr (std::is_same_v<D, half>) {
      result = std::bit_cast<half>(static_cast<uint16_t>(encode_wide<Half>(value, rounding, saturate)));
    } else if constexpr (std::is_same_v<D, bfloat16_t>) {
      result.bits = static_cast<uint16_t>(encode_wide<Bfloat16>(value, rounding, saturate));
    } else if constexpr (std::is_same_v<D, float8_e4m3_t>) {
      result.data = static_cast<uint8_t>(E4M3::encode(value, rounding, saturate));
    } else {
      static_assert(std::is_same_v<D, float8_e5m2_t>, "vcvt does not convert to this type");
      result.data = static_cast<uint8_t>(E5M2::encode(value, rounding, saturate));
    }
    return result;
  }
}

// One lane of the wider type meets `ratio` lanes of the narrower one, of which `part` takes part. The predicate is
// that of the narrower type at the first of them.
template <class D, class S, class... Controls>
inline void convert_lanes(Vector<D> &d, const Vector<S> &s, const vector_bool &mask, Controls...) {
  ++vector_instructions;
  constexpr int rounding = control<round_kind, Controls...>(to_nearest_even);
  constexpr bool saturate = control<saturation_kind, Controls...>(0) != 0;
  constexpr int part = control<part_kind, Controls...>(0);
  constexpr bool merge = control<mode_kind, Controls...>(zeroing) == merging;
  constexpr int ratio = sizeof(D) > sizeof(S) ? sizeof(D) / sizeof(S) : sizeof(S) / sizeof(D);
  constexpr int lanes = 256 / (sizeof(D) > sizeof(S) ? sizeof(D) : sizeof(S));
  static_assert(part < ratio, "vcvt: no such part for these types");
  constexpr int wide = 256 / lanes;
  Vector<D> r = merge ? d : zeros<D>();
  for (int i = 0; i < lanes; ++i) {
    if (!mask.bits.get(i * wide)) continue;
    int from = sizeof(D) > sizeof(S) ? i * ratio + part : i;
    int to = sizeof(D) < sizeof(S) ? i * ratio + part : i;
    r.lane[to] = convert<D>(s.lane[from], rounding, saturate);
    mark(r, to, is_undefined(s, from));
  }
  d = r;
}

} // namespace emu

template <class D, class S, class... Controls>
inline void vcvt(Vector<D> &d, Vector<S> s, vector_bool mask, Controls... controls) {
  emu::convert_lanes(d, s, mask, controls...);
}

// Four bits: 128 bfloat16 lanes and 64 bytes, those at 4 i + part, first lane in the low half.
#define EMU_FP4(type, format)                                                                                          \
  template <class... Controls>                                                                                         \
  inline void vcvt(Vector<type> &d, vector_bf16 s, vector_bool mask, Controls...) {                                    \
    ++emu::vector_instructions;                                                                                        \
    constexpr int rounding = emu::control<emu::round_kind, Controls...>(to_nearest_even);                              \
    constexpr int part = emu::control<emu::part_kind, Controls...>(0);                                                 \
    constexpr bool merge = emu::control<emu::mode_kind, Controls...>(emu::zeroing) == emu::merging;                    \
    Vector<type> r = merge ? d : emu::zeros<type>();                                                                   \
    for (int i = 0; i < 64; ++i) {                                                                                     \
      if (!mask.bits.get(4 * i)) continue;                                                                             \
      unsigned low = emu::format::encode(s.lane[2 * i], rounding);                                                     \
      unsigned high = emu::format::encode(s.lane[2 * i + 1], rounding);                                                \
      r.lane[4 * i + part].data = static_cast<uint8_t>(low | high << 4);                                               \
      emu::mark(r, 4 * i + part, emu::is_undefined(s, 2 * i) || emu::is_undefined(s, 2 * i + 1));                      \
    }                                                                                                                  \
    d = r;                                                                                                             \
  }                                                                                                                    \
  template <class... Controls>                                                                                         \
  inline void vcvt(vector_bf16 &d, Vector<type> s, vector_bool mask, Controls...) {                                    \
    ++emu::vector_instructions;                                                                                        \
    constexpr int part = emu::control<emu::part_kind, Controls...>(0);                                                 \
    constexpr bool merge = emu::control<emu::mode_kind, Controls...>(emu::zeroing) == emu::merging;                    \
    vector_bf16 r = merge ? d : emu::zeros<bfloat16_t>();                                                              \
    for (int i = 0; i < 128; ++i) {                                                                                    \
      if (!mask.bits.get(i / 2 * 4)) continue;                                                                         \
      int byte = i / 2 * 4 + part;                                                                                     \
      r.lane[i] = bfloat16_t(emu::format::decode(s.lane[byte].data >> i % 2 * 4 & 15));                                \
      emu::mark(r, i, emu::is_undefined(s, byte));                                                                     \
    }                                                                                                                  \
    d = r;                                                                                                             \
  }
EMU_FP4(float4_e2m1x2_t, E2M1)
EMU_FP4(float4_e1m2x2_t, E1M2)

// Forms with an explicit mode: merging keeps the lanes of d that are not selected.
#define EMU_MODE_BINARY(name, api)                                                                                     \
  template <class T, class R, class M>                                                                                 \
  inline void name(Vector<T> &d, Vector<T> a, R b, vector_bool mask, M) {                                              \
    Vector<T> r;                                                                                                       \
    api(r, a, b, mask);                                                                                                \
    if (M::value == emu::merging) emu::merge(r, r, d, mask);                                                           \
    d = r;                                                                                                             \
  }
#define EMU_MODE_UNARY(name, api)                                                                                      \
  template <class T, class M> inline void name(Vector<T> &d, Vector<T> a, vector_bool mask, M) {                       \
    Vector<T> r;                                                                                                       \
    api(r, a, mask);                                                                                                   \
    if (M::value == emu::merging) emu::merge(r, r, d, mask);                                                           \
    d = r;                                                                                                             \
  }
// Reductions write the first `lanes` lanes of the result.
#define EMU_MODE_REDUCTION(name, api, written)                                                                         \
  template <class D, class T, class M> inline void name(Vector<D> &d, Vector<T> a, vector_bool mask, M) {              \
    Vector<D> r;                                                                                                       \
    api(r, a, mask);                                                                                                   \
    if (M::value == emu::merging) emu::merge(r, r, d, emu::pattern<sizeof(D)>(PAT_##written));                         \
    d = r;                                                                                                             \
  }
EMU_MODE_BINARY(vadd, asc_add)
EMU_MODE_BINARY(vsub, asc_sub)
EMU_MODE_BINARY(vmul, asc_mul)
EMU_MODE_BINARY(vdiv, asc_div)
EMU_MODE_BINARY(vmax, asc_max)
EMU_MODE_BINARY(vmin, asc_min)
EMU_MODE_BINARY(vand, asc_and)
EMU_MODE_BINARY(vor, asc_or)
EMU_MODE_BINARY(vxor, asc_xor)
EMU_MODE_BINARY(vshl, asc_shiftleft)
EMU_MODE_BINARY(vshr, asc_shiftright)
EMU_MODE_BINARY(vabsdif, asc_abs_sub)
EMU_MODE_BINARY(vadds, asc_add_scalar)
EMU_MODE_BINARY(vmuls, asc_mul_scalar)
EMU_MODE_BINARY(vmaxs, asc_max_scalar)
EMU_MODE_BINARY(vmins, asc_min_scalar)
EMU_MODE_BINARY(vshls, asc_shiftleft_scalar)
EMU_MODE_BINARY(vshrs, asc_shiftright_scalar)
EMU_MODE_UNARY(vabs, asc_abs)
EMU_MODE_UNARY(vneg, asc_neg)
EMU_MODE_UNARY(vrelu, asc_relu)
EMU_MODE_UNARY(vnot, asc_not)
EMU_MODE_UNARY(vexp, asc_exp)
EMU_MODE_UNARY(vln, asc_ln)
EMU_MODE_UNARY(vsqrt, asc_sqrt)
EMU_MODE_REDUCTION(vcadd, asc_reduce_sum, VL1)
EMU_MODE_REDUCTION(vcmax, asc_reduce_max, VL2)
EMU_MODE_REDUCTION(vcmin, asc_reduce_min, VL2)
EMU_MODE_REDUCTION(vcgadd, asc_reduce_sum_datablock, VL8)
EMU_MODE_REDUCTION(vcgmax, asc_reduce_max_datablock, VL8)
EMU_MODE_REDUCTION(vcgmin, asc_reduce_min_datablock, VL8)
EMU_MODE_REDUCTION(vcpadd, asc_pair_reduce_sum, H)
template <class T, class S, class M> inline void vaxpy(Vector<T> &d, Vector<T> a, S scalar, vector_bool mask, M) {
  Vector<T> r = d;
  asc_axpy(r, a, scalar, mask);
  if (M::value == emu::merging) emu::merge(r, r, d, mask);
  d = r;
}
template <class T, class S, class M, class = std::enable_if_t<!std::is_same_v<S, Vector<T>>>>
inline void vdup(Vector<T> &d, S scalar, vector_bool mask, M) {
  Vector<T> r;
  asc_duplicate_scalar(r, scalar, mask);
  if (M::value == emu::merging) emu::merge(r, r, d, mask);
  d = r;
}
template <class T, class P, class M> inline void vdup(Vector<T> &d, Vector<T> s, vector_bool mask, P, M) {
  Vector<T> r;
  emu::duplicate_lane(r, s, P::value == 0 ? 0 : s.lanes - 1, mask);
  if (M::value == emu::merging) emu::merge(r, r, d, mask);
  d = r;
}
