// Arguments of an iteration's attention, and how results reach their rows. Knows a plan, no keys or blocks.
//
// S is the storage of queries and results, K that of keys and values: the same, or int8 with a scale for each token and
// key-value head.
#pragma once

#include "attention_plan.h"
#include "attention_softmax.h"

namespace quire {

// Inputs and outputs of a pass, keys and values, and the plan's memory for partial results.
template <class S, class K>
struct Call {
  const S* query;
  int64_t query_stride;
  S* out;
  int64_t out_stride;
  const K* keys;
  const K* values;
  int64_t key_block_stride, value_block_stride;
  float scale;
  float* partials;
};

template <class S, class K>
void give_results(const Plan& plan, const Unit& unit, const Call<S, K>& call, const float* merged) {
  for (int row = 0; row < unit.num_heads * unit.num_queries; ++row, merged += plan.padded_dim() + 2) {
    S* to = call.out + (unit.first_token + row / unit.num_heads) * call.out_stride +
            (unit.first_head + row % unit.num_heads) * plan.head_dim;
    float inverse = 1.0f / merged[1];
    int d = 0;
    for (; d + LANES <= plan.head_dim; d += LANES) store_floats(to + d, load<vfloat>(merged + 2 + d) * inverse);
    for (; d < plan.head_dim; ++d) set_float(to[d], merged[2 + d] * inverse);
  }
}

// Merges the parts of several units, in their order, into the first of them.
template <class S, class K>
void merge(const Plan& plan, const Merge& merge, const Call<S, K>& call) {
  const Unit& unit = plan.units[merge.unit];
  int64_t dims = plan.padded_dim();
  float* merged = call.partials + merge.first * plan.partial_floats();
  for (int row = 0; row < unit.num_heads * unit.num_queries; ++row)
    for (int i = 1; i < merge.count; ++i) {
      const float* part = merged + i * plan.partial_floats() + row * (dims + 2);
      merge_part(merged + row * (dims + 2), part[0], part[1], part + 2, dims);
    }
  give_results(plan, unit, call, merged);
}

}  // namespace quire
