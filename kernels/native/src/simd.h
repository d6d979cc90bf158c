// Vectors of the host's width through the compiler's vector extensions, and what torch's bfloat16 is in memory.
// Knows no kernel. Everything else that depends on the instruction set is behind these few functions.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include <arm_neon.h>
#endif

// The number of floats in a vector; may be set beyond what the host has, then the compiler splits each vector.
#ifndef QUIRE_LANES
#if defined(__AVX512F__)
#define QUIRE_LANES 16
#elif defined(__AVX__)
#define QUIRE_LANES 8
#else
#define QUIRE_LANES 4
#endif
#endif

#define QUIRE_INLINE static inline __attribute__((always_inline))

// Compiled once for all callers.
#define QUIRE_OUTLINE static __attribute__((noinline))

// Keeps a vector in a register: else compilers read it from memory again for every product.
#if (defined(__AVX512F__) && QUIRE_LANES == 16) || (defined(__AVX__) && QUIRE_LANES == 8)
#define QUIRE_KEEP(vector) asm("" : "+v"(vector))
#elif defined(__aarch64__) && QUIRE_LANES == 4
#define QUIRE_KEEP(vector) asm("" : "+w"(vector))
#else
#define QUIRE_KEEP(vector) (void)0
#endif

// Where registers are few: values read before this are read again after it, not kept.
#if defined(__AVX512F__) || defined(__aarch64__)
#define QUIRE_READ_AGAIN() (void)0
#else
#define QUIRE_READ_AGAIN() asm volatile("" ::: "memory")
#endif

