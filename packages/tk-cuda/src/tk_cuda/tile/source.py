"""CUDA device functions for number formats and scales, shared by all kernels that quantize.

Kernels import :data:`SOURCE` with ``T.import_source(SOURCE)`` and call the functions with ``T.call_extern``, or through
the wrappers of ``tile.scales`` and ``tile.encode``. Every function is exact where the formats are: no fast math, no
flush to zero, results do not depend on the architecture. ``TK_FN`` can be redefined so that a host compiler builds the
same text for tests.
"""

from __future__ import annotations

_BASE = r"""
#ifndef TK_TILE
#define TK_TILE
#ifndef TK_FN
#define TK_FN __device__ __forceinline__
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define TK_HAS_FP8 1
#endif
#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL) || defined(__CUDA_ARCH_FEAT_SM120_ALL)
#define TK_HAS_FP4 1
#endif

TK_FN unsigned tk_bits(float x) { return __float_as_uint(x); }
TK_FN float tk_float(unsigned bits) { return __uint_as_float(bits); }
// About 1 / x, within an ulp where both are normal.
TK_FN float tk_rcp(float x) {
#ifdef __CUDA_ARCH__
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
#else
  return 1.0f / x;
#endif
}

// bf16 pairs: element 0 in the low half.
TK_FN float tk_bf16_lo(unsigned pair) { return tk_float(pair << 16); }
TK_FN float tk_bf16_hi(unsigned pair) { return tk_float(pair & 0xffff0000u); }

// Round to nearest even; a NaN stays a NaN.
TK_FN unsigned tk_to_bf16x2(float lo, float hi) {
#ifdef __CUDA_ARCH__
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
  return pair;
#else
  unsigned pair = 0;
  const float v[2] = {lo, hi};
  for (int i = 0; i < 2; ++i) {
    unsigned b = tk_bits(v[i]);
    unsigned h = v[i] != v[i] ? 0x7fffu : (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
    pair |= h << (16 * i);
  }
  return pair;
#endif
}
TK_FN unsigned short tk_to_bf16(float x) { return (unsigned short)tk_to_bf16x2(x, 0.0f); }
"""

_AMAX = r"""
// Largest magnitudes, kept as the bits of a non-negative fp32: an unsigned maximum, in which Inf and NaN win.
TK_FN unsigned tk_amax(unsigned acc, float x) {
#ifdef __CUDA_ARCH__
  float out;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(tk_float(acc)), "f"(fabsf(x)));
  return tk_bits(out);
#else
  const unsigned b = tk_bits(x) & 0x7fffffffu;
  return acc > b ? acc : b;
#endif
}
TK_FN unsigned tk_amax_bits(unsigned a, unsigned b) { return a > b ? a : b; }
// The same for two bf16 at once, each in its half; tk_amax_fold gives the fp32 bits of the larger.
TK_FN unsigned tk_amax_bf16x2(unsigned acc, unsigned pair) {
#ifdef __CUDA_ARCH__
  unsigned magnitudes, out;
  asm("abs.bf16x2 %0, %1;" : "=r"(magnitudes) : "r"(pair));
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(acc), "r"(magnitudes));
  return out;
#else
  const unsigned p = pair & 0x7fff7fffu;
  const unsigned lo = (acc & 0xffffu) > (p & 0xffffu) ? acc & 0xffffu : p & 0xffffu;
  const unsigned hi = (acc >> 16) > (p >> 16) ? acc >> 16 : p >> 16;
  return hi << 16 | lo;
#endif
}
TK_FN unsigned tk_amax_fold(unsigned acc) { return tk_amax_bits(acc << 16, acc & 0xffff0000u); }
"""

