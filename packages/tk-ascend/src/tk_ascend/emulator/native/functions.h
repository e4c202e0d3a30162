// Scalar functions of SIMT and scalar code.
//
// Transcendental functions are computed in double and rounded once, the same for SIMT and SIMD code; the real units
// differ from this by a few units in the last place.
#pragma once

#include "types.h"

namespace emu {

#define EMU_ROUNDED(name, function)                                                                                    \
  inline float name(float x) { return static_cast<float>(function(static_cast<double>(x))); }
EMU_ROUNDED(exp_, std::exp)
EMU_ROUNDED(exp2_, std::exp2)
EMU_ROUNDED(log_, std::log)
EMU_ROUNDED(log2_, std::log2)
EMU_ROUNDED(log10_, std::log10)
EMU_ROUNDED(log1p_, std::log1p)
EMU_ROUNDED(tanh_, std::tanh)
EMU_ROUNDED(tan_, std::tan)
EMU_ROUNDED(sin_, std::sin)
EMU_ROUNDED(cos_, std::cos)
EMU_ROUNDED(atan_, std::atan)
EMU_ROUNDED(erf_, std::erf)
EMU_ROUNDED(sqrt_, std::sqrt)
#undef EMU_ROUNDED
inline float exp10_(float x) { return static_cast<float>(std::pow(10.0, static_cast<double>(x))); }
inline float rsqrt_(float x) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))); }
inline float atan2_(float y, float x) {
  return static_cast<float>(std::atan2(static_cast<double>(y), static_cast<double>(x)));
}
inline float pow_(float x, float y) {
  return static_cast<float>(std::pow(static_cast<double>(x), static_cast<double>(y)));
}
inline void sincos_(float x, float *sine, float *cosine) {
  *sine = sin_(x);
  *cosine = cos_(x);
}

} // namespace emu

// The C library has most of these names already, with other roundings.
#define expf(x) emu::exp_(x)
#define exp2f(x) emu::exp2_(x)
#define exp10f(x) emu::exp10_(x)
#define logf(x) emu::log_(x)
#define log2f(x) emu::log2_(x)
#define log10f(x) emu::log10_(x)
#define log1pf(x) emu::log1p_(x)
#define tanhf(x) emu::tanh_(x)
#define tanf(x) emu::tan_(x)
#define sinf(x) emu::sin_(x)
#define cosf(x) emu::cos_(x)
#define atanf(x) emu::atan_(x)
#define atan2f(y, x) emu::atan2_(y, x)
#define erff(x) emu::erf_(x)
#define sqrtf(x) emu::sqrt_(x)
#define rsqrtf(x) emu::rsqrt_(x)
#define powf(x, y) emu::pow_(x, y)
#define sincosf(x, s, c) emu::sincos_(x, s, c)

#define EMU_HALF_FUNCTION(name, function)                                                                              \
  inline half h##name(half x) { return static_cast<half>(function(static_cast<float>(x))); }
EMU_HALF_FUNCTION(exp, emu::exp_)
EMU_HALF_FUNCTION(exp2, emu::exp2_)
EMU_HALF_FUNCTION(exp10, emu::exp10_)
EMU_HALF_FUNCTION(log, emu::log_)
EMU_HALF_FUNCTION(log2, emu::log2_)
EMU_HALF_FUNCTION(log10, emu::log10_)
EMU_HALF_FUNCTION(log1p, emu::log1p_)
EMU_HALF_FUNCTION(tanh, emu::tanh_)
EMU_HALF_FUNCTION(tan, emu::tan_)
EMU_HALF_FUNCTION(sin, emu::sin_)
EMU_HALF_FUNCTION(cos, emu::cos_)
EMU_HALF_FUNCTION(atan, emu::atan_)
EMU_HALF_FUNCTION(erf, emu::erf_)
EMU_HALF_FUNCTION(sqrt, emu::sqrt_)
EMU_HALF_FUNCTION(rsqrt, emu::rsqrt_)
EMU_HALF_FUNCTION(floor, std::floor)
EMU_HALF_FUNCTION(ceil, std::ceil)
EMU_HALF_FUNCTION(fabs, std::fabs)
EMU_HALF_FUNCTION(round, std::round)
EMU_HALF_FUNCTION(trunc, std::trunc)
#undef EMU_HALF_FUNCTION

using std::isfinite;
using std::isinf;
using std::isnan;

template <class A, class B> inline auto min(A a, B b) -> std::common_type_t<A, B> { return b < a ? b : a; }
template <class A, class B> inline auto max(A a, B b) -> std::common_type_t<A, B> { return a < b ? b : a; }

inline half __float2half(float x) { return static_cast<half>(x); }
inline float __half2float(half x) { return static_cast<float>(x); }
inline bfloat16_t __float2bfloat16_rn(float x) { return bfloat16_t(x); }
inline float __bfloat162float(bfloat16_t x) { return x; }
inline half2 __float22half2_rn(float2 v) { return {static_cast<half>(v.x), static_cast<half>(v.y)}; }
inline float2 __half22float2(half2 v) { return {static_cast<float>(v.x), static_cast<float>(v.y)}; }
inline bfloat16x2_t __float22bfloat162_rn(float2 v) { return {bfloat16_t(v.x), bfloat16_t(v.y)}; }
inline float2 __bfloat1622float2(bfloat16x2_t v) { return {v.x, v.y}; }
inline float2 __e4m3x22float2(float8_e4m3x2_t v) {
  return {emu::E4M3::decode(v.data & 255), emu::E4M3::decode(v.data >> 8)};
}
inline float2 __e5m2x22float2(float8_e5m2x2_t v) {
  return {emu::E5M2::decode(v.data & 255), emu::E5M2::decode(v.data >> 8)};
}

using __asc_fp8x2_storage_t = uint16_t;
enum { __ASC_NOSAT, __ASC_SATFINITE };
enum { __ASC_E4M3, __ASC_E5M2 };
inline __asc_fp8x2_storage_t __asc_cvt_float2_to_fp8x2(float2 v, int saturation, int format) {
  bool saturate = saturation == __ASC_SATFINITE;
  auto encode = [&](float x) {
    return format == __ASC_E4M3 ? emu::E4M3::encode(x, to_nearest_even, saturate)
                                : emu::E5M2::encode(x, to_nearest_even, saturate);
  };
  return static_cast<uint16_t>(encode(v.x) | encode(v.y) << 8);
}
