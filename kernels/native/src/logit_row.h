// One row of logits as floats in a thread's memory: blocks, and the maximum of each, by which later scans skip most of
// the row. Knows no sampling parameters.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "simd.h"

namespace quire {

constexpr int64_t BLOCK = 64;
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

struct TokenValue {
  float value;
  int64_t token_id;
};

class LogitRow {
 public:
  bool is_finite = false;  // every logit that was loaded

  int64_t size() const { return size_; }
  int64_t num_blocks() const { return num_blocks_; }
  float* values() { return blocks_.data()->values; }
  const float* values() const { return blocks_.data()->values; }
  const float* block(int64_t i) const { return blocks_[i].values; }
  float block_max(int64_t i) const { return maxima_[i]; }
  float max() const { return max_; }

  template <class S>
  void load(const S* logits, int64_t size) {
    size_ = size;
    num_blocks_ = (size + BLOCK - 1) / BLOCK;
    if (static_cast<int64_t>(blocks_.size()) < num_blocks_) {
      blocks_.resize(num_blocks_);
      maxima_.resize(num_blocks_);
    }
    vfloat zeros = {};  // NaN where a logit is not finite
    float rest_zeros = 0.0f;
    max_ = MINUS_INFINITY;
    for (int64_t b = 0; b < num_blocks_; ++b) {
      float* to = blocks_[b].values;
      const S* from = logits + b * BLOCK;
      if ((b + 1) * BLOCK <= size) {
        for (int64_t i = 0; i < BLOCK; i += LANES) {
          vfloat x = load_floats(from + i);
          zeros += x * 0.0f;
          store_floats(to + i, x);
        }
      } else {
        for (int64_t i = 0; i < BLOCK; ++i) {
          bool is_inside = b * BLOCK + i < size;
          to[i] = is_inside ? to_float(from[i]) : MINUS_INFINITY;
          if (is_inside) rest_zeros += to[i] * 0.0f;
        }
      }
      set_maximum(b);
    }
    float zero = sum_of(zeros) + rest_zeros;
    is_finite = zero == zero;
  }

  // Finds the maxima again after values were changed. False if a value is NaN or positive infinity.
  bool find_maxima() {
    vint is_below = vint{} - 1;
    const vfloat infinity = all(std::numeric_limits<float>::infinity());
    max_ = MINUS_INFINITY;
    for (int64_t b = 0; b < num_blocks_; ++b) {
      for (int64_t i = 0; i < BLOCK; i += LANES) is_below &= load_floats(block(b) + i) < infinity;
      set_maximum(b);
    }
    int32_t are_below = -1;
    for (int i = 0; i < LANES; ++i) are_below &= is_below[i];
    return are_below != 0;
  }

  // The lowest id of the greatest value; no value may be NaN.
  int64_t best_token() const {
    int64_t b = 0;
    while (maxima_[b] != max_) ++b;
    int64_t i = b * BLOCK;
    while (values()[i] != max_) ++i;
    return i;
  }

  // ln of the sum of exp(value - maximum), to the rounding of float32.
  float log_sum() const {
    constexpr int64_t SPAN = 16;  // blocks whose sums are added in float32
    double sum = 0.0;
    for (int64_t first = 0; first < num_blocks_; first += SPAN) {
      vfloat sums = {};
      for (int64_t b = first; b < std::min(first + SPAN, num_blocks_); ++b)
        for (int64_t i = 0; i < BLOCK; i += LANES) sums += exp_below(load_floats(block(b) + i) - max_);
      sum += sum_of(sums);
    }
    return static_cast<float>(std::log(sum));
  }

  // Logits to log-probabilities, in place: (value - maximum) - log_sum, each difference rounded. Maxima are not kept.
  void subtract(float log_sum) {
    const float max = max_;
    for (int64_t b = 0; b < num_blocks_; ++b)
      for (int64_t i = 0; i < BLOCK; i += LANES)
        store_floats(blocks_[b].values + i, (load_floats(block(b) + i) - max) - log_sum);
  }

  // 1 + the number of values that are greater.
  int32_t rank_of(float value) const {
    vint count = {};
    for (int64_t b = 0; b < num_blocks_; ++b) {
      if (!(maxima_[b] > value)) continue;
      for (int64_t i = 0; i < BLOCK; i += LANES) count -= load_floats(block(b) + i) > value;
    }
    int32_t rank = 1;
    for (int i = 0; i < LANES; ++i) rank += count[i];
    return rank;
  }

  // The `count` greatest values, 1 to size, in any order; the last of them is the least. Valid until the next call.
  const std::vector<float>& greatest_values(int64_t count) {
    const float bound = bound_of(count);
    greatest_.clear();
    visit_from(bound, [&](int64_t i, float value) { (void)i, greatest_.push_back(value); });
    std::nth_element(greatest_.begin(), greatest_.begin() + (count - 1), greatest_.end(), std::greater<float>());
    greatest_.resize(count);
    return greatest_;
  }

  // The `count` greatest values with their ids, by falling value and rising id; no value may be NaN.
  const std::vector<TokenValue>& best_tokens(int64_t count) {
    best_.clear();
    if (count == 0) return best_;
    visit_from(bound_of(count), [&](int64_t i, float value) { best_.push_back({value, i}); });
    auto is_before = [](const TokenValue& a, const TokenValue& b) {
      return a.value > b.value || (a.value == b.value && a.token_id < b.token_id);
    };
    std::nth_element(best_.begin(), best_.begin() + (count - 1), best_.end(), is_before);
    best_.resize(count);
    std::sort(best_.begin(), best_.end(), is_before);
    return best_;
  }

 private:
  struct alignas(64) Block {
    float values[BLOCK];
  };

  void set_maximum(int64_t b) {
    vfloat most = load_floats(blocks_[b].values);
    for (int64_t i = LANES; i < BLOCK; i += LANES) most = greater(load_floats(blocks_[b].values + i), most);
    maxima_[b] = max_of(most);
    max_ = maxima_[b] > max_ ? maxima_[b] : max_;
  }

  // A number that at least `count` values reach: the count-th largest of the blocks' maxima.
  float bound_of(int64_t count) {
    if (count > num_blocks_) return MINUS_INFINITY;
    copies_.assign(maxima_.begin(), maxima_.begin() + num_blocks_);
    std::nth_element(copies_.begin(), copies_.begin() + (count - 1), copies_.end(), std::greater<float>());
    return copies_[count - 1];
  }

  template <class F>
  void visit_from(float bound, F&& visit) const {
    for (int64_t b = 0; b < num_blocks_; ++b) {
      if (maxima_[b] < bound) continue;
      const int64_t end = std::min(size_, (b + 1) * BLOCK);
      for (int64_t i = b * BLOCK; i < end; ++i)
        if (values()[i] >= bound) visit(i, values()[i]);
    }
  }

  int64_t size_ = 0, num_blocks_ = 0;
  float max_ = MINUS_INFINITY;
  std::vector<Block> blocks_;
  std::vector<float> maxima_, copies_, greatest_;
  std::vector<TokenValue> best_;
};

}  // namespace quire