_E4M3 = r"""
// fp32 to e4m3: nearest even, saturating, the sign of zero and NaN kept.
TK_FN unsigned tk_e4m3_soft(float v) {
  const unsigned b = tk_bits(v), sign = (b >> 24) & 0x80u, mag = b & 0x7fffffffu;
  if (mag > 0x7f800000u) return sign | 0x7fu;
  const float a = fminf(tk_float(mag), 448.0f);
  // Adding 2^20 times the power of two below a (at least 2^-6) rounds a to three mantissa bits.
  unsigned p = tk_bits(a) & 0x7f800000u;
  p = p > 0x3c800000u ? p : 0x3c800000u;
  const unsigned w = tk_bits(__fadd_rn(a, tk_float(p + (20u << 23))));
  return sign | ((w + (w >> 20) - 1128u) & 0x7fu);
}
TK_FN unsigned tk_e4m3x2(float lo, float hi) {
#ifdef TK_HAS_FP8
  unsigned short pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(hi), "f"(lo));
  return pair;
#else
  return tk_e4m3_soft(lo) | tk_e4m3_soft(hi) << 8;
#endif
}
TK_FN unsigned tk_e4m3x1(float v) { return tk_e4m3x2(v, 0.0f) & 0xffu; }
TK_FN unsigned tk_e4m3x4(const float* v) { return tk_e4m3x2(v[0], v[1]) | tk_e4m3x2(v[2], v[3]) << 16; }

// e4m3 to fp32, exact; `at` is the byte of the word.
TK_FN float tk_from_e4m3(unsigned word, int at) {
  const unsigned b = word >> (8 * at);
  // The three mantissa and four exponent bits, read as fp32, are the value times 2^-120, subnormals included.
  const unsigned bits = (b & 0x7fu) == 0x7fu ? 0x7fc00000u : tk_bits(__fmul_rn(tk_float((b & 0x7fu) << 20), 0x1p120f));
  return tk_float(bits | (b & 0x80u) << 24);
}
#ifdef TK_HAS_FP8
// Two pairs of fp16, exact.
TK_FN void tk_e4m3x4_to_f16(unsigned* pairs, unsigned word) {
  asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b; }"
      : "=r"(pairs[0]), "=r"(pairs[1]) : "r"(word));
}
#endif
TK_FN void tk_from_e4m3x4(float* v, unsigned word) {
#ifdef TK_HAS_FP8
  unsigned pairs[2];
  tk_e4m3x4_to_f16(pairs, word);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
        : "=f"(v[2 * i]), "=f"(v[2 * i + 1]) : "r"(pairs[i]));
  }
#else
  for (int i = 0; i < 4; ++i) v[i] = tk_from_e4m3(word, i);
#endif
}
// The largest magnitude of eight codes as the bits of an fp32.
TK_FN unsigned tk_amax_e4m3x8(const unsigned* words) {
  unsigned acc = 0;
#ifdef TK_HAS_FP8
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    unsigned pairs[2];
    tk_e4m3x4_to_f16(pairs, words[i]);
    asm("{ .reg .b32 a, b; abs.f16x2 a, %1; abs.f16x2 b, %2; max.NaN.f16x2 %0, %0, a; max.NaN.f16x2 %0, %0, b; }"
        : "+r"(acc) : "r"(pairs[0]), "r"(pairs[1]));
  }
  float most;
  asm("{ .reg .b16 a, b; mov.b32 {a, b}, %1; max.NaN.f16 a, a, b; cvt.f32.f16 %0, a; }" : "=f"(most) : "r"(acc));
  return tk_bits(most);
#else
  for (int i = 0; i < 8; ++i) acc = tk_amax(acc, tk_from_e4m3(words[i / 4], i % 4));
  return acc;
#endif
}
"""

