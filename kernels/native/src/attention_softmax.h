// The online softmax of a row: weights relative to the greatest score so far, tile after tile, and the merge of parts
// that were computed apart. Knows scores and results, no keys or blocks.
#pragma once

#include <algorithm>

#include "attention_tiles.h"

namespace quire {

constexpr float LOWEST = -std::numeric_limits<float>::infinity();

struct Softmax {
  float greatest = LOWEST;
  vfloat sums = vfloat{};
};

// By what a tile of int8 was divided: a row's scores by that of each key, its weights by that of each value.
QUIRE_INLINE void multiply_tile(float* row, const float* scales) {
  for (int i = 0; i < TILE; i += LANES) store(row + i, load<vfloat>(row + i) * load<vfloat>(scales + i));
}

// Turns a row's scores into weights relative to the greatest score so far, zero outside first to last. Returns by what
// earlier results are to be multiplied. The scale is positive.
inline float weights_of(float* scores, int first, int last, float scale, Softmax& row) {
  if (first >= last) {
    for (int i = 0; i < TILE; i += LANES) store(scores + i, vfloat{});
    return 1.0f;
  }
  if (first > 0 || last < TILE)
    for (int i = 0; i < TILE; i += LANES) {
      vint token = lane_numbers() + i;
      vfloat score = load<vfloat>(scores + i);
      store(scores + i, (token >= first) & (token < last) ? score : all(LOWEST));
    }
  vfloat greatest = load<vfloat>(scores);
  for (int i = LANES; i < TILE; i += LANES) greatest = greater(load<vfloat>(scores + i), greatest);
  float before = row.greatest, now = std::max(max_of(greatest) * scale, before);
  vfloat sums = {};
  for (int i = 0; i < TILE; i += LANES) {
    vfloat weight = exp_below(load<vfloat>(scores + i) * scale - now);
    store(scores + i, weight);
    sums += weight;
  }
  float factor = before == now ? 1.0f : exp_of(before - now);
  row.greatest = now;
  row.sums = row.sums * factor + sums;
  return factor;
}

// Adds a part to what was merged before it: greatest score, sum of weights, and results of one row.
QUIRE_OUTLINE void merge_part(float* merged, float greatest, float sum, const float* results, int64_t dims) {
  if (greatest == LOWEST) return;  // the row sees nothing of it
  float now = std::max(greatest, merged[0]);
  float before = merged[0] == LOWEST ? 0.0f : exp_of(merged[0] - now), added = exp_of(greatest - now);
  merged[0] = now;
  merged[1] = merged[1] * before + sum * added;
  for (int64_t d = 0; d < dims; ++d) merged[2 + d] = merged[2 + d] * before + results[d] * added;
}

}  // namespace quire
