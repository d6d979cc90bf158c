// Products that keep only the greatest output of each row: logits are never written to memory. Results equal those of
// `run_greedy` on the outputs of `run_product`, ties included.

#include "choice.h"
#include "product.h"

namespace quire {

namespace {

QUIRE_INLINE vfloat rounded_as(vfloat x, const float*) { return x; }
QUIRE_INLINE vfloat rounded_as(vfloat x, const bf16*) { return bits_as<vfloat>(widened_halves(rounded(x)) << 16); }

// The lowest finite number, for lanes without an output; on a tie a real output comes first.
float least_as(const float*) { return std::numeric_limits<float>::lowest(); }
float least_as(const bf16*) { return bits_as<float>(0xff7f0000u); }

// Keeps, for each row, the greatest output of each lane, its vector, and whether all were finite.
template <class M, class S>
class Greatest {
 public:
  // best: [num_rows], written at the end
  Greatest(const ProductCall<M, S>& call, Best* best, int64_t num_rows)
      : call_(call), best_(best), num_rows_(num_rows) {
    for (int64_t row = 0; row < num_rows; ++row)
      lanes_[row] = {all(-std::numeric_limits<float>::infinity()), vint{}, vfloat{}};
  }

  void take(const float* sums, int64_t num_rows, int64_t panel) {
    const float least = least_as(call_.bias);
    for (int64_t row = 0; row < num_rows; ++row) {
      Lanes lanes = lanes_[row];
      for (int v = 0; v < VECTORS; ++v) {
        int64_t vector = panel * VECTORS + v;
        vfloat outputs = outputs_of(call_, sums + row * PANEL + v * LANES, vector * LANES, least);
        outputs = rounded_as(outputs, call_.bias);
        lanes.zeros += outputs * 0.0f;  // NaN if an output is not finite
        vint is_greater = outputs > lanes.values;
        lanes.values = is_greater ? outputs : lanes.values;
        lanes.vectors = is_greater ? vint{} + static_cast<int32_t>(vector) : lanes.vectors;
      }
      lanes_[row] = lanes;
    }
  }

  void end() {
    for (int64_t row = 0; row < num_rows_; ++row) {
      const Lanes& lanes = lanes_[row];
      float zero = sum_of(lanes.zeros);
      Best best = {lanes.values[0], static_cast<int64_t>(lanes.vectors[0]) * LANES, zero == zero};
      for (int i = 1; i < LANES; ++i) {
        int64_t index = static_cast<int64_t>(lanes.vectors[i]) * LANES + i;
        if (lanes.values[i] > best.value || (lanes.values[i] == best.value && index < best.index)) {
          best.value = lanes.values[i];
          best.index = index;
        }
      }
      best_[row] = best;
    }
  }

 private:
  struct Lanes {
    vfloat values;
    vint vectors;
    vfloat zeros;
  };

  const ProductCall<M, S>& call_;
  Best* best_;
  int64_t num_rows_;
  Lanes lanes_[BlockRows<M>::MOST];
};

template <class M, class S>
void choose(const ProductCall<M, S>& call, const Parts<M>& parts, const Operation& op, int num_threads) {
  int64_t num_rows = call.num_rows;
  std::vector<Best> best(num_rows * parts.num_groups);  // [num_groups][num_rows]
  product(call, parts, num_threads, [&](int64_t first_row, int64_t num_rows_of_block, int64_t group) {
    return Greatest<M, S>(call, &best[group * num_rows + first_row], num_rows_of_block);
  });
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t group = 1; group < parts.num_groups; ++group) add_best(best[row], best[group * num_rows + row]);
    set_choice(best[row], op, row);
  }
}

}  // namespace

// As run_product; out: tokens [num_rows]
void run_choice(const Operation& op, int64_t num_rows, int num_threads) {
  with_product(op, num_rows, num_threads,
               [&](const auto& call, const auto& parts) { choose(call, parts, op, num_threads); });
}

}  // namespace quire