_E2M1 = r"""
// fp32 to e2m1: nearest even, saturating, the sign of zero kept; a NaN becomes +-6.
TK_FN unsigned tk_e2m1_soft(float v) {
  const unsigned sign = (tk_bits(v) >> 28) & 8u;
  const float a = fminf(tk_float(tk_bits(v) & 0x7fffffffu), 6.0f);
  unsigned p = tk_bits(a) & 0x7f800000u;
  p = p > 0x3f800000u ? p : 0x3f800000u;
  const unsigned w = tk_bits(__fadd_rn(a, tk_float(p + (22u << 23))));
  return sign | ((w + (w >> 22) - 298u) & 7u);
}
TK_FN unsigned tk_e2m1x2(float lo, float hi) { return tk_e2m1_soft(lo) | tk_e2m1_soft(hi) << 4; }

// A magnitude up to 6, rounded to e2m1; both times 2^-6. The result is an e4m3 whose bits 4..2 are the code.
TK_FN float tk_e2m1_as_e4m3(float v) {
  const float m = tk_float(tk_bits(fmaxf(fabsf(v), 0x1p-6f)) & 0x7f800000u);
  const float w = __fmaf_rn(m, 0x1.8p22f, v);  // rounds v to one mantissa bit, multiples of 0.5 below 1
  const float d = __fmaf_rn(m, 0x1.8p22f, -w);  // minus the rounded value, exact; +0 where it is zero
  // -d is -0 for zero, so adding a trace of v gives every zero the sign of v and changes nothing else.
  return __fmaf_rn(v, 0x1p-34f, -d);
}
// Eight values times `factor`, a power of two times at least 2^-120, to eight codes, element 0 in the low nibble.
// `saturate` says whether magnitudes can reach 7, which rounds to 8.
TK_FN unsigned tk_scaled_e2m1x8(const float* x, float factor, bool saturate) {
#if defined(TK_HAS_FP4)
  float v[8];
  unsigned out;
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = __fmul_rn(x[i], factor);
  asm("{ .reg .b8 a, b, c, d;\n"
      "cvt.rn.satfinite.e2m1x2.f32 a, %2, %1;\ncvt.rn.satfinite.e2m1x2.f32 b, %4, %3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 c, %6, %5;\ncvt.rn.satfinite.e2m1x2.f32 d, %8, %7;\n"
      "mov.b32 %0, {a, b, c, d}; }"
      : "=r"(out)
      : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "f"(v[4]), "f"(v[5]), "f"(v[6]), "f"(v[7]));
  return out;
#elif defined(TK_HAS_FP8) || !defined(__CUDA_ARCH__)
  const float small = __fmul_rn(factor, 0x1p-6f);
  float r[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) r[i] = __fmul_rn(x[i], small);
  if (saturate) {
#pragma unroll
    for (int i = 0; i < 8; ++i) r[i] = fmaxf(fminf(r[i], 0x1.8p-4f), -0x1.8p-4f);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) r[i] = tk_e2m1_as_e4m3(r[i]);
  const unsigned even = tk_e4m3x2(r[0], r[2]) | tk_e4m3x2(r[4], r[6]) << 16;
  const unsigned odd = tk_e4m3x2(r[1], r[3]) | tk_e4m3x2(r[5], r[7]) << 16;
  return ((even >> 4) & 0x08080808u) | ((even >> 2) & 0x07070707u) | (odd & 0x80808080u) |
         ((odd << 2) & 0x70707070u);
#else
  unsigned out = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out |= tk_e2m1x2(__fmul_rn(x[2 * i], factor), __fmul_rn(x[2 * i + 1], factor)) << (8 * i);
  }
  return out;
#endif
}
// Eight values to eight codes, element 0 in the low nibble. `saturate` as above.
TK_FN unsigned tk_e2m1x8(const float* x, bool saturate) { return tk_scaled_e2m1x8(x, 1.0f, saturate); }
// Eight values of at most eight significant bits and at most 6: bf16 times a power of two. As fp16 times 2^-14, so that
// 1.0 is the smallest normal number, they are exact from 2^-2 on, and bits 11..9 of their patterns, rounded, are codes.
TK_FN unsigned tk_e2m1x8_short(const float* x) {
#if defined(TK_HAS_FP4) || !defined(__CUDA_ARCH__)
  return tk_e2m1x8(x, false);
#else
  unsigned h[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(h[i]) : "f"(x[2 * i + 1]), "f"(x[2 * i]));
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(h[i]) : "r"(h[i]), "r"(0x04000400u));
    h[i] += 0x00ff00ffu + (h[i] >> 9 & 0x00010001u);
  }
  const unsigned low = __byte_perm(h[0], h[1], 0x7531), high = __byte_perm(h[2], h[3], 0x7531);
  const unsigned even = __byte_perm(low, high, 0x6420), odd = __byte_perm(low, high, 0x7531);
  return (even >> 1 & 0x07070707u) | (even >> 4 & 0x08080808u) | (odd << 3 & 0x70707070u) | (odd & 0x80808080u);
#endif
}
// Four values to two bytes.
TK_FN unsigned tk_e2m1x4(const float* x, bool saturate) {
  const float v[8] = {x[0], x[1], x[2], x[3], 0.0f, 0.0f, 0.0f, 0.0f};
  return tk_e2m1x8(v, saturate) & 0xffffu;
}

// e2m1 to fp32, exact; `at` is the nibble of the word.
TK_FN float tk_from_e2m1(unsigned word, int at) {
  const unsigned c = word >> (4 * at);
  return tk_float(tk_bits(__fmul_rn(tk_float((c & 7u) << 22), 0x1p126f)) | (c & 8u) << 28);
}
"""

