// Sixteen fp32 lanes, the same on every processor: AVX-512, AVX2 (two registers) or plain C++.
//
// Every kernel is written once over F16, with explicit fused multiply-adds (the build turns contraction off), so that
// the order and rounding of additions is a property of the source and not of the compiler, the remainder of a
// vector or the instruction set.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define VIME_AVX512 1
#elif defined(__AVX2__) && defined(__FMA__)
#define VIME_AVX2 1
#endif
#if defined(VIME_AVX512) || defined(VIME_AVX2)
#include <immintrin.h>
#endif

namespace vime {

struct bf16 { uint16_t bits; };

inline float to_float(bf16 x) { uint32_t u = uint32_t(x.bits) << 16; float f; std::memcpy(&f, &u, 4); return f; }
inline float to_float(float x) { return x; }

// Round to nearest even, NaN to the quiet NaN that torch writes. Subnormals are kept (vcvtneps2bf16 would drop them).
inline bf16 to_bf16(float x) {
  if (x != x) return {0x7FC0};
  uint32_t u; std::memcpy(&u, &x, 4);
  return {uint16_t((u + 0x7FFF + ((u >> 16) & 1)) >> 16)};
}
inline void put(float* p, float x) { *p = x; }
inline void put(bf16* p, float x) { *p = to_bf16(x); }

constexpr int W = 16;  // lanes

#if defined(VIME_AVX512)
struct F16 { __m512 v; };
struct I16 { __m512i v; };
inline F16 set1(float x) { return {_mm512_set1_ps(x)}; }
inline F16 zero() { return {_mm512_setzero_ps()}; }
inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F16 x) { _mm512_storeu_ps(p, x.v); }
inline F16 load(const bf16* p) {
  __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(w, 16))};
}
inline __m256i round_bf16(__m512 x) {
  __m512i u = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
  r = _mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7FC0));
  return _mm512_cvtepi32_epi16(r);
}
inline void store(bf16* p, F16 x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), round_bf16(x.v)); }
inline F16 load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p)}; }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
// Lanes below n keep a, the others take b.
inline F16 first_n(int n, F16 a, F16 b) { return {_mm512_mask_blend_ps(n >= W ? 0xFFFF : __mmask16((1u << n) - 1), b.v, a.v)}; }
// where(a < b, x, y); false for NaN
inline F16 where_less(F16 a, F16 b, F16 x, F16 y) { return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)}; }
inline F16 round_even(F16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline I16 to_int(F16 a) { return {_mm512_cvtps_epi32(a.v)}; }
inline F16 to_f(I16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I16 bits(F16 a) { return {_mm512_castps_si512(a.v)}; }
inline F16 from_bits(I16 a) { return {_mm512_castsi512_ps(a.v)}; }
inline I16 iset1(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I16 operator+(I16 a, I16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I16 operator-(I16 a, I16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline I16 operator&(I16 a, I16 b) { return {_mm512_and_si512(a.v, b.v)}; }
inline I16 operator|(I16 a, I16 b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int n> inline I16 shl(I16 a) { return {_mm512_slli_epi32(a.v, n)}; }
template <int n> inline I16 sar(I16 a) { return {_mm512_srai_epi32(a.v, n)}; }
inline __m256 fold8(F16 a) { return _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1)); }
#elif defined(VIME_AVX2)
struct F16 { __m256 a, b; };
struct I16 { __m256i a, b; };
inline F16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F16 x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
inline __m256 widen8(const bf16* p) {
  __m256i w = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
}
inline F16 load(const bf16* p) { return {widen8(p), widen8(p + 8)}; }
inline __m256i round8(__m256 x) {
  __m256i u = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
  return _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7FC0), _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
inline void store(bf16* p, F16 x) {
  __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(round8(x.a), round8(x.b)), 0xD8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed);
}
inline F16 load_n(const float* p, int n) { float t[16] = {}; std::memcpy(t, p, n * sizeof(float)); return load(t); }
inline F16 fma(F16 x, F16 y, F16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F16 operator+(F16 x, F16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F16 operator-(F16 x, F16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F16 operator*(F16 x, F16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F16 operator/(F16 x, F16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline __m256 below8(int n) {
  return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)));
}
inline F16 first_n(int n, F16 x, F16 y) { return {_mm256_blendv_ps(y.a, x.a, below8(n)), _mm256_blendv_ps(y.b, x.b, below8(n - 8))}; }
inline F16 where_less(F16 p, F16 q, F16 x, F16 y) {
  return {_mm256_blendv_ps(y.a, x.a, _mm256_cmp_ps(p.a, q.a, _CMP_LT_OQ)), _mm256_blendv_ps(y.b, x.b, _mm256_cmp_ps(p.b, q.b, _CMP_LT_OQ))};
}
inline F16 round_even(F16 x) {
  return {_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline I16 to_int(F16 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline F16 to_f(I16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I16 bits(F16 x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
inline F16 from_bits(I16 x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
inline I16 iset1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I16 operator+(I16 x, I16 y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I16 operator-(I16 x, I16 y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
inline I16 operator&(I16 x, I16 y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
inline I16 operator|(I16 x, I16 y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
template <int n> inline I16 shl(I16 x) { return {_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)}; }
template <int n> inline I16 sar(I16 x) { return {_mm256_srai_epi32(x.a, n), _mm256_srai_epi32(x.b, n)}; }
inline __m256 fold8(F16 x) { return _mm256_add_ps(x.a, x.b); }
#else
struct F16 { float v[16]; };
struct I16 { int32_t v[16]; };
#define VIME_EACH for (int i = 0; i < 16; ++i)
inline F16 set1(float x) { F16 r; VIME_EACH r.v[i] = x; return r; }
inline F16 zero() { return set1(0.f); }
inline F16 load(const float* p) { F16 r; VIME_EACH r.v[i] = p[i]; return r; }
inline F16 load(const bf16* p) { F16 r; VIME_EACH r.v[i] = to_float(p[i]); return r; }
inline void store(float* p, F16 x) { VIME_EACH p[i] = x.v[i]; }
inline void store(bf16* p, F16 x) { VIME_EACH p[i] = to_bf16(x.v[i]); }
inline F16 load_n(const float* p, int n) { float t[16] = {}; std::memcpy(t, p, n * sizeof(float)); return load(t); }
inline F16 fma(F16 a, F16 b, F16 c) { F16 r; VIME_EACH r.v[i] = std::fma(a.v[i], b.v[i], c.v[i]); return r; }
inline F16 operator+(F16 a, F16 b) { F16 r; VIME_EACH r.v[i] = a.v[i] + b.v[i]; return r; }
inline F16 operator-(F16 a, F16 b) { F16 r; VIME_EACH r.v[i] = a.v[i] - b.v[i]; return r; }
inline F16 operator*(F16 a, F16 b) { F16 r; VIME_EACH r.v[i] = a.v[i] * b.v[i]; return r; }
inline F16 operator/(F16 a, F16 b) { F16 r; VIME_EACH r.v[i] = a.v[i] / b.v[i]; return r; }
inline F16 first_n(int n, F16 a, F16 b) { F16 r; VIME_EACH r.v[i] = i < n ? a.v[i] : b.v[i]; return r; }
inline F16 where_less(F16 a, F16 b, F16 x, F16 y) { F16 r; VIME_EACH r.v[i] = a.v[i] < b.v[i] ? x.v[i] : y.v[i]; return r; }
inline F16 round_even(F16 a) { F16 r; VIME_EACH r.v[i] = std::nearbyint(a.v[i]); return r; }
inline I16 to_int(F16 a) { I16 r; VIME_EACH r.v[i] = a.v[i] > -2e9f && a.v[i] < 2e9f ? int32_t(std::nearbyint(a.v[i])) : INT32_MIN; return r; }
inline F16 to_f(I16 a) { F16 r; VIME_EACH r.v[i] = float(a.v[i]); return r; }
inline I16 bits(F16 a) { I16 r; std::memcpy(&r, &a, 64); return r; }
inline F16 from_bits(I16 a) { F16 r; std::memcpy(&r, &a, 64); return r; }
inline I16 iset1(int32_t x) { I16 r; VIME_EACH r.v[i] = x; return r; }
inline I16 operator+(I16 a, I16 b) { I16 r; VIME_EACH r.v[i] = int32_t(uint32_t(a.v[i]) + uint32_t(b.v[i])); return r; }
inline I16 operator-(I16 a, I16 b) { I16 r; VIME_EACH r.v[i] = int32_t(uint32_t(a.v[i]) - uint32_t(b.v[i])); return r; }
inline I16 operator&(I16 a, I16 b) { I16 r; VIME_EACH r.v[i] = a.v[i] & b.v[i]; return r; }
inline I16 operator|(I16 a, I16 b) { I16 r; VIME_EACH r.v[i] = a.v[i] | b.v[i]; return r; }
template <int n> inline I16 shl(I16 a) { I16 r; VIME_EACH r.v[i] = int32_t(uint32_t(a.v[i]) << n); return r; }
template <int n> inline I16 sar(I16 a) { I16 r; VIME_EACH r.v[i] = a.v[i] >> n; return r; }
#undef VIME_EACH
#endif

// Sixteen words of two bf16 as they lie, and one of the two in fp32: the low half (0) or the high one (1).
#if defined(VIME_AVX512)
inline F16 load_words(const bf16* p) { return {_mm512_loadu_ps(p)}; }
#elif defined(VIME_AVX2)
inline F16 load_words(const bf16* p) {
  const auto* x = reinterpret_cast<const __m256i*>(p);
  return {_mm256_castsi256_ps(_mm256_loadu_si256(x)), _mm256_castsi256_ps(_mm256_loadu_si256(x + 1))};
}
#else
inline F16 load_words(const bf16* p) { F16 x; std::memcpy(&x, p, 64); return x; }
#endif
inline F16 load_words_upto(const bf16* p, int64_t n) {
  if (n >= W) return load_words(p);
  bf16 t[2 * W] = {};
  std::memcpy(t, p, size_t(n) * 4);
  return load_words(t);
}
template <int part> inline F16 half_of(F16 words) {
  if constexpr (part == 0) return from_bits(shl<16>(bits(words)));
  else return from_bits(bits(words) & iset1(int32_t(0xFFFF0000)));
}
// To the dtype T and back.
template <class T> inline F16 round_to(F16 x);
template <> inline F16 round_to<float>(F16 x) { return x; }
#if defined(VIME_AVX512)
template <> inline F16 round_to<bf16>(F16 x) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(round_bf16(x.v)), 16))}; }
#else
template <> inline F16 round_to<bf16>(F16 x) { bf16 t[16]; store(t, x); return load(t); }
#endif
inline F16 load_n(const bf16* p, int n) { bf16 t[16] = {}; std::memcpy(t, p, n * sizeof(bf16)); return load(t); }
template <class T> inline void store_n(T* p, F16 x, int n) { T t[16]; store(t, x); std::memcpy(p, t, n * sizeof(T)); }
template <class T> inline F16 load_upto(const T* p, int64_t n) { return n >= W ? load(p) : load_n(p, int(n)); }
template <class T> inline void store_upto(T* p, F16 x, int64_t n) { if (n >= W) store(p, x); else store_n(p, x, int(n)); }
// The larger; the second where one is NaN (as x86 max does).
#if defined(VIME_AVX512)
inline F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
#elif defined(VIME_AVX2)
inline F16 max(F16 a, F16 b) { return {_mm256_max_ps(a.a, b.a), _mm256_max_ps(a.b, b.b)}; }
#else
inline F16 max(F16 a, F16 b) { return where_less(b, a, a, b); }
#endif

// f(0), f(1), ... f(N - 1) with constants, so that an array of registers stays one.
template <int N, class F>
inline __attribute__((always_inline)) void each(const F& f) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) { (f(std::integral_constant<int, I>{}), ...); }(std::make_integer_sequence<int, N>{});
}
#define VIME_DO(name) [&](auto name) __attribute__((always_inline))

// body(k, n): whole vectors first (n a constant, so that its tests vanish), then the rest through the same code.
template <class Body>
inline __attribute__((always_inline)) void vectors(int64_t size, const Body& body) {
  int64_t k = 0;
  for (; k + W <= size; k += W) body(k, int64_t(W));
  if (k < size) body(k, size - k);
}
// The same, telling which of four accumulators is next, by a constant.
template <class Body>
inline __attribute__((always_inline)) void vectors4(int64_t size, const Body& body) {
  int64_t k = 0;
  for (; k + 4 * W <= size; k += 4 * W) each<4>(VIME_DO(i) { body(i, k + i * W, int64_t(W)); });
  each<4>(VIME_DO(i) { if (k < size) body(i, k, std::min<int64_t>(W, size - k)), k += W; });
}

// Sum of the lanes: i with i+8, then +4, +2, +1. The only order used anywhere.
#if defined(VIME_AVX512) || defined(VIME_AVX2)
inline float hsum(F16 x) {
  __m256 h = fold8(x);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
inline void hsum4(const F16* x, float* out) {  // four at once, the same order
#if defined(VIME_AVX512)
  auto halves = [](__m512 a, __m512 b) { return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE)); };
  __m512 ab = halves(x[0].v, x[1].v), cd = halves(x[2].v, x[3].v);
  __m512 q = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
  q = _mm512_add_ps(q, _mm512_permute_ps(q, 0x4E));
  q = _mm512_add_ps(q, _mm512_permute_ps(q, 0xB1));
  _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, q)));
#else
  __m128 q[4];
  for (int i = 0; i < 4; ++i) { __m256 h = fold8(x[i]); q[i] = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1)); }
  __m128 ab = _mm_add_ps(_mm_unpacklo_ps(q[0], q[1]), _mm_unpackhi_ps(q[0], q[1]));
  __m128 cd = _mm_add_ps(_mm_unpacklo_ps(q[2], q[3]), _mm_unpackhi_ps(q[2], q[3]));
  _mm_storeu_ps(out, _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab)));
#endif
}
#else
inline float hsum(F16 x) {
  for (int s = 8; s; s >>= 1) for (int i = 0; i < s; ++i) x.v[i] += x.v[i + s];
  return x.v[0];
}
inline void hsum4(const F16* x, float* out) { for (int i = 0; i < 4; ++i) out[i] = hsum(x[i]); }
#endif
#if defined(VIME_AVX512)
inline float hmax(F16 x) { return _mm512_reduce_max_ps(x.v); }
#else
inline float hmax(F16 x) {
  float t[16]; store(t, x);
  float m = t[0];
  for (int i = 1; i < 16; ++i) m = t[i] > m ? t[i] : m;
  return m;
}
#endif

