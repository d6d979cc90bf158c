// Work on a token's fused queries, keys and values before attention: norms of heads, rotation, and writing keys and
// values to their slots. Knows slots and the layout of blocks, no rows.

#include <cmath>

#include "cache.h"
#include "kernels.h"
#include "simd.h"
#include "team.h"

namespace quire {

namespace {

constexpr int MIN_PARALLEL = 1 << 14;  // elements, below which a second thread costs more than it saves

struct Treatment {
  const float* rotary;  // of the token: cosines, then sines, or null
  int half;             // rotary_dim / 2
  float eps;
};

template <class S>
void treat_head(float* x, const S* head, int dim, const S* norm, const Treatment& treatment) {
  copy_floats(x, head, dim);
  if (norm) {
    float squares = 0.0f;
    for (int d = 0; d < dim; ++d) squares += x[d] * x[d];
    float factor = 1.0f / std::sqrt(squares / dim + treatment.eps);
    for (int d = 0; d < dim; ++d) {
      S rounded;
      set_float(rounded, x[d] * factor * to_float(norm[d]));
      x[d] = to_float(rounded);
    }
  }
  if (treatment.rotary) {
    int half = treatment.half;
    const float *cosines = treatment.rotary, *sines = cosines + half;
    for (int d = 0; d < half; ++d) {
      float first = x[d], second = x[d + half];
      x[d] = first * cosines[d] - second * sines[d];
      x[d + half] = second * cosines[d] + first * sines[d];
    }
  }
}

// keys and values: a block's, from this head on
template <class S>
void write_slot(const Cache& cache, S* keys, S* values, int offset, const float* key, const S* value) {
  int64_t dim = cache.head_dim, size = cache.block_size;
  if (!is_packed(cache)) {
    for (int64_t d = 0; d < dim; ++d) {
      set_float(keys[offset * dim + d], key[d]);
      values[offset * dim + d] = value[d];
    }
  } else if (sizeof(S) == 2) {
    S halves[MAX_DIM];
    copy_floats(halves, key, dim);
    for (int64_t d = 0; d < dim; d += 2) store(keys + (d / 2 * size + offset) * 2, load<uint32_t>(halves + d));
    S* at = values + offset / 2 * 2 * dim + offset % 2;
    for (int64_t d = 0; d < dim; ++d) at[2 * d] = value[d];
  } else {
    for (int64_t d = 0; d < dim; ++d) set_float(keys[d * size + offset], key[d]);
    for (int64_t d = 0; d < dim; ++d) values[offset * dim + d] = value[d];
  }
}

// To the nearest of 127 steps on each side of zero. Returns the step, which is NaN if any number is not finite.
float round_to_int8(const float* x, int dim, int8_t* rounded) {
  const float MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which is in the low bits
  uint32_t greatest_bits = 0;  // of the absolute values, whose order is that of their bits
  for (int d = 0; d < dim; ++d) {
    uint32_t bits = bits_as<uint32_t>(x[d]) & 0x7fffffffu;
    greatest_bits = bits > greatest_bits ? bits : greatest_bits;
  }
  float step = bits_as<float>(greatest_bits) / 127.0f;
  if (greatest_bits >= 0x7f800000u || step < std::numeric_limits<float>::min()) {
    for (int d = 0; d < dim; ++d) rounded[d] = 0;
    return greatest_bits >= 0x7f800000u ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
  }
  float inverse = 1.0f / step;
  for (int d = 0; d < dim; ++d)
    rounded[d] = static_cast<int8_t>(bits_as<int32_t>(x[d] * inverse + MAGIC) - bits_as<int32_t>(MAGIC));
  return step;
}

// In int8 the scales follow the head's bytes.
template <class S>
void write_slot(const Cache& cache, int8_t* keys, int8_t* values, int offset, const float* key, const S* value) {
  int64_t dim = cache.head_dim, size = cache.block_size, key_stride = is_packed(cache) ? size : 1;
  int64_t scale_place = size * dim + offset * static_cast<int64_t>(sizeof(float));
  int8_t rounded[MAX_DIM];
  store(keys + scale_place, round_to_int8(key, cache.head_dim, rounded));
  int8_t* at = keys + (is_packed(cache) ? offset : offset * dim);
  for (int64_t d = 0; d < dim; ++d) at[d * key_stride] = rounded[d];
  float wide[MAX_DIM];
  copy_floats(wide, value, dim);
  store(values + scale_place, round_to_int8(wide, cache.head_dim, values + offset * dim));
}

// K: of keys and values, see attention_call.h
template <class S, class K>
void rotate_and_write(const Cache& cache, const Operation& op, const int64_t* positions, const int64_t* slots,
                      int64_t num_tokens, int num_threads) {
  const float* rotary = static_cast<const float*>(op.second);
  const S *query_norm = static_cast<const S*>(op.query_norm), *key_norm = static_cast<const S*>(op.key_norm);
  int dim = cache.head_dim, rotary_dim = static_cast<int>(op.num_inputs);
  int64_t head_stride = head_numel<K>(cache.block_size, dim);
  int64_t width = static_cast<int64_t>(cache.num_heads + 2 * cache.num_kv_heads) * dim;
  share_rows(num_threads, num_tokens, num_tokens * width > MIN_PARALLEL, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      float x[MAX_DIM];
      S* query = static_cast<S*>(op.x) + token * op.x_stride;
      const S* key = query + static_cast<int64_t>(cache.num_heads) * dim;
      const S* value = key + static_cast<int64_t>(cache.num_kv_heads) * dim;
      Treatment treatment = {rotary ? rotary + positions[token] * rotary_dim : nullptr, rotary_dim / 2, op.number};
      if (rotary || query_norm)
        for (int head = 0; head < cache.num_heads; ++head, query += dim) {
          treat_head(x, query, dim, query_norm, treatment);
          copy_floats(query, x, dim);
        }
      if (slots[token] < 0) continue;
      int64_t block = slots[token] / cache.block_size;
      int offset = static_cast<int>(slots[token] % cache.block_size);
      K* keys = static_cast<K*>(cache.keys) + block * cache.key_block_stride;
      K* values = static_cast<K*>(cache.values) + block * cache.value_block_stride;
      for (int head = 0; head < cache.num_kv_heads; ++head) {
        treat_head(x, key + head * dim, dim, key_norm, treatment);
        write_slot(cache, keys + head * head_stride, values + head * head_stride, offset, x, value + head * dim);
      }
    }
  });
}

}  // namespace

// x: fused queries, keys and values; first: cache; second: rotary [positions, num_inputs], or null; number: epsilon of
// `query_norm` and `key_norm`, or null
void run_rotation(const Operation& op, const int64_t* positions, const int64_t* slots, int64_t num_tokens,
                  int num_threads) {
  const Cache& cache = *static_cast<const Cache*>(op.first);
  with_storage(cache.half, [&](auto zero) {
    typedef decltype(zero) S;
    auto run = cache.int8 ? rotate_and_write<S, int8_t> : rotate_and_write<S, S>;
    run(cache, op, positions, slots, num_tokens, num_threads);
  });
}

}  // namespace quire