_E5M6 = r"""
// fp32 to e5m6 by the rule of the format's definition: fp16 toward zero, cut to twelve bits, then rounded by the low
// seventeen bits of the fp32 pattern (nearest even for normal codes).
TK_FN unsigned tk_e5m6(unsigned cut, float v) {
  return (cut + (((tk_bits(v) & 0x1ffffu) + (cut & 1u) + 0xffffu) >> 17)) & 0xfffu;
}
// Eight values to three words, a big-endian stream of twelve-bit codes in little-endian words.
TK_FN void tk_e5m6x8(unsigned* words, const float* v) {
  unsigned h[8];
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
#ifdef __CUDA_ARCH__
    unsigned pair;
    asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(v[i + 1]), "f"(v[i]));
#else
    const unsigned pair = tk_host_f16_rz(v[i]) | (unsigned)tk_host_f16_rz(v[i + 1]) << 16;
#endif
    h[i] = tk_e5m6((pair & 0xffffu) >> 4, v[i]);
    h[i + 1] = tk_e5m6(pair >> 20, v[i + 1]);
  }
  words[0] = h[0] << 20 | h[1] << 8 | h[2] >> 4;
  words[1] = h[2] << 28 | h[3] << 16 | h[4] << 4 | h[5] >> 8;
  words[2] = h[5] << 24 | h[6] << 12 | h[7];
}
TK_FN float tk_from_f16(unsigned h) {
#ifdef __CUDA_ARCH__
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"((unsigned short)h));
  return out;
#else
  return tk_host_from_f16(h);
#endif
}
TK_FN void tk_from_e5m6x8(float* v, const unsigned* words) {
  const unsigned a = words[0], b = words[1], c = words[2];
  v[0] = tk_from_f16((a >> 16) & 0xfff0u);
  v[1] = tk_from_f16((a >> 4) & 0xfff0u);
  v[2] = tk_from_f16(((a << 8) & 0xff00u) | ((b >> 24) & 0xf0u));
  v[3] = tk_from_f16((b >> 12) & 0xfff0u);
  v[4] = tk_from_f16(b & 0xfff0u);
  v[5] = tk_from_f16(((b << 12) & 0xf000u) | ((c >> 20) & 0xff0u));
  v[6] = tk_from_f16((c >> 8) & 0xfff0u);
  v[7] = tk_from_f16((c << 4) & 0xfff0u);
}
"""

