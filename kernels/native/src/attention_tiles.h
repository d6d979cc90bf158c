// The two products of attention over a tile of keys, with sums in registers: scores of some rows of queries, and the
// weighted sum of values. Knows packed groups of 16 tokens, no blocks, rows or masks.
//
// A row is one query head of one token. Keys of a group lie dimension by dimension, 16 tokens side by side, so that
// one vector adds to the scores of its tokens without sums across lanes; in bfloat16 two dimensions of a token are one
// 32-bit word. Values lie token by token; in bfloat16 two tokens of a dimension are one word.
#pragma once

#include "simd.h"

namespace quire {

constexpr int TILE_GROUPS = 4;
constexpr int TILE = TILE_GROUPS * GROUP;  // keys that are scored before their softmax
constexpr int MAX_SUM_ROWS = NUM_SUMS / 4;  // rows whose sums are in registers together

// Multiplication of words of storage S by a row's factors, FACTORS numbers for each word.
// float and int8_t go one by one, as float32; the caller multiplies by the scales of int8.
template <class S>
struct Products {
  static constexpr int STEP = 1;  // dimensions of keys, or tokens of values, in a word
  static constexpr int FACTORS = 1;
  static constexpr bool ROUNDS = false;
  static constexpr int SUMS = NUM_SUMS;  // in registers
  typedef S Word;
  typedef float Factor;

  template <int R, int N>
  QUIRE_INLINE void add(vfloat (&sums)[R][N], const Word* const (&words)[N], const Factor* factors, int64_t stride) {
    for (int n = 0; n < N; ++n) {
      vfloat word = load_floats(words[n]);
      if (R > 1) QUIRE_KEEP(word);
      for (int r = 0; r < R; ++r) sums[r][n] += word * factors[r * stride];
    }
  }
};

template <>
struct Products<bf16> {
  static constexpr int STEP = 2;
  typedef uint32_t Word;

#if QUIRE_PAIRS
  // Queries are bfloat16 already; weights are rounded to it.
  static constexpr int FACTORS = 1;
  static constexpr bool ROUNDS = true;  // factors are pairs of bfloat16
  static constexpr int SUMS = NUM_SUMS;
  typedef uint32_t Factor;

  template <int R, int N>
  QUIRE_INLINE void add(vfloat (&sums)[R][N], const Word* const (&words)[N], const Factor* factors, int64_t stride) {
    for (int n = 0; n < N; ++n) {
      vuint word = load<vuint>(words[n]);
      if (R > 1) QUIRE_KEEP(word);
      for (int r = 0; r < R; ++r) sums[r][n] = add_pairs(sums[r][n], word, factors[r * stride] - vuint{});
    }
  }
#else
  static constexpr int FACTORS = 2;
  static constexpr bool ROUNDS = false;
  static constexpr int SUMS = NUM_SUMS_OF_HALVES;
  typedef float Factor;