// exp, about 1 ulp (Cephes expf polynomial). 0 below -87.33, so that no result is subnormal; inf above 88.72.
inline F16 exp(F16 x) {
  F16 n = round_even(x * set1(1.44269504088896341f));
  n = where_less(set1(128.f), n, set1(128.f), n);
  F16 r = fma(n, set1(2.12194440e-4f), fma(n, set1(-0.693359375f), x));
  F16 p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r) + set1(1.f);
  I16 k = to_int(n), half = sar<1>(k), bias = iset1(127);
  p = p * from_bits(shl<23>(half + bias)) * from_bits(shl<23>((k - half) + bias));
  p = where_less(x, set1(-87.33654f), zero(), p);
  return where_less(set1(88.7228394f), x, set1(std::numeric_limits<float>::infinity()), p);
}

// The same bits for x <= 0, as after a maximum was taken off: nothing can overflow, and one exact factor does.
inline F16 exp_down(F16 x) {
  F16 n = round_even(x * set1(1.44269504088896341f));
  F16 r = fma(n, set1(2.12194440e-4f), fma(n, set1(-0.693359375f), x));
  F16 p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r) + set1(1.f);
  return where_less(x, set1(-87.33654f), zero(), p * from_bits(shl<23>(to_int(n) + iset1(127))));
}

