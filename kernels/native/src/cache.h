// One layer's keys and values in their blocks, as the Python side describes them once.
#pragma once

#include <cstdint>

namespace quire {

struct Cache {
  void* keys;
  void* values;
  int64_t key_block_stride, value_block_stride;  // in elements
  int32_t num_heads, num_kv_heads, head_dim, block_size;
  int32_t half;  // bfloat16, else float32
};

// Blocks of these shapes are packed for vectors; others lie plainly, [num_kv_heads, block_size, head_dim].
//
// float32:  keys [num_kv_heads, head_dim, block_size], values [num_kv_heads, block_size, head_dim]
// bfloat16: keys [num_kv_heads, head_dim / 2, block_size, 2], values [num_kv_heads, block_size / 2, head_dim, 2]
inline bool is_packed(const Cache& cache) { return cache.block_size % 16 == 0 && cache.head_dim % 16 == 0; }

constexpr int MAX_DIM = 512;  // of a head

}  // namespace quire