_SCALES = r"""
// The usual amax, from 2^-100 to 2^102, is divided without IEEE division: with s about 1 / b, q = RN(a s) and the exact
// remainder e = a - q b, RN(q + e s) is the quotient. Tried for every mantissa, each qmax and every s within two ulp.
TK_FN bool tk_is_usual(unsigned amax) { return amax - 0x0d800000u < 0x65000000u; }
TK_FN float tk_quotient(float a, float b, float s) {
  const float q = __fmul_rn(a, s);
  return __fmaf_rn(__fmaf_rn(-q, b, a), s, q);
}
// Scales of a block from the bits of its amax, already raised to the clamp. A block with a NaN or an Inf gets a NaN.
TK_FN float tk_sf_plain(unsigned amax, float qmax) {
  const float a = tk_float(amax);
  if (tk_is_usual(amax)) return tk_quotient(a, qmax, 1.0f / qmax);
  return amax >= 0x7f800000u ? tk_float(0x7fc00000u) : __fdiv_rn(a, qmax);
}
// Factors are finite, so that zeros stay zeros in a block whose scale is 0.
TK_FN float tk_inv_plain(unsigned amax, float qmax) {
  const float a = tk_float(amax);
  if (tk_is_usual(amax)) {
    const float s = tk_rcp(a);
    return tk_quotient(qmax, a, __fmaf_rn(s, __fmaf_rn(-a, s, 1.0f), s));
  }
  return fminf(__fdiv_rn(qmax, a), 0x1.fffffep127f);
}
// Biased exponent of the smallest power of two that is at least amax / qmax, for qmax = 448, 6 or 65024, whose
// mantissa bits are given: ceil(log2) is a comparison of mantissas. 0 where amax / qmax underflows to 0, 255 for NaN.
TK_FN unsigned tk_ue8m0(unsigned amax, float qmax) {
  const unsigned q = tk_bits(qmax);
  const int e = (int)((amax + (0x7fffffu - (q & 0x7fffffu))) >> 23) - (int)(q >> 23) + 127;
  const int least = amax > (unsigned)(qmax * 0.5f) ? 1 : 0;
  const int biased = e > least ? e : least;
  return amax >= 0x7f800000u ? 255u : (unsigned)biased;
}
TK_FN float tk_sf_ue8m0(unsigned biased) { return tk_float(biased == 255u ? 0x7fc00000u : biased << 23); }
TK_FN float tk_inv_ue8m0(unsigned biased) { return tk_float((254u - biased) << 23); }
TK_FN unsigned tk_sf_e4m3(unsigned amax, float qmax) {
  return amax >= 0x7f800000u ? 0x7fu : tk_e4m3x1(tk_sf_plain(amax, qmax));
}
// One Newton step from the approximation is exact for every code.
TK_FN float tk_inv_e4m3(unsigned sf) {
  float v[4];
  tk_from_e4m3x4(v, sf);
  const float s = tk_rcp(v[0]);
  return sf - 1u < 0x7eu ? __fmaf_rn(s, __fmaf_rn(-v[0], s, 1.0f), s) : 0x1.fffffep127f;
}
// Whether magnitudes over some of these scales can pass qmax by more than a fifteenth: they were not rounded as normal
// numbers.
template <int kCount>
TK_FN bool tk_are_coarse(const unsigned* sf) {
  bool coarse = false;
#pragma unroll
  for (int i = 0; i < kCount; ++i) coarse = coarse || sf[i] - 8u > 0x75u;
  return coarse;
}
// UE8M0 to fp32 as OCP MX has it: byte 0 is 2^-127, byte 255 is NaN.
TK_FN float tk_from_ue8m0(unsigned byte) {
  return tk_float(byte == 0u ? 0x00400000u : byte == 255u ? 0x7fc00000u : byte << 23);
}
"""