// log((1 + f) * 2^e) for 1 + f in [sqrt(1/2), sqrt(2)), about 1 ulp (Cephes logf polynomial).
inline F16 log_reduced(F16 f, F16 e) {
  F16 z = f * f;
  F16 p = set1(7.0376836292e-2f);
  p = fma(p, f, set1(-1.1514610310e-1f));
  p = fma(p, f, set1(1.1676998740e-1f));
  p = fma(p, f, set1(-1.2420140846e-1f));
  p = fma(p, f, set1(1.4249322787e-1f));
  p = fma(p, f, set1(-1.6668057665e-1f));
  p = fma(p, f, set1(2.0000714765e-1f));
  p = fma(p, f, set1(-2.4999993993e-1f));
  p = fma(p, f, set1(3.3333331174e-1f));
  F16 y = fma(e, set1(-2.12194440e-4f), f * z * p);
  y = fma(z, set1(-0.5f), y);
  return fma(e, set1(0.693359375f), f + y);
}

// log of a positive, normal, finite number.
inline F16 log(F16 x) {
  I16 u = bits(x), offset = iset1(0x3F3504F3);  // sqrt(1/2)
  I16 e = sar<23>(u - offset);
  F16 m = from_bits(u - shl<23>(e));
  return log_reduced(m - set1(1.f), to_f(e));
}
inline float log1(float x) { float t[16]; store(t, log(set1(x))); return t[0]; }

#if defined(VIME_AVX512)
inline void transpose16(__m512i* r) {  // 16 x 16 words of 32 bits
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]), t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]), r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]), r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88), t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xDD);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88), t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xDD);
  }
  for (int i = 0; i < 8; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88), r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
  }
}
#endif

}  // namespace vime
