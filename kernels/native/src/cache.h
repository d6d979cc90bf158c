// One layer's keys and values in their blocks; the Python side fills this once.
#pragma once

#include <cstdint>

namespace quire {

struct Cache {
  void* keys;
  void* values;
  int64_t key_block_stride, value_block_stride;  // in elements as stored
  int32_t num_heads, num_kv_heads, head_dim, block_size;
  int32_t half;  // queries and results are bfloat16, else float32
  int32_t int8;  // keys and values are int8, with a scale for each token and head; else as queries
};

// Workers fetch each other's blocks: a change of this layout takes another _BLOCK_LAYOUT in native_kernels.py.
//
// Blocks of these shapes are packed for vectors; others lie plainly, [num_kv_heads, block_size, head_dim].
//
// float32:  keys [num_kv_heads, head_dim, block_size], values [num_kv_heads, block_size, head_dim]
// bfloat16: keys [num_kv_heads, head_dim / 2, block_size, 2], values [num_kv_heads, block_size / 2, head_dim, 2]
// int8:     as float32, and behind each head's bytes its scales, float [block_size], at any address
inline bool is_packed(const Cache& cache) { return cache.block_size % 16 == 0 && cache.head_dim % 16 == 0; }

constexpr int MAX_DIM = 512;  // of a head

// Elements from one key-value head of a block to the next.
template <class K>
int64_t head_numel(int64_t block_size, int64_t head_dim) {
  return block_size * (head_dim + (sizeof(K) == 1 ? sizeof(float) : 0));
}

}  // namespace quire