  template <int R, int N>
  QUIRE_INLINE void add(vfloat (&sums)[R][N], const Word* const (&words)[N], const Factor* factors, int64_t stride) {
    for (int n = 0; n < N; ++n) {
      vfloat first = first_of(load<vuint>(words[n]));
      for (int r = 0; r < R; ++r) sums[r][n] += first * factors[r * stride];
    }
    QUIRE_READ_AGAIN();  // the words: registers are short of sums
    for (int n = 0; n < N; ++n) {
      vfloat second = second_of(load<vuint>(words[n]));
      for (int r = 0; r < R; ++r) sums[r][n] += second * factors[r * stride + 1];
    }
  }
#endif
};

// Into the cache that holds more than a tile.
QUIRE_INLINE void fetch_ahead(const void* address) { __builtin_prefetch(address, 0, 2); }

// scores[row][group * 16 + token] = sum over dimensions of q[row][d] * k[group][d][token]
//
// keys:    G groups; word (d / STEP, token) lies at d / STEP * word_stride + token
// ahead:   groups of a tile to come, fetched into the caches meanwhile
// factors: [R, words of dimensions], the queries
// scores:  [R, TILE], from the first of the groups on
template <class P, int R, int G>
QUIRE_INLINE void score_rows(const typename P::Word* const* keys, const typename P::Word* const* ahead,
                             int64_t word_stride, int num_words,
                             const typename P::Factor* factors, int64_t factor_stride, float* scores) {
  constexpr int N = G * GROUP_VECTORS;
  vfloat sums[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) sums[r][n] = vfloat{};
  for (int i = 0; i < num_words; ++i) {
    for (int g = 0; g < G; ++g) fetch_ahead(ahead[g] + i * word_stride);
    const typename P::Word* words[N];
    for (int n = 0; n < N; ++n) words[n] = keys[n / GROUP_VECTORS] + i * word_stride + n % GROUP_VECTORS * LANES;
    P::add(sums, words, factors + i * P::FACTORS, factor_stride);
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store(scores + r * TILE + n * LANES, sums[r][n]);
}

// All groups of a tile for R rows.
template <class P, int R>
QUIRE_OUTLINE void score_tile(const typename P::Word* const* keys, const typename P::Word* const* ahead,
                              int num_groups, int64_t word_stride, int num_words, const typename P::Factor* factors, int64_t factor_stride,
                             float* scores) {
  constexpr int FIT = P::SUMS / (R * GROUP_VECTORS);
  constexpr int G = FIT >= 4 ? 4 : FIT >= 2 ? 2 : 1;
  int group = 0;
  for (; group + G <= num_groups; group += G)
    score_rows<P, R, G>(keys + group, ahead + group, word_stride, num_words, factors, factor_stride, scores + group * GROUP);
  for (; group < num_groups; ++group)
    score_rows<P, R, 1>(keys + group, ahead + group, word_stride, num_words, factors, factor_stride, scores + group * GROUP);
}

// out[row][d] += sum over tokens of weight[row][token] * v[token][d], for N vectors of dimensions
//
// values:  groups; word (token / STEP, d) lies at token / STEP * dims + d
// ahead:   groups of a tile to come, from where these dimensions' share of them begins. Memory is quickest read in its
//          own order, which is not the order of the products: each call fetches N vectors' share of a group at a stretch
// factors: [R, words of a tile's tokens], the weights
// out:     [R, dims], at the first of the dimensions
template <class P, int R, int N>
QUIRE_INLINE void weigh_dims(const typename P::Word* const* values, const typename P::Word* const* ahead,
                             int first_word, int last_word, int64_t dims, const typename P::Factor* factors, int64_t factor_stride,
                             float* out) {
  constexpr int GROUP_WORDS = GROUP / P::STEP;
  vfloat sums[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) sums[r][n] = load<vfloat>(out + r * dims + n * LANES);
  for (int i = first_word; i < last_word;) {
    const typename P::Word* p = values[i / GROUP_WORDS] + i % GROUP_WORDS * dims;
    const typename P::Word* next = ahead[i / GROUP_WORDS] + i % GROUP_WORDS * N * LANES;
    int end = (i / GROUP_WORDS + 1) * GROUP_WORDS;
    end = end < last_word ? end : last_word;
    for (; i < end; ++i, p += dims, next += N * LANES) {
      for (int n = 0; n < N; n += GROUP_VECTORS) fetch_ahead(next + n * LANES);
      const typename P::Word* words[N];
      for (int n = 0; n < N; ++n) words[n] = p + n * LANES;
      P::add(sums, words, factors + i * P::FACTORS, factor_stride);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store(out + r * dims + n * LANES, sums[r][n]);
}

// All dimensions, which are a multiple of GROUP, for R rows.
template <class P, int R>
QUIRE_OUTLINE void weigh_tile(const typename P::Word* const* values, const typename P::Word* const* ahead,
                              int first_word, int last_word, int64_t dims, const typename P::Factor* factors, int64_t factor_stride,
                             float* out) {
  constexpr int FIT = P::SUMS / R;
  constexpr int N = FIT >= 4 * GROUP_VECTORS ? 4 * GROUP_VECTORS : FIT >= 2 * GROUP_VECTORS ? 2 * GROUP_VECTORS
                                                                                            : GROUP_VECTORS;
  const typename P::Word *at[TILE_GROUPS], *next[TILE_GROUPS];
  int64_t d = 0;
  for (; d + N * LANES <= dims; d += N * LANES) {
    for (int g = 0; g < TILE_GROUPS; ++g) at[g] = values[g] + d, next[g] = ahead[g] + d * (GROUP / P::STEP);
    weigh_dims<P, R, N>(at, next, first_word, last_word, dims, factors, factor_stride, out + d);
  }
  for (; d < dims; d += GROUP) {
    for (int g = 0; g < TILE_GROUPS; ++g) at[g] = values[g] + d, next[g] = ahead[g] + d * (GROUP / P::STEP);
    weigh_dims<P, R, GROUP_VECTORS>(at, next, first_word, last_word, dims, factors, factor_stride, out + d);
  }
}

}  // namespace quire