namespace quire {

constexpr int LANES = QUIRE_LANES;
constexpr int GROUP = 16;                     // tokens or dimensions that go together in packed blocks
constexpr int GROUP_VECTORS = GROUP / LANES;  // a group as vectors
// How many sums a loop keeps in registers, beside what it multiplies: a few words and factors, or halves of words too.
#if defined(__AVX512F__)
constexpr int NUM_SUMS = 24, NUM_SUMS_OF_HALVES = 16;  // of 32 registers
#elif defined(__aarch64__)
constexpr int NUM_SUMS = 16, NUM_SUMS_OF_HALVES = 16;  // of 32 registers
#else
constexpr int NUM_SUMS = 12, NUM_SUMS_OF_HALVES = 8;  // of 16
#endif
static_assert(GROUP % LANES == 0, "a group is a whole number of vectors");

typedef float vfloat __attribute__((vector_size(LANES * 4)));
typedef int32_t vint __attribute__((vector_size(LANES * 4)));
typedef uint32_t vuint __attribute__((vector_size(LANES * 4)));
typedef uint16_t vhalf __attribute__((vector_size(LANES * 2)));
typedef int8_t vbyte __attribute__((vector_size(LANES)));

struct bf16 {
  uint16_t bits;
};

template <class V, class T>
QUIRE_INLINE V load(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}

template <class V, class T>
QUIRE_INLINE void store(T* p, V v) {
  std::memcpy(p, &v, sizeof(V));
}

template <class V, class T>
QUIRE_INLINE V bits_as(T v) {
  static_assert(sizeof(V) == sizeof(T), "the same bits");
  V as;
  std::memcpy(&as, &v, sizeof(V));
  return as;
}

QUIRE_INLINE vfloat all(float x) { return vfloat{} + x; }

// b where either is NaN.
QUIRE_INLINE vfloat greater(vfloat a, vfloat b) {
#if defined(__AVX512F__) && QUIRE_LANES == 16
  return (vfloat)_mm512_max_ps((__m512)a, (__m512)b);  // compilers take two instructions for the other form
#else
  return a > b ? a : b;
#endif
}

QUIRE_INLINE vint lane_numbers() {
  vint numbers;
  for (int i = 0; i < LANES; ++i) numbers[i] = i;
  return numbers;
}

QUIRE_INLINE float sum_of(vfloat v) {
  float lanes[LANES];
  store(lanes, v);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

QUIRE_INLINE float max_of(vfloat v) {
#if QUIRE_LANES == 16 && !defined(__clang__)
  v = greater(v, __builtin_shuffle(v, vint{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}));
  v = greater(v, __builtin_shuffle(v, vint{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}));
  v = greater(v, __builtin_shuffle(v, vint{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}));
  v = greater(v, __builtin_shuffle(v, vint{1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}));
  return v[0];
#endif
  float lanes[LANES];
  store(lanes, v);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  return lanes[0];
}

// Two bfloat16 side by side in each lane, as floats: a bfloat16 is the upper half of its float.
QUIRE_INLINE vfloat first_of(vuint pairs) { return bits_as<vfloat>(pairs << 16); }
QUIRE_INLINE vfloat second_of(vuint pairs) { return bits_as<vfloat>(pairs & 0xffff0000u); }

// function(bf16()) or function(float()), as rows are stored.
template <class F>
void with_storage(bool half, F&& function) {
  half ? function(bf16()) : function(float());
}

QUIRE_INLINE float to_float(float x) { return x; }
QUIRE_INLINE float to_float(int8_t x) { return x; }
QUIRE_INLINE float to_float(bf16 x) { return bits_as<float>(static_cast<uint32_t>(x.bits) << 16); }

QUIRE_INLINE vfloat load_floats(const float* p) { return load<vfloat>(p); }
// GCC emits four instructions for a conversion that needs one.
QUIRE_INLINE vuint widened_halves(vhalf x) {
#if defined(__AVX512F__) && QUIRE_LANES == 16 && !defined(__clang__)
  typedef short shorts __attribute__((vector_size(32)));
  typedef int ints __attribute__((vector_size(64)));
  return (vuint)__builtin_ia32_pmovzxwd512_mask((shorts)x, ints{}, 0xffff);
#elif defined(__AVX2__) && QUIRE_LANES == 8 && !defined(__clang__)
  typedef short shorts __attribute__((vector_size(16)));
  return (vuint)__builtin_ia32_pmovzxwd256((shorts)x);
#else
  return __builtin_convertvector(x, vuint);
#endif
}

QUIRE_INLINE vfloat load_floats(const bf16* p) { return bits_as<vfloat>(widened_halves(load<vhalf>(p)) << 16); }

// One instruction each to load and to widen, which compilers do not find by themselves.
QUIRE_INLINE vfloat load_floats(const int8_t* p) {
#if defined(__AVX512F__) && QUIRE_LANES == 16
  // With a mask, since GCC 12 warns of the undefined values in the unmasked ones.
  __m512i whole = _mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128((const __m128i*)p));
  return bits_as<vfloat>(_mm512_maskz_cvtepi32_ps(0xffff, whole));
#elif defined(__AVX2__) && QUIRE_LANES == 8
  return bits_as<vfloat>(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))));
#else
  return __builtin_convertvector(__builtin_convertvector(load<vbyte>(p), vint), vfloat);
#endif
}

// True if the processor multiplies pairs of bfloat16: products are exact, sums are in float32.
#if defined(__AVX512BF16__) && QUIRE_LANES == 16
#define QUIRE_PAIRS 1
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && QUIRE_LANES == 4
#define QUIRE_PAIRS 1
#else
#define QUIRE_PAIRS 0
#endif

