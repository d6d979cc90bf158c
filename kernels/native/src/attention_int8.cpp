// Attention of an iteration over keys and values in int8, which are widened in registers. Sums are in float32.

#include "attention_unit.h"

namespace quire {

void attend_int8(Plan& plan, const Cache& cache, const Operation& op) {
  with_storage(cache.half, [&](auto zero) { attend<decltype(zero), int8_t>(plan, cache, op); });
}

}  // namespace quire
