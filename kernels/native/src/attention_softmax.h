// The online softmax of a row: weights relative to the greatest score so far, tile after tile, and the merge of parts
// that were computed separately. Knows scores and results, no keys or blocks.
#pragma once

#include <algorithm>

#include "attention_tiles.h"

namespace quire {

constexpr float LOWEST = -std::numeric_limits<float>::infinity();

struct Softmax {
  float greatest = LOWEST;
  vfloat sums = vfloat{};
};

// Scales of a tile of int8: a row's scores are multiplied by the keys' scales, its weights by the values'.
QUIRE_INLINE void multiply_tile(float* row, const float* scales) {
  for (int i = 0; i < TILE; i += LANES) store(row + i, load<vfloat>(row + i) * load<vfloat>(scales + i));
}

// The keys of a tile that a row sees, the last one not included.
struct Seen {
  int first, last;

  bool is_nothing() const { return first >= last; }
};

// The greatest score among the keys that a row sees; other scores become LOWEST if the row sees any key.
inline float greatest_of(float* scores, Seen seen) {
  if (seen.is_nothing()) return LOWEST;
  if (seen.first > 0 || seen.last < TILE)
    for (int i = 0; i < TILE; i += LANES) {
      vint token = lane_numbers() + i;
      vfloat score = load<vfloat>(scores + i);
      store(scores + i, (token >= seen.first) & (token < seen.last) ? score : all(LOWEST));
    }
  vfloat greatest = load<vfloat>(scores);
  for (int i = LANES; i < TILE; i += LANES) greatest = greater(load<vfloat>(scores + i), greatest);
  return max_of(greatest);
}

// Takes the greatest scores of some rows of a tile, at most LANES: factors are what their earlier results are to be
// multiplied by. The scale is positive.
inline void raise_greatest(const float* greatest, float scale, int num_rows, Softmax* rows, float* factors) {
  float before[LANES] = {}, now[LANES] = {};
  bool is_raised = false;
  for (int i = 0; i < num_rows; ++i) {
    before[i] = rows[i].greatest;
    now[i] = std::max(greatest[i] * scale, before[i]);
    rows[i].greatest = now[i];
    is_raised |= now[i] != before[i];
  }
  if (!is_raised) {  // mostly, once a row has seen a few tiles
    std::fill(factors, factors + num_rows, 1.0f);
    return;
  }
  vfloat was = load<vfloat>(before), is = load<vfloat>(now);
  store(factors, was == is ? all(1.0f) : exp_of(was - is));
  for (int i = 0; i < num_rows; ++i)
    if (factors[i] != 1.0f) rows[i].sums *= factors[i];
}

// Turns a row's scores into weights relative to its greatest score so far; zero where it sees nothing.
inline void weights_of(float* scores, Seen seen, float scale, Softmax& row) {
  if (seen.is_nothing()) {
    for (int i = 0; i < TILE; i += LANES) store(scores + i, vfloat{});
    return;
  }
  vfloat sums = {};
  for (int i = 0; i < TILE; i += LANES) {
    vfloat weight = exp_below(load<vfloat>(scores + i) * scale - row.greatest);
    store(scores + i, weight);
    sums += weight;
  }
  row.sums = row.sums + sums;
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
