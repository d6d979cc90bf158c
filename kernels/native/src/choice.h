// Result of scanning some of a row's logits, and how to merge two results. Knows no logits.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace quire {

struct Best {
  float value;
  int64_t index;
  bool is_finite;  // all of them
};

// `other` is of later tokens: on a tie the first stays.
inline void add_best(Best& best, const Best& other) {
  best.is_finite &= other.is_finite;
  if (other.value > best.value) {
    best.value = other.value;
    best.index = other.index;
  }
}

// Token 0 if a logit is not finite.
inline void set_choice(const Best& best, const Operation& op, int64_t row) {
  static_cast<int64_t*>(op.out)[row] = best.is_finite ? best.index : 0;
  op.finite[row] = best.is_finite;
}

}  // namespace quire