_STOCHASTIC = r"""
// Random bits for four values to be rounded: a hash of their fp32 patterns and of the index of the quad.
TK_FN unsigned tk_hash(const float* v, unsigned index) {
  unsigned h = tk_bits(v[0]) * 0x5671D42Bu + tk_bits(v[1]) * 0x9995E499u + tk_bits(v[2]) * 0xACE1B8A5u +
               tk_bits(v[3]) * 0xE153538Du + index;
  h ^= h >> 23;
  h *= 0x7FEB352Du;
  return h ^ h >> 16;
}
TK_FN unsigned tk_hash0(unsigned h) {
  const unsigned r = h * 0x846CA68Bu;
  return r ^ r >> 11;
}
TK_FN unsigned tk_hash1(unsigned h) {
  const unsigned r = h * 0xD35A2D97u;
  return r ^ r >> 11;
}
TK_FN unsigned tk_rotl(unsigned r, int n) { return n ? r << n | r >> (32 - n) : r; }

// |v| rounded stochastically to the grid whose smallest binade starts at `low` and has 2^bits steps: up where
// r < floor(2^32 fraction). The fraction is exact: it is a difference of multiples of the last bit of v.
TK_FN float tk_stochastic(float a, unsigned r, float low, int bits) {
  unsigned p = tk_bits(a) & 0x7f800000u;
  p = p > tk_bits(low) ? p : tk_bits(low);
  const float t = __fmul_rn(a, tk_float(((254u + bits) << 23) - p));       // in steps
  const float whole = __fsub_rn(__fadd_rz(t, 8388608.0f), 8388608.0f);
  const unsigned cut = __float2uint_rz(__fmul_rn(__fsub_rn(t, whole), 4294967296.0f));
  return __fmul_rn(r < cut ? __fadd_rn(whole, 1.0f) : whole, tk_float(p - ((unsigned)bits << 23)));
}
// The smaller one, or NaN if one is.
TK_FN float tk_least(float a, float b) {
#ifdef __CUDA_ARCH__
  float out;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
#else
  return a != a || b < a ? (a != a ? a : b) : b != b ? b : a;
#endif
}
TK_FN float tk_copysign(float a, float v) { return tk_float((tk_bits(a) & 0x7fffffffu) | (tk_bits(v) & 0x80000000u)); }
TK_FN float tk_stochastic_e4m3(float v, unsigned r) {
  if (!(fabsf(v) < 448.0f)) return v;
  return tk_copysign(tk_stochastic(fabsf(v), r, 0x1p-6f, 3), v);
}
TK_FN unsigned tk_e4m3x4_stochastic(const float* v, unsigned index) {
  const unsigned r = tk_hash0(tk_hash(v, index));
  float s[4];
  const float least = tk_least(tk_least(fabsf(v[0]), fabsf(v[1])), tk_least(fabsf(v[2]), fabsf(v[3])));
  if (least >= 0x1p-6f) {
    // Normal codes, or saturated: r < 2^12 fraction is a carry out of the cut bits of fraction + ~r.
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = tk_float((tk_bits(v[i]) + (~tk_rotl(r, 8 * i) >> 12)) & 0xfff00000u);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = tk_stochastic_e4m3(v[i], tk_rotl(r, 8 * i));
  }
  return tk_e4m3x4(s);
}
// Four values to two bytes of e2m1; the rounded values are exact, so the encoder only packs them.
TK_FN unsigned tk_e2m1x4_stochastic(const float* v, unsigned index) {
  const unsigned r = tk_hash0(tk_hash(v, index));
  float s[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float a = fminf(fabsf(v[i]), 6.0f);
    s[i] = tk_copysign(tk_stochastic(a, tk_rotl(r, 8 * i), 1.0f, 1), v[i]);
  }
  return tk_e2m1x4(s, false);
}
// Eight short values (as of tk_e2m1x8_short). Times 2^-126 their patterns hold the code in bits 24..22 and the fraction
// below, exact for multiples of 2^-23: zeros and magnitudes from 2^-16 on. r < 2^32 fraction is then a carry.
TK_FN unsigned tk_e2m1x8_short_stochastic(const float* v, unsigned index) {
  unsigned least = 0xffffffffu, out = 0u;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const unsigned before = (tk_bits(v[i]) & 0x7fffffffu) - 1u;  // the largest number for a zero
    least = before < least ? before : least;
  }
  if (least < 0x377fffffu) return tk_e2m1x4_stochastic(v, index) | tk_e2m1x4_stochastic(v + 4, index + 1) << 16;
#pragma unroll
  for (int q = 1; q >= 0; --q) {
    const unsigned noise = ~tk_hash0(tk_hash(v + 4 * q, index + q));
#pragma unroll
    for (int i = 3; i >= 0; --i) {
      const float x = v[4 * q + i];
      const unsigned code = (tk_bits(__fmul_rn(fabsf(x), 0x1p-126f)) << 6) + (tk_rotl(noise, 8 * i) >> 4);
      out = out << 4 | (code | (tk_bits(x) & 0x80000000u)) >> 28;
    }
  }
  return out;
}
// One value to bf16 bits: up where the 16 random bits are below the cut ones; saturates, keeps Inf, quiets NaN.
TK_FN unsigned tk_bf16_stochastic(float v, unsigned r) {
  const unsigned b = tk_bits(v), magnitude = b & 0x7fffffffu;
  if (magnitude >= 0x7f800000u) return (b >> 16) | (magnitude > 0x7f800000u ? 0x40u : 0u);
  const unsigned up = (b >> 16) + ((r & 0xffffu) < (b & 0xffffu) ? 1u : 0u);
  return (up & 0x7fffu) == 0x7f80u ? up - 1u : up;
}
TK_FN void tk_bf16x4_stochastic(unsigned* pairs, const float* v, unsigned index) {
  const unsigned h = tk_hash(v, index), r0 = tk_hash0(h), r1 = tk_hash1(h);
  pairs[0] = tk_bf16_stochastic(v[0], r0) | tk_bf16_stochastic(v[1], r0 >> 16) << 16;
  pairs[1] = tk_bf16_stochastic(v[2], r1) | tk_bf16_stochastic(v[3], r1 >> 16) << 16;
}
#endif
"""

SOURCE = _BASE + _AMAX + _E4M3 + _E2M1 + _E5M6 + _SCALES + _STOCHASTIC