#if QUIRE_PAIRS
QUIRE_INLINE vuint load_pairs(const bf16* p) { return load<vuint>(p); }
#if defined(__AVX512BF16__)
QUIRE_INLINE vuint load_pairs(const int8_t* p) {
  return (vuint)_mm512_cvtne2ps_pbh((__m512)load_floats(p + LANES), (__m512)load_floats(p));
}
QUIRE_INLINE vfloat add_pairs(vfloat sum, vuint a, vuint b) {
  return (vfloat)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
#else
QUIRE_INLINE vuint load_pairs(const int8_t* p) {
  bfloat16x8_t first = vcvtq_low_bf16_f32((float32x4_t)load_floats(p));
  return (vuint)vcvtq_high_bf16_f32(first, (float32x4_t)load_floats(p + LANES));
}
QUIRE_INLINE vfloat add_pairs(vfloat sum, vuint a, vuint b) {
  return (vfloat)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
}
#endif
#endif

// To the nearest, ties to even; NaN stays NaN. AVX-512's own rounding takes numbers below 2^-126 for zero.
QUIRE_INLINE vhalf rounded(vfloat x) {
#if QUIRE_PAIRS && defined(__AVX512BF16__)
  return (vhalf)_mm512_cvtneps_pbh((__m512)x);
#elif QUIRE_PAIRS
  return (vhalf)vcvt_bf16_f32((float32x4_t)x);
#else
  vuint bits = bits_as<vuint>(x);
  vuint halves = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return __builtin_convertvector(x == x ? halves : (vuint{} + 0x7fc0u), vhalf);
#endif
}

QUIRE_INLINE void store_floats(float* p, vfloat x) { store(p, x); }
QUIRE_INLINE void store_floats(bf16* p, vfloat x) { store(p, rounded(x)); }

QUIRE_INLINE void set_float(float& to, float x) { to = x; }
QUIRE_INLINE void set_float(bf16& to, float x) {
  uint32_t bits = bits_as<uint32_t>(x);
#if QUIRE_PAIRS && defined(__AVX512BF16__)
  if ((bits & 0x7f800000u) == 0) bits &= 0x80000000u;
#endif
  uint32_t half = x == x ? (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16 : 0x7fc0u;
  to.bits = static_cast<uint16_t>(half);
}

// Numbers of one storage into another.
template <class To, class From>
QUIRE_INLINE void copy_floats(To* to, const From* from, int64_t size) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) store_floats(to + i, load_floats(from + i));
  for (; i < size; ++i) set_float(to[i], to_float(from[i]));
}

// Common part of exp_of and exp_below: e^x = 2^whole * fraction, for x between -87 and 88.7.
struct Power {
  vint whole;
  vfloat fraction;
};

QUIRE_INLINE Power power_of(vfloat x) {
  const float MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which is in the low bits
  vfloat shifted = x * 1.44269504088896341f + MAGIC;
  vfloat n = shifted - MAGIC;
  vfloat r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  vfloat p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return {bits_as<vint>(shifted) - bits_as<int32_t>(MAGIC), p * (r * r) + r + 1.0f};
}

// e^x to about 2 units in the last place; 0 below -87, infinity above 88.7, NaN for NaN.
QUIRE_INLINE vfloat exp_of(vfloat x) {
  vfloat bounded = x < -87.0f ? all(-87.0f) : x;
  bounded = bounded > 88.7f ? all(88.7f) : bounded;
  Power power = power_of(bounded);
  // In two steps, since 2^128 is no float though 2^127 times 1.99 is.
  vint half = power.whole >> 1;
  vfloat y = power.fraction * bits_as<vfloat>((half + 127) << 23);
  y *= bits_as<vfloat>((power.whole - half + 127) << 23);
  y = x < -87.0f ? vfloat{} : y;
  return x > 88.7f ? all(std::numeric_limits<float>::infinity()) : y;
}

// The same for x that is not above 0, in about half the instructions.
QUIRE_INLINE vfloat exp_below(vfloat x) {
#if defined(__AVX512F__) && QUIRE_LANES == 16
  const float LOG2_E = 1.44269504088896341f, LOG2_E_REST = 1.92596299112661e-8f;
  vfloat bounded = greater(all(-700.0f), x);  // 2^-1010 is 0 below
  vfloat n = (vfloat)_mm512_roundscale_ps((__m512)(bounded * LOG2_E), 0);
  vfloat r = bounded * LOG2_E - n + bounded * LOG2_E_REST;
  vfloat p = all(1.535336188319500e-4f);
  p = p * r + 1.339887440266574e-3f;
  p = p * r + 9.618437357674640e-3f;
  p = p * r + 5.550332471162809e-2f;
  p = p * r + 2.402264791363012e-1f;
  p = p * r + 6.931472028550421e-1f;
  return (vfloat)_mm512_scalef_ps((__m512)(p * r + 1.0f), (__m512)n);
#endif
  Power power = power_of(x < -87.0f ? all(-87.0f) : x);
  vfloat y = power.fraction * bits_as<vfloat>((power.whole + 127) << 23);
  return x < -87.0f ? vfloat{} : y;
}

QUIRE_INLINE float exp_of(float x) { return exp_of(all(x))[0]; }

}  // namespace quire
